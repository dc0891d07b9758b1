"""Which documents are relevant to which query, and by how much: pairs checked, grouped, and laid out for counting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mmclip.errors import UserError
from mmclip.retrieval.sides import Side

Array = NDArray[Any]


def group_pairs(pairs: Tensor | Array, n_queries: int, n_documents: int) -> tuple[Array, Array, Array]:
    """(queries [Q], offsets [Q + 1], documents [P]) of pairs [P, 2] of (query row, document row); repeats count once.

    Errors: UserError for a pair outside the rows, or no pair at all.

    >>> group_pairs(np.array([[3, 1], [0, 2], [3, 0], [3, 1]]), 4, 3)
    (array([0, 3]), array([0, 1, 3]), array([2, 0, 1]))
    """
    pairs = np.asarray(pairs, dtype=np.int64)
    if pairs.ndim != 2 or pairs.shape[1:] != (2,) or len(pairs) == 0:
        raise UserError(
            f"relevance pairs of shape {list(pairs.shape)}: at least one (query row, document row) pair is needed, "
            "as an array of shape [P, 2]"
        )
    for column, (name, n) in enumerate((("query", n_queries), ("document", n_documents))):
        outside = (pairs[:, column] < 0) | (pairs[:, column] >= n)
        if outside.any():
            at = int(outside.argmax())
            raise UserError(
                f"relevance pair {at} names {name} row {int(pairs[at, column])}; valid rows are 0 to {n - 1}"
            )
    code = np.unique(pairs[:, 0] * n_documents + pairs[:, 1])
    query, documents = np.divmod(code, n_documents)
    queries, starts = np.unique(query, return_index=True)
    return queries, np.append(starts, len(code)), documents


class Qrels:
    """Graded relevance: P (query row, document row) pairs with gains; a document without a pair is irrelevant.

    Attributes:
        pairs: [P, 2] int64, (query row, document row), each once, sorted by query, then document.
        gains: [P] float64 above 0; how relevant the document is.
        queries: [Q] rows of the queries with a relevant document, ascending.
        offsets: [Q + 1]; query i's pairs are offsets[i] : offsets[i + 1].

    >>> qrels = Qrels([[3, 1], [0, 2], [3, 0], [3, 1]], gains=[1, 1, 1, 2])  # of a repeated pair the largest gain
    >>> qrels.queries.tolist(), qrels.offsets.tolist(), qrels.documents.tolist(), qrels.gains.tolist()
    ([0, 3], [0, 1, 3], [2, 0, 1], [1.0, 1.0, 2.0])
    """

    def __init__(self, pairs: ArrayLike | Tensor, gains: ArrayLike | None = None) -> None:
        """Sort pairs [P, 2], keep each once with its largest gain.

        Args:
            pairs: (query row, document row), at least one.
            gains: [P], finite and above 0; 1 by default.

        Raises:
            UserError: pairs or gains of another form, or a negative row.
        """
        given = np.asarray(pairs)
        if given.ndim != 2 or given.shape[1:] != (2,) or len(given) == 0:
            raise UserError(
                f"relevance pairs of shape {list(given.shape)}: at least one (query row, document row) pair is needed, "
                "as an array of shape [P, 2]"
            )
        given = given.astype(np.int64)
        g = np.ones(len(given)) if gains is None else np.asarray(gains, dtype=np.float64)
        if g.shape != (len(given),) or not (np.isfinite(g) & (g > 0)).all():
            raise UserError(
                f"gains of shape {list(g.shape)} for {len(given)} relevance pairs: one finite number above 0 for each "
                "is needed; leave out irrelevant pairs"
            )
        order = np.lexsort((-g, given[:, 1], given[:, 0]))
        given, g = given[order], g[order]
        first = np.append(True, (np.diff(given, axis=0) != 0).any(axis=1))
        self.pairs, self.gains = given[first], g[first]
        self.queries, starts = np.unique(self.pairs[:, 0], return_index=True)
        self.offsets = np.append(starts, len(self.pairs))

    def __len__(self) -> int:
        """P."""
        return len(self.pairs)

    @property
    def documents(self) -> Array:
        """[P]: the document row of each pair."""
        return self.pairs[:, 1]

    @cached_property
    def numbers(self) -> Array:
        """[P]: which of the Q queries each pair belongs to."""
        return np.repeat(np.arange(len(self.queries)), np.diff(self.offsets))

    def transposed(self) -> Qrels:
        """The opposite direction's: documents rank queries."""
        return Qrels(self.pairs[:, ::-1], self.gains)

    def check(self, n_queries: int, n_documents: int) -> None:
        """Raise UserError for a row that does not exist."""
        for column, (side, n) in enumerate((("query", n_queries), ("document", n_documents))):
            rows = self.pairs[:, column]
            outside = rows[(rows < 0) | (rows >= n)]
            if len(outside):
                raise UserError(f"a relevance pair names {side} row {outside[0]}; valid rows are 0 to {n - 1}")


