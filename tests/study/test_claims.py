"""The paper's claims are answered by rule: what is planted decides, and what was not run is not answered."""

from __future__ import annotations

from typing import Any

import pytest

from mmclip.metrics.bootstrap import Estimate
from mmclip.study.arms import Arm
from mmclip.study.claims import claims, judged
from mmclip.study.estimates import Study
from mmclip.study.plan import CLIP, TEXT
from mmclip.study.tables import load_claims
from tests.helpers.studying import (
    INSIDE,
    OUTSIDE,
    UNDETERMINED,
    kappa_section,
    nulls,
    of,
    planted_arm,
    start,
    text_arm,
    text_family,
    text_start,
)

Json = dict[str, Any]
YES, NO, OPEN, MISSING = load_claims(TEXT)["verdicts"]


@pytest.mark.parametrize(
    ("lo", "hi", "expected", "paper", "more", "place"),
    [
        (0.6, 0.8, "below 1", 0.65, {}, 0),
        (0.8, 0.99, "below 1", 0.1, {}, 0),  # the side decides, not the size
        (0.9, 1.1, "below 1", 0.94, {}, 2),
        (0.9, 1.1, "below 1", 0.65, {}, 1),
        (1.1, 1.3, "below 1", 0.65, {}, 1),
        (1.1, 1.3, "above 1", 1.05, {}, 0),
        (0.9, 1.1, "above 1", 1.05, {}, 2),
        (0.9, 1.1, "above 1", 1.5, {}, 1),
        (0.01, 0.05, "above 0", 0.025, {}, 0),
        (-0.01, 0.01, "above 0", 0.025, {}, 1),  # the paper's effect is excluded
        (-0.05, -0.01, "above 0", 0.025, {}, 1),
        (-0.01, 0.04, "above 0", 0.025, {}, 2),
        (0.001, 0.01, "above 0", 0.025, {}, 0),
        (-0.01, 0.1, "above 0", 0.05, {"effect": 0.2}, 1),
        (0.001, 0.005, "below 0.01", None, {"refuted": "above 0"}, 1),
        (-0.01, 0.005, "below 0.01", None, {"refuted": "above 0"}, 0),
        (-0.01, 0.02, "below 0.01", None, {"refuted": "above 0"}, 2),
    ],
)
def test_the_rule(lo: float, hi: float, expected: str, paper: float | None, more: Json, place: int) -> None:
    assert judged(Estimate((lo + hi) / 2, lo, hi, 3), {"expected": expected, **more}, paper) == place


def test_no_interval_is_no_answer() -> None:
    rule = {"expected": "below 1"}
    places = [judged(e, rule, 0.5) for e in (Estimate.missing("no arm"), Estimate(0.5, None, None, 1, "one image"))]
    assert [load_claims(CLIP)["verdicts"][place] for place in places] == ["not asked here", "underpowered"]


# --- CLIP -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows() -> list[Json]:
    kappa = {s: start((3.0, 1.0, 2.0, 2.0)) for s in (0, 1)}
    arms = [
        planted_arm(noise=1.4),
        planted_arm(norm="dot", noise=4.0),
        planted_arm(loss="asym-t2i", noise=1.8, starts=kappa),
        planted_arm(loss="asym-t2i", norm="qnorm", noise=1.2, lengths=0.3),
        planted_arm(loss="asym-t2i", norm="dot", noise=4.0, lengths=0.3),
        planted_arm(loss="asym-t2i", norm="dnorm", noise=1.8),
        planted_arm("slow", norm="learned", gamma_lr=5e-4, lr=5e-4),
        planted_arm("own rate", norm="learned"),
        planted_arm("held", norm="learned", gamma_lr=0.0),
        planted_arm("tuned", "asym-t2i", "qnorm", noise=1.2, initial="sym cosine"),
        *nulls(("base", "sym", "cosine"), ("control", "asym-t2i", "cosine"), ("null", "asym-t2i", "qnorm")),
    ]
    return claims(Study(arms, resamples=200)).records


def all_of(rows: list[Json], claim: str) -> list[Json]:
    return [r for r in rows if r["claim"] == claim]


