#!/usr/bin/env python3
"""Evaluate a model in both directions under every scoring, and compare runs.

python scripts/evaluate.py --model logs/my-run --data builtin:scenes --compare logs/other-run
"""

from mmclip.config.evaluate import parse_evaluate
from mmclip.config.flags import run_script


def main() -> None:
    settings = parse_evaluate()
    from mmclip.commands.evaluate import evaluate_model  # after the flags are known to be right

    evaluate_model(settings)


if __name__ == "__main__":
    run_script(main)
