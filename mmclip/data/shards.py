"""Pictures with captions, read from tar shards, a clip-benchmark folder or a CSV. No metrics.

Faults of the whole (a missing shard, a truncated tar, an empty split) are errors; faults of single samples are noted
in ``skipped`` and the rest is used.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from braceexpand import braceexpand

from mmclip.data.csv import index_csv
from mmclip.data.image_text import BadSample, CaptionTruth, ImageTextData, ImageTruth
from mmclip.data.tarindex import Sample, index_shard
from mmclip.errors import UserError, printable

_HOLDOUT = re.compile(r"(.*)\[holdout (\d{1,18})\]")  # as ImageTextData.holdout names it
MAX_SHARDS = 1_000_000  # more is a slip in a pattern
FORMS = (
    "a shard pattern 'DIR/{0..5}.tar', a folder in clip-benchmark's layout (ROOT or ROOT/SPLIT), a CSV, "
    "builtin:scenes or builtin:scenes-uninformative"
)


def open_data(
    source: str,
    split: str | None = None,
    purpose: str = "train",
    dataset_type: str = "auto",
    img_key: str = "filepath",
    caption_key: str = "title",
    separator: str = "\t",
) -> ImageTextData:
    """Open training ("train") or evaluation ("eval") data. Errors: UserError, one line, for every fault of the whole;
    faults of single samples are in ``skipped``.

    A split may be the images that a run held out, as it names them: ``train[holdout 1000]``, the last 1,000 of train.
    """
    if held := _HOLDOUT.fullmatch(split or ""):
        whole = open_data(source, held[1] or None, purpose, dataset_type, img_key, caption_key, separator)
        if not 0 < int(held[2]) <= len(whole):
            raise UserError(f"{printable(source)} [{printable(split, 60)}]: of {len(whole)} images")
        return whole.holdout(int(held[2]))[1]
    if not source.strip():
        raise UserError(f"{source!r}: no data named; valid: {FORMS}")
    path = builtin_folder(source) or Path(source)
    if "://" in source or source.startswith("pipe:"):
        raise UserError(
            f"{printable(source)}: remote data are not read; copy the shards to a local folder. Valid: {FORMS}"
        )
    if dataset_type == "csv" or (dataset_type == "auto" and path.suffix.lower() in (".csv", ".tsv")):
        return _finish(index_csv(path, img_key, caption_key, separator), str(path))
    if is_folder(path):
        folder = find_split(path, split, purpose)
        if folder is None:
            there = ", ".join(sorted(p.name for p in path.iterdir() if p.is_dir())) or "no folders"
            wanted = split or ("train" if purpose == "train" else "test or val")
            raise UserError(f"{path}: no split {printable(wanted)} with shards in it; there: {printable(there)}")
        return _open_shards(shards_of(folder), str(path), folder.name, folder / "truth.jsonl")
    return _open_shards(_expanded(source), source, split or "shards", None)


def is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # longer than a name may be, as a pattern of many shards is
        return False


def _expanded(source: str) -> list[Path]:
    """The shards of a pattern: '::' between patterns, braces, and wildcards where they match. Errors: UserError."""
    shards: list[Path] = []
    try:
        for part in source.split("::"):
            if _count(part) > MAX_SHARDS:
                raise UserError(f"{printable(part)}: a pattern of more than {MAX_SHARDS:,} shards")
            for name in braceexpand(part):
                wild = glob.has_magic(name) and not Path(name).exists()
                found = glob.glob(name) if wild else []  # noqa: PTH207  (Path.glob takes no absolute pattern)
                shards += _in_order([Path(p) for p in found]) or [Path(name)]
    except OSError as error:
        raise UserError(f"{printable(source)}: {printable(error.strerror or error)}; valid: {FORMS}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{printable(source)}: not a shard pattern: {printable(error, 60)}; valid: {FORMS}") from None
    if not any(s.suffix == ".tar" for s in shards):
        raise UserError(f"{printable(source)}: no such data; valid: {FORMS}")
    return shards


def _count(pattern: str) -> int:
    """How many names braceexpand would make of a pattern: it holds all of the inner ones before it gives the first."""
    outer: list[tuple[int, int, int]] = []  # of each open brace: where it opens, and the two numbers before it
    names, earlier = 1, 0  # of the alternative that is read, and of those before it in the same braces
    for token in re.finditer(r"\\.|[{},]", pattern, re.DOTALL):
        if token[0] == "{":
            outer.append((token.end(), names, earlier))
            names, earlier = 1, 0
        elif token[0] == "," and outer:
            names, earlier = 1, earlier + names
        elif token[0] == "}" and outer:
            start, before, before_earlier = outer.pop()
            span = re.fullmatch(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?", pattern[start : token.start()])
            if span:
                inner = abs(int(span[2]) - int(span[1])) // (int(span[3] or 1) or 1) + 1
            else:
                letters = re.fullmatch(r"[A-Za-z]\.\.[A-Za-z](\.\.-?\d+)?", pattern[start : token.start()])
                inner = 52 if letters else earlier + names
            names, earlier = before * inner, before_earlier
    return names


def _in_order(shards: Iterable[Path]) -> list[Path]:
    """2.tar before 10.tar."""
    return sorted(shards, key=lambda p: (str(p.parent), len(p.stem), p.stem))


def find_split(root: Path, split: str | None, purpose: str) -> Path | None:
    """The folder of a split in clip-benchmark's layout: ROOT/SPLIT, or ROOT itself where it holds shards."""
    names = [split] if split else ["train"] if purpose == "train" else ["test", "val"]
    for name in names:
        if _has_shards(root / name):
            return root / name
    return root if split in (None, root.name) and _has_shards(root) else None


