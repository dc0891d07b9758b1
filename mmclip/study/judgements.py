"""A study's tables that judge: the correction's gain, learned and useful, both directions kept, forgetting, κ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmclip.evaluation.diagnostics import value_at
from mmclip.evaluation.results import CORRECTED, NATIVE, REVERSED
from mmclip.reporting.table import is_number
from mmclip.study.arms import Arm
from mmclip.study.numbers import (
    Estimate,
    Scored,
    Study,
    initial,
    permuted,
    served,
    sign_test,
    spread,
    trained,
)
from mmclip.study.sheets import Sheet, estimate_columns, reasons, spread_columns
from mmclip.study.tables import DIRECTIONS, alike, setting_columns, zero_shot

Json = dict[str, Any]
KEPT = 0.95  # share of sym/cosine's success@1 that a direction must keep, by the interval's lower end
WORDS = {True: "yes", False: "not shown", None: "open"}
MATRICES = ("query_raw", "query_normalized", "document_raw", "document_normalized")
NO_BASELINE = "no baseline: a sym/cosine arm on the same data"


def correction(study: Study) -> Sheet:
    """What the correction gives over the trained scores read backwards, and over sym/cosine's native."""
    rows = []
    for arm in study.arms:
        baseline = study.baseline(arm)
        for direction in DIRECTIONS:
            corrected = Scored(arm, direction, CORRECTED)
            gain = study.difference(corrected, Scored(arm, direction, REVERSED))
            if gain.value is None and arm.trains(direction) and len(trained(arm)) == 1:
                continue  # its opposite was not trained: there is nothing to read backwards
            beside = _beside(study.difference, corrected, baseline, NATIVE)
            row: Json = {"arm": arm.name, "direction": direction, "trained": arm.trains(direction)}
            row |= {"null": permuted(arm), "n_seeds": gain.n_seeds}
            for scoring in (NATIVE, REVERSED, CORRECTED):
                row |= spread_columns(scoring, study.spread(Scored(arm, direction, scoring)))
            row |= estimate_columns("corrected_minus_reversed", gain)
            row |= {"baseline": baseline and baseline.name}
            row |= estimate_columns("corrected_minus_baseline_native", beside)
            rows.append(
                row | {"reason": reasons(corrected_minus_reversed=gain, corrected_minus_baseline_native=beside)}
            )
    return Sheet("correction", ("arm", "direction", "trained", "null", "n_seeds"), rows)


def _beside(of: Any, scored: Scored, baseline: Arm | None, scoring: str) -> Estimate:
    """``of`` (a difference or a ratio) of an arm's scores to the baseline's, over the same queries."""
    if baseline is None:
        return Estimate.missing(NO_BASELINE)
    found: Estimate = of(scored, Scored(baseline, scored.direction, scoring))
    return found


def verdicts(study: Study) -> Sheet:
    """Learned and useful in each trained direction of every arm whose documents keep some length, nulls among them."""
    rows = []
    for arm in study.arms:
        if all(run.json["evaluation"]["native"]["gamma_d"] == 1 for run in arm.runs.values()):
            continue
        for direction in trained(arm):
            found = study.verdict(arm, direction)
            learned, useful = found.get("learned") or {}, found.get("useful") or {}
            beside = useful.get("native_minus_baseline_cosine") or {}
            rows.append(
                {"arm": arm.name, "direction": direction, "null": permuted(arm)}
                | {key: found[key] for key in ("control", "baseline", "n_seeds")}
                | {"learned": _word(learned), "d_arm": learned.get("d_run"), "d_control": learned.get("d_control")}
                | _difference("d_difference", learned)
                | {"useful": _word(useful), "native_minus_cosine": useful.get("native_minus_cosine_run")}
                | _ends("native_minus_cosine", useful.get("native_minus_cosine_run_ci"))
                | {"dot_minus_cosine_control": useful.get("dot_minus_cosine_control")}
                | _difference("gain_over_control", useful.get("gain") or {})
                | _difference("native_minus_baseline_cosine", beside)
                | {"learned_sentence": learned.get("sentence"), "useful_sentence": useful.get("sentence")}
                | {"reason": found.get("reason", "")}
            )
    return Sheet("verdicts", ("arm", "direction", "null", "control", "baseline", "n_seeds", "learned", "useful"), rows)


def _word(found: Json) -> str:
    return WORDS[found["verdict"]] if found else ""


def _difference(name: str, found: Json) -> Json:
    return {name: found.get("delta"), **_ends(name, found.get("ci"))}


