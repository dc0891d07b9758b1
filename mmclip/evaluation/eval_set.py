"""What is evaluated: raw embeddings with their relevance, and the pools of candidates cut from them.

A pool is a set of candidates with its own queries. ``retrieval`` is the main one: every image and every caption, no
distractor. Beside it stand ``full`` (only captions of level "full", where levels are known and differ) and one pool for
each set of distractors (everything, plus candidates that match nothing), each with its own numbers: they are not
comparable across pools.
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

from mmclip.errors import UserError, printable
from mmclip.retrieval.qrels import Qrels
from mmclip.retrieval.sides import lengths

Array = NDArray[Any]
FULL = "full"
MAIN_POOL = "retrieval"
LONGEST = 1e18  # the product of two such lengths is within float32's range, and no encoder comes near


@dataclass
class Distractors:
    """Candidates that match nothing and never ask: image [N2, D], text [M2, D], either None; captions [M2] where known.

    name: the pool's. mark: whatever else tells these items from others of the name. owner: side -> image row of every
    item, those of one row being drawn together in a bootstrap: a distractor image's captions, or, for ``twins``, an
    image of the main pool with what was made out of it. A side that is left out: each item by itself.
    """

    name: str
    image: Tensor | None = None
    text: Tensor | None = None
    captions: list[str] | None = None
    mark: str = ""
    owner: dict[str, list[int]] = field(default_factory=dict)
    twins: bool = False

    def __post_init__(self) -> None:
        self.image, self.text = (x if x is not None and len(x) else None for x in (self.image, self.text))

    def sides(self) -> dict[str, Tensor]:
        return {side: x for side, x in (("image", self.image), ("text", self.text)) if x is not None}

    def fingerprint(self) -> str:
        """16 hex digits of name, mark, counts and captions."""
        counts = {side: len(x) for side, x in self.sides().items()}
        content = json.dumps([self.name, self.mark, counts, self.captions])
        return hashlib.sha256(content.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _check_owner(distractors: Distractors, n_images: int) -> None:
    """A mistake of whoever made them; the numbers would be silently wrong."""
    images = distractors.sides().get("image")
    limit = n_images if distractors.twins or images is None else len(images)
    for side, rows in distractors.owner.items():
        x = distractors.sides().get(side)
        if x is None or len(rows) != len(x) or not all(0 <= r < limit for r in rows):
            raise UserError(
                f"{printable(distractors.name, 60)} {side}: owner has {len(rows)} rows, from {min(rows, default=0)} to "
                f"{max(rows, default=0)}; one from 0 to {limit - 1} for each item is needed"
            )


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
    distractors                  sets of candidates that are never queries
    gains [P]                    how relevant each pair is, above 0; None: all alike

    Errors: UserError, one line, for shapes or lengths that disagree, rows outside, no pair, and values not finite.
    """

    image: Tensor
    text: Tensor
    pairs: Tensor
    image_keys: list[str]
    captions: list[str]
    levels: list[str] | None = None
    n_objects: list[int] | None = None
    owner: list[int] | None = None
    distractors: list[Distractors] = field(default_factory=list)
    gains: Array | None = None

    def __post_init__(self) -> None:
        self.distractors = [d for d in self.distractors if d.sides()]
        names = [d.name for d in self.distractors]
        for d in self.distractors:
            _check_owner(d, len(self.image))
        taken = {n for n in names if names.count(n) > 1} | ({MAIN_POOL, FULL} & set(names))
        if taken:
            raise UserError(f"distractors called {printable(sorted(taken)[0], 60)!r} twice, or like another pool")
        dim = self.image.shape[-1] if self.image.ndim else 0
        named = {"image": self.image, "text": self.text}
        named |= {f"{printable(d.name, 60)} {side}": x for d in self.distractors for side, x in d.sides().items()}
        for side, x in named.items():
            if x.ndim != 2 or len(x) == 0 or x.shape[1] != dim:
                raise UserError(
                    f"{side} embeddings of shape {list(x.shape)}: at least one row is needed, and one dimension for "
                    f"all (the images' is {dim})"
                )
            if not dim:
                raise UserError(f"{side} embeddings of shape {list(x.shape)}: vectors of no dimension")
            longest = float(lengths(x, side).max())  # checks that every value is finite
            if longest > LONGEST:
                raise UserError(
                    f"{side} embeddings: a length of {longest:.3g}; above {LONGEST:.0e} products overflow in float32: "
                    "divide all embeddings by one constant"
                )
        for name, values, n in (
            ("image_keys", self.image_keys, len(self.image)),
            ("captions", self.captions, len(self.text)),
            ("levels", self.levels, len(self.text)),
            ("n_objects", self.n_objects, len(self.image)),
            ("owner", self.owner, len(self.text)),
        ):
            if values is not None and len(values) != n:
                raise UserError(f"{name} has {len(values)} entries; {n} embeddings need {n}")
        # Also checks the pairs and gains: rows that exist, and at least one.
        self.pairs = torch.as_tensor(self.pairs, dtype=torch.int64).cpu()
        Qrels(self.pairs, self.gains).check(len(self.image), len(self.text))
        if self.owner is not None:
            outside = [o for o in self.owner if not -1 <= o < len(self.image)]
            if outside:
                raise UserError(f"owner names image row {outside[0]}; valid rows are -1 to {len(self.image) - 1}")

    def owners(self) -> Array:
        """[M]: the image row of every text, -1 for nobody's."""
        owner = np.full(len(self.text), -1)
        if self.owner is not None:
            owner[:] = self.owner
        else:
            every = self.pairs.numpy()
            owner[every[::-1, 1]] = every[::-1, 0]  # written last to first, so that the first pair stays
        return owner

    def fingerprint(self) -> str:
        """16 hex digits of keys, captions, levels and pairs: equal when runs can be paired."""
        digest = hashlib.sha256()
        digest.update(json.dumps([self.image_keys, self.captions, self.levels]).encode())
        digest.update(np.unique(self.pairs.numpy(), axis=0).astype("<i8").tobytes())
        if self.gains is not None:
            digest.update(np.asarray(self.gains, dtype="<f8").tobytes())
        return digest.hexdigest()[:16]


