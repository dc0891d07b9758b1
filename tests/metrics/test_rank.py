"""Rates of single queries against ir_measures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmclip import metrics
from mmclip.metrics.rank import clamped


@st.composite
def judged(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Ranks and gains of 1 to 15 relevant documents for several queries over 40 candidates."""
    per_query = draw(st.lists(st.sets(st.integers(1, 40), min_size=1, max_size=15), min_size=1, max_size=6))
    ranks = np.array([r for q in per_query for r in sorted(q, key=lambda x: (x * 7) % 11)])
    gains = np.array(draw(st.lists(st.integers(1, 4), min_size=len(ranks), max_size=len(ranks))))
    return ranks, np.cumsum([0, *map(len, per_query)]), gains, 40


@given(case=judged(), k=st.integers(1, 60), graded=st.booleans())
def test_every_rate_equals_ir_measures(case, k, graded):
    ir = pytest.importorskip("ir_measures")
    ranks, offsets, gains, n = case
    gains = gains if graded else np.ones_like(gains)
    qrels, run = [], []
    for q in range(len(offsets) - 1):
        at = slice(offsets[q], offsets[q + 1])
        qrels += [ir.Qrel(str(q), f"d{r}", int(g)) for r, g in zip(ranks[at], gains[at], strict=True)]
        # Scores derived from the ranks: distinct, so that no other tool's tie rule plays a part.
        run += [ir.ScoredDoc(str(q), f"d{r}", float(n - r)) for r in range(1, n + 1)]
    kinds = {"success": ir.Success, "recall": ir.R, "mrr": ir.RR, "ndcg": ir.nDCG}
    rates = {*metrics.RATES, *(f"{kind}@{k}" for kind in kinds)} - {"map"}
    named = {rate: kinds[rate.split("@")[0]] @ int(rate.split("@")[1]) for rate in rates} | {"map": ir.AP}
    theirs = {(m.query_id, str(m.measure)): m.value for m in ir.iter_calc(named.values(), qrels, run)}
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
    assert clamped(5) == {"success@10": 5, "mrr@10": 5, "ndcg@10": 5}
    assert clamped(10) == {}


@pytest.mark.parametrize("rate", ["hits@1", "recall", "ndcg@0", "ndcg@-1", "mrr@", "map@5", "recall@5.5"])
def test_an_unknown_rate_names_the_valid_ones(rate):
    with pytest.raises(ValueError, match="valid are success@K"):
        metrics.per_query([1], [0, 1], rates=[rate])


@pytest.mark.parametrize(("ranks", "offsets"), [([1, 2], [0, 2, 2]), ([1], [0, 2]), ([0], [0, 1]), ([], [0])])
def test_unusable_ranks_are_refused(ranks, offsets):
    with pytest.raises(ValueError):
        metrics.per_query(np.array(ranks), np.array(offsets))
