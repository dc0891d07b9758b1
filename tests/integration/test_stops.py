"""Runs that end early: by a signal after saving, by an alarm under --strict, by data or a loss that cannot be used."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from shlex import split

import pytest

from tests.helpers.tiny import ROOT, disturbed, logged, run_script, untimed

FLAGS = split(
    "--batch-size 32 --workers 2 --lr 1e-3 --warmup 2 --epochs 20 --log-every-n-steps 1 --device cpu "
    "--val-steps 15 --save-steps 1000"
)
STEPS = 60
# Runs a script behind a patch, which is one of Python's statements on "training", a module of it, or "ClipTask"
PATCHED = """
import os, runpy, signal, sys
from mmclip.training import trainer as training
from mmclip.training.clip_task import ClipTask
{}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
CUT = """
real, calls = ClipTask.validate, []
def validate(self, *a):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return real(self, *a)
ClipTask.validate = validate
"""
VANISH = """
real = training.Trainer._take
def take(self, batch, due):
    if self.step == 3:
        open(os.environ["SHARD"], "r+b").truncate(0)
    return real(self, batch, due)
training.Trainer._take = take
"""


def patched(patch: str, *flags: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PATCHED.format(patch), ROOT / "scripts" / "train_clip.py", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [str(c) for c in command], cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )


def train(*flags: object) -> str:
    """What a run that ends well says."""
    done = run_script("train_clip.py", *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


@pytest.fixture(scope="module")
def flags(tiny_data: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    logs = tmp_path_factory.mktemp("logs")
    flags = ["--train-data", tiny_data, "--model", tiny_model, "--logs", logs, *FLAGS]
    train(*flags, "--name", "whole")
    return flags


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_saves_and_leaves(flags: list[object], signum: signal.Signals) -> None:
    logs, name = Path(str(flags[5])), signum.name
    command = ["train_clip.py", *flags, "--name", name]
    # to the reading processes as well, as a terminal and a scheduler do
    code, stderr = disturbed(command, logs / name, 6, lambda pid: os.killpg(pid, signum))
    assert code == 128 + signum, stderr[-2000:]
    assert "Traceback" not in stderr and f"{name}: saving, then leaving" in stderr
    assert f"continue with --name {name} --resume latest" in stderr
    steps = len(logged(logs / name))
    assert 5 < steps < STEPS, "stopped in the middle"
    assert (logs / name / "checkpoints" / "latest").read_text() == f"step_{steps:08d}.pt\n", "no step is lost"
    assert f"continuing after step {steps}" in train(*flags, "--name", name, "--resume", "latest", "--workers", 0)
    weights = "model/open_clip_model.safetensors"
    assert (logs / name / weights).read_bytes() == (logs / "whole" / weights).read_bytes()
    assert len(logged(logs / name)) == STEPS


def test_a_validation_that_is_cut_is_made_up_for_by_the_continuation(flags: list[object]) -> None:
    cut = patched(CUT, *flags, "--name", "cut")
    assert cut.returncode == 143 and "step 30: validation ended by SIGTERM" in cut.stderr, cut.stderr[-2000:]
    train(*flags, "--name", "cut", "--resume", "latest")
    logs = Path(str(flags[5]))
    assert untimed(logs / "cut") == untimed(logs / "whole"), "every step once, and step 30 with its validation"


def test_data_that_vanish_during_a_run_stop_it(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_data, tmp_path / "data")
    flags = ["--train-data", tmp_path / "data", "--model", tiny_model, "--logs", tmp_path, "--name", "x", *FLAGS,
             "--workers", 0, "--epochs", 100, "--val-data", "none"]  # fmt: skip
    done = patched(VANISH, *flags, SHARD=str(tmp_path / "data" / "train" / "0.tar"))
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert last.startswith("error: step 103: no image could be read in 100 steps in a row; last: ") and "0.tar" in last
    assert (tmp_path / "x" / "checkpoints" / "step_00000003.pt").is_file()


def test_a_run_names_its_alarms_and_strict_ends_it(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    """gammas that cannot move, at a learning rate of next to nothing."""
    flags = ["--train-data", tiny_data, "--model", tiny_model, "--logs", tmp_path, *FLAGS, "--workers", 0, "--norm",
             "learned", "--gamma-lr", "1e-9", "--epochs", 4, "--save-steps", 5]  # fmt: skip
    assert train(*flags, "--name", "x").count("both gammas stand where they started") == 1
    assert [x["step"] for x in logged(tmp_path / "x") if "gamma_unmoved" in x.get("alarms", {})] == [6]
    assert "gamma_unmoved" in (tmp_path / "x" / "results.json").read_text()
    for resume in ([], ["--resume", "latest"]):  # continued, it is still an error
        strict = run_script("train_clip.py", *flags, "--name", "strict", "--strict", *resume)
        last = strict.stderr.strip().splitlines()[-1]
        assert strict.returncode == 2 and "Traceback" not in strict.stderr
        assert last.startswith("error: step 6: alarm (--strict): after half of the run both gammas")
    assert (tmp_path / "strict" / "checkpoints" / "latest").read_text() == "step_00000006.pt\n", "nothing is lost"
    train(*flags, "--name", "strict", "--resume", "latest", "--no-strict")
    assert "gamma_unmoved" in (tmp_path / "strict" / "results.json").read_text(), "not forgotten"


def test_a_run_that_overflows_stops_with_its_samples_and_the_state_before(
    tiny_data: Path, tiny_model: Path, tmp_path: Path
) -> None:
    flags = ["--train-data", tiny_data, "--model", tiny_model, "--logs", tmp_path, *FLAGS, "--name", "x"]
    done = run_script("train_clip.py", *flags, "--norm", "dot", "--lr", "1e18", "--save-steps", 1)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("error: step ") and "Traceback" not in done.stderr
    assert "not finite" in last and "Try a lower --lr" in last
