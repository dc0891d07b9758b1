"""A study's tables: records of plain values, which their CSV files hold, and how a page or a terminal shows them.

Columns follow a convention: NAME_mean and NAME_sd over seeds, NAME with NAME_lo and NAME_hi of an estimate. Titles,
heads and shown columns are data: ``tables`` of configs/claims/*.yaml.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import yaml
from braceexpand import braceexpand

from mmclip.config.parser import CONFIGS
from mmclip.errors import printable
from mmclip.evaluation.diagnostics import value_at
from mmclip.evaluation.results import CORRECTED, NATIVE, REVERSED
from mmclip.metrics.bootstrap import Estimate
from mmclip.reporting.table import Cell, Table, is_number, rate, signed, span, text_cell
from mmclip.roles import CLIP_DIRECTIONS, LOSS_WEIGHTS
from mmclip.study.arms import Arm
from mmclip.study.estimates import Score, Spread, Study, reported, spread
from mmclip.study.plan import CLIP, COSMETIC, EVALUATIONS, MEASURING, TEXT, Kind

Json = dict[str, Any]
Record = Mapping[str, Any]  # values, Spreads and Estimates by name
DIRECTIONS = CLIP.directions
SIDES = ("image", "text")
SCORINGS = ("cosine", "dot", "qnorm", "dnorm", NATIVE, REVERSED, CORRECTED)
MATRICES = tuple(f"{role}_{kind}" for role in ("query", "document") for kind in ("raw", "normalized"))
KEPT = 0.95  # share of sym/cosine's success@1 that a direction must keep, by the interval's lower end
WORDS = {True: "yes", False: "not shown", None: "open"}
NO_BASELINE = Estimate.missing("no baseline: a sym/cosine arm on the same data")
# Settings that differ within an arm, or do not make it what it is
OF_A_RUN = (*COSMETIC, *MEASURING, "seed", "init_from", "loss", "i2t_weight")
SIGNED = ("minus", "difference", "gain", "change", "d_topk", "d_corpus", "d_arm", "d_control", "count")
UP, DOWN = ("yes", "Yes", "reproduced", "clean"), ("no", "No", "not reproduced", "found")


@dataclass
class StudyTable:
    """Records under the name of their CSV file, and their view.

    Attributes:
        records: plain values by column; "reason" says why values are missing.
        layout: "title", "first" columns of the file, "head" (format of a record's row head, its explanation in a second
            line) and "shown", the columns of the view; "NAME/OTHER" has another value beside it.
    """

    name: str
    records: list[Json]
    layout: Json

    def view(self) -> Table:
        """Rounded numbers with their intervals; notes say what is missing and why."""
        shown = [name for part in self.layout["shown"].split() for name in braceexpand(part)]
        rows, missing = [], dict[str, list[str]]()
        for record in self.records:
            words = {k: text_cell(v, 160).text for k, v in record.items()}
            head = self.layout.get("head", "{arm}").format_map(words)
            rows.append((head, [_cell(record, name) for name in shown]))
            if record.get("reason"):
                missing.setdefault(record["reason"], []).append(head.partition("\n")[0])
        notes = [printable(f"{', '.join(dict.fromkeys(names))}: {why}.", 400) for why, names in missing.items()]
        heads = (name.partition("/")[0].replace("success@1_", "").replace("_minus_", " less ") for name in shown)
        return Table(self.layout["title"], ["", *(head.replace("_", " ") for head in heads)], rows, notes)

    def file(self) -> Table:
        return Table.of_records(self.layout["title"], self.records, self.layout["first"].split())


def _cell(record: Json, name: str) -> Cell:
    """A column's cell by the convention of its names; differences are signed and marked by their side of no effect."""
    name, _, other = name.partition("/")
    value = record.get(f"{name}_mean", record.get(name))
    beside = _cell(record, other).text if is_number(record.get(other)) else ""
    if not is_number(value):
        cell = text_cell(value, 200)
        cell.kind = cell.kind or ("up" if cell.text in UP else "down" if cell.text in DOWN else "")
        return cell
    ratio, sign = "ratio" in name or name == "delta_cv", any(part in name for part in SIGNED)
    text = signed(value) if sign else rate(value) if isinstance(value, float) and abs(value) < 10 else f"{value:.0f}"
    if beside and other.startswith("paper"):
        text, beside = f"{text} / {beside}", ""
    beside = beside and f"detectable {beside}"
    sd, lo, hi = (record.get(f"{name}_{end}") for end in ("sd", "lo", "hi"))
    if not is_number(lo) or not is_number(hi):
        return Cell(text, " ".join(filter(None, (f"±{rate(sd)}" if is_number(sd) else "", beside))))
    around = (KEPT if "ratio" in name else 1.0) if ratio else 0.0
    side: Literal["up", "down", "noise"] = "up" if lo > around else "down" if hi < around else "noise"
    return Cell(text, " · ".join(filter(None, (span([lo, hi]), beside))), side if ratio or sign else "")


