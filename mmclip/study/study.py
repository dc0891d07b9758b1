"""A study from its file to its page: plan, run what is missing, gather the arms, write tables and pictures."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmclip.config import StudyConfig
from mmclip.errors import UserError, printable
from mmclip.evaluation.results import NATIVE
from mmclip.io import lock_folder, write_text_atomically
from mmclip.study import text_study
from mmclip.study.finished import Read, damaged, gather, put_aside, read_run
from mmclip.study.kinds import CLIP, TEXT
from mmclip.study.plan import Cell, Plan, plan_study, require_data
from mmclip.study.runner import StudyRun, is_finished, seconds_of

Json = dict[str, Any]
STUDY_FILE = "study.json"
MOST_JOBS = 4  # on a CPU, where nothing is asked for: each holds a model and its data


class _Tools(NamedTuple):
    """What a kind of runs needs beside its settings. require_data: before the first run. read, gather: what is finished
    (study_finished). numbers: a finished cell in a few words. write: tables, pictures and the page."""

    require_data: Callable[[Sequence[Cell]], None]
    read: Read
    gather: Callable[[Sequence[Cell]], tuple[Sequence[Any], dict[Cell, str]]]
    numbers: Callable[[Cell], str]
    write: Callable[..., Path]


def study(settings: StudyConfig, script: Path) -> int:
    """Everything that run_study.py does; script: train_clip.py, beside which the other kinds' scripts lie. Returns the
    exit code: 0, 1 where a run failed, or that of the signal that ended it. Errors: UserError, one line, before
    anything is trained."""
    plan = plan_study(settings)
    if plan.kind is not CLIP:
        script = script.with_name(f"{plan.kind.script}.py")
    there = sum(map(is_finished, plan.cells))
    print(
        f"{printable(plan.title, 100)}: {len(plan.cells)} runs, {there} finished -> {printable(plan.folder)}",
        file=sys.stderr,
    )
    if settings.dry_run:
        unusable = damaged(plan.cells, TOOLS[plan.kind.script].read)
        for cell in plan.cells:
            state = "damaged" if cell in unusable else "finished" if is_finished(cell) else "to run"
            print(f"{state:8}  {printable(cell.folder.name, 120)}  {printable(cell.name)}")
        return 0
    plan.folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_folder(plan.folder)  # two studies would start the same runs
    except UserError:
        told = f"{printable(plan.folder)}: another process runs this study: wait for it, or end it first"
        raise UserError(told) from None
    with lock or contextlib.nullcontext():
        return _run(plan, settings.jobs, script)


def _run(plan: Plan, asked: int, script: Path) -> int:
    tools = TOOLS[plan.kind.script]
    unusable = damaged(plan.cells, tools.read)
    tools.require_data([c for c in plan.cells if c in unusable or not is_finished(c)])
    put_aside(unusable.items())
    devices = gpus()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = asked or len(devices) or min(cores, MOST_JOBS)
    run = StudyRun(plan.cells, script, jobs, devices, max(1, cores // jobs))
    signum = run.run(tools.numbers)
    if signum:
        _write_state(plan, run.failed)
        left = sum(not is_finished(c) for c in plan.cells)
        print(f"stopped with {left} runs left; the same command goes on", file=sys.stderr)
        return 128 + signum
    arms, unreadable = tools.gather(plan.cells)
    _write_state(plan, run.failed | unreadable)
    failed = [{"arm": c.arm, "seed": c.seed, "reason": why} for c, why in (run.failed | unreadable).items()]
    if not arms:
        raise UserError(
            f"none of the {len(plan.cells)} runs is finished: {failed[0]['reason'] if failed else 'no runs'}"
        )
    print(f"page: {printable(tools.write(arms, plan.folder, title=plan.title, failed=failed))}")
    print(f"tables: {printable(plan.folder / 'tables')}")
    if failed:
        print(f"{len(failed)} of {len(plan.cells)} runs failed:", file=sys.stderr)
        for entry in failed:
            print(
                f"  {printable(entry['arm'], 80)}, seed {entry['seed']}: {printable(entry['reason'], 400)}",
                file=sys.stderr,
            )
    return 1 if failed else 0


def gpus() -> list[str]:
    """Names of the GPUs that jobs can be given, as CUDA_VISIBLE_DEVICES takes them."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_available():
        return []
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def _numbers(cell: Cell) -> str:
    """A finished cell in a few words. Errors: UserError, OSError, where its files are not whole."""
    retrieval = read_run(cell)[0].json["retrieval"]
    return "  ".join(f"{d} {retrieval[d][NATIVE]['success@1']:.3f}" for d in retrieval)


def _write_clip(*args: Any, **more: Any) -> Path:
    from mmclip.study.report import write_study  # matplotlib and jinja2 take a second to import

    return write_study(*args, **more)


def _write_text(*args: Any, **more: Any) -> Path:
    from mmclip.study.text_report import write_text_study

    return write_text_study(*args, **more)


TOOLS = {
    CLIP.script: _Tools(require_data, read_run, gather, _numbers, _write_clip),
    TEXT.script: _Tools(
        text_study.require_data, text_study.read_run, text_study.gather, text_study.numbers, _write_text
    ),
}


def _write_state(plan: Plan, failed: dict[Cell, str]) -> None:
    """study.json: every run, where it is, how it stands."""
    cells = [
        {
            "arm": c.arm,
            "seed": c.seed,
            "folder": c.folder.name,
            "state": "failed" if c in failed else "finished" if is_finished(c) else "not run",
            "seconds": seconds_of(c),
            "reason": failed.get(c),
        }
        for c in plan.cells
    ]
    write_text_atomically(plan.folder / STUDY_FILE, json.dumps({"title": plan.title, "runs": cells}, indent=1) + "\n")
