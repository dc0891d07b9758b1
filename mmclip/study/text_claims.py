"""The paper's claims about text retrieval, answered by rule from a text study's arms.

docs/text_study.md states each claim with its statistic, its control and the rule; the names (TX1, ...) are its.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mmclip.evaluation.results import NATIVE
from mmclip.metrics import DETECTABLE
from mmclip.reporting.table import is_number
from mmclip.roles import Normalization
from mmclip.study.judgements import MATRICES
from mmclip.study.numbers import Estimate
from mmclip.study.sheets import Sheet, estimate_columns
from mmclip.study.text_numbers import NORMAL_95, Scored, TextStudy
from mmclip.study.text_study import TextArm
from mmclip.study.text_tables import delta_cv_of, fisher

Json = dict[str, Any]
Family = dict[str, TextArm]
YES, NO, OPEN, MISSING = "Yes", "No", "Open", "not asked"
# nDCG@10 over cosine's, mean over BEIR, Contriever: Feng & Watanabe 2026, Table 1
PAPER_GAINS = {"dot": 0.025, "qnorm": 0.030, "dnorm": 0.015, "learned": 0.026}
CONTROLS = {"dot": "dnorm", "qnorm": "cosine"}  # the same loss, the documents' length divided out
KEEP_LENGTH = [n.value for n in Normalization if n.control]  # of documents
SMALL_D = 0.2  # Cohen's "small"
MOVED = 0.05  # of γ
KEPT = 0.9  # share of native that the angles alone must keep
NOTHING = 0.01  # nDCG@10 that is no gain
PAPER_COLLAPSE = 0.23 / 0.94  # E5: cosine after training over dot
NO_SUCH = "the study has no such arms"


def claims(study: TextStudy) -> Sheet:
    """A row a claim, norm and data set, "not asked" where the study has no arms or data for it."""
    rows: list[Json] = []
    for family in study.families():
        for make in (_gains, _best, _further, _lengths, _corpus, _delta_cv, _kappa, _gammas, _collapse, _count, _luck):
            rows += [row | {"baseline": family["cosine"].name} for row in make(study, family)]
    return Sheet("claims", ("claim", "statement", "data", "norm", "verdict", "value", "value_lo", "value_hi"), rows)


def judged(found: Estimate, paper: float) -> str:
    """The verdict on a number that the paper has above 0."""
    if found.lo is None or found.hi is None:
        return _unknown(found)
    return YES if found.above(0) else NO if found.below(0) or found.below(paper) else OPEN


def _unknown(found: Estimate) -> str:
    """Of a number without an interval."""
    return MISSING if found.value is None else OPEN


def _row(claim: str, statement: str, data: str, norm: str, verdict: str, found: Estimate, **more: Any) -> Json:
    row = {"claim": claim, "statement": statement, "data": data, "norm": norm, "verdict": verdict}
    row |= estimate_columns("value", found) | {"n_seeds": found.n_seeds, "smallest_effect": found.smallest}
    return row | {"paper": None, "counts": ""} | more | {"reason": found.reason}


def _gains(study: TextStudy, family: Family) -> Iterator[Json]:
    """TX1 in domain, TX1o out of it: every norm over cosine."""
    for i, data in enumerate(study.data):
        claim, where = ("TX1o", "out of domain") if i else ("TX1", "in domain")
        for norm, paper in PAPER_GAINS.items():
            found = _gain(study, family, norm, data)
            yield _row(claim, f"{norm} beats cosine {where}", data, norm, judged(found, paper), found, paper=paper)


def _gain(study: TextStudy, family: Family, norm: str, data: str) -> Estimate:
    if norm not in family:
        return Estimate.missing(NO_SUCH)
    return study.difference(Scored(family[norm], data), Scored(family["cosine"], data))


def _best(study: TextStudy, family: Family) -> Iterator[Json]:
    """TX2: qnorm over each other norm; shown is the least, over the best other one."""
    for data in study.data:
        others = [norm for norm in ("cosine", *PAPER_GAINS) if norm != "qnorm"]
        found = {n: Estimate.missing(NO_SUCH) for n in others}
        if "qnorm" in family:
            mine = Scored(family["qnorm"], data)
            found |= {n: study.difference(mine, Scored(family[n], data)) for n in others if n in family}
        lacking = [e for e in found.values() if e.lo is None]
        if lacking:
            least, norm, verdict = lacking[0], "qnorm", _unknown(lacking[0])
        else:
            rival = min(others, key=lambda n: found[n].value or 0.0)
            least, norm = found[rival], f"qnorm over {rival}"
            verdict = YES if all(e.above(0) for e in found.values()) else OPEN
            verdict = NO if any(e.below(0) for e in found.values()) else verdict
        told = "; ".join(f"over {n} {_signed(e)}" for n, e in found.items())
        yield _row("TX2", "qnorm is the best of the five", data, norm, verdict, least, paper=0.004, counts=told)


def _further(study: TextStudy, family: Family) -> Iterator[Json]:
    """TX3: the gain out of domain less that in domain."""
    inside, *outside = study.data
    for data in outside:
        for norm in PAPER_GAINS:
            found = Estimate.missing(NO_SUCH)
            if norm in family:
                sides = [Scored(family[n], d) for d in (data, inside) for n in (norm, "cosine")]
                found = study.estimate(sides, lambda x: (x[0] - x[1]) - (x[2] - x[3]))
            yield _row("TX3", f"{norm} gains more out of domain than in it", f"{data} less {inside}", norm,
                       judged(found, 0.0), found)  # fmt: skip


def _lengths(study: TextStudy, family: Family) -> Iterator[Json]:
    """TX4 and TX4u: learned and useful, against a control whose documents are normalized."""
    for data in study.data:
        for norm, control in CONTROLS.items():
            told: Json = {"reason": NO_SUCH}
            if norm in family and control in family:
                told = study.verdict(data, family[norm], family[control], family["cosine"])
            learned, useful = (told.get(k) or {"reason": told.get("reason", "")} for k in ("learned", "useful"))
            found = _reported(learned, told)
            verdict = judged(found, SMALL_D)
            words = _words(d=learned.get("d_run"), control=learned.get("d_control"))
            yield _row("TX4", f"document length was learned: d(topk) of {norm} less that of {control}", data, norm,
                       verdict, found, counts=words)  # fmt: skip
            parts = [_reported(useful.get("gain") or useful, told)]
            parts.append(_reported(useful.get("native_minus_baseline_cosine") or useful, told))
            lo, hi = useful.get("native_minus_cosine_run_ci") or (None, None)
            parts.append(Estimate(useful.get("native_minus_cosine_run"), lo, hi, parts[0].n_seeds, parts[0].reason))
            words = "; ".join(
                f"{name} {_signed(part)}"
                for name, part in zip(
                    ("over the control's gain", "over cosine's", "over its cosine"), parts, strict=True
                )
            )
            verdict = YES if useful.get("verdict") is True else OPEN
            verdict = NO if any(part.below(0) for part in parts) else verdict
            verdict = _unknown(parts[1]) if parts[1].lo is None else verdict
            yield _row(
                "TX4u", f"and useful: native of {norm} less cosine's", data, norm, verdict, parts[1], counts=words
            )


def _reported(found: Json, told: Json) -> Estimate:
    """A difference as verdicts have it."""
    lo, hi = found.get("ci") or (None, None)
    if found.get("delta") is None:
        return Estimate.missing(found.get("reason") or told.get("reason") or "no verdict")
    smallest = None if lo is None or hi is None else DETECTABLE * (hi - lo) / 2 / NORMAL_95
    return Estimate(found["delta"], lo, hi, told.get("n_seeds", 0), smallest=smallest)


def _corpus(study: TextStudy, family: Family) -> Iterator[Json]:
    yield from _of_documents(study, family, "TX5", "corpus", SMALL_D, "relevant documents are longer, d(corpus)")


def _count(study: TextStudy, family: Family) -> Iterator[Json]:
    yield from _of_documents(study, family, "TX10", "count", 0.0, "length counts relevant queries, Spearman")


def _of_documents(study: TextStudy, family: Family, claim: str, number: str, least: float, what: str) -> Iterator[Json]:
    """TX5, TX10: a number of documents above 0 and above the cosine arm's; shown is the difference."""
    for data in study.data:
        for norm in ("dot", "qnorm"):
            own = beside = Estimate.missing(NO_SUCH)
            if norm in family:
                own = study.documents(data, number, family[norm])
                beside = study.documents(data, number, family[norm], family["cosine"])
            told = [judged(e, least) for e in (own, beside)]
            verdict = next((v for v in (MISSING, NO, OPEN) if v in told), YES)
            words = f"itself {_signed(own)}"
            yield _row(claim, f"{what}: {norm} less cosine", data, norm, verdict, beside, counts=words)


