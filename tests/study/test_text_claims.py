"""Claims about text by the rules of docs/text_study.md: planted effects are found, nulls are not, gaps are told."""

from __future__ import annotations

from typing import Any

import pytest

from mmclip.study.claims import claims
from mmclip.study.estimates import Study
from mmclip.study.plan import TEXT
from tests.helpers.text_studying import INSIDE, OUTSIDE, UNDETERMINED, arm, family, start

Json = dict[str, Any]
YES, NO, OPEN, MISSING = "Yes", "No", "Open", "not asked"


def rows(arms: Any) -> list[Json]:
    return list(claims(Study(arms, TEXT, resamples=200)).records)


def of(found: list[Json], claim: str, **known: str) -> Json:
    (row,) = [r for r in found if r["claim"] == claim and all(r[k] == v for k, v in known.items())]
    return row


@pytest.fixture(scope="module")
def planted() -> list[Json]:
    return rows(family(lengths=0.4, starts={0: start(UNDETERMINED)}))


@pytest.fixture(scope="module")
def null() -> list[Json]:
    return rows(family())


@pytest.mark.parametrize("data", [INSIDE, OUTSIDE])
def test_planted_lengths_are_found(planted: list[Json], data: str) -> None:
    gain = "TX1" if data == INSIDE else "TX1o"
    for norm in ("dot", "qnorm"):
        for claim in (gain, "TX4", "TX5", "TX10"):
            row = of(planted, claim, norm=norm, data=data)
            assert row["verdict"] == YES, row
        assert of(planted, "TX4", norm=norm, data=data)["smallest_effect"] > 0
        assert of(planted, "TX4u", norm=norm, data=data)["verdict"] == YES
    assert of(planted, gain, norm="dnorm", data=data)["verdict"] == NO, "dnorm ranks as cosine does here"
    assert of(planted, "TX2", data=data)["verdict"] == OPEN, "qnorm and dot rank alike"
    assert of(planted, "TX6", data=data)["verdict"] == YES


@pytest.mark.parametrize("data", [INSIDE, OUTSIDE])
def test_nothing_is_found_where_there_is_nothing(null: list[Json], data: str) -> None:
    for claim in ("TX1", "TX1o", "TX4", "TX4u", "TX5", "TX10"):
        for row in (r for r in null if r["claim"] == claim and r["data"] == data):
            assert row["verdict"] in (NO, OPEN), row
    assert all(r["verdict"] != YES for r in null if r["claim"] == "TX3")


def test_angles_that_collapsed_are_told(planted: list[Json], null: list[Json]) -> None:
    assert of(planted, "TX9", norm="dot", data=INSIDE)["verdict"] == NO
    assert of(null, "TX9", norm="dot", data=INSIDE)["value"] == pytest.approx(1, abs=0.1)


def test_exponents_leave_the_middle_by_rule(planted: list[Json]) -> None:
    row = of(planted, "TX8")
    assert row["verdict"] == YES and row["value"] == pytest.approx(0.1) and "gamma_q 0.400" in row["counts"]


def test_kappa_that_is_undetermined_is_not_asked(planted: list[Json], null: list[Json]) -> None:
    row = of(planted, "TX7")
    assert row["verdict"] == MISSING
    assert row["reason"].startswith("cannot be asked with 565 pairs at 384 dimensions: 1536 are needed")
    assert of(null, "TX7")["reason"] == "nothing was measured before training"


def test_kappa_of_one_case_decides_nothing() -> None:
    names = ("query_raw", "query_normalized", "document_raw", "document_normalized")
    section: Json = {"status": "determined", "n": 48, "n_available": 60, "dim": 12}
    section |= {
        n: {"log10_kappa": {"value": v, "ci": [v - 0.1, v + 0.1]}} for n, v in zip(names, (3, 1, 2, 2), strict=True)
    }
    told = start(section)
    told["fisher"]["titles"] = section
    found = [
        r
        for r in rows([arm("cosine", starts={0: told}), arm("qnorm", lengths=0.4), arm("dnorm")])
        if r["claim"] == "TX7"
    ]
    assert [r["verdict"] for r in found] == [OPEN, OPEN]
    assert found[0]["counts"] == (
        "one case: raw: the query's κ is larger (3.00, 2.00), which would name qnorm; normalized: the document's κ is "
        "larger (1.00, 2.00), which would name dnorm; qnorm won"
    )
    assert found[1]["counts"].startswith("κ of titles as queries decides nothing: ")


@pytest.mark.parametrize(("best", "verdict"), [("qnorm", YES), ("dot", NO)])
def test_a_best_norm_beats_every_other_one(best: str, verdict: str) -> None:
    norms = ("cosine", "dot", "qnorm", "dnorm", "learned")
    row = of(rows([arm(n, lengths=0.4 if n == best else 0.0, outside=False) for n in norms]), "TX2", data=INSIDE)
    assert row["verdict"] == verdict and (row["norm"] == "qnorm over dot" or best == "qnorm")


def test_arms_that_are_not_there_are_not_asked_for() -> None:
    found = rows([arm("cosine", outside=False), arm("dot", outside=False)])
    missing = {(r["claim"], r["norm"]) for r in found if r["verdict"] == MISSING}
    assert ("TX1", "qnorm") in missing and ("TX2", "qnorm") in missing and ("TX4", "dot") in missing
    assert ("TX8", "learned") in missing and ("TX6", "dnorm over dot") in missing
    assert not [r for r in found if r["claim"] in ("TX1o", "TX3")]
    assert all(r["reason"] for r in found if r["verdict"] == MISSING)
    assert {r["verdict"] for r in found} <= {YES, NO, OPEN, MISSING}
    assert rows([arm("dot")]) == rows([]) == []
