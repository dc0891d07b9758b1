"""The loss of one score matrix and its focal form against loops, one query at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mmclip.losses import contrastive_cross_entropy
from mmclip.roles import Positives
from tests.helpers.naive import known_positives, naive_focal


@given(
    queries=st.integers(1, 6),
    extra=st.integers(0, 4),
    beyond=st.integers(0, 3),
    policy=st.sampled_from(list(Positives)),
    focal=st.sampled_from([0.0, 0.5, 1.0, 2.0, 5.0]),
    seed=st.integers(0, 1000),
)
def test_loss_and_gradient_equal_the_naive_loops(
    queries: int, extra: int, beyond: int, policy: Positives, focal: float, seed: int
) -> None:
    """positives [Q, Q + extra] of scores [Q, Q + extra + beyond]; columns beyond them are negatives."""
    g = torch.Generator().manual_seed(seed)
    scores = (torch.randn(queries, queries + extra + beyond, generator=g, dtype=torch.float64) * 3).requires_grad_()
    positives = torch.rand(queries, queries + extra, generator=g) < 0.4  # the pair itself counts, marked or not
    padded = nn.functional.pad(positives, (0, beyond)).tolist()
    fast = contrastive_cross_entropy(scores, positives, policy, focal)
    naive = naive_focal(scores, padded, policy.value, focal)
    if naive.isfinite():  # 0 / 0 where nothing is left to find
        assert fast.item() == pytest.approx(naive.item(), rel=1e-9, abs=1e-12)
        ours, theirs = (torch.autograd.grad(value, scores)[0] for value in (fast, naive))
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("policy", list(Positives))
@pytest.mark.parametrize("scale", [1e4, 30.0])
def test_the_focal_loss_of_found_queries_is_0_and_its_gradient_finite(policy: Positives, scale: float) -> None:
    scores = (scale * torch.eye(4)).requires_grad_()
    loss = contrastive_cross_entropy(scores, known_positives(torch.arange(4), None), policy, 2.0)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert scores.grad is not None and scores.grad.isfinite().all()
    one_left = scores.detach().clone()
    one_left[2] = 0.0
    assert contrastive_cross_entropy(one_left, None, policy, 2.0).item() == pytest.approx(math.log(4), rel=1e-5)
