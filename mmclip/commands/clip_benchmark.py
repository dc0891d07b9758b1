"""mmclip clip-benchmark: its own command line, with mmclip's models."""

from mmclip.evaluation.clip_benchmark import main

__all__ = ["main"]