def _has_shards(folder: Path) -> bool:
    return is_folder(folder) and ((folder / "nshards.txt").is_file() or any(folder.glob("*.tar")))


def builtin_folder(source: str) -> Path | None:
    """The folder of built-in data, drawn first where it is not there yet; None for any other source.

    Errors: UserError for a name that is no built-in data.
    """
    if not source.startswith("builtin:"):
        return None
    from mmclip.data.scenes.build import VARIANTS, build_scenes
    from mmclip.data.scenes.classes import CLASSES

    variant = source.removeprefix("builtin:")
    if variant == CLASSES:
        raise UserError(f"{source}: pictures of classes, without captions: they are for --zeroshot-data")
    if variant not in VARIANTS:
        raise UserError(
            f"{printable(source)}: unknown built-in data; valid: " + ", ".join(f"builtin:{v}" for v in VARIANTS)
        )
    return build_scenes(builtin_root(), variant)


def builtin_root() -> Path:
    """Where built-in data are drawn."""
    return Path(os.environ.get("MMCLIP_DATA", "data"))


def shards_of(folder: Path) -> list[Path]:
    """All shards of a split folder. Errors: UserError where nshards.txt, if it is there, does not agree with them."""
    there = _in_order(folder.glob("*.tar"))
    count_file = folder / "nshards.txt"
    if not count_file.is_file():
        return there
    text = count_file.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(r"[0-9]{1,18}", text) or not 0 < int(text) <= MAX_SHARDS:
        raise UserError(
            f"{count_file}: a number of shards, 1 to {MAX_SHARDS:,}, is expected, got {printable(text, 60)!r}; "
            f"shards there: {len(there)}"
        )
    expected = [folder / f"{i}.tar" for i in range(int(text))]
    missing = [p.name for p in expected if p not in set(there)]
    extra = [p.name for p in there if p not in set(expected)]
    if missing or extra:
        raise UserError(
            f"{count_file} says {text} shards (0.tar to {int(text) - 1}.tar); missing: "
            f"{', '.join(missing[:3]) or 'none'}; not counted: {', '.join(extra[:3]) or 'none'}"
        )
    return expected


