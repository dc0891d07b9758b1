"""Bad flags and bad data through the real script: fatal faults are one line and exit code 2, others are skipped."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.helpers.tiny import MODEL, add, jpeg, logged, run_script


@pytest.fixture(scope="module")
def common(tiny_data: Path, tiny_model: Path) -> list[object]:
    return ["--train-data", tiny_data, "--model", tiny_model, "--batch-size", 32, "--workers", 0, "--epochs", 1,
            "--val-data", "none", "--device", "cpu", "--name", "x"]  # fmt: skip


@pytest.fixture(scope="module")
def finished(common: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    logs = tmp_path_factory.mktemp("finished")
    assert run_script("train_clip.py", *common, "--logs", logs).returncode == 0
    return logs


def refused(*flags: object) -> str:
    """The last line of a run that must be refused soon."""
    done = run_script("train_clip.py", *flags, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-2000:]
    *before, last = done.stderr.strip().splitlines()
    assert last.startswith("error: ") and not [x for x in before if x.startswith("error")], done.stderr
    return last


class Evil:
    """A pickle that would write a file when it is loaded."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return __import__("os").system, ("touch PWNED",)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--norm", "l2"], "--norm l2: expected one of cosine"),
        (["--device", "meta"], "--device meta: not usable here"),
        (["--compare", "no-run"], "no file no-run"),
        (["--batch-size", 97], "--batch-size 97 x 1 processes is more than the 96 images"),
        (["--batch-size", 25, "--accum-freq", 4], "--batch-size 25 x --accum-freq 4 x 1 processes is more than the 96"),
        (["--train-data", "/no/such/folder"], "no such data"),
        (["--train-split", "training"], "no split training"),
        (["--warmup", 900], "never reach its peak"),
        (["--train-num-samples", 1000], "holds only 96 images"),
        (["--model", "ViT-B-33"], "unknown to open_clip; did you mean ViT-B-32?"),
        (["--pretrained", "EVIL"], "not a checkpoint of this model"),
        (["--resume", "EVIL"], "not a checkpoint that can be read safely"),
        (["--resume", "latest"], "holds no run; check --logs and --name"),
        (["--resume", "no.pt"], "--resume no.pt: no such file"),
        (["--logs", "FILE"], "FILE"),
    ],
    ids=lambda v: " ".join(map(str, v)) if isinstance(v, list) else "",
)
def test_wrong_flags_and_files_are_one_line(
    flags: list[object], message: str, common: list[object], tmp_path: Path
) -> None:
    torch.save(Evil(), tmp_path / "evil.pt")
    (tmp_path / "FILE").write_text("a file where a folder is wanted")
    flags = [{"EVIL": tmp_path / "evil.pt", "FILE": tmp_path / "FILE"}.get(str(f), f) for f in flags]
    assert message in refused(*common, "--logs", tmp_path / "logs", *flags)
    assert not list(tmp_path.rglob("PWNED")) and not Path("PWNED").exists()


def test_a_log_folder_that_exists_and_other_settings_are_refused(common: list[object], finished: Path) -> None:
    common = [*common, "--logs", finished]
    assert "exists: choose another --name, or continue it with --resume latest" in refused(*common)
    assert "lr was 0.0005, is 0.01" in refused(*common, "--resume", "latest", "--lr", "1e-2")
    assert "accum_freq was 1, is 2" in refused(*common, "--resume", "latest", "--accum-freq", 2)


def test_checkpoints_of_another_model_and_other_data_are_refused(
    common: list[object], finished: Path, tiny_data: Path, tmp_path: Path
) -> None:
    wider = tmp_path / "wider.json"
    wider.write_text(json.dumps(MODEL | {"embed_dim": 24}))
    weights = finished / "x" / "model" / "open_clip_model.safetensors"
    common = [*common, "--logs", tmp_path]
    assert "not a checkpoint of this model" in refused(*common, "--model", wider, "--pretrained", weights)
    newest = finished / "x" / "checkpoints" / "step_00000003.pt"
    assert "model was" in refused(*common, "--model", wider, "--resume", newest)
    state = torch.load(newest, weights_only=True)
    state["settings"]["model"] = str(wider)
    torch.save(state, tmp_path / "other.pt")
    line = refused(*common, "--model", wider, "--resume", tmp_path / "other.pt")
    assert "not a checkpoint of this model: encoder" in line
    data = shutil.copytree(tiny_data, tmp_path / "data")
    shard(data / "train" / "0.tar", {"more.jpg": jpeg(), "more.txt": b"one more"}, "a")
    (data / "train" / "truth.jsonl").unlink()
    assert "the training data are not the run's" in refused(*common, "--resume", newest, "--train-data", data)


