#!/usr/bin/env python3
"""Fine-tune a text encoder for retrieval so that embedding length may carry relevance.

python scripts/train_text.py --model DIR --train-data DIR/scifact --val-data DIR/scifact --norm qnorm
"""

from mmclip.config.flags import run_script
from mmclip.config.text import parse_train_text


def main() -> None:
    settings = parse_train_text()
    from mmclip.commands.train_text import train_text  # after the flags are known to be right

    train_text(settings)


if __name__ == "__main__":
    run_script(main)
