"""A study's judging tables: what is planted is found, nulls are clean, κ is counted by both signs."""

from __future__ import annotations

import pytest

from mmclip.study import tables
from mmclip.study.claims import kappa_counts
from mmclip.study.estimates import Score, Study
from tests.helpers.studying import planted_arm, start

HIGH_QUERY, HIGH_DOCUMENT = (3.0, 1.0, 2.0, 2.0), (2.0, 2.0, 3.0, 1.0)


@pytest.fixture(scope="module")
def study():
    starts = {0: start(HIGH_QUERY, 0.5), 1: start(HIGH_QUERY, 0.6)}
    tuned = planted_arm("tuned", "asym-t2i", "qnorm", noise=1.1, lengths=0.3, initial="sym cosine", starts=starts)
    for seed, run in tuned.results().items():
        run.json["zero_shot"] = {"acc1": {"native": 0.4 + seed / 10, "cosine": 0.4}}
    arms = [
        planted_arm(noise=1.8, starts=starts),
        planted_arm(loss="asym-t2i", noise=1.8, starts=starts),
        planted_arm(loss="asym-t2i", norm="qnorm", noise=1.2, lengths=0.3),
        planted_arm(loss="asym-t2i", norm="dnorm", noise=1.8),
        tuned,
        planted_arm("null base", permuted=True, changes={"permute_pairs": True}),
        planted_arm("null control", "asym-t2i", permuted=True, changes={"permute_pairs": True}),
        planted_arm("null", "asym-t2i", "qnorm", permuted=True, changes={"permute_pairs": True}),
    ]
    return Study(arms, resamples=200)


def of(sheet, **keys):
    return [row for row in sheet.records if all(row[k] == v for k, v in keys.items())]


def test_verdicts_have_their_numbers_and_the_null_is_clean(study):
    sheet = tables.verdicts(study)
    assert [row["arm"] for row in sheet.records] == ["asym-t2i qnorm", "tuned", "null"]
    (row,) = of(sheet, arm="asym-t2i qnorm")
    assert (row["learned"], row["useful"], row["null"], row["n_seeds"]) == ("yes", "yes", False, 2)
    assert row["d_difference"] == pytest.approx(row["d_arm"] - row["d_control"])
    assert row["d_difference_lo"] > 0 < row["gain_over_control_lo"]
    (null,) = of(sheet, arm="null")
    assert null["null"] is True and null["control"] == "null control" and null["baseline"] == "null base"
    assert "yes" not in (null["learned"], null["useful"])


def test_the_corrections_gain_is_where_a_direction_was_read_backwards(study):
    sheet = tables.correction(study)
    assert [row["direction"] for row in of(sheet, arm="asym-t2i qnorm")] == ["i2t"]
    assert [row["direction"] for row in of(sheet, arm="sym cosine")] == ["i2t", "t2i"]
    (row,) = of(sheet, arm="asym-t2i qnorm")
    arm = study.arms[2]
    gain = study.difference(Score(arm, "i2t", "corrected"), Score(arm, "i2t", "reversed"))
    assert (row["corrected_minus_reversed"], row["corrected_minus_reversed_lo"]) == gain[:2]
    assert row["corrected_minus_reversed"] == pytest.approx(row["corrected_mean"] - row["reversed_mean"])


def test_what_is_served_is_a_rule(study):
    sheet = tables.keeps_both(study)
    decides = of(sheet, arm="asym-t2i qnorm", by_rule=True)
    assert [(row["i2t_scoring"], row["t2i_scoring"]) for row in decides] == [("corrected", "native")]
    assert [row["served"] for row in of(sheet, arm="sym cosine", by_rule=True)] == [
        "native",
        "corrected",
        "i2t corrected, t2i native",
        "t2i corrected, i2t native",
    ]
    itself = of(sheet, arm="sym cosine", served="native")[0]
    assert itself["keeps_both"] is True and itself["lowest_end"] == 1
    for row in sheet.records:
        ends = (row["i2t_ratio_to_native_lo"], row["t2i_ratio_to_native_lo"])
        if None in ends:  # a null's baseline finds nothing in many resamples
            assert row["keeps_both"] is None and row["reason"]
            continue
        assert row["keeps_both"] == (min(ends) >= 0.95) and row["lowest_end"] == min(ends)


