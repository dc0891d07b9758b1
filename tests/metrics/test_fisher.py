"""Fisher matrices against autograd and closed forms; condition numbers with intervals, nulls and "undetermined"."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mmclip.metrics import fisher
from mmclip.metrics.fisher import (
    document_fisher,
    fisher_report,
    log10_kappa,
    marchenko_pastur,
    matched_pairs,
    query_fisher,
    vanishing_trace,
)
from mmclip.roles import Exponents, Normalization
from mmclip.similarity import mean_norm_factor, score

ALPHA, DIM, REPORT_DIM = 1.3, 4, 16
N = 4 * REPORT_DIM
DOT, QNORM = Normalization.DOT.exponents, Normalization.QNORM.exponents
NAMES = ["query_raw", "query_normalized", "document_raw", "document_normalized"]


def sample(n: int = 5, m: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    q = 2 * torch.randn(n, DIM, generator=gen, dtype=torch.float64) + 1
    return q, torch.randn(m, DIM, generator=gen, dtype=torch.float64) + 0.5


def noise(n: int, dim: int, m: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Isotropic vectors."""
    gen = torch.Generator().manual_seed(0)
    return torch.randn(n, dim, generator=gen), torch.randn(m or n, dim, generator=gen)


def by_autograd(q: torch.Tensor, d: torch.Tensor, exponents: Exponents) -> tuple[torch.Tensor, torch.Tensor]:
    """E[g g^T] of one item's own raw vector, outcome by outcome: its mean over queries, and over documents."""
    of_query, of_document = torch.zeros(DIM, DIM), torch.zeros(DIM, DIM)
    for i in range(len(q)):
        for j in range(len(d)):
            own, documents = q[i : i + 1].clone().requires_grad_(), d.clone().requires_grad_()
            log_p = score(own, documents, exponents, ALPHA).log_softmax(1)[0, j]
            g_q, g_d = torch.autograd.grad(log_p, (own, documents))
            of_query = of_query + log_p.exp().detach() * g_q.T @ g_q / len(q)
            of_document = of_document + log_p.exp().detach() * g_d.T @ g_d / (len(q) * len(d))
    return of_query, of_document


@example(0.0, 0.0, 700)  # the four matrices: each role raw and normalized, whatever else is drawn
@example(0.0, 1.0, 700)
@example(1.0, 0.0, 700)
@example(1.0, 1.0, 700)
@given(st.sampled_from([0.0, 1.0, 0.3, 0.77]), st.sampled_from([0.0, 1.0, 0.5]), st.sampled_from([1, 700, 2**20]))
def test_both_matrices_equal_autograds_for_every_exponent_and_block(gamma_q, gamma_d, block_bytes):
    q, d = sample()
    exponents, order = Exponents(gamma_q, gamma_d), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    for matrix, wanted in zip((query_fisher, document_fisher), by_autograd(q, d, exponents), strict=True):
        found = matrix(q, d, exponents, ALPHA, block_bytes=block_bytes)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        assert (found - found.T).abs().max() < 1e-15
        # which document belongs to which query changes nothing
        torch.testing.assert_close(matrix(q, d[order], exponents, ALPHA), found)


def test_a_shift_shared_by_all_raw_documents_carries_no_information():
    # why F_D is a mean over single documents: under one shared shift the softmax does not move at all
    q, d = sample()
    shift = torch.zeros(DIM, dtype=torch.float64, requires_grad=True)
    log_p = score(q, d + shift, DOT, ALPHA).log_softmax(1)
    for outcome in log_p.flatten():
        (gradient,) = torch.autograd.grad(outcome, shift, retain_graph=True)
        assert gradient.abs().max() < 1e-14


def test_a_normalized_role_has_no_information_along_its_only_direction():
    q, d = sample()
    q = q[:1].repeat(3, 1) * torch.tensor([[1.0], [2.0], [5.0]])
    u = q[0] / q[0].norm()
    assert (u @ query_fisher(q, d, QNORM, ALPHA) @ u).abs() < 1e-15
    assert u @ query_fisher(q, d, DOT, ALPHA) @ u > 1e-3


def test_documents_far_from_the_origin_lose_no_digits():
    q, d = sample()
    far, near = (query_fisher(q, x, DOT, ALPHA) for x in (d + 1e6, d))
    torch.testing.assert_close(far, near, rtol=1e-6, atol=1e-9)


