"""One direction, read from blocks of a Gram matrix: scores, log-sum-exps, targets, and what they give to gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mmclip.distributed.columns import Columns

Relation = Callable[[Tensor, Tensor], Tensor]
Multipliers = tuple[Tensor | None, Tensor | None]


class Factors(NamedTuple):
    """score = scale * inner product / (row * column): 0-d, [N] or None for 1, [M] or None; all above 0."""

    scale: Tensor
    row: Tensor | None = None
    column: Tensor | None = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Factors:
        scale, row, column = (t if t is None else t.detach().to(dtype) for t in tensors)
        assert scale is not None
        return cls(scale, row, column)

    def multipliers(self) -> Multipliers:
        """What rows and columns are to be multiplied with: a number each, or one for all, or None for 1."""
        row = self.scale if self.row is None else self.scale / self.row
        return row, None if self.column is None else 1 / self.column

    def beyond(self, inner: Factors, alike: bool) -> Multipliers:
        """The same where rows and columns hold the multipliers of ``inner`` already."""
        if alike:  # one number for a whole block
            return self.scale / inner.scale, None
        row, column = self.scale / inner.scale, inner.column
        row = row if inner.row is None else row * inner.row
        row = row if self.row is None else row / self.row
        if self.column is not None:
            column = 1 / self.column if column is None else column / self.column
        return row, column


@dataclass(frozen=True)
class Way:
    """A direction: its factors, the weight of its loss in the total (None: no gradient) and its known positives.

    relation: which queries and documents are known to match, by their numbers in the whole batch, pairs first:
    [k], [n] -> bool [k, n]; one function for both ways is symmetric, and asked once.
    """

    factors: Factors
    weight: float | None = 1.0
    relation: Relation | None = None


def scaled(x: Tensor, factor: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows [n, D] times a number each, [n], or all times one."""
    return torch.mul(x, factor[:, None] if factor.ndim else factor, out=out)


@dataclass(frozen=True)
class Plan:
    """What is no tensor.

    pairs: row i and column i match for i below it; rows and columns behind are candidates only. multi: known positives
    are targets, too, instead of left out. focal: weights of all queries, [n] -> [n] of sum 1, from the log of the
    probability that each gives its targets; None: equal ones. alike: both ways divide rows by the same numbers, and
    columns.
    """

    pairs: int
    multi: bool = False
    focal: Callable[[Tensor], Tensor] | None = None
    alike: bool = False
    across_ranks: bool = False


