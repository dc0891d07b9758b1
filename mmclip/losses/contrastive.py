"""The directional contrastive loss. It has a similarity and never redefines it.

For one direction L_dir = mean_i -log softmax_j(s_ij)[i], with the documents of the global batch as candidates
(docs/math.md: "Loss"; Feng & Watanabe 2026, section 3). The total is lambda * L_i2t + (1 - lambda) * L_t2i, of text q2d
and d2q likewise. A focal weight moves the mean to hard queries, a penalty holds norms where they began.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmclip import distributed
from mmclip.losses.cross_entropy import contrastive_cross_entropy
from mmclip.losses.positives import Lookup, PositiveMask, Sides, oriented, with_negatives
from mmclip.losses.tiled import tiled_loss
from mmclip.roles import CLIP_DIRECTIONS, TEXT_DIRECTIONS, Direction, Normalization, Positives, direction_weights
from mmclip.similarity import TINY, Similarity, magnitude

Weights = Mapping[Direction, float]
TEXT_SCALE_INIT = 20.0  # sentence-transformers' scale of cosines


class LossOutput(NamedTuple):
    """Values of one batch.

    Attributes:
        loss: weighted total, 0-d, with its gradient.
        by_direction: unweighted loss of each direction, 0-d, detached.
        norms: norms of the raw features by side, [B] of the global batch, detached.
        norm_drift: penalty before its weight, 0-d, detached; None without one.
    """

    loss: Tensor
    by_direction: dict[Direction, Tensor]
    norms: dict[str, Tensor]
    norm_drift: Tensor | None = None


class ContrastiveLoss(nn.Module):
    """Weighted directional contrastive loss of raw features.

    Its parameters, those of ``similarity``, must reach the optimizer, gamma with a larger learning rate than the
    encoders' (docs/math.md: "Similarity"). ``weights`` may be changed from step to step.

    >>> loss = ContrastiveLoss(Similarity("qnorm"), {Direction.I2T: 1.0, Direction.T2I: 0.0})
    >>> sorted(d.value for d in loss({"image": torch.randn(4, 8), "text": torch.randn(4, 8)}).by_direction)
    ['i2t', 't2i']
    """

    def __init__(
        self,
        similarity: Similarity,
        weights: Weights,
        positives: Positives | str = Positives.MASK,
        focal: float = 0.0,
        norm_drift: float = 0.0,
        *,
        end_weights: Weights | None = None,
        gather: bool = False,
        tiled: bool = True,
    ) -> None:
        """Make a loss over the directions of ``weights``.

        Args:
            similarity: the similarity, with an alpha for each direction.
            weights: weight of each direction's loss in the total.
            positives: policy for known positives.
            focal: exponent of (1 - p) in the queries' weights; 0 for equal ones.
            norm_drift: weight of the penalty E[log(|x| / l0)**2] of each side, l0 its geometric mean at first.
            end_weights: weights at the last step; one above 0 here or in ``weights`` makes a direction a trained one.
            gather: whether features, positives and negatives of all ranks are one batch, with its exact gradients.
            tiled: False for whole score matrices, slower and larger, which have second derivatives.

        Raises:
            ValueError: a focal exponent below 0, or no weight above 0.
        """
        super().__init__()
        if not 0 <= focal < math.inf:
            raise ValueError(f"focal {focal} is not a number of at least 0")
        self.similarity, self.weights, self.positives = similarity, dict(weights), Positives(positives)
        self.focal, self.norm_drift, self.gather, self.tiled = focal, norm_drift, gather, tiled
        end = end_weights or {}
        self.trained = tuple(d for d in self.weights if max(weights[d], end.get(d, 0)) > 0)
        if not self.trained:
            raise ValueError(f"weights {self.weights}: no direction has one above 0")
        self.sides = ("image", "text") if set(self.weights) <= set(CLIP_DIRECTIONS) else ("query", "document")
        for direction in self.weights:
            similarity.logit_scale(direction).requires_grad_(similarity.learn_scale and direction in self.trained)
        for side in self.sides if norm_drift else ():
            self.register_buffer(f"log_length_{side}", torch.tensor(math.nan))  # log l0; checkpoints have this name

    def forward(
        self,
        features: Sides,
        positives: PositiveMask | None = None,
        negatives: Sides | None = None,
        untrained: bool = True,
    ) -> LossOutput:
        """Loss of a batch.

        Args:
            features: raw features by side ("image", "text" or "query", "document"), [B, D]; row i is pair i.
            positives: known positives besides the pairs.
            negatives: further raw candidates by side, [H, D].
            untrained: whether to compute the (gradient-free) losses of directions of weight 0, too.

        Raises:
            ValueError: shapes that do not fit each other, or no pairs.
        """
        self._check(features, positives, negatives := negatives or {})
        # The row direction has a weight, or its alpha's gradient would be rounding where it is 0
        directions = sorted(self.weights, key=lambda d: (d not in self.trained, self.weights[d] == 0))
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.norm_drift > 0):
            norms = {side: self._of_all(magnitude(features[side])) for side in self.sides}
        more = {side: self._of_all(magnitude(x).detach()) for side, x in negatives.items()}
        for direction in directions:
            if self.training or not self.similarity.has_norm_stats(direction):
                documents = with_negatives(direction.document_side, norms, more)
                self.similarity.update_norm_stats(direction, norms[direction.query_side], documents)
            if untrained and direction not in self.trained:  # its loss is comparable at the trained one's scale
                trained, of = self.trained[0], self.similarity
                log_scale = of.logit_scale(trained) + of.log_norm_factor(trained) - of.log_norm_factor(direction)
                of.logit_scale(direction).data.copy_(log_scale.detach())
        used = directions if untrained else [d for d in directions if d in self.trained]
        weights = {d: self.weights[d] if d in self.trained else None for d in used}
        known = None if self.positives is Positives.NONE else positives
        lookup = None if known is None else known.lookup(self.gather)
        value = tiled_loss if self.tiled else ContrastiveLoss._plain
        total, values = value(self, weights, features, negatives, lookup)
        out = LossOutput(total, values, {side: n.detach() for side, n in norms.items()})
        if not self.norm_drift:
            return out
        drift = torch.stack([self._drift(side, n) for side, n in norms.items()]).sum()
        return out._replace(loss=total + self.norm_drift * drift, norm_drift=drift.detach())

    def _of_all(self, rows: Tensor) -> Tensor:
        return distributed.gather_rows(rows) if self.gather else rows

    def _plain(
        self, weights: Mapping[Direction, float | None], features: Sides, negatives: Sides, lookup: Lookup | None
    ) -> tuple[Tensor, dict[Direction, Tensor]]:
        """Total and each direction's loss from whole score matrices."""
        features, negatives = ({s: self._of_all(x) for s, x in of.items()} for of in (features, negatives))
        terms, values = [], {}
        for direction, weight in weights.items():
            query, document = (
                features[direction.query_side],
                with_negatives(direction.document_side, features, negatives),
            )
            numbers = torch.arange(len(document), device=query.device)
            known = None if lookup is None else oriented(lookup, direction)(numbers[: len(query)], numbers)
            with torch.set_grad_enabled(torch.is_grad_enabled() and weight is not None):
                scores = self.similarity(direction, query, document)
                value = contrastive_cross_entropy(scores, known, self.positives, self.focal)
            values[direction] = value.detach()
            if weight is not None:  # one that is 0 for a moment gives its alpha a gradient of 0, not none
                terms.append(weight * value)
        return torch.stack(terms).sum(), values

    def _drift(self, side: str, norms: Tensor) -> Tensor:
        """E[log(|x| / l0)**2] of a side's norms [B], l0 their geometric mean in the first batch."""
        log, start = norms.clamp_min(TINY).log(), self.get_buffer(f"log_length_{side}")
        if bool(start.isnan()):
            start.copy_(log.detach().mean())
        return (log - start).square().mean()

    def _check(self, features: Sides, positives: PositiveMask | None, negatives: Sides) -> None:
        """Refuse shapes that do not fit: tiles would take the first rows of the longer side."""
        shapes = {s: list(features[s].shape) if s in features else "missing" for s in self.sides}
        more = {f"negative {s}": list(x.shape) for s, x in negatives.items()}
        shown = ", ".join(f"{name} {shape}" for name, shape in (shapes | more).items())
        own, other = shapes.values()
        if own != other or len(own) != 2 or any(len(x) != 2 or x[1] != own[1] for x in more.values()):
            raise ValueError(f"{shown}: raw features [B, D] of {' and '.join(shapes)} are expected, row i the pair i")
        if not set(negatives) <= set(shapes):
            raise ValueError(f"{shown}: negatives are of {' or '.join(shapes)}")
        pairs = len(features[self.sides[0]])
        if pairs == 0 and not self.gather:
            raise ValueError(f"{shown}: no pairs")
        if positives is None or (self.gather and positives.columns is not None):
            return
        columns = (None, pairs, pairs + len(negatives.get(self.sides[1], ())))
        if positives.pairs != pairs or positives.columns not in columns:
            known = f"{positives.pairs} rows" + (f", {positives.columns} columns" if positives.columns else "")
            raise ValueError(f"{shown}: known positives of {known}, {pairs} pairs are expected")


