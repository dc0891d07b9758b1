"""An arm of a study: one setting with its finished runs, and which other arms it is judged against."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mmclip.config import TrainConfig
from mmclip.evaluation.results import Results
from mmclip.roles import LOSS_WEIGHTS, Direction

Json = dict[str, Any]
# What changes neither a run's numbers nor what is measured of it
COSMETIC = ("logs", "name", "resume", "may_change", "workers", "log_every_n_steps", "save_steps", "keep_checkpoints",
            "report", "verbose", "report_to", "compare", "strict", "max_bad_samples", "device", "cache_dir", "torchcompile",
            "benchmark", "grad_checkpointing")  # fmt: skip
# What is measured of an arm, and not what it is
MEASURING = ("measure_start", "zeroshot_data", "zeroshot_split", "val_steps", "bank_size")
# What two arms must share to be compared: which questions are asked, and what was there to learn from. The rest (loss,
# schedules, optimization) may differ between an arm and what it is judged against; the arm that differs least is taken.
SHARED = ("train_data", "train_split", "train_num_samples", "train_fraction", "permute_pairs", "val_data", "val_split",
          "val_holdout", "model", "pretrained", "lock_image", "lock_text")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Arm:
    """One setting of a study.

    name: short and unique, "asym-i2t qnorm". settings: of its first seed. runs: seed -> results. logs: seed -> lines of
    metrics.jsonl. starts: seed -> start.json, what was measured before the first step ({} where nothing was). initial:
    the arm whose run of the same seed it starts from, None for random or pretrained weights. seconds: seed -> how long
    its run took, where that is known.
    """

    name: str
    settings: TrainConfig
    runs: Mapping[int, Results]
    logs: Mapping[int, list[Json]]
    starts: Mapping[int, Json]
    initial: str | None = None
    seconds: Mapping[int, float] = dataclasses.field(default_factory=dict)

    @property
    def i2t_weight(self) -> float:
        """lambda, the weight of i2t in the loss."""
        asked = self.settings.i2t_weight
        return LOSS_WEIGHTS[self.settings.loss] if asked is None else asked

    def trains(self, direction: str) -> bool:
        """Whether a direction has a weight above 0 at any time."""
        end = self.settings.i2t_weight_end
        weights = [self.i2t_weight, *([end] if end is not None else [])]
        return any((w if direction == Direction.I2T.value else 1 - w) > 0 for w in weights)

    def seeds_with(self, *others: Arm) -> list[int]:
        """The seeds that this arm and all ``others`` have finished."""
        return sorted(set(self.runs).intersection(*(o.runs for o in others)))


def control_of(arm: Arm, arms: Iterable[Arm]) -> Arm | None:
    """The arm of the same directions and data whose documents' length no loss ever saw (gamma_d 1); None where there is
    none. Of several the one that differs least; cosine before dnorm, which is one for a single direction only: trained
    both ways, the documents of one direction are the queries of the other, whose length it keeps."""
    arms = list(arms)
    norms = ("cosine", "dnorm") if arm.i2t_weight in (0, 1) else ("cosine",)
    blind = {None, *(a.name for a in arms if a.settings.norm in norms and _never_sees(a))}
    candidates = [
        other
        for other in arms
        if other.settings.norm in norms
        and _never_sees(other)
        and other.initial == arm.initial  # lengths of another start are other lengths
        and other.initial in blind
        and (other.i2t_weight, other.settings.i2t_weight_end) == (arm.i2t_weight, arm.settings.i2t_weight_end)
        and _comparable(arm, other)
    ]
    return min(candidates, key=lambda o: (o.settings.norm != "cosine", _distance(arm, o)), default=None)


def baseline_of(arm: Arm, arms: Iterable[Arm]) -> Arm | None:
    """The sym/cosine arm on the same data, None where there is none. Of several the one that differs least, which for a
    fine-tuned arm is the one that started where it did."""
    candidates = [
        other
        for other in arms
        if other.settings.norm == "cosine"
        and other.i2t_weight == 0.5
        and other.settings.i2t_weight_end is None
        and _never_sees(other)
        and _comparable(arm, other)
    ]
    return min(candidates, key=lambda o: _distance(arm, o), default=None)


def _comparable(a: Arm, b: Arm) -> bool:
    """Whether both have the same data, and a seed in common."""
    mine, other = a.settings.to_dict(), b.settings.to_dict()
    return all(mine.get(k) == other.get(k) for k in SHARED) and bool(a.seeds_with(b))


def _never_sees(arm: Arm) -> bool:
    """Whether no part of the loss ever sees a length that the arm's normalization divides out."""
    return arm.settings.gamma_schedule == "none" and arm.settings.norm_drift == 0


def _distance(a: Arm, b: Arm) -> tuple[bool, int]:
    """(whether they start from different weights, how many settings differ)."""
    mine, other = a.settings.to_dict(), b.settings.to_dict()
    differ = [k for k in mine if k not in ("seed", "name", "logs") and mine[k] != other.get(k)]
    return a.initial != b.initial, len(differ)
