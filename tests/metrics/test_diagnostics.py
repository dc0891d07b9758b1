"""Cohen's d and its neighbours against numbers known beforehand, and every way in which they cannot be had."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from mmclip.metrics import magnitude as diagnostics
from mmclip.retrieval import Ranking

HOW = {"resamples": 300, "seed": 0}


def naive_d(relevant: np.ndarray, irrelevant: np.ndarray) -> float:
    n1, n2 = len(relevant), len(irrelevant)
    pooled = ((n1 - 1) * relevant.var(ddof=1) + (n2 - 1) * irrelevant.var(ddof=1)) / (n1 + n2 - 2)
    return float((relevant.mean() - irrelevant.mean()) / np.sqrt(pooled))


def planted(rng, d, n=4000, k=10):
    """Lengths of the k best of n / k queries; the first of each is relevant and longer by d standard deviations."""
    x = rng.normal(100.0, 2.0, size=(n // k, k))
    relevant = np.zeros_like(x, dtype=bool)
    relevant[:, 0] = True
    return x + 2.0 * d * relevant, relevant


def ranked(offsets, documents, n: int) -> Ranking:
    """A ranking of which only relevance matters: lists are empty."""
    documents, q = np.asarray(documents), len(offsets) - 1
    none = np.zeros((q, 1), dtype=np.int64)
    ones = np.ones(len(documents))
    return Ranking(np.arange(q), np.asarray(offsets), documents, ones, ones, none[:, 0] > 0, none, none > 0, none, n)


@pytest.mark.parametrize("d", [-0.5, 0.0, 1.5, 5.0])
def test_a_planted_d_lies_in_its_interval(d):
    x, relevant = planted(np.random.default_rng(1), d)
    centred, level = diagnostics.centred(x)
    moments = diagnostics.split_moments(centred, relevant)
    value, reason = diagnostics.effect(moments, level, np.arange(len(x)), what="w", **HOW)
    assert reason is None
    assert value["value"] == pytest.approx(naive_d(x[relevant], x[~relevant]), rel=1e-9)
    assert value["ci"][0] <= d <= value["ci"][1]
    assert (value["n_relevant"], value["n_irrelevant"]) == (400, 3600)


def test_huge_lengths_lose_no_digits():
    x, relevant = planted(np.random.default_rng(1), 0.7)
    small = diagnostics.centred(x)
    large = diagnostics.centred(x * 1e12 + 0)
    values = [
        diagnostics.effect(diagnostics.split_moments(c, relevant), level, np.arange(len(x)), what="w", **HOW)[0]
        for c, level in (small, large)
    ]
    assert values[0]["value"] == pytest.approx(values[1]["value"], rel=1e-9)


def test_pairs_equal_the_pairs_written_out():
    rng = np.random.default_rng(0)
    lengths = rng.uniform(1, 3, size=7)
    offsets, documents = np.array([0, 3, 4, 6]), np.array([0, 1, 5, 2, 0, 6])
    value, _ = diagnostics.cohens_d(lengths, ranked(offsets, documents, 7), np.arange(3), np.arange(7), **HOW)["pairs"]
    relevant = lengths[documents]
    irrelevant = []
    for q in range(3):
        own = set(documents[offsets[q] : offsets[q + 1]])
        irrelevant += [lengths[j] for j in range(7) if j not in own]
    assert value["value"] == pytest.approx(naive_d(relevant, np.array(irrelevant)))
    assert value["n_irrelevant"] == len(irrelevant)


def test_balanced_pairs_are_degenerate_and_say_so():
    lengths = np.random.default_rng(0).uniform(1, 2, size=4)
    offsets, documents = np.arange(21), np.repeat(np.arange(4), 5)
    found = diagnostics.cohens_d(lengths, ranked(offsets, documents, 4), np.arange(20), np.arange(4), **HOW)
    value, reason = found["pairs"]
    assert (value, reason) == (None, "degenerate: every candidate is relevant to 5 queries")


def test_corpus_compares_documents_not_pairs():
    lengths = np.array([5.0, 5.5, 6.0, 1.0, 1.2, 0.8])
    some, every = (ranked(np.arange(len(d) + 1), d, 6) for d in ([0, 0, 0, 1, 2], range(6)))
    value, _ = diagnostics.cohens_d(lengths, some, np.arange(5), np.arange(6), **HOW)["corpus"]
    assert value["value"] == pytest.approx(naive_d(lengths[:3], lengths[3:]))
    assert (value["n_relevant"], value["n_irrelevant"]) == (3, 3)
    assert diagnostics.cohens_d(lengths, every, np.arange(6), np.arange(6), **HOW)["corpus"][1] == (
        "every candidate is relevant to some query"
    )


@pytest.mark.parametrize(
    ("lengths", "relevant", "words"),
    [
        ([[1.0, 2.0]], [[False, False]], "no relevant document"),
        ([[1.0, 2.0]], [[True, True]], "no irrelevant document"),
        ([[2.0, 2.0, 2.0]], [[True, False, False]], "do not vary"),
        ([[1.0, 1.0 + 1e-8, 1.0 - 1e-8]], [[True, False, False]], "do not vary"),  # unit vectors and their rounding
        ([[1.0, 2.0]], [[True, False]], "do not vary"),  # one each: no variance
        ([[0.0, 0.0, 0.0]], [[True, False, False]], "do not vary"),
    ],
)
def test_what_cannot_be_computed_has_a_reason(lengths, relevant, words):
    x, level = diagnostics.centred(np.array(lengths))
    moments = diagnostics.split_moments(x, np.array(relevant))
    value, reason = diagnostics.effect(moments, level, np.arange(len(x)), what="these", **HOW)
    assert value is None
    assert words in reason
    assert "these" in reason


def test_an_interval_needs_enough_resamples_in_which_d_exists():
    # One query of fifty holds all relevant documents: a third of the resamples has none.
    x = np.random.default_rng(0).normal(10, 1, size=(50, 4))
    relevant = np.zeros_like(x, dtype=bool)
    relevant[0, :2] = True
    centred, level = diagnostics.centred(x)
    value, _ = diagnostics.effect(diagnostics.split_moments(centred, relevant), level, np.arange(50), what="w", **HOW)
    assert value["ci"] is None


def test_summary_of_little_or_nothing_is_json():
    for lengths in ([], [1.0], [0.0, 0.0], [1.0, 2.0]):
        json.dumps(diagnostics.summary(lengths), allow_nan=False)
    assert diagnostics.summary([2.0, 4.0])["cv"] == pytest.approx(np.sqrt(2) / 3)
    quantiles = diagnostics.summary(np.arange(101))["quantiles"]
    assert quantiles == {"0.05": 5.0, "0.25": 25.0, "0.5": 50.0, "0.75": 75.0, "0.95": 95.0}
    assert diagnostics.summary([])["quantiles"] is None


def test_spearman_equals_scipy():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9, 200).astype(float), rng.normal(size=200)
    assert diagnostics.spearman(y, x)[0]["value"] == pytest.approx(stats.spearmanr(y, x).statistic)
    assert diagnostics.spearman([1, 2], [1, 2])[0] is None
    assert diagnostics.spearman([1, 2, 3], [4, 4, 4])[0] is None


def test_bins_hold_every_known_value_once():
    values = np.random.default_rng(0).poisson(9, size=500)
    values[:7] = -1
    bins, names = diagnostics.number_bins(values)
    assert len(names) <= 5
    assert (bins == -1).sum() == 7
    for i, name in enumerate(names):
        low, high = (int(x) for x in (name.split("-") * 2)[:2]) if "-" in name else (int(name), int(name))
        inside = values[bins == i]
        assert (inside.min(), inside.max()) == (low, high)
    assert diagnostics.number_bins([-1, -1])[1] == []
    assert diagnostics.number_bins([4, 4])[1] == ["4"]


def test_groups_of_documents_and_of_queries():
    rng = np.random.default_rng(0)
    lengths = rng.normal(10, 1, size=40)
    group = np.arange(40) % 2
    top_ids = np.array([rng.permutation(40)[:10] for _ in range(30)])
    top_relevant = rng.random((30, 10)) < 0.3
    lists = replace(ranked(np.arange(31), np.arange(30), 40), top_ids=top_ids, top_relevant=top_relevant)
    args = (["a", "b"], lists, np.arange(30))
    rows = diagnostics.by_document_group(lengths, group, *args, **HOW)
    inside = group[top_ids] == 1
    x = lengths[top_ids]
    assert rows[1]["topk"]["value"] == pytest.approx(naive_d(x[inside & top_relevant], x[inside & ~top_relevant]))
    assert (rows[1]["group"], rows[1]["n"]) == ("b", 20)
    assert rows[1]["mean"] == pytest.approx(lengths[1::2].mean())
    asked = np.array([0] * 10 + [1] * 20)
    rows = diagnostics.by_query_group(lengths, asked, *args, **HOW)
    assert rows[0]["n"] == 10
    assert rows[0]["topk"]["value"] == pytest.approx(naive_d(x[:10][top_relevant[:10]], x[:10][~top_relevant[:10]]))
    assert diagnostics.by_query_group(lengths, asked, [], *args[1:], **HOW) == []
