"""Built-in distractors: candidates that match nothing, made from the evaluation set itself.

    blank            image   one random colour
    noise            image   random cells of colour, 64 along the short side: finer noise would not survive a resize
    blurred          image   the picture under a Gaussian blur of an eighth of its short side, at least a pixel
    shuffled         image   the picture's patches, 8 by 8, each moved to another place
    boilerplate      text    empty alt texts of the web: "Stock photo", "Click to enlarge"
    shuffled-words   text    a caption's own words in another order

All of them count as irrelevant to every query. blurred, shuffled and shuffled-words are **near-duplicates on purpose**:
they keep the colours, textures or words of something relevant. Report each kind by itself. Images depend on the decoded
pixels and the seed only, captions on the set of captions and the seed, not on their order.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch import Tensor

from mmclip.errors import UserError, printable

KINDS = dict.fromkeys(("blank", "noise", "blurred", "shuffled"), "image") | dict.fromkeys(
    ("boilerplate", "shuffled-words"), "text"
)  # name -> the side whose candidates it adds to
TWINS = ("blurred", "shuffled")  # near-duplicates of one picture of the data
NOISE_CELLS = 64  # along the short side
BLUR = 1 / 8  # standard deviation of the blur, as a fraction of the short side
PATCHES = 8  # along each side of a shuffled picture
_TRIES = 20  # random orders of a caption's words before it counts as having no new one

# Any of the first, alone or with any of the second; none names what a picture could show.
_HEADS = (
    *("Image", "Untitled", "Stock photo", "Royalty-free image", "Photo of the day", "Image not available"),
    *("No description available", "Placeholder image", "Thumbnail", "Featured image", "Main image", "Teaser image"),
    *("Photo gallery", "Image gallery", "Picture 1 of 12", "Item 3 of 9", "Fig. 2", "Attachment", "Header image"),
    *("Default picture", "Upload", "File photo", "Courtesy photo", "Handout photo", "Archive photo", "Media asset"),
    *("Advertisement", "Sponsored content", "Related article", "Preview", "Cover image", "HD wallpaper"),
    *("IMG_2047.JPG", "DSC00318.jpg", "header-final-v2.png", "image001.gif", "Scan0004", "Photo by contributor"),
)
_TAILS = (
    *("click to enlarge", "click here to see more", "view full size", "zoom in", "open original"),
    *("all rights reserved", "editorial use only", "used with permission", "image via press release"),
    *("download now", "free download", "high resolution", "1920 x 1080", "75% off today", "buy prints online"),
    *("share this", "save to favourites", "order now", "subscribe to our newsletter", "read more", "page 2"),
    *("photo credit unknown", "source: internet", "copyright 2014", "licence required", "loading, please wait"),
)
_JOINTS = (" - ", " | ", ", ", ": ", " (", " / ")

Array = NDArray[Any]


def corrupt(kind: str, image: Image.Image, seed: int) -> Image.Image:
    """A distractor of ``kind`` from an image of any mode: RGB, of the same size (UserError for a kind of text)."""
    _check(kind, "image")
    picture = image.convert("RGB")
    width, height = picture.size
    rng = _rng(kind, seed, picture.size, picture.tobytes())
    if kind == "blank":
        return Image.new("RGB", picture.size, tuple(rng.integers(0, 256, 3).tolist()))
    if kind == "noise":
        scale = min(1.0, NOISE_CELLS / min(picture.size))
        cells = rng.integers(0, 256, (max(1, round(height * scale)), max(1, round(width * scale)), 3), dtype=np.uint8)
        return Image.fromarray(cells).resize(picture.size, Image.Resampling.NEAREST)
    if kind == "blurred":
        return picture.filter(ImageFilter.GaussianBlur(max(1.0, BLUR * min(picture.size))))
    return Image.fromarray(_shuffled(np.array(picture), rng))


def _shuffled(pixels: Array, rng: np.random.Generator) -> Array:
    """Move every patch of pixels [H, W, 3] elsewhere; the rows and columns left over by equal patches stay."""
    rows, columns = (min(PATCHES, n) for n in pixels.shape[:2])
    high, wide = pixels.shape[0] // rows, pixels.shape[1] // columns
    inner = pixels[: rows * high, : columns * wide]
    patches = inner.reshape(rows, high, columns, wide, 3).swapaxes(1, 2).reshape(rows * columns, high, wide, 3)
    order = rng.permutation(len(patches))
    moved = np.empty_like(patches)
    moved[order] = patches[np.roll(order, 1)]  # one cycle through all places: none keeps its own
    inner[:] = moved.reshape(rows, columns, high, wide, 3).swapaxes(1, 2).reshape(inner.shape)
    return pixels


@dataclass(frozen=True)
class Corrupted:
    """An image transform that applies ``transform`` to an image's distractor; pickles where ``transform`` does."""

    kind: str
    transform: Callable[[Any], Tensor]
    seed: int

    def __post_init__(self) -> None:
        _check(self.kind, "image")

    def __call__(self, image: Image.Image) -> Tensor:
        return self.transform(corrupt(self.kind, image, self.seed))


