"""Pictures with captions, read from tar shards, a clip-benchmark folder or a CSV. No metrics.

Faults of the whole (a missing shard, a truncated tar, an empty split) are errors; faults of single samples are noted
in ``skipped`` and the rest is used.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from braceexpand import braceexpand

from mmclip.errors import UsageError, one_line
from mmclip.flags import nearest
from mmclip.image_text import BadSample, CaptionTruth, ImageTextData, ImageTruth
from mmclip.tarindex import MAX_CAPTION_BYTES, Sample, index_shard

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
    """Open training ("train") or evaluation ("eval") data. Errors: UsageError, one line, for every fault of the whole;
    faults of single samples are in ``skipped``.
    """
    path = builtin_folder(source) or Path(source)
    if "://" in source or source.startswith("pipe:"):
        raise UsageError(
            f"{one_line(source)}: remote data are not read; copy the shards to a local folder. Valid: {FORMS}"
        )
    if dataset_type == "csv" or (dataset_type == "auto" and path.suffix.lower() in (".csv", ".tsv")):
        return _open_csv(path, img_key, caption_key, separator)
    if path.is_dir():
        folder = find_split(path, split, purpose)
        if folder is None:
            there = ", ".join(sorted(p.name for p in path.iterdir() if p.is_dir())) or "no folders"
            wanted = split or ("train" if purpose == "train" else "test or val")
            raise UsageError(f"{path}: no split {one_line(wanted)} with shards in it; there: {one_line(there)}")
        return _open_shards(_shards_of(folder), str(path), folder.name, folder / "truth.jsonl")
    shards = [Path(p) for part in source.split("::") for p in braceexpand(part)]
    if not any(s.suffix == ".tar" for s in shards):
        raise UsageError(f"{one_line(source)}: no such data; valid: {FORMS}")
    return _open_shards(shards, source, split or "shards", None)


def find_split(root: Path, split: str | None, purpose: str) -> Path | None:
    """The folder of a split in clip-benchmark's layout: ROOT/SPLIT, or ROOT itself where it holds shards."""
    names = [split] if split else ["train"] if purpose == "train" else ["test", "val"]
    for name in names:
        if _has_shards(root / name):
            return root / name
    return root if split in (None, root.name) and _has_shards(root) else None


def _has_shards(folder: Path) -> bool:
    return folder.is_dir() and ((folder / "nshards.txt").is_file() or any(folder.glob("*.tar")))


def builtin_folder(source: str) -> Path | None:
    """The folder of built-in data, drawn first where it is not there yet; None for any other source.

    Errors: UsageError for a name that is no built-in data.
    """
    if not source.startswith("builtin:"):
        return None
    from mmclip.scenes import VARIANTS, build_scenes

    variant = source.removeprefix("builtin:")
    if variant not in VARIANTS:
        raise UsageError(
            f"{one_line(source)}: unknown built-in data; valid: " + ", ".join(f"builtin:{v}" for v in VARIANTS)
        )
    return build_scenes(Path(os.environ.get("MMCLIP_DATA", "data")), variant)


def _shards_of(folder: Path) -> list[Path]:
    """All shards of a split folder; nshards.txt, where it is there, must agree with them."""
    there = sorted(folder.glob("*.tar"), key=lambda p: (len(p.stem), p.stem))
    count_file = folder / "nshards.txt"
    if not count_file.is_file():
        return there
    text = count_file.read_text(encoding="utf-8", errors="replace").strip()
    if not text.isdigit():
        raise UsageError(f"{count_file}: a number of shards is expected, got {one_line(text, 60)!r}")
    expected = [folder / f"{i}.tar" for i in range(int(text))]
    missing = [p.name for p in expected if p not in there]
    extra = [p.name for p in there if p not in expected]
    if missing or extra:
        raise UsageError(
            f"{count_file} says {text} shards (0.tar to {int(text) - 1}.tar); missing: "
            f"{', '.join(missing[:3]) or 'none'}; not counted: {', '.join(extra[:3]) or 'none'}"
        )
    return expected