def plain_values(record: Record) -> Json:
    """A record with the columns of its Spreads and Estimates.

    >>> plain_values({"x": Spread(1.0, None, 1), "y": Estimate.missing("no arm")})
    {'x_mean': 1.0, 'x_sd': None, 'y': None, 'y_lo': None, 'y_hi': None}
    """
    row: Json = {}
    for name, value in record.items():
        if isinstance(value, Spread):
            row |= {f"{name}_mean": value.mean, f"{name}_sd": value.sd}
        elif isinstance(value, Estimate):
            row |= {name: value.value, f"{name}_lo": value.lo, f"{name}_hi": value.hi}
        else:
            row[name] = value
    return row


def reasons(result: Mapping[str, Estimate]) -> str:
    """Why values do not exist: "ratio: no seed of ...", equal reasons once."""
    names: dict[str, list[str]] = {}
    for name, estimate in result.items():
        if estimate.reason:
            names.setdefault(estimate.reason, []).append(name)
    return "; ".join(f"{', '.join(of)}: {reason}" for reason, of in names.items())


def records_of(rows: Callable[[Study], Iterator[Record]], study: Study) -> list[Json]:
    """Plain values of a table below."""
    return [plain_values(row) for row in rows(study)]


@cache
def load_claims(kind: Kind) -> Json:
    """The paper's claims and numbers, and the layout of tables: configs/claims/NAME.yaml."""
    content: Json = yaml.safe_load((CONFIGS / "claims" / f"{kind.name}.yaml").read_text(encoding="utf-8"))
    return content


def at(document: Json, path: str) -> Any:
    """A number of results.json or start.json, None where it does not exist."""
    value = value_at(document, path.split())[0]
    return value if is_number(value) else None


def over_seeds(arm: Arm | None, path: str, data: str = "") -> Spread:
    """A number of results.json over an arm's seeds."""
    return spread(at(run.json, path) for run in (arm.results(data) if arm else {}).values())


def settings_of(arm: Arm) -> Json:
    row = {"arm": arm.name, "loss": arm.settings["loss"], "i2t_weight": arm.i2t_weight, "norm": arm.settings["norm"]}
    row |= {"curriculum": arm.loss_options, "train_fraction": arm.fraction, "permute_pairs": arm.permuted}
    return row | {"initial": arm.start}


def alike(arm: Arm, arms: Iterable[Arm], norm: str) -> list[Arm]:
    """Arms with another normalization and all else the same, but names and seeds."""
    return [o for o in arms if o.settings["norm"] == norm and _group(o, "norm") == _group(arm, "norm")]


def _group(arm: Arm, without: str) -> Json:
    """Settings that make an arm what it is; λ stands for the loss."""
    values = {**arm.settings, "initial": arm.start, "lambda": arm.i2t_weight}
    return {k: v for k, v in values.items() if k not in (*OF_A_RUN, without)}


# --- CLIP -------------------------------------------------------------------------------------------------------------


def frontier(study: Study) -> Iterator[Record]:
    """An arm natively in both directions; and corrected where the direction was not trained, or in both directions of
    an arm that trained both."""
    for (number, arm), point in itertools.product(enumerate(study.arms, 1), (NATIVE, CORRECTED)):
        row: Json = {"number": number} | settings_of(arm) | {"point": point, "n_seeds": len(arm.seeds)}
        for d in DIRECTIONS:
            score = Score(arm, d, point if len(arm.trained) == 2 or point == NATIVE else arm.served(d))
            result = study.mean(score)
            row |= {f"{d}_scoring": score.scoring, d: study.spread(score), f"{d}_lo": result.lo, f"{d}_hi": result.hi}
        yield row