def shard(path: Path, members: dict[str, bytes], mode: Literal["w", "a"] = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            add(tar, name, content)
    return path


def good(n: int) -> dict[str, bytes]:
    return {k: v for i in range(n) for k, v in ((f"g{i}.jpg", jpeg()), (f"g{i}.txt", f"caption {i}".encode()))}


@pytest.mark.parametrize(
    ("members", "keep", "named", "message"),
    [
        (good(64), None, "{0..1}.tar", "missing shard"),
        (good(64), -30_000, "0.tar", "truncated"),
        ({f"{i}.jpg": jpeg() for i in range(64)}, None, "0.tar", "no captions: none of its 64"),
        ({}, None, "0.tar", "empty"),
        ("filepath\ttitle\n", None, "a.csv", "empty"),
        ("", None, "a.csv", "the file is empty"),
    ],
    ids=["missing shard", "truncated tar", "no captions", "empty tar", "CSV without rows", "empty CSV"],
)
def test_faults_of_whole_files_are_fatal_and_named(
    members: dict[str, bytes] | str, keep: int | None, named: str, message: str, common: list[object], tmp_path: Path
) -> None:
    if isinstance(members, str):
        (tmp_path / named).write_text(members)
    else:
        path = shard(tmp_path / "0.tar", members)
        path.write_bytes(path.read_bytes()[:keep])
    line = refused(*common, "--logs", tmp_path / "logs", "--train-data", tmp_path / named)
    assert message in line and str(tmp_path) in line


def test_a_cache_without_space_is_refused_before_the_trunk_runs(common: list[object], tmp_path: Path) -> None:
    """On a tmpfs of half a megabyte."""
    place = tmp_path / "cache"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount a small tmpfs here")
    try:
        line = refused(*common, "--logs", tmp_path, "--cache-dir", place, "--cache-features", "--lock-image")
        assert "needs" in line and "are free there" in line and "another --cache-dir" in line
    finally:
        subprocess.run(["umount", str(place)], check=True)


BAD = {
    "corrupt.jpg": jpeg()[:400],
    "corrupt.txt": b"a corrupt picture",
    "zero.jpg": b"",
    "zero.txt": b"a picture of no bytes",
    "silent.jpg": jpeg(),
    "garbled.jpg": jpeg(),
    "garbled.txt": b"\xff\xfe caption",
}


@pytest.fixture
def spoiled(tmp_path: Path) -> Path:
    path = shard(tmp_path / "0.tar", good(30) | BAD)
    return shard(path, {"g3.jpg": jpeg(), "g3.txt": b"another caption of it"}, "a")  # a duplicate key


@pytest.mark.parametrize("workers", [0, 2])
def test_faults_of_samples_are_skipped_counted_and_named(
    common: list[object], spoiled: Path, tmp_path: Path, workers: int
) -> None:
    flags = [*common, "--train-data", spoiled, "--logs", tmp_path, "--batch-size", 8, "--workers", workers]
    done = run_script("train_clip.py", *flags, "--epochs", 4)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (x for x in done.stderr.splitlines() if x.startswith("training data: "))
    assert line.startswith("training data: 5 samples cannot be used: ")
    assert all(key in line for key in ("corrupt", "zero", "silent", "garbled", "g3"))
    assert logged(tmp_path / "x")


@pytest.mark.parametrize("limit", [5, 4, 2])
def test_too_many_bad_samples_are_an_error_where_a_limit_is_set(
    common: list[object], spoiled: Path, tmp_path: Path, limit: int
) -> None:
    """Three are known when the data are opened, the fourth and fifth when their pictures are read."""
    flags = [*common, "--train-data", spoiled, "--logs", tmp_path, "--batch-size", 8, "--epochs", 4]
    flags += ["--max-bad-samples", limit]
    if limit == 5:
        assert run_script("train_clip.py", *flags).returncode == 0
    else:
        line = refused(*flags)
        assert f"--max-bad-samples {limit}: {limit + 1} samples cannot be used" in line and "silent" in line
