"""What the loss does to what it trains: free embeddings find each other, exponents move to where length helps."""

from __future__ import annotations

import math

import pytest
import torch

from mmclip.losses.contrastive import clip_loss
from mmclip.roles import LOSS_WEIGHTS
from mmclip.similarity import Direction, Normalization


@pytest.mark.parametrize("name", list(LOSS_WEIGHTS))
@pytest.mark.parametrize("norm", list(Normalization))
def test_every_pair_of_loss_and_norm_falls_on_a_small_task(name: str, norm: Normalization) -> None:
    """Both sides are free embeddings of the same 16 items: every loss must be able to match them."""
    torch.manual_seed(6)
    image, text = (torch.nn.Parameter(torch.randn(16, 8)) for _ in range(2))
    loss = clip_loss(name, norm)
    optimizer = torch.optim.Adam([image, text, *loss.parameters()], lr=0.05)
    values = []
    for _ in range(60):
        optimizer.zero_grad()
        out = loss({"image": image, "text": text})
        out.loss.backward()
        optimizer.step()
        loss.similarity.clamp_()
        values.append(out.loss.item())
    assert all(math.isfinite(v) for v in values)
    assert values[-1] < 0.2 * values[0]


def gamma_task(informative: bool, seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Fixed features in which only lengths can help, and a pool of decoys. Informative: a decoy document is short, a
    query whose direction is blurred is short. Misleading: the reverse, so a trained gamma must divide lengths out."""
    g = torch.Generator().manual_seed(seed)
    n, dim = 64, 16
    direction = torch.nn.functional.normalize(torch.randn(n, dim, generator=g), dim=1)
    blur = (torch.arange(n) % 2).float()[:, None]  # every other query points elsewhere than its document
    query = torch.nn.functional.normalize(direction + blur * 2 * torch.randn(n, dim, generator=g) / dim**0.5, dim=1)
    decoy = torch.nn.functional.normalize(direction + 0.3 * torch.randn(n, dim, generator=g) / dim**0.5, dim=1)
    long, short = 3.0, 0.6
    query_length = torch.where(blur > 0, short, long) if informative else torch.where(blur > 0, long, short)
    document_length, decoy_length = (long, short) if informative else (short, long)
    sides = {"image": query * query_length, "text": direction * document_length}
    return sides, {"text": decoy * decoy_length}


@pytest.mark.parametrize(("informative", "sign"), [(True, -1), (False, 1)])
def test_both_gammas_move_the_right_way_where_length_matters(informative: bool, sign: int) -> None:
    sides, decoys = gamma_task(informative)
    loss = clip_loss("asym-i2t", "learned")
    gammas = [p for n, p in loss.named_parameters() if "gamma_hat" in n]
    alpha = loss.similarity.logit_scale(Direction.I2T)
    optimizer = torch.optim.Adam([{"params": gammas, "lr": 0.02}, {"params": [alpha], "lr": 0.01}])
    for _ in range(150):
        optimizer.zero_grad()
        loss(sides, extra=decoys).loss.backward()
        optimizer.step()
        loss.similarity.clamp_()
    gamma_q, gamma_d = (g.item() for g in loss.similarity.exponents)
    assert sign * (gamma_q - 0.5) > 0.1, gamma_q
    assert sign * (gamma_d - 0.5) > 0.1, gamma_d


def test_asym_qnorm_gives_documents_a_radial_gradient_and_queries_none() -> None:
    """Prop. 4.2: what is normalized cannot change its length; what is raw can."""
    torch.manual_seed(3)
    image, text = (torch.randn(6, 8, requires_grad=True) for _ in range(2))
    clip_loss("asym-i2t", "qnorm")({"image": image, "text": text}).loss.backward()
    assert image.grad is not None and text.grad is not None
    torch.testing.assert_close((image.grad * image.detach()).sum(dim=1), torch.zeros(6), atol=1e-6, rtol=0)
    assert (text.grad * text.detach()).sum(dim=1).abs().min() > 1e-4