def table6(study: Study) -> Iterator[Record]:
    """The paper's six configurations first, then every other arm; its numbers beside them, rates as fractions."""

    def row(arm: Arm | None, paper: Json) -> Record:
        about = arm.settings if arm else paper
        row: Json = {"paper_config": paper.get("name"), "loss": about["loss"], "norm": about["norm"]}
        row |= {"arm": arm and arm.name, "n_seeds": len(arm.seeds) if arm else 0}
        for side in SIDES:
            row[f"d_topk_{side}"] = over_seeds(arm, f"magnitude {side} cohens_d topk value")
            row[f"paper_d_{side}"] = paper.get(f"d_{side}")
        for s, d in itertools.product(("cosine", "dot"), DIRECTIONS):
            row[f"success@1_{s}_{d}"] = study.spread(Score(arm, d, s)) if arm else spread([])
            row[f"paper_R@1_{s}_{d}"] = paper[f"{s}_{d}"] / 100 if paper else None
        return row | {"reason": "" if arm else "no arm of this study"}

    rest = list(study.arms)
    for paper in load_claims(study.kind)["table6"]:
        setting = (LOSS_WEIGHTS[paper["loss"]], paper["norm"])
        mine = [a for a in rest if study.is_plain(a) and (a.i2t_weight, a.settings["norm"]) == setting]
        rest = [arm for arm in rest if arm not in mine]
        yield from (row(arm, paper) for arm in (*mine, *[None] * (not mine)))
    yield from (row(arm, {}) for arm in rest)


def keeps_both(study: Study) -> Iterator[Record]:
    """Whether both directions keep ``KEPT`` of sym/cosine's native success@1, by the lower ends of paired ratios.

    How an arm is served is a rule and not the better result: a trained direction natively and an untrained one
    corrected; an arm trained both ways natively, corrected, or one direction so and the other so, each in a record of
    its own. Records without ``by_rule`` show what a one-sided arm keeps without the correction and decide nothing.
    """
    for arm in study.arms:
        baseline = study.baseline(arm)
        ways = [(NATIVE, len(arm.trained) == 2, (NATIVE, NATIVE))]
        if len(arm.trained) == 1:
            ways += [("native where trained, else corrected", True, (arm.served("i2t"), arm.served("t2i")))]
        else:
            ways += [
                (CORRECTED, True, (CORRECTED, CORRECTED)),
                ("i2t corrected, t2i native", True, (CORRECTED, NATIVE)),
            ]
            ways += [("t2i corrected, i2t native", True, (NATIVE, CORRECTED))]
        for served, by_rule, scorings in ways:
            row: Json = {"arm": arm.name, "served": served, "by_rule": by_rule, "null": arm.permuted}
            row |= {"baseline": baseline and baseline.name}
            for d, s in zip(DIRECTIONS, scorings, strict=True):
                row[f"{d}_scoring"] = s
                for to in (NATIVE, CORRECTED):
                    ratio = study.ratio(Score(arm, d, s), Score(baseline, d, to)) if baseline else NO_BASELINE
                    row[f"{d}_ratio_to_{to}"] = ratio
            result: dict[str, Estimate] = {d: row[f"{d}_ratio_to_{NATIVE}"] for d in DIRECTIONS}
            ends = [ratio.lo for ratio in result.values() if ratio.lo is not None]
            lowest = min(ends) if len(ends) == len(result) else None
            row |= {"n_seeds": result["t2i"].n_seeds, "lowest_end": lowest}
            yield row | {"keeps_both": None if lowest is None else lowest >= KEPT, "reason": reasons(result)}


