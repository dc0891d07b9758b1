"""A study's page and files, whole and in part: nothing crashes, nothing is unescaped, numbers are those of the runs."""

from __future__ import annotations

import csv
import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mmclip.study.arms import Arm
from mmclip.study.estimates import Study
from mmclip.study.plan import CLIP, TEXT
from mmclip.study.report import Report, write_study
from mmclip.study.tables import TABLES
from tests.helpers.reporting import Page
from tests.helpers.studying import INSIDE, OUTSIDE, UNDETERMINED, nulls, planted_arm, start, text_arm, text_start

EVIL = '<script>alert("x")</script> $x_1$ _a'
FAILED = [{"arm": "sym dot <i>", "seed": 1, "reason": "the loss is not finite"}]


@pytest.fixture(scope="module")
def arms() -> list[Arm]:
    starts = {0: start((3, 1, 2, 2), 0.5), 1: start((3, 1, 2, 2), 0.5)}
    return [
        planted_arm(noise=1.8, starts=starts),
        planted_arm(loss="asym-i2t", noise=1.8, starts=starts),
        planted_arm(loss="asym-i2t", norm="qnorm", noise=1.5, lengths=0.3),
        planted_arm(loss="asym-i2t", norm="dnorm", noise=1.5),
        planted_arm(EVIL, "asym-i2t", "learned", noise=1.5, lengths=0.3),
        planted_arm("half", "asym-i2t", "qnorm", noise=1.9, train_fraction=0.5),
        planted_arm("tuned", "asym-i2t", "qnorm", noise=1.3, lengths=0.3, initial="sym cosine"),
        *nulls(("null", "asym-i2t", "qnorm")),
    ]


@pytest.fixture(scope="module")
def written(arms: list[Arm], tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("study")
    return write_study(Study(arms, resamples=200), folder, title="Planted & <b>bold</b>", failed=FAILED)


@pytest.fixture(scope="module")
def text_written(tmp_path_factory: pytest.TempPathFactory) -> Report:
    evil = dataclasses.replace(text_arm("dot", lengths=0.4), name="<script>dot\n$x$")
    cosine = text_arm("cosine", starts={0: text_start(UNDETERMINED)})
    study = Study([cosine, evil, text_arm("dnorm", queries_vary=0.8)], TEXT, resamples=200)
    return write_study(study, tmp_path_factory.mktemp("text"), title="Tiny <i>", failed=FAILED)


def read(report: Report, name: str) -> list[dict[str, str]]:
    with (report.page.parent / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def figures(report: Report) -> set[str]:
    return {p.stem for p in (report.page.parent / "figures").iterdir()}


@pytest.mark.parametrize("kind", ["clip", "text"])
def test_the_page_is_well_formed_alone_and_escaped(kind: str, request: pytest.FixtureRequest) -> None:
    report = request.getfixturevalue("written" if kind == "clip" else "text_written")
    page = Page(report.page)
    assert not page.all("script") and "<script" not in page.source and not page.all("img")
    titles = ("Planted & <b>bold</b>", EVIL) if kind == "clip" else ("Tiny <i>", "565 matched pairs")
    for text in (*titles, "sym dot <i>", "the loss is not finite"):
        assert text in page.words
    ids = {a.get("id") for a in page.all("section")}
    links = {str(a["href"]) for a in page.all("a")}
    assert links == {f"#{name}" for name in ids} | {f"tables/{name}.csv" for name in ids}, (
        "a section has rows and a file"
    )
    assert all((report.page.parent / link).is_file() for link in links if not link.startswith("#"))
    assert "http" not in page.source.replace("http-equiv", "").replace("http://www.w3.org/", "")
    head = page.source[: page.source.index("<main>")]  # a sentence and the first picture
    assert report.lines[1][:40].split(":")[0] in head.replace("&lt;", "<")
    assert ("Frontier of" if kind == "clip" else "nDCG@10 of 2 norms") in head
    assert page.source.index("is best with") < page.source.index("<svg") < page.source.index("<main>")
    assert len(report.lines) <= 9 and not any("\n" in line for line in report.lines)


def test_files_are_there_and_numbers_survive_them(arms: list[Arm], written: Report, text_written: Report) -> None:
    pairs = {f"{name}-{d}" for name in ("matrix", "fractions") for d in ("i2t", "t2i")}
    assert figures(written) == {"frontier", "gamma", *pairs}
    rows = read(written, "cells")
    assert len(rows) == 16
    for row in rows:
        (arm,) = [a for a in arms if a.name == row["arm"]]
        result = arm.results()[int(row["seed"])].json["retrieval"]["t2i"]
        assert float(row["success@1_native_t2i"]) == result["native"]["success@1"]
        assert row["success@1_corrected_i2t"] == "" or math.isfinite(float(row["success@1_corrected_i2t"]))
        assert row["permute_pairs"] == ("yes" if arm.name == "null" else "no")
    assert read(written, "failed") == [{"arm": "sym dot <i>", "seed": "1", "reason": "the loss is not finite"}]
    assert all(read(written, name) or name in ("gamma", "delta_cv") for name in written.tables)
    assert figures(text_written) == {f"differences-{data}" for data in (INSIDE, OUTSIDE)}
    for name in ("runs", "retrieval", "differences", "magnitude", "delta_cv", "fisher", "claims", "failed"):
        assert read(text_written, name), name


def test_the_summary_counts_verdicts_and_a_dirty_null_is_one(written: Report, tmp_path: Path) -> None:
    words = [row["verdict"] for row in read(written, "claims") if row["claim"].startswith("T")]
    (line,) = [line for line in written.lines if line.startswith("Which claims of the paper hold here?")]
    assert all((f"{words.count(word)} {word}" in line) is (word != "not asked here") for word in set(words))
    assert any(line.startswith("Are the nulls clean? 1 clean") for line in written.lines)
    assert any(
        re.search(r"useful .*\? \d yes, \d open, \d not shown \((not )?reproduced|underpowered\)", x)
        for x in written.lines
    )
    leaky = planted_arm("leaky", permute_pairs=True, permuted=False)
    report = write_study(Study([leaky], resamples=50), tmp_path, title="t")
    assert any(line.startswith("Are the nulls clean? 2 found: leaky above chance") for line in report.lines)
    assert '<li class="no"><strong>Are the nulls clean?' in report.page.read_text(encoding="utf-8")
    assert len(report.lines) == 3, "a question without arms for it has no line"


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
def test_a_study_in_part_has_a_page(part: Callable[[], list[Arm]], tmp_path: Path) -> None:
    report = write_study(Study(part(), resamples=50), tmp_path / "new" / "study", title="part")
    assert "The paper&#39;s claims" in report.page.read_text(encoding="utf-8")
    assert len(list((tmp_path / "new" / "study" / "tables").glob("*.csv"))) == len(TABLES[CLIP]) + 2
