"""Directional contrastive losses of raw features, over a similarity (mmclip.similarity) and its roles (mmclip.roles).

``clip_loss`` and ``text_loss`` make a ``ContrastiveLoss`` by the names of the training scripts; ``PositiveMask`` marks
known positives; ``contrastive_cross_entropy`` is the formula for one score matrix. ``losses.sentence_transformers`` has
drop-in losses for that library and is imported by itself. Imports distributed, config and what is below them.
"""

from mmclip.losses.contrastive import ContrastiveLoss, LossOutput, clip_loss, text_loss
from mmclip.losses.cross_entropy import contrastive_cross_entropy
from mmclip.losses.positives import PositiveMask, mask_from_ids, mask_from_judgments, mask_from_matrix
from mmclip.roles import Positives

__all__ = [
    "ContrastiveLoss",
    "LossOutput",
    "PositiveMask",
    "Positives",
    "clip_loss",
    "contrastive_cross_entropy",
    "mask_from_ids",
    "mask_from_judgments",
    "mask_from_matrix",
    "text_loss",
]
