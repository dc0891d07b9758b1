"""A text model as a script's flags ask for it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from mmclip.config.text_model import TextModelConfig
from mmclip.errors import printable
from mmclip.models.text_encoder import ROLES, TextModel, load_text_model


def text_precision(asked: str, device: torch.device) -> str:
    """ "fp32" or "amp_bf16" of a --precision.

    >>> text_precision("auto", torch.device("cpu")), text_precision("amp_bfloat16", torch.device("cpu"))
    ('fp32', 'amp_bf16')
    """
    half = device.type == "cuda" if asked == "auto" else asked != "fp32"
    return "amp_bf16" if half else "fp32"


def open_text_model(settings: TextModelConfig, device: torch.device, keep_normalize: bool = False) -> TextModel:
    """Texts are cut to what the flags say; else, for what mmclip trained, to what it was trained with. What a person
    should know of the model goes to stderr. Errors: UserError, one line."""
    model = load_text_model(
        str(settings.model),
        device,
        pooling=settings.pooling,
        random_init=settings.random_init,
        keep_normalize=keep_normalize,
        query_length=settings.query_length,
        document_length=settings.document_length,
        query_prompt=settings.query_prompt,
        document_prompt=settings.document_prompt,
        seed=settings.seed,
        precision=text_precision(settings.precision, device),
    )
    trained: Any = model.facts.get("lengths")
    for role in ROLES:
        length = trained.get(role) if isinstance(trained, dict) else None
        if model.lengths.get(role) is None and isinstance(length, int) and length > 0:
            model.lengths[role] = length
    for note in model.notes:
        print(f"warning: {printable(model.name)}: {printable(note)}", file=sys.stderr)
    return model


def encoding(model: TextModel) -> dict[str, Any]:
    """How texts became vectors, as results.json and mmclip.json have it: {"removed", "lengths", "prompts"}."""
    return {
        "removed": list(model.removed),
        "lengths": {role: model.length_of(role) for role in ROLES},
        "prompts": {role: model.prompts.get(role, "") for role in ROLES},
    }
