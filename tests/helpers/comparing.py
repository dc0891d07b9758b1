"""Nested dicts of tensors held against each other, for test_sharding.py: one number, and the tensor that it is of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.sharded import FLOOR, Found


def worst(got: Found, expected: Found) -> tuple[float, str]:
    """The largest max|got - expected| / max|expected| of all tensors in two nested dicts, and its name; infinite where
    something else is not equal. The denominator is at least ``FLOOR`` of the largest among tensors of the same kind."""
    a, b = flat(got), flat(expected)
    assert a.keys() == b.keys()
    largest: dict[str, float] = {}
    for (kind, _), value in b.items():
        if isinstance(value, Tensor) and value.numel():
            largest[kind] = max(largest.get(kind, 0.0), float(value.abs().max()))
    return max((off(a[key], b[key], FLOOR * largest.get(key[0], 0.0)), " ".join(key)) for key in b)


def flat(found: Any, *path: str) -> dict[tuple[str, str], Any]:
    """(kind, name) -> value: an optimizer's tensors are of kind "exp_avg", "exp_avg_sq" and "step"."""
    if isinstance(found, dict) and found:
        return {k: v for name, inner in found.items() for k, v in flat(inner, *path, str(name)).items()}
    return {(path[-1] if path[0] == "optimizer" else path[0] if len(path) > 1 else "", " ".join(path)): found}


def off(got: Any, expected: Any, floor: float = 0.0) -> float:
    if not isinstance(expected, Tensor):
        return 0.0 if got == expected else torch.inf
    assert got.shape == expected.shape and got.isfinite().all() and expected.isfinite().all()
    if got.equal(expected):
        return 0.0
    return float((got.double() - expected.double()).abs().max()) / max(float(expected.abs().max()), floor)
