"""Cohen's d and AUC of norms against planted and written-out numbers, and every way in which they do not exist."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mmclip.metrics import magnitude
from mmclip.metrics.magnitude import by_group, cohens_d, magnitude_auc, number_bins, spearman, summary
from mmclip.retrieval import Ranking, rank
from mmclip.roles import Normalization

HOW = {"resamples": 200, "seed": 0}


def naive_d(relevant: np.ndarray, irrelevant: np.ndarray) -> float:
    n1, n2 = len(relevant), len(irrelevant)
    pooled = ((n1 - 1) * relevant.var(ddof=1) + (n2 - 1) * irrelevant.var(ddof=1)) / (n1 + n2 - 2)
    return float((relevant.mean() - irrelevant.mean()) / np.sqrt(pooled))


def naive_auc(relevant: np.ndarray, irrelevant: np.ndarray) -> float:
    a, b = relevant[:, None], irrelevant[None, :]
    return float(np.mean((a > b) + 0.5 * (a == b)))


def effect_of(norms: np.ndarray, relevant: np.ndarray, **how):
    """d of lists of norms [Q, k], every query by itself."""
    x, level = magnitude.centred(norms)
    moments = magnitude.split_moments(x, relevant)
    return magnitude.effect(moments, level, np.arange(len(x)), what="these", **{**HOW, **how})


def ranked(norms: np.ndarray, pairs: np.ndarray, n_queries: int, k: int = 4) -> Ranking:
    gen = torch.Generator().manual_seed(0)
    query = torch.randn(n_queries, 6, generator=gen)
    unit = torch.nn.functional.normalize(torch.randn(len(norms), 6, generator=gen), dim=1)
    document = unit * torch.as_tensor(norms)[:, None]
    return rank(query, document, pairs, {"cosine": Normalization.COSINE.exponents}, top_k={"cosine": k})["cosine"]


def planted(d: float, n: int = 4000, k: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Norms of the k best of n / k queries; the first of each is relevant and longer by d standard deviations."""
    x = np.random.default_rng(1).normal(100.0, 2.0, size=(n // k, k))
    relevant = np.zeros_like(x, dtype=bool)
    relevant[:, 0] = True
    return x + 2.0 * d * relevant, relevant


@pytest.mark.parametrize("d", [-0.5, 0.0, 1.5, 5.0])
def test_a_planted_d_lies_in_its_interval_at_any_scale(d):
    x, relevant = planted(d)
    value, reason = effect_of(x, relevant)
    assert reason is None
    assert value["value"] == pytest.approx(naive_d(x[relevant], x[~relevant]), rel=1e-9)
    assert value["ci"][0] <= d <= value["ci"][1]
    assert (value["n_relevant"], value["n_irrelevant"]) == (400, 3600)
    assert effect_of(x * 1e12, relevant)[0]["value"] == pytest.approx(value["value"], rel=1e-9)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.lists(st.integers(0, 6), min_size=1, max_size=20))
def test_auc_equals_all_comparisons_written_out(relevant, irrelevant):
    counts = [np.bincount(x, minlength=7) for x in (relevant, irrelevant)]
    expected = naive_auc(np.array(relevant), np.array(irrelevant))
    assert magnitude.auc(*counts) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("statistic", "naive"), [(cohens_d, naive_d), (magnitude_auc, naive_auc)])
def test_every_reference_set_equals_its_pairs_written_out(statistic, naive):
    rng = np.random.default_rng(1)
    norms = rng.integers(5, 15, size=40).astype(float)  # with ties
    pairs = np.unique(np.column_stack([rng.integers(0, 25, 60), rng.integers(0, 30, 60)]), axis=0)
    r = ranked(norms, pairs, 25)
    found = statistic(norms, r, r.queries, np.arange(40), **HOW)
    top, judged = norms[r.top_ids], np.isin(np.arange(40), r.documents)
    own = [r.documents[r.offsets[i] : r.offsets[i + 1]] for i in range(len(r.queries))]
    others = np.concatenate([np.setdiff1d(np.arange(40), d) for d in own])
    groups = {
        "topk": (top[r.top_relevant], top[~r.top_relevant]),
        "corpus": (norms[judged], norms[~judged]),
        "pairs": (norms[r.documents], norms[others]),
    }
    for name, (relevant, irrelevant) in groups.items():
        value, _ = found[name]
        assert value["value"] == pytest.approx(naive(relevant, irrelevant)), name
        assert (value["n_relevant"], value["n_irrelevant"]) == (len(relevant), len(irrelevant))
        assert value["ci"][0] <= value["value"] <= value["ci"][1]


def test_a_bootstrap_sample_counts_a_query_as_often_as_it_is_drawn(monkeypatch):
    norms = np.array([3.0, 1.0, 2.0, 5.0, 4.0])
    r = ranked(norms, np.array([[0, 0], [1, 3], [1, 1]]), 2)
    sums, real = [], magnitude.auc
    monkeypatch.setattr(magnitude, "auc", lambda a, b: sums.append((a.sum(), b.sum())) or real(a, b))
    magnitude_auc(norms, r, np.array([0, 1]), np.arange(5), resamples=30, seed=0)
    # all pairs of a sample of two queries: the first has 1 of 5 relevant, the second 2 of 5
    assert {(2, 8), (3, 7), (4, 6)} <= set(sums)


