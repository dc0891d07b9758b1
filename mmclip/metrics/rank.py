"""Ranking metrics of single queries, from the ranks of their relevant documents. numpy only.

Queries are ragged: query i's relevant documents have the ranks ``ranks[offsets[i]:offsets[i + 1]]``, 1 is best. Names
follow ir_measures' definitions: CLIP papers' "R@k" with several captions an image is success@k here.

    success@k   1 if a relevant document is among the first k
    recall@k    the fraction of the relevant documents among the first k
    mrr@k       1 / rank of the first relevant document, 0 beyond k
    ndcg@k      gains over log2(1 + rank), divided by the best that k documents can reach; gains are 1 by default and
                used as they are (as trec_eval does)
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


def cutoff(rate: str) -> int | None:
    """k of a metric's name; None for map, which has none.

    Raises:
        ValueError: The name is unknown; the valid ones are listed.

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
    """Name the metrics whose k exceeds the number of candidates, with the k that they amount to.

    >>> clamped(4, ["success@1", "success@5", "map"])
    {'success@5': 4}
    """
    return {rate: n_candidates for rate in rates if (cutoff(rate) or 0) > n_candidates}


def per_query(
    ranks: ArrayLike, offsets: ArrayLike, gains: ArrayLike | None = None, rates: Iterable[str] = RATES
) -> dict[str, Array]:
    """Compute each of ``rates``, and ``first_rank``, of every query: name -> [Q].

    Args:
        ranks: [P] ranks of relevant documents, grouped by query.
        offsets: [Q + 1], rising from 0 to P.
        gains: [P] how relevant, for ndcg; 1 by default.
        rates: Names of metrics.

    Raises:
        ValueError: A query has no relevant document (leave it out), a rank is below 1, or a metric is unknown.

    >>> rates = ("success@1", "recall@2", "mrr@10", "map")
    >>> values = per_query([4, 1, 2], [0, 2, 3], rates=rates)  # the first query's documents stand at 4 and 1
    >>> {name: v.tolist() for name, v in values.items()}
    {'success@1': [1.0, 0.0], 'recall@2': [0.5, 1.0], 'mrr@10': [1.0, 0.5], 'map': [0.75, 0.5], 'first_rank': [1, 2]}
    >>> per_query([1, 2, 3], [0, 2, 3], [1, 4, 1], ["ndcg@1"])["ndcg@1"]  # the first query's better one stands second
    array([0.25, 0.  ])
    """
    r, o = np.asarray(ranks), np.asarray(offsets)
    if len(o) < 2 or o[0] != 0 or o[-1] != len(r) or (np.diff(o) < 1).any():
        raise ValueError(f"offsets must rise from 0 to the number of ranks, {len(r)}: every query needs a rank")
    if r.min() < 1:
        raise ValueError(f"ranks start at 1; received {r.min()}")
    g = np.ones(len(r)) if gains is None else np.asarray(gains, dtype=np.float64)
    many = np.diff(o)
    query = np.repeat(np.arange(len(many)), many)
    places = 1 + np.arange(len(r)) - np.repeat(o[:-1], many)  # 1, 2, ... within each query
    first = np.minimum.reduceat(r.astype(np.int64), o[:-1])

    def total(x: Array) -> Array:
        sums: Array = np.add.reduceat(x.astype(np.float64), o[:-1])
        return sums

    def discounted(k: int, g: Array, r: Array) -> Array:
        return total(np.where(r <= k, g / np.log2(1.0 + r), 0.0))

    values: dict[str, Array] = {}
    for rate in rates:
        kind, k = rate.partition("@")[0], cutoff(rate)
        if k is None:
            values[rate] = total(places / r[np.lexsort((r, query))]) / many
        elif kind == "success":
            values[rate] = (first <= k).astype(np.float64)
        elif kind == "recall":
            values[rate] = total(r <= k) / many
        elif kind == "mrr":
            values[rate] = np.where(first <= k, 1.0 / first, 0.0)
        else:
            values[rate] = discounted(k, g, r) / discounted(k, g[np.lexsort((-g, query))], places)
    return values | {"first_rank": first}
