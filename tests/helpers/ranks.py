"""What gloo ranks of uneven rows do for test_distributed.py, and one process on the joint batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmclip.config import LossConfig
from mmclip.distributed.collectives import average_, gather_rows, world
from mmclip.losses import ContrastiveLoss, clip_loss, contrastive_cross_entropy, mask_from_ids
from mmclip.losses.schedule import exponents_at, i2t_weight_at, start_exponents
from mmclip.roles import SCALE_INIT, Direction, Exponents, Normalization, Positives, direction_weights
from mmclip.similarity import magnitude

SPLITS = {2: (5, 3), 3: (4, 1, 3)}  # rows of each rank, by the number of ranks: 8 in all, shared out unevenly
IMAGE_ID = torch.tensor([0, 1, 2, 3, 1, 0, 5, 2])  # three images have two captions in the batch
TEXT_ID = torch.tensor([0, 1, 2, 3, 4, 5, 4, 1])  # and two captions stand there twice
LOSSES = {"sym": ("sym", None), "sym 0.3": ("sym", 0.3), "asym-i2t": ("asym-i2t", None), "asym-t2i": ("asym-t2i", None)}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
STEPS, SCALE_MAX = 3, 0.9 * SCALE_INIT
TOWERS = {f"{side}.{name}" for side in ("image", "text") for name in ("0.weight", "0.bias", "2.weight")}
Found = dict[str, Tensor]  # losses, gradients and running lengths by name
Gather = Callable[[Tensor], Tensor]


class Case(NamedTuple):
    loss: str
    norm: str
    positives: str

    def build(self, dtype: torch.dtype, gather: bool = True) -> ContrastiveLoss:
        name, weight = LOSSES[self.loss]
        return clip_loss(name, self.norm, weight, self.positives, gather=gather).to(dtype)


CASES = [Case(loss, n.value, p.value) for loss in LOSSES for n in Normalization for p in Positives]
STEP_CASES = [c for c in CASES if c.positives == "mask"]


class Towers(nn.Module):
    """Both towers in one forward, as DDP needs it.

    No bias at the end: one of documents whose length is kept shifts all scores of a query alike, so its gradient is 0
    by construction, and a relative error of it would be noise over noise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = (
            nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False)) for _ in range(2)
        )

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.image(image), self.text(text)


def network_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    towers = Towers().to(dtype)
    return nn.parallel.DistributedDataParallel(towers) if world()[1] > 1 else towers


def named_parameters(network: nn.Module, loss: nn.Module) -> dict[str, nn.Parameter]:
    return {n.removeprefix("module."): p for n, p in [*network.named_parameters(), *loss.named_parameters()]}


def own_batch(dtype: torch.dtype, seed: int = 0) -> tuple[dict[str, Tensor], slice]:
    """This rank's rows of the joint batch, and which they are; all of them in a single process."""
    rank, ranks = world()
    sizes = SPLITS.get(ranks, (8,))
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    g = torch.Generator().manual_seed(seed)
    return {side: torch.randn(8, 6, generator=g).to(dtype)[rows] for side in ("image", "text")}, rows


def backward(
    network: nn.Module,
    loss: ContrastiveLoss,
    step: int = 0,
    gather: Gather | None = None,
    exponents: Exponents | None = None,
) -> Found:
    """What a training step does up to its backward pass: each gives its rows, or, with ``gather``, those of all."""
    sides, rows = own_batch(next(loss.parameters()).dtype, seed=step)
    image, text = network(**sides)
    ids = IMAGE_ID[rows], TEXT_ID[rows]
    given = {"image": image, "text": text}
    if exponents is not None:
        loss.similarity.change_exponents(exponents, {side: gather_rows(magnitude(x)) for side, x in given.items()})
    if gather is not None:
        given, ids = {side: gather(x) for side, x in given.items()}, (gather_rows(ids[0]), gather_rows(ids[1]))
    # as in training, the untrained direction's loss is asked for in some steps only
    out = loss(given, mask_from_ids(*ids), untrained=step % 2 == 0)
    out.loss.backward()
    return {"loss": out.loss.detach()} | {f"loss_{d.value}": v for d, v in out.by_direction.items()}


def average(loss: ContrastiveLoss) -> None:
    """Alpha and gamma are outside DDP, in training as here."""
    average_([p.grad for p in loss.parameters() if p.grad is not None])


def collect(network: nn.Module, loss: ContrastiveLoss) -> Found:
    """Every gradient and the running lengths."""
    average(loss)
    named = named_parameters(network, loss)
    return {n: p.grad for n, p in named.items() if p.grad is not None} | dict(loss.named_buffers())


