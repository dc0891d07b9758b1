#!/usr/bin/env python3
"""The symmetry check on sentence pairs: Spearman under every scoring, and training with the paper's squared error.

python scripts/sts.py --model DIR/all-MiniLM-L6-v2 --data DIR/stsb/dev.tsv
"""

from mmclip.config.flags import run_script
from mmclip.config.sts import parse_sts


def main() -> None:
    settings = parse_sts()
    from mmclip.commands.sts import run_sts  # after the flags are known to be right

    run_sts(settings)


if __name__ == "__main__":
    run_script(main)
