"""An arm of a study: one setting with its finished runs, read back, and the arms that it is judged against."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from mmclip.config.clip import LossConfig
from mmclip.errors import UserError, printable
from mmclip.evaluation.results import CORRECTED, NATIVE, START_FILE, Results, load_results
from mmclip.reporting.page import read_lines
from mmclip.roles import CLIP_DIRECTIONS, direction_weights
from mmclip.study.plan import StudyRun, is_finished, seconds_of
from mmclip.training.log import METRICS

Json = dict[str, Any]
OWN_COLUMNS = ("loss", "i2t_weight", "norm")  # settings of the loss that have columns of their own in tables
# What two arms share to be compared: the same queries and the same data to learn from. All else (loss, schedules,
# optimization) may differ between an arm and what it is judged against; the arm that differs least is taken.
SHARED = (
    *("train_data", "train_split", "train_num_samples", "train_fraction", "permute_pairs", "val_data", "val_split"),
    *("val_holdout", "model", "pretrained", "lock_image", "lock_text"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Arm:
    """One setting of a study with its finished runs.

    Attributes:
        name: short and unique, "asym-i2t qnorm".
        settings: of its first seed, by name.
        runs: data set -> training seed -> results; the data set of the training is the first.
        logs: seed -> lines of metrics.jsonl.
        starts: seed -> start.json, the evaluation before the first step; {} where there is none.
        initial: the arm whose run of the same seed it starts from; None for random or pretrained weights.
        seconds: seed -> duration of its run, where that is known.
    """

    name: str
    settings: Json
    runs: dict[str, dict[int, Results]]
    logs: dict[int, list[Json]] = dataclasses.field(default_factory=dict)
    starts: dict[int, Json] = dataclasses.field(default_factory=dict)
    initial: str | None = None
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)

    def results(self, data: str = "") -> dict[int, Results]:
        """Training seed -> results on a data set, by default the first."""
        return self.runs.get(data or next(iter(self.runs), ""), {})

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for runs in self.runs.values() for seed in runs})

    def seeds_with(self, *others: Arm, data: str = "") -> list[int]:
        """Seeds that this arm and all others have finished."""
        return sorted(set(self.results(data)).intersection(*(o.results(data) for o in others)))

    @property
    def i2t_weight(self) -> float:
        """λ, the weight of i2t in the loss."""
        return direction_weights(self.settings["loss"], self.settings["i2t_weight"])[CLIP_DIRECTIONS[0]]

    @property
    def weights(self) -> tuple[float, float | None]:
        """λ at the start, and at the end where it changes."""
        return self.i2t_weight, self.settings["i2t_weight_end"]

    @property
    def trained(self) -> list[str]:
        """Directions whose weight is above 0 at any time."""
        weights = [w for w in self.weights if w is not None]
        i2t, t2i = (d.value for d in CLIP_DIRECTIONS)
        return [i2t] * any(w > 0 for w in weights) + [t2i] * any(w < 1 for w in weights)

    def served(self, direction: str) -> str:
        """Scoring by which a direction is served, chosen by rule: native where it was trained, else corrected."""
        return NATIVE if direction in self.trained else CORRECTED

    @property
    def fraction(self) -> float:
        """Share of the training images."""
        share = self.settings["train_fraction"]
        return 1.0 if share is None else share

    @property
    def permuted(self) -> bool:
        """Whether the arm is a null, trained on images with captions of others."""
        return bool(self.settings["permute_pairs"])

    @property
    def start(self) -> str | None:
        """Origin of its weights, None for random ones."""
        return self.initial or self.settings["init_from"] or self.settings["pretrained"]

    @property
    def loss_options(self) -> str:
        """Settings of the loss that differ from their defaults, without loss, λ and norm: "gamma_init=0.9 ..."."""
        values = [(f.name, self.settings[f.name], f.default) for f in dataclasses.fields(LossConfig)]
        return " ".join(f"{k}={v}" for k, v, default in values if k not in OWN_COLUMNS and v != default)

    @property
    def is_blind(self) -> bool:
        """Whether no part of the loss depends on a norm that the arm's normalization divides out."""
        return self.settings["gamma_schedule"] == "none" and self.settings["norm_drift"] == 0


