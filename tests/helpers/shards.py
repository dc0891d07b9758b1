"""Shards of random pictures, written member by member."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from tests.helpers.tiny import add


def jpeg(seed: int = 0, size: tuple[int, int] = (20, 12)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), "JPEG")


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, form)
    return out.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]], form: int = tarfile.GNU_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in members:
            add(tar, name, content)
    return path


def good(n: int = 4) -> list[tuple[str, bytes]]:
    texts = [f"caption {i}\nanother {i}\n".encode() for i in range(n)]
    return [member for i in range(n) for member in ((f"k{i}.jpg", jpeg(i)), (f"k{i}.txt", texts[i]))]


def folder(root: Path, split: str = "train", shards: list[list[tuple[str, bytes]]] | None = None) -> Path:
    shards = [good()] if shards is None else shards
    for i, members in enumerate(shards):
        write_tar(root / split / f"{i}.tar", members)
    (root / split / "nshards.txt").write_text(f"{len(shards)}\n")
    return root
