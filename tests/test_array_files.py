"""Array files of both kinds: what was written comes back, and no file can run code, hang or ask for the moon."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mmclip.config.clip import EMBEDDING_SUFFIXES as OF_THE_FLAG
from mmclip.errors import UserError
from mmclip.io import SUFFIXES, check_suffix, json_array, read_arrays, read_json_array, write_arrays

ARRAYS = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array([1, -2]), "ids": json_array(["a", "\udce9"])}


def npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def header(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"shape": shape, "fortran_order": False, "descr": dtype})
    return out.getvalue()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_was_written_comes_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    write_arrays(path, ARRAYS)
    found = read_arrays(path)
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype and (found[name] == array).all()
    assert read_json_array(found["ids"], "ids") == ["a", "\udce9"]
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_the_flag_and_the_reader_know_the_same_kinds() -> None:
    assert OF_THE_FLAG == SUFFIXES
    for name in ("x", "x.pt", "x.npz.gz"):
        with pytest.raises(UserError, match=r"\.safetensors or \.npz"):
            check_suffix(name)


def test_bfloat16_is_read_as_float32(tmp_path: Path) -> None:
    save_file({"x": torch.tensor([1.5, 2.0], dtype=torch.bfloat16)}, tmp_path / "x.safetensors")
    assert read_arrays(tmp_path / "x.safetensors")["x"].tolist() == [1.5, 2.0]


def test_compressed_and_fortran_ordered_arrays_are_read(tmp_path: Path) -> None:
    x = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    np.savez_compressed(tmp_path / "x.npz", x=x, names=np.array(["é", "bb"]))
    found = read_arrays(tmp_path / "x.npz")
    assert (found["x"] == x).all() and found["names"].tolist() == ["é", "bb"]


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", ids=np.array(["a", None], dtype=object))
    with pytest.raises(UserError, match="ids holds Python objects; numbers or strings"):
        read_arrays(tmp_path / "x.npz")


@pytest.mark.parametrize("content", [header((10**14,)), header((2,)) + b"\0" * 4, b"", b"x" * 99])
def test_a_header_is_not_believed(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match=r"not readable as \.npz") as error:
        read_arrays(npz(tmp_path / "x.npz", image=content))
    assert "\n" not in str(error.value)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    size = 300_000_000
    archive = zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED)
    with archive, archive.open("image.npy", "w") as member:
        member.write(header((size // 4,)))
        for _ in range(size // 10**6):
            member.write(bytes(10**6))
    with pytest.raises(UserError, match="no embeddings shrink so far"):
        read_arrays(tmp_path / "x.npz")


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "junk", [b"", b"PK\3\4", b"\xff" * 8, b"\xff\xff\xff\xff\0\0\0\0{", bytes(1000), b"[" * 10_000]
)
def test_junk_is_one_line(tmp_path: Path, suffix: str, junk: bytes) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(junk)
    with pytest.raises(UserError, match="not readable as") as error:
        read_arrays(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10_000), value=st.integers(1, 255))
def test_a_changed_byte_is_read_or_told(tmp_path: Path, suffix: str, at: int, value: int) -> None:
    path = tmp_path / f"x{suffix}"
    write_arrays(path, ARRAYS)
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= value
    path.write_bytes(content)
    try:
        read_arrays(path)
    except UserError as error:
        assert "\n" not in str(error)


def test_a_pipe_and_a_folder_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    (tmp_path / "folder.npz").mkdir()
    for name in ("pipe.npz", "folder.npz"):
        with pytest.raises(UserError, match="not a plain file"):
            read_arrays(tmp_path / name)
    with pytest.raises(UserError, match="no such file"):
        read_arrays(tmp_path / "nothing.npz")


@pytest.mark.parametrize("text", [b"[1e999]", b"[NaN]", b"[" * 100_000, b"\xff", b"[1"])
def test_json_that_is_none_names_the_array(text: bytes) -> None:
    with pytest.raises(UserError, match=r"^meta: uint8 is read as the bytes of a JSON text"):
        read_json_array(np.frombuffer(text, dtype=np.uint8), "meta")
