"""How many documents score at least as much as each relevant one, tile by tile and exactly.

A score is the float64 one rounded once to float32 (:mod:`mmclip.retrieval.sides`): it knows nothing of tiles. A tile's scores are
products of lower precision, and no score is farther from the exact one than E (:func:`mmclip.retrieval.tiles.tile_error`). So a
score outside threshold ± E is decided by the tile, and only those inside are computed again, in float64, each by
itself. Where they are many (a collapsed model: all scores are alike) the whole tile is computed again in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mmclip.retrieval.qrels import Slots
from mmclip.retrieval.sides import Scoring, Side
from mmclip.retrieval.tiles import Search, Tile, tile_size
from mmclip.retrieval.top_lists import TopList

_CROWDED = 64  # a tile with more than one undecided score in so many is computed again as a whole
_LISTED = 256  # a tile with more than one score in so many that may matter is counted, not searched
_AT_ONCE = 2**18  # comparisons of single documents made together

Progress = Callable[[int, int], None]


class Ranked:
    """One ranking of one direction: what is compared with, and what has been counted. P pairs in the slots' order.

    threshold [P] float32: scores of the relevant documents. at_least, above [P] int64: how many *irrelevant* documents
    score at least, and more than, so much. ``cosine`` [P]: the pairs' exact cosines; ``error``: E.
    """

    def __init__(self, slots: Slots, scoring: Scoring, cosine: Tensor, error: float, top: TopList | None) -> None:
        self.slots, self.scoring, self.error, self.top = slots, scoring, error, top
        self.threshold = scoring.weighted(cosine, slots.document).float()
        self.low, self.high = self.threshold - error, self.threshold + error
        self.at_least, self.above = (torch.zeros(len(cosine), dtype=torch.int64, device=cosine.device) for _ in "ab")

    def least_cosine(self) -> Tensor:
        """[P] float64: below this cosine no document reaches the threshold, whatever its weight."""
        least = self.threshold.double()
        if self.scoring.weight is not None:
            least = torch.where(least > 0, least / self.scoring.weight.max(), least / self.scoring.weight.min())
        return least

    def count(self, tile: Tile, by_row: bool) -> None:
        """Compare all of a tile with all thresholds of its queries."""
        start = tile.span(by_row)[0]
        scores = tile.scores(self.scoring, by_row)
        pairs = self.slots.inside(*tile.span(by_row))
        low = [tile.count(scores, self.low[at], by_row) for at in pairs]
        high = [tile.count(scores, self.high[at], by_row) for at in pairs]
        if int((torch.cat(low) - torch.cat(high)).sum()) * _CROWDED > scores.numel():
            scores = tile.exact_scores(self.scoring, by_row)
            for at in pairs:
                bound = self.threshold[at]
                self.at_least[at] += tile.count(scores, bound, by_row)
                self.above[at] += tile.count(scores, bound.nextafter(torch.full_like(bound, torch.inf)), by_row)
            return
        for at, many, decided in zip(pairs, low, high, strict=True):
            self.at_least[at] += decided
            self.above[at] += decided
            query = (many - decided).nonzero().squeeze(1)
            part = scores[query] if by_row else scores[:, query].T
            inside = (part >= self.low[at][query, None]) & (part < self.high[at][query, None])
            which, document = inside.nonzero(as_tuple=True)
            place = document + tile.span(not by_row)[0]
            score = part[which, document].double()
            self.settle(query[which] + at.start, query[which] + start, place, score, self.error)

    def settle(self, pair: Tensor, query: Tensor, document: Tensor, score: Tensor, error: float) -> None:
        """Count single documents [n] against single pairs.

        By their ``score``, which is off by at most ``error`` times a weight, where that decides, else exactly.
        """
        distance = score - self.threshold[pair]
        off = error if self.scoring.weight is None else error * self.scoring.weight[document]
        ahead, near = pair[distance > off], distance.abs() <= off
        pair = pair[near]
        value = self.scoring.exact(query[near], document[near])
        for counter, hit in (
            (self.at_least, value >= self.threshold[pair]),
            (self.above, value > self.threshold[pair]),
        ):
            both = torch.cat([ahead, pair[hit]])
            counter.index_add_(0, both, torch.ones_like(both))


class Asked:
    """One direction: its queries, and all of their rankings.

    Most documents stand behind every relevant one in every ranking. The least cosine that matters to a query finds
    those which may not, and where they are few, only they are looked at. ``error``: of the tiles' rough products.
    """

    def __init__(self, slots: Slots, by_row: bool, n_queries: int, rankings: list[Ranked], error: float) -> None:
        self.slots, self.by_row, self.rankings, self.error = slots, by_row, rankings, error
        least = torch.stack([r.least_cosine() for r in rankings]).amin(dim=0) - error
        # Queries without a relevant document look for none. Never below -2: -inf marks relevant documents in tiles.
        self.floor = least.new_full((n_queries,), torch.inf)
        self.floor.scatter_reduce_(0, slots.query, least, "amin")
        self.floor = self.floor.clamp_min(-2).float()
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def count(self, tile: Tile) -> None:
        """Count a tile's documents for its queries, and offer them to the lists of the best."""
        by_row = self.by_row
        query_span, document_span = tile.span(by_row), tile.span(not by_row)
        if query_span[0] >= self.slots.sizes[0]:
            return
        for ranked in self.rankings:
            if ranked.top is not None:
                scores = tile.scores(ranked.scoring, by_row)
                search = tile.search if scores is tile.rough else Search(scores)
                ranked.top.take(search, by_row, query_span, document_span[0])
        floor = self.floor[slice(*query_span)]
        found = tile.search.reaching(floor, by_row)
        if found is None or len(found[0]) * _LISTED > tile.rough.numel():
            for ranked in self.rankings:
                ranked.count(tile, by_row)
            return
        query, document, score = found
        self._waiting.append((query + query_span[0], document + document_span[0], score))
        if sum(len(x[0]) for x in self._waiting) * len(self.slots.sizes) > _AT_ONCE:
            self.finish()

    def finish(self) -> None:
        """Count the documents that were set aside."""
        if not self._waiting:
            return
        found = [torch.cat(x) for x in zip(*self._waiting, strict=True)]
        self._waiting = []
        step = max(1, _AT_ONCE // len(self.slots.sizes))
        for query, document, cosine in zip(*(x.split(step) for x in found), strict=True):
            number, pair = self.slots.pairs_of(query)
            for ranked in self.rankings:
                score = ranked.scoring.weighted(cosine.double(), document)
                ranked.settle(pair, query[number], document[number], score[number], self.error)


def count_tiles(
    rows: Side,
    columns: Side,
    directions: list[Asked],
    block_bytes: int,
    half: bool,
    progress: Progress | None = None,
) -> None:
    """Fill the counts and lists of ``directions``, of which the first has the rows as queries.

    half: whether tiles may be searched in bfloat16, which lists of the best cannot be.
    """
    height, width = tile_size(len(rows), len(columns), rows.x.shape[1], block_bytes)
    tile = Tile(rows, columns, height, width, half)
    relevant = directions[0].slots
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
            for asked in directions:
                asked.count(tile)
            if progress is not None:
                progress(i * len(columns) + (stop - i) * end, len(rows) * len(columns))
    for asked in directions:
        asked.finish()
