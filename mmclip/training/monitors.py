"""What goes wrong in magnitude-aware training, told in plain words with what to try. Rules only: numbers in, words out.

Each alarm is raised once a run. The numbers are those of metrics.jsonl; thresholds are named here and explained where
they are used. A number that is not finite raises nothing here: the step itself stops the run. The rules are the same
for CLIP and for text; what to try differs by script (``Advice``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import permutations
from typing import NamedTuple

STUCK_STEPS = 50  # a loss that has not left ln(batch) for this long after the warm-up
STUCK_WITHIN = 0.02  # of ln(batch)
PINNED = 0.02  # a gamma this close to 0 or 1 has no gradient left: sigmoid's slope is below 0.02
UNMOVED = 0.01  # a gamma that half a run has moved by less than this
IN_A_ROW = 3  # logged steps that a passing state must last
WAITING, WAITING_SECONDS = 0.5, 10.0  # share of the time that steps waited for data, over at least so long
NOISE = 3.0  # standard errors that a difference of success rates must exceed


class Alarm(NamedTuple):
    """``name`` is for programs, ``text`` for people."""

    name: str
    text: str


class Advice(NamedTuple):
    """What to try, in the flags of a script: after a loss that stands still, and after angles that collapsed."""

    stuck: str
    collapse: str


CLIP_ADVICE = Advice(
    stuck="check that captions belong to their pictures, then try another --lr (ten times less when fine-tuning, up "
    "to 1e-3 from random weights), a longer --warmup, or a larger batch",
    collapse="Lower --lr, raise --proj-wd, start from a cosine-trained checkpoint (--pretrained), or let --norm "
    "learned choose the share of length",
)
TEXT_ADVICE = Advice(
    stuck="check that documents belong to their queries, then try another --lr, a longer --warmup, or a larger batch",
    collapse="Lower --lr, train --norm qnorm or cosine, or let --norm learned choose the share of length",
)


class Alarms:
    """The rules with what they remember.

    batch: candidates that a query of a step has; weights: of the directions by name ("i2t", "t2i"); gamma_init: of both
    roles, or (query's, document's). queries: how many the validation data have, by direction ({}: no such data);
    metric: what validation measures, a rate from 0 to 1; watched: the directions whose angles may not collapse [the
    trained ones]. raised: names of alarms that are told already.
    """

    def __init__(
        self,
        *,
        batch: float,
        weights: Mapping[str, float],
        learned: bool,
        gamma_init: float | tuple[float, float],
        scale_max: float,
        warmup: int,
        total_steps: int,
        queries: Mapping[str, int] | None = None,
        metric: str = "success@1",
        watched: Iterable[str] | None = None,
        advice: Advice = CLIP_ADVICE,
        raised: Iterable[str] = (),
    ) -> None:
        self.chance_loss = math.log(max(batch, 2))
        self.trained = [d for d, w in weights.items() if w > 0]
        self.learned, self.scale_max = learned, scale_max
        both = gamma_init if isinstance(gamma_init, tuple) else (gamma_init, gamma_init)
        self.gamma_init = dict(zip(("q", "d"), both, strict=True))
        self.warmup, self.total_steps = warmup, total_steps
        self.queries, self.metric, self.advice = dict(queries or {}), metric, advice
        self.watched = self.trained if watched is None else list(watched)
        # of a random candidate being relevant, in both directions: as many groups as the first direction has queries
        self.chance = 1 / max(next(iter(self.queries.values()), 0), 1)
        self.raised = set(raised)
        self._losses: list[tuple[int, float]] = []
        self._rows: dict[str, int] = {}
        self._waited = 0.0

    def training(self, step: int, numbers: Mapping[str, float], seconds: float) -> list[Alarm]:
        """Alarms of a logged training step; ``seconds`` since the one before it."""
        return self._new([*self._stuck(step, numbers), *self._gamma(step, numbers), *self._scale(numbers),
                          *self._starving(numbers, seconds)])  # fmt: skip

    def validation(self, numbers: Mapping[str, float]) -> list[Alarm]:
        """Alarms of a validation."""
        return self._new([*self._collapse(numbers), *self._dead(numbers)])

    def _new(self, found: list[Alarm]) -> list[Alarm]:
        found = [a for a in found if a.name not in self.raised]
        self.raised |= {a.name for a in found}
        return found

    def _lasts(self, name: str, now: bool) -> bool:
        """Whether a state has been there at the last logged steps too."""
        self._rows[name] = self._rows.get(name, 0) + 1 if now else 0
        return self._rows[name] >= IN_A_ROW

    def _stuck(self, step: int, numbers: Mapping[str, float]) -> Iterable[Alarm]:
        """Both halves of a window at ln(batch): a loss on its way through it would show in one of them only."""
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
        if not self.learned:
            return
        gammas = {role: numbers[f"gamma_{role}"] for role in ("q", "d")}
        pinned = {r: g for r, g in gammas.items() if min(g, 1 - g) < PINNED}
        if self._lasts("gamma", bool(pinned)):
            told = ", ".join(f"gamma_{r} = {g:.3f}" for r, g in pinned.items())
            yield Alarm(
                "gamma_pinned",
                f"{told}: so near its end that it hardly moves any more. The run is all but one with a fixed "
                "normalization (--norm): train that one, or lower --gamma-lr, or move --gamma-init",
            )
        if step >= self.total_steps / 2 and all(abs(g - self.gamma_init[r]) < UNMOVED for r, g in gammas.items()):
            yield Alarm(
                "gamma_unmoved",
                f"after half of the run both gammas stand where they started ({gammas['q']:.3f}, {gammas['d']:.3f}): "
                "they are not being learned. Raise --gamma-lr (1e-2 moves them in a few hundred steps)",
            )

    def _scale(self, numbers: Mapping[str, float]) -> Iterable[Alarm]:
        at = [d for d in self.trained if numbers[f"effective_scale_{d}"] >= 0.999 * self.scale_max]
        if self._lasts("scale", bool(at)):
            yield Alarm(
                "scale_clamped",
                f"the effective scale of {' and '.join(at)} is held at --logit-scale-max {self.scale_max:g}: the loss "
                "wants still sharper scores. Usual late in a long run; early in one, look for duplicates among the "
                "pairs, lower --lr, or raise the limit",
            )

    def _starving(self, numbers: Mapping[str, float], seconds: float) -> Iterable[Alarm]:
        waiting = numbers.get("data_wait", 0.0) > WAITING
        self._waited = self._waited + seconds if waiting else 0.0
        if self._lasts("data", waiting) and self._waited > WAITING_SECONDS:
            yield Alarm(
                "data_starved",
                f"steps wait for data {numbers['data_wait']:.0%} of the time: raise --workers, keep the shards on a "
                "faster disk, store smaller pictures, or --cache-features where a trunk is locked",
            )

    def _collapse(self, numbers: Mapping[str, float]) -> Iterable[Alarm]:
        for d in self.watched:
            native, cosine = self._rate(numbers, d, "native"), self._rate(numbers, d, "cosine")
            if cosine < native / 2 and native - cosine > self._noise(d, native, cosine):
                yield Alarm(
                    "magnitude_collapse",
                    f"{d} finds {native:.1%} natively and {cosine:.1%} by cosine ({self.metric}): the ranking rests on "
                    f"the lengths, and the angles carry little. {self.advice.collapse}",
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
        """What two rates of so many queries may differ by through chance alone: a number from 0 to 1 with mean a varies
        by a (1 - a) at most, which it does where it is 0 or 1."""
        return NOISE * math.sqrt((a * (1 - a) + b * (1 - b)) / max(self.queries[direction], 1))

    def _rate(self, numbers: Mapping[str, float], direction: str, scoring: str) -> float:
        return numbers[f"val_{direction}_{self.metric}_{scoring}"]
