"""--benchmark measures the run's own steps, accounts for all of their time, and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mmclip.commands import train as run
from mmclip.config import TrainConfig
from mmclip.data.shards import open_data
from mmclip.embeddings.encode import EncodeOptions
from mmclip.embeddings.features import FeatureSource
from mmclip.errors import UserError
from mmclip.models.factory import build_model
from mmclip.training import profiler
from mmclip.training.clip_task import ClipTask, build_loss
from mmclip.training.profiler import WARMUP, Clock, Measured
from mmclip.training.step import PHASES, TrainStep
from mmclip.training.trainer import Trainer
from tests.helpers.tiny import ROOT


def settings(data: Path, model: Path, logs: Path, **more: Any) -> TrainConfig:
    defaults = {"model": str(model), "train_data": str(data), "logs": str(logs), "batch_size": 16, "workers": 0,
                "device": "cpu", "name": "b", "warmup": 0, "aug_cfg": ["none=1"], "lr": 1e-3}  # fmt: skip
    return TrainConfig(**(defaults | more))


def trainer(of: TrainConfig, folder: Path) -> Trainer:
    torch.manual_seed(0)
    model = build_model(of.model)
    options = EncodeOptions(torch.device("cpu"), batch_size=of.batch_size, progress=False)
    return Trainer(ClipTask(of, model, build_loss(of, model), FeatureSource(open_data(of.train_data)), options), folder)


@pytest.mark.parametrize("accum_freq", [1, 2])
def test_parts_are_all_of_a_step_and_the_stepper_is_left_as_it_was(
    tiny_data: Path, tiny_model: Path, tmp_path: Path, accum_freq: int
) -> None:
    t = trainer(settings(tiny_data, tiny_model, tmp_path, accum_freq=accum_freq), tmp_path / "none")
    before = t.stepper.begin_phase
    found, signum = profiler.measure(t, 3)
    assert found is not None and signum == 0 and t.stepper.begin_phase is before
    assert t.step == WARMUP + 2 * 3 and found.samples == 16 * accum_freq
    assert set(found.phases) == set(PHASES) and all(len(times) == 3 for times in found.phases.values())
    assert all(min(times) > 0 for times in found.phases.values())
    assert 0 < found.mfu < 1.5 and found.peak > 2**26 and found.per_second > 0
    assert not (tmp_path / "none").exists() and profiler.matrix_rate(torch.device("cpu"), "fp32") > 1e8
    assert Measured(1, 8, 0.5, 16, {}, 3_000, 12_000, 1).mfu == 0.5


def test_a_clock_charges_each_second_to_one_phase() -> None:
    start = time.perf_counter()
    clock = Clock(torch.device("cpu"))
    clock("loss")
    time.sleep(0.01)
    clock("optimizer")
    clock("data wait")
    assert sum(clock.spent.values()) <= time.perf_counter() - start
    assert clock.spent["loss"] >= 0.01 > clock.spent["optimizer"] >= 0


def test_flops_are_the_matrix_products_of_forward_and_backward(
    tiny_data: Path, tiny_model: Path, tmp_path: Path
) -> None:
    t = trainer(settings(tiny_data, tiny_model, tmp_path), tmp_path)
    batch = next(iter(t.task.batches(0)))
    whole = profiler.count_flops(t, batch)
    halves = sum(profiler.count_flops(t, part) for part in batch.split(8))
    assert whole == halves
    assert all(p.grad is None for p in t.task.towers.parameters())
    t.task.towers.lock("image")
    t.task.towers.lock("text")
    heads = 2 * 16 * (64 + 32) * 16  # B x widths x D, forward; the same again for the weights' gradient
    trunks = profiler.count_flops(t, batch) - 2 * heads
    assert 2 * trunks < whole < 4 * trunks + 3 * heads, "a backward pass costs about two forward ones"


def test_it_prints_numbers_and_pictures_that_cannot_be_read_and_leaves_no_folder(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["filepath\ttitle"]
    for i in range(40):
        Image.new("RGB", (32, 32)).save(tmp_path / f"{i}.png")
        rows.append(f"{i}.png\tpicture {i}")
    (tmp_path / "7.png").write_bytes((tmp_path / "7.png").read_bytes()[:50])
    (tmp_path / "x.csv").write_text("\n".join(rows), encoding="utf-8")
    run.run(settings(tmp_path / "x.csv", tiny_model, tmp_path / "logs", benchmark=2))
    out, err = capsys.readouterr()
    assert re.search(r"^training data: 1 sample cannot be used: .*7\.png: ", err, re.MULTILINE)
    assert re.search(r"[\d.,]+ samples/s: 2 steps of 1[56], median [\d.,]+ ms, 1 process on cpu", out)
    assert re.search(r"MFU [\d.]+% in the median step: [\d.]+ GFLOP", out) and "peak memory" in out
    assert all(re.search(rf"{part} +[\d.,]+ +\d+%", out) for part in PHASES)
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("signum", "at", "measured", "parts"),
    [
        (signal.SIGINT, 1, 0, 0),
        (signal.SIGTERM, WARMUP, 0, 0),
        (signal.SIGINT, WARMUP + 1, 1, 0),
        (signal.SIGTERM, WARMUP + 3, 3, 0),
        (signal.SIGINT, WARMUP + 4 + 2, 4, 2),
        (signal.SIGTERM, WARMUP + 8, 4, 4),
    ],
)
def test_a_signal_ends_it_with_the_steps_so_far(
    tiny_data: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, signum: signal.Signals, at: int, measured: int, parts: int,
) -> None:  # fmt: skip
    stock, calls = TrainStep.run, list[int]()

    def take(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            signal.raise_signal(signum)
        return stock(*args)

    monkeypatch.setattr(TrainStep, "run", take)
    monkeypatch.setattr(profiler, "matrix_rate", lambda *_: 1e10)  # which takes seconds
    with pytest.raises(SystemExit) as left:
        run.run(settings(tiny_data, tiny_model, tmp_path / "logs", benchmark=4))
    assert left.value.code == 128 + signum and len(calls) == at, "no step after the one that a signal came in"
    out, err = capsys.readouterr()
    done = f"with {measured}" if measured else "before any"
    assert err.splitlines()[-1] == f"stopped by {signum.name} {done} of 4 steps measured"
    steps = {0: None, 4: "4 steps"}.get(measured, f"{measured} of 4 steps")
    assert (f" samples/s: {steps} of 16, median" in out) if steps else out == ""
    more = {0: None, 4: "where 4 more steps go"}.get(parts, f"where {parts} of 4 more steps go")
    assert (more in out and "data wait" in out) if more else "data wait" not in out
    assert ("is not measured" in out) == (measured > 0 and not parts)


def test_a_signal_to_the_whole_group_ends_it_too(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    code = (
        "import os, runpy, signal, sys\nfrom mmclip.training.step import TrainStep\nstock, calls = TrainStep.run, []\n"
        "def take(*a):\n    calls.append(1)\n    if len(calls) == 9: os.killpg(0, signal.SIGTERM)\n"
        "    return stock(*a)\nTrainStep.run = take\nsys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    flags = ["--train-data", tiny_data, "--model", tiny_model, "--logs", tmp_path, "--batch-size", 16, "--workers", 2,
             "--device", "cpu", "--benchmark", 500]  # fmt: skip
    command = [sys.executable, "-c", code, ROOT / "scripts" / "train_clip.py", *flags]
    done = subprocess.run([str(c) for c in command], cwd=ROOT, capture_output=True, text=True, check=False,
                          start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == 143 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert re.search(r"samples/s: \d of 500 steps of 16", done.stdout), done.stdout


def test_a_loss_that_is_not_finite_is_one_line(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    t = trainer(settings(tiny_data, tiny_model, tmp_path), tmp_path)
    with torch.no_grad():
        t.task.towers.clip.text_projection.fill_(torch.nan)
    with pytest.raises(UserError, match="--benchmark: step 1: the loss is nan"):
        profiler.measure(t, 1)
