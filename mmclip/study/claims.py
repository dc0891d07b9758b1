"""The paper's claims, judged by rule from a study's arms. The claims are data: configs/claims/*.yaml.

Entries with a ``statistic`` (ratio or difference) are evaluated by ``compared``; the others name a function below.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from scipy.stats import binomtest

from mmclip.evaluation.results import NATIVE
from mmclip.metrics.bootstrap import Estimate
from mmclip.reporting.table import is_number
from mmclip.roles import Direction
from mmclip.study import tables
from mmclip.study.arms import Arm
from mmclip.study.estimates import Score, Study, reported
from mmclip.study.plan import CLIP
from mmclip.study.tables import MATRICES, StudyTable, load_claims, plain_values, records_of

Json = dict[str, Any]
REPRODUCED, NOT, UNDERPOWERED, MISSING = range(4)  # places in an entry's verdicts
NO_SUCH = Estimate.missing("the study has no such arms")
LOOP = ("directions", "trained", "started", "function", "data", "norms")  # entries with the same loop go side by side
Row = tuple[Json, int | str, Estimate, Json]  # words of the statement, place or word of the verdict, more columns


class Case(NamedTuple):
    """One judgement of a claim: its entry, the words of its statement, and the arms of a text study by norm."""

    study: Study
    entry: Json
    words: Json
    family: dict[str, Arm]

    @property
    def paper(self) -> float | None:
        """The paper's number, which the file may write as a quotient."""
        number = self.entry.get("paper")
        if isinstance(number, dict):
            number = number[next(self.words[k] for k in ("trained", "norm", "direction") if k in self.words)]
        above, _, below = str(number).partition("/")
        return None if number is None else float(above) / float(below or 1)

    def arm(self, side: Json) -> Arm | None:
        """The arm of a side of the entry, None where the study has none."""
        norm = side["norm"].format_map(self.words)
        if self.study.kind is not CLIP:
            return self.family.get(norm)
        return self.study.plain_arm(side.get("loss", "{loss}").format_map(self.words), norm)

    def score(self, side: Json) -> Score | None:
        arm, scoring = self.arm({"norm": "{norm}"} | side), side.get("scoring", NATIVE)
        if side.get("arm") == "started":
            arm = next(a for a in self.study.arms if a.name == self.words["arm"])
        data = self.study.data[0] if side.get("data") == "first" else self.words.get("data", "")
        return Score(arm, self.words["direction"], scoring, data) if arm else None

    def over(self, norm: str, other: str) -> Estimate:
        """Native of one norm less that of another."""
        after, before = (Score(self.family[n], "q2d", data=self.words["data"]) for n in (norm, other))
        return self.study.difference(after, before)


def judged(result: Estimate, entry: Json, paper: float | None = None) -> int:
    """Place of the verdict on an estimate, by an entry's "expected", "effect" and "refuted".

    >>> [judged(Estimate(x, x - 0.1, x + 0.1, 3), {"expected": "above 1"}, 1.2) for x in (1.2, 0.8, 1.05, 1.15)]
    [0, 1, 1, 0]
    """

    def lies(where: str) -> bool:
        side, bound = where.split()
        return result.above(float(bound)) if side == "above" else result.below(float(bound))

    if result.lo is None or result.hi is None:
        return MISSING if result.value is None else UNDERPOWERED
    if "refuted" in entry and lies(entry["refuted"]):
        return NOT
    if lies(entry["expected"]):
        return REPRODUCED
    side, bound = entry["expected"].split()
    effect = next(x for x in (entry.get("effect"), paper, bound) if x is not None)
    return NOT if lies(f"{'below' if side == 'above' else 'above'} {effect}") else UNDERPOWERED


