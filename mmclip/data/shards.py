"""Image-text data from tar shards, a folder in clip-benchmark's layout, or a CSV.

Faults of a data set (a missing shard, a truncated tar, an empty split) are errors; faults of single samples are listed
in ``skipped``, and the rest is used. Shards are indexed, never unpacked: an image is read at its offset in the tar.
"""

from __future__ import annotations

import glob
import json
import os
import re
import tarfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from braceexpand import braceexpand

from mmclip.data.csv import index_csv
from mmclip.data.image_text import BadSample, CaptionTruth, ImageTextData, ImageTruth
from mmclip.errors import UserError, printable, reason

_HOLDOUT = re.compile(r"(.*)\[holdout (\d{1,18})\]")  # a split's name by ImageTextData.holdout
MAX_SHARDS = 1_000_000  # more is a slip in a pattern
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
MAX_CAPTION_BYTES = 1_000_000  # a larger text file is a fault, not a caption
_END = 1024  # bytes of zeros that end a tar
_PADDING = 1 << 20  # bytes checked behind a tar's end: writers pad to 10 KB, seldom to more
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
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
    """Open training or evaluation data.

    Args:
        source: One of FORMS.
        split: Split of a folder; by default train, or test (else val) for evaluation. ``train[holdout 1000]`` is the
            last 1,000 images of train, which a run with --val-holdout leaves out.
        purpose: "train" or "eval".
        dataset_type: "auto", "webdataset" or "csv".
        img_key: CSV column of image paths.
        caption_key: CSV column of captions.
        separator: CSV separator.

    Raises:
        UserError: A fault of the data set, in one line; faults of single samples are in ``skipped``.
    """
    if held := _HOLDOUT.fullmatch(split or ""):
        whole = open_data(source, held[1] or None, purpose, dataset_type, img_key, caption_key, separator)
        if not 0 < int(held[2]) <= len(whole):
            raise UserError(f"{printable(source)} [{printable(split, 60)}]: of {len(whole)} images")
        return whole.holdout(int(held[2]))[1]
    if not source.strip():
        raise UserError(f"{source!r}: no data named; valid: {FORMS}")
    if "://" in source or source.startswith("pipe:"):
        raise UserError(f"{printable(source)}: remote data are not read; copy the shards to a local folder: {FORMS}")
    path, truth = builtin_folder(source) or Path(source), None
    if dataset_type == "csv" or (dataset_type == "auto" and path.suffix.lower() in (".csv", ".tsv")):
        data = index_csv(path, img_key, caption_key, separator)
    elif is_folder(path):
        folder = find_split(path, split, purpose)
        if folder is None:
            folders = ", ".join(sorted(p.name for p in path.iterdir() if p.is_dir())) or "no folders"
            wanted = split or ("train" if purpose == "train" else "test or val")
            raise UserError(f"{path}: no split {printable(wanted)} with shards in it; there: {printable(folders)}")
        data, truth = _read_shards(shards_of(folder), str(path), folder.name), folder / "truth.jsonl"
    else:
        data = _read_shards(_expanded(source), source, split or "shards")
    if not data.keys:
        first = f"; first of {len(data.skipped)} skipped: {data.skipped[0]}" if data.skipped else ""
        raise UserError(f"{printable(data.path)} [{data.split}]: empty: no image with a caption{first}")
    if truth is not None and truth.is_file():
        data.truth = _read_truth(truth, data)
    return data


def is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # longer than a name may be, as a pattern of many shards is
        return False


def _expanded(source: str) -> list[Path]:
    """Shards of a pattern: '::' between patterns, braces, and wildcards where they match."""
    shards: list[Path] = []
    try:
        for part in source.split("::"):
            ranges = re.findall(r"(-?\d+)\.\.(-?\d+)", part)  # braceexpand lists inner braces before the first name
            large = any(abs(int(end) - int(start)) >= MAX_SHARDS for start, end in ranges) or part.count("{") > 20
            names = [] if large else list(islice(braceexpand(part), MAX_SHARDS + 1))
            if large or len(names) > MAX_SHARDS:
                raise UserError(f"{printable(part)}: a pattern of more than {MAX_SHARDS:,} shards")
            for name in names:
                wild = glob.has_magic(name) and not Path(name).exists()
                matches = glob.glob(name) if wild else []  # noqa: PTH207  (Path.glob takes no absolute pattern)
                shards += _in_order([Path(p) for p in matches]) or [Path(name)]
        if not any(s.suffix == ".tar" for s in shards):
            raise UserError(f"{printable(source)}: no such data; valid: {FORMS}")
        if missing := [str(s) for s in shards if not s.is_file()]:
            count = f"{len(missing)} of {len(shards)}"
            raise UserError(f"{printable(source)}: missing shard {printable(missing[0])} ({count})")
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{printable(source)}: not a shard pattern: {reason(error, 60)}; valid: {FORMS}") from None
    return shards


