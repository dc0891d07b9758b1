"""Checks of a run: alarms with advice, unusable samples, and the errors after which a run cannot go on.

Alarms are rules of magnitude-aware training over the numbers of metrics.jsonl; each is raised once a run. The rules are
the same for CLIP and for text, the advice differs (``Advice``). A number that is not finite raises no alarm: the step
itself stops the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mmclip.data.image_text import BadSample, named, skipped_line
from mmclip.errors import UserError, printable

if TYPE_CHECKING:
    from mmclip.training.task import Task

STUCK_STEPS = 50  # logged steps span at least this many before a constant loss counts as stuck
STUCK_WITHIN = 0.02  # relative distance to ln(candidates)
PINNED = 0.02  # distance of gamma to 0 or 1 below which sigmoid's slope, and so its gradient, is below 0.02
UNMOVED = 0.01  # change of gamma that half a run should exceed
IN_A_ROW = 3  # logged steps that a passing state must last
WAITING, WAITING_SECONDS = 0.5, 10.0  # share of the time spent waiting for data, over at least so long
NOISE = 3.0  # standard errors that a difference of success rates must exceed

ALARMS = {  # names for programs, texts for people
    "loss_stuck": "the loss has stood at ln(batch) = {chance:.2f}, that of guessing, for {steps} steps after the "
    "warm-up: {advice.stuck}",
    "gamma_pinned": "{pinned}: so near its end that it hardly moves any more. The run is all but one with a fixed "
    "normalization (--norm): train that one, or lower --gamma-lr, or move --gamma-init",
    "gamma_unmoved": "after half of the run both gammas stand where they started ({q:.3f}, {d:.3f}): they are not "
    "being learned. Raise --gamma-lr (1e-2 moves them in a few hundred steps)",
    "scale_clamped": "the effective scale of {directions} is held at --logit-scale-max {limit:g}: the loss wants still "
    "sharper scores. Usual late in a long run; early in one, look for duplicates among the pairs, lower --lr, or raise "
    "the limit",
    "data_starved": "steps wait for data {share:.0%} of the time: {advice.starved}",
    "magnitude_collapse": "{d} finds {native:.1%} natively and {cosine:.1%} by cosine ({metric}): the ranking rests on "
    "the magnitudes, and the angles carry little. {advice.collapse}",
    "direction_dead": "{other} finds {dead:.1%} where {d} finds {alive:.1%}: that direction is all but dead, which is "
    "the price of a one-direction loss. Where it is needed, --loss sym with --i2t-weight {weight} keeps it alive",
}
Alarms = Iterator[tuple[str, dict[str, Any]]]  # names, and values of their texts


class Advice(NamedTuple):
    """What to try, in the flags of a command; ``starved`` None: data are in memory and never waited for."""

    stuck: str
    collapse: str
    memory: str
    starved: str | None = None


CLIP_ADVICE = Advice(
    stuck="check that captions belong to their images, then try another --lr (ten times less when fine-tuning, up "
    "to 1e-3 from random weights), a longer --warmup, or a larger batch",
    collapse="Lower --lr, raise --proj-wd, start from a cosine-trained checkpoint (--pretrained), or let --norm "
    "learned choose the share of the magnitude",
    memory="A smaller --batch-size with a larger --accum-freq keeps the loss as it is",
    starved="raise --workers, keep the shards on a faster disk, store smaller images, or --cache-features where a "
    "trunk is locked",
)
TEXT_ADVICE = Advice(
    stuck="check that documents belong to their queries, then try another --lr, a longer --warmup, or a larger batch",
    collapse="Lower --lr, train --norm qnorm or cosine, or let --norm learned choose the share of the magnitude",
    memory="--mini-batch-size keeps the loss as it is",
)


class Monitors:
    """The alarms of a task's run by name (``raised``), and their state, which belongs in its checkpoints."""

    @torch.no_grad()
    def __init__(self, task: Task) -> None:
        self.task, self.queries, self.metric, self.advice = task, task.validation_queries, task.metric, task.advice
        self.trained = [d.value for d in task.loss.trained]
        learned = task.config.norm == "learned" and task.config.gamma_lr > 0
        self.gamma_init = [float(g) for g in task.loss.similarity.exponents] if learned else None
        self.chance_loss = math.log(max(task.candidates, 2))  # that of guessing
        # Success rate of a random ranking, in both directions: as many groups as the first direction has queries
        self.chance = 1 / max(next(iter(self.queries.values()), 0), 1)
        self.raised: dict[str, str] = {}
        self._losses: list[tuple[int, float]] = []
        self._rows: dict[str, int] = {}
        self._waited = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rules remember, as plain values."""
        return {"raised": self.raised, "losses": self._losses, "rows": self._rows, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another run's :meth:`state_dict`."""
        self.raised, self._rows = dict(state["raised"]), dict(state["rows"])
        self._losses, self._waited = [(step, loss) for step, loss in state["losses"]], state["waited"]

    def training(self, step: int, numbers: Mapping[str, float], seconds: float) -> list[tuple[str, str]]:
        """New alarms of a logged training step; ``seconds`` since the one before it."""
        return self._new(self._of_training(step, numbers, seconds))

    def validation(self, numbers: Mapping[str, float]) -> list[tuple[str, str]]:
        """New alarms of a validation."""
        return self._new(self._of_validation(numbers))

    def _new(self, alarms: Alarms) -> list[tuple[str, str]]:
        texts = [(name, ALARMS[name].format(advice=self.advice, **values)) for name, values in alarms]
        new = [(name, text) for name, text in texts if name not in self.raised]
        self.raised |= dict(new)
        return new

    def _lasts(self, name: str, now: bool) -> bool:
        """Whether a state has held at each of the last ``IN_A_ROW`` logged steps."""
        self._rows[name] = self._rows.get(name, 0) + 1 if now else 0
        return self._rows[name] >= IN_A_ROW

    def _of_training(self, step: int, numbers: Mapping[str, float], seconds: float) -> Alarms:
        if self._is_stuck(step, numbers["loss"]):
            yield "loss_stuck", {"chance": self.chance_loss, "steps": STUCK_STEPS}
        if self.gamma_init is not None:
            gammas = {role: numbers[f"gamma_{role}"] for role in ("q", "d")}
            pinned = ", ".join(f"gamma_{role} = {g:.3f}" for role, g in gammas.items() if min(g, 1 - g) < PINNED)
            if self._lasts("gamma", bool(pinned)):
                yield "gamma_pinned", {"pinned": pinned}
            moved = max(abs(g - start) for g, start in zip(gammas.values(), self.gamma_init, strict=True))
            if step >= self.task.total_steps / 2 and moved < UNMOVED:
                yield "gamma_unmoved", gammas
        limit = self.task.config.logit_scale_max
        clamped = [d for d in self.trained if numbers[f"effective_scale_{d}"] >= 0.999 * limit]
        if self._lasts("scale", bool(clamped)):
            yield "scale_clamped", {"directions": " and ".join(clamped), "limit": limit}
        waiting = self.advice.starved is not None and numbers.get("data_wait", 0.0) > WAITING
        self._waited = self._waited + seconds if waiting else 0.0
        if self._lasts("data", waiting) and self._waited > WAITING_SECONDS:
            yield "data_starved", {"share": numbers["data_wait"]}

    def _is_stuck(self, step: int, loss: float) -> bool:
        """Whether both halves of a window are at ln(candidates): a loss passing through shows in one of them."""
        if step > self.task.warmup:
            self._losses.append((step, loss))
        since = step - STUCK_STEPS
        if not self._losses or self._losses[0][0] > since:
            return False
        self._losses = [x for x in self._losses if x[0] >= since]
        half = since + STUCK_STEPS // 2
        halves = [[v for s, v in self._losses if s < half], [v for s, v in self._losses if s >= half]]
        return all(h and abs(sum(h) / len(h) / self.chance_loss - 1) < STUCK_WITHIN for h in halves)

    def _of_validation(self, numbers: Mapping[str, float]) -> Alarms:
        rates = {d: [numbers[f"val_{d}_{self.metric}_{s}"] for s in ("native", "cosine")] for d in self.queries}
        for d, (native, cosine) in rates.items():
            # An untrained direction is not watched; text validation has one direction, whatever was trained
            watched = d in self.trained or len(rates) == 1
            if watched and cosine < native / 2 and native - cosine > self._noise(d, native, cosine):
                yield "magnitude_collapse", {"d": d, "native": native, "cosine": cosine, "metric": self.metric}
        for d, other in permutations(rates, 2):
            alive, dead = rates[d][0], rates[other][0]
            learned = alive > 10 * self.chance and alive > self._noise(d, alive, self.chance)
            if learned and dead < alive / 10 and alive - dead > self._noise(other, alive, dead):
                weight = "0.9" if d == "i2t" else "0.1"
                yield "direction_dead", {"d": d, "other": other, "alive": alive, "dead": dead, "weight": weight}

    def _noise(self, direction: str, a: float, b: float) -> float:
        """Chance difference of two rates of so many queries: a rate a has variance a (1 - a) at most."""
        return NOISE * math.sqrt((a * (1 - a) + b * (1 - b)) / max(self.queries[direction], 1))


