"""A script in a process that is forked says and does what one that is started says and does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.warm import run_warm

TELLS = """
import atexit, os, sys
atexit.register(print, "the end")
print(sys.argv[1:], __name__, os.getcwd(), os.environ["SAID"], "HOME" in os.environ)
print(sys.path[0], [m for m in sys.modules if m.split(".")[0] == "mmclip"], file=sys.stderr)
"""


def both(folder: Path, code: str, *arguments: str) -> list[tuple[int, str, str]]:
    """(exit code, output, errors) of a script that is forked, and of one that is started."""
    script, environment = folder / "script.py", {"SAID": "yes", "PATH": os.environ["PATH"]}
    script.write_text(code, encoding="utf-8")
    found = [
        run_warm([str(script), *arguments], folder, environment, 60),
        subprocess.run([sys.executable, str(script), *arguments], cwd=folder, env=environment, capture_output=True,
                       text=True, check=False, stdin=subprocess.DEVNULL),
    ]  # fmt: skip
    return [(done.returncode, done.stdout, done.stderr) for done in found]


@pytest.mark.parametrize(
    "ending",
    ["", "sys.exit(2)", "sys.exit('one line')", "print(input())  # there is no input", "os.kill(os.getpid(), 9)",
     "sys.stdout.flush(); os._exit(7)"],
)  # fmt: skip
def test_a_forked_script_is_as_a_started_one(tmp_path: Path, ending: str) -> None:
    forked, started = both(tmp_path, TELLS + ending, "--flag", "a b")
    if "input" in ending:  # what leads to the line of the error differs
        assert forked[2].splitlines()[-1] == started[2].splitlines()[-1] == "EOFError: EOF when reading a line"
        forked, started = (*forked[:2], ""), (*started[:2], "")
    assert forked == started


def test_packages_of_others_are_there_and_a_script_starts_as_the_main_module(tmp_path: Path) -> None:
    done = run_warm([str(_script(tmp_path, "import sys; print('torch' in sys.modules, 'mmclip' in sys.modules)"))],
                    tmp_path, os.environ, 60)  # fmt: skip
    assert done.stdout == "True False\n"


def test_a_script_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    script = _script(tmp_path, "import time; print('begun', flush=True); time.sleep(600)")
    with pytest.raises(subprocess.TimeoutExpired) as error:
        run_warm([str(script)], tmp_path, os.environ, 8)
    assert error.value.stdout == "begun\n"


def _script(folder: Path, code: str) -> Path:
    path = folder / "script.py"
    path.write_text(code, encoding="utf-8")
    return path