def verdicts(study: Study) -> Iterator[Record]:
    """Learned and useful in each trained direction of every arm whose documents keep some norm, nulls among them."""
    for arm in study.arms:
        if all(run.json["evaluation"]["native"]["gamma_d"] == 1 for run in arm.results().values()):
            continue
        for d in arm.trained:
            result = study.verdict(arm, d)
            learned, useful = result.get("learned") or {}, result.get("useful") or {}
            row: Json = {"arm": arm.name, "direction": d, "null": arm.permuted}
            row |= {key: result[key] for key in ("control", "baseline", "n_seeds")}
            row |= {"learned": WORDS[learned["verdict"]] if learned else "", "d_arm": learned.get("d_run")}
            row |= {"d_control": learned.get("d_control"), "d_difference": reported(learned)}
            row |= {"useful": WORDS[useful["verdict"]] if useful else ""}
            row |= {"native_minus_cosine": reported(useful, "native_minus_cosine_run")}
            row |= {"dot_minus_cosine_control": useful.get("dot_minus_cosine_control")}
            row |= {"gain_over_control": reported(useful.get("gain"))}
            row |= {"native_minus_baseline_cosine": reported(useful.get("native_minus_baseline_cosine"))}
            row |= {"learned_sentence": learned.get("sentence"), "useful_sentence": useful.get("sentence")}
            yield row | {"reason": result.get("reason", "")}


def correction(study: Study) -> Iterator[Record]:
    """Gain of the correction over the trained scores read in reverse, and over sym/cosine's native."""
    for arm, d in itertools.product(study.arms, DIRECTIONS):
        corrected, baseline = Score(arm, d, CORRECTED), study.baseline(arm)
        gain = study.difference(corrected, Score(arm, d, REVERSED))
        if gain.value is None and arm.trained == [d]:
            continue  # its opposite was not trained: there is nothing to read in reverse
        beside = study.difference(corrected, Score(baseline, d)) if baseline else NO_BASELINE
        result = {"corrected_minus_reversed": gain, "corrected_minus_baseline_native": beside}
        row: Json = {"arm": arm.name, "direction": d, "trained": d in arm.trained, "null": arm.permuted}
        row |= {"n_seeds": gain.n_seeds, "baseline": baseline and baseline.name}
        row |= {s: study.spread(Score(arm, d, s)) for s in (NATIVE, REVERSED, CORRECTED)}
        yield row | result | {"reason": reasons(result)}


def matrix(study: Study) -> Iterator[Record]:
    """success@1: trained with, down; scored with, across."""
    for arm, d in itertools.product(study.arms, DIRECTIONS):
        row = {"arm": arm.name, "direction": d, "trained": d in arm.trained, "n_seeds": len(arm.seeds)}
        yield row | {s: study.spread(Score(arm, d, s)) for s in SCORINGS}


def gamma(study: Study) -> Iterator[Record]:
    """γ at every logged step of the arms in which it moves."""
    for arm in study.arms:
        for seed, lines in sorted(arm.logs.items()):
            steps = [r for r in lines if is_number(r.get("gamma_q")) and is_number(r.get("gamma_d"))]
            if len({(r["gamma_q"], r["gamma_d"]) for r in steps}) > 1:
                for r in steps:
                    yield {"arm": arm.name, "seed": seed} | {k: r[k] for k in ("step", "gamma_q", "gamma_d")}


def cv(study: Study) -> Iterator[Record]:
    """CV of either side's norms."""
    for arm in study.arms:
        result = {f"cv_{side}": over_seeds(arm, f"magnitude {side} cv") for side in SIDES}
        yield settings_of(arm) | {"n_seeds": len(arm.seeds)} | result


def delta_cv(study: Study) -> Iterator[Record]:
    """The paper's ΔCV = CV(dnorm-trained) / CV(dot-trained) on the query's side, seed by seed, wherever both exist."""
    for dnorm in (arm for arm in study.arms if arm.settings["norm"] == "dnorm"):
        trained = [d for d in CLIP_DIRECTIONS if d.value in dnorm.trained]
        for dot, direction in itertools.product(alike(dnorm, study.arms, "dot"), trained):
            path = f"magnitude {direction.query_side} cv"
            pairs = [[at(a.results()[s].json, path) for a in (dnorm, dot)] for s in dnorm.seeds_with(dot)]
            result = spread(a / b for a, b in pairs if a is not None and b)
            row = {"i2t_weight": dnorm.i2t_weight, "direction": direction.value, "query_side": direction.query_side}
            yield row | {"dnorm_arm": dnorm.name, "dot_arm": dot.name, "n_seeds": result.n, "delta_cv": result}