def test_every_claim_has_its_rows_and_every_row_a_verdict(rows: list[Json]) -> None:
    assert {r["claim"] for r in rows} == {*(f"T{i}" for i in range(1, 13)), "T7b", "B1", "B2", "B3"}
    assert all(r["verdict"] and r["statement"] and r["direction"] for r in rows)
    untrained = [r for r in rows if r["direction"] == "i2t" and r["claim"] in ("T3", "T4", "T5", "T8")]
    assert {r["verdict"] for r in untrained} == {"not asked here"}


@pytest.mark.parametrize(
    ("claim", "direction", "verdict", "above", "paper"),
    [
        ("T1", "t2i", "reproduced", False, 19.5 / 28.0),
        ("T3", "t2i", "reproduced", True, 23.4 / 17.6),
        ("T5", "t2i", "reproduced", True, 23.4 / 16.7),
        ("T6", "t2i", "not reproduced", True, 23.4 / 28.0),  # planted above sym/cosine
        ("T7b", "i2t", "not reproduced", None, 0.2 / 38.4),  # planted alive
        ("T8", "t2i", "reproduced", None, 2.11),
    ],
)
def test_planted_effects_are_found_on_their_side(
    rows: list[Json], claim: str, direction: str, verdict: str, above: bool | None, paper: float
) -> None:
    row = of(rows, claim=claim, direction=direction)
    assert row["verdict"] == verdict and row["paper"] == pytest.approx(paper)
    assert above is None or (row["value_lo"] > 1 if above else row["value_hi"] < 1)
    assert row["smallest_effect"] == pytest.approx(1.43 * (row["value_hi"] - row["value_lo"]) / 2)
    assert claim != "T7b" or row["value_lo"] > 0.1
    assert claim != "T8" or row["value"] == pytest.approx(row["arm_d"] - row["control_d"])


def test_claims_of_functions_are_answered_by_what_was_planted(rows: list[Json]) -> None:
    assert {(r["arm"], r["verdict"]) for r in all_of(rows, "T9")} == {("slow", "reproduced"), ("own rate", "control")}
    t10 = of(rows, claim="T10")  # one useful arm contradicts that none is
    assert t10["verdict"] == "not reproduced" and "asym-t2i qnorm t2i" in t10["useful"]
    assert [r["verdict"] for r in all_of(rows, "T11")] == ["underpowered", "underpowered"], "κ of few rows"
    t12 = of(rows, claim="T12")  # the trained start's norms say less
    assert "tuned" in t12["statement"] and t12["value_hi"] < 1 and t12["verdict"] == "not reproduced"
    b1 = of(rows, claim="B1", direction="i2t")
    assert b1["verdict"] in ("yes", "no", "open") and b1["value_lo"] <= b1["value"] <= b1["value_hi"]
    both = all_of(rows, "B2")
    assert both and [r["value"] for r in both] == sorted((r["value"] for r in both), reverse=True)
    assert not any("null" in r["statement"] for r in both)
    assert [r["verdict"] for r in all_of(rows, "B3")] == ["clean"] * 4


def test_a_null_that_finds_something_shows_and_chance_is_that_of_the_datas_own_relevance() -> None:
    arm = planted_arm("leaky", permute_pairs=True, permuted=False)  # permuted by name, but it knows the right pairs
    result = all_of(claims(Study([arm], resamples=50)).records, "B3")
    assert {(r["verdict"], r["counts"]) for r in result} == {("found", "above chance")}
    for run in arm.results().values():
        assert run.json["data"]["chance"] == {"i2t": pytest.approx(2 / 60), "t2i": pytest.approx(1 / 60)}
        run.json["data"]["chance"] = {"i2t": 1.0, "t2i": 1.0}  # every document would do
    assert {r["verdict"] for r in all_of(claims(Study([arm], resamples=50)).records, "B3")} == {"clean"}


def test_a_study_without_arms_for_a_claim_says_so() -> None:
    result = claims(Study([planted_arm(seeds=(0,))], resamples=30)).records
    assert {r["verdict"] for r in result if r["claim"] != "T2"} == {"not asked here"}


# --- text -------------------------------------------------------------------------------------------------------------


def text_claims(arms: list[Arm]) -> list[Json]:
    return claims(Study(arms, TEXT, resamples=200)).records


@pytest.fixture(scope="module")
def planted() -> list[Json]:
    return text_claims(text_family(lengths=0.4, starts={0: text_start(UNDETERMINED)}))


