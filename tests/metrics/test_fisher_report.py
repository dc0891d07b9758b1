"""Condition numbers with their intervals and nulls, and "undetermined" where they would speak of the sample."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip.metrics import fisher as report_module
from mmclip.metrics.fisher import (
    document_fisher,
    fisher_report,
    four_matrices,
    log10_kappa,
    matched_pairs,
    query_fisher,
)
from mmclip.similarity import Exponents, mean_norm_factor

DIM = 16
N = 4 * DIM
QNORM = Exponents(1.0, 0.0)
NAMES = ["query_raw", "query_normalized", "document_raw", "document_normalized"]


def sample(n: int, dim: int = DIM, noise: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    document = torch.randn(n, dim, generator=gen) * torch.linspace(0.5, 2, dim) + 0.5
    return 0.6 * document + noise * torch.randn(n, dim, generator=gen), document


def report_of(q: torch.Tensor, d: torch.Tensor, exponents: Exponents = QNORM, alpha: float = 1.0, **options):
    rows = np.arange(len(q))
    return fisher_report(q, d, (rows, rows), rows, exponents, alpha, **{"resamples": 20} | options)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 1000))
def test_matched_pairs_are_pairs_with_every_query_and_document_once(n, m, seed):
    rng = np.random.default_rng(seed)
    pairs = np.argwhere(rng.random((n, m)) < 0.4)
    rows, documents = matched_pairs(pairs[:, 0], pairs[:, 1], rng)
    assert len(set(rows)) == len(rows) == len(set(documents))
    assert {(a, b) for a, b in zip(rows, documents, strict=True)} <= {(a, b) for a, b in pairs}
    assert len(rows) > 0 or len(pairs) == 0


def test_one_to_many_relevance_is_matched_as_far_as_it_goes():
    many, one = np.arange(50), np.arange(50) // 5
    for pairs in ((many, one), (one, many)):
        rows, _ = matched_pairs(*pairs, np.random.default_rng(0))
        assert len(rows) == 10


def test_isotropic_noise_of_the_wrong_sizes_is_undetermined_with_the_reason():
    gen = torch.Generator().manual_seed(0)
    q, d = torch.randn(300, 384, generator=gen), torch.randn(5183, 384, generator=gen)
    rows = np.arange(300)
    found = fisher_report(q, d, (rows, rows), rows, Exponents(0.0, 0.0), 0.01)
    assert found == {
        "status": "undetermined",
        "reason": "300 matched pairs: 1536 are needed, 4 a dimension",
        "n_available": 300,
        "n_needed": 1536,
        "dim": 384,
    }


def test_a_report_holds_the_four_at_one_effective_scale():
    q, d = sample(N)  # no pair is left out, so that the sample is known
    found = report_of(q, d, alpha=2.0)
    json.dumps(found, allow_nan=False)
    assert (found["status"], found["n"], found["n_available"], found["dim"]) == ("determined", N, N, DIM)
    q, d = q.double(), d.double()
    scale = 2.0 * mean_norm_factor(q, d, QNORM)
    assert found["effective_scale"] == pytest.approx(scale)
    wanted = {
        "query_raw": (query_fisher, (0.0, 0.0)),
        "query_normalized": (query_fisher, (1.0, 0.0)),
        "document_raw": (document_fisher, (1.0, 0.0)),
        "document_normalized": (document_fisher, (1.0, 1.0)),
    }
    for name, (matrix, exponents) in wanted.items():
        at = Exponents(*exponents)
        alpha = scale / mean_norm_factor(q, d, at)
        eigenvalues = torch.linalg.eigvalsh(matrix(q, d, at, alpha))
        section = found[name]
        assert section["exponents"] == {"gamma_q": exponents[0], "gamma_d": exponents[1]}
        assert section["alpha"] == pytest.approx(alpha)
        assert section["log10_kappa"]["value"] == pytest.approx(log10_kappa(eigenvalues))
        assert section["sensitivity"] == {
            "0.001": pytest.approx(log10_kappa(eigenvalues, 1e-3)),
            "1e-05": pytest.approx(log10_kappa(eigenvalues, 1e-5)),
        }
        assert section["effective_rank"] == pytest.approx(
            float(eigenvalues.sum() ** 2 / (eigenvalues**2).sum()), rel=1e-9
        )
        lo, hi = section["log10_kappa"]["ci"]
        assert lo < section["log10_kappa"]["value"] < hi
    assert found["query_normalized"]["alpha"] == found["document_raw"]["alpha"] == pytest.approx(2.0)
    assert found["marchenko_pastur"] == pytest.approx(np.log10(9))
    assert found["query_raw"]["unpaired"] is None
    assert found["unpaired_reason"] == f"{N} matched pairs: {2 * N} are needed"


def test_permuted_pairs_change_nothing_where_every_pair_is_in_the_sample():
    q, d = sample(N)
    rows = np.arange(N)
    one = fisher_report(q, d, (rows, rows), rows, QNORM, 1.0, resamples=2)
    other = fisher_report(q, d, (rows, np.roll(rows, 5)), rows, QNORM, 1.0, resamples=2)
    for name in NAMES:
        assert one[name]["log10_kappa"]["value"] == pytest.approx(other[name]["log10_kappa"]["value"])


def test_right_answers_among_the_candidates_show_against_the_unpaired_null():
    q, d = sample(2 * N, noise=0.05)
    unrelated = q.mean(0) + q.std(0) * torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    found, alone = (report_of(x, d, alpha=20.0)["document_normalized"] for x in (q, unrelated))
    assert found["log10_kappa"]["value"] - found["unpaired"] > 2
    assert abs(alone["log10_kappa"]["value"] - alone["unpaired"]) < 0.6  # the null has other documents: sampling


def test_isotropic_noise_under_a_flat_softmax_is_its_own_null_and_near_marchenko_pastur():
    gen = torch.Generator().manual_seed(0)
    q, d = torch.randn(256, 64, generator=gen), torch.randn(256, 64, generator=gen)
    found = report_of(q, d, Exponents(0.0, 0.0), alpha=1e-3)
    for name in NAMES:
        assert found[name]["log10_kappa"]["value"] == pytest.approx(found[name]["gaussian"], abs=0.05)
        assert found[name]["log10_kappa"]["value"] == pytest.approx(found["marchenko_pastur"], abs=0.15)


def test_the_gaussian_null_has_the_features_mean_and_covariance_exactly_and_nothing_else():
    x = torch.rand(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3 + 4
    drawn = report_module._gaussian_like(x, np.random.default_rng(0))
    torch.testing.assert_close(drawn.mean(0), x.mean(0))
    torch.testing.assert_close(drawn.T.cov(), x.T.cov())
    assert abs(torch.corrcoef(torch.stack([drawn[:, 0], x[:, 0]]))[0, 1]) < 0.3
    assert x.min() > 4 > drawn.min()  # a cube of a uniform number has a floor, a Gaussian has none


def test_the_interval_covers_the_number_that_other_queries_of_the_same_kind_give(monkeypatch):
    monkeypatch.setattr(report_module, "GAUSSIAN_DRAWS", 1)  # of no interest here
    _, d = sample(N)
    values, intervals = {name: [] for name in NAMES}, {name: [] for name in NAMES}
    for seed in range(6):
        gen = torch.Generator().manual_seed(100 + seed)
        q = 0.6 * d + torch.randn(N, DIM, generator=gen)
        found = report_of(q, d, resamples=40)
        for name in NAMES:
            values[name].append(found[name]["log10_kappa"]["value"])
            intervals[name].append(found[name]["log10_kappa"]["ci"])
    for name in NAMES:
        covered = [lo <= np.mean(values[name]) <= hi for lo, hi in intervals[name]]
        assert sum(covered) >= 5, name


def test_queries_of_one_cluster_are_drawn_together_and_one_cluster_has_no_interval():
    groups = report_module._groups(np.repeat(np.arange(30), 4), np.random.default_rng(0))
    assert len(groups) == 30
    assert all(len({int(row) // 4 for row in g}) == 1 and len(g) == 4 for g in groups)
    assert len(report_module._groups(np.arange(500), np.random.default_rng(0))) == report_module.GROUPS
    q, d = sample(N)
    rows = np.arange(N)
    found = fisher_report(q, d, (rows, rows), np.zeros(N), QNORM, 1.0)
    assert found["query_raw"]["log10_kappa"]["ci"] is None


def test_the_same_seed_gives_the_same_report():
    q, d = sample(3 * N)
    assert report_of(q, d, seed=4) == report_of(q, d, seed=4)
    assert report_of(q, d, seed=4)["query_raw"] != report_of(q, d, seed=5)["query_raw"]


def test_what_has_no_condition_number_says_why():
    q, d = sample(N)
    saturated = report_of(q, d, alpha=1e6)
    json.dumps(saturated, allow_nan=False)
    for name in NAMES:
        assert saturated[name]["log10_kappa"] is None
        assert "saturated" in saturated[name]["log10_kappa_reason"]
    d[3] = 0
    assert report_of(q, d)["reason"] == "1 sampled vectors have norm 0 and no direction"


def test_the_four_are_named_by_role_and_exponent():
    assert {name: (m.__name__, tuple(e)) for name, (m, e) in four_matrices(Exponents(0.3, 0.6)).items()} == {
        "query_raw": ("query_fisher", (0.0, 0.6)),
        "query_normalized": ("query_fisher", (1.0, 0.6)),
        "document_raw": ("document_fisher", (0.3, 0.0)),
        "document_normalized": ("document_fisher", (0.3, 1.0)),
    }