def pretrained(study: Study) -> Iterator[Record]:
    """Arms that start from trained weights: against the same setting from their model's own start, and what zero-shot
    classification loses by the training, seed by seed."""

    def before(arm: Arm, seed: int, path: str) -> Any:
        """Of start.json, else of the run that it starts from."""
        source = next((a.results().get(seed) for a in study.arms if a.name == arm.initial), None)
        value = at(arm.starts.get(seed) or {}, path)
        return at(source.json, path) if value is None and source else value

    missing = Estimate.missing("no arm of this loss and normalization from random weights")
    same = ("i2t_weight", "norm", "curriculum", "train_fraction", "permute_pairs")
    for arm in (a for a in study.arms if a.start is not None):
        own = settings_of(arm)
        scratch = (a for a in study.arms if a.start is None and all(settings_of(a)[k] == own[k] for k in same))
        other, result = next(scratch, None), {}
        row = own | {"from_random": other and other.name, "n_seeds": len(arm.seeds)}
        for d in DIRECTIONS:
            beside = study.difference(Score(arm, d), Score(other, d)) if other else missing
            result[f"minus_from_random_{d}"] = beside
            row |= {f"success@1_native_{d}": study.spread(Score(arm, d)), f"minus_from_random_{d}": beside}
        for s in (NATIVE, "cosine"):
            path = f"zero_shot acc1 {s}"
            pairs = [(before(arm, seed, path), at(run.json, path)) for seed, run in arm.results().items()]
            known = [(a, b) for a, b in pairs if a is not None and b is not None]
            row |= {
                f"zero_shot_before_{s}": spread(a for a, _ in known),
                f"zero_shot_after_{s}": spread(b for _, b in known),
            }
            row[f"zero_shot_change_{s}"] = spread(b - a for a, b in known)
            row[f"zero_shot_{s}_n"] = len(known)
        yield row | {"reason": reasons(result)}


def fractions(study: Study) -> Iterator[Record]:
    """success@1 by the share of the training data, for settings that were trained on several."""
    groups: dict[str, list[Arm]] = {}
    for arm in study.arms:
        groups.setdefault(repr(_group(arm, "train_fraction")), []).append(arm)
    for members in (m for m in groups.values() if len({arm.fraction for arm in m}) > 1):
        arms, name = sorted(members, key=lambda a: a.fraction), max(members, key=lambda a: a.fraction).name
        for arm, d, s in itertools.product(arms, DIRECTIONS, (NATIVE, CORRECTED)):
            result = study.mean(Score(arm, d, s))
            row = {"setting": name} | settings_of(arm) | {"direction": d, "scoring": s, "n_seeds": len(arm.seeds)}
            row |= {"success@1": study.spread(Score(arm, d, s))}
            yield row | {"success@1_lo": result.lo, "success@1_hi": result.hi}


def fisher(study: Study) -> Iterator[Record]:
    """κ of a trained direction and seed, and which of qnorm and dnorm won.

    κ is the start of the cosine arm of the same setting where there is one (so that the other role is a unit vector in
    all four matrices), else of the qnorm or the dnorm arm; "kappa_of" says which.
    """
    for qnorm in (a for a in study.arms if a.settings["norm"] == "qnorm" and not a.permuted):
        for dnorm in alike(qnorm, study.arms, "dnorm"):
            starts = [*alike(qnorm, study.arms, "cosine"), qnorm, dnorm]
            for d, seed in itertools.product(qnorm.trained, qnorm.seeds_with(dnorm)):
                result = study.difference(Score(qnorm, d), Score(dnorm, d), [seed])
                winner = "qnorm" if result.above(0) else "dnorm" if result.below(0) else "within noise"
                of = next((a for a in starts if kappas(a, d, seed)[0]), None)
                kappa, why = kappas(of or starts[0], d, seed)
                row: Json = {k: settings_of(qnorm)[k] for k in ("i2t_weight", "train_fraction", "initial")}
                row |= {"direction": d, "seed": seed, "qnorm_arm": qnorm.name, "dnorm_arm": dnorm.name}
                row |= {"qnorm_minus_dnorm": result, "winner": None if result.lo is None else winner}
                row |= {"kappa_of": of and of.name} | {f"log10_kappa_{name}": kappa.get(name) for name in MATRICES}
                yield row | {"reason": "; ".join(filter(None, (result.reason, why)))}


