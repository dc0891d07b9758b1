"""Pictures with captions in memory, pixels on disk: the one data set class. Random access; no metrics.

Captions are held (they are small), pictures are read when they are asked for. That makes exact shuffles, exact epochs
with any number of workers, and exact resumption plain index arithmetic.
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
MAX_SCANNED = 10**10  # pixels times scans of a JPEG: ten seconds; a progressive one has some ten scans
MAX_ASPECT = 200  # resizing the short side of a line of pixels would ask for gigabytes
# Decoders of pictures only: Pillow would also hand PostScript under a picture's name to Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_TAIL = 64  # bytes: a PNG's checksum and a JPEG's last coefficients, which tell pictures of one size apart


class BadSample(Exception):
    """A sample that cannot be used: its key, the file it is in, and why."""

    def __init__(self, key: str, where: str, reason: str) -> None:
        super().__init__(key, where, reason)  # all three, so that it can cross a process boundary
        self.key, self.where, self.reason = key, where, reason

    @property
    def why(self) -> str:
        return f"{self.where}: {self.reason}"

    def __str__(self) -> str:
        return named(self.key, f"{printable(self.where, 160)}: {printable(self.reason, 160)}", 80, 330)


def named(key: str, why: str, key_limit: int = 60, why_limit: int = 160) -> str:
    """'KEY in FILE: REASON' of a bad sample, ``why`` being 'FILE: REASON'. A key that is the file's own path, as in a
    CSV, is not named again.

    >>> named("0007", "train/0.tar: an empty picture"), named("dog.png", "photos/dog.png: an empty picture")
    ('0007 in train/0.tar: an empty picture', 'photos/dog.png: an empty picture')
    """
    again = f"/{key}: " in f"/{why}"
    return printable(why, why_limit) if again else f"{printable(key, key_limit)} in {printable(why, why_limit)}"


def skipped_line(skipped: Mapping[str, str]) -> str:
    """'3 samples cannot be used: …', naming the first five."""
    first = "; ".join(named(k, why) for k, why in list(skipped.items())[:5])
    more = f"; and {len(skipped) - 5} more" if len(skipped) > 5 else ""
    samples = "1 sample" if len(skipped) == 1 else f"{len(skipped)} samples"
    return f"{samples} cannot be used: {first}{more}"


def by_key(samples: Iterable[BadSample]) -> dict[str, str]:
    """Each sample's file and reason by its key; a key that comes again gets a number, so that all are counted."""
    found: dict[str, str] = {}
    for sample in samples:
        key, n = sample.key, 2
        while key in found:
            key, n = f"{sample.key} ({n})", n + 1
        found[key] = sample.why
    return found


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


@dataclass(frozen=True)
class Origin:
    """Where the rows of a part came from: ``whole``, the data as they were opened, and there the row of each image's
    picture, and of each caption, counted through all images."""

    whole: ImageTextData
    pictures: list[int]
    texts: list[int]


