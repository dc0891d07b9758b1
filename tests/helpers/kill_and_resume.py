"""Start a run, SIGKILL it at a random moment, resume it, until it has been killed often enough. A program of its own:

    python tests/helpers/kill_and_resume.py FOLDER KILLS SEED CACHED FLAG...

Each attempt is a fork, which kills itself from inside at the drawn moment. The parent has imported everything and
computed nothing, so a fork is as good as a new process. Prints a JSON line an attempt.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mmclip.commands.train import run as train
from mmclip.config import TrainConfig, parse
from mmclip.embeddings import trunk_cache
from mmclip.evaluation.eval_set import EvalSource
from mmclip.models import export
from mmclip.training import checkpoint as checkpoints
from mmclip.training import log as runlog
from mmclip.training.step import TrainStep

LIVE = ("forward", "update", "checkpoint", "pointer", "line", "validation", "export", "time")
CACHED = ("cache", "reasons", "cache", "validation", "checkpoint", "time")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # nothing may happen behind it


def before(real: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    die()


def after(real: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    real(*args, **kwargs)
    die()


def half_written(real: Callable[..., Any], data: Any, target: Any, **kwargs: Any) -> None:
    """Write the first half of a file, of a name or open."""
    real(data, target, **kwargs)
    if not isinstance(target, str):
        target.flush()
    number = os.open(target, os.O_RDWR) if isinstance(target, str) else target.fileno()
    os.ftruncate(number, os.fstat(number).st_size // 2)
    die()


def half_a_line(real: Callable[..., Any], log: Any, step: int, values: Any) -> None:
    log.file.write(json.dumps({"step": step, **values})[:40])
    log.file.flush()
    die()


MOMENTS: dict[
    str, tuple[Any, str, Callable[..., None], int]
] = {  # owner, function, its substitute, last call that dies
    "forward": (TrainStep, "_backward", after, 5),
    "update": (TrainStep, "run", after, 5),
    "checkpoint": (torch, "save", half_written, 3),
    "pointer": (checkpoints, "write_text_atomically", before, 3),
    "line": (runlog.RunLog, "write", half_a_line, 5),
    "validation": (EvalSource, "embed", before, 2),
    "export": (export, "save_file", half_written, 1),
    "cache": (trunk_cache, "save_file", half_written, 6),
    "reasons": (trunk_cache, "write_atomically", before, 6),
}


def plan(moment: str, rng: random.Random, seconds: float, soon: bool) -> None:
    """Arrange for this process to be killed at a moment; ``soon``: at the first of its kind."""
    if moment == "time":
        threading.Timer(rng.uniform(0.0, seconds / 4 if soon else seconds), die).start()
    elif moment != "none":
        owner, name, instead, most = MOMENTS[moment]
        real, calls, last = getattr(owner, name), [0], 1 if soon else rng.randint(1, most)

        def called(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            return instead(real, *args, **kwargs) if calls[0] == last else real(*args, **kwargs)

        setattr(owner, name, called)


def attempt(flags: list[str], output: Path, moment: str, rng: random.Random, seconds: float, soon: bool) -> int:
    """Run in a fork that is killed at ``moment``; its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 1
    try:
        torch.set_num_threads(1)
        trunk_cache.PART_ROWS = {"image": 16, "text": 40}  # several parts of a tiny data set
        plan(moment, rng, seconds, soon)
        train(parse(TrainConfig, flags))
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    folder, kills, rng, cached = Path(sys.argv[1]), int(sys.argv[2]), random.Random(sys.argv[3]), sys.argv[4] == "1"
    runs, killed, soon, seconds = ["whole"], 0, False, 0.0
    moments: list[str] = ["none"]
    while True:
        name, resume = runs[-1], []
        if not moments:
            moments = rng.sample(CACHED if cached else LIVE, len(CACHED if cached else LIVE))
        moment = moments.pop() if killed < kills else "none"
        if (folder / name / "config.yaml").is_file():
            resume = ["--resume", "latest"]
        flags = [*sys.argv[5:], "--logs", str(folder), "--cache-dir", str(folder / f"cache-{name}"), "--name", name]
        began = time.monotonic()
        status = attempt([*flags, *resume], folder / f"{name}.txt", moment, random.Random(rng.random()), seconds, soon)
        print(json.dumps({"run": name, "moment": moment, "status": status, "resumed": bool(resume)}), flush=True)
        if os.WIFSIGNALED(status):
            killed, soon = killed + 1, False
            continue
        assert status == 0, (folder / f"{name}.txt").read_text()
        if killed >= kills:
            return
        if name == "whole":
            seconds = time.monotonic() - began
        else:  # the run ended before its moment came: the next one, a new run, meets that moment early
            soon = True
            moments.append(moment)
        runs.append(f"run{len(runs) - 1}")


if __name__ == "__main__":
    main()
