"""Compare finished runs over the same data: paired differences, significance, verdicts, and means over seeds.

Every difference is paired: both runs rank the same queries, so queries are resampled together (those of one image as
one cluster), which removes the variance that the runs share.

A difference is {"delta", "ci", "within_noise"}: ``within_noise`` where the 95 % interval contains 0, or where all
queries are one cluster, whose variance cannot be estimated ("ci" None).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmclip import metrics
from mmclip.errors import UserError, printable
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import CORRECTED, NATIVE, REVERSED, Array, Json, Results
from mmclip.metrics import magnitude as magnitudes
from mmclip.metrics.significance import FLIPS
from mmclip.models.metadata import trained_directions
from mmclip.roles import TEXT_DIRECTIONS, Direction

SEED = 0
Place = tuple[str, Direction]  # candidate pool and direction
MIN_MEMBERS = 30  # of each group of a verdict: percentiles of 8 members cover 95% in nine cases of ten, of 30 in 93%
ONE_CLUSTER, ONE_QUERY = "all queries belong to one image", "there is only one query"
METRICS = {False: "success@1", True: "ndcg@10"}  # of a verdict on images and texts, or on text retrieval
# Training metadata that, with the model, make two runs replicates that differ in the seed
SAME = (
    *("loss", "i2t_weight", "i2t_weight_end", "norm", "gamma_schedule", "gamma_from", "gamma_start", "gamma_end"),
    *("stage2_lr_factor", "focal", "norm_drift"),
)


def compare(a: Results, b: Results, *, resamples: int = metrics.RESAMPLES, seed: int = SEED) -> Json:
    """b - a: pool -> direction -> scoring -> metric -> difference.

    native is compared with native (each run's own exponents), every other scoring with itself.

    Raises:
        UserError: The runs were not evaluated on the same data.
    """
    same_data(a, b)
    report: Json = {pool: {} for pool in b.pools if pool in a.pools}
    for pool in report:
        for direction, scorings in b.pools[pool]["retrieval"].items():
            names = [s for s in scorings if s in a.pools[pool]["retrieval"][direction]]
            rates = metrics.TEXT_RATES if direction in TEXT_DIRECTIONS else metrics.RATES
            columns = [_values([b], pool, direction, s, m)[0] - _values([a], pool, direction, s, m)[0]
                       for s in names for m in rates]  # fmt: skip
            clusters = b.clusters(pool, direction)
            intervals = iter(metrics.mean_intervals(np.column_stack(columns), clusters, resamples=resamples, seed=seed))
            spread = metrics.several(clusters)
            report[pool][direction] = {s: {m: _difference(next(intervals), spread) for m in rates} for s in names}
    return report


def change(a: Array, b: Array, clusters: Array, seed: int = SEED) -> Json:
    """The difference b - a over the same queries: a [Q], b [Q], clusters [Q]."""
    return _difference(metrics.paired_difference(a, b, clusters, seed=seed), metrics.several(clusters))


def scoring_gain(run: Results, pool: str, direction: str, before: str, after: str, metric: str = "success@1") -> Json:
    """The gain of a scoring over another in one run."""
    a, b = (run.query_values(pool, direction, scoring, metric) for scoring in (before, after))
    return change(a, b, run.clusters(pool, direction))


def against_first(values: Sequence[Array], *, flips: int = FLIPS, seed: int = 0) -> list[Json]:
    """Differences of values[1:] [Q] to values[0] [Q] with {"p", "smallest_detectable", "flips"}, of several p_holm."""
    first, *others = values
    tests: list[Json] = [
        {
            **change(first, other, np.arange(len(first))),
            "p": metrics.randomization_p(first, other, flips=flips, seed=seed),
            "smallest_detectable": metrics.smallest_detectable(first, other),
            "flips": flips,
        }
        for other in others
    ]
    if len(tests) > 1:
        for test, p in zip(tests, metrics.holm([t["p"] for t in tests]), strict=True):
            test["p_holm"] = p
    return tests


def significance(runs: Mapping[str, Results], scoring: str = NATIVE, metric: str = "ndcg@10") -> dict[str, Json]:
    """:func:`against_first` of finished text runs: name of every run but the first -> its test. Raises UserError."""
    for other in (names := list(runs))[1:]:
        same_data(runs[names[0]], runs[other])
    values = [r.query_values(MAIN_POOL, "q2d", scoring, metric) for r in runs.values()]
    return dict(zip(names[1:], against_first(values), strict=True))


def _values(runs: Sequence[Results], pool: str, direction: str, scoring: str, metric: str) -> Array:
    """Values of every query in float64, a row a run: [S, Q]."""
    return np.stack([r.query_values(pool, direction, scoring, metric).astype(np.float64) for r in runs])


def _difference(interval: tuple[float, float, float], spread: bool = True) -> Json:
    """``spread``: whether there are several clusters."""
    delta, lo, hi = interval
    if not spread:
        return {"delta": delta, "ci": None, "within_noise": True}
    return {"delta": delta, "ci": [lo, hi], "within_noise": lo <= 0 <= hi}


def verdict(
    run: Results | Sequence[Results],
    control: Results | Sequence[Results],
    baseline: Results | Sequence[Results] | None = None,
    pool: str = MAIN_POOL,
    direction: Direction | None = None,
    *,
    metric: str | None = None,
    resamples: int = metrics.RESAMPLES,
    seed: int = SEED,
) -> Json:
    """Decide whether the documents' norm was learned, and whether it is useful.

    LEARNED: d(topk) of the documents exceeds the control's: the paired interval lies above 0.
    USEFUL: (1) the metric's native - cosine of the run is above 0 and exceeds the control's dot - cosine: both paired
    intervals lie above 0; and (2) native is not below the baseline's cosine: no where the difference itself is below 0,
    yes where its paired interval lies above 0, and open (None) between, where the difference is within noise. To exceed
    the control is not enough: its norms are noise to its dot scoring, so it loses by them, and a run whose norms are
    nearly equal beats it; if its angles are better than the baseline's too, it meets (2) as well.

    Args:
        run, control, baseline: One each, or one a training seed in the same order: then means over the seeds are
            judged, and intervals draw seeds as well (mmclip.metrics.bootstrap). The control has the run's loss and
            seed, and documents that were normalized in training (gamma_d = 1), so that no loss used their norm. The
            baseline is the sym/cosine run, of text the same loss with cosine.
        pool: Candidate pool.
        direction: The trained one, q2d of text; needed for a run that trained both.
        metric: success@1, of text ndcg@10, by default.
        resamples, seed: Of the bootstrap.

    Returns:
        {"pool", "direction", "learned": {...}, "useful": {...}}; each "verdict" is True, False, or None with a
        "reason", and "sentence" states it with its numbers.

    Raises:
        UserError: For runs over different data, a control of another loss or seed or with gamma_d other than 1, and
            for text that trained d2q alone, which no evaluation ranks.
    """
    runs, controls, baselines = ([x] if isinstance(x, Results) else list(x or []) for x in (run, control, baseline))
    direction = _trained_direction(runs[0].trained_with) if direction is None else Direction(direction)
    for other in (*runs[1:], *controls, *baselines):
        same_data(runs[0], other)
    for mine, theirs in zip(runs, controls, strict=True):
        check_control(mine, theirs)
    for theirs in baselines:
        check_baseline(theirs, runs[0])
    text, place = is_text(runs[0].trained_with), (pool, direction)
    options: Any = {"resamples": resamples, "seed": seed}
    report: Json = {"pool": pool, "direction": direction.value}
    if all(run.native.gamma_d == 1 for run in runs):
        sentence = "No: the run normalizes its documents (gamma_d 1), so neither loss nor score depends on their norm."
        return report | {kind: {"verdict": False, "sentence": sentence} for kind in ("learned", "useful")}
    if not metrics.several(runs[0].clusters(*place)):
        return report | {kind: _undecided(ONE_QUERY if text else ONE_CLUSTER) for kind in ("learned", "useful")}
    report["learned"] = _learned(runs, controls, place, options)
    return report | {"useful": _useful(runs, controls, baselines, place, metric or METRICS[text], options)}


def _trained_direction(trained: Json) -> Direction:
    if is_text(trained):
        if trained.get("loss") == Direction.D2Q:
            raise UserError("the run trained d2q alone, but text is evaluated in q2d: no trained direction to judge")
        return Direction.Q2D
    if len(directions := trained_directions(trained)) > 1:
        raise UserError("the run trained both directions; name one of: i2t, t2i")
    return directions[0]


def verdicts(run: Results, control: Results, baseline: Results | None = None) -> list[Json]:
    """Verdicts of all pools on a run that keeps some of its documents' norm and has the control's loss and seed;
    [] for any other run. Raises UserError as :func:`verdict`."""
    mine = run.trained_with
    fits = not losses_differ(mine, control.trained_with) and not seeds_differ(run, control)
    if not fits or mine.get("gamma_d") in (None, 1.0) or (is_text(mine) and mine.get("loss") == Direction.D2Q):
        return []
    return [verdict(run, control, baseline, pool) for pool in run.pools if pool in control.pools]


def _learned(runs: list[Results], controls: list[Results], place: Place, options: Json) -> Json:
    pool, direction = place
    clusters, side = runs[0].clusters(*place), direction.document_side
    values, samples = [], []
    for name, group in (("run", runs), ("control", controls)):
        moments = np.stack([r.array(f"{pool}/{direction}/topk_moments") for r in group], axis=1)  # [Q, S, 6]
        fewest = int(moments.sum(axis=0)[:, [0, 3]].min())
        if 0 < fewest < MIN_MEMBERS:
            return _undecided(
                f"too few: {fewest} relevant or irrelevant {side}s among the {name}'s {magnitudes.TOP_K} best by "
                f"cosine; at least {MIN_MEMBERS} are needed"
            )
        levels = np.array([float(r.array(f"{pool}/{direction}/length_level")[0]) for r in group])
        values.append(float(magnitudes.d_from_moments(moments.sum(axis=0), levels).mean()))
        sums = metrics.cluster_sums(moments.reshape(len(moments), -1), clusters, **options)
        samples.append(magnitudes.d_from_moments(sums.reshape(-1, *moments.shape[1:]), levels))
    for name, value in zip(("run", "control"), values, strict=True):
        if not np.isfinite(value):
            return _undecided(f"d(topk) of the {name}'s {side} norms is undefined: a group is empty or norms are equal")
    ci = metrics.finite_interval(metrics.over_seeds(samples[0] - samples[1], seed=options["seed"]))
    if ci is None:
        return _undecided(f"too few queries: d(topk) of the {side} norms is undefined in too many resamples")
    interval = (values[0] - values[1], *ci)
    learned = ci[0] > 0
    head = f"The {side} norm {'was learned' if learned else 'is not shown to be learned'}"
    numbers = f"d(topk) {values[0]:.2f}, control {values[1]:.2f}, difference {_signed(interval, 2)}"
    report = {"verdict": learned, "d_run": values[0], "d_control": values[1], **_difference(interval)}
    return report | {"sentence": f"{head}: {numbers}."}


def _useful(
    runs: list[Results], controls: list[Results], baselines: list[Results], place: Place, metric: str, options: Json
) -> Json:
    clusters = runs[0].clusters(*place)
    native = _values(runs, *place, NATIVE, metric)
    own = native - _values(runs, *place, "cosine", metric)
    noise = _values(controls, *place, "dot", metric) - _values(controls, *place, "cosine", metric)
    gain = metrics.mean_interval(own - noise, clusters, **options)
    helps = metrics.mean_interval(own, clusters, **options)
    report: Json = {
        "metric": metric,
        "native_minus_cosine_run": float(own.mean()),
        "native_minus_cosine_run_ci": list(helps[1:]),
        "dot_minus_cosine_control": float(noise.mean()),
        "gain": _difference(gain),
        "native_minus_baseline_cosine": None,
    }
    useful: bool | None = helps[1] > 0 and gain[1] > 0
    words = f"native minus cosine {_signed(helps, 3)} {metric}, control's dot minus cosine {noise.mean():+.3f}, "
    words += f"difference {_signed(gain, 3)}"
    if baselines:
        margin = metrics.mean_interval(native - _values(baselines, *place, "cosine", metric), clusters, **options)
        report["native_minus_baseline_cosine"] = _difference(margin)
        words += f"; native minus the baseline's cosine {_signed(margin, 3)}"
        if useful and margin[1] <= 0:
            useful = None if margin[0] >= 0 else False
            words += ", not below it but within noise" if useful is None else ""
    elif useful:
        missing = "the cosine run" if place[1] in TEXT_DIRECTIONS else "the sym/cosine run"
        useful, words = None, f"{words}; without a baseline, {missing}, condition (2) is open"
    if useful is None:
        return report | _undecided(words)
    head = "The norm is useful" if useful else "The norm is not shown to be useful"
    return report | {"verdict": useful, "sentence": f"{head}: {words}."}


def _undecided(reason: str) -> Json:
    return {"verdict": None, "reason": reason, "sentence": f"No verdict: {reason}."}


def _signed(interval: tuple[float, float, float], digits: int) -> str:
    delta, lo, hi = interval
    return f"{delta:+.{digits}f} [{lo:+.{digits}f}, {hi:+.{digits}f}]"


def same_data(a: Results, b: Results) -> None:
    """Raise UserError naming both runs where they did not rank the same candidates for the same queries."""
    for key in ("fingerprint", "n_queries", "n_images", "n_texts", "n_documents"):
        left, right = a.json["data"].get(key), b.json["data"].get(key)
        if left != right:
            raise UserError(
                f"runs over different data cannot be compared: {key} is {printable(left, 60)} for {_called(a)} and "
                f"{printable(right, 60)} for {_called(b)}; evaluate both on the same data"
            )
    for pool in a.json.get("pools", {}).keys() & b.json.get("pools", {}).keys():
        if len({str(r.json["pools"][pool].get("fingerprint")) for r in (a, b)}) > 1:
            same = f"pool {printable(pool, 60)} is not the same in both"
            raise UserError(f"runs over different distractors cannot be compared: {same}")


def _called(run: Results) -> str:
    """A model's name, and how it was trained: runs of one study start from one model."""
    words = [str(run.trained_with[k]) for k in ("loss", "norm") if run.trained_with.get(k)]
    words += [f"seed {run.seed}"] if run.seed is not None else []
    return printable(run.json.get("model"), 60) + (f" ({printable(', '.join(words), 60)})" if words else "")


def is_text(trained: Json) -> bool:
    """Whether training metadata are those of a text encoder."""
    return trained.get("task") == "text"


def seeds_differ(run: Results, control: Results) -> bool:
    """Whether both have a known seed, and not the same."""
    return len({run.seed, control.seed} - {None}) > 1


def losses_differ(a: Json, b: Json) -> bool:
    """Whether two losses weigh the directions differently: sym with i2t_weight 1 is asym-i2t, both with q2d_weight 1
    is q2d."""
    if is_text(a) != is_text(b) or a.get("i2t_weight_end") != b.get("i2t_weight_end"):
        return True
    weights = [trained.get("q2d_weight" if is_text(trained) else "i2t_weight") for trained in (a, b)]
    return weights[0] != weights[1] if None not in weights else a.get("loss") != b.get("loss")


def check_baseline(baseline: Results, run: Results) -> None:
    """Require the sym/cosine run or, of text, a cosine run of the run's own loss."""
    trained, native, loss = baseline.trained_with, baseline.native, run.trained_with.get("loss")
    if is_text(run.trained_with):
        wanted, fits = (
            f"a cosine run of the run's loss, {printable(loss)}",
            not losses_differ(trained, run.trained_with),
        )
    else:
        wanted = "a sym/cosine run, both directions of equal weight"
        both = trained.get("loss") in (None, "sym") and trained.get("i2t_weight") in (None, 0.5)
        fits = both and not is_text(trained) and "i2t_weight_end" not in trained
    if not fits or tuple(native) != (1, 1):
        raise UserError(
            f"the baseline was trained with {printable(trained.get('loss'))} and the exponents {native.gamma_q}, "
            f"{native.gamma_d}: a baseline is {wanted}"
        )


def check_control(run: Results, control: Results) -> None:
    """Require the run's loss and seed, and documents that were normalized throughout training."""
    pair = control.trained_with, run.trained_with
    if losses_differ(*pair):
        name = "q2d_weight" if is_text(pair[1]) else "i2t_weight"
        losses = [printable(t.get("loss")) + (f" ({name} {w})" if (w := t.get(name)) else "") for t in pair]
        wrong = f"the loss {losses[0]}, the run with {losses[1]}: a control has the run's loss"
    elif seeds_differ(run, control):
        wrong = f"seed {control.seed}, the run with {run.seed}: a control has the run's seed"
    elif (earlier := pair[0].get("gamma_from", "cosine")) not in ("cosine", "dnorm") or control.native.gamma_d != 1:
        started = "" if control.native.gamma_d != 1 else f" after {printable(earlier, 40)}"
        wrong = (
            f"gamma_d {control.native.gamma_d}{started}: a control normalizes its documents (cosine, dnorm) throughout"
        )
    else:
        return
    raise UserError(f"the control was trained with {wrong}")


@dataclass(frozen=True)
class Group:
    """Runs of one model, loss and normalization with different seeds; intervals of their means cover queries alone."""

    name: str
    runs: list[Results]

    def values(self, pool: str, direction: str, scoring: str) -> Array | None:
        """[Q] success@1, means over the seeds; None where a run does not have the scoring."""
        if any(scoring not in run.pools[pool]["retrieval"][direction] for run in self.runs):
            return None
        return np.asarray(_values(self.runs, pool, direction, scoring, "success@1").mean(axis=0))

    def numbers(self, pool: str, direction: str, scoring: str) -> Json | None:
        """{"mean", "ci" over queries, "low", "high": the lowest and the highest seed} of success@1."""
        values = self.values(pool, direction, scoring)
        if values is None:
            return None
        mean, lo, hi = metrics.mean_intervals(values[:, None], self.runs[0].clusters(pool, direction))[0]
        each = [run.pools[pool]["retrieval"][direction][scoring]["success@1"] for run in self.runs]
        return {"mean": mean, "ci": [lo, hi], "low": min(each), "high": max(each)}

    def gain(self, pool: str, direction: str, scoring: str, over: Group, their: str) -> Json | None:
        """The paired gain of ``scoring`` over ``their`` of another group (or of this one)."""
        mine, other = self.values(pool, direction, scoring), over.values(pool, direction, their)
        return None if mine is None or other is None else change(other, mine, self.runs[0].clusters(pool, direction))

    def row(self, pool: str, direction: str, first: Group) -> tuple[list[Json | None], list[Json | None]]:
        """([native, reversed, corrected] as ``numbers``, [corrected over reversed, native over the first group's,
        corrected over the first group's native] as ``gain``); None where one does not exist."""
        where = (pool, direction)
        return [self.numbers(*where, scoring) for scoring in (NATIVE, REVERSED, CORRECTED)], [
            self.gain(*where, CORRECTED, self, REVERSED),
            None if self is first else self.gain(*where, NATIVE, first, NATIVE),
            self.gain(*where, CORRECTED, first, NATIVE),
        ]


def group_by_seed(runs: Mapping[str, Results]) -> list[Group]:
    """The groups of at least two runs with different seeds, in the order of their first runs."""
    by_kind: dict[str, dict[int, Results]] = {}
    for run in runs.values():
        trained = run.trained_with
        if "loss" in trained and run.seed is not None:
            start = trained.get("initial") or {}
            kind = [trained.get("model", run.json.get("model")), *map(trained.get, SAME)]
            by_kind.setdefault(repr([*kind, start.get("loss"), start.get("norm")]), {}).setdefault(run.seed, run)
    groups = [list(by_seed.values()) for by_seed in by_kind.values() if len(by_seed) > 1]
    return [Group("{loss} {norm}".format(**{"norm": None} | members[0].trained_with), members) for members in groups]
