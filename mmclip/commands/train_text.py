"""A text run from settings to results: opens data, loads the model, trains, saves and evaluates."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from mmclip import distributed
from mmclip.config import TextTrainConfig
from mmclip.data.beir import BeirCollection, evaluation_name, folder_and_split, open_beir, require_beir
from mmclip.data.text_pairs import TextPairs, hold_out
from mmclip.errors import UserError, printable
from mmclip.evaluation.results import RESULTS_FILE
from mmclip.io import lock_folder, remove_partials, require_run_folder, require_space, write_text_atomically
from mmclip.losses.sentence_transformers import CachedRoleRankingLoss, RoleRankingLoss
from mmclip.models.metadata import METADATA_FILE
from mmclip.models.text_encoder import TextEncoder, open_text_model
from mmclip.roles import direction_weights
from mmclip.training.text_finish import MODEL_FOLDER, Evaluations, finish, measure_start
from mmclip.training.text_trainer import KEPT, TextTrainer, checkpoints
from mmclip.training.text_training import Run

CONFIG_FILE = "config.yaml"
# Settings that may differ between a run and its continuation: they change what is written or how fast, not the weights.
FREE_TO_CHANGE = {"resume", "verbose", "logs", "name", "val_data", "watch_steps", "save_steps", "log_every_n_steps", "strict",
                  "measure_start", "encode_batch_size", "device", "grad_checkpointing"}  # fmt: skip


@dataclass
class TextRunData:
    """What is trained on, what is watched, what is evaluated."""

    pairs: TextPairs
    held_out: BeirCollection | None
    val: list[BeirCollection]


def run(settings: TextTrainConfig) -> Path:
    """Train, save and evaluate as the settings say; returns the run's folder. Errors: UserError, one line."""
    device = distributed.start(settings.device)
    if device.type == "cuda" and device.index and distributed.world()[1] == 1:
        raise UserError(
            f"--device {settings.device}: the trainer takes the first device that it sees; set CUDA_VISIBLE_DEVICES to "
            "choose one"
        )
    try:
        with contextlib.ExitStack() as held:  # the folder's lock
            return _train(settings, device, held)
    finally:
        distributed.stop()


def run_name(settings: TextTrainConfig) -> str:
    return settings.name or f"{time.strftime('%Y%m%d-%H%M%S')}-{settings.loss}-{settings.norm}-seed{settings.seed}"


def is_finished(settings: TextTrainConfig, folder: Path) -> bool:
    return (folder / (RESULTS_FILE if settings.val_data else f"{MODEL_FOLDER}/{METADATA_FILE}")).is_file()


def _train(settings: TextTrainConfig, device: torch.device, held: contextlib.ExitStack) -> Path:
    folder = Path(settings.logs) / distributed.gather_objects(run_name(settings))[0]
    rank, ranks = distributed.world()
    distributed.on_rank_0(lambda: require_run_folder(folder, settings.resume))
    if settings.resume:
        check_settings(folder / CONFIG_FILE, settings.to_dict())
        if is_finished(settings, folder):
            if rank == 0:
                print(
                    f"{printable(folder)}: this run is finished; scripts/evaluate_text.py --model {printable(folder)} "
                    "evaluates it on further data",
                    file=sys.stderr,
                )
            return folder
    data = open_data(settings, ranks)
    model = open_text_model(settings, device, settings.keep_normalize)

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if (lock := lock_folder(folder)) is not None:
            held.enter_context(lock)
        for place in (folder, folder / "checkpoints"):
            remove_partials(place)  # of a process that was killed
        weights = sum(t.numel() * t.element_size() for t in model.encoder.state_dict().values())
        left = max(KEPT + 1 - len(checkpoints(folder / "checkpoints")), 1)
        require_space(folder, 3 * weights * left + weights, 2 * weights, "the run (its checkpoints, and the model)",
                      "choose other --logs")  # fmt: skip

    distributed.on_rank_0(prepare)
    there = checkpoints(folder / "checkpoints") if settings.resume else []
    loss = build_loss(settings, model, data.pairs, ranks).to(device)
    per_epoch = len(data.pairs) // settings.batch_size // ranks
    total = min(settings.epochs * per_epoch, settings.max_steps or settings.epochs * per_epoch)
    trainer = TextTrainer(settings, model, loss, data.pairs.dataset(), folder / "checkpoints", total, device)
    run = Run(settings, folder, model, trainer, data.held_out, per_epoch, there[-1] if there else None,
              data.pairs.n_negatives)  # fmt: skip
    if rank == 0:
        every = settings.to_dict() | {"name": folder.name, "resume": None}
        write_text_atomically(folder / CONFIG_FILE, yaml.safe_dump(every, sort_keys=False))
        _introduce(settings, run, data)
    evaluations = Evaluations(settings, model)
    if settings.measure_start and rank == 0:
        measure_start(run, data.pairs, data.val, evaluations)
    distributed.barrier()
    signum = run.train()
    if signum:
        if rank == 0:
            print(
                f"stopped by {signal.Signals(signum).name} after step {run.step} of {run.total}, saved: continue with "
                f"--config {printable(folder / CONFIG_FILE)} --resume latest",
                file=sys.stderr,
            )
        raise SystemExit(128 + signum)
    if rank == 0:
        finish(run, data.pairs, data.val, evaluations)
    distributed.barrier()
    return folder


