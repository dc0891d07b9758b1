"""Files: written whole or not at all, locked, checked for space; array files, JSON text, output folders."""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import shutil
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from mmclip.errors import UserError, parse_json, printable, reason

Array = NDArray[Any]
MARGIN = 16_000_000  # bytes left for logs and results beside the files that are written
SUFFIXES = (".safetensors", ".npz")
MAX_GROWTH = 50  # of a compressed .npz: padded strings shrink a lot, and a bomb a thousand times
MAX_SMALL = 256_000_000  # bytes that any .npz may unpack to


def write_atomically(path: Path, write: Callable[[Path], object], advice: str = "free some space") -> None:
    """Have ``write`` make a partial file or folder beside ``path``; put it in place once it is on the disk.

    Raises UserError where it cannot be written, such as on a full disk; what stood at ``path`` stays.
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


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text_atomically(path: Path, text: str) -> None:
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def remove_partials(folder: Path) -> None:
    """Drop what a killed process left half-written in a folder of this process alone."""
    for partial in folder.glob(".*.partial"):
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def lock_folder(folder: Path, waiting: str = "") -> TextIO:
    """Keep other processes out of a folder until the returned file is closed, or the process ends.

    Where another process holds the lock, print ``waiting`` and wait, or raise UserError without such a text. Nothing is
    locked where the file system has no locks.
    """
    file = open(folder / ".lock", "w", encoding="utf-8")  # noqa: SIM115
    try:
        # a lock of the process: flock's would live on in reading processes that outlive a killed run by seconds
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        if not waiting:
            file.close()
            raise UserError(f"{folder}: another process is writing this run: wait for it, or end it first") from None
        print(waiting, file=sys.stderr, flush=True)
        fcntl.lockf(file, fcntl.LOCK_EX)
    except OSError:
        pass
    return file


def free_bytes(folder: Path) -> int:
    """Bytes that can still be written in ``folder``, or in the nearest existing folder above it."""
    return shutil.disk_usage(next(f for f in (folder, *folder.absolute().parents) if f.exists())).free


def require_space(folder: Path, needed: int, largest: int, what: str, advice: str) -> None:
    """Raise UserError where there is no place for ``needed`` bytes of files, or for a file of ``largest`` bytes."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit not in (resource.RLIM_INFINITY, -1) and largest > limit:
        most = f"this process may write files of {megabytes(limit)} at most (ulimit -f): raise that limit"
        raise UserError(f"{folder}: {what} needs a file of {megabytes(largest)}, and {most}, or {advice}")
    free = free_bytes(folder)
    if needed + MARGIN > free:
        needs = f"needs {megabytes(needed)}, logs and results {megabytes(MARGIN)} more, and {megabytes(free)} are free"
        raise UserError(f"{folder}: {what} {needs} there: free {megabytes(needed + MARGIN - free)}, or {advice}")


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def require_run_folder(folder: Path, resume: str | None) -> None:
    """Raise UserError where a new run's folder holds a run already, or a continued one's holds none."""
    taken = folder.exists() and (not folder.is_dir() or any(not p.name.startswith(".") for p in folder.iterdir()))
    if resume is None and taken:
        raise UserError(f"{folder} exists: choose another --name, or continue it with --resume latest")
    if resume == "latest" and not (folder / "config.yaml").is_file():
        raise UserError(f"--resume latest: {folder} holds no run; check --logs and --name")


def output_folder(output: str | None, default: Path) -> Path:
    """Make --output, or the default, before the work. A run's own results.json is never the default's."""
    where = Path(output) if output else default
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {printable(where)}: cannot be made a folder: {error.strerror}") from None
    return where


def default_output(run: Path | None, model: str, data: str, split: str) -> Path:
    """Inside the evaluated run or, for any other model, in logs."""
    parent = run / "evaluations" if run else Path("logs") / "evaluations" / flat(model)
    return parent / flat(f"{Path(data).resolve().name}-{split}")


def flat(name: str) -> str:
    """A name as one folder's.

    >>> flat("sentence-transformers/all-MiniLM-L6-v2")
    'sentence-transformers-all-MiniLM-L6-v2'
    """
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")


def json_text(content: Any, indent: int | None = None) -> str:
    """A document as it is written. Raises ValueError for NaN and infinity."""
    text = json.dumps(content, indent=indent, allow_nan=False, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode() + "\n"  # a name that is not UTF-8: JSON escapes it alike


def json_array(value: Any) -> Array:
    """The bytes of a value's JSON as uint8, which both kinds of array files can hold."""
    return np.frombuffer(bytearray(json.dumps(value, allow_nan=False), "ascii"), dtype=np.uint8)


def read_json_array(array: Array, name: str) -> Any:
    """Decode ``json_array``. Raises UserError naming the array."""
    try:
        return parse_json(array.tobytes())
    except ValueError as error:
        why = printable(error, 100)
        raise UserError(f"{name}: uint8 is read as the bytes of a JSON text, and it is none: {why}") from None


def checked(path: str | Path) -> Path:
    """The path of an array file. Raises UserError for one that is neither .npz nor .safetensors."""
    if Path(path).suffix not in SUFFIXES:
        raise UserError(f"{printable(path)}: a file ending in {' or '.join(SUFFIXES)} is expected")
    return Path(path)


def read_arrays(path: str | Path) -> dict[str, Array]:
    """Read name -> array of a .npz or .safetensors file; bfloat16 becomes float32, and nothing is unpickled.

    Raises UserError for anything but plain arrays of numbers or strings.
    """
    path = checked(path)
    if not path.is_file():  # a pipe would wait for ever
        raise UserError(f"{printable(path)}: {'not a plain file' if path.exists() else 'no such file'}")
    try:
        if path.suffix == ".npz":
            return _read_npz(path)
        from safetensors.torch import load_file  # torch takes seconds to import

        tensors = load_file(path)
        return {k: (t.float() if str(t.dtype) == "torch.bfloat16" else t).numpy() for k, t in tensors.items()}
    except Exception as error:  # damaged content makes numpy, zipfile, zlib and safetensors raise nearly anything
        raise UserError(f"{printable(path)}: not readable as {path.suffix}: {reason(error)}") from None


def write_arrays(path: str | Path, arrays: Mapping[str, Array]) -> None:
    """Write the kind of file that the name ends in, whole or not at all. Raises UserError."""
    path = checked(path)

    def write(partial: Path) -> None:
        with partial.open("wb") as file:  # to a name numpy would add its own ending
            if path.suffix == ".npz":
                np.savez(file, **arrays)  # type: ignore[arg-type]
                return
        mode = partial.stat().st_mode
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, partial)
        partial.chmod(mode)  # safetensors lets no other user read its files, whatever the umask says

    write_atomically(path, write)


def _read_npz(path: Path) -> dict[str, Array]:
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > max(MAX_SMALL, MAX_GROWTH * path.stat().st_size):
        raise ValueError(f"it would unpack to {unpacked:,} bytes, above {MAX_GROWTH} times as many: no embeddings do")
    arrays: dict[str, Array] = {}
    with np.load(path, allow_pickle=False) as file:
        for name in file.files:
            try:
                arrays[name] = file[name]
            except ValueError as error:  # Python objects, above all
                raise ValueError(f"{printable(name, 60)}: {error}") from None
            if not isinstance(arrays[name], np.ndarray) or arrays[name].dtype.kind not in "biufUS":
                raise ValueError(f"{printable(name, 60)} is no array of numbers or strings")
    return arrays
