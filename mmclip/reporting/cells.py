"""The report's tables, as plain cells: what stands where, and nothing of how it looks.

A cell's text is data or a number and is escaped by the template. Every rate has its 95% interval beneath it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mmclip import metrics
from mmclip.errors import printable
from mmclip.evaluation.comparison import compare, scoring_gain
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import CORRECTED, NATIVE, REVERSED
from mmclip.reporting.formats import delta, number, rate, span
from mmclip.reporting.source import ReportRun
from mmclip.reporting.table import is_number
from mmclip.reporting.tables import FEW_CLUSTERS, few_clusters
from mmclip.similarity import CLIP_DIRECTIONS

Json = dict[str, Any]
NO = "–"  # a number that does not exist
_SHORT = {
    "success@1": "S@1",
    "success@5": "S@5",
    "success@10": "S@10",
    "recall@5": "R@5",
    "mrr@10": "MRR@10",
    "ndcg@10": "nDCG@10",
    "map": "MAP",
}
RATES = {metric: _SHORT.get(metric, metric) for metric in metrics.RATES}
ORDER = (NATIVE, "cosine", CORRECTED, REVERSED)  # of scorings; the others follow as they come


class Cell(NamedTuple):
    """``small`` stands beneath the text; kind: "", "noise", "up", "down" or "none"; bar: (low, value, high) of an
    interval, fractions of the cell's width."""

    text: str
    small: str = ""
    kind: str = ""
    bar: tuple[float, float, float] | None = None


class Row(NamedTuple):
    """run: its number, for its colour, or None; strong: what the eye should find first; about: stands beneath the head.
    A row without cells heads those below it."""

    head: str
    cells: list[Cell]
    run: int | None = None
    strong: bool = False
    about: str = ""


@dataclass
class Table:
    """``label`` says what it is to who cannot see it; the first column holds the rows' heads."""

    label: str
    columns: list[str]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


def glance(runs: Sequence[ReportRun], pool: str = MAIN_POOL) -> Table:
    """success@1 of every run by its main scorings, the two directions side by side, intervals drawn.

    Every bar has one scale, from 0 to the tenth above the largest end of an interval; a note says which.
    """
    rows: list[Row] = []
    for run in runs:
        retrieval = run.results.pools[pool]["retrieval"]
        for scoring in [s for s in ORDER[:3] if any(s in retrieval[d.value] for d in CLIP_DIRECTIONS)]:
            cells = []
            for direction in CLIP_DIRECTIONS:
                cells.append(_rate_cell(retrieval[direction.value].get(scoring), "success@1", bar=True))
            rows.append(Row(run.name, cells, run.number, scoring == NATIVE, scoring))
    end = _upper_end([cell.bar[2] for row in rows for cell in row.cells if cell.bar])
    rows = [row._replace(cells=[_scaled(cell, end) for cell in row.cells]) for row in rows]
    columns = ["run, scoring", *map(_long, CLIP_DIRECTIONS)]
    scale = f"Each line runs from 0 to {_minus(rate(end)).rstrip('0').rstrip('.')}, the same for all"
    notes = [
        f"{scale}; the tick is the value, the band its interval. All images and captions (pool {pool}).",
        *few_images(runs, pool),
    ]
    return Table(f"success@1 in both directions, pool {pool}", columns, rows, notes)


def _upper_end(ends: Sequence[float]) -> float:
    """The tenth at or above the largest end, .1 to 1: rates of .08 and .2 would look alike on a line up to 1.

    >>> _upper_end([0.08, 0.21]), _upper_end([0.3]), _upper_end([1.0]), _upper_end([])
    (0.3, 0.3, 1.0, 1.0)
    """
    return max(math.ceil(max(ends, default=1.0) * 10 - 1e-9), 1) / 10  # 0.3 * 10 may be above 3


def _scaled(cell: Cell, end: float) -> Cell:
    if cell.bar is None:
        return cell
    low, value, high = (x / end for x in cell.bar)
    return cell._replace(bar=(low, value, high))


def few_images(runs: Sequence[ReportRun], pool: str) -> list[str]:
    """A sentence for each direction in which fewer than ``FEW_CLUSTERS`` images ask: intervals are too narrow then.
    The runs are over the same data, so the first speaks for all."""
    found = []
    for direction in CLIP_DIRECTIONS:
        if n := few_clusters(runs[0].results, pool, direction.value):
            found.append(
                f"{direction.value}: queries of {n} image{'s' * (n != 1)} ask; 95% intervals over fewer than "
                f"{FEW_CLUSTERS} are too narrow."
            )
    return found


