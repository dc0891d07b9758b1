"""Definitions as plain as they can be, which fast paths are held against."""

from __future__ import annotations

import torch
from torch import Tensor

CLIP_LOSSES = {
    "sym": ("sym", None), "sym 0.3": ("sym", 0.3), "asym-i2t": ("asym-i2t", None), "asym-t2i": ("asym-t2i", None)
}  # fmt: skip


def known_positives(image_id: Tensor | None, text_id: Tensor | None) -> Tensor | None:
    """Pairs of a batch with the same image or the same caption, ids [B] -> bool [B, B]; None where neither is known."""
    known = None
    for ids in (image_id, text_id):
        if ids is not None:
            same = ids[:, None] == ids[None, :]
            known = same if known is None else known | same
    return known


def naive_focal(scores: torch.Tensor, positives: list[list[bool]], policy: str, focal: float) -> torch.Tensor:
    """PACE's formula with loops; the weights are numbers, so only the losses have a gradient.

    Candidates that ``positives`` has no column of match nothing.
    """
    terms, weights = [], []
    for i in range(len(scores)):
        known = [j for j in range(len(positives[i])) if j != i and positives[i][j]]
        targets = [i, *known] if policy == "multi" else [i]
        rivals = [j for j in range(scores.shape[1]) if policy != "mask" or j not in known]
        log_sum = scores[i, rivals].exp().sum().log()
        terms.append(sum(log_sum - scores[i, j] for j in targets) / len(targets))
        left = [j for j in rivals if j not in targets]  # 1 - p, without its rounding where p is near 1
        weights.append(float((scores[i, left] - log_sum).exp().sum().detach()) ** focal)
    return sum(a * t for a, t in zip(weights, terms, strict=True)) / sum(weights)  # type: ignore[no-any-return]


def naive_loss(scores: torch.Tensor, positives: list[list[bool]], policy: str) -> float:
    """The loss with loops, one query at a time."""
    return float(naive_focal(scores, positives, policy, 0.0))
