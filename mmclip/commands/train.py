"""A run from settings to results: opens data, builds the model, trains, exports and evaluates."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import torch
import yaml

from mmclip import distributed
from mmclip.config import TrainConfig
from mmclip.config.model_config import export_folder
from mmclip.data.datasets import open_training
from mmclip.data.image_text import ImageTextData, by_key, skipped_line
from mmclip.data.loading import steps_per_epoch
from mmclip.distributed import fsdp as sharding
from mmclip.embeddings.encode import Runner
from mmclip.embeddings.features import Source
from mmclip.errors import printable
from mmclip.evaluation.eval_set import EvalSource
from mmclip.evaluation.runs import load_runs
from mmclip.evaluation.zero_shot import ZeroShot, open_classes
from mmclip.io import lock_folder, remove_partials, require_run_folder, write_text_atomically
from mmclip.losses import schedule as curriculum
from mmclip.models import metadata
from mmclip.models.factory import build_model
from mmclip.training import checkpoint as checkpoints
from mmclip.training import profiler as step_timing
from mmclip.training import resume
from mmclip.training.finish import finish
from mmclip.training.optimizer import steps_in_all
from mmclip.training.skipped import Skipped
from mmclip.training.start import measure_start
from mmclip.training.step import seed_of
from mmclip.training.trainer import Trainer


def run_name(settings: TrainConfig) -> str:
    return settings.name or f"{time.strftime('%Y%m%d-%H%M%S')}-{settings.loss}-{settings.norm}-seed{settings.seed}"


def run(settings: TrainConfig) -> Path:
    """Train, export and evaluate as the settings say; returns the run's folder. Errors: UserError, one line."""
    device = distributed.start(settings.device)
    try:
        return _train(settings, device)
    finally:
        distributed.stop()


def _train(settings: TrainConfig, device: torch.device) -> Path:
    folder = Path(settings.logs) / run_name(settings)
    rank, ranks = distributed.world()
    if settings.fsdp:
        sharding.require_processes()
    if settings.benchmark is None:
        distributed.on_rank_0(lambda: require_run_folder(folder, settings.resume))
    checkpoint = checkpoints.find_checkpoint(settings.resume, folder / "checkpoints") if settings.resume else None
    state = checkpoints.load_checkpoint(checkpoint) if checkpoint else {}
    if checkpoint:
        resume.check(state, checkpoint, settings.to_dict(), ranks)
    others = load_runs(settings.compare or [])  # a run that cannot be compared is told now, not after the training
    torch.manual_seed(seed_of(settings.seed))
    data, val_data, distractors = open_training(settings)
    classes = (
        open_classes(settings.zeroshot_data, settings.zeroshot_split) if settings.zeroshot_data is not None else None
    )
    # all refuse before a model loads
    Skipped(settings.max_bad_samples, by_key(data.skipped))
    per_epoch = steps_per_epoch(
        data, settings.batch_size, ranks, not settings.keep_last, settings.accum_freq, settings.loss_batch_size
    )
    curriculum.check(settings, steps_in_all(settings, per_epoch))
    model = build_model(
        f"local-dir:{export_folder(settings.init_from)}" if settings.init_from else settings.model,
        settings.pretrained,
        settings.image_trunk,
        settings.text_trunk,
        settings.pretrained_image,
        settings.pretrained_text,
        settings.force_image_size,
        settings.force_context_length,
    )
    model.initial = metadata.initial_run(settings.init_from) if settings.init_from else {}
    for side, locked in (("image", settings.lock_image), ("text", settings.lock_text)):
        if locked:
            model.towers.lock(side)
    model.towers.to(device)
    lock = None

    def prepare() -> None:
        nonlocal lock
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder)  # held as long as this function runs
        remove_partials(folder)  # of a process that was killed
        checkpoints.require_checkpoint_space(folder, model, settings.keep_checkpoints)

    if settings.benchmark is None:
        distributed.on_rank_0(prepare)
    runner = Runner(device, precision(settings, device), settings.batch_size, settings.workers, progress=rank == 0)
    cache_dir = Path(settings.cache_dir) if settings.cache_features else None
    source = Source.open(data, model, runner, cache_dir, "training")
    if settings.benchmark is not None:
        _benchmark(Trainer(settings, folder, model, source, None, runner), settings.benchmark)
        return folder
    val_source = EvalSource.open(val_data, distractors, model, runner, cache_dir) if val_data else None
    zero_shot = ZeroShot.open(classes, model, runner, cache_dir) if classes else None
    trainer = Trainer(settings, folder, model, source, val_source, runner)
    if checkpoint:
        trainer.resume(state, checkpoint)
        del state  # its tensors are copied
    if rank == 0:
        write_text_atomically(folder / "config.yaml", yaml.safe_dump(settings.to_dict(), sort_keys=False))
        _introduce(trainer)
    if settings.measure_start:
        with sharding.filled(trainer.model.towers, trainer.towers):
            measure_start(trainer, zero_shot)
    signum = trainer.train()
    if signum:
        if rank == 0:
            print(
                f"stopped by {signal.Signals(signum).name} after step {trainer.step} of {trainer.total_steps}, saved: "
                f"continue with --name {printable(folder.name)} --resume latest",
                file=sys.stderr,
            )
        raise SystemExit(128 + signum)
    with sharding.filled(trainer.model.towers, trainer.towers):
        if rank == 0:
            finish(trainer, others, zero_shot)
    distributed.barrier()
    return folder


