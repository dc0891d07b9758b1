"""A run from settings to results: opens data, builds the model, trains, exports and evaluates."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import yaml

from mmclip import checkpoints, distributed
from mmclip.build import build_model
from mmclip.config import TrainSettings
from mmclip.datasets import open_training
from mmclip.embeddings import Runner
from mmclip.errors import UsageError, one_line
from mmclip.eval_source import EvalSource
from mmclip.finish import finish
from mmclip.loader import steps_per_epoch
from mmclip.sources import Source
from mmclip.training import Trainer, seed_of


def run_name(settings: TrainSettings) -> str:
    return settings.name or f"{time.strftime('%Y%m%d-%H%M%S')}-{settings.loss}-{settings.norm}-seed{settings.seed}"


def open_folder(settings: TrainSettings) -> Path:
    """The run's folder. Errors: UsageError where it holds a run already and this is not its continuation."""
    folder = Path(settings.logs) / run_name(settings)
    mine = distributed.world()[0] == 0  # other ranks may look when rank 0 has begun to write
    if mine and settings.resume is None and folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} exists: choose another --name, or continue it with --resume latest")
    return folder


def train(settings: TrainSettings) -> Path:
    """Train, export and evaluate as the settings say; returns the run's folder. Errors: UsageError, one line."""
    device = distributed.start(settings.device)
    try:
        return _train(settings, device)
    finally:
        distributed.stop()


def _train(settings: TrainSettings, device: torch.device) -> Path:
    folder = open_folder(settings)
    checkpoint = checkpoints.find_checkpoint(settings.resume, folder / "checkpoints") if settings.resume else None
    torch.manual_seed(seed_of(settings.seed))
    data, val_data, distractors = open_training(settings)
    rank, ranks = distributed.world()
    steps_per_epoch(data, settings.batch_size, ranks, not settings.keep_last)  # refused before a model loads
    model = build_model(
        settings.model,
        settings.pretrained,
        settings.image_trunk,
        settings.text_trunk,
        settings.pretrained_image,
        settings.pretrained_text,
        settings.force_image_size,
        settings.force_context_length,
    )
    for side, locked in (("image", settings.lock_image), ("text", settings.lock_text)):
        if locked:
            model.towers.lock(side)
    model.towers.to(device)
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    runner = Runner(device, precision(settings, device), settings.batch_size, settings.workers, progress=rank == 0)
    cache_dir = Path(settings.cache_dir) if settings.cache_features else None
    source = Source.open(data, model, runner, cache_dir, "training")
    val_source = EvalSource.open(val_data, distractors, model, runner, cache_dir) if val_data else None
    trainer = Trainer(settings, folder, model, source, val_source, runner)
    if checkpoint is not None:
        trainer.resume(checkpoint)
    if rank == 0:
        checkpoints.write_text_atomically(folder / "config.yaml", yaml.safe_dump(settings.to_dict(), sort_keys=False))
        _introduce(trainer)
    trainer.train()
    if rank == 0:
        finish(trainer)
    distributed.barrier()
    return folder


def precision(settings: TrainSettings, device: torch.device) -> str:
    """'auto' resolved: bf16 autocast where CUDA makes it fast, float32 on a CPU, where it is six times slower."""
    if settings.precision == "auto":
        return "amp_bf16" if device.type == "cuda" else "fp32"
    return settings.precision


def _introduce(trainer: Trainer) -> None:
    """What is about to happen, in three lines, before the first step."""
    settings, data = trainer.settings, trainer.source.data
    trained = sum(p.numel() for p in trainer.towers.parameters() if p.requires_grad)
    val = trainer.val_source.main.data if trainer.val_source else None
    print(f"{settings.loss} loss, {settings.norm} normalization -> {trainer.folder}", file=sys.stderr)
    print(
        f"{len(data):,} images of {one_line(data.path)} [{data.split}], {trainer.batches.left_out} left out an epoch; "
        + (f"evaluation on {len(val):,} of {one_line(val.path)} [{val.split}]" if val else "no evaluation data"),
        file=sys.stderr,
    )
    print(
        f"{settings.model}: {trained / 1e6:.2f} M trained parameters, {trainer.total_steps} steps of "
        f"{settings.batch_size * trainer.ranks} on {trainer.device}",
        file=sys.stderr,
        flush=True,
    )
