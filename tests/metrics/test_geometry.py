"""How vectors lie, against the same numbers written out, and what has no number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mmclip.metrics import geometry
from mmclip.roles import Exponents, Normalization
from mmclip.similarity import score


def vectors(n: int, dim: int, seed: int = 0, shift: float = 0.5) -> torch.Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift


@given(st.integers(2, 30), st.integers(1, 8), st.floats(-2, 2))
def test_anisotropy_equals_the_mean_over_all_pairs(n, dim, shift):
    x = vectors(n, dim, shift=shift)
    cosines = score(x, x, Normalization.COSINE.exponents)
    expected = cosines[~torch.eye(n, dtype=torch.bool)].mean()
    assert geometry.anisotropy(x)[0] == pytest.approx(float(expected), abs=1e-12)


def test_anisotropy_in_blocks_and_with_zero_vectors_is_the_same(monkeypatch):
    x = vectors(11, 5)
    whole = geometry.anisotropy(x)[0]
    monkeypatch.setattr(geometry, "BLOCK_ROWS", 4)
    assert geometry.anisotropy(x)[0] == pytest.approx(whole, abs=1e-14)
    with_zero = torch.cat([x, torch.zeros(1, 5)])
    assert geometry.anisotropy(with_zero)[0] == pytest.approx(whole * 110 / 132)
    assert geometry.anisotropy(x[:1]) == (None, "1 vectors: a pair needs 2")


def test_modality_gap_is_the_distance_of_the_centroids_of_directions():
    x, y = vectors(9, 4), vectors(7, 4, seed=1, shift=-0.5)
    units = [np.stack([v / np.linalg.norm(v) for v in side.numpy()]) for side in (x, y)]
    assert geometry.modality_gap(x, y) == pytest.approx(np.linalg.norm(units[0].mean(0) - units[1].mean(0)))
    assert geometry.modality_gap(x, 3 * x) == pytest.approx(0, abs=1e-12)
    assert geometry.modality_gap(torch.ones(2, 3), -torch.ones(2, 3)) == pytest.approx(2)


def test_effective_ranks_equal_their_definitions(monkeypatch):
    monkeypatch.setattr(geometry, "BLOCK_ROWS", 7)
    x = vectors(50, 6) * torch.tensor([3.0, 1, 1, 0.5, 0.1, 0.01])
    centred = x.numpy() - x.numpy().mean(0)
    s = np.linalg.svd(centred, compute_uv=False)
    c = np.cov(x.numpy().T)
    found, _ = geometry.effective_rank(x)
    assert found["participation"] == pytest.approx(np.trace(c) ** 2 / (c**2).sum())
    assert found["entropy"] == pytest.approx(np.exp(stats.entropy(s / s.sum())))
    assert found["at_most"] == 6


def test_effective_rank_counts_planted_dimensions():
    basis = torch.linalg.qr(vectors(20, 20)).Q[:, :5]
    x = vectors(20000, 5, seed=3, shift=7.0) @ basis.T  # 5 equal dimensions of 20, far from the origin
    found, _ = geometry.effective_rank(x)
    assert found["participation"] == pytest.approx(5, rel=0.01)
    assert found["entropy"] == pytest.approx(5, rel=0.01)
    assert geometry.effective_rank(torch.full((4, 3), 0.1)) == (None, "the vectors do not vary")
    assert geometry.effective_rank(vectors(1, 3)) == (None, "the vectors do not vary")


def test_one_planted_hub_is_found():
    rng = np.random.default_rng(0)
    even = np.array([rng.permutation(100)[:10] for _ in range(500)])
    hub = even.copy()
    hub[~(hub == 7).any(axis=1), 0] = 7
    without, with_hub = (geometry.hubness(ids, 100)[0] for ids in (even, hub))
    assert abs(without["skewness"]) < 0.5
    assert with_hub["skewness"] > 8
    assert with_hub["largest"] == 1
    counts = np.bincount(hub.ravel(), minlength=100)
    assert with_hub["skewness"] == pytest.approx(((counts - counts.mean()) ** 3).mean() / counts.std() ** 3)
    assert geometry.hubness(np.array([[0], [1]]), 4)[0]["never"] == 0.5
    assert geometry.hubness(np.array([[0], [1]]), 2)[0] is None


def test_entanglement_is_the_correlation_over_pairs_in_either_direction(monkeypatch):
    monkeypatch.setattr(geometry, "BLOCK_ROWS", 4)
    x, y = vectors(30, 5), vectors(30, 5, seed=1)
    norms = [np.linalg.norm(v.numpy(), axis=1) for v in (x, y)]
    cosines = (x * y).sum(1).numpy() / norms[0] / norms[1]
    expected = np.corrcoef(np.log(norms[0] * norms[1]), cosines)[0, 1]
    for query, document in ((x, y), (y, x)):
        assert geometry.entanglement(query, document)[0] == {"value": pytest.approx(expected), "n": 30}


def test_planted_entanglement_has_its_sign_and_impossible_ones_a_reason():
    q, d = vectors(200, 8), vectors(200, 8, seed=1)
    q, d = (torch.nn.functional.normalize(x, dim=1) for x in (q, d))
    cosines = (q * d).sum(1, keepdim=True)
    for sign in (-1, 1):
        assert geometry.entanglement(q, d * torch.exp(sign * 2 * cosines))[0]["value"] == pytest.approx(sign)
    assert geometry.entanglement(q, d) == (None, "norms or angles do not vary")
    assert geometry.entanglement(q * 0, d) == (None, "a vector of norm 0 has no angle")
    assert "needs 3" in geometry.entanglement(q[:2], d[:2])[1]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 200.0])
def test_row_entropy_equals_scipys_in_blocks_of_bounded_size(alpha, monkeypatch):
    sizes: list[int] = []
    monkeypatch.setattr(geometry, "score", lambda q, *rest: sizes.append(len(q)) or score(q, *rest))
    q, d, exponents = vectors(13, 6), vectors(40, 6, seed=1), Exponents(1.0, 0.4)
    expected = stats.entropy(score(q, d, exponents, alpha).softmax(1).numpy(), axis=1)
    for block_bytes in (1, 32 * 40 * 5, 2**26):
        found = geometry.row_entropy(q, d, exponents, alpha, block_bytes=block_bytes)
        assert found == pytest.approx(expected, abs=1e-10)
    assert sizes == [1] * 13 + [5, 5, 3] + [13]
    assert alpha or found == pytest.approx(np.log(40))
