"""What the benchmarks share: measurements in processes of their own, contestants that take turns, medians, CSV files.

A benchmark's own process stays light, since Linux counts a parent's size into its child's ru_maxrss: what needs torch
is done by ``python BENCHMARK --measure JSON``, whose last line of output is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import platform
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

Json = dict[str, Any]
MEASURED = ("seconds", "cpu", "mib")
MIB = 2**20
FAILED: list[str] = []  # what failed in this run, as it was told


class Parser(argparse.ArgumentParser):
    """A benchmark's flags: its docstring is its help, and what is wrong is one line and exit code 2."""

    def __init__(self, text: str | None) -> None:
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        refuse(message)


def refuse(message: object) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def count(text: str, least: int = 1) -> int:
    """A flag's whole number. Errors: argparse's, for one below ``least``."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number of at least {least} is expected")
    return number


def peak_mib() -> float:
    """The largest resident size of this process so far, in MiB."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / MIB if sys.platform == "darwin" else size / 1024


def settled_mib() -> float:
    """:func:`peak_mib` to begin with: Linux is asked to forget peaks that are over, such as those of imports."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_mib()


def share(a: float, b: float) -> float:
    """a / b; NaN where there is nothing to divide by, as the memory of something very small."""
    return a / b if b else math.nan


def of_memory(ours: float, theirs: float) -> str:
    """'0.100 of its memory'; what is too small to be told from the rest of a process has no ratio."""
    return f"{ours / theirs:.3f} of its memory" if ours and theirs else "memory too small to compare"


def spent(wall: float, cpu: float) -> Json:
    return {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine(threads: int, device: str = "cpu") -> str:
    """The machine in words; device: "cpu", or the name of what it has."""
    on = f"{cpu_name()}, {threads} thread{'s' * (threads != 1)}, torch {version('torch')}"
    return f"{on}, {'no GPU used' if device == 'cpu' else device}"


def cuda_name() -> str | None:
    """The name of the first CUDA device, asked in a process of its own; None without one."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip() or None


def failed(name: str, code: int, errors: str = "") -> None:
    """Tell in a line that the process of a contestant failed and why: by its last line of ``errors``, which are shown
    before, or by its exit code. Other contestants go on; :func:`exit_code` knows of it."""
    sys.stderr.write(errors)
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    why = f"ended by {signal.Signals(-code).name}" if code < 0 else lines[-1] if lines else f"exit code {code}"
    FAILED.append(f"{name}: failed: {why}")
    print(FAILED[-1], flush=True)


def exit_code(good: bool) -> int:
    """0 for a benchmark whose numbers agree and whose contestants all came to an end, else 1, each failure told again,
    where the numbers end."""
    for told in FAILED:
        print(f"error: {told}", file=sys.stderr)
    return 0 if good and not FAILED else 1


def answer(done: subprocess.CompletedProcess[str], name: str) -> Json | None:
    """The last line of a process's stdout, a JSON object or null; None, told, where it failed."""
    lines = done.stdout.splitlines()
    if done.returncode or not lines or not lines[-1].startswith(("{", "null")):
        failed(name, done.returncode, done.stderr or "")
        return None
    sys.stderr.write(done.stderr or "")
    found: Json | None = json.loads(lines[-1])
    return found


def measured(script: str | Path, spec: Json, name: str) -> Json | None:
    """What a process of its own finds; None where it fails or does not fit into memory (it is killed, or says so),
    which is told in a line under ``name``."""
    command = [sys.executable, str(script), "--measure", json.dumps(spec)]
    errors = None if spec.get("bar") else subprocess.PIPE  # a bar needs the terminal
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    found = None if done.returncode == -9 else answer(done, name)
    if done.returncode == -9 or (not done.returncode and done.stdout.endswith("null\n")):
        print(f"{name}: does not fit into memory", flush=True)
    return found


def take_turns(
    names: Sequence[str], rounds: int, measure: Callable[[str], Json | None], shown: bool = True
) -> dict[str, list[Json]]:
    """``rounds`` measurements of each name, in turns, so that a busy machine slows all; each is printed.

    What fails or does not fit, which ``measure`` tells, is asked no more and left out of the result.
    """
    found: dict[str, list[Json]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in [n for n in names if n in found]:
            now = measure(name)
            if now is None:
                del found[name]
                continue
            found[name].append(now)
            if shown:
                print(row(name, now), flush=True)
    return found


def medians(found: Iterable[Mapping[str, Any]]) -> Json:
    """The median of each measured quantity."""
    every = list(found)
    return {what: median(one[what] for one in every) for what in MEASURED}


def row(name: str, of: Mapping[str, Any], width: int = 28) -> str:
    return f"{name:{width}} {of['seconds']:9.3f} s {of['cpu']:9.3f} s of CPU {of['mib']:9.1f} MiB"


def write_csv(path: Path, about: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A line "# about", then the rows under the keys of the fullest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# {about}\n")
        writer = csv.DictWriter(file, max((list(r) for r in rows), key=len), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()} for r in rows)


def read_csv(path: Path) -> tuple[str, list[dict[str, str]]]:
    """(about, rows) as :func:`write_csv` wrote them."""
    with path.open(encoding="utf-8", newline="") as file:
        about = file.readline().removeprefix("# ").strip()
        return about, list(csv.DictReader(file))
