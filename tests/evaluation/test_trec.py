"""TREC files: written, read by ir_measures and by us, other people's faults named with their line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ir_measures
import numpy as np
import pytest

from mmclip import metrics
from mmclip.errors import UserError
from mmclip.evaluation.eval_set import text_set
from mmclip.evaluation.evaluate import list_scores
from mmclip.evaluation.trec import measure_run, read_run, write_qrels, write_run
from mmclip.roles import Direction, Normalization
from tests.helpers.evaluating import QNORM, collection_of, evaluated, vectors_of

RATES = ("ndcg@10", "recall@100", "mrr@10", "success@1")


def test_what_is_written_is_read_back_and_measured_alike(tmp_path: Path) -> None:
    c = collection_of(n_q=20, n_d=150)
    done = evaluated(c, depth=100)
    data = text_set(c, *vectors_of(c))
    write_qrels(tmp_path / "q", c)
    for name, ranking in done.lists.items():
        exponents = QNORM if name == "native" else Normalization(name).exponents
        write_run(tmp_path / "r", c, ranking, list_scores(data, Direction.Q2D, ranking, exponents), "tag", 100)
        run, notes = read_run(tmp_path / "r", c)
        assert notes == [] and all(len(found) == 100 for found in run.values())
        theirs = {
            str(m): v
            for m, v in ir_measures.calc_aggregate(
                [ir_measures.nDCG @ 10, ir_measures.R @ 100, ir_measures.RR @ 10, ir_measures.Success @ 1],
                ir_measures.read_trec_qrels(str(tmp_path / "q")),
                ir_measures.read_trec_run(str(tmp_path / "r")),
            ).items()
        }
        ours = measure_run(c, run, RATES)
        for rate, measure in zip(RATES, ("nDCG@10", "R@100", "RR@10", "Success@1"), strict=True):
            assert ours[rate].mean() == pytest.approx(theirs[measure])
            assert np.allclose(ours[rate], done.query_values("retrieval", "q2d", name, rate), atol=1e-6)  # without ties


def test_lines_are_the_trec_form_in_our_order_with_the_real_scores(tmp_path: Path) -> None:
    c = collection_of(n_q=2, n_d=3, pairs=np.array([[0, 2], [1, 0]]), gains=np.array([3.0, 1.0]))
    ranking: Any = SimpleNamespace(queries=np.array([0, 1]), top_ids=np.array([[1, 2], [0, 1]]))
    scores = np.array([[0.5, 0.5], [2.25, -1.0]])
    write_run(tmp_path / "r", c, ranking, scores, "t", 2)
    write_qrels(tmp_path / "q", c)
    assert (tmp_path / "r").read_text() == "q0 Q0 d1 1 0.5 t\nq0 Q0 d2 2 0.5 t\nq1 Q0 d0 1 2.25 t\nq1 Q0 d1 2 -1 t\n"
    assert (tmp_path / "q").read_text() == "q0 0 d2 3\nq1 0 d0 1\n"
    write_run(tmp_path / "r", c, ranking, scores, "t", 1)
    assert len((tmp_path / "r").read_text().splitlines()) == 2


def test_only_what_ir_measures_can_tell_is_asked_of_it() -> None:
    c = collection_of()
    run = {name: {"d0": 1.0} for name in c.query_ids}
    assert set(measure_run(c, run, metrics.TEXT_RATES)) == set(metrics.TEXT_RATES) - {"map"}
    assert measure_run(replace(c, gains=c.gains / 2), run, ["ndcg@10", "map"]) == {}


def test_somebodys_run_may_leave_queries_out_and_name_others(tmp_path: Path) -> None:
    c = collection_of(n_q=3, n_d=4, pairs=np.array([[0, 0], [1, 1], [2, 2]]), gains=np.ones(3), excluded={0: [3]})
    (tmp_path / "r").write_text(
        "q0 Q0 d3 1 9 t\nq0 Q0 d0 2 8 t\n\nother Q0 x 1 1 t\nq1 Q0 d2 1 1 t\nq1 Q0 d1 2 0.5 t\n"
    )
    run, notes = read_run(tmp_path / "r", c)
    assert run == {"q0": {"d0": 8.0}, "q1": {"d2": 1.0, "d1": 0.5}}
    assert notes == [
        "1 of 3 queries have no documents: all of their rates are 0",
        "1 queries of other judgments left out",
        "1 documents that their queries exclude left out",
    ]
    assert measure_run(c, run, ["mrr@10"])["mrr@10"].tolist() == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("q0 Q0 d1 1 0.5 t\nq0 Q0 d2 2 0.4\n", "line 2: expected qid Q0 docid rank score tag, got 5 columns"),
        ("q0 Q0 d1 1 high t\n", "line 1: the score is a number, got 'high'"),
        ("q0 Q0 d1 1 nan t\n", "line 1: the score is a number"),
        ("q0 Q0 d99 1 1 t\n", "line 1: document 'd99' is not in the corpus"),
        ("q0 Q0 d1 1 1 t\nq0 Q0 d1 2 0 t\n", "line 2: document 'd1' is listed twice for query 'q0'"),
        ("x Q0 d1 1 1 t\n", "no line of a query of"),
        ("", "no line of a query of"),
    ],
)
def test_a_bad_run_file_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "r").write_text(text)
    with pytest.raises(UserError, match=words) as error:
        read_run(tmp_path / "r", collection_of())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bad", ["a b", "a\tb", "a\u2003b", " a"])
def test_ids_with_white_space_are_named(bad: str, tmp_path: Path) -> None:
    c = collection_of()
    for kind in ("query_ids", "document_ids"):
        names = [*getattr(c, kind)[:-1], bad]
        with pytest.raises(UserError, match="has white space in it"):
            write_qrels(tmp_path / "q", replace(c, **{kind: names}))
    assert not (tmp_path / "q").exists()
