"""Train the runs of a study, several at once, each a process of its own: a failure stops no other run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mmclip.console import progress_bar
from mmclip.errors import UserError, printable
from mmclip.evaluation.results import NATIVE
from mmclip.io import write_text_atomically
from mmclip.reporting.table import rate
from mmclip.study.arms import read_run
from mmclip.study.plan import SECONDS_FILE, StudyRun, is_finished, seconds_of
from mmclip.training.log import METRICS
from mmclip.training.signals import SignalHandler

Json = dict[str, Any]
OUTPUT_FILE = "output.txt"  # what a run printed
POLL = 0.2
STOP_SECONDS = 60.0  # for a run to save itself


@dataclass
class _Process:
    run: StudyRun
    slot: int
    process: subprocess.Popen[bytes]
    output: Path
    task: Any
    since: float = field(default_factory=time.monotonic)


def run_study(
    runs: Sequence[StudyRun], command: Sequence[str], jobs: int, devices: Sequence[str] = (), threads: int = 1
) -> tuple[dict[StudyRun, str], int]:
    """Train what is not finished, to the end or until a signal.

    Args:
        command: of a training, before its --config.
        jobs: runs at once.
        devices: values of CUDA_VISIBLE_DEVICES, for a job each in turn; none on a CPU.
        threads: of a run.

    Returns:
        (run -> reason of its failure, or of that of the run it starts from; number of the signal, 0 for none)
    """
    runner = _Runner(runs, command, jobs, devices, threads)
    return runner.failed, runner.train()


@dataclass
class _Runner:
    runs: Sequence[StudyRun]
    command: Sequence[str]
    jobs: int
    devices: Sequence[str]
    threads: int
    failed: dict[StudyRun, str] = field(default_factory=dict)
    _active: list[_Process] = field(default_factory=list)

    def train(self) -> int:
        self._waiting = [run for run in self.runs if not is_finished(run)]
        with SignalHandler() as handler, progress_bar() as self._bar:
            whole = self._bar.add_task("study", total=len(self.runs), note="")
            try:
                while (self._waiting or self._active) and not handler.signum:
                    self._start()
                    for process in list(self._active):
                        self._watch(process)
                    note = f"{len(self.failed)} failed" if self.failed else ""
                    self._bar.update(whole, completed=sum(map(is_finished, self.runs)), note=note)
                    time.sleep(POLL)
            finally:
                self._stop_all()
        return handler.signum

    def _say(self, text: str) -> None:
        if self._bar.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False)

    def _start(self) -> None:
        """Fill free jobs with runs whose initial run is finished."""
        for run in list(self._waiting):
            if len(self._active) >= self.jobs:
                return
            initial = run.initial
            if initial in self.failed:
                self._waiting.remove(run)
                self._fail(run, f"its initial run failed: {initial.name if initial else ''}")
            elif initial is None or is_finished(initial):
                self._waiting.remove(run)
                self._launch(run)

    def _launch(self, run: StudyRun) -> None:
        slot = min(set(range(self.jobs)) - {p.slot for p in self._active})
        settings = run.folder.parent.parent / "settings"
        settings.mkdir(parents=True, exist_ok=True)
        path = settings / f"{run.folder.name}.yaml"
        write_text_atomically(path, yaml.safe_dump(run.config.to_dict(), sort_keys=False))
        command = [*self.command, "--config", str(path)]
        if (run.folder / "config.yaml").is_file():
            command += ["--resume", "latest"]
        else:  # killed before it had begun
            shutil.rmtree(run.folder, ignore_errors=True)
        environment = {"OMP_NUM_THREADS": str(self.threads), **os.environ}
        if self.devices:
            environment["CUDA_VISIBLE_DEVICES"] = self.devices[slot % len(self.devices)]
        output = settings / f"{run.folder.name}.{OUTPUT_FILE}"
        with output.open("w", encoding="utf-8") as file:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            # a session of its own: Ctrl-C is the study's, which stops its runs
            process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        task = self._bar.add_task(f"  {printable(run.name, 48)}", total=None, note="starting")
        self._active.append(_Process(run, slot, process, output, task))

    def _watch(self, active: _Process) -> None:
        run, code = active.run, active.process.poll()
        if code is None:
            if line := _progress(run.folder / METRICS):
                epoch = line.get("epoch", 0)
                total, note = max(run.config.epochs, epoch + 1), f"step {line.get('step')}"
                self._bar.update(active.task, total=total, completed=epoch, note=note)
            return
        self._active.remove(active)
        self._bar.remove_task(active.task)
        try:
            if code != 0 or not is_finished(run):
                raise UserError(_reason(active.output, code))
            numbers = _numbers(run)
        except (UserError, OSError) as error:
            self._fail(run, str(error))
            return
        spent = time.monotonic() - active.since
        seconds = json.dumps({"seconds": spent + (seconds_of(run) or 0.0)})
        write_text_atomically(run.folder / SECONDS_FILE, seconds)
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)  # model/ holds what is evaluated
        done = f"[{sum(map(is_finished, self.runs))}/{len(self.runs)}]"
        self._say(f"{done} {printable(run.name, 80)}: {numbers}  {spent:.0f} s")

    def _fail(self, run: StudyRun, why: str) -> None:
        self.failed[run] = why
        self._say(f"failed: {printable(run.name, 80)}: {printable(why, 400)}")

    def _stop_all(self) -> None:
        """Have every run save itself and end; one that does not within a minute is killed."""
        for active in self._active:
            active.process.terminate()
        until = time.monotonic() + STOP_SECONDS
        for active in self._active:
            try:
                active.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                active.process.kill()
                active.process.wait()


def set_damaged_aside(runs: Sequence[StudyRun]) -> None:
    """Move finished runs that cannot be read aside, to be trained again; remove checkpoints of those that can."""
    for run in filter(is_finished, runs):
        try:
            read_run(run)
            shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
        except (UserError, OSError) as error:
            aside = run.folder.with_name(f"{run.folder.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            run.folder.rename(aside)
            why = f"damaged, moved to {printable(aside.name)}, is trained again: {printable(error, 400)}"
            print(f"{printable(run.name, 80)}: {why}", file=sys.stderr)


def _numbers(run: StudyRun) -> str:
    """A finished run in a few words: the first metric of each data set and direction."""
    sets = read_run(run)[0].items()
    values = [(f"{name} {d}".strip(), r.json["retrieval"][d][NATIVE]) for name, r in sets for d in r.json["retrieval"]]
    return "  ".join(f"{name} {rate(value[run.kind.metrics[0]])}" for name, value in values)


def _reason(output: Path, code: int) -> str:
    """The last line that is an error, else the last line."""
    lines = [x.strip() for x in output.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()]
    errors = [x.removeprefix("error: ") for x in lines if x.startswith("error: ")]
    how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{(errors or lines or ['without output'])[-1]} ({how}; {output})"


def _progress(path: Path) -> Json:
    """The last whole line of metrics.jsonl."""
    try:
        line = json.loads(path.read_text(encoding="utf-8").rpartition("\n")[0].rpartition("\n")[2])
        return line if isinstance(line, dict) else {}
    except (OSError, ValueError):
        return {}