def test_isotropic_noise_shows_the_sample_as_marchenko_and_pastur_say():
    q, d = noise(300, 384, 5183)
    kappas = [log10_kappa(torch.linalg.eigvalsh(f(q, d, DOT, 0.01))) for f in (query_fisher, document_fisher)]
    assert kappas == pytest.approx([0.48, 4.65], abs=0.03)
    assert marchenko_pastur(384, 5183) == pytest.approx(0.48, abs=0.01)
    with pytest.raises(ValueError, match="n 64 is not above D 64"):
        marchenko_pastur(64, 64)
    rows = np.arange(300)
    assert fisher_report(q, d, (rows, rows), rows, Exponents(0.0, 0.0), 0.01) == {
        "status": "undetermined",
        "reason": "300 matched pairs: 1536 are needed, 4 a dimension",
        "n_available": 300,
        "n_needed": 1536,
        "dim": 384,
    }


@given(
    st.lists(st.floats(0, 1e3), min_size=1, max_size=8).filter(lambda x: max(x) > 1e-3),
    st.floats(1e-6, 1.0),
    st.floats(1e-3, 1e3),
)
def test_kappa_is_at_least_1_bounded_blind_to_scale_and_falls_with_epsilon(values, epsilon, scale):
    x = torch.tensor(values, dtype=torch.float64)
    found = log10_kappa(x, epsilon)
    assert 0 <= found <= math.log10(1 + len(values) / epsilon) + 1e-9
    assert log10_kappa(scale * x, epsilon) == pytest.approx(found, abs=1e-9)
    assert log10_kappa(x, 2 * epsilon) <= found + 1e-12
    assert log10_kappa(torch.cat([x, -1e-18 * x[:1]]), epsilon) >= 0  # an eigenvalue below 0 is rounding


def test_a_saturated_softmax_and_equal_vectors_leave_less_than_the_vanishing_trace():
    q, d = sample()
    equal = torch.ones(6, DIM, dtype=torch.float64)
    for documents, alpha, vanishes in ((d, 1.0, False), (d, 1e4, True), (equal, 1.0, True)):
        bounds = vanishing_trace(q, documents, DOT, alpha)
        assert (float(query_fisher(q, documents, DOT, alpha).trace()) <= bounds[0]) == vanishes
        if documents is d:
            assert (float(document_fisher(q, d, DOT, alpha).trace()) <= bounds[1]) == vanishes


@pytest.mark.parametrize("matrix", [query_fisher, document_fisher])
def test_scores_are_made_in_blocks_and_never_whole(matrix, monkeypatch):
    shapes: list[tuple[int, int]] = []
    monkeypatch.setattr(fisher, "score", lambda q, d, *rest: shapes.append((len(q), len(d))) or score(q, d, *rest))
    q, d = noise(500, 3, 400)
    matrix(q, d, Exponents(1.0, 1.0), 1.0, block_bytes=16 * 400 * 48)
    assert set(shapes) == {(16, 400), (4, 400)} and sum(n for n, _ in shapes) == 500


# the report


def report_sample(n: int, noise: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    document = torch.randn(n, REPORT_DIM, generator=gen) * torch.linspace(0.5, 2, REPORT_DIM) + 0.5
    return 0.6 * document + noise * torch.randn(n, REPORT_DIM, generator=gen), document


def report_of(q: torch.Tensor, d: torch.Tensor, exponents: Exponents = QNORM, alpha: float = 1.0, **options):
    rows = np.arange(len(q))
    clusters = options.pop("clusters", rows)
    return fisher_report(q, d, (rows, rows), clusters, exponents, alpha, **{"resamples": 20} | options)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 1000))
def test_matched_pairs_are_pairs_with_every_query_and_document_once(n, m, seed):
    rng = np.random.default_rng(seed)
    pairs = np.argwhere(rng.random((n, m)) < 0.4)
    rows, documents = matched_pairs(pairs[:, 0], pairs[:, 1], rng)
    assert len(set(rows)) == len(rows) == len(set(documents))
    assert {(a, b) for a, b in zip(rows, documents, strict=True)} <= {(a, b) for a, b in pairs}
    assert len(rows) > 0 or len(pairs) == 0


def test_one_to_many_relevance_is_matched_as_far_as_possible():
    many, one = np.arange(50), np.arange(50) // 5
    for pairs in ((many, one), (one, many)):
        assert len(matched_pairs(*pairs, np.random.default_rng(0))[0]) == 10


