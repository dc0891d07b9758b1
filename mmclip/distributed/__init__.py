"""Ranks, gathering and sharded weights: the torch.distributed calls of mmclip, no-ops in a single process."""

from mmclip.distributed.collectives import (
    average_,
    barrier,
    gather_ids,
    gather_objects,
    gather_rows,
    largest,
    on_rank_0,
    settle,
    start,
    stop,
    world,
)

__all__ = [
    "average_",
    "barrier",
    "gather_ids",
    "gather_objects",
    "gather_rows",
    "largest",
    "on_rank_0",
    "settle",
    "start",
    "stop",
    "world",
]