class Slots:
    """Pairs of (query, relevant document), the queries with most documents first, and slot by slot:

    the first document of every query, then the second of those which have two, and so on. In any run of queries,
    the pairs of one slot are then neighbours, and those of the queries which have the slot come first.

    query, document [P]    positions on their sides, slot by slot
    sizes, base [R]        how many queries have slot s, and where its pairs begin
    """

    def __init__(self, query: Tensor, document: Tensor, sizes: Array) -> None:
        self.query, self.document = query, document
        self.sizes = [int(n) for n in sizes]
        self.base = [int(n) for n in np.cumsum(sizes) - sizes]
        self._base = torch.as_tensor(self.base, device=query.device)
        self._many = torch.bincount(query)

    def inside(self, start: int, stop: int) -> list[slice]:
        """The pairs of the queries start to stop - 1, a slice for each slot."""
        found = []
        for size, base in zip(self.sizes, self.base, strict=True):
            if size <= start:
                break
            found.append(slice(base + start, base + min(stop, size)))
        return found

    def pairs_of(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """(number, pair): every pair of every one of ``query`` [n], and which of the n it belongs to."""
        many = self._many[query]
        number = torch.repeat_interleave(torch.arange(len(query), device=query.device), many)
        slot = torch.arange(len(number), device=query.device) - (many.cumsum(0) - many)[number]
        return number, self._base[slot] + query[number]


@dataclass(frozen=True)
class Judged:
    """One direction's relevance. Q queries with a relevant document, P (query, relevant document) pairs by query.

    queries [Q], offsets [Q + 1], documents [P]: as :func:`group_pairs` has them; gains [P], above 0; priority [Q]: of
    queries with equally many documents, the smaller are taken first.
    """

    queries: Array
    offsets: Array
    documents: Array
    gains: Array
    n_documents: int
    priority: Array

    @classmethod
    def read(
        cls, pairs: Tensor | Array, gains: Array | Sequence[float] | None, n_queries: int, n_documents: int
    ) -> Judged:
        """pairs [P, 2] of (query row, document row), gains [P] or None for 1; of repeated pairs the largest gain.

        Errors: UserError as :func:`group_pairs`, and for gains that are not above 0.
        """
        pairs = np.asarray(pairs)
        queries, offsets, documents = group_pairs(pairs, n_queries, n_documents)
        given = np.ones(len(pairs)) if gains is None else np.asarray(gains, dtype=np.float64)
        if given.shape != (len(pairs),) or not (np.isfinite(given) & (given > 0)).all():
            raise UserError(
                f"gains of shape {list(given.shape)} for {len(pairs)} relevance pairs: one finite number above 0 for "
                "each is needed; leave out what is irrelevant"
            )
        code = np.repeat(queries, np.diff(offsets)) * n_documents + documents
        kept = np.zeros(len(code))
        np.maximum.at(kept, np.searchsorted(code, pairs[:, 0] * n_documents + pairs[:, 1]), given)
        return cls(queries, offsets, documents, kept, n_documents, np.zeros(len(queries)))

    def with_excluded(self, excluded: Array, n_queries: int) -> tuple[Judged, Array]:
        """(these pairs and the ``excluded`` [X, 2] of their queries, which of them [P + X] are excluded).

        To count them as relevant documents is to know their places; :meth:`only` takes them out again.
        Errors: UserError for a row outside, or where an excluded document is relevant.
        """
        more = np.asarray(excluded, dtype=np.int64)
        group_pairs(more, n_queries, self.n_documents)  # rows that exist
        more = np.unique(more[np.isin(more[:, 0], self.queries)], axis=0)
        own = np.column_stack([self.pair_queries, self.documents])
        both = Judged.read(
            np.concatenate([own, more]), np.concatenate([self.gains, np.ones(len(more))]), n_queries, self.n_documents
        )
        if len(both.documents) < len(own) + len(more):
            code = own[:, 0] * self.n_documents + own[:, 1]
            query, document = more[np.isin(more[:, 0] * self.n_documents + more[:, 1], code)][0]
            raise UserError(f"document row {document} is relevant to query row {query} and excluded for it")
        code = both.pair_queries * self.n_documents + both.documents
        return both, np.isin(code, more[:, 0] * self.n_documents + more[:, 1])

    def only(self, kept: Array) -> Judged:
        """The pairs that are ``kept`` [P]; every query keeps one."""
        many = np.add.reduceat(kept.astype(np.int64), self.offsets[:-1])
        offsets = np.concatenate([[0], np.cumsum(many)])
        return replace(self, offsets=offsets, documents=self.documents[kept], gains=self.gains[kept])

    def turned(self, n_queries: int) -> Judged:
        """The other direction's: documents ask for the ``n_queries`` queries."""
        pairs = np.column_stack([self.documents, self.pair_queries])
        return Judged.read(pairs, self.gains, self.n_documents, n_queries)

    @cached_property
    def number(self) -> Array:
        """[P]: which of the Q queries each pair belongs to."""
        return np.repeat(np.arange(len(self.queries)), np.diff(self.offsets))

    @cached_property
    def pair_queries(self) -> Array:
        """[P]: the query's row of each pair."""
        return self.queries[self.number]

    @cached_property
    def most_first(self) -> Array:
        """[Q]: numbers of the queries, those with most relevant documents first."""
        return np.lexsort((self.priority, -np.diff(self.offsets)))

    @cached_property
    def by_slot(self) -> Array:
        """[P]: numbers of the pairs in the order of :meth:`slots`."""
        slot = np.arange(len(self.documents)) - self.offsets[:-1][self.number]
        return np.lexsort((np.argsort(self.most_first)[self.number], slot))

    def order(self, n: int) -> Array:
        """Rows of the queries, those with most relevant documents first, then the others among 0 to n - 1."""
        return np.concatenate([self.queries[self.most_first], np.setdiff1d(np.arange(n), self.queries)])

    def slots(self, asking: Side, answering: Side) -> Slots:
        """The pairs slot by slot, by positions on the two sides. ``asking`` has this direction's :meth:`order`."""
        device = answering.order.device
        query = np.argsort(self.most_first)[self.number[self.by_slot]]
        place = torch.empty(self.n_documents, dtype=torch.int64, device=device)
        place[answering.order] = torch.arange(len(answering), device=device)
        document = place[torch.as_tensor(self.documents[self.by_slot], device=device)]
        sizes = np.bincount(np.arange(len(query)) - self.offsets[:-1][self.number])
        return Slots(torch.as_tensor(query, device=device), document, sizes)
