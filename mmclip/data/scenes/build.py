"""The built-in scenes: a generated retrieval data set with exact relevance, in clip-benchmark's webdataset layout.

    ROOT/VARIANT/
      dataset_type.txt            "retrieval"
      scenes.json                 generator version, variant, seed, sizes: marks a complete build
      SPLIT/nshards.txt           SPLIT is train, test or distractors
      SPLIT/{0..n-1}.tar          KEY.json (the scene), KEY.png, KEY.txt (five captions, one a line)
      SPLIT/truth.jsonl           a line an image, in tar order:
          {"key": "test-00000", "n_objects": 2, "captions": [{"level": "full", "relevant": ["test-00000"]}, ...]}

``captions`` follows the lines of KEY.txt. ``relevant`` holds the keys of all images of that split which the caption
describes (see world.py); train has no ``relevant``. In ``distractors`` every level is "distractor", ``relevant`` is
empty, and the picture and each caption have a ``kind``: no test caption describes those pictures, and those captions
describe neither a test picture nor a distractor. No scene of test or distractors occurs in train.

Variants. ``scenes``: one to four objects; captions from fully specified to vague, so that a caption or a picture alone
shows how specific it is. ``scenes-uninformative``: two objects in every picture, every caption full and of as many
words, every test caption with exactly one image, and distractors drawn like the test split: nothing about a caption
or a picture alone predicts relevance.

    ROOT/scenes-classes/          pictures of one object by colour and shape, for zero-shot classification
      dataset_type.txt, classnames.txt, zeroshot_classification_templates.txt
      scenes.json                 marks a complete build
      test/nshards.txt, test/0.tar        KEY.json (the scene), KEY.png, KEY.cls (the class)

Every class has every size in every place as often, drawn with random numbers of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from mmclip.console import progress_bar
from mmclip.data.scenes.captions import Sample, plan_informative, plan_uninformative
from mmclip.data.scenes.drawing import draw_nothing, draw_picture, png_bytes
from mmclip.data.scenes.world import COLOURS, PLACES, SHAPES, SIZES, Scene, Thing, described
from mmclip.errors import UserError

VARIANTS = ("scenes", "scenes-uninformative")
SPLITS = ("train", "test", "distractors")
GENERATOR_VERSION = 1  # raised whenever a seed would give other content: older builds are then replaced
_MARKER = "scenes.json"
_SHARD = 1000  # images a tar
CLASSES = "scenes-classes"
CLASSES_VERSION = 1  # the same for the classes
TEMPLATES = ("{c}", "a picture with {c}", "there is {c}")  # as captions say it
PICTURES = 2  # of a class, size and place: 20 a class


@dataclass(frozen=True)
class SceneSizes:
    """Images of each split, limited by the number of different scenes and near misses (UserError)."""

    train: int = 7000
    test: int = 600
    distractors: int = 300

    def __post_init__(self) -> None:
        for split in SPLITS:
            if not 1 <= getattr(self, split) <= 100_000:
                raise UserError(f"{getattr(self, split)} images for {split}; valid: 1 to 100000")
        if self.test < 20 or self.distractors > 5 * self.test or self.test + self.distractors > 5000:
            raise UserError(
                f"{self.test} test images and {self.distractors} distractors; "
                "valid: 20 or more, at most 5 times as many distractors, 5000 together"
            )


def build_scenes(root: Path, variant: str = "scenes", seed: int = 0, sizes: SceneSizes = SceneSizes()) -> Path:
    """Draw the built-in scenes unless they are on disk; returns their folder, ``root/variant``.

    A complete build of the same version, seed and sizes is kept, any other build is replaced. The same arguments give
    the same bytes. UserError for an unknown variant, a negative seed, or a folder that is no build of scenes.
    """
    if variant not in VARIANTS:
        raise UserError(f"scene variant {variant!r}; valid: {', '.join(VARIANTS)}")
    if seed < 0:
        raise UserError(f"scene seed {seed}; valid: 0 or more")
    marker = {"generator": GENERATOR_VERSION, "variant": variant, "seed": seed, "sizes": asdict(sizes)}
    return build_folder(Path(root) / variant, marker, lambda folder: _write_all(folder, variant, seed, sizes))


def build_folder(target: Path, marker: object, write: Callable[[Path], None]) -> Path:
    """Write a folder that is complete or absent, unless one with this marker exists; one process at a time.

    Raises:
        UserError: Another kind of folder is in the way.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        existing: object = None
        try:
            existing = json.loads((target / _MARKER).read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            pass
        except (FileNotFoundError, NotADirectoryError):
            if target.exists() and not (target.is_dir() and not any(target.iterdir())):
                why = f"exists and is no build of the scenes ({_MARKER} is missing); move it"
                raise UserError(f"{target} {why}") from None
        if existing == marker:
            return target
        partial = target.parent / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a build that was killed
        partial.mkdir()
        write(partial)
        (partial / _MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)  # an older version
        os.replace(partial, target)
    return target


def _write_all(folder: Path, variant: str, seed: int, sizes: SceneSizes) -> None:
    _write_lines(folder / "dataset_type.txt", ["retrieval"])
    rng = np.random.default_rng([seed, VARIANTS.index(variant)])
    plan = plan_informative if variant == "scenes" else plan_uninformative
    with _progress(variant, sum(asdict(sizes).values())) as advance:
        samples = plan(rng, sizes.train, sizes.test, sizes.distractors)
        for number, split in enumerate(SPLITS):
            files = (
                _sample(_key(split, i), sample, np.random.default_rng([seed, VARIANTS.index(variant), number, i]))
                for i, sample in enumerate(samples[split])
            )
            _write_shards(folder / split, files, advance)
            _write_lines(folder / split / "truth.jsonl", map(json.dumps, _truth(split, samples[split])))


@contextlib.contextmanager
def _progress(name: str, pictures: int) -> Iterator[Callable[[], object]]:
    """A progress bar of ``pictures`` steps, or one line without a terminal; yields a function that advances it."""
    label = f"drawing builtin:{name}"
    if not sys.stderr.isatty():
        print(f"{label}: {pictures:,} pictures, kept for later runs", file=sys.stderr, flush=True)
    with progress_bar() as bar:
        task = bar.add_task(label, total=pictures, note="")
        yield lambda: bar.advance(task)


def _write_shards(folder: Path, samples: Iterable[dict[str, Any]], advance: Callable[[], object]) -> None:
    """Write samples as webdataset does, without time, so that equal content gives equal bytes; and nshards.txt."""
    from webdataset import ShardWriter  # imports torch

    folder.mkdir()
    with ShardWriter(f"{folder}/%d.tar", maxcount=_SHARD, encoder=False, mtime=0.0, verbose=0) as shards:
        for sample in samples:
            shards.write(sample)
            advance()
        (folder / "nshards.txt").write_text(f"{shards.shard}\n", encoding="utf-8")


def _key(split: str, i: int) -> str:
    return f"{split}-{i:05d}"


def _sample(key: str, sample: Sample, rng: np.random.Generator) -> dict[str, Any]:
    """Files of a sample by their suffix."""
    scene = sample.scene.to_json() if sample.scene else {"kind": sample.kind, "objects": []}
    picture = draw_picture(rng, sample.scene) if sample.scene else draw_nothing(rng, sample.kind or "blank")
    texts = "".join(f"{caption.text}\n" for caption in sample.captions).encode()
    return {"__key__": key, "json": json.dumps(scene).encode(), "png": png_bytes(picture), "txt": texts}


def _truth(split: str, samples: list[Sample]) -> Iterator[dict[str, object]]:
    """Lines of truth.jsonl; those of train list no relevant images, which would be hundreds each."""
    owners = [i for i, sample in enumerate(samples) if sample.scene is not None]
    claims = [c.description for s in samples for c in s.captions if c.description] if split != "train" else []
    rows = described([sample.scene for sample in samples if sample.scene is not None], claims)
    for i, sample in enumerate(samples):
        captions: list[dict[str, object]] = []
        for caption in sample.captions:
            captions.append({"level": caption.level})
            if caption.kind is not None:
                captions[-1]["kind"] = caption.kind
            if split != "train":
                claim = caption.description
                captions[-1]["relevant"] = [_key(split, owners[n]) for n in (rows[claim] if claim else ())]
        line = {"key": _key(split, i)} | ({"kind": sample.kind} if sample.kind is not None else {})
        yield {**line, "n_objects": len(sample.scene.things) if sample.scene else 0, "captions": captions}


def class_names() -> list[str]:
    """The 42 classes with their article, as in captions.

    >>> class_names()[0], class_names()[6]
    ('a red circle', 'an orange circle')
    """
    return [f"a{'n' * (colour == 'orange')} {colour} {shape}" for colour, shape in product(COLOURS, SHAPES)]


def build_scene_classes(root: Path, seed: int = 0, pictures: int = PICTURES) -> Path:
    """Draw the pictures of classes unless they are on disk, as ``build_scenes`` does; returns their folder.

    Args:
        root: Folder of built-in data.
        seed: Of the drawing.
        pictures: Pictures of a class, size and place: a tenth of those of a class.
    """
    if seed < 0 or not 1 <= pictures <= 1000:
        raise UserError(f"seed {seed}, {pictures} pictures; valid: 0 or more, and 1 to 1000")
    marker = {"generator": GENERATOR_VERSION, "classes": CLASSES_VERSION, "seed": seed, "pictures": pictures}
    return build_folder(Path(root) / CLASSES, marker, lambda folder: _write_classes(folder, seed, pictures))


def _write_classes(folder: Path, seed: int, pictures: int) -> None:
    names = class_names()
    _write_lines(folder / "dataset_type.txt", ["classification"])
    _write_lines(folder / "classnames.txt", names)
    _write_lines(folder / "zeroshot_classification_templates.txt", TEMPLATES)

    def samples() -> Iterator[dict[str, Any]]:
        for label, (colour, shape) in enumerate(product(COLOURS, SHAPES)):
            for i, (size, place, _) in enumerate(product(SIZES, PLACES, range(pictures))):
                scene = Scene(place, (Thing(size, colour, shape),))
                picture = draw_picture(np.random.default_rng([seed, len(VARIANTS), label, i]), scene)
                files = {"json": json.dumps(scene.to_json()).encode(), "png": png_bytes(picture)}
                yield {"__key__": f"{colour}-{shape}-{i:03d}", **files, "cls": str(label).encode()}

    with _progress(CLASSES, len(names) * len(SIZES) * len(PLACES) * pictures) as advance:
        _write_shards(folder / "test", samples(), advance)


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