def _open_shards(shards: list[Path], path: str, split: str, truth_file: Path | None) -> ImageTextData:
    try:
        missing = [str(s) for s in shards if not s.is_file()]
    except OSError as error:
        raise UserError(f"{printable(path)}: {printable(error.strerror or error)}") from None
    if missing:
        raise UserError(f"{printable(path)}: missing shard {printable(missing[0])} ({len(missing)} of {len(shards)})")
    data = ImageTextData(path, split, [], [], [])
    seen: set[str] = set()
    for shard in shards:
        samples = index_shard(shard)
        pictures = [s for s in samples if s.image is not None]
        if pictures and all(s.text is None and s.fault is None for s in pictures):
            raise UserError(f"{shard}: no captions: none of its {len(pictures)} pictures has a KEY.txt")
        for sample in samples:
            _take(data, sample, seen)
    _finish(data, path)
    if truth_file is not None and truth_file.is_file():
        data.truth = _read_truth(truth_file, data)
    return data


def _take(data: ImageTextData, sample: Sample, seen: set[str]) -> None:
    captions, fault = _captions(sample.text)
    fault = sample.fault or fault
    if sample.image is None:
        fault = fault or "no picture beside its captions"
    if sample.key in seen and sample.fault is None:
        fault = "a duplicate key: the first one is kept"
    if fault is not None or sample.image is None:
        data.skipped.append(BadSample(sample.key, sample.shard, fault or "no picture"))
        return
    seen.add(sample.key)
    data.keys.append(sample.key)
    data.captions.append(captions)
    data.places.append((sample.shard, *sample.image))


def _captions(text: bytes | None) -> tuple[list[str], str | None]:
    """(captions, None) or ([], why not): a caption a line, blank lines dropped.

    Lines end at \\n only: str.splitlines would also break a caption at U+2028 or a vertical tab.
    """
    if text is None:
        return [], "no caption: KEY.txt is missing"
    try:
        lines = [line.strip() for line in text.decode("utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        return [], f"an undecodable caption: {error.reason} at byte {error.start}"
    lines = [line for line in lines if line]
    return (lines, None) if lines else ([], "no caption: KEY.txt is empty")


def _finish(data: ImageTextData, path: str) -> ImageTextData:
    if not data.keys:
        first = f"; first of {len(data.skipped)} skipped: {data.skipped[0]}" if data.skipped else ""
        raise UserError(f"{printable(path)} [{data.split}]: empty: no picture with a caption{first}")
    return data


def _read_truth(path: Path, data: ImageTextData) -> list[ImageTruth]:
    """truth.jsonl, one line an image; lines of skipped images are passed over. Errors: UserError naming the line."""
    by_key: dict[str, ImageTruth] = {}
    line_of: dict[str, int] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            key, truth = _truth_of(json.loads(line))
            if key in by_key:
                raise ValueError(f"{key!r} has a line already, line {line_of[key]}")
        except KeyError as error:
            raise UserError(f"{path}, line {number}: not a truth of an image: no {error}") from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not a truth of an image: {printable(error)}") from None
        by_key[key], line_of[key] = truth, number
    for key, truth in by_key.items():
        for unknown in (k for c in truth.captions for k in c.relevant or () if k not in by_key):
            raise UserError(f"{path}, line {line_of[key]}: relevant names {printable(unknown, 80)}, which has no line")
    for key, own in zip(data.keys, data.captions, strict=True):
        if key not in by_key or len(by_key[key].captions) != len(own):
            raise UserError(
                f"{path}: not aligned with the shards: {printable(key)} has {len(own)} captions, "
                f"{len(by_key[key].captions) if key in by_key else 'no line'} there"
            )
    return [by_key[key] for key in data.keys]


def _truth_of(entry: Any) -> tuple[str, ImageTruth]:
    """A line of truth.jsonl. Errors: KeyError, TypeError, AttributeError, ValueError."""
    key, n_objects, captions = entry["key"], entry.get("n_objects"), []
    counted = isinstance(n_objects, int) and not isinstance(n_objects, bool) and 0 <= n_objects < 2**31
    if not isinstance(key, str) or not (n_objects is None or counted):
        raise ValueError("key must be a string and n_objects a whole number")
    for caption in entry["captions"]:
        relevant = caption.get("relevant")
        if relevant is not None and not (isinstance(relevant, list) and all(isinstance(k, str) for k in relevant)):
            raise ValueError("relevant must be a list of keys")
        captions.append(CaptionTruth(str(caption["level"]), relevant))
    return key, ImageTruth(n_objects, captions)
