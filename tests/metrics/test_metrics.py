"""Metrics against ir_measures; intervals against what they must cover."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmclip import metrics
from mmclip.metrics import bootstrap


@st.composite
def judged(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Ranks and gains of 1 to 15 relevant documents for several queries over 40 candidates."""
    per_query = draw(st.lists(st.sets(st.integers(1, 40), min_size=1, max_size=15), min_size=1, max_size=6))
    ranks = np.array([r for q in per_query for r in sorted(q, key=lambda x: (x * 7) % 11)])
    gains = np.array(draw(st.lists(st.integers(1, 4), min_size=len(ranks), max_size=len(ranks))))
    return ranks, np.cumsum([0, *map(len, per_query)]), gains, 40


@given(case=judged(), k=st.integers(1, 60), graded=st.booleans())
def test_every_rate_equals_ir_measures(case, k, graded):
    ir_measures = pytest.importorskip("ir_measures")
    ranks, offsets, gains, n = case
    gains = gains if graded else np.ones_like(gains)
    qrels, run = [], []
    for q in range(len(offsets) - 1):
        at = slice(offsets[q], offsets[q + 1])
        qrels += [ir_measures.Qrel(str(q), f"d{r}", int(g)) for r, g in zip(ranks[at], gains[at], strict=True)]
        # Scores derived from the ranks: distinct, so that no other tool's tie rule plays a part.
        run += [ir_measures.ScoredDoc(str(q), f"d{r}", float(n - r)) for r in range(1, n + 1)]
    named = {
        "success@1": ir_measures.Success @ 1,
        "success@5": ir_measures.Success @ 5,
        "success@10": ir_measures.Success @ 10,
        "recall@5": ir_measures.R @ 5,
        "mrr@10": ir_measures.RR @ 10,
        "ndcg@10": ir_measures.nDCG @ 10,
        "map": ir_measures.AP,
    }
    assert set(named) == set(metrics.RATES)
    named |= {
        f"success@{k}": ir_measures.Success @ k,
        f"recall@{k}": ir_measures.R @ k,
        f"mrr@{k}": ir_measures.RR @ k,
        f"ndcg@{k}": ir_measures.nDCG @ k,
    }
    theirs = {(m.query_id, str(m.measure)): m.value for m in ir_measures.iter_calc(named.values(), qrels, run)}
    ours = metrics.per_query(ranks, offsets, gains if graded else None, rates=named)
    for name, measure in named.items():
        expected = [theirs[str(q), str(measure)] for q in range(len(offsets) - 1)]
        assert ours[name] == pytest.approx(expected, abs=1e-9), name


@given(case=judged(), more=st.integers(0, 50))
def test_k_above_the_candidates_changes_nothing(case, more):
    ranks, offsets, gains, n = case
    kinds = ("success", "recall", "mrr", "ndcg")
    values = metrics.per_query(ranks, offsets, gains, [f"{kind}@{k}" for kind in kinds for k in (n, n + more)])
    for kind in kinds:
        assert np.array_equal(values[f"{kind}@{n}"], values[f"{kind}@{n + more}"])


def test_rates_with_too_large_a_k_are_named():
    assert metrics.clamped(5) == {"success@10": 5, "mrr@10": 5, "ndcg@10": 5}
    assert metrics.clamped(10) == {}


@pytest.mark.parametrize("rate", ["hits@1", "recall", "ndcg@0", "ndcg@-1", "mrr@", "map@5", "recall@5.5"])
def test_an_unknown_rate_names_the_valid_ones(rate):
    with pytest.raises(ValueError, match="valid are success@K"):
        metrics.per_query([1], [0, 1], rates=[rate])


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
    monkeypatch.setattr(bootstrap, "_CHUNK", 20)
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


@given(seed=st.integers(0, 1000))
def test_the_paired_interval_equals_a_loop_over_resampled_images(seed):
    rng = np.random.default_rng(seed)
    clusters = rng.integers(0, 7, 30)
    a, b = (rng.random(30) < 0.5 for _ in "ab")
    delta, lo, hi = metrics.paired_difference(a, b, clusters, resamples=50, seed=seed)
    names = np.unique(clusters)
    drawn = np.random.default_rng(seed).integers(0, len(names), size=(50, len(names)))
    means = []
    for sample in drawn:
        rows = np.concatenate([np.flatnonzero(clusters == names[c]) for c in sample])
        means.append(b[rows].mean() - a[rows].mean())
    assert delta == pytest.approx(b.mean() - a.mean())
    assert (lo, hi) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))
