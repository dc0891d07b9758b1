"""The training loop: batches in, steps taken, lines logged, validation, checkpoints. No mathematics lives here.

Every random draw follows from (seed, rank, step, part) or (seed, epoch, row), so a run is reproducible and resumes
without stored random states.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mmclip import distributed
from mmclip.config import TrainConfig
from mmclip.data.loading import Batch, ReaderDied
from mmclip.distributed import fsdp as sharding
from mmclip.embeddings.encode import Runner
from mmclip.embeddings.features import Source
from mmclip.errors import UserError
from mmclip.evaluation.eval_set import EvalSource, image_text_sets
from mmclip.evaluation.evaluate import quick_rates
from mmclip.io import write_text_atomically
from mmclip.losses import schedule as curriculum
from mmclip.models.factory import ClipModel
from mmclip.similarity import CLIP_DIRECTIONS
from mmclip.training import checkpoint as checkpoints
from mmclip.training import failures, resume
from mmclip.training.log import RunLog
from mmclip.training.monitors import Alarm, Alarms
from mmclip.training.optimizer import steps_in_all, warmup_steps
from mmclip.training.signals import Cut, Interrupts
from mmclip.training.skipped import Skipped
from mmclip.training.step import NotFinite, Stepper, build_loss, initial_gammas

ALARM = 1000  # why a run stops, where it is no signal's number: an alarm under --strict
PATIENCE = 100  # steps without a picture after which the data are taken for lost


class Trainer:
    """One run: ``train()`` goes to its end; ``step`` counts optimizer steps done."""

    def __init__(
        self,
        settings: TrainConfig,
        folder: Path,
        model: ClipModel,
        source: Source,
        val_source: EvalSource | None,
        runner: Runner,
    ) -> None:
        self.settings, self.folder = settings, folder
        self.source, self.val_source, self.runner = source, val_source, runner
        self.rank, self.ranks = distributed.world()
        self.device = runner.device
        self.towers = model.towers
        self.fingerprints = {
            "data": source.data.fingerprint(),
            **{f"{s} trunk": self.towers.trunk_fingerprint(s) for s, locked in self.towers.locked.items() if locked},
        }
        self.loss = build_loss(settings, model).to(self.device)
        self.stepper = Stepper(settings, model, self.loss, source, runner)
        self.model = self.stepper.model  # for one process to run while ``sharding.filled``
        self.batches = source.batches(settings, model, pin=self.device.type == "cuda")
        self.total_steps = steps_in_all(settings, self.batches.steps_per_epoch)
        self.warmup = warmup_steps(settings.warmup, self.total_steps)
        self.step, self.saved = 0, -1  # saved: the step of the newest checkpoint
        self.taken = 0  # steps that had pictures to learn from
        self.passed_over = 0  # steps in a row that had none
        self.skipped = Skipped(settings.max_bad_samples, source.skipped)
        self.alarms = self._alarms()
        self.told: list[Alarm] = []
        self.pending: dict[str, Any] = {}  # the line of a step whose validation a signal ended

    def _alarms(self) -> Alarms:
        val = self.val_source.main.data if self.val_source else None
        settings = self.settings
        return Alarms(
            batch=self.batches.joint,
            weights={d.value: float(d in self.loss.trained) for d in self.loss.weights},
            learned=settings.norm == "learned" and settings.gamma_lr > 0,
            gamma_init=initial_gammas(settings, self.model),
            scale_max=settings.logit_scale_max,
            warmup=self.warmup,
            total_steps=self.total_steps,
            queries={"i2t": len(val), "t2i": sum(len(c) for c in val.captions)} if val else {},
        )

    # --- the run --------------------------------------------------------------------------------------------------

    def train(self) -> int:
        """Go on to the last step. Returns 0, or the signal's number after which the run was saved and left. Errors:
        UserError where it cannot go on: a loss that is not finite, an alarm under --strict, no pictures, no space."""
        folder = self.folder if self.rank == 0 else None
        log = RunLog(folder, self.total_steps, self.step, self.settings.report_to == "tensorboard")
        try:
            with Interrupts() as interrupts:
                try:
                    why = self._steps(log, interrupts)
                except ReaderDied:  # by a signal to the whole group: this process answers it as the others do
                    if not interrupts.signum:
                        raise
                    why = distributed.largest([self._stop(interrupts), 0, 0], self.device)[0]
            self.save(log)
        except ReaderDied as error:
            if not self.settings.fsdp:  # where a share alone is no checkpoint, and the others do not know
                self._keep()
            kept = "the newest checkpoint" if self.settings.fsdp else "what was trained"
            raise UserError(f"step {self.step + 1}: {error}; {kept} is kept for --resume latest") from None
        finally:
            log.close()
        if why == ALARM:
            first = self.told[0].text if self.told else "another process tells it"
            raise UserError(f"step {self.step}: alarm (--strict): {first}")
        if why == 0 and self.taken == 0:
            raise failures.no_pictures(self.step, self.step, self.skipped.why)
        return why

    def _steps(self, log: RunLog, interrupts: Interrupts) -> int:
        """All steps that are left; why they ended before the last one, else 0."""
        settings, per_epoch = self.settings, self.batches.steps_per_epoch
        val_steps, save_steps = settings.val_steps or per_epoch, settings.save_steps or per_epoch
        seen, since, waited, note = 0, time.perf_counter(), 0.0, ""
        if distributed.largest([len(self.pending)], self.device)[0]:
            self.validate(self.pending, log, interrupts)
        for batch, wait in self._remaining_batches():
            waited += wait
            stop, news, empty = self.agreed(batch, interrupts)
            if stop:
                return stop
            for text in self.note_bad(batch) if news else ():
                log.say(text)
            first, self.step = self.step == 0, self.step + 1
            due = first or self.step % settings.log_every_n_steps == 0 or self.step == self.total_steps
            # where no picture of a rank could be read all ranks pass the step over: towers take no empty batch
            line = self._pass_over() if empty else self._take(batch, due)
            for text in curriculum.told(self.step, line) if self.rank == 0 else ():
                log.say(text)
            seen += len(batch.image_id) * self.ranks
            if "loss" in line:
                elapsed = time.perf_counter() - since
                line |= {
                    "epoch": (self.step - 1) // per_epoch,
                    "samples_per_second": seen / elapsed,
                    "data_wait": waited / elapsed,
                }
                note = (
                    f"loss {line['loss']:.3f}  |image| {line['norm_image_mean']:.3g}"
                    f"  |text| {line['norm_text_mean']:.3g}  {line['samples_per_second']:.0f}/s"
                )
                self._alarm(self.alarms.training(self.step, line, elapsed), line, log)
                seen, since, waited = 0, time.perf_counter(), 0.0
            log.show(self.step, note)
            paused = time.perf_counter()
            if self.val_source is not None and self.step % val_steps == 0 and self.step < self.total_steps:
                self.validate(line, log, interrupts)
            else:
                log.write(self.step, line)
            if self.step % save_steps == 0 and self.step < self.total_steps and not self.passed_over:
                self.save(log)
            since += time.perf_counter() - paused  # validation and saving are not training speed
        return distributed.largest([self._stop(interrupts)], self.device)[0]

    def _remaining_batches(self) -> Iterator[tuple[Batch, float]]:
        """Batches from where the run stands to its end, each with the seconds that it was waited for."""
        per_epoch = self.batches.steps_per_epoch
        while self.step < self.total_steps:
            epoch, start = divmod(self.step, per_epoch)
            iterator = iter(self.batches.batches(epoch, start))
            while self.step < self.total_steps:
                before = time.perf_counter()
                batch = next(iterator, None)
                if batch is None:
                    break
                yield batch, time.perf_counter() - before
            if self.step != (epoch + 1) * per_epoch and self.step < self.total_steps:
                raise UserError(f"epoch {epoch + 1} ended after {self.step - epoch * per_epoch} of {per_epoch} steps")

    def _pass_over(self) -> dict[str, Any]:
        """A step without a picture. Errors: UserError after many in a row: the data are gone."""
        self.passed_over += 1
        if self.passed_over >= PATIENCE:
            last, self.step = self.step, self.step - self.passed_over  # those steps changed nothing
            self._keep()
            raise failures.no_pictures(PATIENCE, last, self.skipped.why)
        return {"passed_over": True}

    def _take(self, batch: Batch, log: bool) -> dict[str, Any]:
        """The step that ``self.step`` already counts. Errors: UserError where its loss or gradient is not finite."""
        self.towers.train()
        self.loss.train()
        try:
            numbers = self.stepper.take(batch, self.step - 1, self.warmup, self.total_steps, log)
        except NotFinite as error:
            self.step -= 1  # not taken: the state is that of the step before
            known, kept = self.folder / f"not_finite_step_{error.facts['step']}.json", False
            if self.rank == 0:
                write_text_atomically(known, json.dumps(error.facts, indent=1))
            if not error.facts["parameters_not_finite"]:
                self._keep(beside=1)
                kept = True
            raise failures.not_finite(error.facts, known, kept) from None
        except torch.OutOfMemoryError as error:
            raise failures.out_of_memory(self.step, self.settings.batch_size, error) from None
        self.taken += 1
        self.passed_over = 0
        return numbers

    # --- what the processes must agree on --------------------------------------------------------------------------

    def agreed(self, batch: Batch, interrupts: Interrupts) -> tuple[int, bool, bool]:
        """(why to stop or 0, whether a rank has news of bad samples, whether a rank's batch is empty)."""
        news = any(s.key not in self.skipped.why for s in batch.bad)
        mine = [self._stop(interrupts), int(news), int(len(batch.image_id) == 0)]
        stop, told, empty = distributed.largest(mine, self.device)
        return stop, bool(told), bool(empty)

    def _stop(self, interrupts: Interrupts) -> int:
        return ALARM if self.settings.strict and self.told else interrupts.signum

    def note_bad(self, batch: Batch) -> list[str]:
        """Tell all ranks of all ranks' bad samples; lines for rank 0 to say. Errors: UserError above a limit."""
        lines = [line for bad in distributed.gather_objects(batch.bad) for line in self.skipped.add(bad)]
        return lines if self.rank == 0 else []

    def _alarm(self, alarms: list[Alarm], line: dict[str, Any], log: RunLog) -> None:
        for alarm in alarms if self.rank == 0 else []:
            self.told.append(alarm)
            line.setdefault("alarms", {})[alarm.name] = alarm.text
            log.say(f"alarm, step {self.step}: {alarm.text}")

    def validate(self, line: dict[str, Any], log: RunLog, interrupts: Interrupts) -> None:
        """Both directions on the validation data into ``line``, which is written; rank 0 works, others wait.
        A signal ends it, the time is needed to save; the continuation begins with it."""
        self.pending = {}
        try:
            with sharding.filled(self.model.towers, self.towers), interrupts.cutting():
                if self.rank == 0 and self.val_source is not None:
                    quiet = replace(self.runner, progress=False)
                    data = image_text_sets(self.val_source.embed(self.model, quiet, with_distractors=False))[0]
                    numbers = quick_rates(data, self.loss.similarity.exponents, CLIP_DIRECTIONS, ["success@1"])
                    line |= numbers
                    log.say(
                        f"step {self.step}: validation success@1  i2t {numbers['val_i2t_success@1_native']:.3f}  "
                        f"t2i {numbers['val_t2i_success@1_native']:.3f}   by cosine  "
                        f"{numbers['val_i2t_success@1_cosine']:.3f}  {numbers['val_t2i_success@1_cosine']:.3f}"
                    )
                    self._alarm(self.alarms.validation(numbers), line, log)
            log.write(self.step, line)
        except Cut:
            self.pending = {"step": self.step, **line}
            log.say(f"step {self.step}: validation ended by {signal.Signals(interrupts.signum).name}")
        distributed.barrier()

    # --- saving ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that a continuation needs, as tensors and plain values. Locked trunks are left out: they are
        rebuilt from where they came, and known by their fingerprints. With --fsdp all ask together, rank 0 gets it."""
        locked = self.towers.locked_names()
        return {
            "format": resume.FORMAT,
            "step": self.step,
            "taken": self.taken,
            "towers": sharding.gathered({k: v for k, v in self.towers.state_dict().items() if k not in locked}),
            "loss": self.loss.state_dict(),
            "optimizer": sharding.gathered(self.stepper.optimizer.state_dict()),
            "settings": self.settings.to_dict(),
            "fingerprints": self.fingerprints,
            "ranks": self.ranks,
            "skipped": dict(self.skipped.why),
            "alarms": {a.name: a.text for a in self.told},
            "pending": self.pending,
        }

    def save(self, log: RunLog) -> None:
        """A checkpoint of where the run stands, with the lines of metrics.jsonl before it safely on the disk."""
        if self.saved != self.step:
            log.flush()
            self._keep()
        self.saved = self.step
        distributed.barrier()

    def _keep(self, beside: int = 0) -> None:
        """A checkpoint, without a word to the other processes (with --fsdp by all of them); ``beside`` more than the
        newest are kept: of a run that went wrong the last state may not be the best."""
        state = self.state() if self.rank == 0 or self.settings.fsdp else {}
        if self.rank == 0:
            keep = self.settings.keep_checkpoints + beside
            checkpoints.save_checkpoint(self.folder / "checkpoints", self.step, state, keep)

    def resume(self, state: dict[str, Any], path: Path) -> None:
        """Continue from a checkpoint that ``resume.check`` has passed. Errors: UserError where data or locked weights
        have changed, or its tensors are not this run's."""
        resume.check_run(state, path, self.fingerprints, self.total_steps)
        resume.load(state, path, self.towers, self.loss, self.stepper.optimizer)
        self.step = self.saved = state["step"]
        self.taken = state["taken"]
        self.skipped = Skipped(self.settings.max_bad_samples, state["skipped"] | self.skipped.why)
        self.told = [Alarm(name, text) for name, text in state["alarms"].items()]
        self.alarms.raised |= set(state["alarms"])
        self.pending = state["pending"]
