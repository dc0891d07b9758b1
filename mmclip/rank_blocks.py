"""One matrix product, tile by tile -> how many documents score at least as much as each relevant one, exactly.

Every scoring of both directions is a_i * G_ij * b_j with one G (docs/math.md, "One Gram matrix"). A tile of

    C = unit rows @ unit columns.T

therefore serves them all: where rows ask, document j's scores are C * w_j, where columns ask they are C * w_i
(:mod:`mmclip.sides`). Counting is a comparison of the tile with one threshold for each relevant document.

**Exact, and fast.** A score is the float64 one rounded once to float32, which knows nothing of tiles. The tile is
float32, and no entry is farther from the exact one than

    E = (D + 16) * 2**-24        (any order of summation; 16 covers unit rows, w and thresholds being rounded)

so an entry outside threshold ± E is decided, and only those inside are computed again, in float64, each by itself.
Where they are many (a collapsed model: all scores are alike) the whole tile is computed again in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmclip.relevance import Slots
from mmclip.sides import Side, exact_dots
from mmclip.top_lists import TopList

_BYTES_PER_SCORE = 32  # tile, its scaled copy, flags, and the float64 tile twice
_BYTES_PER_VALUE = 24  # of a tile's rows and columns: raw, in float64, and unit length
_CROWDED = 64  # a tile with more than one undecided score in so many is computed again as a whole
_FEW = 16  # a tile in which fewer than one pair in so many has a document above its low bound needs no high one

Array = NDArray[Any]
Progress = Callable[[int, int], None]


def tile_error(dim: int) -> float:
    """E: how far a tile's score may be from the exact one, for vectors of ``dim`` numbers and weights up to 1."""
    return (dim + 16) * 2.0**-24


@contextmanager
def full_float32() -> Iterator[None]:
    """float32 products are float32 inside: neither TF32 nor bfloat16, whatever was allowed, nor autocast."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [b.fp32_precision for b in backends]
    try:
        for b in backends:
            b.fp32_precision = "ieee"
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        for b, precision in zip(backends, before, strict=True):
            b.fp32_precision = precision


class Ranked:
    """One ranking of one direction: what is compared with, and what has been counted. P pairs in the slots' order.

    threshold [P] float32: scores of the relevant documents. at_least, above [P] int64: how many *irrelevant* documents
    score at least, and more than, so much. ``cosine`` [P]: the pairs' exact cosines; ``error``: :func:`tile_error`.
    """

    def __init__(
        self, slots: Slots, by_row: bool, weight: Tensor | None, cosine: Tensor, error: float, top: TopList | None
    ) -> None:
        self.slots, self.by_row, self.weight, self.error, self.top = slots, by_row, weight, error, top
        self.weight32 = None if weight is None else weight.float()
        self.threshold = (cosine if weight is None else cosine * weight[slots.document]).float()
        self.low, self.high = self.threshold - error, self.threshold + error
        self.at_least, self.above = (torch.zeros(len(cosine), dtype=torch.int64, device=cosine.device) for _ in "ab")

    def count(self, tile: Tile) -> None:
        """Count a tile's documents for its queries, and offer them to the list of the best."""
        pairs = self.slots.inside(*tile.span(self.by_row))
        if not pairs:
            return
        scores = tile.scores(self)
        if self.top is not None:
            n = pairs[0].stop - pairs[0].start
            asked = scores[:n] if self.by_row else scores[:, :n]
            self.top.take(asked, self.by_row, tile.span(self.by_row)[0], tile.span(not self.by_row)[0])
        low = tile.count(scores, self.low, pairs, self.by_row)
        few = int((low > 0).sum()) * _FEW < len(low)  # then what is above low is looked at by itself
        high = torch.zeros_like(low) if few else tile.count(scores, self.high, pairs, self.by_row)
        undecided = int((low - high).sum())
        if undecided * _CROWDED > scores.numel():
            scores = tile.exact_scores(self)
            next_up = torch.nextafter(self.threshold, torch.full_like(self.threshold, torch.inf))
            self._add(tile.count(scores, self.threshold, pairs, self.by_row), pairs, self.at_least)
            self._add(tile.count(scores, next_up, pairs, self.by_row), pairs, self.above)
            return
        self._add(high, pairs, self.at_least)
        self._add(high, pairs, self.above)
        if undecided:
            self._decide(tile, scores, pairs, low - high, torch.full_like(self.high, torch.inf) if few else self.high)

    @staticmethod
    def _add(counts: Tensor, pairs: list[slice], to: Tensor) -> None:
        for at, n in zip(pairs, counts.split([p.stop - p.start for p in pairs]), strict=True):
            to[at] += n

    def _decide(self, tile: Tile, scores: Tensor, pairs: list[slice], undecided: Tensor, high: Tensor) -> None:
        """Count the documents from low up to ``high`` [P], where ``undecided`` says that there are some."""
        for at, many in zip(pairs, undecided.split([p.stop - p.start for p in pairs]), strict=True):
            query = many.nonzero().squeeze(1)
            if not len(query):
                continue
            part = scores[query] if self.by_row else scores[:, query].T
            inside = (part >= self.low[at][query, None]) & (part < high[at][query, None])
            which, document = inside.nonzero(as_tuple=True)
            pair = query[which] + at.start
            distance = part[which, document].double() - self.threshold[pair]
            error = self.error if self.weight is None else self.error * self.weight[tile.place(document, self.by_row)]
            ahead, near = pair[distance > error], distance.abs() <= error
            pair = pair[near]
            value = tile.exact(self, query[which[near]], document[near])
            for counter, hit in (
                (self.at_least, value >= self.threshold[pair]),
                (self.above, value > self.threshold[pair]),
            ):
                both = torch.cat([ahead, pair[hit]])
                counter.index_add_(0, both, torch.ones_like(both))


