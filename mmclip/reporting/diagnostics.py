"""The report's table of diagnostics: the measures that a reader should meet first, then all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmclip.errors import printable
from mmclip.evaluation.measures import MEASURES, alpha_note, value_at
from mmclip.reporting.cells import NO, Cell, Row, Table, value_cell
from mmclip.reporting.source import ReportRun
from mmclip.reporting.table import is_number
from mmclip.similarity import CLIP_DIRECTIONS

Json = dict[str, Any]


def diagnostics(runs: Sequence[ReportRun], pool: str) -> tuple[Table, Table] | None:
    """(the first ones with what they say, all numbers by their names in results.json); None where no run has any in
    the pool."""
    sections = {
        (run.number, d.value): section
        for run in runs
        for d in CLIP_DIRECTIONS
        if isinstance(section := (run.results.pools[pool].get("diagnostics") or {}).get(d.value), dict)
    }
    if not sections:
        return None
    named = {run.number: run.name for run in runs}
    heads = [f"{named[n]} · {d}" if len(runs) > 1 else d for n, d in sections]
    reasons: dict[str, tuple[list[str], list[str]]] = {}  # what does not exist, and where
    rows = []
    for path, label, about in MEASURES:
        cells = []
        for head, section in zip(heads, sections.values(), strict=True):
            value, reason = value_at(section, path.split())
            cells.append(value_cell(value))
            for known, new in zip(reasons.setdefault(reason, ([], [])), (label, head), strict=True) if reason else ():
                known += [new] if new not in known else []
        if any(cell.text != NO for cell in cells):
            rows.append(Row(label, cells, about=about))
    notes = [
        f"Does not exist: {', '.join(labels)}"
        + (f" ({', '.join(who)})" if len(who) < len(heads) else "")
        + f": {printable(reason, 200)}."
        for reason, (labels, who) in reasons.items()
    ]
    alpha = alpha_note(dict(zip(heads, sections.values(), strict=True)))
    notes += [f"{alpha}."] if alpha is not None else []
    flat = {key: _flat(section) for key, section in sections.items()}
    names = list(dict.fromkeys(name for values in flat.values() for name in values))
    every = [Row(name, [flat[key].get(name, Cell(NO, kind="none")) for key in sections]) for name in names]
    first = Table(f"diagnostics, pool {pool}", ["diagnostic", *heads], rows, notes)
    return first, Table(f"all diagnostics, pool {pool}", ["name", *heads], every)


def _flat(section: Json, prefix: str = "") -> dict[str, Cell]:
    """Every value by the names that lead to it; a value with an interval is one."""
    found: dict[str, Cell] = {}
    for key, value in section.items():
        name = printable(f"{prefix}{key}", 120)
        if isinstance(value, dict) and "ci" not in value:
            found |= _flat(value, f"{name} · ")
        elif isinstance(value, dict | float) or is_number(value):
            found[name] = value_cell(value)
        elif value is not None:
            found[name] = Cell(printable(value, 160))
    return found
