"""The benchmarks of training and embedding do the same work on both sides, and notice where they do not."""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from mmclip.config import TrainConfig, parse
from mmclip.data.shards import open_data

NUMBER = r"\d+\.\d\d"


@pytest.fixture
def benchmark(root, monkeypatch):
    """Imports a benchmark as it is imported beside the others."""
    monkeypatch.syspath_prepend(str(root / "benchmarks"))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def run(root: Path, name: str, *flags: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "benchmarks" / name), *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)


def test_embedding_agrees_with_open_clip_and_ends_with_the_ratio(benchmark, root, tiny_data, tiny_model, tmp_path):
    flags = ["--quick", "--data", tiny_data, "--model", tiny_model, "--workers", 1, "--threads", 1, "--batch-size", 9]
    done = run(root, "embedding.py", *flags, "--csv", tmp_path / "rows.csv")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "the vectors agree" in lines
    assert "24 images and 120 captions" in lines[1]
    ratio = rf"ratio: ours {NUMBER} times open_clip's \({NUMBER} by CPU time\); images {NUMBER}, captions {NUMBER}"
    assert re.fullmatch(ratio, lines[-1])
    _, rows = benchmark("harness").read_csv(tmp_path / "rows.csv")
    assert [row["contestant"] for row in rows] == ["ours", "open_clip"]
    assert all(float(row[f"{side}_seconds"]) > 0 for row in rows for side in ("image", "text"))


@pytest.mark.parametrize(("off", "code", "said"), [(0.0, 0, "the vectors agree"), (0.01, 1, "DO NOT AGREE")])
def test_embedding_fails_where_vectors_differ(
    benchmark, tiny_data, tiny_model, tmp_path, monkeypatch, capsys, off, code, said
):
    embedding = benchmark("embedding")

    def encode(script: str, python: str, told: dict, threads: int) -> dict:
        vectors = {"image": torch.ones(4, 3), "text": torch.ones(20, 3)}
        vectors["text"][7, 2] += off if told["contestant"] == "ours" else 0
        save_file(vectors, told["output"])
        return dict.fromkeys(embedding.MEASURED, 1.0)

    monkeypatch.setattr(embedding.m, "in_a_process", encode)
    args = embedding.parser().parse_args(["--data", str(tiny_data), "--model", str(tiny_model), "--images", "4"])
    embedding.m.settle(args)
    assert embedding.compete(args, tmp_path) == code
    assert said in capsys.readouterr().out


