"""One table for terminal, page and file: cells with intervals, and how numbers are written.

Rates are fractions without the leading zero. Text from data is plain text everywhere: escaped in HTML, no markup in a
terminal, on one line.
"""

from __future__ import annotations

import csv
import functools
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, TypeGuard

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich import box
from rich.console import Console, Group
from rich.table import Table as RichTable
from rich.text import Text

from mmclip.errors import printable
from mmclip.io import write_text_atomically

Json = Mapping[str, Any]
NO = "–"  # a number that does not exist
MIN_WIDTH = 132  # characters: a narrower terminal folds lines, which is better than numbers that are cut
MAX_HEAD, MAX_SHORT = 36, 12  # characters of a row's head in a terminal, and of an explanation that stands in it


@dataclass
class Cell:
    """A value of a table.

    Attributes:
        text: the value as it is shown.
        detail: beside it, smaller: its interval, its spread.
        kind: "noise" (within noise), "up" or "down" (a difference beyond noise), "none" (no value).
        bar: (low, value, high), each a fraction of the cell's width, drawn on a page only.
        value: what a CSV file holds, in full precision; the text where it is None.
    """

    text: str
    detail: str = ""
    kind: Literal["", "noise", "up", "down", "none"] = ""
    bar: tuple[float, float, float] | None = None
    value: float | str | bool | None = None


@dataclass
class Table:
    """Rows of cells under column heads.

    Attributes:
        title: what the table holds.
        columns: heads of all columns, the first that of the rows' heads; "\\n" divides a head into two lines.
        rows: (head, cells). A head's second line, after "\\n", explains it; a row without cells heads those below it.
        notes: sentences under the table.
    """

    title: str
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of_records(cls, title: str, records: Sequence[Json], first: Sequence[str] = ()) -> Table:
        """Table of plain values, a row a record; ``first``: columns that stand first, whether a record has them or not.

        >>> Table.of_records("t", [{"arm": "a", "x": 0.5}, {"arm": "b", "y": None}]).columns
        ['arm', 'x', 'y']
        """
        names = list(dict.fromkeys([*first, *(name for record in records for name in record)]))
        rows = [[text_cell(record.get(name), 200) for name in names] for record in records]
        return cls(title, names, [("" if c.kind == "none" else str(c.value), cells) for c, *cells in rows])

    def to_rich(self) -> RichTable:
        """The table without title and notes; ``console.print(table)`` shows all three. Where it would be too wide,
        intervals stand in the first column of values alone; a name may be cut, a number never is."""
        heads = [[printable(line, MAX_HEAD) for line in name.split("\n")] for name in self.columns]
        explained = [printable(head.partition("\n")[2]) for head, _ in self.rows]
        short = all(len(text) <= MAX_SHORT for text, (_, cells) in zip(explained, self.rows, strict=True) if cells)
        names = [
            printable(head.partition("\n")[0], MAX_HEAD) + (f" {text}" if text and (short or not cells) else "")
            for text, (head, cells) in zip(explained, self.rows, strict=True)
        ]
        for everywhere in (True, False):
            texts = [[_inline(cell, everywhere or i == 0) for i, cell in enumerate(cells)] for _, cells in self.rows]
            shown = [row for row in texts if row]
            wide = [max(map(len, [*head, *(row[i] for row in shown)])) + 2 for i, head in enumerate(heads[1:])]
            if sum(wide) + max(map(len, names), default=0) <= MIN_WIDTH:
                break
        table = RichTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
        styles: list[Json] = [{"max_width": max(MIN_WIDTH - sum(wide) - 24 * (not short), 8)}]
        styles += [{"justify": "right", "min_width": width} for width in wide]
        for head, style in zip(heads, styles, strict=True):
            above = [""] * (max(map(len, heads)) - len(head))
            table.add_column(Text("\n".join(above + head)), no_wrap=True, **style)
        if not short:
            table.add_column("", no_wrap=False)
        for name, row, text, (_, cells) in zip(names, texts, explained, self.rows, strict=True):
            dim = ("dim" if cell.kind in ("none", "noise") else "" for cell in cells)
            more = [] if short or not cells else [Text(f"  {text}", style="dim")]
            table.add_row(Text(name), *map(Text, row, dim), *more)
        return table

    def __rich__(self) -> Group:
        notes = [Text(printable(note, 600), style="dim") for note in self.notes]
        return Group(Text(printable(self.title, 200), style="bold"), self.to_rich(), *notes, Text(""))

    def to_html(self, kind: str = "wide", colours: Mapping[str, int] | None = None) -> Markup:
        """The table in a region that scrolls sideways, and its notes; all text is escaped.

        Args:
            kind: class of the table element.
            colours: row heads -> number of a run, which has a dot in the run's colour there, and bars.
        """
        module: Any = templates().get_template("table.html.j2").module
        return Markup(module.table(self, kind, colours or {}))

    def to_csv(self, path: Path) -> Path:
        """Write columns and rows as plain values in full precision, "" where a value does not exist.

        Errors: UserError where the file cannot be written.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(name.replace("\n", " ") for name in self.columns)
        writer.writerows([head.partition("\n")[0], *map(_plain, cells)] for head, cells in self.rows)
        write_text_atomically(path, text.getvalue().encode("utf-8", "backslashreplace").decode())
        return path


def _inline(cell: Cell, detail: bool) -> str:
    mark = "~" if cell.kind == "noise" else ""
    return printable(f"{mark}{cell.text} {cell.detail if detail else ''}".rstrip(), 80)


def _plain(cell: Cell) -> str:
    value = cell.text if cell.value is None else cell.value
    if cell.kind == "none" or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return repr(float(value)) if isinstance(value, float) else str(value)


@functools.cache
def templates() -> Environment:
    """Templates of pages: everything is escaped, and an undefined name is an error."""
    loader = PackageLoader("mmclip.reporting")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def make_console(file: IO[str] | None = None) -> Console:
    """Console on ``file`` (stdout), with colours on a terminal alone, wide enough for the tables."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    console.width = max(console.width, MIN_WIDTH)
    return console


