"""A tile of the one product, and finding the few large scores in it.

    C = unit rows @ unit columns.T

serves every scoring of both directions (docs/math.md, "One Gram matrix"): where rows ask, document j's scores are
C * w_j; where columns ask, document i's are C * w_i (:mod:`mmclip.retrieval.sides`). Tiles of scores come in two orientations
therefore, ``by_row`` with a query a row, else with a query a column.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import inf, sqrt
from time import process_time
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from mmclip.retrieval.sides import Scoring, Side

_BYTES_PER_SCORE = 32  # tile, its scaled copy, flags, and the same from float64
_BYTES_PER_VALUE = 24  # of a tile's rows and columns: raw, in float64, and unit length
_LINE = 16  # float32 numbers in a cache line
_GROUP = 16  # rows looked at together when large scores are looked for
_OFTEN = 4  # a search in which more than one group in so many has a large score is given up

Array = NDArray[Any]


def tile_error(dim: int) -> float:
    """E: how far a tile's score may be from the exact one, for vectors of ``dim`` numbers and weights up to 1.

    dim roundings, in whatever order the product is summed; 16 covers unit rows, weights and thresholds being rounded.
    """
    return (dim + 16) * 2.0**-24


def rough_error(dim: int) -> float:
    """:func:`tile_error` of a bfloat16 product: both factors and the result are rounded to 8 bits, sums are float32."""
    return 2.0**-8 + 1.02 * 2.0**-9 + (dim + 16) * 2.0**-23


@cache
def bfloat16_pays(dim: int, threads: int) -> bool:
    """Whether this CPU multiplies bfloat16 in hardware, hence much faster than float32: it is tried out."""

    def seconds(x: Tensor) -> float:
        best = inf
        for _ in range(4):
            start = process_time()
            torch.mm(x, x.T)
            best = min(best, process_time() - start)
        return best

    x = torch.ones(512, dim)
    return 1.4 * seconds(x.bfloat16()) < seconds(x)


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


def tile_size(n_rows: int, n_columns: int, dim: int, block_bytes: int) -> tuple[int, int]:
    """Rows and columns of a tile that needs about ``block_bytes``, at least 1 x 1, as square as the sides allow.

    >>> tile_size(5_000, 25_000, 512, 64 * 2**20), tile_size(10, 25_000, 512, 64 * 2**20)
    ((1114, 1114), (10, 5312))
    """
    a, b = _BYTES_PER_SCORE, _BYTES_PER_VALUE * dim
    side = max(1, int((sqrt(b * b + a * block_bytes) - b) / a))
    rows, columns = min(side, n_rows), min(side, n_columns)
    wide = max(1, int((block_bytes - b * min(rows, columns)) / (a * min(rows, columns) + b)))
    wide = min(wide, 2**24)  # float32 counts no further
    return (rows, min(n_columns, max(columns, wide))) if rows < side else (min(n_rows, max(rows, wide)), columns)


class Tile:
    """The product of a run of rows with a run of columns, and room for what is made of it.

    ``rough`` is what is searched first: the bfloat16 product where ``half`` allows it, else ``cosine``, the float32
    product, which is made when it is asked for. Where most tiles of the same rows need it, the rough one is left out.
    """

    def __init__(self, rows: Side, columns: Side, height: int, width: int, half: bool) -> None:
        self.rows, self.columns = rows, columns
        # Rows lie an odd number of cache lines apart: other distances slow the product and the sums, by up to half.
        stride = _LINE * (-(-width // _LINE) | 1)
        self._room = [torch.empty(height, stride, device=rows.x.device) for _ in range(3)]
        self._rough_room = torch.empty(height, stride, dtype=torch.bfloat16) if half else None
        self._row_span = self._column_span = (0, 0)

    def span(self, by_row: bool) -> tuple[int, int]:
        """First and last + 1 position of the tile's queries; of its documents for ``not by_row``."""
        return self._row_span if by_row else self._column_span

    def take_rows(self, start: int, stop: int) -> None:
        self._row_span = (start, stop)
        self._n_rough = self._n_in_vain = 0
        self._rows = self.rows.unit(slice(start, stop))

    def take_columns(self, start: int, stop: int, row: Array, column: Array) -> None:
        """Multiply. Relevant pairs, (row, column) within the tile, are taken out: -inf is below every threshold."""
        self._column_span = (start, stop)
        self._relevant = tuple(torch.as_tensor(x, device=self._rows.device) for x in (row, column))
        self._columns = self.columns.unit(slice(start, stop))
        self._cosine: Tensor | None = None
        self._search: Search | None = None
        if self._rough_room is None or 2 * self._n_in_vain > self._n_rough + 4:
            self.rough = self.cosine
        else:
            self._n_rough += 1
            self.rough = self._multiply(self._rows.bfloat16(), self._columns.bfloat16(), self._rough_room)

    @property
    def cosine(self) -> Tensor:
        if self._cosine is None:
            self._n_in_vain += 1
            self._cosine = self._multiply(self._rows, self._columns, self._room[0])
        return self._cosine

    @property
    def search(self) -> Search:
        """For large rough cosines."""
        if self._search is None:
            self._search = Search(self.rough)
        return self._search

    def _multiply(self, rows: Tensor, columns: Tensor, room: Tensor) -> Tensor:
        out = room[: len(rows), : len(columns)]
        torch.mm(rows, columns.T, out=out)
        out[self._relevant] = -torch.inf
        return out

    def scores(self, scoring: Scoring, by_row: bool) -> Tensor:
        """The tile's scores, each within :func:`tile_error` times its document's weight; valid until asked again."""
        if scoring.weight32 is None:
            return self.cosine
        weight = scoring.weight32[slice(*self.span(not by_row))]
        out = self._room[1][: len(self._rows), : len(self._columns)]
        return torch.mul(self.cosine, weight if by_row else weight[:, None], out=out)

    def exact_scores(self, scoring: Scoring, by_row: bool) -> Tensor:
        """The same, exactly."""
        found = scoring.exact_block(slice(*self.span(by_row)), slice(*self.span(not by_row)))
        found = found if by_row else found.T
        found[self._relevant] = -torch.inf
        return found

    def count(self, scores: Tensor, bound: Tensor, by_row: bool) -> Tensor:
        """How many documents score at least ``bound`` [q], for the first q queries: [q]."""
        part = scores[: len(bound)] if by_row else scores[:, : len(bound)]
        flags = self._room[2][: len(part), : part.shape[1]]  # float: compared and summed faster than bool
        torch.ge(part, bound[:, None] if by_row else bound, out=flags)
        return flags.sum(1 if by_row else 0).long()


