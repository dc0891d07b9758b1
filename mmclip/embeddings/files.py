"""Raw embeddings of images and texts with ids and relevance, in memory and in a file that any script can write.

Arrays of a ``.npz`` or ``.safetensors`` file, for N images, M texts and P relevant pairs:

    image [N, D], text [M, D]    floats as the encoder returns them, never normalized
    image_ids [N], text_ids [M]  unique strings; whole numbers are read as their digits
    text_image_ids [M]           the id of each text's own image, "" for none. Defines relevance unless pairs do, and
                                 which captions a bootstrap draws together
    pairs [P, 2]                 optional with text_image_ids: relevant (image, text), as rows (whole numbers) or, in
                                 .npz, as ids (strings)
    gains [P]                    optional: degree of relevance of each pair, above 0
    captions, levels [M]         optional strings; a level is full, partial, vague...
    n_objects [N]                optional whole numbers
    distractor_image [N2, D], distractor_text [M2, D]    optional: candidates relevant to nothing, with
    distractor_captions [M2], distractor_owner [M2]      the texts' strings, and the distractor image of each, as rows
    evidence_t2i [N], evidence_i2t [M]    optional: log-normalizer of every candidate over a query bank
    meta                         optional JSON: {"model": name, "facts": mmclip.json, "alpha": {"i2t": a, "t2i": a},
                                 "bank": {...}, "distractors": what distinguishes them from others of the name}.
                                 Without facts the native scoring is cosine (a plain CLIP)

Strings are numpy strings, or (as written here, and always in .safetensors) the bytes of a JSON list, which
``json.loads(array.tobytes())`` reads. A script needs only:

    np.savez("x.npz", image=image, text=text, image_ids=names, text_ids=numbers, text_image_ids=names_of_each_text)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmclip.config.model_config import check_metadata, shown
from mmclip.errors import UserError, nearest, printable
from mmclip.io import json_array, read_arrays, read_json_array, write_arrays
from mmclip.retrieval import Qrels, norms
from mmclip.roles import CLIP_DIRECTIONS

Array = NDArray[Any]
SIDES = ("image", "text")
VECTORS = ("image", "text", "distractor_image", "distractor_text")
STRINGS = dict.fromkeys(("text_ids", "text_image_ids", "captions", "levels"), "text") | {
    "image_ids": "image",
    "distractor_captions": "distractor_text",
}  # array -> the vectors that it describes
NUMBERS = {"n_objects": ("image", "iu"), "distractor_owner": ("distractor_text", "iu"), "gains": ("pairs", "iuf")}
NEEDED = ("image", "text", "image_ids", "text_ids")
VALID = tuple(dict.fromkeys((*NEEDED, *VECTORS, *STRINGS, "pairs", *NUMBERS, "evidence_i2t", "evidence_t2i", "meta")))
META = {"model": str, "facts": dict, "alpha": dict, "bank": dict, "distractors": str}
MAX_NORM = 1e18  # the product of two such norms fits in float32, and no encoder comes near


def check_vectors(embeddings: Mapping[str, Tensor]) -> None:
    """Require finite [n, D] with n, D >= 1 and one D for all names, and norms whose products float32 can hold."""
    dim = next(iter(embeddings.values())).shape[-1:]
    for name, x in embeddings.items():
        if x.ndim != 2 or not x.numel() or x.shape[1:] != dim:
            needed = f"one dimension for all (the {next(iter(embeddings))}s' is {[*dim, 0][0]})"
            raise UserError(f"{name} embeddings of shape {list(x.shape)}: at least one row is needed, and {needed}")
        largest = float(norms(x, name).max())  # also refuses values that are not finite
        if largest > MAX_NORM:
            overflow = f"above {MAX_NORM:.0e} products overflow in float32: divide all embeddings by one constant"
            raise UserError(f"{name} embeddings: a norm of {largest:.3g}; {overflow}")


@dataclasses.dataclass
class Distractors:
    """Candidates that are relevant to nothing and never queries.

    Attributes:
        name: Of the candidate pool that they make with the main images and texts.
        image, text: Raw [N2, D] and [M2, D], either None.
        captions: M2 strings, None where unknown.
        mark: Distinguishes these items from others of the name.
        owner: Side -> image row of every item; a bootstrap draws items of one row together. Rows count the distractor
            images or, with ``twins``, the main images that they were made of. A side may be missing: each by itself.
    """

    name: str
    image: Tensor | None = None
    text: Tensor | None = None
    captions: list[str] | None = None
    mark: str = ""
    owner: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    twins: bool = False

    def sides(self) -> dict[str, Tensor]:
        """The sides that have items."""
        return {side: x for side, x in zip(SIDES, (self.image, self.text), strict=True) if x is not None and len(x)}

    def fingerprint(self) -> str:
        """16 hex digits of name, mark, counts and captions."""
        counts = {side: len(x) for side, x in self.sides().items()}
        content = json.dumps([self.name, self.mark, counts, self.captions])
        return hashlib.sha256(content.encode("utf-8", "backslashreplace")).hexdigest()[:16]

    def check(self, n_images: int) -> None:
        """Require an owner row in range for each item; ``n_images``: of the main images."""
        sizes = {side: len(x) for side, x in self.sides().items()}
        limit = n_images if self.twins else sizes.get("image", n_images)
        for side, rows in self.owner.items():
            if len(rows) != sizes.get(side) or not all(0 <= r < limit for r in rows):
                span = f"{len(rows)} rows, from {min(rows, default=0)} to {max(rows, default=0)}"
                needed = f"one from 0 to {limit - 1} for each item is needed"
                raise UserError(f"{printable(self.name, 60)} {side}: owner has {span}; {needed}")


@dataclasses.dataclass
class Embeddings:
    """Raw embeddings of N images and M texts with P relevant pairs; checked on construction (UserError, one line).

    Attributes named as a file's arrays hold these. The others:
        pairs: [P, 2] int64 (image row, text row).
        captions: None: texts are called by their ids.
        text_ids: None: KEY#0, KEY#1... of their image.
        owner: Image row that each caption belongs to, -1 for none; None: that of the text's first pair.
        distractors: A file holds at most one set.
        skipped: id -> reason, of images that could not be read.
        metadata: mmclip.json of the encoder; {} for a plain CLIP.
        alpha: direction -> logit scale, None where not trained or unknown.
        evidence: direction -> [n candidates] float64 log-normalizers under alpha of the opposite direction.
        bank: Name, size and overlap by side of the query bank that ``evidence`` was computed over.
    """

    image: Tensor
    text: Tensor
    pairs: Tensor
    image_ids: list[str]
    captions: list[str] | None = None
    text_ids: list[str] | None = None
    levels: list[str] | None = None
    n_objects: list[int] | None = None
    owner: list[int] | None = None
    distractors: list[Distractors] = dataclasses.field(default_factory=list)
    gains: Array | None = None
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    model: str = ""
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    alpha: dict[str, float | None] = dataclasses.field(default_factory=dict)
    evidence: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    bank: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.distractors = [d for d in self.distractors if d.sides()]
        n, m = len(self.image), len(self.text)
        for names, size in ((("image_ids", "n_objects"), n), (("captions", "text_ids", "levels", "owner"), m)):
            for name in names:
                values = getattr(self, name)
                if values is not None and len(values) != size:
                    raise UserError(f"{name} has {len(values)} entries for {size} embeddings")
                if values is not None and name.endswith("_ids") and len(set(values)) < size:
                    twice = Counter(values).most_common(1)[0][0]
                    raise UserError(f"{name}: {printable(twice, 80)!r} stands there twice; ids are unique")
        vectors = {"image": self.image, "text": self.text}
        for d in self.distractors:
            d.check(n)
            vectors |= {f"{printable(d.name, 60)} {side}": x for side, x in d.sides().items()}
        check_vectors(vectors)
        self.pairs = torch.as_tensor(self.pairs, dtype=torch.int64).cpu()
        if len(self.pairs):  # distractors have none
            Qrels(self.pairs, self.gains).check(n, m)
        if outside := [o for o in self.owner or [] if not -1 <= o < n]:
            raise UserError(f"owner names image row {outside[0]}; valid rows are -1 to {n - 1}")
        self.alpha = {d.value: self.alpha.get(d.value) for d in CLIP_DIRECTIONS}
        for direction in [d for d in CLIP_DIRECTIONS if d.value in self.evidence]:
            evidence, size = self.evidence[direction.value], len(vectors[direction.document_side])
            if evidence.shape != (size,) or not bool(evidence.isfinite().all()):
                needed = f"a finite number for each of the {size} {direction.document_side}s is needed"
                raise UserError(f"evidence_{direction.value} of shape {list(evidence.shape)}: {needed}")
            opposite = direction.opposite.value
            if self.alpha[opposite] is None:
                raise UserError(f"evidence_{direction.value} without alpha of {opposite}: it was computed with that")

    @property
    def texts(self) -> list[str]:
        """Captions, or the ids of texts that have none."""
        return self.captions if self.captions is not None else self.named_texts()

    def named_texts(self) -> list[str]:
        """``text_ids``, by default KEY#i: the image's id and the caption's place among its captions."""
        if self.text_ids is not None:
            return self.text_ids
        count: Counter[int] = Counter()
        names = []
        for row in self.owners().tolist():
            names.append(f"{self.image_ids[row] if row >= 0 else ''}#{count[row]}")
            count[row] += 1
        return names

    def owners(self) -> Array:
        """[M]: image row of every text, -1 for none."""
        if self.owner is not None:
            return np.asarray(self.owner, dtype=np.int64)
        owner, pairs = np.full(len(self.text), -1), self.pairs.numpy()
        owner[pairs[::-1, 1]] = pairs[::-1, 0]  # last to first, so that the first pair stays
        return owner

    def fingerprint(self) -> str:
        """16 hex digits of ids, captions, levels, pairs and gains: equal where runs can be paired."""
        digest = hashlib.sha256(json.dumps([self.image_ids, self.texts, self.levels]).encode())
        digest.update(np.unique(self.pairs.numpy(), axis=0).astype("<i8").tobytes())
        if self.gains is not None:
            digest.update(np.asarray(self.gains, dtype="<f8").tobytes())
        return digest.hexdigest()[:16]

    def bank_counts(self, name: str) -> dict[str, int]:
        """Side -> "size" or "overlap" of the query bank of ``evidence``; sides that the file lacks are missing."""
        counts = self.bank.get(name)
        return {k: v for k, v in counts.items() if isinstance(v, int)} if isinstance(counts, dict) else {}


