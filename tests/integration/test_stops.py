"""Runs that end early: by a signal after saving, by an alarm under --strict, by a loss that is not finite."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.tiny import ROOT, run_script

FLAGS = ["--batch-size", 32, "--workers", 2, "--lr", "1e-3", "--warmup", 2, "--epochs", 60, "--log-every-n-steps", 1,
         "--device", "cpu", "--val-steps", 50, "--save-steps", 1000]  # fmt: skip


@pytest.fixture(scope="module")
def flags(tiny_data: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    logs = tmp_path_factory.mktemp("logs")
    flags = ["--train-data", tiny_data, "--model", tiny_model, "--logs", logs, *FLAGS]
    whole = run_script("train_clip.py", *flags, "--name", "whole")
    assert whole.returncode == 0, whole.stderr[-2000:]
    return flags


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_saves_and_leaves(flags: list[object], signum: signal.Signals) -> None:
    logs, name = Path(str(flags[5])), signum.name
    command = [sys.executable, ROOT / "scripts" / "train_clip.py", *flags, "--name", name]
    process = subprocess.Popen(
        [str(c) for c in command], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    metrics, deadline = logs / name / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.is_file() and metrics.read_text().count("\n") > 5):
        assert process.poll() is None and time.monotonic() < deadline, "the run never got going"
        time.sleep(0.01)
    os.killpg(process.pid, signum)  # to the reading processes as well, as a terminal and a scheduler do
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 128 + signum, stderr[-2000:]
    assert "Traceback" not in stderr and f"{name}: saving, then leaving" in stderr
    assert f"continue with --name {name} --resume latest" in stderr
    steps = metrics.read_text().count("\n")
    assert 5 < steps < 180, "stopped in the middle"
    assert (logs / name / "checkpoints" / "latest").read_text() == f"step_{steps:08d}.pt\n", "no step is lost"
    resumed = run_script("train_clip.py", *flags, "--name", name, "--resume", "latest", "--workers", 0)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert f"continuing after step {steps}" in resumed.stderr
    weights = "model/open_clip_model.safetensors"
    assert (logs / name / weights).read_bytes() == (logs / "whole" / weights).read_bytes()
    assert metrics.read_text().count("\n") == 180


CUT = """
import os, runpy, signal, sys
from mmclip.training.clip_task import ClipTask
real, calls = ClipTask.validate, []
def validate(self, *a):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return real(self, *a)
ClipTask.validate = validate
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_validation_that_is_cut_is_made_up_for_by_the_continuation(flags: list[object]) -> None:
    logs = Path(str(flags[5]))
    command = [sys.executable, "-c", CUT, ROOT / "scripts" / "train_clip.py", *flags, "--name", "cut"]
    cut = subprocess.run([str(c) for c in command], cwd=ROOT, capture_output=True, text=True, check=False,
                         env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert cut.returncode == 143 and "step 100: validation ended by SIGTERM" in cut.stderr, cut.stderr[-2000:]
    resumed = run_script("train_clip.py", *flags, "--name", "cut", "--resume", "latest")
    assert resumed.returncode == 0, resumed.stderr[-2000:]

    def lines(name: str) -> list[dict[str, object]]:
        found = [json.loads(x) for x in (logs / name / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in x.items() if k not in ("samples_per_second", "data_wait")} for x in found]

    assert lines("cut") == lines("whole"), "every step once, and step 100 with its validation"


def test_a_run_tells_its_alarms_and_strict_ends_it(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    """gammas that cannot move, at a learning rate of next to nothing."""
    flags = ["--train-data", tiny_data, "--model", tiny_model, "--logs", tmp_path, "--batch-size", 32, "--workers", 0,
             "--norm", "learned", "--gamma-lr", "1e-9", "--epochs", 8, "--log-every-n-steps", 1, "--device", "cpu",
             "--save-steps", 5]  # fmt: skip
    done = run_script("train_clip.py", *flags, "--name", "told")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("both gammas stand where they started") == 1
    lines = [json.loads(x) for x in (tmp_path / "told" / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if "gamma_unmoved" in x.get("alarms", {})] == [12]
    assert "gamma_unmoved" in json.loads((tmp_path / "told" / "results.json").read_text())["alarms"]
    strict = run_script("train_clip.py", *flags, "--name", "strict", "--strict")
    last = strict.stderr.strip().splitlines()[-1]
    assert strict.returncode == 2 and "Traceback" not in strict.stderr
    assert last.startswith("error: step 12: alarm (--strict): after half of the run both gammas")
    assert (tmp_path / "strict" / "checkpoints" / "latest").read_text() == "step_00000012.pt\n", "nothing is lost"
    again = run_script("train_clip.py", *flags, "--name", "strict", "--strict", "--resume", "latest")
    assert again.returncode == 2 and "alarm (--strict): after half of the run" in again.stderr, "still an error"
    gone_on = run_script("train_clip.py", *flags, "--name", "strict", "--resume", "latest", "--no-strict")
    assert gone_on.returncode == 0, gone_on.stderr[-2000:]
    assert "gamma_unmoved" in json.loads((tmp_path / "strict" / "results.json").read_text())["alarms"], "not forgotten"


def test_a_run_that_overflows_stops_with_its_samples_and_the_state_before(
    tiny_data: Path, tiny_model: Path, tmp_path: Path
) -> None:
    done = run_script(
        "train_clip.py", "--train-data", tiny_data, "--model", tiny_model, "--logs", tmp_path, "--name", "x",
        "--batch-size", 32, "--workers", 2, "--norm", "dot", "--lr", "1e18", "--epochs", 8, "--device", "cpu",
        "--save-steps", 1,
    )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("error: step ") and "Traceback" not in done.stderr
    assert "not finite" in last and "Try a lower --lr" in last
