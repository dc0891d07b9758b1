"""The training loop; no mathematics lives here.

batch -> towers (raw features) -> gather over ranks -> directional loss (roles, normalize, scores, cross-entropy) ->
gradients. Every random draw follows from (seed, rank, step), so a run is reproducible and resumes without stored
random states.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmclip import checkpoints, distributed
from mmclip.build import Model
from mmclip.config import TrainSettings
from mmclip.embeddings import Runner
from mmclip.errors import UsageError, one_line
from mmclip.eval_source import EvalSource
from mmclip.facts import main_direction
from mmclip.loader import Batch
from mmclip.losses import ContrastiveLoss, clip_loss
from mmclip.optimization import build_optimizer, learning_rate_factor, set_learning_rate, warmup_steps
from mmclip.runlog import RunLog
from mmclip.similarity import SCALE_INIT, Direction, magnitude
from mmclip.sources import Source

# Settings that may differ between a run and its continuation: they change what is written or how fast, not the result.
FREE_TO_CHANGE = {
    "resume",
    "logs",
    "name",
    "workers",
    "log_every_n_steps",
    "val_steps",
    "save_steps",
    "report_to",
    "compare",
    "device",
    "cache_dir",
    "torchcompile",
    "grad_checkpointing",
}


class Trainer:
    """One run: ``train()`` goes to its end; ``step`` counts optimizer steps done."""

    def __init__(
        self,
        settings: TrainSettings,
        folder: Path,
        model: Model,
        source: Source,
        val_source: EvalSource | None,
        runner: Runner,
    ) -> None:
        self.settings, self.folder, self.model, self.runner = settings, folder, model, runner
        self.source, self.val_source = source, val_source
        self.rank, self.ranks = distributed.world()
        self.device = device = runner.device
        self.towers = model.towers
        self.loss = build_loss(settings, model).to(device)
        self.network = self._wrap()
        self.optimizer = build_optimizer(self.towers, self.loss, settings)
        self.batches = source.batches(settings, model)
        self.total_steps = self.batches.steps_per_epoch * settings.epochs
        if settings.max_steps is not None:
            self.total_steps = min(self.total_steps, settings.max_steps)
        self.warmup = warmup_steps(settings.warmup, self.total_steps)
        self.step = 0
        self.bad: dict[str, str] = {}  # key -> where and why, of every sample that could not be read
        self.data_key = source.data.fingerprint()

    def _wrap(self) -> nn.Module:
        """Towers, then DDP, then compile: the order in which all three work."""
        network: nn.Module = self.towers
        if self.settings.grad_checkpointing:
            self.towers.clip.set_grad_checkpointing()
        if self.ranks > 1:
            network = nn.parallel.DistributedDataParallel(
                network, device_ids=[self.device] if self.device.type == "cuda" else None
            )
        if self.settings.torchcompile:
            network = torch.compile(network)  # type: ignore[assignment]
        return network

    # --- one step -------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Raw features of both sides, gathered over ranks."""
        images, image_from_trunk = self.source.inputs("image", batch, self.device)
        texts, text_from_trunk = self.source.inputs("text", batch, self.device)
        with self.runner.autocast():
            image, text = self.network(images, texts, image_from_trunk, text_from_trunk)
        return {"image": distributed.gather_rows(image.float()), "text": distributed.gather_rows(text.float())}

    def train_step(self, batch: Batch, log: bool) -> dict[str, float]:
        """One optimizer step; returns the numbers to log (none where ``log`` is False)."""
        torch.manual_seed(seed_of(self.settings.seed, self.rank, self.step))
        set_learning_rate(self.optimizer, learning_rate_factor(self.step, self.warmup, self.total_steps))
        self.optimizer.zero_grad(set_to_none=True)
        sides = self.forward(batch)
        image_id = distributed.gather_ids(batch.image_id.to(self.device))
        text_id = distributed.gather_ids(batch.text_id.to(self.device))
        out = self.loss(sides, image_id, text_id, untrained=log)
        if not torch.isfinite(out.loss):
            raise UsageError(
                f"step {self.step + 1}: the loss is {float(out.loss.detach())}; first samples of the batch: "
                f"{', '.join(one_line(k, 40) for k in batch.keys[:4])}. Try a lower --lr, --grad-clip-norm 1, or fp32"
            )
        out.loss.backward()
        distributed.average_([p.grad for p in self.loss.parameters() if p.grad is not None])
        numbers: dict[str, float] = {}
        if self.settings.grad_clip_norm is not None:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            numbers["grad_norm"] = float(nn.utils.clip_grad_norm_(parameters, self.settings.grad_clip_norm))
        self.optimizer.step()
        self.loss.similarity.clamp_()
        self.step += 1
        if log:
            numbers |= {"loss": float(out.loss.detach())}
            numbers |= {f"loss_{d.value}": float(v) for d, v in sorted(out.by_direction.items())}
            numbers |= self.state_numbers(sides)
        return numbers

    @torch.no_grad()
    def state_numbers(self, sides: dict[str, Tensor]) -> dict[str, float]:
        """Scale, exponents and lengths, for metrics.jsonl."""
        similarity = self.loss.similarity
        gamma_q, gamma_d = (float(g) for g in similarity.exponents)
        numbers = {
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "logit_scale": float(similarity.scale(main_direction(self.loss))),
            "gamma_q": gamma_q,
            "gamma_d": gamma_d,
        }
        for direction in (Direction.I2T, Direction.T2I):
            numbers[f"logit_scale_{direction.value}"] = float(similarity.scale(direction))
            numbers[f"effective_scale_{direction.value}"] = similarity.effective_scale(direction)
        for side, rows in sides.items():
            length = magnitude(rows)
            numbers[f"norm_{side}_mean"] = float(length.mean())
            numbers[f"norm_{side}_std"] = float(length.std()) if len(length) > 1 else 0.0
        return numbers

    # --- the run --------------------------------------------------------------------------------------------------

    def train(self) -> None:
        settings = self.settings
        log = RunLog(
            self.folder if self.rank == 0 else None, self.total_steps, self.step, settings.report_to == "tensorboard"
        )
        val_steps = settings.val_steps or self.batches.steps_per_epoch
        save_steps = settings.save_steps or self.batches.steps_per_epoch
        try:
            note, seen, taken, started, since, waited = "", 0, 0, self.step, time.perf_counter(), 0.0
            for batch, wait in self._remaining_batches():
                waited += wait
                self._note_bad(batch, log)
                due = (self.step + 1) % settings.log_every_n_steps == 0 or self.step + 1 == self.total_steps
                self.towers.train()
                self.loss.train()
                if distributed.fewest(len(batch.image_id), self.device) == 0:
                    # no picture of a rank could be read: towers take no empty batch, so all ranks pass the step over
                    self.step += 1
                    numbers: dict[str, float] = {}
                else:
                    numbers = self.train_step(batch, due or self.step == 0)
                    taken += 1
                seen += len(batch.image_id) * self.ranks
                if numbers.get("loss") is not None:
                    elapsed = time.perf_counter() - since
                    numbers |= {
                        "epoch": (self.step - 1) // self.batches.steps_per_epoch,
                        "samples_per_second": seen / elapsed,
                        "data_wait": waited / elapsed,
                    }
                    log.write(self.step, numbers)
                    seen, since, waited = 0, time.perf_counter(), 0.0
                    note = (
                        f"loss {numbers['loss']:.3f}  |image| {numbers['norm_image_mean']:.3g}"
                        f"  |text| {numbers['norm_text_mean']:.3g}  {numbers['samples_per_second']:.0f}/s"
                    )
                log.show(self.step, note)
                if self.step == self.total_steps:
                    break
                paused = time.perf_counter()
                if self.val_source is not None and self.step % val_steps == 0:
                    self.validate(log)
                if self.step % save_steps == 0:
                    self.save()
                since += time.perf_counter() - paused  # validation and saving are not training speed
            if taken == 0 and self.step > started:
                first = next(iter(f"{k} in {why}" for k, why in self.bad.items()), "on another rank")
                raise UsageError(f"no picture could be read in {self.step - started} steps; first: {one_line(first)}")
            self.save()
        finally:
            log.close()

    def _remaining_batches(self) -> Iterator[tuple[Batch, float]]:
        """Batches from where the run stands to its end, each with the seconds that it was waited for."""
        per_epoch = self.batches.steps_per_epoch
        while self.step < self.total_steps:
            epoch, start = divmod(self.step, per_epoch)
            iterator = iter(self.batches.batches(epoch, start))
            while True:
                before = time.perf_counter()
                batch = next(iterator, None)
                if batch is None:
                    break
                yield batch, time.perf_counter() - before
            if self.step != (epoch + 1) * per_epoch and self.step < self.total_steps:
                raise UsageError(f"epoch {epoch + 1} ended after {self.step - epoch * per_epoch} of {per_epoch} steps")

    def _note_bad(self, batch: Batch, log: RunLog) -> None:
        for sample in batch.bad:
            if sample.key not in self.bad:
                self.bad[sample.key] = f"{sample.where}: {sample.reason}"
                log.say(
                    f"skipped {one_line(sample.key, 80)} in {one_line(sample.where, 120)}: "
                    f"{one_line(sample.reason, 120)} ({len(self.bad)} so far)"
                )

    def validate(self, log: RunLog) -> None:
        """Both directions on the validation data, natively and by cosine; rank 0 works, the others wait."""
        if self.rank == 0 and self.val_source is not None:
            numbers = self.val_source.quick_numbers(self.model, self.loss.similarity.exponents, self.runner)
            log.write(self.step, numbers)
            log.say(
                f"step {self.step}: validation success@1  i2t {numbers['val_i2t_success@1_native']:.3f}  "
                f"t2i {numbers['val_t2i_success@1_native']:.3f}   by cosine  "
                f"{numbers['val_i2t_success@1_cosine']:.3f}  {numbers['val_t2i_success@1_cosine']:.3f}"
            )
        distributed.barrier()

    # --- saving ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that a continuation needs, as tensors and plain values. Locked trunks are left out: they are
        rebuilt from where they came."""
        locked = self.towers.locked_names()
        return {
            "format": "mmclip-checkpoint-1",
            "step": self.step,
            "towers": {k: v for k, v in self.towers.state_dict().items() if k not in locked},
            "loss": self.loss.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "settings": self.settings.to_dict(),
            "data": self.data_key,
            "ranks": self.ranks,
        }

    def save(self) -> None:
        if self.rank == 0:
            checkpoints.save_checkpoint(self.folder / "checkpoints", self.step, self.state())
        distributed.barrier()

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint. Errors: UsageError where settings that matter, or the data, have changed."""
        state = checkpoints.load_checkpoint(path)
        now = self.settings.to_dict()
        changed = [k for k, v in state["settings"].items() if k not in FREE_TO_CHANGE and now.get(k) != v]
        if changed:
            told = ", ".join(
                f"{k} was {one_line(state['settings'][k], 60)}, is {one_line(now.get(k), 60)}" for k in changed
            )
            raise UsageError(f"--resume {path}: other settings than the run's: {told}")
        if state["data"] != self.data_key:
            raise UsageError(f"--resume {path}: the training data are not the run's")
        if state["ranks"] != self.ranks:
            raise UsageError(f"--resume {path}: the run had {state['ranks']} processes, now there are {self.ranks}")
        self.towers.load_state_dict(state["towers"], strict=False)
        self.loss.load_state_dict(state["loss"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def build_loss(settings: TrainSettings, model: Model) -> ContrastiveLoss:
    """The loss of a run; its initial effective scale is the flag's, else a loaded checkpoint's, else CLIP's."""
    scale = settings.logit_scale_init or model.facts.get("effective_scale") or model.loaded_scale or SCALE_INIT
    return clip_loss(
        settings.loss,
        settings.norm,
        settings.i2t_weight,
        settings.positives,
        min(scale, settings.logit_scale_max),
        settings.logit_scale_max,
        settings.gamma_init,
    )


def seed_of(*numbers: int) -> int:
    """A 63-bit seed from whole numbers; numpy's SeedSequence mixes neighbouring ones well."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
