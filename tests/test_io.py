"""Files: whole or not at all, locked, a full disk named in a line; array files that cannot run code, hang or grow."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mmclip.commands import train
from mmclip.config import TrainConfig
from mmclip.config.clip import EMBEDDING_SUFFIXES
from mmclip.errors import UserError
from mmclip.io import (
    SUFFIXES,
    free_bytes,
    json_array,
    lock_folder,
    read_arrays,
    read_json_array,
    remove_partials,
    require_space,
    write_arrays,
    write_atomically,
    write_text_atomically,
)
from mmclip.training.checkpoint import FORMAT, find_checkpoint, load_checkpoint, save_checkpoint
from tests.helpers.tiny import ROOT

ARRAYS = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array([1, -2]), "ids": json_array(["a", "\udce9"])}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_failed_write_leaves_the_old_file_and_no_partial_one(tmp_path: Path) -> None:
    write_text_atomically(tmp_path / "a", "old")

    def fails(partial: Path) -> None:
        partial.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"a: cannot be written: No space left on device \(.* MB free there\): tidy up"):
        write_atomically(tmp_path / "a", fails, "tidy up")
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


def test_a_folder_replaces_a_folder_and_partials_of_a_killed_process_go(tmp_path: Path) -> None:
    for text in ("old", "new"):

        def write(partial: Path, text: str = text) -> None:
            partial.mkdir()
            (partial / text).write_text(text)

        write_atomically(tmp_path / "model", write)
    assert names(tmp_path / "model") == ["new"]
    (tmp_path / ".model.7.partial").mkdir()
    (tmp_path / ".model.7.partial" / "x").write_text("x")
    (tmp_path / ".a.pt.7.partial").write_text("x")
    remove_partials(tmp_path)
    assert names(tmp_path) == ["model"]


def test_space_is_required_before_the_work(tmp_path: Path) -> None:
    free = free_bytes(tmp_path / "not" / "there" / "yet")
    require_space(tmp_path, free // 2, free // 2, "it", "do less")
    with pytest.raises(UserError, match=r"it needs .* MB, logs and .* MB are free there: free .* MB, or do less"):
        require_space(tmp_path, 2 * free, 2 * free, "it", "do less")


def test_one_process_at_a_time_holds_a_folder_and_another_is_refused_or_waits(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from mmclip.io import lock_folder; p = Path(sys.argv[1])\n"
    pipes: dict[str, Any] = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with lock_folder(tmp_path):
        refused = subprocess.run([sys.executable, "-c", code + "lock_folder(p)", tmp_path], check=False, **pipes)
        assert "another process is writing this run" in refused.stderr
        command = [sys.executable, "-c", code + "lock_folder(p, 'waiting'); print((p / 'done').exists())", tmp_path]
        other = subprocess.Popen(command, **pipes)
        assert other.stderr is not None and other.stderr.readline() == "waiting\n"
        (tmp_path / "done").touch()
    assert other.communicate(timeout=60) == ("True\n", "") and other.returncode == 0


# --- checkpoints ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def files_of_a_megabyte() -> Iterator[None]:
    """At most: what a full disk does to a process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save(folder: Path, *steps: int, value: float = 1.0) -> None:
    for step in steps:
        content = {"format": FORMAT, "step": step, "encoder": {"w": torch.full((1000, 1000), value)}}
        save_checkpoint(folder, step, content, keep=2)


