"""Local tar shards as an index: where each sample's picture lies, and its captions. Nothing is ever unpacked."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mmclip.errors import UsageError, one_line

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
MAX_CAPTION_BYTES = 1_000_000  # a larger text file is a fault, not a caption
_BLOCK = 512  # tar's


@dataclass
class Sample:
    """A key of a shard: its picture's offset and size there, and its captions' bytes; either may be missing."""

    key: str
    shard: str
    image: tuple[int, int] | None = None
    text: bytes | None = None
    fault: str | None = None


def index_shard(path: Path) -> list[Sample]:
    """The samples of a tar in the order of their first members.

    A member's key is its path up to the first dot of its name, as webdataset has it. Members that are no plain files
    are passed over; an absolute path or '..' is a fault of its sample. Errors: UsageError for a file that is no tar or
    that stops before its end.
    """
    samples: dict[str, Sample] = {}
    size = path.stat().st_size
    end = 0
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                end = max(end, member.offset_data + (member.size if member.isreg() else 0))
                if end > size:
                    raise UsageError(
                        f"{path}: truncated: its member {one_line(member.name, 80)} ends at byte {end:,} "
                        f"of a file of {size:,}"
                    )
                if member.isreg():
                    _add_member(samples, tar, member, str(path))
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path}: not a readable tar, or a truncated one: {one_line(error)}") from None
    # tarfile takes a file that stops between members for complete; a whole one ends in zero blocks.
    rest = -(-end // _BLOCK) * _BLOCK
    with path.open("rb") as file:
        file.seek(rest)
        tail = file.read(2 * _BLOCK)
    if len(tail) < 2 * _BLOCK or any(tail):
        raise UsageError(f"{path}: truncated or damaged: no end-of-archive blocks at byte {rest:,} of {size:,}")
    return list(samples.values())


def _add_member(samples: dict[str, Sample], tar: tarfile.TarFile, member: tarfile.TarInfo, shard: str) -> None:
    name = PurePosixPath(member.name)
    stem, _, suffix = name.name.partition(".")
    suffix = suffix.lower()
    if not suffix or suffix not in (*IMAGE_SUFFIXES, "txt"):
        return
    key = str(name.with_name(stem)) if stem else member.name
    sample = samples.setdefault(key, Sample(key, shard))
    if name.is_absolute() or ".." in name.parts:
        sample.fault = f"its member {one_line(member.name, 80)} leaves the archive's folder"
    elif suffix == "txt":
        if sample.text is not None:
            sample.fault = sample.fault or "two caption files"
        elif member.size > MAX_CAPTION_BYTES:
            sample.fault = f"a caption file of {member.size:,} bytes (at most {MAX_CAPTION_BYTES:,})"
        else:
            file = tar.extractfile(member)
            sample.text = file.read() if file else b""
    elif sample.image is not None:
        sample.fault = sample.fault or "a duplicate key: two pictures"
    else:
        sample.image = (member.offset_data, member.size)
