"""Ranking metrics of single queries, from the ranks of their relevant documents. numpy only.

Queries are ragged: query i's relevant documents have the ranks ``ranks[offsets[i]:offsets[i + 1]]``, 1 is best. Names
follow ir_measures' definitions: CLIP papers' "R@k" with several captions an image is success@k here.

    success@k   1 if a relevant document is among the first k
    recall@k    the fraction of the relevant documents among the first k
    mrr@k       1 / rank of the first relevant document, 0 beyond k
    ndcg@k      gains over log2(1 + rank), divided by the best that k documents can reach; gains are 1 by default
    map         the mean, over the relevant documents, of the share of relevant ones down to their rank

k above the number of candidates means all of them (:func:`clamped` names such metrics).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RATES = ("success@1", "success@5", "success@10", "recall@5", "mrr@10", "ndcg@10", "map")
TEXT_RATES = (*RATES, "recall@100")  # of text retrieval

Array = NDArray[Any]


def success_at(k: int, ranks: Array, offsets: Array) -> Array:
    """[Q] of 0 and 1.

    >>> success_at(1, np.array([3, 1, 2]), np.array([0, 2, 3]))  # the first query's documents stand at 3 and 1
    array([1., 0.])
    """
    return (first_rank(ranks, offsets) <= k).astype(np.float64)


def recall_at(k: int, ranks: Array, offsets: Array) -> Array:
    """[Q] fractions.

    >>> recall_at(2, np.array([3, 1, 2]), np.array([0, 2, 3]))
    array([0.5, 1. ])
    """
    hits: Array = np.add.reduceat((np.asarray(ranks) <= k).astype(np.float64), offsets[:-1])
    return hits / np.diff(offsets)


def mrr_at(k: int, ranks: Array, offsets: Array) -> Array:
    """[Q] reciprocal ranks.

    >>> mrr_at(10, np.array([4, 2, 11]), np.array([0, 2, 3]))
    array([0.5, 0. ])
    """
    first = first_rank(ranks, offsets)
    return np.where(first <= k, 1.0 / first, 0.0)


def ndcg_at(k: int, ranks: Array, offsets: Array, gains: ArrayLike | None = None) -> Array:
    """[Q] normalized discounted gains; gains [P] of the documents, 1 by default, used as they are (as trec_eval does).

    >>> ndcg_at(10, np.array([1, 2, 3]), np.array([0, 2, 3]))  # perfect; and 1 / log2(4)
    array([1. , 0.5])
    >>> ndcg_at(1, np.array([1, 2]), np.array([0, 2]), gains=[1, 4])  # the better one stands second
    array([0.25])
    """
    g = np.ones(len(ranks)) if gains is None else np.asarray(gains, dtype=np.float64)
    order = np.lexsort((-g, _query_numbers(offsets)))

    def discounted(g: Array, r: Array) -> Array:
        total: Array = np.add.reduceat(np.where(r <= k, g / np.log2(1.0 + r), 0.0), offsets[:-1])
        return total

    return discounted(g, np.asarray(ranks)) / discounted(g[order], _places(offsets))


def average_precision(ranks: Array, offsets: Array) -> Array:
    """[Q] average precisions; their mean is map.

    >>> average_precision(np.array([4, 1, 2]), np.array([0, 2, 3]))  # (1/1 + 2/4) / 2; and 1/2
    array([0.75, 0.5 ])
    """
    ordered = np.asarray(ranks)[np.lexsort((ranks, _query_numbers(offsets)))]
    precision: Array = np.add.reduceat(_places(offsets) / ordered, offsets[:-1])
    return precision / np.diff(offsets)


def _query_numbers(offsets: Array) -> Array:
    """[P]: which query each rank belongs to."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def _places(offsets: Array) -> Array:
    """[P]: 1, 2, ... within each query."""
    places: Array = 1 + np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
    return places


def first_rank(ranks: Array, offsets: Array) -> Array:
    """[Q] int64: rank of each query's best relevant document."""
    return np.minimum.reduceat(np.asarray(ranks, dtype=np.int64), offsets[:-1])


def cutoff(rate: str) -> int | None:
    """k of a metric's name; None for map, which has none.

    Raises:
        ValueError: the name is unknown; the valid ones are listed.

    >>> cutoff("recall@20")
    20
    """
    kind, _, k = rate.partition("@")
    if rate == "map":
        return None
    if kind not in ("success", "recall", "mrr", "ndcg") or not k.isdecimal() or int(k) < 1:
        raise ValueError(f"no rate {rate!r}; valid are success@K, recall@K, mrr@K, ndcg@K with K from 1 on, and map")
    return int(k)


def clamped(n_candidates: int, rates: Iterable[str] = RATES) -> dict[str, int]:
    """The metrics whose k exceeds the number of candidates, with the k that they amount to.

    >>> clamped(4, ["success@1", "success@5", "map"])
    {'success@5': 4}
    """
    return {rate: n_candidates for rate in rates if (cutoff(rate) or 0) > n_candidates}


def per_query(
    ranks: ArrayLike, offsets: ArrayLike, gains: ArrayLike | None = None, rates: Iterable[str] = RATES
) -> dict[str, Array]:
    """Each of ``rates``, and ``first_rank``, of every query: name -> [Q].

    Args:
        ranks: [P] ranks of relevant documents, grouped by query.
        offsets: [Q + 1], rising from 0 to P.
        gains: [P] how relevant, for ndcg; 1 by default.

    Raises:
        ValueError: a query has no relevant document (leave it out), a rank is below 1, or a metric is unknown.
    """
    r, o = np.asarray(ranks), np.asarray(offsets)
    if len(o) < 2 or o[0] != 0 or o[-1] != len(r) or (np.diff(o) < 1).any():
        raise ValueError(f"offsets must rise from 0 to the number of ranks, {len(r)}: every query needs a rank")
    if r.min() < 1:
        raise ValueError(f"ranks start at 1; received {r.min()}")
    values = {}
    for rate in rates:
        k = cutoff(rate)
        if k is None:
            values[rate] = average_precision(r, o)
        elif rate.startswith("ndcg"):
            values[rate] = ndcg_at(k, r, o, gains)
        else:
            measure = {"success": success_at, "recall": recall_at, "mrr": mrr_at}[rate.partition("@")[0]]
            values[rate] = measure(k, r, o)
    values["first_rank"] = first_rank(r, o)
    return values
