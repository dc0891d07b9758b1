"""AUC of length against the pairs written out, on every reference set, and the ways in which it does not exist."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip.metrics import magnitude as auc
from mmclip.metrics.magnitude import cohens_d
from mmclip.retrieval.ranking import Ranking, rank
from mmclip.similarity import Normalization

HOW = {"resamples": 200, "seed": 0}


def naive(relevant: np.ndarray, irrelevant: np.ndarray) -> float:
    a, b = relevant[:, None], irrelevant[None, :]
    return float(np.mean((a > b) + 0.5 * (a == b)))


def ranked(lengths: np.ndarray, pairs: np.ndarray, n_queries: int, k: int = 4) -> Ranking:
    gen = torch.Generator().manual_seed(0)
    query = torch.randn(n_queries, 6, generator=gen)
    unit = torch.nn.functional.normalize(torch.randn(len(lengths), 6, generator=gen), dim=1)
    document = unit * torch.as_tensor(lengths)[:, None]
    return rank(query, document, pairs, {"cosine": Normalization.COSINE.exponents}, top_k={"cosine": k})["cosine"]


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=20),
    st.lists(st.integers(0, 6), min_size=1, max_size=20),
)
def test_auc_equals_all_comparisons_written_out(relevant, irrelevant):
    counts = [np.bincount(x, minlength=7) for x in (relevant, irrelevant)]
    assert auc.auc(*counts) == pytest.approx(naive(np.array(relevant), np.array(irrelevant)), abs=1e-12)


def test_every_reference_set_equals_its_pairs_written_out():
    rng = np.random.default_rng(1)
    lengths = rng.integers(5, 15, size=40).astype(float)  # with ties
    pairs = np.unique(np.column_stack([rng.integers(0, 25, 60), rng.integers(0, 30, 60)]), axis=0)
    r = ranked(lengths, pairs, 25)
    found = auc.magnitude_auc(lengths, r, r.queries, np.arange(40), **HOW)
    top = lengths[r.top_ids]
    assert found["topk"][0]["value"] == pytest.approx(naive(top[r.top_relevant], top[~r.top_relevant]))
    some = np.isin(np.arange(40), r.documents)
    assert found["corpus"][0]["value"] == pytest.approx(naive(lengths[some], lengths[~some]))
    own = [r.documents[r.offsets[i] : r.offsets[i + 1]] for i in range(len(r.queries))]
    others = np.concatenate([np.setdiff1d(np.arange(40), d) for d in own])
    assert found["pairs"][0]["value"] == pytest.approx(naive(lengths[r.documents], lengths[others]))
    d = cohens_d(lengths, r, r.queries, np.arange(40), **HOW)
    for name, (value, _) in found.items():
        assert (value["n_relevant"], value["n_irrelevant"]) == (d[name][0]["n_relevant"], d[name][0]["n_irrelevant"])
        assert value["ci"][0] <= value["value"] <= value["ci"][1]


def test_a_bootstrap_sample_counts_a_query_as_often_as_it_is_drawn():
    lengths = np.array([3.0, 1.0, 2.0, 5.0, 4.0])
    pairs = np.array([[0, 0], [1, 3], [1, 1]])
    r = ranked(lengths, pairs, 2)
    seen = []
    real = auc.auc
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auc, "auc", lambda a, b: seen.append((a.sum(), b.sum())) or real(a, b))
        auc.magnitude_auc(lengths, r, np.array([0, 1]), np.arange(5), resamples=30, seed=0)
    # all pairs of a sample of two queries: the first has 1 of 5 relevant, the second 2 of 5
    assert {(2, 8), (3, 7), (4, 6)} <= set(seen)


def test_auc_is_blind_to_a_monotone_rescaling_and_swaps_with_the_sign():
    rng = np.random.default_rng(2)
    lengths = rng.uniform(1, 3, size=30)
    r = ranked(lengths, np.column_stack([np.arange(20), np.arange(20)]), 20)
    one, other, turned = (
        auc.magnitude_auc(x, r, r.queries, np.arange(30), **HOW)["topk"][0]["value"]
        for x in (lengths, np.exp(3 * lengths), 10 - lengths)
    )
    assert one == other
    assert turned == pytest.approx(1 - one)


def test_what_does_not_exist_has_ds_reason():
    lengths = np.random.default_rng(0).uniform(1, 2, size=8)
    r = ranked(lengths, np.column_stack([np.arange(8), np.arange(8)]), 8, k=8)
    args = (r, r.queries, np.arange(8))
    mine, theirs = auc.magnitude_auc(lengths, *args, **HOW), cohens_d(lengths, *args, **HOW)
    assert mine["corpus"] == theirs["corpus"] == (None, "every candidate is relevant to some query")
    assert mine["pairs"] == theirs["pairs"]
    assert mine["topk"][1] is None
    flat = auc.magnitude_auc(np.full(8, 2.0), *args, **HOW)
    assert set(flat.values()) == {(None, "norms do not vary")}
    no_hit = ranked(lengths, np.array([[0, 5]]), 1, k=1)
    assert auc.magnitude_auc(lengths, no_hit, no_hit.queries, np.arange(8), **HOW)["topk"][1] == (
        "no relevant document among the queries' 1 best by cosine"
    )


def test_one_cluster_has_a_value_and_no_interval():
    lengths = np.random.default_rng(3).uniform(1, 2, size=12)
    r = ranked(lengths, np.column_stack([np.arange(6), np.arange(6)]), 6)
    args = (lengths, r, np.zeros(6), np.zeros(12))
    for found in (auc.magnitude_auc(*args, **HOW), cohens_d(*args, **HOW)):
        for value, reason in found.values():
            assert reason is None
            assert value["ci"] is None
