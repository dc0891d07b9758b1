"""The report page: what it holds, what it leaves out with a word, and that nothing from data becomes markup."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mmclip.errors import UserError
from mmclip.evaluation.results import load_results, save_results
from mmclip.reporting.page import write_page
from mmclip.reporting.summary import summarize
from tests.helpers.evaluating import evaluate_clip
from tests.helpers.reporting import COSINE, QNORM, Page, make_pictures, make_run, planted
from tests.helpers.tiny import run_script

EVIL = "<script>alert(1)</script>\"'&{{ 7*7 }}"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def runs(pictures, tmp_path_factory):
    """Three runs over the same pictures: sym/cosine, one whose captions' lengths were trained, and its control."""
    folder = tmp_path_factory.mktemp("runs")
    for name, loss, norm, native, noise in (
        ("baseline", "sym", "cosine", COSINE, 1.4),
        ("qnorm", "asym-i2t", "qnorm", QNORM, 1.5),
        ("control", "asym-i2t", "cosine", COSINE, 1.5),
    ):
        make_run(folder / name, pictures, native, loss, norm, noise)
    return folder


def copy_of(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


def test_a_run_has_every_section_and_its_numbers(runs, tmp_path):
    path = write_page({"qnorm": runs / "qnorm"}, tmp_path / "report.html")
    page = Page(path)
    ids = [a["id"] for a in page.all("section")]
    assert ids == ["message", "numbers", "norms", "curves", "retrievals", "diagnostics", "settings"]
    results = load_results(runs / "qnorm")
    section = results.json["retrieval"]["t2i"]["native"]
    lo, hi = section["ci"]["success@1"]
    for number in (section["success@1"], section["map"]):
        assert f" {number:.3f}".replace(" 0.", " .").strip() in page.words
    assert f"{lo:.3f}–{hi:.3f}".replace("0.", ".") in page.words
    assert len(page.all("h1")) == 1
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert all(b <= a + 1 for a, b in pairwise(levels))
    assert "native = dot = qnorm" in page.words  # two rankings, not five
    assert page.words.count("(success@k: one relevant document is enough)") == 1
    assert "0.001" in page.words  # a setting of config.yaml
    answer = summarize({"qnorm": results}).facts[0][1]
    first = page.words.index(answer)
    assert first < page.words.index("What it looks like") < page.words.index("Both directions")


def test_the_page_needs_nothing_else(runs, tmp_path):
    path = write_page({n: runs / n for n in ("baseline", "qnorm", "control")}, tmp_path / "all.html")
    page = Page(path)
    assert not re.search(r"https?:|@import|url\((?!#)|//[a-z]", re.sub(r"base64,[\w+/=]+", "", page.source))
    assert page.all("script") == []
    assert all(a["src"].startswith("data:image/jpeg") and a["alt"] for a in page.all("img"))
    plots = [a for a in page.all("svg") if a.get("class") == "plot"]
    assert len(plots) == 3 * 4 + 2 + 2 + 3 and all(
        a["aria-label"] for a in plots
    )  # norms, two of them twice, trade-offs, curves
    for name, attributes in page.tags:
        assert not any(a.startswith("on") for a in attributes), name
    assert path.stat().st_size < 3_000_000
    beside = sorted(p.name for p in (tmp_path / "all").iterdir())
    assert "norms-text-1.svg" in beside
    assert all(re.fullmatch(r"[\w-]+[.]svg", name) for name in beside)


def test_a_comparison_has_differences_verdicts_and_the_trade_off(runs, tmp_path):
    named = {n: runs / n for n in ("baseline", "qnorm", "control")}
    page = Page(write_page(named, tmp_path / "c.html", control=runs / "control", baseline=runs / "baseline"))
    assert "norms learned? " in page.words
    assert "norms useful? not shown (i2t, pool retrieval)" in page.words
    assert "qnorm less baseline" in page.words
    assert "within noise" in page.words
    assert any(str(a.get("aria-label")).startswith("Trade-off of 3 runs") for a in page.all("svg"))
    assert "qnorm against baseline: " in page.words and page.source.count('class="card"') == 4 + 3 * 12
    dots = [a["class"] for a in page.all("span") if str(a.get("class")).startswith("dot ")]
    assert dots[:3] == ["dot r0", "dot r1", "dot r2"]


def test_every_run_has_a_colour_of_the_page_and_seeds_stand_together(pictures, tmp_path):
    for seed in range(13):
        make_run(tmp_path / f"r{seed}", pictures, COSINE, "sym", "cosine", seed=seed)
    page = Page(write_page({f"r{i}": tmp_path / f"r{i}" for i in range(13)}, tmp_path / "r.html"))
    dots = [a["class"] for a in page.all("span") if str(a.get("class")).startswith("dot ")]
    assert dots[:13] == [f"dot r{i}" for i in (*range(12), 0)]
    assert all(page.source.count(f".r{i}{{color:#") == 2 for i in range(12))  # light and dark
    assert "Over seeds" in page.words and "7 more runs are not shown here" in page.words


def test_text_from_data_never_becomes_markup(pictures, tmp_path):
    captions = [f"{EVIL} {i}" for i in range(120)]
    results = make_run(tmp_path / "evil", pictures, captions=captions, bank=True)
    results.json |= {
        "model": EVIL,
        "alarms": {"x": EVIL},
        "diagnostics": {"i2t": {"auc": {"topk": None, "topk_reason": EVIL}, EVIL: EVIL}},
        "versions": {EVIL: EVIL},
    }
    results.json["retrieval"]["t2i"]["corrected"] |= {"bank": EVIL, "bank_size": EVIL, "alpha": "x"}
    save_results(results, tmp_path / "evil")
    (tmp_path / "evil" / "config.yaml").write_text(f"name: {json.dumps(EVIL)}\n", encoding="utf-8")
    page = Page(write_page({"<b>x": tmp_path / "evil"}, tmp_path / "page.html"))
    assert page.all("script") == []
    assert page.all("b") == []
    assert "&lt;b&gt;x" in page.source
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page.source
    assert "<script" not in page.source
    assert EVIL in "".join(page.text)  # the reader sees what stood there, braces and quotes as well
    (style,) = re.findall(r"<style>(.*?)</style>", page.source, re.DOTALL)
    assert "alert" not in style
    (policy,) = [a["content"] for a in page.all("meta") if "http-equiv" in a]
    assert policy.startswith("default-src 'none'")


def test_a_scoring_of_one_direction_stands_where_it_is(runs, pictures, tmp_path):
    results = make_run(tmp_path / "qnorm", pictures, bank=True)
    assert "corrected" not in results.json["retrieval"]["i2t"]
    page = Page(write_page({"baseline": runs / "baseline", "qnorm": tmp_path / "qnorm"}, tmp_path / "r.html"))
    value = results.json["retrieval"]["t2i"]["corrected"]["success@1"]
    assert re.search(rf"corrected {value:.3f}".replace("0.", "[.]"), page.words)
    assert "cosine = reversed = dnorm" in page.words  # qnorm's matrix read backwards: who asks keeps its length
    assert "corrected: bank transductive, 120 items, α 2.000; transductive: " in page.words
    assert "it serves, without training" in page.words


def test_best_and_worst_are_the_runs_own(runs, tmp_path):
    page = Page(write_page({"qnorm": runs / "qnorm"}, tmp_path / "r.html"))
    results = load_results(runs / "qnorm")
    worst = int(results.array("retrieval/t2i/native/first_rank").max())
    assert f"first relevant at rank {worst} of 40" in page.words
    first = int(results.array("retrieval/t2i/native/first_rank").argmax())
    query = int(results.array("retrieval/t2i/queries")[first])
    assert f"caption {query} of picture {query // 3}" in page.words
    length = results.array("retrieval/lengths/text")[query]
    assert f"query, norm {length:.2f}" in page.words
    assert "✓ relevant" in page.words
    assert "✓ relevant, missed" in page.words
    thumbnails = [a for a in page.all("img") if a["src"].startswith("data:image/jpeg")]
    assert len(thumbnails) > 20


def test_what_is_not_there_is_said(runs, tmp_path):
    bare = copy_of(runs / "qnorm", tmp_path / "bare")
    for name in ("items.json", "metrics.jsonl", "config.yaml"):
        (bare / name).unlink()
    results = load_results(bare)
    results.per_query = {k: v for k, v in results.per_query.items() if "/top_" not in k and "/lengths/" not in k}
    save_results(results, bare)
    (bare / "items.json").write_text("[]", encoding="utf-8")
    page = Page(write_page({"bare": bare}, tmp_path / "r.html"))
    for sentence in (
        "bare: no training curves: no metrics.jsonl (its log is not in this folder)",
        "bare: no settings: no config.yaml that can be read",
        "bare: no pictures of norms: not kept by its evaluation; evaluate it again",
        "bare: It was evaluated without keeping its best documents",
    ):
        assert sentence in page.words
    assert page.all("img") == []
    assert [a["id"] for a in page.all("section")] == ["message", "numbers", "norms", "diagnostics", "settings"]


def test_data_that_are_gone_or_others_are_said(runs, tmp_path):
    moved = copy_of(runs / "qnorm", tmp_path / "moved")
    results = load_results(moved)
    results.json["data"]["path"] = str(tmp_path / "nowhere.csv")
    save_results(results, moved)
    page = Page(write_page({"m": moved}, tmp_path / "r.html"))
    assert "evaluation data cannot be opened here, so the keys of the pictures stand in their places" in page.words
    assert len([a for a in page.all("span") if a.get("class") == "nothing"]) > 20
    assert "cannot be read" not in page.words
    results.json["data"]["path"] = "builtin:scenes"
    save_results(results, moved)
    words = Page(write_page({"m": moved}, tmp_path / "r.html")).words
    assert "builtin:scenes is not a folder" in words  # and nothing was drawn
    items = json.loads((moved / "items.json").read_text())
    (moved / "items.json").write_text(json.dumps(items | {"captions": items["captions"][1:]}))
    assert "evaluate it again" in Page(write_page({"m": moved}, tmp_path / "r.html")).words


def test_a_picture_that_cannot_be_read_is_named(runs, pictures, tmp_path):
    for file in pictures.parent.iterdir():
        shutil.copy(file, tmp_path / file.name)
    for i in range(0, 40, 2):
        (tmp_path / f"k{i:03}.png").write_bytes(b"not a picture")
    run = copy_of(runs / "qnorm", tmp_path / "run")
    results = load_results(run)
    results.json["data"]["path"] = str(tmp_path / "pairs.csv")
    save_results(results, run)
    assert re.search(r"k\d+\.png: cannot be read", Page(write_page({"r": run}, tmp_path / "r.html")).words)


def test_numbers_that_do_not_exist_are_dashes(runs, tmp_path):
    odd = copy_of(runs / "qnorm", tmp_path / "odd")
    content = json.loads((odd / "results.json").read_text())
    numbers = content["retrieval"]["t2i"]["native"]
    numbers["map"] = float("nan")
    numbers["ci"]["success@1"] = None
    content["magnitude"]["text"]["cohens_d"]["topk"] = {"value": float("nan"), "ci": None}
    content["diagnostics"] = {"i2t": {"modality_gap": float("nan"), "anisotropy": {"query": 0.125, "document": None}}}
    (odd / "results.json").write_text(json.dumps(content))  # Python writes and reads NaN
    with (odd / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "loss": null}\n{"step": NaN}\n[1]\n{"step": 50, "lo')
    page = Page(write_page({"odd": odd}, tmp_path / "r.html"))
    assert "nan" not in page.words.lower().split()
    assert "0.1250" in page.words
    assert "–" in page.words


def test_only_what_can_be_compared_is_compared(runs, pictures, tmp_path):
    make_run(tmp_path / "other", pictures, captions=[f"another {i}" for i in range(120)])
    with pytest.raises(UserError, match="different data"):
        write_page({"a": runs / "qnorm", "b": tmp_path / "other"}, tmp_path / "r.html")
    with pytest.raises(UserError, match="control is of none"):
        write_page({"a": runs / "baseline"}, tmp_path / "r.html", control=runs / "control")
    with pytest.raises(UserError, match="html file is expected"):
        write_page({"a": runs / "baseline"}, tmp_path / "r.txt")
    with pytest.raises(UserError, match="at least one run"):
        write_page({}, tmp_path / "r.html")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other"]  # nothing was begun


def test_the_script_writes_where_it_says(runs, tmp_path):
    for name in ("baseline", "qnorm"):
        copy_of(runs / name, tmp_path / name)
    done = run_script("report.py", "--runs", tmp_path / "qnorm")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"report: {tmp_path / 'qnorm' / 'report.html'}\n"
    done = run_script("report.py", "--runs", tmp_path / "baseline", tmp_path / "qnorm")
    assert done.returncode == 0, done.stderr
    assert "qnorm less baseline" in Page(tmp_path / "report.html").words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to report"),
        (("--runs", "a", "--baseline", "b"), "needs --control"),
        (("--runs", "nowhere"), "no file"),
        (("--runs", "a", "--outptu", "b"), "did you mean --output?"),
    ],
)
def test_bad_flags_are_one_line(arguments, message):
    done = run_script("report.py", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_report_does_not_depend_on_how_often_it_is_written(runs, tmp_path):
    first = write_page({"q": runs / "qnorm"}, tmp_path / "r.html").read_bytes()
    assert write_page({"q": runs / "qnorm"}, tmp_path / "r.html").read_bytes() == first
    assert np.all([p.suffix == ".svg" for p in (tmp_path / "r").iterdir()])  # no partial file is left


def test_vectors_without_a_model_or_pictures_have_a_report(tmp_path):
    results = evaluate_clip(planted(), COSINE, {"model": None, "data": {"path": "vectors.npz"}}, resamples=10)
    save_results(results, tmp_path / "run")
    page = Page(write_page({"vectors": tmp_path / "run"}, tmp_path / "r.html"))
    assert "None" not in page.words.split()
    assert "vectors: not trained by mmclip" in page.words
    assert "A file of embeddings holds no pictures: the keys of the pictures stand in their places." in page.words
    assert "cannot be" not in page.words
    assert re.search(r"caption \d+ of picture \d+ .*k\d{3}\.png", page.words)
    assert "no metrics.jsonl (only evaluated, not trained by mmclip)" in page.words
