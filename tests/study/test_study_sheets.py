"""CSV files of a study: what goes in comes out, and nothing stands for what does not exist."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmclip.study.numbers import Estimate
from mmclip.study.sheets import Sheet, estimate_cell, estimate_columns, mean_cell, reasons, write_sheet

values = (
    st.none()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs", "Cc")))
)


@given(st.lists(st.dictionaries(st.sampled_from(["a", "b", 'c,"']), values), max_size=5))
def test_rows_survive_the_file(tmp_path_factory, rows):
    path = write_sheet(Sheet("x", ("a",), rows), tmp_path_factory.mktemp("sheet"))
    with path.open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == len(rows)
    for row, read in zip(rows, found, strict=True):
        for name, text in read.items():
            value = row.get(name)
            assert (float(text) == value) if isinstance(value, float) else (text == ("" if value is None else value))


def test_a_header_stands_without_rows_and_nan_is_empty(tmp_path: Path):
    assert write_sheet(Sheet("x", ("a", "b"), []), tmp_path).read_text(encoding="utf-8") == "a,b\n"
    text = write_sheet(Sheet("x", ("a",), [{"a": float("nan"), "b": True}]), tmp_path).read_text(encoding="utf-8")
    assert text == "a,b\n,yes\n"


def test_cells_say_which_side_of_a_bound_an_interval_is():
    kinds = {(0.96, 1.1): "up", (0.5, 0.9): "down", (0.9, 1.0): "noise"}
    for (lo, hi), kind in kinds.items():
        assert estimate_cell(estimate_columns("r", Estimate(0.97, lo, hi, 3)), "r", around=0.95).kind == kind
    assert estimate_cell(estimate_columns("r", Estimate.missing("why")), "r").kind == "none"
    assert estimate_cell(estimate_columns("r", Estimate(0.5, None, None, 1)), "r").small == "no interval"
    assert mean_cell({"m_mean": -0.1, "m_sd": None}, "m", signed=True)[:2] == ("−.100", "")


def test_one_reason_is_told_once():
    same = Estimate.missing("no baseline")
    assert reasons(a=same, b=same, c=Estimate(1.0, 1.0, 1.0, 1)) == "a, b: no baseline"


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path):
    from mmclip.errors import UserError

    with pytest.raises(UserError, match="cannot be written"):
        write_sheet(Sheet("x", ("a",), []), tmp_path / "none")
