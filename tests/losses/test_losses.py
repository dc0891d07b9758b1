from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from open_clip.loss import ClipLoss
from torch import nn

from mmclip.losses.contrastive import ContrastiveLoss, clip_loss, contrastive_loss
from mmclip.roles import Positives, direction_weights
from mmclip.similarity import CLIP_DIRECTIONS, Direction
from tests.helpers.naive import known_positives, naive_focal, naive_loss


def test_the_drift_penalty_is_the_formula_by_hand_with_its_gradient() -> None:
    g = torch.Generator().manual_seed(0)
    first, now = ({s: torch.randn(5, 3, generator=g, dtype=torch.float64) for s in ("image", "text")} for _ in range(2))
    now = {s: (rows * 3).requires_grad_() for s, rows in now.items()}
    loss, plain = (clip_loss("sym", "cosine", norm_drift=w).double() for w in (0.25, 0.0))
    expected = {}
    for side, rows in first.items():
        start = rows.norm(dim=1).log().mean()
        expected[side] = (now[side].norm(dim=1).log() - start).square().mean()
    loss(first), plain(first)
    out, other = loss(now), plain(now)
    assert out.norm_drift is not None and other.norm_drift is None
    total = sum(expected.values())
    assert out.norm_drift.item() == pytest.approx(total.item(), rel=1e-12)  # type: ignore[arg-type]
    assert out.loss.item() == pytest.approx((other.loss + 0.25 * total).item(), rel=1e-12)
    ours = torch.autograd.grad(out.loss, list(now.values()))
    naive = torch.autograd.grad(other.loss + 0.25 * total, list(now.values()))
    for a, b in zip(ours, naive, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)
    again = clip_loss("sym", "cosine", norm_drift=0.25).double()
    again.load_state_dict(loss.state_dict())
    assert torch.equal(again(now).norm_drift, out.norm_drift), "where lengths began is saved"  # type: ignore[arg-type]


