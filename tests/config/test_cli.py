"""The console command: its commands, their entry points, and the one error boundary."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from mmclip.cli import COMMANDS, dispatch
from mmclip.errors import UserError, nearest, printable


def mmclip(*argv: str, root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mmclip", *argv], cwd=root, capture_output=True, text=True, check=False
    )


def test_commands_are_listed_and_a_wrong_one_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown and command.summary in shown for name, command in COMMANDS.items())
    assert dispatch([]) == 2
    with pytest.raises(UserError, match=r"unknown command 'trian'; did you mean train\?"):
        dispatch(["trian"])
    with pytest.raises(UserError, match="one of train, evaluate"):
        dispatch(["xxxxxxxx"])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_entry_point(name: str) -> None:
    module = importlib.import_module(f"mmclip.commands.{COMMANDS[name].module}")
    assert callable(module.run if COMMANDS[name].config else module.main)


def test_a_command_and_its_script_are_the_same(root: Path) -> None:
    by_command = mmclip("train", "--lr", "-1", root=root)
    script = [sys.executable, "scripts/train_clip.py", "--lr", "-1"]
    by_script = subprocess.run(script, cwd=root, capture_output=True, text=True, check=False)
    assert by_command.returncode == by_script.returncode == 2
    assert by_command.stderr == by_script.stderr == "error: --lr -1.0: expected a number above 0\n"


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        ("UserError('a\\nb\\x1b[31m')", 2, r"error: a\nb\x1b[31m"),
        ("OSError(28, 'No space left on device', 'a\\nb')", 2, r"error: a\nb: No space left on device"),
        ("MemoryError()", 2, "error: out of memory"),
        ("RuntimeError('DefaultCPUAllocator: can\\'t allocate memory: 9 bytes')", 2, "error: out of memory"),
        ("RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')", 2, "error: out of memory: CUDA"),
        ("RuntimeError('a bug')", 1, "Traceback"),
        ("KeyboardInterrupt", 130, "interrupted"),
    ],
)
def test_an_error_is_one_line_and_a_bug_keeps_its_traceback(root: Path, error: str, exit_code: int, line: str) -> None:
    code = f"""
from mmclip.cli import run_guarded
from mmclip.errors import UserError
def main():
    print("caf\u00e9")
    raise {error}
run_guarded(main)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False,
                          env={"PYTHONIOENCODING": "ascii", "PATH": ""})  # fmt: skip
    assert done.returncode == exit_code and done.stdout == "caf\\xe9\n"
    assert done.stderr.lstrip().startswith(line) and (exit_code != 2 or done.stderr.count("\n") == 1)


def test_shown_text_cannot_control_a_terminal() -> None:
    assert printable("a\x1b[31m\u202eb\nc") == "a\\x1b[31m\\u202eb\\nc"
    assert len(printable("x" * 5000)) == 300 and nearest("zzz", ["lr"]) == ""


def test_public_names_exist_and_importing_them_is_lazy(root: Path) -> None:
    code = "import sys, mmclip; assert 'torch' not in sys.modules and dir(mmclip) == sorted(mmclip.__all__); "
    code += "assert all(getattr(mmclip, name) for name in mmclip.__all__); assert not hasattr(mmclip, 'lod_model')"
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