def claims(study: Study) -> StudyTable:
    """A record a claim and direction (of text: norm and data set), "not asked" where the study has no arms for it."""
    file, clip = load_claims(study.kind), study.kind is CLIP
    records = []
    for case in (case for family in ([{}] if clip else study.families()) for case in _cases(study, family)):
        for words, verdict, result, more in FUNCTIONS[case.entry.get("function", "compared")](case):
            words = case.words | words
            smallest = result.smallest
            if "power" in file:
                smallest = None if result.lo is None else file["power"] * ((result.hi or 0.0) - result.lo) / 2
            row = {"claim": case.entry["id"], "statement": case.entry["statement"].format_map(words)}
            row |= {k: words.get(k, "") for k in (("direction",) if clip else ("data", "norm"))}
            row |= {"verdict": verdict if isinstance(verdict, str) else case.entry["verdicts"][verdict]}
            row |= plain_values({"value": result}) | {"n_seeds": result.n_seeds, "smallest_effect": smallest}
            row |= {"paper": case.paper} | ({} if clip else {"counts": ""}) | more | {"reason": result.reason}
            records.append(row if clip else row | {"baseline": case.family["cosine"].name})
    return StudyTable("claims", records, file["tables"]["claims"])


def _cases(study: Study, family: dict[str, Arm]) -> Iterator[Case]:
    file = load_claims(study.kind)
    for _, group in itertools.groupby(file["claims"], lambda entry: [entry.get(k) for k in LOOP]):
        entries = [{"verdicts": file["verdicts"]} | entry for entry in group]
        for words in _loop(study, entries[0]):
            for entry in entries:
                yield Case(study, entry, words | ({"direction": words["other"]} if "measured" in entry else {}), family)


def _loop(study: Study, entry: Json) -> Iterator[Json]:
    """Words of the statement, for each direction, arm, or data set and norm."""
    if study.kind is not CLIP:
        data = {"first": study.data[:1], "others": study.data[1:], None: [""]}.get(entry.get("data"), study.data)
        norms = [{"norm": norm} for norm in entry.get("norms", [""])]
        yield from ({"direction": "q2d", "data": name} | norm for name in data for norm in norms)
    elif "trained" in entry:
        for d in entry["trained"]:
            yield {"trained": d, "direction": d, "other": Direction(d).opposite.value, "loss": f"asym-{d}"}
    elif "started" in entry:
        for arm in study.arms:
            loss, norm = arm.settings["loss"], arm.settings["norm"]
            if arm.start and not arm.permuted and arm.settings["i2t_weight"] is None and norm in entry["started"]:
                words = {"arm": arm.name, "loss": loss, "norm": norm}
                yield from (words | {"direction": d} for d in arm.trained if study.plain_arm(loss, norm))
    else:
        yield from ({"direction": d} for d in entry.get("directions", ["both"]))


def _compared(case: Case) -> Iterator[Row]:
    """A ratio or a difference of two sides; "beyond": over, or less, the same of another arm or data set."""
    entry, words = case.entry, {}
    sides = [entry["of"], entry["to"]]
    if beyond := entry.get("beyond"):
        sides += [side | beyond for side in sides]
        words = {"data": f"{case.words['data']} less {case.study.data[0]}"} if "data" in beyond else {}
    scores = [score for side in sides if (score := case.score(side)) is not None]
    result = NO_SUCH
    if len(scores) == len(sides):
        combine = operator.truediv if entry["statistic"] == "ratio" else operator.sub
        pairs = (lambda x: combine(x[0], x[1])), (lambda x: combine(combine(x[0], x[1]), combine(x[2], x[3])))
        result = case.study.estimate(scores, pairs[len(sides) == 4])
    yield words, judged(result, entry, case.paper), result, {}


# --- learned and useful -----------------------------------------------------------------------------------------------


def _verdict(case: Case, part: str) -> tuple[Json, Json]:
    """(a part of the verdict on the entry's arm, the verdict); the reason why there is none in place of the part."""
    if (arm := case.arm(case.entry)) is None:
        return {"reason": NO_SUCH.reason}, {}
    verdict = case.study.verdict(arm, case.words["direction"], case.words.get("data", ""))
    return verdict.get(part) or verdict, verdict | {"n_of_arm": len(arm.seeds)}


def _learned(case: Case) -> Iterator[Row]:
    """d(topk) of the documents' norms less the control's."""
    learned, verdict = _verdict(case, "learned")
    result = reported(learned, n_seeds=verdict.get("n_of_arm", 0))
    more = {"arm_d": learned.get("d_run"), "control_d": learned.get("d_control")}
    yield {}, judged(result, case.entry, case.paper), result, more


