#!/usr/bin/env python3
"""Evaluate a text encoder's retrieval under every scoring, and compare runs.

python scripts/evaluate_text.py --model DIR/all-MiniLM-L6-v2 --data DIR/scifact
"""

from mmclip.config.flags import run_script
from mmclip.config.text_evaluate import parse_evaluate_text


def main() -> None:
    settings = parse_evaluate_text()
    from mmclip.commands.evaluate_text import evaluate_text_model  # after the flags are known to be right

    evaluate_text_model(settings)


if __name__ == "__main__":
    run_script(main)
