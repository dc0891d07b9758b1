"""The settings of evaluate.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mmclip.config.clip import MODEL, RUN
from mmclip.config.data import DATA, SCENES, check_zeroshot
from mmclip.config.encode import EncodeConfig
from mmclip.config.flags import flag, parse
from mmclip.errors import UserError, printable


@dataclasses.dataclass
class EvaluateConfig(EncodeConfig):
    """Every flag of evaluate.py. No model where only finished runs are compared, or saved embeddings are evaluated."""

    embeddings: str | None = flag(
        None,
        MODEL,
        "saved embeddings instead of a model and data: .safetensors or .npz, as scripts/embed.py writes them",
        metavar="FILE",
    )
    distractors: list[str] | None = flag(
        None,
        DATA,
        "candidates that match nothing, each kind a pool of its own: data sets, or blank, noise, blurred, shuffled "
        "(pictures), boilerplate, shuffled-words (captions)",
        type=str,
        nargs="+",
        metavar="KIND",
    )
    zeroshot_data: str | None = flag(
        None,
        DATA,
        "pictures of classes, on which zero-shot accuracy is measured, too: a folder in clip-benchmark's layout, or "
        "builtin:scenes-classes",
    )
    zeroshot_split: str | None = flag(None, DATA, "split of that folder [test, else val]")
    output: str | None = flag(
        None,
        RUN,
        "folder for results.json and per_query.npz [evaluations/DATA-SPLIT in the run, else in logs]",
        metavar="DIR",
    )
    report: bool = flag(True, RUN, "write report.html beside results.json: a page with pictures")
    compare: list[str] | None = flag(
        None, RUN, "finished runs to set beside it, on the same data", type=str, nargs="+", metavar="RUN"
    )
    control: str | None = flag(
        None,
        RUN,
        "the control run (same loss and seed, documents normalized): was magnitude learned, is it useful?",
        metavar="RUN",
    )
    baseline: str | None = flag(None, RUN, "the sym/cosine run of that verdict", metavar="RUN")
    plot: str | None = flag(None, RUN, "write the trade-off picture of the compared runs here", metavar="PNG")
    block_bytes: int = flag(64 * 2**20, RUN, "working memory of the ranking, beside the embeddings", metavar="BYTES")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(block_bytes=2**20)
        check_zeroshot(self.zeroshot_data, self.zeroshot_split)
        if self.zeroshot_data is not None and self.model is None and self.embeddings is None:
            raise UserError("--zeroshot-data needs --model: finished runs are compared as they are")
        if self.model is None and self.embeddings is None and not self.compare:
            raise UserError("nothing to do: give --model, --embeddings, or --compare with finished runs")
        if self.embeddings is not None:
            for name in ("model", "pretrained", "data", "split", "distractors", "bank_split", "zeroshot_data"):
                if getattr(self, name) not in (None, SCENES):
                    raise UserError(
                        f"--embeddings {printable(self.embeddings)} with --{name.replace('_', '-')}: saved "
                        "embeddings are what they are; encode again with scripts/embed.py"
                    )
        if self.baseline is not None and self.control is None:
            raise UserError("--baseline is the sym/cosine run of a verdict: it needs --control")


DESCRIPTION = """Evaluate a model in both retrieval directions under every scoring, with magnitudes, and compare runs.

Scorings: cosine, dot, qnorm, dnorm, and native, the normalization that the model was trained with (a plain CLIP's is
cosine). A direction whose opposite was trained has two more: reversed, the trained scores read backwards, and, with
--bank, corrected: those less what each candidate scores on average over the bank."""

EXAMPLES = """examples:
  python scripts/evaluate.py --model logs/demo-scenes-seed0/qnorm --data builtin:scenes
      an mmclip run on the built-in scenes

  python scripts/evaluate.py --model ViT-B-32 --pretrained laion2b_s34b_b79k --data DIR/flickr8k --output logs/zero-shot
      any open_clip model on your own data

  python scripts/evaluate.py --model RUN --data DIR/flickr8k --split val --bank DIR/flickr8k --bank-size 2000
      the same for a run, its untrained direction corrected with 2,000 captions of the training split

  python scripts/evaluate.py --embeddings vectors.npz
      vectors of any two encoders: image [N, D], text [M, D], image_ids, text_ids, text_image_ids

  D=logs/demo-scenes-seed0; python scripts/evaluate.py --compare $D/baseline $D/qnorm $D/control \\
      --control $D/control --baseline $D/baseline --plot tradeoff.png
      finished runs, nothing encoded again: was magnitude learned, is it useful, and what did it cost?"""


def parse_evaluate(argv: Sequence[str] | None = None) -> EvaluateConfig:
    """The command line of evaluate.py. Errors: UserError."""
    return parse(EvaluateConfig, argv, DESCRIPTION, EXAMPLES)


@dataclasses.dataclass
class DiagnoseConfig(EvaluateConfig):
    """Every flag of diagnose.py."""

    fisher: bool = flag(True, RUN, "the condition numbers of the four Fisher matrices: a minute and more at D = 512")


DESCRIPTION_DIAGNOSE = """Everything that a model's raw vectors tell: lengths by side and role, Cohen's d and AUC of
relevance, hubness, anisotropy, effective rank, modality gap, entropy of the scores, Fisher condition numbers.

It writes what evaluate.py writes and a Fisher section; --control RUN asks whether length was learned and is useful."""

EXAMPLES_DIAGNOSE = """examples:
  python scripts/diagnose.py --model ViT-B-32 --pretrained laion2b_s34b_b79k --data DIR/flickr8k --output logs/zero-shot
      what the lengths of a plain CLIP know, without training

  python scripts/diagnose.py --embeddings vectors.safetensors --no-fisher
      the same for saved vectors, in seconds

  python scripts/diagnose.py --model RUN --data DIR/flickr8k --distractors boilerplate shuffled-words blank noise \\
      --control CONTROL
      against captions and pictures that match nothing, and against the run whose lengths no loss saw"""


def parse_diagnose(argv: Sequence[str] | None = None) -> DiagnoseConfig:
    """The command line of diagnose.py. Errors: UserError."""
    return parse(DiagnoseConfig, argv, DESCRIPTION_DIAGNOSE, EXAMPLES_DIAGNOSE)
