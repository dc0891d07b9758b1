"""Metadata of trained models: mmclip.json of an export, and ``trained_with`` of results.json.

loss, i2t_weight | q2d_weight, norm, positives     how the model was trained
gamma_q, gamma_d                                   exponents by role, the native scoring
logit_scale_DIRECTION                              alpha of a direction (not its logarithm), None where untrained
effective_scale_DIRECTION, effective_scale         alpha times the mean norm factors; of the direction whose alpha
                                                   the export has as ``logit_scale``
gamma_schedule, focal, norm_drift, …               schedule options that differ from their defaults
initial                                            the run that --init-from started from
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from mmclip import __version__
from mmclip.config import LossConfig, TextTrainConfig
from mmclip.config.model_config import export_folder, read_metadata, weights_of
from mmclip.errors import UserError, printable
from mmclip.roles import (
    CLIP_DIRECTIONS,
    LOSS_WEIGHTS,
    TEXT_DIRECTIONS,
    Direction,
    Exponents,
    Normalization,
    direction_weights,
)
from mmclip.similarity import Similarity

METADATA_FILE = "mmclip.json"
TEXT_PACKAGES = ("sentence-transformers", "accelerate", "ir_measures")  # named where they are installed


@torch.no_grad()
def _similarity_metadata(similarity: Similarity, trained: Sequence[Direction], text: bool) -> dict[str, Any]:
    """Normalization, exponents and the scales of each direction; None for a direction without training or batches."""
    gamma_q, gamma_d = (float(g) for g in similarity.exponents)
    metadata: dict[str, Any] = {"norm": similarity.norm.value, "gamma_q": gamma_q, "gamma_d": gamma_d}
    for direction in TEXT_DIRECTIONS if text else CLIP_DIRECTIONS:
        known = direction in trained and similarity.has_norm_stats(direction)
        metadata[f"logit_scale_{direction.value}"] = float(similarity.scale(direction)) if known else None
        metadata[f"effective_scale_{direction.value}"] = similarity.effective_scale(direction) if known else None
    return metadata | {"effective_scale": metadata[f"effective_scale_{main_direction(trained).value}"]}


def main_direction(trained: Sequence[Direction]) -> Direction:
    """The direction whose alpha is the one ``logit_scale`` of an export: i2t (q2d), unless only the other is trained.

    >>> main_direction([Direction.T2I]).value, main_direction([Direction.T2I, Direction.I2T]).value
    ('t2i', 'i2t')
    """
    return next((d for d in (Direction.I2T, Direction.Q2D) if d in trained), trained[0])


def clip_metadata(
    config: LossConfig, similarity: Similarity, trained: Sequence[Direction], initial: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Metadata of a trained CLIP as plain values; ``initial`` is the run that --init-from started from."""
    weights = direction_weights(config.loss, config.i2t_weight)
    metadata = {"loss": config.loss, "i2t_weight": weights[Direction.I2T], "positives": config.positives}
    metadata |= _similarity_metadata(similarity, trained, text=False) | schedule_metadata(config)
    return metadata | ({"initial": initial} if initial else {})


def text_metadata(config: TextTrainConfig, similarity: Similarity, trained: Sequence[Direction]) -> dict[str, Any]:
    """Metadata of a trained text encoder as plain values: see ``clip_metadata``."""
    weights = direction_weights(config.loss, config.q2d_weight, text=True)
    metadata: dict[str, Any] = {"task": "text", "loss": config.loss, "q2d_weight": weights[Direction.Q2D]}
    metadata |= {"positives": config.positives}
    metadata |= _similarity_metadata(similarity, trained, text=True)
    return metadata | {name: v for name in ("focal", "norm_drift") if (v := getattr(config, name))}


def schedule_metadata(config: LossConfig) -> dict[str, Any]:
    """Schedule options that differ from their defaults."""
    names: tuple[str, ...] = {
        "none": (),
        "switch": ("gamma_schedule", "gamma_from", "gamma_start", "stage2_lr_factor"),
        "anneal": ("gamma_schedule", "gamma_from", "gamma_start", "gamma_end"),
    }[config.gamma_schedule]
    names += tuple(name for name in ("focal", "norm_drift") if getattr(config, name))
    names += ("i2t_weight_end",) if config.i2t_weight_end is not None else ()
    return {name: getattr(config, name) for name in names}


def initial_run(run: str) -> dict[str, Any]:
    """The run that --init-from starts from: name, training metadata, and ``key``, a digest of its weights.

    Values are None where it has no metadata (a plain CLIP). No path, because runs are moved.
    """
    folder = export_folder(run)
    metadata, key = read_metadata(folder), None
    if weights := weights_of(folder):
        with weights.open("rb") as file:
            key = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    name = folder.resolve().parent.name if folder.name == "model" else folder.resolve().name
    names = ("loss", "norm", "gamma_q", "gamma_d", "effective_scale", "seed")
    return {"run": name, **{k: metadata.get(k) for k in names}, "key": key}


def native_exponents(metadata: Mapping[str, Any]) -> Exponents:
    """Exponents that a model was trained with; those of cosine for a model without metadata (any plain CLIP)."""
    try:
        cosine = Normalization.COSINE.exponents
        return Exponents(float(metadata["gamma_q"]), float(metadata["gamma_d"])) if metadata else cosine
    except (KeyError, TypeError, ValueError):
        raise UserError("mmclip.json holds no numbers gamma_q and gamma_d") from None


def trained_directions(metadata: Mapping[str, Any]) -> tuple[Direction, ...]:
    """Directions whose loss a model minimized, by mmclip.json or ``trained_with`` (UserError for an unknown loss)."""
    loss, own = metadata.get("loss"), metadata.get("i2t_weight")
    if loss not in LOSS_WEIGHTS:
        valid = ", ".join(LOSS_WEIGHTS)
        raise UserError(f"the run names the loss {printable(loss)}; a direction needs one of: {valid}")
    constant = loss == "sym" and own in (0, 1) and metadata.get("i2t_weight_end", own) == own
    weight = float(own) if own is not None and constant else LOSS_WEIGHTS[loss]
    return tuple(d for d, w in zip(CLIP_DIRECTIONS, (weight, 1 - weight), strict=True) if w > 0)


def trained_scales(metadata: Mapping[str, Any], loaded_scale: float | None = None) -> dict[Direction, float | None]:
    """alpha of every trained direction, None where it is unknown; {} for an unknown loss.

    A plain CLIP (no metadata) was trained in both directions with one scale, that of its checkpoint.
    """
    if not metadata:
        return dict.fromkeys(CLIP_DIRECTIONS, loaded_scale)
    if metadata.get("loss") not in LOSS_WEIGHTS:
        return {}
    return {d: metadata.get(f"logit_scale_{d.value}") for d in trained_directions(metadata)}


def versions() -> dict[str, str]:
    """Releases that a result depends on."""
    releases = {"mmclip": __version__, "python": platform.python_version()}
    for package in ("torch", "torchvision", "open_clip_torch", "timm", "transformers", "numpy", *TEXT_PACKAGES):
        with contextlib.suppress(PackageNotFoundError):
            releases[package] = version(package)
    return releases


def weights_key(module: nn.Module) -> str:
    """64 hex digits of every weight and buffer, by name."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
