"""The tiled loss against whole score matrices: values, every gradient, and what it costs."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmclip.losses import ContrastiveLoss, clip_loss, mask_from_ids, mask_from_matrix, tiled
from mmclip.roles import Direction, Normalization, Positives

LOSSES = {"sym": ("sym", None), "sym 0.3": ("sym", 0.3), "asym-i2t": ("asym-i2t", None), "asym-t2i": ("asym-t2i", None)}
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
    monkeypatch.setitem(tiled.PIECE, "cpu", 10)  # nor are the last columns ten
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
@pytest.mark.parametrize("loss", LOSSES)
def test_tiles_have_the_values_and_gradients_of_whole_matrices(
    monkeypatch: pytest.MonkeyPatch, loss: str, norm: Normalization
) -> None:
    name, weight = LOSSES[loss]
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


@pytest.mark.parametrize("name", ["sym", "asym-t2i"])
def test_negatives_may_be_known_positives(name: str) -> None:
    known = torch.rand(B, B + 11, generator=torch.Generator().manual_seed(3)) < 0.1
    for policy in (Positives.MASK, Positives.MULTI):
        losses = [clip_loss(name, "qnorm", positives=policy, tiled=is_tiled).double() for is_tiled in (True, False)]
        a, b = (found(loss, more=True, positives=mask_from_matrix(known)) for loss in losses)
        assert_equal(a, b)
        assert (
            a["loss"] != found(clip_loss(name, "qnorm", positives=policy).double(), more=True, positives=None)["loss"]
        )


def test_a_direction_without_weight_has_its_value_and_no_gradient() -> None:
    both, alone = (clip_loss("asym-i2t", "learned").double() for _ in range(2))
    a, b = found(both), found(alone, untrained=False)
    assert "loss_t2i" in a and "loss_t2i" not in b
    assert_equal({n: v for n, v in a.items() if n != "loss_t2i"}, b)
    assert_equal(a, found(clip_loss("asym-i2t", "learned", tiled=False).double()))


def test_a_second_derivative_is_refused_and_whole_matrices_have_one() -> None:
    x = sides()
    value = clip_loss("sym", "learned").double()(x).loss
    with pytest.raises(RuntimeError, match=r"no second derivative.*tiled=False"):
        torch.autograd.grad(value, x["image"], create_graph=True)
    value = clip_loss("sym", "learned", tiled=False).double()(x).loss
    first = torch.autograd.grad(value, x["image"], create_graph=True)[0]
    assert torch.autograd.grad(first.square().sum(), x["image"])[0].abs().max() > 0


def test_a_loss_may_be_differentiated_twice_over_and_scaled() -> None:
    x = sides()
    value = clip_loss("sym", "qnorm").double()(x).loss
    once = torch.autograd.grad(value, x["image"], retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(-4 * value, x["image"])[0], -4 * once, rtol=1e-14, atol=0)


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
    (operations, numbers), (of_one, numbers_of_one) = cost(both), cost(one)
    assert operations == 8 and of_one == 6
    assert numbers == numbers_of_one == 8 * B / B**2, "a block of rows is the largest tensor"
    assert cost(clip_loss("sym", norm, tiled=False).double()) == (12, 1)


def test_without_gradients_only_the_value_is_made() -> None:
    loss = clip_loss("sym", "dnorm").double()
    with torch.no_grad(), Costs() as costs:
        out = loss(sides())
    assert costs.operations == 2 * B * B * D
    assert not out.loss.requires_grad
    assert out.loss.item() == loss.eval()(sides()).loss.item()


# --- parts ------------------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    n=st.integers(1, 4),
    dim=st.sampled_from([0, 1]),
    hidden=st.floats(0, 0.9),
    scale=st.sampled_from([1.0, 1e4]),
    seed=st.integers(0, 999),
)
def test_log_sum_exp_in_any_blocks_is_that_of_the_whole(
    sizes: list[int], n: int, dim: int, hidden: float, scale: float, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    whole = torch.randn(sum(sizes), n, generator=g, dtype=torch.float64) * scale
    whole[torch.rand(whole.shape, generator=g) < hidden] = -torch.inf
    running = tiled.LogSumExp(n, whole)
    for block in whole.split(sizes):
        block = block if dim == 0 else block.T
        running.add(block, slice(None), dim)
    torch.testing.assert_close(running.value(), whole.logsumexp(0), rtol=1e-12, atol=1e-12)


def test_half_precision_rows_stay_as_they_are_and_their_products_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with its product that is float32 written out."""
    monkeypatch.setattr(tiled, "multiply", lambda a, b, out=None: torch.mm(a.float(), b.float()))
    monkeypatch.setattr(tiled, "takes_half", lambda x: x.dtype == torch.bfloat16)
    for norm in Normalization:
        a, b = (found(clip_loss("sym", norm, tiled=t), torch.bfloat16, norms=3.0) for t in (True, False))
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-5)
        assert a["image"].dtype == torch.bfloat16
        assert_equal(a, b, bound=2e-2)


def test_half_precision_on_a_cpu_is_made_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, seen = tiled.multiply, set()

    def noting(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        seen.add(a.dtype)
        return plain(a, b, out)

    monkeypatch.setattr(tiled, "multiply", noting)
    found(clip_loss("sym", "qnorm"), torch.bfloat16)
    assert seen == {torch.float32}
