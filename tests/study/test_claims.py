"""The paper's claims are answered by rule: what is planted decides, and what was not run is not answered."""

from __future__ import annotations

import pytest

from mmclip.metrics.bootstrap import Estimate
from mmclip.study.claims import claims, judged
from mmclip.study.estimates import Study
from mmclip.study.plan import CLIP, TEXT
from mmclip.study.tables import load_claims
from tests.helpers.studying import planted_arm, start


@pytest.mark.parametrize(
    ("value", "lo", "hi", "paper", "below", "verdict"),
    [
        (0.7, 0.6, 0.8, 0.65, True, "reproduced"),
        (0.9, 0.8, 0.99, 0.1, True, "reproduced"),  # the side decides, not the size
        (0.98, 0.9, 1.1, 0.94, True, "underpowered"),
        (0.98, 0.9, 1.1, 0.65, True, "not reproduced"),
        (1.2, 1.1, 1.3, 0.65, True, "not reproduced"),
        (1.2, 1.1, 1.3, 1.05, False, "reproduced"),
        (1.0, 0.9, 1.1, 1.05, False, "underpowered"),
        (1.0, 0.9, 1.1, 1.5, False, "not reproduced"),
    ],
)
def test_the_rule_of_a_ratio(value: float, lo: float, hi: float, paper: float, below: bool, verdict: str) -> None:
    place = judged(Estimate(value, lo, hi, 3), {"expected": "below 1" if below else "above 1"}, paper)
    assert load_claims(CLIP)["verdicts"][place] == verdict


def test_no_interval_is_no_answer() -> None:
    rule = {"expected": "below 1"}
    places = [judged(e, rule, 0.5) for e in (Estimate.missing("no arm"), Estimate(0.5, None, None, 1, "one image"))]
    assert [load_claims(CLIP)["verdicts"][place] for place in places] == ["not asked here", "underpowered"]


@pytest.mark.parametrize(
    ("lo", "hi", "expected", "more", "word"),
    [
        (0.01, 0.05, "above 0", {"paper": 0.025}, "Yes"),
        (-0.01, 0.01, "above 0", {"paper": 0.025}, "No"),  # the paper's effect is excluded
        (-0.05, -0.01, "above 0", {"paper": 0.025}, "No"),
        (-0.01, 0.04, "above 0", {"paper": 0.025}, "Open"),
        (0.001, 0.01, "above 0", {"paper": 0.025}, "Yes"),
        (-0.01, 0.1, "above 0", {"effect": 0.2, "paper": 0.05}, "No"),
        (0.001, 0.005, "below 0.01", {"refuted": "above 0"}, "No"),
        (-0.01, 0.005, "below 0.01", {"refuted": "above 0"}, "Yes"),
        (-0.01, 0.02, "below 0.01", {"refuted": "above 0"}, "Open"),
    ],
)
def test_the_rule_of_a_difference(lo: float, hi: float, expected: str, more: dict, word: str) -> None:
    paper = more.pop("paper", None)
    place = judged(Estimate((lo + hi) / 2, lo, hi, 3), {"expected": expected, **more}, paper)
    assert load_claims(TEXT)["verdicts"][place] == word


@pytest.fixture(scope="module")
def rows():
    kappa = {s: start((3.0, 1.0, 2.0, 2.0)) for s in (0, 1)}
    arms = [
        planted_arm(noise=1.4),
        planted_arm(norm="dot", noise=4.0),
        planted_arm(loss="asym-t2i", noise=1.8, starts=kappa),
        planted_arm(loss="asym-t2i", norm="qnorm", noise=1.2, lengths=0.3),
        planted_arm(loss="asym-t2i", norm="dot", noise=4.0, lengths=0.3),
        planted_arm(loss="asym-t2i", norm="dnorm", noise=1.8),
        planted_arm("slow", norm="learned", changes={"gamma_lr": 5e-4, "lr": 5e-4}),
        planted_arm("own rate", norm="learned"),
        planted_arm("held", norm="learned", changes={"gamma_lr": 0.0}),
        planted_arm("tuned", "asym-t2i", "qnorm", noise=1.2, lengths=0.0, initial="sym cosine"),
        planted_arm("null base", permuted=True, changes={"permute_pairs": True}),
        planted_arm("null control", "asym-t2i", permuted=True, changes={"permute_pairs": True}),
        planted_arm("null", "asym-t2i", "qnorm", permuted=True, changes={"permute_pairs": True}),
    ]
    return claims(Study(arms, resamples=200)).records