def numbers(runs: Sequence[ReportRun], pool: str, direction: str) -> Table:
    """Every metric in one direction, run by run; scorings with the same numbers share a row."""
    rows, notes = [], []
    banks: dict[str, list[str]] = {}
    for run in runs:
        section = run.results.pools[pool]["retrieval"][direction]
        if len(runs) > 1:
            rows.append(Row(run.name, [], run.number))
        for names in _alike(section):
            found = section[names[0]]
            cells = [_rate_cell(found, metric) for metric in RATES]
            median = found.get("median_rank")
            cells.append(Cell(f"{median:g}") if is_number(median) else Cell(NO, kind="none"))
            rows.append(Row(" = ".join(names), cells, strong=NATIVE in names))
        found = section.get(CORRECTED)
        if isinstance(found, dict):
            alpha = f" (α {number(found['alpha'])})" if is_number(found.get("alpha")) else ""
            gain = scoring_gain(run.results, pool, direction, REVERSED, CORRECTED) if REVERSED in section else None
            banks.setdefault(_bank_words(found), []).append(
                f"{run.name}{alpha}" + (f" {_minus(delta(gain))}" if gain else "")
            )
    for bank, gains in banks.items():
        notes.append(f"{bank} Corrected less reversed, success@1, paired, ~ within noise: {'; '.join(gains)}.")
    return Table(f"{direction}, pool {pool}", ["scoring", *RATES.values(), "median rank"], rows, notes)


def changes(runs: Sequence[ReportRun]) -> dict[str, dict[str, Table]]:
    """pool -> direction -> every run less the first, paired. {} for a single run.

    Errors: UserError where the runs were not evaluated on the same data.
    """
    first, *others = runs
    found = {run.number: compare(first.results, run.results) for run in others}
    tables: dict[str, dict[str, Table]] = {}
    for pool in shared_pools(runs) if others else []:
        tables[pool] = {}
        for direction in CLIP_DIRECTIONS:
            rows = []
            for run in others:
                section = found[run.number][pool][direction.value]
                rows.append(Row(f"{run.name} less {first.name}", [], run.number))
                for names in _alike(section):
                    cells = [change_cell(section[names[0]][metric]) for metric in RATES]
                    rows.append(Row(" = ".join(names), cells, strong=NATIVE in names))
            label = f"differences to {first.name}, {direction.value}, pool {pool}"
            tables[pool][direction.value] = Table(label, ["scoring", *RATES.values()], rows)
    return tables


def lengths(runs: Sequence[ReportRun], pool: str) -> Table:
    """Mean length, CV and Cohen's d by reference set, of each side as the documents of a direction."""
    sides = [(d.document_side, d.value) for d in reversed(CLIP_DIRECTIONS)]
    columns = ["run"]
    for side, direction in sides:
        columns += [f"|{side}| mean", "CV", f"d topk, {direction}", "d corpus", "d pairs"]
    rows = []
    reasons: dict[tuple[str, str], dict[str, list[str]]] = {}
    for run in runs:
        cells = []
        for side, _ in sides:
            section = run.results.pools[pool]["magnitude"][side]
            mean, cv = section.get("mean"), section.get("cv")
            cells.append(Cell(number(mean)) if is_number(mean) else Cell(NO, kind="none"))
            cells.append(Cell(rate(cv)) if is_number(cv) else Cell(NO, kind="none"))
            for kind in ("topk", "corpus", "pairs"):
                cells.append(value_cell(section["cohens_d"].get(kind), signed=True))
                reason = section["cohens_d"].get(f"{kind}_reason")
                if reason is not None:
                    reasons.setdefault((kind, printable(reason)), {}).setdefault(f"|{side}|", []).append(run.name)
        rows.append(Row(run.name, cells, run.number))
    notes = []
    for (kind, reason), of in reasons.items():
        who = [s if len(names) == len(runs) else f"{s} ({', '.join(names)})" for s, names in of.items()]
        notes.append(f"d {kind} of {' and '.join(who)} does not exist: {reason}.")
    return Table(f"embedding length, pool {pool}", columns, rows, notes)