def test_auc_is_blind_to_a_monotone_rescaling_and_swaps_with_the_sign():
    norms = np.random.default_rng(2).uniform(1, 3, size=30)
    r = ranked(norms, np.column_stack([np.arange(20), np.arange(20)]), 20)
    one, other, turned = (
        magnitude_auc(x, r, r.queries, np.arange(30), **HOW)["topk"][0]["value"]
        for x in (norms, np.exp(3 * norms), 10 - norms)
    )
    assert one == other and turned == pytest.approx(1 - one)


@pytest.mark.parametrize("statistic", [cohens_d, magnitude_auc])
def test_what_does_not_exist_has_a_reason_and_one_cluster_no_interval(statistic):
    norms = np.random.default_rng(0).uniform(1, 2, size=8)
    every = np.arange(8)
    r = ranked(norms, np.array([[q, q // 2] for q in range(16)]), 16, k=8)
    balanced = ranked(norms, np.array([[q, q // 5] for q in range(40)]), 40, k=8)
    found = statistic(norms, balanced, balanced.queries, every, **HOW)
    assert found["pairs"] == (None, "degenerate: every candidate is relevant to 5 queries")
    assert found["corpus"] == (None, "every candidate is relevant to some query")
    assert found["topk"][1] is None
    for value, _ in statistic(norms, r, np.zeros(16), np.zeros(8), **HOW).values():
        assert value is None or value["ci"] is None
    no_hit = ranked(norms, np.array([[0, 5]]), 1, k=1)
    reason = statistic(norms, no_hit, no_hit.queries, every, **HOW)["topk"][1]
    assert reason == "no relevant document among the queries' 1 best by cosine"
    for _, reason in statistic(np.full(8, 2.0), no_hit, no_hit.queries, every, **HOW).values():
        assert "do not vary" in reason or "no relevant" in reason


@pytest.mark.parametrize(
    ("norms", "relevant", "words"),
    [
        ([[1.0, 2.0]], [[False, False]], "no relevant document among these"),
        ([[1.0, 2.0]], [[True, True]], "no irrelevant document among these"),
        ([[2.0, 2.0, 2.0]], [[True, False, False]], "do not vary"),
        ([[1.0, 1.0 + 1e-8, 1.0 - 1e-8]], [[True, False, False]], "do not vary"),  # unit vectors and their rounding
        ([[1.0, 2.0]], [[True, False]], "do not vary"),  # one each: no variance
        ([[0.0, 0.0, 0.0]], [[True, False, False]], "do not vary"),
    ],
)
def test_d_of_degenerate_groups_has_a_reason(norms, relevant, words):
    value, reason = effect_of(np.array(norms), np.array(relevant))
    assert value is None and words in reason and "these" in reason


def test_an_interval_needs_enough_resamples_in_which_d_exists():
    # One query of fifty holds all relevant documents: a third of the resamples has none.
    x = np.random.default_rng(0).normal(10, 1, size=(50, 4))
    relevant = np.zeros_like(x, dtype=bool)
    relevant[0, :2] = True
    assert effect_of(x, relevant)[0]["ci"] is None


def test_summary_of_little_or_nothing_is_json():
    for norms in ([], [1.0], [0.0, 0.0], [1.0, 2.0]):
        json.dumps(summary(norms), allow_nan=False)
    assert summary([2.0, 4.0])["cv"] == pytest.approx(np.sqrt(2) / 3)
    assert summary(np.arange(101))["quantiles"] == {"0.05": 5.0, "0.25": 25.0, "0.5": 50.0, "0.75": 75.0, "0.95": 95.0}
    assert summary([])["quantiles"] is None


def test_spearman_equals_scipy():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9, 200).astype(float), rng.normal(size=200)
    assert spearman(y, x)[0]["value"] == pytest.approx(stats.spearmanr(y, x).statistic)
    assert spearman([1, 2], [1, 2])[0] is None
    assert spearman([1, 2, 3], [4, 4, 4])[0] is None


def test_bins_hold_every_known_value_once():
    values = np.random.default_rng(0).poisson(9, size=500)
    values[:7] = -1
    bins, names = number_bins(values)
    assert len(names) <= 5 and (bins == -1).sum() == 7
    for i, name in enumerate(names):
        low, _, high = name.partition("-")
        assert (values[bins == i].min(), values[bins == i].max()) == (int(low), int(high or low))
    assert number_bins([-1, -1])[1] == []
    assert number_bins([4, 4])[1] == ["4"]


def test_groups_of_documents_and_of_queries():
    norms = np.random.default_rng(0).normal(10, 1, size=40)
    lists = ranked(norms, np.array([[q, (7 * q + c) % 40] for q in range(30) for c in range(9)]), 30, k=10)
    group, top, relevant = np.arange(40) % 2, norms[lists.top_ids], lists.top_relevant
    rows = by_group(norms, group, ["a", "b"], lists, np.arange(30), **HOW)
    inside = group[lists.top_ids] == 1
    assert rows[1]["topk"]["value"] == pytest.approx(naive_d(top[inside & relevant], top[inside & ~relevant]))
    assert (rows[1]["group"], rows[1]["n"]) == ("b", 20)
    assert rows[1]["mean"] == pytest.approx(norms[1::2].mean())
    of_query = np.array([0] * 10 + [1] * 20)
    rows = by_group(norms, of_query, ["a", "b"], lists, np.arange(30), of_queries=True, **HOW)
    assert rows[0]["n"] == 10 and rows[0]["mean"] == pytest.approx(top[:10][relevant[:10]].mean())
    assert rows[0]["topk"]["value"] == pytest.approx(naive_d(top[:10][relevant[:10]], top[:10][~relevant[:10]]))
    assert by_group(norms, of_query, [], lists, np.arange(30), of_queries=True, **HOW) == []
