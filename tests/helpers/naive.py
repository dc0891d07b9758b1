"""Definitions as plain as they can be, which fast paths are held against."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def known_positives(image_id: Tensor | None, text_id: Tensor | None) -> Tensor | None:
    """Pairs of a batch with the same image or the same caption, ids [B] -> bool [B, B]; None where neither is known."""
    known = None
    for ids in (image_id, text_id):
        if ids is not None:
            same = ids[:, None] == ids[None, :]
            known = same if known is None else known | same
    return known


def naive_loss(scores: torch.Tensor, positives: list[list[bool]], policy: str) -> float:
    """The loss with loops, one query at a time; candidates that ``positives`` has no column of match nobody."""
    total = 0.0
    for i in range(len(scores)):
        known = [j for j in range(len(positives[i])) if j != i and positives[i][j]]
        left_out = known if policy == "mask" else []
        rivals = [j for j in range(scores.shape[1]) if j not in left_out]
        log_sum = math.log(sum(math.exp(float(scores[i, j])) for j in rivals))
        targets = [i, *known] if policy == "multi" else [i]
        total += sum(log_sum - float(scores[i, j]) for j in targets) / len(targets)
    return total / len(scores)


def naive_focal(scores: torch.Tensor, positives: list[list[bool]], policy: str, focal: float) -> torch.Tensor:
    """PACE's formula with loops; the weights are numbers, so only the losses have a gradient."""
    terms, weights = [], []
    for i in range(len(scores)):
        known = [j for j in range(len(positives[i])) if j != i and positives[i][j]]
        targets = [i, *known] if policy == "multi" else [i]
        rivals = [j for j in range(scores.shape[1]) if policy != "mask" or j not in known]
        log_sum = scores[i, rivals].exp().sum().log()
        terms.append(sum(log_sum - scores[i, j] for j in targets) / len(targets))
        weights.append(float(1 - sum((scores[i, j] - log_sum).exp() for j in targets).detach()) ** focal)
    return sum(a * t for a, t in zip(weights, terms, strict=True)) / sum(weights)  # type: ignore[no-any-return]
