"""Tables of the studies' pages, until those are made of :class:`mmclip.reporting.table.Table`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

NO = "–"


class Cell(NamedTuple):
    text: str
    small: str = ""
    kind: str = ""
    bar: tuple[float, float, float] | None = None


class Row(NamedTuple):
    head: str
    cells: list[Cell]
    run: int | None = None
    strong: bool = False
    about: str = ""


@dataclass
class Table:
    label: str
    columns: list[str]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