def load_embeddings(path: str | Path) -> Embeddings:
    """Read a file of either kind without running anything in it. Raises UserError, one line, naming the file."""
    try:
        return _from_arrays(read_arrays(path))
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(printable(path)) else f"{printable(path)}: {text}") from None


def save_embeddings(path: str | Path, data: Embeddings) -> None:
    """Write a file of the kind that ``path`` ends in, whole or not at all. Raises UserError."""
    arrays: dict[str, Array] = {name: getattr(data, name).numpy() for name in ("image", "text", "pairs")}
    strings = {"image_ids": data.image_ids, "text_ids": data.named_texts(), "captions": data.captions,
               "levels": data.levels}  # fmt: skip
    if data.owner is not None:
        strings["text_image_ids"] = [data.image_ids[row] if row >= 0 else "" for row in data.owner]
    if data.gains is not None:
        arrays["gains"] = np.asarray(data.gains, dtype=np.float64)
    if data.n_objects is not None:
        arrays["n_objects"] = np.asarray(data.n_objects, dtype=np.int64)
    arrays |= {f"evidence_{direction}": x.double().numpy() for direction, x in data.evidence.items()}
    meta: dict[str, Any] = {"model": data.model, "facts": data.metadata, "alpha": data.alpha, "bank": data.bank}
    for extra in data.distractors[:1]:
        arrays |= {f"distractor_{side}": x.numpy() for side, x in extra.sides().items()}
        strings["distractor_captions"] = extra.captions
        if "text" in extra.owner:
            arrays["distractor_owner"] = np.asarray(extra.owner["text"], dtype=np.int64)
        meta["distractors"] = extra.mark
    arrays |= {name: json_array(values) for name, values in strings.items() if values is not None}
    write_arrays(path, arrays | {"meta": json_array(meta)})


