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

import torch

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
from mmclip.training.monitors import Alarm, Monitors
from mmclip.training.signals import Interrupted, SignalHandler
from mmclip.training.step import NotFinite, TrainStep
from mmclip.training.task import Batch, Task

ALARM = 1000  # reason to stop that is no signal number: an alarm under --strict
PATIENCE = 100  # steps in a row without a sample after which the data count as lost


class Trainer:
    """One run: :meth:`train` takes all steps that are left; ``step`` counts those behind it."""

    def __init__(self, task: Task, folder: Path) -> None:
        self.task, self.config, self.folder = task, task.config, folder
        self.rank, self.ranks = distributed.world()
        self.stepper = TrainStep(task)
        self.step, self.saved = 0, -1  # saved: the step of the newest checkpoint
        self.taken = 0  # steps that had samples to learn from
        self.passed_over = 0  # steps in a row that had none
        self.monitors = self._monitors()
        self.pending: dict[str, Any] = {}  # the line of a step whose validation a signal ended
        self._seconds, self._since = 0.0, time.perf_counter()

    def _monitors(self) -> Monitors:
        config, task = self.config, self.task
        learned = config.norm == "learned" and config.gamma_lr > 0
        gamma_q, gamma_d = (float(torch.as_tensor(g).detach()) for g in task.loss.similarity.exponents)
        return Monitors(
            candidates=task.candidates,
            trained=[d.value for d in task.loss.trained],
            gamma_init=(gamma_q, gamma_d) if learned else None,
            scale_max=config.logit_scale_max,
            warmup=task.warmup,
            total_steps=task.total_steps,
            queries=task.validation_queries,
            metric=task.metric,
            advice=task.advice,
        )

    @property
    def seconds(self) -> float:
        """Time since the first step, all attempts together."""
        return self._seconds + time.perf_counter() - self._since

    # --- the run --------------------------------------------------------------------------------------------------

    def train(self) -> int:
        """Take the steps that are left.

        Returns:
            0, or the number of the signal after which the run was saved and left.

        Raises:
            UserError: The run cannot go on: a loss that is not finite, an alarm under --strict, no samples, no space.
        """
        folder = self.folder if self.rank == 0 else None
        log = RunLog(folder, self.task.total_steps, self.step, self.config.report_to == "tensorboard")
        try:
            with SignalHandler() as handler:
                try:
                    reason = self._steps(log, handler)
                except ReaderDied:  # by a signal to the whole group: this process stops as the others do
                    if not handler.signum:
                        raise
                    reason = distributed.largest([self._stop(handler), 0, 0], self.task.device)[0]
            self.save(log)
        except ReaderDied as error:
            if not self.config.fsdp:  # where a share alone is no checkpoint, and the others do not know
                self._keep()
            kept = "the newest checkpoint" if self.config.fsdp else "what was trained"
            raise UserError(f"step {self.step + 1}: {error}; {kept} is kept for --resume latest") from None
        finally:
            log.close()
        if reason == ALARM:
            first = next(iter(self.monitors.raised.values()), "another process raised it")
            raise UserError(f"step {self.step}: alarm (--strict): {first}")
        if reason == 0 and self.taken == 0:
            raise monitors.no_samples(self.step, self.step, self.task.bad_samples.reasons)
        return reason

    def _steps(self, log: RunLog, handler: SignalHandler) -> int:
        """Take all steps that are left; the reason why they ended before the last one, else 0."""
        task, config, per_epoch = self.task, self.config, self.task.steps_per_epoch
        save_steps = config.save_steps or per_epoch
        consumed, since, waited, note = 0, time.perf_counter(), 0.0, ""
        if distributed.largest([len(self.pending)], task.device)[0]:
            self.validate(self.pending, log, handler)
        for batch, wait in self._remaining_batches():
            waited += wait
            stop, bad, empty = self.agreed(batch, handler)
            if stop:
                return stop
            for text in self.note_bad(batch) if bad else ():
                log.say(text)
            first, last, self.step = self.step == 0, self.step + 1 == task.total_steps, self.step + 1
            due = first or last or self.step % config.log_every_n_steps == 0
            # Encoders take no empty batch: where a rank could read no sample all ranks pass the step over
            line = self._pass_over() if empty else self._take(batch, due)
            for text in schedule.describe(self.step, line) if self.rank == 0 else ():
                log.say(text)
            consumed += len(batch.keys) * self.ranks
            if "loss" in line:
                elapsed = time.perf_counter() - since
                rate = consumed / elapsed
                line |= {"epoch": (self.step - 1) // per_epoch, f"{task.unit}_per_second": rate}
                line["data_wait"] = waited / elapsed
                norms = "  ".join(f"|{side}| {line[f'norm_{side}_mean']:.3g}" for side in task.sides)
                note = f"loss {line['loss']:.3f}  {norms}  {rate:.0f}/s"
                self._alarm(self.monitors.training(self.step, line, elapsed), line, log)
                consumed, since, waited = 0, time.perf_counter(), 0.0
            log.show(self.step, note)
            paused = time.perf_counter()
            if self._validation_due(last):
                self.validate(line, log, handler)
            else:
                log.write(self.step, line)
            if self.step % save_steps == 0 and not last and not self.passed_over:
                self.save(log)
            since += time.perf_counter() - paused  # validation and saving are not training speed
        return distributed.largest([self._stop(handler)], task.device)[0]

    def _validation_due(self, last: bool) -> bool:
        if not self.task.validation_queries:
            return False
        return self.task.validates_last if last else self.step % self.task.val_steps == 0

    def _remaining_batches(self) -> Iterator[tuple[Batch, float]]:
        """Batches from the current step to the last, each with the seconds that it was waited for."""
        per_epoch, total = self.task.steps_per_epoch, self.task.total_steps
        while self.step < total:
            epoch, start = divmod(self.step, per_epoch)
            iterator = iter(self.task.batches(epoch, start))
            while self.step < total:
                before = time.perf_counter()
                batch = next(iterator, None)
                if batch is None:
                    break
                yield batch, time.perf_counter() - before
            if self.step != (epoch + 1) * per_epoch and self.step < total:
                raise UserError(f"epoch {epoch + 1} ended after {self.step - epoch * per_epoch} of {per_epoch} steps")

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
            path, kept = self.folder / f"not_finite_step_{error.facts['step']}.json", False
            if self.rank == 0:
                write_text_atomically(path, json.dumps(error.facts, indent=1))
            if not error.facts["parameters_not_finite"]:
                self._keep(more=1)  # of a run that went wrong the last state may not be the best
                kept = True
            raise monitors.not_finite(error.facts, path, kept) from None
        except torch.OutOfMemoryError as error:
            raise monitors.out_of_memory(self.step, self.config.batch_size, self.task.advice, error) from None
        self.taken += 1
        self.passed_over = 0
        return numbers

    # --- what the processes agree on ------------------------------------------------------------------------------

    def agreed(self, batch: Batch, handler: SignalHandler) -> tuple[int, bool, bool]:
        """(reason to stop or 0, whether a rank has new bad samples, whether a rank's batch is empty)."""
        new = any(sample.key not in self.task.bad_samples.reasons for sample in batch.bad)
        mine = [self._stop(handler), int(new), int(len(batch.keys) == 0)]
        stop, bad, empty = distributed.largest(mine, self.task.device)
        return stop, bool(bad), bool(empty)

    def _stop(self, handler: SignalHandler) -> int:
        return ALARM if self.config.strict and self.monitors.raised else handler.signum

    def note_bad(self, batch: Batch) -> list[str]:
        """Count all ranks' bad samples on all ranks; lines for rank 0. Raises: UserError: More than the limit."""
        lines = [line for bad in distributed.gather_objects(batch.bad) for line in self.task.bad_samples.add(bad)]
        return lines if self.rank == 0 else []

    def _alarm(self, alarms: list[Alarm], line: dict[str, Any], log: RunLog) -> None:
        for alarm in alarms if self.rank == 0 else []:
            line.setdefault("alarms", {})[alarm.name] = alarm.text
            log.say(f"alarm, step {self.step}: {alarm.text}")

    # --- validation and results -----------------------------------------------------------------------------------

    def validate(self, line: dict[str, Any], log: RunLog, handler: SignalHandler) -> None:
        """Validate into ``line``, which is written; rank 0 works, others wait.

        A signal ends it, since the time is needed to save; the continuation begins with it.
        """
        self.pending = {}
        try:
            with fsdp.filled(self.task.network, self.task.encoder), handler.interruptible():
                if self.rank == 0:
                    numbers = self.task.validate(self.task.loss.similarity.exponents)
                    line |= numbers
                    values = {
                        scoring: "  ".join(
                            f"{d} {numbers[f'val_{d}_{self.task.metric}_{scoring}']:.3f}"
                            for d in self.task.validation_queries
                        )
                        for scoring in ("native", "cosine")
                    }
                    log.say(
                        f"step {self.step}: validation {self.task.metric}  {values['native']}   by cosine  "
                        f"{values['cosine']}"
                    )
                    self._alarm(self.monitors.validation(numbers), line, log)
            log.write(self.step, line)
        except Interrupted:
            self.pending = {"step": self.step, **line}
            log.say(f"step {self.step}: validation ended by {signal.Signals(handler.signum).name}")
        distributed.barrier()

    def evaluate(self) -> Iterator[tuple[str, Results]]:
        """Results of the trained model by folder of the run, with the run's alarms; "" is its own, the last one.

        Raises alarms of its own where no validation followed the last step.
        """
        for folder, results in self.task.evaluate(self.step, self.seconds):
            if not folder and not self.task.validates_last:
                retrieval = results.json["retrieval"]
                numbers = {
                    f"val_{d}_{self.task.metric}_{scoring}": retrieval[d][scoring][self.task.metric]
                    for d in self.task.validation_queries
                    for scoring in ("native", "cosine")
                }
                for alarm in self.monitors.validation(numbers):
                    print(f"alarm: {alarm.text}", file=sys.stderr)
            results.json["alarms"] = dict(self.monitors.raised)
            yield folder, results

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that a continuation needs, as tensors and plain values.

        Locked weights are left out: they are rebuilt from their source and recognized by fingerprints. With --fsdp all
        ranks call it together, and rank 0 gets whole tensors.
        """
        locked = self.task.locked_names()
        encoder = {k: v for k, v in self.task.encoder.state_dict().items() if k not in locked}
        return {
            "format": FORMAT,
            "step": self.step,
            "taken": self.taken,
            "seconds": self.seconds,
            "ranks": self.ranks,
            "encoder": fsdp.gathered(encoder),
            "loss": self.task.loss.state_dict(),
            "optimizer": fsdp.gathered(self.stepper.optimizer.state_dict()),
            "settings": self.config.to_dict(),
            "fingerprints": self.task.fingerprints,
            "bad_samples": dict(self.task.bad_samples.reasons),
            "monitors": self.monitors.state_dict(),
            "pending": self.pending,
        }

    def save(self, log: RunLog) -> None:
        """Save a checkpoint, with the lines of metrics.jsonl before it on the disk."""
        if self.saved != self.step:
            log.flush()
            self._keep()
        self.saved = self.step
        distributed.barrier()

    def _keep(self, more: int = 0) -> None:
        """Save a checkpoint without waiting for other processes (with --fsdp: by all of them).

        Args:
            more: Checkpoints kept beyond --keep-checkpoints.
        """
        state = self.state() if self.rank == 0 or self.config.fsdp else {}
        if self.rank == 0:
            save_checkpoint(self.folder / "checkpoints", self.step, state, self.config.keep_checkpoints + more)

    def resume(self, state: dict[str, Any], path: Path) -> None:
        """Continue from a checkpoint that ``check_settings`` has passed.

        Raises:
            UserError: Data or locked weights have changed, or the tensors are not this run's.
        """
        task = self.task
        check_run(state, path, task.fingerprints, task.total_steps)
        restore(state, path, task.encoder, task.loss, self.stepper.optimizer, task.locked_names(),
                task.partial_gradients)  # fmt: skip
        self.step = self.saved = state["step"]
        self.taken, self._seconds = state["taken"], state["seconds"]
        task.bad_samples.load(state["bad_samples"])
        self.monitors.load_state_dict(state["monitors"])
        self.pending = state["pending"]
