"""Writing: whole or not at all, and a full disk is one line that says what to free."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmclip.errors import UserError
from mmclip.io import (
    alone_in,
    free_bytes,
    lock_folder,
    remove_partials,
    require_space,
    write_atomically,
    write_text_atomically,
)
from mmclip.training.checkpoint import FORMAT, find_checkpoint, load_checkpoint, save_checkpoint
from tests.helpers.tiny import ROOT, run_script

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.path.insert(0, "")
sys.argv = sys.argv[2:]
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def limited(size: int, script: str, *flags: object) -> subprocess.CompletedProcess[str]:
    """A script that may write files of ``size`` bytes at most: what a full disk does to it."""
    command = [sys.executable, "-c", LIMITED, size, ROOT / "scripts" / script, *flags]
    return subprocess.run([str(c) for c in command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)


def test_a_failed_write_leaves_the_old_file_and_no_partial_one(tmp_path: Path) -> None:
    write_text_atomically(tmp_path / "a", "old")

    def fails(partial: Path) -> None:
        partial.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"a: cannot be written: No space left on device \(.* MB free there\): tidy up"):
        write_atomically(tmp_path / "a", fails, "tidy up")
    assert (tmp_path / "a").read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_folder_replaces_a_folder(tmp_path: Path) -> None:
    for text in ("old", "new"):

        def write(partial: Path, text: str = text) -> None:
            partial.mkdir()
            (partial / text).write_text(text)

        write_atomically(tmp_path / "model", write)
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["new"]


def test_partials_of_a_killed_process_go(tmp_path: Path) -> None:
    (tmp_path / ".model.7.partial").mkdir()
    (tmp_path / ".model.7.partial" / "x").write_text("x")
    (tmp_path / ".a.pt.7.partial").write_text("x")
    (tmp_path / "a.pt").write_text("x")
    remove_partials(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_space_is_asked_for_before_the_work(tmp_path: Path) -> None:
    free = free_bytes(tmp_path / "not" / "there" / "yet")
    require_space(tmp_path, free // 2, free // 2, "it", "do less")
    with pytest.raises(UserError, match=r"it needs .* MB, logs and .* MB are free there: free .* MB, or do less"):
        require_space(tmp_path, 2 * free, 2 * free, "it", "do less")


def state(value: float) -> dict[str, object]:
    return {"format": FORMAT, "encoder": {"w": torch.full((1000, 1000), value)}}


def test_where_the_disk_is_full_the_checkpoint_before_still_loads(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, state(1.0), keep=2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"free some space .*The newest checkpoint is step_00000001.pt"):
            save_checkpoint(tmp_path, 2, state(2.0), keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "latest").read_text() == "step_00000001.pt\n"
    assert float(load_checkpoint(tmp_path / "step_00000001.pt")["encoder"]["w"][0, 0]) == 1.0
    assert {p.name for p in tmp_path.iterdir()} == {"latest", "step_00000001.pt"}
    save_checkpoint(tmp_path, 2, state(2.0), keep=2)
    assert (tmp_path / "latest").read_text() == "step_00000002.pt\n"


def test_a_damaged_checkpoint_is_told_by_its_checksum_with_what_is_beside_it(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, state(1.0), keep=2)
    newest = tmp_path / "step_00000002.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    told = r"fails its checksum; beside it are step_00000001\.pt: give --resume the path of one"
    with pytest.raises(UserError, match=told):
        load_checkpoint(newest)


def test_latest_is_the_pointers_else_the_newest_there(tmp_path: Path) -> None:
    assert find_checkpoint("latest", tmp_path) is None
    for step in (1, 2):
        save_checkpoint(tmp_path, step, state(1.0), keep=2)
    (tmp_path / "latest").write_text("step_00000001.pt\n")
    assert find_checkpoint("latest", tmp_path) == tmp_path / "step_00000001.pt"
    (tmp_path / "latest").write_text("")
    with pytest.raises(UserError, match=r"names nothing, a missing file; there: step_00000001\.pt, step_00000002\.pt"):
        find_checkpoint("latest", tmp_path)
    (tmp_path / "latest").unlink()
    assert find_checkpoint("latest", tmp_path) == tmp_path / "step_00000002.pt"


def test_a_run_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from mmclip.io import lock_folder; lock_folder(Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    held = lock_folder(tmp_path)
    assert held is not None
    other = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "another process is writing this run" in other.stderr
    held.close()
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test_the_newest_are_kept_and_those_ahead_of_a_run_taken_back(tmp_path: Path) -> None:
    for step in (1, 2, 3, 9):
        save_checkpoint(tmp_path, step, state(1.0), keep=2)
    save_checkpoint(tmp_path, 4, state(1.0), keep=2)
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == [f"step_{s:08d}.pt" for s in (3, 4, 9)]
    assert (tmp_path / "latest").read_text() == "step_00000004.pt\n"


def test_no_checkpoint_is_made_of_weights_that_are_not_finite(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, state(1.0), keep=2)
    with pytest.raises(UserError, match="1 weights are not finite, such as w"):
        save_checkpoint(tmp_path, 2, state(torch.inf), keep=2)
    assert (tmp_path / "latest").read_text() == "step_00000001.pt\n"


def test_a_disk_that_fills_while_a_run_trains_loses_no_checkpoint(
    tiny_data: Path, tiny_model: Path, tmp_path: Path
) -> None:
    flags = ["--train-data", tiny_data, "--model", tiny_model, "--batch-size", 32, "--workers", 0, "--epochs", 2,
             "--save-steps", 2, "--logs", tmp_path, "--device", "cpu"]  # fmt: skip
    refused = limited(1_000_000, "train_clip.py", *flags, "--name", "early")
    assert refused.returncode == 2 and "needs a file of" in refused.stderr and "ulimit -f" in refused.stderr
    assert "Traceback" not in refused.stderr and not list(tmp_path.rglob("*.pt")), "found before the first step"
    done = run_script("train_clip.py", *flags, "--name", "late")
    assert done.returncode == 0, done.stderr[-2000:]
    blocked = tmp_path / "late" / "checkpoints"
    for newest in ("step_00000006.pt", "step_00000004.pt"):
        (blocked / newest).unlink()
    (blocked / "latest").write_text("step_00000002.pt\n")
    (blocked / ".step_00000004.pt.1.partial").write_text("of a killed process")
    patched = (
        "import sys, runpy, torch\n"
        "def full(*a, **k): raise RuntimeError('[enforce fail at inline_container.cc:672]')  # torch's words for it\n"
        "torch.save = full; sys.argv = sys.argv[1:]; sys.path.insert(0, '')\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", patched, ROOT / "scripts" / "train_clip.py", *flags, "--name", "late", "--resume",
               "latest"]  # fmt: skip
    failed = subprocess.run([str(c) for c in command], cwd=ROOT, capture_output=True, text=True, check=False)
    last = failed.stderr.strip().splitlines()[-1]
    assert failed.returncode == 2 and "Traceback" not in failed.stderr
    assert last.startswith("error: ") and "free some space" in last and "step_00000002.pt" in last
    assert run_script("train_clip.py", *flags, "--name", "late", "--resume", "latest").returncode == 0
    steps = [json.loads(x)["step"] for x in (tmp_path / "late" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == 6


def test_one_process_at_a_time_is_inside_and_the_other_says_that_it_waits(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from mmclip.io import alone_in\n"
        "with alone_in(Path(sys.argv[1]), 'waiting'): print(Path(sys.argv[1], 'done').exists())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with alone_in(tmp_path, "nobody is inside"):
        other = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert other.stderr is not None and other.stderr.readline() == "waiting\n"
        (tmp_path / "done").touch()
    assert other.communicate(timeout=60) == ("True\n", "") and other.returncode == 0
