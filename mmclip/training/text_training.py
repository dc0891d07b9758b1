"""What happens between the steps of a text run: lines, alarms, checkpoints, a look at the held-out queries, signals.

A checkpoint is complete or not there: it gets its name last. Every random draw follows from (seed, rank, step) or
(seed, epoch), so a run goes on from one as if it had never stopped, without stored random states. What the rules of
the alarms remember is read back from metrics.jsonl.
"""

from __future__ import annotations

import json
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerState

from mmclip import distributed
from mmclip.config import TextTrainConfig
from mmclip.data.beir import BeirCollection
from mmclip.errors import UserError
from mmclip.evaluation.eval_set import text_set
from mmclip.evaluation.evaluate import quick_rates
from mmclip.losses.sentence_transformers import RoleRankingLoss
from mmclip.models.text_encoder import TextEncoder
from mmclip.similarity import Direction, Exponents
from mmclip.training.log import METRICS, RunLog
from mmclip.training.monitors import TEXT_ADVICE, Alarm, Alarms
from mmclip.training.signals import Cut, Interrupts
from mmclip.training.text_trainer import TextTrainer, progress_of

ALARM = 1000  # why a run stops, where it is no signal's number: an alarm under --strict
WATCHED = "ndcg@10"


@torch.no_grad()
def exponents_of(loss: RoleRankingLoss) -> Exponents:
    return Exponents(*(float(g) for g in loss.loss.similarity.exponents))


