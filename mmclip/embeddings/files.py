"""Raw embeddings of images and texts with ids and relevance, in memory and in a file that any script can write.

Arrays of a ``.npz`` or ``.safetensors`` file, for N images, M texts and P relevant pairs:

    image [N, D], text [M, D]    floats as the encoder returns them, never normalized
    image_ids [N], text_ids [M]  unique strings; whole numbers are read as their digits
    text_image_ids [M]           the id of each text's own image, "" for none. Defines relevance unless pairs do, and
                                 which captions a bootstrap draws together
    pairs [P, 2]                 optional with text_image_ids: relevant (image, text), as rows (whole numbers) or, in
                                 .npz, as ids (strings)
    gains [P]                    optional: degree of relevance of each pair, above 0
    captions [M]                 optional strings
    levels [M]                   optional strings: full, partial, vague...
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
from mmclip.retrieval import Qrels
from mmclip.retrieval.sides import lengths
from mmclip.similarity import CLIP_DIRECTIONS

Array = NDArray[Any]
NEEDED = ("image", "text", "image_ids", "text_ids")
OPTIONAL = ("text_image_ids", "pairs", "gains", "captions", "levels", "n_objects", "distractor_image",
            "distractor_text", "distractor_captions", "distractor_owner", "evidence_i2t", "evidence_t2i",
            "meta")  # fmt: skip
MAX_NORM = 1e18  # the product of two such norms fits in float32, and no encoder comes near


def check_vectors(embeddings: Mapping[str, Tensor]) -> None:
    """Require finite [n, D] with n, D >= 1 and one D for all names, and norms whose products float32 can hold."""
    dim = next(iter(embeddings.values())).shape[-1:]
    for name, x in embeddings.items():
        shape = f"{name} embeddings of shape {list(x.shape)}"
        if x.ndim != 2 or len(x) == 0 or x.shape[1:] != dim:
            first = next(iter(embeddings))
            raise UserError(
                f"{shape}: at least one row is needed, and one dimension for all (the {first}s' is {[*dim, 0][0]})"
            )
        if not x.shape[1]:
            raise UserError(f"{shape}: vectors of no dimension")
        largest = float(lengths(x, name).max())  # also refuses values that are not finite
        if largest > MAX_NORM:
            raise UserError(
                f"{name} embeddings: a norm of {largest:.3g}; above {MAX_NORM:.0e} products overflow in float32: "
                "divide all embeddings by one constant"
            )


@dataclasses.dataclass
class Distractors:
    """Candidates that are relevant to nothing and never queries.

    Attributes:
        name: Of the candidate pool that they make with the main images and texts.
        image, text: Raw [N2, D] and [M2, D], either None.
        captions: M2 strings, None where unknown.
        mark: What else distinguishes these items from others of the name.
        owner: side -> image row of every item; a bootstrap draws items of one row together. Rows count the distractor
            images or, with ``twins``, the main images that they were made of. Without a side: each item by itself.
    """

    name: str
    image: Tensor | None = None
    text: Tensor | None = None
    captions: list[str] | None = None
    mark: str = ""
    owner: dict[str, list[int]] = dataclasses.field(default_factory=dict)
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

    def check(self, n_images: int) -> None:
        """Require an owner row in range for each item; ``n_images``: of the main images."""
        limit = n_images if self.twins or self.image is None else len(self.image)
        for side, rows in self.owner.items():
            n = len(self.sides().get(side, ()))
            if len(rows) != n or not n or not all(0 <= r < limit for r in rows):
                raise UserError(
                    f"{printable(self.name, 60)} {side}: owner has {len(rows)} rows, from {min(rows, default=0)} to "
                    f"{max(rows, default=0)}; one from 0 to {limit - 1} for each item is needed"
                )


@dataclasses.dataclass
class Embeddings:
    """Raw embeddings of N images and M texts with P relevant pairs; checked on construction (UserError, one line).

    Attributes:
        image, text: [N, D] and [M, D], never normalized.
        pairs: [P, 2] int64 (image row, text row).
        image_ids: N unique strings.
        captions: M strings; None: texts are called by their ids.
        text_ids: M unique strings; None: after their image, KEY#0, KEY#1...
        owner: Image row that each caption belongs to, -1 for none; None: that of the text's first pair.
        gains: [P] degrees of relevance above 0; None: all 1.
        levels, n_objects: M strings (full, partial, vague...) and N counts, or None.
        distractors: Sets of candidates without relevance. A file holds at most one.
        skipped: id -> reason, of images that could not be read.
        model, metadata: The encoder's name and its mmclip.json; {} for a plain CLIP.
        alpha: direction -> logit scale, None where not trained or unknown.
        evidence: direction -> [n candidates] float64 log-normalizers under alpha of the opposite direction.
        bank: Description of the query bank that ``evidence`` was computed over: name, size and overlap by side.
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
        for name, size in (("image_ids", n), ("captions", m), ("text_ids", m), ("levels", m), ("n_objects", n),
                           ("owner", m)):  # fmt: skip
            values = getattr(self, name)
            if values is not None and len(values) != size:
                raise UserError(f"{name} has {len(values)} entries for {size} embeddings")
            if values is not None and name.endswith("_ids") and len(set(values)) < size:
                twice = next(v for i, v in enumerate(values) if v in values[:i])
                raise UserError(f"{name}: {printable(twice, 80)!r} stands there twice; ids are unique")
        for d in self.distractors:
            d.check(n)
        extra = {f"{printable(d.name, 60)} {s}": x for d in self.distractors for s, x in d.sides().items()}
        check_vectors({"image": self.image, "text": self.text, **extra})
        self.pairs = torch.as_tensor(self.pairs, dtype=torch.int64).cpu()
        if len(self.pairs):  # distractors have none
            Qrels(self.pairs, self.gains).check(n, m)
        if outside := [o for o in self.owner or [] if not -1 <= o < n]:
            raise UserError(f"owner names image row {outside[0]}; valid rows are -1 to {n - 1}")
        self.alpha = {d.value: self.alpha.get(d.value) for d in CLIP_DIRECTIONS}
        for direction in CLIP_DIRECTIONS:
            evidence, name = self.evidence.get(direction.value), f"evidence_{direction.value}"
            if evidence is None:
                continue
            size = len(direction.roles({"image": self.image, "text": self.text})[1])
            if evidence.shape != (size,) or not bool(evidence.isfinite().all()):
                raise UserError(
                    f"{name} of shape {list(evidence.shape)}: a finite number for each of the {size} "
                    f"{direction.document_side}s is needed"
                )
            if self.alpha[direction.opposite.value] is None:
                raise UserError(f"{name} without alpha of {direction.opposite.value}: it was computed with that")

    @property
    def texts(self) -> list[str]:
        """Captions, or the ids of texts that have none."""
        return self.captions if self.captions is not None else self.named_texts()

    def named_texts(self) -> list[str]:
        """``text_ids``, by default KEY#i: the image's id and the caption's place among its captions."""
        if self.text_ids is not None:
            return self.text_ids
        count: dict[int, int] = {}
        names = []
        for row in self.owners().tolist():
            count[row] = count.get(row, -1) + 1
            names.append(f"{self.image_ids[row] if row >= 0 else ''}#{count[row]}")
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
        """side -> "size" or "overlap" of the query bank of ``evidence``, as far as the file has them."""
        counts = self.bank.get(name)
        return {k: v for k, v in counts.items() if isinstance(v, int)} if isinstance(counts, dict) else {}


