"""One optimizer step: raw features, the loss on the whole batch of all processes, exact gradients, AdamW.

With --accum-freq or --loss-batch-size the batch goes through the towers in parts, yet the loss sees all of it: the
features of every part are computed first, the loss is differentiated once with respect to them (so alpha and gamma get
their gradients once), and each part is then run again to carry its rows' gradient into the towers (Gao et al. 2021,
"Scaling deep contrastive learning batch size under memory limited setup", GradCache). Dropout draws the same masks both
times: a part's random state is a function of (seed, rank, step, part).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmclip import distributed
from mmclip.config import TrainConfig
from mmclip.data.loading import Batch
from mmclip.distributed import fsdp as sharding
from mmclip.embeddings.encode import Runner
from mmclip.embeddings.features import Source
from mmclip.errors import UserError, printable
from mmclip.losses import schedule as curriculum
from mmclip.losses.contrastive import ContrastiveLoss, LossOutput, clip_loss
from mmclip.models.factory import ClipModel
from mmclip.models.metadata import main_direction, native_exponents
from mmclip.roles import direction_weights
from mmclip.similarity import SCALE_INIT, Direction, Exponents, magnitude
from mmclip.training.optimizer import build_optimizer, learning_rate_factor, set_learning_rate


class NotFinite(Exception):
    """A step whose loss or gradient is NaN or infinite; nothing has been changed by it. ``facts``: what is known."""

    def __init__(self, facts: dict[str, Any]) -> None:
        super().__init__(facts)
        self.facts = facts


class Stepper:
    """Towers, loss and optimizer of a run, and ``take``: one step of them."""

    def __init__(
        self, settings: TrainConfig, model: ClipModel, loss: ContrastiveLoss, source: Source, runner: Runner
    ) -> None:
        self.settings, self.model, self.towers, self.loss = settings, model, model.towers, loss
        self.source, self.runner = source, runner
        self.rank, self.ranks = distributed.world()
        self.network = self._wrap()
        self.optimizer = build_optimizer(self.towers, loss, settings)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

    def _wrap(self) -> nn.Module:
        """Towers, then DDP, then compile: the order in which all three work. With --fsdp ``model`` becomes a copy
        that one process can run while ``sharding.filled``."""
        network: nn.Module = self.towers
        if self.settings.grad_checkpointing:
            self.towers.clip.set_grad_checkpointing()
        if self.settings.fsdp:
            self.model = dataclasses.replace(self.model, towers=sharding.hollow(self.towers))
            sharding.shard(self.towers, self.runner.device, self.runner.precision)
        elif self.ranks > 1:
            network = nn.parallel.DistributedDataParallel(
                network, device_ids=[self.runner.device] if self.runner.device.type == "cuda" else None
            )
        if self.settings.torchcompile:
            network = torch.compile(network)  # type: ignore[assignment]
        return network

    def take(self, batch: Batch, step: int, warmup: int, total_steps: int, log: bool) -> dict[str, Any]:
        """Step number ``step``, from 0; returns the numbers to log (where ``log`` is False only news: "transition" of a
        schedule, "initial" of a run that starts from another).

        Errors: NotFinite, before anything is changed.
        """
        factor = learning_rate_factor(step, warmup, total_steps)
        set_learning_rate(self.optimizer, factor * curriculum.rate_factor(self.settings, step, total_steps))
        weight = curriculum.i2t_weight_at(self.settings, step, total_steps)
        if weight is not None:
            self.loss.weights = direction_weights(self.settings.loss, weight)
        self.optimizer.zero_grad(set_to_none=True)
        # What a forward pass changes by itself: batch statistics, running lengths, the first batch's alpha
        changing = [*self.towers.buffers(), *self.loss.state_dict().values()]
        before = [t.clone() for t in changing]
        start = self.model.initial
        if start and self.loss.similarity.is_calibrated(main_direction(self.loss.trained)):
            start = {}
        scheduled = self.settings.gamma_schedule != "none"
        self.exponents = curriculum.exponents_at(self.settings, step, total_steps) if scheduled else None
        self.news: dict[str, Any] = {}
        out = self._backward(batch, step, log)
        if start:
            self.news["initial"] = self._after_start(start)
        own = [*self.loss.parameters(), *(sharding.replicated(self.towers) if self.settings.fsdp else ())]
        distributed.average_([p.grad for p in own if p.grad is not None])
        norm = sharding.total_norm([p.grad for p in self.parameters if p.grad is not None])
        lengths = sum(length.sum() for length in out.lengths.values())  # cosine's loss would not show them
        if not math.isfinite(float(out.loss.detach() + norm + lengths)):  # one question to the device, not three
            facts = self._not_finite(batch, out, step)
            for tensor, value in zip(changing, before, strict=True):
                tensor.copy_(value)
            raise NotFinite(facts)
        if self.settings.grad_clip_norm is not None:
            for same in sharding.alike(self.parameters):
                nn.utils.clip_grads_with_norm_(same, self.settings.grad_clip_norm, norm)
        self.optimizer.step()
        self.loss.similarity.clamp_()
        if not log:
            return self.news
        numbers = {"loss": float(out.loss.detach()), "grad_norm": float(norm)}
        if out.norm_drift is not None:
            numbers["norm_drift"] = float(out.norm_drift)
        numbers |= {f"loss_{d.value}": float(v) for d, v in sorted(out.by_direction.items())}
        return numbers | self._state_numbers(out.lengths) | self.news

    # --- gradients ------------------------------------------------------------------------------------------------

    def _features(self, batch: Batch, step: int, part: int) -> tuple[Tensor, Tensor]:
        """Raw features of a part."""
        torch.manual_seed(seed_of(self.settings.seed, self.rank, step, part))
        images, image_from_trunk = self.source.inputs("image", batch, self.runner.device)
        texts, text_from_trunk = self.source.inputs("text", batch, self.runner.device)
        if not image_from_trunk:
            images = self.model.pixels(images)
        try:
            with self.runner.autocast():
                image, text = self.network(images, texts, image_from_trunk, text_from_trunk)
        except torch._dynamo.exc.TorchDynamoException as error:  # no compiler, or a model that it cannot take
            raise UserError(f"--torchcompile: this model cannot be compiled here: {printable(error, 200)}") from None
        return image, text

    def _loss(self, image: Tensor, text: Tensor, batch: Batch, log: bool) -> LossOutput:
        """The loss of all processes' rows."""
        sides = {"image": image, "text": text}
        if self.exponents is not None:
            with torch.no_grad():  # rows that hold their lengths alone
                lengths = {s: distributed.gather_rows(magnitude(x)[:, None]) for s, x in sides.items()}
            self._change_exponents(self.exponents, lengths)
        ids = batch.image_id.to(self.runner.device), batch.text_id.to(self.runner.device)
        return self.loss(sides, *ids, untrained=log, across_ranks=True)

    def _backward(self, batch: Batch, step: int, log: bool) -> LossOutput:
        """Gradients of the whole batch's loss in every parameter's ``grad``."""
        parts = self.parts(batch)
        if len(parts) == 1:
            out = self._loss(*self._features(batch, step, 0), batch, log)
            out.loss.backward()
            return out
        statistics = [b.clone() for b in self.towers.buffers()]
        # Compiled, the graphs with and without gradient are two, and nothing promises that they draw masks alike.
        with self._alone(), torch.set_grad_enabled(self.settings.torchcompile):
            features = [tuple(f.detach() for f in self._features(p, step, i)) for i, p in enumerate(parts)]
        for buffer, before in zip(self.towers.buffers(), statistics, strict=True):
            buffer.copy_(before)  # batch statistics count each part once, in the pass below
        image, text = (torch.cat(side).requires_grad_() for side in zip(*features, strict=True))
        out = self._loss(image, text, batch, log)
        out.loss.backward()
        assert image.grad is not None and text.grad is not None
        sizes = [len(part.keys) for part in parts]
        gradients = zip(image.grad.split(sizes), text.grad.split(sizes), strict=True)
        for i, (part, gradient) in enumerate(zip(parts, gradients, strict=True)):
            with self._alone() if i + 1 < len(parts) else contextlib.nullcontext():
                torch.autograd.backward(self._features(part, step, i), gradient)
        return out

    def parts(self, batch: Batch) -> list[Batch]:
        """The batch in parts of --batch-size rows. Processes make the same number of parts, the most that one needs, or
        as many as each has rows for: with --fsdp a pass is work of all, and DDP rearranges its buckets in a pass."""
        parts = batch.split(self.settings.batch_size)
        if self.ranks == 1 or (self.settings.accum_freq == 1 and self.settings.loss_batch_size is None):
            return parts  # one
        most, fewest = distributed.largest([len(parts), -len(batch.keys)], self.runner.device)
        together = min(most, -fewest)
        return parts if len(parts) == together else batch.split(self.settings.batch_size, together)

    def _alone(self) -> contextlib.AbstractContextManager[Any]:
        """Passes whose gradients other processes are not told of yet."""
        if self.ranks == 1 or self.settings.fsdp:  # sharding.py: why a part's gradients do not wait
            return contextlib.nullcontext()
        module: Any = getattr(self.network, "_orig_mod", self.network)  # torch.compile's wrapper hides DDP
        return module.no_sync()

    def _change_exponents(self, to: Exponents, sides: dict[str, Tensor]) -> None:
        """A step's exponents; news where they leave those that the schedule starts with, or arrive."""
        before = self._scales()
        if self.loss.similarity.change_exponents(to, sides):
            after = self._scales()
            ends = curriculum.start_exponents(self.settings), self.loss.similarity.norm.exponents
            if (before["gamma_q"], before["gamma_d"]) == ends[0] or (after["gamma_q"], after["gamma_d"]) == ends[1]:
                self.news["transition"] = {n: [before[n], after[n]] for n in after}

    # --- what is known of a step ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _state_numbers(self, lengths: dict[str, Tensor]) -> dict[str, float]:
        """Scale, exponents and lengths, for metrics.jsonl."""
        numbers = {
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "logit_scale": float(self.loss.similarity.scale(main_direction(self.loss.trained))),
            **self._scales(),
        }
        if self.settings.i2t_weight_end is not None:
            numbers["i2t_weight"] = self.loss.weights[Direction.I2T]
        for side, length in lengths.items():
            numbers[f"norm_{side}_mean"] = float(length.mean())
            numbers[f"norm_{side}_std"] = float(length.std()) if len(length) > 1 else 0.0
        return numbers

    @torch.no_grad()
    def _scales(self) -> dict[str, float]:
        """Exponents, and of each direction alpha ("logit_scale") and the effective scale."""
        similarity = self.loss.similarity
        gamma_q, gamma_d = (float(g) for g in similarity.exponents)
        numbers = {"gamma_q": gamma_q, "gamma_d": gamma_d}
        for direction in (Direction.I2T, Direction.T2I):
            numbers[f"logit_scale_{direction.value}"] = float(similarity.scale(direction))
            numbers[f"effective_scale_{direction.value}"] = similarity.effective_scale(direction)
        return numbers

    def _after_start(self, initial: dict[str, Any]) -> dict[str, Any]:
        """What the first batch made of the run that this one starts from: [there, here] by name, None for what was not
        trained there. A plain CLIP has one scale."""
        there, here = self.model.metadata, self._scales()
        plain = {n: 1.0 if n.startswith("gamma") else self.model.loaded_scale for n in here}
        pairs = {n: [(there or plain).get(n), v] for n, v in here.items()}
        return {**{k: initial[k] for k in ("run", "loss", "norm")}, **pairs}

    @torch.no_grad()
    def _not_finite(self, batch: Batch, out: LossOutput, step: int) -> dict[str, Any]:
        """Where a NaN or an infinity came from, as plain values: the samples' keys of all processes, those whose own
        features are not finite, and the parameters whose gradient is not."""
        keys = [k for part in distributed.gather_objects(batch.keys) for k in part]
        named = [*self.towers.named_parameters(), *self.loss.named_parameters()]
        lost = torch.stack([~length.isfinite() for length in out.lengths.values()]).any(dim=0).tolist()
        return {
            "step": step + 1,
            "loss": str(float(out.loss.detach())),
            "keys_with_non_finite_features": [k for k, bad in zip(keys, lost, strict=True) if bad],
            "parameters_not_finite": [n for n, p in named if not sharding.whole(p).isfinite().all()],
            "gradients_not_finite": [
                n for n, p in named if p.grad is not None and not sharding.whole(p.grad).isfinite().all()
            ],
            "keys": keys,
        }


