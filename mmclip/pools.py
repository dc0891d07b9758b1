"""What is evaluated: raw embeddings with their relevance, and the pools of candidates cut from them.

A pool is a set of candidates with its own queries. ``retrieval`` is the main one: every image and every caption, no
distractor. Beside it stand ``full`` (only captions of level "full", where levels are known and differ) and
``distractors`` (everything, plus candidates that match nothing), each with its own numbers: they are not comparable
across pools.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmclip.errors import UsageError
from mmclip.relevance import group_pairs
from mmclip.sides import lengths

Array = NDArray[Any]
FULL = "full"
MAIN_POOL = "retrieval"


@dataclass
class EvalData:
    """Raw embeddings of an evaluation set; N images, M texts, P relevant pairs.

    image [N, D], text [M, D]    raw features, never normalized
    pairs [P, 2]                 int64 (image row, text row), relevance of both directions
    image_keys, captions         N and M strings
    levels                       M strings (full, partial, vague...) or None
    n_objects                    N counts or None
    owner                        M image rows: whose caption a text is, used to resample an image's captions together;
                                 None: the image of the text's first pair; -1: nobody's
    distractor_image [N2, D], distractor_text [M2, D]    candidates that are never queries; None (or no row): none

    Errors: UsageError, one line, for shapes or lengths that disagree, rows outside, no pair, and values not finite.
    """

    image: Tensor
    text: Tensor
    pairs: Tensor
    image_keys: list[str]
    captions: list[str]
    levels: list[str] | None = None
    n_objects: list[int] | None = None
    owner: list[int] | None = None
    distractor_image: Tensor | None = None
    distractor_text: Tensor | None = None

    def __post_init__(self) -> None:
        if self.distractor_image is not None and len(self.distractor_image) == 0:
            self.distractor_image = None
        if self.distractor_text is not None and len(self.distractor_text) == 0:
            self.distractor_text = None
        dim = self.image.shape[-1] if self.image.ndim else 0
        named = {"image": self.image, "text": self.text}
        named |= {
            name: x
            for name, x in (("distractor image", self.distractor_image), ("distractor text", self.distractor_text))
            if x is not None
        }
        for side, x in named.items():
            if x.ndim != 2 or len(x) == 0 or x.shape[1] != dim:
                raise UsageError(
                    f"{side} embeddings of shape {list(x.shape)}: at least one row and the images' dimension, "
                    f"[n, {dim}], is needed"
                )
            lengths(x, side)  # checks that every value is finite
        for name, values, n in (
            ("image_keys", self.image_keys, len(self.image)),
            ("captions", self.captions, len(self.text)),
            ("levels", self.levels, len(self.text)),
            ("n_objects", self.n_objects, len(self.image)),
            ("owner", self.owner, len(self.text)),
        ):
            if values is not None and len(values) != n:
                raise UsageError(f"{name} has {len(values)} entries; {n} embeddings need {n}")
        # Also checks the pairs: rows that exist, and at least one.
        self.pairs = torch.as_tensor(self.pairs, dtype=torch.int64).cpu()
        group_pairs(self.pairs, len(self.image), len(self.text))
        if self.owner is not None:
            outside = [o for o in self.owner if not -1 <= o < len(self.image)]
            if outside:
                raise UsageError(f"owner names image row {outside[0]}; valid rows are -1 to {len(self.image) - 1}")

    def fingerprint(self) -> str:
        """16 hex digits of keys, captions, levels, pairs and distractor counts: equal when runs can be paired."""
        digest = hashlib.sha256()
        counts = [0 if x is None else len(x) for x in (self.distractor_image, self.distractor_text)]
        digest.update(json.dumps([self.image_keys, self.captions, self.levels, counts]).encode())
        digest.update(np.unique(self.pairs.numpy(), axis=0).astype("<i8").tobytes())
        return digest.hexdigest()[:16]


@dataclass
class Pool:
    """One pool: raw vectors by side, pairs by pool rows, and what is known of each row.

    clusters: side -> [n] numbers; rows with one number (an image and its captions) are resampled together.
    whole: side -> {attribute: [n] whole numbers, -1 unknown}; named: side -> {attribute: [n] str, "" unknown}
    """

    name: str
    vectors: dict[str, Tensor]
    pairs: Array
    clusters: dict[str, Array]
    whole: dict[str, dict[str, Array]] = field(default_factory=dict)
    named: dict[str, dict[str, Array]] = field(default_factory=dict)


def make_pools(data: EvalData) -> list[Pool]:
    """The main pool, then those of the others that ``data`` has."""
    n, m = len(data.image), len(data.text)
    pairs = data.pairs.numpy()
    main = _pool(data, MAIN_POOL, np.arange(m), pairs)
    pools = [main]
    levels = np.array(data.levels or [], dtype=object)
    full = np.flatnonzero(levels == FULL)
    if 0 < len(full) < m:
        place = np.full(m, -1)
        place[full] = np.arange(len(full))
        kept = np.column_stack([pairs[:, 0], place[pairs[:, 1]]])
        kept = kept[kept[:, 1] >= 0]
        if len(kept):
            pools.append(_pool(data, FULL, full, kept))
    extra = {"image": data.distractor_image, "text": data.distractor_text}
    if any(x is not None for x in extra.values()):
        pool = _pool(data, "distractors", np.arange(m), pairs)
        next_cluster = n + m
        for side, x in extra.items():
            if x is None:
                continue
            pool.vectors[side] = torch.cat([pool.vectors[side], x.to(pool.vectors[side])])
            new = np.arange(next_cluster, next_cluster + len(x))
            next_cluster += len(x)
            pool.clusters[side] = np.concatenate([pool.clusters[side], new])
            pool.whole[side] = {k: np.append(v, np.full(len(x), -1)) for k, v in pool.whole[side].items()}
            pool.named[side] = {k: np.append(v, [""] * len(x)) for k, v in pool.named[side].items()}
        pools.append(pool)
    return pools


def _pool(data: EvalData, name: str, texts: Array, pairs: Array) -> Pool:
    """All images with the text rows ``texts``; pairs in the pool's rows. Cluster numbers: images 0..N-1, texts that
    belong to nobody N + their row."""
    n = len(data.image)
    owner = np.full(len(data.text), -1)
    if data.owner is not None:
        owner[:] = data.owner
    else:
        every = data.pairs.numpy()
        owner[every[::-1, 1]] = every[::-1, 0]  # written last to first, so that the first pair stays
    text_clusters = np.where(owner >= 0, owner, n + np.arange(len(owner)))[texts]
    words = np.array([len(c.split()) for c in data.captions], dtype=np.int64)[texts]
    counts = _optional(data.n_objects)
    return Pool(
        name=name,
        vectors={"image": data.image, "text": data.text[torch.as_tensor(texts)]},
        pairs=pairs,
        clusters={"image": np.arange(n), "text": text_clusters},
        whole={"image": {} if counts is None else {"n_objects": counts}, "text": {"n_words": words}},
        named={"image": {}, "text": {} if data.levels is None else {"level": np.array(data.levels, object)[texts]}},
    )


def _optional(values: Sequence[int] | None) -> Array | None:
    return None if values is None else np.asarray(values, dtype=np.int64)
