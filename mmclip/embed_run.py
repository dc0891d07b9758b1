"""embed.py: a model and a data set -> a file of raw vectors, relevance, scoring, and the correction's log-evidence."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmclip import distributed
from mmclip.build import Model
from mmclip.comparison import trained_directions
from mmclip.config_embed import EmbedSettings
from mmclip.config_evaluate import EvaluateSettings
from mmclip.correction import bank_side, log_evidence
from mmclip.datasets import open_evaluation
from mmclip.embeddings import Runner, encode_image, encode_text
from mmclip.errors import UsageError, one_line
from mmclip.eval_source import EvalSource
from mmclip.evaluate_run import load_model
from mmclip.evaluation import Results
from mmclip.facts import native_exponents
from mmclip.files import require_space
from mmclip.image_text import ImageTextData
from mmclip.pools import EvalData
from mmclip.saved_embeddings import SavedEmbeddings, save_embeddings
from mmclip.similarity import CLIP_DIRECTIONS, Direction
from mmclip.skipped import told


def embed(settings: EmbedSettings) -> None:
    """Everything that embed.py does. Errors: UsageError, one line."""
    assert settings.model is not None and settings.output is not None
    device = distributed.start(settings.device)
    data, distractors = _open(settings, settings.data, settings.split)
    bank_data = _open(settings, settings.bank, settings.bank_split)[0] if settings.bank else None
    print(f"encoding {len(data):,} images of {one_line(data.path)} [{one_line(data.split, 60)}]", file=sys.stderr)
    if bank_data is not None and (bank_data.path, bank_data.split) == (data.path, data.split):
        print("--bank names the very data that are encoded: the evidence knows their queries", file=sys.stderr)
    model = load_model(settings.model, settings.pretrained)
    alpha = scales(model)
    corrected = correctable(model) if bank_data else ()
    for direction in corrected:
        if alpha[direction.opposite.value] is None:
            raise UsageError(
                f"--bank: --model {one_line(settings.model)} has no scale of {direction.opposite.value}, which "
                "log-evidence needs; a trained model has one"
            )
    path = Path(settings.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    _require_space(path, data, distractors, model)
    model.towers.to(device)
    precision = "fp32" if settings.precision == "auto" else settings.precision
    runner = Runner(device, precision, settings.batch_size, settings.workers)
    source = EvalSource.open(data, distractors, model, runner, None)
    found = source.eval_data(model, runner)
    if source.skipped:
        print(told(source.skipped), file=sys.stderr)
    saved = _saved(found, settings.model, model.facts, alpha)
    if bank_data is not None:
        saved = _with_evidence(saved, corrected, bank_data, model, runner, settings)
    save_embeddings(path, saved)
    print(
        f"embeddings: {one_line(path)}: {len(found.image):,} images, {len(found.text):,} texts, "
        f"D = {found.image.shape[1]}" + "".join(f", evidence of {d}" for d in saved.evidence)
    )


def scales(model: Model) -> dict[str, float | None]:
    """alpha by direction: mmclip.json's, or a plain checkpoint's one scale for both; None where there is none."""
    if model.facts:
        return {d.value: model.facts.get(f"logit_scale_{d.value}") for d in CLIP_DIRECTIONS}
    return dict.fromkeys((d.value for d in CLIP_DIRECTIONS), model.loaded_scale)


def correctable(model: Model) -> tuple[Direction, ...]:
    """Directions whose opposite the model's loss trained. A plain CLIP was trained in both."""
    trained = trained_directions(Results({"trained_with": model.facts}, {})) if model.facts else CLIP_DIRECTIONS
    return tuple(d for d in CLIP_DIRECTIONS if d.opposite in trained)


def embed_bank(side: str, data: ImageTextData, model: Model, runner: Runner, size: int, seed: int) -> Tensor:
    """``size`` captions or images of ``data``, drawn by ``seed``, or all where there are fewer: raw [B, D].

    An image that cannot be read is left out. Errors: UsageError where none can.
    """
    drawn = torch.Generator().manual_seed(seed)
    if side == "text":
        captions = [c for image in data.captions for c in image]
        rows = torch.randperm(len(captions), generator=drawn)[:size].tolist()
        return runner.texts(encode_text(model), [captions[r] for r in rows], model.tokenize, label="bank: captions")
    some = data.subset(torch.randperm(len(data), generator=drawn)[:size].tolist())
    vectors, bad = runner.images(encode_image(model), some, model.transform(), label="bank: images")
    return vectors[[row for row in range(len(some)) if row not in bad]]


def _open(settings: EmbedSettings, source: str, split: str | None) -> tuple[ImageTextData, ImageTextData | None]:
    shared = ("dataset_type", "csv_img_key", "csv_caption_key", "csv_separator")
    same = {name: getattr(settings, name) for name in shared}
    return open_evaluation(EvaluateSettings(model=settings.model, data=source, split=split, **same))


def _require_space(path: Path, data: ImageTextData, distractors: ImageTextData | None, model: Model) -> None:
    """Errors: UsageError before the work where the disk has no place for its result."""
    rows = sum(len(d) + sum(map(len, d.captions)) for d in (data, distractors) if d is not None)
    size = rows * 4 * int(model.towers.model_cfg["embed_dim"])
    require_space(path.parent, size, size, "a file of embeddings", "name another place with --output")


def _saved(found: EvalData, name: str, facts: dict[str, Any], alpha: dict[str, float | None]) -> SavedEmbeddings:
    """Texts are called KEY#0, KEY#1... by their image and their place among its captions that were encoded."""
    assert found.owner is not None
    count = [0] * len(found.image)
    text_ids = []
    for row in found.owner:
        text_ids.append(f"{found.image_keys[row]}#{count[row]}")
        count[row] += 1
    return SavedEmbeddings(
        found.image,
        found.text,
        found.image_keys,
        text_ids,
        found.pairs,
        owner=found.owner,
        captions=found.captions,
        levels=found.levels,
        n_objects=found.n_objects,
        distractor_image=found.distractor_image,
        distractor_text=found.distractor_text,
        model=name,
        facts=facts,
        alpha=alpha,
    )


def _with_evidence(
    saved: SavedEmbeddings,
    directions: tuple[Direction, ...],
    data: ImageTextData,
    model: Model,
    runner: Runner,
    settings: EmbedSettings,
) -> SavedEmbeddings:
    exponents = native_exponents(saved.facts)
    evidence: dict[str, Tensor] = {}
    bank: dict[str, Any] = {"data": Path(data.path).name, "split": data.split, "seed": settings.seed}
    for direction in directions:
        side = bank_side(direction)
        vectors = embed_bank(side, data, model, runner, settings.bank_size, settings.seed)
        _, candidates = direction.roles({"image": saved.image, "text": saved.text})
        alpha = saved.alpha[direction.opposite.value]
        assert alpha is not None
        evidence[direction.value] = log_evidence(candidates, vectors, exponents, alpha)
        bank[f"{side}s"] = len(vectors)
    return dataclasses.replace(saved, evidence=evidence, bank=bank)
