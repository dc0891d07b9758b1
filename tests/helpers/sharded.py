"""The two gloo ranks of test_sharding.py: the same steps of uneven rows under DDP and FSDP2, in one start.

All but bf16 is computed in float64, so that equal states differ by at most ``EXACT``, also after AdamW. AdamW takes
full steps from rounding errors of parameters without effect (a bias of keys, or one in front of batch statistics, has
1e-16 of the others' gradient): differences below ``FLOOR`` of the largest value are ignored.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmclip.config import TrainConfig
from mmclip.data.loading import Batch
from mmclip.distributed import fsdp as sharding
from mmclip.embeddings.encode import EncodeOptions
from mmclip.losses.contrastive import clip_loss
from mmclip.models.factory import ClipModel, build_model
from mmclip.training.checkpoint import restore
from mmclip.training.clip_task import ClipTask
from mmclip.training.step import NotFinite, TrainStep
from tests.helpers.ranks import Found
from tests.helpers.texts import make_bert
from tests.helpers.tiny import MODEL, LiveSource

SPLIT = (10, 7)  # rows of each rank: three parts of four and two, which passes of all processes cannot be
STEPS = 2  # before the checkpoint; one more comes behind it
WORDS = 60
EXACT, FLOOR = 1e-8, 1e-6


class Case(NamedTuple):
    model: str = "native"
    locked: tuple[str, ...] = ()
    from_trunk: bool = False
    precision: str = "fp32"
    more: tuple[tuple[str, Any], ...] = ()  # settings

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "fp32" else torch.float32


ACCUMULATED = (("batch_size", 4), ("accum_freq", 3))
CASES = {
    "plain": Case(more=(("grad_clip_norm", 0.5),)),
    "accumulated, checkpointed": Case(more=(*ACCUMULATED, ("grad_checkpointing", True))),
    "locked": Case(locked=("image",), more=ACCUMULATED),
    "from trunks": Case(locked=("image", "text"), from_trunk=True),
    "odd parameters": Case("odd", more=(("batch_size", 5), ("accum_freq", 2))),  # batch statistics: of equal parts
    "timm and HF": Case("timm", more=(("grad_checkpointing", True),)),
    # an eps above all gradients, lest AdamW make full steps of rounding
    "bf16": Case(precision="amp_bf16", more=(*ACCUMULATED, ("eps", 1.0))),
    "bf16 resnet": Case("resnet", precision="amp_bf16", more=(("eps", 1.0),)),
}


class Odd(nn.Module):
    """Parameters of which a rank may hold nothing: one number and a scalar; batch statistics."""

    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        self.after, self.norm = after, nn.BatchNorm1d(64)
        self.one, self.scalar = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.after(x)
        return self.norm(x.flatten(0, -2)).view_as(x) * self.one * self.scalar


class Live(LiveSource):
    """The batch's own tensors, or their trunk features."""

    def __init__(self, model: ClipModel, from_trunk: bool) -> None:
        super().__init__(10)
        self.plain = copy.deepcopy(model.towers).eval() if from_trunk else None

    def inputs(self, side: str, batch: Batch, device: torch.device) -> tuple[Tensor | None, bool]:
        live, _ = super().inputs(side, batch, device)
        assert live is not None
        return (live, False) if self.plain is None else (self.plain.trunk(side, live), True)


def config(folder: Path, kind: str) -> Path:
    """Write a model config of each kind, the text trunk's files beside it."""
    found = copy.deepcopy(MODEL)
    if kind == "resnet":
        found["vision_cfg"] = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8}
    if kind == "timm":
        make_bert(folder, pooling=None)
        found["vision_cfg"] = {"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear", "image_size": 160}
        found["text_cfg"] = {"hf_model_name": str(folder), "hf_tokenizer_name": str(folder), "hf_proj_type": "mlp",
                             "hf_pooler_type": "mean_pooler", "context_length": 16}  # fmt: skip
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    return path


@functools.cache
def built(path: Path) -> ClipModel:
    torch.manual_seed(0)
    model = build_model(str(path))
    if (words := getattr(model.towers.clip, "token_embedding", None)) is not None:  # 49408 rows: most of the time
        words.weight = nn.Parameter(words.weight[:WORDS].detach().clone())
    return model


def build(folder: Path, case: Case) -> ClipModel:
    found = built(folder / f"{'native' if case.model == 'odd' else case.model}.json")
    model = dataclasses.replace(found, towers=copy.deepcopy(found.towers))
    if case.model == "odd":
        model.towers.clip.visual.ln_post = Odd(model.towers.clip.visual.ln_post)
    for side in case.locked:
        model.towers.lock(side)
    model.towers.to(case.dtype)
    return model


def own_batch(case: Case, step: int, rows: slice | None = None) -> Batch:
    """This rank's rows of a step's joint batch."""
    if rows is None:
        rank = dist.get_rank()
        rows = slice(sum(SPLIT[:rank]), sum(SPLIT[: rank + 1]))
    g, total = torch.Generator().manual_seed(step), sum(SPLIT)
    size = 160 if case.model == "timm" else 32
    images = torch.randn(total, 3, size, size, generator=g)[rows].to(case.dtype)
    tokens, ids = torch.randint(1, WORDS, (total, 16), generator=g)[rows], torch.arange(total)[rows]
    return Batch(images, tokens, ids, ids, ids, [f"k{i}" for i in ids.tolist()])


