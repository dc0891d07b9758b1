"""The report's tables hold the results' numbers, and only those."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from mmclip.evaluation.comparison import compare
from mmclip.reporting.cells import NO, RATES, changes, few_images, glance, lengths, numbers, settings, value_cell
from mmclip.reporting.source import read_runs
from tests.helpers.reporting import COSINE, make_pictures, make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    pictures = make_pictures(folder / "pictures")
    make_run(folder / "a", pictures, COSINE, "sym", "cosine", noise=1.2)
    make_run(folder / "b", pictures, bank=True)
    return read_runs({"a": folder / "a", "b": folder / "b"})


def bare(x: float, sign: str = "") -> str:
    return f"{x:{sign}.3f}".replace("0.", ".").replace("-", "−")


def test_every_metric_stands_with_its_interval(runs):
    table = numbers(runs[1:], "distractors", "t2i")
    assert table.columns == ["scoring", *RATES.values(), "median rank"]
    row = next(r for r in table.rows if r.head.startswith("native"))
    found = runs[1].results.pools["distractors"]["retrieval"]["t2i"]["native"]
    for metric, cell in zip(RATES, row.cells, strict=False):
        lo, hi = found["ci"][metric]
        assert (cell.text, cell.small) == (bare(found[metric]), f"{bare(lo)}–{bare(hi)}")
    assert row.cells[-1].text == f"{found['median_rank']:g}"
    assert row.strong
    assert "corrected" in [r.head for r in table.rows]
    assert "corrected" not in [r.head for r in numbers(runs[1:], "distractors", "i2t").rows]


def test_differences_are_the_comparisons(runs):
    found = compare(runs[0].results, runs[1].results)
    tables = changes(runs)
    assert list(tables) == ["retrieval", "distractors"]
    head, *rows = tables["retrieval"]["i2t"].rows
    assert (head.head, head.cells) == ("b less a", [])
    native = next(r for r in rows if r.strong)
    for metric, cell in zip(RATES, native.cells, strict=True):
        change = found["retrieval"]["i2t"]["native"][metric]
        assert cell.text == bare(change["delta"], "+")
        assert (cell.kind == "noise") is change["within_noise"]
        assert cell.kind in ("noise", "up" if change["delta"] > 0 else "down")
    assert changes(runs[:1]) == {}


def test_the_glance_draws_intervals_within_its_cell(runs):
    table = glance(runs)
    assert [(r.head, r.about) for r in table.rows] == [
        *(("a", s) for s in ("native", "cosine")),
        *(("b", s) for s in ("native", "cosine", "corrected")),
    ]
    assert table.rows[-1].cells[0].text == NO  # i2t was trained: there is nothing to correct
    for row in table.rows:
        for cell in row.cells:
            assert cell.bar is None or 0 <= cell.bar[0] <= cell.bar[1] <= cell.bar[2] <= 1


def test_the_glance_has_one_scale_a_tenth_above_the_largest_end(runs):
    low = copy.deepcopy(runs)
    for i, run in enumerate(low):
        for direction in ("i2t", "t2i"):
            for found in run.results.json["retrieval"][direction].values():
                found["success@1"] = 0.1 + i / 20
                found["ci"]["success@1"] = [0.05, 0.15 + i / 10]
    table = glance(low)
    bars = {row.head: row.cells[1].bar for row in table.rows}
    assert bars["a"] == pytest.approx((0.05 / 0.3, 0.1 / 0.3, 0.15 / 0.3))
    assert bars["b"] == pytest.approx((0.05 / 0.3, 0.15 / 0.3, 0.25 / 0.3))
    assert table.notes[0].startswith("Each line runs from 0 to .3, the same for all;")
    assert glance(runs).notes[0].startswith("Each line runs from 0 to 1, the same for all;")


@pytest.mark.parametrize(
    ("clusters", "said"), [(1, "queries of 1 image ask"), (19, "queries of 19 images"), (20, None)]
)
def test_few_images_are_said_where_they_ask(runs, clusters, said):
    few = copy.deepcopy(runs)
    few[0].results.per_query["retrieval/i2t/clusters"] = np.arange(40) % clusters
    notes = few_images(few, "retrieval")
    assert [said in n and n.startswith("i2t: ") for n in notes] == ([True] if said else [])
    assert glance(few).notes[1:] == notes
    assert few_images(few, "distractors") == []


def test_lengths_say_why_a_number_is_missing(runs):
    table = lengths(runs, "retrieval")
    d = runs[1].results.json["magnitude"]["text"]["cohens_d"]
    at = table.columns.index("d topk, i2t") - 1
    assert table.rows[1].cells[at].text == f"{d['topk']['value']:+.2f}".replace("-", "−")
    assert d["corpus"] is None
    assert table.rows[1].cells[at + 1].text == NO
    assert any(n.startswith("d corpus of |image| and |text| does not exist: ") for n in table.notes)


def test_settings_that_differ_come_first(runs):
    differ, same = settings(runs)
    rows = {r.head: [c.text for c in r.cells] for r in differ.rows}
    assert rows["loss"] == ["sym", "asym-i2t"]
    assert rows["evaluation · native · gamma_d"] == ["1", "0"]
    assert {r.head for r in same.rows} >= {"lr", "versions · mmclip"}
    assert not {r.head for r in same.rows} & rows.keys()


@pytest.mark.parametrize("value", [None, {"value": None, "ci": None}, float("nan"), {"value": float("inf")}, "x", True])
def test_a_number_that_does_not_exist_is_a_dash(value):
    assert value_cell(value) == (NO, "", "none", None)
