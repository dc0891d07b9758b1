"""Intervals over clusters and training seeds: against plain loops over the same draws, and against the truth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmclip import metrics
from mmclip.metrics import bootstrap
from mmclip.metrics.bootstrap import estimate, mean_interval, mean_samples, over_seeds, seed_counts

B = 40


def naive(values: np.ndarray, clusters: np.ndarray, seed: int) -> list[float]:
    """Means over drawn queries and drawn seeds, one resample and one seed at a time: values [S, Q]."""
    names = np.unique(clusters)
    drawn = np.random.default_rng(seed).integers(0, len(names), size=(B, len(names)))
    times = seed_counts(len(values), resamples=B, seed=seed).astype(int)
    samples = []
    for sample, repeats in zip(drawn, times, strict=True):
        rows = np.concatenate([np.flatnonzero(clusters == names[c]) for c in sample])
        samples.append(np.mean([values[s, rows].mean() for s, n in enumerate(repeats) for _ in range(n)]))
    return samples


@given(st.integers(1, 4), st.integers(2, 6), st.integers(0, 5))
def test_samples_and_paired_intervals_equal_a_plain_loop(n_seeds: int, n_clusters: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    clusters = rng.permutation(np.r_[np.arange(n_clusters), rng.integers(0, n_clusters, 9)])
    a, b = rng.random((2, n_seeds, len(clusters)))
    samples = over_seeds(mean_samples(a.T, clusters, resamples=B, seed=seed), seed=seed)
    np.testing.assert_allclose(samples, naive(a, clusters, seed), rtol=1e-12)
    delta, lo, hi = metrics.paired_difference(a[0], b[0], clusters, resamples=B, seed=seed)
    assert delta == pytest.approx(b[0].mean() - a[0].mean())
    assert (lo, hi) == pytest.approx(tuple(np.quantile(naive((b - a)[:1], clusters, seed), [0.025, 0.975])))


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        values = (rng.random(80) < 0.3).astype(float)
        _, lo, hi = metrics.mean_intervals(values[:, None], np.arange(80), resamples=300, seed=trial)[0]
        covered += lo <= 0.3 <= hi
    assert 0.88 <= covered / 200 <= 0.99


def test_clusters_widen_the_interval_of_dependent_queries():
    rng = np.random.default_rng(0)
    values = np.repeat((rng.random(100) < 0.5).astype(float), 5)  # five captions that always agree
    apart = metrics.mean_intervals(values[:, None], np.arange(500))[0]
    together = metrics.mean_intervals(values[:, None], np.repeat(np.arange(100), 5))[0]
    assert (together[2] - together[1]) / (apart[2] - apart[1]) == pytest.approx(np.sqrt(5), rel=0.15)


def test_cluster_sums_take_whole_clusters_are_repeatable_and_do_not_depend_on_chunks(monkeypatch):
    values, clusters = np.array([[1.0], [10.0], [10.0]]), np.array([7, 3, 3])
    sums, other = (metrics.cluster_sums(values, clusters, resamples=50, seed=seed) for seed in (1, 2))
    assert set(sums.ravel()) <= {2.0, 21.0, 40.0} and not np.array_equal(sums, other)
    monkeypatch.setattr(bootstrap, "_CHUNK", 20)
    assert np.array_equal(sums, metrics.cluster_sums(values, clusters, resamples=50, seed=1))


def test_paired_difference_removes_what_two_runs_share():
    rng = np.random.default_rng(0)
    hard = rng.random(400)
    a, b = (hard < 0.5).astype(float), (hard < 0.53).astype(float)
    delta, lo, hi = metrics.paired_difference(a, b, np.arange(400))
    assert 0 < lo < delta < hi
    unpaired = metrics.paired_difference(a, rng.permutation(b), np.arange(400))
    assert unpaired[2] - unpaired[1] > 2 * (hi - lo)


def test_seeds_that_differ_widen_the_interval_and_equal_ones_do_not() -> None:
    base = np.random.default_rng(1).random(300)
    alike, apart = np.stack([base] * 4), base + np.array([-0.3, -0.1, 0.1, 0.3])[:, None]
    (mean, lo, hi), (same, low, high) = (mean_interval(v, np.arange(300)) for v in (alike, apart))
    assert mean == pytest.approx(same) and high - low > 3 * (hi - lo)
    assert (mean, lo, hi) == pytest.approx(metrics.mean_intervals(base[:, None], np.arange(300))[0])
    assert mean_interval([base], np.arange(300)) == metrics.mean_intervals(base[:, None], np.arange(300))[0]


def test_seeds_are_drawn_with_replacement_and_a_drawn_nan_stays_one() -> None:
    assert (seed_counts(1, resamples=7) == 1).all()
    draws = seed_counts(3, resamples=2000)
    assert (draws.sum(axis=1) == 3).all() and set(np.unique(draws)) == {0, 1, 2, 3}
    np.testing.assert_allclose(draws.mean(axis=0), 1, atol=0.06)
    samples = np.tile([1.0, 2.0, np.nan], (2000, 1))
    np.testing.assert_array_equal(np.isnan(over_seeds(samples)), draws[:, 2] > 0)


def test_an_estimate_pairs_sides_by_query_and_seed() -> None:
    rng = np.random.default_rng(3)
    a, clusters = rng.random((3, 40)), np.arange(40) // 2

    def drawn(values: np.ndarray) -> list[tuple[float, np.ndarray]]:
        return [(float(v.mean()), mean_samples(v[:, None], clusters, resamples=B)[:, 0]) for v in values]

    found = estimate([drawn(a + 0.1), drawn(a)], lambda x: x[0] - x[1])
    assert found[:4] == pytest.approx((0.1, 0.1, 0.1, 3)) and found.smallest == pytest.approx(0, abs=1e-12)
    alone = estimate([drawn(a)])
    assert alone[:3] == pytest.approx(mean_interval(a, clusters, resamples=B)) and alone.above(0)
    ratio = estimate([drawn(a), drawn(0 * a)], lambda x: x[0] / x[1])
    assert ratio.value is None and "does not exist" in ratio.reason and not ratio.below(1)
