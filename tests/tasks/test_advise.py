"""The rule on numbers whose answer is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmclip.metrics import mean_interval
from mmclip.tasks.advise import CANNOT_TELL, CONTROLS, DETECTABLE, MIN_QUERIES, NORMS, decide, estimate

MARGIN = 0.005


def made(
    native: Mapping[str, float], own_cosine: Mapping[str, float] | None = None, queries: int = 200, noise: float = 0.02
) -> dict[str, dict[str, np.ndarray]]:
    """Values of every norm around a mean each, over hard and easy queries that all norms share."""
    rng = np.random.default_rng(0)
    hardness = rng.uniform(0.2, 0.8, queries)

    def around(mean: float) -> np.ndarray:
        return hardness + mean - 0.5 + noise * rng.standard_normal((3, queries))

    values = {}
    for norm in NORMS:
        mean = native.get(norm, 0.5)
        angle = (own_cosine or {}).get(norm, 0.5)
        values[norm] = {"native": around(mean), "cosine": around(angle), "dot": around(0.5)}
    return values


def test_a_norm_whose_length_helps_is_recommended_and_its_equals_are_named() -> None:
    report = decide(made({"dot": 0.60, "qnorm": 0.62, "learned": 0.55, "dnorm": 0.5}), MARGIN)
    assert report["answer"] == "qnorm"
    assert report["ties"] == []
    assert report["sure"] == 1
    assert "+0.1" in report["because"]
    equal = made({"qnorm": 0.62})
    equal["dot"] = equal["qnorm"]
    report = decide(equal, MARGIN)
    assert {report["answer"], *report["ties"]} == {"dot", "qnorm"}


@pytest.mark.parametrize("norm", ["dot", "qnorm", "learned"])
def test_a_gain_that_is_not_by_length_is_no_recommendation(norm: str) -> None:
    report = decide(made({norm: 0.60}, {norm: 0.60}), MARGIN)  # its own angles are as good as its scores
    assert report["answer"] == CANNOT_TELL
    assert report["because"].endswith(f"{norm} gained, but not shown by length")
    assert decide(made({norm: 0.60}), MARGIN)["answer"] == norm


def test_a_gain_that_the_control_has_too_is_no_recommendation() -> None:
    report = decide(made({"dot": 0.60, "dnorm": 0.60}, {"dnorm": 0.60}), MARGIN)
    assert CONTROLS["dot"] == "dnorm"
    assert report["answer"] == "dnorm", "it keeps no document's length, so its gain is by training alone"
    assert "by training alone" in report["because"]


def test_cosine_where_nothing_else_can_gain_the_margin() -> None:
    worse = dict.fromkeys(NORMS[1:], 0.45)
    assert decide(made(worse), MARGIN)["answer"] == "cosine"
    level = decide(made({}, noise=0.001), MARGIN)
    assert level["answer"] == "cosine"
    assert level["sure"] == 1
    assert decide(made({}, noise=0.001), 0.0)["answer"] == CANNOT_TELL, "level, and any gain matters"


def test_it_cannot_tell_where_noise_hides_the_margin() -> None:
    report = decide(made({}, noise=0.5), MARGIN)
    assert report["answer"] == CANNOT_TELL
    largest = max(report["norms"][n]["gain"]["se"] for n in NORMS[1:])
    assert report["detectable"] == pytest.approx(DETECTABLE * largest)
    told = f"at most ±{DETECTABLE * largest:.3f} ndcg@10 was detectable with 200 queries and 3 seeds"
    assert report["because"] == told
    part = made({"dot": 0.3, "learned": 0.4}, noise=0.1)
    part["qnorm"] = part["cosine"]
    report = decide(part, MARGIN)
    assert report["answer"] == CANNOT_TELL
    assert report["detectable"] == pytest.approx(DETECTABLE * report["norms"]["dnorm"]["gain"]["se"])
    assert "; dnorm may gain 0.005 (at most +" in report["because"]
    assert report["because"].endswith("dot, qnorm, learned cannot")


def test_too_few_queries_or_too_few_that_are_answered_are_no_interval() -> None:
    few = made({"qnorm": 0.9}, queries=MIN_QUERIES - 1)
    assert decide(few, MARGIN)["answer"] == CANNOT_TELL
    assert decide(made({"qnorm": 0.9}, queries=MIN_QUERIES), MARGIN)["answer"] == "qnorm"
    silent = made({"qnorm": 0.9})
    for found in silent.values():
        for values in found.values():
            values[:, MIN_QUERIES - 1 :] = 0
    report = decide(silent, MARGIN)
    assert report["answer"] == CANNOT_TELL
    assert report["because"] == "ndcg@10 is above 0 for 29 of 200 held-out queries: 30 are needed"


@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(3, 12))
def test_an_estimate_is_that_of_the_seed_bootstrap(seed: int, seeds: int, queries: int) -> None:
    values = np.random.default_rng(seed).standard_normal((seeds, queries))
    found = estimate(values, resamples=50, seed=seed)
    mean, lo, hi = mean_interval(values, np.arange(queries), resamples=50, seed=seed)
    assert (found["value"], *found["ci"]) == pytest.approx((mean, lo, hi))
    assert found["se"] > 0


@given(st.lists(st.floats(0.4, 0.6), min_size=4, max_size=4), st.sampled_from([0.01, 0.1]))
def test_the_answer_follows_from_the_intervals_alone(means: list[float], noise: float) -> None:
    report: dict[str, Any] = decide(made(dict(zip(NORMS[1:], means, strict=True)), noise=noise), MARGIN, resamples=100)
    lows = {n: report["norms"][n]["gain"]["ci"][0] for n in NORMS[1:]}
    tops = [report["norms"][n]["gain"]["ci"][1] for n in NORMS[1:]]
    if report["answer"] in lows:
        assert lows[report["answer"]] > 0
    elif report["answer"] == "cosine":
        assert max(tops) < MARGIN
    else:
        assert max(tops) >= MARGIN
