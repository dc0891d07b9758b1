"""Runs of the real scripts on tiny data: what they leave, how they resume, what they refuse."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from shlex import split
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from mmclip import load_model
from mmclip.commands.evaluate import run_folder
from tests.helpers.tiny import disturbed, logged, run_script

COMMON = split("--batch-size 32 --workers 0 --lr 3e-3 --warmup 2 --log-every-n-steps 1 --device cpu")
WEIGHTS = "model/open_clip_model.safetensors"


def said(data: Path, model: Path, logs: Path, name: str, *flags: object) -> str:
    """What a run that ends well prints on stderr."""
    command = ["--train-data", data, "--model", model, "--logs", logs, "--name", name, *COMMON, *flags]
    done = run_script("train_clip.py", *command)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def tiny_run(data: Path, model: Path, logs: Path, name: str, *flags: object) -> Path:
    said(data, model, logs, name, *flags)
    return logs / name


def content(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def same_weights(a: Path, b: Path) -> bool:
    ours, theirs = (load_file(str(run / WEIGHTS)) for run in (a, b))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


ASYM = split("--loss asym-i2t --norm qnorm --epochs 3 --save-steps 2 --val-steps 3")


@pytest.fixture(scope="module")
def run(tiny_data: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    logs = tmp_path_factory.mktemp("logs")
    return tiny_run(tiny_data, tiny_model, logs, "asym", *ASYM, "--report-to", "tensorboard", "--report")


def test_a_run_leaves_everything_that_the_readme_names(run: Path) -> None:
    names = {p.name for p in run.iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "checkpoints", "model", "results.json", "per_query.npz"}
    assert "tensorboard" in names and (run / "checkpoints" / "latest").read_text().strip() == "step_00000009.pt"
    exported = ["mmclip.json", "open_clip_config.json", "open_clip_model.safetensors"]
    assert sorted(p.name for p in (run / "model").iterdir()) == exported


def test_metrics_have_a_line_a_step_with_both_directions(run: Path) -> None:
    lines = [m for m in logged(run) if "loss" in m]
    assert [m["step"] for m in lines] == list(range(1, 10))
    for name in (
        "loss_i2t", "loss_t2i", "logit_scale", "gamma_q", "gamma_d", "norm_image_mean", "norm_text_mean",
        "effective_scale_i2t", "samples_per_second",
    ):  # fmt: skip
        assert all(math.isfinite(m[name]) for m in lines), name
    assert lines[0]["effective_scale_i2t"] == pytest.approx(1 / 0.07, rel=0.02), "calibrated on the first batch"
    assert all(m["loss"] == m["loss_i2t"] for m in lines), "asym-i2t trains i2t alone"
    assert [m["step"] for m in logged(run) if "val_i2t_success@1_native" in m] == [3, 6]


def test_results_hold_both_directions_every_scoring_and_every_pool(run: Path) -> None:
    results = content(run / "results.json")
    trained = results["trained_with"]
    assert trained | {"loss": "asym-i2t", "i2t_weight": 1.0, "norm": "qnorm", "gamma_q": 1.0, "gamma_d": 0.0} == trained
    assert trained["logit_scale_t2i"] is None, "the untrained direction has no scale"
    assert (results["data"]["n_images"], results["data"]["n_texts"]) == (24, 120)
    for pool in (results, results["pools"]["full"], results["pools"]["distractors"]):
        for direction in ("i2t", "t2i"):
            by_scoring = pool["retrieval"][direction]
            backwards = {"reversed", "corrected"} if direction == "t2i" else set()
            assert set(by_scoring) == {"cosine", "dot", "qnorm", "dnorm", "native"} | backwards
            assert by_scoring["native"] == by_scoring["qnorm"]
            assert by_scoring["cosine"]["success@1"] == by_scoring["dnorm"]["success@1"]
            assert by_scoring["dot"]["success@1"] == by_scoring["qnorm"]["success@1"]
        assert pool["magnitude"]["text"]["mean"] > 0
    assert results["pools"]["distractors"]["magnitude"]["text"]["cohens_d"]["corpus"] is not None


def test_a_run_and_an_evaluation_end_with_their_page(run: Path, tiny_data: Path, tmp_path: Path) -> None:
    page = (run / "report.html").read_text(encoding="utf-8")
    shown = content(run / "results.json")["retrieval"]["t2i"]["native"]["success@1"]
    assert f"{shown:.3f}".lstrip("0") in page and "data:image/" in page
    done = run_script("evaluate.py", "--model", run, "--data", tiny_data, "--output", tmp_path / "y", "--report")
    assert done.returncode == 0 and (tmp_path / "y" / "report.html").is_file(), done.stderr
    assert f"report: {tmp_path / 'y' / 'report.html'}" in done.stdout


def test_export_alone_serves_mmclip_and_stock_open_clip(run: Path, tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    shutil.copytree(run / "model", folder)
    ours = load_model(str(folder))
    theirs, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    theirs.eval()
    captions = ["a small red circle", "two shapes"]
    assert torch.equal(ours.tokenize(captions), tokenizer(captions))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 30, 3), dtype=np.uint8))
    assert torch.equal(ours.transform()(picture), preprocess(picture))
    with torch.no_grad():
        image, text = ours.towers(preprocess(picture)[None], tokenizer(captions))
        assert torch.equal(image, theirs.encode_image(preprocess(picture)[None]))
        assert torch.equal(text, theirs.encode_text(tokenizer(captions)))
    assert theirs.logit_scale.exp().item() == pytest.approx(ours.metadata["logit_scale_i2t"], rel=1e-5)
    assert run_folder(str(run)) == run and run_folder(str(run / "model")) == run and run_folder(str(folder)) is None


def test_evaluate_script_repeats_the_runs_own_numbers(run: Path, tiny_data: Path, tmp_path: Path) -> None:
    done = run_script(
        "evaluate.py", "--model", run / "model", "--data", tiny_data, "--bank", tiny_data, "--output",
        tmp_path, "--workers", 0, "--compare", run,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    own, again = (content(p / "results.json") for p in (run, tmp_path))
    corrected = again["retrieval"]["t2i"]["corrected"]
    assert 0 < corrected.pop("bank_overlap") < corrected["bank_size"], "vague captions are in both splits"
    assert own["retrieval"] == again["retrieval"] and own["magnitude"] == again["magnitude"]
    assert "image → text" in done.stdout and "answer " in done.stdout and len(done.stdout.splitlines()) <= 12


def test_resumed_run_equals_the_uninterrupted_one(run: Path, tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "asym")
    for name in ("step_00000008.pt", "step_00000009.pt"):
        (tmp_path / "asym" / "checkpoints" / name).unlink()
    (tmp_path / "asym" / "checkpoints" / "latest").write_text("step_00000006.pt\n")
    (tmp_path / "asym" / WEIGHTS).unlink()
    again = tiny_run(tiny_data, tiny_model, tmp_path, "asym", *ASYM, "--resume", "latest", "--workers", 2)
    assert same_weights(run, again)


def test_a_run_is_extended_and_slowed_on_purpose(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    tiny_run(tiny_data, tiny_model, tmp_path, "x", "--epochs", 2, "--val-data", "none")
    more = split("--epochs 3 --lr 1e-5 --val-data none --resume latest --may-change epochs lr")
    rates = [m["lr"] for m in logged(tiny_run(tiny_data, tiny_model, tmp_path, "x", *more))]
    assert len(rates) == 9 and rates[5] > 1e-4 and 0 < rates[6] < 1e-5


@pytest.mark.parametrize(("flags", "steps"), [([], 4), (["--keep-last"], 6)])
def test_last_partial_batch_is_dropped_or_kept(
    tiny_data: Path, tiny_model: Path, tmp_path: Path, flags: list[str], steps: int
) -> None:
    some = split("--epochs 2 --batch-size 40 --val-data none")
    run = tiny_run(tiny_data, tiny_model, tmp_path, "x", *some, *flags)
    assert logged(run)[-1]["step"] == steps and not (run / "results.json").exists()


def test_towers_start_from_an_open_clip_checkpoint_file(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    open_clip.add_model_config(tiny_model)
    torch.manual_seed(5)
    source = open_clip.create_model(tiny_model.stem)
    with torch.no_grad():
        source.logit_scale.fill_(math.log(30.0))
    weights = {f"module.{k}": v for k, v in source.state_dict().items()}
    torch.save({"epoch": 3, "name": "x", "state_dict": weights}, tmp_path / "epoch_3.pt")
    flags = split("--max-steps 3 --lr 1e-5 --norm dot --val-data none")
    run = tiny_run(tiny_data, tiny_model, tmp_path, "tuned", "--pretrained", tmp_path / "epoch_3.pt", *flags)
    assert logged(run)[0]["effective_scale_i2t"] == pytest.approx(30, rel=0.02), "the checkpoint's scale"
    tuned = load_model(str(run)).towers.clip.state_dict()
    moved = {k: (tuned[k] - v).abs().max().item() for k, v in source.state_dict().items() if k != "logit_scale"}
    assert max(moved.values()) < 1e-3, "started from the checkpoint"
    assert moved["visual.conv1.weight"] > 0 and moved["token_embedding.weight"] > 0, "both towers trained"


def test_a_reading_process_that_is_killed_ends_the_run_and_loses_no_step(
    tiny_data: Path, tiny_model: Path, tmp_path: Path
) -> None:
    command = ["train_clip.py", "--train-data", tiny_data, "--model", tiny_model, "--logs", tmp_path, "--name", "x",
               *COMMON, "--workers", 1, "--epochs", 1, "--val-data", "none", "--batch-size", 2, "--save-steps",
               1000]  # fmt: skip

    def kill_readers(pid: int) -> None:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)

    code, stderr = disturbed(command, tmp_path / "x", 1, kill_readers)
    if code == 0:
        pytest.skip("the reader had read everything before it was killed")
    last = stderr.strip().splitlines()[-1]
    assert code == 2 and "Traceback" not in stderr
    assert last.startswith("error: step ") and "a reading process was ended from outside" in last
    kept = int((tmp_path / "x" / "checkpoints" / "latest").read_text()[5:13])
    assert kept == len(logged(tmp_path / "x")) > 0
    resumed = run_script(*command, "--resume", "latest", "--workers", 0)
    assert resumed.returncode == 0 and f"continuing after step {kept}" in resumed.stderr, resumed.stderr[-2000:]


# --- start.json -------------------------------------------------------------------------------------------------------

MEASURED = split("--batch-size 16 --epochs 2 --loss asym-i2t --norm qnorm --permute-pairs --save-steps 2")


@pytest.fixture(scope="module")
def measured(tiny_data: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, classes: Path) -> Path:
    flags = [*MEASURED, "--measure-start", "--zeroshot-data", classes, "--max-steps", 6]
    logs = tmp_path_factory.mktemp("logs")
    assert "warning: the pairs are permuted" in said(tiny_data, tiny_model, logs, "measured", *flags)
    return logs / "measured"


def test_start_json_holds_an_evaluation_fisher_numbers_and_zero_shot_accuracy(measured: Path) -> None:
    start, results = content(measured / "start.json"), content(measured / "results.json")
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
    for trained in (content(measured / "model" / "mmclip.json"), results["trained_with"]):
        assert trained["data"]["permuted_pairs"] is True
        assert trained["data"]["split"] == "train (pairs permuted)"


def test_to_measure_changes_nothing_and_a_resumed_run_keeps_it(
    measured: Path, tiny_data: Path, tiny_model: Path
) -> None:
    plain = tiny_run(tiny_data, tiny_model, measured.parent, "plain", *MEASURED, "--max-steps", 6)
    assert not (plain / "start.json").exists() and same_weights(measured, plain)
    before = (measured / "start.json").read_bytes()
    more = split("--resume latest --measure-start --may-change epochs max_steps --epochs")
    text = said(tiny_data, tiny_model, measured.parent, "measured", *MEASURED, *more, 3)
    assert (measured / "start.json").read_bytes() == before and "before the first step" not in text
    (measured / "start.json").unlink()
    text = said(tiny_data, tiny_model, measured.parent, "measured", *MEASURED, *more, 4)
    assert not (measured / "start.json").exists() and "no start.json: --measure-start came after step 18" in text
