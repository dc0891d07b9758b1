"""The built-in scenes: a generated retrieval data set with exact relevance, in clip-benchmark's webdataset layout.

    ROOT/VARIANT/
      dataset_type.txt            "retrieval"
      scenes.json                 generator version, variant, seed, sizes: marks a complete build
      SPLIT/nshards.txt           SPLIT is train, test or distractors
      SPLIT/{0..n-1}.tar          KEY.json (the scene), KEY.png, KEY.txt (five captions, one a line)
      SPLIT/truth.jsonl           a line an image, in tar order:
          {"key": "test-00000", "n_objects": 2, "captions": [{"level": "full", "relevant": ["test-00000"]}, ...]}

``captions`` follows the lines of KEY.txt. ``relevant`` holds the keys of all images of that split which the caption
describes (world.py defines how a caption is read); train has no ``relevant``. In ``distractors`` every level is
"distractor", ``relevant`` is empty, and the picture and each caption have a ``kind``: those pictures are described by
no test caption, and those captions describe neither a test picture nor a distractor.

Variants. ``scenes``: one to four objects; captions from fully specified to vague, so that how much a caption says,
and whether a picture shows anything, can be told from it alone. ``scenes-uninformative``: two objects in every
picture, every caption full and of as many words, every test caption with exactly one image, and distractors drawn
like the test split itself: nothing about a caption or a picture alone predicts relevance.

No scene of test or distractors occurs in train.

    ROOT/scenes-classes/          pictures of one object by colour and shape, for zero-shot classification
      dataset_type.txt, classnames.txt, zeroshot_classification_templates.txt
      scenes.json                 marks a complete build
      test/nshards.txt, test/0.tar        KEY.json (the scene), KEY.png, KEY.cls (the class)

Every class has every size in every place as often, drawn with random numbers of their own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
from filelock import FileLock

from mmclip.console import progress_bar
from mmclip.data.scenes.drawing import draw_nothing, draw_picture, png_bytes
from mmclip.data.scenes.plan import Sample, plan_informative, plan_uninformative
from mmclip.data.scenes.world import COLOURS, PLACES, SHAPES, SIZES, Scene, Thing, described
from mmclip.errors import UserError

VARIANTS = ("scenes", "scenes-uninformative")
SPLITS = ("train", "test", "distractors")
GENERATOR_VERSION = 1  # raised whenever the same seed would give other bytes: older builds are then replaced
_MARKER = "scenes.json"
_SHARD = 1000  # images a tar
CLASSES = "scenes-classes"
CLASSES_VERSION = 1  # raised whenever the same seed would give other bytes
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
        if _read_marker(target) == marker:
            return target
        partial = target.parent / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a build that was killed
        partial.mkdir()
        write(partial)
        (partial / _MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)  # an older version
        os.replace(partial, target)
    return target


def _read_marker(target: Path) -> object:
    """Content of a build's marker; None for no folder or an empty one."""
    try:
        return json.loads((target / _MARKER).read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return {}
    except (FileNotFoundError, NotADirectoryError):
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise UserError(f"{target} exists and is no build of the scenes ({_MARKER} is missing); move it") from None
        return None


def _write_all(folder: Path, variant: str, seed: int, sizes: SceneSizes) -> None:
    (folder / "dataset_type.txt").write_text("retrieval\n", encoding="utf-8")
    rng = np.random.default_rng([seed, VARIANTS.index(variant)])
    plan = plan_informative if variant == "scenes" else plan_uninformative
    with drawing(variant, sum(asdict(sizes).values())) as advance:
        samples = plan(rng, sizes.train, sizes.test, sizes.distractors)
        for number, split in enumerate(SPLITS):
            picture_seed = [seed, VARIANTS.index(variant), number]
            _write_split(folder / split, samples[split], picture_seed, advance)


@contextlib.contextmanager
def drawing(name: str, pictures: int) -> Iterator[Callable[[], object]]:
    """A progress bar of ``pictures`` steps, or one line without a terminal; yields a function that advances it."""
    label = f"drawing builtin:{name}"
    if not sys.stderr.isatty():
        print(f"{label}: {pictures:,} pictures, kept for later runs", file=sys.stderr, flush=True)
    with progress_bar() as bar:
        task = bar.add_task(label, total=pictures, note="")
        yield lambda: bar.advance(task)


def _write_split(folder: Path, samples: list[Sample], seed: list[int], advance: Callable[[], object]) -> None:
    """Write the shards of a split, nshards.txt and truth.jsonl; ``advance`` is called once an image."""
    folder.mkdir()
    n_shards = (len(samples) + _SHARD - 1) // _SHARD
    for shard in range(n_shards):
        with tarfile.open(folder / f"{shard}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for i in range(shard * _SHARD, min((shard + 1) * _SHARD, len(samples))):
                for extension, content in _files(samples[i], np.random.default_rng([*seed, i])):
                    add_file(tar, f"{_key(folder.name, i)}.{extension}", content)
                advance()
    (folder / "nshards.txt").write_text(f"{n_shards}\n", encoding="utf-8")
    lines = [json.dumps(line) + "\n" for line in _truth(folder.name, samples)]
    (folder / "truth.jsonl").write_text("".join(lines), encoding="utf-8")


def add_file(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a member without time and owner, so that equal content gives equal bytes."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    tar.addfile(info, io.BytesIO(content))


def _key(split: str, i: int) -> str:
    return f"{split}-{i:05d}"


def _files(sample: Sample, rng: np.random.Generator) -> Iterator[tuple[str, bytes]]:
    """(extension, content) of a sample's files in the order of the shard."""
    scene = sample.scene.to_json() if sample.scene else {"kind": sample.kind, "objects": []}
    picture = draw_picture(rng, sample.scene) if sample.scene else draw_nothing(rng, sample.kind or "blank")
    yield "json", json.dumps(scene).encode()
    yield "png", png_bytes(picture)
    yield "txt", "".join(f"{caption.text}\n" for caption in sample.captions).encode()


def _truth(split: str, samples: list[Sample]) -> Iterator[dict[str, object]]:
    """Lines of truth.jsonl; those of train list no relevant images, which would be hundreds each."""
    owners = [i for i, sample in enumerate(samples) if sample.scene is not None]
    claims = [c.description for s in samples for c in s.captions if c.description] if split != "train" else []
    rows = described([sample.scene for sample in samples if sample.scene is not None], claims)
    for i, sample in enumerate(samples):
        captions = []
        for caption in sample.captions:
            entry: dict[str, object] = {"level": caption.level}
            if caption.kind is not None:
                entry["kind"] = caption.kind
            if split != "train":
                claim = caption.description
                entry["relevant"] = [_key(split, owners[n]) for n in (rows[claim] if claim else ())]
            captions.append(entry)
        line: dict[str, object] = {"key": _key(split, i)}
        if sample.kind is not None:
            line["kind"] = sample.kind
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
    for name, lines in (
        ("dataset_type.txt", ["classification"]),
        ("classnames.txt", names),
        ("zeroshot_classification_templates.txt", list(TEMPLATES)),
    ):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "test").mkdir()
    (folder / "test" / "nshards.txt").write_text("1\n", encoding="utf-8")
    total = len(names) * len(SIZES) * len(PLACES) * pictures
    shard = folder / "test" / "0.tar"
    with drawing(CLASSES, total) as advance, tarfile.open(shard, "w", format=tarfile.USTAR_FORMAT) as tar:
        for label, (colour, shape) in enumerate(product(COLOURS, SHAPES)):
            for i, (size, place, _) in enumerate(product(SIZES, PLACES, range(pictures))):
                scene = Scene(place, (Thing(size, colour, shape),))
                picture = draw_picture(np.random.default_rng([seed, len(VARIANTS), label, i]), scene)
                key = f"{colour}-{shape}-{i:03d}"
                add_file(tar, f"{key}.json", json.dumps(scene.to_json()).encode())
                add_file(tar, f"{key}.png", png_bytes(picture))
                add_file(tar, f"{key}.cls", str(label).encode())
                advance()