def load_embeddings(path: str | Path) -> Embeddings:
    """Read a file of either kind without running anything in it. Raises UserError, one line, naming the file."""
    try:
        return _from_arrays(_Reader(read_arrays(path)))
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


class _Reader:
    """Arrays as a script wrote them -> checked values; every error names its array."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        self.arrays = arrays

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def _refuse(self, name: str, expected: str) -> UserError:
        array = self.arrays[name]
        return UserError(f"{name} of shape {list(array.shape)}, {array.dtype}: {expected}")

    def floats(self, name: str) -> Array:
        if self.arrays[name].dtype.kind != "f":
            kind = self.arrays[name].dtype
            raise UserError(f"{name} holds {kind}: floats are expected (cast them, {name}.astype('float32'))")
        return self.arrays[name]

    def vectors(self, name: str) -> Tensor:
        """[n, D]; float64 stays, all else becomes float32."""
        array = self.floats(name)
        if array.ndim != 2:
            raise UserError(f"{name} of shape {list(array.shape)}: a row for each embedding is expected, [n, D]")
        wide = array.dtype.itemsize >= 8
        return torch.from_numpy(array.astype(np.float64 if wide else np.float32, copy=not array.flags.writeable))

    def numbers(self, name: str, kinds: str, n: int, dtype: type) -> Array | None:
        if name not in self:
            return None
        if self.arrays[name].dtype.kind not in kinds or self.arrays[name].shape != (n,):
            raise self._refuse(name, f"{n} numbers are expected")
        return self.arrays[name].astype(dtype)

    def strings(self, name: str, n: int) -> list[str]:
        """n strings out of numpy strings, whole numbers, or the bytes of a JSON list."""
        array = self.arrays[name]
        if array.dtype == np.uint8:
            values = read_json_array(array, name)
            if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
                raise UserError(f"{name} is the JSON of no list of strings")
        elif array.ndim == 1 and array.dtype.kind in "iu":
            values = [str(v) for v in array.tolist()]
        elif array.ndim == 1 and array.dtype.kind in "US":
            values = decoded(array, name)
        else:
            raise self._refuse(name, f"{n} strings are expected, [{n}]")
        if len(values) != n:
            raise UserError(f"{name} has {len(values)} entries for {n} embeddings")
        return values

    def pairs(self, ids: Mapping[str, list[str]]) -> Array:
        """[P, 2] rows out of rows or ids."""
        array = self.arrays["pairs"]
        if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iuUS":
            raise self._refuse("pairs", "(image, text) rows or ids are expected, [P, 2]")
        if array.dtype.kind in "iu":
            return array
        columns = zip(("image", "text"), array.T, strict=True)
        rows = [rows_of(decoded(column, "pairs"), ids[side], "pairs", side, empty=False) for side, column in columns]
        return np.array(rows, dtype=np.int64).T

    def meta(self) -> dict[str, Any]:
        """The meta object, from uint8 or from one numpy string; {} without one."""
        if "meta" not in self:
            return {}
        array = self.arrays["meta"]
        if array.dtype.kind in "US" and array.size == 1:
            (text,) = decoded(array.reshape(1), "meta")
            array = np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)
        if array.dtype != np.uint8:
            raise self._refuse("meta", "the text of one JSON object is expected")
        meta: Any = read_json_array(array, "meta")
        kinds = {"": dict, "model": str, "facts": dict, "alpha": dict, "bank": dict, "distractors": str}
        for name, kind in kinds.items():
            value = meta.get(name, kind()) if name else meta
            if not isinstance(value, kind):
                what = "a text" if kind is str else "an object"
                raise UserError(f"meta{f': {name}' if name else ''} is {shown(value)}: expected {what}")
        facts = check_metadata(meta.get("facts", {}), "meta: facts")
        if facts and not {"gamma_q", "gamma_d"} <= facts.keys():
            raise UserError("meta: facts without gamma_q and gamma_d: the exponents that the model is native in")
        for direction, value in meta.get("alpha", {}).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if direction not in list(CLIP_DIRECTIONS) or (value is not None and not (number and 0 < value <= 1e30)):
                shown_name = printable(direction, 60)
                raise UserError(f"meta: alpha {shown_name}: {shown(value)}: i2t and t2i are numbers above 0")
        found: dict[str, Any] = meta
        return found


def decoded(array: Array, name: str) -> list[str]:
    try:
        return [v.decode("utf-8") if isinstance(v, bytes) else v for v in array.tolist()]
    except UnicodeDecodeError as error:
        raise UserError(f"{name} holds bytes that are not UTF-8: {printable(error, 100)}") from None


def rows_of(wanted: Sequence[str], ids: Sequence[str], name: str, side: str, empty: bool = True) -> list[int]:
    """The row of each id; -1 for "" where ``empty``. Raises UserError naming the first unknown id."""
    row_of = {key: row for row, key in enumerate(ids)}
    if empty:
        row_of.setdefault("", -1)
    unknown = [key for key in wanted if key not in row_of]
    if unknown:
        first, count = printable(unknown[0], 80), f"{len(unknown)} of {len(wanted)}"
        if len(unknown) == len(wanted):
            known = printable(ids[0], 80) if ids else ""
            raise UserError(
                f"{name}: none of {len(wanted)} matches an {side} id: {first!r}, but {side}_ids has {known!r}"
            )
        raise UserError(f"{name}: {count} match no {side} id, the first is {first!r}")
    return [row_of[key] for key in wanted]


def _from_arrays(read: _Reader) -> Embeddings:
    valid, names = (*NEEDED, *OPTIONAL), ", ".join(read.arrays) or "none"
    for name in read.arrays:
        if name not in valid:
            shown_name = printable(name, 60)
            raise UserError(f"unknown array {shown_name!r}{nearest(name[:60], valid)} (valid: {', '.join(valid)})")
    for name in NEEDED:
        if name not in read:
            raise UserError(f"no array {name!r}; there: {names}; needed: {', '.join(NEEDED)}")
    if "text_image_ids" not in read and "pairs" not in read:
        raise UserError(f"nothing says what is relevant: text_image_ids or pairs is needed; there: {names}")
    if "gains" in read and "pairs" not in read:
        raise UserError("gains without pairs: they say how relevant each pair is")
    sides = ("image", "text", "distractor_image", "distractor_text")
    vectors = {name: read.vectors(name) for name in sides if name in read}
    ids = {side: read.strings(f"{side}_ids", len(vectors[side])) for side in ("image", "text")}
    m, owner = len(ids["text"]), None
    if "text_image_ids" in read:
        owner = rows_of(read.strings("text_image_ids", m), ids["image"], "text_image_ids", "image")
    if "pairs" in read:
        pairs = read.pairs(ids)
    else:
        pairs = np.array([[image, text] for text, image in enumerate(owner or []) if image >= 0]).reshape(-1, 2)
    Qrels(pairs)  # a file without a relevant pair cannot be evaluated
    meta = read.meta()
    facts = meta.get("facts", {})
    n_objects = read.numbers("n_objects", "iu", len(ids["image"]), np.int64)
    evidence = {d.value: f"evidence_{d.value}" for d in CLIP_DIRECTIONS if f"evidence_{d.value}" in read}
    return Embeddings(
        vectors["image"],
        vectors["text"],
        torch.from_numpy(pairs.astype(np.int64)),
        ids["image"],
        captions=read.strings("captions", m) if "captions" in read else None,
        text_ids=ids["text"],
        levels=read.strings("levels", m) if "levels" in read else None,
        n_objects=None if n_objects is None else n_objects.tolist(),
        owner=owner,
        distractors=_distractors(read, vectors, meta.get("distractors", "")),
        gains=read.numbers("gains", "iuf", len(pairs), np.float64),
        model=meta.get("model", ""),
        metadata=facts,
        alpha={d.value: facts.get(f"logit_scale_{d.value}") for d in CLIP_DIRECTIONS} | meta.get("alpha", {}),
        evidence={d: torch.from_numpy(read.floats(name).astype(np.float64)) for d, name in evidence.items()},
        bank=meta.get("bank", {}),
    )


def _distractors(read: _Reader, vectors: Mapping[str, Tensor], mark: str) -> list[Distractors]:
    """One set, called "distractors"; a text of a distractor image is drawn together with it."""
    image, text = vectors.get("distractor_image"), vectors.get("distractor_text")
    m = 0 if text is None else len(text)
    captions = read.strings("distractor_captions", m) if "distractor_captions" in read else None
    rows = read.numbers("distractor_owner", "iu", m, np.int64)
    owner = {}
    if rows is not None:
        owner = {"text": rows.tolist()} | ({} if image is None else {"image": list(range(len(image)))})
    return [] if image is None and text is None else [Distractors("distractors", image, text, captions, mark, owner)]