def kappas(arm: Arm, direction: str, seed: int) -> tuple[dict[str, float], str]:
    """(matrix -> log10 κ, "") of start.json, measured over training pairs; or ({}, reason)."""
    if not arm.starts.get(seed):
        return {}, "nothing was measured before training"
    section, why = value_at(arm.starts[seed], ["fisher", direction])
    if isinstance(section, dict) and section.get("status") == "undetermined":
        return {}, f"κ is undetermined: {section.get('reason')}"
    values = {name: at(section or {}, f"{name} log10_kappa value") for name in MATRICES}
    result = {name: float(value) for name, value in values.items() if value is not None}
    return result, "" if result else why or "start.json holds no κ of this direction"


def cells(study: Study) -> Iterator[Record]:
    """Every run."""
    for arm in study.arms:
        for seed, run in sorted(arm.results().items()):
            trained, start = run.json["trained_with"], arm.starts.get(seed) or {}
            row = settings_of(arm) | {"seed": seed} | {g: trained.get(g) for g in ("gamma_q", "gamma_d")}
            row |= {"steps": (arm.logs.get(seed) or [{}])[-1].get("step"), "seconds": arm.seconds.get(seed)}
            for d, s, k in itertools.product(DIRECTIONS, SCORINGS, (1, 5, 10)):
                row[f"success@{k}_{s}_{d}"] = study.rate(run, d, s, f"success@{k}")
            for side in SIDES:
                path = f"magnitude {side} cohens_d"
                row[f"d_topk_{side}"] = at(run.json, f"{path} topk value")
                row[f"cv_{side}"] = at(run.json, f"magnitude {side} cv")
                corpus = ((at(section, f"{path} corpus value"), pool) for pool, section in run.pools.items())
                first = next((pair for pair in corpus if pair[0] is not None), (None, None))
                row[f"d_corpus_{side}"], row[f"d_corpus_{side}_pool"] = first
            row |= {f"effective_scale_{d}": trained.get(f"effective_scale_{d}") for d in DIRECTIONS}
            for s in (NATIVE, "cosine"):
                row[f"zero_shot_acc1_{s}"] = at(run.json, f"zero_shot acc1 {s}")
                row[f"zero_shot_before_acc1_{s}"] = at(start, f"zero_shot acc1 {s}")
            yield row


# --- text -------------------------------------------------------------------------------------------------------------


def differences(study: Study) -> Iterator[Record]:
    """Every other norm less its cosine arm's native, natively and by cosine scoring, paired over queries and seeds."""
    for family, data in itertools.product(study.families(), study.data):
        cosine = family["cosine"]
        for (norm, arm), s in itertools.product(list(family.items())[1:], (NATIVE, "cosine")):
            result = {
                m: study.difference(Score(arm, "q2d", s, data, m), Score(cosine, "q2d", NATIVE, data, m))
                for m in TEXT.metrics
            }
            row: Json = {"data": data, "arm": arm.name, "norm": norm, "scoring": s, "baseline": cosine.name}
            row |= {"n_seeds": result[TEXT.metrics[0]].n_seeds} | result
            yield row | {f"{m}_smallest": e.smallest for m, e in result.items()} | {"reason": reasons(result)}


def retrieval(study: Study) -> Iterator[Record]:
    """Every arm natively and by cosine on each data set: means and ranges over seeds, intervals over queries and seeds;
    before them the untrained model, whose intervals are over queries."""
    for data in study.data:
        yield from (_untrained(study, data, s) for s in ("cosine", "dot"))
        for arm, s in itertools.product((a for a in study.arms if data in a.runs), (NATIVE, "cosine")):
            result = {m: study.mean(Score(arm, "q2d", s, data, m)) for m in TEXT.metrics}
            row: Json = {
                "data": data,
                "arm": arm.name,
                "scoring": s,
                "n_seeds": result[TEXT.metrics[0]].n_seeds,
            } | result
            for m in TEXT.metrics:
                each = [run.json["retrieval"]["q2d"][s][m] for run in arm.results(data).values()]
                row |= {f"{m}_min": min(each), f"{m}_max": max(each)}
            yield row | {"reason": reasons(result)}


def _starts(study: Study) -> Iterator[Json]:
    """Evaluations before training, all of the same weights."""
    return (start for arm in study.arms for start in arm.starts.values() if start)


