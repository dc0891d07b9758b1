"""The lines that every command ends with: few, plain, and as honest as the intervals."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from mmclip.errors import UserError
from mmclip.evaluation.comparison import compare, verdicts
from mmclip.evaluation.results import load_results
from mmclip.reporting.summary import judged, print_ending, served, summarize
from tests.helpers.reporting import COSINE, HOSTILE, clip_run, text_run


@pytest.fixture(scope="module")
def runs(folders):
    return {name: load_results(folder) for name, folder in folders.items()}


def fact(summary, head: str) -> str:
    return dict(summary.facts)[head]


def test_a_comparison_ends_with_nine_lines_at_most_and_its_differences(runs):
    found = [v for run in runs.values() for v in verdicts(run, runs["control"], runs["baseline"])]
    lines = summarize(runs, verdicts=found).to_lines()
    assert len(lines) <= 9 and [line.split()[0] for line in lines[4:6]] == ["answer", "because"]
    assert max(map(len, lines)) < 140
    change = compare(runs["baseline"], runs["qnorm"])["retrieval"]["i2t"]["native"]["success@1"]
    assert f"image → text {change['delta']:+.3f}".replace("0.", ".").replace("-", "−") in lines[5]
    word = "within noise" if change["within_noise"] else "worse" if change["delta"] < 0 else "better"
    assert lines[4].startswith(f"answer    qnorm against baseline: image → text {word}")
    assert "(corrected)" in lines[4] and lines[2].endswith("corrected")  # t2i was not trained
    assert lines[6].startswith("norms") and "not shown to be" in lines[6]


@pytest.mark.parametrize(
    ("named", "subject", "answer"),
    [
        ({"a": "baseline", "b": "baseline"}, None, "b against a: within noise in both directions"),
        ({"new": "control", "old": "baseline"}, "new", "new against old: "),
        ({"q": "qnorm"}, None, "ranking with norms against ranking by cosine: "),
        ({"b": "baseline"}, None, "ranking by dot against cosine: "),
    ],
)
def test_a_run_is_held_against_another_or_its_own_cosine_or_dot(runs, named, subject, answer):
    assert fact(summarize({n: runs[of] for n, of in named.items()}, subject), "answer").startswith(answer)


def test_corrected_scores_are_held_against_corrected_ones_where_there_are(runs):
    both = {"a": runs["qnorm"], "b": runs["qnorm"]}
    summary = summarize(both)
    assert [cells[1].detail.split()[-1] for _, cells in summary.rows] == ["corrected"] * 2
    assert "+.000 [+.000, +.000]" in fact(summary, "because")
    assert served(runs["qnorm"], "t2i") == "corrected" and served(runs["qnorm"], "i2t") == "native"


def test_the_judged_run_keeps_norms_or_is_the_second(runs):
    assert judged(runs) == "qnorm"
    assert judged({"control": runs["control"], "baseline": runs["baseline"]}) == "baseline"
    assert judged({"qnorm": runs["qnorm"]}) == "qnorm"


def test_a_start_is_a_baseline_without_pairs(runs):
    start = copy.deepcopy(runs["baseline"].json)
    for direction in ("i2t", "t2i"):
        start["retrieval"][direction]["native"] |= {"success@1": 0.01, "ci": {"success@1": [0.0, 0.02]}}
    summary = summarize({"new": runs["baseline"]}, start=start)
    assert summary.rows[0][0] == "the untrained model"
    assert fact(summary, "answer") == "new against the untrained model: better in both directions"
    start["retrieval"]["i2t"]["native"]["ci"]["success@1"] = [0.0, 0.9]
    again = summarize({"new": runs["baseline"]}, start=start)
    assert fact(again, "answer").endswith("image → text within noise; text → image better")
    assert "the 95% intervals overlap" in fact(again, "how sure")


def test_text_runs_have_one_direction_and_ndcg():
    lines = summarize({"a": text_run(COSINE), "b": text_run()}).to_lines()
    assert lines[0].startswith("nDCG@10, 95% interval") and "query → document" in lines[0]
    assert "b against a: query → document" in lines[3] and "60 queries" in lines[-2]


def test_few_images_are_said_and_names_are_plain(runs):
    few = copy.deepcopy(runs["baseline"])
    for d in ("i2t", "t2i"):
        clusters = few.per_query[f"retrieval/{d}/clusters"]
        few.per_query[f"retrieval/{d}/clusters"] = np.arange(len(clusters)) % 5
    few.json["data"]["path"] = HOSTILE
    text = "\n".join(summarize({HOSTILE: few}).to_lines())
    assert "5 images with their captions, which are few" in text and "\x1b" not in text and "\u202e" not in text


def test_other_data_are_refused_and_verbose_has_every_table_first(runs, capsys):
    with pytest.raises(UserError, match="different data"):
        summarize({"a": runs["baseline"], "b": clip_run(COSINE, "sym")})
    print_ending({"a": runs["baseline"], "b": runs["qnorm"]}, verbose=True)
    long = capsys.readouterr().out
    print_ending({"a": runs["baseline"], "b": runs["qnorm"]})
    short = capsys.readouterr().out
    assert long.endswith(short) and len(short.splitlines()) < 10 < len(long.splitlines())
    assert "at a glance · pool distractors" in long and "embedding norms" in long
