"""mmclip study: a grid of trainings, with tables, claims and a page."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mmclip.config import StudyConfig
from mmclip.errors import UserError, printable
from mmclip.io import json_text, lock_folder, write_text_atomically
from mmclip.reporting.table import show
from mmclip.study.arms import gather
from mmclip.study.estimates import Study
from mmclip.study.plan import StudyPlan, StudyRun, is_finished, plan_study, require_data, seconds_of
from mmclip.study.runner import run_study, set_damaged_aside

MOST_JOBS = 4  # on a CPU: each holds a model and its data


def run(config: StudyConfig, command: Sequence[str] | None = None) -> int:
    """Train what is missing and write tables and page.

    Args:
        command: of a training, before its --config; by default mmclip train, or train-text.

    Returns:
        The exit code: 0, 1 where a run failed, or that of the signal that ended it.
    """
    plan = plan_study(config)
    finished = sum(map(is_finished, plan.runs))
    head = f"{printable(plan.title, 100)}: {len(plan.runs)} runs, {finished} finished"
    print(f"{head} -> {printable(plan.folder)}", file=sys.stderr)
    if config.dry_run:
        for one in plan.runs:
            state = "finished" if is_finished(one) else "to run"
            print(f"{state:8}  {printable(one.folder.name, 120)}  {printable(one.name)}")
        return 0
    plan.folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(plan.folder):  # two studies would start the same runs
        return _run(plan, config, command or [sys.executable, "-m", "mmclip", plan.kind.command])


def _run(plan: StudyPlan, config: StudyConfig, command: Sequence[str]) -> int:
    set_damaged_aside(plan.runs)
    require_data(run for run in plan.runs if not is_finished(run))
    devices = gpus()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = config.jobs or len(devices) or min(cores, MOST_JOBS)
    failed, signum = run_study(plan.runs, command, jobs, devices, max(1, cores // jobs))
    if signum:
        _write_state(plan, failed)
        left = sum(not is_finished(run) for run in plan.runs)
        print(f"stopped with {left} runs left; the same command goes on", file=sys.stderr)
        return 128 + signum
    arms, unreadable = gather(plan.runs)
    failed |= unreadable
    _write_state(plan, failed)
    if not arms:
        raise UserError(f"none of the {len(plan.runs)} runs is finished: {next(iter(failed.values()), 'no runs')}")
    from mmclip.study.report import write_study  # matplotlib and jinja2 take a second to import

    failures = [{"arm": run.arm, "seed": run.seed, "reason": why} for run, why in failed.items()]
    report = write_study(Study(arms, plan.kind), plan.folder, title=plan.title, failed=failures)
    names = list(report.tables) if config.verbose else plan.show
    show(table.view() for name, table in report.tables.items() if name in names and table.records)
    for line in report.lines:
        print(printable(line, 1000))
    if failed:
        print(f"{len(failed)} of {len(plan.runs)} runs failed:", file=sys.stderr)
        for one, why in failed.items():
            print(f"  {printable(one.name, 80)}: {printable(why, 400)}", file=sys.stderr)
    print(f"page: {printable(report.page)}")
    return 1 if failed else 0


def gpus() -> list[str]:
    """GPUs for jobs, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_available():
        return []
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def _write_state(plan: StudyPlan, failed: dict[StudyRun, str]) -> None:
    """study.json: every run with its folder and state."""
    runs = []
    for run in plan.runs:
        state = "failed" if run in failed else "finished" if is_finished(run) else "not run"
        runs.append({"arm": run.arm, "seed": run.seed, "folder": run.folder.name, "state": state})
        runs[-1] |= {"seconds": seconds_of(run), "reason": failed.get(run)}
    write_text_atomically(plan.folder / "study.json", json_text({"title": plan.title, "runs": runs}, indent=1))
