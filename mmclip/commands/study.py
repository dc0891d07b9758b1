"""mmclip study: a grid of trainings."""

from __future__ import annotations

from pathlib import Path

from mmclip.config import StudyConfig
from mmclip.study.study import study


def run(config: StudyConfig) -> int:
    """Run what is missing and write tables and page; returns the exit code."""
    return study(config, Path(__file__).resolve().parents[2] / "scripts" / "train_clip.py")
