"""The training loop of every modality: batches, steps, log lines, validation, checkpoints, signals.

Every random draw follows from (seed, rank, step, part) or (seed, epoch, row), so a run is reproducible and continues
without stored random states.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmclip import distributed
from mmclip.data.loading import ReaderDied
from mmclip.distributed import fsdp
from mmclip.errors import UserError
from mmclip.evaluation.results import Results
from mmclip.io import write_text_atomically
from mmclip.losses import schedule
from mmclip.training import monitors
from mmclip.training.checkpoint import FORMAT, check_run, restore, save_checkpoint
from mmclip.training.log import RunLog
from mmclip.training.monitors import Monitors
from mmclip.training.signals import Interrupted, SignalHandler
from mmclip.training.step import NotFinite, TrainStep
from mmclip.training.task import Batch, Task

ALARM = 1000  # reason to stop that is no signal number: an alarm under --strict
PATIENCE = 100  # steps in a row without a sample after which the data count as lost


class Trainer:
    """One run: :meth:`train` takes all steps that are left; ``step`` counts those behind it."""

    handler: SignalHandler

    def __init__(self, task: Task, folder: Path) -> None:
        self.task, self.config, self.folder = task, task.config, folder
        self.rank, self.ranks = distributed.world()
        self.stepper, self.monitors, self.log = TrainStep(task), Monitors(task), RunLog()
        self.step, self.saved = 0, -1  # saved: the step of the newest checkpoint
        self.taken = 0  # steps that had samples to learn from
        self.passed_over = 0  # steps in a row that had none
        self.reason = 0  # to stop: a signal's number, or ALARM
        self.waited = 0.0  # seconds for batches
        self.pending: dict[str, Any] = {}  # the line of a step whose validation a signal ended
        self._seconds, self._since = 0.0, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time since the first step, all attempts together."""
        return self._seconds + time.perf_counter() - self._since

    def train(self) -> int:
        """Take the steps that are left; returns 0, or the number of the signal after which the run was saved.

        Raises:
            UserError: The run cannot go on: a loss that is not finite, an alarm under --strict, no samples, no space.
        """
        folder = self.folder if self.rank == 0 else None
        self.log = RunLog(folder, self.task.total_steps, self.step, self.config.report_to == "tensorboard")
        try:
            with SignalHandler() as self.handler:
                self._steps()
            self.save()
        except ReaderDied as error:
            if not self.config.fsdp:  # where a share alone is no checkpoint, and the others do not know
                self._keep()
            kept = "the newest checkpoint" if self.config.fsdp else "what was trained"
            raise UserError(f"step {self.step + 1}: {error}; {kept} is kept for --resume latest") from None
        finally:
            self.log.close()
        if self.reason == ALARM:
            first = next(iter(self.monitors.raised.values()), "another process raised it")
            raise UserError(f"step {self.step}: alarm (--strict): {first}")
        if self.reason == 0 and self.taken == 0:
            raise monitors.no_samples(self.step, self.step, self.task.bad_samples.reasons)
        return self.reason

    def _steps(self) -> None:
        """Take all steps that are left, or those before a reason to stop."""
        task, per_epoch = self.task, self.task.steps_per_epoch
        consumed, since, note = 0, time.perf_counter(), ""
        if distributed.largest([len(self.pending)], task.device)[0]:
            self.validate(self.pending)
        for batch, complete in self._remaining_batches():
            first, last, self.step = self.step == 0, self.step + 1 == task.total_steps, self.step + 1
            due = first or last or self.step % self.config.log_every_n_steps == 0
            # Encoders take no empty batch: where a rank could read no sample all ranks pass the step over
            line = self._take(batch, due) if complete else self._pass_over()
            for text in schedule.describe(self.step, line):
                self.log.say(text)
            consumed += len(batch.keys) * self.ranks
            if "loss" in line:
                elapsed = time.perf_counter() - since
                rate = consumed / elapsed
                line |= {"epoch": (self.step - 1) // per_epoch, f"{task.unit}_per_second": rate}
                line["data_wait"] = self.waited / elapsed
                norms = "  ".join(f"|{side}| {line[f'norm_{side}_mean']:.3g}" for side in task.sides)
                note = f"loss {line['loss']:.3f}  {norms}  {rate:.0f}/s"
                self._alarm(self.monitors.training(self.step, line, elapsed), line)
                consumed, since, self.waited = 0, time.perf_counter(), 0.0
            self.log.show(self.step, note)
            paused = time.perf_counter()
            if task.validation_queries and (task.validates_last if last else self.step % task.val_steps == 0):
                self.validate(line)
            else:
                self.log.write(self.step, line)
            if self.step % (self.config.save_steps or per_epoch) == 0 and not last and not self.passed_over:
                self.save()
            since += time.perf_counter() - paused  # validation and saving are not training speed
        self.reason = self.reason or distributed.largest([self._stop()], task.device)[0]

    def _remaining_batches(self) -> Iterator[tuple[Batch, bool]]:
        per_epoch, total = self.task.steps_per_epoch, self.task.total_steps
        while self.step < total and not self.reason:
            epoch, start = divmod(self.step, per_epoch)
            for batch in self.batches(epoch, start):
                yield batch
                if self.step == total:
                    return
            if self.step != (epoch + 1) * per_epoch and not self.reason:
                raise UserError(f"epoch {epoch + 1} ended after {self.step - epoch * per_epoch} of {per_epoch} steps")

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Batch, bool]]:
        """Batches of an epoch until a process has a ``reason`` to stop, and whether all ranks have samples in theirs.

        Bad samples of all ranks are counted on all ranks (UserError: more than the limit); ``waited`` is measured.
        """
        task, iterator = self.task, iter(self.task.batches(epoch, start))
        while True:
            before = time.perf_counter()
            try:
                batch = next(iterator, None)
            except ReaderDied:  # by a signal to the whole group: this process stops as the others do
                if not self.handler.signum:
                    raise
                self.reason = distributed.largest([self._stop(), 0, 0], task.device)[0]
                return
            if batch is None:
                return
            self.waited += time.perf_counter() - before
            new = any(sample.key not in task.bad_samples.reasons for sample in batch.bad)
            mine = [self._stop(), int(new), int(len(batch.keys) == 0)]
            self.reason, bad, empty = distributed.largest(mine, task.device)
            if self.reason:
                return
            for samples in distributed.gather_objects(batch.bad) if bad else ():
                for text in task.bad_samples.add(samples):
                    self.log.say(text)
            yield batch, not empty

    def _stop(self) -> int:
        return ALARM if self.config.strict and self.monitors.raised else self.handler.signum

    def _pass_over(self) -> dict[str, Any]:
        """A step without a sample. Raises: UserError: Too many in a row."""
        self.passed_over += 1
        if self.passed_over >= PATIENCE:
            last, self.step = self.step, self.step - self.passed_over  # those steps changed nothing
            self._keep()
            raise monitors.no_samples(PATIENCE, last, self.task.bad_samples.reasons)
        return {"passed_over": True}

    def _take(self, batch: Batch, log: bool) -> dict[str, Any]:
        """The step that ``self.step`` counts already. Raises: UserError: Its loss or gradient is not finite."""
        try:
            numbers = self.stepper.run(batch, self.step - 1, log)
        except NotFinite as error:
            self.step -= 1  # not taken: the state is that of the step before
            path = self.folder / f"not_finite_step_{error.facts['step']}.json"
            if self.rank == 0:
                write_text_atomically(path, json.dumps(error.facts, indent=1))
            if kept := not error.facts["parameters_not_finite"]:
                self._keep(more=1)  # of a run that went wrong the last state may not be the best
            raise monitors.not_finite(error.facts, path, kept) from None
        self.taken, self.passed_over = self.taken + 1, 0
        return numbers

    def _alarm(self, alarms: list[tuple[str, str]], line: dict[str, Any]) -> None:
        for name, text in alarms:
            line.setdefault("alarms", {})[name] = text
            self.log.say(f"alarm, step {self.step}: {text}")

    def validate(self, line: dict[str, Any]) -> None:
        """Validate into ``line``, which is written; rank 0 works, others wait.

        A signal ends it, since the time is needed to save; the continuation begins with it.
        """
        task, self.pending = self.task, {}
        try:
            with fsdp.filled(task.network, task.encoder), self.handler.interruptible():
                if self.rank == 0:
                    numbers = task.validate(task.loss.similarity.exponents)
                    line |= numbers
                    native, cosine = (
                        "  ".join(f"{d} {numbers[f'val_{d}_{task.metric}_{s}']:.3f}" for d in task.validation_queries)
                        for s in ("native", "cosine")
                    )
                    self.log.say(f"step {self.step}: validation {task.metric}  {native}   by cosine  {cosine}")
                    self._alarm(self.monitors.validation(numbers), line)
            self.log.write(self.step, line)
        except Interrupted:
            self.pending = {"step": self.step, **line}
            self.log.say(f"step {self.step}: validation ended by {signal.Signals(self.handler.signum).name}")
        distributed.barrier()

    def evaluate(self) -> Iterator[tuple[str, Results]]:
        """Results of the trained model by folder of the run, with the run's alarms; "" is its own, the last one.

        Raises alarms of its own where no validation followed the last step.
        """
        for folder, results in self.task.evaluate(self.step, self.seconds):
            if not folder and not self.task.validates_last:
                rates, metric = results.json["retrieval"], self.task.metric
                of = [(d, scoring) for d in self.task.validation_queries for scoring in ("native", "cosine")]
                numbers = {f"val_{d}_{metric}_{scoring}": rates[d][scoring][metric] for d, scoring in of}
                for _, text in self.monitors.validation(numbers):
                    print(f"alarm: {text}", file=sys.stderr)
            results.json["alarms"] = dict(self.monitors.raised)
            yield folder, results

    def state(self) -> dict[str, Any]:
        """Everything that a continuation needs, as tensors and plain values.

        Locked weights are left out: they are rebuilt from their source and recognized by fingerprints. With --fsdp all
        ranks call it together, and rank 0 gets whole tensors.
        """
        task = self.task
        encoder = {k: v for k, v in task.encoder.state_dict().items() if k not in task.locked}
        counts = {"step": self.step, "taken": self.taken, "seconds": self.seconds, "ranks": self.ranks}
        tensors = {"encoder": encoder, "optimizer": self.stepper.optimizer.state_dict()}
        return {
            "format": FORMAT,
            **counts,
            **fsdp.gathered(tensors),
            "loss": task.loss.state_dict(),
            "settings": self.config.to_dict(),
            "fingerprints": task.fingerprints,
            "bad_samples": dict(task.bad_samples.reasons),
            "monitors": self.monitors.state_dict(),
            "pending": self.pending,
        }

    def save(self) -> None:
        """Save a checkpoint, with the lines of metrics.jsonl before it on the disk."""
        if self.saved != self.step:
            self.log.flush()
            self._keep()
        self.saved = self.step
        distributed.barrier()

    def _keep(self, more: int = 0) -> None:
        """Save a checkpoint without waiting for other processes (with --fsdp by all), and ``more`` earlier ones."""
        state = self.state() if self.rank == 0 or self.config.fsdp else {}
        if self.rank == 0:
            save_checkpoint(self.folder / "checkpoints", self.step, state, self.config.keep_checkpoints + more)

    def resume(self, state: dict[str, Any], path: Path) -> None:
        """Continue from a checkpoint that ``check_settings`` has passed. Raises: UserError: It is not this run's."""
        check_run(state, path, self.task.fingerprints, self.task.total_steps)
        restore(state, path, self.stepper)
        self.step = self.saved = state["step"]
        self.taken, self._seconds, self.pending = state["taken"], state["seconds"], state["pending"]
        self.task.bad_samples.load(state["bad_samples"])
        self.monitors.load_state_dict(state["monitors"])
