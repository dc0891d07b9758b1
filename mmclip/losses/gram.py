"""All directions' losses and gradients from one pass over one Gram matrix, in tiles (docs/math.md: "One Gram matrix").

Rows and columns are the two sides of a batch. **Forth** the rows ask and the columns answer, **back** the columns ask.
Whatever the normalization, both directions' scores are the same inner products times a factor a row and a factor a
column, so one matrix product serves both:

    forth   a row's softmax is complete in its block of rows
    back    a column's log-sum-exp grows block by block, by a running maximum: raw scores have no bound
    then    a second pass over the blocks gives all gradients. Of the first pass's products ``KEEP`` bytes are kept, the
            others made again: 6 B^2 D operations where all fit, 8 B^2 D where none does, in the memory of B D numbers
            and a few blocks. One direction alone needs no second pass: 6 B^2 D and nothing kept.

Gradients are made together with the loss; backward only hands them on. Across ranks each has its own rows and the
columns of all: one side is gathered, the columns' maxima and sums are merged, and the columns' gradients go back to
their ranks (mmclip.distributed.columns).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mmclip.distributed.columns import Columns
from mmclip.losses.gram_way import Asking, Factors, Plan, Room, Way, scaled

ROWS = 512  # rows of a block, at least: fewer and the matrix products slow down
BLOCK = {"cpu": 2**21, "cuda": 2**26}  # numbers of a block, at least, by kind of device
PIECE = {"cpu": 2**11, "cuda": 2**31}  # columns of one matrix product: wider ones slow down on a CPU
STRIP = {"cpu": 2**18, "cuda": 2**26}  # numbers of a block that are looked at together: a CPU's cache holds few
KEEP = {"cpu": 2**28, "cuda": 2**32}  # bytes of inner products that are kept for the gradients, by kind of device


def gram_loss(rows: Tensor, columns: Tensor, forth: Way, back: Way | None, plan: Plan) -> tuple[Tensor, Tensor]:
    """(the weighted sum of the ways' losses, 0-d, with its gradients; each way's own loss, [1 or 2], without).

    rows [N, D], columns [M, D] of one dtype: float32, float64, or, on CUDA, bfloat16. Across ranks they are this one's;
    losses are those of the whole batch and gradients are world-size times theirs, as distributed.gather_rows has it.
    Errors: RuntimeError where a second derivative is asked for.
    """
    factors = [*forth.factors, *(back.factors if back is not None else ())]
    asked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (rows, columns, *factors))
    with torch.autocast(device_type=rows.device.type, enabled=False):
        total, values = _GramLoss.apply(forth, back, plan, asked, rows, columns, *factors)
    return total, values


class _GramLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forth: Way, back: Way | None, plan: Plan, with_gradients: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        tiles = _Tiles(forth, back, plan, tensors, with_gradients)
        total, values = tiles.run()
        ctx.gradients = tiles.gradients()
        ctx.mark_non_differentiable(values)
        return total, values

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the tiled contrastive loss has no second derivative, and create_graph=True asks for one; "
                "ContrastiveLoss(..., tiled=False) has"
            )
        found = [g if g is None else g * outer[0].to(g.dtype) for g in ctx.gradients]
        return (None, None, None, None, *found)


class _Tiles:
    """One forward pass: the ways, the rows of this rank, the columns of all, and sums of gradients."""

    def __init__(
        self, forth: Way, back: Way | None, plan: Plan, tensors: tuple[Tensor | None, ...], with_gradients: bool
    ) -> None:
        rows, columns = tensors[:2]
        assert rows is not None and columns is not None
        self.plan, self.with_gradients = plan, with_gradients
        self.dtypes = [t if t is None else t.dtype for t in tensors]
        self.shared = Columns(columns, rows, plan.pairs, plan.across_ranks)
        half = rows.dtype == torch.bfloat16
        dtype = torch.float32 if half else rows.dtype
        factors = Factors.of(tensors[2:5], dtype)
        # Forth's factors go into rows and columns, where they cost no pass over the scores; bfloat16 stays as it is:
        # its products are exact, its multiples are not
        self.inner = (None, None) if half else factors.multipliers()
        self.rows, own = (x if f is None else scaled(x, f) for x, f in zip((rows, columns), self.inner, strict=True))
        self.columns = self.shared.gather(own)
        self.room = Room(len(self.columns), dtype, rows.device)
        left = factors.multipliers() if half else (None, None)
        self.forth = Asking(forth, factors, left, self.shared, plan, len(rows), self.room, back=False)
        self.back = None
        if back is not None:
            others = Factors.of(tensors[5:8], dtype)
            left = others.multipliers() if half else others.beyond(factors, plan.alike)
            self.back = Asking(back, others, left, self.shared, plan, len(rows), self.room, back=True)
        if with_gradients:
            self.row_gradient = torch.zeros(rows.shape, dtype=dtype, device=rows.device)
            self.column_gradient = torch.zeros(self.columns.shape, dtype=dtype, device=rows.device)

    def run(self) -> tuple[Tensor, Tensor]:
        plan, room, back = self.plan, self.room, self.back
        at_once = self.with_gradients and back is None and plan.focal is None
        left = self._of_device(KEEP) if self.with_gradients and not at_once else 0
        kept: list[Tensor] = []  # of the first blocks
        for at in self._blocks():
            left -= (at.stop - at.start) * room.row_bytes
            products = self._products(
                at, None if left >= 0 else room.buffer("products", at.stop - at.start, room.width)
            )
            for strip in self._strips(at):
                part, known = products[strip.start - at.start : strip.stop - at.start], self._known(strip)
                for way in self._ways(at):
                    way.see(part, known[way.back], strip)
            if at_once:
                self.forth.weigh(at)
                self._differentiate(products, at)
            if left >= 0:
                kept.append(products)
        ways = [self.forth] if back is None else [self.forth, back]
        values = torch.stack([way.settle() for way in ways])
        if self.with_gradients and not at_once:
            for i, at in enumerate(self._blocks()):
                again = room.buffer("products", at.stop - at.start, room.width) if i >= len(kept) else None
                products = kept[i] if again is None else self._products(at, again)
                self._differentiate(products, at)
        total = (values * values.new_tensor([way.weight for way in ways])).sum()
        return total, values

    def _blocks(self) -> Iterator[slice]:
        """Blocks of rows; none holds both pairs and candidates only."""
        height = max(ROWS, self._of_device(BLOCK) // max(len(self.columns), 1))
        for start, stop in ((0, self.plan.pairs), (self.plan.pairs, len(self.rows) if self.back else 0)):
            for first in range(start, stop, height):
                yield slice(first, min(first + height, stop))

    def _strips(self, at: slice) -> Iterator[slice]:
        """A block in parts: what is done a number at a time is done to a part while it is in the cache."""
        height = max(1, self._of_device(STRIP) // max(len(self.columns), 1))
        for first in range(at.start, at.stop, height):
            yield slice(first, min(first + height, at.stop))

    def _of_device(self, table: dict[str, int]) -> int:
        return table.get(self.rows.device.type, table["cpu"])

    def _ways(self, at: slice) -> list[Asking]:
        """Those that a block concerns: rows that are candidates only do not ask."""
        forth = [self.forth] if at.start < self.plan.pairs else []
        return forth if self.back is None else [*forth, self.back]

    def _products(self, at: slice, out: Tensor | None) -> Tensor:
        rows, piece = self.rows[at], self._of_device(PIECE)
        if len(self.columns) <= piece or rows.dtype == torch.bfloat16:
            return multiply(rows, self.columns.T, out)
        out = rows.new_empty(len(rows), len(self.columns)) if out is None else out
        for columns, part in zip(self.columns.split(piece), out.split(piece, 1), strict=True):
            torch.mm(rows, columns.T, out=part)
        return out

    def _known(self, at: slice) -> dict[bool, Tensor | None]:
        """Known positives of a block, forth (False) and back (True)."""
        ways = self._ways(at)
        known = {way.back: way.known(at) for way in ways[:1]}
        for way in ways[1:]:
            once, first = way.way.relation is ways[0].way.relation, known[False]
            known[way.back] = way.known(at) if not once else None if first is None else first[:, : way.width]
        return known

    def _differentiate(self, products: Tensor, at: slice) -> None:
        """A block's part of all gradients, its own written over its products."""
        ways = [way for way in self._ways(at) if way.weighed]
        for strip in self._strips(at):
            part, known = products[strip.start - at.start : strip.stop - at.start], self._known(strip)
            found = [way.gradient(part, known[way.back], strip) for way in ways]
            if at.start >= self.plan.pairs:
                part.zero_()  # rows that are candidates only have a part where columns ask
            for i, gradient in enumerate(found):
                own = part[:, : gradient.shape[1]]
                own.copy_(gradient) if i == 0 else own.add_(gradient)
        if ways:
            whole = products.to(self.columns.dtype)
            self.row_gradient[at] = multiply(whole, self.columns)
            if whole.dtype == self.column_gradient.dtype:
                self.column_gradient.addmm_(whole.T, self.rows[at])
            else:
                self.column_gradient += multiply(whole.T, self.rows[at])

    def gradients(self) -> list[Tensor | None]:
        """Of rows, columns and every factor, in their own dtypes."""
        if not self.with_gradients:
            return []
        sides, ranks = (self.row_gradient, self.shared.scatter(self.column_gradient)), self.shared.ranks
        found: list[Tensor | None] = [
            x.mul_(ranks) if f is None else scaled(x, f * ranks, out=x) for x, f in zip(sides, self.inner, strict=True)
        ]
        for way in [self.forth] if self.back is None else [self.forth, self.back]:
            found += way.factor_gradients()
        return [g if g is None or dtype is None else g.to(dtype) for g, dtype in zip(found, self.dtypes, strict=True)]


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """A matrix product, in float32 where its factors are bfloat16 (whose own products are exact in it)."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=torch.float32)
