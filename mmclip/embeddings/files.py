"""Embeddings in a file: raw vectors, ids, relevance, scoring. Anyone may write it; it is evaluated as a model is.

One set of names, in ``.npz`` and in ``.safetensors``. N images, M texts, P relevant pairs:

    image [N, D], text [M, D]   floats as the encoder gives them, never normalized
    image_ids [N], text_ids [M] unique strings; whole numbers are taken by their digits
    text_image_ids [M]          the id of each text's own image, "" for none. It says what is relevant, unless pairs do,
                                and which captions a bootstrap draws together
    pairs [P, 2]                optional if text_image_ids is there: (image, text) relevant to each other, as rows
                                (whole numbers) or, in .npz, as ids (strings)
    gains [P]                   optional: how relevant each pair is, above 0
    captions [M]                optional strings
    levels [M]                  optional strings: full, partial, vague...
    n_objects [N]               optional whole numbers
    distractor_image [N2, D], distractor_text [M2, D]    optional: candidates that match nothing, with
    distractor_captions [M2], distractor_owner [M2]      the texts' strings, and the distractor image of each, as rows
    evidence_t2i [N], evidence_i2t [M]    optional: log-evidence of every candidate (mmclip.retrieval.hubness), bank included
    meta                        optional JSON: {"model": its name, "facts": mmclip.json, "alpha": {"i2t": a, "t2i": a},
                                "bank": {...}, "distractors": what tells them from others}. No facts: a
                                plain CLIP, native in cosine

Strings are numpy strings, or (as written here, and always in .safetensors) the bytes of a JSON list: see
mmclip.array_files. Read in numpy by ``json.loads(array.tobytes())``.
All that a script needs to write:

    np.savez("x.npz", image=image, text=text, image_ids=names, text_ids=numbers, text_image_ids=names_of_each_text)
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmclip.array_files import json_array, read_arrays, write_arrays
from mmclip.embeddings.arrays import (
    first_repeated,
    read_floats,
    read_meta,
    read_numbers,
    read_pairs,
    read_rows,
    read_strings,
    read_vectors,
)
from mmclip.errors import UserError, nearest, printable
from mmclip.evaluation.eval_set import Distractors, EvalData
from mmclip.similarity import CLIP_DIRECTIONS

Array = NDArray[Any]
NEEDED = ("image", "text", "image_ids", "text_ids")
EVIDENCE = tuple(f"evidence_{d.value}" for d in CLIP_DIRECTIONS)
OPTIONAL = ("text_image_ids", "pairs", "gains", "captions", "levels", "n_objects", "distractor_image",
            "distractor_text", "distractor_captions", "distractor_owner", *EVIDENCE, "meta")  # fmt: skip


@dataclasses.dataclass
class SavedEmbeddings:
    """Names and shapes as the file has them, but

    pairs [P, 2]    int64 rows (image, text); owner: the image row of each text, -1 for none, or None where unknown
    evidence        direction -> [n candidates] float64: log-evidence under alpha of the opposite direction
    alpha           direction -> scale of its scores; None: not trained, or unknown
    facts           mmclip.json; {} for a plain CLIP

    Errors: UserError, one line, for what does not fit together (also all of EvalData's).
    """

    image: Tensor
    text: Tensor
    image_ids: list[str]
    text_ids: list[str]
    pairs: Tensor
    owner: list[int] | None = None
    gains: Array | None = None
    captions: list[str] | None = None
    levels: list[str] | None = None
    n_objects: list[int] | None = None
    distractors: Distractors | None = None
    evidence: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    model: str = ""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    alpha: dict[str, float | None] = dataclasses.field(default_factory=dict)
    bank: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, ids, n in (
            ("image_ids", self.image_ids, len(self.image)),
            ("text_ids", self.text_ids, len(self.text)),
        ):
            if len(ids) != n:
                raise UserError(f"{name} has {len(ids)} entries for {n} embeddings")
            if len(set(ids)) < n:
                raise UserError(f"{name}: {printable(first_repeated(ids), 80)!r} stands there twice; ids are unique")
        self.eval_data()
        self.alpha = {d.value: self.alpha.get(d.value) for d in CLIP_DIRECTIONS}
        for direction in CLIP_DIRECTIONS:
            if direction.value not in self.evidence:
                continue
            found = self.evidence[direction.value]
            n = len(direction.roles({"image": self.image, "text": self.text})[1])
            if found.shape != (n,) or not bool(found.isfinite().all()):
                raise UserError(
                    f"evidence_{direction.value} of shape {list(found.shape)}: a finite number for each of the {n} "
                    f"{direction.document_side}s is needed"
                )
            if self.alpha[direction.opposite.value] is None:
                raise UserError(
                    f"evidence_{direction.value} without alpha of {direction.opposite.value}: it was computed with that"
                )

    def counts_of_bank(self, name: str) -> dict[str, int]:
        """side -> "size" or "overlap" of the bank that the evidence was computed over, as far as the file tells."""
        found = self.bank.get(name)
        return {k: v for k, v in found.items() if isinstance(v, int)} if isinstance(found, dict) else {}

    def eval_data(self) -> EvalData:
        """What mmclip evaluates. Texts without captions are called by their ids."""
        return EvalData(
            image=self.image,
            text=self.text,
            pairs=self.pairs,
            image_keys=self.image_ids,
            captions=self.text_ids if self.captions is None else self.captions,
            levels=self.levels,
            n_objects=self.n_objects,
            owner=self.owner,
            distractors=[] if self.distractors is None else [self.distractors],
            gains=self.gains,
        )


def load_embeddings(path: str | Path) -> SavedEmbeddings:
    """Read a file of either kind. Nothing in it is run. Errors: UserError, one line, naming the file."""
    try:
        return _from_arrays(read_arrays(path))
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(printable(path)) else f"{printable(path)}: {text}") from None


def save_embeddings(path: str | Path, saved: SavedEmbeddings) -> None:
    """Write a file of the kind that ``path`` ends in, whole or not at all. Errors: UserError."""
    arrays: dict[str, Array] = {name: getattr(saved, name).numpy() for name in ("image", "text", "pairs")}
    for name in ("image_ids", "text_ids", "captions", "levels"):
        if (values := getattr(saved, name)) is not None:
            arrays[name] = json_array(values)
    if saved.owner is not None:
        arrays["text_image_ids"] = json_array([saved.image_ids[row] if row >= 0 else "" for row in saved.owner])
    if saved.gains is not None:
        arrays["gains"] = np.asarray(saved.gains, dtype=np.float64)
    if saved.n_objects is not None:
        arrays["n_objects"] = np.asarray(saved.n_objects, dtype=np.int64)
    arrays |= {f"evidence_{direction}": x.double().numpy() for direction, x in saved.evidence.items()}
    meta: dict[str, Any] = {"model": saved.model, "facts": saved.facts, "alpha": saved.alpha, "bank": saved.bank}
    if saved.distractors is not None:
        extra = saved.distractors
        arrays |= {f"distractor_{side}": x.numpy() for side, x in extra.sides().items()}
        if extra.captions is not None:
            arrays["distractor_captions"] = json_array(extra.captions)
        if "text" in extra.owner:
            arrays["distractor_owner"] = np.asarray(extra.owner["text"], dtype=np.int64)
        meta["distractors"] = extra.mark
    arrays["meta"] = json_array(meta)
    write_arrays(path, arrays)


def _from_arrays(arrays: dict[str, Array]) -> SavedEmbeddings:
    valid = (*NEEDED, *OPTIONAL)
    for name in arrays:
        if name not in valid:
            raise UserError(
                f"unknown array {printable(name, 60)!r}{nearest(name[:60], valid)} (valid: {', '.join(valid)})"
            )
    there = ", ".join(arrays) or "none"
    for name in NEEDED:
        if name not in arrays:
            raise UserError(f"no array {name!r}; there: {there}; needed: {', '.join(NEEDED)}")
    if "text_image_ids" not in arrays and "pairs" not in arrays:
        raise UserError(f"nothing says what is relevant: text_image_ids or pairs is needed; there: {there}")
    if "gains" in arrays and "pairs" not in arrays:
        raise UserError("gains without pairs: they say how relevant each pair is")
    vectors: dict[str, Tensor] = {
        n: read_vectors(arrays[n], n) for n in ("image", "text", "distractor_image", "distractor_text") if n in arrays
    }
    ids = {side: read_strings(arrays[f"{side}_ids"], f"{side}_ids", len(vectors[side])) for side in ("image", "text")}
    texts = len(ids["text"])
    owner = None
    if "text_image_ids" in arrays:
        owner = read_rows(
            read_strings(arrays["text_image_ids"], "text_image_ids", texts), ids["image"], "text_image_ids", "image"
        )
    if "pairs" in arrays:
        pairs = read_pairs(arrays["pairs"], ids)
    else:
        pairs = np.array([[image, text] for text, image in enumerate(owner or []) if image >= 0]).reshape(-1, 2)
    meta = read_meta(arrays["meta"]) if "meta" in arrays else {}
    facts = meta.get("facts", {})
    alpha = {d.value: facts.get(f"logit_scale_{d.value}") for d in CLIP_DIRECTIONS} | meta.get("alpha", {})
    n_objects = read_numbers(arrays, "n_objects", "iu", len(ids["image"]))
    gains = read_numbers(arrays, "gains", "iuf", len(pairs))
    evidence = {name.rpartition("_")[2]: arrays[name] for name in EVIDENCE if name in arrays}
    return SavedEmbeddings(
        vectors["image"],
        vectors["text"],
        ids["image"],
        ids["text"],
        torch.from_numpy(pairs.astype(np.int64)),
        owner=owner,
        gains=None if gains is None else gains.astype(np.float64),
        captions=read_strings(arrays["captions"], "captions", texts) if "captions" in arrays else None,
        levels=read_strings(arrays["levels"], "levels", texts) if "levels" in arrays else None,
        n_objects=None if n_objects is None else n_objects.astype(np.int64).tolist(),
        distractors=_distractors(arrays, vectors, meta.get("distractors", "")),
        evidence={d: torch.from_numpy(read_floats(x, f"evidence_{d}").astype(np.float64)) for d, x in evidence.items()},
        model=meta.get("model", ""),
        facts=facts,
        alpha=alpha,
        bank=meta.get("bank", {}),
    )


def _distractors(arrays: dict[str, Array], vectors: dict[str, Tensor], mark: str) -> Distractors | None:
    """One set, called "distractors"; a text of a distractor image is drawn together with it."""
    image, text = vectors.get("distractor_image"), vectors.get("distractor_text")
    texts = 0 if text is None else len(text)
    captions = None
    if "distractor_captions" in arrays:
        captions = read_strings(arrays["distractor_captions"], "distractor_captions", texts)
    rows = read_numbers(arrays, "distractor_owner", "iu", texts)
    if image is None and text is None:
        return None
    owner = {}
    if rows is not None:
        owner = {"text": rows.astype(np.int64).tolist()} | ({} if image is None else {"image": list(range(len(image)))})
    return Distractors("distractors", image, text, captions, mark, owner)
