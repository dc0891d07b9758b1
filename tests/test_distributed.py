"""Two gloo ranks against one process on the joint batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from mmclip.distributed import average_, gather_ids, gather_rows
from mmclip.losses import LOSS_WEIGHTS, clip_loss
from mmclip.similarity import Normalization

SIZES = (5, 3)  # rows of each rank: uneven


def _rank(rank: int, folder: str, work: Callable[[int, str], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(SIZES))
    try:
        work(rank, folder)
    finally:
        dist.destroy_process_group()


def _batch() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    n = sum(SIZES)
    sides = {s: torch.randn(n, 6, generator=g, dtype=torch.float64) for s in ("image", "text")}
    return sides, torch.tensor([0, 1, 2, 3, 4, 0, 5, 2])


def _model() -> nn.ModuleDict:
    torch.manual_seed(1)
    return nn.ModuleDict({s: nn.Linear(6, 4, dtype=torch.float64) for s in ("image", "text")})


def _pairs() -> list[tuple[str, str]]:
    return [(name, norm.value) for name in LOSS_WEIGHTS for norm in Normalization]


class _Both(nn.Module):
    """Both towers in one forward, as DDP needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = _model()

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.towers["image"](image), self.towers["text"](text)


def _train_rank(rank: int, folder: str) -> None:
    sides, ids = _batch()
    own = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    found = {}
    for name, norm in _pairs():
        network = nn.parallel.DistributedDataParallel(_Both())
        loss = clip_loss(name, norm).double()
        image, text = network(sides["image"][own], sides["text"][own])
        gathered = {"image": gather_rows(image), "text": gather_rows(text)}
        out = loss(gathered, image_id=gather_ids(ids[own]))
        out.loss.backward()
        average_([p.grad for p in loss.parameters() if p.grad is not None])
        named = [*network.module.named_parameters(), *loss.named_parameters()]
        found[f"{name} {norm}"] = {n: p.grad for n, p in named if p.grad is not None} | {"loss": out.loss.detach()}
    torch.save(found, f"{folder}/rank{rank}.pt")


def test_two_uneven_ranks_have_the_joint_batchs_loss_and_gradients(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path), _train_rank), nprocs=len(SIZES))
    ranks = [torch.load(tmp_path / f"rank{r}.pt", weights_only=True) for r in range(len(SIZES))]
    sides, ids = _batch()
    for name, norm in _pairs():
        network, loss = _Both(), clip_loss(name, norm).double()
        image, text = network(sides["image"], sides["text"])
        out = loss({"image": image, "text": text}, image_id=ids)
        out.loss.backward()
        named = [*network.named_parameters(), *loss.named_parameters()]
        expected = {n: p.grad for n, p in named if p.grad is not None} | {"loss": out.loss.detach()}
        for found in ranks:
            got = found[f"{name} {norm}"]
            assert got.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(got[key], value, rtol=1e-10, atol=1e-12, msg=f"{name} {norm} {key}")


def test_a_single_process_gathers_nothing() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    assert gather_rows(x) is x and gather_ids(x) is x


@pytest.mark.parametrize("device", ["cuda", "cuda:9", "gpu"])
def test_cuda_where_there_is_none_is_refused(device: str) -> None:
    from mmclip.distributed import start
    from mmclip.errors import UsageError

    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(UsageError, match=f"--device {device}"):
        start(device)