class Tile:
    """The product of a run of rows with a run of columns, and room for what is made of it."""

    def __init__(self, rows: Side, columns: Side, size: int) -> None:
        self.rows, self.columns = rows, columns
        self.room = [torch.empty(size, device=rows.x.device) for _ in range(3)]
        self.row_span = self.column_span = (0, 0)

    def span(self, by_row: bool) -> tuple[int, int]:
        return self.row_span if by_row else self.column_span

    def place(self, document: Tensor, by_row: bool) -> Tensor:
        """Positions of the tile's documents on their side."""
        return document + self.span(not by_row)[0]

    def take_rows(self, start: int, stop: int) -> None:
        self.row_span = (start, stop)
        self.row_raw = self.rows.raw(slice(start, stop))
        self.row_unit = self.rows.unit(self.row_raw, slice(start, stop))

    def take_columns(self, start: int, stop: int, row: Array, column: Array) -> None:
        """Multiply. Relevant pairs, (row, column) within the tile, are taken out: -inf is below every threshold."""
        self.column_span = (start, stop)
        self.column_raw = self.columns.raw(slice(start, stop))
        device = self.row_raw.device
        self.relevant = torch.as_tensor(row, device=device), torch.as_tensor(column, device=device)
        self.cosine = self._room(0, (len(self.row_raw), stop - start))
        torch.mm(self.row_unit, self.columns.unit(self.column_raw, slice(start, stop)).T, out=self.cosine)
        self.cosine[self.relevant] = -torch.inf
        self.dots: Tensor | None = None

    def _room(self, i: int, shape: tuple[int, ...]) -> Tensor:
        return self.room[i][: int(np.prod(shape))].view(shape)

    def _across(self, x: Tensor, by_row: bool) -> Tensor:
        """x [documents] so that it multiplies a tile in which rows ask, or columns."""
        part = x[slice(*self.span(not by_row))]
        return part if by_row else part[:, None]

    def scores(self, ranked: Ranked) -> Tensor:
        if ranked.weight32 is None:
            return self.cosine
        weight = self._across(ranked.weight32, ranked.by_row)
        return torch.mul(self.cosine, weight, out=self._room(1, tuple(self.cosine.shape)))

    def exact_scores(self, ranked: Ranked) -> Tensor:
        """The same from a float64 product."""
        if self.dots is None:
            self.dots = self.row_raw.double() @ self.column_raw.double().T
            self.dots *= self.rows.inverse[slice(*self.row_span), None]
            self.dots *= self.columns.inverse[slice(*self.column_span)]
            self.dots[self.relevant] = -torch.inf
        found = self._room(1, tuple(self.cosine.shape))
        if ranked.weight is None:
            return found.copy_(self.dots)
        return found.copy_(self.dots * self._across(ranked.weight, ranked.by_row))

    def exact(self, ranked: Ranked, query: Tensor, document: Tensor) -> Tensor:
        """float32 scores [n] of single (query, document) places in the tile."""
        row, column = (query, document) if ranked.by_row else (document, query)
        found = exact_dots(self.row_raw, self.column_raw, row, column)
        found *= self.rows.inverse[row + self.row_span[0]] * self.columns.inverse[column + self.column_span[0]]
        if ranked.weight is not None:
            found *= ranked.weight[self.place(document, ranked.by_row)]
        return found.float()

    def count(self, scores: Tensor, bound: Tensor, pairs: list[slice], by_row: bool) -> Tensor:
        """How many documents score at least ``bound`` [P], for the pairs, a slot after the other."""
        found = []
        for at in pairs:
            n = at.stop - at.start
            part = scores[:n] if by_row else scores[:, :n]
            flags = self._room(2, tuple(part.shape))  # float flags: compared and summed faster than bool ones
            torch.ge(part, bound[at, None] if by_row else bound[at], out=flags)
            found.append(flags.sum(1 if by_row else 0))
        return torch.cat(found).long()