# --- arrays of a user's script -> checked values; every error names its array -----------------------------------------


def _from_arrays(arrays: dict[str, Array]) -> Embeddings:
    names = ", ".join(arrays) or "none"
    if unknown := [name for name in arrays if name not in VALID]:
        close = nearest(unknown[0][:60], VALID)
        raise UserError(f"unknown array {printable(unknown[0], 60)!r}{close} (valid: {', '.join(VALID)})")
    if missing := [name for name in NEEDED if name not in arrays]:
        raise UserError(f"no array {missing[0]!r}; there: {names}; needed: {', '.join(NEEDED)}")
    if "text_image_ids" not in arrays and "pairs" not in arrays:
        raise UserError(f"nothing says what is relevant: text_image_ids or pairs is needed; there: {names}")
    if "gains" in arrays and "pairs" not in arrays:
        raise UserError("gains without pairs: they say how relevant each pair is")
    vectors = {name: _vectors(arrays[name], name) for name in VECTORS if name in arrays}
    sizes = {name: len(x) for name, x in vectors.items()}
    strings = {name: _strings(arrays[name], name, sizes.get(of, 0)) for name, of in STRINGS.items() if name in arrays}
    ids, owner = {side: strings[f"{side}_ids"] for side in SIDES}, None
    if "text_image_ids" in strings:
        owner = _rows(strings["text_image_ids"], {"": -1} | _row_of(ids["image"]), "text_image_ids", "image")
    pairs = _pairs(arrays["pairs"], ids) if "pairs" in arrays else [(i, t) for t, i in enumerate(owner or []) if i >= 0]
    rows = torch.as_tensor(np.array(pairs, dtype=np.int64).reshape(-1, 2))
    Qrels(rows)  # a file without a relevant pair cannot be evaluated
    sizes["pairs"] = len(rows)
    numbers = {n: _numbers(arrays[n], n, kinds, sizes.get(of, 0)) for n, (of, kinds) in NUMBERS.items() if n in arrays}
    meta = _meta(arrays.get("meta", json_array({})))
    facts = meta.get("facts", {})
    extra = Distractors("distractors", vectors.get("distractor_image"), vectors.get("distractor_text"))
    extra.mark, extra.captions = meta.get("distractors", ""), strings.get("distractor_captions")
    if "distractor_owner" in numbers:
        images = {side: list(range(len(x))) for side, x in extra.sides().items() if side == "image"}
        extra.owner = images | {"text": numbers["distractor_owner"].tolist()}
    evidence = {d.value: f"evidence_{d.value}" for d in CLIP_DIRECTIONS if f"evidence_{d.value}" in arrays}
    return Embeddings(
        vectors["image"],
        vectors["text"],
        rows,
        ids["image"],
        captions=strings.get("captions"),
        text_ids=ids["text"],
        levels=strings.get("levels"),
        n_objects=numbers["n_objects"].tolist() if "n_objects" in numbers else None,
        owner=owner,
        distractors=[extra],
        gains=numbers["gains"].astype(np.float64) if "gains" in numbers else None,
        model=meta.get("model", ""),
        metadata=facts,
        alpha={d.value: facts.get(f"logit_scale_{d.value}") for d in CLIP_DIRECTIONS} | meta.get("alpha", {}),
        evidence={d: torch.from_numpy(_floats(arrays[name], name).astype(float)) for d, name in evidence.items()},
        bank=meta.get("bank", {}),
    )


