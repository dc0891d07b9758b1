"""Cache of locked trunks' outputs on disk, in parts: an interruption loses one part at most."""

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
Part = tuple[Tensor, dict[int, str]]  # outputs [rows, W], and the reasons of rows that could not be read


def cache_key(side: str, model: ClipModel, data: ImageTextData) -> str:
    """Digest of all that a trunk's outputs depend on: its config and weights, the data, and the preprocessing.

    Preprocessing is the evaluation transform, or the tokenizer, identified by the token ids of the first captions.
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
) -> Part:
    """Outputs of a trunk over a data set, computed where the cache lacks them.

    Parts on disk are not computed again, and parts without any of ``rows`` not at all. Processes that need the same
    parts wait for each other.

    Args:
        side: "image" or "text".
        model: Model with the trunk.
        data: Data set, as it was opened.
        folder: --cache-dir.
        options: How to run the trunk.
        label: Of the progress bar.
        rows: Rows of images, or of captions counted over all images, in the order of the result; by default all.

    Returns:
        [rows, W] float32, and {row: reason} of images that cannot be read, whose outputs are NaN.

    Raises:
        UserError: The folder cannot be written, or the disk is too full.
    """
    captions = [c for image in data.captions for c in image]
    total, size = len(data) if side == "image" else len(captions), PART_ROWS[side]
    place = folder / cache_key(side, model, data)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--cache-dir {folder}: cannot be written: {error.strerror}") from None
    model.towers.eval()
    rows = range(total) if rows is None else rows
    parts: dict[int, Part] = {}

    def rows_of(part: int) -> range:
        return range(part * size, min((part + 1) * size, total))

    def load_parts() -> list[int]:
        """Load what is on disk; the parts that are missing."""
        needed = sorted({row // size for row in rows} - parts.keys())
        loaded = {part: _load(_path(place, part), len(rows_of(part))) for part in needed}
        parts.update({part: content for part, content in loaded.items() if content is not None})
        return [part for part in needed if part not in parts]

    def compute(part: int) -> Part:
        own, note = rows_of(part), f"{label} ({part + 1}/{-(-total // size)})"
        if side == "text":
            texts = captions[own.start : own.stop]
            return encode_texts(lambda t: model.towers.trunk("text", t), texts, model.tokens, options, note), {}
        reader = as_bytes(model.transform())
        return encode_images(lambda x: model.towers.trunk("image", model.pixels(x)), data, reader, options, own, note)

    if load_parts():
        with lock_folder(place, f"{label}: waiting for another process that fills {printable(place)}"):
            if missing := load_parts():
                one = model.transform()(Image.new("RGB", (64, 64)))[None] if side == "image" else model.tokenize(["a"])
                row = 4 * model.towers.trunk(side, one.to(options.device)).shape[1]  # bytes
                advice = "name another --cache-dir"
                require_space(place, len(missing) * size * row, min(size, total) * row, f"caching {label}", advice)
            for part in missing:
                parts[part] = compute(part)
                _save(_path(place, part), *parts[part])
    order = sorted(parts)
    place_of = {row: i for i, row in enumerate(r for part in order for r in rows_of(part))}
    features = torch.cat([parts[part][0] for part in order])[[place_of[row] for row in rows]]
    bad = {row: why for _, reasons in parts.values() for row, why in reasons.items()}
    return features, {row: bad[row] for row in rows if row in bad}


def _path(place: Path, part: int) -> Path:
    return place / f"part-{part:05d}.safetensors"


def _load(path: Path, rows: int) -> Part | None:
    """A part from the disk; None where it is missing, or is not of ``rows`` rows."""
    reasons = path.with_suffix(".json")
    if path.is_file() and reasons.is_file():
        features = load_file(str(path))["features"]
        if len(features) == rows:
            return features, {int(k): str(v) for k, v in json.loads(reasons.read_text(encoding="utf-8")).items()}
    return None


def _save(path: Path, features: Tensor, bad: dict[int, str]) -> None:
    advice = "free some space, or name another --cache-dir"
    write_atomically(path.with_suffix(".json"), lambda p: p.write_text(json.dumps(bad), encoding="utf-8"), advice)
    write_atomically(path, lambda p: save_file({"features": features}, str(p)), advice)  # last: it completes the part
