"""The settings of train_text.py: they check themselves, build nothing and import nothing heavy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmclip.config.clip import MODEL, OPTIMIZATION, RUN
from mmclip.config.flags import flag, parse
from mmclip.config.loss import LOSS, steps_or_fraction
from mmclip.config.model_config import CONFIGS
from mmclip.config.text_model import TEXT_DATA, TextModelConfig
from mmclip.errors import UserError, printable, require
from mmclip.roles import NORMS, POSITIVES, TEXT_LOSS_WEIGHTS


@dataclasses.dataclass
class TextTrainConfig(TextModelConfig):
    """Every flag of train_text.py."""

    keep_normalize: bool = flag(
        False,
        MODEL,
        "leave a final Normalize module where it is; its vectors have no length, so only --norm cosine can be trained",
    )
    train_data: str | None = flag(
        None,
        TEXT_DATA,
        "a BEIR folder, or triples: .tsv (query, positive, negatives…) or .jsonl (query, positive, negative…)",
    )
    train_split: str = flag("train", TEXT_DATA, "split of the BEIR folder", metavar="SPLIT")
    val_data: list[str] | None = flag(
        None,
        TEXT_DATA,
        "BEIR folders that the finished model is evaluated on, each FOLDER or FOLDER:SPLIT [test]; the first is the "
        "run's results.json, others lie in evaluations/",
        type=str,
        nargs="*",
        metavar="DATA",
    )
    watch_queries: int = flag(
        100,
        TEXT_DATA,
        "training queries held out and watched while training: native and cosine side by side; 0: none",
        metavar="N",
    )
    train_fraction: float = flag(1.0, TEXT_DATA, "train on this share of the queries", metavar="F")
    loss: str = flag(
        "q2d",
        LOSS,
        "which directions train: queries find their documents (q2d), documents their queries (d2q), or both",
        choices=tuple(TEXT_LOSS_WEIGHTS),
    )
    q2d_weight: float | None = flag(None, LOSS, "weight of q2d in --loss both [0.5]", type=float, metavar="W")
    norm: str = flag(
        "cosine",
        LOSS,
        "whose length is divided out: both, neither, the query's, the document's, or a learned share of each role's",
        choices=NORMS,
    )
    positives: str = flag(
        "mask",
        LOSS,
        "documents of the batch that are judged relevant to a query, or that it shares with another: left out of the "
        "denominator, targets too, or plain negatives (as MultipleNegativesRankingLoss has them)",
        choices=POSITIVES,
    )
    logit_scale_init: float = flag(20.0, LOSS, "initial effective scale, 1 / temperature", metavar="S")
    logit_scale_max: float = flag(100.0, LOSS, "the effective scale is clamped here", metavar="S")
    learn_scale: bool = flag(False, LOSS, "train alpha, too; by default it stays where the first batch sets it")
    gamma_init: float = flag(0.5, LOSS, "initial gamma of both roles with --norm learned", metavar="G")
    focal: float = flag(0.0, LOSS, "weigh each query by (1 - p)**F, p the probability of its positives", metavar="F")
    norm_drift: float = flag(
        0.0, LOSS, "weight of the penalty E[log(length / l0)**2] of each side, l0 that of the first batch", metavar="W"
    )
    epochs: int = flag(3, OPTIMIZATION, "passes over the pairs", metavar="N")
    max_steps: int | None = flag(None, OPTIMIZATION, "stop after so many steps", type=int, metavar="N")
    batch_size: int = flag(64, OPTIMIZATION, "pairs a step and process", metavar="B")
    mini_batch_size: int | None = flag(
        None,
        OPTIMIZATION,
        "texts that go through the model at once, by gradient caching: the batch's exact gradients in less memory",
        type=int,
        metavar="B",
    )
    lr: float = flag(2e-5, OPTIMIZATION, "peak learning rate")
    gamma_lr: float = flag(1e-2, OPTIMIZATION, "peak learning rate of gamma")
    wd: float = flag(0.01, OPTIMIZATION, "weight decay of matrices")
    warmup: float = flag(
        0.1, OPTIMIZATION, "warm-up: a number of steps, or a fraction of the run below 1", type=steps_or_fraction
    )
    grad_clip_norm: float = flag(
        1.0, OPTIMIZATION, "clip the norm of the model's gradient to this; 0: never", metavar="G"
    )
    grad_checkpointing: bool = flag(False, OPTIMIZATION, "recompute activations: less memory, more time")
    logs: str = flag("logs", RUN, "folder of runs", metavar="DIR")
    name: str | None = flag(None, RUN, "name of the run's folder [time, loss and norm]")
    resume: str | None = flag(
        None,
        RUN,
        "'latest' (with --name) continues a run from its newest checkpoint, or starts it over where it has none",
    )
    save_steps: int | None = flag(None, RUN, "write a checkpoint every N steps [an epoch]", type=int, metavar="N")
    watch_steps: int | None = flag(
        None, RUN, "look at the held-out queries every N steps [an epoch]", type=int, metavar="N"
    )
    log_every_n_steps: int = flag(1, RUN, "steps between lines of metrics.jsonl", metavar="N")
    measure_start: bool = flag(
        True,
        RUN,
        "evaluate the model before the first step, too, into start.json, with the Fisher condition numbers of the "
        "training pairs",
    )
    strict: bool = flag(False, RUN, "an alarm (the angles collapse, a loss stands still) ends the run")

    def __post_init__(self) -> None:
        self.check_model()
        at_least_one = ("epochs", "max_steps", "batch_size", "mini_batch_size", "save_steps", "watch_steps",
                        "log_every_n_steps")  # fmt: skip
        for names, valid, ok in (
            (at_least_one, "a whole number of at least 1", lambda v: v >= 1),
            (("lr", "logit_scale_init", "logit_scale_max"), "a number above 0", lambda v: v > 0),
            (("gamma_lr", "wd", "warmup", "focal", "norm_drift", "watch_queries", "grad_clip_norm"),
             "a number of at least 0", lambda v: v >= 0),
            (("q2d_weight",), "a number from 0 to 1", lambda v: 0 <= v <= 1),
            (("gamma_init",), "a number between 0 and 1, both excluded", lambda v: 0 < v < 1),
            (("train_fraction",), "a number above 0 and at most 1", lambda v: 0 < v <= 1),
        ):  # fmt: skip
            require(self, names, valid, ok)
        if self.q2d_weight is not None and self.loss != "both":
            raise UserError(f"--q2d-weight {self.q2d_weight:g} needs --loss both, not --loss {self.loss}")
        if self.logit_scale_init > self.logit_scale_max:
            raise UserError(
                f"--logit-scale-init {self.logit_scale_init:g} is above --logit-scale-max {self.logit_scale_max:g}"
            )
        if self.keep_normalize and self.norm != "cosine":
            raise UserError(
                f"--keep-normalize with --norm {self.norm}: vectors that end in a Normalize module have no length to "
                "train; leave it out, or train --norm cosine"
            )
        if self.train_data is None:
            raise UserError("--train-data is missing: a BEIR folder, or a .tsv or .jsonl of triples")
        if not Path(self.train_data).exists():
            raise UserError(f"--train-data {printable(self.train_data)}: no such file or folder")
        if self.name is not None and (self.name in ("", ".", "..") or "/" in self.name or "\\" in self.name):
            raise UserError(f"--name {printable(self.name)!r}: a plain folder name is expected, without slashes")
        if self.resume is not None and (self.resume != "latest" or self.name is None):
            raise UserError(
                f"--resume {printable(self.resume)}: 'latest' is expected, with --name, the run to continue"
            )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


DESCRIPTION = """Fine-tune a text encoder for retrieval so that embedding length may carry relevance.

The query asks, documents answer (q2d). --norm acts on these roles: cosine divides out both lengths, qnorm the query's,
dnorm the document's, dot neither. A final Normalize module, which hides length, is taken off and reported."""

EXAMPLES = """examples:
  python scripts/train_text.py --model DIR/all-MiniLM-L6-v2 --train-data DIR/scifact --val-data DIR/scifact --norm qnorm
      a sentence-transformers model on a BEIR folder

  python scripts/train_text.py --model DIR --train-data triples.tsv --norm learned --mini-batch-size 16 --batch-size 256
      MS MARCO style triples, with gradients cached"""


def parse_train_text(argv: Sequence[str] | None = None) -> TextTrainConfig:
    """The command line of train_text.py. Errors: UserError, before any model or data is touched."""
    return parse(TextTrainConfig, argv, DESCRIPTION, EXAMPLES, CONFIGS)
