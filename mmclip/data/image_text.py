"""Image-text data sets: captions in memory, images on disk, random access by row.

Random access makes exact shuffles, exact epochs with any number of workers, and exact resumption index arithmetic.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import stat
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from mmclip.errors import printable, reason

MAX_PIXELS = 100_000_000  # a larger picture is a fault, or an attack
MAX_BYTES = 256_000_000  # the same, before anything is read
MAX_ASPECT = 200  # resizing the short side of a line of pixels would ask for gigabytes
# Decoders of pictures only: Pillow would also hand PostScript under a picture's name to Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_TAIL = 64  # bytes: a PNG's checksum and a JPEG's last coefficients differ between pictures of one size


class BadSample(Exception):
    """A sample that cannot be used: its key, its file and the reason."""

    def __init__(self, key: str, where: str, reason: str) -> None:
        super().__init__(key, where, reason)  # all three, so that it can cross a process boundary
        self.key, self.where, self.reason = key, where, reason

    @property
    def why(self) -> str:
        return f"{self.where}: {self.reason}"

    def __str__(self) -> str:
        return named(self.key, f"{printable(self.where, 160)}: {printable(self.reason, 160)}", 80, 330)


def named(key: str, why: str, key_limit: int = 60, why_limit: int = 160) -> str:
    """'KEY in FILE: REASON' of a bad sample, cut at the limits; a key that is the file's own path is left out.

    >>> named("0007", "train/0.tar: an empty picture"), named("dog.png", "photos/dog.png: an empty picture")
    ('0007 in train/0.tar: an empty picture', 'photos/dog.png: an empty picture')
    """
    shown = printable(why, why_limit)
    return shown if f"/{key}: " in f"/{why}" else f"{printable(key, key_limit)} in {shown}"


def skipped_line(skipped: Mapping[str, str]) -> str:
    """'3 samples cannot be used: …', naming the first five."""
    first = "; ".join(named(k, why) for k, why in list(skipped.items())[:5])
    more = f"; and {len(skipped) - 5} more" if len(skipped) > 5 else ""
    return f"{len(skipped)} sample{'s' * (len(skipped) != 1)} cannot be used: {first}{more}"


def by_key(samples: Iterable[BadSample]) -> dict[str, str]:
    """Each sample's file and reason by its key; a repeated key gets a number, so that all are counted."""
    reasons: dict[str, str] = {}
    for sample in samples:
        key, n = sample.key, 2
        while key in reasons:
            key, n = f"{sample.key} ({n})", n + 1
        reasons[key] = sample.why
    return reasons


@dataclass(frozen=True)
class CaptionTruth:
    """Caption ground truth: specificity level and keys of relevant images (default: its own)."""

    level: str
    relevant: list[str] | None = None


@dataclass(frozen=True)
class ImageTruth:
    """Image ground truth: number of objects, if known, and the truth of its captions in order."""

    n_objects: int | None
    captions: list[CaptionTruth]


@dataclass(frozen=True)
class Origin:
    """Rows of a subset in the data as they were opened: of each image, and of each caption counted over all images."""

    whole: ImageTextData
    pictures: Sequence[int]
    texts: Sequence[int]