def _useful(case: Case) -> Iterator[Row]:
    """Native less cosine's native; beside it the gain over the control's, and native less cosine of the arm itself."""
    useful, verdict = _verdict(case, "useful")
    result = {
        "over the control's gain": reported(useful.get("gain") or useful),
        "over cosine's": reported(useful.get("native_minus_baseline_cosine") or useful),
        "over its cosine": reported(useful, "native_minus_cosine_run"),
    }
    shown = result["over cosine's"]._replace(n_seeds=verdict.get("n_seeds", 0))
    place = NOT if any(e.below(0) for e in result.values()) else REPRODUCED if useful.get("verdict") else UNDERPOWERED
    if shown.lo is None:
        place = MISSING if shown.value is None else UNDERPOWERED
    yield {}, place, shown, {"counts": "; ".join(f"{name} {_signed(e)}" for name, e in result.items())}


def _not_useful(case: Case) -> Iterator[Row]:
    """Whether any arm is useful. That none is shown to be is evidence only where every interval of native less
    sym/cosine's cosine ends below ``little`` of the latter."""
    rows = [r for r in records_of(tables.verdicts, case.study) if not r["null"] and r["useful"]]
    words, small = [r["useful"] for r in rows], True
    for row in rows:
        baseline = next((a for a in case.study.arms if a.name == row["baseline"]), None)
        own = case.study.spread(Score(baseline, row["direction"], "cosine")).mean if baseline else None
        high = row["native_minus_baseline_cosine_hi"]
        small &= high is not None and high < case.entry["little"] * (own or 0.0)
    place = MISSING if not rows else NOT if "yes" in words else REPRODUCED if small else UNDERPOWERED
    more = {"counts": ", ".join(f"{words.count(w)} {w}" for w in ("yes", "open", "not shown"))}
    more["useful"] = ", ".join(f"{r['arm']} {r['direction']}" for r in rows if r["useful"] == "yes")
    yield {}, place, Estimate(float(words.count("yes")), None, None, 0), more


def _both(case: Case) -> Iterator[Row]:
    """Arms that keep both directions, with magnitude learned and useful in a trained one; most kept first."""
    useful: dict[str, list[str]] = {}  # by arm, of the directions in which the norm was learned
    for row in (r for r in records_of(tables.verdicts, case.study) if not r["null"]):
        useful.setdefault(row["arm"], []).extend([row["useful"]] * (row["learned"] == "yes"))
    rows = [
        r for r in records_of(tables.keeps_both, case.study) if r["arm"] in useful and r["by_rule"] and not r["null"]
    ]
    for row in sorted((r for r in rows if is_number(r["lowest_end"])), key=lambda r: -r["lowest_end"]):
        learned = useful[row["arm"]]
        helps = next((word for word in ("yes", "open") if word in learned), "no")
        kept, was_learned = ("yes" if x else "no" for x in (row["keeps_both"], learned))
        more = {"counts": f"kept {kept}, learned {was_learned}, useful there {helps}"}
        words, verdict = {k: row[k] for k in ("arm", "served")}, helps if row["keeps_both"] and learned else "no"
        yield words, verdict, Estimate(row["lowest_end"], None, None, row["n_seeds"]), more


def _nulls(case: Case) -> Iterator[Row]:
    """Arms trained on permuted pairs: no verdict may be positive, nor success@1 above chance."""
    rows = {(r["arm"], r["direction"]): r for r in records_of(tables.verdicts, case.study) if r["null"]}
    for arm, d in ((a, d) for a in case.study.arms if a.permuted for d in a.trained):
        data = next(iter(arm.results().values())).json["data"]
        chance = data.get("chance", {}).get(d, 1 / data["n_images"])
        result = case.study.mean(Score(arm, d))
        positive = [k for k in ("learned", "useful") if rows.get((arm.name, d), {}).get(k) == "yes"]
        positive += ["above chance"] if result.above(chance) else []
        more = {"chance": chance, "counts": ", ".join(positive)}
        yield {"arm": arm.name, "direction": d}, "found" if positive else "clean", result, more


