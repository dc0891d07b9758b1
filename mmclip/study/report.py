"""A study as files: every table as CSV, pictures as SVG, and one HTML page that needs nothing else.

The page runs no script and asks nobody for anything; text from settings and data is escaped. It holds for a study that
is not finished as well: what cannot be computed yet is an empty cell, with its reason in the table's file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmclip.errors import UserError, printable
from mmclip.evaluation.results import CORRECTED, NATIVE
from mmclip.io import write_text_atomically
from mmclip.reporting.figures import (
    Picture,
    Point,
    Series,
    curves_figure,
    fractions_figure,
    frontier_figure,
    heat_figure,
    write_picture,
)
from mmclip.reporting.page import page_environment
from mmclip.reporting.table import is_number
from mmclip.study import claims as study_claims
from mmclip.study import judgements as study_judgements
from mmclip.study import tables as study_tables
from mmclip.study.arms import Arm
from mmclip.study.judgements import KEPT
from mmclip.study.numbers import Study
from mmclip.study.page import page_tables
from mmclip.study.sheets import Sheet, page_table, text_cell, write_sheet
from mmclip.study.summary import summary
from mmclip.study.tables import DIRECTIONS, SCORINGS

Json = dict[str, Any]
STUDY_FILE = "study.html"
LONG = {"i2t": "image → text", "t2i": "text → image"}
SHEETS = (
    study_tables.cells,
    study_tables.table6,
    study_tables.frontier,
    study_tables.matrix,
    study_tables.gammas,
    study_tables.cv,
    study_tables.delta_cv,
    study_tables.fractions,
    study_judgements.correction,
    study_judgements.verdicts,
    study_judgements.keeps_both,
    study_judgements.pretrained,
    study_judgements.fisher,
    study_claims.claims,
)


def write_study(
    arms: Sequence[Arm],
    folder: Path,
    *,
    title: str,
    failed: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[str] = (),
) -> Path:
    """Write folder/tables/NAME.csv, folder/figures/NAME.svg, and folder/study.html; returns the
    page's path.

    arms: in the order of the tables; an arm without a finished run is left out. failed: cells that have no result, each
    a row of what is known of it, "arm", "seed" and "reason" say. notes: sentences of the page's head.
    Errors: UserError where something cannot be written.
    """
    study = Study(arms)
    sheets = [make(study) for make in SHEETS]
    folder = Path(folder)
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
        "notes": [printable(note, 600) for note in notes],
        "kept": f"{KEPT:.0%}",
        "data": _data(study),
        "counts": _counts(study, failed),
        "few_seeds": 1 < min((len(arm.runs) for arm in study.arms), default=0) <= 5,
        "one_seed": [arm.name for arm in study.arms if len(arm.runs) == 1],
        "summary": summary(rows),
        "tables": page_tables(rows),
        "pictures": _pictures(study, rows, folder / "figures"),
        "failed": _failed(failed),
        "reasons": {name: _reasons(rows[name]) for name in rows},
    }
    path = folder / STUDY_FILE
    page = page_environment().get_template("study.html.j2").render(content)
    write_text_atomically(path, page.encode("utf-8", "backslashreplace").decode())
    return path


def _data(study: Study) -> str:
    for arm in study.arms:
        for run in arm.runs.values():
            data = run.json["data"]
            counts = " and ".join(
                f"{data[k]:,} {w}" for k, w in (("n_images", "images"), ("n_texts", "texts")) if k in data
            )
            place = printable(Path(str(data.get("path", "–"))).name, 60)
            return f"{place} [{printable(data.get('split', '–'), 30)}], {counts}"
    return "no finished run"


def _counts(study: Study, failed: Sequence[Mapping[str, Any]]) -> str:
    runs = sum(len(arm.runs) for arm in study.arms)
    return f"{len(study.arms)} arms, {runs} finished runs, {len(failed)} failed"


def _failed(failed: Sequence[Mapping[str, Any]]) -> Any:
    """A table of the failed cells, None where there are none."""
    names = list(dict.fromkeys(key for cell in failed for key in cell if key != "arm"))
    told = [(str(cell.get("arm", "–")), "", [text_cell(cell.get(key), 300) for key in names]) for cell in failed]
    return page_table("failed cells", "arm", told, [printable(name, 40) for name in names]) if failed else None


def _reasons(rows: Sequence[Json]) -> list[str]:
    """What is missing from a table and why, an arm's names together."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.get("reason"):
            name = row.get("arm") or row.get("claim") or row.get("paper_config") or row.get("qnorm_arm") or "–"
            found.setdefault(row["reason"], []).append(str(name))
    return [printable(f"{', '.join(dict.fromkeys(names))}: {reason}.", 400) for reason, names in found.items()]