def _in_order(shards: list[Path]) -> list[Path]:
    """By number: 2.tar before 10.tar."""
    return sorted(shards, key=lambda p: (str(p.parent), len(p.stem), p.stem))


def find_split(root: Path, split: str | None, purpose: str) -> Path | None:
    """The folder of a split in clip-benchmark's layout: ROOT/SPLIT, or ROOT itself where it holds shards."""
    names = [split] if split else ["train"] if purpose == "train" else ["test", "val"]
    folders = [root / name for name in names] + [root] * (split in (None, root.name))
    return next((f for f in folders if is_folder(f) and ((f / "nshards.txt").is_file() or any(f.glob("*.tar")))), None)


def builtin_folder(source: str) -> Path | None:
    """The folder of built-in data, which is drawn on first use; None for any other source."""
    if not source.startswith("builtin:"):
        return None
    from mmclip.data.scenes.build import CLASSES, VARIANTS, build_scenes

    variant = source.removeprefix("builtin:")
    if variant == CLASSES:
        raise UserError(f"{source}: images of classes, without captions: for --zeroshot-data")
    if variant not in VARIANTS:
        valid = ", ".join(f"builtin:{v}" for v in VARIANTS)
        raise UserError(f"{printable(source)}: unknown built-in data; valid: {valid}")
    return build_scenes(builtin_root(), variant)


def builtin_root() -> Path:
    """Folder of built-in data: MMCLIP_DATA, else data/."""
    return Path(os.environ.get("MMCLIP_DATA", "data"))


def shards_of(folder: Path) -> list[Path]:
    """All shards of a split folder (UserError where an nshards.txt does not agree with them)."""
    shards = _in_order(list(folder.glob("*.tar")))
    count_file = folder / "nshards.txt"
    if not count_file.is_file():
        return shards
    text = count_file.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(r"[0-9]{1,18}", text) or not 0 < int(text) <= MAX_SHARDS:
        raise UserError(
            f"{count_file}: a number of shards, 1 to {MAX_SHARDS:,}, is expected, got {printable(text, 60)!r}; "
            f"shards there: {len(shards)}"
        )
    expected = [folder / f"{i}.tar" for i in range(int(text))]
    missing, extra = (
        [p.name for p in some if p not in set(others)][:3] for some, others in ((expected, shards), (shards, expected))
    )
    if missing or extra:
        raise UserError(
            f"{count_file} says {text} shards (0.tar to {int(text) - 1}.tar); missing: "
            f"{', '.join(missing) or 'none'}; not counted: {', '.join(extra) or 'none'}"
        )
    return expected


def _read_shards(shards: list[Path], path: str, split: str) -> ImageTextData:
    data = ImageTextData(path, split, [], [], [])
    keys: set[str] = set()
    for shard in shards:
        samples = index_shard(shard)
        images = [s for s in samples if s.image is not None]
        if images and all(s.text is None and s.fault is None for s in images):
            raise UserError(f"{shard}: no captions: none of its {len(images)} images has a KEY.txt")
        for sample in samples:
            captions, fault = _captions(sample.text)
            if sample.image is None:
                fault = fault or "no image beside its captions"
            if sample.key in keys:
                fault = "a duplicate key: the first one is kept"
            fault = sample.fault or fault
            if fault is not None or sample.image is None:
                data.skipped.append(BadSample(sample.key, sample.shard, fault or "no image"))
                continue
            keys.add(sample.key)
            data.keys.append(sample.key)
            data.captions.append(captions)
            data.places.append((sample.shard, *sample.image))
    return data


def _captions(text: bytes | None) -> tuple[list[str], str | None]:
    """(captions, one a line without blank lines; None, or the fault where there is no caption)."""
    if text is None:
        return [], "no caption: KEY.txt is missing"
    try:  # lines end at \n only: str.splitlines would also break a caption at U+2028 or a vertical tab
        lines = [line for raw in text.decode("utf-8-sig").split("\n") if (line := raw.strip())]
    except UnicodeDecodeError as error:
        return [], f"an undecodable caption: {error.reason} at byte {error.start}"
    return lines, None if lines else "no caption: KEY.txt is empty"


