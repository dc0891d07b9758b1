"""A study as files: every table as CSV, pictures, and one HTML page that needs nothing else; and in a few sentences.

It holds for a study that is not finished as well: what does not exist yet has its reason beside its table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmclip.errors import printable
from mmclip.evaluation.results import CORRECTED, NATIVE
from mmclip.io import write_text_atomically
from mmclip.reporting import figures
from mmclip.reporting.figures import Picture, Point, Series, write_picture
from mmclip.reporting.page import page_environment
from mmclip.reporting.table import is_number, rate
from mmclip.study.claims import MISSING, claims
from mmclip.study.estimates import Score, Study
from mmclip.study.plan import CLIP
from mmclip.study.tables import DIRECTIONS, KEPT, SCORINGS, TABLES, UP, StudyTable, load_claims, records_of

Json = dict[str, Any]
PAGE = "study.html"
Drawn = Iterator[tuple[Any, str, str, str]]  # figure, name of its file, alternative text, caption
LONG = {"i2t": "image → text", "t2i": "text → image"}


class Report(NamedTuple):
    """page: path of the page. lines: what the study says, for a terminal. tables: by name."""

    page: Path
    lines: list[str]
    tables: dict[str, StudyTable]


def write_study(study: Study, folder: Path, *, title: str, failed: Sequence[Mapping[str, Any]] = ()) -> Report:
    """Write folder/tables/NAME.csv, folder/figures/NAME.svg and folder/study.html.

    Args:
        failed: runs that have no result, with "arm", "seed" and "reason".

    Raises:
        UserError, OSError: something cannot be written.
    """
    layouts = load_claims(study.kind)["tables"]
    made = [StudyTable(name, records_of(rows, study), layouts[name]) for name, rows in TABLES[study.kind].items()]
    tables = {table.name: table for table in (claims(study), *made)}
    layout = {"title": "Failed runs", "first": "arm seed reason", "shown": "seed reason"}
    failures = StudyTable("failed", [*map(dict, failed)], layout)
    for part in ("tables", "figures"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for table in (*tables.values(), failures):
        table.file().to_csv(folder / "tables" / f"{table.name}.csv")
    opening, replies = _opening(study), _answers(study, tables["claims"].records)
    views = {name: table.view() for name, table in {**tables, "failed": failures}.items() if table.records}
    n_runs = sum(len(arm.seeds) for arm in study.arms)
    content = {
        "title": printable(title, 120),
        "text": study.kind is not CLIP,
        "data": _data(study),
        "counts": f"{len(study.arms)} arms, {n_runs} finished runs, {len(failed)} failed",
        "few_seeds": min((len(arm.seeds) for arm in study.arms), default=0) <= 5,
        "opening": opening,
        "answers": replies,
        "kept": f"{KEPT:.0%}",
        "views": views,
        "pictures": _pictures(study, tables, folder / "figures"),
    }
    page = page_environment().get_template("study.html.j2").render(content)
    write_text_atomically(folder / PAGE, page.encode("utf-8", "backslashreplace").decode())
    lines = [f"{content['data']}: {content['counts']}", opening, *(f"{r['ask']} {r['answer']}" for r in replies)]
    return Report(folder / PAGE, lines, tables)


def _data(study: Study) -> str:
    if study.kind is not CLIP:
        return ", ".join(printable(name, 60) for name in study.data) or "no finished run"
    for arm in study.arms:
        data = next(iter(arm.results().values())).json["data"]
        counts = " and ".join(f"{data[f'n_{side}']:,} {side}" for side in ("images", "texts") if f"n_{side}" in data)
        place = printable(Path(str(data.get("path", "–"))).name, 60)
        return f"{place} [{printable(data.get('split', '–'), 30)}], {counts}"
    return "no finished run"


def _opening(study: Study) -> str:
    """The best arm of each direction or data set, beside its baseline."""
    arms = [arm for arm in study.arms if not arm.settings.get("permute_pairs")]
    metric, parts = study.kind.metrics[0], []
    for d, data in itertools.product(study.kind.directions, study.data):
        means = {a: m for a in arms if (m := study.spread(Score(a, d, data=data)).mean) is not None}
        if means:
            best = max(means, key=lambda arm: means[arm])
            base = study.baseline(best)
            more = f", {printable(base.name, 60)} has {rate(means[base])}" if base in means and base is not best else ""
            best_of = f"{data or LONG[d]}: {printable(best.name, 60)} is best with"
            parts.append(f"{best_of} {rate(means[best])} {metric}{more}")
    return "; ".join(parts) + "." if parts else "No run has finished."


def _answers(study: Study, rows: Sequence[Json]) -> list[Json]:
    """Verdicts by question that the study has arms for: {"kind": "yes", "no" or "open", "ask", "answer"}."""
    replies, file = [], load_claims(study.kind)
    for question in file["questions"]:
        mine = [r for r in rows if r["claim"] in question["claims"] and r["verdict"] != file["verdicts"][MISSING]]
        if not mine:
            continue
        words = [r["verdict"] for r in mine]
        counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
        shown = [_number(r) for r in mine] if len(question["claims"]) == 1 else []
        more = f": {'; '.join(filter(None, shown[:2]))}" if any(shown[:2]) else ""
        if len(shown) == 1 and mine[0].get("counts"):
            counts, more = printable(shown[0], 300), f" ({words[0]})"
        kind = "no" if "found" in words else "yes" if set(UP) & set(words) else "open"
        replies.append({"kind": kind, "ask": question["ask"], "answer": f"{counts}{printable(more, 300)}."})
    return replies


def _number(row: Json) -> str:
    """The numbers of a claim: its value with its interval, or its counts."""
    if row.get("counts"):
        return f"{row['statement'].partition(': ')[2]} {row['counts']}".strip()
    ends = f" [{rate(row['value_lo'])}, {rate(row['value_hi'])}]" if is_number(row["value_lo"]) else ""
    return f"{row.get('direction', '')} {rate(row['value'])}{ends}" if is_number(row["value"]) else ""


# --- pictures ---------------------------------------------------------------------------------------------------------


def _pictures(study: Study, tables: Mapping[str, StudyTable], folder: Path) -> dict[str, list[Picture]]:
    rows = {name: table.records for name, table in tables.items()}
    drawn = (
        {"differences": _differences(study, rows["differences"])}
        if study.kind is not CLIP
        else {
            "frontier": _frontier(study, rows["frontier"], {r["baseline"] for r in rows["keeps_both"]}),
            "matrix": _heat_maps(rows["matrix"]),
            "gamma": _gammas(rows["gamma"]),
            "fractions": _fractions(rows["fractions"]),
        }
    )
    return {
        section: [write_picture(figure, folder, *about) for figure, *about in made] for section, made in drawn.items()
    }


def _frontier(study: Study, rows: Sequence[Json], baselines: set[str]) -> Drawn:
    """Arms on all data with right pairs. Bars: one sd over seeds; of one seed half of the interval over queries."""
    whole, points = {arm.name for arm in study.arms if study.is_whole(arm)}, []
    for native, corrected in zip(rows[::2], rows[1::2], strict=True):
        bars, sides = [], ("t2i", "i2t")
        for lo, hi, sd in ((native[f"{d}_{end}"] for end in ("lo", "hi", "sd")) for d in sides):
            bars.append(sd if sd is not None else (hi - lo) / 2 if lo is not None else None)
        values: list[Any] = [[row[f"{d}_mean"] for d in sides] for row in (native, corrected)]
        at, other, error = (None if None in pair else tuple(pair) for pair in (*values, bars))
        if native["arm"] in whole and at is not None:
            about = (native["number"], native["arm"], native["norm"], native["i2t_weight"])
            points.append(Point(*about, at, error, other, native["arm"] in baselines))
    if points:
        alt = f"Frontier of {len(points)} arms: success@1 of text to image across, of image to text up."
        caption = (
            "Up and to the right is better. Filled: native, with bars of one standard deviation over seeds, of one "
            f"seed half of the interval over queries; half filled: corrected. Dashed: {KEPT:.0%} of sym/cosine. "
            "Arms that another one exceeds in both directions are grey."
        )
        yield figures.frontier_figure(points, KEPT), "frontier", alt, caption


def _heat_maps(rows: Sequence[Json]) -> Drawn:
    mine = {d: [[r[f"{s}_mean"] for s in SCORINGS] for r in rows if r["direction"] == d] for d in DIRECTIONS}
    values = {d: np.array(result, dtype=float) for d, result in mine.items()}  # None becomes nan
    if not rows or not all(np.isfinite(v).any() for v in values.values()):
        return
    top = max(float(np.nanmax(v)) for v in values.values()) or 1.0
    names = list(dict.fromkeys(r["arm"] for r in rows))
    for d in DIRECTIONS:
        alt = f"Heat map of success@1, {LONG[d]}: arms down, scorings across."
        caption = f"{LONG[d]}: trained with, down; scored with, across. Both pictures have one scale, 0 to {top:.2f}."
        yield figures.heat_figure(names, SCORINGS, values[d], top), f"matrix-{d}", alt, caption


def _gammas(rows: Sequence[Json]) -> Drawn:
    """Means over seeds at the steps that all of an arm's seeds logged."""
    series = []
    for number, name in enumerate(dict.fromkeys(r["arm"] for r in rows)):
        mine = [r for r in rows if r["arm"] == name]
        n, steps = len({r["seed"] for r in mine}), [r["step"] for r in mine]
        whole = [step for step in sorted(set(steps)) if steps.count(step) == n]
        for key in ("gamma_q", "gamma_d"):
            means = [float(np.mean([r[key] for r in mine if r["step"] == step])) for step in whole]
            series.append(Series(name if key == "gamma_q" else "", number, key == "gamma_d", whole, means))
    if any(one.steps for one in series):
        yield figures.curves_figure(series, "γ"), "gamma", "γ over steps.", "γq; dashed: γd. Means over seeds."