def _benchmark(trainer: Trainer, steps: int) -> None:
    """--benchmark: numbers on stdout, after a signal those of the steps so far; of the run's folder nothing is made."""
    found, signum = step_timing.measure(trainer, steps)
    if trainer.rank == 0 and found:
        step_timing.show(found, trainer, steps)
    if trainer.rank == 0 and trainer.skipped.why:
        print(f"training data: {skipped_line(trainer.skipped.why)}", file=sys.stderr)
    if signum:
        if trainer.rank == 0:
            done = f"with {found.steps}" if found else "before any"
            print(f"stopped by {signal.Signals(signum).name} {done} of {steps} steps measured", file=sys.stderr)
        raise SystemExit(128 + signum)


def precision(settings: TrainConfig, device: torch.device) -> str:
    """'auto' resolved: bf16 autocast where CUDA makes it fast, float32 on a CPU, where it is six times slower."""
    if settings.precision == "auto":
        return "amp_bf16" if device.type == "cuda" else "fp32"
    return settings.precision


def _introduce(trainer: Trainer) -> None:
    """What is about to happen, in three lines, before the first step."""
    settings, data = trainer.settings, trainer.source.data
    trained = sum(p.numel() for p in trainer.towers.parameters() if p.requires_grad)
    val = trainer.val_source.main.data if trainer.val_source else None
    print(f"{settings.loss} loss, {settings.norm} normalization -> {printable(trainer.folder)}", file=sys.stderr)
    evaluated = f"evaluation on {_named(val)}" if val else "no evaluation data"
    print(f"{_named(data)}, {trainer.batches.left_out} left out an epoch; {evaluated}", file=sys.stderr)
    if data.permuted:
        print("warning: the pairs are permuted (--permute-pairs): nothing true can be learned", file=sys.stderr)
    if trainer.skipped.why:
        print(skipped_line(trainer.skipped.why), file=sys.stderr)
    if trainer.step:
        print(f"continuing after step {trainer.step}", file=sys.stderr)
    elif settings.resume:
        print("no checkpoint yet: starting from the first step", file=sys.stderr)
    print(
        f"{printable(settings.model)}: {trained / 1e6:.2f} M trained parameters, {trainer.total_steps} steps of "
        f"{trainer.batches.joint} on {trainer.device}",
        file=sys.stderr,
        flush=True,
    )


def _named(data: ImageTextData) -> str:
    return f"{len(data):,} images of {printable(data.path)} [{printable(data.split)}]"
