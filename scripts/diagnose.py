#!/usr/bin/env python
"""Diagnose a model's raw vectors; --help says how."""

from mmclip.config.evaluate import parse_diagnose
from mmclip.config.flags import run_script


def main() -> None:
    settings = parse_diagnose()
    from mmclip.commands.evaluate import evaluate_model

    evaluate_model(settings)


if __name__ == "__main__":
    run_script(main)