def of(rows, claim, **keys):
    return [r for r in rows if r["claim"] == claim and all(r[k] == v for k, v in keys.items())]


def test_every_claim_has_its_rows_and_every_row_a_verdict(rows) -> None:
    assert {r["claim"] for r in rows} == {*(f"T{i}" for i in range(1, 13)), "T7b", "B1", "B2", "B3"}
    assert all(r["verdict"] and r["statement"] and r["direction"] for r in rows)
    assert {r["verdict"] for r in rows if r["direction"] == "i2t" and r["claim"] in ("T3", "T4", "T5", "T8")} == {
        "not asked here"
    }


def test_planted_effects_are_found_on_their_side(rows) -> None:
    (t1,) = of(rows, "T1", direction="t2i")
    assert t1["verdict"] == "reproduced" and t1["value_hi"] < 1 and t1["paper"] == pytest.approx(19.5 / 28.0)
    (t3,) = of(rows, "T3", direction="t2i")
    assert t3["verdict"] == "reproduced" and t3["value_lo"] > 1 and t3["paper"] == pytest.approx(23.4 / 17.6)
    (t5,) = of(rows, "T5", direction="t2i")
    assert t5["verdict"] == "reproduced" and t5["value_lo"] > 1
    (t6,) = of(rows, "T6", direction="t2i")
    assert t6["verdict"] == "not reproduced", "it was planted above sym/cosine"
    (t7b,) = of(rows, "T7b", direction="i2t")
    assert t7b["verdict"] == "not reproduced" and t7b["value_lo"] > 0.1, "it was planted alive"
    (t8,) = of(rows, "T8", direction="t2i")
    assert t8["verdict"] == "reproduced" and t8["value"] == pytest.approx(t8["arm_d"] - t8["control_d"])
    for row in (t1, t3, t5):
        assert row["smallest_effect"] == pytest.approx(1.43 * (row["value_hi"] - row["value_lo"]) / 2)


def test_learned_exponents_are_judged_at_the_encoders_rate_alone(rows) -> None:
    assert {(r["arm"], r["verdict"]) for r in of(rows, "T9")} == {("slow", "reproduced"), ("own rate", "control")}


def test_one_useful_arm_contradicts_that_none_is(rows) -> None:
    (t10,) = of(rows, "T10")
    assert t10["verdict"] == "not reproduced" and "asym-t2i qnorm t2i" in t10["useful"]


def test_kappa_of_few_rows_is_underpowered(rows) -> None:
    assert [r["verdict"] for r in of(rows, "T11")] == ["underpowered", "underpowered"]


def test_a_trained_start_whose_length_says_less_contradicts_the_claim(rows) -> None:
    (t12,) = of(rows, "T12")
    assert "tuned" in t12["statement"] and t12["value_hi"] < 1 and t12["verdict"] == "not reproduced"


def test_nulls_are_clean_and_the_correction_is_counted(rows) -> None:
    assert {r["verdict"] for r in of(rows, "B3")} == {"clean"} and len(of(rows, "B3")) == 4
    (b1,) = of(rows, "B1", direction="i2t")
    assert b1["verdict"] in ("yes", "no", "open") and b1["value_lo"] <= b1["value"] <= b1["value_hi"]
    both = of(rows, "B2")
    assert both and [r["value"] for r in both] == sorted((r["value"] for r in both), reverse=True)
    assert not any("null" in r["statement"] for r in both)


def test_a_null_that_finds_something_is_told() -> None:
    arms = [planted_arm("leaky", changes={"permute_pairs": True})]  # permuted by name, but it knows the right pairs
    found = of(claims(Study(arms, resamples=50)).records, "B3")
    assert {(r["verdict"], r["counts"]) for r in found} == {("found", "above chance")}


def test_chance_is_that_of_the_datas_own_relevance() -> None:
    arm = planted_arm("leaky", changes={"permute_pairs": True})
    for run in arm.results().values():
        assert run.json["data"]["chance"] == {"i2t": pytest.approx(2 / 60), "t2i": pytest.approx(1 / 60)}
        run.json["data"]["chance"] = {"i2t": 1.0, "t2i": 1.0}  # every document would do
    assert {r["verdict"] for r in of(claims(Study([arm], resamples=50)).records, "B3")} == {"clean"}


def test_a_study_without_arms_for_a_claim_says_so() -> None:
    rows = claims(Study([planted_arm(seeds=(0,))], resamples=30)).records
    assert {r["verdict"] for r in rows if r["claim"] != "T2"} == {"not asked here"}
