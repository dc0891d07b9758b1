"""Means over training seeds, with intervals over queries and seeds. numpy only.

All seeds answered the same queries. A bootstrap sample draws clusters of queries (metrics.cluster_draws) and, of n > 1
seeds, n seeds with replacement; of one seed only queries are drawn. What is compared shares both draws: the same
clusters, and the same seeds on either side, so differences and ratios are paired by query and by seed.

n of n seeds have (n - 1) / n of the seeds' variance, and percentiles know no heavier tail: with 3 to 5 seeds the
interval's share of the seeds is too narrow (anti-conservative), with one there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmclip.metrics import rank as metrics

Array = NDArray[Any]
MIN_DEFINED = 0.9  # share of the resamples in which a number must exist to have an interval
DETECTABLE = 2.8  # standard errors: z(0.975) + z(0.8)
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
        sides: of each side, and of each training seed, a value and its bootstrap samples [B] over queries (as
            :func:`mean_samples` draws them; the same seeds in the same order on every side).
        combine: from the sides' means over seeds, numbers or drawn ones [B], to the estimated number, such as their
            difference or ratio.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        value = combine([np.float64(np.mean([v for v, _ in side])) for side in sides])
        drawn = combine([over_seeds(np.column_stack([x for _, x in side]), seed=seed) for side in sides])
    n_seeds, samples = len(sides[0]), drawn[np.isfinite(drawn)]
    if not np.isfinite(value):
        return Estimate.missing("nothing is found on the other side: the ratio does not exist")
    if len(samples) < MIN_DEFINED * len(drawn):
        return Estimate(float(value), None, None, n_seeds, "the ratio exists in too few resamples")
    smallest = DETECTABLE * float(np.std(samples, ddof=1))
    return Estimate(float(value), *metrics.interval(samples), n_seeds, smallest=smallest)
