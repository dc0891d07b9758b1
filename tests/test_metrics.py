"""Metrics against ir_measures; intervals against what they must cover."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmclip import metrics


@st.composite
def judged(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Ranks of 1 to 15 relevant documents for several queries over 40 candidates."""
    per_query = draw(st.lists(st.sets(st.integers(1, 40), min_size=1, max_size=15), min_size=1, max_size=6))
    ranks = np.array([r for q in per_query for r in sorted(q, key=lambda x: (x * 7) % 11)])
    return ranks, np.cumsum([0, *map(len, per_query)]), 40


@given(judged())
def test_every_rate_equals_ir_measures(case):
    ir_measures = pytest.importorskip("ir_measures")
    ranks, offsets, n = case
    qrels, run = [], []
    for q in range(len(offsets) - 1):
        relevant = set(ranks[offsets[q] : offsets[q + 1]].tolist())
        qrels += [ir_measures.Qrel(str(q), f"d{r}", 1) for r in relevant]
        # Scores derived from the ranks: distinct, so that no other tool's tie rule plays a part.
        run += [ir_measures.ScoredDoc(str(q), f"d{r}", float(n - r)) for r in range(1, n + 1)]
    named = {
        "success@1": ir_measures.Success @ 1,
        "success@5": ir_measures.Success @ 5,
        "success@10": ir_measures.Success @ 10,
        "recall@5": ir_measures.R @ 5,
        "mrr@10": ir_measures.RR @ 10,
        "ndcg@10": ir_measures.nDCG @ 10,
    }
    theirs = {(m.query_id, str(m.measure)): m.value for m in ir_measures.iter_calc(named.values(), qrels, run)}
    ours = metrics.per_query(ranks, offsets)
    assert set(named) == set(metrics.RATES)
    for name, measure in named.items():
        expected = [theirs[str(q), str(measure)] for q in range(len(offsets) - 1)]
        assert ours[name] == pytest.approx(expected, abs=1e-9), name


@pytest.mark.parametrize(("ranks", "offsets"), [([1, 2], [0, 2, 2]), ([1], [0, 2]), ([0], [0, 1]), ([], [0])])
def test_unusable_ranks_are_refused(ranks, offsets):
    with pytest.raises(ValueError):
        metrics.per_query(np.array(ranks), np.array(offsets))


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
    ratio = (together[2] - together[1]) / (apart[2] - apart[1])
    assert ratio == pytest.approx(np.sqrt(5), rel=0.15)


def test_cluster_sums_take_whole_clusters_and_are_repeatable():
    values = np.array([[1.0], [10.0], [10.0]])
    clusters = np.array([7, 3, 3])
    sums = metrics.cluster_sums(values, clusters, resamples=50, seed=1)
    assert set(sums.ravel()) <= {2.0, 21.0, 40.0}
    assert np.array_equal(sums, metrics.cluster_sums(values, clusters, resamples=50, seed=1))
    assert not np.array_equal(sums, metrics.cluster_sums(values, clusters, resamples=50, seed=2))


def test_chunks_do_not_change_the_samples(monkeypatch):
    values, clusters = np.arange(12.0)[:, None], np.arange(12) // 2
    whole = metrics.cluster_sums(values, clusters, resamples=40, seed=3)
    monkeypatch.setattr(metrics, "_CHUNK", 20)
    assert np.array_equal(whole, metrics.cluster_sums(values, clusters, resamples=40, seed=3))


def test_paired_difference_removes_what_two_runs_share():
    rng = np.random.default_rng(0)
    hard = rng.random(400)
    a = (hard < 0.5).astype(float)
    b = (hard < 0.53).astype(float)
    delta, lo, hi = metrics.paired_difference(a, b, np.arange(400))
    assert delta == pytest.approx(b.mean() - a.mean())
    assert 0 < lo < delta < hi
    unpaired = metrics.paired_difference(a, rng.permutation(b), np.arange(400))
    assert unpaired[2] - unpaired[1] > 2 * (hi - lo)