def _ends(name: str, ci: Sequence[float] | None) -> Json:
    lo, hi = ci or (None, None)
    return {f"{name}_lo": lo, f"{name}_hi": hi}


def keeps_both(study: Study) -> Sheet:
    """Whether both directions keep ``KEPT`` of sym/cosine's native success@1, by the lower ends of paired ratios.

    How an arm is served is a rule and not the better result: a trained direction natively and an untrained one
    corrected; an arm trained both ways natively, corrected, or one direction so and the other so, each in a row of its
    own. Rows without ``by_rule`` show what a one-sided arm keeps without the correction and decide nothing.
    """
    rows = []
    for arm in study.arms:
        baseline = study.baseline(arm)
        ways: list[tuple[str, bool, dict[str, str]]] = [
            (NATIVE, len(trained(arm)) == 2, dict.fromkeys(DIRECTIONS, NATIVE))
        ]
        ways.append((CORRECTED, True, dict.fromkeys(DIRECTIONS, CORRECTED)))
        if len(trained(arm)) == 1:
            ways[1] = ("native where trained, else corrected", True, {d: served(arm, d) for d in DIRECTIONS})
        else:
            for d, other in (DIRECTIONS, DIRECTIONS[::-1]):
                ways.append((f"{d} corrected, {other} native", True, {d: CORRECTED, other: NATIVE}))
        for name, by_rule, scorings in ways:
            row: Json = {"arm": arm.name, "served": name, "by_rule": by_rule, "null": permuted(arm)}
            row |= {"baseline": baseline and baseline.name}
            found = {}
            for direction in DIRECTIONS:
                scored = Scored(arm, direction, scorings[direction])
                ratio = _beside(study.ratio, scored, baseline, NATIVE)
                found[direction] = ratio
                row |= {f"{direction}_scoring": scored.scoring, "n_seeds": ratio.n_seeds}
                row |= estimate_columns(f"{direction}_ratio_to_native", ratio)
                beside = _beside(study.ratio, scored, baseline, CORRECTED)
                row |= estimate_columns(f"{direction}_ratio_to_corrected", beside)
            ends = [ratio.lo for ratio in found.values()]
            known = [end for end in ends if end is not None]
            row["lowest_end"] = min(known) if len(known) == len(ends) else None
            row["keeps_both"] = None if row["lowest_end"] is None else row["lowest_end"] >= KEPT
            rows.append(row | {"reason": reasons(**found)})
    head = ("arm", "served", "by_rule", "null", "baseline", "n_seeds", "keeps_both", "lowest_end")
    return Sheet("keeps_both", head, rows)


def pretrained(study: Study) -> Sheet:
    """Arms that start from trained weights: against the same setting from their model's own start, and what zero-shot
    classification loses by the training, seed by seed."""
    rows = []
    for arm in (a for a in study.arms if initial(a) is not None):
        scratch = [a for a in study.arms if initial(a) is None and _same_setting(a, arm)]
        other = scratch[0] if scratch else None
        row = setting_columns(arm) | {"from_random": other and other.name, "n_seeds": len(arm.runs)}
        found = {}
        for direction in DIRECTIONS:
            row |= spread_columns(f"success@1_native_{direction}", study.spread(Scored(arm, direction)))
            name = f"minus_from_random_{direction}"
            found[name] = Estimate.missing("no arm of this loss and normalization from random weights")
            if other:
                found[name] = study.difference(Scored(arm, direction), Scored(other, direction))
            row |= estimate_columns(name, found[name])
        for scoring in (NATIVE, "cosine"):
            pairs = [
                (_before(study, arm, seed, scoring), zero_shot(run.json, scoring)) for seed, run in arm.runs.items()
            ]
            told = [(before, after) for before, after in pairs if before is not None and after is not None]
            row |= spread_columns(f"zero_shot_before_{scoring}", spread(before for before, _ in told))
            row |= spread_columns(f"zero_shot_after_{scoring}", spread(after for _, after in told))
            row |= spread_columns(f"zero_shot_change_{scoring}", spread(after - before for before, after in told))
            row[f"zero_shot_{scoring}_n"] = len(told)
        rows.append(row | {"reason": reasons(**found)})
    return Sheet("pretrained", ("arm", "initial", "from_random", "n_seeds"), rows)


def _before(study: Study, arm: Arm, seed: int, scoring: str) -> float | None:
    """Zero-shot accuracy before the first step: of start.json, else of the run that it starts from."""
    found = zero_shot(arm.starts.get(seed) or {}, scoring)
    source = next((a for a in study.arms if a.name == arm.initial), None)
    return zero_shot(source.runs[seed].json, scoring) if found is None and source and seed in source.runs else found


