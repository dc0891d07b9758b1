"""What a study says, in plain words computed from its tables; a null result is said as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmclip.errors import printable
from mmclip.reporting.formats import rate
from mmclip.study.judgements import KEPT, kappa_verdicts

Json = dict[str, Any]
SHOWN = 6  # names in a sentence; more are in the tables
LEVEL = 0.05  # of the sign test


def answer(kind: str, question: str, word: str, sentence: str) -> Json:
    """kind: "yes", "no" or "open", how the answer looks."""
    return {"kind": kind, "question": question, "answer": word, "sentence": sentence}


def summary(sheets: dict[str, Sequence[Json]]) -> list[Json]:
    """Answers to what a study asks, from the rows of its tables by name."""
    return [
        *_keeps(sheets["keeps_both"], sheets["verdicts"]),
        *(_verdicts(sheets["verdicts"], kind) for kind in ("learned", "useful")),
        _nulls(sheets["verdicts"]),
        _correction(sheets["correction"]),
        kappa(sheets["fisher"]),
    ]


def _names(rows: Sequence[Any]) -> str:
    told = list(dict.fromkeys(printable(row, 90) for row in rows))
    return ", ".join(told[:SHOWN]) + (f" and {len(told) - SHOWN} more" if len(told) > SHOWN else "")


def _place(row: Json) -> str:
    return f"{row['arm']} ({row['direction']})"


def _keeps(rows: Sequence[Json], verdicts: Sequence[Json]) -> list[Json]:
    """With length in the score; arms without, sym/cosine above all, keep both by not asking for anything."""
    question = f"Do both directions keep {KEPT:.0%} of sym/cosine's success@1 with length in the score?"
    judged = {row["arm"] for row in verdicts if not row["null"]}
    asked = [row for row in rows if row["by_rule"] and row["arm"] in judged]
    told = [row for row in asked if row["keeps_both"] is not None]
    if not told:
        why = next((row["reason"] for row in asked if row["reason"]), "no arm keeps its documents' length")
        return [answer("open", question, "Not answered.", f"No setting has both ratios: {printable(why, 200)}.")]
    keep = [row for row in told if row["keeps_both"]]
    missing = f" {len(asked) - len(told)} more have no ratio." if len(asked) > len(told) else ""
    if not keep:
        best = max(told, key=lambda row: row["lowest_end"])
        sentence = (
            f"In none of {len(told)} ways to serve {len({row['arm'] for row in told})} arms, by the lower ends of the "
            f"paired intervals. Nearest: {_way(best)}, lower end {rate(best['lowest_end'])}.{missing}"
        )
        return [answer("no", question, "Not shown.", sentence)]
    ways = [f"{_way(row)}, lower end {rate(row['lowest_end'])}" for row in sorted(keep, key=lambda r: -r["lowest_end"])]
    found = [
        answer(
            "yes",
            question,
            "Yes.",
            f"{len(keep)} of {len(told)} ways to serve an arm: {'; '.join(ways[:SHOWN])}.{missing}",
        )
    ]
    names = {row["arm"] for row in keep}
    both = [r for r in verdicts if r["arm"] in names and r["learned"] == r["useful"] == "yes"]
    question = "Is length learned and useful in one of these?"
    if both:
        return [*found, answer("yes", question, "Yes.", f"{_names([_place(r) for r in both])}.")]
    learned = [_place(r) for r in verdicts if r["arm"] in names and r["learned"] == "yes"]
    what = f"It was learned in {_names(learned)}" if learned else "In none of them is it shown to be learned"
    return [*found, answer("no", question, "Not shown.", f"{what}; in none is it shown to be both.")]


def _way(row: Json) -> str:
    return f"{printable(row['arm'], 60)} served {row['served']}"


def _verdicts(rows: Sequence[Json], kind: str) -> Json:
    question = {"learned": "Was length learned?", "useful": "Is length useful?"}[kind]
    real = [row for row in rows if not row["null"]]
    told = [row for row in real if row[kind]]
    left = len(real) - len(told)
    missing = f" {left} ha{'s' if left == 1 else 've'} no verdict: {printable(_why(real, kind), 200)}." if left else ""
    if not told:
        return answer("open", question, "Not answered.", (missing or "No arm keeps its documents' length.").strip())
    yes, undecided = ([_place(row) for row in told if row[kind] == word] for word in ("yes", "open"))
    rest = f" Open, within noise: {_names(undecided)}." if undecided else ""
    if not yes:
        return answer(
            "open" if undecided else "no", question, "Not shown.", f"In none of {len(told)} verdicts.{rest}{missing}"
        )
    sentence = f"In {len(yes)} of {len(told)} verdicts: {_names(yes)}.{rest}{missing}"
    return answer("yes", question, "Yes." if len(yes) == len(real) else "In some.", sentence)


def _why(rows: Sequence[Json], kind: str) -> str:
    return next((row["reason"] for row in rows if not row[kind] and row["reason"]), "no reason is told")


def _nulls(rows: Sequence[Json]) -> Json:
    question = "Are the nulls clean?"
    nulls = [row for row in rows if row["null"]]
    told = [row for row in nulls if row["learned"] or row["useful"]]
    if not nulls:
        sentence = "No arm was trained on permuted pairs: nothing here shows that the same pipeline can say no."
        return answer("open", question, "None was run.", sentence)
    if not told:
        why = _why(nulls, "learned")
        return answer("open", question, "Not answered.", f"Permuted pairs have no verdict: {printable(why, 200)}.")
    positive = [_place(row) for row in told if "yes" in (row["learned"], row["useful"])]
    if positive:
        sentence = (
            f"Trained on permuted pairs, and yet positive: {_names(positive)}. Positive verdicts above are in doubt."
        )
        return answer("no", question, "No.", sentence)
    return answer("yes", question, "Yes.", f"No verdict on permuted pairs is positive ({len(told)} of them).")


def _correction(rows: Sequence[Json]) -> Json:
    question = "Does the correction give back the direction that was not trained?"
    told = [row for row in rows if not row["trained"] and not row["null"]]
    told = [row for row in told if row["corrected_minus_reversed_lo"] is not None]
    if not told:
        return answer("open", question, "Not answered.", "No one-sided arm has corrected scores with an interval.")
    above = [row for row in told if row["corrected_minus_reversed_lo"] > 0]
    ends = [hi for row in told if (hi := row["corrected_minus_baseline_native_hi"]) is not None]
    sentence = (
        f"Corrected is above reversed beyond noise in {len(above)} of {len(told)} directions that were not trained"
    )
    if ends:
        sentence += f"; in {sum(hi >= 0 for hi in ends)} of {len(ends)} it is level with sym/cosine's native, or above"
    sentence += "."
    kind, word = ("yes", "Yes.") if len(above) == len(told) else ("open", "In some.") if above else ("no", "Not shown.")
    return answer(kind, question, word, sentence)


def kappa(rows: Sequence[Json]) -> Json:
    """The verdict on Fisher's κ, both signs of both hypotheses."""
    question = "Does κ before training tell which of qnorm and dnorm wins?"
    found = kappa_verdicts(rows)
    if not any(v["n"] + v["noise"] for v in found):
        return answer("open", question, "Not answered.", f"No κ beside a winner: {printable(_kappa_why(rows), 200)}.")
    told, powered, speaks = [], False, False
    for v in found:
        words = (
            f"{v['matrices']} matrices: normalizing the side of the larger κ is right in {v['larger']} of {v['n']} "
            f"decided rows, that of the smaller in {v['smaller']} (two-sided sign test p {v['p']:.2g}; {v['noise']} "
            "more rows within noise)"
        )
        can = 2 * 0.5 ** v["n"] < LEVEL
        powered |= can
        speaks |= v["p"] < LEVEL and not v["constant"]
        words += "" if can else f", underpowered: {v['n']} rows cannot reach p < {LEVEL:g}"
        words += ", κ names the same norm in every row, so always naming it does as well" if v["constant"] else ""
        told.append(words)
    sentence = f"{'; '.join(told)}. Seeds of one setting are not independent, so p is too small."
    sentence = sentence[:1].upper() + sentence[1:]
    if speaks:
        return answer("yes", question, "It agrees.", sentence)
    return answer("no" if powered else "open", question, "Not shown." if powered else "Underpowered.", sentence)


def _kappa_why(rows: Sequence[Json]) -> str:
    if not rows:
        return "no qnorm arm has a dnorm arm of the same setting and seed"
    return next((row["reason"] for row in rows if row["reason"]), "κ is equal on both sides")
