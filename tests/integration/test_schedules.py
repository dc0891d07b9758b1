"""Real runs of each schedule, and of a run that starts from another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mmclip import load_model
from mmclip.roles import Normalization
from tests.helpers.tiny import run_script

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
