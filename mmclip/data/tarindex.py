"""Local tar shards as an index: where each sample's picture lies, and its captions. Nothing is ever unpacked."""

from __future__ import annotations

import re
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mmclip.errors import UserError, printable, reason

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
MAX_CAPTION_BYTES = 1_000_000  # a larger text file is a fault, not a caption
MAX_HEADER_BYTES = 65_536  # of an extended header or a long name: a path has 4096 at most
_HEADERS = b"xgXLK"  # types of members that describe the next one
_BLOCK = 512  # tar's
_PADDING = 1 << 20  # looked through behind a tar's end: writers pad to 10 KB, seldom to more


@dataclass
class Sample:
    """A key of a shard: its picture's offset and size there, and its captions' (or label's) bytes; either may be
    missing."""

    key: str
    shard: str
    image: tuple[int, int] | None = None
    text: bytes | None = None
    fault: str | None = None


class _Member(tarfile.TarInfo):
    """A member whose extended header is looked at before tarfile reads it: it would take one of any size into memory,
    and up to Python 3.11.9 time by the square of a run of digits."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _HEADERS:
            if self.size > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {self.size:,} bytes (at most {MAX_HEADER_BYTES:,})")
            at = tar.fileobj.tell()
            digits = re.search(rb"\d{300}", tar.fileobj.read(max(self.size, 0)))
            tar.fileobj.seek(at)
            if digits:
                raise ValueError("a header with a number of more than 300 digits")
        return super()._proc_member(tar)  # type: ignore[misc]


def index_shard(path: Path, text: str = "txt") -> list[Sample]:
    """The samples of a tar in the order of their first members. ``text``: how names of captions, or labels, end.

    A member's key is its path up to the first dot of its name, as webdataset has it. A link, a device, a sparse file,
    an absolute path or '..' is a fault of its sample. Of a key's second picture or caption file the
    first is kept, and one more Sample without either names the other. Errors: UserError for a file that is no tar,
    that stops before its end, or that goes on behind it.
    """
    samples: dict[str, Sample] = {}
    repeated: dict[str, Sample] = {}
    size = path.stat().st_size
    end, at = 0, -1
    try:
        with tarfile.open(path, "r:", tarinfo=_Member) as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # ours are in ``samples``; a shard may have a million
                if member.size < 0 or member.offset <= at:
                    # tarfile would step back by a negative size, and read the same members for ever
                    raise UserError(f"{path}: damaged: its member {printable(member.name, 80)} has a negative size")
                at = member.offset
                # of a sparse file only the parts that are no holes are there
                stored = (
                    tar.offset if member.issparse() else member.offset_data + (member.size if member.isreg() else 0)
                )
                end = max(end, stored)
                if end > size:
                    raise UserError(
                        f"{path}: truncated: its member {printable(member.name, 80)} ends at byte {end:,} "
                        f"of a file of {size:,}"
                    )
                if not member.isdir():
                    _add_member(samples, repeated, tar, member, str(path), text)
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not a readable tar, or a truncated one: {reason(error)}{_packed(path)}") from None
    # tarfile takes a file that stops between members for complete; a whole one ends in zero blocks.
    rest = -(-end // _BLOCK) * _BLOCK
    with path.open("rb") as file:
        file.seek(rest)
        tail = file.read(2 * _BLOCK)
        behind = file.read(_PADDING)
    if len(tail) < 2 * _BLOCK or any(tail):
        raise UserError(f"{path}: truncated or damaged: no end-of-archive blocks at byte {rest:,} of {size:,}")
    if any(behind):
        raise UserError(
            f"{path}: goes on behind its end-of-archive blocks at byte {rest:,} of {size:,}: tars joined by cat? "
            "Their later members would be lost; list them as shards of their own"
        )
    return [*samples.values(), *repeated.values()]


def _packed(path: Path) -> str:
    """A hint for a compressed tar, else ''."""
    try:
        with path.open("rb") as file:
            start = file.read(6)
    except OSError:
        return ""
    kinds = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
    kind = next((name for magic, name in kinds.items() if start.startswith(magic)), None)
    return f"; it is compressed ({kind}): unpack it, pictures are read by their place in the tar" if kind else ""


def _add_member(
    samples: dict[str, Sample],
    repeated: dict[str, Sample],
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    shard: str,
    text: str,
) -> None:
    name = PurePosixPath(member.name)
    stem, _, suffix = name.name.partition(".")
    suffix = suffix.lower()
    if not suffix or suffix not in (*IMAGE_SUFFIXES, text):
        return
    key = str(name.with_name(stem)) if stem else member.name
    sample = samples.setdefault(key, Sample(key, shard))
    told = "caption file" if text == "txt" else "label"
    if (suffix == text and sample.text is not None) or (suffix != text and sample.image is not None):
        what = told if suffix == text else "picture"
        fault = f"a duplicate key, two {what}s: the first one is kept"
        repeated.setdefault(key, Sample(key, shard, fault=fault))
    elif not member.name.isascii() and any("\ud800" <= c <= "\udfff" for c in member.name):
        sample.fault = "a name that is not UTF-8"
    elif name.is_absolute() or ".." in name.parts:
        sample.fault = f"its member {printable(member.name, 80)} leaves the archive's folder"
    elif not member.isreg() or member.issparse():
        sample.fault = f"its member {printable(member.name, 80)} is a link, a device or a sparse file, not a plain one"
    elif suffix == text:
        if member.size > MAX_CAPTION_BYTES:
            sample.fault = f"a {told} of {member.size:,} bytes (at most {MAX_CAPTION_BYTES:,})"
        else:
            file = tar.extractfile(member)
            sample.text = file.read() if file else b""
    else:
        sample.image = (member.offset_data, member.size)
