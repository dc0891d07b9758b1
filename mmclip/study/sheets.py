"""A study's tables as files: one row of plain values, full precision, and "" where a value does not exist."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmclip.errors import printable
from mmclip.io import write_text_atomically
from mmclip.reporting.cells import NO, Cell, Row, Table
from mmclip.reporting.formats import rate, span
from mmclip.reporting.table import is_number
from mmclip.study.numbers import Estimate, Spread

Json = dict[str, Any]


class Sheet(NamedTuple):
    """``name``: of the file, without its ending. ``head``: columns that stand first, whether a row has them or not."""

    name: str
    head: Sequence[str]
    rows: Sequence[Json]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys([*self.head, *(name for row in self.rows for name in row)]))


def write_sheet(sheet: Sheet, folder: Path) -> Path:
    """folder/NAME.csv with a header. Errors: UserError where it cannot be written."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(sheet.columns)
    writer.writerows([[_text(row.get(name)) for name in sheet.columns] for row in sheet.rows])
    path = folder / f"{sheet.name}.csv"
    write_text_atomically(path, text.getvalue().encode("utf-8", "backslashreplace").decode())
    return path


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and not is_number(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return repr(float(value)) if isinstance(value, float) else str(value)


def estimate_columns(name: str, found: Estimate) -> Json:
    """NAME, NAME_lo and NAME_hi of an estimate."""
    return {name: found.value, **interval_columns(name, found)}


def interval_columns(name: str, found: Estimate) -> Json:
    return {f"{name}_lo": found.lo, f"{name}_hi": found.hi}


def spread_columns(name: str, found: Spread) -> Json:
    """NAME_mean and NAME_sd over seeds."""
    return {f"{name}_mean": found.mean, f"{name}_sd": found.sd}


def reasons(**found: Estimate) -> str:
    """Why values do not exist: "ratio: no seed of ...", the same reason once."""
    told: dict[str, list[str]] = {}
    for name, estimate in found.items():
        if estimate.reason:
            told.setdefault(estimate.reason, []).append(name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in told.items())


def minus(number: str) -> str:
    return number.replace("-", "−")


def text_cell(value: Any, limit: int = 80) -> Cell:
    return Cell(NO, kind="none") if value in (None, "") else Cell(printable(_text(value), limit))


def mean_cell(row: Json, name: str, signed: bool = False) -> Cell:
    """The mean of NAME_mean with ± NAME_sd beneath."""
    mean, sd = row.get(f"{name}_mean"), row.get(f"{name}_sd")
    if not is_number(mean):
        return Cell(NO, kind="none")
    return Cell(_number(mean, signed), f"±{rate(sd)}" if is_number(sd) else "")


def estimate_cell(row: Json, name: str, signed: bool = False, around: float = 0.0) -> Cell:
    """NAME with its interval beneath; its kind says whether that lies above or below ``around`` or holds it."""
    value, lo, hi = (row.get(key) for key in (name, f"{name}_lo", f"{name}_hi"))
    if not is_number(value):
        return Cell(NO, kind="none")
    if lo is None or hi is None:
        return Cell(_number(value, signed), "no interval")
    kind = "up" if lo > around else "down" if hi < around else "noise"
    return Cell(_number(value, signed), minus(span([lo, hi])), kind)


def _number(value: float, signed: bool) -> str:
    return minus(f"{'+' if signed and value >= 0 else ''}{rate(value)}")


def page_table(label: str, head: str, rows: Sequence[tuple[str, str, Sequence[Cell]]], columns: Sequence[str]) -> Table:
    """A table of the page: rows of (head, what stands beneath it, cells)."""
    found = [Row(printable(name, 60), list(cells), about=printable(about, 160)) for name, about, cells in rows]
    return Table(label, [head, *columns], found)
