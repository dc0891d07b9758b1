"""The settings of the loss: directions, normalization, scale. A part of every training run's settings."""

from __future__ import annotations

import dataclasses

from mmclip.errors import UsageError, require
from mmclip.flags import flag

LOSSES = ("sym", "asym-i2t", "asym-t2i")
NORMS = ("cosine", "dot", "qnorm", "dnorm", "learned")
POSITIVES = ("mask", "multi", "none")
LOSS = "loss and normalization"


@dataclasses.dataclass
class LossSettings:
    """Which directions train, and whose length is divided out."""

    loss: str = flag(
        "sym", LOSS, "which directions train: both (sym), image-to-text or text-to-image only", choices=LOSSES
    )
    i2t_weight: float | None = flag(None, LOSS, "weight of i2t in --loss sym [0.5]", type=float, metavar="W")
    norm: str = flag(
        "cosine",
        LOSS,
        "whose length is divided out: both, neither, the query's, the document's, or a learned share of each role's",
        choices=NORMS,
    )
    positives: str = flag(
        "mask",
        LOSS,
        "other captions of an image and exact duplicates: left out of the denominator, targets too, or plain negatives",
        choices=POSITIVES,
    )
    logit_scale_init: float | None = flag(
        None, LOSS, "initial effective scale [14.29, or the checkpoint's]", type=float, metavar="S"
    )
    logit_scale_max: float = flag(100.0, LOSS, "the effective scale is clamped here", metavar="S")
    gamma_init: float = flag(0.5, LOSS, "initial gamma of both roles with --norm learned", metavar="G")

    def check_loss(self) -> None:
        """Errors: UsageError naming the flag and what it was given."""
        require(self, ("logit_scale_init", "logit_scale_max"), "a number above 0", lambda v: v > 0)
        require(self, ("gamma_init",), "a number between 0 and 1, both excluded", lambda v: 0 < v < 1)
        require(self, ("i2t_weight",), "a number from 0 to 1", lambda v: 0 <= v <= 1)
        if self.i2t_weight is not None and self.loss != "sym":
            raise UsageError(f"--i2t-weight {self.i2t_weight:g} needs --loss sym, not --loss {self.loss}")
        if self.logit_scale_init is not None and self.logit_scale_init > self.logit_scale_max:
            raise UsageError(
                f"--logit-scale-init {self.logit_scale_init:g} is above --logit-scale-max {self.logit_scale_max:g}"
            )
