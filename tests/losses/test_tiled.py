"""The tiled loss against whole score matrices: values, every gradient, and what it costs."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmclip.losses import ContrastiveLoss, clip_loss, mask_from_ids, mask_from_matrix, tiled
from mmclip.roles import Direction, Normalization, Positives
from tests.helpers.naive import CLIP_LOSSES

B, D = 37, 5  # blocks of 8 rows: the last one is not full
IDS = mask_from_ids(
    torch.randint(0, 25, (B,), generator=torch.Generator().manual_seed(1)),
    torch.randint(0, 40, (B,), generator=torch.Generator().manual_seed(2)),
)
Found = dict[str, Tensor]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "ROWS", 8)
    monkeypatch.setitem(tiled.BLOCK, "cpu", 1)
    monkeypatch.setitem(tiled.STRIP, "cpu", 5 * B)


def rows(dtype: torch.dtype = torch.float64, norms: float = 1.0) -> Found:
    g = torch.Generator().manual_seed(0)
    sizes = {"image": B, "text": B, "more image": 6, "more text": 11}
    return {n: (torch.randn(k, D, generator=g).double() * norms).to(dtype).requires_grad_() for n, k in sizes.items()}


def sides() -> Found:
    return {s: x for s, x in rows().items() if " " not in s}


def found(
    loss: ContrastiveLoss, dtype: torch.dtype = torch.float64, more: bool = False, norms: float = 1.0, **how: Any
) -> Found:
    """Values and every gradient, with negatives of both sides if ``more``."""
    x = rows(dtype, norms)
    negatives = {s: x[f"more {s}"] for s in ("image", "text")} if more else {}
    out = loss({s: x[s] for s in ("image", "text")}, negatives=negatives, **{"positives": IDS, **how})
    out.loss.backward()
    for negative in negatives.values():  # those of a direction without gradient may have none, or 0
        negative.grad = torch.zeros_like(negative) if negative.grad is None else negative.grad
    values = {"loss": out.loss.detach()} | {f"loss_{d.value}": v for d, v in out.by_direction.items()}
    named = [*x.items(), *loss.named_parameters()]
    return values | {n: p.grad for n, p in named if p.grad is not None}


def assert_equal(a: Found, b: Found, bound: float = 1e-10) -> None:
    assert a.keys() == b.keys()
    for name, value in b.items():
        assert a[name].dtype == value.dtype and value.isfinite().all()
        # a gradient of rounding alone, where a norm is divided out, is 0
        assert float((a[name] - value).abs().max()) <= bound * max(float(value.abs().max()), 1e-3), name


@pytest.mark.parametrize("norm", list(Normalization))
@pytest.mark.parametrize("loss", CLIP_LOSSES)
def test_tiles_have_the_values_and_gradients_of_whole_matrices(
    monkeypatch: pytest.MonkeyPatch, loss: str, norm: Normalization
) -> None:
    name, weight = CLIP_LOSSES[loss]
    for policy, focal, more in product(Positives, (0.0, 2.0), (False, True)):
        how: Any = {"positives": policy, "focal": focal, "norm_drift": 0.3, "gamma_init": (0.3, 0.8)}
        ours, plain = (clip_loss(name, norm, weight, tiled=tiled, **how).double() for tiled in (True, False))
        expected = found(plain, more=more)  # which sets alpha
        assert not more or expected["more text"].any() == (loss != "asym-t2i")
        monkeypatch.setitem(tiled.KEEP, "cpu", 2 * 8 * 8 * B * more)
        assert_equal(found(ours, more=more), expected)


@pytest.mark.parametrize("norm", ["cosine", "dot", "learned"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_scores_of_ten_thousand_neither_overflow_nor_differ(norm: str, dtype: torch.dtype) -> None:
    results, top = [], 0.0
    for is_tiled in (True, False):
        loss = clip_loss("sym", norm, tiled=is_tiled).to(dtype)
        found(loss, dtype)  # calibrates
        for direction in loss.trained:
            loss.similarity.logit_scale(direction).data += 7.0
        loss.zero_grad()
        results.append(found(loss.eval(), dtype))
        x = rows(dtype)
        top = float(loss.similarity(Direction.I2T, x["image"], x["text"]).detach().abs().max())
    assert 1e4 < top < 1e6
    assert_equal(*results, bound=1e-10 if dtype == torch.float64 else 3e-3)  # scores round to 1e-3 there


@pytest.mark.parametrize("norm", list(Normalization))
def test_vectors_of_zeros_and_masked_rivals_have_the_gradients_of_whole_matrices(norm: Normalization) -> None:
    for dtype, policy in product((torch.float64, torch.float32), (Positives.MASK, Positives.MULTI)):
        results = []
        for is_tiled in (True, False):
            x = {s: t.detach().to(dtype) for s, t in sides().items()}
            for side in x.values():
                side[:9] = 0
                side.requires_grad_()
            out = clip_loss("sym", norm, positives=policy, tiled=is_tiled).to(dtype)(x, IDS)
            out.loss.backward()
            results.append({"loss": out.loss.detach()} | {s: t.grad[9:] for s, t in x.items() if t.grad is not None})
        assert_equal(*results, bound=1e-10 if dtype == torch.float64 else 1e-3)


@pytest.mark.parametrize("name", ["sym", "asym-t2i"])
def test_negatives_may_be_known_positives(name: str) -> None:
    known = torch.rand(B, B + 11, generator=torch.Generator().manual_seed(3)) < 0.1
    for policy in (Positives.MASK, Positives.MULTI):
        losses = [clip_loss(name, "qnorm", positives=policy, tiled=is_tiled).double() for is_tiled in (True, False)]
        a, b = (found(loss, more=True, positives=mask_from_matrix(known)) for loss in losses)
        assert_equal(a, b)
        without = found(clip_loss(name, "qnorm", positives=policy).double(), more=True, positives=None)
        assert a["loss"] != without["loss"]


def test_a_loss_may_be_differentiated_again_and_whole_matrices_have_second_derivatives() -> None:
    x = sides()
    value = clip_loss("sym", "learned").double()(x).loss
    once = torch.autograd.grad(value, x["image"], retain_graph=True)[0]
    again = torch.autograd.grad(-4 * value, x["image"], retain_graph=True)[0]
    torch.testing.assert_close(again, -4 * once, rtol=1e-14, atol=1e-18)
    with pytest.raises(RuntimeError, match=r"no second derivative.*tiled=False"):
        torch.autograd.grad(value, x["image"], create_graph=True)
    value = clip_loss("sym", "learned", tiled=False).double()(x).loss
    first = torch.autograd.grad(value, x["image"], create_graph=True)[0]
    assert torch.autograd.grad(first.square().sum(), x["image"])[0].abs().max() > 0


# --- cost -------------------------------------------------------------------------------------------------------------


class Costs(TorchDispatchMode):
    """Operations of matrix products, and the numbers of the largest tensor made here."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            self.operations += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and not x._is_view():
                self.numel = max(self.numel, x.numel())
        return out


