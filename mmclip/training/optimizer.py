"""AdamW's parameter groups and the learning-rate schedules."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import torch
from torch import nn

from mmclip.config import TextTrainConfig, TrainConfig
from mmclip.errors import UserError
from mmclip.losses.contrastive import ContrastiveLoss
from mmclip.losses.schedule import as_step
from mmclip.models.towers import Towers

# Parameters that transformers' Trainer never decays: by name, and all of LayerNorm modules
UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
Group = tuple[str, Iterable[nn.Parameter], float, float]  # name, parameters, peak learning rate, weight decay


def clip_groups(towers: Towers, loss: ContrastiveLoss, config: TrainConfig) -> list[Group]:
    """Groups of a CLIP run: decayed matrices, undecayed vectors, projections, alpha and gamma.

    As in open_clip, vectors (biases, norms, class embedding) and alpha have no weight decay. The output projections
    are a group of their own, since decay there shrinks magnitudes directly. gamma has its own learning rate.
    """
    projections = towers.head_parameter_names("image") | towers.head_parameter_names("text")
    exempt = set(towers.clip.no_weight_decay()) if hasattr(towers.clip, "no_weight_decay") else set()

    def kind(name: str, parameter: nn.Parameter) -> str:
        vector = parameter.ndim < 2 or name.removeprefix("clip.") in exempt
        return "vectors" if vector else "projections" if name in projections else "matrices"

    named = [(kind(n, p), p) for n, p in towers.named_parameters() if p.requires_grad]
    decay = {"matrices": config.wd, "vectors": 0.0}
    decay["projections"] = config.wd if config.proj_wd is None else config.proj_wd
    groups = [(name, [p for k, p in named if k == name], config.lr, wd) for name, wd in decay.items()]
    return [*groups, *loss_groups(loss, config)]


def text_groups(encoder: nn.Module, loss: ContrastiveLoss, config: TextTrainConfig) -> list[Group]:
    """Groups of a text run, those of SentenceTransformerTrainer; alpha and gamma are never decayed."""
    norms = {id(p) for m in encoder.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters(recurse=False)}
    named = [(n, p) for n, p in encoder.named_parameters() if p.requires_grad]
    kept = {n for n, p in named if id(p) in norms or UNDECAYED.search(n.lower())}
    return [
        ("decayed", [p for n, p in named if n not in kept], config.lr, config.wd),
        ("undecayed", [p for n, p in named if n in kept], config.lr, 0.0),
        *loss_groups(loss, config),
    ]


def loss_groups(loss: ContrastiveLoss, config: TrainConfig | TextTrainConfig) -> list[Group]:
    """alpha with the encoder's learning rate and gamma with its own, without weight decay."""
    gammas = [p for n, p in loss.named_parameters() if "gamma_hat" in n]
    alphas = [p for n, p in loss.named_parameters() if "gamma_hat" not in n and p.requires_grad]
    return [("alpha", alphas, config.lr, 0.0), ("gamma", gammas, config.gamma_lr, 0.0)]


def build_adamw(groups: Iterable[Group], betas: tuple[float, float], eps: float) -> torch.optim.AdamW:
    """AdamW whose groups know their ``name`` and ``peak_lr``; groups without parameters are left out."""
    dicts = [
        {"name": name, "params": list(parameters), "lr": lr, "peak_lr": lr, "weight_decay": decay}
        for name, parameters, lr, decay in groups
    ]
    return torch.optim.AdamW([g for g in dicts if g["params"]], betas=betas, eps=eps, fused=True)


def steps_in_all(config: TrainConfig | TextTrainConfig, per_epoch: int) -> int:
    """Steps of a run of ``config.epochs``, at most ``config.max_steps``."""
    steps = per_epoch * config.epochs
    return steps if config.max_steps is None else min(steps, config.max_steps)


def warmup_steps(warmup: float, total_steps: int) -> int:
    """Resolve a fraction of the run below 1, or a number of steps. Raises UserError if it would fill the run.

    >>> warmup_steps(0.1, 200), warmup_steps(50, 200)
    (20, 50)
    """
    steps = as_step(warmup, total_steps)
    if steps and steps >= total_steps:
        long = f"--warmup {warmup:g}: {steps} steps of warm-up in a run of {total_steps} steps"
        raise UserError(f"{long}; the learning rate would never reach its peak")
    return steps


def cosine_factor(step: int, warmup: int, total_steps: int) -> float:
    """Share of the peak rate at a step counted from 0: linear warm-up, then a cosine to 0 (open_clip's).

    >>> [round(cosine_factor(s, 2, 6), 2) for s in range(6)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))


def linear_factor(step: int, warmup: int, total_steps: int) -> float:
    """Share of the peak rate at a step counted from 0: linear warm-up from 0, then linear to 0 (transformers').

    >>> [linear_factor(s, 2, 6) for s in range(6)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup:
        return step / warmup
    return (total_steps - step) / max(1, total_steps - warmup)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group to ``factor`` of its peak learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
