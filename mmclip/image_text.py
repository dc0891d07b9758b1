"""Pictures with captions in memory, pixels on disk: the one data set class. Random access; no metrics.

Captions are held (they are small), pictures are read when they are asked for. That makes exact shuffles, exact epochs
with any number of workers, and exact resumption plain index arithmetic.
"""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from mmclip.errors import one_line

MAX_PIXELS = 100_000_000  # a larger picture is a fault, or an attack


class BadSample(Exception):
    """A sample that cannot be used: its key, the file it is in, and why."""

    def __init__(self, key: str, where: str, reason: str) -> None:
        super().__init__(key, where, reason)  # all three, so that it can cross a process boundary
        self.key, self.where, self.reason = key, where, reason

    def __str__(self) -> str:
        return f"{one_line(self.key, 80)} in {one_line(self.where, 160)}: {one_line(self.reason, 160)}"


@dataclass(frozen=True)
class CaptionTruth:
    """What is known of a caption: its level, and the keys of all images that it describes (None: its own)."""

    level: str
    relevant: list[str] | None = None


@dataclass(frozen=True)
class ImageTruth:
    """What is known of an image: its object count where told, and its captions' truth in their order."""

    n_objects: int | None
    captions: list[CaptionTruth]


@dataclass
class ImageTextData:
    """N images with at least one caption each.

    keys [N]; captions [N] lists; places [N]: (file, offset, size) of a picture, offset -1 for a file of its own;
    truth [N] or None; skipped: samples left out when the data were opened.
    """

    path: str
    split: str
    keys: list[str]
    captions: list[list[str]]
    places: list[tuple[str, int, int]]
    truth: list[ImageTruth] | None = None
    skipped: list[BadSample] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.keys)

    def read_image(self, row: int) -> Image.Image:
        """The picture of a row, decoded, in RGB. Errors: BadSample naming key, file and reason."""
        path, offset, size = self.places[row]
        try:
            with open(path, "rb") as file:
                if offset >= 0:
                    file.seek(offset)
                content = file.read(size) if offset >= 0 else file.read()
            if not content:
                raise ValueError("an empty picture, 0 bytes")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # decoders warn of odd metadata; what cannot be decoded raises
                image = Image.open(io.BytesIO(content))
                if image.width * image.height > MAX_PIXELS:
                    raise ValueError(f"{image.width} x {image.height} pixels, above {MAX_PIXELS:,}")
                return image.convert("RGB")
        except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError, MemoryError) as error:
            raise BadSample(self.keys[row], path, str(error)) from None

    def subset(self, rows: Sequence[int]) -> ImageTextData:
        """The data of some rows, in their order."""
        truth = [self.truth[r] for r in rows] if self.truth is not None else None
        return ImageTextData(
            self.path,
            self.split,
            [self.keys[r] for r in rows],
            [self.captions[r] for r in rows],
            [self.places[r] for r in rows],
            truth,
            self.skipped,
        )

    def fingerprint(self) -> str:
        """16 hex digits of keys, captions and picture sizes: the same for a copy elsewhere, another for other data."""
        digest = hashlib.sha256()
        for key, captions, (path, offset, size) in zip(self.keys, self.captions, self.places, strict=True):
            bytes_ = size if offset >= 0 else Path(path).stat().st_size if Path(path).exists() else -1
            digest.update(json.dumps([key if offset >= 0 else Path(key).name, captions, bytes_]).encode())
        return digest.hexdigest()[:16]
