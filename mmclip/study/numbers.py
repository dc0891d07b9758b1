"""The statistics of a study: what arms have in common, paired over queries and seeds (docs/math.md: "Study").

What does not exist is told, never raised: an :class:`Estimate` without a value has a reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from mmclip import metrics
from mmclip.config import LossConfig
from mmclip.errors import UserError
from mmclip.evaluation.comparison import ONE_CLUSTER, pooled_verdict, same_data
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import CORRECTED, NATIVE, Results
from mmclip.metrics import MIN_DEFINED, Estimate, mean_samples, over_seeds
from mmclip.reporting.table import is_number
from mmclip.similarity import CLIP_DIRECTIONS, Direction
from mmclip.study.arms import Arm, baseline_of, control_of

Array = NDArray[Any]
Json = dict[str, Any]
METRIC = "success@1"
NAMED = ("loss", "i2t_weight", "norm")  # settings of the loss that have columns of their own


class Spread(NamedTuple):
    """Mean and sample standard deviation over n seeds; None where they do not exist."""

    mean: float | None
    sd: float | None
    n: int


class Scored(NamedTuple):
    """An arm's answers in a direction by a scoring."""

    arm: Arm
    direction: str
    scoring: str = NATIVE


def spread(values: Iterable[float | None]) -> Spread:
    """Of the values that exist.

    >>> spread([1.0, 3.0, None]), spread([2.0]), spread([])
    (Spread(mean=2.0, sd=1.4142135623730951, n=2), Spread(mean=2.0, sd=None, n=1), Spread(mean=None, sd=None, n=0))
    """
    x = np.array([v for v in values if is_number(v)], dtype=np.float64)
    return Spread(float(x.mean()) if len(x) else None, float(x.std(ddof=1)) if len(x) > 1 else None, len(x))


def sign_test(agree: int, n: int) -> float:
    """Two-sided p of ``agree`` heads in n throws of a fair coin, exact.

    >>> sign_test(6, 6), sign_test(2, 4), sign_test(0, 0)
    (0.03125, 1.0, 1.0)
    """
    return float(binomtest(agree, n).pvalue) if n else 1.0


def fraction(arm: Arm) -> float:
    return 1.0 if arm.settings.train_fraction is None else arm.settings.train_fraction


def permuted(arm: Arm) -> bool:
    """Whether the arm is a null: trained on pictures with captions of others."""
    return arm.settings.permute_pairs


def initial(arm: Arm) -> str | None:
    """What the arm's weights come from, None for random ones."""
    found = arm.initial or arm.settings.init_from or arm.settings.pretrained
    return None if found is None else str(found)


def curriculum(arm: Arm) -> str:
    """The settings of the loss that are not the default and have no column of their own: "gamma_init=0.9 ..."."""
    told = []
    for field in dataclasses.fields(LossConfig):
        value = getattr(arm.settings, field.name)
        if field.name not in NAMED and value != field.default:
            told.append(f"{field.name}={value}")
    return " ".join(told)


def trained(arm: Arm) -> list[str]:
    return [d.value for d in CLIP_DIRECTIONS if arm.trains(d.value)]


def served(arm: Arm, direction: str) -> str:
    """The scoring that a direction is served by, chosen by rule: natively where it was trained, else corrected."""
    return NATIVE if arm.trains(direction) else CORRECTED


