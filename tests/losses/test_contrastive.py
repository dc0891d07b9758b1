"""The directional loss: weights, roles, drift, known positives, what it refuses, and what it does to what it trains."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from open_clip.loss import ClipLoss
from torch import Tensor, nn

from mmclip.losses import clip_loss, mask_from_ids, mask_from_matrix, text_loss
from mmclip.roles import CLIP_DIRECTIONS, LOSS_WEIGHTS, Direction, Normalization, Positives, direction_weights
from tests.helpers.naive import naive_loss


def features(seed: int, pairs: int = 6, dim: int = 8, names: tuple[str, str] = ("image", "text")) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(pairs, dim, generator=g, dtype=torch.float64) * (4 - 2 * i) for i, n in enumerate(names)}


def test_the_drift_penalty_is_the_formula_by_hand_with_its_gradient() -> None:
    first, now = features(0), {s: (3 * rows).requires_grad_() for s, rows in features(1).items()}
    loss, plain = (clip_loss("sym", "cosine", norm_drift=w).double() for w in (0.25, 0.0))
    expected = []
    for side, rows in first.items():
        start = rows.norm(dim=1).log().mean()
        expected.append((now[side].norm(dim=1).log() - start).square().mean())
    loss(first), plain(first)
    out, other = loss(now), plain(now)
    assert out.norm_drift is not None and other.norm_drift is None
    total = torch.stack(expected).sum()
    assert out.norm_drift.item() == pytest.approx(total.item(), rel=1e-12)
    assert out.loss.item() == pytest.approx((other.loss + 0.25 * total).item(), rel=1e-12)
    ours = torch.autograd.grad(out.loss, list(now.values()))
    naive = torch.autograd.grad(other.loss + 0.25 * total, list(now.values()))
    torch.testing.assert_close(ours, naive, rtol=1e-10, atol=1e-14)
    again = clip_loss("sym", "cosine", norm_drift=0.25).double()
    again.load_state_dict(loss.state_dict())
    assert again(now).norm_drift == out.norm_drift, "where norms began is saved"


def test_a_weight_that_is_0_for_a_moment_leaves_alpha_a_parameter_with_a_gradient_of_0() -> None:
    loss = clip_loss("sym", "qnorm", 1.0, i2t_weight_end=0.0).double()
    assert loss.trained == CLIP_DIRECTIONS and clip_loss("sym", "qnorm", 1.0, i2t_weight_end=1.0).trained == ("i2t",)
    out = loss(features(0), untrained=False)
    out.loss.backward()
    grads = {n: p.grad for n, p in loss.named_parameters()}
    assert torch.equal(out.loss, out.by_direction[Direction.I2T]) and set(out.by_direction) == set(CLIP_DIRECTIONS)
    assert grads["similarity.logit_scale_t2i"] == 0 and grads["similarity.logit_scale_i2t"] != 0
    loss.weights = direction_weights("sym", 0.25)
    out = loss(features(0))
    i2t, t2i = (out.by_direction[d].item() for d in CLIP_DIRECTIONS)
    assert out.loss.item() == pytest.approx(0.25 * i2t + 0.75 * t2i)


def test_sym_cosine_without_positives_is_clip_loss() -> None:
    sides = {s: x.float().requires_grad_() for s, x in features(0).items()}
    image, text = sides.values()
    ours = clip_loss("sym", "cosine", positives="none")(sides)
    normal = nn.functional.normalize
    theirs = ClipLoss()(normal(image, dim=-1), normal(text, dim=-1), torch.tensor(1 / 0.07))
    assert ours.loss.item() == pytest.approx(theirs.item(), rel=1e-5)
    gradients = (torch.autograd.grad(value, (image, text)) for value in (ours.loss, theirs))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("norm", ["dot", "qnorm", "dnorm", "learned"])
def test_total_is_the_weighted_sum_of_role_true_directions(norm: str) -> None:
    sides = features(1)
    loss = clip_loss("sym", norm, i2t_weight=0.3).double()
    out = loss(sides)
    expected = {}
    for direction in CLIP_DIRECTIONS:
        query, document = direction.roles(sides)
        gq, gd = (torch.as_tensor(g).item() for g in loss.similarity.exponents)
        q, d = query / query.norm(dim=1, keepdim=True) ** gq, document / document.norm(dim=1, keepdim=True) ** gd
        scores = loss.similarity.scale(direction).item() * q @ d.T
        expected[direction] = nn.functional.cross_entropy(scores, torch.arange(6)).item()
        assert out.by_direction[direction].item() == pytest.approx(expected[direction], rel=1e-10)
    assert out.loss.item() == pytest.approx(0.3 * expected[Direction.I2T] + 0.7 * expected[Direction.T2I], rel=1e-10)


@pytest.mark.parametrize(("name", "trained"), [("asym-i2t", "i2t"), ("asym-t2i", "t2i")])
def test_one_direction_loss_trains_one_alpha_and_reports_both(name: str, trained: str) -> None:
    loss = clip_loss(name, "qnorm").double()
    out = loss(features(2))
    assert torch.equal(out.loss.detach(), out.by_direction[Direction(trained)])
    assert set(out.by_direction) == set(CLIP_DIRECTIONS)
    assert [n for n, p in loss.named_parameters() if p.requires_grad] == [f"similarity.logit_scale_{trained}"]
    a, b = (loss.similarity.effective_scale(d) for d in CLIP_DIRECTIONS)
    assert a == pytest.approx(b, rel=1e-14), "an untrained direction follows, in the loss's own precision"
    assert set(loss(features(2), untrained=False).by_direction) == {Direction(trained)}
    zeros = clip_loss(name, "dot")({s: 0 * x for s, x in features(2).items()})
    assert zeros.loss.isfinite() and zeros.by_direction.keys() == set(CLIP_DIRECTIONS)


def test_text_retrieval_uses_the_same_loss_with_its_own_scale() -> None:
    text, clip = text_loss("q2d", "qnorm").double(), clip_loss("asym-i2t", "qnorm", scale_init=20.0).double()
    ours, theirs = text(features(5, names=("query", "document"))), clip(features(5))
    assert ours.loss.item() == theirs.loss.item() and not [p for p in text.parameters() if p.requires_grad]
    learned = text_loss("both", q2d_weight=0.3, learn_scale=True, scale_init=10)
    assert learned.weights == {"q2d": 0.3, "d2q": 0.7} and learned.similarity.scale_init == 10
    trained = [n for n, p in learned.named_parameters() if p.requires_grad]
    assert trained == ["similarity.logit_scale_q2d", "similarity.logit_scale_d2q"]


@pytest.mark.parametrize("policy", list(Positives))
def test_known_positives_of_both_directions_are_one_matrix(policy: Positives) -> None:
    sides, more = features(8, 4, 6, ("query", "document")), features(9, 3, 6)["text"]
    known = torch.rand(4, 7, generator=torch.Generator().manual_seed(8)) < 0.4
    loss = text_loss("both", "qnorm", positives=policy).double()
    found = loss(sides, mask_from_matrix(known), {"document": more}).by_direction
    for direction, matches in ((Direction.Q2D, known), (Direction.D2Q, known[:, :4].T)):
        query, document = direction.roles(sides)
        document = torch.cat([document, more]) if direction is Direction.Q2D else document
        scores = loss.similarity(direction, query, document).detach()
        assert found[direction].item() == pytest.approx(naive_loss(scores, matches.tolist(), policy.value), rel=1e-10)
    ids = torch.tensor([0, 1, 0, 2])
    same = mask_from_matrix(ids[:, None] == ids)
    assert loss(sides, same).by_direction == loss(sides, mask_from_ids(ids)).by_direction, "ids say the same"


def test_settings_and_batches_that_do_not_fit_are_refused() -> None:
    for how, message in (
        ({"norm": "bogus"}, "unknown normalization 'bogus'; valid: cosine, dot, qnorm, dnorm, learned"),
        ({"norm": "learned", "gamma_init": 5.0}, "gamma_init 5.0 is not between 0 and 1"),
        ({"focal": -1.0}, "focal -1.0"),
        ({"focal": math.nan}, "focal nan"),
    ):
        with pytest.raises(ValueError, match=message):
            clip_loss("sym", **how)  # type: ignore[arg-type]
    pairs = {"image": (8, 4), "text": (8, 4)}
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"image": (8, 4), "text": (9, 4)}, {}, r"image \[8, 4\], text \[9, 4\]: raw features \[B, D\]"),
        ({"image": (8, 4), "text": (8, 5)}, {}, r"text \[8, 5\]"),
        ({"image": (8,), "text": (8,)}, {}, r"image \[8\]"),
        ({"image": (8, 4), "txt": (8, 4)}, {}, "text missing"),
        ({"image": (0, 4), "text": (0, 4)}, {}, "no pairs"),
        (pairs, {"positives": mask_from_ids(torch.arange(7))}, "known positives of 7 rows, 8 pairs are expected"),
        (pairs, {"negatives": {"txt": torch.ones(2, 4)}}, "negatives are of image or text"),
        (pairs, {"negatives": {"text": torch.ones(2, 3)}}, r"negative text \[2, 3\]"),
        (pairs, {"positives": mask_from_matrix(torch.ones(8, 9) > 0)}, "known positives of 8 rows, 9 columns"),
    ]
    for shapes, more, message in refused:
        with pytest.raises(ValueError, match=message):
            clip_loss("sym", "qnorm")({s: torch.ones(shape) for s, shape in shapes.items()}, **more)


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(LOSS_WEIGHTS))
@pytest.mark.parametrize("norm", list(Normalization))
def test_every_pair_of_loss_and_norm_falls_on_a_small_task(name: str, norm: Normalization) -> None:
    """Both sides are free embeddings of the same 16 items: every loss must be able to match them."""
    torch.manual_seed(6)
    image, text = (nn.Parameter(torch.randn(16, 8)) for _ in range(2))
    loss = clip_loss(name, norm)
    optimizer = torch.optim.Adam([image, text, *loss.parameters()], lr=0.05)
    values = []
    for _ in range(60):
        optimizer.zero_grad()
        values.append(loss({"image": image, "text": text}).loss)
        values[-1].backward()
        optimizer.step()
        loss.similarity.clamp_logit_scale()
    assert torch.stack(values).isfinite().all() and values[-1] < 0.2 * values[0]


def gamma_task(informative: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Fixed features in which only norms can help, and a pool of decoys. Informative: a decoy document is short, a
    query whose direction is blurred is short. Misleading: the reverse, so a trained gamma must divide norms out."""
    g = torch.Generator().manual_seed(0)
    n, dim = 64, 16
    unit = nn.functional.normalize
    direction = unit(torch.randn(n, dim, generator=g), dim=1)
    blur = (torch.arange(n) % 2).float()[:, None]  # every other query points elsewhere than its document
    query = unit(direction + blur * 2 * torch.randn(n, dim, generator=g) / dim**0.5, dim=1)
    decoy = unit(direction + 0.3 * torch.randn(n, dim, generator=g) / dim**0.5, dim=1)
    long, short = 3.0, 0.6
    query_norm = torch.where(blur > 0, short, long) if informative else torch.where(blur > 0, long, short)
    document_norm, decoy_norm = (long, short) if informative else (short, long)
    return {"image": query * query_norm, "text": direction * document_norm}, {"text": decoy * decoy_norm}


