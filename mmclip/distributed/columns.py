"""One side of a batch that is spread over ranks: gathered once, and its gradients sent back. No-ops in one process.

Gathering one side instead of two halves what ranks send each other (docs/math.md: "One Gram matrix"). Ranks may hold
different numbers of rows; gloo takes equal ones, so what is sent is padded.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mmclip.distributed.collectives import world


class Columns:
    """``pairs`` rows of every rank in rank order, then every rank's further candidates.

    pairs: of all ranks; first: the number of this rank's first pair; first_further_row: the same of the rows behind the
    pairs on the side that is not gathered; ranks: how many there are.
    """

    def __init__(self, columns: Tensor, rows: Tensor, pairs: int, across_ranks: bool) -> None:
        """columns [m, ...], rows [n, ...]: of this rank, the first ``pairs`` of both are its pairs."""
        self.rank, self.ranks = world() if across_ranks else (0, 1)
        counts = [[pairs, len(columns) - pairs, len(rows) - pairs]]
        if self.ranks > 1:
            counts = self._all(torch.tensor(counts, device=columns.device)).tolist()
        self._pairs, self._further, further_rows = zip(*counts, strict=True)
        self.pairs, self.first = sum(self._pairs), sum(self._pairs[: self.rank])
        self.first_further_row = sum(further_rows[: self.rank])

    def _all(self, x: Tensor) -> Tensor:
        """[n, ...] of every rank, alike in shape -> [ranks * n, ...]."""
        if self.ranks == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    def gather(self, x: Tensor, pairs_only: bool = False) -> Tensor:
        """What each rank has of its columns, or of its pairs, [m, ...] -> that of all, pairs first."""
        if self.ranks == 1:
            return x
        further = [0] * self.ranks if pairs_only else self._further
        lengths = [p + e for p, e in zip(self._pairs, further, strict=True)]
        padded = x.new_zeros((max(lengths), *x.shape[1:]))
        padded[: len(x)] = x
        parts = self._all(padded).split(max(lengths)) if max(lengths) else []
        heads = [part[:p] for part, p in zip(parts, self._pairs, strict=False)]
        tails = [part[p : p + e] for part, p, e in zip(parts, self._pairs, further, strict=False)]
        return torch.cat([*heads, *tails]) if parts else x

    def scatter(self, x: Tensor) -> Tensor:
        """Of what each rank has for all columns, [M, ...], the sum over ranks for this rank's own, [m, ...]."""
        if self.ranks == 1:
            return x
        longest = max(p + e for p, e in zip(self._pairs, self._further, strict=True))
        parts = []
        heads, tails = x[: self.pairs].split(self._pairs), x[self.pairs :].split(self._further)
        for head, tail in zip(heads, tails, strict=True):
            part = x.new_zeros((longest, *x.shape[1:]))
            part[: len(head)], part[len(head) : len(head) + len(tail)] = head, tail
            parts.append(part)
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts)
        return own[: self._pairs[self.rank] + self._further[self.rank]]

    def summed(self, x: Tensor) -> Tensor:
        """The sum over ranks."""
        if self.ranks > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """The maximum over ranks."""
        if self.ranks > 1:
            x = x.clone()
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x
