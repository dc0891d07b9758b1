"""Real runs of each schedule, and of a run that starts from another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from shlex import split

import pytest
import torch

from mmclip import load_model
from mmclip.roles import Normalization
from tests.helpers.tiny import logged, run_script, untimed

COMMON = split(
    "--batch-size 32 --workers 0 --lr 3e-3 --warmup 2 --log-every-n-steps 1 --device cpu --epochs 3 --bank-size 0"
)


def train(data: Path, model: Path, logs: Path, name: str, *flags: object) -> str:
    """What a run of 9 steps says."""
    command = ["--train-data", data, "--model", model, "--logs", logs, "--name", name, *COMMON, *flags]
    done = run_script("train_clip.py", *command)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_model(str(run)).towers.state_dict()


@pytest.mark.parametrize(
    "flags",
    [
        "--gamma-schedule switch --stage2-lr-factor 0.5 --norm dot",  # the switch is step 6
        "--gamma-schedule anneal --gamma-start 0.1 --norm qnorm --focal 2 --norm-drift 0.1 --i2t-weight 0 "
        "--i2t-weight-end 1",
    ],
    ids=["across a switch", "inside an anneal"],
)
def test_a_run_that_is_cut_ends_where_the_whole_one_does(
    flags: str, tiny_data: Path, tiny_model: Path, tmp_path: Path
) -> None:
    common = [*flags.split(), "--save-steps", 2, "--keep-checkpoints", 9]
    said = train(tiny_data, tiny_model, tmp_path, "whole", *common)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "checkpoints" / "latest").write_text("step_00000004.pt\n")
    train(tiny_data, tiny_model, tmp_path, "cut", *common, "--resume", "latest")
    runs = [tmp_path / name for name in ("whole", "cut")]
    whole, again = (weights(run) for run in runs)
    assert all(torch.equal(whole[k], again[k]) for k in whole)
    last, repeated = (torch.load(run / "checkpoints" / "step_00000009.pt", weights_only=True)["loss"] for run in runs)
    assert all(torch.equal(v, repeated[k]) for k, v in last.items())

    lines, repeated = (untimed(run) for run in runs)
    assert lines == repeated
    transitions = {x["step"]: x["transition"] for x in lines if "transition" in x}
    assert len([x for x in said.splitlines() if x.startswith("step ") and "gamma_d 1 ->" in x]) >= 1
    norm = Normalization("dot" if "--norm dot" in flags else "qnorm")
    assert (lines[-1]["gamma_q"], lines[-1]["gamma_d"]) == norm.exponents
    for at in transitions.values():
        for d in ("i2t", "t2i"):
            before, after = at[f"effective_scale_{d}"]
            assert after == pytest.approx(before, rel=1e-4)
            assert at[f"logit_scale_{d}"][0] != at[f"logit_scale_{d}"][1]
    if "switch" in flags:
        assert list(transitions) == [6] and [x["gamma_d"] for x in lines] == [1] * 5 + [0] * 4
    else:
        assert list(transitions) == [3, 8], "the first step that left cosine, and the one that arrived"
        assert [x["gamma_d"] for x in lines] == pytest.approx([1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0, 0])
        assert [x["i2t_weight"] for x in lines] == pytest.approx([i / 8 for i in range(9)])
        assert all(x["norm_drift"] >= 0 for x in lines) and lines[-1]["norm_drift"] > 0
    facts = load_model(str(tmp_path / "cut")).metadata
    assert facts["gamma_schedule"] in flags and (facts["gamma_q"], facts["gamma_d"]) == norm.exponents
    assert facts["logit_scale_i2t"] and facts["logit_scale_t2i"]
    results = json.loads((tmp_path / "cut" / "results.json").read_text(encoding="utf-8"))
    assert results["trained_with"]["gamma_from"] == "cosine"
    assert results["retrieval"]["i2t"]["native"] == results["retrieval"]["i2t"][norm.value]


LOCKED = ["--lock-image", "--lock-text", "--cache-features", "--cache-dir"]


@pytest.fixture(scope="module")
def cosine(tiny_data: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    logs = tmp_path_factory.mktemp("first")
    train(tiny_data, tiny_model, logs, "cosine", *LOCKED, logs / "cache", "--seed", 3)
    return logs / "cosine"


@pytest.mark.parametrize("norm", ["dot", "learned"])
def test_a_run_starts_from_another_in_another_norm_with_its_scale_and_its_cache(
    norm: str, cosine: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """--model is a name that nothing here is: the run's own architecture is taken."""
    cache = cosine.parent / "cache"
    parts = sorted(cache.rglob("*.safetensors"))
    start = cosine if norm == "dot" else cosine / "model"
    flags = [*LOCKED, cache, "--norm", norm, "--gamma-init", 0.3, "--init-from", start, "--max-steps", 3]
    said = train(tiny_data, Path("ViT-B-32"), tmp_path, "x", *flags)
    assert sorted(cache.rglob("*.safetensors")) == parts and "trunk (1/" not in said, "the same trunks, the same cache"
    before, after = load_model(str(cosine)), load_model(str(tmp_path / "x"))
    first = logged(tmp_path / "x")[0]
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
    initial = logged(tmp_path / "b")[0]["initial"]
    assert abs(known["gamma_d"] - 0.5) > 0.01
    assert initial["gamma_d"] == pytest.approx([known["gamma_d"]] * 2, abs=1e-5)


def test_a_schedule_that_the_run_is_too_short_for_is_refused_before_a_model_loads(tiny_data: Path) -> None:
    done = run_script("train_clip.py", "--train-data", tiny_data, "--model", "ViT-B-33", *COMMON, "--norm", "dot",
                      "--gamma-schedule", "switch", "--gamma-start", 9)  # fmt: skip
    assert done.returncode == 2 and "--gamma-start 9: in a run of 9 steps" in done.stderr, done.stderr[-500:]
