"""A text study's tables that describe: retrieval, differences to cosine, lengths, κ before training, what ran."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mmclip.evaluation.diagnostics import value_at
from mmclip.evaluation.results import NATIVE, Results
from mmclip.reporting.table import is_number
from mmclip.study.judgements import MATRICES
from mmclip.study.numbers import Estimate, spread
from mmclip.study.sheets import Sheet, estimate_columns, reasons, spread_columns
from mmclip.study.text_numbers import Scored, TextStudy
from mmclip.study.text_study import EVALUATIONS, Q2D, SHOWN, TextArm

Json = dict[str, Any]
UNTRAINED = "untrained"
SCORINGS = (NATIVE, "cosine")
QUESTIONS = ("q2d", "titles")  # whose κ start.json may hold: the training queries', and titles as queries


def retrieval(study: TextStudy) -> Sheet:
    """Every arm natively and by cosine, a row a data set: means over seeds, their range, intervals over queries and
    seeds; before them the untrained model, whose intervals are over queries."""
    rows = []
    for data in study.data:
        rows += [_untrained(study, data, scoring) for scoring in ("cosine", "dot")]
        for arm in (a for a in study.arms if data in a.runs):
            for scoring in SCORINGS:
                row: Json = {"data": data, "arm": arm.name, "scoring": scoring}
                found = {m: study.mean(Scored(arm, data, scoring, m)) for m in SHOWN}
                row["n_seeds"] = found[SHOWN[0]].n_seeds
                for metric, estimate in found.items():
                    each = [r.json["retrieval"][Q2D][scoring][metric] for r in arm.runs[data].values()]
                    row |= estimate_columns(metric, estimate)
                    row |= {f"{metric}_min": min(each), f"{metric}_max": max(each)}
                rows.append(row | {"reason": reasons(**found)})
    return Sheet("retrieval", ("data", "arm", "scoring", "n_seeds"), rows)


def _untrained(study: TextStudy, data: str, scoring: str) -> Json:
    row: Json = {"data": data, "arm": UNTRAINED, "scoring": scoring, "n_seeds": None}
    for start in starts(study):
        section = start if data == study.data[0] else (start.get(EVALUATIONS) or {}).get(data) or {}
        found = ((section.get("retrieval") or {}).get(Q2D) or {}).get(scoring)
        if found:
            for metric in SHOWN:
                lo, hi = (found.get("ci") or {}).get(metric) or (None, None)
                row |= {metric: found.get(metric), f"{metric}_lo": lo, f"{metric}_hi": hi}
            return row
    return row | {"reason": "no run measured this data set before training"}


def starts(study: TextStudy) -> Iterable[Json]:
    """What was measured before training: all arms start from the same weights."""
    return (start for arm in study.arms for start in arm.starts.values() if start)


def differences(study: TextStudy) -> Sheet:
    """Every other norm less its cosine arm's native, natively and by cosine scoring, paired over queries and seeds,
    with the smallest detectable effect."""
    rows = []
    for family in study.families():
        baseline = family["cosine"]
        for data in study.data:
            for norm, arm in family.items():
                for scoring in SCORINGS if norm != "cosine" else ():
                    row: Json = {"data": data, "arm": arm.name, "norm": norm, "scoring": scoring}
                    row["baseline"] = baseline.name
                    found = {
                        m: study.difference(Scored(arm, data, scoring, m), Scored(baseline, data, NATIVE, m))
                        for m in SHOWN
                    }
                    row["n_seeds"] = found[SHOWN[0]].n_seeds
                    for metric, estimate in found.items():
                        row |= estimate_columns(metric, estimate) | {f"{metric}_smallest": estimate.smallest}
                    rows.append(row | {"reason": reasons(**found)})
    return Sheet("differences", ("data", "arm", "norm", "scoring", "baseline", "n_seeds"), rows)


def magnitude(study: TextStudy) -> Sheet:
    """Lengths of every arm on every data set: d of the documents', CV of both sides, length and relevance count, γ, the
    effective scale. ± (sd) and ranges are over seeds, intervals as TextStudy.documents has them."""
    rows = []
    for data in study.data:
        for arm in (a for a in study.arms if data in a.runs):
            runs = list(arm.runs[data].values())
            told = {what: study.documents(data, what, arm) for what in ("corpus", "count")}
            row: Json = {"data": data, "arm": arm.name, "n_seeds": len(runs)}
            row |= estimate_columns("d_corpus", told["corpus"])
            row |= spread_columns("d_topk", spread(_at(r, "magnitude document cohens_d topk value") for r in runs))
            for side in ("query", "document"):
                row |= spread_columns(f"cv_{side}", spread(_at(r, f"magnitude {side} cv") for r in runs))
            row |= estimate_columns("relevance_count", told["count"])
            for gamma in ("gamma_q", "gamma_d"):
                row |= spread_columns(gamma, spread(_at(r, f"evaluation native {gamma}") for r in runs))
            scale = f"diagnostics {Q2D} scale effective_scale"
            row |= spread_columns("effective_scale", spread(_at(r, scale) for r in runs))
            row |= spread_columns("seconds", spread(arm.seconds.values()))
            rows.append(row | {"reason": reasons(d_corpus=told["corpus"], relevance_count=told["count"])})
    return Sheet("magnitude", ("data", "arm", "n_seeds"), rows)


def _at(run: Results, path: str) -> Any:
    return value_at(run.json, path.split())[0]


def delta_cv(study: TextStudy) -> Sheet:
    """CV of query lengths trained with dnorm over that with dot, a row a data set and family."""
    rows = []
    for family in study.families():
        for data in study.data:
            found = delta_cv_of(study, family, data)
            row: Json = {"data": data, "baseline": family["cosine"].name, "n_seeds": found.n_seeds}
            row |= estimate_columns("delta_cv", found) | {"delta_cv_smallest": found.smallest}
            rows.append(row | {"reason": found.reason})
    return Sheet("delta_cv", ("data", "baseline", "n_seeds"), rows)


def delta_cv_of(study: TextStudy, family: dict[str, TextArm], data: str) -> Estimate:
    if "dnorm" not in family or "dot" not in family:
        return Estimate.missing("no dnorm arm beside a dot arm")
    return study.delta_cv(data, family["dnorm"], family["dot"])


def fisher(study: TextStudy) -> Sheet:
    """log10 κ before training, of every question that start.json holds; "undetermined" with its reason."""
    rows = []
    for start in starts(study):
        for question in QUESTIONS:
            section = (start.get("fisher") or {}).get(question)
            row: Json = {"question": question}
            if not isinstance(section, dict):
                rows.append(row | {"status": "not measured", "reason": f"start.json holds no κ of {question}"})
                continue
            row |= {k: section.get(k) for k in ("status", "n_available", "n_needed", "n", "dim", "effective_scale")}
            for name in MATRICES:
                found, _ = value_at(section, [name, "log10_kappa"])
                kappa = found if isinstance(found, dict) and is_number(found.get("value")) else {}
                lo, hi = kappa.get("ci") or (None, None)
                row |= {f"log10_kappa_{name}": kappa.get("value")}
                row |= {f"log10_kappa_{name}_lo": lo, f"log10_kappa_{name}_hi": hi}
            rows.append(row | {"reason": section.get("reason") or ""})
        break  # the untrained model is the same in all
    return Sheet("fisher", ("question", "status", "n_available", "n_needed", "dim"), rows)


def runs(study: TextStudy) -> Sheet:
    """Every finished run: its native nDCG@10 by data set, γ at the end, effective scale, seconds."""
    rows = []
    for arm in study.arms:
        for seed in arm.seeds:
            row: Json = {"arm": arm.name, "seed": seed, "seconds": arm.seconds.get(seed)}
            for data in study.data:
                run = arm.runs.get(data, {}).get(seed)
                if run is None:
                    continue
                for metric in SHOWN:
                    row[f"{metric}_{data}"] = _at(run, f"retrieval {Q2D} {NATIVE} {metric}")
                row |= {g: _at(run, f"evaluation native {g}") for g in ("gamma_q", "gamma_d")}
                row[f"effective_scale_{data}"] = _at(run, f"diagnostics {Q2D} scale effective_scale")
            rows.append(row)
    return Sheet("runs", ("arm", "seed", "seconds"), rows)
