"""Means over training seeds, with intervals over queries and seeds. numpy only.

All seeds answered the same queries. A bootstrap sample draws clusters of queries (metrics.cluster_draws) and, of n > 1
seeds, n seeds with replacement; of one seed only queries are drawn. What is compared shares both draws: the same
clusters, and the same seeds on either side, so differences and ratios are paired by query and by seed.

n of n seeds have (n - 1) / n of the seeds' variance, and percentiles know no heavier tail: with 3 to 5 seeds the
interval's share of the seeds is too narrow (anti-conservative), with one there is none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmclip.metrics import rank as metrics

Array = NDArray[Any]
_STREAM = 1  # seeds are drawn from other random numbers than clusters


def seed_draws(n: int, *, resamples: int = metrics.RESAMPLES, seed: int = 0) -> Array:
    """How often each of n training seeds is in a sample of n of them: [resamples, n]; 1 of one."""
    rng = np.random.default_rng([seed, _STREAM])
    return rng.multinomial(n, np.full(n, 1 / n), size=resamples).astype(np.float64)


def mean_samples(values: ArrayLike, clusters: ArrayLike, *, resamples: int = metrics.RESAMPLES, seed: int = 0) -> Array:
    """Means of the columns of values [Q, m] over bootstrap samples of clusters [Q]: [resamples, m]."""
    v = np.asarray(values, dtype=np.float64)
    sums = metrics.cluster_sums(np.column_stack([v, np.ones(len(v))]), clusters, resamples=resamples, seed=seed)
    return sums[:, :-1] / sums[:, -1:]


def over_seeds(samples: Array, *, seed: int = 0) -> Array:
    """Mean over drawn seeds of samples [B, S], a column a training seed: [B].

    A sample is not finite where that of a drawn seed is not.
    """
    times = seed_draws(samples.shape[1], resamples=len(samples), seed=seed)
    return np.where(times > 0, times * samples, 0.0).sum(axis=1) / samples.shape[1]


def mean_interval(
    values: ArrayLike, clusters: ArrayLike, *, resamples: int = metrics.RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """(mean, lo, hi) of values [S, Q], a row a training seed; clusters [Q]. Of one seed what metrics.mean_intervals
    gives."""
    v = np.asarray(values, dtype=np.float64)
    samples = over_seeds(mean_samples(v.T, clusters, resamples=resamples, seed=seed), seed=seed)
    return (float(v.mean()), *metrics.interval(samples))
