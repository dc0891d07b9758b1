"""The report over seeds, and its notes on runs without a log and on a scale that nobody told."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from mmclip.evaluation.measures import alpha_note
from mmclip.evaluation.results import save_results
from mmclip.reporting.cells import NO
from mmclip.reporting.diagnostics import diagnostics
from mmclip.reporting.diagnostics_table import diagnostics_table
from mmclip.reporting.page import write_report
from mmclip.reporting.seeds import COLUMNS, GAINS, seeds
from mmclip.reporting.source import read_runs
from tests.helpers.reporting import COSINE, Page, make_pictures, make_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """sym/cosine and asym-i2t/qnorm with two seeds each, and an asym-i2t/cosine with one."""
    folder = tmp_path_factory.mktemp("seeds")
    pictures = make_pictures(folder / "pictures")
    for seed in (0, 1):
        make_run(folder / f"sym-{seed}", pictures, COSINE, "sym", "cosine", noise=1.3 + seed / 10, seed=seed)
        make_run(folder / f"qnorm-{seed}", pictures, noise=1.5 + seed / 10, bank=True, seed=seed)
    make_run(folder / "control", pictures, COSINE, "asym-i2t", "cosine", seed=0)
    return folder


def read(folder, *names):
    return read_runs({n: folder / n for n in names})


ALL = ("sym-0", "qnorm-0", "sym-1", "qnorm-1", "control")


def bare(x: float, sign: str = "") -> str:
    return f"{x:{sign}.3f}".replace("0.", ".").replace("-", "−")


def test_means_ranges_and_differences_are_those_of_the_seeds(folder):
    runs = read(folder, *ALL)
    table = seeds(runs, "retrieval")
    assert table.columns == ["mean of seeds", *COLUMNS, *GAINS]
    assert [r.head for r in table.rows] == [
        *("sym cosine: sym-0, sym-1", "i2t", "t2i"),
        *("asym-i2t qnorm: qnorm-0, qnorm-1", "i2t", "t2i"),
    ]
    named = {r.name: r.results.json["retrieval"]["t2i"] for r in runs}

    def mean(kind, scoring):
        return np.mean([named[f"{kind}-{seed}"][scoring]["success@1"] for seed in (0, 1)])

    row = table.rows[-1].cells
    native = [named[f"qnorm-{seed}"]["native"]["success@1"] for seed in (0, 1)]
    assert [c.text for c in row[:3]] == ["2", bare(np.mean(native)), f"{bare(min(native))}–{bare(max(native))}"]
    assert "–" in row[1].small
    assert [c.text for c in row[3:5]] == [bare(mean("qnorm", s)) for s in ("reversed", "corrected")]
    assert [c.text for c in row[5:]] == [
        bare(mean("qnorm", "corrected") - mean("qnorm", "reversed"), "+"),
        bare(mean("qnorm", "native") - mean("sym", "native"), "+"),
        bare(mean("qnorm", "corrected") - mean("sym", "native"), "+"),
    ]
    assert all(c.small for c in row[5:])
    assert table.rows[1].cells[6].text == NO  # the first group's native less itself
    assert table.rows[4].cells[4].text == NO  # i2t was trained: nothing to correct


def test_without_two_seeds_there_is_no_such_section(folder, tmp_path):
    assert seeds(read(folder, "sym-0", "qnorm-1", "control"), "retrieval") is None
    page = Page(write_report({n: folder / n for n in ("sym-0", "qnorm-1")}, tmp_path / "a.html"))
    assert "Over seeds" not in page.words
    page = Page(write_report({n: folder / n for n in ALL}, tmp_path / "b.html"))
    assert "seeds" in [a["id"] for a in page.all("section")]
    assert "asym-i2t qnorm: qnorm-0, qnorm-1" in page.words


def test_a_run_is_told_trained_or_only_evaluated_as_it_was(folder, tmp_path):
    for name in ("sym-0", "qnorm-0", "control"):
        shutil.copytree(folder / name, tmp_path / name)
    for name in ("sym-0", "qnorm-0"):
        (tmp_path / name / "metrics.jsonl").unlink()
    (run,) = read(tmp_path, "qnorm-0")
    del run.results.json["trained_with"]["loss"]
    save_results(run.results, tmp_path / "qnorm-0")
    named = {n: tmp_path / n for n in ("sym-0", "qnorm-0", "control")}
    words = Page(write_report(named, tmp_path / "r.html")).words
    assert "so no curves: sym-0 (trained, but its log is not in this folder: " in words
    assert "so no curves: qnorm-0 (only evaluated: not trained by mmclip)." in words
    assert words.count("so no curves") == 2


def test_every_run_has_a_colour_of_the_page(folder, tmp_path):
    page = Page(write_report({f"r{i}": folder / "control" for i in range(13)}, tmp_path / "r.html"))
    dots = [a["class"] for a in page.all("span") if str(a.get("class")).startswith("dot ")]
    assert dots[:13] == [f"dot r{i}" for i in (*range(12), 0)]
    for i in range(12):
        assert page.source.count(f".r{i}{{color:#") == 2  # light and dark


def test_a_scale_that_nobody_told_is_said_on_the_page_and_the_screen(folder):
    runs = read(folder, "sym-0", "qnorm-0")
    for run, sources in zip(runs, (("given", "calibrated"), ("given", "given")), strict=True):
        for direction, source in zip(("i2t", "t2i"), sources, strict=True):
            run.results.json["diagnostics"][direction]["scale"]["alpha_source"] = source
    (note,) = [n for n in diagnostics(runs, "retrieval")[0].notes if "α" in n]
    assert note == (
        "α of sym-0 · t2i is not known (it was not trained, or the file does not say): its effective scale is set to "
        "14.3, and its entropy and Fisher numbers hang on that."
    )
    said = diagnostics_table(runs[0].results)[1]
    assert said[-1].startswith("α of t2i is not known")
    assert not any("α" in n for n in diagnostics_table(runs[1].results)[1])
    assert alpha_note({"i2t": None, "t2i": {"scale": {"alpha_source": "given"}}}) is None
