"""Paired ratios and differences over seeds, and verdicts pooled over them, on planted arms."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mmclip import metrics
from mmclip.errors import UserError
from mmclip.evaluation.comparison import verdict
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import CORRECTED, NATIVE
from mmclip.metrics.bootstrap import seed_counts
from mmclip.similarity import Direction
from mmclip.study.arms import baseline_of, control_of
from mmclip.study.estimates import Score, Study
from tests.helpers.studying import planted_arm

B = 60


@pytest.fixture(scope="module")
def arms():
    return {
        "baseline": planted_arm("baseline", "sym", "cosine", (0, 1, 2), noise=1.8),
        "control": planted_arm("control", "asym-t2i", "cosine", (0, 1, 2), noise=1.8),
        "better": planted_arm("better", "asym-t2i", "qnorm", (0, 1, 2), noise=1.2, lengths=0.3),
        "same": planted_arm("same", "asym-t2i", "qnorm", (0, 1, 2), noise=1.8),
        "worse": planted_arm("worse", "sym", "dot", (1, 2, 3), noise=4.0),
    }


@pytest.fixture(scope="module")
def study(arms):
    return Study(list(arms.values()), resamples=B)


def test_the_ratio_and_the_difference_equal_a_plain_double_loop(study, arms):
    a, b = Score(arms["better"], "t2i"), Score(arms["baseline"], "t2i", "cosine")
    values = [
        [
            s.arm.results()[seed].query_values(MAIN_POOL, "t2i", s.scoring, "success@1").astype(float)
            for seed in (0, 1, 2)
        ]
        for s in (a, b)
    ]
    clusters = arms["better"].results()[0].array(f"{MAIN_POOL}/t2i/clusters")
    names = np.unique(clusters)
    (times,) = metrics.cluster_counts(len(names), resamples=B, seed=0)
    draws = seed_counts(3, resamples=B, seed=0)
    ratios, differences = [], []
    for r in range(B):
        sums = [0.0, 0.0]
        for side in (0, 1):
            for s in range(3):
                for c, name in enumerate(names):
                    sums[side] += draws[r, s] * times[r, c] * values[side][s][clusters == name].sum()
        n = 3 * sum(times[r, c] * (clusters == name).sum() for c, name in enumerate(names))
        ratios.append(sums[0] / sums[1])
        differences.append((sums[0] - sums[1]) / n)
    ratio, difference = study.ratio(a, b), study.difference(a, b)
    assert (ratio.lo, ratio.hi) == pytest.approx(metrics.interval(ratios))
    assert (difference.lo, difference.hi) == pytest.approx(metrics.interval(differences))
    means = [np.mean(v) for v in values]
    assert (ratio.value, difference.value) == pytest.approx((means[0] / means[1], means[0] - means[1]))
    assert ratio.n_seeds == 3


def test_a_planted_effect_is_found_and_a_planted_null_is_not(study, arms):
    baseline = Score(arms["baseline"], "t2i")
    assert study.ratio(Score(arms["better"], "t2i"), baseline).above(1.05)
    null = study.ratio(Score(arms["same"], "t2i", "cosine"), baseline)
    assert not null.above(1) and not null.below(1)
    assert study.ratio(Score(arms["worse"], "t2i"), baseline).below(0.95)
    found = study.verdict(arms["better"], "t2i")
    assert (found["control"], found["baseline"], found["n_seeds"]) == ("control", "baseline", 3)
    assert found["learned"]["verdict"] is True and found["useful"]["verdict"] is True
    found = study.verdict(arms["same"], "t2i")
    assert found["learned"]["verdict"] is False and found["useful"]["verdict"] is not True


def test_an_arm_is_itself_times_one_and_directions_pair_by_picture(study, arms):
    one = Score(arms["better"], "t2i")
    assert study.ratio(one, one)[:3] == (1.0, 1.0, 1.0)
    assert study.difference(one, one)[:3] == (0.0, 0.0, 0.0)
    across = study.difference(Score(arms["better"], "i2t"), one)
    assert across.value == pytest.approx(study.mean(Score(arms["better"], "i2t")).value - study.mean(one).value)
    assert across.lo <= across.value <= across.hi


def test_only_common_seeds_count(study, arms):
    found = study.difference(Score(arms["worse"], "t2i"), Score(arms["baseline"], "t2i"))
    assert found.n_seeds == 2
    assert study.difference(Score(arms["worse"], "t2i"), Score(arms["baseline"], "t2i"), [2]).n_seeds == 1
    none = study.difference(Score(arms["worse"], "t2i"), Score(arms["baseline"], "t2i"), [3])
    assert none.value is None and "no seed" in none.reason


def test_what_does_not_exist_has_a_reason(study, arms):
    found = study.ratio(Score(arms["better"], "t2i", CORRECTED), Score(arms["baseline"], "t2i"))
    assert found.value is None and "corrected" in found.reason
    other = planted_arm("other", noise=1.0)
    other.results()[0].json["data"]["fingerprint"] = "else"
    assert "different data" in study.difference(Score(other, "t2i"), Score(arms["baseline"], "t2i")).reason
    lost = Study([planted_arm("lost", "sym", "dot")])
    assert "no control" in lost.verdict(lost.arms[0], "i2t")["reason"]
    zero = planted_arm("zero")
    for run in zero.results().values():
        run.per_query[f"{MAIN_POOL}/t2i/native/success@1"][:] = 0
    assert "does not exist" in study.ratio(Score(arms["baseline"], "t2i"), Score(zero, "t2i")).reason


@pytest.mark.parametrize("name", ["better", "same"])
def test_the_verdict_of_one_seed_is_comparisons(arms, name):
    run, control, baseline = (arms[a].results()[1] for a in (name, "control", "baseline"))
    one = verdict(run, control, baseline, resamples=B)
    assert verdict([run], [control], [baseline], MAIN_POOL, Direction.T2I, resamples=B) == one
    only = [dataclasses.replace(arms[a], runs={"": {1: arms[a].results()[1]}}) for a in (name, "control", "baseline")]
    found = Study(only, resamples=B).verdict(only[0], "t2i")
    assert {key: found[key] for key in one} == one


def test_a_pooled_verdict_is_of_the_seeds_means(study, arms):
    found = study.verdict(arms["better"], "t2i")
    each = [
        verdict(arms["better"].results()[s], arms["control"].results()[s], arms["baseline"].results()[s])
        for s in (0, 1, 2)
    ]
    for path in (("learned", "d_run"), ("learned", "delta"), ("useful", "native_minus_cosine_run")):
        assert found[path[0]][path[1]] == pytest.approx(np.mean([one[path[0]][path[1]] for one in each]))


def test_pooled_runs_must_be_each_others_seeds_controls_and_data(arms):
    runs, controls = ([arms[a].results()[s] for s in order] for a, order in (("better", (0, 1)), ("control", (1, 0))))
    with pytest.raises(UserError, match="a control has the run's seed"):
        verdict(runs, controls, None, MAIN_POOL, Direction.T2I)
    with pytest.raises(UserError, match="a control has the run's loss"):
        verdict(runs, [arms["worse"].results()[1]] * 2, None, MAIN_POOL, Direction.T2I)


def test_a_weight_of_one_is_one_direction_whatever_the_loss_is_called(arms):
    weighted = planted_arm("weighted", "sym", "qnorm", (0,), weight=0.0, noise=1.2, lengths=0.3)
    found = Study([weighted, arms["control"], arms["baseline"]], resamples=B).verdict(weighted, "t2i")
    assert found["control"] == "control" and found["learned"]["verdict"] is True


def test_a_dnorm_arm_controls_one_direction_only():
    both, one = planted_arm("a", "sym", "qnorm", (0,)), planted_arm("b", "asym-i2t", "qnorm", (0,))
    dnorms = [planted_arm("c", "sym", "dnorm", (0,)), planted_arm("d", "asym-i2t", "dnorm", (0,))]
    assert control_of(both, dnorms) is None, "its queries' length is trained in the other direction"
    assert control_of(one, dnorms) is dnorms[1]
    assert baseline_of(one, dnorms) is None


def test_what_an_arm_is():
    arm = planted_arm("a", "sym", "qnorm", (0,), weight=0.25, changes={"gamma_init": 0.9, "train_fraction": 0.5})
    assert arm.loss_options == "gamma_init=0.9"
    half = planted_arm("half", seeds=(0,), changes={"train_fraction": 0.5})
    whole = planted_arm("whole", seeds=(0,))
    assert Study([arm, half]).is_plain(half) and not Study([arm, half]).is_plain(arm), "the study's own share is whole"
    assert Study([half, whole]).is_plain(whole) and not Study([half, whole]).is_plain(half)
    assert arm.trained == ["i2t", "t2i"]
    asym = planted_arm("b", "asym-i2t", seeds=(0,))
    assert [asym.served(d) for d in ("i2t", "t2i")] == [NATIVE, CORRECTED]


def test_a_control_never_saw_a_length_and_starts_where_the_arm_starts():
    def arm(name, norm, initial=None, **changes):
        return planted_arm(name, "asym-t2i", norm, (0,), initial=initial, changes=changes)

    run, clean = arm("run", "qnorm"), arm("clean", "cosine")
    assert control_of(run, [arm("drift", "cosine", norm_drift=0.1), clean]) is clean
    assert control_of(run, [arm("later", "cosine", gamma_schedule="switch", gamma_from="dot")]) is None
    tuned = arm("tuned", "qnorm", initial="clean")
    assert control_of(tuned, [clean]) is None, "lengths of another start are other lengths"
    dot, cosine = arm("from dot", "cosine", initial="raw"), arm("from cosine", "cosine", initial="clean")
    assert control_of(tuned, [clean, cosine]) is cosine
    assert control_of(arm("tuned dot", "qnorm", initial="raw"), [arm("raw", "dot"), dot]) is None
