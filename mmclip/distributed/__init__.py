"""Ranks, collectives and sharded weights over torch.distributed; all no-ops in a single process.

``world`` and ``start`` know the processes, ``gather_rows`` makes the ranks' rows one batch with exact gradients, and
``mmclip.distributed.fsdp`` shards a model's weights. Imports mmclip.errors only.
"""

from mmclip.distributed.collectives import (
    all_max,
    all_sum,
    average_,
    barrier,
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
    "all_max",
    "all_sum",
    "average_",
    "barrier",
    "gather_objects",
    "gather_rows",
    "largest",
    "on_rank_0",
    "settle",
    "start",
    "stop",
    "world",
]
