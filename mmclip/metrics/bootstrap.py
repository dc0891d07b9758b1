"""The one bootstrap: percentile intervals over clusters of queries, and over training seeds where there are several.

A sample draws as many **clusters** of queries as there are, with replacement, and takes all queries of each: the
captions of one image are not independent, so they are drawn together. Samples are counts, how often each cluster is
drawn, so every statistic of sums (a mean, a ratio, Cohen's d, AUC) is a product counts x sums. Equal clusters and
seeds give equal samples: two runs over the same queries are paired.

Of n > 1 **training seeds** n are drawn as well, the same on all sides of a comparison. n of n seeds have (n - 1) / n of
their variance, and percentiles know no heavier tail: with 3 to 5 seeds the seeds' share of an interval is too narrow
(anti-conservative), with one there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95  # of every interval
RESAMPLES = 1000
MIN_DEFINED = 0.9  # share of the resamples in which a number must exist to have an interval
DETECTABLE = 2.8  # standard errors: z(0.975) + z(0.8)
_STREAM = 1  # seeds are drawn from other random numbers than clusters
_CHUNK = 2**22  # resampled cluster numbers held at once

Array = NDArray[Any]


def cluster_counts(n: int, *, resamples: int = RESAMPLES, seed: int = 0) -> Iterator[NDArray[np.float64]]:
    """Yield how often each of n clusters is in a bootstrap sample of n: chunks [b, n], ``resamples`` rows in all."""
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK // n)
    for start in range(0, resamples, chunk):
        b = min(chunk, resamples - start)
        drawn = rng.integers(0, n, size=(b, n)) + n * np.arange(b)[:, None]
        yield np.bincount(drawn.ravel(), minlength=b * n).reshape(b, n).astype(np.float64)


def cluster_sums(
    values: ArrayLike, clusters: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0
) -> NDArray[np.float64]:
    """Sum values [Q, m] over bootstrap samples of clusters [Q]: [resamples, m]."""
    v = np.asarray(values, dtype=np.float64)
    names, member = np.unique(np.asarray(clusters), return_inverse=True)
    by_cluster = np.zeros((len(names), v.shape[1]))
    np.add.at(by_cluster, member, v)
    return np.concatenate([c @ by_cluster for c in cluster_counts(len(names), resamples=resamples, seed=seed)])


def mean_samples(values: ArrayLike, clusters: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0) -> Array:
    """Means of the columns of values [Q, m] over bootstrap samples of clusters [Q]: [resamples, m]."""
    v = np.asarray(values, dtype=np.float64)
    sums = cluster_sums(np.column_stack([v, np.ones(len(v))]), clusters, resamples=resamples, seed=seed)
    return sums[:, :-1] / sums[:, -1:]


def interval(samples: ArrayLike) -> tuple[float, float]:
    """(lo, hi): the central 95% of bootstrap samples [B]."""
    lo, hi = np.quantile(np.asarray(samples, dtype=np.float64), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(lo), float(hi)


def finite_interval(samples: Array) -> tuple[float, float] | None:
    """:func:`interval` of the finite samples; None where fewer than ``MIN_DEFINED`` of them are finite."""
    finite = samples[np.isfinite(samples)]
    return interval(finite) if len(finite) >= MIN_DEFINED * len(samples) else None


def several(clusters: ArrayLike) -> bool:
    """Whether clusters [Q] can be resampled: one has no spread, which is not certainty."""
    return len(np.unique(np.asarray(clusters))) > 1


def mean_intervals(
    values: ArrayLike, clusters: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0
) -> list[tuple[float, float, float]]:
    """(mean, lo, hi) of each column of values [Q, m] over clusters [Q]."""
    v = np.asarray(values, dtype=np.float64)
    means = mean_samples(v, clusters, resamples=resamples, seed=seed)
    return [(float(v[:, j].mean()), *interval(means[:, j])) for j in range(v.shape[1])]


def paired_difference(
    a: ArrayLike, b: ArrayLike, clusters: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """(delta, lo, hi) of mean(b) - mean(a) over the same queries: a [Q], b [Q], clusters [Q].

    >>> paired_difference([0, 0, 1, 1], [1, 0, 1, 1], [0, 1, 2, 3])[0]
    0.25
    """
    difference = np.asarray(b, dtype=np.float64) - np.asarray(a, dtype=np.float64)
    return mean_intervals(difference[:, None], clusters, resamples=resamples, seed=seed)[0]


def seed_counts(n: int, *, resamples: int = RESAMPLES, seed: int = 0) -> Array:
    """Draw n of n training seeds: how often each is in a sample, [resamples, n]; 1 of one."""
    rng = np.random.default_rng([seed, _STREAM])
    return rng.multinomial(n, np.full(n, 1 / n), size=resamples).astype(np.float64)


def over_seeds(samples: Array, *, seed: int = 0) -> Array:
    """Average samples [B, S], a column a training seed, over drawn seeds: [B]; not finite where a drawn one is not."""
    times = seed_counts(samples.shape[1], resamples=len(samples), seed=seed)
    return np.where(times > 0, times * samples, 0.0).sum(axis=1) / samples.shape[1]


def mean_interval(
    values: ArrayLike, clusters: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """(mean, lo, hi) of values [S, Q], a row a training seed, over clusters [Q] and seeds."""
    v = np.asarray(values, dtype=np.float64)
    samples = over_seeds(mean_samples(v.T, clusters, resamples=resamples, seed=seed), seed=seed)
    return (float(v.mean()), *interval(samples))


class Estimate(NamedTuple):
    """A number over ``n_seeds`` training seeds with its 95% interval; without a value (or interval) it has a reason.

    smallest: the smallest detectable effect, 2.8 standard errors (5% two-sided, power 80%).
    """

    value: float | None
    lo: float | None
    hi: float | None
    n_seeds: int
    reason: str = ""
    smallest: float | None = None

    @classmethod
    def missing(cls, reason: str) -> Estimate:
        return cls(None, None, None, 0, reason)

    def above(self, bound: float) -> bool:
        return self.lo is not None and self.lo > bound

    def below(self, bound: float) -> bool:
        return self.hi is not None and self.hi < bound


def estimate(
    sides: Sequence[Sequence[tuple[float, Array]]],
    combine: Callable[[list[Any]], Any] = lambda means: means[0],
    *,
    seed: int = 0,
) -> Estimate:
    """Combine means of several sides, paired by query and by training seed.

    Args:
        sides: Of each side, and of each training seed, a value and its bootstrap samples [B] over queries (as
            :func:`mean_samples` draws them; the same seeds in the same order on every side).
        combine: From the sides' means over seeds, numbers or drawn ones [B], to the estimated number, such as their
            difference or ratio.
        seed: Of the draw of training seeds.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        value = combine([np.float64(np.mean([v for v, _ in side])) for side in sides])
        drawn = combine([over_seeds(np.column_stack([x for _, x in side]), seed=seed) for side in sides])
    n_seeds, samples = len(sides[0]), drawn[np.isfinite(drawn)]
    if not np.isfinite(value):
        return Estimate.missing("the other side is 0: the ratio does not exist")
    if len(samples) < MIN_DEFINED * len(drawn):
        return Estimate(float(value), None, None, n_seeds, "the ratio exists in too few resamples")
    smallest = DETECTABLE * float(np.std(samples, ddof=1))
    return Estimate(float(value), *interval(samples), n_seeds, smallest=smallest)
