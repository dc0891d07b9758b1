"""Paired significance of finished text runs against the first of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmclip.evaluation.comparable import same_data
from mmclip.evaluation.comparison import change
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import NATIVE, Results
from mmclip.metrics.significance import FLIPS, holm, randomization_p, smallest_detectable

Json = dict[str, Any]


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