def show(tables: Iterable[Table], console: Console | None = None) -> None:
    """Print tables with their titles and notes."""
    console = console or make_console()
    for table in tables:
        console.print(table)


# --- how numbers are written ------------------------------------------------------------------------------------------


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of JSON is a finite number.

    >>> is_number(0.5), is_number(float("nan")), is_number(True), is_number(None)
    (True, False, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def rate(value: float | None, ci: Sequence[float] | None = None) -> str:
    """A fraction, with half of its interval where there is one.

    >>> rate(0.4521), rate(1.0), rate(-0.25), rate(0.4521, [0.42, 0.48]), rate(None)
    ('.452', '1.000', '−.250', '.452 ±.030', '–')
    """
    half = "" if ci is None else f" ±{_bare((ci[1] - ci[0]) / 2)}"
    return NO if value is None else _bare(value) + half


def signed(value: float) -> str:
    """A difference of fractions.

    >>> signed(0.0312), signed(-1.5)
    ('+.031', '−1.500')
    """
    return _bare(value, "+")


def span(ci: Sequence[float] | None) -> str:
    """An interval in full; ``""`` where there is none.

    >>> span([0.42, 0.48]), span([-0.05, 0.012]), span(None)
    ('.420–.480', '−.050, .012', '')
    """
    if ci is None or not all(map(is_number, ci)):
        return ""
    return (", " if ci[0] < 0 else "–").join(map(_bare, ci))


def number(value: float | None) -> str:
    """Four digits.

    >>> number(12.3456), number(0.05), number(None)
    ('12.35', '0.05000', '–')
    """
    return NO if value is None else f"{value:#.4g}".replace("-", "−")


def _bare(value: float, sign: str = "") -> str:
    """Three digits after a point without its leading zero."""
    return re.sub(r"^([+-]?)0\.", r"\1.", f"{value:{sign}.3f}").replace("-", "−")


def text_cell(value: object, limit: int = 80) -> Cell:
    """Any plain value in words; none where it is None, "" or not finite.

    >>> text_cell(True).text, text_cell(0.25).text, text_cell(None).text
    ('yes', '0.25', '–')
    """
    if value is None or value == "" or (isinstance(value, float) and not math.isfinite(value)):
        return Cell(NO, kind="none")
    if isinstance(value, bool):
        return Cell("yes" if value else "no", value=value)
    if isinstance(value, float):
        return Cell(f"{value:.6g}", value=value)
    return Cell(printable(value, limit), value=str(value))


def rate_cell(value: object, ci: Sequence[float] | None = None, bar: bool = False) -> Cell:
    """A fraction with its interval; ``bar`` draws both on a line from 0 to 1."""
    if not is_number(value):
        return Cell(NO, kind="none")
    ends = ci if ci is not None and all(map(is_number, ci)) else (value, value)
    low, at, high = (min(max(float(x), 0.0), 1.0) for x in (ends[0], value, ends[1]))
    return Cell(rate(value), span(ci), bar=(low, at, high) if bar else None, value=value)


def change_cell(change: Json | None) -> Cell:
    """A paired difference {"delta", "ci"}, within noise where the interval holds 0 or is missing; none for None."""
    if change is None or not is_number(change["delta"]):
        return Cell(NO, kind="none")
    value, ci = change["delta"], change["ci"]
    noise = change.get("within_noise", ci is None or ci[0] <= 0 <= ci[1])
    kind: Literal["noise", "up", "down"] = "noise" if noise else "up" if value > 0 else "down"
    return Cell(signed(value), span(change["ci"]), kind, value=value)


def value_cell(value: object, effect: bool = False) -> Cell:
    """A number, or {"value", "ci"}; ``effect``: a signed effect size with two digits."""
    value, ci = (value.get("value"), value.get("ci")) if isinstance(value, Mapping) else (value, None)
    if not is_number(value):
        return Cell(NO, kind="none")
    if not effect:
        return Cell(number(value), span(ci), value=value)
    ends = ", ".join(f"{x:.2f}" for x in ci) if ci is not None and all(map(is_number, ci)) else ""
    return Cell(f"{value:+.2f}".replace("-", "−"), ends.replace("-", "−"), value=value)