def _delta_cv(study: TextStudy, family: Family) -> Iterator[Json]:
    for data in study.data:
        found = delta_cv_of(study, family, data)
        verdict = _unknown(found) if found.lo is None else YES if found.above(1) else NO if found.below(1) else OPEN
        yield _row("TX6", "query lengths vary more trained with dnorm than with dot: ΔCV", data, "dnorm over dot",
                   verdict, found)  # fmt: skip


def _kappa(study: TextStudy, family: Family) -> Iterator[Json]:
    """TX7: one case at most, which decides nothing; what it says is told."""
    data = study.data[0]
    rows = {row["question"]: row for row in fisher(study).rows}
    statement = "κ before training says which side to normalize: qnorm less dnorm"
    found = Estimate.missing(NO_SUCH)
    if "qnorm" in family and "dnorm" in family:
        found = study.difference(Scored(family["qnorm"], data), Scored(family["dnorm"], data))
    row = rows.get("q2d", {})
    if row.get("status") == "undetermined":
        n, needed, dim = (row.get(k) for k in ("n_available", "n_needed", "dim"))
        why = f"cannot be asked with {n} pairs at {dim} dimensions: {needed} are needed ({row['reason']})"
        yield _row("TX7", statement, data, "", MISSING, found._replace(reason=why))
    elif row.get("status") != "determined":
        why = row.get("reason") or "nothing was measured before training"
        yield _row("TX7", statement, data, "", MISSING, found._replace(reason=why))
    else:
        yield _row("TX7", statement, data, "", OPEN if found.lo is not None else _unknown(found), found,
                   counts=f"one case: {_named(row, found)}")  # fmt: skip
    titles = rows.get("titles", {})
    if titles.get("status") == "determined":
        words = f"decides nothing: {_named(titles, found)}"
        yield _row("TX7", f"{statement}; κ of titles as queries", data, "", OPEN, found, counts=words)


