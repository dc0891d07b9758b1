"""Whether two runs' means differ by more than the choice of queries, and what difference could have been seen at all.

A paired randomization test (Smucker, Allan & Carterette 2007): if the two runs are one, which of them a query's two
numbers belong to is a coin's toss, so the sign of every difference is. Of several comparisons with one
first run, p-values are corrected by Holm's procedure, too.

    smallest detectable effect = 2.8 * s / sqrt(Q)

s: sample standard deviation of the Q paired differences; 2.8 = z(0.975) + z(0.8): a true difference as large as that is
found by a two-sided test at 5 % in four samples of five. What is smaller may be there, and these queries may not tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import permutation_test

from mmclip.evaluation.comparable import same_data
from mmclip.evaluation.comparison import change
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import NATIVE, Results
from mmclip.metrics.bootstrap import DETECTABLE

FLIPS = 9999  # sign patterns tried where there are more, so p is never below 1 / 10,000

Json = dict[str, Any]


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
    """The smallest true difference that the same queries would most likely show: a [Q], b [Q]; None of one query.

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


def against_first(values: Sequence[NDArray[Any]], *, flips: int = FLIPS, seed: int = 0) -> list[Json]:
    """What each of values[1:] [Q] has over values[0] [Q], the same queries in all: {"delta", "ci", "within_noise", "p",
    "smallest_detectable", "flips"} and, of several, "p_holm"."""
    first, *others = values
    queries = np.arange(len(first))
    found: list[Json] = [
        {
            **change(first, other, queries),
            "p": randomization_p(first, other, flips=flips, seed=seed),
            "smallest_detectable": smallest_detectable(first, other),
            "flips": flips,
        }
        for other in others
    ]
    if len(found) > 1:
        for one, p in zip(found, holm([f["p"] for f in found]), strict=True):
            one["p_holm"] = p
    return found


def significance(runs: Mapping[str, Results], scoring: str = NATIVE, metric: str = "ndcg@10") -> dict[str, Json]:
    """:func:`against_first` of finished text runs (q2d), the first being what the others are measured against: name of
    every other -> its answer. Errors: UserError where the runs were not evaluated on the same data."""
    first, *others = runs.values()
    for other in others:
        same_data(first, other)
    values = [r.query_values(MAIN_POOL, "q2d", scoring, metric) for r in runs.values()]
    return dict(zip(list(runs)[1:], against_first(values), strict=True))
