"""start.json: what a model knows before its first step, and that to measure it changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.tiny import run_script


@pytest.fixture(scope="module")
def common(tiny_data: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    logs = tmp_path_factory.mktemp("logs")
    return ["--train-data", tiny_data, "--model", tiny_model, "--batch-size", 16, "--workers", 0, "--epochs", 2,
            "--device", "cpu", "--loss", "asym-i2t", "--norm", "qnorm", "--permute-pairs", "--save-steps", 2,
            "--logs", logs]  # fmt: skip


@pytest.fixture(scope="module")
def run(common: list[object], classes: Path) -> Path:
    done = run_script(
        "train_clip.py", *common, "--name", "measured", "--measure-start", "--zeroshot-data", classes, "--max-steps", 6
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "warning: the pairs are permuted" in done.stderr
    return Path(str(common[-1])) / "measured"


def content(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_it_holds_an_evaluation_fisher_numbers_and_zero_shot_accuracy(run: Path) -> None:
    start, results = content(run / "start.json"), content(run / "results.json")
    assert start["steps"] == 0 and start["data"] == results["data"], "the same evaluation data"
    assert start["evaluation"]["native"] == {"gamma_q": 1.0, "gamma_d": 0.0}
    for direction in ("i2t", "t2i"):
        assert set(start["retrieval"][direction]) >= {"native", "cosine", "dot"}
        fisher = start["fisher"][direction]
        assert fisher["status"] == "determined" and fisher["n"] == 64, "of 96 training pairs, which D = 16 needs"
        assert fisher["effective_scale"] == pytest.approx(1 / 0.07, rel=0.1), "as training starts"
        assert start["diagnostics"][direction]["fisher"]["status"] == "undetermined", "24 pairs of evaluation"
    assert start["zero_shot"]["n_images"] == results["zero_shot"]["n_images"] == 40
    assert start["magnitude"]["text"]["mean"] != results["magnitude"]["text"]["mean"]
    assert start["trained_with"]["logit_scale_t2i"] is None, "no loss trains it"


def test_permuted_pairs_are_told_wherever_the_data_are_named(run: Path) -> None:
    for trained in (content(run / "model" / "mmclip.json"), content(run / "results.json")["trained_with"]):
        assert trained["data"]["permuted_pairs"] is True
        assert trained["data"]["split"] == "train (pairs permuted)"


def test_to_measure_changes_nothing(run: Path, common: list[object]) -> None:
    done = run_script("train_clip.py", *common, "--name", "plain", "--max-steps", 6)
    assert done.returncode == 0, done.stderr[-2000:]
    plain = run.parent / "plain"
    assert not (plain / "start.json").exists()
    ours, theirs = (load_file(str(p / "model" / "open_clip_model.safetensors")) for p in (run, plain))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_a_resumed_run_keeps_what_was_measured(run: Path, common: list[object]) -> None:
    before = (run / "start.json").read_bytes()
    flags = ["--resume", "latest", "--measure-start", "--epochs", 3, "--may-change", "epochs", "max_steps"]
    done = run_script("train_clip.py", *common, "--name", "measured", *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (run / "start.json").read_bytes() == before
    assert "before the first step" not in done.stderr
    (run / "start.json").unlink()
    flags = ["--resume", "latest", "--measure-start", "--epochs", 4, "--may-change", "epochs", "max_steps"]
    done = run_script("train_clip.py", *common, "--name", "measured", *flags)
    assert done.returncode == 0 and not (run / "start.json").exists()
    assert "no start.json: --measure-start came after step 18" in done.stderr
