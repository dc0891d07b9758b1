"""The settings of run_study.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mmclip.config.clip import RUN
from mmclip.config.flags import flag, parse
from mmclip.errors import UserError

STUDY_DEFAULT = "study_scenes"


@dataclasses.dataclass
class StudyConfig:
    """Every flag of run_study.py."""

    config: str = flag(
        STUDY_DEFAULT, RUN, "the study: a YAML file, or the name of one in configs/ (its grid is explained below)"
    )
    logs: str = flag("logs", RUN, "the study lands in LOGS/NAME/", metavar="DIR")
    name: str | None = flag(None, RUN, "name of the study's folder [that of its file]")
    seeds: list[int] | None = flag(None, RUN, "seeds instead of the file's", type=int, nargs="+", metavar="SEED")
    jobs: int = flag(0, RUN, "runs at once; 0: one a GPU, without a GPU one a core, four at most", metavar="N")
    set: list[str] | None = flag(
        None,
        RUN,
        "settings of every run instead of the file's and its arms', such as train_data=DIR cache_dir=DIR",
        type=str,
        nargs="+",
        metavar="K=V",
    )
    dry_run: bool = flag(False, RUN, "list the runs, and which are finished; train nothing")

    def __post_init__(self) -> None:
        if self.jobs < 0:
            raise UserError(f"--jobs {self.jobs}: expected 0 or more")
        if self.name is not None and (self.name in ("", ".", "..") or "/" in self.name or "\\" in self.name):
            raise UserError(f"--name {self.name!r}: a plain folder name is expected, without slashes")
        for text in self.set or []:
            if "=" not in text:
                raise UserError(f"--set {text!r}: expected SETTING=VALUE")
        if self.seeds and (min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds)):
            raise UserError(f"--seeds {' '.join(map(str, self.seeds))}: different whole numbers from 0 on are expected")


DESCRIPTION = """Run a grid of trainings and show what magnitude learning costs: the paper's Table 6, the trade-off of
both directions, verdicts against controls, and what the correction of the untrained direction gives back.

Each run is an ordinary run of train_clip.py, or of train_text.py, in a folder of its own, known by its settings: a
study that was stopped, or whose file has grown, trains only what is missing, and goes on inside a run that was cut. A
finished run whose files are damaged is put aside (RUN.damaged) and trained again. A run that fails is listed and stops
no other."""

EXAMPLES = """the study's file: settings of train_clip.py for all runs, and
  config: flickr8k_heads            what they start from, one of configs/ or a path
  seeds: [0, 1, 2]                  every arm runs with each
  arms:                             settings of each arm; a list is an axis of the grid, equal arms are run once
    - {loss: sym, norm: [cosine, dot, qnorm]}
    - {loss: sym, norm: qnorm, i2t_weight: [0, 0.25, 0.5, 0.75, 1]}
    - {loss: sym, norm: dot, init_from: sym cosine, name: fine-tuned}     from the run of that arm and seed
    - {loss: sym, norm: learned, seeds: [0, 1, 2, 3, 4]}                  with seeds of its own
  script: train_text                for text encoders: settings of train_text.py, and a page of its own

examples:
  python scripts/run_study.py
      configs/study_scenes.yaml: built-in data, eight minutes on two cores

  MMCLIP_SHARED=DIR python scripts/run_study.py --config study_flickr8k_heads
      projection heads on frozen trunks; again after an interruption, it goes on where it was

  MMCLIP_SHARED=DIR python scripts/run_study.py --config study_scifact
      five norms of a text encoder, in domain and out of it

  python scripts/run_study.py --config my_study.yaml --set train_data=DIR --seeds 0 1 2 3 4 --dry-run
      which runs that would be"""


def parse_study(argv: Sequence[str] | None = None) -> StudyConfig:
    """The command line of run_study.py. Errors: UserError."""
    return parse(StudyConfig, argv, DESCRIPTION, EXAMPLES)