def test_a_weight_that_is_0_for_a_moment_leaves_alpha_a_parameter_with_a_gradient_of_0() -> None:
    sides = {s: torch.randn(6, 8, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(("image", "text"))}
    loss = clip_loss("sym", "qnorm", 1.0, i2t_weight_end=0.0)
    assert loss.trained == CLIP_DIRECTIONS and clip_loss("sym", "qnorm", 1.0, i2t_weight_end=1.0).trained == ("i2t",)
    out = loss(sides, untrained=False)
    out.loss.backward()
    grads = {n: p.grad for n, p in loss.named_parameters()}
    assert torch.equal(out.loss, out.by_direction[Direction.I2T]) and set(out.by_direction) == set(CLIP_DIRECTIONS)
    assert grads["similarity.logit_scale_t2i"] == 0 and grads["similarity.logit_scale_i2t"] != 0
    loss.weights = direction_weights("sym", 0.25)
    out = loss(sides)
    assert out.loss.item() == pytest.approx(
        0.25 * out.by_direction[Direction.I2T].item() + 0.75 * out.by_direction[Direction.T2I].item()
    )


def test_sym_cosine_without_positives_is_clip_loss() -> None:
    torch.manual_seed(0)
    image, text = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    ours = clip_loss("sym", "cosine", positives="none")({"image": image, "text": text})
    normal = torch.nn.functional.normalize
    theirs = ClipLoss()(normal(image, dim=-1), normal(text, dim=-1), torch.tensor(1 / 0.07))
    assert ours.loss.item() == pytest.approx(theirs.item(), rel=1e-5)
    ours_grad = torch.autograd.grad(ours.loss, (image, text))
    theirs_grad = torch.autograd.grad(theirs, (image, text))
    for a, b in zip(ours_grad, theirs_grad, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("norm", ["dot", "qnorm", "dnorm", "learned"])
def test_total_is_the_weighted_sum_of_role_true_directions(norm: str) -> None:
    torch.manual_seed(1)
    sides = {"image": torch.randn(6, 8) * 4, "text": torch.randn(6, 8) * 2}
    loss = clip_loss("sym", norm, i2t_weight=0.3)
    out = loss(sides)
    expected = {}
    for direction in (Direction.I2T, Direction.T2I):
        query, document = direction.roles(sides)
        gq, gd = (torch.as_tensor(g).item() for g in loss.similarity.exponents)
        q, d = query / query.norm(dim=1, keepdim=True) ** gq, document / document.norm(dim=1, keepdim=True) ** gd
        scores = loss.similarity.scale(direction).item() * q @ d.T
        expected[direction] = float(torch.nn.functional.cross_entropy(scores, torch.arange(6)))
        assert float(out.by_direction[direction]) == pytest.approx(expected[direction], rel=1e-5)
    assert out.loss.item() == pytest.approx(0.3 * expected[Direction.I2T] + 0.7 * expected[Direction.T2I], rel=1e-5)


@pytest.mark.parametrize(("name", "trained"), [("asym-i2t", "i2t"), ("asym-t2i", "t2i")])
def test_one_direction_loss_trains_one_alpha_and_reports_both(name: str, trained: str) -> None:
    torch.manual_seed(2)
    sides = {"image": torch.randn(6, 8) * 4, "text": torch.randn(6, 8) * 2}
    loss = clip_loss(name, "qnorm")
    out = loss(sides)
    assert torch.equal(out.loss.detach(), out.by_direction[Direction(trained)])
    assert set(out.by_direction) == {Direction.I2T, Direction.T2I}
    assert [n for n, p in loss.named_parameters() if p.requires_grad] == [f"similarity.logit_scale_{trained}"]
    other = Direction(trained).opposite
    assert loss.similarity.effective_scale(other) == pytest.approx(loss.similarity.effective_scale(Direction(trained)))
    assert set(loss(sides, untrained=False).by_direction) == {Direction(trained)}


def test_extra_candidates_enter_the_denominator_of_their_side_only() -> None:
    torch.manual_seed(4)
    sides = {"image": torch.randn(4, 8), "text": torch.randn(4, 8)}
    loss = clip_loss("sym", "cosine")
    plain = loss(sides).by_direction
    more = loss(sides, extra={"text": torch.randn(5, 8)}).by_direction
    assert more[Direction.I2T] > plain[Direction.I2T]
    assert more[Direction.T2I] == plain[Direction.T2I]


def test_duplicate_captions_and_captions_of_one_image_are_known_positives() -> None:
    assert known_positives(None, None) is None
    image_id, text_id = torch.tensor([0, 0, 1, 2]), torch.tensor([5, 6, 7, 5])
    expected = [[1, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]]
    known = known_positives(image_id, text_id)
    assert known is not None and known.int().tolist() == expected


def test_text_retrieval_uses_the_same_loss() -> None:
    torch.manual_seed(5)
    sides = {"query": torch.randn(4, 8), "document": torch.randn(4, 8)}
    text = ContrastiveLoss({Direction.Q2D: 1.0}, "qnorm")(sides)
    clip = clip_loss("asym-i2t", "qnorm")({"image": sides["query"], "text": sides["document"]})
    assert text.loss.item() == clip.loss.item()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("syn",), "unknown loss 'syn'"), (("sym", 1.5), "outside 0 to 1"), (("asym-i2t", 0.4), "fixes the i2t weight")],
)
def test_bad_weights_are_refused(arguments: tuple[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        direction_weights(*arguments)


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_an_untrained_direction_follows_the_trained_ones_effective_scale(factor: float) -> None:
    """In the loss's own precision, and without a division by the length of a vector of zeros."""
    g = torch.Generator().manual_seed(0)
    sides = {s: factor * torch.randn(6, 4, generator=g, dtype=torch.float64) for s in ("image", "text")}
    loss = clip_loss("asym-i2t", "dot").double()
    out = loss(sides)
    assert out.by_direction.keys() == set(CLIP_DIRECTIONS) and torch.isfinite(out.loss)
    if factor:
        a, b = (loss.similarity.effective_scale(d) for d in CLIP_DIRECTIONS)
        assert a == pytest.approx(b, rel=1e-14)


@given(
    queries=st.integers(1, 5),
    extra=st.integers(0, 4),
    beyond=st.integers(0, 3),
    policy=st.sampled_from(list(Positives)),
    focal=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 1000),
)
def test_known_positives_may_stand_among_the_extra_candidates(
    queries: int, extra: int, beyond: int, policy: Positives, focal: float, seed: int
) -> None:
    """positives [Q, Q + extra] of scores [Q, Q + extra + beyond]; columns beyond them are none."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(queries, queries + extra + beyond, generator=g, dtype=torch.float64) * 3
    positives = torch.rand(queries, queries + extra, generator=g) < 0.4  # the pair itself counts, said or not
    padded = nn.functional.pad(positives, (0, beyond)).tolist()
    fast = contrastive_loss(scores, positives, policy, focal)
    if focal:
        assert fast.item() == pytest.approx(naive_focal(scores, padded, policy.value, focal).item(), rel=1e-9)
    else:
        assert fast.item() == pytest.approx(naive_loss(scores, padded, policy.value), rel=1e-10)


@pytest.mark.parametrize("policy", list(Positives))
def test_known_positives_of_a_direction_are_used_as_they_are_given(policy: Positives) -> None:
    g = torch.Generator().manual_seed(8)
    sides = {s: torch.randn(4, 6, generator=g, dtype=torch.float64) for s in ("query", "document")}
    extra = {"document": torch.randn(3, 6, generator=g, dtype=torch.float64)}
    known = {Direction.Q2D: torch.rand(4, 7, generator=g) < 0.4, Direction.D2Q: torch.rand(4, 4, generator=g) < 0.4}
    loss = ContrastiveLoss({Direction.Q2D: 0.5, Direction.D2Q: 0.5}, "qnorm", policy).double()
    found = loss(sides, extra=extra, known=known).by_direction
    for direction, matches in known.items():
        query, document = direction.roles(sides)
        if direction is Direction.Q2D:
            document = torch.cat([document, extra["document"]])
        scores = loss.similarity(direction, query, document).detach()
        assert found[direction].item() == pytest.approx(naive_loss(scores, matches.tolist(), policy.value), rel=1e-10)
    alone = loss(sides, extra=extra, known={Direction.Q2D: known[Direction.Q2D]}).by_direction  # of d2q none is known
    assert (alone[Direction.D2Q] != found[Direction.D2Q]) == (policy is not Positives.NONE)
    same = torch.tensor([0, 1, 0, 2])
    by_id = known_positives(same, None)
    assert by_id is not None
    given = loss(sides, known=dict.fromkeys(known, by_id)).by_direction
    assert given == loss(sides, same).by_direction, "ids say the same"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"norm": "bogus"}, "unknown normalization 'bogus'; valid: cosine, dot, qnorm, dnorm, learned"),
        ({"norm": "learned", "gamma_init": 5.0}, "gamma_init 5.0 is not between 0 and 1"),
        ({"focal": -1.0}, "focal -1.0"),
        ({"focal": math.nan}, "focal nan"),
    ],
    ids=str,
)
def test_a_loss_of_no_sense_is_refused(how: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        clip_loss("sym", **how)
