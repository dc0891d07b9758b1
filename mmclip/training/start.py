"""What a run's model knows before its first step: start.json.

That is a results.json of the untrained model, and beside it "fisher": the condition numbers over pairs of the training
data. They need four pairs a dimension, which evaluation data seldom have, and what is to be predicted from them, whose
length training had better divide out, may be asked of training data only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmclip import distributed
from mmclip.errors import printable
from mmclip.evaluation.evaluate import evaluate_model
from mmclip.evaluation.results import START_FILE, json_text
from mmclip.evaluation.zero_shot import ZeroShot
from mmclip.io import write_text_atomically
from mmclip.metrics.fisher_report import PER_DIMENSION, fisher_report
from mmclip.models import metadata
from mmclip.models.metadata import native_exponents
from mmclip.similarity import CLIP_DIRECTIONS, TINY, Direction, mean_length_factors
from mmclip.training.trainer import Trainer


@torch.no_grad()
def measure_start(trainer: Trainer, classes: ZeroShot | None) -> None:
    """Write start.json: what results.json holds, of the weights before the first step, with Fisher condition numbers
    of evaluation and training data and ``classes``' zero-shot accuracy. ``native`` is what the first step has: --norm,
    or --gamma-from of a schedule. No weight is changed.

    A run that goes on after its first step keeps what it has. Rank 0 works, others wait.
    """
    path = trainer.folder / START_FILE
    if trainer.step:
        if distributed.world()[0] == 0 and not path.is_file():
            print(f"no {START_FILE}: --measure-start came after step {trainer.step}", file=sys.stderr)
        return
    if distributed.world()[0] == 0 and trainer.val_source is not None:
        settings = trainer.settings
        trained = metadata.clip_metadata(settings, trainer.loss.similarity, trainer.loss.trained, trainer.model.initial)
        vectors = _training_pairs(trainer)
        alphas = _alphas(trainer, vectors)
        results = evaluate_model(
            trainer.val_source,
            trainer.model,
            trainer.runner,
            trained | {f"logit_scale_{d.value}": alphas[d] for d, weight in trainer.loss.weights.items() if weight > 0},
            {"model": settings.model, "seed": settings.seed, "steps": 0, "versions": metadata.versions()},
            classes=classes,
            fisher=True,
            seed=settings.seed,
        )
        native = native_exponents(trained)
        data, each = trainer.source.data, np.arange(len(vectors["image"]))
        fisher: dict[str, Any] = {"data": {"path": data.path, "split": data.split}}
        for direction in CLIP_DIRECTIONS:
            query, document = direction.roles(vectors)
            fisher[direction.value] = fisher_report(
                query, document, (each, each), each, native, alphas[direction], seed=settings.seed
            )
        write_text_atomically(path, json_text({**results.json, "fisher": fisher}, indent=1))
        print(f"before the first step: {printable(path)}", file=sys.stderr, flush=True)
    distributed.barrier()


def _training_pairs(trainer: Trainer) -> dict[str, Tensor]:
    """{"image": [n, D], "text": [n, D]}: random training images with a caption of theirs each, as many as the Fisher
    report and its nulls have a use for."""
    source, model, runner = trainer.source, trainer.model, trainer.runner
    n, enough = len(source.data), 2 * PER_DIMENSION * int(model.towers.model_cfg["embed_dim"])
    rows = np.sort(np.random.default_rng(trainer.settings.seed).choice(n, min(n, enough), replace=False)).tolist()
    texts = trainer.batches.drawn(0, rows).tolist()
    image, bad = source.vectors("image", model, runner, "before the first step", rows)
    text, _ = source.vectors("text", model, runner, "before the first step", texts)
    kept = [i for i in range(len(rows)) if i not in bad]
    return {"image": image[kept], "text": text[kept]}


def _alphas(trainer: Trainer, vectors: Mapping[str, Tensor]) -> dict[Direction, float]:
    """alpha of each direction: the loss's own where it has one already, else what a first batch of these would set."""
    similarity = trainer.loss.similarity
    found = {}
    for direction, weight in trainer.loss.weights.items():
        if weight > 0 and similarity.is_calibrated(direction):
            found[direction] = float(similarity.scale(direction))
        else:
            lengths = mean_length_factors(*direction.roles(vectors), similarity.exponents).prod()
            found[direction] = similarity.scale_init / max(float(lengths), TINY)
    return found