def _untrained(study: Study, data: str, scoring: str) -> Record:
    row: Json = {"data": data, "arm": "untrained", "scoring": scoring, "n_seeds": None}
    for start in _starts(study):
        section = start if data == study.data[0] else (start.get(EVALUATIONS) or {}).get(data) or {}
        if result := value_at(section, ["retrieval", "q2d", scoring])[0]:
            cis = {m: (result.get("ci") or {}).get(m) or (None, None) for m in TEXT.metrics}
            return row | {m: Estimate(result.get(m), lo, hi, 1) for m, (lo, hi) in cis.items()}
    return row | {"reason": "no run measured this data set before training"}


def magnitude(study: Study) -> Iterator[Record]:
    """Norms of every arm on every data set: d of the documents', CV of both sides, norm and relevance count, γ."""
    for data, arm in ((data, a) for data in study.data for a in study.arms if data in a.runs):
        corpus, count = (study.documents(data, what, arm) for what in ("corpus", "count"))
        row: Json = {"data": data, "arm": arm.name, "n_seeds": len(arm.results(data)), "d_corpus": corpus}
        row |= {"d_topk": over_seeds(arm, "magnitude document cohens_d topk value", data)}
        row |= {f"cv_{side}": over_seeds(arm, f"magnitude {side} cv", data) for side in ("query", "document")}
        row |= {"relevance_count": count}
        row |= {name: over_seeds(arm, f"evaluation native {name}", data) for name in ("gamma_q", "gamma_d")}
        row |= {"effective_scale": over_seeds(arm, "diagnostics q2d scale effective_scale", data)}
        row |= {"seconds": spread(arm.seconds.values())}
        yield row | {"reason": reasons({"d_corpus": corpus, "relevance_count": count})}


def text_delta_cv(study: Study) -> Iterator[Record]:
    """CV of query norms trained with dnorm over that with dot."""
    for family, data in itertools.product(study.families(), study.data):
        result = study.delta_cv(data, family)
        row = {"data": data, "baseline": family["cosine"].name, "n_seeds": result.n_seeds, "delta_cv": result}
        yield row | {"delta_cv_smallest": result.smallest, "reason": result.reason}


def text_fisher(study: Study) -> Iterator[Record]:
    """κ of the training's queries, and of titles as queries."""
    start = next(_starts(study), {})
    for question in ("q2d", "titles") if start else ():
        section = (start.get("fisher") or {}).get(question)
        if not isinstance(section, dict):
            why = f"start.json holds no κ of {question}"
            yield {"question": question, "status": "not measured", "reason": why}
            continue
        row: Json = {"question": question}
        row |= {k: section.get(k) for k in ("status", "n_available", "n_needed", "n", "dim", "effective_scale")}
        for name in MATRICES:
            kappa = (section.get(name) or {}).get("log10_kappa") or {}
            lo, hi = kappa.get("ci") or (None, None)
            row[f"log10_kappa_{name}"] = Estimate(kappa.get("value"), lo, hi, 1)
        yield row | {"reason": section.get("reason") or ""}


def runs(study: Study) -> Iterator[Record]:
    """Every run: its native numbers by data set, γ at the end, effective scale, seconds."""
    for arm, seed in ((a, seed) for a in study.arms for seed in a.seeds):
        row: Json = {"arm": arm.name, "seed": seed, "seconds": arm.seconds.get(seed)}
        for data, run in ((data, run) for data in study.data if (run := arm.results(data).get(seed)) is not None):
            row |= {f"{m}_{data}": study.rate(run, "q2d", NATIVE, m) for m in TEXT.metrics}
            row |= {g: at(run.json, f"evaluation native {g}") for g in ("gamma_q", "gamma_d")}
            row[f"effective_scale_{data}"] = at(run.json, "diagnostics q2d scale effective_scale")
        yield row


Rows = Callable[[Study], Iterator[Record]]
_CLIP = (
    frontier,
    table6,
    keeps_both,
    verdicts,
    correction,
    matrix,
    gamma,
    cv,
    delta_cv,
    pretrained,
    fractions,
    fisher,
    cells,
)
_TEXT: dict[str, Rows] = {"delta_cv": text_delta_cv, "fisher": text_fisher, "runs": runs}
TABLES: dict[Kind, dict[str, Rows]] = {
    CLIP: {rows.__name__: rows for rows in _CLIP},
    TEXT: {rows.__name__: rows for rows in (differences, retrieval, magnitude)} | _TEXT,
}