def _read_truth(path: Path, data: ImageTextData) -> list[ImageTruth]:
    """truth.jsonl, one line an image; lines of skipped images are passed over (UserError names the line)."""
    by_key: dict[str, ImageTruth] = {}
    line_of: dict[str, int] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            key, truth = _truth_of(json.loads(line))
            if key in by_key:
                raise ValueError(f"{key!r} has a line already, line {line_of[key]}")
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else printable(error)
            raise UserError(f"{path}, line {number}: not a truth of an image: {why}") from None
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
    """A line of truth.jsonl. Raises KeyError, TypeError, AttributeError or ValueError."""
    key, n_objects, captions = entry["key"], entry.get("n_objects"), []
    counted = type(n_objects) is int and 0 <= n_objects < 2**31
    if not isinstance(key, str) or not (n_objects is None or counted):
        raise ValueError("key must be a string and n_objects a whole number")
    for caption in entry["captions"]:
        relevant = caption.get("relevant")
        if relevant is not None and not (isinstance(relevant, list) and all(isinstance(k, str) for k in relevant)):
            raise ValueError("relevant must be a list of keys")
        captions.append(CaptionTruth(str(caption["level"]), relevant))
    return key, ImageTruth(n_objects, captions)


@dataclass
class Sample:
    """A sample of a shard: offset and size of its image, and the bytes of its captions (or label), where present."""

    key: str
    shard: str
    image: tuple[int, int] | None = None
    text: bytes | None = None
    fault: str | None = None


def index_shard(path: Path, text: str = "txt") -> list[Sample]:
    """Index the samples of a tar in the order of their first members.

    A member's key is its path up to the first dot of its name, webdataset's rule. A link, a device, a sparse file, an
    absolute path or '..' is a fault of its sample. Of two images or caption files of a key the first is kept, and
    another Sample without either names the second.

    Args:
        path: The tar.
        text: Suffix of caption files, or of labels ("cls").

    Raises:
        UserError: The file is no tar, stops before its end, or goes on behind it.
    """
    samples: dict[str, Sample] = {}
    repeated: dict[str, Sample] = {}
    at = -1
    try:
        with tarfile.open(path, "r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # ours are in ``samples``; a shard may have a million
                if member.size < 0 or member.offset <= at:  # tarfile would read the same members for ever
                    raise tarfile.ReadError(f"{printable(member.name, 80)} has a negative size")
                at = member.offset
                name = PurePosixPath(member.name)
                stem, _, suffix = name.name.partition(".")
                if not member.isdir() and suffix.lower() in (*IMAGE_SUFFIXES, text):
                    key = str(name.with_name(stem)) if stem else member.name
                    sample = samples.setdefault(key, Sample(key, str(path)))
                    if repeat := _add_member(sample, tar, member, suffix.lower() == text, text):
                        repeated.setdefault(key, Sample(key, str(path), fault=repeat))
            end = tar.offset
        with path.open("rb") as file:
            file.seek(end)
            tail, behind = file.read(_END), file.read(_PADDING)
    except Exception as error:  # damaged content makes tarfile raise nearly anything
        with path.open("rb") as file:
            start = file.read(6)
        kind = next((kind for magic, kind in _COMPRESSED.items() if start.startswith(magic)), None)
        hint = f"; it is compressed ({kind}): unpack it, images are read by their place in the tar" if kind else ""
        raise UserError(f"{path}: not a readable tar, or a truncated one: {reason(error)}{hint}") from None
    # tarfile takes a file that stops between members for complete; a whole one ends in zero blocks.
    if len(tail) < _END or any(tail):
        raise UserError(f"{path}: truncated or damaged: no end-of-archive blocks at byte {end:,}")
    if any(behind):
        raise UserError(
            f"{path}: goes on behind its end-of-archive blocks at byte {end:,}: tars joined by cat? "
            "Their later members would be lost; list them as shards of their own"
        )
    return [*samples.values(), *repeated.values()]


def _add_member(sample: Sample, tar: tarfile.TarFile, member: tarfile.TarInfo, is_text: bool, text: str) -> str | None:
    """Add a file of a sample, or its fault; returns the fault of a repeated one."""
    kind, shown = "image" if not is_text else "caption file" if text == "txt" else "label", printable(member.name, 80)
    if (sample.text if is_text else sample.image) is not None:
        return f"a duplicate key, two {kind}s: the first one is kept"
    if any("\ud800" <= c <= "\udfff" for c in member.name):
        sample.fault = "a name that is not UTF-8"
    elif member.name.startswith("/") or ".." in PurePosixPath(member.name).parts:
        sample.fault = f"its member {shown} leaves the archive's folder"
    elif not member.isreg() or member.issparse():
        sample.fault = f"its member {shown} is a link, a device or a sparse file, not a plain one"
    elif is_text and member.size > MAX_CAPTION_BYTES:
        sample.fault = f"a {kind} of {member.size:,} bytes (at most {MAX_CAPTION_BYTES:,})"
    elif is_text:
        file = tar.extractfile(member)
        sample.text = file.read() if file else b""
    else:
        sample.image = (member.offset_data, member.size)
    return None
