"""A forked script says and does what a started one says and does."""

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


@pytest.mark.parametrize(
    "ending",
    ["", "sys.exit(2)", "sys.exit('one line')", "print(input())  # there is no input", "os.kill(os.getpid(), 9)",
     "sys.stdout.flush(); os._exit(7)"],
)  # fmt: skip
def test_a_forked_script_is_as_a_started_one(tmp_path: Path, ending: str) -> None:
    script, environment = tmp_path / "script.py", {"SAID": "yes", "PATH": os.environ["PATH"]}
    script.write_text(TELLS + ending, encoding="utf-8")
    words = [str(script), "--flag", "a b"]
    started = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True,
                             check=False, stdin=subprocess.DEVNULL)  # fmt: skip
    forked = run_warm(words, tmp_path, environment, 60)
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    if "input" in ending:  # the frames above the error differ
        assert forked.stderr.splitlines()[-1] == started.stderr.splitlines()[-1] == "EOFError: EOF when reading a line"
    else:
        assert forked.stderr == started.stderr


def test_packages_of_others_are_imported_and_ranks_meet(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint('torch' in sys.modules, 'mmclip' in sys.modules)\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\ndist.barrier()\nsys.exit(3 * (os.environ['RANK'] == '1'))\n"
    )
    done = run_warm([str(script)], tmp_path, os.environ, 60, ranks=2)
    assert (done.returncode, done.stdout) == (3, "True False\n" * 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_that_takes_too_long_is_ended(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "script.py").write_text("import time; print('begun', flush=True); time.sleep(600)", encoding="utf-8")
    with pytest.raises(subprocess.TimeoutExpired) as error:
        run_warm([str(tmp_path / "script.py")], tmp_path, os.environ, 4, ranks)
    assert error.value.stdout == "begun\n" * ranks
