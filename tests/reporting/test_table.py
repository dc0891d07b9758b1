"""One table in a terminal, on a page and as CSV: hostile text, numbers never cut, full precision, gaps."""

from __future__ import annotations

import csv
import re

import pytest

from mmclip.reporting.table import MIN_WIDTH, NO, Cell, Table, change_cell, rate_cell, text_cell, value_cell
from tests.helpers.reporting import HOSTILE, printed


def wide(columns: int) -> Table:
    cells = [rate_cell(0.123456 + i / 100, [0.1, 0.2]) for i in range(columns)]
    return Table(HOSTILE, [HOSTILE, *(f"top\ncolumn {i}" for i in range(columns))], [(HOSTILE, cells)], [HOSTILE])


@pytest.mark.parametrize("columns", [2, 9])
def test_a_terminal_shows_text_as_text_and_whole_numbers(columns):
    text = printed(wide(columns))
    assert "\x1b" not in text and "\u202e" not in text and "[red]x" in text and ":smile:" in text
    assert max(map(len, text.splitlines())) <= MIN_WIDTH
    intervals = columns if columns == 2 else 1  # of the first column alone where there are many
    assert len(re.findall(r"\.\d{3}(?!\d)", text)) == columns + 2 * intervals
    assert not re.search(r"\.\d*…", text)


def test_explanations_stand_beside_short_heads_or_in_the_last_column():
    rows = [("run\nnative", [Cell("1")]), ("group", []), ("run\ncosine", [Cell("2")])]
    lines = printed(Table("t", ["run", "x"], rows)).splitlines()
    assert [line.split() for line in lines[3:6]] == [["run", "native", "1"], ["group"], ["run", "cosine", "2"]]
    long = printed(Table("t", ["run", "x"], [("run\nwhat it says in many words", [Cell("1")])])).splitlines()
    assert long[3].split()[:2] == ["run", "1"] and long[3].endswith("what it says in many words")


def test_a_page_escapes_and_has_dots_bars_and_kinds():
    noise = change_cell({"delta": -0.1, "ci": [-0.2, 0.1], "within_noise": True})
    rows = [("x\nhow", [rate_cell(0.5, [0.4, 0.6], bar=True), noise]), (HOSTILE, [])]
    html = Table(HOSTILE, ["run", "a\nb", "c"], rows, ["<b>"]).to_html("glance", {"x": 14})
    assert "<script" not in html
    for part in (
        *("&lt;script&gt;", "&lt;b&gt;", 'class="dot r2"', 'class="bar r2"', "<small>how</small>", "<small>b</small>"),
        *('<td class="noise">−.100 <span title="within noise">~</span>', "<small>−.200, .100</small>"),
        'x1="400.0" x2="600.0"',
    ):
        assert part in html


def test_a_file_has_full_precision_and_gaps(tmp_path):
    records = [{"arm": "a", "x": 1 / 3, "ok": True, "n": 3}, {"arm": "b,", "x": float("nan"), "y": None}]
    path = Table.of_records("t", records, ["arm", "y"]).to_csv(tmp_path / "t.csv")
    with path.open(encoding="utf-8", newline="") as file:
        first, second = csv.DictReader(file)
    assert first == {"arm": "a", "y": "", "x": repr(1 / 3), "ok": "yes", "n": "3"}
    assert (second["x"], second["n"], second["arm"]) == ("", "", "b,")
    rows = [("h\nmore", [rate_cell(0.123456789, [0, 1]), rate_cell(None), text_cell("x")])]
    assert Table("t", ["run", "a\nb", "c", "d"], rows).to_csv(tmp_path / "u.csv").read_text() == (
        "run,a b,c,d\nh,0.123456789,,x\n"
    )


@pytest.mark.parametrize("value", [None, {"value": None, "ci": None}, float("nan"), {"value": float("inf")}, "x", True])
def test_a_number_that_does_not_exist_is_a_dash(value):
    assert value_cell(value) == Cell(NO, kind="none")
