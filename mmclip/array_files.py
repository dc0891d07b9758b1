"""Named arrays in one file, .npz or .safetensors, read so that no file can run code or ask for more than it holds.

safetensors knows numbers only, and numpy would pad every string to the longest, so a list of strings (or any JSON) is
written in both as a uint8 array: the UTF-8 bytes of its JSON. ``json.loads(array.tobytes())`` has it back.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from mmclip.config.model_config import finite
from mmclip.errors import UserError, printable, reason
from mmclip.io import write_atomically

Array = NDArray[Any]
SUFFIXES = (".safetensors", ".npz")
# What a compressed .npz may grow to: padded strings shrink a lot, and a bomb a thousand times.
MAX_GROWTH = 50
MAX_SMALL = 256_000_000  # bytes that any file may hold


def check_suffix(path: str | Path, name: str = "") -> None:
    """Errors: UserError for a file that is named as neither kind; ``name`` is the flag that said so."""
    if Path(path).suffix not in SUFFIXES:
        raise UserError(f"{name} {printable(path)}: a file ending in {' or '.join(SUFFIXES)} is expected".lstrip())


def read_arrays(path: str | Path) -> dict[str, Array]:
    """name -> array; bfloat16 comes as float32. Errors: UserError, one line, for anything but plain arrays."""
    path = Path(path)
    check_suffix(path)
    if not path.is_file():  # a pipe would wait for ever
        raise UserError(f"{printable(path)}: {'not a plain file' if path.exists() else 'no such file'}")
    try:
        return _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)
    except UserError:
        raise
    except Exception as error:  # damaged content makes numpy, zipfile, zlib and safetensors raise nearly anything
        raise UserError(f"{printable(path)}: not readable as {path.suffix}: {reason(error)}") from None


def write_arrays(path: str | Path, arrays: Mapping[str, Array]) -> None:
    """Whole or not at all, in the kind that the name ends in. Errors: UserError."""
    path = Path(path)
    check_suffix(path)

    def write(partial: Path) -> None:
        if path.suffix == ".npz":
            with partial.open("wb") as file:  # given a name, numpy would add its own ending
                np.savez(file, **arrays)  # type: ignore[arg-type]
        else:
            partial.touch()
            mode = partial.stat().st_mode
            save_file({k: torch.from_numpy(np.require(v, requirements=["C", "W"])) for k, v in arrays.items()}, partial)
            partial.chmod(mode)  # safetensors lets nobody else read its files, whatever the umask says

    write_atomically(path, write)


def json_array(value: Any) -> Array:
    """Any JSON value as uint8. Half characters, which file names may hold, are escaped and survive.

    >>> json_array(["a"]).tobytes()
    b'["a"]'
    """
    return np.frombuffer(bytearray(json.dumps(value, allow_nan=False), "ascii"), dtype=np.uint8)


def read_json_array(array: Array, name: str) -> Any:
    """What :func:`json_array` wrote. Errors: UserError naming the array."""
    try:
        return json.loads(array.tobytes().decode("utf-8"), parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else printable(error, 100)
        raise UserError(f"{name}: uint8 is read as the bytes of a JSON text, and it is none: {why}") from None


def _read_npz(path: Path) -> dict[str, Array]:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        size, whole = path.stat().st_size, sum(m.file_size for m in members)
        if whole > max(MAX_SMALL, MAX_GROWTH * size):
            raise UserError(
                f"{printable(path)}: {size:,} bytes that would unpack to {whole:,}, above {MAX_GROWTH} times as many: "
                "no embeddings shrink so far"
            )
        return {m.filename.removesuffix(".npy"): _read_member(archive, m) for m in members}


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """The header is believed only if the bytes that follow are as many as it says: nothing is asked for before."""
    name = printable(member.filename.removesuffix(".npy"), 60)
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        if dtype.hasobject or dtype.kind not in "biufUS":
            kind = "Python objects" if dtype.hasobject else f"{printable(dtype, 60)} values"
            raise UserError(f"{name} holds {kind}; numbers or strings are read, such as np.array(ids, dtype=str)")
        if math.prod(shape) * dtype.itemsize != member.file_size - file.tell():
            raise ValueError(f"{name} has another size than its header says")
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _read_safetensors(path: Path) -> dict[str, Array]:
    found: dict[str, Array] = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (it is no mapping)
            tensor = file.get_tensor(name)
            found[name] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return found
