#!/usr/bin/env python3
"""Run a grid of trainings and show the trade-off of magnitude learning and bidirectional retrieval.

python scripts/run_study.py --config study_flickr8k_heads
"""

import sys
from pathlib import Path

from mmclip.config.flags import run_script
from mmclip.config.study import parse_study


def main() -> None:
    settings = parse_study()
    from mmclip.study.study import study  # after the flags are known to be right

    code = study(settings, Path(__file__).with_name("train_clip.py"))
    if code:
        sys.exit(code)


if __name__ == "__main__":
    run_script(main)