def _shape(array: Array, name: str) -> str:
    return f"{name} of shape {list(array.shape)}, {array.dtype}"


def _floats(array: Array, name: str) -> Array:
    if array.dtype.kind != "f":
        raise UserError(f"{name} holds {array.dtype}: floats are expected (cast them, {name}.astype('float32'))")
    return array


def _vectors(array: Array, name: str) -> Tensor:
    """[n, D]; float64 stays, all else becomes float32."""
    if _floats(array, name).ndim != 2:
        raise UserError(f"{_shape(array, name)}: a row for each embedding is expected, [n, D]")
    wide = array.dtype.itemsize >= 8
    return torch.from_numpy(array.astype(np.float64 if wide else np.float32, copy=not array.flags.writeable))


def _numbers(array: Array, name: str, kinds: str, n: int) -> Array:
    if array.dtype.kind not in kinds or array.shape != (n,):
        raise UserError(f"{_shape(array, name)}: {n} numbers are expected")
    return array


def _strings(array: Array, name: str, n: int) -> list[str]:
    """n strings out of numpy strings, whole numbers, or the bytes of a JSON list."""
    if array.dtype == np.uint8:
        values = read_json_array(array, name)
        if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            raise UserError(f"{name} is the JSON of no list of strings")
    elif array.ndim == 1 and array.dtype.kind in "iuUS":
        values = _decoded(array, name)
    else:
        raise UserError(f"{_shape(array, name)}: {n} strings are expected, [{n}]")
    if len(values) != n:
        raise UserError(f"{name} has {len(values)} entries for {n} embeddings")
    return values