def settings(runs: Sequence[ReportRun]) -> tuple[Table, Table]:
    """(settings that differ, all the others) of the runs, with what the training left and the versions."""
    columns = [_facts_of(run) for run in runs]
    names = list(dict.fromkeys(name for facts in columns for name in facts))
    rows = {name: Row(name, [Cell(facts.get(name, NO)) for facts in columns]) for name in names}
    differ = [n for n in names if len({facts.get(n) for facts in columns}) > 1]
    heads = ["setting", *(run.name for run in runs)]
    return (
        Table("settings that differ between the runs", heads, [rows[n] for n in differ]),
        Table("settings and versions", heads, [rows[n] for n in names if n not in differ]),
    )


def _facts_of(run: ReportRun) -> dict[str, str]:
    found: dict[str, Any] = dict(run.settings or {})
    for head in ("trained_with", "data", "evaluation", "versions"):
        found |= _flat(run.results.json.get(head) or {}, head)
    found |= {k: run.results.json[k] for k in ("model", "seed") if k in run.results.json}
    return {printable(name, 80): _setting_words(value) for name, value in found.items()}


def _flat(section: Any, prefix: str) -> Json:
    if not isinstance(section, dict):
        return {prefix: section}
    return {k: v for name, inner in section.items() for k, v in _flat(inner, f"{prefix} · {name}").items()}


def _setting_words(value: Any) -> str:
    if value is None:
        return NO
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return printable(", ".join(map(str, value)), 200)
    return printable(repr(value) if value in ("", "\t") else value, 200)


def shared_pools(runs: Sequence[ReportRun]) -> list[str]:
    first, *others = (run.results.pools for run in runs)
    return [pool for pool in first if all(pool in other for other in others)]


def value_cell(found: Any, signed: bool = False) -> Cell:
    """{"value", "ci"} or a bare number; a dash where it does not exist."""
    value, ci = (found.get("value"), found.get("ci")) if isinstance(found, dict) else (found, None)
    if not is_number(value):
        return Cell(NO, kind="none")
    text = f"{value:+.2f}" if signed else number(value)
    return Cell(_minus(text), _minus(span(ci, 2 if signed else 3)))


def _alike(section: Json) -> list[list[str]]:
    """Scorings grouped by equal numbers, native first: four normalizations are two rankings."""
    groups: dict[str, list[str]] = {}
    for scoring in sorted(section, key=lambda s: ORDER.index(s) if s in ORDER else len(ORDER)):
        groups.setdefault(json.dumps(section[scoring], sort_keys=True), []).append(scoring)
    return list(groups.values())


def _rate_cell(found: Any, metric: str, bar: bool = False) -> Cell:
    value = found.get(metric) if isinstance(found, dict) else None
    if not is_number(value):
        return Cell(NO, kind="none")
    ci = (found.get("ci") or {}).get(metric)
    ends = ci if ci and all(map(is_number, ci)) else [value, value]
    drawn = (min(max(x, 0.0), 1.0) for x in (ends[0], value, ends[1])) if bar else None
    return Cell(rate(value), span(ci), bar=tuple(drawn) if drawn else None)  # type: ignore[arg-type]


def change_cell(change: Json) -> Cell:
    """{"delta", "ci", "within_noise"} of a paired difference."""
    value = change["delta"]
    if not is_number(value):
        return Cell(NO, kind="none")
    kind = "noise" if change["within_noise"] else "up" if value > 0 else "down"
    return Cell(_minus(rate(value) if value < 0 else f"+{rate(value)}"), _minus(span(change["ci"])), kind)


def _minus(number: str) -> str:
    return number.replace("-", "−")


def _bank_words(found: Json) -> str:
    words = f"corrected: evidence over a bank of {_setting_words(found.get('bank_size'))}"
    words += "" if found.get("transductive") else f" ({printable(found.get('bank'))})"
    if is_number(found.get("bank_overlap")):
        words += f", {found['bank_overlap']:g} of them in the evaluation, too"
    if found.get("transductive"):
        words += "; transductive: the bank is the evaluation's own items, which a search engine would not have"
    return words + "."


def _long(direction: Any) -> str:
    return {"i2t": "image → text (i2t)", "t2i": "text → image (t2i)"}[direction.value]
