#!/usr/bin/env python3
"""clip-benchmark's own command line with mmclip's models, and with magnitude: zero-shot classification and retrieval.

python scripts/clip_benchmark.py eval --model_type mmclip --model logs/my-run --scoring native --dataset wds/flickr8k …
"""

import sys
from pathlib import Path

# This file has the package's name, and Python looks beside a script first: it would be imported in the package's place.
HERE = Path(__file__).resolve().parent
sys.path[:] = [p for p in sys.path if Path(p).resolve() != HERE]

from mmclip.config.flags import run_script  # noqa: E402


def main() -> None:
    from mmclip.evaluation.clip_benchmark import main  # importing torch takes seconds

    main()


if __name__ == "__main__":
    run_script(main)
