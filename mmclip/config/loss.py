"""The settings of the loss: directions, normalization, scale, and what of it changes over a run. A part of every
training run's settings."""

from __future__ import annotations

import argparse
import dataclasses
import math

from mmclip.config.flags import flag
from mmclip.errors import UserError, require
from mmclip.roles import FIXED_NORMS, LOSS_WEIGHTS, NORMS, POSITIVES, SCALE_MAX

LOSS, CURRICULUM = "loss and normalization", "curriculum"
SCHEDULES = ("none", "switch", "anneal")


def steps_or_fraction(text: str) -> float:
    """Of a run: a fraction below 1, or a number of steps. Errors: ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or (value >= 1 and value != int(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a fraction below 1 nor a whole number of steps")
    return value


@dataclasses.dataclass
class LossConfig:
    """Which directions train, whose length is divided out, and the curriculum."""

    loss: str = flag(
        "sym",
        LOSS,
        "which directions train: both (sym), image-to-text or text-to-image only",
        choices=tuple(LOSS_WEIGHTS),
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
    logit_scale_max: float = flag(SCALE_MAX, LOSS, "the effective scale is clamped here", metavar="S")
    gamma_init: float = flag(
        0.5, LOSS, "initial gamma of both roles with --norm learned (--init-from a learned run: its own)", metavar="G"
    )

    gamma_schedule: str = flag(
        "none",
        CURRICULUM,
        "how the run gets from --gamma-from to --norm: at once at --gamma-start, or in a straight line from there to "
        "--gamma-end; alpha keeps the effective scale",
        choices=SCHEDULES,
    )
    gamma_from: str = flag("cosine", CURRICULUM, "normalization that a schedule starts with", choices=FIXED_NORMS)
    gamma_start: float = flag(
        0.5, CURRICULUM, "where it leaves --gamma-from: a step, or a fraction of the run", type=steps_or_fraction
    )
    gamma_end: float = flag(
        0.75, CURRICULUM, "where an anneal arrives at --norm: a step, or a fraction of the run", type=steps_or_fraction
    )
    stage2_lr_factor: float = flag(
        1.0, CURRICULUM, "all learning rates are multiplied by this after --gamma-schedule switch", metavar="F"
    )
    focal: float = flag(
        0.0,
        CURRICULUM,
        "weigh each query by (1 - p)**F, p the probability of its positives; PACE: 2, off: 0",
        metavar="F",
    )
    i2t_weight_end: float | None = flag(
        None,
        CURRICULUM,
        "--loss sym: weight of i2t at the last step, in a straight line from --i2t-weight",
        type=float,
        metavar="W",
    )
    norm_drift: float = flag(
        0.0,
        CURRICULUM,
        "weight of the penalty E[log(length / l0)**2] of each side, l0 its geometric mean in the first batch",
        metavar="W",
    )

    def check_loss(self) -> None:
        """Errors: UserError naming the flag and what it was given."""
        require(self, ("logit_scale_init", "logit_scale_max"), "a number above 0", lambda v: v > 0)
        require(self, ("gamma_init",), "a number between 0 and 1, both excluded", lambda v: 0 < v < 1)
        require(self, ("i2t_weight", "i2t_weight_end"), "a number from 0 to 1", lambda v: 0 <= v <= 1)
        require(self, ("focal", "norm_drift"), "a number of at least 0", lambda v: v >= 0)
        for name in ("i2t_weight", "i2t_weight_end"):
            if getattr(self, name) is not None and self.loss != "sym":
                given = f"--{name.replace('_', '-')} {getattr(self, name):g}"
                raise UserError(f"{given} needs --loss sym, not --loss {self.loss}")
        if self.logit_scale_init is not None and self.logit_scale_init > self.logit_scale_max:
            raise UserError(
                f"--logit-scale-init {self.logit_scale_init:g} is above --logit-scale-max {self.logit_scale_max:g}"
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        """What can be said of the exponents' schedule before the number of steps is known (curriculum.check)."""
        require(self, ("stage2_lr_factor",), "a number above 0", lambda v: v > 0)
        if self.stage2_lr_factor != 1 and self.gamma_schedule != "switch":
            raise UserError(f"--stage2-lr-factor {self.stage2_lr_factor:g} needs --gamma-schedule switch")
        unused = {"none": ("gamma_from", "gamma_start", "gamma_end"), "switch": ("gamma_end",)}
        for name in unused.get(self.gamma_schedule, ()):
            if (value := getattr(self, name)) != next(f.default for f in dataclasses.fields(self) if f.name == name):
                needs = "anneal" if self.gamma_schedule == "switch" else "switch or anneal"
                raise UserError(f"--{name.replace('_', '-')} {value} needs --gamma-schedule {needs}")
        if self.gamma_schedule == "none":
            return
        given = f"--gamma-schedule {self.gamma_schedule}"
        if self.norm == "learned":
            raise UserError(f"{given}: --norm learned finds its exponents itself; a fixed normalization is expected")
        if self.norm == self.gamma_from:
            raise UserError(f"{given}: --gamma-from {self.gamma_from} is --norm itself, so nothing would change")
        start, end = self.gamma_start, self.gamma_end
        if self.gamma_schedule == "switch" and start == 0:
            raise UserError(f"{given}: --gamma-start 0 leaves no step before it")
        if self.gamma_schedule == "anneal" and start >= end and (start < 1) == (end < 1):
            raise UserError(f"{given}: --gamma-start {start:g} is not before --gamma-end {end:g}")
