"""A run ends with everything that it has to say: its page shows its own numbers."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.tiny import run_script
from tests.integration.test_training import COMMON


def test_a_run_ends_with_its_page(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    done = run_script(
        "train_clip.py", "--train-data", tiny_data, "--model", tiny_model, "--logs", tmp_path, "--name", "x", *COMMON,
        "--report",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    page = (tmp_path / "x" / "report.html").read_text(encoding="utf-8")
    results = json.loads((tmp_path / "x" / "results.json").read_text(encoding="utf-8"))
    found = results["retrieval"]["t2i"]["native"]["success@1"]
    assert f"{found:.3f}".lstrip("0") in page and "data:image/" in page
    assert f"report: {tmp_path / 'x' / 'report.html'}" in done.stdout
    again = run_script(
        "evaluate.py", "--model", tmp_path / "x", "--data", tiny_data, "--output", tmp_path / "y", "--report"
    )
    assert again.returncode == 0 and (tmp_path / "y" / "report.html").is_file(), again.stderr
