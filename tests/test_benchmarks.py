"""The benchmarks run at a small size, and say what they are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


def run(root: Path, *flags: str) -> str:
    command = [sys.executable, str(root / "benchmarks/retrieval.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_says_what_is_measured_and_how(root):
    text = run(root, "--help")
    for word in ("python benchmarks/retrieval.py --large", "ru_maxrss", "all four scorings", "ties", "--threads"):
        assert word in text


def test_retrieval_agrees_with_clip_benchmark_and_ends_with_the_ratio(root):
    pytest.importorskip("clip_benchmark")
    lines = run(root, "--images", "120", "--dim", "16", "--rounds", "1", "--lists", "3").splitlines()
    assert "the numbers agree" in lines
    assert re.fullmatch(r"ratio: \d+\.\d times as fast \(\d+\.\d by CPU time\), \d+\.\d{3} of the memory", lines[-1])
