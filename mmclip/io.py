"""Writing so that a crash, a full disk or a second reader finds the old file or the new one, and nothing between."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from safetensors import SafetensorError

from mmclip.errors import UserError, reason

MARGIN = 16_000_000  # bytes left for logs and results beside what is asked for


def write_atomically(path: Path, write: Callable[[Path], object], advice: str = "free some space") -> None:
    """Have ``write`` make a partial file or folder beside ``path``, and put it in place once it is safely on the disk.

    Errors: UserError where it cannot be written, a full disk above all; what stood at ``path`` stays.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        for written in [*partial.iterdir(), partial] if partial.is_dir() else [partial]:
            _flush(written)
        if path.is_dir():  # no folder can be put over another in one step
            shutil.rmtree(path)
        os.replace(partial, path)
        _flush(path.parent)  # the new name, too, must outlive a power cut
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have kinds of their own
        _remove(partial)
        free = megabytes(free_bytes(path.parent))
        raise UserError(f"{path}: cannot be written: {reason(error, 120)} ({free} free there): {advice}") from None


def write_text_atomically(path: Path, text: str) -> None:
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def remove_partials(folder: Path) -> None:
    """Drop what a killed process left half-written in a folder that is this process's alone."""
    for partial in folder.glob(".*.partial"):
        _remove(partial)


def lock_folder(folder: Path) -> TextIO | None:
    """Keep other processes from writing the same run; the lock ends with the file that is returned, or the process.

    None where the file system knows no locks. Errors: UserError where another process holds it.
    """
    file = open(folder / ".lock", "w", encoding="utf-8")  # noqa: SIM115
    try:
        # a lock of the process: flock's would live on in reading processes that outlive a killed run by seconds
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise UserError(f"{folder}: another process is writing this run: wait for it, or end it first") from None
    except OSError:
        file.close()
        return None
    return file


def require_run_folder(folder: Path, resume: str | None) -> None:
    """Errors: UserError where the folder holds a run already and this is not its continuation, or holds none and this
    is one."""
    there = folder.exists() and (not folder.is_dir() or any(not p.name.startswith(".") for p in folder.iterdir()))
    if resume is None and there:
        raise UserError(f"{folder} exists: choose another --name, or continue it with --resume latest")
    if resume == "latest" and not (folder / "config.yaml").is_file():
        raise UserError(f"--resume latest: {folder} holds no run; check --logs and --name")


@contextlib.contextmanager
def alone_in(folder: Path, waiting: str) -> Iterator[None]:
    """One process at a time is inside for a folder; where another one is, ``waiting`` is said and it is waited for.

    Where the file system knows no locks nobody waits.
    """
    with open(folder / ".lock", "w", encoding="utf-8") as file:
        with contextlib.suppress(OSError):
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                print(waiting, file=sys.stderr, flush=True)
                fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def free_bytes(folder: Path) -> int:
    """Bytes that can still be written in ``folder``, or in the nearest folder above it that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_space(folder: Path, needed: int, largest: int, what: str, advice: str) -> None:
    """Refuse before the work what the disk, or the process's limit on a file's size, has no place for.

    needed: bytes of all files, largest: of one. Errors: UserError with both sizes.
    """
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit not in (resource.RLIM_INFINITY, -1) and largest > limit:
        raise UserError(
            f"{folder}: {what} needs a file of {megabytes(largest)}, and this process may write files of "
            f"{megabytes(limit)} at most (ulimit -f): raise that limit, or {advice}"
        )
    free = free_bytes(folder)
    if needed + MARGIN > free:
        raise UserError(
            f"{folder}: {what} needs {megabytes(needed)}, logs and results {megabytes(MARGIN)} more, and "
            f"{megabytes(free)} are free there: free {megabytes(needed + MARGIN - free)}, or {advice}"
        )


def megabytes(size: int) -> str:
    """
    >>> megabytes(12_345_678)
    '12.3 MB'
    """
    return f"{size / 1e6:,.1f} MB"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
