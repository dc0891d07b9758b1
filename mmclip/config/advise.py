"""The settings of advise.py: they check themselves, build nothing and import nothing heavy."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from mmclip.config.clip import MODEL, RUN
from mmclip.config.data import DATA
from mmclip.config.flags import flag, parse
from mmclip.config.text_model import TextModelConfig
from mmclip.errors import UserError, printable, require

TRIAL = "trial"
TASKS = ("auto", "text", "clip")
DIRECTIONS = {"text": ("q2d",), "clip": ("both", "i2t", "t2i")}  # the first is the default
MAX_ITEMS = {"text": 6000, "clip": 2500}  # documents; images
METRIC = r"(success|recall|mrr|ndcg)@[1-9]\d{0,5}|map"


@dataclasses.dataclass
class AdviseConfig(TextModelConfig):
    """Every flag of advise.py; those of a text model that a CLIP model does not have say nothing there."""

    pretrained: str | None = flag(None, MODEL, "of a CLIP model's name or JSON: an open_clip tag or a checkpoint file")
    data: str | None = flag(
        None, DATA, "a BEIR folder (text), or what evaluate.py takes (clip): a folder of shards, a CSV, builtin:scenes"
    )
    task: str = flag("auto", DATA, "auto looks at the data: a folder with corpus.jsonl is text", choices=TASKS)
    split: str | None = flag(None, DATA, "training split; a BEIR folder without one lends its test queries [train]")
    max_items: int | None = flag(
        None, DATA, "encode at most so many documents (text) or images with their captions (clip); what the queries "
        "need is kept, the rest drawn at random [6000 documents, 2500 images]", type=int, metavar="N",
    )  # fmt: skip
    dataset_type: str = flag("auto", DATA, "how to read the data", choices=("auto", "webdataset", "csv"))
    csv_img_key: str = flag("filepath", DATA, "CSV column of image paths")
    csv_caption_key: str = flag("title", DATA, "CSV column of captions")
    csv_separator: str = flag("\t", DATA, "CSV separator")
    direction: str | None = flag(
        None, TRIAL, "who asks: q2d (text); i2t or t2i, trained alone, or both, trained together and judged by their "
        "mean (clip) [q2d; both]", choices=("q2d", "i2t", "t2i", "both"),
    )  # fmt: skip
    held_out: float = flag(0.4, TRIAL, "share of the training queries (images) that only judge", metavar="F")
    seeds: int = flag(3, TRIAL, "trials of each norm", metavar="N")
    steps: int = flag(200, TRIAL, "most steps of a head; fewer where held-out queries are answered better", metavar="N")
    batch_size: int = flag(128, TRIAL, "pairs a step", metavar="B")
    rank: int | None = flag(
        None, TRIAL, "heads are the identity plus a matrix of this rank [any matrix]", type=int, metavar="R"
    )
    metric: str = flag("ndcg@10", TRIAL, "what is compared: success@K, recall@K, mrr@K, ndcg@K or map")
    margin: float = flag(0.005, TRIAL, "a gain that does not matter", metavar="X")
    fisher: bool = flag(True, TRIAL, "the condition numbers of the Fisher matrices, as evidence: a minute at D = 512")
    output: str | None = flag(
        None, RUN, "folder for advise.json, advise.png and the encoded vectors [logs/advice/MODEL-DATA]", metavar="DIR"
    )
    workers: int = flag(2, RUN, "processes that read and decode images", metavar="N")

    def __post_init__(self) -> None:
        for names, valid, ok in (
            (("seeds",), "a whole number of at least 2: one seed has no spread", lambda v: v >= 2),
            (("steps", "rank", "encode_batch_size"), "a whole number of at least 1", lambda v: v >= 1),
            (("batch_size",), "a whole number of at least 2", lambda v: v >= 2),
            (("max_items",), "a whole number of at least 100", lambda v: v >= 100),
            (("seed", "workers"), "a whole number of at least 0", lambda v: v >= 0),
            (("margin",), "a number of at least 0", lambda v: v >= 0),
            (("held_out",), "a number from 0.1 to 0.8", lambda v: 0.1 <= v <= 0.8),
        ):
            require(self, names, valid, ok)
        if not re.fullmatch(METRIC, self.metric):
            raise UserError(
                f"--metric {printable(self.metric, 60)}: success@K, recall@K, mrr@K, ndcg@K or map is expected"
            )
        if self.data is None:
            raise UserError("--data is missing: a BEIR folder, or images with captions as evaluate.py takes them")
        if self.model is None:
            raise UserError("--model is missing: a sentence-transformers model (text), or a CLIP model or run")
        if self.direction is not None and self.direction not in DIRECTIONS[self.kind]:
            raise UserError(
                f"--direction {self.direction} of {self.kind} data: expected {' or '.join(DIRECTIONS[self.kind])}"
            )
        if self.kind == "text":
            self.check_model()

    @property
    def kind(self) -> str:
        """The task, "text" or "clip", by what the data's folder holds where it is not told."""
        if self.task != "auto":
            return self.task
        assert self.data is not None
        try:
            return "text" if (Path(self.data) / "corpus.jsonl").is_file() else "clip"
        except OSError:  # longer than a name may be, as a pattern of many shards is
            return "clip"

    @property
    def asked(self) -> str:
        return self.direction or DIRECTIONS[self.kind][0]

    @property
    def limit(self) -> int:
        return MAX_ITEMS[self.kind] if self.max_items is None else self.max_items


DESCRIPTION = """Which side should be normalized for this model and these data: cosine, dot, qnorm, dnorm or learned?

Raw vectors of the training split are encoded once. On them a linear head, the identity at first, is trained with each
norm and several seeds, and judged on training queries that were held out whole; the evaluation split is not read.

The rule, fixed before any number is seen; a difference counts where its 95% interval over queries and seeds does:
  1. Fewer than 30 held-out queries (images) for which any head finds anything: can't tell.
  2. A norm is recommended where its head beats cosine's, and, where it keeps the documents' length, also its control's
     (the same with documents normalized) and its own vectors ranked by cosine: length helps, and not luck. Of several,
     the one whose gain over cosine is the most certain; those that cannot be told from it are named.
  3. Else cosine, where no other norm can gain --margin or more.
  4. Else can't tell: norms that cannot gain --margin are named, and for the others the smallest effect that could
     have been seen.
Lengths' CV, zero-shot scorings and Fisher condition numbers are shown as evidence and take no part in the rule.

Not covered: training the encoder itself. Heads on frozen vectors cannot give a length what the encoder threw away."""

EXAMPLES = """examples:
  python scripts/advise.py --model DIR/all-MiniLM-L6-v2 --data DIR/scifact --document-length 64
      a sentence-transformers model on a BEIR folder, documents cut to 64 tokens

  python scripts/advise.py --model ViT-B-32 --pretrained laion2b_s34b_b79k --data DIR/flickr8k
      an open_clip model on pictures with captions, both directions

  python scripts/advise.py --model logs/my-run --data DIR/flickr8k --split "train[holdout 1000]" --direction t2i
      a run, on training pictures that it was not trained on (--val-holdout 1000)"""


def parse_advise(argv: Sequence[str] | None = None) -> AdviseConfig:
    """The command line of advise.py. Errors: UserError, before any model or data is touched."""
    return parse(AdviseConfig, argv, DESCRIPTION, EXAMPLES)
