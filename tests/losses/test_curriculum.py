"""What changes over a run: schedules as functions of the step, what is refused, and real runs of each option."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip import load_model
from mmclip.config import LossConfig, TrainConfig
from mmclip.errors import UserError
from mmclip.losses.contrastive import clip_loss
from mmclip.losses.schedule import as_step, check, describe, exponents_at, i2t_weight_at, rate_factor
from mmclip.models.metadata import clip_metadata
from mmclip.similarity import FIXED_NORMALIZATIONS, Normalization
from tests.helpers.tiny import run_script

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


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"gamma_schedule": "switch", "norm": "learned"}, "--norm learned trains its exponents"),
        ({"gamma_schedule": "switch"}, "--gamma-from cosine is --norm itself"),
        ({"gamma_schedule": "switch", "norm": "dot", "gamma_start": 0.0}, "leaves no step before it"),
        ({"gamma_schedule": "anneal", "norm": "dot", "gamma_start": 0.8}, "--gamma-start 0.8 is not before"),
        (
            {"gamma_schedule": "anneal", "norm": "dot", "gamma_start": 9, "gamma_end": 9},
            "--gamma-start 9 is not before",
        ),
        ({"stage2_lr_factor": 0.1}, "--stage2-lr-factor 0.1 needs --gamma-schedule switch"),
        ({"stage2_lr_factor": 0.0}, "--stage2-lr-factor 0.0: expected a number above 0"),
        ({"focal": -1.0}, "--focal -1.0: expected a number of at least 0"),
        ({"norm_drift": math.nan}, "--norm-drift nan: expected a number of at least 0"),
        ({"i2t_weight_end": 1.5}, "--i2t-weight-end 1.5: expected a number from 0 to 1"),
        ({"i2t_weight_end": 0.5, "loss": "asym-i2t"}, "--i2t-weight-end 0.5 needs --loss sym"),
        ({"init_from": "no-run"}, "--init-from no-run: no model there"),
        ({"init_from": "no-run", "pretrained": "openai"}, "--pretrained openai beside --init-from no-run"),
    ],
)
def test_what_cannot_be_is_refused_by_the_settings_alone(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        TrainConfig(**flags)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"gamma_schedule": "switch", "gamma_start": 20}, "--gamma-start 20: in a run of 20 steps it would never come"),
        ({"gamma_schedule": "anneal", "gamma_start": 0.1, "gamma_end": 30}, "--gamma-end 30: in a run of 20 steps"),
        (
            {"gamma_schedule": "anneal", "gamma_start": 16},
            "--gamma-start 16 is step 16 and --gamma-end 0.75 is step 15",
        ),
    ],
)
def test_steps_that_a_run_does_not_have_are_refused(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check(LossConfig(norm="dot", **flags), 20)
    check(LossConfig(norm="dot", **flags), 100)


def test_facts_say_what_was_used_and_nothing_else() -> None:
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
    assert of(norm="dot", gamma_schedule="switch", norm_drift=0.1).keys() - plain.keys() == {
        "gamma_schedule", "gamma_from", "gamma_start", "stage2_lr_factor", "norm_drift"
    }  # fmt: skip
    assert of(norm="dot", gamma_schedule="anneal").keys() - plain.keys() == {
        "gamma_schedule", "gamma_from", "gamma_start", "gamma_end"
    }  # fmt: skip


def test_another_runs_name_cannot_write_on_the_screen() -> None:
    (text,) = describe(1, {"initial": {"run": "a\nb", "loss": "sym", "norm": "x\x1b[2J", "gamma_q": [None, 1.0]}})
    assert text.isprintable()


# --- real runs --------------------------------------------------------------------------------------------------------

COMMON = ["--batch-size", 32, "--workers", 0, "--lr", "3e-3", "--warmup", 2, "--log-every-n-steps", 1,
          "--device", "cpu", "--epochs", 3, "--bank-size", 0]  # fmt: skip


def train(data: Path, model: Path, logs: Path, name: str, *flags: object) -> str:
    """What a run of 9 steps says."""
    command = ["--train-data", data, "--model", model, "--logs", logs, "--name", name, *COMMON, *flags]
    done = run_script("train_clip.py", *command)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_model(str(run)).towers.state_dict()


@pytest.mark.parametrize(
    ("flags", "cut"),
    [
        (["--gamma-schedule", "switch", "--stage2-lr-factor", 0.5, "--norm", "dot"], 4),  # the switch is step 6
        (["--gamma-schedule", "anneal", "--gamma-start", 0.1, "--norm", "qnorm", "--focal", 2, "--norm-drift", 0.1,
          "--i2t-weight", 0, "--i2t-weight-end", 1], 4),
    ],
    ids=["across a switch", "inside an anneal"],
)  # fmt: skip
def test_a_run_that_is_cut_ends_where_the_whole_one_does(
    flags: list[object], cut: int, tiny_data: Path, tiny_model: Path, tmp_path: Path
) -> None:
    flags = [*flags, "--save-steps", 2, "--keep-checkpoints", 9]
    said = train(tiny_data, tiny_model, tmp_path, "whole", *flags)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    kept = tmp_path / "cut" / "checkpoints"
    (kept / "latest").write_text(f"step_{cut:08d}.pt\n")
    train(tiny_data, tiny_model, tmp_path, "cut", *flags, "--resume", "latest")
    whole, again = (weights(tmp_path / n) for n in ("whole", "cut"))
    assert all(torch.equal(whole[k], again[k]) for k in whole)
    states = [
        torch.load(tmp_path / n / "checkpoints" / "step_00000009.pt", weights_only=True) for n in ("whole", "cut")
    ]
    assert all(torch.equal(v, states[1]["loss"][k]) for k, v in states[0]["loss"].items())

    timing = ("samples_per_second", "data_wait")
    told_lines = [
        [{k: v for k, v in x.items() if k not in timing} for x in lines(tmp_path / n)] for n in ("whole", "cut")
    ]
    assert told_lines[0] == told_lines[1]
    whole_lines = told_lines[0]
    transitions = {x["step"]: x["transition"] for x in whole_lines if "transition" in x}
    assert len([x for x in said.splitlines() if x.startswith("step ") and "gamma_d 1 ->" in x]) >= 1
    norm = Normalization("dot" if "dot" in flags else "qnorm")
    assert (whole_lines[-1]["gamma_q"], whole_lines[-1]["gamma_d"]) == norm.exponents
    for at in transitions.values():
        for d in ("i2t", "t2i"):
            before, after = at[f"effective_scale_{d}"]
            assert after == pytest.approx(before, rel=1e-4)
            assert at[f"logit_scale_{d}"][0] != at[f"logit_scale_{d}"][1]
    if "switch" in flags:
        assert list(transitions) == [6]
        assert [x["gamma_d"] for x in whole_lines] == [1] * 5 + [0] * 4
    else:
        assert list(transitions) == [3, 8], "the first step that left cosine, and the one that arrived"
        assert [x["gamma_d"] for x in whole_lines] == pytest.approx([1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0, 0])
        assert [x["i2t_weight"] for x in whole_lines] == pytest.approx([i / 8 for i in range(9)])
        assert all(x["norm_drift"] >= 0 for x in whole_lines) and whole_lines[-1]["norm_drift"] > 0
    facts = load_model(str(tmp_path / "cut")).metadata
    assert facts["gamma_schedule"] in flags and (facts["gamma_q"], facts["gamma_d"]) == norm.exponents
    assert facts["logit_scale_i2t"] and facts["logit_scale_t2i"]
    results = json.loads((tmp_path / "cut" / "results.json").read_text(encoding="utf-8"))
    assert results["trained_with"]["gamma_from"] == "cosine"
    assert results["retrieval"]["i2t"]["native"] == results["retrieval"]["i2t"][norm.value]


@pytest.fixture(scope="module")
def cosine(tiny_data: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    logs = tmp_path_factory.mktemp("first")
    flags = ["--lock-image", "--lock-text", "--cache-features", "--cache-dir", logs / "cache", "--seed", 3]
    train(tiny_data, tiny_model, logs, "cosine", *flags)
    return logs / "cosine"


@pytest.mark.parametrize("norm", ["dot", "learned"])
def test_a_run_starts_from_another_in_another_norm_with_its_scale_and_its_cache(
    norm: str, cosine: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """--model is a name that nothing here is: the run's own architecture is taken."""
    cache = cosine.parent / "cache"
    parts = sorted(cache.rglob("*.safetensors"))
    flags = [
        "--lock-image",
        "--lock-text",
        "--cache-features",
        "--cache-dir",
        cache,
        "--norm",
        norm,
        "--gamma-init",
        0.3,
    ]
    start = cosine if norm == "dot" else cosine / "model"
    said = train(tiny_data, Path("ViT-B-32"), tmp_path, "x", *flags, "--init-from", start, "--max-steps", 3)
    assert sorted(cache.rglob("*.safetensors")) == parts and "trunk (1/" not in said, "the same trunks, the same cache"
    before, after = load_model(str(cosine)), load_model(str(tmp_path / "x"))
    first = lines(tmp_path / "x")[0]
    initial = first["initial"]
    assert (initial["run"], initial["loss"], initial["norm"]) == ("cosine", "sym", "cosine")
    assert initial["effective_scale_i2t"] == pytest.approx([before.metadata["effective_scale_i2t"]] * 2, rel=1e-5)
    assert initial["logit_scale_i2t"][0] == before.metadata["logit_scale_i2t"] != initial["logit_scale_i2t"][1]
    assert initial["gamma_d"] == [1.0, 0.0 if norm == "dot" else pytest.approx(0.3)]
    assert "starting from cosine (sym loss, cosine): gamma_q 1 -> " in said
    facts = after.metadata["initial"]
    assert (facts["run"], facts["norm"], facts["seed"], len(facts["key"])) == ("cosine", "cosine", 3, 16)
    assert str(tmp_path) not in json.dumps(facts) and after.metadata["model"] == before.metadata["model"]
    trunk = {k: v for k, v in before.towers.state_dict().items() if "visual.conv1" in k}
    assert trunk and all(torch.equal(v, after.towers.state_dict()[k]) for k, v in trunk.items())


def test_a_learned_run_goes_on_with_its_gammas(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    train(tiny_data, tiny_model, tmp_path, "a", "--norm", "learned", "--gamma-lr", 0.2, "--val-data", "none")
    known = load_model(str(tmp_path / "a")).metadata
    more = ["--init-from", tmp_path / "a", "--max-steps", 3]
    train(tiny_data, tiny_model, tmp_path, "b", "--norm", "learned", "--val-data", "none", *more)
    initial = lines(tmp_path / "b")[0]["initial"]
    assert abs(known["gamma_d"] - 0.5) > 0.01
    assert initial["gamma_d"] == pytest.approx([known["gamma_d"]] * 2, abs=1e-5)


def test_a_schedule_that_the_run_is_too_short_for_is_refused_before_a_model_loads(tiny_data: Path) -> None:
    done = run_script("train_clip.py", "--train-data", tiny_data, "--model", "ViT-B-33", *COMMON, "--norm", "dot",
                      "--gamma-schedule", "switch", "--gamma-start", 9)  # fmt: skip
    assert done.returncode == 2 and "--gamma-start 9: in a run of 9 steps" in done.stderr, done.stderr[-500:]
