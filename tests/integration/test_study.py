"""A real study on tiny data: killed in the middle, started again, and what it leaves."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import tiny

STUDY = """\
title: Tiny <b>study</b>
val_steps: 1000
epochs: 1
batch_size: 32
workers: 0
arms:
  - {loss: sym, norm: cosine}
  - {loss: asym-i2t, norm: [qnorm, cosine]}
  - {loss: sym, norm: learned, init_from: sym cosine, name: tuned, measure_start: true}
  - {loss: asym-i2t, norm: qnorm, permute_pairs: true, batch_size: 10000, name: too large a batch}
"""


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int, dict[str, float]]:
    """(the study's folder, what the second start said, its exit code, when each run's results were written)."""
    folder = tmp_path_factory.mktemp("study")
    file = folder / "small.yaml"
    data, model = tiny.make_data(folder), tiny.make_model(folder)
    file.write_text(STUDY, encoding="utf-8")
    flags = ["--config", str(file), "--logs", str(folder / "logs"), "--jobs", "1"]
    flags += ["--set", f"train_data={data}", f"model={model}"]
    script = str(tiny.ROOT / "scripts" / "run_study.py")
    first = subprocess.Popen(
        [sys.executable, script, *flags],
        cwd=tiny.ROOT,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    until = time.monotonic() + 200
    while len(finished(folder)) < 1 and time.monotonic() < until:
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)  # the run that it had begun goes on without it
    first.wait()
    before = finished(folder)
    assert before and first.returncode == -signal.SIGKILL
    done = tiny.run_script("run_study.py", *flags)
    after = finished(folder)
    assert {k: after[k] for k in before} == before, "a finished run was run again"
    return folder / "logs" / "small", done.stdout + done.stderr, done.returncode, after


def finished(folder: Path) -> dict[str, float]:
    return {p.parent.name: p.stat().st_mtime for p in folder.glob("logs/small/runs/*/results.json")}


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / "tables" / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_run_but_the_one_that_cannot_be_is_there(left: tuple[Path, str, int, dict[str, float]]) -> None:
    folder, said, code, found = left
    assert code == 1 and len(found) == 4
    assert "1 of 5 runs failed" in said and "too large a batch" in said and "Traceback" not in said
    assert [(r["arm"], "10000" in r["reason"]) for r in rows(folder, "failed")] == [("too large a batch", True)]
    assert {r["arm"] for r in rows(folder, "cells")} == {"sym cosine", "asym-i2t qnorm", "asym-i2t cosine", "tuned"}
    assert not list(folder.glob("runs/*/checkpoints"))


def test_its_page_and_tables_are_written(left: tuple[Path, str, int, dict[str, float]]) -> None:
    folder = left[0]
    page = (folder / "study.html").read_text(encoding="utf-8")
    assert "Tiny &lt;b&gt;study" in page and "<script" not in page
    (t6,) = [r for r in rows(folder, "claims") if r["claim"] == "T6" and r["direction"] == "i2t"]
    assert float(t6["value_lo"]) <= float(t6["value"]) <= float(t6["value_hi"])
    (verdict,) = [r for r in rows(folder, "verdicts") if r["arm"] == "asym-i2t qnorm"]
    assert verdict["control"] == "asym-i2t cosine" and verdict["baseline"] == "sym cosine"


def test_a_run_starts_from_the_one_that_it_names(left: tuple[Path, str, int, dict[str, float]]) -> None:
    (row,) = [r for r in rows(left[0], "pretrained") if r["arm"] == "tuned"]
    assert row["initial"] == "sym cosine"
    (start,) = left[0].glob("runs/tuned-*/start.json")
    assert start.stat().st_size > 1000
