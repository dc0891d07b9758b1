"""Paired significance of the difference of two runs' means over the same queries.

A paired randomization test (Smucker, Allan & Carterette 2007): under the null hypothesis the two runs are exchangeable,
so the sign of each query's difference is a coin's toss. Of several comparisons with one first run, p-values are
corrected by Holm's procedure (1979).

    smallest detectable effect = 2.8 * s / sqrt(Q)

s: sample standard deviation of the Q paired differences; 2.8 = z(0.975) + z(0.8): a two-sided test at 5 % detects a
true difference of this size in four samples of five. A smaller one may exist and stay undetected.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import permutation_test

from mmclip.metrics.bootstrap import DETECTABLE

FLIPS = 9999  # sign patterns tried where there are more, so p is never below 1 / 10,000


def randomization_p(a: ArrayLike, b: ArrayLike, *, flips: int = FLIPS, seed: int = 0) -> float:
    """Two-sided p of mean(b) - mean(a), the same queries in both: a [Q], b [Q]. Exact where 2**Q is at most ``flips``.

    >>> randomization_p([0.0, 0.1, 0.2, 0.3], [0.5, 0.4, 0.9, 0.6])  # of 16 patterns of signs two are as far from 0
    0.125
    """
    x, y = (np.asarray(v, dtype=np.float64) for v in (a, b))
    difference = y - x
    if not difference.any():
        return 1.0
    found = permutation_test(
        (difference,),
        lambda d, axis: d.mean(axis=axis),
        permutation_type="samples",
        n_resamples=flips,
        batch=max(1, 2**22 // len(difference)),
        vectorized=True,
        rng=np.random.default_rng(seed),
    )
    return float(found.pvalue)


def smallest_detectable(a: ArrayLike, b: ArrayLike) -> float | None:
    """Smallest detectable mean difference over the same queries: a [Q], b [Q]; None of one query.

    >>> round(smallest_detectable([0.0] * 100, [0.1, -0.1] * 50), 4)
    0.0281
    """
    difference = np.asarray(b, dtype=np.float64) - np.asarray(a, dtype=np.float64)
    n = len(difference)
    return DETECTABLE * float(difference.std(ddof=1)) / sqrt(n) if n > 1 else None


def holm(p: Sequence[float]) -> list[float]:
    """Holm-corrected p-values (1979), in the order of ``p``.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(p), 0.0
    for tried, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - tried) * p[i]))
        corrected[i] = largest
    return corrected