class Study:
    """Finished arms and what was drawn of them: the same queries and seeds for all that is compared."""

    def __init__(
        self, arms: Sequence[Arm], pool: str = MAIN_POOL, *, resamples: int = metrics.RESAMPLES, seed: int = 0
    ) -> None:
        self.arms = [arm for arm in arms if arm.runs]
        self.pool = pool
        self.options: dict[str, Any] = {"resamples": resamples, "seed": seed}
        self._drawn: dict[tuple[int, str], dict[str, tuple[float, Array]]] = {}
        self._told: dict[tuple[str, str], Json] = {}
        self.share = max((fraction(arm) for arm in self.arms), default=1.0)

    def is_whole(self, arm: Arm) -> bool:
        """Trained on right pairs, and on as much data as any arm of the study."""
        return fraction(arm) == self.share and not permuted(arm)

    def is_plain(self, arm: Arm) -> bool:
        """Whole, trained from its model's own start, without a curriculum."""
        return self.is_whole(arm) and not curriculum(arm) and initial(arm) is None

    def control(self, arm: Arm) -> Arm | None:
        return control_of(arm, [other for other in self.arms if other is not arm])

    def baseline(self, arm: Arm) -> Arm | None:
        return baseline_of(arm, self.arms)

    def rate(self, run: Results, direction: str, scoring: str, metric: str = METRIC) -> float | None:
        """A number of results.json, None where the run does not have it."""
        value = run.pools[self.pool]["retrieval"][direction].get(scoring, {}).get(metric)
        return float(value) if is_number(value) else None

    def spread(self, scored: Scored, metric: str = METRIC) -> Spread:
        """Over the arm's seeds."""
        return spread(self.rate(run, scored.direction, scored.scoring, metric) for run in scored.arm.runs.values())

    def mean(self, scored: Scored, seeds: Sequence[int] | None = None) -> Estimate:
        """Mean success@1 of the arm, with its interval over queries and seeds."""
        return self.estimate([scored], seeds, lambda x: x[0])

    def difference(self, after: Scored, before: Scored, seeds: Sequence[int] | None = None) -> Estimate:
        """Mean success@1 of ``after`` less that of ``before``, paired, over the seeds that both have."""
        return self.estimate([after, before], seeds, lambda x: x[0] - x[1])

    def ratio(self, of: Scored, to: Scored, seeds: Sequence[int] | None = None) -> Estimate:
        """Mean success@1 of ``of`` over that of ``to``, paired, over the seeds that both have."""
        return self.estimate([of, to], seeds, lambda x: x[0] / x[1])

    def verdict(self, arm: Arm, direction: str) -> Json:
        """comparison.pooled_verdict against the arm's control and baseline over the seeds that all have, with their
        names as "control" and "baseline" and the number of seeds as "n_seeds"; {"reason"} where there is none."""
        if (arm.name, direction) not in self._told:
            self._told[arm.name, direction] = self._verdict(arm, direction)
        return self._told[arm.name, direction]

    def _verdict(self, arm: Arm, direction: str) -> Json:
        control, baseline = self.control(arm), self.baseline(arm)
        report: Json = {"control": control and control.name, "baseline": baseline and baseline.name, "n_seeds": 0}
        if control is None:
            return {**report, "reason": "no control: an arm of the same directions and data, trained with cosine"}
        seeds = arm.seeds_with(control, *([baseline] if baseline else []))
        if not seeds and baseline:
            baseline, seeds, report["baseline"] = None, arm.seeds_with(control), None
        mine, controls, baselines = ([o.runs[s] for s in seeds] if o else None for o in (arm, control, baseline))
        try:
            found = pooled_verdict(
                mine or [], controls or [], baselines, self.pool, Direction(direction), **self.options
            )
        except UserError as error:
            return {**report, "reason": str(error)}
        return {**report, "n_seeds": len(seeds), **found}

    def estimate(self, sides: Sequence[Scored], seeds: Sequence[int] | None, combine: Any) -> Estimate:
        """``combine`` of the sides' means over the seeds that all of them have, [n_sides] or, drawn, [n_sides, B]."""
        common = [s for s in sides[0].arm.seeds_with(*(side.arm for side in sides)) if seeds is None or s in seeds]
        for side in sides:
            common = [s for s in common if self.rate(side.arm.runs[s], side.direction, side.scoring) is not None]
            if not common:
                return Estimate.missing(f"no seed of {side.arm.name} with {side.scoring} scores of {side.direction}")
        runs = [[side.arm.runs[s] for s in common] for side in sides]
        try:
            for run in (run for group in runs for run in group):
                same_data(runs[0][0], run)
            clusters = [
                group[0].array(f"{self.pool}/{x.direction}/clusters") for group, x in zip(runs, sides, strict=True)
            ]
            drawn = [
                [self._samples(run, x.direction)[x.scoring] for run in group]
                for group, x in zip(runs, sides, strict=True)
            ]
        except UserError as error:
            return Estimate.missing(str(error))
        if any(not np.array_equal(np.unique(c), np.unique(clusters[0])) for c in clusters[1:]):
            return Estimate.missing("the directions' queries are of different images")
        with np.errstate(divide="ignore", invalid="ignore"):
            value = combine([np.float64(np.mean([v for v, _ in group])) for group in drawn])
            means = [over_seeds(np.column_stack([x for _, x in group]), seed=self.options["seed"]) for group in drawn]
            samples = combine(means)
        if not np.isfinite(value):
            return Estimate.missing("nothing is found on the other side: the ratio does not exist")
        samples = samples[np.isfinite(samples)]
        if not metrics.several(clusters[0]):
            return Estimate(float(value), None, None, len(common), ONE_CLUSTER)
        if len(samples) < MIN_DEFINED * self.options["resamples"]:
            return Estimate(float(value), None, None, len(common), "the ratio exists in too few resamples")
        return Estimate(float(value), *metrics.interval(samples), len(common))

    def _samples(self, run: Results, direction: str) -> dict[str, tuple[float, Array]]:
        """Scoring -> (success@1, its means over drawn clusters [B]); drawn once for all of a run's scorings."""
        key = (id(run), direction)
        if key not in self._drawn:
            names = list(run.pools[self.pool]["retrieval"][direction])
            values = np.column_stack([run.query_values(self.pool, direction, s, METRIC) for s in names])
            means = mean_samples(values, run.array(f"{self.pool}/{direction}/clusters"), **self.options)
            of = values.astype(np.float64).mean(axis=0)
            self._drawn[key] = {s: (float(of[i]), means[:, i]) for i, s in enumerate(names)}
        return self._drawn[key]