# --- γ and κ ----------------------------------------------------------------------------------------------------------


def _gammas(case: Case) -> Iterator[Row]:
    """Learned exponents at the end, at the encoders' learning rate and, as a control, at one of their own."""
    for arm in case.study.arms:
        plain = case.study.is_whole(arm) and not arm.start and arm.i2t_weight == 0.5
        rate = arm.settings["gamma_lr"]
        if arm.settings["norm"] == "learned" and plain and not arm.loss_options and rate:
            off = [_from_half(run.json["trained_with"]) for run in arm.results().values()]
            verdict: int | str = REPRODUCED if max(off) <= case.entry["unmoved"] else NOT
            words = {"rate": "the encoders' rate"}
            if rate != arm.settings["lr"]:
                verdict, words = "control", {"rate": f"a rate of {rate:g}"}
            yield words, verdict, Estimate(max(off), None, None, len(off)), {"arm": arm.name}


def _text_gammas(case: Case) -> Iterator[Row]:
    """The farther γ of every seed from ½; shown is the mean over seeds."""
    if "learned" not in case.family:
        yield {}, MISSING, NO_SUCH, {}
        return
    ends = [run.json["evaluation"]["native"] for run in case.family["learned"].results().values()]
    off, moved = [_from_half(end) for end in ends], case.entry["moved"]
    place = REPRODUCED if min(off) > moved else NOT if max(off) <= moved else UNDERPOWERED
    means = (f"{k} {sum(float(e[k]) for e in ends) / len(ends):.3f}" for k in ("gamma_q", "gamma_d"))
    yield {}, place, Estimate(sum(off) / len(off), None, None, len(off)), {"counts": ", ".join(means)}


def _from_half(end: Json) -> float:
    return max(abs(float(end[k]) - 0.5) for k in ("gamma_q", "gamma_d"))


def _kappa(case: Case) -> Iterator[Row]:
    """The side of larger (or of smaller) log10 κ against the better of qnorm and dnorm."""
    for result in kappa_counts(records_of(tables.fisher, case.study)):
        place = MISSING if not result["n"] + result["noise"] else UNDERPOWERED
        if result["n"] >= 6:  # 5 agreements of 5 have p = 0.06
            place = REPRODUCED if result["p"] < 0.05 and not result["constant"] else NOT
        counts = f"larger {result['larger']}, smaller {result['smaller']}, within noise {result['noise']}"
        more = {"counts": counts, "p": result["p"], "constant": result["constant"]}
        yield {"matrices": result["matrices"]}, place, Estimate(None, None, None, 0), more


def kappa_counts(rows: list[Json]) -> list[Json]:
    """How often "normalize the side of the larger κ" and its opposite name the winning norm, for raw and for normalized
    matrices: {"matrices", "n", "larger", "smaller", "p", "noise", "constant"}.

    qnorm normalizes the query's side, dnorm the document's. n: rows with κ and a winner beyond noise; noise: rows with
    κ and none. p: two-sided sign test, as if rows were independent, which seeds of one setting are not. constant: the
    prediction is the same in every row, and then nothing speaks for κ more than for always naming that norm.
    """
    counts = []
    for kind in ("raw", "normalized"):
        names = (f"log10_kappa_query_{kind}", f"log10_kappa_document_{kind}", "winner")
        result = ([row.get(name) for name in names] for row in rows)
        known = [(a, b, winner) for a, b, winner in result if is_number(a) and is_number(b) and a != b]
        decided = [("qnorm" if a > b else "dnorm", winner) for a, b, winner in known if winner in ("qnorm", "dnorm")]
        agree, n = sum(guess == winner for guess, winner in decided), len(decided)
        row = {"matrices": kind, "n": n, "larger": agree, "smaller": n - agree, "noise": len(known) - n}
        row |= {"p": float(binomtest(agree, n).pvalue) if n else 1.0}
        counts.append(row | {"constant": len({guess for guess, _ in decided}) == 1})
    return counts