def captions(kind: str, captions: Sequence[str], n: int, seed: int) -> list[str]:
    """``n`` different captions of ``kind``, none of them among ``captions`` (ignoring case and spaces).

    boilerplate: some 6,000 combinations, then the same with numbers. shuffled-words: each caption in a new order, then
    in yet another one; captions of one word, or of equal words, are left out. Fewer than ``n`` where there are fewer
    orders; UserError where there is none.

    >>> captions("shuffled-words", ["red square", "square", "the the"], 1, seed=0)
    ['square red']
    """
    _check(kind, "text")
    taken = {_plain(c) for c in captions}
    texts: list[str] = []
    for text in _boilerplate(seed) if kind == "boilerplate" else _shuffled_words(sorted(set(captions)), seed, taken):
        if len(texts) == n:
            break
        if _plain(text) not in taken:
            taken.add(_plain(text))
            texts.append(text)
    if n and not texts:
        raise UserError(f"{kind}: the words of {len(captions)} captions have no order that is no caption")
    return texts


def _boilerplate(seed: int) -> Iterator[str]:
    """All combinations in random order, then again with numbers, endlessly."""
    every = [*_HEADS, *(tail.capitalize() for tail in _TAILS)]
    every += [f"{a}{joint}{b}{')' * (joint == ' (')}" for a, joint, b in product(_HEADS, _JOINTS, _TAILS)]
    order = _rng("boilerplate", seed).permutation(len(every))
    for round_ in count(1):
        for i in order:
            yield every[i] if round_ == 1 else f"{every[i]} #{round_}"


def _shuffled_words(different: list[str], seed: int, taken: set[str]) -> Iterator[str]:
    """In each round a new order of each caption's words that is not in the growing set ``taken``."""
    open_ = [different[i] for i in _rng("shuffled-words", seed).permutation(len(different))]
    for round_ in count():
        still_open = []
        for caption in open_:
            words = caption.split()
            rng = _rng("shuffled-words", seed, caption, round_)
            for _ in range(_TRIES if len(set(words)) > 1 else 0):
                text = " ".join(words[i] for i in rng.permutation(len(words)))
                if _plain(text) not in taken:
                    still_open.append(caption)
                    yield text
                    break
        if not still_open:
            return
        open_ = still_open


def parse_distractors(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the values of ``--distractors`` into built-in kinds and data sources, each once, in order.

    A folder with the name of a kind is ``./NAME``. A source is builtin:…, an existing path, or looks like a path or
    pattern; ``open_data`` reads it. UserError for any other name.

    >>> parse_distractors(["blank", "builtin:scenes", "shards/{0..3}.tar"])
    (['blank'], ['builtin:scenes', 'shards/{0..3}.tar'])
    """
    kinds, data = ([n for n in dict.fromkeys(names) if (n in KINDS) == built_in] for built_in in (True, False))
    for name in data:
        looks = name.startswith("builtin:") or any(c in name for c in "/\\{") or glob.has_magic(name)
        looks = looks or name.lower().endswith((".tar", ".csv", ".tsv"))
        if not looks and not (name.strip() and os.path.exists(name)):  # noqa: PTH110  (False for any impossible name)
            raise UserError(
                f"--distractors {printable(name) or repr(name)}: no built-in kind and no data there; valid: "
                f"{', '.join(KINDS)}, or data as --data takes them"
            )
    return kinds, data


def _check(kind: str, side: str) -> None:
    valid = [name for name, its in KINDS.items() if its == side]
    if kind not in valid:
        word = "pictures" if side == "image" else "captions"
        raise UserError(f"{printable(kind)} is no kind of distractor {word}; valid: {', '.join(valid)}")


def _plain(caption: str) -> str:
    return " ".join(caption.split()).casefold()


def _rng(*parts: object) -> np.random.Generator:
    """A generator seeded by ``parts`` alone."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return np.random.default_rng(int.from_bytes(digest.digest(), "little"))
