"""The settings of sts.py: they check themselves, build nothing and import nothing heavy."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmclip.config.clip import MODEL, OPTIMIZATION, RUN
from mmclip.config.flags import flag, parse
from mmclip.config.loss import LOSS, steps_or_fraction
from mmclip.config.text_model import TEXT_DATA, TextModelConfig
from mmclip.errors import UserError, printable, require
from mmclip.roles import FIXED_NORMS, NORMS

AUTO = "auto"
PAPER_SCALE = 0.01


def scale_or_auto(text: str) -> float | str:
    """A number, or 'auto'. Errors: ArgumentTypeError."""
    if text == AUTO:
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor '{AUTO}'") from None


@dataclasses.dataclass
class StsConfig(TextModelConfig):
    """Every flag of sts.py."""

    data: str | None = flag(
        None, TEXT_DATA, "pairs that are scored: .csv, or tab-separated, with a header: score, sentence1, sentence2"
    )
    train: str | None = flag(None, TEXT_DATA, "pairs to train on first, in the same form", metavar="FILE")
    holdout: float | None = flag(
        None,
        TEXT_DATA,
        "hold this share of the --train pairs out and evaluate on them; no sentence stands on both sides of the split",
        type=float,
        metavar="F",
    )
    norms: list[str] = flag(FIXED_NORMS, LOSS, "normalizations to train", type=str, nargs="+", metavar="NORM")
    scale: float | str | None = flag(
        None,
        LOSS,
        "alpha of the trained scores; auto: what makes the effective scale of the first batch --effective-scale "
        "[1 for cosine, whose scores lie in -1 to 1, and 0.01, the paper's, for the others]",
        type=scale_or_auto,
        metavar="ALPHA",
    )
    effective_scale: float = flag(
        1.0, LOSS, "with --scale auto: alpha times the mean lengths that are kept, at the start", metavar="S"
    )
    head_only: bool = flag(
        False,
        MODEL,
        "leave the encoder as it is and train a residual layer on its vectors, which begins as none: seconds a run",
    )
    gamma_init: float = flag(0.5, LOSS, "initial gamma of both roles with --norms learned", metavar="G")
    seeds: list[int] = flag((0,), OPTIMIZATION, "each norm is trained once with each", type=int, nargs="+")
    epochs: int = flag(2, OPTIMIZATION, "passes over the pairs", metavar="N")
    batch_size: int = flag(32, OPTIMIZATION, "pairs a step", metavar="B")
    lr: float = flag(2e-5, OPTIMIZATION, "peak learning rate")
    gamma_lr: float = flag(1e-2, OPTIMIZATION, "peak learning rate of gamma")
    wd: float = flag(0.01, OPTIMIZATION, "weight decay of matrices")
    warmup: float = flag(
        0.1, OPTIMIZATION, "warm-up: a number of steps, or a fraction of the run below 1", type=steps_or_fraction
    )
    output: str | None = flag(
        None,
        RUN,
        "folder for sts.json, sts.csv and runs/, one file a run, which are kept [logs/sts/MODEL-DATA]",
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        self.norms, self.seeds = list(dict.fromkeys(self.norms)), list(dict.fromkeys(self.seeds))
        self.check_model()
        for names, valid, ok in (
            (("epochs", "batch_size"), "a whole number of at least 1", lambda v: v >= 1),
            (("lr", "effective_scale"), "a number above 0", lambda v: v > 0),
            (("gamma_lr", "wd", "warmup"), "a number of at least 0", lambda v: v >= 0),
            (("gamma_init", "holdout"), "a number between 0 and 1, both excluded", lambda v: 0 < v < 1),
        ):
            require(self, names, valid, ok)
        if self.scale != AUTO:
            require(self, ("scale",), f"a number above 0, or {AUTO}", lambda v: v > 0)
        for norm in self.norms:
            if norm not in NORMS:
                raise UserError(f"--norms {printable(norm, 60)}: unknown; valid: {', '.join(NORMS)}")
        if min(self.seeds) < 0:
            raise UserError(f"--seeds {min(self.seeds)}: expected whole numbers of at least 0")
        if self.train is None and (self.holdout is not None or self.data is None):
            raise UserError("--holdout is a share of the --train pairs: it needs --train FILE" if self.data is not None
                             or self.holdout is not None else "--data is missing: a file of pairs")  # fmt: skip
        if self.train is not None and (self.data is None) == (self.holdout is None):
            raise UserError("--train needs other pairs to evaluate on: either --data FILE, or --holdout, a share of "
                             "the training pairs")  # fmt: skip
        if self.head_only and self.train is None:
            raise UserError("--head-only says what is trained: it needs --train FILE")
        if self.effective_scale != 1.0 and self.scale != AUTO:
            raise UserError(f"--effective-scale {self.effective_scale:g} needs --scale {AUTO}")
        for name in ("data", "train"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise UserError(f"--{name} {printable(path)}: no such file")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


DESCRIPTION = """The symmetry check: pairs of sentences with a score, ordered by every scoring of a model.

Both sentences have the same role, so to divide out one side's length alone has no reason to help; --train trains each
normalization on pairs, mean (s(sentence1, sentence2) - label)**2, and looks what it costs (docs/symmetry.md)."""

EXAMPLES = """examples:
  python scripts/sts.py --model DIR/all-MiniLM-L6-v2 --data DIR/stsb/dev.tsv
      Spearman under every scoring, with intervals

  python scripts/sts.py --model DIR/all-MiniLM-L6-v2 --train DIR/stsb/dev.tsv --holdout 0.33 --seeds 0 1 \\
      --scale auto
      four norms trained from one effective scale; a repeated command trains only what is missing"""


def parse_sts(argv: Sequence[str] | None = None) -> StsConfig:
    """The command line of sts.py. Errors: UserError, before any model or data is touched."""
    return parse(StsConfig, argv, DESCRIPTION, EXAMPLES)
