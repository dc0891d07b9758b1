"""The vectors of a side, made ready for tiles: lengths, unit rows, what scores are multiplied by; and exact scores.

A score with the query's length divided out, which never changes a ranking, is

    s(q, d) = cos(q, d) * w_d        w_d = |d|**(1 - gamma_d), times a power of two

:meth:`Side.weight` is that w. **The** score, of which ties are made, is its float64 value rounded once to float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmclip.errors import UserError
from mmclip.similarity import TINY

_AT_ONCE = 2**17  # numbers gathered at once: they stay in the cache
_SMALLEST = torch.finfo(torch.float32).tiny

Array = NDArray[Any]


def lengths(x: Tensor, side: str) -> Tensor:
    """Euclidean length of each row of x [N, D] in float64: [N].

    Errors: UserError naming the first row of ``side`` that holds a NaN or an infinity.
    """
    found = [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64) for part in x.split(4096)]
    length = torch.cat(found) if found else x.new_zeros(0, dtype=torch.float64)
    bad = ~torch.isfinite(length)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise UserError(
            f"{side} embeddings: row {row} holds NaN or infinity, or numbers too large to have a length "
            f"({int(bad.sum())} of {len(x)} rows do); every value must be finite"
        )
    return length


def inverse(length: Tensor) -> Tensor:
    """1 / length, and 0 for 0: a zero vector stays one."""
    return torch.where(length > 0, 1 / length, 0.0)


def exact_dots(x: Tensor, y: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """float64 dot products of x [N, D] rows i [n] with y [M, D] rows j [n]: [n], each alone and always the same."""
    step = max(1, _AT_ONCE // max(1, x.shape[1]))
    found = torch.empty(len(i), dtype=torch.float64, device=x.device)
    # The same room is used again and again: making new ones takes longer than the products.
    shape = (min(step, len(i)), x.shape[1])
    raw_a, raw_b, a, b = (x.new_empty(shape, dtype=t) for t in (x.dtype, y.dtype, torch.float64, torch.float64))
    for start in range(0, len(i), step):
        n = min(step, len(i) - start)
        a[:n] = torch.index_select(x, 0, i[start : start + n], out=raw_a[:n])
        b[:n] = torch.index_select(y, 0, j[start : start + n], out=raw_b[:n])
        torch.sum(a[:n].mul_(b[:n]), 1, out=found[start : start + n])
    return found


class Side:
    """The vectors x [N, D] of one side in the order in which tiles take them: ``order`` [n], rows of x.

    length [N]: as :func:`lengths` has it.
    """

    def __init__(self, x: Tensor, length: Tensor, order: Array) -> None:
        self.x = x
        self.order = torch.as_tensor(order, device=x.device)
        self.in_place = bool((order == np.arange(len(order))).all())
        self.length = length[self.order]
        self.inverse = inverse(self.length)
        # Where float32 can hold all of it, unit rows are made in float32: three roundings, and no float64 copy.
        safe = ((self.length > 1e-25) & (self.length < 1e25)) | (self.length == 0)
        self.factor = self.inverse.float() if x.dtype != torch.float64 and bool(safe.all()) else self.inverse

    def __len__(self) -> int:
        return len(self.order)

    def raw(self, at: slice | Tensor) -> Tensor:
        return self.x[at] if self.in_place else self.x[self.order[at]]

    def unit(self, at: slice) -> Tensor:
        """float32 rows of length 1, or 0."""
        return (self.raw(at) * self.factor[at, None]).float()

    def weight(self, gamma_d: float) -> Tensor | None:
        """w [n] in float64: |d|**(1 - gamma_d) times a power of two that makes the largest at most 1; None for all 1.

        A length below TINY is divided by TINY, as everywhere. What is 1e-38 of the largest, or less, counts as that.
        """
        w = self.length / self.length.clamp_min(TINY).pow(gamma_d)
        w = torch.where(self.length > 0, w, 1.0)  # a zero vector scores 0 by any weight
        if bool(((w - 1).abs() < 1e-9).all()):
            return None
        return torch.ldexp(w, -torch.frexp(w.max()).exponent).clamp_min(_SMALLEST)


class Scoring:
    """The scores of one ranking: ``asking`` and ``answering`` sides, and the documents' weight [n], None for all 1."""

    def __init__(self, asking: Side, answering: Side, gamma_d: float) -> None:
        self.asking, self.answering = asking, answering
        self.weight = answering.weight(gamma_d)
        self.weight32 = None if self.weight is None else self.weight.float()

    def weighted(self, cosine: Tensor, document: Tensor) -> Tensor:
        """cosine [n] in float64 of documents at positions [n] -> their scores."""
        return cosine if self.weight is None else cosine * self.weight[document]

    def exact(self, query: Tensor, document: Tensor) -> Tensor:
        """float32 scores [n] of positions query [n] and document [n]."""
        dots = exact_dots(self.asking.x, self.answering.x, self.asking.order[query], self.answering.order[document])
        return self.weighted(dots * (self.asking.inverse[query] * self.answering.inverse[document]), document).float()

    def exact_block(self, query: slice | Tensor, document: slice) -> Tensor:
        """float32 scores [q, d] of all with all, from one float64 product."""
        dots = self.asking.raw(query).double() @ self.answering.raw(document).double().T
        dots *= self.asking.inverse[query, None]
        dots *= self.answering.inverse[document]
        return (dots if self.weight is None else dots.mul_(self.weight[document])).float()
