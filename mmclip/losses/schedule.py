"""Schedules of the loss over a run: exponents, the weight of a direction, the learning rate of a second stage.

Pure functions of the settings and the step, so a resumed run needs no memory of them. The last step of every run has
the exponents of --norm, with which it is exported and evaluated.
"""

from __future__ import annotations

import math
from typing import Any

from mmclip.config import LossConfig
from mmclip.errors import UserError, printable
from mmclip.roles import Exponents, Normalization


def as_step(share: float, total_steps: int) -> int:
    """Step, counted from 0, of a fraction below 1 of a run (at most the last step) or of a number of steps.

    >>> as_step(0.5, 9), as_step(0.999, 9), as_step(40, 9)
    (5, 8, 40)
    """
    return min(math.ceil(share * total_steps), total_steps - 1) if share < 1 else int(share)


def check(settings: LossConfig, total_steps: int) -> None:
    """Refuse (UserError) a schedule that does not arrive at --norm by the last of ``total_steps``."""
    if settings.gamma_schedule == "none":
        return
    switch, start, end = settings.gamma_schedule == "switch", settings.gamma_start, settings.gamma_end
    last = f"--gamma-start {start:g}" if switch else f"--gamma-end {end:g}"
    begin, done = as_step(start, total_steps), as_step(start if switch else end, total_steps)
    if done >= total_steps:
        raise UserError(f"{last}: in a run of {total_steps} steps it would never come to --norm {settings.norm}")
    if not switch and begin >= done and (start < 1) != (end < 1):
        at = f"--gamma-start {start:g} is step {begin} and {last} is step {done} of {total_steps}"
        raise UserError(f"{at}: an anneal begins before it ends")


def start_exponents(settings: LossConfig) -> Exponents | None:
    """Exponents at the first step of a scheduled run; None without a schedule."""
    return None if settings.gamma_schedule == "none" else Normalization(settings.gamma_from).exponents


def exponents_at(settings: LossConfig, step: int, total_steps: int) -> Exponents:
    """Exponents of a step (from 0) of a scheduled run; each role's move in a straight line."""
    start, end = Normalization(settings.gamma_from).exponents, Normalization(settings.norm).exponents
    begin = as_step(settings.gamma_start, total_steps)
    done = begin if settings.gamma_schedule == "switch" else as_step(settings.gamma_end, total_steps)
    share = max(0, step - begin) / max(1, done - begin)
    return end if step >= done else Exponents(*(a + share * (b - a) for a, b in zip(start, end, strict=True)))


def rate_factor(settings: LossConfig, step: int, total_steps: int) -> float:
    """Factor of all learning rates: --stage2-lr-factor from the switch on, else 1."""
    switched = settings.gamma_schedule == "switch" and step >= as_step(settings.gamma_start, total_steps)
    return settings.stage2_lr_factor if switched else 1.0


def i2t_weight_at(settings: LossConfig, step: int, total_steps: int) -> float | None:
    """Lambda of a step, from --i2t-weight at the first to --i2t-weight-end at the last; None if it is constant."""
    start, end = 0.5 if settings.i2t_weight is None else settings.i2t_weight, settings.i2t_weight_end
    share = step / max(1, total_steps - 1)
    return None if end is None else (1 - share) * start + share * end


def describe(step: int, line: dict[str, Any]) -> list[str]:
    """Transitions and starts from another run in a line of metrics.jsonl, of a step from 1, as sentences."""
    texts = []
    if at := line.get("initial"):
        trained = f"{at['loss']} loss, {at['norm']}" if at["loss"] else "a plain CLIP"
        texts.append(f"starting from {printable(at['run'], 80)} ({printable(trained, 80)}): {_changes(at)}")
    if "transition" in line:
        texts.append(f"step {step}: {_changes(line['transition'])}")
    return texts


def _changes(pairs: dict[str, Any]) -> str:
    names = [n for n, v in pairs.items() if isinstance(v, list) and v[0] is not None]
    return ", ".join(f"{n.replace('logit_scale', 'alpha')} {pairs[n][0]:.4g} -> {pairs[n][1]:.4g}" for n in names)
