"""The benchmarks run at a small size, and say what they are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


def run(root: Path, *flags: str, name: str = "retrieval.py") -> str:
    command = [sys.executable, str(root / "benchmarks" / name), *flags]
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


def test_serving_measures_every_index_of_every_scoring(root):
    pytest.importorskip("faiss", reason="faiss is not installed: pip install -e '.[serving]'")
    text = run(root, "--images", "60", "--dim", "8", "--k", "3", name="serving.py")
    blocks = text.strip().split("\n\n")
    assert [b.split(":")[0] for b in blocks] == ["i2t native", "t2i native", "t2i corrected"]
    for block in blocks:
        rows = block.splitlines()[1:]
        assert len(rows) == 7 + ("corrected" in block)
        assert [r for r in rows if r.endswith("beyond rounding 0")] == [rows[0], rows[2]]
        assert all("recall@3 1.0000" in r for r in (rows[0], rows[2]))


def test_serving_tells_in_one_line_of_a_file_that_is_none(root, tmp_path):
    pytest.importorskip("faiss", reason="faiss is not installed: pip install -e '.[serving]'")
    command = [sys.executable, str(root / "benchmarks/serving.py"), "--embeddings", str(tmp_path / "x.npz")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path / 'x.npz'}: no such file\n")