def one_step(case: Case, dtype: torch.dtype, gather: Gather | None = None) -> Found:
    network, loss = network_of(dtype), case.build(dtype, gather is None)
    return backward(network, loss, gather=gather) | collect(network, loss)


def several_steps(case: Case) -> Found:
    """Everything trained after AdamW steps on different batches, in float64, under a clamp that acts at once."""
    network, loss = network_of(torch.float64), case.build(torch.float64)
    loss.similarity.scale_max = SCALE_MAX
    named = named_parameters(network, loss)
    optimizer = torch.optim.AdamW([p for p in named.values() if p.requires_grad], lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(network, loss, step)
        for p in loss.parameters():
            if p.grad is not None:  # on other hardware ranks round differently: that must not part their alphas
                p.grad *= 1 + 1e-14 * world()[0]
        average(loss)
        optimizer.step()
        loss.similarity.clamp_logit_scale()
    return {n: p.detach() for n, p in named.items()} | dict(loss.named_buffers())


def curriculum_steps() -> Found:
    """Everything trained and every step's losses of a run in which all that can change does: an anneal to dot, lambda
    from 1 to 0, a focal weight, a penalty on drifting lengths."""
    settings = LossConfig(
        norm="dot",
        gamma_schedule="anneal",
        gamma_start=0.0,
        i2t_weight=1.0,
        i2t_weight_end=0.0,
        focal=2.0,
        norm_drift=0.3,
    )
    network = network_of(torch.float64)
    loss = clip_loss(
        "sym", "dot", 1.0, "multi", 2.0, 0.3, i2t_weight_end=0.0, gather=True, start=start_exponents(settings)
    ).double()
    named = named_parameters(network, loss)
    optimizer = torch.optim.AdamW([p for p in named.values() if p.requires_grad], lr=1e-2)
    found: Found = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss.weights = direction_weights("sym", i2t_weight_at(settings, step, STEPS))
        losses = backward(network, loss, step, exponents=exponents_at(settings, step, STEPS))
        average(loss)
        found |= {f"{step} {n}": v for n, v in losses.items()}
        found |= {f"{step} {n} grad": p.grad.clone() for n, p in named.items() if p.grad is not None and p.grad.any()}
        optimizer.step()
        loss.similarity.clamp_logit_scale()
    state = {n: b for n, b in loss.named_buffers() if n != "similarity.gammas"}
    assert loss.similarity.gammas is not None and not loss.similarity.gammas.any(), "it arrived at dot"
    return found | {n: p.detach() for n, p in named.items()} | state


# --- planted faults ---------------------------------------------------------------------------------------------------


def plain_gather(rows: Tensor) -> Tensor:
    """torch.distributed's own gathering, which has no gradient, with this rank's rows put back: the planted fault."""
    rank, ranks = world()
    sizes = SPLITS[ranks]
    padded = nn.functional.pad(rows.detach(), (0, 0, 0, max(sizes) - len(rows)))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([rows if r == rank else part[: sizes[r]] for r, part in enumerate(parts)])


def own_queries_only(norm: str) -> Found:
    """asym-i2t by each rank's own queries against plainly gathered documents: the usual form of the fault.

    Weighted by the rank's share, so that the query tower's gradient is right and only the documents' is not.
    """
    network, loss = network_of(torch.float64), Case("asym-i2t", norm, "none").build(torch.float64)
    sides, rows = own_batch(torch.float64)
    image, text = network(**sides)
    images, texts = plain_gather(image), plain_gather(text)
    for direction in loss.weights:
        loss.similarity.update_norm_stats(
            direction, *direction.roles({"image": magnitude(images), "text": magnitude(texts)})
        )
    candidates = torch.cat([text, texts[: rows.start], texts[rows.stop :]])  # the document of query i is candidate i
    value = (
        contrastive_cross_entropy(loss.similarity(Direction.I2T, image, candidates))
        * len(image)
        * world()[1]
        / len(images)
    )
    value.backward()
    return collect(network, loss)


# --- ranks ------------------------------------------------------------------------------------------------------------


def on_rank(rank: int, folder: str, ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    try:
        found: dict[str, dict[Any, Found]] = {str(d): {tuple(c): one_step(c, d) for c in CASES} for d in TOLERANCE}
        found["steps"] = {tuple(c): several_steps(c) for c in STEP_CASES}
        found["curriculum"] = {"all": curriculum_steps()}
        asym = [Case("asym-i2t", n.value, "none") for n in Normalization]
        found["plain gather"] = {c.norm: one_step(c, torch.float64, plain_gather) for c in asym}
        found["own queries"] = {c.norm: own_queries_only(c.norm) for c in asym}
        torch.save(found, f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()