@pytest.mark.parametrize(("informative", "sign"), [(True, -1), (False, 1)])
def test_both_gammas_move_the_right_way_where_norms_matter(informative: bool, sign: int) -> None:
    sides, decoys = gamma_task(informative)
    loss = clip_loss("asym-i2t", "learned")
    gammas = [p for n, p in loss.named_parameters() if "gamma_hat" in n]
    alpha = loss.similarity.logit_scale(Direction.I2T)
    optimizer = torch.optim.Adam([{"params": gammas, "lr": 0.02}, {"params": [alpha], "lr": 0.01}])
    for _ in range(150):
        optimizer.zero_grad()
        loss(sides, negatives=decoys).loss.backward()
        optimizer.step()
        loss.similarity.clamp_logit_scale()
    gamma_q, gamma_d = (g.item() for g in loss.similarity.exponents)  # type: ignore[union-attr]
    assert sign * (gamma_q - 0.5) > 0.1, gamma_q
    assert sign * (gamma_d - 0.5) > 0.1, gamma_d


def test_asym_qnorm_gives_documents_a_radial_gradient_and_queries_none() -> None:
    """Prop. 4.2: a normalized feature cannot change its norm; a raw one can."""
    image, text = (x.float().requires_grad_() for x in features(3).values())
    clip_loss("asym-i2t", "qnorm")({"image": image, "text": text}).loss.backward()
    assert image.grad is not None and text.grad is not None
    torch.testing.assert_close((image.grad * image.detach()).sum(dim=1), torch.zeros(6), atol=1e-5, rtol=0)
    assert (text.grad * text.detach()).sum(dim=1).abs().min() > 1e-4