class Search:
    """Finds the few large ones among a tile's ``scores`` [h, w]: by the largest of each ``_GROUP`` rows, a column each.

    Looking at those takes a tenth of the time of looking at every score.
    """

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores
        whole = len(scores) // _GROUP
        scores = scores.float()  # bfloat16 is slow here
        self.peaks = scores.new_empty(-(-len(scores) // _GROUP), scores.shape[1])
        torch.amax(scores[: whole * _GROUP].unflatten(0, (whole, _GROUP)), 1, out=self.peaks[:whole])
        if whole < len(self.peaks):
            self.peaks[-1] = scores[whole * _GROUP :].amax(0)

    def reaching(self, floor: Tensor, by_row: bool) -> tuple[Tensor, Tensor, Tensor] | None:
        """(query, document, score) of every score of at least its query's ``floor`` [h], or [w] where columns ask.

        None where they are not few: other ways are faster then.
        """
        bound = floor
        if by_row:
            padded = torch.nn.functional.pad(floor, (0, -len(floor) % _GROUP), value=torch.inf)
            bound = padded.view(-1, _GROUP).amin(1)[:, None]
        hit = self.peaks >= bound
        if int(hit.sum()) * _OFTEN > hit.numel():
            return None
        group, column = hit.nonzero(as_tuple=True)
        row = _GROUP * group[:, None] + torch.arange(_GROUP, device=group.device)
        inside = row < len(self.scores)
        row = row.clamp(max=len(self.scores) - 1)
        score = self.scores[row, column[:, None]]
        found = inside & (score >= (floor[row] if by_row else floor[column, None]))
        which, member = found.nonzero(as_tuple=True)
        row, column, score = row[which, member], column[which], score[which, member]
        return (row, column, score) if by_row else (column, row, score)
