"""Checks of a run: alarms with advice, unusable samples, and the errors after which a run cannot go on.

Alarms are rules of magnitude-aware training over the numbers of metrics.jsonl; each is raised once a run. The rules are
the same for CLIP and for text, the advice differs (``Advice``). A number that is not finite raises no alarm: the step
itself stops the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

from mmclip.data.image_text import BadSample, named, skipped_line
from mmclip.errors import UserError, printable

STUCK_STEPS = 50  # logged steps span at least this many before a constant loss counts as stuck
STUCK_WITHIN = 0.02  # relative distance to ln(candidates)
PINNED = 0.02  # distance of gamma to 0 or 1 below which sigmoid's slope, and so its gradient, is below 0.02
UNMOVED = 0.01  # change of gamma that half a run should exceed
IN_A_ROW = 3  # logged steps that a passing state must last
WAITING, WAITING_SECONDS = 0.5, 10.0  # share of the time spent waiting for data, over at least so long
NOISE = 3.0  # standard errors that a difference of success rates must exceed


class Alarm(NamedTuple):
    """``name`` is for programs, ``text`` for people."""

    name: str
    text: str


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
    """The alarms of a run and their state, which belongs in its checkpoints.

    Args:
        candidates: Candidates of a query in a step, whose logarithm is the loss of guessing.
        trained: Names of the trained directions ("i2t", "t2i"; "q2d", "d2q").
        gamma_init: Initial learned exponents (query's, document's); None where they are not learned.
        scale_max: Upper limit of the effective scale.
        warmup: Steps of warm-up.
        total_steps: Steps of the run.
        queries: Validation queries by direction; {} without validation data.
        metric: Metric of the validation, a rate from 0 to 1.
        advice: What to try.
    """

    def __init__(
        self,
        *,
        candidates: float,
        trained: Iterable[str],
        gamma_init: tuple[float, float] | None,
        scale_max: float,
        warmup: int,
        total_steps: int,
        queries: Mapping[str, int] | None = None,
        metric: str = "success@1",
        advice: Advice = CLIP_ADVICE,
    ) -> None:
        self.chance_loss = math.log(max(candidates, 2))
        self.trained, self.gamma_init, self.scale_max = list(trained), gamma_init, scale_max
        self.warmup, self.total_steps = warmup, total_steps
        self.queries, self.metric, self.advice = dict(queries or {}), metric, advice
        # Success rate of a random ranking, in both directions: as many groups as the first direction has queries
        self.chance = 1 / max(next(iter(self.queries.values()), 0), 1)
        self.raised: dict[str, str] = {}  # name -> text
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

    def training(self, step: int, numbers: Mapping[str, float], seconds: float) -> list[Alarm]:
        """New alarms of a logged training step; ``seconds`` since the one before it."""
        return self._new([*self._stuck(step, numbers), *self._gamma(step, numbers), *self._scale(numbers),
                          *self._starving(numbers, seconds)])  # fmt: skip

    def validation(self, numbers: Mapping[str, float]) -> list[Alarm]:
        """New alarms of a validation."""
        return self._new([*self._collapse(numbers), *self._dead(numbers)])

    def _new(self, alarms: list[Alarm]) -> list[Alarm]:
        new = [alarm for alarm in alarms if alarm.name not in self.raised]
        self.raised |= dict(new)
        return new

    def _lasts(self, name: str, now: bool) -> bool:
        """Whether a state has held at each of the last ``IN_A_ROW`` logged steps."""
        self._rows[name] = self._rows.get(name, 0) + 1 if now else 0
        return self._rows[name] >= IN_A_ROW

    def _stuck(self, step: int, numbers: Mapping[str, float]) -> Iterable[Alarm]:
        """Both halves of a window at ln(candidates): a loss that only passes through shows in one of them."""
        if step > self.warmup:
            self._losses.append((step, numbers["loss"]))
        since = step - STUCK_STEPS
        if not self._losses or self._losses[0][0] > since:
            return
        self._losses = [x for x in self._losses if x[0] >= since]
        half = since + STUCK_STEPS // 2
        halves = [[v for s, v in self._losses if s < half], [v for s, v in self._losses if s >= half]]
        if all(h and abs(sum(h) / len(h) / self.chance_loss - 1) < STUCK_WITHIN for h in halves):
            yield Alarm(
                "loss_stuck",
                f"the loss has stood at ln(batch) = {self.chance_loss:.2f}, that of guessing, for {STUCK_STEPS} steps "
                f"after the warm-up: {self.advice.stuck}",
            )

    def _gamma(self, step: int, numbers: Mapping[str, float]) -> Iterable[Alarm]:
        if self.gamma_init is None:
            return
        gammas = {role: numbers[f"gamma_{role}"] for role in ("q", "d")}
        pinned = {role: g for role, g in gammas.items() if min(g, 1 - g) < PINNED}
        if self._lasts("gamma", bool(pinned)):
            yield Alarm(
                "gamma_pinned",
                f"{', '.join(f'gamma_{role} = {g:.3f}' for role, g in pinned.items())}: so near its end that it hardly "
                "moves any more. The run is all but one with a fixed normalization (--norm): train that one, or lower "
                "--gamma-lr, or move --gamma-init",
            )
        moved = [abs(g - start) for g, start in zip(gammas.values(), self.gamma_init, strict=True)]
        if step >= self.total_steps / 2 and max(moved) < UNMOVED:
            yield Alarm(
                "gamma_unmoved",
                f"after half of the run both gammas stand where they started ({gammas['q']:.3f}, {gammas['d']:.3f}): "
                "they are not being learned. Raise --gamma-lr (1e-2 moves them in a few hundred steps)",
            )

    def _scale(self, numbers: Mapping[str, float]) -> Iterable[Alarm]:
        clamped = [d for d in self.trained if numbers[f"effective_scale_{d}"] >= 0.999 * self.scale_max]
        if self._lasts("scale", bool(clamped)):
            yield Alarm(
                "scale_clamped",
                f"the effective scale of {' and '.join(clamped)} is held at --logit-scale-max {self.scale_max:g}: the "
                "loss wants still sharper scores. Usual late in a long run; early in one, look for duplicates among "
                "the pairs, lower --lr, or raise the limit",
            )

    def _starving(self, numbers: Mapping[str, float], seconds: float) -> Iterable[Alarm]:
        waiting = self.advice.starved is not None and numbers.get("data_wait", 0.0) > WAITING
        self._waited = self._waited + seconds if waiting else 0.0
        if self._lasts("data", waiting) and self._waited > WAITING_SECONDS:
            yield Alarm(
                "data_starved", f"steps wait for data {numbers['data_wait']:.0%} of the time: {self.advice.starved}"
            )

    def _collapse(self, numbers: Mapping[str, float]) -> Iterable[Alarm]:
        # An untrained direction is not watched; text validation has one direction, whatever was trained
        for d in [d for d in self.queries if d in self.trained or len(self.queries) == 1]:
            native, cosine = self._rate(numbers, d, "native"), self._rate(numbers, d, "cosine")
            if cosine < native / 2 and native - cosine > self._noise(d, native, cosine):
                yield Alarm(
                    "magnitude_collapse",
                    f"{d} finds {native:.1%} natively and {cosine:.1%} by cosine ({self.metric}): the ranking rests on "
                    f"the magnitudes, and the angles carry little. {self.advice.collapse}",
                )

    def _dead(self, numbers: Mapping[str, float]) -> Iterable[Alarm]:
        for d, other in permutations(self.queries, 2):
            alive, dead = self._rate(numbers, d, "native"), self._rate(numbers, other, "native")
            learned = alive > 10 * self.chance and alive > self._noise(d, alive, self.chance)
            if learned and dead < alive / 10 and alive - dead > self._noise(other, alive, dead):
                yield Alarm(
                    "direction_dead",
                    f"{other} finds {dead:.1%} where {d} finds {alive:.1%}: that direction is all but dead, which is "
                    "the price of a one-direction loss. Where it is needed, --loss sym with --i2t-weight "
                    f"{'0.9' if d == 'i2t' else '0.1'} keeps it alive",
                )

    def _noise(self, direction: str, a: float, b: float) -> float:
        """Difference of two rates of so many queries that chance alone explains.

        A number from 0 to 1 with mean a has variance a (1 - a) at most.
        """
        return NOISE * math.sqrt((a * (1 - a) + b * (1 - b)) / max(self.queries[direction], 1))

    def _rate(self, numbers: Mapping[str, float], direction: str, scoring: str) -> float:
        return numbers[f"val_{direction}_{self.metric}_{scoring}"]


class BadSamples:
    """Unusable training samples, key -> file and reason; ``limit`` is --max-bad-samples, None for no limit."""

    def __init__(self, limit: int | None = None, reasons: Mapping[str, str] | None = None) -> None:
        """Raises: UserError: More reasons than the limit."""
        self.limit = limit
        self.reasons: dict[str, str] = dict(reasons or {})
        self._check()

    def add(self, samples: Iterable[BadSample]) -> list[str]:
        """Count samples; a line for each new one. Raises: UserError: More than the limit."""
        lines = []
        for sample in samples:
            if sample.key not in self.reasons:
                self.reasons[sample.key] = sample.why
                lines.append(f"skipped {sample} ({len(self.reasons)} so far)")
        self._check()
        return lines

    def load(self, reasons: Mapping[str, str]) -> None:
        """Add those of a checkpoint. Raises: UserError: More than the limit."""
        self.reasons = dict(reasons) | self.reasons
        self._check()

    def _check(self) -> None:
        if self.limit is not None and len(self.reasons) > self.limit:
            raise UserError(f"--max-bad-samples {self.limit}: {skipped_line(self.reasons)}")


# --- errors after which a run cannot go on ----------------------------------------------------------------------------


def not_finite(facts: Mapping[str, Any], path: Path, kept: bool) -> UserError:
    """Error of a step whose loss or gradient is NaN or infinite.

    Args:
        facts: Those of :class:`mmclip.training.step.NotFinite`, written to ``path``.
        kept: Whether the state before the step is a checkpoint.
    """
    keys = facts["keys_with_non_finite_features"] or facts["keys"]
    shown = ", ".join(printable(key, 40) for key in keys[:4]) + (" …" if len(keys) > 4 else "")
    return UserError(
        f"step {facts['step']}: the loss is {facts['loss']}, and {len(facts['gradients_not_finite'])} gradients "
        f"are not finite; samples: {shown} (all {len(facts['keys'])} in {path})"
        f"{'; the state before it is kept as a checkpoint' if kept else ''}. "
        "Try a lower --lr, --grad-clip-norm 1 or --precision fp32"
        f"{', with --resume latest --may-change and its name' if kept else ''}"
    )


def out_of_memory(step: int, batch_size: int, advice: Advice, error: Exception) -> UserError:
    """Error of a step that does not fit into the device's memory."""
    return UserError(
        f"step {step}: out of memory with --batch-size {batch_size}: {printable(error, 120)}. {advice.memory}; "
        "--grad-checkpointing saves memory, too"
    )


def no_samples(steps: int, step: int, reasons: Mapping[str, str]) -> UserError:
    """Error after ``steps`` steps without any readable sample."""
    last = named(*list(reasons.items())[-1], 80) if reasons else "one on another process"
    return UserError(
        f"step {step}: no image could be read in {steps} steps in a row; last: {last}. "
        "The state before them is kept: once the data are back, continue with --resume latest"
    )
