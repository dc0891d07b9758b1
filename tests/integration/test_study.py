"""A real study on tiny data: killed in the middle, started again, with a run that cannot be, and what it leaves."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmclip.commands.study import run
from mmclip.config import StudyConfig, parse
from tests.helpers import tiny

STUDY = """\
title: Tiny <b>study</b>
val_steps: 1000
epochs: 1
batch_size: 32
workers: 0
arms:
  - {loss: sym, norm: cosine}
  - {loss: asym-i2t, norm: qnorm}
  - {loss: sym, norm: learned, init_from: sym cosine, name: tuned, measure_start: true}
  - {loss: asym-i2t, norm: qnorm, permute_pairs: true, batch_size: 10000, name: too large a batch}
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyConfig, int]:
    folder = tmp_path_factory.mktemp("study")
    (folder / "small.yaml").write_text(STUDY, encoding="utf-8")
    settings = [f"train_data={tiny.make_data(folder)}", f"model={tiny.make_model(folder)}"]
    flags = ["--config", str(folder / "small.yaml"), "--logs", str(folder / "logs"), "--jobs", "1", "--set", *settings]
    with subprocess.Popen(
        [sys.executable, "-m", "mmclip", "study", *flags],
        cwd=tiny.ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as first:
        until = time.monotonic() + 200
        while not finished(folder) and time.monotonic() < until:
            time.sleep(0.1)
        os.killpg(first.pid, signal.SIGKILL)
    before = finished(folder)
    assert before and first.returncode == -signal.SIGKILL
    config = parse(StudyConfig, flags)
    code = run(config)
    after = finished(folder)
    assert {k: after[k] for k in before} == before, "a finished run was run again"
    return config, code


def finished(folder: Path) -> dict[str, float]:
    return {p.parent.name: p.stat().st_mtime for p in folder.glob("logs/small/runs/*/results.json")}


def rows(config: StudyConfig, name: str) -> list[dict[str, str]]:
    with (Path(config.logs) / "small" / "tables" / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_run_but_the_one_that_cannot_be_is_there(study: tuple[StudyConfig, int]) -> None:
    config, code = study
    folder = Path(config.logs) / "small"
    assert code == 1 and len(list(folder.glob("runs/*/results.json"))) == 3
    assert [(r["arm"], "10000" in r["reason"]) for r in rows(config, "failed")] == [("too large a batch", True)]
    assert {r["arm"] for r in rows(config, "cells")} == {"sym cosine", "asym-i2t qnorm", "tuned"}
    assert not list(folder.glob("runs/*/checkpoints"))
    page = (folder / "study.html").read_text(encoding="utf-8")
    assert "Tiny &lt;b&gt;study" in page and "<script" not in page and "Traceback" not in page
    (t6,) = [r for r in rows(config, "claims") if r["claim"] == "T6" and r["direction"] == "i2t"]
    assert float(t6["value_lo"]) <= float(t6["value"]) <= float(t6["value_hi"])
    assert {r["baseline"] for r in rows(config, "keeps_both")} == {"sym cosine"}


def test_a_run_starts_from_the_one_that_it_names(study: tuple[StudyConfig, int]) -> None:
    (row,) = [r for r in rows(study[0], "pretrained") if r["arm"] == "tuned"]
    assert row["initial"] == "sym cosine"
    (start,) = Path(study[0].logs).glob("small/runs/tuned-*/start.json")
    assert start.stat().st_size > 1000


def test_the_grid_is_shown_without_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.yaml").write_text(STUDY, encoding="utf-8")
    flags = ["--config", str(tmp_path / "s.yaml"), "--logs", str(tmp_path / "logs"), "--dry-run"]
    assert run(parse(StudyConfig, flags)) == 0
    assert capsys.readouterr().out.startswith("to run    sym-cosine-seed0-") and not (tmp_path / "logs").exists()
