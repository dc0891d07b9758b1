"""Roles, the five normalizations against their formulas, and the scale's calibration, clamp and schedule."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmclip.errors import UserError
from mmclip.roles import CLIP_DIRECTIONS, FIXED_NORMALIZATIONS, Direction, Exponents, Normalization, direction_weights
from mmclip.similarity import Similarity, magnitude, normalize, score

I2T = Direction.I2T
SEEDS = st.integers(0, 10_000)


def features(seed: int, n: int = 6, dim: int = 5, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    norms = torch.rand(2, n, 1, generator=g, dtype=dtype) * 9 + 0.5
    raw = torch.randn(2, n, dim, generator=g, dtype=dtype) * norms
    return {"image": raw[0], "text": raw[1]}


def norms(seed: int, n: int = 6, stretch: float = 1.0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {side: stretch * magnitude(rows) for side, rows in features(seed, n, dtype=dtype).items()}


def numbers(exponents: Exponents) -> list[float]:
    return [torch.as_tensor(g).item() for g in exponents]


@given(seed=SEEDS, gamma_q=st.floats(0, 1))
def test_scores_are_the_formulas_one_pair_at_a_time_and_rank_by_the_documents_exponent(
    seed: int, gamma_q: float
) -> None:
    sides, transposed = features(seed), {}
    for direction in CLIP_DIRECTIONS:
        query, document = direction.roles(sides)
        order = {}
        for norm in FIXED_NORMALIZATIONS:
            scores = score(query, document, norm.exponents)
            for q, d in itertools.product(range(len(query)), range(len(document))):  # each formula of the paper
                dot, nq, nd = (float(x) for x in (query[q] @ document[d], query[q].norm(), document[d].norm()))
                naive = {"cosine": dot / (nq * nd), "dot": dot, "qnorm": dot / nq, "dnorm": dot / nd}[norm.value]
                assert float(scores[q, d]) == pytest.approx(naive, rel=1e-12)
            order[norm.value] = scores.argsort(dim=1).tolist()
            transposed.setdefault(norm.value, []).append(scores)
        assert order["cosine"] == order["dnorm"] and order["dot"] == order["qnorm"], "four scorings, two rankings"
        ratio = score(query, document, Exponents(gamma_q, 0.3)) / score(query, document, Exponents(0.0, 0.3))
        assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio)), "the query's exponent rescales its scores"
    same = {norm: bool(torch.allclose(i2t, t2i.T)) for norm, (i2t, t2i) in transposed.items()}
    assert same == {"cosine": True, "dot": True, "qnorm": False, "dnorm": False}, "never transpose one"


def test_roles_follow_the_direction() -> None:
    sides = {"image": 1, "text": 2, "query": 3, "document": 4}
    assert [d.roles(sides) for d in Direction] == [(1, 2), (2, 1), (3, 4), (4, 3)]
    assert all(d.opposite.roles(sides) == d.roles(sides)[::-1] and d.opposite.opposite is d for d in Direction)
    with pytest.raises(ValueError, match="learned"):
        Normalization.LEARNED.exponents  # noqa: B018


@pytest.mark.parametrize("text", [False, True])
def test_bad_weights_are_refused(text: bool) -> None:
    both, one, first = ("both", "q2d", "q2d") if text else ("sym", "asym-i2t", "i2t")
    for arguments, message in (
        (("syn",), f"unknown loss 'syn'; valid: .*{one}"),
        ((both, 1.5), f"{first} weight 1.5 is outside 0 to 1"),
        ((one, 0.4), f"fixes the {first} weight at 1; give 0.4 with loss '{both}'"),
    ):
        with pytest.raises(UserError, match=message):
            direction_weights(*arguments, text=text)  # type: ignore[misc]


@pytest.mark.parametrize("gamma", [0.0, 0.4, 1.0, torch.tensor(0.4)])
def test_zero_vectors_score_zero_and_have_finite_gradients(gamma: float | Tensor) -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    scores = score(x, torch.ones(4, 3), Exponents(gamma, gamma))
    assert (scores == 0).all()
    scores.sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()


def test_scores_are_float32_under_autocast_and_do_not_overflow() -> None:
    query = torch.full((2, 64), 30.0).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = score(query, query, Normalization.DOT.exponents, scale=100.0)
    assert scores.dtype == torch.float32
    assert scores[0, 0] == 30.0 * 30.0 * 64 * 100
    assert normalize(torch.full((1, 4), 3e4).half(), 1.0).dtype == torch.float32


# --- scale ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", list(Normalization))
@pytest.mark.parametrize("direction", CLIP_DIRECTIONS)
def test_first_batch_sets_the_effective_scale(norm: Normalization, direction: Direction) -> None:
    similarity = Similarity(norm, scale_init=14.3)
    query, document = direction.roles(norms(1, n=64, dtype=torch.float32))
    assert math.isnan(similarity.effective_scale(direction)) and not similarity.has_norm_stats(direction)
    similarity.update_norm_stats(direction, query, document)
    gamma_q, gamma_d = numbers(similarity.exponents)
    expected = float(query.pow(1 - gamma_q).mean() * document.pow(1 - gamma_d).mean())
    assert similarity.effective_scale(direction) == pytest.approx(14.3, rel=1e-5)
    assert similarity.scale(direction).item() * expected == pytest.approx(14.3, rel=1e-5)


def test_clamp_acts_on_the_effective_scale_and_survives_a_restart() -> None:
    query, document = I2T.roles(norms(2, n=32, dtype=torch.float32))
    similarity = Similarity("dot", scale_init=14.3, scale_max=100)
    similarity.update_norm_stats(I2T, query, document)
    similarity.clamp_logit_scale()
    assert similarity.effective_scale(I2T) == pytest.approx(14.3, rel=1e-5), "below the clamp nothing moves"
    for _ in range(200):  # norms grow tenfold on both sides: alpha must fall although no gradient moves it
        similarity.update_norm_stats(I2T, query * 10, document * 10)
        similarity.clamp_logit_scale()
    assert similarity.effective_scale(I2T) == pytest.approx(100, rel=1e-4)
    assert similarity.logit_scale(I2T).item() < 0, "log(alpha) may be negative"
    again = Similarity("dot", scale_init=14.3, scale_max=100)
    again.load_state_dict(similarity.state_dict())
    assert again.has_norm_stats(I2T) and again.effective_scale(I2T) == similarity.effective_scale(I2T)


@given(
    seed=SEEDS,
    path=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=4),
    stretch=st.floats(1e-3, 1e3),
)
def test_the_effective_scale_is_continuous_across_any_change_of_exponents(
    seed: int, path: list[tuple[float, float]], stretch: float
) -> None:
    similarity, sides = Similarity("dot", start=Exponents(1.0, 1.0)).double(), norms(seed, stretch=stretch)
    for direction in CLIP_DIRECTIONS:  # another batch, so that the running statistics differ
        similarity.update_norm_stats(direction, *direction.roles(norms(seed + 1)))
    for to in path:
        before = {d: similarity.effective_scale(d) for d in CLIP_DIRECTIONS}
        alphas = {d: similarity.scale(d).item() for d in CLIP_DIRECTIONS}
        old = numbers(similarity.exponents)
        changed = similarity.change_exponents(Exponents(*to), sides)
        assert changed == (old != list(to)) and numbers(similarity.exponents) == list(to)
        for direction in CLIP_DIRECTIONS:
            assert similarity.effective_scale(direction) == pytest.approx(before[direction], rel=1e-10)
            query, document = direction.roles(sides)
            factors = [float(query.pow(1 - gq).mean() * document.pow(1 - gd).mean()) for gq, gd in (old, to)]
            assert similarity.scale(direction).item() == pytest.approx(alphas[direction] * factors[0] / factors[1])


def test_exponents_are_saved_change_before_the_first_batch_and_with_vectors_of_zeros() -> None:
    similarity = Similarity("dot", start=Exponents(1.0, 1.0), scale_init=20.0)
    similarity.change_exponents(Exponents(0.0, 0.0), norms(3))
    similarity.update_norm_stats(I2T, *I2T.roles(norms(3)))
    assert similarity.effective_scale(I2T) == pytest.approx(20.0)
    again = Similarity("dot", start=Exponents(1.0, 1.0))
    again.load_state_dict(similarity.state_dict())
    assert numbers(again.exponents) == [0.0, 0.0] and "gammas" not in Similarity("dot").state_dict()
    similarity, zeros = Similarity("dot", start=Exponents(1.0, 1.0)), dict.fromkeys(("image", "text"), torch.zeros(3))
    similarity.update_norm_stats(I2T, *I2T.roles(zeros))
    similarity.change_exponents(Exponents(0.5, 0.0), zeros)
    assert all(t.isfinite().all() for n, t in similarity.state_dict().items() if "t2i" not in n)


def test_gamma_is_shared_by_the_directions_and_alpha_is_not() -> None:
    similarity = Similarity("learned", gamma_init=(0.2, 0.9))
    names = sorted(n for n, _ in similarity.named_parameters())
    assert names == ["gamma_hat_d", "gamma_hat_q", "logit_scale_i2t", "logit_scale_t2i"]
    assert numbers(similarity.exponents) == pytest.approx([0.2, 0.9])
    q2d = Similarity("qnorm", [Direction.Q2D], learn_scale=False)
    assert [(n, p.requires_grad) for n, p in q2d.named_parameters()] == [("logit_scale_q2d", False)]


def test_a_start_above_the_clamp_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scale_init 14\.3 is not above 0 and at most scale_max 1"):
        Similarity("dot", scale_init=14.3, scale_max=1)
