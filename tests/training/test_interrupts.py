"""SIGTERM and Ctrl-C: the real script, stopped in the middle, saves, leaves, and ends as the uninterrupted run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmclip.training.signals import Cut, Interrupts
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
from mmclip.evaluation.eval_source import EvalSource
real, calls = EvalSource.quick_numbers, []
def numbers(self, *a):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return real(self, *a)
EvalSource.quick_numbers = numbers
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


def send(signum: int) -> None:
    """A signal to this process, which may have threads: then it arrives a moment later, and two at once become one."""
    os.kill(os.getpid(), signum)
    time.sleep(0.3)


def test_the_first_signal_is_noted_and_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        assert interrupts.signum == 0
        send(signal.SIGTERM)
        assert interrupts.signum == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_signal_acts_at_once() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process of pytest-xdist ignores it
    with pytest.raises(KeyboardInterrupt), Interrupts():
        send(signal.SIGINT)
        send(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_work_that_may_be_cut_is_cut_and_no_handler_of_exceptions_can_swallow_it() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(Cut), interrupts.cutting():
            try:
                send(signal.SIGTERM)
            except Exception:
                pytest.fail("swallowed")
        with pytest.raises(Cut), interrupts.cutting():
            pytest.fail("not even begun after a signal")
