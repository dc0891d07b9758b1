"""Parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from mmclip.config import TrainConfig
from mmclip.errors import UserError
from mmclip.losses.contrastive import ContrastiveLoss
from mmclip.losses.schedule import as_step
from mmclip.models.towers import Towers


def parameter_groups(towers: Towers, loss: ContrastiveLoss, settings: TrainConfig) -> list[dict[str, object]]:
    """AdamW groups: decayed matrices, undecayed vectors, magnitude-carrying projections, alpha and gamma.

    As in open_clip, vectors (biases, norms, class embedding) and alpha have no weight decay. The output projections
    are a group of their own: decay there shrinks magnitudes directly. gamma has its own learning rate.
    """
    projections = towers.head_parameter_names("image") | towers.head_parameter_names("text")
    exempt = set(towers.clip.no_weight_decay()) if hasattr(towers.clip, "no_weight_decay") else set()
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    carriers: list[nn.Parameter] = []
    for name, parameter in towers.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2 or name.removeprefix("clip.") in exempt:
            vectors.append(parameter)
        else:
            (carriers if name in projections else matrices).append(parameter)
    gammas = [p for n, p in loss.named_parameters() if "gamma_hat" in n]
    alphas = [p for n, p in loss.named_parameters() if "gamma_hat" not in n and p.requires_grad]
    proj_wd = settings.wd if settings.proj_wd is None else settings.proj_wd
    groups = [
        ("matrices", matrices, settings.lr, settings.wd),
        ("vectors", vectors, settings.lr, 0.0),
        ("projections", carriers, settings.lr, proj_wd),
        ("alpha", alphas, settings.lr, 0.0),
        ("gamma", gammas, settings.gamma_lr, 0.0),
    ]
    return [
        {"name": name, "params": parameters, "lr": lr, "peak_lr": lr, "weight_decay": decay}
        for name, parameters, lr, decay in groups
        if parameters
    ]


def build_optimizer(towers: Towers, loss: ContrastiveLoss, settings: TrainConfig) -> torch.optim.AdamW:
    groups = parameter_groups(towers, loss, settings)
    return torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True)


def steps_in_all(settings: TrainConfig, per_epoch: int) -> int:
    steps = per_epoch * settings.epochs
    return steps if settings.max_steps is None else min(steps, settings.max_steps)


def warmup_steps(warmup: float, total_steps: int) -> int:
    """A fraction below 1 of the run, or a number of steps. Errors: UserError where it would fill the run.

    >>> warmup_steps(0.1, 200), warmup_steps(50, 200)
    (20, 50)
    """
    steps = as_step(warmup, total_steps)
    if steps and steps >= total_steps:
        raise UserError(
            f"--warmup {warmup:g}: {steps} steps of warm-up in a run of {total_steps} steps; "
            "the learning rate would never reach its peak"
        )
    return steps


def learning_rate_factor(step: int, warmup: int, total_steps: int) -> float:
    """Share of the peak learning rate at a step counted from 0: linear warm-up, then a cosine to 0 (open_clip's).

    >>> [round(learning_rate_factor(s, 2, 6), 2) for s in range(6)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
