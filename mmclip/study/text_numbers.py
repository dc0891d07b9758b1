"""The statistics of a text study: what arms have in common, over queries and seeds (docs/text_study.md).

What does not exist is told, never raised: an Estimate without a value has a reason. ``smallest`` of one is 2.8 of its
standard errors: what a two-sided test at 5% finds in 80% of cases.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmclip import metrics
from mmclip.errors import UserError
from mmclip.evaluation.comparison import ONE_CLUSTER, pooled_verdict, same_data
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import NATIVE, Results
from mmclip.metrics import DETECTABLE, MIN_DEFINED, mean_samples, over_seeds
from mmclip.reporting.table import is_number
from mmclip.roles import NORMS, Direction
from mmclip.study.kinds import TEXT
from mmclip.study.numbers import Estimate
from mmclip.study.text_study import METRIC, Q2D, SHOWN, TextArm

Array = NDArray[Any]
Json = dict[str, Any]
NORMAL_95 = 1.959964
# What the arms of a family may differ in: the norm, and what only some norms have
OF_A_NORM = ("norm", "gamma_init", "gamma_lr", "seed", *TEXT.cosmetic, *TEXT.measuring)


class Scored(NamedTuple):
    """An arm's answers on a data set by a scoring."""

    arm: TextArm
    data: str
    scoring: str = NATIVE
    metric: str = METRIC


