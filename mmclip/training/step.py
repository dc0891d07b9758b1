"""One optimizer step: raw features, the loss on the whole batch of all processes, exact gradients, AdamW.

A batch larger than a forward pass (--accum-freq, --loss-batch-size, --mini-batch-size) is accumulated exactly: the
features of all its parts are computed first, the loss is differentiated once with respect to them (so alpha and gamma
get their gradients once), and each part is then encoded again to carry its rows' gradients into the encoder (Gao et al.
2021, "Scaling deep contrastive learning batch size under memory limited setup", GradCache). Dropout draws the same
masks both times: a part's random state is a function of (seed, rank, step, part).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmclip import distributed
from mmclip.distributed import fsdp
from mmclip.errors import UserError, printable
from mmclip.losses.contrastive import ContrastiveLoss, LossOutput
from mmclip.roles import Direction
from mmclip.training.optimizer import set_learning_rate
from mmclip.training.task import Batch, Task

PHASES = ("data wait", "transfer, preprocessing", "encoder forward", "loss", "backward", "optimizer")


class NotFinite(Exception):
    """A step whose loss or gradient is NaN or infinite; it has changed nothing. ``facts``: plain values about it."""

    def __init__(self, facts: dict[str, Any]) -> None:
        super().__init__(facts)
        self.facts = facts


class TrainStep:
    """Encoder, loss and optimizer of a run, and :meth:`run`, one step of them.

    ``begin_phase`` is called with each of ``PHASES`` when it begins; --benchmark puts a clock there.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.config = task, task.config
        self.encoder, self.loss = task.encoder, task.loss
        self.rank, self.ranks = distributed.world()
        self.begin_phase: Callable[[str], None] = lambda phase: None
        if self.config.grad_checkpointing:
            task.checkpoint_gradients(True)
        self.network: nn.Module = self.encoder
        if self.config.fsdp:
            task.use_copy(fsdp.hollow(self.encoder))
            fsdp.shard(self.encoder, task.device, task.precision)
        elif self.ranks > 1:
            devices = [task.device] if task.device.type == "cuda" else None
            self.network = nn.parallel.DistributedDataParallel(
                self.encoder, devices, find_unused_parameters=task.partial_gradients
            )
        if self.config.torchcompile:  # around DDP, the order in which both work
            self.network = torch.compile(self.network)  # type: ignore[assignment]
        self.optimizer = task.build_optimizer()
        self.parameters: list[nn.Parameter] = [p for group in self.optimizer.param_groups for p in group["params"]]
        own = set() if task.clips_loss else {id(p) for p in self.loss.parameters()}
        self.clipped = [p for p in self.parameters if id(p) not in own]

    def run(self, batch: Batch, step: int, log: bool) -> dict[str, Any]:
        """Take step number ``step``, counted from 0.

        Returns:
            The numbers of metrics.jsonl; where ``log`` is False only news, such as a schedule's transition.

        Raises:
            NotFinite: The loss or a gradient is NaN or infinite; nothing is changed.
            UserError: Out of memory, or a model that cannot be compiled.
        """
        try:
            return self._run(batch, step, log)
        except torch._dynamo.exc.TorchDynamoException as error:  # also where there is no compiler
            raise UserError(f"--torchcompile: this model cannot be compiled here: {printable(error, 200)}") from None
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"step {step + 1}: out of memory with --batch-size {self.config.batch_size}: {printable(error, 120)}. "
                f"{self.task.advice.memory}; --grad-checkpointing saves memory, too"
            ) from None

    def _run(self, batch: Batch, step: int, log: bool) -> dict[str, Any]:
        self.encoder.train()
        self.loss.train()
        set_learning_rate(self.optimizer, self.task.lr_factor(step))
        self.task.begin_step(step)
        self.optimizer.zero_grad(set_to_none=True)
        # What a forward pass changes by itself: batch statistics, norm statistics, the first batch's alpha
        changing = [*self.encoder.buffers(), *self.loss.state_dict().values()]
        before = [t.clone() for t in changing]
        out, news = self._backward(batch, step, log)
        self.begin_phase("optimizer")
        alone = [*self.loss.parameters(), *(fsdp.replicated(self.encoder) if self.config.fsdp else ())]
        own_gradients = [p.grad for p in alone if p.grad is not None]
        distributed.average_(own_gradients)
        norm = fsdp.total_norm([p.grad for p in self.clipped if p.grad is not None])
        finite = [out.loss.detach(), norm, *(n.sum() for n in out.norms.values()), *(g.sum() for g in own_gradients)]
        if not math.isfinite(float(torch.stack([x.float() for x in finite]).sum())):  # the device is waited for once
            facts = self._facts(batch, out, step)
            for tensor, value in zip(changing, before, strict=True):
                tensor.copy_(value)
            raise NotFinite(facts)
        if self.config.grad_clip_norm:
            for same in fsdp.alike(self.clipped):
                nn.utils.clip_grads_with_norm_(same, self.config.grad_clip_norm, norm)
        self.optimizer.step()
        self.loss.similarity.clamp_logit_scale()
        return self._numbers(out, norm) | news if log else news

    def _features(self, batch: Batch, step: int, part: int) -> dict[str, Tensor]:
        """Raw features of a part by name."""
        torch.manual_seed(seed_of(self.config.seed, self.rank, step, part))
        self.begin_phase("transfer, preprocessing")
        inputs = self.task.inputs(batch)
        self.begin_phase("encoder forward")
        with self.task.autocast():
            features = self.network(*inputs)
        self.begin_phase("loss")
        return dict(zip(self.task.outputs, features, strict=True))

    def _backward(self, batch: Batch, step: int, log: bool) -> tuple[LossOutput, dict[str, Any]]:
        """Leave the gradient of the whole batch's loss in every parameter's ``grad``."""
        parts = self.parts(batch)
        if len(parts) == 1:
            out, news = self.task.compute_loss(self._features(parts[0], step, 0), batch, log)
            self.begin_phase("backward")
            out.loss.backward()
            return out, news
        statistics = [b.clone() for b in self.encoder.buffers()]
        # Compiled, the graphs with and without gradient are two, which need not draw the same masks
        with self._no_sync(), torch.set_grad_enabled(self.config.torchcompile):
            encoded = [{s: f.detach() for s, f in self._features(p, step, i).items()} for i, p in enumerate(parts)]
        for buffer, value in zip(self.encoder.buffers(), statistics, strict=True):
            buffer.copy_(value)  # batch statistics count each part once, in the pass below
        features = {side: torch.cat([part[side] for part in encoded]).requires_grad_() for side in encoded[0]}
        out, news = self.task.compute_loss(features, batch, log)
        self.begin_phase("backward")
        out.loss.backward()
        sizes = [len(part.keys) for part in parts]
        gradients = [f.grad.split(sizes) for f in features.values() if f.grad is not None]
        for i, part in enumerate(parts):
            with self._no_sync() if i + 1 < len(parts) else contextlib.nullcontext():
                again = list(self._features(part, step, i).values())
                self.begin_phase("backward")
                torch.autograd.backward(again, [g[i] for g in gradients])
        return out, news

    def parts(self, batch: Batch) -> Sequence[Batch]:
        """Split a batch for its forward passes.

        Processes make the same number of parts, the most that one needs, or as many as each has rows for: with --fsdp
        a pass is work of all, and DDP rearranges its buckets in a pass.
        """
        size = self.task.part_size
        parts = batch.split(size)
        if self.ranks == 1 or not self.task.accumulates:
            return parts
        most, fewest = distributed.largest([len(parts), -len(batch.keys)], self.task.device)
        together = min(most, -fewest)
        return parts if len(parts) == together else batch.split(size, together)

    def _no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """Skip DDP's gradient synchronization, for all passes but the last."""
        if self.ranks == 1 or self.config.fsdp:  # distributed/fsdp.py: why a part's gradients do not wait
            return contextlib.nullcontext()
        module: Any = getattr(self.network, "_orig_mod", self.network)  # torch.compile's wrapper hides DDP
        return module.no_sync()

    @torch.no_grad()
    def _numbers(self, out: LossOutput, norm: Tensor) -> dict[str, float]:
        """A line of metrics.jsonl."""
        directions = sorted(out.by_direction)
        main = next(d for d in self.loss.weights if d in self.loss.trained)
        numbers = {"loss": float(out.loss.detach()), "grad_norm": float(norm)}
        numbers |= {} if out.norm_drift is None else {"norm_drift": float(out.norm_drift)}
        numbers |= {f"loss_{d.value}": float(out.by_direction[d]) for d in directions}
        numbers["lr"] = float(self.optimizer.param_groups[0]["lr"])
        numbers["logit_scale"] = float(self.loss.similarity.scale(main))
        numbers |= similarity_numbers(self.loss, directions)
        for side, norms in out.norms.items():
            numbers[f"norm_{side}_mean"] = float(norms.mean())
            numbers[f"norm_{side}_std"] = float(norms.std()) if len(norms) > 1 else 0.0
        return numbers

    @torch.no_grad()
    def _facts(self, batch: Batch, out: LossOutput, step: int) -> dict[str, Any]:
        """Where a NaN or an infinity came from: samples of all processes, parameters, gradients."""

        def broken(tensors: dict[str, Any]) -> list[str]:
            return [n for n, x in tensors.items() if not fsdp.whole(x).isfinite().all()]

        keys = [key for part in distributed.gather_objects(batch.keys) for key in part]
        named = {**dict(self.encoder.named_parameters()), **dict(self.loss.named_parameters())}
        lost = torch.stack([~norms.isfinite() for norms in out.norms.values()]).any(dim=0).tolist()
        return {
            "step": step + 1,
            "loss": str(float(out.loss.detach())),
            "keys_with_non_finite_features": [key for key, bad in zip(keys, lost, strict=True) if bad],
            "parameters_not_finite": broken(named),
            "gradients_not_finite": broken({n: p.grad for n, p in named.items() if p.grad is not None}),
            "keys": keys,
        }


@torch.no_grad()
def similarity_numbers(loss: ContrastiveLoss, directions: Sequence[Direction]) -> dict[str, float]:
    """Exponents, and of each direction alpha ("logit_scale") and the effective scale."""
    similarity = loss.similarity
    gamma_q, gamma_d = (float(g) for g in similarity.exponents)
    numbers = {"gamma_q": gamma_q, "gamma_d": gamma_d}
    for direction in directions:
        numbers[f"logit_scale_{direction.value}"] = float(similarity.scale(direction))
        numbers[f"effective_scale_{direction.value}"] = similarity.effective_scale(direction)
    return numbers


def seed_of(*numbers: int) -> int:
    """A 63-bit seed from whole numbers; numpy's SeedSequence mixes neighbouring ones well."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
