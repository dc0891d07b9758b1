"""What advise.py shows: the answer first, then the evidence in a table; and a picture of the norms' differences."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from rich.text import Text

from mmclip.errors import printable
from mmclip.reporting.table import NO, Cell, Table, make_console
from mmclip.tasks.advise import CANNOT_TELL

Json = dict[str, Any]
WIDTH = 118
SIDES = {"query": "qnorm", "document": "dnorm"}  # a side, and the norm that normalizes it alone
KAPPA = (
    "the paper's hypothesis is that kappa says which side to normalize; its sign is not public, so it is to be tested "
    "and decided nothing here"
)


def answer_lines(report: Json) -> list[str]:
    """The answer, why, how sure, and what is not told from it."""
    answer = report["answer"]
    told = answer if answer == CANNOT_TELL else f"train with --norm {answer}"
    lines = [f"{told} ({report['direction']})", f"because   {report['because']}"]
    if report["sure"] is not None:
        what = "no other norm gains the margin" if answer == "cosine" else f"{answer} is above cosine"
        lines.append(f"how sure  {what} in {100 * report['sure']:.0f}% of resamples of queries and seeds")
    if report["ties"]:
        lines.append(f"not told from it: {', '.join(report['ties'])}")
    trained = (report["sections"][report["direction"]]["norms"].get(answer) or {}).get("trained")
    if trained is not None and trained["ci"][0] <= 0:
        lines.append(
            f"beside it  a cosine-trained head ranked by dot may gain as much: trained length adds {ranged(trained)}"
        )
    each = {d: s["answer"] for d, s in report["sections"].items() if d != report["direction"]}
    if each:
        lines.append("by direction: " + ", ".join(f"{d} {a}" for d, a in each.items()))
    return lines


def show(report: Json) -> None:
    console = make_console()
    first, *rest = answer_lines(report)
    console.print(Text.assemble("answer    ", (first, "bold")))
    for line in rest:
        console.print(Text(line))
    trial = report["trial"]
    for direction, section in report["sections"].items():
        if not section["norms"]:
            continue
        title = f"trial of {direction}: {section['n_queries']} held-out {trial['units']}, {section['n_seeds']} seeds"
        columns = ["norm", "native", "minus\ncosine", "minus\ncontrol", "by norm\nown head", "detectable"]
        rows = []
        for norm, found in section["norms"].items():
            cells = [Cell(f"{found['native']['value']:.3f}")]
            cells += [Cell(ranged(found.get(k))) for k in ("gain", "over_control", "by_length")]
            rows.append((norm, [*cells, Cell(f"±{found['detectable']:.3f}" if "detectable" in found else NO)]))
        console.print()
        console.print(Table(f"{title}, {section['metric']}; 95% intervals", columns, rows))
    for line in evidence_lines(report):
        console.print(Text("\n".join(textwrap.wrap(line, WIDTH, subsequent_indent="          "))))


def evidence_lines(report: Json) -> list[str]:
    """One line for each piece of evidence that took no part, for each note and for what is not covered."""
    found = report["evidence"]
    lines = [f"lengths   CV of {side} lengths {x['cv']:.3f} [{x['ci'][0]:.3f}, {x['ci'][1]:.3f}], {x['n']:,} vectors"
             for side, x in found["lengths"].items()]  # fmt: skip
    for direction, section in found["zero_shot"].items():
        scorings = dict(section["scorings"])
        told = f"cosine {scorings.pop('cosine')['value']:.3f}"
        for name, x in scorings.items():
            lo, hi = x["minus_cosine_ci"]
            told += f", {name} {x['minus_cosine']:+.3f} [{lo:+.3f}, {hi:+.3f}]"
        lines.append(f"untrained {direction}: {told}, {section['n']} held out")
    for direction, section in found["fisher"].items():
        lines.append(f"kappa     {direction}: {kappa_words(section)}")
    if found["fisher"]:
        lines.append(f"          {KAPPA}")
    lines += [f"note      {printable(note, 400)}" for note in report["notes"]]
    lines.append(f"scope     {report['not_covered']}")
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in report["seconds"].items())
    return [*lines, f"time      {took}"]


def kappa_words(section: Json) -> str:
    """log10 kappa of the raw sides with their nulls, and what the larger one would name."""
    if section["status"] != "determined":
        return f"undetermined: {section['reason']}"
    told = []
    for role in SIDES:
        part = section[f"{role}_raw"]
        if part["log10_kappa"] is None:
            told.append(f"{role} none ({part['log10_kappa_reason']})")
            continue
        lo, hi = part["log10_kappa"]["ci"]
        nulls = [f"{k} {part[k]:.2f}" for k in ("unpaired", "gaussian") if part[k] is not None]
        told.append(f"{role} {part['log10_kappa']['value']:.2f} [{lo:.2f}, {hi:.2f}] (nulls: {', '.join(nulls)})")
    larger = section["larger"]["raw"]
    name = f"larger of the {larger}, which {SIDES[larger]} would normalize" if larger in SIDES else str(larger)
    sampling = f"sampling alone {section['marchenko_pastur']:.2f}"
    return f"log10 {', '.join(told)}; {sampling}; {name}; over {section['n']} {section['reference']}"


def ranged(found: Json | None) -> str:
    return "–" if found is None else f"{found['value']:+.3f} [{found['ci'][0]:+.3f}, {found['ci'][1]:+.3f}]"


def draw(report: Json, path: Path) -> None:
    """Each norm's gain over cosine with its interval, a row a norm and direction, the margin shaded."""
    from mmclip.reporting.figures import intervals_figure, write_png

    sections = {d: s for d, s in report["sections"].items() if s["norms"]}
    norms = [n for n in next(iter(sections.values()))["norms"] if n != "cosine"]
    margin = next(iter(sections.values()))["margin"]
    rows = [(d, norm, section["norms"][norm]["gain"]) for d, section in sections.items() for norm in norms]
    figure = intervals_figure(
        [f"{norm} ({direction})" for direction, norm, _ in rows],
        [gain["value"] for *_, gain in rows],
        [gain["ci"] for *_, gain in rows],
        [margin] * len(rows),
        f"{report['trial']['metric']} minus cosine's, 95% interval; shaded: the margin",
    )
    figure.axes[0].set_title(f"advice: {report['answer']}")
    write_png(figure, path)
