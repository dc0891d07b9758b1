"""Both directions' losses and all gradients from one product X Y^T, in tiles (docs/math.md: "One Gram matrix").

Rows are the queries of the first (row) direction, columns those of the second; both directions' scores are the same
products, times a factor per row and per column. The first direction's factors are multiplied into X and Y, where
autograd differentiates them; the second keeps scales: t_ji = s_ij * row_scale_i * column_scale_j with s_ij = x_i . y_j.

A row's softmax is complete in its block of rows, a column's grows block by block. A second pass makes the gradients, in
the memory of B D numbers and a few blocks; one direction alone needs none. Each rank has its own rows and all columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmclip import distributed
from mmclip.losses.cross_entropy import focal_weights
from mmclip.losses.positives import Lookup, Sides, oriented, with_negatives
from mmclip.roles import Direction, Positives
from mmclip.similarity import divisor

if TYPE_CHECKING:
    from mmclip.losses.contrastive import ContrastiveLoss

ROWS = 512  # rows of a block, at least: fewer and the matrix products slow down
BLOCK = {"cpu": 2**21, "cuda": 2**26}  # numbers of a block, at least, by kind of device
STRIP = {"cpu": 2**18, "cuda": 2**26}  # numbers of a block that are processed together: a CPU's cache holds few
KEEP = {"cpu": 2**28, "cuda": 2**32}  # bytes of products that are kept for the gradients
HALF = ("cuda",)  # devices whose bfloat16 is multiplied into float32; float16 could not hold a batch's gradients
HIDDEN = -1e22  # score of no candidate: scales from 1e-12 to 1e12 keep it low and finite

Weights = Mapping[Direction, float | None]  # None: a value without gradient


def tiled_loss(
    loss: ContrastiveLoss, weights: Weights, features: Sides, negatives: Sides, lookup: Lookup | None
) -> tuple[Tensor, dict[Direction, Tensor]]:
    """Weighted total, 0-d, with its gradients, and each direction's own value, as ``loss`` has them.

    ``weights`` are of one or two directions, the row direction first. bfloat16 on CUDA is multiplied as it is.
    """
    first, *others = weights
    rows, columns = (with_negatives(s, features, negatives) for s in (first.query_side, first.document_side))
    rows = rows if others else features[first.query_side]
    half = rows.dtype == columns.dtype == torch.bfloat16 and rows.device.type in HALF
    dtype = rows.dtype if half else torch.promote_types(torch.promote_types(rows.dtype, columns.dtype), torch.float32)
    rows, columns = rows.to(dtype), columns.to(dtype)
    with torch.autocast(device_type=rows.device.type, enabled=False):
        (gamma_q, gamma_d), alphas = loss.similarity.exponents, [loss.similarity.scale(d) for d in weights]
        # what rows and columns hold already: bfloat16 products are exact, its multiples are not
        held: Any = (1.0, 0.0, 0.0) if half else (alphas[0], gamma_q, gamma_d)
        roles = zip(alphas, (gamma_q, gamma_d), (gamma_d, gamma_q), strict=False)
        scales = [_scales(rows, columns, a / held[0], r - held[1], c - held[2]) for a, r, c in roles]
        if not half:
            row, column = _scales(rows, columns, *held)
            rows, scales[0] = rows * row[:, None], (None, None)
            columns = columns if column is None else columns * column[:, None]
        tiles = _Tiles(loss, weights, len(features[first.query_side]), lookup and oriented(lookup, first))
        columns, *column_scales = tiles.gathered(len(rows), columns, *(c for _, c in scales))
        tensors = [rows, columns, *(t for (r, _), c in zip(scales, column_scales, strict=True) for t in (r, c))]
        differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        total, values = _Tiled.apply(tiles, differentiated, *tensors)
    return total, dict(zip(weights, values.unbind(), strict=True))


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product, of bfloat16 in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.dtype == torch.bfloat16 else torch.mm(a, b)


def _scales(rows: Tensor, columns: Tensor, alpha: Tensor, of_rows: Any, of_columns: Any) -> tuple[Any, Tensor | None]:
    """alpha / |x|**of_rows, [N], and 1 / |y|**of_columns, [M] or None."""
    row, column = divisor(rows, of_rows), divisor(columns, of_columns)
    return alpha.expand(len(rows)) if row is None else alpha / row, None if column is None else column.reciprocal()


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, differentiated: bool, *tensors: Any) -> tuple[Tensor, Tensor]:
        values, ctx.gradients = tiles.run(differentiated, *tensors)
        ctx.mark_non_differentiable(values)
        return (values * values.new_tensor([w or 0.0 for w in tiles.weights])).sum(), values

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("tiles have no second derivative (create_graph=True): ContrastiveLoss(tiled=False) has")
        return (None, None, *(g if g is None else g * outer[0].to(g.dtype) for g in ctx.gradients))


class _Tiles:
    """One pass over the tiles of x [N, D] times y [M, D] transposed."""

    def __init__(self, loss: ContrastiveLoss, weights: Weights, pairs: int, lookup: Lookup | None) -> None:
        self.weights, self.pairs, self.focal, self.lookup = [*weights.values()], pairs, loss.focal, lookup
        self.several = lookup is not None and loss.positives is Positives.MULTI  # targets of a query
        self.rank, self.ranks = distributed.world() if loss.gather else (0, 1)
        alone = SimpleNamespace(all_sum=lambda x: x, all_max=lambda x: x, gather_rows=lambda x, _=None: x)
        self.all: Any = distributed if loss.gather else alone

    def gathered(self, n_rows: int, *columns: Any) -> list[Any]:
        """Columns and their scales, [m, ...] each or None, of all ranks: pairs before negatives."""
        first, p = columns[0], self.pairs
        counts = torch.tensor([[p, len(first) - p, n_rows - p]], device=first.device)
        pairs, negatives, row_negatives = self.all.gather_rows(counts, [1] * self.ranks).T.tolist()
        self.all_pairs, self.first = sum(pairs), sum(pairs[: self.rank])
        self.numbers = torch.arange(n_rows, device=first.device) + self.first  # of this rank's rows among all
        self.numbers[p:] += self.all_pairs + sum(row_negatives[: self.rank]) - p - self.first
        sizes = [(s, n) for s, n in ((slice(0, p), pairs), (slice(p, None), negatives)) if sum(n)]
        return [t if t is None else torch.cat([self.all.gather_rows(t[s], n) for s, n in sizes]) for t in columns]

    def run(self, differentiated: bool, x: Tensor, y: Tensor, *scales: Tensor | None) -> tuple[Tensor, list[Any]]:
        """Each direction's loss, [1 or 2], and the gradients of all tensors."""
        block, strip, left = (table.get(x.device.type, table["cpu"]) for table in (BLOCK, STRIP, KEEP))
        height, self.strip = (max(least, n // max(len(y), 1)) for least, n in ((ROWS, block), (1, strip)))
        blocks = [slice(i, i + height) for i in range(0, len(x), height)]
        self.x, self.y, self.like = x, y, x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))
        self.softmaxes = [StreamingSoftmax(self, i > 0, *scales[2 * i :][:2]) for i in range(len(self.weights))]
        self.gradients = [torch.zeros_like(t, dtype=self.like.dtype) for t in (x, y) if differentiated]
        at_once = differentiated and len(self.weights) == 1 and not self.focal
        kept: list[Tensor] = []  # products of the first blocks
        for at in blocks:
            products = self._products(at)
            for tile in self._tiles(products, at):
                for softmax in self.softmaxes:
                    softmax.add(*tile)
            left -= products.numel() * products.itemsize
            if at_once:
                self.softmaxes[0].weigh(at, 1 / self.all_pairs)
                self._differentiate(products, at)
            elif differentiated and left >= 0:
                kept.append(products)
        values = torch.stack([softmax.finish() for softmax in self.softmaxes])
        for i, at in enumerate(blocks if differentiated and not at_once else ()):
            self._differentiate(kept[i] if i < len(kept) else self._products(at), at)
        return values, [*self.gradients, *(g for s in self.softmaxes for g in s.scale_gradients())]

    def _products(self, at: slice) -> Tensor:
        """Products [k, M] of rows with all columns; those of known positives that are no targets are hidden."""
        products, hides = multiply(self.x[at], self.y.T), self.lookup is not None and not self.several
        return products.masked_fill_(self._known(at), HIDDEN) if hides else products

    def _known(self, rows: slice) -> Tensor:
        """Known positives of rows, bool [k, M], with the pairs if those are targets, too."""
        assert self.lookup is not None
        known = self.lookup(self.numbers[rows], torch.arange(len(self.y), device=self.x.device))
        self.own(known, rows).fill_(self.several)
        return known

    def own(self, tile: Tensor, rows: slice) -> Tensor:
        """The pairs' entries of a tile, a view; rows of negatives have none."""
        return tile[: max(0, self.pairs - rows.start)].diagonal(self.first + rows.start)

    def _tiles(self, products: Tensor, at: slice) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """(Rows, products, targets where there may be several) of parts of a block that stay in the cache."""
        for i, part in enumerate(products.split(self.strip)):
            rows = slice(at.start + i * self.strip, at.start + i * self.strip + len(part))
            yield rows, part, self._known(rows) if self.several else None

    def _differentiate(self, products: Tensor, at: slice) -> None:
        """Add a block's part of all gradients; its products are overwritten by theirs."""
        for rows, tile, targets in self._tiles(products, at):
            reverse = [s.differentiate(rows, tile, targets) for s in self.softmaxes[1:] if s.weight is not None]
            tile.copy_(self.softmaxes[0].differentiate(rows, tile, targets, tile))  # in place, unless scales are left
            for gradient in reverse:
                tile[:, : self.all_pairs] += gradient
        (of_rows, of_columns), products = self.gradients, products.to(self.y.dtype)
        of_rows[at] = multiply(products, self.y)
        if products.dtype == self.like.dtype:
            of_columns.addmm_(products.T, self.x[at])
        else:
            of_columns += multiply(products.T, self.x[at])


