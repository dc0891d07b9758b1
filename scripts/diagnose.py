#!/usr/bin/env python
"""Diagnose a model's raw vectors; --help says how."""

from mmclip.config_evaluate import parse_diagnose
from mmclip.flags import run_script


def main() -> None:
    settings = parse_diagnose()
    from mmclip.evaluate_run import evaluate_model

    evaluate_model(settings)


if __name__ == "__main__":
    run_script(main)
