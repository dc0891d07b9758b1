"""Zero-shot classification, which is i2t: a picture is the query and a class, described by prompts, the document.

A class's document is the mean over its templates' texts t of t / |t|**gamma_d. It is ranked as it is, by the picture's
mean score of the templates, but for gamma_d = 1, where it is normalized once more: then it is clip-benchmark's class
vector, and accuracy by cosine is clip-benchmark's (mmclip.evaluation.clip_benchmark gives clip-benchmark the same).
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
from mmclip.errors import UserError, printable
from mmclip.evaluation.results import NATIVE
from mmclip.models.factory import ClipModel
from mmclip.retrieval.ranking import as_floats, rank
from mmclip.similarity import Exponents, Normalization, normalize

NAMES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"
Json = dict[str, Any]


@dataclass(frozen=True)
class Classes:
    """Pictures of C classes: names [C]; templates with {c} for the name; ``data``, each picture's caption being its
    class's name; labels: key -> class."""

    names: list[str]
    templates: list[str]
    data: ImageTextData
    labels: dict[str, int]

    def prompts(self) -> list[str]:
        """[C * T] texts, class by class."""
        return [template.replace("{c}", name) for name in self.names for template in self.templates]


def open_classes(source: str, split: str | None = None) -> Classes:
    """Pictures of classes in clip-benchmark's layout: ROOT/classnames.txt, its templates, and ROOT/SPLIT/*.tar with
    KEY.jpg (png, webp) and KEY.cls, its class, counted from 0; or builtin:scenes-classes, which are drawn on first use.

    Errors: UserError for every fault of the whole; single samples that cannot be used are in ``data.skipped``.
    """
    root = Path(source)
    if source == f"builtin:{CLASSES}":
        root = build_scene_classes(builtin_root())
    elif source.startswith("builtin:"):
        raise UserError(f"--zeroshot-data {printable(source)}: unknown built-in classes; valid: builtin:{CLASSES}")
    if not source.strip() or not is_folder(root):
        raise UserError(f"--zeroshot-data {printable(source)!r}: no such folder; valid: a folder, builtin:{CLASSES}")
    names, templates = _lines(root / NAMES), _lines(root / TEMPLATES)
    for template in templates:
        if "{c}" not in template:
            raise UserError(f"{root / TEMPLATES}: {printable(template, 80)!r} has no {{c}}, the place of the name")
    folder = find_split(root, split, "eval")
    if folder is None:
        there = ", ".join(sorted(p.name for p in root.iterdir() if p.is_dir())) or "no folders"
        raise UserError(f"{root}: no split {printable(split or 'test or val')} with shards in it; there: {there}")
    data, labels = ImageTextData(str(root), folder.name, [], [], []), {}
    for shard in shards_of(folder):
        for sample in index_shard(shard, "cls"):
            label, fault = _label(sample, names)
            if sample.key in labels and sample.fault is None:
                fault = "a duplicate key: the first one is kept"
            if fault is not None or sample.image is None:
                data.skipped.append(BadSample(sample.key, sample.shard, fault or "no image beside its label"))
                continue
            labels[sample.key] = label
            data.keys.append(sample.key)
            data.captions.append([names[label]])
            data.places.append((sample.shard, *sample.image))
    if not labels:
        first = f"; first of {len(data.skipped)} skipped: {data.skipped[0]}" if data.skipped else ""
        raise UserError(f"{folder}: empty: no picture with a label (KEY.cls){first}")
    return Classes(names, templates, data, labels)