def clip_loss(
    loss: str = "sym", norm: Normalization | str = Normalization.COSINE, i2t_weight: float | None = None,
    positives: Positives | str = Positives.MASK, focal: float = 0.0, norm_drift: float = 0.0,
    i2t_weight_end: float | None = None, gather: bool = False, tiled: bool = True, **similarity: Any,
) -> ContrastiveLoss:  # fmt: skip
    """The loss of images and texts by the names of ``mmclip train``; ``similarity`` goes to ``Similarity``.

    >>> clip_loss("asym-i2t", "qnorm").weights[Direction.I2T]
    1.0
    """
    weights, of = direction_weights(loss, i2t_weight), Similarity(norm, CLIP_DIRECTIONS, **similarity)
    end = None if i2t_weight_end is None else direction_weights(loss, i2t_weight_end)
    return ContrastiveLoss(of, weights, positives, focal, norm_drift, end_weights=end, gather=gather, tiled=tiled)


def text_loss(
    loss: str = "q2d", norm: Normalization | str = Normalization.COSINE, q2d_weight: float | None = None,
    positives: Positives | str = Positives.MASK, focal: float = 0.0, norm_drift: float = 0.0, gather: bool = False,
    tiled: bool = True, **similarity: Any,
) -> ContrastiveLoss:  # fmt: skip
    """The loss of queries and documents by the names of ``mmclip train-text``; ``similarity`` goes to ``Similarity``.

    By default the effective scale is sentence-transformers' 20, and alpha is not trained.

    >>> {d.value: w for d, w in text_loss("both", "qnorm").weights.items()}
    {'q2d': 0.5, 'd2q': 0.5}
    """
    weights = direction_weights(loss, q2d_weight, text=True)
    of = Similarity(norm, TEXT_DIRECTIONS, **{"scale_init": TEXT_SCALE_INIT, "learn_scale": False} | similarity)
    return ContrastiveLoss(of, weights, positives, focal, norm_drift, gather=gather, tiled=tiled)
