"""The directional contrastive loss. It has a similarity and never redefines it.

For one direction (docs/math.md: "Loss"; Feng & Watanabe 2026, section 3)

    L_dir = mean_i -log softmax_j(s_ij)[i]

with the documents of the global batch as candidates. The total is lambda * L_i2t + (1 - lambda) * L_t2i: ``sym`` is
lambda = 1/2, ``asym-i2t`` lambda = 1, ``asym-t2i`` lambda = 0. Text retrieval is the one direction q2d.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmclip.similarity import SCALE_INIT, SCALE_MAX, Direction, Normalization, RoleSimilarity

LOSS_WEIGHTS = {"sym": 0.5, "asym-i2t": 1.0, "asym-t2i": 0.0}  # name -> lambda, the weight of i2t


class Positives(StrEnum):
    """What to do with known positives other than the pair itself: another caption of the image, an exact duplicate."""

    MASK = "mask"  # leave them out of the denominator
    MULTI = "multi"  # they are targets too, each with the same weight
    NONE = "none"  # treat them as negatives, like open_clip's ClipLoss and MultipleNegativesRankingLoss


class LossOutput(NamedTuple):
    """``loss`` is what to call backward on; ``by_direction`` the unweighted loss of each direction, detached."""

    loss: Tensor
    by_direction: dict[Direction, Tensor]


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


def contrastive_loss(scores: Tensor, positives: Tensor | None = None, policy: Positives = Positives.MASK) -> Tensor:
    """Softmax cross-entropy of each query over its candidates, where the document of query i is candidate i.

    scores [Q, N] with N >= Q (columns from Q on are extra negatives), positives bool [Q, Q] or None -> 0-d mean.

    >>> s = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    >>> float(contrastive_loss(s).exp())  # two equal candidates: one chance in two
    2.0
    >>> both = torch.ones(2, 2, dtype=torch.bool)
    >>> float(contrastive_loss(s, both, Positives.MASK).exp())  # the other one is a known positive: no rival is left
    1.0
    """
    queries = len(scores)
    if policy is Positives.NONE or positives is None:
        return nn.functional.cross_entropy(scores, torch.arange(queries, device=scores.device))
    own = torch.eye(queries, dtype=torch.bool, device=scores.device)
    if policy is Positives.MASK:
        others = nn.functional.pad(positives & ~own, (0, scores.shape[1] - queries))
        return nn.functional.cross_entropy(
            scores.masked_fill(others, -torch.inf), torch.arange(queries, device=scores.device)
        )
    target = nn.functional.pad((positives | own).to(scores.dtype), (0, scores.shape[1] - queries))
    return nn.functional.cross_entropy(scores, target / target.sum(dim=1, keepdim=True))


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

    Its parameters (``similarity``) must reach the optimizer; give gamma a larger learning rate than the encoders, with
    which it cannot move (docs/math.md: "Similarity").

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
        gamma_init: float = 0.5,
    ) -> None:
        super().__init__()
        self.weights = dict(weights)
        self.positives = Positives(positives)
        self.similarity = RoleSimilarity(norm, self.weights, scale_init, scale_max, gamma_init)
        for direction, weight in self.weights.items():
            # An untrained direction's alpha follows the trained one's effective scale (see forward), never a gradient.
            self.similarity.logit_scale(direction).requires_grad_(weight > 0)

    def forward(
        self,
        sides: Mapping[str, Tensor],
        image_id: Tensor | None = None,
        text_id: Tensor | None = None,
        extra: Mapping[str, Tensor] | None = None,
        untrained: bool = True,
    ) -> LossOutput:
        """sides: raw features by side name ("image", "text"; or "query", "document"), each [B, D], row i the pair i.

        image_id, text_id [B]: equal numbers mark known positives. extra: further raw candidates by side, [H, D], that
        match no query. ``untrained`` False leaves out the (gradient-free) losses of directions of weight 0.
        """
        positives = known_positives(image_id, text_id)
        total: Tensor | None = None
        by_direction: dict[Direction, Tensor] = {}
        for direction in sorted(self.weights, key=lambda d: self.weights[d] == 0):  # trained directions first
            weight = self.weights[direction]
            query, document = direction.roles(sides)
            if weight == 0 and not untrained:
                if self.training:  # its running lengths must not depend on how often its loss is asked for
                    self.similarity.observe(direction, query, document)
                continue
            if extra and direction.document_side in extra:
                document = torch.cat([document, extra[direction.document_side].to(document.dtype)])
            with torch.set_grad_enabled(torch.is_grad_enabled() and weight > 0):
                if self.training or not self.similarity.is_calibrated(direction):
                    self.similarity.observe(direction, query, document)
                if weight == 0:
                    self._follow_trained(direction)
                value = contrastive_loss(self.similarity(direction, query, document), positives, self.positives)
            by_direction[direction] = value.detach()
            if weight > 0:
                total = weight * value if total is None else total + weight * value
        if total is None:
            raise ValueError("no direction has a weight above 0")
        return LossOutput(total, by_direction)

    @torch.no_grad()
    def _follow_trained(self, direction: Direction) -> None:
        """Give an untrained direction the trained one's effective scale, so that its logged loss is comparable."""
        trained = next(d for d, w in self.weights.items() if w > 0)
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
    gamma_init: float = 0.5,
) -> ContrastiveLoss:
    """The loss by the names of ``train_clip.py``: ``--loss``, ``--norm``, ``--i2t-weight``, ``--positives``.

    >>> clip_loss("asym-i2t", "qnorm").weights[Direction.I2T]
    1.0
    """
    return ContrastiveLoss(direction_weights(loss, i2t_weight), norm, positives, scale_init, scale_max, gamma_init)