@dataclass
class Pool:
    """One pool: raw vectors by side, pairs by pool rows with their gains, and what is known of each row.

    clusters: side -> [n] numbers; rows with one number (an image and its captions) are resampled together.
    whole: side -> {attribute: [n] whole numbers, -1 unknown}; named: side -> {attribute: [n] str, "" unknown}
    text_length: unit -> [n texts], -1 unknown, as :func:`text_lengths` has it
    fingerprint: of its distractors, None for a pool without
    """

    name: str
    vectors: dict[str, Tensor]
    pairs: Array
    gains: Array | None
    clusters: dict[str, Array]
    whole: dict[str, dict[str, Array]] = field(default_factory=dict)
    named: dict[str, dict[str, Array]] = field(default_factory=dict)
    text_length: dict[str, Array] = field(default_factory=dict)
    fingerprint: str | None = None


def make_pools(data: EvalData) -> list[Pool]:
    """The main pool, then those of the others that ``data`` has."""
    m = len(data.text)
    pairs = data.pairs.numpy()
    main = _pool(data, MAIN_POOL, np.arange(m), pairs, data.gains)
    pools = [main]
    levels = np.array(data.levels or [], dtype=object)
    full = np.flatnonzero(levels == FULL)
    if 0 < len(full) < m:
        place = np.full(m, -1)
        place[full] = np.arange(len(full))
        kept = np.column_stack([pairs[:, 0], place[pairs[:, 1]]])
        among = kept[:, 1] >= 0
        if among.any():
            gains = None if data.gains is None else np.asarray(data.gains)[among]
            pools.append(_pool(data, FULL, full, kept[among], gains))
    return pools + [_with_distractors(data, pairs, d) for d in data.distractors]


def _with_distractors(data: EvalData, pairs: Array, distractors: Distractors) -> Pool:
    m = len(data.text)
    pool = _pool(data, distractors.name, np.arange(m), pairs, data.gains)
    pool.fingerprint = distractors.fingerprint()
    first = len(data.image) + m  # the first number that no image or text of the main pool has
    for i, (side, x) in enumerate(distractors.sides().items()):
        pool.vectors[side] = torch.cat([pool.vectors[side], x.to(pool.vectors[side])])
        if side in distractors.owner:
            new = np.asarray(distractors.owner[side], dtype=np.int64) + (0 if distractors.twins else first)
        else:
            new = np.arange(len(x)) + first + i * max(len(y) for y in distractors.sides().values())
        pool.clusters[side] = np.concatenate([pool.clusters[side], new])
        pool.whole[side] = {k: np.append(v, np.full(len(x), -1)) for k, v in pool.whole[side].items()}
        pool.named[side] = {k: np.append(v, [""] * len(x)) for k, v in pool.named[side].items()}
        if side == "text":
            known = text_lengths(distractors.captions) if distractors.captions is not None else {}
            unknown = np.full(len(x), -1)
            pool.text_length = {k: np.append(v, known.get(k, unknown)) for k, v in pool.text_length.items()}
    return pool


def _pool(data: EvalData, name: str, texts: Array, pairs: Array, gains: Array | None) -> Pool:
    """All images with the text rows ``texts``; pairs in the pool's rows. Cluster numbers: images 0..N-1, texts that
    belong to nobody N + their row."""
    n = len(data.image)
    owner = data.owners()
    text_clusters = np.where(owner >= 0, owner, n + np.arange(len(owner)))[texts]
    lengths_of_text = {unit: n[texts] for unit, n in text_lengths(data.captions).items()}
    counts = _optional(data.n_objects)
    return Pool(
        name=name,
        vectors={"image": data.image, "text": data.text[torch.as_tensor(texts)]},
        pairs=pairs,
        gains=gains,
        clusters={"image": np.arange(n), "text": text_clusters},
        whole={"image": {} if counts is None else {"n_objects": counts}, "text": {"n_words": lengths_of_text["words"]}},
        named={"image": {}, "text": {} if data.levels is None else {"level": np.array(data.levels, object)[texts]}},
        text_length=lengths_of_text,
    )


def text_lengths(texts: Sequence[str]) -> dict[str, Array]:
    """{"words": [n], "characters": [n]} of texts; words are separated by white space.

    >>> text_lengths(["a dog", ""])
    {'words': array([2, 0]), 'characters': array([5, 0])}
    """
    return {
        "words": np.array([len(t.split()) for t in texts], dtype=np.int64),
        "characters": np.array([len(t) for t in texts], dtype=np.int64),
    }


def _optional(values: Sequence[int] | None) -> Array | None:
    return None if values is None else np.asarray(values, dtype=np.int64)