@dataclass
class ImageTextData:
    """N images with at least one caption each.

    keys [N]; captions [N] lists; places [N]: (file, offset, size) of a picture, offset -1 for a file of its own;
    truth [N] or None; skipped: samples left out when the data were opened; part_of: None for data as they were opened;
    permuted: whether each image has another one's captions.
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
        """The picture of a row, decoded, in RGB. Errors: BadSample naming key, file and reason."""
        path, offset, size = self.places[row]
        try:
            if offset < 0:
                offset, size = 0, picture_size(path)
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
                if image.width * image.height > MAX_PIXELS:
                    raise ValueError(f"{image.width} x {image.height} pixels, above {MAX_PIXELS:,}")
                if max(image.size) > MAX_ASPECT * min(image.size):
                    raise ValueError(f"{image.width} x {image.height} pixels, more than {MAX_ASPECT} to 1")
                scans = content.count(b"\xff\xda") if content.startswith(b"\xff\xd8") else 1
                if scans * image.width * image.height > MAX_SCANNED:
                    raise ValueError(f"{scans:,} scans of {image.width} x {image.height} pixels: too long to decode")
                image.load()
                return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it
        except UnidentifiedImageError:
            raise BadSample(
                self.keys[row], path, f"not a readable picture of a known kind ({', '.join(FORMATS)})"
            ) from None
        except Exception as error:  # damaged content makes decoders raise nearly anything
            raise BadSample(self.keys[row], path, reason(error)) from None

    def subset(self, rows: Sequence[int]) -> ImageTextData:
        """The data of some rows, in their order."""
        return self._taken(rows, rows)

    def holdout(self, n: int) -> tuple[ImageTextData, ImageTextData]:
        """(all images but the last ``n``, those, under a name that ``open_data`` takes for a split)."""
        kept = len(self) - n
        held = dataclasses.replace(self.subset(range(kept, len(self))), skipped=[])
        held.split = f"{self.split}[holdout {n}]"
        return self.subset(range(kept)), held

    def permute(self, seed: int) -> ImageTextData:
        """The same pictures, each with the captions of another one: the pairs say nothing, all else is as it was.

        Which one is drawn evenly from all orders that leave no image its own captions. What is known of relevance does
        not hold any more and is left out. Errors: ValueError for a single image.
        """
        n = len(self)
        if n < 2:
            raise ValueError(f"{n} images: there is no other one to take captions from")
        rng = np.random.default_rng([seed, 4])
        while ((giver := rng.permutation(n)) == np.arange(n)).any():  # e draws on average
            pass
        found = self._taken(range(n), giver.tolist())
        return dataclasses.replace(found, split=f"{self.split} (pairs permuted)", truth=None, permuted=True)

    def _taken(self, pictures: Sequence[int], givers: Sequence[int]) -> ImageTextData:
        """Pictures of some rows, with the captions of others, as many."""
        origin = self.origin()
        counts = [len(c) for c in self.captions]
        first = np.concatenate([[0], np.cumsum(counts)]).tolist()
        return dataclasses.replace(
            self,
            keys=[self.keys[r] for r in pictures],
            captions=[self.captions[r] for r in givers],
            places=[self.places[r] for r in pictures],
            truth=[self.truth[r] for r in pictures] if self.truth is not None else None,
            part_of=Origin(
                origin.whole,
                [origin.pictures[r] for r in pictures],
                [origin.texts[t] for r in givers for t in range(first[r], first[r] + counts[r])],
            ),
        )

    def origin(self) -> Origin:
        """Where the rows came from; data as they were opened are their own whole."""
        every = range(sum(len(c) for c in self.captions))
        return self.part_of or Origin(self, list(range(len(self))), list(every))

    def fingerprint(self) -> str:
        """16 hex digits of keys, captions, picture sizes and last bytes: the same for a copy elsewhere, another for
        other data."""
        digest = hashlib.sha256()
        with contextlib.ExitStack() as stack:
            opened, file = "", None
            for key, captions, (path, offset, size) in zip(self.keys, self.captions, self.places, strict=True):
                if path != opened:
                    stack.close()
                    opened, file = path, None
                    with contextlib.suppress(OSError, ValueError):
                        size = size if offset >= 0 else picture_size(path)
                        file = stack.enter_context(open(path, "rb"))
                tail = b""
                if file is not None:
                    file.seek(max(offset, 0) + max(size - _TAIL, 0))
                    tail = file.read(min(size, _TAIL))
                name = key if offset >= 0 else Path(key).name
                digest.update(json.dumps([name, captions, size, tail.hex()]).encode())
        return digest.hexdigest()[:16]


def picture_size(path: str | Path) -> int:
    """Bytes of a picture's own file. Errors: OSError, and ValueError for a pipe or a device, which may never end."""
    status = Path(path).stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a plain file")
    return status.st_size