def _open_shards(shards: list[Path], path: str, split: str, truth_file: Path | None) -> ImageTextData:
    missing = [str(s) for s in shards if not s.is_file()]
    if missing:
        raise UsageError(f"{one_line(path)}: missing shard {one_line(missing[0])} ({len(missing)} of {len(shards)})")
    data = ImageTextData(path, split, [], [], [])
    seen: set[str] = set()
    for shard in shards:
        samples = index_shard(shard)
        if samples and all(s.text is None for s in samples if s.image is not None):
            raise UsageError(f"{shard}: no captions: none of its {len(samples)} samples has a KEY.txt")
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
    if sample.key in seen:
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
        lines = [line.strip() for line in text.decode("utf-8").split("\n")]
    except UnicodeDecodeError as error:
        return [], f"an undecodable caption: {error.reason} at byte {error.start}"
    lines = [line for line in lines if line]
    return (lines, None) if lines else ([], "no caption: KEY.txt is empty")


def _finish(data: ImageTextData, path: str) -> ImageTextData:
    if not data.keys:
        first = f"; first of {len(data.skipped)} skipped: {data.skipped[0]}" if data.skipped else ""
        raise UsageError(f"{one_line(path)} [{data.split}]: empty: no picture with a caption{first}")
    return data


def _read_truth(path: Path, data: ImageTextData) -> list[ImageTruth]:
    """truth.jsonl, one line an image; lines of skipped images are passed over. Errors: UsageError naming the line."""
    by_key: dict[str, ImageTruth] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry: dict[str, Any] = json.loads(line)
            captions = [CaptionTruth(str(c["level"]), c.get("relevant")) for c in entry["captions"]]
            by_key[entry["key"]] = ImageTruth(entry.get("n_objects"), captions)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}, line {number}: not a truth of an image: {one_line(error)}") from None
    for key, own in zip(data.keys, data.captions, strict=True):
        if key not in by_key or len(by_key[key].captions) != len(own):
            raise UsageError(
                f"{path}: not aligned with the shards: {one_line(key)} has {len(own)} captions, "
                f"{len(by_key[key].captions) if key in by_key else 'no line'} there"
            )
    return [by_key[key] for key in data.keys]


def _open_csv(path: Path, img_key: str, caption_key: str, separator: str) -> ImageTextData:
    """open_clip's CSV: a picture's path and a caption a row; rows of one path are one image with several captions."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    if len(separator) != 1:
        raise UsageError(f"--csv-separator {separator!r}: a single character is expected")
    data = ImageTextData(str(path), "csv", [], [], [])
    row_of: dict[str, int] = {}
    csv.field_size_limit(MAX_CAPTION_BYTES)
    for number, row in _csv_rows(path, img_key, caption_key, separator):
        key, caption = (row.get(img_key) or "").strip(), (row.get(caption_key) or "").strip()
        if not key or not caption:
            what = "no caption" if key else "no image path"
            data.skipped.append(BadSample(key or f"line {number}", str(path), f"{what}, line {number}"))
            continue
        if key in row_of:
            data.captions[row_of[key]].append(caption)
            continue
        row_of[key] = len(data.keys)
        data.keys.append(key)
        data.captions.append([caption])
        # open_clip reads paths from where it runs; a path beside the CSV is what a moved data set has
        place = Path(key) if Path(key).is_absolute() or Path(key).exists() else path.parent / key
        data.places.append((str(place), -1, 0))
    return _finish(data, str(path))


def _csv_rows(path: Path, img_key: str, caption_key: str, separator: str) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, delimiter=separator)
            columns = list(reader.fieldnames or [])
            for wanted, flag in ((img_key, "--csv-img-key"), (caption_key, "--csv-caption-key")):
                if wanted not in columns:
                    raise UsageError(
                        f"{path}: no column {one_line(wanted)!r} ({flag}){nearest(wanted, columns)}; "
                        f"with --csv-separator {separator!r} its columns are: "
                        f"{one_line(', '.join(columns) or 'none, the file is empty', 160)}"
                    )
            for row in reader:
                yield reader.line_num, row
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: not readable as CSV: {one_line(error)}") from None
