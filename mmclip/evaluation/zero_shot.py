"""Zero-shot classification as i2t retrieval: an image is the query, a class (the mean of its prompts) the document.

A class's document is the mean over its templates' texts t of t / |t|**gamma_d. It is ranked as it is, by the image's
mean score of the templates, but for gamma_d = 1, where it is normalized once more: then it is clip-benchmark's class
vector, and accuracy by cosine is clip-benchmark's (mmclip.evaluation.clip_benchmark passes clip-benchmark the same).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mmclip import metrics
from mmclip.data.image_text import BadSample, ImageTextData
from mmclip.data.scenes.build import CLASSES, build_scene_classes
from mmclip.data.shards import Sample, builtin_root, find_split, index_shard, is_folder, shards_of
from mmclip.embeddings.encode import EncodeOptions, encode_texts, text_encoder
from mmclip.embeddings.features import FeatureSource
from mmclip.errors import UserError, printable, reason
from mmclip.evaluation.results import NATIVE
from mmclip.models.factory import ClipModel
from mmclip.retrieval.ranking import as_floats, rank
from mmclip.roles import Exponents, Normalization
from mmclip.similarity import normalize

NAMES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"
Json = dict[str, Any]


@dataclass(frozen=True)
class Classes:
    """Labelled images of C classes.

    Attributes:
        names: [C] class names.
        templates: [T] prompts with {c} for the name.
        data: Images; the caption of each is its class's name.
        labels: Image key -> class.
    """

    names: list[str]
    templates: list[str]
    data: ImageTextData
    labels: dict[str, int]


def open_classes(source: str, split: str | None = None) -> Classes:
    """Open images of classes in clip-benchmark's layout, or builtin:scenes-classes, which are drawn on first use.

    The layout is ROOT/classnames.txt, its templates, and ROOT/SPLIT/*.tar with KEY.jpg (png, webp) and KEY.cls, the
    class, counted from 0. Single samples that cannot be used are in ``data.skipped``.

    Raises:
        UserError: The data set as a whole is unusable.
    """
    root = build_scene_classes(builtin_root()) if source == f"builtin:{CLASSES}" else Path(source)
    if source != f"builtin:{CLASSES}" and source.startswith("builtin:"):
        raise UserError(f"--zeroshot-data {printable(source)}: unknown built-in classes; valid: builtin:{CLASSES}")
    if not source.strip() or not is_folder(root):
        raise UserError(f"--zeroshot-data {printable(source)!r}: no such folder; valid: a folder, builtin:{CLASSES}")
    names, templates = _lines(root / NAMES), _lines(root / TEMPLATES)
    for template in templates:
        if "{c}" not in template:
            raise UserError(f"{root / TEMPLATES}: {printable(template, 80)!r} has no {{c}}, the place of the name")
    folder = find_split(root, split, "eval")
    if folder is None:
        splits = ", ".join(sorted(p.name for p in root.iterdir() if p.is_dir())) or "no folders"
        raise UserError(f"{root}: no split {printable(split or 'test or val')} with shards in it; it has: {splits}")
    data, labels = ImageTextData(str(root), folder.name, [], [], []), {}
    for shard in shards_of(folder):
        for sample in index_shard(shard, "cls"):
            fault = _fault(sample, len(names))
            if sample.key in labels and sample.fault is None:
                fault = "a duplicate key: the first one is kept"
            if fault is not None or sample.image is None or sample.text is None:
                data.skipped.append(BadSample(sample.key, sample.shard, fault or "no image beside its label"))
                continue
            labels[sample.key] = int(sample.text)
            data.keys.append(sample.key)
            data.captions.append([names[labels[sample.key]]])
            data.places.append((sample.shard, *sample.image))
    if not labels:
        first = f"; first of {len(data.skipped)} skipped: {data.skipped[0]}" if data.skipped else ""
        raise UserError(f"{folder}: empty: no image with a label (KEY.cls){first}")
    return Classes(names, templates, data, labels)


def _lines(path: Path) -> list[str]:
    """The lines of a file. Raises UserError for a missing or empty file, or an empty line: lines are counted."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").rstrip().split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        needs = f"classification needs {NAMES} and {TEMPLATES}, one per line"
        raise UserError(f"{path}: {reason(error, 80)}; {needs}") from None
    if "" in lines:
        raise UserError(f"{path}, line {lines.index('') + 1}: empty; one per line is expected")
    return lines


def _fault(sample: Sample, n_classes: int) -> str | None:
    """Why a sample has no usable label."""
    if sample.fault is not None or sample.text is None:
        return sample.fault or "no label: KEY.cls is missing"
    if not re.fullmatch(rb"\s*[0-9]{1,9}\s*", sample.text):
        return f"a label is a whole number, got {printable(sample.text, 40)}"
    label = int(sample.text)
    return None if label < n_classes else f"label {label} of {n_classes} classes, which are counted from 0"


@dataclass
class ZeroShot:
    """Classes with the source of their images' features: live, or cached outputs of a locked trunk."""

    classes: Classes
    source: FeatureSource

    @classmethod
    def open(
        cls, classes: Classes, model: ClipModel, options: EncodeOptions, cache_dir: Path | None = None
    ) -> ZeroShot:
        return cls(classes, FeatureSource.open(classes.data, model, options, cache_dir, "zero-shot", ("image",)))

    def measure(self, model: ClipModel, options: EncodeOptions, native: Exponents, seed: int = 0) -> Json:
        """Measure accuracy by the trained exponents and others: the section "zero_shot" of results.json.

        Images that cannot be read are left out and named. Raises UserError where none can be read.
        """
        data = self.source.data
        image, bad = self.source.vectors("image", model, options, "zero-shot")
        kept = [row for row in range(len(data)) if row not in bad]
        names, templates = self.classes.names, self.classes.templates
        texts = [template.replace("{c}", name) for name in names for template in templates]
        prompts = encode_texts(text_encoder(model), texts, model.tokens, options, "zero-shot: prompts")
        labels = [self.classes.labels[data.keys[row]] for row in kept]
        return {
            "data": {"path": data.path, "split": data.split},
            "n_classes": len(names),
            "n_templates": len(templates),
            "n_images": len(kept),
            **classify(image[kept], prompts.unflatten(0, (len(names), -1)), labels, native, seed=seed),
            "skipped": self.source.skipped | {data.keys[row]: why for row, why in bad.items()},
        }


def class_documents(prompts: Tensor, gamma_d: float) -> tuple[Tensor, float]:
    """(documents [C, D] float32 of raw prompts [C, T, D], the gamma_d that they are ranked with).

    >>> import torch
    >>> class_documents(torch.tensor([[[3.0, 4.0], [0.0, 2.0]]]), 0.0)
    (tensor([[1.5000, 3.0000]]), 0.0)
    >>> class_documents(torch.tensor([[[3.0, 4.0], [0.0, 2.0]]]), 1.0)
    (tensor([[0.3000, 0.9000]]), 1.0)
    """
    mean = normalize(prompts.double().flatten(0, 1), gamma_d).view(prompts.shape).mean(1)
    return mean.float(), 1.0 if gamma_d == 1.0 else 0.0  # the mean has the norms that gamma_d keeps


def classify(
    image: Tensor,
    prompts: Tensor,
    labels: Sequence[int],
    native: Exponents,
    *,
    resamples: int = metrics.RESAMPLES,
    seed: int = 0,
) -> Json:
    """Classify raw image [N, D] by prompts [C, T, D]; a tie with another class counts against the model.

    Returns:
        {"acc1": {scoring: share of images whose class of labels [N] scores best}, "ci": {scoring: [lo, hi]}}, intervals
        by a 95 % bootstrap over images, None for a single one.
    """
    scorings = {NATIVE: as_floats(native)}
    scorings |= {n.value: n.exponents for n in (Normalization.COSINE, Normalization.DOT)}
    images = np.arange(len(labels))
    pairs = np.column_stack([images, np.asarray(labels, dtype=np.int64)])
    hits = []
    for name, exponents in scorings.items():
        documents, gamma_d = class_documents(prompts, float(exponents.gamma_d))
        ranking = rank(image, documents, pairs, {name: Exponents(exponents.gamma_q, gamma_d)})[name]
        hits.append(metrics.per_query(ranking.ranks, ranking.offsets, rates=["success@1"])["success@1"])
    intervals = metrics.mean_intervals(np.column_stack(hits), images, resamples=resamples, seed=seed)
    by_scoring = dict(zip(scorings, intervals, strict=True))
    return {
        "acc1": {name: value for name, (value, _, _) in by_scoring.items()},
        "ci": {name: [lo, hi] if len(labels) > 1 else None for name, (_, lo, hi) in by_scoring.items()},
    }
