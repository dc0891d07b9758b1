"""The k best documents of every query, collected while tiles pass (:mod:`mmclip.retrieval.rank_blocks`) and put in exact order.

A tile's scores are off by at most E, so a few more than k are kept: whatever was not kept is surely worse than the
k-th, unless the last one kept is within 2E of it. Such a query is crowded, and its whole row is computed in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmclip.retrieval.qrels import Slots
from mmclip.retrieval.sides import Scoring
from mmclip.retrieval.tiles import Search

_SPARE = 8  # kept beyond k
_BYTES_PER_SCORE = 64  # a crowded query's row: float64 twice, float32, the keys that order it and their making

Array = NDArray[Any]


class TopList:
    """The best *irrelevant* documents: values and positions [Q, kept], in the tiles' approximate order.

    ``error`` is E; k is clamped to the number of documents.
    """

    def __init__(self, k: int, slots: Slots, scoring: Scoring, error: float) -> None:
        self.k, self.slots, self.scoring, self.error = min(k, len(scoring.answering)), slots, scoring, error
        shape = (slots.sizes[0], min(k + _SPARE, len(scoring.answering)))
        self.values = torch.full(shape, -torch.inf, device=slots.query.device)
        self.places = torch.zeros(shape, dtype=torch.int64, device=slots.query.device)

    def take(self, search: Search, by_row: bool, queries: tuple[int, int], document: int) -> None:
        """A tile's scores of the queries at positions ``queries``, of the documents from ``document`` on.

        What is below the last of the values kept so far is not among the best.
        """
        kept = self.values.shape[1]
        at = slice(queries[0], min(queries[1], len(self.values)))
        n = at.stop - at.start
        floor = self.values.new_full((queries[1] - queries[0],), torch.inf)
        floor[:n] = self.values[at, -1]
        found = search.reaching(floor, by_row)
        if found is None:  # the first tile, or scores that are alike
            scores = search.scores[:n] if by_row else search.scores[:, :n].T.contiguous()
            values, places = scores.topk(min(kept, scores.shape[1]), dim=1)
        else:
            values, places = _as_rows(*found, n)
        values = torch.cat([self.values[at], values], dim=1)
        places = torch.cat([self.places[at], places + document], dim=1)
        self.values[at], best = values.topk(kept, dim=1)
        self.places[at] = places.gather(1, best)

    def rows(self, block_bytes: int) -> Tensor:
        """Document rows [Q, k]: best float32 score first, then the smaller row."""
        rows, crowded = self._kept(), self._crowded()
        if len(crowded):
            rows[crowded] = self._whole(crowded, block_bytes)
        return rows

    def _kept(self) -> Tensor:
        """Document rows [Q, k] by what was kept: exact scores where neighbours are closer than 2E."""
        near = self.values[:, :-1] - self.values[:, 1:] <= 2 * self.error
        edge = torch.zeros(len(near), 1, dtype=torch.bool, device=near.device)
        query, column = (torch.cat([near, edge], 1) | torch.cat([edge, near], 1)).nonzero(as_tuple=True)
        values = self.values.clone()
        values[query, column] = self.scoring.exact(query, self.places[query, column])
        rows, at = self.scoring.answering.order[self.places].sort(dim=1)
        order = values.gather(1, at).sort(dim=1, descending=True, stable=True).indices
        return rows.gather(1, order)[:, : self.k]

    def _crowded(self) -> Tensor:
        """Positions of the queries whose best k may not all have been kept."""
        if self.values.shape[1] == len(self.scoring.answering):
            return torch.empty(0, dtype=torch.int64, device=self.values.device)
        return (self.values[:, self.k - 1] - self.values[:, -1] <= 2 * self.error).nonzero().squeeze(1)

    def _whole(self, query: Tensor, block_bytes: int) -> Tensor:
        """Document rows [q, k] of queries [q] from all of their scores."""
        answering, found = self.scoring.answering, []
        step = max(1, block_bytes // (32 * answering.x.shape[1]))
        for part in query.split(max(1, block_bytes // (_BYTES_PER_SCORE * len(answering)))):
            spans = [slice(j, j + step) for j in range(0, len(answering), step)]
            scores = torch.cat([self.scoring.exact_block(part, at) for at in spans], dim=1)
            place = torch.full((len(self.scoring.asking),), -1, device=part.device)
            place[part] = torch.arange(len(part), device=part.device)
            pair = (place[self.slots.query] >= 0).nonzero().squeeze(1)
            scores[place[self.slots.query[pair]], self.slots.document[pair]] = -torch.inf
            found.append(answering.order[_order_keys(scores, answering.order).topk(self.k, dim=1).indices])
        return torch.cat(found)


def insert_relevant(rows: Array, queries: Array, documents: Array, ranks: Array) -> tuple[Array, Array]:
    """(ids, relevant) [Q, k]: irrelevant rows [Q, k] in order, with relevant documents [P] put where they rank.

    queries [P] are rows of ``rows``; only ranks up to k have a place.

    >>> insert_relevant(np.array([[7, 8, 9]]), np.array([0, 0]), np.array([4, 5]), np.array([2, 6]))
    (array([[7, 4, 8]]), array([[False,  True, False]]))
    """
    relevant = np.zeros(rows.shape, dtype=bool)
    inside = ranks <= rows.shape[1]
    at = (queries[inside], ranks[inside] - 1)
    relevant[at] = True
    ids = np.take_along_axis(rows, np.maximum(np.cumsum(~relevant, axis=1) - 1, 0), axis=1)
    ids[at] = documents[inside]
    return ids, relevant


def _as_rows(query: Tensor, document: Tensor, value: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """(values, documents) [n, c] of a list; -inf fills short rows."""
    query, order = query.sort()
    many = torch.bincount(query, minlength=n)
    column = torch.arange(len(query), device=query.device) - (many.cumsum(0) - many)[query]
    values = torch.full((n, int(many.max())), -torch.inf, device=value.device)
    documents = torch.zeros(values.shape, dtype=torch.int64, device=value.device)
    values[query, column], documents[query, column] = value[order], document[order]
    return values, documents


def _order_keys(scores: Tensor, row: Tensor) -> Tensor:
    """int64 keys, larger first: the float32 score in the high half, then the smaller row."""
    bits = (scores + 0.0).view(torch.int32)  # adding 0 turns -0.0 into 0.0, which is equal to it
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # negative floats order backwards as integers
    return (bits.long() << 32) + (2**31 - 1 - row)
