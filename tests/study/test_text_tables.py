"""Tables of a text study hold what its runs say, and a reason where they say nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmclip.study import tables
from mmclip.study.estimates import Study
from mmclip.study.plan import TEXT
from mmclip.study.tables import StudyTable
from tests.helpers.text_studying import INSIDE, OUTSIDE, UNDETERMINED, arm, start


@pytest.fixture(scope="module")
def study() -> Study:
    arms = [arm("cosine", starts={0: start(UNDETERMINED, {"ndcg@10": 0.4}), 1: {}}), arm("dot", lengths=0.4)]
    return Study(arms, TEXT, resamples=50)


def of(sheet: StudyTable, **known: Any) -> dict[str, Any]:
    (row,) = [r for r in sheet.records if all(r[k] == v for k, v in known.items())]
    return row


def test_retrieval_has_means_ranges_and_the_untrained_model(study: Study) -> None:
    sheet = tables.retrieval(study)
    for data in (INSIDE, OUTSIDE):
        for scoring in ("native", "cosine"):
            row = of(sheet, data=data, arm="q2d dot", scoring=scoring)
            runs = [study.arms[1].runs[data][s].json["retrieval"]["q2d"][scoring] for s in (0, 1)]
            for metric in ("ndcg@10", "recall@100", "mrr@10"):
                each = [r[metric] for r in runs]
                assert row[metric] == pytest.approx(np.mean(each))
                assert (row[f"{metric}_min"], row[f"{metric}_max"]) == (min(each), max(each))
    assert of(sheet, data=INSIDE, arm="untrained", scoring="dot")["ndcg@10_lo"] == pytest.approx(0.35)
    lacking = of(sheet, data=OUTSIDE, arm="untrained", scoring="cosine")
    assert lacking["reason"] == "no run measured this data set before training" and "ndcg@10" not in lacking
    both = Study([arm("cosine", starts={0: start(UNDETERMINED, other=True)})], TEXT, resamples=50)
    assert of(tables.retrieval(both), data=OUTSIDE, arm="untrained", scoring="cosine")["mrr@10"] == 0.25


def test_differences_are_to_the_cosine_arm_natively_and_by_cosine(study: Study) -> None:
    sheet = tables.differences(study)
    assert len(sheet.records) == 4
    row = of(sheet, data=INSIDE, scoring="cosine")
    dot, cosine = (a.runs[INSIDE] for a in reversed(study.arms))
    told = [
        dot[s].json["retrieval"]["q2d"]["cosine"]["mrr@10"] - cosine[s].json["retrieval"]["q2d"]["native"]["mrr@10"]
        for s in (0, 1)
    ]
    assert row["mrr@10"] == pytest.approx(np.mean(told), abs=1e-7) and row["baseline"] == "q2d cosine"
    assert of(sheet, data=INSIDE, scoring="native")["mrr@10_smallest"] > 0


def test_lengths_are_the_runs_own(study: Study) -> None:
    row = of(tables.magnitude(study), data=OUTSIDE, arm="q2d dot")
    runs = [study.arms[1].runs[OUTSIDE][s].json for s in (0, 1)]
    assert row["cv_query_mean"] == pytest.approx(np.mean([r["magnitude"]["query"]["cv"] for r in runs]))
    topk = [r["magnitude"]["document"]["cohens_d"]["topk"]["value"] for r in runs]
    assert row["d_topk_mean"] == pytest.approx(np.mean(topk)) and row["d_topk_sd"] == pytest.approx(
        np.std(topk, ddof=1)
    )
    assert (row["gamma_q_mean"], row["gamma_d_sd"]) == (0, 0) and row["seconds_mean"] == 9.5
    assert row["effective_scale_mean"] > 0 and row["d_corpus_lo"] > 0


def test_kappa_is_undetermined_with_its_reason_and_told_where_it_is_not(study: Study) -> None:
    sheet = tables.text_fisher(study)
    assert of(sheet, question="q2d")["reason"] == "565 matched pairs, 1536 needed"
    assert of(sheet, question="titles")["status"] == "not measured"
    names = ("query_raw", "query_normalized", "document_raw", "document_normalized")
    section = {"status": "determined", "n": 9, **{n: {"log10_kappa": {"value": 2.5, "ci": [2, 3]}} for n in names}}
    told = tables.text_fisher(Study([arm("cosine", starts={0: start(section)})], TEXT))
    row = of(told, question="q2d")
    assert (row["log10_kappa_document_raw"], row["log10_kappa_document_raw_hi"], row["reason"]) == (2.5, 3, "")
    assert tables.text_fisher(Study([], TEXT)).records == []


def test_runs_are_all_there(study: Study) -> None:
    rows = tables.runs(study).records
    assert [(r["arm"], r["seed"]) for r in rows] == [(f"q2d {n}", s) for n in ("cosine", "dot") for s in (0, 1)]
    run = study.arms[1].runs[OUTSIDE][1].json
    assert rows[3][f"ndcg@10_{OUTSIDE}"] == run["retrieval"]["q2d"]["native"]["ndcg@10"]


def test_delta_cv_without_its_arms_has_a_reason(study: Study) -> None:
    rows = tables.text_delta_cv(study).records
    assert [r["reason"] for r in rows] == ["no dnorm arm beside a dot arm"] * 2 and rows[0]["delta_cv"] is None
