"""Whether a checkpoint continues this very run, and taking it in. Nothing of a checkpoint is believed unchecked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmclip.config import TrainConfig
from mmclip.config.clip import CHANGEABLE
from mmclip.distributed.fsdp import shared_out
from mmclip.errors import UserError, printable
from mmclip.losses.contrastive import ContrastiveLoss
from mmclip.models.towers import Towers

FORMAT = "mmclip-checkpoint-2"
DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
CONTENT = {
    "step": int,
    "taken": int,
    "ranks": int,
    "towers": dict,
    "loss": dict,
    "optimizer": dict,
    "settings": dict,
    "fingerprints": dict,
    "skipped": dict,
    "alarms": dict,
    "pending": dict,
}
# Settings that may differ between a run and its continuation: they change what is written, how fast, or where the data
# lie (whose fingerprint is compared), and not the weights.
FREE_TO_CHANGE = {
    "resume",
    "may_change",
    "logs",
    "name",
    "workers",
    "log_every_n_steps",
    "val_steps",
    "val_data",
    "val_split",
    "zeroshot_data",
    "zeroshot_split",
    "measure_start",
    "save_steps",
    "keep_checkpoints",
    "bank_size",
    "report",
    "verbose",
    "report_to",
    "benchmark",
    "compare",
    "strict",
    "max_bad_samples",
    "device",
    "train_data",
    "cache_dir",
    "torchcompile",
    "fsdp",
    "grad_checkpointing",
}


def check(state: dict[str, Any], path: Path, settings: Mapping[str, Any], ranks: int) -> None:
    """What can be said before a model loads. Errors: UserError naming the content, setting or number of processes
    that is not as it was."""
    odd = [k for k, kind in CONTENT.items() if not isinstance(state.get(k), kind)]
    if odd:
        raise UserError(f"--resume {path}: a damaged checkpoint: {', '.join(odd)} missing or of another kind")
    before, free = state["settings"], FREE_TO_CHANGE | set(settings["may_change"] or ())
    changed = [k for k in before if k not in free and settings.get(k) != before[k]]
    # a flag that is newer than the checkpoint had no effect then, as its default has none
    changed += [k for k in settings if k not in free and k not in before and settings[k] != DEFAULTS.get(k)]
    if changed:
        told = ", ".join(
            f"{printable(k, 40)} was {printable(before.get(k, 'not there'), 60)}, is {printable(settings.get(k), 60)}"
            for k in changed
        )
        meant = [k for k in changed if k in CHANGEABLE]
        hint = f" (meant? --may-change {' '.join(meant)})" if meant == changed else ""
        raise UserError(f"--resume {path}: other settings than the run's: {told}{hint}")
    if state["ranks"] != ranks:
        raise UserError(f"--resume {path}: the run had {state['ranks']} processes, now there are {ranks}")


def check_run(state: dict[str, Any], path: Path, fingerprints: Mapping[str, str], total_steps: int) -> None:
    """Errors: UserError for other data, other weights of a locked trunk, or a step beyond the run."""
    for what in {*state["fingerprints"], *fingerprints}:
        if state["fingerprints"].get(what) != fingerprints.get(what):
            told = "training data are" if what == "data" else f"weights of the locked {printable(what, 40)} are"
            raise UserError(f"--resume {path}: the {told} not the run's")
    texts = [*state["skipped"].items(), *state["alarms"].items()]
    if not all(isinstance(text, str) for pair in texts for text in pair):
        raise UserError(f"--resume {path}: a damaged checkpoint: skipped or alarms hold something else than texts")
    if not 0 <= state["taken"] <= state["step"] <= total_steps:
        raise UserError(f"--resume {path}: step {state['step']} of a run of {total_steps}: a damaged checkpoint")


def load(
    state: dict[str, Any], path: Path, towers: Towers, loss: ContrastiveLoss, optimizer: torch.optim.Optimizer
) -> None:
    """Put a checked checkpoint's tensors in place. Errors: UserError for tensors that are not this run's."""
    locked = towers.locked_names()
    own = {k: v for k, v in towers.state_dict().items() if k not in locked}
    _same_tensors(own, state["towers"], path, "towers")
    _same_tensors(loss.state_dict(), state["loss"], path, "loss", finite=state["taken"] > 0)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = state["optimizer"].get("state")
    if not isinstance(saved, dict) or (saved and sorted(map(str, saved)) != sorted(map(str, range(len(parameters))))):
        raise UserError(f"--resume {path}: a damaged checkpoint: the optimizer's state is not of this run's parameters")
    for i, moments in saved.items():
        expected = {"step": torch.zeros(()), "exp_avg": parameters[int(i)], "exp_avg_sq": parameters[int(i)]}
        _same_tensors(expected, moments, path, f"optimizer, parameter {i}")
    towers.load_state_dict({k: shared_out(v, own[k]) for k, v in state["towers"].items()}, strict=False)
    loss.load_state_dict(state["loss"])
    # learning rates and decay are the settings', which are equal: a file does not choose them
    saved = {i: {k: shared_out(v, parameters[int(i)]) for k, v in moments.items()} for i, moments in saved.items()}
    optimizer.load_state_dict({"state": saved, "param_groups": optimizer.state_dict()["param_groups"]})


def _same_tensors(
    own: Mapping[str, Tensor | nn.Parameter], saved: Any, path: Path, what: str, finite: bool = True
) -> None:
    if not isinstance(saved, dict):
        raise UserError(f"--resume {path}: a damaged checkpoint: {what}: {type(saved).__name__}, not tensors by name")
    odd = [str(k) for k in {*own, *saved} if not _alike(own.get(k), saved.get(k))]
    if odd:
        raise UserError(
            f"--resume {path}: not a checkpoint of this model: {what}: {len(odd)} tensors missing, left over or of "
            f"another shape, such as {printable(min(odd), 80)}"
        )
    broken = [k for k, v in saved.items() if finite and not v.isfinite().all()]
    broken += [k for k in saved if k == "exp_avg_sq" and (saved[k] < 0).any()]
    if broken:
        raise UserError(
            f"--resume {path}: a damaged checkpoint: {what}: {len(broken)} tensors hold impossible numbers, such as "
            f"{printable(min(broken), 80)}"
        )


def _alike(a: Any, b: Any) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.shape == b.shape
        and a.is_floating_point() == b.is_floating_point()
        and b.layout == torch.strided
        and b.device.type == "cpu"  # a file may name any device, such as one without storage
    )
