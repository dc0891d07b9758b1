"""Two gloo ranks with uneven rows against one process on the joint batch, in float64.

The model is wrapped as SentenceTransformerTrainer wraps it:
the loss's model alone, so alpha and gamma stay outside DistributedDataParallel.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from mmclip.distributed.collectives import world
from mmclip.losses.sentence_transformers import CachedRoleRankingLoss, RoleRankingLoss
from mmclip.roles import Normalization, direction_weights
from tests.helpers.ranks import off, run_ranks, worst

SIZES = (4, 3)  # rows of each rank
IDS = torch.tensor([[0, 0, 6], [1, 1, 5], [2, 2, 4], [0, 3, 1], [3, 4, 0], [1, 5, 3], [4, 0, 2]])
RELEVANT = torch.tensor([[0, 3], [1, 6], [2, 0], [3, 4]])
STEPS = 2
Found = dict[str, Tensor]


class Case(NamedTuple):
    weights: str
    norm: str
    positives: str
    cached: bool

    def build(self, model: nn.Module, **settings: Any) -> RoleRankingLoss:
        settings |= {"learn_scale": True, "relevant": RELEVANT, "norm_drift": 0.1}
        weights = direction_weights(self.weights, 0.3 if self.weights == "both" else None, text=True)
        if self.cached:
            settings["mini_batch_size"] = 2
        kind = CachedRoleRankingLoss if self.cached else RoleRankingLoss
        return kind(model, weights, self.norm, self.positives, **settings).double()


CASES = [
    Case(weights, norm.value, positives, cached)
    for weights, norm, (positives, cached) in product(
        ("q2d", "d2q", "both"), Normalization, (("mask", False), ("mask", True), ("multi", False))
    )
]

APART = [c for c in CASES if c.positives == "mask"]


class Encoder(nn.Sequential):
    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": super().forward(features["rows"])}


def encoder() -> nn.Module:
    """No bias at the end: its gradient would be 0 by construction where a kept length shifts all scores alike."""
    torch.manual_seed(1)
    return Encoder(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False)).double()


def batch(step: int) -> tuple[list[dict[str, Tensor]], Tensor]:
    """This rank's rows of three columns; all of them in a single process."""
    rank, ranks = world()
    rows = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1])) if ranks > 1 else slice(None)
    g = torch.Generator().manual_seed(step)
    columns = [torch.randn(7, 6, generator=g, dtype=torch.float64) for _ in range(3)]
    return [{"rows": c[rows]} for c in columns], IDS[rows]


def several_steps(case: Case, hooks: bool = True, **settings: Any) -> Found:
    """Every step's loss and gradients, what is trained and remembered at the end: two SGD steps, each of two passes."""
    loss = case.build(encoder(), **settings)
    if not hooks:
        for p in loss._own():
            p._post_accumulate_grad_hooks.clear()  # type: ignore[attr-defined]
    if world()[1] > 1:
        loss.model = nn.parallel.DistributedDataParallel(loss.model)
    optimizer = torch.optim.SGD([p for p in loss.parameters() if p.requires_grad], lr=1e-2)
    found: Found = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for half in range(2):
            value = loss(*batch(2 * step + half))
            (value / 2).backward()
            found[f"{step} {half} loss"] = value.detach()
            if step == half == 0:
                found |= {f"first grad {n.replace('.module', '')}": 2 * p.grad for n, p in loss.named_parameters()
                          if p.grad is not None}  # fmt: skip
        for name, p in loss.named_parameters():
            if p.grad is not None:
                found[f"{step} grad {name.replace('.module', '')}"] = p.grad.clone()
        optimizer.step()
        loss.clamp_logit_scale()
    return found | {n.replace(".module", ""): t for n, t in loss.state_dict().items()}


def on_rank(_: Path) -> dict[str, Any]:
    found = {"gathered": {tuple(c): several_steps(c, gather_across_devices=True) for c in CASES}}
    found["apart"] = {tuple(c): several_steps(c) for c in APART}
    found["no hooks"] = {tuple(c): several_steps(c, hooks=False) for c in APART if c.norm == "learned"}
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[Any, Found]]]:
    return run_ranks(on_rank, len(SIZES), tmp_path_factory.mktemp("ranks"))


def test_uneven_ranks_that_gather_are_one_process_with_the_joint_batch(ranks: list[dict[str, Any]]) -> None:
    for case in CASES:
        expected = several_steps(case)
        trained = {"q2d": 1, "d2q": 1, "both": 2}[case.weights] + 2 * (case.norm == "learned")
        assert sum("0 grad loss." in n for n in expected) == trained
        assert sum("0 grad model." in n for n in expected) == 3
        own = {n for n in expected if "length_factors" in n or "log_length" in n}
        assert len(own) == 4
        for rank, found in enumerate(ranks):
            got = found["gathered"][tuple(case)]
            unknown = {n for n in expected if expected[n].isnan().all() and got[n].isnan().all()}
            far, name = worst(*({n: t for n, t in of.items() if n not in unknown} for of in (got, expected)))
            assert far <= 1e-10, f"rank {rank}, {' '.join(map(str, case))}: {name} is off by {far:.1e}"
            assert all(expected[n].abs().max() > 1e-6 for n in expected if "grad" in n)


def test_without_gathering_each_rank_has_its_own_candidates_and_all_share_alpha_gamma_and_lengths(
    ranks: list[dict[str, Any]],
) -> None:
    """Gradients are the mean of the ranks' own: one process that takes the ranks' batches by turns, in which alpha is
    set and lengths are seen by the joint batch."""
    for case in APART:
        first, second = (found["apart"][tuple(case)] for found in ranks)
        own = {f"{s} {h} loss" for s in range(STEPS) for h in range(2)}
        parted = [n for n in first if not torch.equal(first[n].nan_to_num(7), second[n].nan_to_num(7))]
        assert set(parted) == own, f"{' '.join(map(str, case))}: the ranks parted in {parted}"
        expected = by_turns(case)
        far, name = worst({n: first[n] for n in expected}, expected)
        assert far <= 1e-10, f"{' '.join(map(str, case))}: {name} is off by {far:.1e}"


def by_turns(case: Case) -> Found:
    """The gradients of the first pass, as said above."""
    loss = case.build(encoder())
    features, ids = batch(0)
    loss(features, ids)  # sets alpha and sees the lengths
    loss.eval()  # and no more
    total: Tensor = torch.zeros((), dtype=torch.float64)
    for rank, size in enumerate(SIZES):
        rows = slice(sum(SIZES[:rank]), sum(SIZES[:rank]) + size)
        value = RoleRankingLoss.forward(loss, [{"rows": f["rows"][rows]} for f in features], ids[rows])
        total = total + value / len(SIZES)
    first = {n: p for n, p in loss.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(total, list(first.values()))
    return {f"first grad {n}": g for n, g in zip(first, gradients, strict=True)}


def test_without_the_hook_gamma_would_part(ranks: list[dict[str, Any]]) -> None:
    for case in (c for c in APART if c.norm == "learned"):
        first, second = (found["no hooks"][tuple(case)] for found in ranks)
        assert off(first["loss.similarity.gamma_hat_d"], second["loss.similarity.gamma_hat_d"]) > 1e-6
