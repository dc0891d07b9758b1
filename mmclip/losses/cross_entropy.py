"""The loss of one score matrix by its formula: reference of the tiled loss, with second derivatives."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmclip.roles import Positives


def contrastive_cross_entropy(
    scores: Tensor, positives: Tensor | None = None, policy: Positives = Positives.MASK, focal: float = 0.0
) -> Tensor:
    """Softmax cross-entropy of each query over its candidates; the document of query i is candidate i.

    Args:
        scores: [Q, N] with N >= Q; columns from Q on are negatives.
        positives: known positives, bool [Q, Q to N]; missing columns are negatives.
        policy: what known positives are, besides the pairs.
        focal: exponent of (1 - p) in each query's weight, p the probability of its targets; 0 for equal weights.

    Returns:
        Mean over queries, 0-d.

    >>> s = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    >>> float(contrastive_cross_entropy(s).exp())  # two equal candidates: one chance in two
    2.0
    >>> both = torch.ones(2, 2, dtype=torch.bool)
    >>> float(contrastive_cross_entropy(s, both, Positives.MASK).exp())  # a known positive is no rival
    1.0
    """
    own, target = torch.arange(len(scores), device=scores.device), None
    if policy is not Positives.NONE and positives is not None:
        diagonal = torch.eye(len(scores), positives.shape[1], dtype=torch.bool, device=scores.device)
        missing = (0, scores.shape[1] - positives.shape[1])
        if policy is Positives.MASK:
            scores = scores.masked_fill(nn.functional.pad(positives & ~diagonal, missing), -torch.inf)
        else:
            target = nn.functional.pad((positives | diagonal).to(scores.dtype), missing)
    goal = own if target is None else target / target.sum(dim=1, keepdim=True)
    if focal == 0:
        return nn.functional.cross_entropy(scores, goal)
    with torch.no_grad():
        log_p = scores.log_softmax(dim=1)
        log_p = log_p[own, own] if target is None else log_p.masked_fill(target == 0, -torch.inf).logsumexp(dim=1)
        weights = focal_weights(log_p, focal)
    return (weights * nn.functional.cross_entropy(scores, goal, reduction="none")).sum()


def focal_weights(log_p: Tensor, focal: float) -> Tensor:
    """(1 - p)**focal of each query as a share of their sum, [Q] -> [Q]; equal shares if all are 0.

    >>> focal_weights(torch.tensor([0.5, 0.75]).log(), 1.0)
    tensor([0.6667, 0.3333])
    """
    log_weight = focal * (-log_p.clamp_max(0).expm1()).log()
    return torch.where(log_weight.amax() == -torch.inf, 0, log_weight).softmax(dim=0)
