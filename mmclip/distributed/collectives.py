"""Ranks, reductions and gathering: the torch.distributed calls of mmclip, no-ops in a single process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mmclip.errors import UserError, printable

T = TypeVar("T")


def world() -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) outside torchrun."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def start(device: str) -> torch.device:
    """Join the process group of torchrun, if there is one (NCCL on CUDA, else gloo), and choose the device.

    Args:
        device: "auto", "cpu", "cuda", "cuda:N" or "mps".

    Raises:
        UserError: a device that this machine does not have.
    """
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = ("cuda" if cuda else "cpu") if device == "auto" else device
    try:
        chosen = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if name == "cuda" else name)
    except RuntimeError:
        chosen = torch.device("meta")
    usable = {"cpu": True, "cuda": (chosen.index or 0) < cuda, "mps": torch.backends.mps.is_available()}
    if not usable.get(chosen.type, False):
        valid = f"valid: auto, cpu, cuda, cuda:N, mps (on a Mac); this machine has {cuda} CUDA devices"
        raise UserError(f"--device {printable(device)}: not usable here; {valid}")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        # Ranks wait while rank 0 validates, or fills a cache: longer than the backends' defaults.
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=timedelta(hours=3))
    return chosen


def stop() -> None:
    """Leave the process group."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def barrier() -> None:
    """Wait for all ranks."""
    if world()[1] > 1:
        dist.barrier()


def settle(error: Exception | None) -> None:
    """Raise this rank's error, or leave silently with its exit code where another rank has one."""
    failed = gather_objects(error is not None)
    if error is not None:
        raise error
    if any(failed):
        raise SystemExit(2)


def on_rank_0(check: Callable[[], None]) -> None:
    """Run a check on rank 0 alone; its UserError or OSError is raised there, and all ranks leave."""
    error: Exception | None = None
    if world()[0] == 0:
        try:
            check()
        except (UserError, OSError) as raised:
            error = raised
    settle(error)


def all_sum(x: Tensor) -> Tensor:
    """Sum over ranks."""
    return _reduced(x, dist.ReduceOp.SUM)


def all_max(x: Tensor) -> Tensor:
    """Maximum over ranks."""
    return _reduced(x, dist.ReduceOp.MAX)


def _reduced(x: Tensor, op: Any) -> Tensor:
    if world()[1] > 1:
        x = x.clone()
        dist.all_reduce(x, op=op)
    return x


def largest(numbers: list[int], device: torch.device) -> list[int]:
    """The largest value over ranks of each number."""
    return [int(n) for n in all_max(torch.tensor(numbers, device=device))] if world()[1] > 1 else numbers


def average_(gradients: Sequence[Tensor]) -> None:
    """Mean over ranks, in place: parameters outside DDP (alpha, gamma) stay equal to the last bit on every rank."""
    size = world()[1]
    for gradient in gradients if size > 1 else []:
        dist.all_reduce(gradient)
        gradient.div_(size)


def gather_objects(item: T) -> list[T]:
    """A plain value of every rank, in rank order."""
    if world()[1] == 1:
        return [item]
    items: list[Any] = [None] * world()[1]
    dist.all_gather_object(items, item)
    return items


def gather_rows(rows: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """Rows of all ranks in rank order, with exact gradients: [n_r, ...] -> [sum of n_r, ...].

    Backward sums the ranks' gradients, so rows receive world-size times the gradient of a loss that all ranks compute
    (or sum up) alike, and DistributedDataParallel's mean over ranks makes it exact. Half the bytes of an all-reduce
    are sent back. gloo refuses ranks with different numbers of rows: they are padded here.

    Args:
        rows: features, norms or ids of this rank.
        counts: number of rows of each rank, if it is known.
    """
    if world()[1] == 1:
        return rows
    if counts is None:
        own = torch.tensor([len(rows)], device=rows.device)
        counts = _GatherRows.apply(own, [1] * world()[1]).tolist()
    gathered: Tensor = _GatherRows.apply(rows, counts)
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.counts = counts
        padded = _padded(rows.detach(), max(counts))
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = [_padded(part, max(ctx.counts)) for part in gradients[0].split(list(ctx.counts))]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts)
        return own[: ctx.counts[world()[0]]], None


def _padded(rows: Tensor, length: int) -> Tensor:
    padded = rows.new_zeros((length, *rows.shape[1:]))
    padded[: len(rows)] = rows
    return padded