def _fractions(rows: Sequence[Json]) -> Drawn:
    """Native, and corrected where the direction was not trained."""
    for d in DIRECTIONS:
        known = [r for r in rows if r["direction"] == d and r["success@1_mean"] is not None]
        trained = {r["arm"] for r in known if (r["i2t_weight"] if d == "i2t" else 1 - r["i2t_weight"]) > 0}
        shown = [r for r in known if r["scoring"] == NATIVE or (r["scoring"] == CORRECTED and r["arm"] not in trained)]
        if shown:
            alt = f"success@1, {LONG[d]}, over the share of the training data."
            yield figures.fractions_figure(shown), f"fractions-{d}", alt, f"{LONG[d]}; bars: one sd over seeds."


def _differences(study: Study, rows: Sequence[Json]) -> Drawn:
    """nDCG@10 less cosine's, a picture a data set, in the same scale."""
    shown = [r for r in rows if r["scoring"] == NATIVE and is_number(r["ndcg@10_lo"])]
    ends = [0.0, *(r[f"ndcg@10_{end}"] for r in shown for end in ("lo", "hi"))]
    limits = (min(ends) - 0.005, max(ends) + 0.005)
    for i, data in enumerate(study.data):
        if mine := [r for r in shown if r["data"] == data]:
            arms, values, bands = ([r[name] for r in mine] for name in ("arm", "ndcg@10", "ndcg@10_smallest"))
            cis = [[r["ndcg@10_lo"], r["ndcg@10_hi"]] for r in mine]
            figure = figures.intervals_figure(arms, values, cis, bands, "nDCG@10 less cosine's", limits)
            where = f"{data}, {'out of' if i else 'in'} domain"
            alt = f"nDCG@10 of {len(mine)} norms less cosine's on {where}, with intervals."
            caption = f"{where}: native nDCG@10 less cosine's; grey: differences too small to be detected."
            yield figure, f"differences-{data}", alt, caption