@dataclass
class ImageTextData:
    """N images with at least one caption each.

    Attributes:
        path: Source.
        split: Name of the split.
        keys: [N] sample keys.
        captions: [N] lists of captions.
        places: [N] (file, offset, size) of an image; offset -1 is a file of its own.
        truth: [N] ground truth, or None.
        skipped: Samples that were left out when the data were opened.
        part_of: Rows in the data as they were opened; None for these themselves.
        permuted: Whether each image has the captions of another one.
    """

    path: str
    split: str
    keys: list[str]
    captions: list[list[str]]
    places: list[tuple[str, int, int]]
    truth: list[ImageTruth] | None = None
    skipped: list[BadSample] = field(default_factory=list)
    part_of: Origin | None = field(default=None, repr=False)
    permuted: bool = False

    def __len__(self) -> int:
        return len(self.keys)

    def read_image(self, row: int) -> Image.Image:
        """The decoded image of a row, in RGB (BadSample names key, file and reason)."""
        path, offset, size = self.places[row]
        try:
            if offset < 0:
                offset, size = 0, file_size(path)
            if size > MAX_BYTES:
                raise ValueError(f"{size:,} bytes, above {MAX_BYTES:,}")
            with open(path, "rb") as file:
                file.seek(offset)
                content = file.read(size)
            if not content:
                raise ValueError("an empty picture, 0 bytes")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # decoders warn of odd metadata; what cannot be decoded raises
                image = Image.open(io.BytesIO(content), formats=FORMATS)
                pixels = f"{image.width} x {image.height} pixels"
                if image.width * image.height > MAX_PIXELS:
                    raise ValueError(f"{pixels}, above {MAX_PIXELS:,}")
                if max(image.size) > MAX_ASPECT * min(image.size):
                    raise ValueError(f"{pixels}, more than {MAX_ASPECT} to 1")
                image.load()
                return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it
        except Exception as error:  # damaged content makes decoders raise nearly anything
            unknown = f"not a readable picture of a known kind ({', '.join(FORMATS)})"
            why = unknown if isinstance(error, UnidentifiedImageError) else reason(error)
            raise BadSample(self.keys[row], path, why) from None

    def subset(self, rows: Sequence[int]) -> ImageTextData:
        """The data of some rows, in their order."""
        return self._taken(rows, rows)

    def holdout(self, n: int) -> tuple[ImageTextData, ImageTextData]:
        """All images but the last ``n``, and those as a split of their own, ``train[holdout n]`` for ``open_data``."""
        kept = len(self) - n
        held = dataclasses.replace(self.subset(range(kept, len(self))), skipped=[])
        held.split = f"{self.split}[holdout {n}]"
        return self.subset(range(kept)), held

    def permute(self, seed: int) -> ImageTextData:
        """A null: the same images, each with the captions of another one, without ground truth.

        Drawn evenly from all derangements. Raises ValueError for a single image.
        """
        n = len(self)
        if n < 2:
            raise ValueError(f"{n} images: there is no other one to take captions from")
        rng = np.random.default_rng([seed, 4])
        while ((donor := rng.permutation(n)) == np.arange(n)).any():  # e draws on average
            pass
        permuted = self._taken(range(n), donor.tolist())
        return dataclasses.replace(permuted, split=f"{self.split} (pairs permuted)", truth=None, permuted=True)

    def _taken(self, pictures: Sequence[int], donors: Sequence[int]) -> ImageTextData:
        """Images of some rows with the captions of others, as many."""
        origin = self.origin()
        first = np.cumsum([0, *map(len, self.captions)]).tolist()
        texts = [t for r in donors for t in range(first[r], first[r + 1])]
        return dataclasses.replace(
            self,
            keys=[self.keys[r] for r in pictures],
            captions=[self.captions[r] for r in donors],
            places=[self.places[r] for r in pictures],
            truth=[self.truth[r] for r in pictures] if self.truth is not None else None,
            part_of=Origin(origin.whole, [origin.pictures[r] for r in pictures], [origin.texts[t] for t in texts]),
        )

    def origin(self) -> Origin:
        """Rows in the data as they were opened."""
        texts = range(sum(map(len, self.captions)))
        return self.part_of or Origin(self, range(len(self)), texts)

    def fingerprint(self) -> str:
        """16 hex digits of keys, captions, image sizes and last bytes: equal for copies, different for other data."""
        digest = hashlib.sha256()
        with contextlib.ExitStack() as stack:
            opened, file = "", None
            for key, captions, (path, offset, size) in zip(self.keys, self.captions, self.places, strict=True):
                if path != opened:
                    stack.close()
                    opened, file = path, None
                    with contextlib.suppress(OSError, ValueError):
                        size = size if offset >= 0 else file_size(path)
                        file = stack.enter_context(open(path, "rb"))
                tail = b""
                if file is not None:
                    file.seek(max(offset, 0) + max(size - _TAIL, 0))
                    tail = file.read(min(size, _TAIL))
                name = key if offset >= 0 else Path(key).name
                digest.update(json.dumps([name, captions, size, tail.hex()]).encode())
        return digest.hexdigest()[:16]


def file_size(path: str | Path) -> int:
    """Bytes of an image file (OSError; ValueError for a pipe or a device, which may never end)."""
    status = Path(path).stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a plain file")
    return status.st_size
