"""Runs of the real scripts on tiny data: what they leave, how they resume, what they refuse."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

from mmclip import load_model
from mmclip.commands.evaluate import run_folder
from tests.helpers.tiny import ROOT, run_script

COMMON = [
    "--batch-size", 32, "--workers", 0, "--lr", "3e-3", "--warmup", 2, "--log-every-n-steps", 1, "--device",
    "cpu",
]  # fmt: skip


def tiny_run(data: Path, model: Path, logs: Path, name: str, *flags: object) -> Path:
    done = run_script(
        "train_clip.py", "--train-data", data, "--model", model, "--logs", logs, "--name", name, *COMMON, *flags
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return logs / name


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def run(tiny_data: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    logs = tmp_path_factory.mktemp("logs")
    return tiny_run(
        tiny_data, tiny_model, logs, "asym", "--loss", "asym-i2t", "--norm", "qnorm", "--epochs", 3,
        "--save-steps", 2, "--val-steps", 3, "--report-to", "tensorboard",
    )  # fmt: skip


def test_a_run_leaves_everything_that_the_readme_names(run: Path) -> None:
    assert {p.name for p in run.iterdir()} >= {
        "config.yaml",
        "metrics.jsonl",
        "checkpoints",
        "model",
        "results.json",
        "per_query.npz",
        "tensorboard",
    }
    assert (run / "checkpoints" / "latest").read_text().strip() == "step_00000009.pt"
    assert sorted(p.name for p in (run / "model").iterdir()) == [
        "mmclip.json",
        "open_clip_config.json",
        "open_clip_model.safetensors",
    ]


def test_metrics_have_a_line_a_step_with_both_directions(run: Path) -> None:
    lines = [m for m in metrics(run) if "loss" in m]
    assert [m["step"] for m in lines] == list(range(1, 10))
    for name in (
        "loss_i2t", "loss_t2i", "logit_scale", "gamma_q", "gamma_d", "norm_image_mean", "norm_text_mean",
        "effective_scale_i2t", "samples_per_second",
    ):  # fmt: skip
        assert all(math.isfinite(m[name]) for m in lines), name
    assert lines[0]["effective_scale_i2t"] == pytest.approx(1 / 0.07, rel=0.02), "calibrated on the first batch"
    assert all(m["loss"] == m["loss_i2t"] for m in lines), "asym-i2t trains i2t alone"
    assert [m["step"] for m in metrics(run) if "val_i2t_success@1_native" in m] == [3, 6]


def test_results_hold_both_directions_every_scoring_and_every_pool(run: Path) -> None:
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert (
        results["trained_with"]
        | {"loss": "asym-i2t", "i2t_weight": 1.0, "norm": "qnorm", "gamma_q": 1.0, "gamma_d": 0.0}
        == results["trained_with"]
    )
    assert results["trained_with"]["logit_scale_t2i"] is None, "the untrained direction has no scale"
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
    own, again = (json.loads((p / "results.json").read_text(encoding="utf-8")) for p in (run, tmp_path))
    corrected = again["retrieval"]["t2i"]["corrected"]
    assert 0 < corrected.pop("bank_overlap") < corrected["bank_size"], "vague captions are in both splits"
    assert own["retrieval"] == again["retrieval"] and own["magnitude"] == again["magnitude"]
    assert "image → text" in done.stdout and "answer " in done.stdout and len(done.stdout.splitlines()) <= 12


def test_resumed_run_equals_the_uninterrupted_one(run: Path, tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    flags = ["--loss", "asym-i2t", "--norm", "qnorm", "--epochs", 3, "--save-steps", 2, "--val-steps", 3]
    tiny_run(tiny_data, tiny_model, tmp_path, "whole", *flags)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for name in ("step_00000008.pt", "step_00000009.pt"):
        (tmp_path / "cut" / "checkpoints" / name).unlink()
    (tmp_path / "cut" / "checkpoints" / "latest").write_text("step_00000006.pt\n")
    (tmp_path / "cut" / "model" / "open_clip_model.safetensors").unlink()
    tiny_run(tiny_data, tiny_model, tmp_path, "cut", *flags, "--resume", "latest", "--workers", 2)
    a, b = (load_model(str(tmp_path / n)).towers.state_dict() for n in ("whole", "cut"))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_run_is_extended_and_slowed_on_purpose(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    tiny_run(tiny_data, tiny_model, tmp_path, "x", "--epochs", 2, "--val-data", "none")
    more = ["--epochs", 3, "--lr", "1e-5", "--val-data", "none", "--resume", "latest", "--may-change", "epochs", "lr"]
    run = tiny_run(tiny_data, tiny_model, tmp_path, "x", *more)
    rates = [m["lr"] for m in metrics(run)]
    assert len(rates) == 9 and rates[5] > 1e-4 and 0 < rates[6] < 1e-5


def test_last_partial_batch_is_dropped_or_kept(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    dropped = tiny_run(tiny_data, tiny_model, tmp_path, "drop", "--epochs", 2, "--batch-size", 40, "--val-data", "none")
    kept = tiny_run(
        tiny_data, tiny_model, tmp_path, "keep", "--epochs", 2, "--batch-size", 40, "--val-data", "none", "--keep-last"
    )
    assert (metrics(dropped)[-1]["step"], metrics(kept)[-1]["step"]) == (4, 6)
    assert not (dropped / "results.json").exists()


def test_towers_start_from_an_open_clip_checkpoint_file(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    open_clip.add_model_config(tiny_model)
    torch.manual_seed(5)
    source = open_clip.create_model(tiny_model.stem)
    with torch.no_grad():
        source.logit_scale.fill_(math.log(30.0))
    torch.save(
        {"epoch": 3, "name": "x", "state_dict": {f"module.{k}": v for k, v in source.state_dict().items()}},
        tmp_path / "epoch_3.pt",
    )
    run = tiny_run(
        tiny_data, tiny_model, tmp_path, "tuned", "--pretrained", tmp_path / "epoch_3.pt", "--max-steps", 3,
        "--lr", "1e-5", "--norm", "dot", "--val-data", "none",
    )  # fmt: skip
    assert metrics(run)[0]["effective_scale_i2t"] == pytest.approx(30, rel=0.02), "the checkpoint's scale"
    tuned = load_model(str(run)).towers.clip.state_dict()
    moved = {k: (tuned[k] - v).abs().max().item() for k, v in source.state_dict().items() if k != "logit_scale"}
    assert max(moved.values()) < 1e-3, "started from the checkpoint"
    assert moved["visual.conv1.weight"] > 0 and moved["token_embedding.weight"] > 0, "both towers trained"


def test_a_reading_process_that_is_killed_is_told_and_loses_no_step(
    tiny_data: Path, tiny_model: Path, tmp_path: Path
) -> None:
    command = [sys.executable, ROOT / "scripts" / "train_clip.py", "--train-data", tiny_data, "--model", tiny_model,
               "--logs", tmp_path, "--name", "x", *COMMON, "--workers", 1, "--epochs", 1, "--val-data", "none",
               "--batch-size", 2, "--save-steps", 1000]  # fmt: skip
    process = subprocess.Popen([str(c) for c in command], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    metrics, deadline = tmp_path / "x" / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.is_file() and metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, "the run never got going"
        time.sleep(0.005)
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    _, stderr = process.communicate(timeout=200)
    if process.returncode == 0:
        pytest.skip("the reader had read everything before it was killed")
    last = stderr.strip().splitlines()[-1]
    assert process.returncode == 2 and "Traceback" not in stderr
    assert last.startswith("error: step ") and "a reading process was ended from outside" in last
    kept = int((tmp_path / "x" / "checkpoints" / "latest").read_text()[5:13])
    assert kept == len(metrics.read_text().splitlines()) > 0
    resumed = run_script("train_clip.py", *command[2:], "--resume", "latest", "--workers", 0)
    assert resumed.returncode == 0 and f"continuing after step {kept}" in resumed.stderr, resumed.stderr[-2000:]


VANISH = """
import os, runpy, sys
from mmclip.training import trainer as training
real = training.Trainer._take
def take(self, batch, due):
    if self.step == 3:
        open(os.environ["SHARD"], "r+b").truncate(0)
    return real(self, batch, due)
training.Trainer._take = take
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_data_that_vanish_during_a_run_stop_it(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_data, tmp_path / "data")
    command = [sys.executable, "-c", VANISH, ROOT / "scripts" / "train_clip.py", "--train-data", tmp_path / "data",
               "--model", tiny_model, "--logs", tmp_path, "--name", "x", *COMMON, "--epochs", 100,
               "--val-data", "none"]  # fmt: skip
    environment = {**os.environ, "SHARD": str(tmp_path / "data" / "train" / "0.tar"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(c) for c in command], cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert last.startswith("error: step 103: no image could be read in 100 steps in a row; last: ") and "0.tar" in last
    assert (tmp_path / "x" / "checkpoints" / "step_00000003.pt").is_file()