def _lines(path: Path) -> list[str]:
    """The lines of a file, which are counted. Errors: UserError for a missing or empty file, or an empty line."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").rstrip().split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else printable(error, 80)
        raise UserError(f"{path}: {why}; classification needs {NAMES} and {TEMPLATES}, a line each") from None
    if "" in lines:
        raise UserError(f"{path}, line {lines.index('') + 1}: empty; a line each is expected")
    return lines


def _label(sample: Sample, names: Sequence[str]) -> tuple[int, str | None]:
    """(class, None) or (-1, why not)."""
    if sample.fault is not None:
        return -1, sample.fault
    if sample.text is None:
        return -1, "no label: KEY.cls is missing"
    if not re.fullmatch(rb"\s*[0-9]{1,9}\s*", sample.text):
        return -1, f"a label is a whole number, got {printable(sample.text, 40)}"
    label = int(sample.text)
    known = label < len(names)
    return (label, None) if known else (-1, f"label {label} of {len(names)} classes, which are counted from 0")


@dataclass
class ZeroShot:
    """Classes with a model: their pictures read live, or replaced by cached outputs of a locked trunk."""

    classes: Classes
    source: FeatureSource

    @classmethod
    def open(
        cls, classes: Classes, model: ClipModel, options: EncodeOptions, cache_dir: Path | None = None
    ) -> ZeroShot:
        return cls(classes, FeatureSource.open(classes.data, model, options, cache_dir, "zero-shot", ("image",)))

    def measure(self, model: ClipModel, options: EncodeOptions, native: Exponents, seed: int = 0) -> Json:
        """The section "zero_shot" of results.json. native: the trained exponents; seed: of the bootstrap.

        Pictures that cannot be read are left out and named. Errors: UserError where none can be read.
        """
        data = self.source.data
        image, bad = self.source.vectors("image", model, options, "zero-shot")
        kept = [row for row in range(len(data)) if row not in bad]
        prompts = encode_texts(text_encoder(model), self.classes.prompts(), model.tokens, options, "zero-shot: prompts")
        labels = [self.classes.labels[data.keys[row]] for row in kept]
        return {
            "data": {"path": data.path, "split": data.split},
            "n_classes": len(self.classes.names),
            "n_templates": len(self.classes.templates),
            "n_images": len(kept),
            **classify(image[kept], prompts.unflatten(0, (len(self.classes.names), -1)), labels, native, seed=seed),
            "skipped": self.source.skipped | {data.keys[row]: why for row, why in bad.items()},
        }


def class_documents(prompts: Tensor, gamma_d: float) -> tuple[Tensor, float]:
    """(a document a class, the gamma_d that it is ranked with): raw prompts [C, T, D] -> [C, D] float32.

    >>> import torch
    >>> class_documents(torch.tensor([[[3.0, 4.0], [0.0, 2.0]]]), 0.0)
    (tensor([[1.5000, 3.0000]]), 0.0)
    >>> class_documents(torch.tensor([[[3.0, 4.0], [0.0, 2.0]]]), 1.0)
    (tensor([[0.3000, 0.9000]]), 1.0)
    """
    mean = normalize(prompts.double().flatten(0, 1), gamma_d).view(prompts.shape).mean(1)
    return mean.float(), 1.0 if gamma_d == 1.0 else 0.0  # lengths that gamma_d leaves are in the mean already


def classify(
    image: Tensor,
    prompts: Tensor,
    labels: Sequence[int],
    native: Exponents,
    *,
    resamples: int = metrics.RESAMPLES,
    seed: int = 0,
) -> Json:
    """{"acc1": {scoring: share of pictures whose class scores best}, "ci": {scoring: [lo, hi]}}.

    image [N, D] and prompts [C, T, D] raw, labels [N]. A tie with another class counts against the model. Intervals are
    95 % bootstraps over pictures, None for a single one.
    """
    scorings = {
        NATIVE: as_floats(native),
        "cosine": Normalization.COSINE.exponents,
        "dot": Normalization.DOT.exponents,
    }
    pairs = np.column_stack([np.arange(len(labels)), np.asarray(labels, dtype=np.int64)])
    right = []
    for name, exponents in scorings.items():
        documents, gamma_d = class_documents(prompts, float(exponents.gamma_d))
        ranking = rank(image, documents, pairs, {name: Exponents(exponents.gamma_q, gamma_d)})[name]
        right.append(metrics.success_at(1, ranking.ranks, ranking.offsets))
    found = metrics.mean_intervals(np.column_stack(right), np.arange(len(labels)), resamples=resamples, seed=seed)
    several = len(labels) > 1
    return {
        "acc1": {name: value for name, (value, _, _) in zip(scorings, found, strict=True)},
        "ci": {name: [lo, hi] if several else None for name, (_, lo, hi) in zip(scorings, found, strict=True)},
    }