def stepper(folder: Path, case: Case, fsdp: bool) -> TrainStep:
    model = build(folder, case)
    options = EncodeOptions(torch.device("cpu"), case.precision, progress=False)
    source: Any = Live(model, case.from_trunk)
    given = {"batch_size": 16, "lr": 1e-3, "eps": 1e-3, "fsdp": fsdp, "warmup": 0, "max_steps": 10, **dict(case.more)}
    task = ClipTask(
        TrainConfig(**given), model, clip_loss("sym", "learned", gather=True).to(case.dtype), source, options
    )
    return TrainStep(task)


def gradients(s: TrainStep) -> Found:
    named = [*s.encoder.named_parameters(), *s.loss.named_parameters()]
    return {n: sharding.whole(p.grad).clone() for n, p in named if p.grad is not None}


def state_of(s: TrainStep) -> Found:
    """As ``Trainer.state`` has it; None for tensors of other ranks than 0."""
    locked = s.task.locked
    return copy.deepcopy({
        "taken": 1, "encoder": sharding.gathered({k: v for k, v in s.encoder.state_dict().items() if k not in locked}),
        "loss": s.loss.state_dict(), "optimizer": sharding.gathered(s.optimizer.state_dict()),
    })  # fmt: skip


def shares(tensors: list[Tensor]) -> tuple[int, int]:
    """(numbers of tensors on this rank, on all ranks)."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() for t in local), sum(t.numel() for t in tensors)


def several_steps(folder: Path, case: Case, fsdp: bool) -> Found:
    s = stepper(folder, case, fsdp)
    found: Found = {"numbers": s.run(own_batch(case, 0), 0, True), "gradients": gradients(s)}
    for step in range(1, STEPS):
        s.run(own_batch(case, step), step, False)
    found["state"] = state_of(s)
    s.run(own_batch(case, STEPS), STEPS, False)
    parameters = [p for p in s.encoder.parameters() if p.requires_grad]
    moments = [m for p in parameters for m in (s.optimizer.state[p]["exp_avg"], s.optimizer.state[p]["exp_avg_sq"])]
    gradients_of = [p.grad for p in parameters if p.grad is not None]
    held = {"parameters": list(s.encoder.parameters()), "moments": moments, "gradients": gradients_of}
    return {**found, "held": {k: shares(v) for k, v in held.items()}, "last": state_of(s)}


def continued(folder: Path, case: Case, fsdp: bool, rows: slice | None = None) -> Found:
    """The state one step after a run continues from ``checkpoint.pt``."""
    s = stepper(folder, case, fsdp)
    with torch.no_grad():  # other weights and norm statistics, to be overwritten
        s.loss({side: torch.randn(4, 16, dtype=case.dtype) for side in ("image", "text")})
        for p in s.parameters:
            p.add_(1)
    path = folder / "checkpoint.pt"
    restore(torch.load(path, weights_only=True), path, s)
    s.run(own_batch(case, STEPS, rows), STEPS, False)
    return state_of(s)


def not_finite(folder: Path, fsdp: bool) -> Found:
    """A step with bad pixels on rank 1 alone, between two good ones."""
    case = CASES["odd parameters"]
    s = stepper(folder, case, fsdp)
    s.run(own_batch(case, 0), 0, False)
    before, bad = state_of(s), own_batch(case, 1)
    assert bad.images is not None
    bad.images[3 if dist.get_rank() == 1 else slice(0, 0)] = torch.nan
    try:
        s.run(bad, 1, False)
    except NotFinite as error:
        facts = error.facts
    after = state_of(s)
    s.run(own_batch(case, 1), 1, False)
    return {"before": before, "after": after, "facts": facts, "went on": state_of(s)}


def filled(folder: Path) -> Found:
    """Features of the copy that rank 0 runs alone, and the devices of parameters meanwhile."""
    case = CASES["odd parameters"]
    found: Found = {}
    for fsdp in (False, True):
        s = stepper(folder, case, fsdp)
        s.run(own_batch(case, 0), 0, False)
        with sharding.filled(s.task.network, s.encoder):
            if dist.get_rank() == 0:
                batch = own_batch(case, 7)
                with torch.no_grad():
                    found[f"features {fsdp}"] = s.task.network.eval()(batch.images, batch.tokens)
            found[f"inside {fsdp}"] = {p.device.type for p in s.task.network.parameters()}
        found[f"after {fsdp}"] = {p.device.type for p in s.task.network.parameters()}
        s.run(own_batch(case, 1), 1, False)
        found[f"went on {fsdp}"] = state_of(s)
    return found


def summed(folder: Path) -> Found:
    """The planted fault: the sum of the ranks' gradients in place of their mean."""
    s = stepper(folder, CASES["plain"]._replace(more=()), True)
    towers: Any = s.encoder
    for module in (towers, *sharding.blocks(towers)):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        module.set_gradient_divide_factor(1.0)
    s.run(own_batch(CASES["plain"], 0), 0, False)
    return gradients(s)


def on_rank(place: Path) -> Found:
    ways = {"ddp": False, "fsdp": True}
    found: Found = {n: {w: several_steps(place, c, fsdp) for w, fsdp in ways.items()} for n, c in CASES.items()}
    if dist.get_rank() == 0:
        torch.save(found["locked"]["fsdp"]["state"], place / "checkpoint.pt")
    dist.barrier()
    found["continued"] = {w: continued(place, CASES["locked"], fsdp) for w, fsdp in ways.items()}
    found["not finite"] = {w: not_finite(place, fsdp) for w, fsdp in ways.items()}
    return found | {"filled": filled(place), "summed": summed(place)}