def cost(loss: ContrastiveLoss) -> tuple[float, float]:
    """(operations in matrix products over B^2 D, numbers of the largest tensor over B^2)."""
    with Costs() as costs:
        loss(sides(), IDS, untrained=False).loss.backward()
    return costs.operations / (B * B * D), costs.numel / B**2


@pytest.mark.parametrize("norm", ["cosine", "qnorm", "learned"])
def test_operations_and_memory_are_those_of_the_formula(monkeypatch: pytest.MonkeyPatch, norm: str) -> None:
    both, one = clip_loss("sym", norm).double(), clip_loss("asym-t2i", norm).double()
    assert cost(both)[0] == 6 and cost(one)[0] == 6
    monkeypatch.setitem(tiled.KEEP, "cpu", 3 * 8 * B * 8)  # three blocks of eight rows
    assert cost(both)[0] == pytest.approx(8 - 2 * 24 / B) and cost(one)[0] == 6
    monkeypatch.setitem(tiled.KEEP, "cpu", 8 * B * 8 - 1)  # a byte too few for the first
    block = 8 * B / B**2
    assert cost(both) == (8, block) and cost(one) == (6, block), "a block of rows is the largest tensor"
    assert cost(clip_loss("sym", norm, tiled=False).double()) == (12, 1)
    with torch.no_grad(), Costs() as costs:
        out = both(sides())
    assert costs.operations == 2 * B * B * D and not out.loss.requires_grad
    assert out.loss.item() == both.eval()(sides()).loss.item()


@pytest.mark.parametrize("on_cuda", [True, False])
def test_half_precision_stays_on_cuda_with_exact_products_and_is_made_float32_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, on_cuda: bool
) -> None:
    types = set()

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        types.add(a.dtype)
        return torch.mm(a.float(), b.float())

    monkeypatch.setattr(tiled, "multiply", multiply)
    monkeypatch.setattr(tiled, "HALF", ("cpu",) if on_cuda else ())
    for norm in Normalization:
        a, b = (found(clip_loss("sym", norm, tiled=t), torch.bfloat16, norms=3.0) for t in (True, False))
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-5)
        assert a["image"].dtype == torch.bfloat16
        assert_equal(a, b, bound=2e-2)
    assert types == {torch.bfloat16 if on_cuda else torch.float32}