def _named(row: Json, found: Estimate) -> str:
    """Whose κ is larger, and what won."""
    won = "qnorm won" if found.above(0) else "dnorm won" if found.below(0) else "neither won beyond noise"
    told = []
    for kind in ("raw", "normalized"):
        query, document = (row.get(f"log10_kappa_{name}") for name in MATRICES if name.endswith(kind))
        if is_number(query) and is_number(document):
            side, norm = ("query", "qnorm") if query > document else ("document", "dnorm")
            told.append(f"{kind}: the {side}'s κ is larger ({query:.2f}, {document:.2f}), which would name {norm}")
    return "; ".join([*told, won])


def _gammas(study: TextStudy, family: Family) -> Iterator[Json]:
    """TX8: the farther γ of every seed from ½; shown is the mean of both."""
    statement = f"learned γ leave ½ by more than {MOVED:g}: the larger distance, mean over seeds"
    if "learned" not in family:
        yield _row("TX8", statement, "", "learned", MISSING, Estimate.missing(NO_SUCH))
        return
    ends = [run.json["evaluation"]["native"] for run in family["learned"].runs[study.data[0]].values()]
    off = [max(abs(float(e[k]) - 0.5) for k in ("gamma_q", "gamma_d")) for e in ends]
    verdict = YES if min(off) > MOVED else NO if max(off) <= MOVED else OPEN
    means = {k: sum(float(e[k]) for e in ends) / len(ends) for k in ("gamma_q", "gamma_d")}
    yield _row("TX8", statement, "", "learned", verdict, Estimate(sum(off) / len(off), None, None, len(off)),
               paper=0.002, counts=_words(**means))  # fmt: skip


def _collapse(study: TextStudy, family: Family) -> Iterator[Json]:
    """TX9: cosine scoring over native."""
    for data in study.data:
        for norm in KEEP_LENGTH:
            found = Estimate.missing(NO_SUCH)
            if norm in family:
                sides = [Scored(family[norm], data, s) for s in ("cosine", NATIVE)]
                found = study.estimate(sides, lambda x: x[0] / x[1])
            verdict = _unknown(found)
            if found.lo is not None:
                verdict = YES if found.lo >= KEPT else NO if found.below(KEPT) else OPEN
            yield _row("TX9", f"no collapse: cosine scoring over native of {norm}", data, norm, verdict, found,
                       paper=PAPER_COLLAPSE)  # fmt: skip


def _luck(study: TextStudy, family: Family) -> Iterator[Json]:
    """TX11: what dot scoring gives a cosine-trained model."""
    for data in study.data:
        arm = family["cosine"]
        found = study.difference(Scored(arm, data, "dot"), Scored(arm, data, "cosine"))
        verdict = _unknown(found) if found.lo is None else NO if found.above(0) else OPEN
        verdict = YES if verdict == OPEN and found.below(NOTHING) else verdict
        yield _row("TX11", "a cosine-trained model gains nothing by dot scoring: dot less cosine", data, "cosine",
                   verdict, found)  # fmt: skip


def _signed(found: Estimate) -> str:
    if found.value is None:
        return "–"
    ends = "" if found.lo is None or found.hi is None else f" [{found.lo:+.3f}, {found.hi:+.3f}]"
    return f"{found.value:+.3f}{ends}"


def _words(**values: Any) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items() if is_number(value))


def tally(rows: Sequence[Json]) -> dict[str, int]:
    """Verdict -> how often."""
    return {word: sum(row["verdict"] == word for row in rows) for word in (YES, NO, OPEN, MISSING)}
