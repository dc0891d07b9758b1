"""Paired ratios and differences over queries and seeds against plain loops; pooled verdicts; reasons of what lacks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mmclip import metrics
from mmclip.errors import UserError
from mmclip.evaluation.comparison import verdict
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import CORRECTED, NATIVE, Results
from mmclip.metrics.bootstrap import seed_counts
from mmclip.similarity import Direction
from mmclip.study.arms import Arm, baseline_of, control_of
from mmclip.study.estimates import Score, Study
from mmclip.study.plan import TEXT
from tests.helpers.studying import INSIDE, OUTSIDE, planted_arm, text_arm, text_family, text_settings

B = 200


@pytest.fixture(scope="module")
def arms() -> dict[str, Arm]:
    return {
        "baseline": planted_arm("baseline", "sym", "cosine", (0, 1, 2), noise=1.8),
        "control": planted_arm("control", "asym-t2i", "cosine", (0, 1, 2), noise=1.8),
        "better": planted_arm("better", "asym-t2i", "qnorm", (0, 1, 2), noise=1.2, lengths=0.3),
        "same": planted_arm("same", "asym-t2i", "qnorm", (0, 1, 2), noise=1.8),
        "worse": planted_arm("worse", "sym", "dot", (1, 2, 3), noise=4.0),
    }


@pytest.fixture(scope="module")
def study(arms: dict[str, Arm]) -> Study:
    return Study(list(arms.values()), resamples=B)


@pytest.fixture(scope="module")
def text() -> Study:
    return Study(text_family(lengths=0.3), TEXT, resamples=B)


def naive(study: Study, score: Score, seeds: tuple[int, ...], offset: int = 0) -> tuple[float, Any]:
    """(mean, its samples [B]): clusters drawn, seeds drawn, one resample at a time."""
    runs = [score.arm.results(score.data)[s] for s in seeds]
    prefix = f"{MAIN_POOL}/{score.direction}"
    values = [run.array(f"{prefix}/{score.scoring}/{study.kind.metrics[0]}").astype(np.float64) for run in runs]
    names, member = np.unique(runs[0].array(f"{prefix}/clusters"), return_inverse=True)
    times = np.concatenate(list(metrics.cluster_counts(len(names), resamples=B, seed=offset)))[:, member]  # [B, Q]
    draws = seed_counts(len(runs), resamples=B, seed=0)
    samples = [
        sum(draws[b, s] * (times[b] @ v) / times[b].sum() for s, v in enumerate(values)) / len(runs) for b in range(B)
    ]
    return float(np.mean(values)), np.array(samples)


def test_estimates_equal_a_plain_loop_and_are_paired(study: Study, text: Study, arms: dict[str, Arm]) -> None:
    cosine, dot = text.arms[:2]
    cases = [
        (study, Score(arms["better"], "t2i"), Score(arms["baseline"], "t2i", "cosine"), (0, 1, 2)),
        (text, Score(dot, "q2d", data=INSIDE), Score(cosine, "q2d", data=INSIDE), (0, 1)),
    ]
    for whole, a, b, seeds in cases:
        (mean_a, of_a), (mean_b, of_b) = naive(whole, a, seeds), naive(whole, b, seeds)
        ratio, difference = whole.ratio(a, b), whole.difference(a, b)
        assert (ratio.lo, ratio.hi) == pytest.approx(metrics.interval(of_a / of_b))
        assert (difference.lo, difference.hi) == pytest.approx(metrics.interval(of_a - of_b))
        assert (ratio.value, difference.value) == pytest.approx((mean_a / mean_b, mean_a - mean_b))
        assert difference.smallest == pytest.approx(2.8 * (of_a - of_b).std(ddof=1)) and ratio.n_seeds == len(seeds)
        unpaired = naive(whole, a, seeds, 1)[1] - naive(whole, b, seeds, 2)[1]
        assert (of_a - of_b).std() < unpaired.std(), "pairing removed nothing"


def test_data_sets_are_drawn_apart_and_seeds_together(text: Study) -> None:
    sides = [Score(a, "q2d", data=d) for d in (OUTSIDE, INSIDE) for a in text.arms[1::-1]]
    result = text.estimate(sides, lambda x: (x[0] - x[1]) - (x[2] - x[3]))
    of = [naive(text, side, (0, 1), 1000 * (side.data == OUTSIDE))[1] for side in sides]
    assert (result.lo, result.hi) == pytest.approx(metrics.interval((of[0] - of[1]) - (of[2] - of[3])))


def test_a_planted_effect_is_found_and_a_planted_null_is_not(study: Study, arms: dict[str, Arm]) -> None:
    baseline = Score(arms["baseline"], "t2i")
    assert study.ratio(Score(arms["better"], "t2i"), baseline).above(1.05)
    null = study.ratio(Score(arms["same"], "t2i", "cosine"), baseline)
    assert not null.above(1) and not null.below(1)
    assert study.ratio(Score(arms["worse"], "t2i"), baseline).below(0.95)
    result = study.verdict(arms["better"], "t2i")
    assert (result["control"], result["baseline"], result["n_seeds"]) == ("control", "baseline", 3)
    assert result["learned"]["verdict"] is True and result["useful"]["verdict"] is True
    result = study.verdict(arms["same"], "t2i")
    assert result["learned"]["verdict"] is False and result["useful"]["verdict"] is not True


def test_an_arm_is_itself_times_one_and_directions_pair_by_picture(study: Study, arms: dict[str, Arm]) -> None:
    one = Score(arms["better"], "t2i")
    assert study.ratio(one, one)[:3] == (1.0, 1.0, 1.0)
    none = study.difference(one, one)
    assert (*none[:3], none.smallest) == (0, 0, 0, 0)
    across = study.difference(Score(arms["better"], "i2t"), one)
    assert across.value == pytest.approx(study.mean(Score(arms["better"], "i2t")).value - study.mean(one).value)
    assert across.lo <= across.value <= across.hi


def test_only_common_seeds_count(study: Study, arms: dict[str, Arm]) -> None:
    worse, baseline = Score(arms["worse"], "t2i"), Score(arms["baseline"], "t2i")
    result = [study.difference(worse, baseline, seeds) for seeds in (None, [2], [3])]
    assert [e.n_seeds for e in result] == [2, 1, 0] and result[2].value is None and "no seed" in result[2].reason


def test_what_does_not_exist_has_a_reason(study: Study, text: Study, arms: dict[str, Arm]) -> None:
    baseline = Score(arms["baseline"], "t2i")
    result = study.ratio(Score(arms["better"], "t2i", CORRECTED), baseline)
    assert result.value is None and "corrected" in result.reason
    other = planted_arm("other", noise=1.0)
    other.results()[0].json["data"]["fingerprint"] = "else"
    assert "different data" in study.difference(Score(other, "t2i"), baseline).reason
    lost = Study([planted_arm("lost", "sym", "dot")])
    assert "no control" in lost.verdict(lost.arms[0], "i2t")["reason"]
    zero = planted_arm("zero")
    for run in zero.results().values():
        run.per_query[f"{MAIN_POOL}/t2i/native/success@1"][:] = 0
    assert "does not exist" in study.ratio(baseline, Score(zero, "t2i")).reason

    cosine, dot = text.arms[:2]
    late = Score(text_arm("qnorm", seeds=(7,)), "q2d", data=INSIDE)
    assert (
        text.difference(late, Score(dot, "q2d", data=INSIDE)).reason == "no seed of q2d dot with native scores of q2d"
    )
    assert text.documents("nowhere", "corpus", dot).reason.startswith("no seed that all have")
    run = next(iter(dot.runs[INSIDE].values()))
    document = run.json["magnitude"]["document"]
    effects = document["cohens_d"] | {"corpus": None, "corpus_reason": "all are relevant"}
    magnitude = run.json["magnitude"] | {"document": document | {"cohens_d": effects}}
    lacking = dataclasses.replace(dot, runs={INSIDE: {0: Results(run.json | {"magnitude": magnitude}, {})}})
    assert text.documents(INSIDE, "corpus", lacking).reason == "q2d dot, seed 0: all are relevant"
    assert "no per-query numbers" in text.delta_cv(INSIDE, {"dnorm": lacking, "dot": lacking}).reason
    late_control = Study([cosine, dot, text_arm("dnorm", seeds=(7,))], TEXT, resamples=20)
    assert late_control.verdict(dot, "q2d", INSIDE)["reason"].startswith("no seed that all have")
    assert "no control" in Study([cosine, dot], TEXT).verdict(dot, "q2d", INSIDE)["reason"]


# --- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["better", "same"])
def test_the_verdict_of_one_seed_is_comparisons(arms: dict[str, Arm], name: str) -> None:
    run, control, baseline = (arms[a].results()[1] for a in (name, "control", "baseline"))
    one = verdict(run, control, baseline, resamples=B)
    assert verdict([run], [control], [baseline], MAIN_POOL, Direction.T2I, resamples=B) == one
    only = [dataclasses.replace(arms[a], runs={"": {1: arms[a].results()[1]}}) for a in (name, "control", "baseline")]
    result = Study(only, resamples=B).verdict(only[0], "t2i")
    assert {key: result[key] for key in one} == one


def test_a_pooled_verdict_is_of_the_seeds_means(study: Study, arms: dict[str, Arm]) -> None:
    result = study.verdict(arms["better"], "t2i")
    names = ("better", "control", "baseline")
    each = [verdict(*(arms[a].results()[s] for a in names), resamples=20) for s in (0, 1, 2)]
    for part, number in (("learned", "d_run"), ("learned", "delta"), ("useful", "native_minus_cosine_run")):
        assert result[part][number] == pytest.approx(np.mean([one[part][number] for one in each]))


def test_pooled_runs_must_be_each_others_seeds_controls_and_data(arms: dict[str, Arm]) -> None:
    runs, controls = ([arms[a].results()[s] for s in order] for a, order in (("better", (0, 1)), ("control", (1, 0))))
    with pytest.raises(UserError, match="a control has the run's seed"):
        verdict(runs, controls, None, MAIN_POOL, Direction.T2I)
    with pytest.raises(UserError, match="a control has the run's loss"):
        verdict(runs, [arms["worse"].results()[1]] * 2, None, MAIN_POOL, Direction.T2I)


def test_a_text_verdict_is_by_ndcg_against_the_familys_control(text: Study) -> None:
    result = text.verdict(text.arms[1], "q2d", INSIDE)
    assert (result["control"], result["baseline"], result["n_seeds"]) == ("q2d dnorm", "q2d cosine", 2)
    learned, useful = result["learned"], result["useful"]
    assert useful["metric"] == "ndcg@10" and learned["verdict"] is True and learned["d_run"] > 1


# --- which arms -------------------------------------------------------------------------------------------------------


def test_what_an_arm_is_and_which_is_its_control(arms: dict[str, Arm]) -> None:
    arm = planted_arm("a", "sym", "qnorm", (0,), weight=0.25, gamma_init=0.9, train_fraction=0.5)
    half, whole = planted_arm("half", seeds=(0,), train_fraction=0.5), planted_arm("whole", seeds=(0,))
    assert arm.loss_options == "gamma_init=0.9" and arm.trained == ["i2t", "t2i"]
    assert Study([arm, half]).is_plain(half) and not Study([arm, half]).is_plain(arm), "the study's own share is whole"
    assert Study([half, whole]).is_plain(whole) and not Study([half, whole]).is_plain(half)
    asym = planted_arm("b", "asym-i2t", seeds=(0,))
    assert [asym.served(d) for d in ("i2t", "t2i")] == [NATIVE, CORRECTED]
    # a weight of one is one direction, whatever the loss is called
    weighted = planted_arm("weighted", "sym", "qnorm", (0,), weight=0.0, noise=1.2, lengths=0.3)
    result = Study([weighted, arms["control"], arms["baseline"]], resamples=B).verdict(weighted, "t2i")
    assert result["control"] == "control" and result["learned"]["verdict"] is True


def test_a_control_depends_on_no_norm_and_starts_where_the_arm_starts() -> None:
    def arm(name: str, norm: str, loss: str = "asym-t2i", **more: Any) -> Arm:
        return planted_arm(name, loss, norm, (0,), **more)

    both, one = arm("a", "qnorm", "sym"), arm("b", "qnorm", "asym-i2t")
    dnorms = [arm("c", "dnorm", "sym"), arm("d", "dnorm", "asym-i2t")]
    assert control_of(both, dnorms) is None, "its queries' norm is trained in the other direction"
    assert control_of(one, dnorms) is dnorms[1] and baseline_of(one, dnorms) is None
    run, clean = arm("run", "qnorm"), arm("clean", "cosine")
    assert control_of(run, [arm("drift", "cosine", norm_drift=0.1), clean]) is clean
    assert control_of(run, [arm("later", "cosine", gamma_schedule="switch", gamma_from="dot")]) is None
    tuned = arm("tuned", "qnorm", initial="clean")
    assert control_of(tuned, [clean]) is None, "norms of another start are other norms"
    dot, cosine = arm("from dot", "cosine", initial="raw"), arm("from cosine", "cosine", initial="clean")
    assert control_of(tuned, [clean, cosine]) is cosine
    assert control_of(arm("tuned dot", "qnorm", initial="raw"), [arm("raw", "dot"), dot]) is None


def test_a_family_differs_in_its_norm_alone() -> None:
    arms = [*text_family(), text_arm("dot", lr=1e-3), text_arm("cosine", lr=1e-3), text_arm("qnorm", epochs=9)]
    result = Study(arms, TEXT).families()
    assert [list(f) for f in result] == [["cosine", "dot", "qnorm", "dnorm", "learned"], ["cosine", "dot"]]
    assert result[1]["dot"].settings["lr"] == 1e-3
    both, measured = (
        dataclasses.replace(arms[1], settings=text_settings("dot", **more))
        for more in ({"loss": "both", "gamma_init": 0.2}, {"measure_start": False, "gamma_lr": 0.5})
    )
    assert Study([arms[0], both], TEXT).families() == [{"cosine": arms[0]}]
    assert list(Study([arms[0], measured], TEXT).families()[0]) == ["cosine", "dot"]


# --- norms ------------------------------------------------------------------------------------------------------------


def test_delta_cv_is_of_the_queries_and_of_an_arm_itself_one(text: Study) -> None:
    _, dot, _, dnorm, _ = text.arms
    result = text.delta_cv(INSIDE, {"dnorm": dnorm, "dot": dot})
    cvs = [[a.runs[INSIDE][s].json["magnitude"]["query"]["cv"] for s in (0, 1)] for a in (dnorm, dot)]
    assert result.value == pytest.approx(np.mean(cvs[0]) / np.mean(cvs[1]), rel=1e-5)
    assert result.lo is not None and result.lo < result.value < (result.hi or 0)
    assert text.delta_cv(INSIDE, {"dnorm": dot, "dot": dot})[:3] == (1, 1, 1)


def test_numbers_of_documents_have_normal_intervals_as_wide_as_a_runs_own_and_more(text: Study) -> None:
    cosine, dot = text.arms[:2]
    runs = [dot.runs[INSIDE][s].json for s in (0, 1)]
    own = [run["magnitude"]["document"]["cohens_d"]["corpus"] for run in runs]
    result, beside = text.documents(INSIDE, "corpus", dot), text.documents(INSIDE, "corpus", dot, cosine)
    assert result.value == pytest.approx(np.mean([d["value"] for d in own]))
    widths = [(e.hi or 0) - (e.lo or 0) for e in (result, beside)]
    assert widths[0] >= np.mean([d["ci"][1] - d["ci"][0] for d in own]) * (1 - 1e-9)
    assert widths[1] > widths[0], "two arms are no less uncertain than one"
    counts = [run["diagnostics"]["q2d"]["relevance_count"]["value"] for run in runs]
    assert text.documents(INSIDE, "count", dot).value == pytest.approx(np.mean(counts))
