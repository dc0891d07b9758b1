"""The built-in scenes: a generated retrieval data set in clip-benchmark's webdataset layout, with exact relevance.

    ROOT/VARIANT/
      dataset_type.txt            "retrieval"
      scenes.json                 generator version, variant, seed, sizes: the mark of a complete build
      SPLIT/nshards.txt           SPLIT is train, test or distractors
      SPLIT/{0..n-1}.tar          KEY.json (the scene), KEY.png, KEY.txt (five captions, one a line)
      SPLIT/truth.jsonl           a line an image, in tar order:
          {"key": "test-00000", "n_objects": 2, "captions": [{"level": "full", "relevant": ["test-00000"]}, ...]}

``captions`` follows the lines of KEY.txt. ``relevant`` holds the keys of all images of that split which the caption
describes (scene_truth.py says how a caption is read); train has no ``relevant``. In ``distractors`` every level is
"distractor", ``relevant`` is empty, and the picture and each caption have a ``kind``: those pictures are described by
no test caption, and those captions describe neither a test picture nor a distractor.

Variants. ``scenes``: one to four objects; captions from fully specified to vague, so that how much a caption says,
and whether a picture shows anything, can be told from it alone. ``scenes-uninformative``: two objects in every
picture, every caption full and of as many words, every test caption with exactly one image, and distractors drawn
like the test split itself: nothing about a caption or a picture alone predicts relevance.

No scene of test or distractors occurs in train.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mmclip.console import progress_bar
from mmclip.data.scenes.drawing import draw_nothing, draw_picture, png_bytes
from mmclip.data.scenes.plan import Sample, plan_informative, plan_uninformative
from mmclip.data.scenes.world import SceneTable
from mmclip.errors import UserError

VARIANTS = ("scenes", "scenes-uninformative")
SPLITS = ("train", "test", "distractors")
GENERATOR_VERSION = 1  # raised whenever the same seed would give other bytes: older builds are then replaced
_MARKER = "scenes.json"
_SHARD = 1000  # images a tar
_STALE_SECONDS = 3600.0  # a partial folder this old belongs to a build that died


@dataclass(frozen=True)
class SceneSizes:
    """Images a split.

    Errors: UserError for a split without images, or more than there are different scenes and near misses for.
    """

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
    """Makes sure that the built-in scenes are on disk and returns their folder, ``root/variant``.

    Built in a folder beside it and renamed when complete, so an interrupted build leaves nothing that looks finished
    and two builds at once end in one whole folder. A complete build of the same version, seed and sizes is kept; any
    other build is replaced. The same arguments give the same bytes.

    Errors: UserError for an unknown variant, a negative seed, or a folder there that is no build of scenes.
    """
    if variant not in VARIANTS:
        raise UserError(f"scene variant {variant!r}; valid: {', '.join(VARIANTS)}")
    if seed < 0:
        raise UserError(f"scene seed {seed}; valid: 0 or more")
    marker = {"generator": GENERATOR_VERSION, "variant": variant, "seed": seed, "sizes": asdict(sizes)}
    return build_folder(Path(root) / variant, marker, lambda folder: _write_all(folder, variant, seed, sizes))


def build_folder(target: Path, marker: object, write: Callable[[Path], None]) -> Path:
    """``target``, made by ``write`` unless a build with this marker is there already. Errors: UserError for a folder
    there that is no build of scenes."""
    if _read_marker(target) == marker:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(target)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=".partial", dir=target.parent))
    try:
        write(partial)
        (partial / _MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
        partial.chmod(0o755)  # mkdtemp's folders are private
        _put_in_place(partial, target, marker)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _read_marker(target: Path) -> object:
    """The marker's content; None where nothing (or an empty folder) is. Errors: UserError for a foreign folder."""
    try:
        return json.loads((target / _MARKER).read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return {}
    except (FileNotFoundError, NotADirectoryError):
        if target.is_dir() and not any(target.iterdir()):
            return None
        if target.exists():
            raise UserError(f"{target} exists and is no build of the scenes ({_MARKER} is missing); move it") from None
        return None


def _put_in_place(partial: Path, target: Path, marker: object) -> None:
    """Renames the finished folder; whatever another process put there meanwhile stays if it is the same build."""
    for _ in range(10):
        try:
            os.replace(partial, target)  # replaces an empty folder, refuses a full one
            return
        except OSError:
            if _read_marker(target) == marker:
                return
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=".partial", dir=target.parent))
        try:
            os.replace(target, old)
        except FileNotFoundError:
            pass  # another process moved it first
        finally:
            shutil.rmtree(old, ignore_errors=True)
    raise UserError(f"{target} keeps changing while the scenes are built; stop the other builds")


def _remove_stale(target: Path) -> None:
    for left in target.parent.glob(f".{target.name}-*.partial"):
        try:
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        except FileNotFoundError:
            pass


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
    """A bar of as many pictures, moved by what it yields; where there is no terminal for one, a line beforehand."""
    label = f"drawing builtin:{name}"
    if not sys.stderr.isatty():
        print(f"{label}: {pictures:,} pictures, kept for later runs", file=sys.stderr, flush=True)
    with progress_bar() as bar:
        task = bar.add_task(label, total=pictures, note="")
        yield lambda: bar.advance(task)


def _write_split(folder: Path, samples: list[Sample], seed: list[int], advance: Callable[[], object]) -> None:
    """The split's shards, nshards.txt and truth.jsonl; ``advance`` is called once an image."""
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
    """A member without a time and an owner: the same content gives the same bytes."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    tar.addfile(info, io.BytesIO(content))


def _key(split: str, i: int) -> str:
    return f"{split}-{i:05d}"


def _files(sample: Sample, rng: np.random.Generator) -> Iterator[tuple[str, bytes]]:
    """(extension, content) of one sample's files, in the order in which they are stored."""
    scene = sample.scene.to_json() if sample.scene else {"kind": sample.kind, "objects": []}
    picture = draw_picture(rng, sample.scene) if sample.scene else draw_nothing(rng, sample.kind or "blank")
    yield "json", json.dumps(scene).encode()
    yield "png", png_bytes(picture)
    yield "txt", "".join(f"{caption.text}\n" for caption in sample.captions).encode()


def _truth(split: str, samples: list[Sample]) -> Iterator[dict[str, object]]:
    """The lines of truth.jsonl. Train's list no relevant images: each would name hundreds, and nothing reads them."""
    owners = [i for i, sample in enumerate(samples) if sample.scene is not None]
    table = SceneTable([sample.scene for sample in samples if sample.scene is not None])
    for i, sample in enumerate(samples):
        captions = []
        for caption in sample.captions:
            entry: dict[str, object] = {"level": caption.level}
            if caption.kind is not None:
                entry["kind"] = caption.kind
            if split != "train":
                claim = caption.description
                entry["relevant"] = [_key(split, owners[n]) for n in (table.described(claim) if claim else ())]
            captions.append(entry)
        line: dict[str, object] = {"key": _key(split, i)}
        if sample.kind is not None:
            line["kind"] = sample.kind
        yield {**line, "n_objects": len(sample.scene.things) if sample.scene else 0, "captions": captions}
