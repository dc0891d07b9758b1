"""A study's page and files, whole and in part: nothing crashes, nothing is unescaped, numbers are those of the runs."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmclip.errors import UserError
from mmclip.metrics.bootstrap import Estimate
from mmclip.study.estimates import Study
from mmclip.study.plan import CLIP, TEXT
from mmclip.study.report import Report, write_study
from mmclip.study.tables import TABLES, StudyTable, plain_values, reasons
from tests.helpers import text_studying
from tests.helpers.reporting import Page
from tests.helpers.studying import planted_arm, start
from tests.helpers.text_studying import INSIDE, OUTSIDE, UNDETERMINED

EVIL = '<script>alert("x")</script> $x_1$ _a'
FAILED = [{"arm": "sym dot <i>", "seed": 1, "reason": "the loss is not finite"}]


@pytest.fixture(scope="module")
def arms():
    starts = {0: start((3, 1, 2, 2), 0.5), 1: start((3, 1, 2, 2), 0.5)}
    return [
        planted_arm(noise=1.8, starts=starts),
        planted_arm(loss="asym-i2t", noise=1.8, starts=starts),
        planted_arm(loss="asym-i2t", norm="qnorm", noise=1.5, lengths=0.3),
        planted_arm(loss="asym-i2t", norm="dnorm", noise=1.5),
        planted_arm(EVIL, "asym-i2t", "learned", noise=1.5, lengths=0.3),
        planted_arm("half", "asym-i2t", "qnorm", noise=1.9, changes={"train_fraction": 0.5}),
        planted_arm("tuned", "asym-i2t", "qnorm", noise=1.3, lengths=0.3, initial="sym cosine"),
        planted_arm("null", "asym-i2t", "qnorm", permuted=True, changes={"permute_pairs": True}),
    ]


@pytest.fixture(scope="module")
def written(arms, tmp_path_factory) -> Report:
    folder = tmp_path_factory.mktemp("study")
    return write_study(Study(arms, resamples=200), folder, title="Planted & <b>bold</b>", failed=FAILED)


@pytest.fixture(scope="module")
def text_written(tmp_path_factory) -> Report:
    evil = dataclasses.replace(text_studying.arm("dot", lengths=0.4), name="<script>dot\n$x$")
    cosine = text_studying.arm("cosine", starts={0: text_studying.start(UNDETERMINED)})
    study = Study([cosine, evil, text_studying.arm("dnorm", queries_vary=0.8)], TEXT, resamples=200)
    return write_study(study, tmp_path_factory.mktemp("text"), title="Tiny <i>", failed=FAILED)


def read(report: Report, name: str) -> list[dict[str, str]]:
    with (report.page.parent / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("kind", ["clip", "text"])
def test_the_page_is_well_formed_alone_and_escaped(kind, request):
    report = request.getfixturevalue("written" if kind == "clip" else "text_written")
    page = Page(report.page)
    assert not page.all("script") and "<script" not in page.source and not page.all("img")
    titles = ("Planted & <b>bold</b>", EVIL) if kind == "clip" else ("Tiny <i>", "565 matched pairs")
    for text in (*titles, "sym dot <i>", "the loss is not finite"):
        assert text in page.words
    ids = {a.get("id") for a in page.all("section")}
    assert {str(a["href"])[1:] for a in page.all("a") if str(a["href"]).startswith("#")} == ids
    linked = {str(a["href"]) for a in page.all("a") if not str(a["href"]).startswith("#")}
    assert linked == {f"tables/{name}.csv" for name in ids}, "every section has rows and a file"
    assert all((report.page.parent / link).is_file() for link in linked)
    assert "http" not in page.source.replace("http-equiv", "").replace("http://www.w3.org/", "")


def test_a_page_opens_with_a_sentence_and_the_frontier(written, text_written):
    for report, picture in ((written, "Frontier of"), (text_written, "nDCG@10 of 2 norms")):
        page = Page(report.page).source
        head = page[: page.index("<main>")]
        assert report.lines[1][:40].split(":")[0] in head.replace("&lt;", "<") and picture in head
        assert page.index("is best with") < page.index("<svg") < page.index("<main>")
        assert len(report.lines) <= 9 and not any("\n" in line for line in report.lines)


def test_files_are_there_and_numbers_survive_them(arms, written):
    names = {p.name for p in (written.page.parent / "figures").iterdir()}
    assert names == {
        f"{n}.svg" for n in ("frontier", "matrix-i2t", "matrix-t2i", "gamma", "fractions-i2t", "fractions-t2i")
    }
    rows = read(written, "cells")
    assert len(rows) == 16
    for row in rows:
        (arm,) = [a for a in arms if a.name == row["arm"]]
        found = arm.results()[int(row["seed"])].json["retrieval"]["t2i"]
        assert float(row["success@1_native_t2i"]) == found["native"]["success@1"]
        assert row["success@1_corrected_i2t"] == "" or math.isfinite(float(row["success@1_corrected_i2t"]))
        assert row["permute_pairs"] == ("yes" if arm.name == "null" else "no")
    assert read(written, "failed") == [{"arm": "sym dot <i>", "seed": "1", "reason": "the loss is not finite"}]
    assert all(read(written, name) or name in ("gamma", "delta_cv") for name in written.tables)


def test_text_has_its_tables_and_a_picture_a_data_set(text_written):
    for name in ("runs", "retrieval", "differences", "magnitude", "delta_cv", "fisher", "claims", "failed"):
        assert read(text_written, name), name
    names = {p.name for p in (text_written.page.parent / "figures").iterdir()}
    assert names == {f"differences-{data}.svg" for data in (INSIDE, OUTSIDE)}


def test_the_summary_counts_verdicts_and_a_dirty_null_is_one(written):
    words = [row["verdict"] for row in read(written, "claims") if row["claim"].startswith("T")]
    (told,) = [line for line in written.lines if line.startswith("Which claims of the paper hold here?")]
    for word in set(words):
        assert f"{words.count(word)} {word}" in told
    assert any(line.startswith("Are the nulls clean? 1 clean") for line in written.lines)


def test_a_null_that_is_found_shows(tmp_path):
    leaky = planted_arm("leaky", changes={"permute_pairs": True})
    report = write_study(Study([leaky], resamples=50), tmp_path, title="t")
    assert any(line.startswith("Are the nulls clean? 2 found: leaky above chance") for line in report.lines)
    assert '<li class="no"><strong>Are the nulls clean?' in report.page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "part",
    [
        lambda: [],
        lambda: [planted_arm(seeds=(0,))],
        lambda: [planted_arm(loss="asym-i2t", norm="qnorm", seeds=(2,), logs=False)],
        lambda: [planted_arm(seeds=(0, 1)), planted_arm(loss="asym-i2t", norm="qnorm", seeds=(2,))],
        lambda: [planted_arm(seeds=(0,)), planted_arm(loss="sym", norm="learned", seeds=(0, 1), logs=False)],
        lambda: [planted_arm("no bank", bank=False, seeds=(0,)), planted_arm("b", "asym-i2t", bank=False, seeds=(0,))],
        lambda: [planted_arm(norm="qnorm", starts={0: {}, 1: {"zero_shot": None}}, initial="gone")],
    ],
)
def test_a_study_in_part_has_a_page(part, tmp_path):
    report = write_study(Study(part(), resamples=50), tmp_path / "new" / "study", title="part")
    assert "The paper&#39;s claims" in report.page.read_text(encoding="utf-8")
    assert len(list((tmp_path / "new" / "study" / "tables").glob("*.csv"))) == len(TABLES[CLIP]) + 2


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(UserError, match="cannot be made"):
        write_study(Study([]), tmp_path / "file", title="t")


# --- a table ----------------------------------------------------------------------------------------------------------

values = (
    st.none()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1)
)


@given(st.lists(st.dictionaries(st.sampled_from(["b", 'c,"']), values), max_size=5))
def test_records_survive_the_file(tmp_path_factory, records):
    rows = [{"a": i / 4, **record} for i, record in enumerate(records)]
    path = StudyTable("x", "X", ("a",), rows, "{a}", ()).file().to_csv(tmp_path_factory.mktemp("t") / "x.csv")
    with path.open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == len(rows)
    for row, read in zip(rows, found, strict=True):
        for name, text in read.items():
            value = row.get(name)
            assert (float(text) == value) if isinstance(value, float) else (text == ("" if value is None else value))


def test_a_header_stands_without_records(tmp_path: Path):
    path = StudyTable("x", "X", ("a", "b"), [], "{a}", ()).file().to_csv(tmp_path / "x.csv")
    assert path.read_text(encoding="utf-8") == "a,b\n"


def test_cells_follow_the_names_of_columns():
    row = plain_values({"arm": "a", "ratio": Estimate(0.97, 0.96, 1.1, 3), "x_minus_y": Estimate(-0.1, -0.2, -0.05, 3)})
    row |= {"m_mean": 0.25, "m_sd": None, "n": 3, "word": "not reproduced", "paper_m": 0.5, "z": None, "reason": "why"}
    table = StudyTable("t", "T", (), [row], "{arm}\n{n}", ("ratio", "x_minus_y", "m/paper_m", "n", "word", "z")).view()
    ((head, cells),) = table.rows
    assert head == "a\n3" and table.columns[2] == "x less y" and table.notes == ["a: why."]
    assert [(c.text, c.detail, c.kind) for c in cells] == [
        (".970", ".960–1.100", "up"),
        ("−.100", "−.200, −.050", "down"),
        (".250 / .500", "", ""),
        ("3", "", ""),
        ("not reproduced", "", "down"),
        ("–", "", "none"),
    ]
    for (lo, hi), kind in {(0.5, 0.9): "down", (0.9, 1.0): "noise"}.items():
        found = plain_values({"ratio": Estimate(0.9, lo, hi, 3)})
        assert StudyTable("t", "T", (), [found], "", ("ratio",)).view().rows[0][1][0].kind == kind


def test_one_reason_is_named_once():
    same = Estimate.missing("no baseline")
    assert reasons({"a": same, "b": same, "c": Estimate(1.0, 1.0, 1.0, 1)}) == "a, b: no baseline"