@pytest.fixture(scope="module")
def null() -> list[Json]:
    return text_claims(text_family())


@pytest.mark.parametrize("data", [INSIDE, OUTSIDE])
def test_planted_norms_are_found_and_nulls_are_not(planted: list[Json], null: list[Json], data: str) -> None:
    gain = "TX1" if data == INSIDE else "TX1o"
    for norm in ("dot", "qnorm"):
        for claim in (gain, "TX4", "TX4u", "TX5", "TX10"):
            assert of(planted, claim=claim, norm=norm, data=data)["verdict"] == YES, (claim, norm)
        assert of(planted, claim="TX4", norm=norm, data=data)["smallest_effect"] > 0
    assert of(planted, claim=gain, norm="dnorm", data=data)["verdict"] == NO, "dnorm ranks as cosine does here"
    assert of(planted, claim="TX2", data=data)["verdict"] == OPEN, "qnorm and dot rank alike"
    assert of(planted, claim="TX6", data=data)["verdict"] == YES
    for row in null:
        if row["data"] == data and row["claim"] in ("TX1", "TX1o", "TX4", "TX4u", "TX5", "TX10"):
            assert row["verdict"] in (NO, OPEN), row
        assert row["claim"] != "TX3" or row["verdict"] != YES


def test_collapsed_angles_and_exponents_that_leave_the_middle_by_rule(planted: list[Json], null: list[Json]) -> None:
    assert of(planted, claim="TX9", norm="dot", data=INSIDE)["verdict"] == NO
    assert of(null, claim="TX9", norm="dot", data=INSIDE)["value"] == pytest.approx(1, abs=0.1)
    row = of(planted, claim="TX8")
    assert row["verdict"] == YES and row["value"] == pytest.approx(0.1) and "gamma_q 0.400" in row["counts"]


def test_undetermined_kappa_and_one_case_decide_nothing(planted: list[Json], null: list[Json]) -> None:
    row = of(planted, claim="TX7")
    assert row["verdict"] == MISSING
    assert row["reason"].startswith("cannot be asked with 565 pairs at 384 dimensions: 1536 are needed")
    assert of(null, claim="TX7")["reason"] == "nothing was measured before training"
    section = kappa_section((3, 1, 2, 2), n=48, n_available=60, dim=12)
    measured = text_start(section) | {"fisher": {"q2d": section, "titles": section}}
    arms = [text_arm("cosine", starts={0: measured}), text_arm("qnorm", lengths=0.4), text_arm("dnorm")]
    result = all_of(text_claims(arms), "TX7")
    assert [r["verdict"] for r in result] == [OPEN, OPEN]
    assert result[0]["counts"] == (
        "one case: raw: the query's κ is larger (3.00, 2.00), which would name qnorm; normalized: the document's κ is "
        "larger (1.00, 2.00), which would name dnorm; qnorm won"
    )
    assert result[1]["counts"].startswith("κ of titles as queries decides nothing: ")


@pytest.mark.parametrize(("best", "verdict"), [("qnorm", YES), ("dot", NO)])
def test_a_best_norm_beats_every_other_one(best: str, verdict: str) -> None:
    norms = ("cosine", "dot", "qnorm", "dnorm", "learned")
    arms = [text_arm(n, lengths=0.4 if n == best else 0.0, outside=False) for n in norms]
    row = of(text_claims(arms), claim="TX2", data=INSIDE)
    assert row["verdict"] == verdict and (row["norm"] == "qnorm over dot" or best == "qnorm")


def test_missing_arms_are_not_asked_for() -> None:
    result = text_claims([text_arm("cosine", outside=False), text_arm("dot", outside=False)])
    missing = {(r["claim"], r["norm"]) for r in result if r["verdict"] == MISSING}
    assert missing >= {
        ("TX1", "qnorm"),
        ("TX2", "qnorm"),
        ("TX4", "dot"),
        ("TX8", "learned"),
        ("TX6", "dnorm over dot"),
    }
    assert not [r for r in result if r["claim"] in ("TX1o", "TX3")]
    assert all(r["reason"] for r in result if r["verdict"] == MISSING)
    assert {r["verdict"] for r in result} <= {YES, NO, OPEN, MISSING}
    assert text_claims([text_arm("dot")]) == text_claims([]) == []
