"""How numbers are written in tables: fractions without the leading zero, ± half of the 95% interval."""

from __future__ import annotations

import math
from typing import Any

Json = dict[str, Any]
NONE = "-"


def rate(value: float | None, ci: list[float] | None = None) -> str:
    """A fraction, with half of its interval where there is one.

    >>> rate(0.4521), rate(1.0), rate(0.4521, [0.42, 0.48]), rate(None)
    ('.452', '1.000', '.452 ±.030', '-')
    """
    if value is None:
        return NONE
    return _bare(f"{value:.3f}") + _half(ci)


def delta(change: Json) -> str:
    """A difference of fractions; ``~`` marks an interval that holds 0.

    >>> delta({"delta": -0.0312, "ci": [-0.05, -0.01], "within_noise": False})
    '-.031 ±.020'
    >>> delta({"delta": 0.002, "ci": [-0.008, 0.012], "within_noise": True})
    '~+.002 ±.010'
    """
    mark = "~" if change["within_noise"] else ""
    return f"{mark}{_bare(format(change['delta'], '+.3f'))}{_half(change['ci'])}"


def effect(found: Json | None) -> str:
    """Cohen's d with half of its interval.

    >>> effect({"value": 0.512, "ci": [0.4, 0.6]}), effect(None)
    ('+0.51 ±0.10', '-')
    """
    if found is None:
        return NONE
    ci = found["ci"]
    return f"{found['value']:+.2f}" + ("" if ci is None else f" ±{(ci[1] - ci[0]) / 2:.2f}")


def span(ci: list[float] | None, digits: int = 3) -> str:
    """An interval in full; ``""`` where there is none.

    >>> span([0.42, 0.48]), span([-0.05, 0.012]), span(None)
    ('.420–.480', '-.050, .012', '')
    """
    if ci is None or not all(isinstance(x, int | float) and math.isfinite(x) for x in ci):
        return ""
    lo, hi = (_bare(f"{x:.{digits}f}") for x in ci)
    return f"{lo}, {hi}" if ci[0] < 0 else f"{lo}–{hi}"


def number(value: float | None) -> str:
    return NONE if value is None else f"{value:#.4g}"


def _half(ci: list[float] | None) -> str:
    return "" if ci is None else " ±" + _bare(f"{(ci[1] - ci[0]) / 2:.3f}")


def _bare(number: str) -> str:
    """0.452 -> .452; the sign stays."""
    return number.replace("0.", ".", 1) if number.lstrip("+-").startswith("0.") else number
