"""Outputs of locked trunks, computed once and kept on disk in parts, so that an interruption loses one part at most."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmclip.data.image_text import ImageTextData
from mmclip.embeddings.encode import EncodeOptions, encode_images, encode_texts
from mmclip.errors import UserError, printable
from mmclip.io import lock_folder, require_space, write_atomically
from mmclip.models.factory import ClipModel
from mmclip.models.towers import as_bytes

PART_ROWS = {"image": 512, "text": 4096}
ADVICE = "free some space, or name another --cache-dir"


def cache_key(side: str, model: ClipModel, data: ImageTextData) -> str:
    """Digest of everything that a trunk's outputs depend on: its config and weights, the data, and what turns the
    data into its input (the evaluation transform; the tokenizer, told by what it does to the data's first captions).
    """
    digest = hashlib.sha256()
    digest.update(f"1 {side} {model.towers.trunk_fingerprint(side)} {data.fingerprint()}".encode())
    if side == "image":
        digest.update(json.dumps(model.preprocess_cfg, sort_keys=True, default=str).encode())
    else:
        captions = [c for image in data.captions[:64] for c in image]
        digest.update(model.tokenize(captions).numpy().tobytes() if captions else b"")
    return f"{side}-{digest.hexdigest()[:20]}"


def cached_trunk(
    side: str,
    model: ClipModel,
    data: ImageTextData,
    folder: Path,
    options: EncodeOptions,
    label: str,
    rows: Sequence[int] | None = None,
) -> tuple[Tensor, dict[int, str]]:
    """A trunk's outputs over a data set, or over some of its rows in their order, from the cache where they are there:
    ([rows, W] float32, {row: why}).

    Rows are images for side "image" and captions, in the order of the images, for side "text". An image that cannot
    be read leaves a row of NaN and its reason. Parts already on disk are not computed again, and those that hold none
    of the ``rows`` not at all. Two processes that need the same parts wait for each other.
    """
    captions = [c for image in data.captions for c in image]
    total = len(data) if side == "image" else len(captions)
    place = folder / cache_key(side, model, data)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--cache-dir {folder}: cannot be written: {error.strerror}") from None
    model.towers.eval()
    size = PART_ROWS[side]
    needed = sorted({row // size for row in (range(total) if rows is None else rows)})

    def rows_of(part: int) -> range:
        return range(part * size, min((part + 1) * size, total))

    def run(part: int) -> tuple[Tensor, dict[int, str]]:
        own, note = rows_of(part), f"{label} ({part + 1}/{-(-total // size)})"
        if side == "image":
            reader = as_bytes(model.transform())
            return encode_images(
                lambda x: model.towers.trunk("image", model.pixels(x)), data, reader, options, own, note
            )
        texts = captions[own.start : own.stop]
        return encode_texts(lambda t: model.towers.trunk("text", t), texts, model.tokens, options, note), {}

    found: dict[int, tuple[Tensor, dict[int, str]]] = {}

    def missing() -> list[int]:
        for part in needed:
            if part not in found and (there := _load(_path(place, part), len(rows_of(part)))) is not None:
                found[part] = there
        return [part for part in needed if part not in found]

    if missing():
        with lock_folder(place, f"{label}: waiting for another process that fills {printable(place)}"):
            left = missing()
            if left:
                row = 4 * _width(side, model, options)
                require_space(
                    place,
                    len(left) * size * row,
                    min(size, total) * row,
                    f"caching {label}",
                    "name another --cache-dir",
                )
            for part in left:
                found[part] = run(part)
                _save(_path(place, part), *found[part])
    features = torch.cat([found[part][0] for part in needed])
    bad = {row: why for _, part_bad in found.values() for row, why in part_bad.items()}
    if rows is None:
        return features, bad
    place_of = {row: i for i, row in enumerate(r for part in needed for r in rows_of(part))}
    return features[[place_of[row] for row in rows]], {row: bad[row] for row in rows if row in bad}


def _path(place: Path, part: int) -> Path:
    return place / f"part-{part:05d}.safetensors"


def _load(path: Path, rows: int) -> tuple[Tensor, dict[int, str]] | None:
    """A part's rows and the reasons of the bad ones; None where it is not there, or is not of ``rows`` rows."""
    reasons = path.with_suffix(".json")
    if path.is_file() and reasons.is_file():
        features = load_file(str(path))["features"]
        if len(features) == rows:
            return features, {int(k): str(v) for k, v in json.loads(reasons.read_text(encoding="utf-8")).items()}
    return None


def _save(path: Path, features: Tensor, bad: dict[int, str]) -> None:
    write_atomically(path.with_suffix(".json"), lambda p: p.write_text(json.dumps(bad), encoding="utf-8"), ADVICE)
    write_atomically(path, lambda p: save_file({"features": features}, str(p)), ADVICE)  # last: it makes the part count


def _width(side: str, model: ClipModel, options: EncodeOptions) -> int:
    """Numbers that a trunk gives for one input."""
    one = model.transform()(Image.new("RGB", (64, 64)))[None] if side == "image" else model.tokenize(["a"])
    return model.towers.trunk(side, one.to(options.device)).shape[1]
