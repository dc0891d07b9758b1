"""What tables are put together from: cells that data cannot mark up, and columns that never cut a number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from mmclip.errors import printable
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import Results

MIN_WIDTH = 132  # no table is wider; a narrower terminal folds lines, which is better than numbers cut off
NAME_WIDTH = 22


def make_console(file: IO[str] | None = None) -> Console:
    """A console on ``file`` (stdout): colours only where it is a terminal, and never too narrow for the tables."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    console.width = max(console.width, MIN_WIDTH)
    return console


def new_table(first: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column(Text(f"\n{first}"), no_wrap=True, overflow="ellipsis")
    return table


def gap(table: Table) -> None:
    table.add_column(Text(""), no_wrap=True)


def column(table: Table, top: str, bottom: str) -> None:
    table.add_column(Text.assemble(top, "\n", name_cell(bottom)), justify="right", no_wrap=True)


def row(table: Table, cells: Iterable[Text | str], style: str = "") -> None:
    table.add_row(*(Text(c) if isinstance(c, str) else c for c in cells), style=style)


def titled(title: object, results: Results | None, pool: str, table: Table) -> Group:
    # Where a table is too wide the first column, a name, may be cut. A number never is.
    for column in table.columns[1:]:
        column.min_width = max(
            (line.cell_len for c in column.cells if isinstance(c, Text) for line in c.split()), default=0
        )
    words = f" · pool {printable(pool, 40)}"
    if results is not None:
        place = results.json["data"] if pool == MAIN_POOL else results.json["pools"][pool]
        asked = ", ".join(f"{n} {d}" for d, n in place["n_queries"].items())
        text = "n_documents" in place
        held = f"{place['n_documents']} documents" if text else f"{place['n_images']} images, {place['n_texts']} texts"
        words += f": {held}; queries {asked}"
    return Group(Text.assemble((printable(title, 60), "bold"), printable(words, 200)), table, Text(""))


def name_cell(name: object) -> Text:
    text = Text(printable(name), no_wrap=True)
    text.truncate(NAME_WIDTH, overflow="ellipsis")
    return text
