"""``mmclip train`` and ``mmclip train-text``: from a config to a trained, exported and evaluated model."""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from mmclip import distributed
from mmclip.commands.evaluate import print_report, print_zero_shot
from mmclip.config import TextTrainConfig, TrainConfig
from mmclip.data.image_text import skipped_line
from mmclip.distributed import fsdp
from mmclip.errors import UserError, printable
from mmclip.evaluation.results import RESULTS_FILE, START_FILE, Results, load_runs, save_results
from mmclip.io import json_text, lock_folder, remove_partials, require_run_folder, write_text_atomically
from mmclip.models.metadata import METADATA_FILE
from mmclip.reporting.summary import print_ending
from mmclip.reporting.table import Table, show, text_cell
from mmclip.training import checkpoint as checkpoints
from mmclip.training.clip_task import ClipTask
from mmclip.training.profiler import Measured, measure
from mmclip.training.text_task import TextTask
from mmclip.training.trainer import Trainer

MODEL_FOLDER, CONFIG_FILE = "model", "config.yaml"


def run(config: TrainConfig | TextTrainConfig) -> Path:
    """Train, export and evaluate; returns the run's folder.

    Raises:
        UserError: The run cannot start or cannot go on. One line.
        SystemExit: 128 and the signal's number, after which the run was saved.
    """
    device = distributed.start(config.device)
    with contextlib.ExitStack() as held:  # the folder's lock, too
        held.callback(distributed.stop)
        return _train(config, device, held)


def _train(config: TrainConfig | TextTrainConfig, device: torch.device, held: contextlib.ExitStack) -> Path:
    kind: Any = TextTask if isinstance(config, TextTrainConfig) else ClipTask
    default = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.loss}-{config.norm}-seed{config.seed}"
    folder = Path(config.logs) / distributed.gather_objects(config.name or default)[0]
    rank, ranks = distributed.world()
    if config.fsdp:
        fsdp.require_processes()
    if config.benchmark is None:
        distributed.on_rank_0(lambda: require_run_folder(folder, config.resume))
    checkpoint = checkpoints.find_checkpoint(config.resume, folder / "checkpoints") if config.resume else None
    state = checkpoints.load_checkpoint(checkpoint) if checkpoint else {}
    if checkpoint:
        checkpoints.check_settings(state, checkpoint, config, ranks)
    last = folder / (RESULTS_FILE if config.val_data else f"{MODEL_FOLDER}/{METADATA_FILE}")
    if isinstance(config, TextTrainConfig) and config.resume and not config.may_change and last.is_file():
        evaluation = f"scripts/evaluate_text.py --model {printable(folder)}"
        _say(f"{printable(folder)}: this run is finished; {evaluation} evaluates it on further data")
        return folder
    others = load_runs(getattr(config, "compare", None) or [])  # before the training: one of them may not be comparable
    data = kind.open_data(config)
    model = kind.load_model(config, device)

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(lock_folder(folder))
        remove_partials(folder)  # of a process that was killed
        encoder, locked = kind.trained(model)
        checkpoints.require_checkpoint_space(folder, encoder, locked, config.keep_checkpoints)

    if config.benchmark is None:
        distributed.on_rank_0(prepare)
    trainer = Trainer(kind.open(config, data, model, device), folder)
    if config.benchmark is not None:
        _benchmark(trainer, config.benchmark)
        return folder
    if checkpoint:
        trainer.resume(state, checkpoint)
        del state  # its tensors are copied
    if rank == 0:
        every = config.to_dict() | {"name": folder.name, "resume": None}
        write_text_atomically(folder / CONFIG_FILE, yaml.safe_dump(every, sort_keys=False))
        _introduce(trainer)
    if config.measure_start:
        _measure_start(trainer)
    if signum := trainer.train():
        done = (
            f"stopped by {signal.Signals(signum).name} after step {trainer.step} of {trainer.task.total_steps}, saved"
        )
        _say(f"{done}: continue with --name {printable(folder.name)} --resume latest")
        raise SystemExit(128 + signum)
    with fsdp.filled(trainer.task.network, trainer.task.encoder):
        if rank == 0:
            _finish(trainer, others)
    distributed.barrier()
    return folder


def _say(text: str) -> None:
    """Print a line on stderr, from rank 0 alone."""
    if distributed.world()[0] == 0:
        print(text, file=sys.stderr, flush=True)


def _introduce(trainer: Trainer) -> None:
    """Print what is about to happen, before the first step."""
    config, task = trainer.config, trainer.task
    lines = [f"{config.loss} loss, {config.norm} normalization -> {printable(trainer.folder)}", *task.introduction()]
    if trainer.step:
        lines.append(f"continuing after step {trainer.step}")
    elif config.resume:
        lines.append("no checkpoint yet: starting from the first step")
    trained = sum(p.numel() for p in task.encoder.parameters() if p.requires_grad) / 1e6
    steps = f"{task.total_steps} steps of {task.global_batch} on {task.device}"
    _say("\n".join([*lines, f"{printable(config.model)}: {trained:.2f} M trained parameters, {steps}"]))


