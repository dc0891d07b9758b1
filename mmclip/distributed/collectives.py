"""Ranks and gathering: the few torch.distributed calls that training needs, all no-ops in a single process."""

from __future__ import annotations

import os
from collections.abc import Callable
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
    """The device of this process; joins the process group where torchrun started several (NCCL on CUDA, else gloo).

    device: "auto", "cpu", "cuda" or "cuda:N". Errors: UserError for CUDA where there is none.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {device}: this machine has no usable CUDA device; valid here: cpu, auto")
    if device == "cuda":
        device = f"cuda:{local_rank}"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise UserError(
            f"--device {printable(device)}: unknown; valid: auto, cpu, cuda, cuda:N, mps on a Mac"
        ) from None
    usable = {"cpu": True, "cuda": True, "mps": torch.backends.mps.is_available()}
    if not usable.get(chosen.type, False):
        raise UserError(
            f"--device {printable(device)}: not usable here; valid: auto, cpu, cuda, cuda:N, mps (on a Mac)"
        )
    if chosen.type == "cuda":
        if chosen.index is not None and chosen.index >= torch.cuda.device_count():
            raise UserError(f"--device {device}: there are {torch.cuda.device_count()} CUDA devices, numbered from 0")
        torch.cuda.set_device(chosen)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        # Ranks wait while rank 0 validates, or fills a cache: longer than the backends' defaults.
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=timedelta(hours=3))
    return chosen


def stop() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def barrier() -> None:
    if world()[1] > 1:
        dist.barrier()


def largest(numbers: list[int], device: torch.device) -> list[int]:
    """For each of several numbers the largest that a rank has."""
    if world()[1] == 1:
        return numbers
    tensor = torch.tensor(numbers, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [int(n) for n in tensor]


def settle(error: UserError | None) -> None:
    """Let all processes leave where one of them cannot go on: it raises its error, the others leave with its exit code
    and without a word of their own."""
    failed = gather_objects(error is not None)
    if error is not None:
        raise error
    if any(failed):
        raise SystemExit(2)


def on_rank_0(check: Callable[[], None]) -> None:
    """What one process decides for all. Errors: UserError there, and the others leave with it."""
    error = None
    if world()[0] == 0:
        try:
            check()
        except UserError as raised:
            error = raised
        except OSError as raised:  # a folder that cannot be made
            error = UserError(f"{printable(raised.filename or '')}: {printable(raised.strerror or raised)}")
    settle(error)


def gather_objects(item: T) -> list[T]:
    """A plain value of every rank, in rank order."""
    if world()[1] == 1:
        return [item]
    items: list[Any] = [None] * world()[1]
    dist.all_gather_object(items, item)
    return items


def gather_ids(ids: Tensor) -> Tensor:
    """Ids of all ranks in rank order: [B_r] -> [sum of B_r]. Ranks may hold different numbers of rows."""
    if world()[1] == 1:
        return ids
    return torch.cat(_all_gather(ids)[0])


def gather_rows(rows: Tensor) -> Tensor:
    """Features of all ranks in rank order, with exact gradients: [B_r, D] -> [sum of B_r, D].

    Each rank then computes the same global loss. Backward sums the ranks' gradients, so a rank's rows receive
    world-size times the gradient of that loss, and the mean that DistributedDataParallel takes over ranks makes it
    exact. Ranks may hold different numbers of rows (gloo's all_gather refuses that: rows are padded here).
    """
    if world()[1] == 1:
        return rows
    gathered: Tensor = _GatherRows.apply(rows)
    return gathered


def average_(gradients: list[Tensor]) -> None:
    """Mean over ranks, in place: parameters outside DDP (alpha, gamma) stay equal to the last bit on every rank."""
    size = world()[1]
    for gradient in gradients if size > 1 else []:
        dist.all_reduce(gradient)
        gradient.div_(size)


def _all_gather(rows: Tensor) -> tuple[list[Tensor], list[int]]:
    size = world()[1]
    counts = [torch.zeros(1, dtype=torch.long, device=rows.device) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    lengths = [int(c) for c in counts]
    padded = rows.new_zeros((max(lengths), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded)
    return [part[:n] for part, n in zip(parts, lengths, strict=True)], lengths


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        parts, lengths = _all_gather(rows.detach().contiguous())
        rank = world()[0]
        ctx.start, ctx.length = sum(lengths[:rank]), lengths[rank]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed)
        return summed[ctx.start : ctx.start + ctx.length]
