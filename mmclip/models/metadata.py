"""What a trained model says of itself: the content of mmclip.json and of ``trained_with`` in results.json."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from mmclip import __version__
from mmclip.config.loss import LossConfig
from mmclip.losses.contrastive import ContrastiveLoss
from mmclip.models.model_names import WEIGHT_FILES, export_folder, read_facts
from mmclip.roles import Direction, direction_weights

TEXT_PACKAGES = ("sentence-transformers", "accelerate", "ir_measures")  # named where they are installed


def main_direction(loss: ContrastiveLoss) -> Direction:
    """The direction whose alpha is the model's one ``logit_scale``: i2t unless only t2i is trained."""
    return Direction.I2T if Direction.I2T in loss.trained else Direction.T2I


@torch.no_grad()
def trained_with(loss: ContrastiveLoss, settings: LossConfig, initial: dict[str, Any] | None = None) -> dict[str, Any]:
    """Loss, lambda, normalization, exponents by role and scale by direction, as plain values; the curriculum's settings
    where they were used, and what the run started from (``initial``) where that was another.

    ``logit_scale_*`` is alpha (not its logarithm); ``effective_scale`` belongs to the direction that ``logit_scale``
    of the export belongs to. A direction that was not trained, or has not seen a batch, has no scale of its own: None.
    """
    similarity = loss.similarity
    gamma_q, gamma_d = (float(g) for g in similarity.exponents)
    facts: dict[str, Any] = {
        "loss": settings.loss,
        "i2t_weight": direction_weights(settings.loss, settings.i2t_weight)[Direction.I2T],
        "norm": similarity.norm.value,
        "gamma_q": gamma_q,
        "gamma_d": gamma_d,
        "positives": loss.positives.value,
        "effective_scale": None,
    }
    for direction in loss.weights:
        trained = direction in loss.trained and similarity.is_calibrated(direction)
        facts[f"logit_scale_{direction.value}"] = float(similarity.scale(direction)) if trained else None
        facts[f"effective_scale_{direction.value}"] = similarity.effective_scale(direction) if trained else None
    facts["effective_scale"] = facts[f"effective_scale_{main_direction(loss).value}"]
    return facts | curriculum_facts(settings) | ({"initial": initial} if initial else {})


def curriculum_facts(settings: LossConfig) -> dict[str, Any]:
    """The curriculum's settings that say something: those of a schedule that there is, and what is not off."""
    names = {
        "none": (),
        "switch": ("gamma_schedule", "gamma_from", "gamma_start", "stage2_lr_factor"),
        "anneal": ("gamma_schedule", "gamma_from", "gamma_start", "gamma_end"),
    }[settings.gamma_schedule]
    found = {name: getattr(settings, name) for name in names}
    found |= {name: getattr(settings, name) for name in ("focal", "norm_drift") if getattr(settings, name)}
    return found if settings.i2t_weight_end is None else found | {"i2t_weight_end": settings.i2t_weight_end}


def initial(run: str) -> dict[str, Any]:
    """Which run --init-from takes: its name, what it was trained with (None where it says nothing, a plain CLIP), and
    ``key``, the beginning of its weights' sha256. No path: runs are moved."""
    folder = export_folder(run)
    known = read_facts(folder)
    key = None
    for path in (folder / name for name in WEIGHT_FILES if (folder / name).is_file()):
        with path.open("rb") as file:
            key = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        break
    name = folder.resolve().parent.name if folder.name == "model" else folder.resolve().name
    named = ("loss", "norm", "gamma_q", "gamma_d", "effective_scale", "seed")
    return {"run": name, **{k: known.get(k) for k in named}, "key": key}


def versions() -> dict[str, str]:
    """Releases that a result depends on."""
    found = {"mmclip": __version__, "python": platform.python_version()}
    for package in ("torch", "torchvision", "open_clip_torch", "timm", "transformers", "numpy", *TEXT_PACKAGES):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