def test_where_a_checkpoint_cannot_be_written_the_one_before_still_loads(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(UserError, match="1 weights are not finite, such as w"):
        save(tmp_path, 2, value=torch.inf)
    with (
        files_of_a_megabyte(),
        pytest.raises(UserError, match=r"free some .*The newest checkpoint is step_00000001.pt"),
    ):
        save(tmp_path, 2, value=2.0)
    assert names(tmp_path) == ["latest", "step_00000001.pt"]
    assert (tmp_path / "latest").read_text() == "step_00000001.pt\n"
    assert float(load_checkpoint(tmp_path / "step_00000001.pt")["encoder"]["w"][0, 0]) == 1.0
    save(tmp_path, 2)
    assert (tmp_path / "latest").read_text() == "step_00000002.pt\n"


def test_damaged_and_foreign_checkpoints_are_refused_with_what_is_beside_them(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    newest = tmp_path / "step_00000002.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    message = r"fails its checksum; beside it are step_00000001\.pt: give --resume the path of one"
    with pytest.raises(UserError, match=message):
        load_checkpoint(newest)
    torch.save({"state_dict": {}}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="not an mmclip training checkpoint"):
        load_checkpoint(tmp_path / "x.pt")


def test_latest_is_the_pointers_else_the_newest_there_and_a_path_is_itself(tmp_path: Path) -> None:
    assert find_checkpoint("latest", tmp_path) is None, "a run that was stopped before its first one"
    save(tmp_path, 1, 2)
    first, newest = (tmp_path / f"step_0000000{step}.pt" for step in (1, 2))
    assert find_checkpoint(str(first), Path("elsewhere")) == first
    with pytest.raises(UserError, match=r"--resume nowhere\.pt"):
        find_checkpoint("nowhere.pt", tmp_path)
    (tmp_path / "latest").write_text("step_00000001.pt\n")
    assert find_checkpoint("latest", tmp_path) == first
    for pointer, named in (("", "nothing"), ("step_00000009.pt", "step_00000009.pt")):
        (tmp_path / "latest").write_text(pointer)
        with pytest.raises(
            UserError, match=f"{named}, a missing file; its folder has step_00000001.pt, step_00000002.pt"
        ):
            find_checkpoint("latest", tmp_path)
    (tmp_path / "latest").unlink()
    assert find_checkpoint("latest", tmp_path) == newest and load_checkpoint(newest)["step"] == 2


def test_the_newest_are_kept_and_those_ahead_of_a_run_taken_back(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 9, 4)
    assert names(tmp_path) == ["latest", *(f"step_{s:08d}.pt" for s in (3, 4, 9))]
    assert (tmp_path / "latest").read_text() == "step_00000004.pt\n"


def test_a_disk_that_fills_while_a_run_trains_loses_no_checkpoint(
    tiny_data: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, resume: str | None = None) -> None:
        train.run(TrainConfig(train_data=str(tiny_data), model=str(tiny_model), batch_size=32, workers=0, epochs=2,
                              save_steps=2, logs=str(tmp_path), device="cpu", report=False, name=name,
                              resume=resume))  # fmt: skip

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672]")  # torch's words for a full disk

    with files_of_a_megabyte(), pytest.raises(UserError, match=r"needs a file of .*ulimit -f"):
        run("early")
    assert not list(tmp_path.rglob("*.pt")), "before the first step"
    run("late")
    blocked = tmp_path / "late" / "checkpoints"
    for newest in ("step_00000006.pt", "step_00000004.pt"):
        (blocked / newest).unlink()
    (blocked / "latest").write_text("step_00000002.pt\n")
    (blocked / ".step_00000004.pt.1.partial").write_text("of a killed process")
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"free some space .*step_00000002\.pt"):
        patch.setattr(torch, "save", full)
        run("late", "latest")
    run("late", "latest")
    steps = [json.loads(x)["step"] for x in (tmp_path / "late" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == 6


# --- array files ------------------------------------------------------------------------------------------------------


def header(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"shape": shape, "fortran_order": False, "descr": dtype})
    return out.getvalue()


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        read_arrays(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


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


def test_other_peoples_arrays_are_read_and_bfloat16_as_float32(tmp_path: Path) -> None:
    save_file({"x": torch.tensor([1.5, 2.0], dtype=torch.bfloat16)}, tmp_path / "x.safetensors")
    assert read_arrays(tmp_path / "x.safetensors")["x"].tolist() == [1.5, 2.0]
    x = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    np.savez_compressed(tmp_path / "x.npz", x=x, names=np.array(["é", "bb"]))
    found = read_arrays(tmp_path / "x.npz")
    assert (found["x"] == x).all() and found["names"].tolist() == ["é", "bb"]


def test_objects_pipes_folders_and_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", ids=np.array(["a", None], dtype=object))
    assert "ids: Object arrays cannot be loaded" in refusal(tmp_path / "x.npz")
    os.mkfifo(tmp_path / "pipe.npz")
    (tmp_path / "folder.npz").mkdir()
    for name, message in (("pipe.npz", "not a plain"), ("folder.npz", "not a plain"), ("nothing.npz", "no such file")):
        assert message in refusal(tmp_path / name)
    assert EMBEDDING_SUFFIXES == SUFFIXES
    for name in ("x", "x.pt", "x.npz.gz"):
        assert "a file ending in .safetensors or .npz is expected" in refusal(tmp_path / name)


@pytest.mark.parametrize("content", [header((10**14,)), header((2,)) + b"\0" * 4, b"", b"x" * 99, None])
def test_a_header_is_not_believed_and_a_bomb_not_unpacked(tmp_path: Path, content: bytes | None) -> None:
    archive = zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED)
    with archive, archive.open("image.npy", "w") as member:
        member.write(header((75_000_000,)) if content is None else content)
        for _ in range(300 if content is None else 0):
            member.write(bytes(10**6))
    message = "no embeddings do" if content is None else "not readable as .npz"
    assert message in refusal(tmp_path / "x.npz")


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10_000), value=st.integers(1, 255))
def test_junk_is_one_line_and_a_changed_byte_is_read_or_refused(
    tmp_path: Path, suffix: str, at: int, value: int
) -> None:
    path = tmp_path / f"x{suffix}"
    for junk in (b"", b"PK\3\4", b"\xff" * 8, b"\xff\xff\xff\xff\0\0\0\0{", bytes(1000), b"[" * 10_000):
        path.write_bytes(junk)
        assert "not readable as" in refusal(path)
    write_arrays(path, ARRAYS)
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= value
    path.write_bytes(content)
    try:
        read_arrays(path)
    except UserError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("text", [b"[1e999]", b"[NaN]", b"[" * 100_000, b"\xff", b"[1"])
def test_json_that_is_none_names_the_array(text: bytes) -> None:
    with pytest.raises(UserError, match=r"^meta: uint8 is read as the bytes of a JSON text"):
        read_json_array(np.frombuffer(text, dtype=np.uint8), "meta")
