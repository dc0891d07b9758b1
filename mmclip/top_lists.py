"""The k best documents of every query, collected while tiles pass (:mod:`mmclip.rank_blocks`) and put in exact order.

A tile's scores are off by at most E, so a few more than k are kept: whatever was not kept is surely worse than the
k-th, unless the last one kept is within 2E of it. Such a query is crowded, and its whole row is computed in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmclip.relevance import Slots
from mmclip.sides import Side, exact_dots

_SPARE = 8  # kept beyond k
_GROUP = 16  # documents looked at together
_BYTES_PER_SCORE = 64  # a crowded query's row: float64 twice, float32, the keys that order it and their making

Array = NDArray[Any]


class TopList:
    """The best *irrelevant* documents: values and positions [Q, kept], in the tiles' approximate order.

    ``error`` is E; ``weight`` as in :class:`mmclip.rank_blocks.Ranked`; k is at most the number of documents.
    """

    def __init__(
        self, k: int, asking: Side, answering: Side, slots: Slots, weight: Tensor | None, error: float
    ) -> None:
        self.k, self.asking, self.answering, self.slots = k, asking, answering, slots
        self.weight, self.error = weight, error
        shape = (slots.sizes[0], min(k + _SPARE, len(answering)))
        self.values = torch.full(shape, -torch.inf, device=asking.x.device)
        self.places = torch.zeros(shape, dtype=torch.int64, device=asking.x.device)

    def take(self, scores: Tensor, by_row: bool, query: int, document: int) -> None:
        """A tile's scores of the queries from position ``query`` on, of the documents from ``document`` on.

        ``scores`` has a query a row, or (``by_row`` False) a query a column.
        """
        values, places = self._candidates(scores, by_row, query)
        at = slice(query, query + len(values))
        values = torch.cat([self.values[at], values], dim=1)
        places = torch.cat([self.places[at], places + document], dim=1)
        self.values[at], best = values.topk(self.values.shape[1], dim=1)
        self.places[at] = places.gather(1, best)

    def _candidates(self, scores: Tensor, by_row: bool, query: int) -> tuple[Tensor, Tensor]:
        """(values, documents) [q, c] of at least what a tile adds to the best; -inf fills short rows.

        topk is slow, so the documents are put in groups: what is below the least of the best groups' maxima, or of the
        values kept so far, is not among the best.
        """
        axis, kept = int(by_row), self.values.shape[1]
        n = scores.shape[axis]
        width = -(-n // _GROUP)  # groups; group g holds documents g, g + width, g + 2 width...
        if width < 2 * kept:
            return _topk(scores, min(kept, n), by_row)
        top = scores.narrow(axis, 0, width).clone()
        for start in range(width, n, width):
            part = scores.narrow(axis, start, min(width, n - start))
            of_part = top.narrow(axis, 0, part.shape[axis])
            torch.maximum(of_part, part, out=of_part)
        top = top if by_row else top.T.contiguous()
        floor = torch.maximum(top.topk(kept, dim=1).values[:, -1], self.values[query : query + len(top), -1])
        asked, group = (top >= floor[:, None]).nonzero(as_tuple=True)
        if 2 * len(group) > top.numel():  # scores are alike
            return _topk(scores, kept, by_row)
        members = group[:, None] + width * torch.arange(_GROUP, device=group.device)
        at = members.clamp(max=n - 1)
        value = scores[asked[:, None], at] if by_row else scores[at, asked[:, None]]
        which, number = ((value >= floor[asked, None]) & (members < n)).nonzero(as_tuple=True)
        asked = asked[which]
        many = torch.bincount(asked, minlength=len(top))
        column = torch.arange(len(asked), device=asked.device) - (many.cumsum(0) - many)[asked]
        values = torch.full((len(top), int(many.max())), -torch.inf, device=value.device)
        places = torch.zeros(values.shape, dtype=torch.int64, device=value.device)
        values[asked, column], places[asked, column] = value[which, number], members[which, number]
        return values, places

    def rows(self, block_bytes: int) -> Tensor:
        """Document rows [Q, k]: best float32 score first, then the smaller row."""
        rows, crowded = self._kept(), self._crowded()
        if len(crowded):
            rows[crowded] = self._whole(crowded, block_bytes)
        return rows

    def _kept(self) -> Tensor:
        near = self.values[:, :-1] - self.values[:, 1:] <= 2 * self.error
        edge = torch.zeros(len(near), 1, dtype=torch.bool, device=near.device)
        query, column = (torch.cat([near, edge], 1) | torch.cat([edge, near], 1)).nonzero(as_tuple=True)
        values = self.values.clone()
        values[query, column] = self._exact(query, self.places[query, column])
        rows, at = self.answering.order[self.places].sort(dim=1)
        order = values.gather(1, at).sort(dim=1, descending=True, stable=True).indices
        return rows.gather(1, order)[:, : self.k]

    def _crowded(self) -> Tensor:
        """Positions of the queries whose best k may not all be here."""
        if self.values.shape[1] == len(self.answering):
            return torch.empty(0, dtype=torch.int64, device=self.values.device)
        return (self.values[:, self.k - 1] - self.values[:, -1] <= 2 * self.error).nonzero().squeeze(1)

    def _whole(self, query: Tensor, block_bytes: int) -> Tensor:
        """Document rows [q, k] of queries [q] from all of their scores."""
        found = []
        for part in query.split(max(1, block_bytes // (_BYTES_PER_SCORE * len(self.answering)))):
            asked = self.asking.raw(part).double()
            step = max(1, block_bytes // (8 * asked.shape[1] * 4))
            spans = [slice(j, j + step) for j in range(0, len(self.answering), step)]
            dots = torch.cat([asked @ self.answering.raw(at).double().T for at in spans], dim=1)
            scores = self._scaled(dots, part[:, None], slice(None)).float()
            place = torch.full((len(self.asking),), -1, device=part.device)
            place[part] = torch.arange(len(part), device=part.device)
            pair = (place[self.slots.query] >= 0).nonzero().squeeze(1)
            scores[place[self.slots.query[pair]], self.slots.document[pair]] = -torch.inf
            at = _order_keys(scores, self.answering.order).topk(self.k, dim=1).indices
            found.append(self.answering.order[at])
        return torch.cat(found)

    def _exact(self, query: Tensor, document: Tensor) -> Tensor:
        i, j = self.asking.order[query], self.answering.order[document]
        return self._scaled(exact_dots(self.asking.x, self.answering.x, i, j), query, document).float()

    def _scaled(self, dots: Tensor, query: Tensor, document: Tensor | slice) -> Tensor:
        dots *= self.asking.inverse[query] * self.answering.inverse[document]
        return dots if self.weight is None else dots * self.weight[document]


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


def _topk(scores: Tensor, k: int, by_row: bool) -> tuple[Tensor, Tensor]:
    values, places = (scores if by_row else scores.T.contiguous()).topk(k, dim=1)
    return values, places


def _order_keys(scores: Tensor, row: Tensor) -> Tensor:
    """int64 keys, larger first: the float32 score in the high half, then the smaller row."""
    bits = (scores + 0.0).view(torch.int32)  # adding 0 turns -0.0 into 0.0, which is equal to it
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # negative floats order backwards as integers
    return (bits.long() << 32) + (2**31 - 1 - row)
