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
from mmclip.data.image_text import skipped_line
from mmclip.embeddings.features import FeatureSource
from mmclip.embeddings.files import Embeddings, save_embeddings
from mmclip.errors import UserError, printable
from mmclip.evaluation.eval_set import EvalSource, draw_bank
from mmclip.io import require_space
from mmclip.models.factory import load_clip
from mmclip.models.metadata import native_exponents, trained_scales
from mmclip.retrieval.hubness import TRANSDUCTIVE, QueryBank, document_offsets
from mmclip.similarity import CLIP_DIRECTIONS, Direction


def run(config: EmbedConfig) -> None:
    """Encode a data set into one file. Raises UserError."""
    assert config.model is not None and config.output is not None
    device = distributed.start(config.device)
    data, distractors = open_evaluation(config)
    bank_data = open_bank(config, data) if config.bank not in (None, TRANSDUCTIVE) else None
    print(f"encoding {len(data):,} images of {printable(data.path)} [{printable(data.split, 60)}]", file=sys.stderr)
    model = load_clip(config.model, config.pretrained)
    alpha = trained_scales(model.metadata, model.loaded_scale)
    corrected = [d for d in CLIP_DIRECTIONS if d.opposite in alpha] if config.bank is not None else []
    about = f"--bank: --model {printable(config.model)}"
    if config.bank is not None and not corrected:
        raise UserError(f"{about} names no known loss: nothing can be corrected")
    if missing := next((d.opposite.value for d in corrected if alpha[d.opposite] is None), None):
        raise UserError(f"{about} has no scale of {missing}, which log-evidence needs; a trained model has one")
    path = Path(config.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = sum(len(d) + sum(map(len, d.captions)) for d in (data, *distractors.values()))
    size = rows * 4 * int(model.towers.model_cfg["embed_dim"])
    require_space(path.parent, size, size, "a file of embeddings", "name another place with --output")
    model.towers.to(device)
    options = encode_options(config, device)
    saved = EvalSource.open(data, distractors, model, options).embed(model, options)
    if saved.skipped:
        print(skipped_line(saved.skipped), file=sys.stderr)
    scales = {d.value: a for d, a in alpha.items()}
    saved = dataclasses.replace(saved, model=config.model, metadata=model.metadata, alpha=scales)
    sides = sorted({d.query_side for d in corrected})
    if config.bank is not None:
        bank = QueryBank(TRANSDUCTIVE, {side: getattr(saved, side) for side in sides})
        if bank_data is not None:
            source = FeatureSource(bank_data)
            bank = draw_bank(source, sides, config.bank_size, model, options, config.seed, data)
        saved = _with_evidence(saved, corrected, bank)
    save_embeddings(path, saved)
    print(
        f"embeddings: {printable(path)}: {len(saved.image):,} images, {len(saved.text):,} texts, "
        f"D = {saved.image.shape[1]}" + "".join(f", evidence of {d}" for d in saved.evidence)
    )


def _with_evidence(saved: Embeddings, directions: Sequence[Direction], bank: QueryBank) -> Embeddings:
    exponents, evidence = native_exponents(saved.metadata), dict[str, Tensor]()
    for direction in directions:
        _, candidates = direction.roles({"image": saved.image, "text": saved.text})
        alpha = saved.alpha[direction.opposite.value]
        assert alpha is not None
        evidence[direction.value] = document_offsets(candidates, bank.vectors[direction.query_side], exponents, alpha)
    sizes = {side: len(x) for side, x in bank.vectors.items()}
    return dataclasses.replace(
        saved, evidence=evidence, bank={"name": bank.name, "size": sizes, "overlap": bank.overlap}
    )
