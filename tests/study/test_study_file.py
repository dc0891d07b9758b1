"""Arms of a study's file: counted, told apart, the same one under several names, and under the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmclip.errors import UserError
from tests.helpers.studying import ARMS, plan


def test_a_grid_is_counted_before_it_is_made(tmp_path: Path) -> None:
    axis = str([i / 100 for i in range(1, 61)])
    grid = "{" + ", ".join(f"{name}: {axis}" for name in ("lr", "wd", "warmup", "focal", "norm_drift")) + "}"
    with pytest.raises(UserError, match="arm 1: 777,600,000 runs, more than 2,000"):
        plan(tmp_path, f"arms:\n  - {grid}\n")
    lines = "".join(f"  - {{lr: {axis}, wd: [{i}, {i + 1}, {i + 2}]}}\n" for i in range(20))
    with pytest.raises(UserError, match=r"tiny\.yaml: 3,600 runs, more than 2,000"):
        plan(tmp_path, f"arms:\n{lines}")


def test_arms_that_differ_in_nothing_that_counts_are_one_and_keep_their_names(tmp_path: Path) -> None:
    text = "arms:\n  - {norm: cosine, workers: [0, 1]}\n  - {norm: cosine, save_steps: 5, name: other, seeds: [0, 4]}\n"
    found = plan(tmp_path, text + "  - {norm: dot, init_from: other}\n").runs
    assert [(c.arm, c.seed) for c in found[:1]] == [("sym cosine workers=0", 0)] and found[0].config.workers == 0
    assert [c.seed for c in found if c.arm == found[0].arm] == [0, 4]
    assert len({c.folder for c in found}) == len(found) == 3
    assert found[1].initial is found[0]


def test_arms_that_start_from_one_arm_by_two_names_are_one(tmp_path: Path) -> None:
    text = "arms:\n  - {norm: cosine}\n  - {norm: cosine, name: b}\n"
    text += "  - {norm: dot, init_from: sym cosine}\n  - {norm: dot, init_from: b, name: late}\n"
    found = plan(tmp_path, text).runs
    assert [(c.arm, c.seed) for c in found] == [("sym cosine", 0), ("sym dot init_from=sym cosine", 0)]


def test_what_is_measured_tells_arms_apart_where_their_names_are_one(tmp_path: Path) -> None:
    text = "arms:\n  - {norm: cosine}\n  - {norm: cosine, measure_start: true}\n  - {norm: cosine, bank_size: [0, 7]}\n"
    found = plan(tmp_path, text + "  - {norm: dot, measure_start: true}\n").runs
    names = [
        "sym cosine",
        "sym cosine measure_start=True",
        "sym cosine bank_size=0",
        "sym cosine bank_size=7",
        "sym dot",
    ]
    assert [c.arm for c in found] == names and len({c.folder for c in found}) == 5
    assert plan(tmp_path, text + "  - {norm: cosine, measure_start: true}\n").runs[-1].arm == names[3]


def test_settings_of_the_command_line_win_and_lists_and_null_are_understood(tmp_path: Path) -> None:
    cell = plan(tmp_path, "lr: 1\n" + ARMS, set=["lr=0.5", "aug_cfg=scale=0.9,1 none=1", "grad_clip_norm=null"]).runs[0]
    assert cell.config.lr == 0.5 and cell.config.grad_clip_norm is None
    assert cell.config.aug_cfg == ["scale=0.9,1", "none=1"]
    with pytest.raises(UserError, match="--set: unknown setting 'lrr'; did you mean lr"):
        plan(tmp_path, ARMS, set=["lrr=1"])


def test_settings_of_the_command_line_win_over_arms(tmp_path: Path) -> None:
    text = "arms:\n  - {norm: [cosine, dot], lr: [1e-3, 1e-4], wd: 0.3}\n  - {norm: dot, lr: 1, name: a}\n"
    found = plan(tmp_path, text + "  - {norm: qnorm, init_from: a}\n", set=["lr=0.5", "wd=0.1"]).runs
    assert [c.arm for c in found] == ["sym cosine", "sym dot", "sym qnorm init_from=a"]
    assert {(c.config.lr, c.config.wd) for c in found} == {(0.5, 0.1)} and found[2].initial is found[1]
    for flags, told in (
        (["lr=1", "lr=1"], "--set: lr is set twice"),
        (["val-split=a", "val_split=b"], "--set: val_split is set twice"),
        (["seed=3"], "--set: seed is set by the study for each of its runs; give --seeds"),
        (["logs=a"], "--set: logs is set by the study"),
    ):
        with pytest.raises(UserError, match=re.escape(told)):
            plan(tmp_path, ARMS, set=flags)
    assert plan(tmp_path, ARMS, set=["grad-clip-norm=null"]).runs[0].config.grad_clip_norm is None
