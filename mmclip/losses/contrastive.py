"""The directional contrastive loss. It has a similarity and never redefines it.

For one direction (docs/math.md: "Loss"; Feng & Watanabe 2026, section 3)

    L_dir = mean_i -log softmax_j(s_ij)[i]

with the documents of the global batch as candidates. The total is lambda * L_i2t + (1 - lambda) * L_t2i: ``sym`` is
lambda = 1/2, ``asym-i2t`` lambda = 1, ``asym-t2i`` lambda = 0. Text retrieval is the one direction q2d. A focal weight
moves the mean to queries that are not found yet, a penalty holds lengths where they began (docs/math.md: "Curriculum").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmclip import distributed
from mmclip.losses.cross_entropy import contrastive_loss, focal_weights
from mmclip.losses.gram_way import Relation
from mmclip.losses.tiled import Known, check_batch, relation_of, same_ids, tiled_losses
from mmclip.roles import SCALE_INIT, SCALE_MAX, Direction, Exponents, Normalization, Positives, direction_weights
from mmclip.similarity import TINY, RoleSimilarity, magnitude


class LossOutput(NamedTuple):
    """``loss`` is what to call backward on; ``by_direction`` the unweighted loss of each direction, detached;
    ``lengths`` those of all raw rows by side, [B], detached; ``norm_drift`` the penalty before its weight, detached,
    None without one."""

    loss: Tensor
    by_direction: dict[Direction, Tensor]
    lengths: dict[str, Tensor]
    norm_drift: Tensor | None = None


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
        tiled: bool = True,
    ) -> None:
        """norm_drift: weight of that penalty, which has a buffer for each side then. start: see RoleSimilarity. tiled
        False: whole score matrices, slower and with all their memory, of which autograd can take second derivatives.
        """
        super().__init__()
        if not 0 <= focal < math.inf:
            raise ValueError(f"focal {focal} is not a number of at least 0")
        self.weights = dict(weights)
        ever = [d for w in (self.weights, end_weights or {}) for d, weight in w.items() if weight > 0]
        self.trained = tuple(d for d in self.weights if d in ever)
        self.positives = Positives(positives)
        self.focal, self.norm_drift, self.tiled = focal, norm_drift, tiled
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
        known: Mapping[Direction, Known] | None = None,
        across_ranks: bool = False,
    ) -> LossOutput:
        """sides: raw features by side name ("image", "text"; or "query", "document"), each [B, D], row i the pair i.

        image_id, text_id [B]: equal numbers mark known positives. extra: further raw candidates by side, [H, D].
        known: instead of ids, the known positives of a direction, bool [B, B] or, with those among the extra
        candidates, [B, B + H]; or a function of query numbers [k] and candidate numbers [n] -> bool [k, n].
        ``untrained`` False leaves out the (gradient-free) losses of directions of weight 0.

        across_ranks: rows, ids and further candidates are this rank's, of as many as it has; loss and ``known`` are of
        the whole batch, its ranks in order, and gradients are as distributed.gather_rows has them.

        Errors: ValueError for sides, ids or candidates that do not fit each other, and for no pairs at all.
        """
        extra = extra or {}
        check_batch(self.weights, sides, {"image_id": image_id, "text_id": text_id}, extra, known, across_ranks)
        if across_ranks:
            image_id, text_id = (i if i is None else distributed.gather_ids(i) for i in (image_id, text_id))
            if not self.tiled:
                sides, extra = ({s: distributed.gather_rows(x) for s, x in of.items()} for of in (sides, extra))
                across_ranks = False
        # All that is asked for below but the scores is lengths: a row that holds its length alone has that length
        gather = distributed.gather_rows if across_ranks else _itself
        seen, more = ({s: gather(magnitude(x)[:, None]) for s, x in of.items()} for of in (sides, extra))
        weights: dict[Direction, float | None] = {}
        for direction in sorted(self.weights, key=lambda d: d not in self.trained):  # trained directions first
            trained = direction in self.trained
            query, document = direction.roles(seen)
            if not trained and not untrained:
                if self.training:  # its running lengths must not depend on how often its loss is asked for
                    self.similarity.observe(direction, query, document)
                continue
            if direction.document_side in more:
                document = torch.cat([document, more[direction.document_side].to(document.dtype)])
            if self.training or not self.similarity.is_calibrated(direction):
                self.similarity.observe(direction, query, document)
            if not trained:
                self._follow_trained(direction)
            weights[direction] = self.weights[direction] if trained else None
        if not self.trained:
            raise ValueError("no direction has a weight above 0")
        relations = self._relations(weights, image_id, text_id, known)
        if self.tiled:
            focal = partial(focal_weights, focal=self.focal) if self.focal else None
            multi = self.positives is Positives.MULTI
            total, by_direction = tiled_losses(
                self.similarity, weights, sides, extra, relations, multi, focal, across_ranks
            )
        else:
            total, by_direction = self._plain(weights, sides, extra, relations)
        lengths = {s: x.detach()[:, 0] for s, x in seen.items()}
        if not self.norm_drift:
            return LossOutput(total, by_direction, lengths)
        drift = torch.stack([self._drift(side, rows) for side, rows in seen.items()]).sum()
        return LossOutput(total + self.norm_drift * drift, by_direction, lengths, drift.detach())

    def _relations(
        self,
        directions: Iterable[Direction],
        image_id: Tensor | None,
        text_id: Tensor | None,
        known: Mapping[Direction, Known] | None,
    ) -> dict[Direction, Relation | None]:
        if self.positives is Positives.NONE:
            return {}
        if known is not None:
            return {direction: relation_of(known.get(direction)) for direction in directions}
        return dict.fromkeys(directions, same_ids(image_id, text_id))

    def _plain(
        self,
        weights: Mapping[Direction, float | None],
        sides: Mapping[str, Tensor],
        extra: Mapping[str, Tensor],
        relations: Mapping[Direction, Relation | None],
    ) -> tuple[Tensor, dict[Direction, Tensor]]:
        """The same by whole score matrices."""
        terms, by_direction = [], {}
        for direction, weight in weights.items():
            query, document = direction.roles(sides)
            if direction.document_side in extra:
                document = torch.cat([document, extra[direction.document_side].to(document.dtype)])
            relation = relations.get(direction)
            numbers = torch.arange(len(document), device=query.device)
            positives = None if relation is None else relation(numbers[: len(query)], numbers)
            with torch.set_grad_enabled(torch.is_grad_enabled() and weight is not None):
                scores = self.similarity(direction, query, document)
                value = contrastive_loss(scores, positives, self.positives, self.focal)
            by_direction[direction] = value.detach()
            if weight is not None:  # one that is 0 for a moment gives its alpha a gradient of 0, not none
                terms.append(weight * value)
        return torch.stack(terms).sum(), by_direction

    def _drift(self, side: str, rows: Tensor) -> Tensor:
        """E[log(|x| / l0)**2] of a side's raw rows [B, D], l0 their lengths' geometric mean in the first batch."""
        log = magnitude(rows).clamp_min(TINY).log()
        start = self.get_buffer(f"log_length_{side}")
        if bool(start.isnan()):
            start.copy_(log.detach().mean())
        return (log - start).square().mean()

    @torch.no_grad()
    def _follow_trained(self, direction: Direction) -> None:
        """Give an untrained direction the trained one's effective scale, so that its logged loss is comparable."""
        trained = self.trained[0]
        of = self.similarity
        log_scale = of.logit_scale(trained) + of.log_lengths(trained) - of.log_lengths(direction)
        of.logit_scale(direction).copy_(log_scale)


def _itself(rows: Tensor) -> Tensor:
    return rows


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
    tiled: bool = True,
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
        tiled,
    )
