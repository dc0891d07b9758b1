"""Start a run, SIGKILL it at a random moment, resume it, until it has been killed often enough. A program of its own:

    python tests/helpers/kill_and_resume.py FOLDER KILLS SEED CACHED FLAG...

Everything is imported once; each attempt is a fork, which kills itself from inside at the moment that was drawn. What
is forked has computed nothing yet, so it is as good as a new process. Prints a JSON line an attempt.
"""

from __future__ import annotations

import io
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


def at_call(owner: Any, name: str, count: int, instead: Callable[..., Any]) -> None:
    """Have the ``count``-th call of ``owner.name`` do ``instead``, with the real function as its first argument."""
    real, calls = getattr(owner, name), [0]

    def called(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return instead(real, *args, **kwargs) if calls[0] == count else real(*args, **kwargs)

    setattr(owner, name, called)


def half_of_a_checkpoint(real: Callable[..., Any], state: Any, file: Any) -> None:
    whole = io.BytesIO()
    real(state, whole)
    file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
    file.flush()
    die()


def half_of_a_file(real: Callable[..., Any], tensors: Any, path: str, **kwargs: Any) -> None:
    real(tensors, path, **kwargs)
    os.truncate(path, Path(path).stat().st_size // 2)
    die()


def half_of_a_line(real: Callable[..., Any], log: Any, step: int, values: Any) -> None:
    log.file.write(json.dumps({"step": step, **values})[:40])
    log.file.flush()
    die()


def after(real: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    real(*args, **kwargs)
    die()


def before(real: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    die()


def plan(moment: str, rng: random.Random, seconds: float, soon: bool) -> None:
    """Arrange for this process to be killed at a moment; ``soon``: at the first of its kind."""
    if moment == "time":
        threading.Timer(rng.uniform(0.0, seconds / 4 if soon else seconds), die).start()
        return
    owner, name, instead, most = {
        "forward": (TrainStep, "_backward", after, 5),
        "update": (TrainStep, "run", after, 5),
        "checkpoint": (torch, "save", half_of_a_checkpoint, 3),
        "pointer": (checkpoints, "write_text_atomically", before, 3),
        "line": (runlog.RunLog, "write", half_of_a_line, 5),
        "validation": (EvalSource, "embed", before, 2),
        "export": (export, "save_file", half_of_a_file, 1),
        "cache": (trunk_cache, "save_file", half_of_a_file, 6),
        "reasons": (trunk_cache, "write_atomically", before, 6),
    }[moment]
    at_call(owner, name, 1 if soon else rng.randint(1, most), instead)


def attempt(flags: list[str], output: Path, prepare: Callable[[], None]) -> int:
    """A forked run; its wait status."""
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
        prepare()
        train(parse(TrainConfig, flags))
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    folder, kills, rng, cached = Path(sys.argv[1]), int(sys.argv[2]), random.Random(sys.argv[3]), sys.argv[4] == "1"
    flags = [*sys.argv[5:], "--logs", str(folder)]
    started = time.monotonic()
    cache = ["--cache-dir", str(folder / "cache-whole")]
    status = attempt([*flags, *cache, "--name", "whole"], folder / "whole.txt", lambda: None)
    assert status == 0, (folder / "whole.txt").read_text()
    seconds, killed, run = time.monotonic() - started, 0, 0
    moments: list[str] = []
    soon = False
    while True:
        if not moments:
            moments = list(CACHED if cached else LIVE)
            rng.shuffle(moments)
        name, moment = f"run{run}", moments.pop() if killed < kills else "none"
        resume = ["--resume", "latest"] if (folder / name / "config.yaml").is_file() else []
        cache = ["--cache-dir", str(folder / f"cache-{run}")]

        def prepare(moment: str = moment, soon: bool = soon) -> None:
            if moment != "none":
                plan(moment, random.Random(rng.random()), seconds, soon)

        status = attempt([*flags, *cache, "--name", name, *resume], folder / f"{name}.txt", prepare)
        rng.random()  # the fork drew one, too
        print(json.dumps({"run": name, "moment": moment, "status": status, "resumed": bool(resume)}), flush=True)
        if os.WIFSIGNALED(status):
            killed, soon = killed + 1, False
            continue
        assert status == 0, (folder / f"{name}.txt").read_text()
        run += 1
        if killed >= kills:
            return
        soon = True  # the run ended before its moment came: the next one, a new run, meets that moment early
        moments.append(moment)


if __name__ == "__main__":
    main()
