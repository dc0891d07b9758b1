"""One case: a short training run in a process of its own, and everything that must be true of it."""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from fuzz_inputs import STEPS

Listing = dict[str, tuple[int, int, int]]


@dataclass
class Outcome:
    """How a case ended. ``faults``: what must not be, empty for a case that is right."""

    code: int
    seconds: float
    megabytes: float
    faults: list[str]

    def __str__(self) -> str:
        told = "; ".join(self.faults) or "right"
        return f"exit code {self.code}, {self.seconds:.1f} s, {self.megabytes:.0f} MB, {told}"


def train_main(argv: Sequence[str]) -> None:
    """What scripts/train_clip.py does."""
    from mmclip.commands.train import train
    from mmclip.config.clip import parse_train
    from mmclip.config.flags import run_script

    def main() -> None:
        train(parse_train([*argv, "--no-report"]))  # the page is not what is damaged here, and takes seconds

    run_script(main)


def run_case(
    root: Path,
    case: Path,
    argv: Sequence[str],
    *,
    seconds: float,
    gigabytes: float,
    may_need_memory: bool = False,
    runner: Callable[[Sequence[str]], None] = train_main,
) -> Outcome:
    """Run ``runner(argv)`` in the folder ``case`` of ``root`` and check it; its output is in root/stdout, root/stderr.

    ``may_need_memory``: the inputs may ask for more memory than there is, as a model's size does: to say so is right.
    """
    for name in ("stdout", "stderr"):
        (root / name).write_bytes(b"")
    before, started = _listing(root, case / "logs"), time.monotonic()
    inherited = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    pid = os.fork()
    if pid == 0:
        _child(root, case, argv, gigabytes, runner)
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        late = time.monotonic() - started > seconds
        if done == 0 and late:
            os.killpg(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
        if done or late:
            break
        time.sleep(0.005)
    outcome = Outcome(os.waitstatus_to_exitcode(status), time.monotonic() - started, 0.0, [])
    outcome.megabytes = max(0.0, usage.ru_maxrss / 1024 - inherited)  # a forked process begins with its parent's pages
    outcome.faults = _faults(root, case, outcome, seconds, gigabytes, may_need_memory, done == 0)
    outcome.faults += _changes(before, _listing(root, case / "logs"))
    return outcome


def _child(
    root: Path, case: Path, argv: Sequence[str], gigabytes: float, runner: Callable[[Sequence[str]], None]
) -> None:
    code = 1
    try:
        os.setsid()
        for number, name, mode in ((0, os.devnull, "r"), (1, root / "stdout", "w"), (2, root / "stderr", "w")):
            with open(name, mode) as file:
                os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.chdir(case)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = mapped + int(gigabytes * 2**30)  # a case that asks for more must not take it from the machine
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        runner(argv)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _faults(
    root: Path, case: Path, outcome: Outcome, seconds: float, gigabytes: float, may_need_memory: bool, late: bool
) -> list[str]:
    if late:
        return [f"not done after {seconds:g} s"]
    stdout, stderr = ((root / name).read_text(encoding="utf-8", errors="replace") for name in ("stdout", "stderr"))
    faults = []
    if outcome.code not in (0, 2):
        faults.append(f"exit code {outcome.code}")
    if "Traceback" in stdout + stderr:
        faults.append("a traceback")
    errors = [line for line in stderr.split("\n") if line.startswith("error: ")]
    if outcome.code == 2 and (len(errors) != 1 or not stderr.endswith(f"{errors[0]}\n")):
        faults.append("not one line of error: at the end")
    if any("memory" in e and ("allocate" in e or "out of" in e) for e in errors) and not may_need_memory:
        faults.append("out of memory")
    if any(not c.isprintable() and c not in "\n\t" for c in stdout + stderr):
        faults.append("a character that controls a terminal")
    if outcome.megabytes > gigabytes * 1024:
        faults.append(f"{outcome.megabytes:.0f} MB of memory")
    if outcome.code == 0 and not (case / "logs" / "run" / "model" / "open_clip_model.safetensors").is_file():
        faults.append("no model/")
    if outcome.code == 0 and (why := _unfinished(case / "logs" / "run" / "metrics.jsonl")) and "skipped" not in stderr:
        faults.append(why)
    return faults


def _unfinished(metrics: Path) -> str:
    """What is missing of the last step in metrics.jsonl, else ''."""
    try:
        line = json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])
        whole = line["step"] == STEPS and isinstance(line.get("loss"), float) and math.isfinite(line["loss"])
    except (OSError, ValueError, IndexError, KeyError) as error:
        return f"metrics.jsonl: {error!r}"
    return "" if whole else f"metrics.jsonl ends with {line}"


def _listing(root: Path, apart: Path) -> Listing:
    """Every file below ``root`` except ``apart`` and the two files that the output goes to."""
    found: Listing = {}
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        folders[:] = [f for f in folders if here / f != apart]
        for path in [here / n for n in names if here != root or n not in ("stdout", "stderr")]:
            status = path.lstat()
            found[str(path.relative_to(root))] = (status.st_size, status.st_mtime_ns, status.st_mode)
        found |= {str((here / f).relative_to(root)): (0, 0, 0) for f in folders}
    return found


def _changes(before: Listing, after: Listing) -> list[str]:
    changed = sorted(p for p in before.keys() | after.keys() if before.get(p) != after.get(p))
    return [f"changed outside the log folder: {', '.join(changed[:5])}"] if changed else []


def import_everything() -> None:
    """What a run imports, once for all cases; nothing is computed, so that forking stays safe."""
    for name in (
        "torch._dynamo",
        "transformers.dynamic_module_utils",
        "transformers.utils",
        "mmclip.config.clip",
        "mmclip.commands.train",
    ):
        importlib.import_module(name)
    torch.set_num_threads(1)
