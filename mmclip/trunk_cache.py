"""Outputs of locked trunks, computed once and kept on disk in parts, so that an interruption loses one part at most."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmclip.build import Model
from mmclip.embeddings import Runner
from mmclip.errors import UsageError
from mmclip.files import require_space, write_atomically
from mmclip.image_text import ImageTextData

PART_ROWS = {"image": 512, "text": 4096}
ADVICE = "free some space, or name another --cache-dir"


def cache_key(side: str, model: Model, data: ImageTextData) -> str:
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
    side: str, model: Model, data: ImageTextData, folder: Path, runner: Runner, label: str
) -> tuple[Tensor, dict[int, str]]:
    """A trunk's outputs over a data set, from the cache where they are there: ([rows, W] float32, {row: why}).

    Rows are images for side "image" and captions, in the order of the images, for side "text". An image that cannot
    be read leaves a row of NaN and its reason. Parts already on disk are not computed again.
    """
    captions = [c for image in data.captions for c in image]
    total = len(data) if side == "image" else len(captions)
    place = folder / cache_key(side, model, data)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--cache-dir {folder}: cannot be written: {error.strerror}") from None
    model.towers.eval()
    features: list[Tensor] = []
    bad: dict[int, str] = {}
    size = PART_ROWS[side]
    missing = sum(not _part(place, start, size).is_file() for start in range(0, total, size))
    if missing:
        row = 4 * _width(side, model, runner)
        require_space(
            place, missing * size * row, min(size, total) * row, f"caching {label}", "name another --cache-dir"
        )
    for start in range(0, total, size):
        rows = range(start, min(start + size, total))
        path = _part(place, start, size)

        def run(rows: range = rows) -> tuple[Tensor, dict[int, str]]:
            note = f"{label} ({rows.start // size + 1}/{-(-total // size)})"
            if side == "image":
                return runner.images(lambda x: model.towers.trunk("image", x), data, model.transform(), rows, note)
            part = captions[rows.start : rows.stop]
            return runner.texts(lambda t: model.towers.trunk("text", t), part, model.tokenize, note), {}

        part, part_bad = _load_or_run(path, len(rows), run)
        features.append(part)
        bad |= part_bad
    return torch.cat(features), bad


def _part(place: Path, start: int, size: int) -> Path:
    return place / f"part-{start // size:05d}.safetensors"


def _width(side: str, model: Model, runner: Runner) -> int:
    """Numbers that a trunk gives for one input."""
    one = model.transform()(Image.new("RGB", (64, 64)))[None] if side == "image" else model.tokenize(["a"])
    return model.towers.trunk(side, one.to(runner.device)).shape[1]


def _load_or_run(
    path: Path, rows: int, run: Callable[[], tuple[Tensor, dict[int, str]]]
) -> tuple[Tensor, dict[int, str]]:
    reasons = path.with_suffix(".json")
    if path.is_file() and reasons.is_file():
        features = load_file(str(path))["features"]
        if len(features) == rows:
            return features, {int(k): str(v) for k, v in json.loads(reasons.read_text(encoding="utf-8")).items()}
    features, bad = run()
    write_atomically(reasons, lambda p: p.write_text(json.dumps(bad), encoding="utf-8"), ADVICE)
    write_atomically(path, lambda p: save_file({"features": features}, str(p)), ADVICE)  # last: it makes the part count
    return features, bad