def control_of(arm: Arm, arms: Iterable[Arm]) -> Arm | None:
    """Arm of the same directions and data whose documents are normalized (gamma_d 1), or None.

    Of several the one that differs least; cosine before dnorm, which is a control of one direction only: trained both
    ways, the documents of one direction are the queries of the other, whose norm it keeps.
    """
    arms = list(arms)
    norms = ("cosine", "dnorm") if arm.i2t_weight in (0, 1) else ("cosine",)
    blind = [a for a in arms if a.settings["norm"] in norms and a.is_blind]
    starts = {None, *(a.name for a in blind)}  # norms of another start are other norms
    same = [a for a in blind if a.initial == arm.initial and a.initial in starts and a.weights == arm.weights]
    candidates = [a for a in same if _comparable(arm, a)]
    return min(candidates, key=lambda o: (o.settings["norm"] != "cosine", _distance(arm, o)), default=None)


def baseline_of(arm: Arm, arms: Iterable[Arm]) -> Arm | None:
    """The sym/cosine arm on the same data, or None; of several the one that differs least."""
    symmetric = [a for a in arms if a.settings["norm"] == "cosine" and a.weights == (0.5, None) and a.is_blind]
    candidates = [a for a in symmetric if _comparable(arm, a)]
    return min(candidates, key=lambda o: _distance(arm, o), default=None)


def _comparable(a: Arm, b: Arm) -> bool:
    return all(a.settings.get(k) == b.settings.get(k) for k in SHARED) and bool(a.seeds_with(b))


def _distance(a: Arm, b: Arm) -> tuple[bool, int]:
    """(whether they start from different weights, number of settings that differ)."""
    differ = [k for k, v in a.settings.items() if k not in ("seed", "name", "logs") and v != b.settings.get(k)]
    return a.initial != b.initial, len(differ)


# --- finished runs, read back -----------------------------------------------------------------------------------------


def gather(runs: Sequence[StudyRun]) -> tuple[list[Arm], dict[StudyRun, str]]:
    """(arms with their finished runs, in the order of the file; finished runs that cannot be read, with the reason)."""
    arms: dict[str, Arm] = {}
    unreadable: dict[StudyRun, str] = {}
    for run in filter(is_finished, runs):
        try:
            results, lines, start = read_run(run)
        except (UserError, OSError) as error:
            unreadable[run] = str(error)
            continue
        if not lines:
            print(f"{printable(run.name, 80)}: no {METRICS}, so no curves", file=sys.stderr)
        new = Arm(run.arm, run.config.to_dict(), {}, {}, {}, run.initial.arm if run.initial else None, {})
        arm = arms.setdefault(run.arm, new)
        for data, result in results.items():
            arm.runs.setdefault(data, {})[run.seed] = result
        arm.logs[run.seed], arm.starts[run.seed] = lines, start
        if (seconds := seconds_of(run)) is not None:
            arm.seconds[run.seed] = seconds
    return [arms[name] for name in dict.fromkeys(run.arm for run in runs) if name in arms], unreadable


def read_run(run: StudyRun) -> tuple[dict[str, Results], list[Json], Json]:
    """(data set -> results, lines of metrics.jsonl, start.json or {}) of a finished run.

    Raises:
        UserError, OSError: a file is missing or damaged.
    """
    folders = run.kind.data_folders(run.config, run.folder)
    results = {name: load_results(folder) for name, folder in folders.items()}
    path = run.folder / START_FILE
    try:
        start = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise UserError(f"{printable(path)}: not readable as JSON: {printable(error, 100)}") from None
    return results, read_lines(run.folder / METRICS), start if isinstance(start, dict) else {}
