"""embed.py: a model and a data set -> a file of raw vectors, relevance, scoring, and the correction's log-evidence."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from mmclip import distributed
from mmclip.commands.evaluate import encode_options
from mmclip.config import EmbedConfig
from mmclip.data.datasets import open_bank, open_evaluation
from mmclip.data.image_text import ImageTextData, skipped_line
from mmclip.embeddings.features import FeatureSource
from mmclip.embeddings.files import Embeddings, save_embeddings
from mmclip.errors import UserError, printable
from mmclip.evaluation.eval_set import EvalSource, draw_bank
from mmclip.io import require_space
from mmclip.models.factory import ClipModel, load_clip
from mmclip.models.metadata import native_exponents, trained_scales
from mmclip.retrieval.hubness import TRANSDUCTIVE, QueryBank, bank_side, document_offsets
from mmclip.similarity import CLIP_DIRECTIONS, Direction


def run(settings: EmbedConfig) -> None:
    """Everything that embed.py does. Errors: UserError, one line."""
    assert settings.model is not None and settings.output is not None
    device = distributed.start(settings.device)
    data, distractors = open_evaluation(settings)
    bank_data = open_bank(settings, data) if settings.bank not in (None, TRANSDUCTIVE) else None
    print(f"encoding {len(data):,} images of {printable(data.path)} [{printable(data.split, 60)}]", file=sys.stderr)
    model = load_clip(settings.model, settings.pretrained)
    alpha = trained_scales(model.metadata, model.loaded_scale)
    corrected = [d for d in CLIP_DIRECTIONS if d.opposite in alpha] if settings.bank is not None else []
    if settings.bank is not None and not corrected:
        raise UserError(f"--bank: --model {printable(settings.model)} names no known loss: nothing can be corrected")
    for direction in corrected:
        if alpha[direction.opposite] is None:
            raise UserError(
                f"--bank: --model {printable(settings.model)} has no scale of {direction.opposite.value}, which "
                "log-evidence needs; a trained model has one"
            )
    path = Path(settings.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    _require_space(path, [data, *distractors.values()], model)
    model.towers.to(device)
    options = encode_options(settings, device)
    source = EvalSource.open(data, distractors, model, options)
    found = source.embed(model, options)
    if found.skipped:
        print(skipped_line(found.skipped), file=sys.stderr)
    scales = {d.value: a for d, a in alpha.items()}
    saved = dataclasses.replace(found, model=settings.model, metadata=model.metadata, alpha=scales)
    if bank_data is not None:
        bank = draw_bank(
            FeatureSource(bank_data),
            sorted({bank_side(d) for d in corrected}),
            settings.bank_size,
            model,
            options,
            settings.seed,
            data,
        )
        saved = _with_evidence(saved, corrected, bank)
    elif settings.bank is not None:
        vectors = {bank_side(d): getattr(saved, bank_side(d)) for d in corrected}
        saved = _with_evidence(saved, corrected, QueryBank(TRANSDUCTIVE, vectors))
    save_embeddings(path, saved)
    print(
        f"embeddings: {printable(path)}: {len(found.image):,} images, {len(found.text):,} texts, "
        f"D = {found.image.shape[1]}" + "".join(f", evidence of {d}" for d in saved.evidence)
    )


def _require_space(path: Path, sets: Sequence[ImageTextData], model: ClipModel) -> None:
    """Errors: UserError before the work where the disk has no place for its result."""
    rows = sum(len(d) + sum(map(len, d.captions)) for d in sets)
    size = rows * 4 * int(model.towers.model_cfg["embed_dim"])
    require_space(path.parent, size, size, "a file of embeddings", "name another place with --output")


def _with_evidence(saved: Embeddings, directions: Sequence[Direction], bank: QueryBank) -> Embeddings:
    exponents = native_exponents(saved.metadata)
    evidence: dict[str, Tensor] = {}
    for direction in directions:
        _, candidates = direction.roles({"image": saved.image, "text": saved.text})
        alpha = saved.alpha[direction.opposite.value]
        assert alpha is not None
        evidence[direction.value] = document_offsets(candidates, bank.vectors[bank_side(direction)], exponents, alpha)
    sizes = {side: len(x) for side, x in bank.vectors.items()}
    about = {"name": bank.name, "size": sizes, "overlap": bank.overlap}
    return dataclasses.replace(saved, evidence=evidence, bank=about)