def test_without_a_baseline_there_is_a_reason_and_no_answer():
    study = Study([planted_arm(loss="asym-i2t", norm="qnorm")], resamples=30)
    for row in tables.keeps_both(study).records:
        assert row["keeps_both"] is None and row["i2t_ratio_to_native"] is None and "no baseline" in row["reason"]
    (row,) = tables.verdicts(study).records
    assert row["learned"] == row["useful"] == "" and "no control" in row["reason"]
    (row,) = tables.correction(study).records
    assert row["corrected_minus_reversed"] is not None and "no baseline" in row["reason"]


def test_one_seed_has_intervals_over_queries():
    arms = [planted_arm(seeds=(4,), noise=1.8), planted_arm(loss="asym-i2t", norm="qnorm", seeds=(4,), noise=1.8)]
    row = tables.keeps_both(Study(arms, resamples=100)).records[-1]
    assert row["n_seeds"] == 1 and row["t2i_ratio_to_native_lo"] < row["t2i_ratio_to_native_hi"]


def test_forgetting_is_paired_by_seed(study):
    (row,) = tables.pretrained(study).records
    assert (row["arm"], row["initial"], row["from_random"]) == ("tuned", "sym cosine", "asym-t2i qnorm")
    assert row["zero_shot_change_native_mean"] == pytest.approx(-0.1)
    assert row["zero_shot_change_native_sd"] == pytest.approx(0, abs=1e-12) and row["zero_shot_native_n"] == 2
    expected = study.difference(Score(study.arms[4], "t2i"), Score(study.arms[2], "t2i"))
    assert row["minus_from_random_t2i"] == expected.value


def test_kappa_stands_beside_the_winner(study):
    rows = tables.fisher(study).records
    assert [(row["direction"], row["seed"], row["winner"]) for row in rows] == [
        ("t2i", 0, "qnorm"),
        ("t2i", 1, "qnorm"),
    ]
    assert rows[0]["log10_kappa_query_raw"] == 3.0 and rows[0]["kappa_of"] == "asym-t2i cosine"
    raw, normalized = kappa_counts(rows)
    assert (raw["n"], raw["larger"], raw["smaller"], raw["constant"]) == (2, 2, 0, True)
    assert (normalized["larger"], normalized["smaller"]) == (0, 2)


def test_both_signs_are_counted_and_noise_is_not():
    def rows(*told):
        names = [f"log10_kappa_{role}_{kind}" for role, kind in (("query", "raw"), ("document", "raw"))]
        return [dict(zip((*names, "winner"), row, strict=True)) for row in told]

    pairs = rows(
        (3, 2, "qnorm"), (2, 3, "dnorm"), (3, 2, "dnorm"), (3, 2, "within noise"), (2, 2, "qnorm"), (None, 1, None)
    )
    raw, normalized = kappa_counts(pairs)
    assert (raw["n"], raw["larger"], raw["smaller"], raw["noise"], raw["constant"]) == (3, 2, 1, 1, False)
    assert raw["p"] == 1.0
    assert normalized["n"] == 0
    many = kappa_counts(rows(*[(3, 2, "qnorm"), (2, 3, "dnorm")] * 4))[0]
    assert many["p"] == pytest.approx(2 / 2**8) and not many["constant"]


def test_kappa_that_was_not_measured_has_a_reason():
    undetermined = {"fisher": {"t2i": {"status": "undetermined", "reason": "9 matched pairs"}}}
    for starts, words in (
        ({}, "nothing was measured"),
        ({0: undetermined}, "9 matched pairs"),
        ({0: {"x": 1}}, "no κ"),
    ):
        arms = [planted_arm(loss="asym-t2i", norm=n, seeds=(0,), starts=starts) for n in ("qnorm", "dnorm")]
        (row,) = tables.fisher(Study(arms, resamples=30)).records
        assert row["log10_kappa_query_raw"] is None and words in row["reason"]