def test_training_does_the_same_work_as_open_clip_train_and_ends_with_the_ratio(
    benchmark, root, tiny_data, tiny_model, tmp_path
):
    flags = ["--quick", "--data", tiny_data, "--model", tiny_model, "--workers", 1, "--threads", 1, "--batch-size", 16]
    done = run(root, "training.py", *flags, "--venv", tmp_path / "venv", "--csv", tmp_path / "rows.csv")
    if "requirements" in done.stderr and "cannot be installed" in done.stderr:
        pytest.skip(f"PyPI cannot be reached: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    losses = [[float(x) for x in line.rpartition(": ")[2].split(", ")] for line in lines if "losses of 3" in line]
    assert len(losses) == 2 and losses[0] == pytest.approx(losses[1], abs=2e-3)
    assert len(set(losses[0])) == 3  # weights move
    assert lines[-2].endswith("apart: the same work")
    assert re.fullmatch(rf"ratio: ours {NUMBER} times open_clip_train's \({NUMBER} by CPU time\)", lines[-1])
    assert [line.partition(":")[0] for line in lines if "--pretrained" in line] == ["ours", "open_clip_train"]
    _, rows = benchmark("harness").read_csv(tmp_path / "rows.csv")
    assert [row["contestant"] for row in rows] == ["ours", "open_clip_train"]


def test_training_fails_where_first_losses_differ(benchmark, tiny_data, tiny_model, tmp_path, monkeypatch, capsys):
    training = benchmark("training")

    def measured(args: argparse.Namespace, contestant: str, told: dict, python: str, check: bool) -> dict:
        first = 2.0 + 2e-4 * (contestant == "ours")
        return {"samples_per_second": 2.0, "cpu_per_step": 1.0, "losses": [first, 1.0, 0.5], "flags": []}

    monkeypatch.setattr(training, "measured", measured)
    monkeypatch.setattr(training, "make_venv", lambda folder: sys.executable)
    args = training.parser().parse_args(["--data", str(tiny_data), "--model", str(tiny_model), "--batch-size", "8"])
    training.m.settle(args)
    assert training.compete(args, tmp_path) == 1
    assert "NOT THE SAME WORK" in capsys.readouterr().out


def test_training_says_what_pip_says_where_it_cannot_install(benchmark, tmp_path, monkeypatch):
    training = benchmark("training")
    calls = []

    def call(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        (tmp_path / "venv/lib").mkdir(parents=True, exist_ok=True)
        return subprocess.CompletedProcess(command, int("pip" in command), "", "a\nERROR: no network\n")

    monkeypatch.setattr(training.subprocess, "run", call)
    monkeypatch.setattr(training.Path, "write_text", lambda *_, **__: None)
    with pytest.raises(SystemExit, match=r"open_clip_train's requirements \(.*webdataset.*ERROR: no network"):
        training.make_venv(tmp_path / "venv")
    assert any(word.startswith("webdataset") for word in calls[-1])


def test_timer_counts_the_steps_after_the_warm_up(benchmark, monkeypatch):
    training = benchmark("training")
    ticks = iter([(10.0, 1.0), (16.0, 5.0)])
    monkeypatch.setattr(training.m, "clocks", lambda: next(ticks))
    timer = training.Timer(2, 3, "cpu")
    for _ in range(4):
        timer()
    with pytest.raises(training.Enough):
        timer()
    assert timer.found == {"seconds": 6.0, "cpu": 4.0}


def test_both_layouts_hold_the_same_pictures_and_captions(benchmark, tiny_data, tmp_path):
    measuring = benchmark("side_by_side")
    found = measuring.export(str(tiny_data), "test", "eval", 10, tmp_path / "data", 2, 3)
    assert (found["images"], found["captions"]) == (10, 20)
    whole, files, shards = open_data(str(tiny_data), "test"), open_data(found["csv"]), open_data(found["tar"])
    assert files.captions == shards.captions == [c[:2] for c in whole.captions[:10]]
    for row in range(10):
        picture = whole.read_image(row).tobytes()
        assert files.read_image(row).tobytes() == picture == shards.read_image(row).tobytes()


def test_clocks_count_the_work_of_readers_that_live(benchmark):
    measuring = benchmark("side_by_side")
    code = "x = 0\nwhile True: x += 1"
    reader = multiprocessing.get_context("spawn").Process(target=exec, args=(code,))
    reader.start()
    try:
        before = measuring.clocks()[1]
        for _ in range(100):
            reader.join(0.1)
            if measuring.clocks()[1] > before + 0.3:
                break
        assert measuring.clocks()[1] > before + 0.3
    finally:
        reader.kill()
        reader.join()


def test_our_flags_ask_for_the_loss_and_the_optimizer_that_the_other_side_has(benchmark, tiny_model, tmp_path):
    training = benchmark("training")
    (tmp_path / "w.safetensors").touch()
    told = {"batch_size": 8, "workers": 1, "precision": "fp32", "device": "cpu", "epochs": 2, "logs": str(tmp_path)}
    told |= {"warmup": 3, "layout": "csv", "csv": "x.csv", "check": False, "config": str(tiny_model)}
    flags, _ = training.ours(told | {"weights": str(tmp_path / "w.safetensors")})
    settings = parse(TrainConfig, flags)
    assert {name: getattr(settings, name.replace("-", "_")) for name in training.OPTIMIZER} == training.OPTIMIZER
    assert (settings.loss, settings.norm, settings.positives) == ("sym", "cosine", "none")
    assert (settings.warmup, settings.val_data, settings.dataset_type, settings.workers) == (3, "none", "csv", 1)
