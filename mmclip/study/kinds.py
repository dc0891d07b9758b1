"""What a study may be a grid of: trainings of CLIP models, or of text encoders."""

from __future__ import annotations

import dataclasses
from typing import Any

from mmclip.config import Flag, TextTrainConfig, TrainConfig
from mmclip.study.arms import COSMETIC, MEASURING

Json = dict[str, Any]
Settings = TrainConfig | TextTrainConfig


@dataclasses.dataclass(frozen=True)
class Kind:
    """How the runs of a study are told apart, and what trains one.

    script: its name, without ``.py``. settings: its class. base: the file of configs/ that runs start from where the
    study names none. ours: what only the study sets, for each of its runs; fixed: to what, where all have the same.
    cosmetic: what changes neither a run's numbers nor what is measured of it. measuring: what is measured of an arm,
    and not what it is. weight: the setting that is lambda, of the loss ``losses[0.5]``; losses: lambda -> the loss that
    it makes. initial: the setting that names the run whose weights a run starts from; None where there is none. once:
    what is measured with an arm's first seed only, because nothing random has entered before it.
    """

    script: str
    settings: type[Settings]
    base: str | None
    ours: tuple[str, ...]
    fixed: Json
    cosmetic: tuple[str, ...]
    measuring: tuple[str, ...]
    weight: str
    losses: dict[float, str]
    initial: str | None
    once: str | None = None

    @property
    def fields(self) -> dict[str, Flag]:
        return self.settings.flags


CLIP = Kind(
    script="train_clip",
    settings=TrainConfig,
    base="scenes.yaml",
    ours=("logs", "name", "resume", "may_change", "compare", "report", "keep_checkpoints", "benchmark", "seed"),
    fixed={"report": False, "keep_checkpoints": 1},
    cosmetic=COSMETIC,
    measuring=MEASURING,
    weight="i2t_weight",
    losses={0: "asym-t2i", 0.5: "sym", 1: "asym-i2t"},
    initial="init_from",
)
TEXT = Kind(
    script="train_text",
    settings=TextTrainConfig,
    base=None,
    ours=("logs", "name", "resume", "seed"),
    fixed={},
    cosmetic=("logs", "name", "resume", "log_every_n_steps", "save_steps", "strict", "device", "grad_checkpointing"),
    measuring=("measure_start", "watch_steps"),
    weight="q2d_weight",
    losses={0: "d2q", 0.5: "both", 1: "q2d"},
    initial=None,
    once="measure_start",
)
KINDS = {kind.script: kind for kind in (CLIP, TEXT)}
