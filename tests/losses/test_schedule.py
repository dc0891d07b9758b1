"""Schedules as functions of the step, what is refused, and what metadata say of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip.config import LossConfig, TrainConfig
from mmclip.errors import UserError
from mmclip.losses.contrastive import clip_loss
from mmclip.losses.schedule import as_step, check, describe, exponents_at, i2t_weight_at, rate_factor
from mmclip.models.metadata import clip_metadata
from mmclip.roles import FIXED_NORMALIZATIONS, Normalization

SHARES = st.floats(0, 1, exclude_max=True)
FIXED = [n.value for n in FIXED_NORMALIZATIONS]


@st.composite
def schedules(draw: st.DrawFn) -> LossConfig:
    kind, (start, norm) = draw(st.sampled_from(["switch", "anneal"])), draw(st.permutations(FIXED))[:2]
    begin, end = sorted((draw(SHARES), draw(SHARES)))
    if kind == "switch":
        return LossConfig(norm=norm, gamma_from=start, gamma_schedule=kind, gamma_start=begin or 0.5)
    begin = begin if begin < end else end / 2
    end = end if begin < end else 0.5
    return LossConfig(norm=norm, gamma_from=start, gamma_schedule=kind, gamma_start=begin, gamma_end=end)


@given(settings=schedules(), total=st.integers(1, 400))
def test_a_schedule_of_fractions_ends_at_the_norm_of_any_run_and_moves_one_way(
    settings: LossConfig, total: int
) -> None:
    check(settings, total)
    start, end = (Normalization(n).exponents for n in (settings.gamma_from, settings.norm))
    path = [exponents_at(settings, step, total) for step in range(total)]
    assert path[-1] == end and (path[0] == start or as_step(settings.gamma_start, total) == 0)
    for role in range(2):
        moved = [abs(e[role] - start[role]) for e in path]
        assert moved == sorted(moved) and max(moved) <= 1, "never back, and never too far"
    if settings.gamma_schedule == "switch":
        assert set(path) <= {start, end}


def test_an_anneal_is_a_straight_line_between_its_two_steps() -> None:
    settings = LossConfig(norm="dnorm", gamma_from="dot", gamma_schedule="anneal", gamma_start=2, gamma_end=6)
    path = [exponents_at(settings, step, 9) for step in range(9)]
    assert [p[1] for p in path] == [0, 0, 0, 0.25, 0.5, 0.75, 1, 1, 1] and {p[0] for p in path} == {0}
    assert [rate_factor(settings, step, 9) for step in range(9)] == [1] * 9


def test_a_switch_has_a_second_stage_with_its_own_rate() -> None:
    settings = LossConfig(norm="dot", gamma_schedule="switch", gamma_start=0.5, stage2_lr_factor=0.2)
    assert [rate_factor(settings, step, 5) for step in range(5)] == [1, 1, 1, 0.2, 0.2]
    assert [exponents_at(settings, step, 5)[0] for step in range(5)] == [1, 1, 1, 0, 0]


@given(start=st.floats(0, 1), end=st.floats(0, 1), total=st.integers(2, 300))
def test_lambda_goes_from_the_first_step_to_the_last(start: float, end: float, total: int) -> None:
    settings = LossConfig(i2t_weight=start, i2t_weight_end=end)
    path = [i2t_weight_at(settings, step, total) for step in range(total)]
    assert path[0] == start and path[-1] == end and all(w is not None and 0 <= w <= 1 for w in path)
    assert path[total // 2] == pytest.approx(start + (end - start) * (total // 2) / (total - 1))
    assert i2t_weight_at(LossConfig(i2t_weight=start), 3, total) is None
    assert i2t_weight_at(LossConfig(i2t_weight_end=end), 0, total) == 0.5


def test_schedules_that_cannot_be_are_refused_by_the_settings_or_the_steps_of_a_run() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"gamma_schedule": "switch", "norm": "learned"}, "--norm learned trains its exponents"),
        ({"gamma_schedule": "switch"}, "--gamma-from cosine is --norm itself"),
        ({"gamma_schedule": "switch", "norm": "dot", "gamma_start": 0.0}, "leaves no step before it"),
        ({"gamma_schedule": "anneal", "norm": "dot", "gamma_start": 0.8}, "--gamma-start 0.8 is not before"),
        ({"gamma_schedule": "anneal", "norm": "dot", "gamma_start": 9, "gamma_end": 9}, "--gamma-start 9 is not bef"),
        ({"stage2_lr_factor": 0.1}, "--stage2-lr-factor 0.1 needs --gamma-schedule switch"),
        ({"i2t_weight_end": 0.5, "loss": "asym-i2t"}, "--i2t-weight-end 0.5 needs --loss sym"),
        ({"init_from": "no-run"}, "--init-from no-run: no model there"),
        ({"init_from": "no-run", "pretrained": "openai"}, "--pretrained openai beside --init-from no-run"),
    ]
    for flags, message in refused:
        with pytest.raises(UserError, match=message):
            TrainConfig(**flags)
    late: list[tuple[dict[str, Any], str]] = [
        ({"gamma_schedule": "switch", "gamma_start": 20}, "--gamma-start 20: in a run of 20 steps it would never come"),
        ({"gamma_schedule": "anneal", "gamma_start": 0.1, "gamma_end": 30}, "--gamma-end 30: in a run of 20 steps"),
        (
            {"gamma_schedule": "anneal", "gamma_start": 16},
            "--gamma-start 16 is step 16 and --gamma-end 0.75 is step 15",
        ),
    ]
    for flags, message in late:
        with pytest.raises(UserError, match=message):
            check(LossConfig(norm="dot", **flags), 20)
        check(LossConfig(norm="dot", **flags), 100)


def test_metadata_have_the_options_in_use_and_no_others() -> None:
    sides = {s: torch.randn(4, 8) for s in ("image", "text")}

    def of(**flags: Any) -> dict[str, Any]:
        settings = LossConfig(**flags)
        end = settings.i2t_weight_end
        loss = clip_loss(settings.loss, settings.norm, settings.i2t_weight, i2t_weight_end=end)
        loss(sides)
        loss.weights = dict.fromkeys(loss.weights, 0.5)  # where a schedule stands is not what it began with
        return clip_metadata(settings, loss.similarity, loss.trained)

    plain = of(norm="dot")
    moved = of(i2t_weight=1.0, i2t_weight_end=0.25, focal=2.0)
    assert moved.keys() - plain.keys() == {"i2t_weight_end", "focal"} and moved["i2t_weight"] == 1.0
    assert moved["logit_scale_i2t"] and moved["logit_scale_t2i"], "both directions were trained"
    assert of(i2t_weight=1.0)["logit_scale_t2i"] is None
    schedule = {"gamma_schedule", "gamma_from", "gamma_start"}
    switched = of(norm="dot", gamma_schedule="switch", norm_drift=0.1)
    assert switched.keys() - plain.keys() == schedule | {"stage2_lr_factor", "norm_drift"}
    assert of(norm="dot", gamma_schedule="anneal").keys() - plain.keys() == schedule | {"gamma_end"}


def test_another_runs_name_cannot_write_on_the_screen() -> None:
    (text,) = describe(1, {"initial": {"run": "a\nb", "loss": "sym", "norm": "x\x1b[2J", "gamma_q": [None, 1.0]}})
    assert text.isprintable()