class StreamingSoftmax:
    """Softmax statistics of one retrieval direction, accumulated over score tiles, and then each tile's gradient.

    Queries are this rank's rows (negatives without weight) or, ``by_column``, the columns of all pairs. The scales are
    not yet applied to the tiles. Sums are kept under a running maximum: raw scores have no bound.
    """

    def __init__(self, tiles: _Tiles, by_column: bool, row_scale: Tensor | None, column_scale: Tensor | None) -> None:
        self.tiles, self.by_column, self.dim, like = tiles, by_column, 1 - by_column, tiles.like
        self.weight, self.row_scale, self.column_scale = tiles.weights[by_column], row_scale, column_scale
        self.pairs: int = tiles.all_pairs if by_column else tiles.pairs
        self.first: int = tiles.first if by_column else 0
        self.width, n = (self.pairs, self.pairs) if by_column else (len(tiles.y), len(tiles.x))
        self.every = slice(None) if by_column else None
        # sum and that of the targets alone; the targets' scores added up, and their number
        self.sum, self.hits, self.target, self.count, self.share = (like.new_zeros(n) for _ in range(5))
        self.top, self.shift = like.new_full((n,), -torch.inf), like.new_full((n,), torch.inf)
        self.row_moved, self.column_moved = like.new_zeros(len(tiles.x)), like.new_zeros(len(tiles.y))

    def scaled(self, tile: Tensor, rows: slice) -> Tensor:
        """The tile times the residual scales."""
        if self.row_scale is not None:
            tile = tile * self.row_scale[rows, None]
        return tile if self.column_scale is None else tile * self.column_scale[: self.width]

    def add(self, rows: slice, tile: Tensor, targets: Tensor | None) -> None:
        """Take a tile's scores into the sums."""
        scores, queries = self.scaled(tile[:, : self.width], rows), self.every or rows
        before, self.top[queries] = self.top[queries].clone(), torch.maximum(self.top[queries], scores.amax(self.dim))
        faded = (before - self.top[queries]).exp()
        shares = (scores - self.top[queries].unsqueeze(self.dim)).exp_()
        self.sum[queries] = self.sum[queries] * faded + shares.sum(self.dim)
        if targets is None:
            own, first = self.tiles.own(scores, rows), self.first + rows.start
            self.target[first : first + len(own)], self.count[first : first + len(own)] = own, 1
        else:
            targets = targets[:, : self.width]
            self.hits[queries] = self.hits[queries] * faded + (shares * targets).sum(self.dim)
            self.target[queries] += (scores * targets).sum(self.dim)
            self.count[queries] += targets.sum(self.dim)

    def weigh(self, queries: slice, weights: Tensor | float) -> None:
        """Set the queries' weights in the total; exp(score - shift) is weight times probability."""
        self.share[queries] = (self.weight or 0.0) * self.tiles.ranks * weights
        self.shift[queries] = (self.top + self.sum.log())[queries] - self.share[queries].log()

    def finish(self) -> Tensor:
        """The direction's loss, 0-d, after all tiles."""
        tiles, own, weights = self.tiles, slice(0, self.pairs), 1 / self.tiles.all_pairs
        if self.by_column:
            before, self.top = self.top, tiles.all.all_max(self.top)
            faded = (before - self.top).exp()
            sums = torch.stack([self.sum * faded, self.hits * faded, self.target, self.count])
            self.sum, self.hits, self.target, self.count = tiles.all.all_sum(sums)
        lse, target = (self.top + self.sum.log())[own], (self.target / self.count)[own]
        if tiles.focal:
            log_p = (self.hits / self.sum).log()[own] if tiles.several else target - lse
            every = log_p if self.by_column else tiles.all.gather_rows(log_p)
            weights = focal_weights(every, tiles.focal)[0 if self.by_column else tiles.first :][: len(log_p)]
        self.weigh(own, weights)
        value = ((lse - target) * weights).sum()
        return value if self.by_column else tiles.all.all_sum(value)

    def differentiate(self, rows: slice, tile: Tensor, targets: Tensor | None, out: Tensor | None = None) -> Tensor:
        """The total's gradient in a tile's products, [k, width]; those in the scales are summed up."""
        scores, queries = self.scaled(tile[:, : self.width], rows), self.every or rows
        out = torch.sub(scores, self.shift[queries].unsqueeze(self.dim), out=out).exp_()
        if targets is None:
            own = self.tiles.own(out, rows)
            own -= self.share[self.first + rows.start :][: len(own)]
        else:
            out -= targets[:, : self.width] * (self.share / self.count.clamp_min(1))[queries].unsqueeze(self.dim)
        if self.row_scale is not None or self.column_scale is not None:
            moved = out * scores
            self.row_moved[rows] += moved.sum(1)
            self.column_moved[: self.width] += moved.sum(0)
        return self.scaled(out, rows)

    def scale_gradients(self) -> list[Tensor | None]:
        """Of the residual scales: their logarithms' gradients, divided by them."""
        pairs = (self.row_moved, self.row_scale), (self.column_moved, self.column_scale)
        return [None if scale is None else moved / scale for moved, scale in pairs]
