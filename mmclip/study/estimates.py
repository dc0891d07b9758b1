"""Statistics of a study: estimates over queries and training seeds, paired wherever two arms are compared.

What does not exist is an :class:`Estimate` without a value and with a reason, never an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmclip.errors import UserError
from mmclip.evaluation.comparison import ONE_CLUSTER, same_data, verdict
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import NATIVE, Results
from mmclip.metrics.bootstrap import DETECTABLE, RESAMPLES, Estimate, cluster_sums, estimate, mean_samples, several
from mmclip.reporting.table import is_number
from mmclip.roles import LOSS_WEIGHTS, NORMS, Direction, Normalization
from mmclip.study.arms import Arm, baseline_of, control_of
from mmclip.study.plan import CLIP, COSMETIC, MEASURING, Kind

Array = NDArray[Any]
Json = dict[str, Any]
Samples = tuple[float, Array]  # a value and its bootstrap samples [B] over queries
NORMAL_95 = 1.959964
# Settings in which the arms of a family may differ: the norm, and those that only some norms use
OF_A_NORM = ("norm", "gamma_init", "gamma_lr", "seed", *COSMETIC, *MEASURING)


class Spread(NamedTuple):
    """Mean and sample standard deviation over n seeds; None where they do not exist."""

    mean: float | None
    sd: float | None
    n: int


class Score(NamedTuple):
    """An arm's retrieval in a direction by a scoring; data set and metric are by default the study's first."""

    arm: Arm
    direction: str
    scoring: str = NATIVE
    data: str = ""
    metric: str = ""


def spread(values: Iterable[float | None]) -> Spread:
    """Of the values that exist.

    >>> spread([1.0, 3.0, None]), spread([2.0]), spread([])
    (Spread(mean=2.0, sd=1.4142135623730951, n=2), Spread(mean=2.0, sd=None, n=1), Spread(mean=None, sd=None, n=0))
    """
    x = np.array([v for v in values if is_number(v)], dtype=np.float64)
    return Spread(float(x.mean()) if len(x) else None, float(x.std(ddof=1)) if len(x) > 1 else None, len(x))


def reported(result: Json | None, name: str = "delta", n_seeds: int = 0) -> Estimate:
    """A number of a verdict with its interval, as evaluation.comparison names them."""
    result = result or {}
    lo, hi = result.get("ci" if name == "delta" else f"{name}_ci") or (None, None)
    if result.get(name) is None:
        return Estimate(None, None, None, n_seeds, result.get("reason") or "no verdict")
    smallest = None if lo is None or hi is None else DETECTABLE * (hi - lo) / 2 / NORMAL_95
    return Estimate(result[name], lo, hi, n_seeds, smallest=smallest)


class Study:
    """Finished arms of one kind and their bootstrap samples: the same queries and seeds for all that is compared.

    Queries of different data sets are drawn independently, seeds together.
    """

    def __init__(self, arms: Sequence[Arm], kind: Kind = CLIP, *, resamples: int = RESAMPLES, seed: int = 0) -> None:
        self.kind, self.resamples, self.seed = kind, resamples, seed
        self.arms = [arm for arm in arms if arm.seeds]
        self.data = list(dict.fromkeys(data for arm in self.arms for data in arm.runs))
        self._drawn: dict[tuple[int, str, str], dict[tuple[str, str], Samples]] = {}
        self._verdicts: dict[tuple[str, ...], Json] = {}

    # --- which arms

    def is_whole(self, arm: Arm) -> bool:
        """Trained on right pairs, and on as large a share of the data as any arm of the study."""
        return not arm.permuted and arm.fraction == max(a.fraction for a in self.arms)

    def is_plain(self, arm: Arm) -> bool:
        """Whole, without further options of the loss, and from its model's own start."""
        return self.is_whole(arm) and not arm.loss_options and arm.start is None

    def plain_arm(self, loss: str, norm: str) -> Arm | None:
        """The first plain arm of a loss (by its λ) and a norm."""
        of = (LOSS_WEIGHTS[loss], norm)
        return next((a for a in self.arms if self.is_plain(a) and (a.i2t_weight, a.settings["norm"]) == of), None)

    def control(self, arm: Arm) -> Arm | None:
        if self.kind is CLIP:
            return control_of(arm, [other for other in self.arms if other is not arm])
        return self._family(arm).get(str(Normalization(arm.settings["norm"]).control))

    def baseline(self, arm: Arm) -> Arm | None:
        return baseline_of(arm, self.arms) if self.kind is CLIP else self._family(arm).get("cosine")

    def _family(self, arm: Arm) -> dict[str, Arm]:
        return next((family for family in self.families() if arm in family.values()), {})

    def families(self) -> list[dict[str, Arm]]:
        """Norm -> arm, of arms that differ in their norm alone; without families that have no cosine arm."""
        result: dict[str, dict[str, Arm]] = {}
        for arm in self.arms:
            same = {k: v for k, v in arm.settings.items() if k not in OF_A_NORM}
            result.setdefault(json.dumps(same, sort_keys=True), {}).setdefault(arm.settings["norm"], arm)
        return [{n: family[n] for n in NORMS if n in family} for family in result.values() if "cosine" in family]

    # --- numbers of results.json

    def rate(self, run: Results, direction: str, scoring: str, metric: str = "") -> float | None:
        value = run.json["retrieval"][direction].get(scoring, {}).get(metric or self.kind.metrics[0])
        return float(value) if is_number(value) else None

    def spread(self, score: Score) -> Spread:
        """Over the arm's seeds."""
        runs = score.arm.results(score.data).values()
        return spread(self.rate(run, score.direction, score.scoring, score.metric) for run in runs)

    # --- estimates

    def mean(self, score: Score) -> Estimate:
        return self.estimate([score])

    def difference(self, after: Score, before: Score, seeds: Sequence[int] | None = None) -> Estimate:
        return self.estimate([after, before], lambda x: x[0] - x[1], seeds)

    def ratio(self, of: Score, to: Score) -> Estimate:
        return self.estimate([of, to], lambda x: x[0] / x[1])

    def estimate(
        self,
        scores: Sequence[Score],
        combine: Callable[[list[Any]], Any] = lambda means: means[0],
        seeds: Sequence[int] | None = None,
        samples: Callable[[Results, Score], Samples] | None = None,
    ) -> Estimate:
        """Combine the scores' means over the training seeds that all of them have.

        Args:
            combine: as of :func:`mmclip.metrics.bootstrap.estimate`.
            seeds: those that may count; by default all.
            samples: another number of a run than the mean of the score's metric.
        """
        draw = samples or self._mean
        common = set(scores[0].arm.seeds if seeds is None else seeds)
        for arm, direction, scoring, data, metric in scores:
            runs = arm.results(data)
            common &= {s for s in runs if self.rate(runs[s], direction, scoring, metric) is not None}
            if not common:
                return Estimate.missing(f"no seed of {arm.name} with {scoring} scores of {direction}")
        groups = [[score.arm.results(score.data)[s] for s in sorted(common)] for score in scores]
        firsts: dict[str, tuple[Results, Array]] = {}
        try:
            for group, score in zip(groups, scores, strict=True):
                clusters = np.unique(group[0].array(f"{MAIN_POOL}/{score.direction}/clusters"))
                first, images = firsts.setdefault(score.data, (group[0], clusters))
                for run in group:
                    same_data(first, run)
                if not np.array_equal(images, clusters):
                    return Estimate.missing("the directions' queries are of different images")
            sides = [[draw(run, score) for run in group] for group, score in zip(groups, scores, strict=True)]
        except UserError as error:
            return Estimate.missing(str(error))
        result = estimate(sides, combine, seed=self.seed)
        if result.value is not None and not all(several(clusters) for _, clusters in firsts.values()):
            return Estimate(result.value, None, None, result.n_seeds, ONE_CLUSTER)
        return result

    def delta_cv(self, data: str, family: Mapping[str, Arm]) -> Estimate:
        """CV of query norms trained with dnorm over that with dot, each the mean over seeds."""
        if "dnorm" not in family or "dot" not in family:
            return Estimate.missing("no dnorm arm beside a dot arm")
        scores = [Score(family[norm], self.kind.directions[0], data=data) for norm in ("dnorm", "dot")]
        return self.estimate(scores, lambda x: x[0] / x[1], samples=self._query_cv)

    def _options(self, data: str) -> Json:
        """Another data set's queries are drawn from other random numbers."""
        return {"resamples": self.resamples, "seed": self.seed + 1000 * (self.data.index(data) if data else 0)}

    def _mean(self, run: Results, score: Score) -> Samples:
        """Drawn once for all scorings and metrics of a run's direction."""
        key = (id(run), score.direction, score.data)
        if key not in self._drawn:
            prefix = f"{MAIN_POOL}/{score.direction}"
            names = [(s, m) for s in run.json["retrieval"][score.direction] for m in self.kind.metrics]
            values = np.column_stack([run.array(f"{prefix}/{s}/{m}") for s, m in names])
            means = mean_samples(values, run.array(f"{prefix}/clusters"), **self._options(score.data))
            of = values.astype(np.float64).mean(axis=0)
            self._drawn[key] = {name: (float(of[i]), means[:, i]) for i, name in enumerate(names)}
        return self._drawn[key][score.scoring, score.metric or self.kind.metrics[0]]

    def _query_cv(self, run: Results, score: Score) -> Samples:
        prefix = f"{MAIN_POOL}/{score.direction}"
        side = Direction(score.direction).query_side
        x = run.array(f"{MAIN_POOL}/lengths/{side}")[run.array(f"{prefix}/queries")].astype(np.float64)
        powers = np.column_stack([np.ones(len(x)), x, x**2])
        sums = cluster_sums(powers, run.array(f"{prefix}/clusters"), **self._options(score.data))
        return float(_cv(powers.sum(axis=0))), _cv(sums)

    def documents(self, data: str, number: str, arm: Arm, less: Arm | None = None) -> Estimate:
        """Mean over seeds of d(corpus) ("corpus") or Spearman with the relevance count ("count"), less another arm's.

        The interval is a normal one: the documents' part as if seeds shared all of it and arms none, the seeds' part
        their variance over their number.
        """
        arms = [arm] if less is None else [arm, less]
        common = arm.seeds_with(*arms[1:], data=data)
        if not common:
            return Estimate.missing(f"no seed that all have: {', '.join(a.name for a in arms)}")
        values, errors = np.empty((2, len(arms), len(common)))
        for i, a in enumerate(arms):
            for j, seed in enumerate(common):
                result = _of_documents(a.results(data)[seed].json, number)
                if isinstance(result, str):
                    return Estimate.missing(f"{a.name}, seed {seed}: {result}")
                values[i, j], errors[i, j] = result
        difference = values[0] - values[1] if less is not None else values[0]
        seeds = float(difference.var(ddof=1)) / len(common) if len(common) > 1 else 0.0
        error = math.sqrt(float((errors.mean(axis=1) ** 2).sum()) + seeds)
        value, half = float(difference.mean()), NORMAL_95 * error
        return Estimate(value, value - half, value + half, len(common), smallest=DETECTABLE * error)

    # --- verdicts

    def verdict(self, arm: Arm, direction: str, data: str = "") -> Json:
        """comparison.verdict over common seeds, with "control", "baseline" and "n_seeds"; or a "reason"."""
        key = (arm.name, direction, data)
        if key not in self._verdicts:
            self._verdicts[key] = self._verdict(arm, direction, data)
        return self._verdicts[key]

    def _verdict(self, arm: Arm, direction: str, data: str) -> Json:
        control, baseline = self.control(arm), self.baseline(arm)
        report: Json = {"control": control and control.name, "baseline": baseline and baseline.name, "n_seeds": 0}
        if control is None:
            return {**report, "reason": "no control: an arm of the same directions and data, trained with cosine"}
        if baseline is not None and not arm.seeds_with(control, baseline, data=data):
            baseline, report["baseline"] = None, None
        arms = [arm, control, *([baseline] if baseline else [])]
        seeds = arm.seeds_with(*arms[1:], data=data)
        if not seeds:
            return {**report, "reason": f"no seed that all have: {', '.join(a.name for a in arms)}"}
        mine, controls, *baselines = ([a.results(data)[s] for s in seeds] for a in arms)
        try:
            result = verdict(
                *(mine, controls, baselines[0] if baselines else None, MAIN_POOL, Direction(direction)),
                metric=self.kind.metrics[0],
                **self._options(data),
            )
        except UserError as error:
            return {**report, "reason": str(error)}
        return {**report, "n_seeds": len(seeds), **result}


def _cv(powers: Array) -> Array:
    """Sample CV of sums of (1, x, x²) [..., 3]."""
    n, s, q = np.moveaxis(powers, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance: Array = np.maximum(q - s * s / n, 0.0) / (n - 1)
        return np.sqrt(variance) / (s / n)


def _of_documents(results: Json, number: str) -> tuple[float, float] | str:
    """(value, its standard error over documents), or the reason why there is none."""
    if number == "corpus":
        section, name = results["magnitude"]["document"].get("cohens_d") or {}, "corpus"
    else:
        section, name = (results.get("diagnostics") or {}).get("q2d") or {}, "relevance_count"
    result = section.get(name)
    if not isinstance(result, dict) or not is_number(result.get("value")):
        return str(section.get(f"{name}_reason") or f"no {name} in its results")
    value, ci = float(result["value"]), result.get("ci")
    if number == "corpus":
        return (value, (ci[1] - ci[0]) / (2 * NORMAL_95)) if ci else "d(corpus) has no interval"
    if result["n"] < 4:
        return f"{result['n']} documents: a correlation's interval needs 4"
    return value, (1 - value**2) / math.sqrt(result["n"] - 3)