def check_settings(path: Path, now: dict[str, Any]) -> None:
    """Errors: UserError naming each setting that is not the run's."""
    try:
        before = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        before = None
    if not isinstance(before, dict):
        raise UserError(f"--resume latest: {printable(path)}: not the settings of a run")
    changed = [k for k in now if k not in FREE_TO_CHANGE and before.get(k) != now[k]]
    if changed:
        told = ", ".join(f"{k} was {printable(before.get(k), 60)}, is {printable(now[k], 60)}" for k in changed)
        raise UserError(f"--resume latest: other settings than the run's: {told}")


def open_data(settings: TextTrainConfig, ranks: int) -> TextRunData:
    """All data, so that what is wrong with them is told before a model loads. Errors: UserError."""
    places = [folder_and_split(text) for text in settings.val_data or []]
    for root, split in places:
        require_beir(root, split)
    names = [evaluation_name(root, split) for root, split in places]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise UserError(f"--val-data: {printable(twice)} is named twice; each needs a folder name of its own")
    pairs, held_out = hold_out(str(settings.train_data), settings.train_split, settings.watch_queries, settings.seed)
    if settings.train_fraction < 1:
        pairs = pairs.take_fraction(settings.train_fraction, settings.seed)
    if len(pairs) < settings.batch_size * ranks:
        raise UserError(
            f"--batch-size {settings.batch_size}{f' on {ranks} processes' if ranks > 1 else ''}: there are only "
            f"{len(pairs)} training pairs in {printable(settings.train_data)}; a smaller batch is needed"
        )
    return TextRunData(pairs, held_out, [open_beir(root, split) for root, split in places])


def build_loss(settings: TextTrainConfig, model: TextEncoder, pairs: TextPairs, ranks: int) -> RoleRankingLoss:
    how: dict[str, Any] = {
        "weights": direction_weights(settings.loss, settings.q2d_weight, text=True),
        "norm": settings.norm,
        "positives": settings.positives,
        "scale_init": settings.logit_scale_init,
        "scale_max": settings.logit_scale_max,
        "learn_scale": settings.learn_scale,
        "gamma_init": settings.gamma_init,
        "focal": settings.focal,
        "norm_drift": settings.norm_drift,
        "relevant": torch.from_numpy(pairs.relevant),
        "gather_across_devices": ranks > 1,
    }
    if settings.mini_batch_size is None:
        return RoleRankingLoss(model.encoder, **how)
    return CachedRoleRankingLoss(model.encoder, **how, mini_batch_size=settings.mini_batch_size)


def _introduce(settings: TextTrainConfig, run: Run, data: TextRunData) -> None:
    """What is about to happen, before the first step."""
    model, said = run.model, [f"{settings.loss} loss, {settings.norm} normalization -> {printable(run.folder)}"]
    watched = f"{len(data.held_out.queries)} queries held out and watched" if data.held_out else "no queries watched"
    said.append(f"{len(data.pairs):,} training pairs of {printable(settings.train_data)}; {watched}")
    said += [printable(note) for note in data.pairs.notes]
    said += [f"{printable(c.path)} [{printable(c.split)}]: {printable(note)}" for c in data.val for note in c.notes]
    if model.removed:
        rows = model.encode(data.pairs.dataset()[:64]["positive"], "document", settings.encode_batch_size, False)
        length = float(rows.norm(dim=1).mean())
        said.append(f"removed {', '.join(model.removed)}: vectors are raw, mean length of a document {length:.3g}")
    lengths = ", ".join(f"{role} {model.length_of(role)} tokens" for role in ("query", "document"))
    trained = sum(p.numel() for p in model.encoder.parameters() if p.requires_grad)
    if run.step:
        said.append(f"continuing after step {run.step}")
    elif settings.resume:
        said.append("no checkpoint yet: starting from the first step")
    said.append(f"{printable(model.name)}: {trained / 1e6:.2f} M trained parameters, {lengths}; {run.total} steps of "
                f"{settings.batch_size * run.ranks} pairs on {run.trainer.args.device}")  # fmt: skip
    print("\n".join(said), file=sys.stderr, flush=True)