def _text_kappa(case: Case) -> Iterator[Row]:
    """One case at most, which decides nothing; its κ and its winner are named."""
    rows = {row["question"]: row for row in records_of(tables.text_fisher, case.study)}
    row, titles = rows.get("q2d", {}), rows.get("titles", {})
    result = case.over("qnorm", "dnorm") if {"qnorm", "dnorm"} <= case.family.keys() else NO_SUCH
    if row.get("status") == "determined":
        place = UNDERPOWERED if result.lo is not None or result.value is not None else MISSING
        yield {}, place, result, {"counts": f"one case: {_named(row, result)}"}
    else:
        why = row.get("reason") or "nothing was measured before training"
        if row.get("status") == "undetermined":
            n, needed, dim = (row.get(k) for k in ("n_available", "n_needed", "dim"))
            why = f"cannot be asked with {n} pairs at {dim} dimensions: {needed} are needed ({why})"
        yield {}, MISSING, result._replace(reason=why), {}
    if titles.get("status") == "determined":
        counts = f"κ of titles as queries decides nothing: {_named(titles, result)}"
        yield {}, UNDERPOWERED, result, {"counts": counts}


def _named(row: Json, result: Estimate) -> str:
    """Whose κ is larger, and which norm won."""
    words = []
    for kind in ("raw", "normalized"):
        query, document = (row.get(f"log10_kappa_{name}") for name in MATRICES if name.endswith(kind))
        if is_number(query) and is_number(document):
            side, norm = ("query", "qnorm") if query > document else ("document", "dnorm")
            words.append(f"{kind}: the {side}'s κ is larger ({query:.2f}, {document:.2f}), which would name {norm}")
    won = "qnorm won" if result.above(0) else "dnorm won" if result.below(0) else "neither won beyond noise"
    return "; ".join([*words, won])


# --- text -------------------------------------------------------------------------------------------------------------


def _best(case: Case) -> Iterator[Row]:
    """qnorm over each other norm; shown is the least difference, over the best other one."""
    norms, family = ("cosine", "dot", "dnorm", "learned"), case.family
    result = {n: case.over("qnorm", n) if {"qnorm", n} <= family.keys() else NO_SUCH for n in norms}
    rival = min(result, key=lambda n: (result[n].lo is not None, result[n].value or 0.0))
    least, words = result[rival], {"norm": f"qnorm over {rival}"}
    if least.lo is None:
        place, words = MISSING if least.value is None else UNDERPOWERED, {"norm": "qnorm"}
    else:
        below, above = any(e.below(0) for e in result.values()), all(e.above(0) for e in result.values())
        place = NOT if below else REPRODUCED if above else UNDERPOWERED
    yield words, place, least, {"counts": "; ".join(f"over {n} {_signed(e)}" for n, e in result.items())}


def _documents(case: Case) -> Iterator[Row]:
    """A number of documents, itself and less the cosine arm's; shown is the difference."""
    arm, number, data = case.arm(case.entry), case.entry["number"], case.words["data"]
    own = beside = NO_SUCH
    if arm is not None:
        own = case.study.documents(data, number, arm)
        beside = case.study.documents(data, number, arm, case.family["cosine"])
    places = {judged(e, case.entry) for e in (own, beside)}
    place = next((p for p in (MISSING, NOT, UNDERPOWERED) if p in places), REPRODUCED)
    yield {}, place, beside, {"counts": f"itself {_signed(own)}"}


def _delta_cv(case: Case) -> Iterator[Row]:
    result = case.study.delta_cv(case.words["data"], case.family)
    yield {}, judged(result, case.entry, case.paper), result, {}


def _signed(result: Estimate) -> str:
    if result.value is None:
        return "–"
    return f"{result.value:+.3f}" + ("" if result.lo is None else f" [{result.lo:+.3f}, {result.hi:+.3f}]")


FUNCTIONS: dict[str, Callable[[Case], Iterator[Row]]] = {
    function.__name__[1:]: function
    for function in (
        *(_compared, _learned, _useful, _not_useful, _both, _nulls, _gammas, _text_gammas, _kappa, _text_kappa),
        *(_best, _documents, _delta_cv),
    )
}