def _measure_start(trainer: Trainer) -> None:
    """Write start.json before the first step; a run that goes on after it keeps what it has. Rank 0 works."""
    path = trainer.folder / START_FILE
    if trainer.step and not path.is_file():
        _say(f"no {START_FILE}: --measure-start came after step {trainer.step}")
    if trainer.step:
        return
    with fsdp.filled(trainer.task.network, trainer.task.encoder):
        if trainer.rank == 0:
            write_text_atomically(path, json_text(trainer.task.baseline(), indent=1))
            _say(f"before the first step: {printable(path)}")
    distributed.barrier()


def _say_skipped(trainer: Trainer) -> None:
    if trainer.task.bad_samples.reasons:
        _say(f"training data: {skipped_line(trainer.task.bad_samples.reasons)}")


def _finish(trainer: Trainer, others: dict[str, Results]) -> None:
    """Export, evaluate, save and print. Rank 0 only."""
    config, folder, name = trainer.config, trainer.folder, trainer.folder.name
    scoring = trainer.task.export(folder / MODEL_FOLDER, trainer.step)
    _say_skipped(trainer)
    _say(f"model: {printable(folder / MODEL_FOLDER)}{scoring}")
    results = None
    for place, results in trainer.evaluate():
        save_results(results, folder / place)
        if place:  # a further data set, of texts
            data, rates = results.json["data"], results.json["retrieval"]["q2d"].items()
            by = "  ".join(f"{scoring} {numbers['ndcg@10']:.4f}" for scoring, numbers in rates if "ndcg@10" in numbers)
            print(f"{printable(data['path'])} [{printable(data['split'])}] nDCG@10: {by}")
        else:
            start = folder / START_FILE
            before = json.loads(start.read_text(encoding="utf-8")) if start.is_file() else None
            print_ending({name: results, **others}, name, before, verbose=config.verbose)
            print_zero_shot(results)
        print(f"results: {printable(folder / place / RESULTS_FILE)}")
    if results is None:
        script = "evaluate_text.py" if isinstance(config, TextTrainConfig) else "evaluate.py"
        _say(f"no evaluation data: give --val-data, or evaluate later with scripts/{script}")
    elif isinstance(config, TrainConfig):
        if config.report:
            print_report(name, folder)
        if config.strict and trainer.monitors.raised:
            raise UserError(f"alarm (--strict): {next(iter(trainer.monitors.raised.values()))}")


def _benchmark(trainer: Trainer, steps: int) -> None:
    """--benchmark: numbers on stdout, after a signal those of the steps so far; no run folder is made."""
    measured, signum = measure(trainer, steps)
    if trainer.rank == 0 and measured:
        _show_benchmark(measured, trainer, steps)
    _say_skipped(trainer)
    if signum:
        done = f"with {measured.steps}" if measured else "before any"
        _say(f"stopped by {signal.Signals(signum).name} {done} of {steps} steps measured")
        raise SystemExit(128 + signum)


def _show_benchmark(measured: Measured, trainer: Trainer, wanted: int) -> None:
    """Print the numbers and a table of the phases: medians, and shares of the sum of all medians."""
    device, ranks = trainer.task.device, trainer.ranks

    def steps(taken: int, more: str = "") -> str:
        return f"{taken if taken == wanted else f'{taken} of {wanted}'} {more}step{'s' if wanted > 1 else ''}"

    dtype = "float32" if trainer.task.precision == "fp32" else "bfloat16"
    kind = "allocated on the GPU" if device.type == "cuda" else "resident, readers aside"
    print(
        f"{measured.per_second:,.1f} {trainer.task.unit}/s: {steps(measured.steps)} of {measured.samples:,.0f}, median "
        f"{1e3 * measured.seconds:,.1f} ms, {ranks} process{'es' if ranks > 1 else ''} on {device}\n"
        f"MFU {measured.mfu:.1%} in the median step: {measured.flops / 1e9:,.1f} GFLOP of the encoder a step and "
        f"process, forward and backward counted once, against {measured.rate / 1e9:,.0f} GFLOP/s of a {dtype} matrix "
        f"product measured here\npeak memory {measured.peak / 2**20:,.0f} MiB ({kind})"
    )
    timed = len(next(iter(measured.phases.values())))
    if not timed:
        print("where the time of a step goes is not measured: that needs further steps")
        return
    medians = {phase: statistics.median(times) for phase, times in measured.phases.items()}
    total = sum(medians.values())
    rows = [(p, [text_cell(f"{1e3 * x:,.2f}"), text_cell(f"{x / total:.0%}")]) for p, x in medians.items()]
    title = f"where {steps(timed, 'more ')} go, waiting for the device at each phase's end:"
    show([Table(title, ["phase of a step", "median ms", "share"], rows)])
