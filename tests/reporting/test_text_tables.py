"""Tables of text runs: hostile names, numbers never cut, what a comparison is worth."""

from __future__ import annotations

import io

import numpy as np
import pytest

from mmclip.errors import UserError
from mmclip.evaluation.comparison import compare, verdict, verdicts
from mmclip.evaluation.results import Results
from mmclip.evaluation.significance import against_first, significance
from mmclip.reporting.diagnostics_table import diagnostics_table
from mmclip.reporting.table_parts import make_console
from mmclip.reporting.text_tables import files_table, print_text_comparison, print_text_run, text_notes
from mmclip.similarity import Exponents
from tests.evaluation.test_text_evaluation import COSINE, QNORM, collection_of, vectors_of
from tests.helpers.evaluating import evaluate_text

HOSTILE = "[red]x[/red] \x1b[31m\n\u202e 漢字" + "n" * 80


def run_of(native: Exponents = QNORM, loss: str = "q2d", seed: int = 0, model: str = "m", **facts) -> Results:
    c = collection_of(n_q=60, n_d=90, seed=1, notes=[HOSTILE])
    query, document = vectors_of(c, 1)
    relevant = document.index_select(0, _first(c))
    query = relevant + 0.4 * vectors_of(c, 2 + seed)[0]
    said = {"task": "text", "loss": loss, "q2d_weight": None, "gamma_q": native.gamma_q, "gamma_d": native.gamma_d}
    return evaluate_text(c, query, document, native, {"model": model, "trained_with": said | facts}, resamples=50)


def _first(c):
    import torch

    return torch.tensor([int(c.pairs[c.pairs[:, 0] == q, 1][0]) for q in range(len(c.queries))])


def shown(*parts, of=print_text_run) -> str:
    file = io.StringIO()
    of(*parts, console=make_console(file))
    return file.getvalue()


def test_a_run_is_shown_with_its_numbers_and_nothing_of_its_names_is_markup() -> None:
    run = run_of(model=HOSTILE)
    text = shown(run)
    numbers = run.json["retrieval"]["q2d"]["native"]
    for rate in ("ndcg@10", "mrr@10", "success@1", "recall@100"):
        assert f"{numbers[rate]:.3f}"[1 if numbers[rate] < 1 else 0 :] in text
    assert "native = dot = qnorm" in text and "cosine = dnorm" in text
    assert "\x1b" not in text and "\u202e" not in text and "[red]x[/red]" in text
    assert "90 documents; queries 60 q2d" in text
    assert any("recall@100 take all of them" in note for note in text_notes(run))
    table, said = diagnostics_table(run)
    file = io.StringIO()
    make_console(file).print(table)
    assert "query asks" in file.getvalue() and "image" not in file.getvalue()
    assert any("q2d is not known" in note for note in said)  # its alpha


def test_a_comparison_shows_difference_p_and_what_could_be_seen() -> None:
    runs = {"first": run_of(), "better": run_of(COSINE), HOSTILE: run_of(seed=3)}
    text = shown(runs, of=print_text_comparison)
    found = significance(runs)
    assert list(found) == ["better", HOSTILE]
    for one in found.values():
        assert f"{one['p_holm']:.4f}" in text and f"{one['smallest_detectable']:.3f}" in text
        assert one["p_holm"] >= one["p"] > 0
    a, b = (runs[n].query_values("retrieval", "q2d", "native", "ndcg@10") for n in ("first", "better"))
    assert found["better"]["delta"] == pytest.approx(float(np.mean(b - a.astype(float))), abs=1e-6)
    report = compare(runs["first"], runs["better"])["retrieval"]["q2d"]["native"]
    assert report["ndcg@10"]["delta"] == pytest.approx(found["better"]["delta"])
    assert "recall@100" in report and "p_holm" not in significance({"a": runs["first"], "b": runs["better"]})["b"]
    other = collection_of(n_q=60, n_d=91, seed=1)
    alien = evaluate_text(other, *vectors_of(other), QNORM, {"model": "a"}, resamples=5)
    with pytest.raises(UserError, match="different data"):
        significance({"a": runs["first"], "b": alien})


def test_texts_that_were_cut_otherwise_are_told() -> None:
    runs = {name: run_of(seed=i) for i, name in enumerate(("a", "b"))}
    for run, length in zip(runs.values(), (64, 256), strict=True):
        run.json |= {"lengths": {"query": 64, "document": length}, "prompts": {"query": "", "document": ""}}
    assert "b: query 64 tokens, document 256 tokens" in " ".join(shown(runs, of=print_text_comparison).split())
    runs["b"].json["lengths"]["document"] = 64
    assert "not encoded alike" not in shown(runs, of=print_text_comparison)
    runs["b"].json["prompts"]["query"] = "ask: "
    assert "after 'ask: '" in shown(runs, of=print_text_comparison)


def test_run_files_are_shown_beside_the_first() -> None:
    rates = dict.fromkeys(("ndcg@10", "recall@100", "mrr@10", "success@1"), (0.5, 0.4, 0.6))
    versus = against_first([np.array([0.0, 0.5, 1.0]), np.array([0.5, 0.5, 1.0])])
    file = io.StringIO()
    make_console(file).print(files_table({"a": rates, HOSTILE: rates}, [None, *versus]))
    assert ".500 ±.100" in file.getvalue() and f"{versus[0]['p']:.4f}" in file.getvalue()


def test_verdicts_on_text_ask_ndcg_in_q2d_of_the_same_loss() -> None:
    run, control, baseline = run_of(), run_of(Exponents(0.0, 1.0)), run_of(COSINE)
    found = verdict(run, control, baseline, resamples=50)
    assert (found["direction"], found["useful"]["metric"]) == ("q2d", "ndcg@10")
    assert "the cosine run's cosine" in found["useful"]["sentence"]
    assert "document length" in found["learned"]["sentence"] or found["learned"]["verdict"] is None
    assert verdict(run, control, baseline, metric="mrr@10", resamples=20)["useful"]["metric"] == "mrr@10"
    assert [v["pool"] for v in verdicts(run, control, baseline)] == ["retrieval"]
    weighed = run_of(loss="both", q2d_weight=0.3)
    for other in (run_of(COSINE, "both", q2d_weight=0.5), run_of(COSINE, "d2q")):
        with pytest.raises(UserError, match="a control has the run's loss"):
            verdict(weighed, other)
        assert verdicts(weighed, other) == []
        with pytest.raises(UserError, match="a baseline is a cosine run of the run's loss, both"):
            verdict(weighed, run_of(COSINE, "both", q2d_weight=0.3), other)
    with pytest.raises(UserError, match="a baseline is a cosine run"):
        verdict(run, control, run_of())
    with pytest.raises(UserError, match="d2q alone"):
        verdict(run_of(loss="d2q"), run_of(COSINE, "d2q"))
    assert verdicts(run_of(loss="d2q"), run_of(COSINE, "d2q")) == []
    plain = run_of(COSINE, task="clip")
    assert verdicts(run, plain) == []
