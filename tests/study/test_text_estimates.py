"""Statistics of a text study: paired over queries and seeds, against what a few lines compute; nulls; reasons."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mmclip import metrics
from mmclip.evaluation.results import Results
from mmclip.metrics.bootstrap import seed_counts
from mmclip.study.arms import Arm
from mmclip.study.estimates import Score, Study
from mmclip.study.plan import TEXT
from tests.helpers.text_studying import INSIDE, OUTSIDE, arm, family, settings

B = 300


@pytest.fixture(scope="module")
def study() -> Study:
    return Study(family(lengths=0.3), TEXT, resamples=B)


def values(run: Results, scoring: str = "native") -> Any:
    return run.query_values("retrieval", "q2d", scoring, "ndcg@10").astype(np.float64)


def drawn_means(arms: Arm, data: str, offset: int) -> Any:
    """[B] the long way: queries drawn, seeds drawn, one resample at a time."""
    runs = [arms.runs[data][s] for s in arms.seeds]
    n = len(values(runs[0]))
    times = np.concatenate(list(metrics.cluster_counts(n, resamples=B, seed=offset)))
    seeds = seed_counts(len(runs), resamples=B, seed=0)
    return np.array(
        [sum(seeds[b, j] * (times[b] @ values(run)) / n for j, run in enumerate(runs)) / len(runs) for b in range(B)]
    )


def test_a_difference_is_paired_by_query_and_seed(study: Study) -> None:
    cosine, dot = study.arms[:2]
    found = study.difference(Score(dot, "q2d", data=INSIDE), Score(cosine, "q2d", data=INSIDE))
    samples = drawn_means(dot, INSIDE, 0) - drawn_means(cosine, INSIDE, 0)
    expected = np.mean([values(dot.runs[INSIDE][s]).mean() - values(cosine.runs[INSIDE][s]).mean() for s in (0, 1)])
    assert found.value == pytest.approx(expected) and found.n_seeds == 2
    assert (found.lo, found.hi) == pytest.approx(tuple(np.quantile(samples, [0.025, 0.975])))
    assert found.smallest == pytest.approx(2.8 * samples.std(ddof=1))
    unpaired = drawn_means(dot, INSIDE, 1) - drawn_means(cosine, INSIDE, 2)
    assert samples.std() < unpaired.std(), "pairing removed nothing"


def test_data_sets_are_drawn_apart_and_seeds_together(study: Study) -> None:
    cosine, dot = study.arms[:2]
    sides = [Score(a, "q2d", data=d) for d in (OUTSIDE, INSIDE) for a in (dot, cosine)]
    found = study.estimate(sides, lambda x: (x[0] - x[1]) - (x[2] - x[3]))
    out, inside = ([drawn_means(a, d, o) for a in (dot, cosine)] for d, o in ((OUTSIDE, 1000), (INSIDE, 0)))
    samples = (out[0] - out[1]) - (inside[0] - inside[1])
    assert (found.lo, found.hi) == pytest.approx(tuple(np.quantile(samples, [0.025, 0.975])))


def test_an_arm_less_itself_is_nothing(study: Study) -> None:
    dot = study.arms[1]
    found = study.difference(Score(dot, "q2d", data=INSIDE), Score(dot, "q2d", data=INSIDE))
    assert (found.value, found.lo, found.hi, found.smallest) == (0, 0, 0, 0)
    ranks_alike = study.difference(Score(dot, "q2d", "dot", INSIDE), Score(dot, "q2d", "qnorm", INSIDE))
    assert ranks_alike.value == 0
    assert study.delta_cv(INSIDE, {"dnorm": dot, "dot": dot})[:3] == (1, 1, 1)


def test_delta_cv_is_of_the_queries_that_were_asked(study: Study) -> None:
    _, dot, _, dnorm, _ = study.arms
    found = study.delta_cv(INSIDE, {"dnorm": dnorm, "dot": dot})
    cvs = [[a.runs[INSIDE][s].json["magnitude"]["query"]["cv"] for s in (0, 1)] for a in (dnorm, dot)]
    assert found.value == pytest.approx(np.mean(cvs[0]) / np.mean(cvs[1]), rel=1e-5)
    assert found.lo is not None and found.lo < found.value < (found.hi or 0)


def test_numbers_of_documents_have_normal_intervals_as_wide_as_a_runs_own_and_more(study: Study) -> None:
    dot, cosine = study.arms[1], study.arms[0]
    own = [dot.runs[INSIDE][s].json["magnitude"]["document"]["cohens_d"]["corpus"] for s in (0, 1)]
    found = study.documents(INSIDE, "corpus", dot)
    assert found.value == pytest.approx(np.mean([d["value"] for d in own]))
    width = np.mean([d["ci"][1] - d["ci"][0] for d in own])
    assert found.hi is not None and found.lo is not None and found.hi - found.lo >= width * (1 - 1e-9)
    beside = study.documents(INSIDE, "corpus", dot, cosine)
    assert beside.hi is not None and beside.lo is not None
    assert beside.hi - beside.lo > found.hi - found.lo, "two arms are no less uncertain than one"
    assert study.documents(INSIDE, "count", dot).value == pytest.approx(
        np.mean([dot.runs[INSIDE][s].json["diagnostics"]["q2d"]["relevance_count"]["value"] for s in (0, 1)])
    )


def test_what_does_not_exist_has_a_reason(study: Study) -> None:
    dot = study.arms[1]
    alone = dataclasses.replace(arm("qnorm", seeds=(7,)), name="late")
    found = study.difference(Score(alone, "q2d", data=INSIDE), Score(dot, "q2d", data=INSIDE))
    assert found.value is None and found.reason == "no seed of q2d dot with native scores of q2d"
    assert study.documents("nowhere", "corpus", dot).reason.startswith("no seed that all have")
    other = dataclasses.replace(dot, name="other", runs={INSIDE: arm("dot").runs[OUTSIDE]})
    assert (
        "different data cannot be compared"
        in study.difference(Score(other, "q2d", data=INSIDE), Score(dot, "q2d", data=INSIDE)).reason
    )
    run = next(iter(dot.runs[INSIDE].values()))
    effects = run.json["magnitude"]["document"]["cohens_d"] | {"corpus": None, "corpus_reason": "all are relevant"}
    document = run.json["magnitude"]["document"] | {"cohens_d": effects}
    bare = Results(run.json | {"magnitude": run.json["magnitude"] | {"document": document}}, {})
    lacking = dataclasses.replace(dot, runs={INSIDE: {0: bare}})
    assert study.documents(INSIDE, "corpus", lacking).reason == "q2d dot, seed 0: all are relevant"
    assert "no per-query numbers" in study.delta_cv(INSIDE, {"dnorm": lacking, "dot": lacking}).reason


def test_a_family_differs_in_its_norm_alone() -> None:
    arms = [*family(), arm("dot", lr=1e-3), arm("cosine", lr=1e-3), arm("qnorm", epochs=9)]
    found = Study(arms, TEXT).families()
    assert [list(f) for f in found] == [["cosine", "dot", "qnorm", "dnorm", "learned"], ["cosine", "dot"]]
    assert found[1]["dot"].settings["lr"] == 1e-3
    both = dataclasses.replace(arms[1], settings=settings("dot", loss="both", gamma_init=0.2).to_dict())
    assert Study([arms[0], both], TEXT).families() == [{"cosine": arms[0]}]
    measured = dataclasses.replace(arms[1], settings=settings("dot", measure_start=False, gamma_lr=0.5).to_dict())
    assert list(Study([arms[0], measured], TEXT).families()[0]) == ["cosine", "dot"]


def test_a_verdict_is_by_ndcg_against_the_families_control(study: Study) -> None:
    cosine, dot, *_ = study.arms
    found = study.verdict(dot, "q2d", INSIDE)
    assert (found["control"], found["baseline"], found["n_seeds"]) == ("q2d dnorm", "q2d cosine", 2)
    assert (
        found["useful"]["metric"] == "ndcg@10" and found["learned"]["verdict"] is True and found["learned"]["d_run"] > 1
    )
    late = Study([cosine, dot, arm("dnorm", seeds=(7,))], TEXT, resamples=20)
    assert late.verdict(dot, "q2d", INSIDE)["reason"].startswith("no seed that all have")
    assert "no control" in Study([cosine, dot], TEXT).verdict(dot, "q2d", INSIDE)["reason"]