def _pictures(study: Study, rows: Mapping[str, Sequence[Json]], folder: Path) -> dict[str, list[Picture]]:
    return {
        "frontier": _frontier(study, rows["frontier"], rows["keeps_both"], folder),
        "matrix": _heat_maps(rows["matrix"], folder),
        "gamma": _gammas(rows["gamma"], folder),
        "fractions": _fractions(rows["fractions"], folder),
    }


def _frontier(study: Study, rows: Sequence[Json], kept: Sequence[Json], folder: Path) -> list[Picture]:
    """Arms on all data with right pairs: the others would only stretch the axes."""
    shown = {arm.name for arm in study.arms if study.is_whole(arm)}
    baselines = {row["baseline"] for row in kept if row["arm"] in shown}
    points = []
    for native, corrected in zip(rows[::2], rows[1::2], strict=True):
        at, also = (tuple(row[f"{d}_mean"] for d in ("t2i", "i2t")) for row in (native, corrected))
        sd = tuple(native[f"{d}_sd"] for d in ("t2i", "i2t"))
        if native["arm"] in shown and None not in at:
            name, norm, weight = native["arm"], native["norm"], native["i2t_weight"]
            bars, other = (None if None in pair else pair for pair in (sd, also))
            points.append(Point(native["number"], name, norm, weight, at, bars, other, name in baselines))
    if not points:
        return []
    alt = f"Frontier of {len(points)} arms: success@1 of text to image across, of image to text up."
    caption = (
        "Up and to the right is better. Filled: native, bars one standard deviation over seeds; half filled: "
        f"corrected. Squares in the text's colour: sym/cosine; dashed: {KEPT:.0%} of it. Arms on less data or permuted pairs: see the table."
    )
    return [write_picture(frontier_figure(points, KEPT), folder, "frontier", alt, caption)]


def _heat_maps(rows: Sequence[Json], folder: Path) -> list[Picture]:
    values = {
        d: np.array([[_or_nan(row[f"{s}_mean"]) for s in SCORINGS] for row in rows if row["direction"] == d])
        for d in DIRECTIONS
    }
    if not rows or not all(np.isfinite(v).any() for v in values.values()):
        return []
    top = max(float(np.nanmax(v)) for v in values.values()) or 1.0
    names = list(dict.fromkeys(row["arm"] for row in rows))
    return [
        write_picture(
            heat_figure(names, SCORINGS, values[d], top),
            folder,
            f"matrix-{d}",
            f"Heat map of success@1, {LONG[d]}: arms down, scorings across.",
            f"{LONG[d]}: trained with, down; scored with, across. Both pictures have one scale, 0 to {top:.2f}.",
        )
        for d in DIRECTIONS
    ]


def _or_nan(value: Any) -> float:
    return float(value) if is_number(value) else float("nan")


def _gammas(rows: Sequence[Json], folder: Path) -> list[Picture]:
    """Means over seeds at the steps that all of an arm's seeds logged."""
    series = []
    for number, name in enumerate(dict.fromkeys(row["arm"] for row in rows)):
        mine = [row for row in rows if row["arm"] == name]
        n = len({row["seed"] for row in mine})
        for key, dashed in (("gamma_q", False), ("gamma_d", True)):
            at: dict[int, list[float]] = {}
            for row in mine:
                at.setdefault(row["step"], []).append(row[key])
            steps = sorted(step for step, values in at.items() if len(values) == n)
            means = [float(np.mean(at[step])) for step in steps]
            series.append(Series("" if dashed else name, number, dashed, steps, means))
    if not series:
        return []
    caption = "γq; dashed: γd. Means over seeds."
    return [write_picture(curves_figure(series, "γ"), folder, "gamma", "γ over steps.", caption)]


def _fractions(rows: Sequence[Json], folder: Path) -> list[Picture]:
    """Native, and corrected where the direction was not trained."""
    pictures = []
    for d in DIRECTIONS:
        shown = [r for r in rows if r["direction"] == d and r["success@1_mean"] is not None]
        trained = {r["arm"] for r in shown if (r["i2t_weight"] if d == "i2t" else 1 - r["i2t_weight"]) > 0}
        shown = [r for r in shown if r["scoring"] == NATIVE or (r["scoring"] == CORRECTED and r["arm"] not in trained)]
        if shown:
            alt = f"success@1, {LONG[d]}, over the share of the training data."
            caption = f"{LONG[d]}; bars: one sd over seeds."
            pictures.append(write_picture(fractions_figure(shown), folder, f"fractions-{d}", alt, caption))
    return pictures
