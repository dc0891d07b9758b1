"""What a trained model says of itself: the content of mmclip.json and of ``trained_with`` in results.json."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from mmclip import __version__
from mmclip.losses import ContrastiveLoss
from mmclip.similarity import Direction


def main_direction(loss: ContrastiveLoss) -> Direction:
    """The direction whose alpha is the model's one ``logit_scale``: i2t unless only t2i is trained."""
    return Direction.I2T if loss.weights[Direction.I2T] > 0 else Direction.T2I


@torch.no_grad()
def trained_with(loss: ContrastiveLoss, loss_name: str) -> dict[str, Any]:
    """Loss, lambda, normalization, exponents by role and scale by direction, as plain values.

    ``logit_scale_*`` is alpha (not its logarithm); ``effective_scale`` belongs to the direction that ``logit_scale``
    of the export belongs to. A direction that was not trained, or has not seen a batch, has no scale of its own: None.
    """
    similarity = loss.similarity
    gamma_q, gamma_d = (float(g) for g in similarity.exponents)
    facts: dict[str, Any] = {
        "loss": loss_name,
        "i2t_weight": loss.weights[Direction.I2T],
        "norm": similarity.norm.value,
        "gamma_q": gamma_q,
        "gamma_d": gamma_d,
        "positives": loss.positives.value,
        "effective_scale": None,
    }
    for direction, weight in loss.weights.items():
        trained = weight > 0 and similarity.is_calibrated(direction)
        facts[f"logit_scale_{direction.value}"] = float(similarity.scale(direction)) if trained else None
        facts[f"effective_scale_{direction.value}"] = similarity.effective_scale(direction) if trained else None
    facts["effective_scale"] = facts[f"effective_scale_{main_direction(loss).value}"]
    return facts


def versions() -> dict[str, str]:
    """Releases that a result depends on."""
    found = {"mmclip": __version__, "python": platform.python_version()}
    for package in ("torch", "torchvision", "open_clip_torch", "timm", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
