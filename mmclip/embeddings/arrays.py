"""Arrays as somebody's script wrote them -> checked values: vectors, ids, relevance by row or by id, the meta object.

Every error is a UserError, one line that names the array (mmclip.embeddings.files says what each of them is).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmclip.array_files import read_json_array
from mmclip.config.model_config import check_metadata, shown
from mmclip.errors import UserError, printable
from mmclip.similarity import CLIP_DIRECTIONS

Array = NDArray[Any]


def first_repeated(values: Sequence[str]) -> str | None:
    """
    >>> first_repeated(["a", "b", "a"])
    'a'
    """
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def read_floats(array: Array, name: str) -> Array:
    if array.dtype.kind != "f":
        raise UserError(f"{name} holds {array.dtype}: floats are expected (cast them, {name}.astype('float32'))")
    return array


def read_vectors(array: Array, name: str) -> Tensor:
    """float64 stays, all else becomes float32."""
    if array.ndim != 2:
        raise UserError(f"{name} of shape {list(array.shape)}: a row for each embedding is expected, [n, D]")
    wide = read_floats(array, name).dtype.itemsize >= 8
    return torch.from_numpy(array.astype(np.float64 if wide else np.float32, copy=not array.flags.writeable))


def read_numbers(arrays: dict[str, Array], name: str, kinds: str, n: int) -> Array | None:
    if name not in arrays:
        return None
    array = arrays[name]
    if array.dtype.kind not in kinds or array.shape != (n,):
        raise UserError(f"{name} of shape {list(array.shape)}, {array.dtype}: {n} numbers are expected")
    return array


def read_strings(array: Array, name: str, n: int) -> list[str]:
    """n strings out of numpy strings, whole numbers, or the bytes of a JSON list."""
    if array.dtype == np.uint8:
        values = read_json_array(array, name)
        if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            raise UserError(f"{name} is the JSON of no list of strings")
    elif array.ndim == 1 and array.dtype.kind in "iu":
        values = [str(v) for v in array.tolist()]
    elif array.ndim == 1 and array.dtype.kind in "US":
        values = _decoded(array, name)
    else:
        raise UserError(f"{name} of shape {list(array.shape)}, {array.dtype}: {n} strings are expected, [{n}]")
    if len(values) != n:
        raise UserError(f"{name} has {len(values)} entries for {n} embeddings")
    return values


def _decoded(array: Array, name: str) -> list[str]:
    try:
        return [v.decode("utf-8") if isinstance(v, bytes) else v for v in array.tolist()]
    except UnicodeDecodeError as error:
        raise UserError(f"{name} holds bytes that are not UTF-8: {printable(error, 100)}") from None


def read_pairs(array: Array, ids: dict[str, list[str]]) -> Array:
    """[P, 2] rows out of rows or ids."""
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iuUS":
        raise UserError(
            f"pairs of shape {list(array.shape)}, {array.dtype}: (image, text) rows or ids are expected, [P, 2]"
        )
    if array.dtype.kind in "iu":
        return array
    columns = zip(("image", "text"), array.T, strict=True)
    rows = [read_rows(_decoded(column, "pairs"), ids[side], "pairs", side, empty=False) for side, column in columns]
    return np.array(rows, dtype=np.int64).T


def read_rows(wanted: Sequence[str], ids: Sequence[str], name: str, side: str, empty: bool = True) -> list[int]:
    """The row of each wanted id; -1 for "" where that may stand for none. Errors: naming the first unknown id."""
    row_of = {key: row for row, key in enumerate(ids)}
    if empty and "" not in row_of:
        row_of[""] = -1
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


def read_meta(array: Array) -> dict[str, Any]:
    """The meta object, as uint8 or as one numpy string. Errors: UserError for values that others compute with."""
    if array.dtype.kind in "US" and array.size == 1:
        (text,) = _decoded(array.reshape(1), "meta")
        array = np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)
    if array.dtype != np.uint8:
        raise UserError(f"meta of shape {list(array.shape)}, {array.dtype}: the text of one JSON object is expected")
    meta: Any = read_json_array(array, "meta")
    for name, kind in (
        ("", dict),
        ("model", str),
        ("facts", dict),
        ("alpha", dict),
        ("bank", dict),
        ("distractors", str),
    ):
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
            raise UserError(f"meta: alpha {printable(direction, 60)}: {shown(value)}: i2t and t2i are numbers above 0")
    found: dict[str, Any] = meta
    return found
