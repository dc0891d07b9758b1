"""Two runs over the same data: differences with intervals, and whether length was learned and is useful.

Every difference is paired: both runs answered the same queries, so queries are resampled together (those of one image
as one), which removes what the two share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmclip import metrics
from mmclip.errors import UserError
from mmclip.evaluation.comparable import check_baseline, check_control, is_text, losses_differ, same_data, seeds_differ
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import NATIVE, Results
from mmclip.metrics import magnitude as diagnostics
from mmclip.models.metadata import trained_directions
from mmclip.similarity import TEXT_DIRECTIONS, Direction

Array = NDArray[Any]
Json = dict[str, Any]
SEED = 0
# Of each group of a verdict: percentiles of 8 members cover 95% in nine cases of ten, of 30 in 93 of 100
MIN_MEMBERS = 30
ONE_CLUSTER, ONE_QUERY = "all queries are one image's", "there is one query"
METRICS = {False: "success@1", True: "ndcg@10"}  # what a verdict on images and texts, or on text, is about


def compare(a: Results, b: Results, *, resamples: int = metrics.RESAMPLES, seed: int = SEED) -> Json:
    """b - a: pool -> direction -> scoring -> metric -> {"delta", "ci", "within_noise"}.

    native is compared with native (each run's own exponents), every other scoring with itself. ``within_noise`` says
    that the interval holds 0, or that there is none ("ci" None): all queries are one image's, which have no spread to
    tell. Errors: UserError where the runs were not evaluated on the same data.
    """
    same_data(a, b)
    report: Json = {}
    for pool, section in b.pools.items():
        if pool not in a.pools:
            continue
        report[pool] = {}
        for direction, scorings in section["retrieval"].items():
            names = [s for s in scorings if s in a.pools[pool]["retrieval"][direction]]
            rates = metrics.TEXT_RATES if direction in TEXT_DIRECTIONS else metrics.RATES
            columns = [
                b.query_values(pool, direction, s, m).astype(np.float64) - a.query_values(pool, direction, s, m)
                for s in names
                for m in rates
            ]
            clusters = b.array(f"{pool}/{direction}/clusters")
            found = iter(metrics.mean_intervals(np.column_stack(columns), clusters, resamples=resamples, seed=seed))
            spread = several(clusters)
            report[pool][direction] = {s: {m: _delta(next(found), spread) for m in rates} for s in names}
    return report


def scoring_gain(run: Results, pool: str, direction: str, before: str, after: str, metric: str = "success@1") -> Json:
    """What a scoring gains over another in one run, over the same queries: {"delta", "ci", "within_noise"}."""
    a, b = (run.query_values(pool, direction, scoring, metric) for scoring in (before, after))
    return change(a, b, run.array(f"{pool}/{direction}/clusters"))


def change(a: Array, b: Array, clusters: Array) -> Json:
    """b - a over the same queries, a [Q], b [Q], clusters [Q]: {"delta", "ci", "within_noise"}."""
    return _delta(metrics.paired_difference(a, b, clusters, seed=SEED), several(clusters))


def verdict(
    run: Results,
    control: Results,
    baseline: Results | None = None,
    pool: str = MAIN_POOL,
    direction: Direction | None = None,
    *,
    metric: str | None = None,
    resamples: int = metrics.RESAMPLES,
    seed: int = SEED,
) -> Json:
    """Was the candidates' length learned, and is it useful? {"pool", "direction", "learned": {...}, "useful": {...}}.

    control: the same loss and seed, the candidate side normalized in training (gamma_d = 1), whose lengths no loss saw.
    baseline: the sym/cosine run, of text the same loss with cosine. direction: the trained one; a run that trained both
    needs it named. Text is judged in q2d. metric: success@1, of text ndcg@10.
    LEARNED: d(topk) of the candidates exceeds the control's: the paired interval lies above 0.
    USEFUL: (1) the metric's native - cosine of the run is above 0 and exceeds the control's dot - cosine: both paired
    intervals lie above 0; and (2) native is not below the baseline's cosine: no where the difference itself is below 0,
    yes where its paired interval lies above 0, and open (None) between, where the difference is within noise. To exceed
    the control would not do: a control's lengths are noise to its dot scoring, so it loses by them, and a run whose
    lengths are nearly equal beats it; if its angles are better than the baseline's too, it meets (2) as well.

    "verdict" is True, False, or None with a "reason"; "sentence" says it in words with its numbers.
    Errors: UserError for runs over different data, a control of another loss or with gamma_d other than 1, and for
    text that was trained in d2q alone, which no evaluation asks in.
    """
    facts = run.json.get("trained_with") or {}
    if is_text(facts):
        if facts.get("loss") == Direction.D2Q:
            raise UserError("the run trained d2q alone, and text is evaluated in q2d: there is nothing to judge")
        direction = direction or Direction.Q2D
    if direction is None:
        trained = trained_directions(facts)
        if len(trained) > 1:
            raise UserError("the run trained both directions; name one of: i2t, t2i")
        direction = trained[0]
    baselines = None if baseline is None else [baseline]
    return pooled_verdict([run], [control], baselines, pool, direction, metric=metric, resamples=resamples, seed=seed)


def pooled_verdict(
    runs: Sequence[Results],
    controls: Sequence[Results],
    baselines: Sequence[Results] | None,
    pool: str,
    direction: Direction,
    *,
    metric: str | None = None,
    resamples: int = metrics.RESAMPLES,
    seed: int = SEED,
) -> Json:
    """:func:`verdict` on one setting trained with several seeds: the same questions of the means over seeds.

    runs, controls, baselines: one a training seed, in the same order. Intervals draw queries and seeds
    (metrics.bootstrap), of one seed queries alone.
    """
    direction = Direction(direction)
    for other in (*runs[1:], *controls, *(baselines or [])):
        same_data(runs[0], other)
    for run, control in zip(runs, controls, strict=True):
        check_control(run, control)
    for baseline in baselines or []:
        check_baseline(baseline, runs[0])
    text = is_text(runs[0].json.get("trained_with") or {})
    where = (pool, direction.value)
    options = {"resamples": resamples, "seed": seed}
    report: Json = {"pool": pool, "direction": direction.value}
    if all(run.json["evaluation"]["native"]["gamma_d"] == 1 for run in runs):
        blind = "the run divides its candidates' length out (gamma_d 1): no loss saw it and no score uses it"
        return report | {kind: {"verdict": False, "sentence": f"No: {blind}."} for kind in ("learned", "useful")}
    if not several(runs[0].array("/".join((*where, "clusters")))):
        return report | {kind: _undecided(ONE_QUERY if text else ONE_CLUSTER) for kind in ("learned", "useful")}
    report["learned"] = _learned(runs, controls, where, direction, options)
    report["useful"] = _useful(runs, controls, baselines, where, metric or METRICS[text], options)
    return report


def verdicts(run: Results, control: Results, baseline: Results | None = None) -> list[Json]:
    """The verdicts on a run whose documents keep some length and whose loss and seed are the control's, one a pool; []
    for any other run. Errors: UserError, as of :func:`verdict`."""
    mine, controls = (r.json.get("trained_with") or {} for r in (run, control))
    if losses_differ(mine, controls) or mine.get("gamma_d") in (None, 1.0) or seeds_differ(run, control):
        return []
    if is_text(mine) and mine.get("loss") == Direction.D2Q:
        return []
    return [verdict(run, control, baseline, pool) for pool in run.pools if pool in control.pools]


def _learned(
    runs: Sequence[Results], controls: Sequence[Results], where: tuple[str, str], direction: Direction, options: Json
) -> Json:
    prefix = "/".join(where)
    clusters = runs[0].array(f"{prefix}/clusters")
    side = direction.document_side
    values, samples = [], []
    for name, group in (("run", runs), ("control", controls)):
        moments = np.stack([r.array(f"{prefix}/topk_moments") for r in group], axis=1)  # [Q, S, 6]
        fewest = int(moments.sum(axis=0)[:, [0, 3]].min())
        if 0 < fewest < MIN_MEMBERS:
            return _undecided(
                f"too few: {fewest} relevant or irrelevant {side}s among the {name}'s {diagnostics.TOP_K} best by "
                f"cosine, at least {MIN_MEMBERS} are needed"
            )
        levels = np.array([float(r.array(f"{prefix}/length_level")[0]) for r in group])
        values.append(float(diagnostics.d_from_moments(moments.sum(axis=0), levels).mean()))
        sums = metrics.cluster_sums(moments.reshape(len(moments), -1), clusters, **options)
        samples.append(diagnostics.d_from_moments(sums.reshape(-1, *moments.shape[1:]), levels))
    for name, value in zip(("run", "control"), values, strict=True):
        if not np.isfinite(value):
            reason = f"d(topk) of the {name}'s {side} lengths does not exist: a group is empty or lengths do not vary"
            return _undecided(reason)
    difference = metrics.over_seeds(samples[0] - samples[1], seed=options["seed"])
    difference = difference[np.isfinite(difference)]
    if len(difference) < metrics.MIN_DEFINED * options["resamples"]:
        return _undecided(f"too few queries: d(topk) of the {side} lengths exists in too few resamples")
    lo, hi = metrics.interval(difference)
    learned = lo > 0
    delta = values[0] - values[1]
    return {
        "verdict": learned,
        "d_run": values[0],
        "d_control": values[1],
        **_delta((delta, lo, hi)),
        "sentence": (
            f"{side} length {'was learned' if learned else 'is not shown to be learned'}: d(topk) {values[0]:.2f} "
            f"against the control's {values[1]:.2f}, difference {_signed(delta, lo, hi, 2)}."
        ),
    }


def _useful(
    runs: Sequence[Results],
    controls: Sequence[Results],
    baselines: Sequence[Results] | None,
    where: tuple[str, str],
    metric: str,
    options: Json,
) -> Json:
    text = where[1] in TEXT_DIRECTIONS
    named, missing = ("the cosine run", "the cosine run") if text else ("sym/cosine", "the sym/cosine run")

    def hits(group: Sequence[Results], scoring: str) -> Array:  # [S, Q]
        return np.stack([r.query_values(*where, scoring, metric).astype(np.float64) for r in group])

    clusters = runs[0].array("/".join((*where, "clusters")))
    own = hits(runs, NATIVE) - hits(runs, "cosine")
    luck = hits(controls, "dot") - hits(controls, "cosine")
    gain = metrics.mean_interval(own - luck, clusters, **options)
    helps = metrics.mean_interval(own, clusters, **options)
    report: Json = {
        "metric": metric,
        "native_minus_cosine_run": float(own.mean()),
        "native_minus_cosine_run_ci": list(helps[1:]),
        "dot_minus_cosine_control": float(luck.mean()),
        "gain": _delta(gain),
        "native_minus_baseline_cosine": None,
    }
    above = helps[1] > 0 and gain[1] > 0
    words = (
        f"length gives {_signed(*helps, 3)} {metric} against {luck.mean():+.3f} in the control, difference "
        f"{_signed(*gain, 3)}"
    )
    if baselines is None:
        if above:
            return {**report, **_undecided(f"{words}; without {missing} the second condition is open")}
        return {**report, "verdict": False, "sentence": f"Length is not shown to be useful: {words}."}
    beside = metrics.mean_interval(hits(runs, NATIVE) - hits(baselines, "cosine"), clusters, **options)
    report["native_minus_baseline_cosine"] = _delta(beside)
    words += f"; native minus {named}'s cosine is {_signed(*beside, 3)}"
    if above and beside[0] >= 0 >= beside[1]:
        return {**report, **_undecided(f"{words}, not below it but within noise of it")}
    useful = above and beside[1] > 0
    head = "Length is useful" if useful else "Length is not shown to be useful"
    return {**report, "verdict": useful, "sentence": f"{head}: {words}."}


def _undecided(reason: str) -> Json:
    return {"verdict": None, "reason": reason, "sentence": f"No verdict: {reason}."}


def _signed(delta: float, lo: float, hi: float, digits: int) -> str:
    return f"{delta:+.{digits}f} [{lo:+.{digits}f}, {hi:+.{digits}f}]"


def _delta(found: tuple[float, float, float], spread: bool = True) -> Json:
    """(difference, low, high) as results have it; "within_noise" says that the interval holds 0, or that there is none
    because all queries are one cluster's (``spread`` False)."""
    delta, lo, hi = found
    if not spread:
        return {"delta": delta, "ci": None, "within_noise": True}
    return {"delta": delta, "ci": [lo, hi], "within_noise": lo <= 0 <= hi}


def several(clusters: Array) -> bool:
    """One cluster has no spread, which is not the same as certainty."""
    return len(np.unique(clusters)) > 1
