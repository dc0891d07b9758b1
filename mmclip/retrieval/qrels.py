"""Which documents are relevant to which query, and how relevant."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mmclip.errors import UserError

Array = NDArray[Any]


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
