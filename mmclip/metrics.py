"""Ranks -> numbers with intervals. numpy only; imports nothing of mmclip.

Queries are ragged: query i's relevant documents have the ranks ``ranks[offsets[i]:offsets[i + 1]]``, 1 is best. Names
follow ir_measures' definitions: CLIP papers' "R@k" with several captions is success@k here.

    success@k   1 if a relevant document is among the first k
    recall@k    the fraction of the relevant documents among the first k
    mrr@k       1 / rank of the first relevant document, 0 beyond k
    ndcg@k      binary gains over log2(1 + rank), divided by the best reachable with min(relevant, k) documents

Intervals are percentile bootstraps over **clusters** of queries: the captions of one image are not independent
questions, so they are drawn together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RATES = ("success@1", "success@5", "success@10", "recall@5", "mrr@10", "ndcg@10")
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


def ndcg_at(k: int, ranks: Array, offsets: Array) -> Array:
    """[Q] normalized discounted gains.

    >>> ndcg_at(10, np.array([1, 2, 3]), np.array([0, 2, 3]))  # perfect; and 1 / log2(4)
    array([1. , 0.5])
    """
    ranks = np.asarray(ranks, dtype=np.float64)
    gain = np.add.reduceat(np.where(ranks <= k, 1.0 / np.log2(1.0 + ranks), 0.0), offsets[:-1])
    ideal = np.cumsum(1.0 / np.log2(1.0 + np.arange(1, k + 1)))
    reachable: Array = ideal[np.minimum(np.diff(offsets), k) - 1]
    return gain / reachable


def first_rank(ranks: Array, offsets: Array) -> Array:
    """[Q] int64: rank of each query's best relevant document."""
    return np.minimum.reduceat(np.asarray(ranks, dtype=np.int64), offsets[:-1])


def per_query(ranks: ArrayLike, offsets: ArrayLike) -> dict[str, Array]:
    """Every rate of RATES, and ``first_rank``, for every query: name -> [Q].

    ranks [P]: ranks of relevant documents, grouped by query; offsets [Q + 1], rising.
    Errors: ValueError for a query without a relevant document (leave it out) or ranks below 1.
    """
    r, o = np.asarray(ranks), np.asarray(offsets)
    if len(o) < 2 or o[0] != 0 or o[-1] != len(r) or (np.diff(o) < 1).any():
        raise ValueError(f"offsets must rise from 0 to the number of ranks, {len(r)}: every query needs a rank")
    if r.min() < 1:
        raise ValueError(f"ranks start at 1; received {r.min()}")
    values = {f"success@{k}": success_at(k, r, o) for k in (1, 5, 10)}
    values["recall@5"] = recall_at(5, r, o)
    values["mrr@10"] = mrr_at(10, r, o)
    values["ndcg@10"] = ndcg_at(10, r, o)
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
