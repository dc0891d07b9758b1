"""Both directions' losses and all gradients from one product X Y^T, in tiles (docs/math.md: "One Gram matrix").

Rows are one side of a batch and the queries of the first (row) direction, columns the other side and the queries of the
second. Both directions' scores are the same products times a factor per row and per column. The first direction's
factors are multiplied into X and Y, outside, where autograd differentiates them; the second keeps residual scales:

    s_ij = x_i . y_j        t_ji = s_ij * row_scale_i * column_scale_j

A row's softmax is complete in its block of rows, a column's grows block by block. A second pass makes all gradients;
``KEEP`` bytes of the first pass's products are kept for it, the others made again: 6 B^2 D operations where all fit,
8 B^2 D where none does, in the memory of B D numbers and a few blocks. One direction alone needs no second pass.
Across ranks each has its own rows and the columns of all, whose maxima and sums are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmclip import distributed
from mmclip.losses.cross_entropy import focal_weights
from mmclip.losses.positives import Lookup, oriented
from mmclip.roles import Direction
from mmclip.similarity import Similarity, at_least_float32, divisor

ROWS = 512  # rows of a block, at least: fewer and the matrix products slow down
BLOCK = {"cpu": 2**21, "cuda": 2**26}  # numbers of a block, at least, by kind of device
PIECE = {"cpu": 2**11, "cuda": 2**31}  # columns of one matrix product: wider ones slow down on a CPU
STRIP = {"cpu": 2**18, "cuda": 2**26}  # numbers of a block that are processed together: a CPU's cache holds few
KEEP = {"cpu": 2**28, "cuda": 2**32}  # bytes of products that are kept for the gradients

Scales = tuple[Tensor | None, Tensor | None]


def tiled_loss(
    similarity: Similarity, weights: Mapping[Direction, float | None], features: Mapping[str, Tensor],
    negatives: Mapping[str, Tensor], lookup: Lookup | None, multi: bool, focal: float, gather: bool,
) -> tuple[Tensor, dict[Direction, Tensor]]:  # fmt: skip
    """Weighted total, 0-d, with its gradients, and each direction's own loss without, as ``ContrastiveLoss`` has them.

    ``weights`` are of one or two directions, the row direction first; None is a loss without gradient. Known positives
    (``lookup``) are left out or, if ``multi``, targets. bfloat16 features on CUDA are multiplied as they are.
    """
    first, *others = weights
    sides = {first.query_side: bool(others), first.document_side: True}  # side -> whether its negatives are candidates
    rows, columns = (
        torch.cat([features[s], negatives[s].to(features[s].dtype)]) if used and s in negatives else features[s]
        for s, used in sides.items()
    )
    half = rows.dtype == columns.dtype and takes_half(rows)
    if not half:
        dtype = torch.promote_types(at_least_float32(rows[:0]).dtype, at_least_float32(columns[:0]).dtype)
        rows, columns = rows.to(dtype), columns.to(dtype)
    with torch.autocast(device_type=rows.device.type, enabled=False):
        gamma_q, gamma_d = similarity.exponents
        alike = not isinstance(gamma_q, Tensor) and gamma_q == gamma_d  # then one number scales a whole tile
        by = [(divisor(rows, gamma_q), divisor(columns, gamma_d))]
        by += [by[0] if alike else (divisor(rows, gamma_d), divisor(columns, gamma_q)) for _ in others]
        alphas = [similarity.scale(d) for d in weights]
        scales: list[Scales] = [_scales(a, b) for a, b in zip(alphas, by, strict=True)]
        if not half:  # bfloat16 products are exact, its multiples are not
            row, column = scales[0]
            assert row is not None
            rows = rows * (row[:, None] if row.ndim else row)
            columns = columns if column is None else columns * column[:, None]
            scales = [(None, None), *(_scales(alphas[1] / alphas[0], b, by[0]) for b in by[1:])]
        known = None if lookup is None else oriented(lookup, first)
        tiles = _Tiles(list(weights.values()), len(features[first.query_side]), known, multi, focal, gather)
        columns, *column_scales = tiles.gathered(len(rows), columns, *(c for _, c in scales))
        tensors = [rows, columns, *(t for (r, _), c in zip(scales, column_scales, strict=True) for t in (r, c))]
        tiles.differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        total, values = _Tiled.apply(tiles, *tensors)
    return total, dict(zip(weights, values.unbind(), strict=True))


def takes_half(rows: Tensor) -> bool:
    """Whether bfloat16 rows can be multiplied into float32; float16 could not hold a large batch's gradients."""
    return rows.is_cuda and rows.dtype == torch.bfloat16


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Matrix product, of bfloat16 in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.dtype == torch.bfloat16 else torch.mm(a, b, out=out)


