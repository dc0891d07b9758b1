"""Processes that need not import torch and its like again, which takes most of a short script's time.

A server (multiprocessing's forkserver) imports packages of others, nothing of mmclip, and forks for each start. A
script is ``__main__`` in a process of its own, with its own arguments, environment, output, exit code and time.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")  # also of tests that start ranks by this method
SERVER.set_forkserver_preload(
    ["torch", "torchvision", "open_clip", "scipy.stats", "matplotlib.figure", "jinja2", "rich.progress",
     "sentence_transformers", "datasets"]
)  # fmt: skip
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it once, in the server


def run_warm(
    command: list[str], cwd: Path, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """subprocess.run of [script, arguments...] with its output as text."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        process = SERVER.Process(target=_script, args=(command, cwd, dict(environment), out, err), daemon=False)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout, out.read_text(), err.read_text())
        code = process.exitcode
        process.close()
        return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())


def _script(command: list[str], cwd: Path, environment: dict[str, str], out: Path, err: Path) -> None:
    for descriptor, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - buffered as a file is, whatever the server's output was
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # the script's own children are started as ever
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
