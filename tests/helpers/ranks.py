"""Gloo ranks in processes of their own, and the comparison of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.warm import SERVER, run_all

SECONDS = 60  # that a rank waits for another
Found = dict[str, Any]


def run_ranks(work: Callable[[Path], Any], ranks: int, folder: Path) -> list[Any]:
    """What ``work(folder)`` returns on every rank; all are ended where one fails or hangs."""
    processes = [SERVER.Process(target=_rank, args=(work, folder, rank, ranks)) for rank in range(ranks)]
    assert run_all(processes, 3 * SECONDS) == [0] * ranks, "a rank failed: see its traceback; or it hangs"
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(ranks)]


def _rank(work: Callable[[Path], Any], folder: Path, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    meet, limit = f"file://{folder}/rendezvous", timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks, timeout=limit)
    try:
        torch.save(work(folder), folder / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def worst(got: Found, expected: Found, floor: float = 0.0) -> tuple[float, str]:
    """The largest max|got - expected| / max|expected| over the tensors of two nested dicts, and its tensor's name.

    Infinite for other unequal values. The denominator is at least ``floor`` of the largest tensor of the same kind.
    """
    a, b = flat(got), flat(expected)
    assert a.keys() == b.keys()
    largest: dict[str, float] = {}
    for (kind, _), value in b.items():
        if isinstance(value, Tensor) and value.numel():
            largest[kind] = max(largest.get(kind, 0.0), float(value.abs().max()))
    return max((off(a[key], b[key], floor * largest.get(key[0], 0.0)), " ".join(key)) for key in b)


def flat(found: Any, *path: str) -> dict[tuple[str, str], Any]:
    """(kind, name) -> value: an optimizer's tensors are of kind "exp_avg", "exp_avg_sq" and "step"."""
    if isinstance(found, dict) and found:
        return {k: v for name, inner in found.items() for k, v in flat(inner, *path, str(name)).items()}
    return {(path[-1] if path[0] == "optimizer" else path[0] if len(path) > 1 else "", " ".join(path)): found}


def off(got: Any, expected: Any, floor: float = 0.0) -> float:
    if not isinstance(expected, Tensor):
        return 0.0 if got == expected else torch.inf
    assert got.shape == expected.shape and got.isfinite().all() and expected.isfinite().all()
    if got.equal(expected):
        return 0.0
    return float((got.double() - expected.double()).abs().max()) / max(float(expected.abs().max()), floor, 1e-300)