def _same_setting(a: Arm, b: Arm) -> bool:
    return all(setting_columns(a)[k] == setting_columns(b)[k] for k in _SETTING)


_SETTING = ("i2t_weight", "norm", "curriculum", "train_fraction", "permute_pairs")


def fisher(study: Study) -> Sheet:
    """log10 κ before training, against which of qnorm and dnorm won: a row a trained direction and seed.

    κ is the start of the cosine arm of the same setting where there is one (so that the other role is a unit vector in
    all four matrices), else of the qnorm or the dnorm arm; "kappa_of" says which.
    """
    rows = []
    for qnorm in (a for a in study.arms if a.settings.norm == "qnorm" and not permuted(a)):
        for dnorm in alike(qnorm, study.arms, "dnorm"):
            starts = [*alike(qnorm, study.arms, "cosine"), qnorm, dnorm]
            for direction in trained(qnorm):
                for seed in qnorm.seeds_with(dnorm):
                    rows.append(_fisher_row(study, qnorm, dnorm, starts, direction, seed))
    head = ("i2t_weight", "direction", "seed", "train_fraction", "initial", "qnorm_arm", "dnorm_arm", "winner")
    return Sheet("fisher", head, rows)


def _fisher_row(study: Study, qnorm: Arm, dnorm: Arm, starts: Sequence[Arm], direction: str, seed: int) -> Json:
    row = {k: v for k, v in setting_columns(qnorm).items() if k in ("i2t_weight", "train_fraction", "initial")}
    row |= {"direction": direction, "seed": seed, "qnorm_arm": qnorm.name, "dnorm_arm": dnorm.name}
    found = study.difference(Scored(qnorm, direction), Scored(dnorm, direction), [seed])
    row |= estimate_columns("qnorm_minus_dnorm", found)
    row["winner"] = "qnorm" if found.above(0) else "dnorm" if found.below(0) else "within noise"
    row["winner"] = None if found.lo is None else row["winner"]
    of = next((arm for arm in starts if kappas(arm, direction, seed)[0]), None)
    values, reason = kappas(of or starts[0], direction, seed)
    row["kappa_of"] = of and of.name
    row |= {f"log10_kappa_{name}": values.get(name) for name in MATRICES}
    return row | {"reason": "; ".join(filter(None, (found.reason, reason)))}


def kappas(arm: Arm, direction: str, seed: int) -> tuple[dict[str, float], str]:
    """(matrix -> log10 κ, "") of start.json, measured over training pairs; or ({}, reason)."""
    start = arm.starts.get(seed)
    if not start:
        return {}, "nothing was measured before training"
    section, reason = value_at(start, ["fisher", direction])  # over training pairs, of which there are enough
    if isinstance(section, dict) and section.get("status") == "undetermined":
        return {}, f"κ is undetermined: {section.get('reason')}"
    told = {name: value_at(section, [name, "log10_kappa", "value"])[0] for name in MATRICES}
    found = {name: float(value) for name, value in told.items() if is_number(value)}
    return found, "" if found else reason or "start.json holds no κ of this direction"


def kappa_verdicts(rows: Sequence[Json]) -> list[Json]:
    """How often "normalize the side of the larger κ" and its opposite say which norm wins, for raw and for normalized
    matrices: {"matrices", "n", "larger", "smaller", "p", "noise", "constant"}.

    qnorm normalizes the query's side, dnorm the document's. n: rows with κ and a winner beyond noise; noise: rows with
    κ and none. p: two-sided sign test, as if rows were independent, which seeds of one setting are not. constant: the
    prediction is the same in every row, and then nothing speaks for κ more than for always naming that norm.
    """
    found = []
    for kind in ("raw", "normalized"):
        names = [f"log10_kappa_{role}_{kind}" for role in ("query", "document")]
        told = [row for row in rows if all(is_number(row.get(name)) for name in names)]
        told = [row for row in told if row[names[0]] != row[names[1]]]
        decided = [row for row in told if row["winner"] in ("qnorm", "dnorm")]
        larger = ["qnorm" if row[names[0]] > row[names[1]] else "dnorm" for row in decided]
        agree = sum(guess == row["winner"] for guess, row in zip(larger, decided, strict=True))
        n = len(decided)
        found.append(
            {"matrices": kind, "n": n, "larger": agree, "smaller": n - agree, "p": sign_test(agree, n)}
            | {"noise": len(told) - n, "constant": len(set(larger)) == 1}
        )
    return found
