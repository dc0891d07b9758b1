"""Means over seeds against plain loops over the same draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmclip import metrics
from mmclip.metrics.bootstrap import estimate, mean_interval, mean_samples, over_seeds, seed_counts

B = 40


def naive(values: np.ndarray, clusters: np.ndarray, seed: int) -> list[float]:
    """Means over drawn queries and drawn seeds, one resample and one seed at a time."""
    names = np.unique(clusters)
    (times,) = metrics.cluster_counts(len(names), resamples=B, seed=seed)
    draws = seed_counts(len(values), resamples=B, seed=seed)
    found = []
    for b in range(B):
        chosen = [s for s in range(len(values)) for _ in range(int(draws[b, s]))]
        means = []
        for s in chosen:
            rows = [
                q
                for c, name in enumerate(names)
                for _ in range(int(times[b, c]))
                for q in np.flatnonzero(clusters == name)
            ]
            means.append(np.mean(values[s, rows]))
        found.append(float(np.mean(means)))
    return found


@given(st.integers(1, 4), st.integers(2, 6), st.integers(0, 5))
def test_samples_equal_a_plain_double_loop(n_seeds: int, n_clusters: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    clusters = np.sort(np.r_[np.arange(n_clusters), rng.integers(0, n_clusters, 9)])
    values = rng.random((n_seeds, len(clusters)))
    samples = over_seeds(mean_samples(values.T, clusters, resamples=B, seed=seed), seed=seed)
    np.testing.assert_allclose(samples, naive(values, clusters, seed), rtol=1e-12)


def test_one_seed_draws_queries_alone_as_metrics_does() -> None:
    rng = np.random.default_rng(0)
    values, clusters = rng.integers(0, 2, 50), np.arange(50) // 2
    assert (seed_counts(1, resamples=7) == 1).all()
    assert mean_interval([values], clusters) == metrics.mean_intervals(values[:, None], clusters)[0]


def test_seeds_that_differ_widen_the_interval_and_equal_ones_do_not() -> None:
    rng = np.random.default_rng(1)
    base = rng.random(300)
    alike, apart = np.stack([base] * 4), base + np.array([-0.3, -0.1, 0.1, 0.3])[:, None]
    (mean, lo, hi), (same, low, high) = (mean_interval(v, np.arange(300)) for v in (alike, apart))
    assert mean == pytest.approx(same)
    assert high - low > 3 * (hi - lo)
    assert (mean, lo, hi) == pytest.approx(metrics.mean_intervals(base[:, None], np.arange(300))[0])


def test_seeds_are_drawn_with_replacement_and_a_drawn_nan_stays_one() -> None:
    draws = seed_counts(3, resamples=2000)
    assert (draws.sum(axis=1) == 3).all() and set(np.unique(draws)) == {0, 1, 2, 3}
    np.testing.assert_allclose(draws.mean(axis=0), 1, atol=0.06)
    samples = np.tile([1.0, 2.0, np.nan], (2000, 1))
    np.testing.assert_array_equal(np.isnan(over_seeds(samples)), draws[:, 2] > 0)


def test_an_estimate_pairs_sides_by_query_and_seed() -> None:
    rng = np.random.default_rng(3)
    a, clusters = rng.random((3, 40)), np.arange(40) // 2
    b = a + 0.1

    def drawn(values: np.ndarray) -> list[tuple[float, np.ndarray]]:
        return [(float(v.mean()), mean_samples(v[:, None], clusters, resamples=B)[:, 0]) for v in values]

    found = estimate([drawn(b), drawn(a)], lambda x: x[0] - x[1])
    assert found[:4] == pytest.approx((0.1, 0.1, 0.1, 3)) and found.smallest == pytest.approx(0, abs=1e-12)
    alone = estimate([drawn(a)])
    assert alone[:3] == pytest.approx(mean_interval(a, clusters, resamples=B)) and alone.above(0)
    ratio = estimate([drawn(a), drawn(0 * a)], lambda x: x[0] / x[1])
    assert ratio.value is None and "does not exist" in ratio.reason and not ratio.below(1)
