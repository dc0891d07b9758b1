"""The loss of one score matrix and its focal form against loops, one query at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip.losses.cross_entropy import contrastive_loss
from mmclip.roles import Positives
from tests.helpers.naive import known_positives, naive_focal, naive_loss


@given(
    ids=st.lists(st.integers(0, 3), min_size=2, max_size=7),
    extra=st.integers(0, 3),
    policy=st.sampled_from(list(Positives)),
    seed=st.integers(0, 1000),
)
def test_loss_equals_the_naive_loop(ids: list[int], extra: int, policy: Positives, seed: int) -> None:
    n = len(ids)
    scores = torch.randn(n, n + extra, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    positives = known_positives(torch.tensor(ids), None)
    assert positives is not None
    fast = contrastive_loss(scores, positives, policy)
    assert float(fast) == pytest.approx(naive_loss(scores, positives.tolist(), policy.value), rel=1e-10)


@pytest.mark.parametrize("policy", list(Positives))
def test_gradient_equals_finite_differences(policy: Positives) -> None:
    scores = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    positives = known_positives(torch.tensor([0, 1, 0, 2]), torch.tensor([5, 6, 7, 6]))
    assert torch.autograd.gradcheck(lambda s: contrastive_loss(s, positives, policy), (scores,))


@given(
    ids=st.lists(st.integers(0, 3), min_size=2, max_size=7),
    extra=st.integers(1, 3),
    policy=st.sampled_from(list(Positives)),
    focal=st.sampled_from([0.5, 1.0, 2.0, 5.0]),
    seed=st.integers(0, 1000),
)
def test_the_focal_loss_and_its_gradient_equal_the_naive_loop(
    ids: list[int], extra: int, policy: Positives, focal: float, seed: int
) -> None:
    n = len(ids)
    g = torch.Generator().manual_seed(seed)
    scores = (torch.randn(n, n + extra, generator=g, dtype=torch.float64) * 3).requires_grad_()
    positives = known_positives(torch.tensor(ids), None)
    assert positives is not None
    fast = contrastive_loss(scores, positives, policy, focal)
    naive = naive_focal(scores, positives.tolist(), policy.value, focal)
    assert fast.item() == pytest.approx(naive.item(), rel=1e-9)
    ours, theirs = (torch.autograd.grad(value, scores)[0] for value in (fast, naive))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("policy", list(Positives))
def test_focal_0_is_the_plain_loss_and_a_small_one_comes_near_it(policy: Positives) -> None:
    scores = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positives = known_positives(torch.tensor([0, 1, 0, 2, 3, 4]), None)
    plain = contrastive_loss(scores, positives, policy)
    assert torch.equal(contrastive_loss(scores, positives, policy, 0.0), plain)
    assert float(contrastive_loss(scores, positives, policy, 1e-9)) == pytest.approx(float(plain), rel=1e-7)
    assert abs(float(contrastive_loss(scores, positives, policy, 2.0)) / float(plain) - 1) > 1e-2


@pytest.mark.parametrize("policy", list(Positives))
@pytest.mark.parametrize("scale", [1e4, 30.0])
def test_where_every_query_is_found_the_focal_loss_is_0_and_its_gradient_finite(
    policy: Positives, scale: float
) -> None:
    scores = (scale * torch.eye(4)).requires_grad_()
    loss = contrastive_loss(scores, known_positives(torch.arange(4), None), policy, 2.0)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0, abs=1e-6)
    assert scores.grad is not None and scores.grad.isfinite().all()
    one_left = scores.detach().clone()
    one_left[2] = 0.0
    assert float(contrastive_loss(one_left, None, policy, 2.0)) == pytest.approx(math.log(4), rel=1e-5)
