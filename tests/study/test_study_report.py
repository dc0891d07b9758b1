"""A study's page and files, whole and in part: nothing crashes, nothing is unescaped, numbers are those of the runs."""

from __future__ import annotations

import csv
import math

import pytest

from mmclip.errors import UserError
from mmclip.study.report import SHEETS, write_study
from tests.helpers.reporting import Page
from tests.helpers.studying import planted_arm, start

EVIL = '<script>alert("x")</script> $x_1$ _a'


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
def written(arms, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    failed = [{"arm": "sym dot <i>", "seed": 1, "reason": "the loss is not finite"}]
    return write_study(
        arms, folder, title="Planted & <b>bold</b>", failed=failed, notes=["1,000 held-out pictures <u>"]
    )


def read(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_page_is_well_formed_alone_and_escaped(written):
    page = Page(written)
    assert not page.all("script") and "<script" not in page.source
    for text in (EVIL, "Planted & <b>bold</b>", "sym dot <i>", "the loss is not finite", "1,000 held-out pictures <u>"):
        assert text in page.words
    assert page.all("svg") and not page.all("img")
    ids = {a.get("id") for a in page.all("section")}
    assert {str(a["href"])[1:] for a in page.all("a") if str(a["href"]).startswith("#")} <= ids
    linked = {str(a["href"]) for a in page.all("a") if not str(a["href"]).startswith("#")}
    assert all((written.parent / link).is_file() for link in linked) and len(linked) == len(SHEETS) + 1


def test_files_are_there_and_numbers_survive_them(arms, written):
    rows = read(written.parent / "tables" / "cells.csv")
    assert len(rows) == 16
    for row in rows:
        (arm,) = [a for a in arms if a.name == row["arm"]]
        found = arm.runs[int(row["seed"])].json["retrieval"]["t2i"]
        assert float(row["success@1_native_t2i"]) == found["native"]["success@1"]
        assert row["success@1_corrected_i2t"] == "" or math.isfinite(float(row["success@1_corrected_i2t"]))
        assert row["permute_pairs"] == ("yes" if arm.name == "null" else "no")
    assert read(written.parent / "tables" / "failed.csv") == [
        {"arm": "sym dot <i>", "seed": "1", "reason": "the loss is not finite"}
    ]
    names = {p.name for p in (written.parent / "figures").iterdir()}
    stems = ("frontier", "matrix-i2t", "matrix-t2i", "gamma", "fractions-i2t", "fractions-t2i")
    assert names == {f"{stem}.svg" for stem in stems}


def test_a_table_of_the_page_shows_the_files_numbers(written):
    page = Page(written)
    for row in read(written.parent / "tables" / "verdicts.csv"):
        if row["d_arm"]:
            assert f"{float(row['d_arm']):+.2f}".replace("-", "−") in page.words
    assert "Are the nulls clean?" in page.words and "no control" in page.words


@pytest.mark.parametrize(
    "part",
    [
        lambda: [],
        lambda: [planted_arm(seeds=(0,))],
        lambda: [planted_arm(loss="asym-i2t", norm="qnorm", seeds=(2,), logs=False)],
        lambda: [planted_arm(seeds=(0, 1)), planted_arm(loss="asym-i2t", norm="qnorm", seeds=(2,))],
        lambda: [planted_arm(seeds=(0,)), planted_arm(loss="sym", norm="learned", seeds=(0, 1), logs=False)],
        lambda: [planted_arm("no bank", bank=False, seeds=(0,)), planted_arm("b", "asym-i2t", bank=False, seeds=(0,))],
        lambda: [planted_arm("null", "asym-t2i", "qnorm", permuted=True, changes={"permute_pairs": True})],
        lambda: [planted_arm(norm="qnorm", starts={0: {}, 1: {"zero_shot": None}}, initial="gone")],
    ],
)
def test_a_study_in_part_has_a_page(part, tmp_path):
    page = Page(write_study(part(), tmp_path / "new" / "study", title="part"))
    assert "Fisher κ before training" in page.words
    assert all((tmp_path / "new" / "study" / "tables").glob("*.csv"))


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(UserError, match="cannot be made"):
        write_study([], tmp_path / "file", title="t")
