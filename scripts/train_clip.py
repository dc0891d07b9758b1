#!/usr/bin/env python3
"""Train a CLIP with any loss direction and normalization, and compare both retrieval directions.

python scripts/train_clip.py --loss asym-i2t --norm qnorm
"""

from mmclip.config.clip import parse_train
from mmclip.config.flags import run_script


def main() -> None:
    settings = parse_train()
    from mmclip.commands.train import train  # after the flags are known to be right: importing torch takes seconds

    train(settings)


if __name__ == "__main__":
    run_script(main)
