"""Projection heads on two real frozen trunks and real photos: every loss with every normalization, and the export."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from shlex import split
from typing import Any

import pytest
import torch

from mmclip import load_model
from mmclip.config import CONFIGS, TrainConfig, read_yaml, values_of
from mmclip.data.shards import open_data
from mmclip.embeddings.encode import EncodeOptions
from mmclip.embeddings.features import FeatureSource
from mmclip.models.factory import ClipModel, build_model
from mmclip.roles import LOSS_WEIGHTS
from mmclip.similarity import Normalization
from mmclip.training.clip_task import ClipTask, build_loss
from mmclip.training.step import TrainStep, seed_of
from tests.helpers.tiny import run_script

pytestmark = pytest.mark.real
IMAGES = 384
OPTIONS = EncodeOptions(torch.device("cpu"), progress=False)


@pytest.fixture(scope="module")
def settings(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    os.environ["MMCLIP_SHARED"] = str(shared)
    values = values_of(TrainConfig, read_yaml(CONFIGS / "flickr8k_heads.yaml"))
    cache = tmp_path_factory.mktemp("cache")
    return {**values, "batch_size": 64, "train_num_samples": IMAGES, "workers": 0, "cache_dir": str(cache)}


def heads(config: TrainConfig) -> ClipModel:
    """The two trunks, locked; their float16 weights became float32."""
    torch.manual_seed(seed_of(config.seed))
    model = build_model(config.model, image_trunk=config.image_trunk, text_trunk=config.text_trunk)
    assert {p.dtype for p in model.towers.parameters()} == {torch.float32}
    for side in ("image", "text"):
        model.towers.lock(side)
    return model


@pytest.fixture(scope="module")
def cached(settings: dict[str, Any]) -> FeatureSource:
    """The trunks run once; every run below trains from their outputs."""
    config = TrainConfig(**settings)
    data = open_data(config.train_data).subset(range(IMAGES))
    return FeatureSource.open(data, heads(config), OPTIONS, Path(config.cache_dir), "test")


@pytest.mark.parametrize("norm", list(Normalization))
@pytest.mark.parametrize("loss", list(LOSS_WEIGHTS))
def test_all_fifteen_pairs_train_with_finite_falling_losses(
    settings: dict[str, Any], cached: FeatureSource, loss: str, norm: Normalization
) -> None:
    config = TrainConfig(**{**settings, "loss": loss, "norm": norm.value, "epochs": 8})
    model = heads(config)
    task = ClipTask(config, model, build_loss(config, model), cached, OPTIONS)
    step, losses = TrainStep(task), list[float]()
    for epoch in range(config.epochs):
        for batch in task.batches(epoch):
            losses.append(step.run(batch, len(losses), log=True)["loss"])
    assert all(math.isfinite(v) for v in losses)
    assert losses[0] > 0.7 * math.log(64), "it starts near chance, not saturated"
    assert sum(losses[-6:]) < 0.75 * sum(losses[:6])


def test_export_with_a_hugging_face_tower_is_whole(
    settings: dict[str, Any], shared: Path, tmp_path: Path, cached: FeatureSource
) -> None:
    flags = "--config flickr8k_heads --max-steps 3 --warmup 1 --batch-size 64 --norm learned --val-data none --name run"
    some = ["--train-num-samples", IMAGES, "--cache-dir", settings["cache_dir"], "--logs", tmp_path, "--device", "cpu"]
    done = run_script("train_clip.py", *flags.split(), *some, MMCLIP_SHARED=str(shared))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "trunk (1/" not in done.stderr, "the cache of the same model, weights, data and transform was used"
    folder = tmp_path / "elsewhere"
    shutil.move(tmp_path / "run" / "model", folder)
    shutil.rmtree(tmp_path / "run")
    model = load_model(str(folder))
    assert 0.4 < model.metadata["gamma_q"] < 0.6
    captions = ["a dog runs", "two people on a beach at sunset"]
    ours = model.towers(text=model.tokenize(captions))[1]
    torch.save(ours.detach(), tmp_path / "ours.pt")
    # Stock open_clip finds the text tower's config where it is started: inside the folder.
    code = (
        "import torch, open_clip\n"
        f"m = open_clip.create_model('local-dir:{folder}').eval(); t = open_clip.get_tokenizer('local-dir:{folder}')\n"
        f"f = m.encode_text(t({captions!r}))\n"
        f"torch.testing.assert_close(f, torch.load({str(tmp_path / 'ours.pt')!r}))\n"
    )
    stock = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False,
                           env={**os.environ, "HF_HUB_OFFLINE": "1"})  # fmt: skip
    assert stock.returncode == 0, stock.stderr[-2000:]


def test_unlocked_towers_train_on_real_photos(shared: Path, tmp_path: Path) -> None:
    flags = split(
        "--config flickr8k_scratch --max-steps 4 --warmup 1 --batch-size 16 --val-data none --workers 0 --name run "
        "--loss asym-i2t --norm qnorm --device cpu --logs"
    )
    done = run_script("train_clip.py", *flags, tmp_path, MMCLIP_SHARED=str(shared))
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "run" / "model" / "open_clip_model.safetensors").is_file()
