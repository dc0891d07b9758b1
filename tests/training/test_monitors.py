"""Alarms: each is raised by the run that it is meant for, once, and by no healthy one. Bad samples have a limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mmclip.data.image_text import BadSample
from mmclip.errors import UserError
from mmclip.roles import Direction
from mmclip.training.monitors import CLIP_ADVICE, TEXT_ADVICE, Advice, BadSamples, Monitors

HEALTHY = {"gamma_q": 0.4, "gamma_d": 0.7, "effective_scale_i2t": 30.0, "effective_scale_t2i": 30.0, "data_wait": 0.1}
STILL = {"gamma_q": 0.499, "gamma_d": 0.502}  # the paper's, at the encoders' learning rate
Numbers = Callable[[int], dict[str, float]]


def monitors(metric: str = "success@1", advice: Advice = CLIP_ADVICE, **changed: Any) -> Monitors:
    """The rules of a task of these numbers."""
    known = {
        "candidates": 128, "trained": ["i2t"], "gamma_init": (0.5, 0.5), "queries": {"i2t": 1000, "t2i": 5000},
    } | changed  # fmt: skip
    config = SimpleNamespace(norm="learned" if known["gamma_init"] else "qnorm", gamma_lr=1.0, logit_scale_max=100.0)
    similarity = SimpleNamespace(exponents=known["gamma_init"] or (1.0, 0.0))
    loss = SimpleNamespace(trained=[Direction(d) for d in known["trained"]], similarity=similarity)
    task: Any = SimpleNamespace(
        config=config, loss=loss, candidates=known["candidates"], warmup=20, total_steps=400, metric=metric,
        validation_queries=known["queries"], advice=advice,
    )  # fmt: skip
    return Monitors(task)


def raised(rules: Monitors, numbers: Numbers, seconds: float = 1.0) -> list[tuple[int, str]]:
    """(step, name) of every alarm of 400 steps logged every 10; ``numbers(step)`` over the healthy ones."""
    alarms = []
    for step in range(10, 401, 10):
        line = HEALTHY | {"loss": 4.6 * 0.98 ** (step / 5)} | numbers(step)
        alarms += [(step, name) for name, _ in rules.training(step, line, seconds)]
    return alarms


@pytest.mark.parametrize(
    ("numbers", "changed", "seconds", "expected"),
    [
        (lambda step: {}, {}, 1, []),
        # a loss at ln(batch): 50 steps from the first one after the warm-up, step 30
        (lambda step: {"loss": math.log(128) * (1 + 0.01 * math.sin(step))}, {}, 1, [(80, "loss_stuck")]),
        (lambda step: {"loss": 5.5 - 0.005 * step}, {}, 1, []),  # on its way through it
        (lambda step: {"loss": math.log(128)}, {"candidates": 64}, 1, []),  # of another batch size
        (lambda step: {"gamma_d": 0.5 if step < 100 else 0.99}, {}, 1, [(120, "gamma_pinned")]),
        (lambda step: STILL, {}, 1, [(200, "gamma_unmoved")]),
        (lambda step: {"gamma_q": 0.3, "gamma_d": 0.7}, {"gamma_init": (0.3, 0.7)}, 1, [(200, "gamma_unmoved")]),
        (lambda step: {"gamma_q": 0.3, "gamma_d": 0.3}, {"gamma_init": (0.3, 0.7)}, 1, []),
        (lambda step: {"gamma_q": 1.0, "gamma_d": 0.0}, {"gamma_init": None}, 1, []),
        (lambda step: {"effective_scale_t2i": 100.0}, {}, 1, []),  # not a trained direction
        (lambda step: {"effective_scale_i2t": 100.0}, {}, 1, [(30, "scale_clamped")]),
        (lambda step: {"data_wait": 0.9 if step <= 300 else 0.1}, {}, 0.1, []),  # not for long
        (lambda step: {"data_wait": 0.9}, {}, 4, [(30, "data_starved")]),
        (lambda step: {"data_wait": 0.9 if step % 30 else 0.1}, {}, 9, []),  # not in a row
        (lambda step: {"data_wait": 0.9}, {"advice": TEXT_ADVICE}, 9, []),  # texts are in memory
    ],
)
def test_a_training_alarm_is_raised_once_and_for_its_own_reason_alone(
    numbers: Numbers, changed: dict[str, Any], seconds: float, expected: list[tuple[int, str]]
) -> None:
    assert raised(monitors(**changed), numbers, seconds) == expected


def test_the_state_of_the_rules_continues_in_another_run() -> None:
    """A window that began before the checkpoint, and an alarm that was raised there."""
    for numbers in (lambda step: {"loss": math.log(128)}, lambda step: {"effective_scale_i2t": 100.0}):
        whole, first, second = monitors(), monitors(), monitors()
        expected, found = [], []
        for step in range(10, 401, 10):
            line = HEALTHY | {"loss": 1.0} | numbers(step)
            expected += [(step, alarm) for alarm in whole.training(step, line, 1.0)]
            found += [(step, alarm) for alarm in (first if step <= 40 else second).training(step, line, 1.0)]
            if step == 40:
                second.load_state_dict(first.state_dict())
        assert found == expected and len(expected) == 1 and second.raised == whole.raised


@pytest.mark.parametrize(
    ("rates", "queries", "names"),
    [
        ((0.321, 0.003, 0.305, 0.003), (1000, 5000), ["direction_dead"]),  # the paper's ImgNorm-I2T
        ((0.94, 0.30, 0.23, 0.28), (1000, 5000), ["magnitude_collapse"]),  # the paper's E5
        ((0.760, 0.363, 0.480, 0.360), (1000, 5000), []),  # qnorm on the scenes: by cosine lower, not collapsed
        ((0.171, 0.083, 0.165, 0.090), (1000, 5000), []),  # heads on Flickr8k: half of it, alive
        ((0.004, 0.000, 0.001, 0.000), (1000, 5000), []),  # nothing learned yet: all of it is noise
        ((0.30, 0.29, 0.28, 0.05), (1000, 5000), []),  # the untrained direction's cosine is not watched
        ((0.3, 0.02, 0.3, 0.02), (100, 4), []),  # few queries prove no death
    ],
)
def test_validation_alarms_know_a_price_from_a_collapse(
    rates: tuple[float, ...], queries: tuple[int, int], names: list[str]
) -> None:
    """Rates of i2t and t2i natively, then by cosine."""
    keys = [f"val_{d}_success@1_{scoring}" for scoring in ("native", "cosine") for d in ("i2t", "t2i")]
    numbers = dict(zip(keys, rates, strict=True))
    rules, again = (monitors(queries=dict(zip(("i2t", "t2i"), queries, strict=True))) for _ in range(2))
    assert [name for name, _ in rules.validation(numbers)] == names
    assert rules.validation(numbers) == [], "raised once"
    again.load_state_dict(rules.state_dict())
    assert again.validation(numbers) == [], "nor again after a resumption"


@pytest.mark.parametrize(
    ("native", "cosine", "queries", "names"),
    [
        (0.94, 0.23, 100, ["magnitude_collapse"]),  # the paper's E5: dot stayed, cosine fell
        (0.94, 0.94, 100, []),
        (0.65, 0.40, 100, []),  # a price
        (0.94, 0.23, 4, []),  # four queries are no proof
        (0.30, 0.14, 50, []),  # nor are fifty of so small a difference
        (0.23, 0.94, 100, []),
    ],
)
def test_the_collapse_of_text_has_its_own_metric_and_flags(
    native: float, cosine: float, queries: int, names: list[str]
) -> None:
    numbers = {"val_q2d_ndcg@10_native": native, "val_q2d_ndcg@10_cosine": cosine}
    for trained in ("q2d", "d2q"):
        rules = monitors(trained=[trained], queries={"q2d": queries}, metric="ndcg@10", advice=TEXT_ADVICE)
        alarms = rules.validation(numbers)
        assert [name for name, _ in alarms] == names
        for _, text in alarms:
            assert "94.0% natively and 23.0% by cosine (ndcg@10)" in text
            assert "--proj-wd" not in text and "--pretrained" not in text, "flags that train-text lacks"


def test_bad_samples_are_named_once_and_limited() -> None:
    samples = [BadSample(key, "0.tar", "cut off") for key in ("a", "b", "a")]
    bad = BadSamples(2)
    assert [line.rpartition(" (")[2] for line in bad.add(samples)] == ["1 so far)", "2 so far)"]
    assert bad.add(samples) == []
    with pytest.raises(UserError, match=r"--max-bad-samples 2: 3 samples cannot be used: "):
        bad.load({"c": "0.tar: cut off"})
    with pytest.raises(UserError, match="--max-bad-samples 1"):
        BadSamples(1, bad.reasons)
