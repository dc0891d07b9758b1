"""The Fisher matrices against autograd and against their sums written out, and numbers known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mmclip.metrics import fisher
from mmclip.metrics.fisher import document_fisher, log10_kappa, marchenko_pastur, query_fisher, vanishing_trace
from mmclip.similarity import Exponents, Normalization, score

ALPHA = 1.3
DIM = 4


def sample(n: int = 5, m: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    q = 2 * torch.randn(n, DIM, generator=gen, dtype=torch.float64) + 1
    return q, torch.randn(m, DIM, generator=gen, dtype=torch.float64) + 0.5


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
    exponents = Exponents(gamma_q, gamma_d)
    expected = by_autograd(q, d, exponents)
    for matrix, wanted in zip((query_fisher, document_fisher), expected, strict=True):
        found = matrix(q, d, exponents, ALPHA, block_bytes=block_bytes)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        assert torch.equal(found, found.T) or (found - found.T).abs().max() < 1e-15


@pytest.mark.parametrize("other", [0.0, 1.0])
def test_the_four_equal_their_sums_written_out(other):
    q, d = sample()
    n, m = len(q), len(d)
    eye = torch.eye(DIM, dtype=torch.float64)

    def outer(x):
        return torch.outer(x, x)

    def unit(x):
        return x / x.norm()

    documents = d if other == 0 else torch.stack([unit(x) for x in d])
    for gamma in (0.0, 1.0):
        pi = score(q, d, Exponents(gamma, other), ALPHA).softmax(1)
        total = torch.zeros(DIM, DIM, dtype=torch.float64)
        for i in range(n):
            mean = pi[i] @ documents
            c = sum(pi[i, j] * outer(documents[j] - mean) for j in range(m))
            p = eye - outer(unit(q[i]))
            total += c if gamma == 0 else p @ c @ p / q[i].norm() ** 2
        torch.testing.assert_close(query_fisher(q, d, Exponents(gamma, other), ALPHA), ALPHA**2 / n * total)

    queries = q if other == 0 else torch.stack([unit(x) for x in q])
    pi = score(q, d, Exponents(other, 0.0), ALPHA).softmax(1)
    raw = sum((1 - (pi[i] ** 2).sum()) * outer(queries[i]) for i in range(n))
    torch.testing.assert_close(document_fisher(q, d, Exponents(other, 0.0), ALPHA), ALPHA**2 / (n * m) * raw)
    pi = score(q, d, Exponents(other, 1.0), ALPHA).softmax(1)
    total = torch.zeros(DIM, DIM, dtype=torch.float64)
    for j in range(m):
        p = eye - outer(unit(d[j]))
        inner = sum(pi[i, j] * (1 - pi[i, j]) * outer(queries[i]) for i in range(n))
        total += p @ inner @ p / d[j].norm() ** 2
    torch.testing.assert_close(document_fisher(q, d, Exponents(other, 1.0), ALPHA), ALPHA**2 / (n * m) * total)


def test_a_shift_shared_by_all_raw_documents_carries_no_information():
    # why F_D is a mean over single documents: under one shared shift the softmax does not move at all
    q, d = sample()
    shift = torch.zeros(DIM, dtype=torch.float64, requires_grad=True)
    log_p = score(q, d + shift, Normalization.DOT.exponents, ALPHA).log_softmax(1)
    for outcome in log_p.flatten():
        (gradient,) = torch.autograd.grad(outcome, shift, retain_graph=True)
        assert gradient.abs().max() < 1e-14


def test_which_document_belongs_to_which_query_changes_nothing():
    q, d = sample()
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    for matrix in (query_fisher, document_fisher):
        torch.testing.assert_close(
            matrix(q, d, Exponents(1.0, 0.4), ALPHA), matrix(q, d[order], Exponents(1.0, 0.4), ALPHA)
        )


def test_a_normalized_role_has_no_information_along_its_only_direction():
    q, d = sample()
    q = q[:1].repeat(3, 1) * torch.tensor([[1.0], [2.0], [5.0]])
    u = q[0] / q[0].norm()
    found = query_fisher(q, d, Normalization.QNORM.exponents, ALPHA)
    assert (u @ found @ u).abs() < 1e-15
    assert u @ query_fisher(q, d, Normalization.DOT.exponents, ALPHA) @ u > 1e-3


def test_documents_far_from_the_origin_lose_no_digits():
    q, d = sample()
    expected = query_fisher(q, d, Normalization.DOT.exponents, ALPHA)
    torch.testing.assert_close(
        query_fisher(q, d + 1e6, Normalization.DOT.exponents, ALPHA), expected, rtol=1e-6, atol=1e-9
    )


def test_isotropic_noise_of_unequal_sizes_shows_the_sample_and_not_the_space():
    gen = torch.Generator().manual_seed(0)
    q, d = torch.randn(300, 384, generator=gen), torch.randn(5183, 384, generator=gen)
    kappas = [
        log10_kappa(torch.linalg.eigvalsh(matrix(q, d, Normalization.DOT.exponents, 0.01)))
        for matrix in (query_fisher, document_fisher)
    ]
    assert kappas == pytest.approx([0.48, 4.65], abs=0.03)
    assert marchenko_pastur(384, 5183) == pytest.approx(0.48, abs=0.01)


def test_marchenko_pastur_is_what_isotropic_vectors_under_a_flat_softmax_show():
    gen = torch.Generator().manual_seed(1)
    q, d = (torch.randn(800, 200, generator=gen, dtype=torch.float64) for _ in range(2))
    for matrix in (query_fisher, document_fisher):
        eigenvalues = torch.linalg.eigvalsh(matrix(q, d, Normalization.DOT.exponents, 1e-6))
        assert log10_kappa(eigenvalues) == pytest.approx(marchenko_pastur(200, 800), abs=0.03)
    with pytest.raises(ValueError, match="n 64 is not above D 64"):
        marchenko_pastur(64, 64)


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


def test_a_saturated_softmax_leaves_less_than_the_vanishing_trace():
    q, d = sample()
    for alpha, vanishes in ((1.0, False), (1e4, True)):
        bounds = vanishing_trace(q, d, Normalization.DOT.exponents, alpha)
        for matrix, bound in zip((query_fisher, document_fisher), bounds, strict=True):
            trace = float(matrix(q, d, Normalization.DOT.exponents, alpha).trace())
            assert (trace <= bound) == vanishes
    equal = torch.ones(6, DIM, dtype=torch.float64)
    bounds = vanishing_trace(q, equal, Normalization.DOT.exponents, 1.0)
    assert float(query_fisher(q, equal, Normalization.DOT.exponents, 1.0).trace()) <= bounds[0]


def test_scores_are_made_in_blocks_and_never_whole(monkeypatch):
    shapes = []

    def watched(query, document, *rest):
        shapes.append((len(query), len(document)))
        return score(query, document, *rest)

    monkeypatch.setattr(fisher, "score", watched)
    rng = np.random.default_rng(0)
    q, d = (torch.as_tensor(rng.normal(size=(n, 3))) for n in (500, 400))
    for matrix in (query_fisher, document_fisher):
        shapes.clear()
        matrix(q, d, Exponents(1.0, 1.0), 1.0, block_bytes=16 * 400 * 48)
        assert {n for _, n in shapes} == {400}
        assert max(b for b, _ in shapes) == 16
        assert sum(b for b, _ in shapes) == 500
