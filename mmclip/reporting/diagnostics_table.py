"""The diagnostics of runs as a table for a terminal: measures down, directions across, and why a number is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from mmclip.errors import printable
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.measures import MEASURES, alpha_note, value_at
from mmclip.evaluation.results import Results
from mmclip.reporting.formats import NONE
from mmclip.reporting.table_parts import column, make_console, new_table, row, titled
from mmclip.similarity import Direction


def diagnostics_table(results: Results, name: str | None = None, pool: str = MAIN_POOL) -> tuple[Group, list[str]]:
    """(measures of a pool in every direction, reasons of what does not exist, and what hangs on a guess)."""
    sections = results.pools[pool].get("diagnostics") or {}
    directions = [Direction(d) for d in results.pools[pool]["retrieval"]]
    table = new_table("measure")
    for direction in directions:
        column(table, direction.value, f"{direction.query_side} asks")
    table.add_column(Text("\nwhat it says"), no_wrap=False)
    missing: dict[str, list[str]] = {}
    for path, label, about in MEASURES:
        cells = []
        for direction in directions:
            value, reason = value_at(sections.get(direction.value), path.split())
            cells.append(shown(value))
            if reason is not None:
                missing.setdefault(f"{label}: {printable(reason, 200)}", []).append(direction.value)
        if any(cell != NONE for cell in cells):
            row(table, [label, *cells, Text(about, style="dim")])
    said = [text if len(where) == len(directions) else f"{text} ({where[0]})" for text, where in missing.items()]
    note = alpha_note({d.value: sections.get(d.value) for d in directions})
    said += [note] if note is not None else []
    return titled(
        f"diagnostics of {name if name is not None else results.json.get('model')}", results, pool, table
    ), said


def shown(value: Any) -> str:
    """A number, or {"value", "ci"} with half of its 95% interval.

    >>> shown({"value": 0.512, "ci": [0.4, 0.6]}), shown(3.0), shown(None)
    ('0.512 ±0.100', '3.000', '-')
    """
    ci = None
    if isinstance(value, Mapping):
        value, ci = value.get("value"), value.get("ci")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NONE
    return f"{value:.3f}" + (f" ±{(ci[1] - ci[0]) / 2:.3f}" if ci else "")


def print_diagnostics(results: Results, name: str | None = None, console: Console | None = None) -> None:
    """Every pool's table, and the reasons for what is missing and the notes under it."""
    console = console or make_console()
    for pool in results.pools:
        table, said = diagnostics_table(results, name, pool)
        console.print(table)
        for note in said:
            console.print(Text(note, style="dim"))
        if said:
            console.print()
