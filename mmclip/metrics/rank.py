"""Ranks -> numbers with intervals. numpy only; imports nothing of mmclip.

Queries are ragged: query i's relevant documents have the ranks ``ranks[offsets[i]:offsets[i + 1]]``, 1 is best. Names
follow ir_measures' definitions: CLIP papers' "R@k" with several captions is success@k here.

    success@k   1 if a relevant document is among the first k
    recall@k    the fraction of the relevant documents among the first k
    mrr@k       1 / rank of the first relevant document, 0 beyond k
    ndcg@k      gains over log2(1 + rank), divided by the best that k documents can reach; gains are 1 unless given
    map         the mean, over the relevant documents, of the share of relevant ones down to their rank

k above the number of candidates asks for all of them (:func:`clamped` names such rates).

Intervals are percentile bootstraps over **clusters** of queries: the captions of one image are not independent
questions, so they are drawn together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RATES = ("success@1", "success@5", "success@10", "recall@5", "mrr@10", "ndcg@10", "map")
TEXT_RATES = (*RATES, "recall@100")  # of text retrieval
LEVEL = 0.95  # of every interval
RESAMPLES = 1000
_CHUNK = 2**22  # resampled cluster numbers held at once

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
    best_ranks = 1 + np.arange(len(g)) - np.repeat(offsets[:-1], np.diff(offsets))

    def discounted(g: Array, r: Array) -> Array:
        found: Array = np.add.reduceat(np.where(r <= k, g / np.log2(1.0 + r), 0.0), offsets[:-1])
        return found

    return discounted(g, np.asarray(ranks)) / discounted(g[order], best_ranks)


def average_precision(ranks: Array, offsets: Array) -> Array:
    """[Q] average precisions; their mean is map.

    >>> average_precision(np.array([4, 1, 2]), np.array([0, 2, 3]))  # (1/1 + 2/4) / 2; and 1/2
    array([0.75, 0.5 ])
    """
    ordered = np.asarray(ranks)[np.lexsort((ranks, _query_numbers(offsets)))]
    place = 1 + np.arange(len(ordered)) - np.repeat(offsets[:-1], np.diff(offsets))
    precision: Array = np.add.reduceat(place / ordered, offsets[:-1])
    return precision / np.diff(offsets)


def _query_numbers(offsets: Array) -> Array:
    """[P]: which query each rank belongs to."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def first_rank(ranks: Array, offsets: Array) -> Array:
    """[Q] int64: rank of each query's best relevant document."""
    return np.minimum.reduceat(np.asarray(ranks, dtype=np.int64), offsets[:-1])


def cutoff(rate: str) -> int | None:
    """k of a rate's name; None for map, which has none. Errors: ValueError naming what is valid.

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
    """The rates whose k exceeds the number of candidates, with the k that they amount to.

    >>> clamped(4, ["success@1", "success@5", "map"])
    {'success@5': 4}
    """
    return {rate: n_candidates for rate in rates if (cutoff(rate) or 0) > n_candidates}


def per_query(
    ranks: ArrayLike, offsets: ArrayLike, gains: ArrayLike | None = None, rates: Iterable[str] = RATES
) -> dict[str, Array]:
    """Every one of ``rates``, and ``first_rank``, for every query: name -> [Q].

    ranks [P]: ranks of relevant documents, grouped by query; offsets [Q + 1], rising; gains [P]: how relevant, for
    ndcg.
    Errors: ValueError for a query without a relevant document (leave it out), ranks below 1, or an unknown rate.
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


def cluster_draws(n: int, *, resamples: int = RESAMPLES, seed: int = 0) -> Iterator[NDArray[np.float64]]:
    """How often each of n clusters is in a bootstrap sample of n of them: chunks [b, n], ``resamples`` rows in all."""
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK // n)
    for start in range(0, resamples, chunk):
        b = min(chunk, resamples - start)
        drawn = rng.integers(0, n, size=(b, n)) + n * np.arange(b)[:, None]
        yield np.bincount(drawn.ravel(), minlength=b * n).reshape(b, n).astype(np.float64)


def cluster_sums(
    values: ArrayLike, clusters: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0
) -> NDArray[np.float64]:
    """Sums of ``values`` over bootstrap samples of clusters: values [Q, m], clusters [Q] -> [resamples, m].

    A sample draws as many clusters as there are, with replacement, and takes all queries of each. The same clusters
    and seed give the same samples, so sums of two runs over the same queries are paired.
    """
    v = np.asarray(values, dtype=np.float64)
    names, member = np.unique(np.asarray(clusters), return_inverse=True)
    n = len(names)
    by_cluster = np.zeros((n, v.shape[1]))
    np.add.at(by_cluster, member, v)
    return np.concatenate([times @ by_cluster for times in cluster_draws(n, resamples=resamples, seed=seed)])


def interval(samples: ArrayLike) -> tuple[float, float]:
    """(lo, hi): the central 95% of bootstrap samples [B]."""
    lo, hi = np.quantile(np.asarray(samples, dtype=np.float64), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(lo), float(hi)


def mean_intervals(
    values: ArrayLike, clusters: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0
) -> list[tuple[float, float, float]]:
    """(mean, lo, hi) of each column of values [Q, m]; clusters [Q] says which queries are drawn together."""
    v = np.asarray(values, dtype=np.float64)
    with_count = np.column_stack([v, np.ones(len(v))])
    sums = cluster_sums(with_count, clusters, resamples=resamples, seed=seed)
    means = sums[:, :-1] / sums[:, -1:]
    return [(float(v[:, j].mean()), *interval(means[:, j])) for j in range(v.shape[1])]


def paired_difference(
    a: ArrayLike, b: ArrayLike, clusters: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """(delta, lo, hi) of mean(b) - mean(a), the same queries in both: a [Q], b [Q], clusters [Q].

    >>> paired_difference([0, 0, 1, 1], [1, 0, 1, 1], [0, 1, 2, 3])[0]
    0.25
    """
    difference = np.asarray(b, dtype=np.float64) - np.asarray(a, dtype=np.float64)
    return mean_intervals(difference[:, None], clusters, resamples=resamples, seed=seed)[0]