def _scales(alpha: Tensor, by: Scales, applied: Scales = (None, None)) -> Scales:
    """Factors per row, [N] or 0-d, and per column, [M] or None, where ``applied`` divides rows and columns already."""
    row, column = (
        None if a is b else a if b is None else b.reciprocal() if a is None else a / b
        for a, b in zip(applied, by, strict=True)
    )
    return (alpha if row is None else alpha * row), column


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, *tensors: Any) -> tuple[Tensor, Tensor]:
        values, ctx.gradients = tiles.run(*tensors)
        ctx.mark_non_differentiable(values)
        return (values * values.new_tensor([w or 0.0 for w in tiles.weights])).sum(), values

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            what = "the tiled contrastive loss has no second derivative, and create_graph=True needs one"
            raise RuntimeError(f"{what}; ContrastiveLoss(..., tiled=False) has")
        return (None, *(g if g is None else g * outer[0].to(g.dtype) for g in ctx.gradients))


class Tile(NamedTuple):
    """Products [k, M] of rows with all columns; ``known`` positives bool [k, M], with the pairs if those are targets.

    ``pair`` is the column of the first row's pair, the next row's follows; None for rows that are negatives.
    """

    rows: slice
    products: Tensor
    known: Tensor | None
    pair: int | None


class _Tiles:
    """One pass over the tiles of x [N, D] times y [M, D] transposed."""

    def __init__(self, weights: list[float | None], pairs: int, lookup: Lookup | None, multi: bool, focal: float,
                 gather: bool) -> None:  # fmt: skip
        self.weights, self.pairs, self.lookup, self.multi, self.focal = weights, pairs, lookup, multi, focal
        self.rank, self.ranks = distributed.world() if gather else (0, 1)
        alone = SimpleNamespace(all_sum=lambda x: x, all_max=lambda x: x, gather_rows=lambda x, _=None: x)
        self.all: Any = distributed if gather else alone
        self.differentiated = False

    def gathered(self, n_rows: int, *columns: Tensor | None) -> list[Any]:
        """Columns and their scales, [m, ...] each or None, of all ranks: pairs before negatives."""
        first, p = columns[0], self.pairs
        assert first is not None
        counts = torch.tensor([[p, len(first) - p, n_rows - p]], device=first.device)
        pairs, negatives, row_negatives = self.all.gather_rows(counts, [1] * self.ranks).T.tolist()
        self.all_pairs, self.first = sum(pairs), sum(pairs[: self.rank])
        self.first_negative = self.all_pairs + sum(row_negatives[: self.rank])  # number of its first row
        if self.ranks == 1:
            return list(columns)
        sizes = [(s, n) for s, n in ((slice(0, p), pairs), (slice(p, None), negatives)) if sum(n)]
        return [t if t is None else torch.cat([self.all.gather_rows(t[s], n) for s, n in sizes]) for t in columns]

    def run(self, x: Tensor, y: Tensor, *scales: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """Each direction's loss, [1 or 2], and the gradients of all tensors."""
        self.x, self.y, self.numbers = x, y, torch.arange(len(y), device=x.device)
        self.like = x.new_empty(0, dtype=torch.float32 if x.dtype == torch.bfloat16 else x.dtype)
        self.softmaxes = [StreamingSoftmax(self, i > 0, *scales[2 * i :][:2]) for i in range(len(self.weights))]
        if self.differentiated:
            self.gradients = [torch.zeros_like(t, dtype=self.like.dtype) for t in (x, y)]
        at_once = self.differentiated and len(self.weights) == 1 and not self.focal
        left = self._limit(KEEP) if self.differentiated and not at_once else 0
        kept: list[Tensor] = []  # of the first blocks
        for at in self._blocks():
            products = self._products(at)
            for tile in self._tiles(products, at):
                for softmax in self.softmaxes[tile.pair is None :]:
                    softmax.add(tile)
            if at_once:
                self.softmaxes[0].weigh(at, 1 / self.all_pairs)
                self._differentiate(products, at)
            left -= products.numel() * products.itemsize
            if left >= 0:
                kept.append(products)
        values = torch.stack([softmax.finish() for softmax in self.softmaxes])
        if not self.differentiated:
            return values, []
        for i, at in enumerate(self._blocks() if not at_once else ()):
            self._differentiate(kept[i] if i < len(kept) else self._products(at), at)
        return values, [*self.gradients, *(g for s in self.softmaxes for g in s.scale_gradients())]

    def _differentiate(self, products: Tensor, at: slice) -> None:
        """Add a block's part of all gradients; its products are overwritten by theirs."""
        for tile in self._tiles(products, at):
            reverse = [s.differentiate(tile) for s in self.softmaxes[1:] if s.weight is not None]
            if tile.pair is None:
                tile.products.zero_()
            else:  # in place, but where scales are left
                tile.products.copy_(self.softmaxes[0].differentiate(tile, tile.products))
            for gradient in reverse:
                tile.products[:, : self.all_pairs] += gradient
        (of_rows, of_columns), products = self.gradients, products.to(self.y.dtype)
        of_rows[at] = multiply(products, self.y)
        if products.dtype == self.like.dtype:
            of_columns.addmm_(products.T, self.x[at])
        else:
            of_columns += multiply(products.T, self.x[at])

    def _limit(self, table: dict[str, int]) -> int:
        return table.get(self.x.device.type, table["cpu"])

    def _blocks(self) -> Iterator[slice]:
        """Rows that are multiplied together, pairs or negatives; negatives only where columns are queries, too."""
        height = max(ROWS, self._limit(BLOCK) // max(len(self.y), 1))
        for start, stop in ((0, self.pairs), (self.pairs, len(self.x) if len(self.weights) > 1 else 0)):
            for first in range(start, stop, height):
                yield slice(first, min(first + height, stop))

    def _products(self, at: slice) -> Tensor:
        rows, piece = self.x[at], self._limit(PIECE)
        if rows.dtype == torch.bfloat16:
            return multiply(rows, self.y.T)
        out = rows.new_empty(len(rows), len(self.y))
        for columns, part in zip(self.y.split(piece), out.split(piece, 1), strict=True):
            multiply(rows, columns.T, part)
        return out

    def _tiles(self, products: Tensor, at: slice) -> Iterator[Tile]:
        """Parts of a block that stay in the cache."""
        height = max(1, self._limit(STRIP) // max(len(self.y), 1))
        for start, part in zip(range(at.start, at.stop, height), products.split(height), strict=True):
            first = start + (self.first if start < self.pairs else self.first_negative - self.pairs)
            pair, known = first if start < self.pairs else None, None
            if self.lookup is not None:
                known = self.lookup(torch.arange(first, first + len(part), device=part.device), self.numbers)
                if pair is not None:
                    known.diagonal(pair).fill_(self.multi)
            yield Tile(slice(start, start + len(part)), part, known, pair)


class StreamingSoftmax:
    """Softmax statistics of one retrieval direction, accumulated over score tiles, and then each tile's gradient.

    Queries are the rows of this rank or, ``by_column``, the columns of all. ``row_scale``, ``column_scale``: factors not
    yet applied to the tiles.
    """

    def __init__(self, tiles: _Tiles, by_column: bool, row_scale: Tensor | None, column_scale: Tensor | None) -> None:
        self.tiles, self.by_column, self.dim, like = tiles, by_column, 1 - by_column, tiles.like
        n = tiles.all_pairs if by_column else tiles.pairs
        self.width = n if by_column else len(tiles.y)
        self.weight, self.row_scale, self.column_scale = tiles.weights[by_column], row_scale, column_scale
        self.several = tiles.multi and tiles.lookup is not None  # targets of a query
        self.lse, self.targets = LogSumExp(n, like), LogSumExp(n, like)
        self.target, self.count, self.share, self.shift = (like.new_zeros(n) for _ in range(4))
        self.row_moved, self.column_moved = like.new_zeros(len(tiles.x)), like.new_zeros(len(tiles.y))

    def read(self, tile: Tile) -> tuple[Tensor, Tensor | None, slice, slice | None]:
        """(Scores, known positives, queries of a tile, queries of its pairs)."""
        scores = self.scaled(tile.products[:, : self.width], tile.rows)
        known = None if tile.known is None else tile.known[:, : self.width]
        if not self.by_column:
            return scores, known, tile.rows, tile.rows
        return scores, known, slice(None), None if tile.pair is None else slice(tile.pair, tile.pair + len(scores))

    def scaled(self, tile: Tensor, rows: slice) -> Tensor:
        """The tile times the residual scales."""
        if self.row_scale is not None:
            tile = tile * (self.row_scale[rows, None] if self.row_scale.ndim else self.row_scale)
        return tile if self.column_scale is None else tile * self.column_scale[: self.width]

    def add(self, tile: Tile) -> None:
        """Take a tile's scores into log-sum-exps and targets."""
        scores, known, queries, own = self.read(tile)
        if known is not None and self.several:
            self.target[queries] += torch.where(known, scores, 0).sum(self.dim)
            self.count[queries] += known.sum(self.dim)
            if self.tiles.focal:
                self.targets.add(scores.masked_fill(~known, -torch.inf), queries, self.dim)
        elif own is not None and tile.pair is not None:
            self.target[own], self.count[own] = scores.diagonal(tile.pair), 1
        if known is not None and not self.several:
            scores = scores.masked_fill(known, -torch.inf)
        self.lse.add(scores, queries, self.dim)

    def weigh(self, queries: slice, weights: Tensor | float) -> None:
        """Set the queries' weights in the total; exp(score - shift) is weight times probability."""
        self.share[queries] = (self.weight or 0.0) * self.tiles.ranks * weights
        self.shift[queries] = self.lse.value()[queries] - self.share[queries].log()

    def finish(self) -> Tensor:
        """The direction's loss, 0-d, after all tiles."""
        tiles, weights = self.tiles, 1 / self.tiles.all_pairs
        if self.by_column:
            self.target, self.count = tiles.all.all_sum(self.target), tiles.all.all_sum(self.count)
            self.lse.merge(tiles.all)
            self.targets.merge(tiles.all)
        lse, target = self.lse.value(), self.target / self.count
        if tiles.focal:
            log_p = (self.targets.value() if self.several else target) - lse
            every = log_p if self.by_column else tiles.all.gather_rows(log_p)
            weights = focal_weights(every, tiles.focal)[0 if self.by_column else tiles.first :][: len(log_p)]
        self.weigh(slice(None), weights)
        value = ((lse - target) * weights).sum()
        return value if self.by_column else tiles.all.all_sum(value)

    def differentiate(self, tile: Tile, out: Tensor | None = None) -> Tensor:
        """The total's gradient in a tile's products, [k, width]; those in the scales are summed up."""
        scores, known, queries, own = self.read(tile)
        out = torch.sub(scores, self.shift[queries].unsqueeze(self.dim), out=out).exp_()
        if known is not None and self.several:
            out -= known * (self.share / self.count)[queries].unsqueeze(self.dim)
        elif own is not None and tile.pair is not None:
            out.diagonal(tile.pair).sub_(self.share[own])
        if known is not None and not self.several:
            out.masked_fill_(known, 0)
        if self.row_scale is not None or self.column_scale is not None:
            moved = out * scores
            self.row_moved[tile.rows] += moved.sum(1)
            self.column_moved[: self.width] += moved.sum(0)
        return self.scaled(out, tile.rows)

    def scale_gradients(self) -> list[Tensor | None]:
        """Of the residual scales: their logarithms' gradients, divided by them."""
        row, column = self.row_scale, self.column_scale
        moved = self.row_moved if row is None or row.ndim else self.row_moved.sum()
        return [None if row is None else moved / row, None if column is None else self.column_moved / column]


class LogSumExp:
    """Log-sum-exp of n series, accumulated under a running maximum: raw scores have no bound."""

    def __init__(self, n: int, like: Tensor) -> None:
        self.top, self.sum = like.new_full((n,), -torch.inf), like.new_zeros(n)

    def add(self, scores: Tensor, of: slice, dim: int) -> None:
        """Take scores [k, n] into the series ``of``; ``dim`` is summed out."""
        before = self.top[of]
        top = torch.maximum(before, scores.amax(dim))
        base = top.masked_fill(top == -torch.inf, 0)  # of a series that is empty so far
        self.sum[of] = self.sum[of] * (before - base).exp() + (scores - base.unsqueeze(dim)).exp_().sum(dim)
        self.top[of] = top

    def merge(self, ranks: Any) -> None:
        """Add the other ranks' series."""
        before, self.top = self.top, ranks.all_max(self.top)
        self.sum = ranks.all_sum(self.sum * (before - self.top.masked_fill(self.top == -torch.inf, 0)).exp())

    def value(self) -> Tensor:
        """Log-sum-exp of each series, [n]."""
        return self.top + self.sum.log()