def _decoded(array: Array, name: str) -> list[str]:
    try:
        return [v.decode("utf-8") if isinstance(v, bytes) else str(v) for v in array.tolist()]
    except UnicodeDecodeError as error:
        raise UserError(f"{name} holds bytes that are not UTF-8: {printable(error, 100)}") from None


def _pairs(array: Array, ids: Mapping[str, list[str]]) -> Array:
    """[P, 2] rows out of rows or ids."""
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iuUS":
        raise UserError(f"{_shape(array, 'pairs')}: (image, text) rows or ids are expected, [P, 2]")
    if array.dtype.kind in "iu":
        return array
    columns = zip(SIDES, array.T, strict=True)
    return np.array([_rows(_decoded(column, "pairs"), _row_of(ids[side]), "pairs", side) for side, column in columns]).T


def _row_of(ids: Sequence[str]) -> dict[str, int]:
    return {key: row for row, key in enumerate(ids)}


def _rows(wanted: Sequence[str], row_of: Mapping[str, int], name: str, side: str) -> list[int]:
    """The row of each id. Raises UserError naming the first unknown id."""
    if unknown := [key for key in wanted if key not in row_of]:
        first = printable(unknown[0], 80)
        if len(unknown) < len(wanted):
            raise UserError(f"{name}: {len(unknown)} of {len(wanted)} match no {side} id, the first is {first!r}")
        known = printable(next((key for key in row_of if key), ""), 80)
        raise UserError(f"{name}: none of {len(wanted)} matches an {side} id: {first!r}, but {side}_ids has {known!r}")
    return [row_of[key] for key in wanted]


def _meta(array: Array) -> dict[str, Any]:
    """The meta object, from uint8 or from one numpy string."""
    if array.dtype.kind in "US" and array.size == 1:
        (text,) = _decoded(array.reshape(1), "meta")
        array = np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)
    if array.dtype != np.uint8:
        raise UserError(f"{_shape(array, 'meta')}: the text of one JSON object is expected")
    meta: Any = read_json_array(array, "meta")
    if not isinstance(meta, dict):
        raise UserError(f"meta is {shown(meta)}: expected an object")
    for name, kind in META.items():
        if not isinstance(value := meta.get(name, kind()), kind):
            raise UserError(f"meta: {name} is {shown(value)}: expected {'a text' if kind is str else 'an object'}")
    facts = check_metadata(meta.get("facts", {}), "meta: facts")
    if facts and not {"gamma_q", "gamma_d"} <= facts.keys():
        raise UserError("meta: facts without gamma_q and gamma_d: the exponents that the model is native in")
    for direction, value in meta.get("alpha", {}).items():
        number = type(value) in (int, float) and 0 < value <= 1e30
        if direction not in list(CLIP_DIRECTIONS) or (value is not None and not number):
            name = printable(direction, 60)
            raise UserError(f"meta: alpha {name}: {shown(value)}: i2t and t2i are numbers above 0")
    return meta
