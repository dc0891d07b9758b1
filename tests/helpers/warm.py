"""Script processes that skip importing torch and other packages, which takes most of a short script's time.

A server (multiprocessing's forkserver) imports packages of others, nothing of mmclip, and forks for each start. A
script is ``__main__`` in a process of its own, with its own arguments, environment, output, exit code and time.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")  # also of tests that start ranks by this method
SERVER.set_forkserver_preload(
    ["torch", "torch._dynamo", "torchvision", "open_clip", "scipy.stats", "matplotlib.figure", "jinja2",
     "rich.progress", "sentence_transformers", "datasets"]
)  # fmt: skip
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it once, in the server


def run_warm(
    command: list[str], cwd: Path, environment: Mapping[str, str], timeout: float, ranks: int = 1
) -> subprocess.CompletedProcess[str]:
    """subprocess.run of [script, arguments...] with its output as text; ``ranks`` meet as under torchrun.

    The first rank that fails ends them all.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        out, err = (Path(folder) / name for name in ("out", "err"))
        environments = [dict(environment)]
        if ranks > 1:
            probe.bind(("127.0.0.1", 0))
            meet = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
            environments = [{**environment, **meet, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]
        probe.close()
        processes = [SERVER.Process(target=_script, args=(command, cwd, e, out, err)) for e in environments]
        codes = run_all(processes, timeout)
        if not any(codes) and None in codes:
            raise subprocess.TimeoutExpired(command, timeout, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(command, next(filter(None, codes), 0), out.read_text(), err.read_text())


def run_all(processes: Sequence[BaseProcess], timeout: float) -> list[int | None]:
    """Start processes; their exit codes, None for those that are killed since another failed or time is over."""
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    while (left := [p for p in processes if p.exitcode is None]) and time.monotonic() < deadline:
        if any(p.exitcode for p in processes):
            break
        connection.wait([p.sentinel for p in left], deadline - time.monotonic())
    codes = [p.exitcode for p in processes]
    for process in processes:
        process.kill()
        process.join()
        process.close()
    return codes


def _script(command: list[str], cwd: Path, environment: dict[str, str], out: Path, err: Path) -> None:
    for descriptor, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - buffered as a file is, whatever the server's output was
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # the script's own children are started as ever
    sys.argv = command
    sys.path[:0] = [str(Path(command[0]).parent), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
