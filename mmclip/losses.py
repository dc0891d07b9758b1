"""The directional contrastive loss. It has a similarity and never redefines it.

For one direction (docs/math.md: "Loss"; Feng & Watanabe 2026, section 3)

    L_dir = mean_i -log softmax_j(s_ij)[i]

with the documents of the global batch as candidates. The total is lambda * L_i2t + (1 - lambda) * L_t2i: ``sym`` is
lambda = 1/2, ``asym-i2t`` lambda = 1, ``asym-t2i`` lambda = 0. Text retrieval is the one direction q2d. A focal weight
moves the mean to queries that are not found yet, a penalty holds lengths where they began (docs/math.md: "Curriculum").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmclip.similarity import (
    SCALE_INIT,
    SCALE_MAX,
    TINY,
    Direction,
    Exponents,
    Normalization,
    RoleSimilarity,
    magnitude,
)

LOSS_WEIGHTS = {"sym": 0.5, "asym-i2t": 1.0, "asym-t2i": 0.0}  # name -> lambda, the weight of i2t


class Positives(StrEnum):
    """What to do with known positives other than the pair itself: another caption of the image, an exact duplicate."""

    MASK = "mask"  # leave them out of the denominator
    MULTI = "multi"  # they are targets too, each with the same weight
    NONE = "none"  # treat them as negatives, like open_clip's ClipLoss and MultipleNegativesRankingLoss


class LossOutput(NamedTuple):
    """``loss`` is what to call backward on; ``by_direction`` the unweighted loss of each direction, detached;
    ``norm_drift`` the penalty before its weight, detached, None without one."""

    loss: Tensor
    by_direction: dict[Direction, Tensor]
    norm_drift: Tensor | None = None


def known_positives(image_id: Tensor | None, text_id: Tensor | None) -> Tensor | None:
    """Pairs of the batch that are known to match: same image or same caption string. Both directions share it.

    image_id, text_id [B] -> bool [B, B], or None where neither is known. Entry (i, j) says that i's query matches j's
    document; it is symmetric, so it serves i2t and t2i alike.

    >>> known_positives(torch.tensor([7, 8, 7]), None).int().tolist()  # items 0 and 2 are captions of one image
    [[1, 0, 1], [0, 1, 0], [1, 0, 1]]
    """
    known = None
    for ids in (image_id, text_id):
        if ids is not None:
            same = ids[:, None] == ids[None, :]
            known = same if known is None else known | same
    return known


def contrastive_loss(
    scores: Tensor, positives: Tensor | None = None, policy: Positives = Positives.MASK, focal: float = 0.0
) -> Tensor:
    """Softmax cross-entropy of each query over its candidates, where the document of query i is candidate i.

    scores [Q, N] with N >= Q (columns from Q on are extra negatives), positives bool [Q, from Q to N] (further columns
    are none) or None -> 0-d mean, in which ``focal`` weighs each query by (1 - p)**focal, p the probability that the
    softmax gives its targets.

    >>> s = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    >>> float(contrastive_loss(s).exp())  # two equal candidates: one chance in two
    2.0
    >>> both = torch.ones(2, 2, dtype=torch.bool)
    >>> float(contrastive_loss(s, both, Positives.MASK).exp())  # the other one is a known positive: no rival is left
    1.0
    """
    queries = len(scores)
    own = torch.arange(queries, device=scores.device)
    target = None
    if policy is not Positives.NONE and positives is not None:
        diagonal = torch.eye(queries, positives.shape[1], dtype=torch.bool, device=scores.device)
        more = (0, scores.shape[1] - positives.shape[1])
        if policy is Positives.MASK:
            scores = scores.masked_fill(nn.functional.pad(positives & ~diagonal, more), -torch.inf)
        else:
            target = nn.functional.pad((positives | diagonal).to(scores.dtype), more)
    goal = own if target is None else target / target.sum(dim=1, keepdim=True)
    if focal == 0:
        return nn.functional.cross_entropy(scores, goal)
    with torch.no_grad():
        log_p = scores.log_softmax(dim=1)
        log_p = log_p[own, own] if target is None else log_p.masked_fill(target == 0, -torch.inf).logsumexp(dim=1)
        weights = focal_weights(log_p, focal)
    return (weights * nn.functional.cross_entropy(scores, goal, reduction="none")).sum()


def focal_weights(log_p: Tensor, focal: float) -> Tensor:
    """(1 - p)**focal of each query as a share of their sum, [Q] -> [Q]; equal shares where no query has any left.

    >>> focal_weights(torch.tensor([0.5, 0.75]).log(), 1.0)
    tensor([0.6667, 0.3333])
    """
    log_weight = focal * (-log_p.clamp_max(0).expm1()).log()
    nothing_left = log_weight.amax() == -torch.inf
    return torch.where(nothing_left, torch.zeros_like(log_weight), log_weight).softmax(dim=0)


def direction_weights(loss: str, i2t_weight: float | None = None) -> dict[Direction, float]:
    """Weights of the two CLIP directions for a loss name and, optionally, another lambda for ``sym``.

    Errors: ValueError for an unknown name, a lambda outside 0 to 1, or a lambda beside a one-direction loss.

    >>> {d.value: w for d, w in direction_weights("asym-t2i").items()}
    {'i2t': 0.0, 't2i': 1.0}
    """
    if loss not in LOSS_WEIGHTS:
        raise ValueError(f"unknown loss {loss!r}; valid: {', '.join(LOSS_WEIGHTS)}")
    weight = LOSS_WEIGHTS[loss]
    if i2t_weight is not None:
        if not 0 <= i2t_weight <= 1:
            raise ValueError(f"i2t weight {i2t_weight} is outside 0 to 1")
        if loss != "sym" and i2t_weight != weight:
            raise ValueError(f"loss {loss!r} fixes the i2t weight at {weight:g}; give {i2t_weight:g} with loss 'sym'")
        weight = i2t_weight
    return {Direction.I2T: weight, Direction.T2I: 1.0 - weight}


class ContrastiveLoss(nn.Module):
    """Weighted directional contrastive loss over raw features, with its own alpha per direction and gamma per role.

    ``weights`` may be changed from step to step, ``trained`` are the directions that have one above 0 at the first step
    or at the last (``end_weights``). Its parameters (``similarity``) must reach the optimizer; give
    gamma a larger learning rate than the encoders, with which it cannot move (docs/math.md: "Similarity").

    >>> loss = ContrastiveLoss({Direction.I2T: 1.0, Direction.T2I: 0.0}, norm="qnorm")
    >>> image, text = torch.randn(4, 8), torch.randn(4, 8)
    >>> sorted(d.value for d in loss({"image": image, "text": text}).by_direction)
    ['i2t', 't2i']
    """

    def __init__(
        self,
        weights: Mapping[Direction, float],
        norm: Normalization | str = Normalization.COSINE,
        positives: Positives | str = Positives.MASK,
        scale_init: float = SCALE_INIT,
        scale_max: float = SCALE_MAX,
        gamma_init: float | tuple[float, float] = 0.5,
        focal: float = 0.0,
        norm_drift: float = 0.0,
        end_weights: Mapping[Direction, float] | None = None,
        start: Exponents | None = None,
    ) -> None:
        """norm_drift: weight of that penalty, which has a buffer for each side then. start: see RoleSimilarity."""
        super().__init__()
        self.weights = dict(weights)
        ever = [d for w in (self.weights, end_weights or {}) for d, weight in w.items() if weight > 0]
        self.trained = tuple(d for d in self.weights if d in ever)
        self.positives = Positives(positives)
        self.focal, self.norm_drift = focal, norm_drift
        self.similarity = RoleSimilarity(norm, self.weights, scale_init, scale_max, gamma_init, start)
        for direction in self.weights:
            # An untrained direction's alpha follows the trained one's effective scale (see forward), never a gradient.
            self.similarity.logit_scale(direction).requires_grad_(direction in self.trained)
        for side in (
            dict.fromkeys(s for d in self.weights for s in (d.query_side, d.document_side)) if norm_drift else ()
        ):
            self.register_buffer(f"log_length_{side}", torch.tensor(math.nan))

    def forward(
        self,
        sides: Mapping[str, Tensor],
        image_id: Tensor | None = None,
        text_id: Tensor | None = None,
        extra: Mapping[str, Tensor] | None = None,
        untrained: bool = True,
        known: Mapping[Direction, Tensor] | None = None,
    ) -> LossOutput:
        """sides: raw features by side name ("image", "text"; or "query", "document"), each [B, D], row i the pair i.

        image_id, text_id [B]: equal numbers mark known positives. extra: further raw candidates by side, [H, D].
        known: instead of ids, the known positives of a direction, bool [B, B] or, with those among the extra
        candidates, [B, B + H]. ``untrained`` False leaves out the (gradient-free) losses of directions of weight 0.
        """
        positives = known_positives(image_id, text_id)
        total: Tensor | None = None
        by_direction: dict[Direction, Tensor] = {}
        for direction in sorted(self.weights, key=lambda d: d not in self.trained):  # trained directions first
            weight, trained = self.weights[direction], direction in self.trained
            query, document = direction.roles(sides)
            if not trained and not untrained:
                if self.training:  # its running lengths must not depend on how often its loss is asked for
                    self.similarity.observe(direction, query, document)
                continue
            if extra and direction.document_side in extra:
                document = torch.cat([document, extra[direction.document_side].to(document.dtype)])
            with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
                if self.training or not self.similarity.is_calibrated(direction):
                    self.similarity.observe(direction, query, document)
                if not trained:
                    self._follow_trained(direction)
                scores = self.similarity(direction, query, document)
                matches = positives if known is None else known.get(direction)
                value = contrastive_loss(scores, matches, self.positives, self.focal)
            by_direction[direction] = value.detach()
            if trained:  # a weight that is 0 for a moment gives its alpha a gradient of 0, not none
                total = weight * value if total is None else total + weight * value
        if total is None:
            raise ValueError("no direction has a weight above 0")
        if not self.norm_drift:
            return LossOutput(total, by_direction)
        drift = torch.stack([self._drift(side, rows) for side, rows in sides.items()]).sum()
        return LossOutput(total + self.norm_drift * drift, by_direction, drift.detach())

    def _drift(self, side: str, rows: Tensor) -> Tensor:
        """E[log(|x| / l0)**2] of a side's raw rows [B, D], l0 their lengths' geometric mean in the first batch."""
        log_length = magnitude(rows).clamp_min(TINY).log()
        start = self.get_buffer(f"log_length_{side}")
        if bool(start.isnan()):
            start.copy_(log_length.detach().mean())
        return (log_length - start).square().mean()

    @torch.no_grad()
    def _follow_trained(self, direction: Direction) -> None:
        """Give an untrained direction the trained one's effective scale, so that its logged loss is comparable."""
        trained = self.trained[0]
        of = self.similarity
        log_scale = of.logit_scale(trained) + of.log_lengths(trained) - of.log_lengths(direction)
        of.logit_scale(direction).copy_(log_scale)


def clip_loss(
    loss: str = "sym",
    norm: Normalization | str = Normalization.COSINE,
    i2t_weight: float | None = None,
    positives: Positives | str = Positives.MASK,
    scale_init: float = SCALE_INIT,
    scale_max: float = SCALE_MAX,
    gamma_init: float | tuple[float, float] = 0.5,
    focal: float = 0.0,
    norm_drift: float = 0.0,
    i2t_weight_end: float | None = None,
    start: Exponents | None = None,
) -> ContrastiveLoss:
    """The loss by the names of ``train_clip.py``: ``--loss``, ``--norm``, ``--i2t-weight``, ``--positives``…

    >>> clip_loss("asym-i2t", "qnorm").weights[Direction.I2T]
    1.0
    """
    end = None if i2t_weight_end is None else direction_weights(loss, i2t_weight_end)
    return ContrastiveLoss(
        direction_weights(loss, i2t_weight),
        norm,
        positives,
        scale_init,
        scale_max,
        gamma_init,
        focal,
        norm_drift,
        end,
        start,
    )