def tile_size(n_rows: int, n_columns: int, dim: int, block_bytes: int) -> tuple[int, int]:
    """Rows and columns of a tile that needs about ``block_bytes``, at least 1 x 1, as square as the sides allow."""
    a, b = _BYTES_PER_SCORE, _BYTES_PER_VALUE * dim
    side = max(1, int((sqrt(b * b + a * block_bytes) - b) / a))
    rows, columns = min(side, n_rows), min(side, n_columns)
    wide = max(1, int((block_bytes - b * min(rows, columns)) / (a * min(rows, columns) + b)))
    return (rows, min(n_columns, max(columns, wide))) if rows < side else (min(n_rows, max(rows, wide)), columns)


def count_tiles(
    rows: Side,
    columns: Side,
    relevant: Slots,
    rankings: list[Ranked],
    block_bytes: int,
    progress: Progress | None = None,
) -> None:
    """Fill the counts and lists of ``rankings``. ``relevant``: the pairs, in the direction in which rows ask."""
    height, width = tile_size(len(rows), len(columns), rows.x.shape[1], block_bytes)
    tile = Tile(rows, columns, height * width)
    row, column = (x.cpu().numpy() for x in (relevant.query, relevant.document))
    order = np.lexsort((column, row // height))
    row, column = row[order], column[order]
    for i in range(0, len(rows), height):
        stop = min(i + height, len(rows))
        tile.take_rows(i, stop)
        first, last = np.searchsorted(row // height, [i // height, i // height + 1])
        for j in range(0, len(columns), width):
            end = min(j + width, len(columns))
            here = slice(*(first + np.searchsorted(column[first:last], [j, end])))
            tile.take_columns(j, end, row[here] - i, column[here] - j)
            for ranked in rankings:
                ranked.count(tile)
            if progress is not None:
                progress(i * len(columns) + (stop - i) * end, len(rows) * len(columns))