class BadSamples:
    """Unusable training samples, key -> file and reason; ``limit`` is --max-bad-samples, None for no limit."""

    def __init__(self, limit: int | None = None, reasons: Mapping[str, str] | None = None) -> None:
        """Raises: UserError: More reasons than the limit."""
        self.limit = limit
        self.reasons: dict[str, str] = {}
        self.load(reasons or {})

    def add(self, samples: Iterable[BadSample]) -> list[str]:
        """Count samples; a line for each new one. Raises: UserError: More than the limit."""
        lines = []
        for sample in samples:
            if sample.key not in self.reasons:
                self.reasons[sample.key] = sample.why
                lines.append(f"skipped {sample} ({len(self.reasons)} so far)")
        self.load({})
        return lines

    def load(self, reasons: Mapping[str, str]) -> None:
        """Add those of a checkpoint. Raises: UserError: More than the limit."""
        self.reasons = dict(reasons) | self.reasons
        if self.limit is not None and len(self.reasons) > self.limit:
            raise UserError(f"--max-bad-samples {self.limit}: {skipped_line(self.reasons)}")


def not_finite(facts: Mapping[str, Any], path: Path, kept: bool) -> UserError:
    """Error of a step with a NaN: its ``facts`` are in ``path``; ``kept``: the state before it is a checkpoint."""
    keys = facts["keys_with_non_finite_features"] or facts["keys"]
    shown = ", ".join(printable(key, 40) for key in keys[:4]) + (" …" if len(keys) > 4 else "")
    return UserError(
        f"step {facts['step']}: the loss is {facts['loss']}, and {len(facts['gradients_not_finite'])} gradients "
        f"are not finite; samples: {shown} (all {len(facts['keys'])} in {path})"
        f"{'; the state before it is kept as a checkpoint' if kept else ''}. "
        "Try a lower --lr, --grad-clip-norm 1 or --precision fp32"
        f"{', with --resume latest --may-change and its name' if kept else ''}"
    )


def no_samples(steps: int, step: int, reasons: Mapping[str, str]) -> UserError:
    """Error after ``steps`` steps without any readable sample."""
    last = named(*list(reasons.items())[-1], 80) if reasons else "one on another process"
    return UserError(
        f"step {step}: no image could be read in {steps} steps in a row; last: {last}. "
        "The state before them is kept: once the data are back, continue with --resume latest"
    )
