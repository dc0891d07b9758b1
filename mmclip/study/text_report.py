"""A text study as files: every table as CSV, a picture a data set, and one HTML page that needs
nothing else; the verdicts on the terminal as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmclip.errors import UserError, printable
from mmclip.io import write_text_atomically
from mmclip.reporting.figures import Picture, intervals_figure, write_picture
from mmclip.reporting.formats import rate
from mmclip.reporting.page import page_environment
from mmclip.reporting.table import is_number
from mmclip.reporting.table_parts import make_console, new_table, row
from mmclip.study import text_claims as text_study_claims
from mmclip.study import text_tables as text_study_tables
from mmclip.study.sheets import Sheet, minus, write_sheet
from mmclip.study.text_claims import tally
from mmclip.study.text_numbers import TextStudy
from mmclip.study.text_page import failed_table, page_tables
from mmclip.study.text_study import METRIC, TextArm

Json = dict[str, Any]
PAGE = "study.html"
SHEETS = (
    text_study_tables.runs,
    text_study_tables.retrieval,
    text_study_tables.differences,
    text_study_tables.magnitude,
    text_study_tables.delta_cv,
    text_study_tables.fisher,
    text_study_claims.claims,
)


def write_text_study(
    arms: Sequence[TextArm], folder: Path, *, title: str, failed: Sequence[Mapping[str, Any]] = ()
) -> Path:
    """Write folder/tables/NAME.csv, folder/figures/ and folder/study.html, and show the verdicts; returns the page's
    path. arms: in the order of the tables. failed: cells that have no result, "arm", "seed" and "reason".

    Errors: UserError where something cannot be written.
    """
    study = TextStudy(arms)
    sheets = [make(study) for make in SHEETS]
    for part in ("tables", "figures"):
        try:
            (folder / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{printable(folder / part)}: cannot be made: {error.strerror}") from None
    for sheet in [*sheets, Sheet("failed", ("arm", "seed", "reason"), [dict(f) for f in failed])]:
        write_sheet(sheet, folder / "tables")
    rows = {sheet.name: sheet.rows for sheet in sheets}
    content = {
        "title": printable(title, 120),
        "data": ", ".join(printable(name, 60) for name in study.data) or "no finished run",
        "counts": f"{len(study.arms)} arms, {len(rows['runs'])} finished runs, {len(failed)} failed",
        "few_seeds": min((len(arm.seeds) for arm in study.arms), default=0) <= 5,
        "tally": tally(rows["claims"]),
        "tables": page_tables(rows),
        "pictures": {"differences": _pictures(study, rows["differences"], folder / "figures")},
        "failed": failed_table(failed),
        "reasons": {name: _reasons(rows[name]) for name in rows},
    }
    path = folder / PAGE
    page = page_environment().get_template("text_study.html.j2").render(content)
    write_text_atomically(path, page.encode("utf-8", "backslashreplace").decode())
    print_verdicts(rows["claims"])
    return path


def print_verdicts(rows: Sequence[Json]) -> None:
    """A line a claim, norm and data set; what stands beside a value is in tables/claims.csv."""
    names = ["claim", "norm", "data", "verdict", "value", "smallest"]
    told = []
    for r in rows:
        smallest = rate(r["smallest_effect"]) if is_number(r["smallest_effect"]) else ""
        known = (r["claim"], r["norm"], r["data"], r["verdict"], minus(_interval(r)), smallest)
        told.append([f"{printable(cell, 60)} " for cell in known])
    wide = [max(map(len, column)) for column in zip([f"{n} " for n in names], *told, strict=True)]
    console = make_console()
    left = max(console.width - sum(wide) - len(names), len("reason"))  # a reason may be cut, a number never is
    table = new_table(names[0])
    for name in (*names[1:], "reason"):
        table.add_column(f"\n{name}", no_wrap=True)
    for cells, r in zip(told, rows, strict=True):
        row(table, [*cells, printable(r["reason"], left)])
    console.print(table)


def _interval(r: Json) -> str:
    if not is_number(r["value"]):
        return ""
    ends = [r["value_lo"], r["value_hi"]]
    return f"{r['value']:+.3f}" + (f" [{ends[0]:+.3f}, {ends[1]:+.3f}]" if all(map(is_number, ends)) else "")


def _reasons(rows: Sequence[Json]) -> list[str]:
    """What is missing from a table and why, once."""
    found: dict[str, list[str]] = {}
    for r in rows:
        if r.get("reason"):
            found.setdefault(r["reason"], []).append(str(r.get("claim") or r.get("question") or r.get("arm") or "–"))
    return [printable(f"{', '.join(dict.fromkeys(names))}: {reason}.", 400) for reason, names in found.items()]


def _pictures(study: TextStudy, rows: Sequence[Json], folder: Path) -> list[Picture]:
    """One a data set, in the same scale."""
    shown = [r for r in rows if r["scoring"] == "native" and is_number(r[f"{METRIC}_lo"])]
    if not shown:
        return []
    ends = [0.0, *(r[f"{METRIC}_{end}"] for r in shown for end in ("lo", "hi"))]
    limits = (min(ends) - 0.005, max(ends) + 0.005)
    pictures = []
    for i, data in enumerate(study.data):
        mine = [r for r in shown if r["data"] == data]
        if mine:
            where = f"{data}, {'out of' if i else 'in'} domain"
            pictures.append(
                write_picture(
                    intervals_figure(
                        [r["arm"] for r in mine],
                        [r[METRIC] for r in mine],
                        [(r[f"{METRIC}_lo"], r[f"{METRIC}_hi"]) for r in mine],
                        [r[f"{METRIC}_smallest"] for r in mine],
                        "nDCG@10 less cosine's",
                        limits,
                    ),
                    folder,
                    f"differences-{data}",
                    f"nDCG@10 of {len(mine)} norms less cosine's on {where}, with intervals.",
                    f"{where}: native nDCG@10 less cosine's; bars are 95% over queries and seeds, the band is what is "
                    "too small to be detected.",
                )
            )
    return pictures
