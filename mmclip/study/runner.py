"""Run a study's cells, several at once, each a process of its own: one that fails takes no other along."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import yaml

from mmclip.console import progress_bar
from mmclip.errors import UserError, printable
from mmclip.evaluation.results import RESULTS_FILE
from mmclip.io import write_text_atomically
from mmclip.study.plan import Cell
from mmclip.training.log import METRICS
from mmclip.training.signals import SignalHandler

Json = dict[str, Any]
SECONDS_FILE = "seconds.json"  # how long a cell took, all of its attempts together
OUTPUT_FILE = "output.txt"  # what a cell said
POLL = 0.2
STOP_SECONDS = 60.0  # for a cell to save itself


def is_finished(cell: Cell) -> bool:
    return (cell.folder / RESULTS_FILE).is_file()


def seconds_of(cell: Cell) -> float | None:
    """How long a finished cell took; None where that is not known."""
    try:
        seconds = float(json.loads((cell.folder / SECONDS_FILE).read_text(encoding="utf-8"))["seconds"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return seconds if math.isfinite(seconds) else None


@dataclass
class _Running:
    cell: Cell
    slot: int
    process: subprocess.Popen[str]
    output: TextIO
    since: float = field(default_factory=time.monotonic)
    task: Any = None


class StudyRun:
    """Trains what is not finished. ``failed``: cell -> why, also of cells whose initial run failed."""

    def __init__(self, cells: Sequence[Cell], script: Path, jobs: int, devices: Sequence[str], threads: int) -> None:
        """script: train_clip.py. devices: of CUDA_VISIBLE_DEVICES, a job each in turn; none on a CPU."""
        self.cells, self.script, self.jobs, self.devices, self.threads = cells, script, jobs, devices, threads
        self.failed: dict[Cell, str] = {}
        self.running: list[_Running] = []
        self.waiting = [c for c in cells if not is_finished(c)]
        self.done = len(cells) - len(self.waiting)

    def run(self, finished: Callable[[Cell], str]) -> int:
        """Run to the end; ``finished`` says a cell's numbers in a few words, or raises UserError or OSError where its
        files are not whole. Returns 0, or the signal that ended it."""
        for cell in self.cells:
            if is_finished(cell) and not is_locked(cell.folder):  # by a study that was killed before it could tidy up
                _tidy(cell)
        with SignalHandler() as handler, progress_bar() as bar:
            whole = bar.add_task("study", total=len(self.cells), completed=self.done, note="")
            told = -math.inf
            try:
                while (self.waiting or self.running) and not handler.signum:
                    self._start(bar)
                    if self.waiting and not self.running and time.monotonic() - told > 60:
                        told = time.monotonic()
                        self._say(bar, "waiting for runs of this study that another process trains")
                    for run in list(self.running):
                        self._watch(run, bar, finished)
                    bar.update(whole, completed=self.done, note=self._note())
                    time.sleep(POLL)
            finally:
                self._stop_all()
            bar.update(whole, completed=self.done, note=self._note())
        return handler.signum

    def _note(self) -> str:
        return f"{len(self.failed)} failed" if self.failed else ""

    def _say(self, bar: Any, text: str) -> None:
        if bar.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            bar.console.print(text, markup=False, highlight=False)

    # --- one cell -------------------------------------------------------------------------------------------------

    def _start(self, bar: Any) -> None:
        """Fill the free jobs with cells whose initial cell is finished and which nobody else trains."""
        for cell in list(self.waiting):
            if len(self.running) >= self.jobs:
                return
            if is_finished(cell):  # by another process
                self.waiting.remove(cell)
                self.done += 1
                continue
            if cell.initial in self.failed:
                self.waiting.remove(cell)
                self._fail(cell, f"its initial run failed: {cell.initial.name}" if cell.initial else "", bar)
                continue
            if (cell.initial is not None and not is_finished(cell.initial)) or is_locked(cell.folder):
                continue
            self.waiting.remove(cell)
            self._launch(cell, bar)

    def _launch(self, cell: Cell, bar: Any) -> None:
        slot = min(set(range(self.jobs)) - {r.slot for r in self.running})
        plans = cell.folder.parent.parent / "settings"
        plans.mkdir(parents=True, exist_ok=True)
        plan = plans / f"{cell.folder.name}.yaml"
        write_text_atomically(plan, yaml.safe_dump(cell.settings.to_dict(), sort_keys=False))
        command = [sys.executable, str(self.script), "--config", str(plan)]
        if (cell.folder / "config.yaml").is_file():
            command += ["--resume", "latest"]
        elif cell.folder.exists():  # killed before it had begun
            shutil.rmtree(cell.folder)
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", str(self.threads))
        if self.devices:
            environment["CUDA_VISIBLE_DEVICES"] = self.devices[slot % len(self.devices)]
        output = open(plans / f"{cell.folder.name}.{OUTPUT_FILE}", "w", encoding="utf-8")  # noqa: SIM115
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is the study's, which tells its cells
        )
        run = _Running(cell, slot, process, output)
        run.task = bar.add_task(f"  {printable(cell.name, 48)}", total=None, note="starting")
        self.running.append(run)

    def _watch(self, run: _Running, bar: Any, finished: Callable[[Cell], str]) -> None:
        code = run.process.poll()
        if code is None:
            line = last_line(run.cell.folder / METRICS)
            if line:
                total = max(run.cell.settings.epochs, line.get("epoch", 0) + 1)
                note = f"step {line['step']}"
                bar.update(run.task, total=total, completed=line.get("epoch", 0), note=note)
            return
        self._leave(run)
        bar.remove_task(run.task)
        spent = time.monotonic() - run.since
        if code == 0 and is_finished(run.cell):
            try:
                told = finished(run.cell)
            except (UserError, OSError) as error:
                self._fail(run.cell, str(error), bar)
                return
            self.done += 1
            write_text_atomically(
                run.cell.folder / SECONDS_FILE, json.dumps({"seconds": spent + (seconds_of(run.cell) or 0.0)})
            )
            _tidy(run.cell)
            self._say(bar, f"[{self.done}/{len(self.cells)}] {printable(run.cell.name, 80)}: {told}  {spent:.0f} s")
        else:
            self._fail(run.cell, _reason(Path(run.output.name), code), bar)

    def _fail(self, cell: Cell, why: str, bar: Any) -> None:
        self.failed[cell] = why
        self._say(bar, f"failed: {printable(cell.name, 80)}: {printable(why, 400)}")

    def _leave(self, run: _Running) -> None:
        self.running.remove(run)
        run.output.close()

    def _stop_all(self) -> None:
        """Have every running cell save itself and leave; whoever does not within a minute is killed."""
        for run in self.running:
            run.process.terminate()
        until = time.monotonic() + STOP_SECONDS
        for run in list(self.running):
            try:
                run.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                run.process.kill()
                run.process.wait()
            self._leave(run)


def _tidy(cell: Cell) -> None:
    """Drop a finished cell's checkpoints: model/ holds what is looked at."""
    shutil.rmtree(cell.folder / "checkpoints", ignore_errors=True)


def _reason(output: Path, code: int) -> str:
    """The last line that says an error, else the last line."""
    lines = [x.strip() for x in output.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()]
    errors = [x.removeprefix("error: ") for x in lines if x.startswith("error: ")]
    how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{(errors or lines or ['it said nothing'])[-1]} ({how}; {output})"


def last_line(path: Path) -> Json | None:
    """The last whole line of metrics.jsonl, read from its end."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().decode("utf-8", "replace").splitlines(keepends=True)
        whole = [x for x in lines if x.endswith("\n")]
        found = json.loads(whole[-1])
        return found if isinstance(found, dict) and "step" in found else None
    except (OSError, ValueError, IndexError):
        return None


def is_locked(folder: Path) -> bool:
    """Whether another process writes this run, such as one that outlived an earlier study."""
    try:
        with open(folder / ".lock", "r+", encoding="utf-8") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    return False
