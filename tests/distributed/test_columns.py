"""Two and four gloo ranks, one of them without a pair, against one process on the joint batch, in float64."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from mmclip.distributed.collectives import average_, gather_rows, world
from mmclip.losses import clip_loss, mask_from_ids, tiled
from mmclip.roles import Positives
from mmclip.similarity import Normalization

B, D = 11, 4
SIZES = {2: (7, 4), 4: (5, 0, 4, 2)}  # pairs of each rank
FURTHER = {"image": {2: (3, 2), 4: (0, 1, 4, 0)}, "text": {2: (2, 7), 4: (6, 3, 0, 0)}}  # and further candidates
IMAGE_ID = torch.tensor([0, 1, 2, 0, 3, 4, 5, 1, 0, 6, 7])
TEXT_ID = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 2, 8, 8])
LOSSES = {"sym": ("sym", None), "sym 0.3": ("sym", 0.3), "asym-i2t": ("asym-i2t", None), "asym-t2i": ("asym-t2i", None)}
Found = dict[str, Tensor]


class Case(NamedTuple):
    loss: str
    norm: str
    positives: str
    focal: float


CASES = [
    Case(loss, norm.value, policy, focal)
    for loss, norm, (policy, focal) in product(LOSSES, Normalization, (("mask", 0.0), ("multi", 2.0)))
]


def own(sizes: tuple[int, ...]) -> slice:
    rank, ranks = world()
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1])) if ranks > 1 else slice(None)


def joint(ranks: int) -> Found:
    g = torch.Generator().manual_seed(0)
    sizes = {"image": B, "text": B, **{f"more {s}": sum(n[ranks]) for s, n in FURTHER.items()}}
    return {name: torch.randn(n, D, generator=g, dtype=torch.float64) for name, n in sizes.items()}


def one_step(case: Case, ranks: int) -> Found:
    """Loss and gradients, a rank's own rows put where they stand in the joint batch; what is trained once, averaged."""
    name, weight = LOSSES[case.loss]
    loss = clip_loss(name, case.norm, weight, case.positives, case.focal, 0.1, gather=True).double()
    whole = joint(ranks)
    parts = {n: own(FURTHER[n[5:]][ranks] if n.startswith("more") else SIZES[ranks]) for n in whole}
    x = {n: t[parts[n]].clone().requires_grad_() for n, t in whole.items()}
    pairs = parts["image"]
    out = loss(
        {s: x[s] for s in ("image", "text")},
        mask_from_ids(IMAGE_ID[pairs], TEXT_ID[pairs]),
        {s: x[f"more {s}"] for s in ("image", "text")},
    )
    out.loss.backward()
    average_([p.grad for p in loss.parameters() if p.grad is not None])
    found = {"loss": out.loss.detach()} | {f"loss_{d.value}": v for d, v in out.by_direction.items()}
    found |= {n: p.grad for n, p in loss.named_parameters() if p.grad is not None}
    for n, t in x.items():
        found[n] = torch.zeros_like(whole[n])
        if t.grad is not None:
            found[n][parts[n]] = t.grad / world()[1]
    return found


def there_and_back() -> tuple[Tensor, Tensor]:
    """What every rank gathers, and what it gets back of it."""
    rank, ranks = world()
    mine = torch.tensor([[10.0 * rank + k] for k in range(SIZES[ranks][rank] + FURTHER["text"][ranks][rank])])
    mine.requires_grad_()
    gathered = gather_rows(mine)
    (back,) = torch.autograd.grad(gathered.square().sum() / 2, mine)
    return gathered.detach(), back


class Bytes:
    """Bytes that leave this rank, by what each collective moves in a ring: the least that there is."""

    def __init__(self) -> None:
        self.sent = 0.0

    def __enter__(self) -> Bytes:
        self.plain = {n: getattr(dist, n) for n in ("all_gather", "all_reduce", "reduce_scatter")}

        def wrap(name: str) -> Any:
            def counted(*args: Any, **kwargs: Any) -> Any:
                size, tensors = world()[1], args[1] if name == "reduce_scatter" else args[0]
                # all of what is put together or summed; a sum goes round twice
                n = sum(t.nbytes for t in tensors) if isinstance(tensors, list) else 2 * tensors.nbytes
                self.sent += n * (size - 1) / size
                return self.plain[name](*args, **kwargs)

            return counted

        for name in self.plain:
            setattr(dist, name, wrap(name))
        return self

    def __exit__(self, *error: object) -> None:
        for name, function in self.plain.items():
            setattr(dist, name, function)


def sent(across_ranks: bool) -> float:
    """By a step of wide rows, of which ids and statistics are a small part."""
    x = {s: torch.randn(8, 4096, requires_grad=True) for s in ("image", "text")}
    with Bytes() as counted:
        sides = x if across_ranks else {s: gather_rows(t) for s, t in x.items()}
        clip_loss("sym", "qnorm", gather=across_ranks)(sides).loss.backward()
    return counted.sent / (8 * 4096 * 4 * (world()[1] - 1))


def _rank(rank: int, folder: str, ranks: int) -> None:
    torch.set_num_threads(1)
    # Ranks have other numbers of blocks, and none waits for another's
    tiled.ROWS, tiled.BLOCK["cpu"], tiled.PIECE["cpu"], tiled.STRIP["cpu"] = 2, 1, 3, 1
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    try:
        found: dict[str, Any] = {"steps": {tuple(c): one_step(c, ranks) for c in CASES}, "columns": there_and_back()}
        found["sent"] = [sent(True), sent(False)]
        torch.save(found, f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module", params=SIZES, ids=lambda n: f"{n} ranks")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder, ranks = tmp_path_factory.mktemp("ranks"), request.param
    mp.start_processes(_rank, args=(str(folder), ranks), nprocs=ranks, start_method="forkserver")
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(ranks)]


def test_ranks_with_further_candidates_have_the_joint_batchs_loss_and_gradients(run: list[dict[str, Any]]) -> None:
    for case in CASES:
        expected = one_step(case, len(run))
        assert all(expected[n].any() for n in ("image", "text"))
        for name, value in expected.items():
            of_ranks = [found["steps"][case][name] for found in run]
            # rows are their own rank's, the rest is the same on all
            whole = sum(of_ranks) if name.endswith(("image", "text")) and "loss" not in name else of_ranks[0]
            if whole is of_ranks[0]:
                assert all(torch.equal(whole, other) for other in of_ranks), f"{case}: {name} differs between ranks"
            assert float((whole - value).abs().max()) <= 1e-12 * max(float(value.abs().max()), 1.0), (case, name)
    policies = [one_step(Case("sym", "qnorm", p.value, 0.0), len(run))["loss"] for p in Positives]
    assert len({float(p) for p in policies}) == 3, "known positives are there"


def test_rows_are_gathered_in_rank_order_and_their_gradients_go_home(run: list[dict[str, Any]]) -> None:
    ranks = len(run)
    sizes = [p + more for p, more in zip(SIZES[ranks], FURTHER["text"][ranks], strict=True)]
    for r, found in enumerate(run):
        gathered, back = (t[:, 0].tolist() for t in found["columns"])
        assert gathered == [10.0 * rank + k for rank, n in enumerate(sizes) for k in range(n)]
        assert back == [ranks * (10.0 * r + k) for k in range(sizes[r])]


def test_one_side_is_sent_there_and_its_gradient_back(run: list[dict[str, Any]]) -> None:
    """In rows of one rank to each other one: 2 here; two gathers and two reductions of both sides before."""
    for found in run:
        one, both = found["sent"]
        assert 2 <= one < 2.05, "one side and its gradient"
        assert both > 1.9 * one