def initial_gammas(settings: TrainConfig, model: ClipModel) -> float | tuple[float, float]:
    """What learned exponents start with: those of the learned run that the model comes from by --init-from, a little
    inside where they are at their ends (which have no gradient), else the flag's."""
    if model.initial.get("norm") != "learned":
        return settings.gamma_init
    gamma_q, gamma_d = (min(max(float(g), 1e-3), 1 - 1e-3) for g in native_exponents(model.metadata))
    return gamma_q, gamma_d


def build_loss(settings: TrainConfig, model: ClipModel) -> ContrastiveLoss:
    """The loss of a run; its initial effective scale is the flag's, else a loaded checkpoint's, else CLIP's."""
    scale = settings.logit_scale_init or model.metadata.get("effective_scale") or model.loaded_scale or SCALE_INIT
    return clip_loss(
        settings.loss,
        settings.norm,
        settings.i2t_weight,
        settings.positives,
        min(scale, settings.logit_scale_max),
        settings.logit_scale_max,
        initial_gammas(settings, model),
        settings.focal,
        settings.norm_drift,
        settings.i2t_weight_end,
        curriculum.start_exponents(settings),
    )


def seed_of(*numbers: int) -> int:
    """A 63-bit seed from whole numbers; numpy's SeedSequence mixes neighbouring ones well."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
