"""open_clip's CSV: an image path and a caption a row; rows of one path are one image with several captions."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path

from mmclip.data.image_text import BadSample, ImageTextData, file_size
from mmclip.errors import UserError, nearest, printable, reason

MAX_CAPTION_CHARACTERS = 1_000_000
# Read as one more row; a quote that is never closed swallows it. No file has this text by chance.
_END = "\x02end\x03"


def index_csv(path: Path, img_key: str, caption_key: str, separator: str) -> ImageTextData:
    """Images of a CSV in the order of their first rows.

    A path is relative to the current folder, as in open_clip, else to the CSV. Rows without path or caption, with more
    fields than the header, with undecodable text or without an image are in ``skipped``.

    Raises:
        UserError: The file cannot be read, a column is missing, a quote is never closed.
    """
    data = ImageTextData(str(path), "csv", [], [], [])
    row_of: dict[str, int] = {}
    places: dict[str, tuple[Path, str | None]] = {}
    for line, key, caption, fault in _rows(path, img_key, caption_key, separator):
        if fault is None:
            if key not in places:
                places[key] = _place(path, key)
            place, fault = places[key]
        if fault is not None:
            data.skipped.append(BadSample(key or f"line {line}", str(path), f"{fault}, line {line}"))
            continue
        if key not in row_of:
            row_of[key] = len(data.keys)
            data.keys.append(key)
            data.captions.append([])
            data.places.append((str(place), -1, 0))
        data.captions[row_of[key]].append(caption)
    return data


def _place(path: Path, key: str) -> tuple[Path, str | None]:
    """The path of an image, and the reason where it cannot be used."""
    fault = "no such image"
    for place in (Path(key), path.parent / key):
        try:
            file_size(place)
            return place, None
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            fault = reason(error)
    return Path(key), fault


def _rows(path: Path, img_key: str, caption_key: str, separator: str) -> Iterator[tuple[int, str, str, str | None]]:
    """(line, path, caption, fault or None) of each row."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    separator = "\t" if separator == "\\t" else separator  # as it is typed in a shell
    if len(separator) != 1 or separator in '"\r\n' + _END:
        raise UserError(f"--csv-separator {separator!r}: a single character is expected, no quote and no line break")
    limit = csv.field_size_limit(2**31 - 1)  # the csv module's own: a long caption is a fault of its row only
    try:
        # Undecodable bytes become surrogates, which name their row; the mark of some editors' UTF-8 is dropped.
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(itertools.chain(file, ["\n", _END]), delimiter=separator)
            columns = next(reader)
            wanted = [
                _column(path, columns, img_key, "--csv-img-key", separator),
                _column(path, columns, caption_key, "--csv-caption-key", separator),
            ]
            before = reader.line_num
            for row in reader:
                if row == [_END] and next(reader, None) is None:
                    return
                if any(_END in cell for cell in row):  # swallowed
                    raise UserError(f"{path}, line {before + 1} or later: a quote that is never closed")
                if row:
                    key, caption = (row[i].strip() if i < len(row) else "" for i in wanted)
                    too_many = "more fields than the header" if len(row) > len(columns) else None
                    yield reader.line_num, key, caption, too_many or _fault(key, caption)
                before = reader.line_num
    except (csv.Error, OSError, ValueError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not readable as CSV: {reason(error)}") from None
    finally:
        csv.field_size_limit(limit)


def _fault(key: str, caption: str) -> str | None:
    if not key or not caption:
        return "no caption" if key else "no image path"
    if any("\ud800" <= c <= "\udfff" for c in key + caption):
        return "an undecodable caption or path: not UTF-8"
    if len(caption) > MAX_CAPTION_CHARACTERS:
        return f"a caption of {len(caption):,} characters (at most {MAX_CAPTION_CHARACTERS:,})"
    return None


def _column(path: Path, columns: list[str], name: str, flag: str, separator: str) -> int:
    """Place of a column in the header (UserError where it is missing or repeated)."""
    if (count := columns.count(name)) == 1:
        return columns.index(name)
    if count:
        raise UserError(f"{path}: {count} columns are called {printable(name, 60)!r} ({flag})")
    shown = [printable(c, 60) for c in columns]
    other = next((s for s in ",;\t|" if s != separator and name in "".join(columns[:1]).split(s)), None)
    hint = f"; did you mean --csv-separator {other!r}?" if other else nearest(name, shown)
    raise UserError(
        f"{path}: no column {printable(name)!r} ({flag}){hint}; with --csv-separator {separator!r} its columns are: "
        f"{printable(', '.join(shown) or 'none, the file is empty', 160)}"
    )