def test_a_report_holds_the_four_at_one_effective_scale():
    q, d = report_sample(N)  # no pair is left out, so that the sample is known
    found = report_of(q, d, alpha=2.0, seed=4)
    json.dumps(found, allow_nan=False)
    assert (found["status"], found["n"], found["n_available"], found["dim"]) == ("determined", N, N, REPORT_DIM)
    q, d = q.double(), d.double()
    scale = 2.0 * mean_norm_factor(q, d, QNORM)
    assert found["effective_scale"] == pytest.approx(scale)
    for name, exponents in zip(NAMES, ((0.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 1.0)), strict=True):
        at, section = Exponents(*exponents), found[name]
        alpha = scale / mean_norm_factor(q, d, at)
        matrix = query_fisher if name.startswith("query") else document_fisher
        eigenvalues = torch.linalg.eigvalsh(matrix(q, d, at, alpha))
        assert section["exponents"] == {"gamma_q": exponents[0], "gamma_d": exponents[1]}
        assert section["alpha"] == pytest.approx(alpha)
        assert section["log10_kappa"]["value"] == pytest.approx(log10_kappa(eigenvalues))
        expected = {"0.001": log10_kappa(eigenvalues, 1e-3), "1e-05": log10_kappa(eigenvalues, 1e-5)}
        assert section["sensitivity"] == pytest.approx(expected)
        rank = float(eigenvalues.sum() ** 2 / (eigenvalues**2).sum())
        assert section["effective_rank"] == pytest.approx(rank, rel=1e-9)
        lo, hi = section["log10_kappa"]["ci"]
        assert lo < section["log10_kappa"]["value"] < hi
    assert found["query_normalized"]["alpha"] == found["document_raw"]["alpha"] == pytest.approx(2.0)
    assert found["marchenko_pastur"] == pytest.approx(np.log10(9))
    assert found["query_raw"]["unpaired"] is None
    assert found["unpaired_reason"] == f"{N} matched pairs: {2 * N} are needed"
    again, other = (report_of(q.float(), d.float(), alpha=2.0, seed=s) for s in (4, 5))
    assert again == found and other["query_raw"] != found["query_raw"]


def test_relevant_candidates_show_against_the_unpaired_null():
    q, d = report_sample(2 * N, noise=0.05)
    unrelated = q.mean(0) + q.std(0) * torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    found, alone = (report_of(x, d, alpha=20.0)["document_normalized"] for x in (q, unrelated))
    assert found["log10_kappa"]["value"] - found["unpaired"] > 2
    assert abs(alone["log10_kappa"]["value"] - alone["unpaired"]) < 0.6  # the null has other documents: sampling


def test_isotropic_noise_under_a_flat_softmax_is_its_own_null_and_near_marchenko_pastur():
    found = report_of(*noise(256, 64), Exponents(0.0, 0.0), alpha=1e-3)
    for name in NAMES:
        assert found[name]["log10_kappa"]["value"] == pytest.approx(found[name]["gaussian"], abs=0.05)
        assert found[name]["log10_kappa"]["value"] == pytest.approx(found["marchenko_pastur"], abs=0.15)


def test_the_gaussian_null_has_the_features_mean_and_covariance_exactly_and_nothing_else():
    x = torch.rand(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3 + 4
    drawn = fisher._gaussian_like(x, np.random.default_rng(0))
    torch.testing.assert_close(drawn.mean(0), x.mean(0))
    torch.testing.assert_close(drawn.T.cov(), x.T.cov())
    assert abs(torch.corrcoef(torch.stack([drawn[:, 0], x[:, 0]]))[0, 1]) < 0.3
    assert x.min() > 4 > drawn.min()  # a cube of a uniform number has a floor, a Gaussian has none


def test_the_interval_covers_the_number_that_other_queries_of_the_same_kind_give(monkeypatch):
    monkeypatch.setattr(fisher, "GAUSSIAN_DRAWS", 1)  # of no interest here
    _, d = report_sample(N)
    found = []
    for seed in range(6):
        gen = torch.Generator().manual_seed(100 + seed)
        found.append(report_of(0.6 * d + torch.randn(N, REPORT_DIM, generator=gen), d, resamples=40))
    for name in NAMES:
        kappas = [report[name]["log10_kappa"] for report in found]
        mean = np.mean([kappa["value"] for kappa in kappas])
        assert sum(kappa["ci"][0] <= mean <= kappa["ci"][1] for kappa in kappas) >= 5, name


def test_queries_of_one_cluster_are_drawn_together_and_one_cluster_has_no_interval():
    groups = fisher._groups(np.repeat(np.arange(30), 4), np.random.default_rng(0))
    assert len(groups) == 30
    assert all(len({int(row) // 4 for row in g}) == 1 and len(g) == 4 for g in groups)
    assert len(fisher._groups(np.arange(500), np.random.default_rng(0))) == fisher.GROUPS
    found = report_of(*report_sample(N), clusters=np.zeros(N))
    assert found["query_raw"]["log10_kappa"]["ci"] is None


def test_what_has_no_condition_number_has_a_reason():
    q, d = report_sample(N)
    saturated = report_of(q, d, alpha=1e6)
    json.dumps(saturated, allow_nan=False)
    for name in NAMES:
        assert saturated[name]["log10_kappa"] is None
        assert "saturated" in saturated[name]["log10_kappa_reason"]
    d[3] = 0
    assert report_of(q, d)["reason"] == "1 sampled vectors have norm 0 and no direction"
