"""The report page: what it holds, what it leaves out with a word, and that nothing from data becomes markup."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from mmclip.commands import report
from mmclip.config import ReportConfig, parse
from mmclip.errors import UserError
from mmclip.evaluation.results import Results, load_results, save_results
from mmclip.reporting.page import read_items, read_lines, read_settings, write_page
from mmclip.reporting.summary import summarize
from tests.helpers.evaluating import evaluate_clip
from tests.helpers.reporting import COSINE, Page, make_run, planted

EVIL = "<script>alert(1)</script>\"'&{{ 7*7 }}"


@pytest.fixture
def run(folders, tmp_path):
    """A copy of qnorm that a test may change."""
    return Path(shutil.copytree(folders["qnorm"], tmp_path / "run"))


def page_of(named: dict[str, Path], folder: Path, **more: Path) -> Page:
    return Page(write_page(named, folder / "r.html", **more))


def bare(number: float) -> str:
    return f"{number:.3f}".replace("0.", ".")


def test_a_run_has_every_section_its_numbers_and_its_best_and_worst(folders, tmp_path):
    page = page_of({"qnorm": folders["qnorm"]}, tmp_path)
    ids = [a["id"] for a in page.all("section")]
    assert ids == ["message", "numbers", "norms", "curves", "retrievals", "diagnostics", "settings"]
    results = load_results(folders["qnorm"])
    section = results.json["retrieval"]["t2i"]["native"]
    assert all(bare(section[metric]) in page.words for metric in ("success@1", "map"))
    assert "–".join(map(bare, section["ci"]["success@1"])) in page.words
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1 and all(b <= a + 1 for a, b in pairwise(levels))
    assert "native = dot = qnorm" in page.words  # two rankings, not five
    assert page.words.count("(success@k: one relevant document is enough)") == 1
    assert "0.001" in page.words  # a setting of config.yaml
    answer = page.words.index(summarize({"qnorm": results}).facts[0][1])
    assert answer < page.words.index("What it looks like") < page.words.index("Both directions")
    ranks = results.array("retrieval/t2i/native/first_rank")
    query = int(results.array("retrieval/t2i/queries")[ranks.argmax()])
    norm = results.array("retrieval/lengths/text")[query]
    assert f"first relevant at rank {ranks.max()} of 40" in page.words and "✓ relevant, missed" in page.words
    assert f"caption {query} of picture {query // 3}" in page.words and f"query, norm {norm:.2f}" in page.words
    assert page_of({"qnorm": folders["qnorm"]}, tmp_path).source == page.source  # however often it is written


def test_a_comparison_needs_nothing_else_and_has_differences_and_verdicts(folders, tmp_path):
    page = page_of(folders, tmp_path, control=folders["control"], baseline=folders["baseline"])
    assert not re.search(r"https?:|@import|url\((?!#)|//[a-z]", re.sub(r"base64,[\w+/=]+", "", page.source))
    assert page.all("script") == [] and len(page.source) < 3_000_000
    assert len(page.all("img")) > 60
    assert all(a["src"].startswith("data:image/jpeg") and a["alt"] for a in page.all("img"))
    plots = [a for a in page.all("svg") if a.get("class") == "plot"]
    assert len(plots) == 3 * 4 + 2 + 2 + 3  # norms, two of them twice, trade-offs, curves
    assert all(a["aria-label"] for a in plots) and any("Trade-off of 3 runs" in a["aria-label"] for a in plots)
    assert not [name for name, attributes in page.tags if any(a.startswith("on") for a in attributes)]
    beside = [p.name for p in (tmp_path / "r").iterdir()]
    assert "norms-text-1.svg" in beside and all(re.fullmatch(r"[\w-]+[.]svg", name) for name in beside)
    for words in ("norms learned? ", "norms useful? not shown (i2t, pool retrieval)", "qnorm less baseline",
                  "within noise", "qnorm against baseline: "):  # fmt: skip
        assert words in page.words
    assert page.source.count('class="card"') == 4 + 3 * 12
    assert page.dots[:3] == ["dot r0", "dot r1", "dot r2"]


def test_every_run_has_a_colour_of_the_page_and_seeds_stand_together(pictures, tmp_path):
    for seed in range(13):
        make_run(tmp_path / f"r{seed}", pictures, COSINE, "sym", "cosine", seed=seed)
    page = page_of({f"r{i}": tmp_path / f"r{i}" for i in range(13)}, tmp_path)
    assert page.dots[:13] == [f"dot r{i}" for i in (*range(12), 0)]
    assert all(page.source.count(f".r{i}{{color:#") == 2 for i in range(12))  # light and dark
    assert "Over seeds" in page.words and "7 more runs are not shown here" in page.words


def test_text_from_data_never_becomes_markup(pictures, tmp_path):
    results = make_run(tmp_path / "evil", pictures, captions=[f"{EVIL} {i}" for i in range(120)], bank=True)
    results.json |= {
        "model": EVIL,
        "alarms": {"x": EVIL},
        "diagnostics": {"i2t": {"auc": {"topk": None, "topk_reason": EVIL}, EVIL: EVIL}},
        "versions": {EVIL: EVIL},
    }
    results.json["retrieval"]["t2i"]["corrected"] |= {"bank": EVIL, "bank_size": EVIL, "alpha": "x"}
    save_results(results, tmp_path / "evil")
    (tmp_path / "evil" / "config.yaml").write_text(f"name: {json.dumps(EVIL)}\n", encoding="utf-8")
    page = page_of({"<b>x": tmp_path / "evil"}, tmp_path)
    assert page.all("script") == page.all("b") == [] and "<script" not in page.source
    assert "&lt;b&gt;x" in page.source and "&lt;script&gt;alert(1)&lt;/script&gt;" in page.source
    assert EVIL in "".join(page.text)  # the reader sees what stood there, braces and quotes as well
    (style,) = re.findall(r"<style>(.*?)</style>", page.source, re.DOTALL)
    (policy,) = [a["content"] for a in page.all("meta") if "http-equiv" in a]
    assert "alert" not in style and policy.startswith("default-src 'none'")


def test_a_scoring_of_one_direction_stands_where_it_is(folders, tmp_path):
    retrieval = load_results(folders["qnorm"]).json["retrieval"]
    assert "corrected" not in retrieval["i2t"]
    words = page_of({name: folders[name] for name in ("baseline", "qnorm")}, tmp_path).words
    assert f"corrected {bare(retrieval['t2i']['corrected']['success@1'])}" in words
    assert "corrected: bank transductive, 120 items, α 2.000; transductive: " in words
    assert "cosine = reversed = dnorm" in words and "it serves, without training" in words


def test_what_a_folder_does_not_have_is_said(run, tmp_path):
    for name in ("metrics.jsonl", "config.yaml"):
        (run / name).unlink()
    results = load_results(run)
    results.per_query = {k: v for k, v in results.per_query.items() if "/top_" not in k and "/lengths/" not in k}
    save_results(results, run)
    (run / "items.json").write_text("[]", encoding="utf-8")
    page = page_of({"bare": run}, tmp_path)
    for sentence in (
        "bare: no training curves: no metrics.jsonl (its log is not in this folder)",
        "bare: no settings: no config.yaml that can be read",
        "bare: no pictures of norms: not kept by its evaluation; evaluate it again",
        "bare: It was evaluated without keeping its best documents",
    ):
        assert sentence in page.words
    assert page.all("img") == []
    assert [a["id"] for a in page.all("section")] == ["message", "numbers", "norms", "diagnostics", "settings"]


def test_pictures_that_are_gone_or_unreadable_are_named(run, pictures, tmp_path):
    results = load_results(run)
    results.json["data"]["path"] = str(tmp_path / "pairs.csv")
    save_results(results, run)
    page = page_of({"m": run}, tmp_path)
    assert "evaluation data cannot be opened here, so the keys of the pictures stand in their places" in page.words
    assert len([a for a in page.all("span") if a.get("class") == "nothing"]) > 20
    assert "cannot be read" not in page.words
    for file in pictures.parent.iterdir():
        shutil.copy(file, tmp_path / file.name)
    for i in range(0, 40, 2):
        (tmp_path / f"k{i:03}.png").write_bytes(b"not a picture")
    assert re.search(r"k\d+\.png: cannot be read", page_of({"r": run}, tmp_path).words)


def test_numbers_that_do_not_exist_are_dashes(run, tmp_path):
    content = json.loads((run / "results.json").read_text())
    numbers = content["retrieval"]["t2i"]["native"]
    numbers["map"], numbers["ci"]["success@1"] = float("nan"), None
    content["magnitude"]["text"]["cohens_d"]["topk"] = {"value": float("nan"), "ci": None}
    content["diagnostics"] = {"i2t": {"modality_gap": float("nan"), "anisotropy": {"query": 0.125, "document": None}}}
    (run / "results.json").write_text(json.dumps(content))  # Python writes and reads NaN
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "loss": null}\n{"step": NaN}\n[1]\n{"step": 50, "lo')
    words = page_of({"odd": run}, tmp_path).words
    assert "nan" not in words.lower().split() and "0.1250" in words and "–" in words


def test_only_what_can_be_compared_is_compared(folders, pictures, tmp_path):
    make_run(tmp_path / "other", pictures, captions=[f"another {i}" for i in range(120)])
    baseline = {"a": folders["baseline"]}
    for named, page, control, message in (
        (baseline | {"b": tmp_path / "other"}, "r.html", None, "different data"),
        (baseline, "r.html", folders["control"], "control is of none"),
        (baseline, "r.txt", None, "html file is expected"),
        ({}, "r.html", None, "at least one run"),
    ):
        with pytest.raises(UserError, match=message):
            write_page(named, tmp_path / page, control=control)
    assert [p.name for p in tmp_path.iterdir()] == ["other"]  # nothing was begun


def test_the_command_writes_beside_its_run_or_runs(folders, run, tmp_path, capsys):
    report.run(ReportConfig(runs=[str(run)]))
    assert capsys.readouterr().out == f"report: {run / 'report.html'}\n"
    shutil.copytree(folders["baseline"], tmp_path / "baseline")
    report.run(ReportConfig(runs=[str(tmp_path / "baseline"), str(run)]))
    assert "run less baseline" in Page(tmp_path / "report.html").words


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "nothing to report"),
        (["--runs", "a", "--baseline", "b"], "needs --control"),
        (["--runs", "nowhere"], "no file"),
        (["--runs", "a", "--outptu", "b"], "did you mean --output?"),
    ],
)
def test_bad_flags_are_one_line(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        report.run(parse(ReportConfig, argv))


def test_vectors_without_a_model_or_pictures_have_a_report(tmp_path):
    results = evaluate_clip(planted(), COSINE, {"model": None, "data": {"path": "vectors.npz"}}, resamples=10)
    save_results(results, tmp_path / "run")
    words = page_of({"vectors": tmp_path / "run"}, tmp_path).words
    assert "None" not in words.split() and "cannot be" not in words
    assert "vectors: not trained by mmclip" in words
    assert "A file of embeddings holds no pictures: the keys of the pictures stand in their places." in words
    assert re.search(r"caption \d+ of picture \d+ .*k\d{3}\.png", words)
    assert "no metrics.jsonl (only evaluated, not trained by mmclip)" in words


def test_torn_and_odd_lines_are_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 2, "loss": 1}\n[]\n{"loss": 3}\n{"step": NaN}\n{"step": 1}\n\xff\xfe\n{"step": 3, "lo')
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    assert read_lines(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("text", "settings"),
    [(None, None), ("lr: 0.25\n", {"lr": 0.25})]
    + [(text, None) for text in ("no: such\n", "loss: [\n", "loss: !!python/object:os.system {}\n", "x" * 200_000)],
)
def test_settings_are_read_or_none(tmp_path, text, settings):
    if text is not None:
        (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    assert read_settings(tmp_path) == settings


@pytest.mark.parametrize("columns", [(), (["a"], [], []), (["a"], ["b"], ["c"])])
def test_items_of_another_shape_are_none(columns):
    items = dict(zip(("image_keys", "captions", "owner"), columns, strict=False))
    assert read_items(Results({"data": {"n_images": 1, "n_texts": 1}}, {}, items)) is None
