"""Damaged inputs of every kind through real runs, and faults planted to show that the fuzzer would tell them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

Runner = Callable[[Sequence[str]], None]


@pytest.fixture(scope="module")
def fuzz(root: Path) -> dict[str, ModuleType]:
    """The fuzzer's modules: benchmarks/ is no package."""
    import importlib

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root / "benchmarks"))
        return {name: importlib.import_module(f"fuzz_{name}") for name in ("run", "inputs", "mutations")}


def test_sixty_damaged_inputs_end_in_a_finished_run_or_in_one_line(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/fuzz.py", "--cases", "60", "--output", str(tmp_path / "failures")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert not (tmp_path / "failures").exists()


def says(text: str, code: int) -> Runner:
    def runner(argv: Sequence[str]) -> None:
        print(text, file=sys.stderr)
        sys.exit(code)

    return runner


def breaks(argv: Sequence[str]) -> None:
    raise RuntimeError("planted")


def writes_beside_its_logs(argv: Sequence[str]) -> None:
    Path("left.txt").write_text("x", encoding="utf-8")
    says("error: x", 2)(argv)


def writes_in_its_logs(argv: Sequence[str]) -> None:
    Path("logs").mkdir()
    Path("logs/kept.txt").write_text("x", encoding="utf-8")
    says("error: x", 2)(argv)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("runner", "told"),
    [
        (breaks, ["exit code 1", "a traceback"]),
        (lambda argv: time.sleep(60), ["not done after 1 s"]),
        (lambda argv: os.kill(os.getpid(), signal.SIGKILL), ["exit code -9"]),
        (lambda argv: bytearray(2**31), ["exit code 1", "a traceback"]),
        (lambda argv: None, ["no model/", "metrics.jsonl"]),
        (writes_beside_its_logs, ["changed outside the log folder: case/left.txt"]),
        (says("error: x\nand more", 2), ["not one line"]),
        (says("error: x\nerror: y", 2), ["not one line"]),
        (says("no error", 2), ["not one line"]),
        (says("error: out of memory", 2), ["out of memory"]),
        (says("\x1b[31m\nerror: x", 2), ["controls a terminal"]),
        (says("error: x", 3), ["exit code 3"]),
        (says("a warning\nerror: x", 2), []),
        (writes_in_its_logs, []),
    ],
)
def test_a_planted_fault_is_told(fuzz: dict[str, ModuleType], tmp_path: Path, runner: Runner, told: list[str]) -> None:
    (tmp_path / "case").mkdir()
    outcome = fuzz["run"].run_case(tmp_path, tmp_path / "case", [], seconds=1, gigabytes=1, runner=runner)
    assert len(outcome.faults) >= len(told) and bool(outcome.faults) == bool(told), outcome
    for part in told:
        assert part in str(outcome)


def test_damage_follows_from_its_seed_and_nearly_always_changes_something(
    fuzz: dict[str, ModuleType], tmp_path: Path
) -> None:
    fuzz["inputs"].make_data(tmp_path)
    for name in ("data.tar", "pairs.csv", "config.yaml", "model.json", "folder/test/truth.jsonl", "pictures/0.png"):
        path, changed = tmp_path / name, 0
        good = path.read_bytes()
        for seed in range(40):
            results = []
            for _ in range(2):
                path.write_bytes(good)
                fuzz["mutations"].damage(path, [tmp_path / "data.tar"], random.Random(seed))
                results.append(path.read_bytes())
            assert results[0] == results[1], (name, seed)
            changed += results[0] != good
        assert changed >= 34, f"{name}: {changed} of 40"
        path.write_bytes(good)
