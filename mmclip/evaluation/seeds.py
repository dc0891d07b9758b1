"""Runs that differ only in their seed, taken together: their mean with an interval over queries, and their range.

A query's number is its mean over the seeds, and queries are drawn as everywhere (those of one image together). So the
interval covers the choice of queries and not that of seeds; how far the seeds are apart stands beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmclip import metrics
from mmclip.evaluation.comparison import change
from mmclip.evaluation.results import CORRECTED, NATIVE, REVERSED, Results

Array = NDArray[Any]
Json = dict[str, Any]
# of "trained_with"; with the model, what makes two runs the same but for the seed
SAME = ("loss", "i2t_weight", "norm", "gamma_schedule", "gamma_from", "gamma_start", "gamma_end", "stage2_lr_factor",
        "focal", "norm_drift", "i2t_weight_end")  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Runs of one model, loss and normalization with different seeds."""

    name: str
    runs: list[Results]

    def values(self, pool: str, direction: str, scoring: str, metric: str = "success@1") -> Array | None:
        """[Q]: mean over the seeds for each query; None where a run does not have the scoring."""
        if any(scoring not in run.pools[pool]["retrieval"][direction] for run in self.runs):
            return None
        every = [run.query_values(pool, direction, scoring, metric).astype(np.float64) for run in self.runs]
        return np.mean(every, axis=0)

    def numbers(self, pool: str, direction: str, scoring: str, metric: str = "success@1") -> Json | None:
        """{"mean", "ci", "low", "high"}: mean with its interval over queries, the lowest and the highest seed."""
        values = self.values(pool, direction, scoring, metric)
        if values is None:
            return None
        mean, lo, hi = metrics.mean_intervals(values[:, None], self.clusters(pool, direction))[0]
        each = [run.pools[pool]["retrieval"][direction][scoring][metric] for run in self.runs]
        return {"mean": mean, "ci": [lo, hi], "low": min(each), "high": max(each)}

    def clusters(self, pool: str, direction: str) -> Array:
        return self.runs[0].array(f"{pool}/{direction}/clusters")

    def gain(self, pool: str, direction: str, scoring: str, over: Group, their: str) -> Json | None:
        """What ``scoring`` gains over ``their`` of another group (or of this one), paired: {"delta", "ci", ...}."""
        mine, other = self.values(pool, direction, scoring), over.values(pool, direction, their)
        return None if mine is None or other is None else change(other, mine, self.clusters(pool, direction))

    def row(self, pool: str, direction: str, first: Group) -> tuple[list[Json | None], list[Json | None]]:
        """([native, reversed, corrected] as ``numbers``, [corrected over reversed, native over the first group's,
        corrected over the first group's native] as ``gain``); None where one does not exist."""
        where = (pool, direction)
        return [self.numbers(*where, scoring) for scoring in (NATIVE, REVERSED, CORRECTED)], [
            self.gain(*where, CORRECTED, self, REVERSED),
            None if self is first else self.gain(*where, NATIVE, first, NATIVE),
            self.gain(*where, CORRECTED, first, NATIVE),
        ]


def group_by_seed(runs: Mapping[str, Results]) -> list[Group]:
    """The groups of at least two runs with different seeds, in the order of their first runs."""
    found: dict[str, dict[Any, Results]] = {}
    for run in runs.values():
        trained = run.json.get("trained_with") or {}
        if "loss" not in trained or run.seed is None:
            continue
        started = trained.get("initial") or {}
        kind = repr([trained.get("model", run.json.get("model")), *(trained.get(k) for k in SAME),
                     *(started.get(k) for k in ("loss", "norm"))])  # fmt: skip
        found.setdefault(kind, {}).setdefault(run.seed, run)
    groups = []
    for by_seed in found.values():
        if len(by_seed) > 1:
            every = list(by_seed.values())
            trained = every[0].json["trained_with"]
            groups.append(Group(f"{trained['loss']} {trained.get('norm')}", every))
    return groups