class Room:
    """Working memory that all blocks share, by name: a block's numbers are read and written some ten times."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width, self.dtype, self.device = width, dtype, device
        self._buffers: dict[str, Tensor] = {}

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def buffer(self, name: str, height: int, width: int) -> Tensor:
        """[height, width], contiguous, with whatever was left there."""
        if name not in self._buffers or self._buffers[name].numel() < height * width:
            self._buffers[name] = torch.empty(height * width, dtype=self.dtype, device=self.device)
        return self._buffers[name][: height * width].view(height, width)

    def zeros(self, n: int) -> Tensor:
        return torch.zeros(n, dtype=self.dtype, device=self.device)


class Running:
    """log-sum-exp of many things, by a running maximum."""

    def __init__(self, room: Room, n: int) -> None:
        self.top, self.sum = room.zeros(n).fill_(-torch.inf), room.zeros(n)

    def add(self, scores: Tensor, of: slice, dim: int, work: Tensor) -> None:
        """Scores [k, n], which ``dim`` sums out, of the things ``of``."""
        before = self.top[of]
        top = torch.maximum(before, scores.amax(dim))
        base = top.masked_fill(top == -torch.inf, 0)  # where there is nothing yet
        here = torch.sub(scores, base.unsqueeze(dim), out=work).exp_().sum(dim)
        self.sum[of] = self.sum[of] * (before - base).exp() + here
        self.top[of] = top

    def merge(self, shared: Columns) -> None:
        """With what the other ranks have seen."""
        top = shared.largest(self.top)
        self.sum.mul_((self.top - top.masked_fill(top == -torch.inf, 0)).exp())
        self.top, self.sum = top, shared.summed(self.sum)

    def log(self) -> Tensor:
        return self.top + self.sum.log()


class Asking:
    """A way and what is known of its queries, [n]: forth the rows' of this rank, back the columns' of all ranks."""

    def __init__(
        self,
        way: Way,
        factors: Factors,
        left: Multipliers,
        shared: Columns,
        plan: Plan,
        n_rows: int,
        room: Room,
        *,
        back: bool,
    ) -> None:
        """left: what the products' rows and columns are still to be multiplied with, see Factors."""
        self.way, self.shared, self.plan, self.room, self.back = way, shared, plan, room, back
        self.dim = 0 if back else 1
        self.width = shared.pairs if back else room.width  # columns that take part
        self.weighed = way.weight is not None
        self.weight = way.weight or 0.0
        self.factors = factors
        self.left_row, column = left
        self.left_column = None if column is None else shared.gather(column)[: self.width]
        n = shared.pairs if back else plan.pairs
        self.lse, self.target, self.count = Running(room, n), room.zeros(n), room.zeros(n)
        self.target_lse = Running(room, n) if plan.multi and plan.focal is not None else None
        self.each, self.shift = room.zeros(n), room.zeros(n)
        self.scale_gradient = room.zeros(1)
        self.row_gradient = None if factors.row is None else room.zeros(n_rows)
        self.column_gradient = None if factors.column is None else room.zeros(room.width)

    # --- blocks -----------------------------------------------------------------------------------------------------

    def _of(self, at: slice) -> slice:
        """The queries that a block of rows says something of."""
        return slice(None) if self.back else at

    def _own(self, block: Tensor, at: slice) -> Tensor:
        """The pairs' entries of a block, to be read and written."""
        return block.diagonal(self.shared.first + at.start)[: len(block)]

    def _asking_own(self, at: slice) -> slice:
        """The queries whose pairs are in a block."""
        first = self.shared.first if self.back else 0
        return slice(first + at.start, first + at.stop)

    def _has_pairs(self, at: slice) -> bool:
        return at.start < self.plan.pairs

    def _scores(self, products: Tensor, at: slice) -> Tensor:
        """[k, width]; ``products`` themselves where there is nothing to multiply with."""
        products = products[:, : self.width]
        if self.left_row is None and self.left_column is None:
            return products
        out = self.room.buffer("scores", len(products), self.width)
        self._factors(products, at, out)
        return out

    def _factors(self, block: Tensor, at: slice, out: Tensor) -> None:
        if self.left_row is not None:
            block = scaled(block, self.left_row[at] if self.left_row.ndim else self.left_row, out)
        if self.left_column is not None:
            torch.mul(block, self.left_column, out=out)

    def known(self, at: slice) -> Tensor | None:
        """Known positives of a block but the pairs themselves, bool [k, width]."""
        if self.way.relation is None:
            return None
        device = self.room.device
        start = at.start + self.shared.first
        if not self._has_pairs(at):
            start = at.start - self.plan.pairs + self.shared.pairs + self.shared.first_further_row
        rows = torch.arange(start, start + at.stop - at.start, device=device)
        columns = torch.arange(self.width, device=device)
        known = self.way.relation(columns, rows).T.clone() if self.back else self.way.relation(rows, columns).clone()
        if self._has_pairs(at):
            self._own(known, at).fill_(False)
        return known

    # --- the loss -----------------------------------------------------------------------------------------------------

    def see(self, products: Tensor, known: Tensor | None, at: slice) -> None:
        """Take a block's scores into log-sum-exps and targets."""
        scores, of = self._scores(products, at), self._of(at)
        work = self.room.buffer("work", len(products), self.width)
        if self._has_pairs(at):
            own = self._asking_own(at)
            self.target[own] += self._own(scores, at)
            self.count[own] += 1
        if known is not None and self.plan.multi:
            self.target[of] += torch.where(known, scores, 0).sum(self.dim)
            self.count[of] += known.sum(self.dim)
        if self.target_lse is not None:
            none = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
            targets = none if known is None else known.clone()
            if self._has_pairs(at):
                self._own(targets, at).fill_(True)
            self.target_lse.add(torch.where(targets, scores, -torch.inf), of, self.dim, work)
        if known is not None and not self.plan.multi:
            scores = self.room.buffer("masked", len(products), self.width).copy_(scores).masked_fill_(known, -torch.inf)
        self.lse.add(scores, of, self.dim, work)

    def weigh(self, at: slice, weights: Tensor | None = None) -> None:
        """Each query's weight in the total, equal shares by default, and what to take off its scores so that their exp
        is probability times weight."""
        self.each[at] = self.weight / self.shared.pairs if weights is None else self.weight * weights
        self.shift[at] = self.lse.top[at] + self.lse.sum[at].log() - self.each[at].log()

    def settle(self) -> Tensor:
        """The loss, 0-d, once all blocks are seen."""
        if self.back:
            self.lse.merge(self.shared)
            self.target, self.count = self.shared.summed(self.target), self.shared.summed(self.count)
            if self.target_lse is not None:
                self.target_lse.merge(self.shared)
        lse, target, weights = self.lse.log(), self.target / self.count, None
        if self.plan.focal is not None:
            log_p = (target if self.target_lse is None else self.target_lse.log()) - lse
            if self.back:
                weights = self.plan.focal(log_p)
            else:
                first = self.shared.first
                weights = self.plan.focal(self.shared.gather(log_p, pairs_only=True))[first : first + self.plan.pairs]
        self.weigh(slice(None), weights)
        terms = lse - target
        value = (terms / self.shared.pairs if weights is None else terms * weights).sum()
        return value if self.back else self.shared.summed(value)

    # --- gradients ----------------------------------------------------------------------------------------------------

    def gradient(self, products: Tensor, known: Tensor | None, at: slice) -> Tensor:
        """Of the total in a block's inner products, [k, width]; those in the factors are summed up."""
        scores, of = self._scores(products, at), self._of(at)
        out = self.room.buffer("back" if self.back else "forth", len(products), self.width)
        torch.sub(scores, self.shift[of].unsqueeze(self.dim), out=out).exp_()
        if known is not None:
            if self.plan.multi:
                out -= known * (self.each / self.count)[of].unsqueeze(self.dim)
            else:
                out.masked_fill_(known, 0)
        if self._has_pairs(at):
            own = self._asking_own(at)
            self._own(out, at).sub_((self.each / self.count)[own])
        moved = torch.mul(out, scores, out=self.room.buffer("work", len(products), self.width))
        by_row = moved.sum(1)
        self.scale_gradient += by_row.sum()
        if self.row_gradient is not None:
            self.row_gradient[at] += by_row
        if self.column_gradient is not None:
            self.column_gradient[: self.width] += moved.sum(0)
        self._factors(out, at, out)
        return out

    def factor_gradients(self) -> list[Tensor | None]:
        """Of scale, row, column: what their logarithms get, divided by them; a divisor has the sign of one."""
        if not self.weighed:
            return [None, None, None]
        scale, row, column = self.factors
        ranks = self.shared.ranks
        found: list[Tensor | None] = [self.scale_gradient.sum() * ranks / scale, None, None]
        if row is not None and self.row_gradient is not None:
            found[1] = self.row_gradient * (-ranks) / row
        if column is not None and self.column_gradient is not None:
            found[2] = self.shared.scatter(self.column_gradient) * (-ranks) / column
        return found