class TextStudy:
    """Finished arms and what was drawn of them: the same queries and seeds for all that is compared. Queries of
    different data sets are drawn apart, seeds together."""

    def __init__(self, arms: Sequence[TextArm], *, resamples: int = metrics.RESAMPLES, seed: int = 0) -> None:
        self.arms = [arm for arm in arms if arm.seeds]
        self.data = list(dict.fromkeys(data for arm in self.arms for data in arm.runs))
        self.resamples, self.seed = resamples, seed
        self._drawn: dict[tuple[int, str], dict[str, tuple[float, Array]]] = {}

    def families(self) -> list[dict[str, TextArm]]:
        """Norm -> its first arm, of arms that differ in their norm alone; those with a cosine arm, which the others are
        compared with."""
        found: dict[str, dict[str, TextArm]] = {}
        for arm in self.arms:
            same = {k: v for k, v in arm.settings.to_dict().items() if k not in OF_A_NORM}
            found.setdefault(json.dumps(same, sort_keys=True), {}).setdefault(arm.settings.norm, arm)
        return [{n: family[n] for n in NORMS if n in family} for family in found.values() if "cosine" in family]

    def mean(self, side: Scored) -> Estimate:
        return self.estimate([side], lambda x: x[0])

    def difference(self, after: Scored, before: Scored) -> Estimate:
        """Mean of ``after`` less that of ``before``, paired, over the seeds that both have."""
        return self.estimate([after, before], lambda x: x[0] - x[1])

    def estimate(self, sides: Sequence[Scored], combine: Callable[[list[Any]], Any]) -> Estimate:
        """``combine`` of the sides' means over the seeds that all have: numbers [n_sides] or, drawn, [n_sides, B]."""
        return self._estimate(
            [(side.arm, side.data) for side in sides],
            lambda i, run: self._rates(run, sides[i].data)[f"{sides[i].scoring}/{sides[i].metric}"],
            combine,
        )

    def delta_cv(self, data: str, over: TextArm, under: TextArm) -> Estimate:
        """CV of query lengths trained as ``over``, divided by that as ``under``: the mean of both over seeds."""
        return self._estimate(
            [(over, data), (under, data)], lambda _, run: self._query_cv(run, data), lambda x: x[0] / x[1]
        )

    def _estimate(
        self,
        places: Sequence[tuple[TextArm, str]],
        drawn: Callable[[int, Results], tuple[float, Array]],
        combine: Callable[[list[Any]], Any],
    ) -> Estimate:
        """drawn: (number of the place, a run of it) -> (its value, its samples [B])."""
        common = sorted(set.intersection(*(set(arm.runs.get(data, {})) for arm, data in places)))
        if not common:
            return Estimate.missing(f"no seed that all have: {', '.join(dict.fromkeys(a.name for a, _ in places))}")
        try:
            firsts: dict[str, Results] = {}
            for arm, data in places:
                for seed in common:
                    same_data(firsts.setdefault(data, arm.runs[data][seed]), arm.runs[data][seed])
            found = [[drawn(i, arm.runs[data][s]) for s in common] for i, (arm, data) in enumerate(places)]
        except UserError as error:
            return Estimate.missing(str(error))
        with np.errstate(divide="ignore", invalid="ignore"):
            value = combine([np.float64(np.mean([v for v, _ in group])) for group in found])
            samples = combine([over_seeds(np.column_stack([x for _, x in group]), seed=self.seed) for group in found])
        if not np.isfinite(value):
            return Estimate.missing("the number does not exist: nothing on the other side")
        if not all(metrics.several(run.array(f"{MAIN_POOL}/{Q2D}/clusters")) for run in firsts.values()):
            return Estimate(float(value), None, None, len(common), ONE_CLUSTER)
        samples = samples[np.isfinite(samples)]
        if len(samples) < MIN_DEFINED * self.resamples:
            return Estimate(float(value), None, None, len(common), "it exists in too few resamples")
        smallest = DETECTABLE * float(np.std(samples, ddof=1))
        return Estimate(float(value), *metrics.interval(samples), len(common), smallest=smallest)

    def _options(self, data: str) -> Json:
        """Of draws: another data set's queries are others."""
        return {"resamples": self.resamples, "seed": self.seed + 1000 * self.data.index(data)}

    def _rates(self, run: Results, data: str) -> dict[str, tuple[float, Array]]:
        """SCORING/METRIC -> (mean, its means over drawn clusters [B]); drawn once for all of a run's."""
        key = (id(run), data)
        if key not in self._drawn:
            scorings = run.json["retrieval"][Q2D]
            names = [f"{s}/{m}" for s in scorings for m in SHOWN]
            values = np.column_stack([run.array(f"{MAIN_POOL}/{Q2D}/{name}") for name in names])
            means = mean_samples(values, run.array(f"{MAIN_POOL}/{Q2D}/clusters"), **self._options(data))
            of = values.astype(np.float64).mean(axis=0)
            self._drawn[key] = {name: (float(of[i]), means[:, i]) for i, name in enumerate(names)}
        return self._drawn[key]

    def _query_cv(self, run: Results, data: str) -> tuple[float, Array]:
        """CV of the lengths of the queries that were asked, and of drawn ones [B]."""
        prefix = f"{MAIN_POOL}/{Q2D}"
        x = run.array(f"{MAIN_POOL}/lengths/query")[run.array(f"{prefix}/queries")].astype(np.float64)
        powers = np.column_stack([np.ones(len(x)), x, x**2])
        sums = metrics.cluster_sums(powers, run.array(f"{prefix}/clusters"), **self._options(data))
        return float(_cv(powers.sum(axis=0))), _cv(sums)

    # --- numbers of documents, which have intervals of their own ----------------------------------------------------

    def documents(self, data: str, number: str, arm: TextArm, less: TextArm | None = None) -> Estimate:
        """Mean over seeds of d(corpus) ("corpus") or of Spearman with the relevance count ("count"), less that of
        another arm. The interval is a normal one: the documents' part as if seeds shared all of it and arms none, the
        seeds' part their variance over their number."""
        arms = [arm] if less is None else [arm, less]
        common = sorted(set.intersection(*(set(a.runs.get(data, {})) for a in arms)))
        if not common:
            return Estimate.missing(f"no seed that all have: {', '.join(a.name for a in arms)}")
        values, errors = np.empty((len(arms), len(common))), np.empty((len(arms), len(common)))
        for i, a in enumerate(arms):
            for j, seed in enumerate(common):
                value, error, reason = _of_documents(a.runs[data][seed].json, number)
                if value is None or error is None:
                    return Estimate.missing(f"{a.name}, seed {seed}: {reason}")
                values[i, j], errors[i, j] = value, error
        told = values[0] - values[1] if less is not None else values[0]
        seeds = float(told.var(ddof=1)) / len(common) if len(common) > 1 else 0.0
        error = math.sqrt(float((errors.mean(axis=1) ** 2).sum()) + seeds)
        value = float(told.mean())
        half = NORMAL_95 * error
        return Estimate(value, value - half, value + half, len(common), smallest=DETECTABLE * error)

    # --- verdicts ---------------------------------------------------------------------------------------------------

    def verdict(self, data: str, arm: TextArm, control: TextArm, baseline: TextArm) -> Json:
        """comparison.pooled_verdict by nDCG@10 over the seeds that all have, with their number as "n_seeds"; {"reason"}
        where there is none."""
        common = sorted(set.intersection(*(set(a.runs.get(data, {})) for a in (arm, control, baseline))))
        if not common:
            return {"reason": f"no seed that all have: {arm.name}, {control.name}, {baseline.name}"}
        mine, controls, baselines = ([a.runs[data][s] for s in common] for a in (arm, control, baseline))
        try:
            found = pooled_verdict(
                mine, controls, baselines, MAIN_POOL, Direction.Q2D, metric=METRIC, **self._options(data)
            )
        except UserError as error:
            return {"reason": str(error)}
        return {"n_seeds": len(common), **found}


def _cv(powers: Array) -> Array:
    """Sample CV of sums of (1, x, x²) [..., 3]."""
    n, s, q = np.moveaxis(powers, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance: Array = np.maximum(q - s * s / n, 0.0) / (n - 1)
        return np.sqrt(variance) / (s / n)


def _of_documents(results: Json, number: str) -> tuple[float | None, float | None, str]:
    """(value, its standard error over documents, "") or (None, None, reason)."""
    if number == "corpus":
        section, name = results["magnitude"]["document"].get("cohens_d") or {}, "corpus"
    else:
        section, name = (results.get("diagnostics") or {}).get(Q2D) or {}, "relevance_count"
    found = section.get(name)
    if not isinstance(found, dict) or not is_number(found.get("value")):
        return None, None, str(section.get(f"{name}_reason") or f"no {name} in its results")
    value = float(found["value"])
    if number == "corpus":
        if not found.get("ci"):
            return None, None, "d(corpus) has no interval"
        lo, hi = found["ci"]
        return value, (hi - lo) / (2 * NORMAL_95), ""
    if found["n"] < 4:
        return None, None, f"{found['n']} documents: a correlation's interval needs 4"
    return value, (1 - value**2) / math.sqrt(found["n"] - 3), ""