class Run(TrainerCallback):
    """What happens between the steps: lines, alarms, checkpoints, a look at the held-out queries, signals."""

    def __init__(
        self,
        settings: TextTrainConfig,
        folder: Path,
        model: TextEncoder,
        trainer: TextTrainer,
        held_out: BeirCollection | None,
        steps_per_epoch: int,
        checkpoint: Path | None,
        negatives: int = 0,
    ) -> None:
        """negatives: hard ones of a pair."""
        self.settings, self.folder, self.model, self.trainer = settings, folder, model, trainer
        self.held_out, self.per_epoch, self.checkpoint = held_out, steps_per_epoch, checkpoint
        self.negatives = negatives
        self.loss = trainer.role_loss
        self.rank, self.ranks = distributed.world()
        self.total = trainer.args.max_steps
        progress = progress_of(checkpoint, self.ranks) if checkpoint else {}
        self.step: int = progress.get("step", 0)
        self.saved = self.step
        self.before: float = progress.get("seconds", 0.0)
        self.since = time.perf_counter()
        self.alarms, self.told = self._alarms(), list[Alarm]()
        self.seen, self.line_since = 0, time.perf_counter()
        self.why = 0
        self.numbers: dict[str, float] = {}  # of the step's line
        self.rate = 0.0
        self.loss.loss.register_forward_hook(self._measure, with_kwargs=True)
        trainer.add_callback(self)

    @property
    def seconds(self) -> float:
        """Of training, all attempts together."""
        return self.before + time.perf_counter() - self.since

    def train(self) -> int:
        """Go on to the last step. Returns 0, or the signal's number after which the run was saved and left. Errors:
        UserError for a loss that is not finite, an alarm under --strict, no space."""
        self.log = RunLog(self.folder if self.rank == 0 else None, self.total, self.step, tensorboard=False)
        try:
            with Interrupts() as self.interrupts:
                start = str(self.checkpoint) if self.checkpoint else None
                if start:
                    self.trainer._load_from_checkpoint(start)
                self._catch_up()
                if not self.why and self.step < self.total:
                    with warnings.catch_warnings():  # accelerate's call of DistributedDataParallel
                        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
                        self.trainer.train(resume_from_checkpoint=start)
        finally:
            self.log.close()
        if self.why == ALARM:
            first = self.told[0].text if self.told else "another process tells it"
            raise UserError(f"step {self.step}: alarm (--strict): {first}")
        return self.why

    # --- what the trainer calls -----------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self.line_since = time.perf_counter()

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self.trainer.batches.set_epoch(state.global_step // self.per_epoch)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        seeds = np.random.SeedSequence((self.settings.seed, self.rank, state.global_step))
        torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0] >> 1))

    def on_optimizer_step(self, args: Any, state: TrainerState, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.loss.clamp_scale()
        self.rate = optimizer.param_groups[0]["lr"]

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self.step = state.global_step
        self.seen += self.settings.batch_size * self.ranks
        last, note = self.step == self.total, ""
        if self.step == 1 or last or self.step % self.settings.log_every_n_steps == 0:
            note = self._write_line()
        self.log.show(self.step, note)
        paused = time.perf_counter()
        stop = self._agreed()
        if stop or last or self.step % (self.settings.save_steps or self.per_epoch) == 0:
            self._save()
        if not stop and self._watch_due():
            self._watch()
            stop = self._agreed()
        self.line_since += time.perf_counter() - paused  # saving and looking are not training speed
        if stop:
            self._save()
            self.why = stop
            control.should_training_stop = True

    # --- lines ----------------------------------------------------------------------------------------------------

    def _alarms(self) -> Alarms:
        settings = self.settings
        weights = {d.value: w for d, w in self.loss.loss.weights.items()}
        return Alarms(
            # d2q has no candidates but the batch's own
            batch=settings.batch_size * self.ranks * (1 + self.negatives) ** weights.get(Direction.Q2D.value, 0.0),
            weights=weights,
            learned=settings.norm == "learned" and settings.gamma_lr > 0,
            gamma_init=settings.gamma_init,
            scale_max=settings.logit_scale_max,
            warmup=self.trainer.args.get_warmup_steps(self.total),
            total_steps=self.total,
            queries={Direction.Q2D.value: len(self.held_out.queries)} if self.held_out else {},
            metric=WATCHED,
            watched=[Direction.Q2D.value] if self.held_out else [],
            advice=TEXT_ADVICE,
        )

    @torch.no_grad()
    def _measure(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep what a step's line says of its global batch; forward hook of the loss over raw rows."""
        self.numbers = {f"loss_{d.value}": float(value) for d, value in output.by_direction.items()}
        self.numbers |= {f"norm_{side}_mean": float(lengths.mean()) for side, lengths in output.lengths.items()}

    @torch.no_grad()
    def _write_line(self) -> str:
        similarity = self.loss.loss.similarity
        gamma_q, gamma_d = exponents_of(self.loss)
        elapsed = time.perf_counter() - self.line_since
        line: dict[str, Any] = {"epoch": (self.step - 1) // self.per_epoch, "loss": float(self.trainer.step_loss)}
        line |= self.numbers
        for direction in self.loss.loss.trained:
            line[f"logit_scale_{direction.value}"] = float(similarity.scale(direction))
            line[f"effective_scale_{direction.value}"] = similarity.effective_scale(direction)
        line |= {"gamma_q": gamma_q, "gamma_d": gamma_d, "lr": self.rate, "pairs_per_second": self.seen / elapsed}
        self._tell(self.alarms.training(self.step, line, elapsed), line)
        self.log.write(self.step, line)
        self.seen, self.line_since = 0, time.perf_counter()
        return (
            f"loss {line['loss']:.3f}  |query| {line['norm_query_mean']:.3g}  |document| "
            f"{line['norm_document_mean']:.3g}  {line['pairs_per_second']:.0f}/s"
        )

    def _tell(self, alarms: list[Alarm], line: dict[str, Any]) -> None:
        for alarm in alarms if self.rank == 0 else []:
            self.told.append(alarm)
            line.setdefault("alarms", {})[alarm.name] = alarm.text
            self.log.say(f"alarm, step {self.step}: {alarm.text}")

    def _agreed(self) -> int:
        """Why to stop, or 0: the processes' common answer."""
        mine = ALARM if self.settings.strict and self.told else self.interrupts.signum
        return distributed.largest([mine], self.trainer.args.device)[0]

    def _save(self) -> None:
        if self.saved != self.step:
            self.log.flush()
            if self.rank == 0:
                progress = {"step": self.step, "seconds": self.seconds, "ranks": self.ranks}
                self.trainer.save_checkpoint(progress)
        self.saved = self.step
        distributed.barrier()

    # --- the held-out queries -------------------------------------------------------------------------------------

    def _watch_due(self) -> bool:
        every = self.settings.watch_steps or self.per_epoch
        return self.held_out is not None and (self.step % every == 0 or self.step == self.total)

    def _watch(self) -> None:
        """Native and cosine on the held-out queries, a line of its own. Rank 0 works, others wait; a signal ends it,
        the continuation looks again."""
        try:
            with self.interrupts.cutting():
                if self.rank == 0 and self.held_out is not None:
                    query = self.model.encode(self.held_out.queries, "query", self.settings.encode_batch_size, False)
                    document = self.model.encode(
                        self.held_out.documents, "document", self.settings.encode_batch_size, False
                    )
                    data, rates = text_set(self.held_out, query, document), ("ndcg@10", "success@1")
                    found = quick_rates(data, exponents_of(self.loss), [Direction.Q2D], rates)
                    line: dict[str, Any] = {"epoch": (self.step - 1) // self.per_epoch, **found}
                    by = {s: f"{found[f'val_q2d_{WATCHED}_{s}']:.3f}" for s in ("native", "cosine")}
                    self.log.say(
                        f"step {self.step}: held-out queries, {WATCHED} {by['native']}   by cosine {by['cosine']}"
                    )
                    self._tell(self.alarms.validation(line), line)
                    self.log.write(self.step, line)
        except Cut:
            name = signal.Signals(self.interrupts.signum).name
            self.log.say(f"step {self.step}: the look at the held-out queries ended by {name}")
        distributed.barrier()

    def _catch_up(self) -> None:
        """The lines before the checkpoint through the rules once more, so that what is told is not told again; then a
        look that was due when the run was left."""
        path, looked = self.folder / METRICS, False
        for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            line = json.loads(text)
            trained = "loss" in line
            self.told += self.alarms.training(line["step"], line, 0.0) if trained else self.alarms.validation(line)
            looked = looked or (not trained and line["step"] == self.step)
        self.why = self._agreed()
        mine = int(self.rank == 0 and self.step > 0 and self._watch_due() and not looked)
        if not self.why and distributed.largest([mine], self.trainer.args.device)[0]:
            self._watch()
            self.why = self._agreed()
