"""SIGKILL at random moments: during steps, while files are written, in validation, while features are cached."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny import ROOT, logged
from tests.helpers.warm import run_warm

STEPS = 12
TIMES = {"samples_per_second", "data_wait"}


def lines(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMES} for line in logged(run)]


@pytest.mark.parametrize(("cached", "workers", "kills"), [(False, 0, 16), (False, 2, 12), (True, 0, 8)])
def test_a_run_killed_again_and_again_ends_as_the_whole_one(
    cached: bool, workers: int, kills: int, tiny_data: Path, tiny_model: Path, tmp_path: Path
) -> None:
    flags = ["--train-data", tiny_data, "--model", tiny_model, "--batch-size", 24, "--epochs", 3, "--lr", "3e-3",
             "--warmup", 2, "--log-every-n-steps", 1, "--save-steps", 2, "--val-steps", 3, "--device", "cpu",
             "--loss", "sym", "--norm", "learned", "--workers", workers, "--no-report"]  # fmt: skip
    flags += ["--lock-image", "--lock-text", "--cache-features"] if cached else []
    program = [ROOT / "tests" / "helpers" / "kill_and_resume.py", tmp_path, kills, 7, int(cached), *flags]
    done = run_warm(list(map(str, program)), ROOT, {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, 550)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    attempts = [json.loads(line) for line in done.stdout.splitlines()]
    killed = [a for a in attempts if os.WTERMSIG(int(a["status"])) == signal.SIGKILL]
    assert len(killed) == kills and any(a["resumed"] for a in attempts)
    kinds = {"checkpoint", "validation", "time", *(("cache", "reasons") if cached else ("forward", "update", "line"))}
    assert {a["moment"] for a in killed} >= kinds
    whole = tmp_path / "whole"
    assert [x["step"] for x in lines(whole)] == list(range(1, STEPS + 1))
    for run in {a["run"] for a in attempts}:
        for file in ("model/open_clip_model.safetensors", "per_query.npz"):
            assert (tmp_path / run / file).read_bytes() == (whole / file).read_bytes(), (run, file)
        assert lines(tmp_path / run) == lines(whole), f"{run}: every step once, with the same numbers"
        assert not list((tmp_path / run).rglob(".*.partial")), "nothing half-written stays"
        kept = sorted(p.name for p in (tmp_path / run / "checkpoints").glob("*.pt"))
        assert kept == [f"step_{s:08d}.pt" for s in (8, 10, 12)]
