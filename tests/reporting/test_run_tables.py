"""Tables of runs hold the results' numbers, and say why one is missing; for images and texts, and for text."""

from __future__ import annotations

import copy
import re
from itertools import islice

import numpy as np
import pytest
import torch

from mmclip.embeddings.files import Embeddings
from mmclip.errors import UserError
from mmclip.evaluation.comparison import against_first, compare, significance, verdict
from mmclip.evaluation.diagnostics import MEASURES, alpha_note, value_at
from mmclip.reporting import run_tables as tables
from mmclip.reporting.table import MIN_WIDTH, NO
from tests.helpers.evaluating import evaluate_clip
from tests.helpers.reporting import COSINE, HOSTILE, QNORM, clip_run, make_run, printed, text_run


@pytest.fixture(scope="module")
def runs():
    return {
        "sym-cosine": clip_run(COSINE, "sym"),
        HOSTILE: clip_run(QNORM, "asym-t2i", HOSTILE, 1),
        "_$control": clip_run(COSINE, "asym-t2i", seed=2),
    }


@pytest.fixture(scope="module")
def banked(pictures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    named = {f"sym-{s}": (COSINE, "sym", "cosine", 1.2 + s / 10, False, s) for s in (0, 1)}
    named |= {f"qnorm-{s}": (QNORM, "asym-i2t", "qnorm", 1.5 + s / 10, True, s) for s in (0, 1)}
    return {
        name: make_run(folder / name, pictures, *how, bank=bank, seed=seed)
        for name, (*how, bank, seed) in named.items()
    }


def bare(x: float, sign: str = "") -> str:
    return f"{x:{sign}.3f}".replace("0.", ".").replace("-", "−")


def rows_of(table) -> dict:
    return dict(table.rows)


def test_all_tables_print_within_the_width_without_markup_of_names(runs):
    every = [*tables.run_tables(runs, groups=True), *tables.comparison_tables(runs)]
    text = printed(*every, *tables.diagnostics_tables(runs))
    assert "\x1b" not in text and "\u202e" not in text and "[red]x" in text
    assert max(map(len, text.splitlines())) <= MIN_WIDTH
    assert "degenerate: every candidate is relevant to 2 queries" in text
    titles = [table.title for table in every]
    assert any(t.startswith("text norm by words in the caption") for t in titles)
    assert any(t.startswith("image norm by caption level of the query") for t in titles)
    odd = copy.deepcopy(runs["_$control"])
    odd.json["data"]["n_images"] = odd.json["data"]["n_queries"]["i2t"] = HOSTILE
    assert "\x1b" not in printed(*tables.run_tables({"odd": odd}))


def test_every_metric_stands_with_its_interval_and_alike_scorings_share_a_row(banked):
    run = banked["qnorm-0"]
    table = tables.retrieval_table({"q": run}, "distractors", "t2i")
    assert table.columns == ["scoring", *tables.HEADS.values(), "median\nrank"]
    numbers = run.pools["distractors"]["retrieval"]["t2i"]["native"]
    cells = rows_of(table)["native = dot = qnorm"]
    for metric, cell in zip(tables.HEADS, cells, strict=False):
        span = "–".join(map(bare, numbers["ci"][metric]))
        assert (cell.text, cell.detail, cell.value) == (bare(numbers[metric]), span, numbers[metric])
    assert cells[-1].text == f"{numbers['median_rank']:g}"
    assert "corrected" in rows_of(table)
    assert any(n.startswith("corrected: bank transductive, 130 items, α 2.000; transductive: ") for n in table.notes)
    assert not any("corrected" in head for head, _ in tables.retrieval_table({"q": run}, "distractors", "i2t").rows)


def test_differences_are_the_comparisons(banked):
    first, second = runs = dict(islice(banked.items(), 1, 3))
    found = compare(runs[first], runs[second])
    changes = tables.differences(runs)
    table = tables.change_table(runs, "retrieval", "i2t", changes)
    assert table.rows[0] == (f"{second} less {first}", [])
    glance = rows_of(tables.overview(runs, "retrieval", changes))
    for metric, cell in zip(tables.HEADS, rows_of(table)["native"], strict=True):
        change = found["retrieval"]["i2t"]["native"][metric]
        assert cell.text == bare(change["delta"], "+")
        assert cell.kind == ("noise" if change["within_noise"] else "up" if change["delta"] > 0 else "down")
        if metric == "success@1":
            assert glance[f"{second}\nnative"][1] == cell
    assert tables.differences({"a": runs[first]}) == {}


def test_the_glance_has_bars_of_one_scale_a_tenth_above_the_largest_end(banked):
    low = copy.deepcopy(dict(islice(banked.items(), 1, 3)))
    for i, run in enumerate(low.values()):
        for direction in ("i2t", "t2i"):
            for numbers in run.json["retrieval"][direction].values():
                numbers["success@1"], numbers["ci"]["success@1"] = 0.1 + i / 20, [0.05, 0.15 + i / 10]
    rows = rows_of(tables.overview(low))
    kinds = [("sym-1", "native"), ("sym-1", "cosine"), *(("qnorm-0", s) for s in ("native", "cosine", "corrected"))]
    assert list(rows) == ["\n".join(kind) for kind in kinds]
    assert rows["sym-1\nnative"][2].bar == pytest.approx((0.05 / 0.3, 0.1 / 0.3, 0.15 / 0.3))
    assert rows["qnorm-0\nnative"][2].bar == pytest.approx((0.05 / 0.3, 0.15 / 0.3, 0.25 / 0.3))
    assert rows["qnorm-0\ncorrected"][0].text == NO  # i2t was trained: there is nothing to correct


@pytest.mark.parametrize("clusters", [1, 19, 20])
def test_few_independent_queries_are_said(banked, clusters):
    few = copy.deepcopy(dict(islice(banked.items(), 1)))
    few["sym-0"].per_query["retrieval/i2t/clusters"] = np.arange(40) % clusters
    notes = [n for n in tables.overview(few).notes if "too narrow" in n]
    assert len(notes) == (clusters < 20) and all(f"of {clusters} clusters only" in n for n in notes)


def test_norms_say_why_a_number_is_missing(runs):
    table = tables.norms_table(dict(islice(runs.items(), 1)), "retrieval")
    d = runs["sym-cosine"].json["magnitude"]["text"]["cohens_d"]
    cells = rows_of(table)["sym-cosine\ntexts, ranked in image → text"]
    assert cells[2].text == f"{d['topk']['value']:+.2f}".replace("-", "−")
    assert d["corpus"] is None and cells[3].text == NO
    assert any(n.startswith("no d (corpus) of texts: ") for n in table.notes)


def test_groups_are_left_out_where_the_data_or_a_run_does_not_have_them(runs):
    assert tables.groups_table(runs, "text", "colour") is None
    other = copy.deepcopy(runs["_$control"])
    del other.json["pools"]["full"]
    for side in other.json["magnitude"].values():
        side["by_document"].pop("n_objects", None)
        side["by_document"]["n_words"] = None
    both = {"sym-cosine": runs["sym-cosine"], "other": other}
    heads = {head.partition(",")[0] for head, _ in tables.groups_table(both, "text", "n_words").rows}
    assert heads == {"n", "sym-cosine"}
    assert "pool full" not in printed(*tables.comparison_tables(both))


def test_ties_and_a_clamped_k_are_notes():
    x, names = torch.ones(4, 3), list("abcd")
    same = Embeddings(x, x, torch.tensor([[i, i] for i in range(4)]), names, names)
    tied = evaluate_clip(same, QNORM, {"model": "m"}, resamples=10)
    notes = tables.retrieval_table({"m": tied}, "retrieval", "i2t").notes
    assert "tied queries, at most 4: counted against the model" in notes
    assert "4 candidates: success@5, success@10, recall@5, mrr@10, ndcg@10 take all of them" in notes


def test_means_ranges_and_differences_are_those_of_the_seeds(banked):
    table = tables.seeds_table(banked, "retrieval")
    assert [head for head, _ in table.rows] == [
        *("sym cosine: sym-0, sym-1", "image → text", "text → image"),
        *("asym-i2t qnorm: qnorm-0, qnorm-1", "image → text", "text → image"),
    ]

    def each(kind, scoring):
        return [banked[f"{kind}-{s}"].json["retrieval"]["t2i"][scoring]["success@1"] for s in (0, 1)]

    means = {s: np.mean(each("qnorm", s)) for s in ("native", "reversed", "corrected")}
    native, base = each("qnorm", "native"), np.mean(each("sym", "native"))
    cells = table.rows[-1][1]
    assert [c.text for c in cells] == [
        *("2", bare(means["native"]), f"{bare(min(native))}–{bare(max(native))}"),
        *(bare(means["reversed"]), bare(means["corrected"]), bare(means["corrected"] - means["reversed"], "+")),
        *(bare(means["native"] - base, "+"), bare(means["corrected"] - base, "+")),
    ]
    assert table.rows[1][1][6].text == NO and table.rows[4][1][4].text == NO  # itself; trained: nothing to correct
    assert tables.seeds_table({k: banked[k] for k in ("sym-0", "qnorm-1")}, "retrieval") is None


def test_diagnostics_are_those_of_the_json_with_reasons(runs):
    run = runs["sym-cosine"]
    sections = run.json["diagnostics"]
    first, every = tables.diagnostics_tables({"run": run})
    assert first.columns == ["measure", "i2t\nimage queries", "t2i\ntext queries"]
    gap = next(cells for head, cells in first.rows if head.startswith("modality gap\n"))
    assert [c.value for c in gap] == [sections[d]["modality_gap"] for d in ("i2t", "t2i")]
    assert any(sections["i2t"]["auc"]["corpus_reason"] in note for note in first.notes)
    assert "log₁₀" not in printed(first), "Fisher matrices were not asked for"
    assert rows_of(every)["auc · topk"][0].value == sections["i2t"]["auc"]["topk"]["value"]
    paths = [path for path, *_ in MEASURES if not path.startswith("fisher")]
    assert not [path for path in paths if value_at(sections["i2t"], path.split()) == (None, None)]
    known = {name: copy.deepcopy(run) for name in "ab"}
    for r, sources in zip(known.values(), (("given", "calibrated"), ("given", "given")), strict=True):
        for d, source in zip(("i2t", "t2i"), sources, strict=True):
            r.json["diagnostics"][d]["scale"]["alpha_source"] = source
    (note,) = [n for n in tables.diagnostics_tables(known)[0].notes if "α" in n]
    assert note.startswith("α of a t2i is not known") and "14.3" in note
    assert alpha_note({"i2t": None, "t2i": {"scale": {"alpha_source": "given"}}}) is None


def test_settings_that_differ_come_first(banked):
    runs = {"a": banked["sym-0"], "b": banked["qnorm-1"]}
    settings = {"a": {"loss": "sym", "lr": 0.001, "x": None}, "b": {"loss": "q", "lr": 0.001}}
    differ, same = tables.settings_tables(runs, settings)
    rows = {head: [c.text for c in cells] for head, cells in differ.rows}
    assert rows["loss"] == ["sym", "q"]
    assert rows["evaluation · native · gamma_d"] == ["1", "0"]
    assert {"lr", "versions · mmclip"} <= rows_of(same).keys() and not rows_of(same).keys() & rows.keys()


def test_an_open_verdict_has_its_reason(runs):
    _, run, control = runs.values()
    found = verdict(run, control)
    found["learned"] = {"verdict": None, "reason": "r", "sentence": "No verdict: [b]r[/b]."}
    learned, useful = tables.verdict_lines([found])
    assert learned == "norms learned? open (t2i, pool retrieval): No verdict: [b]r[/b]."
    assert useful.startswith("norms useful? ")


def test_a_text_run_is_shown_with_its_numbers():
    run = text_run(model=HOSTILE)
    numbers = run.json["retrieval"]["q2d"]["native"]
    retrieval, norms = tables.run_tables({"run": run})
    assert list(rows_of(retrieval)) == ["native = dot = qnorm", "cosine = dnorm"]
    assert [c.value for c in retrieval.rows[0][1][:4]] == [numbers[m] for m in tables.TEXT_HEADS]
    assert "90 documents; queries 60 q2d" in retrieval.title
    assert any("recall@100 take all of them" in note for note in retrieval.notes)
    assert "run\ndocuments, ranked in query → document" in rows_of(norms)
    first, _ = tables.diagnostics_tables({"run": run})
    assert first.columns == ["measure", "q2d"]
    assert any("q2d" in note and "is not known" in note for note in first.notes)  # its alpha


def test_a_comparison_of_text_shows_p_and_what_could_be_detected():
    runs = {"first": text_run(), "better": text_run(COSINE), HOSTILE: text_run(seed=3)}
    rows = rows_of(tables.overview(runs))
    found = significance(runs)
    for name, one in found.items():
        change, p, least = rows[f"{name}\nnative"][1:]
        assert (change.value, p.text, least.value) == (one["delta"], f"{one['p_holm']:.4f}", one["smallest_detectable"])
    assert [c.text for c in rows["first\nnative"][1:]] == [NO] * 3
    for run, length in zip(runs.values(), (64, 256, 64), strict=True):
        run.json |= {"lengths": {"query": 64, "document": length}, "prompts": {"query": "", "document": ""}}
    assert any("better: query 64 tokens, document 256 tokens" in n for n in tables.overview(runs).notes)
    runs["better"].json["lengths"]["document"] = 64
    assert tables.encoded_unlike(runs) is None
    runs["better"].json["prompts"]["query"] = "ask: "
    assert "after 'ask: '" in tables.encoded_unlike(runs)
    alien = text_run(documents=91)
    with pytest.raises(UserError, match="different data"):
        tables.comparison_tables({"a": runs["first"], "b": alien})


def test_run_files_are_shown_beside_the_first():
    rates = dict.fromkeys(tables.TEXT_HEADS, (0.5, 0.4, 0.6))
    versus = against_first([np.array([0.0, 0.5, 1.0]), np.array([0.5, 0.5, 1.0])])
    text = printed(tables.files_table({"a": rates, HOSTILE: rates}, [None, *versus]))
    assert ".500 .400–.600" in text and f"{versus[0]['p']:.4f}" in text and not re.search(r"[.\d]…", text)
