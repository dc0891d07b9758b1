"""The settings of evaluate.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mmclip.config import DATA, MODEL, PRECISIONS, RUN, SCENES
from mmclip.errors import UsageError
from mmclip.flags import flag, parse


@dataclasses.dataclass
class EvaluateSettings:
    """Every flag of evaluate.py."""

    model: str | None = flag(
        None,
        MODEL,
        "a run's folder, its model/ folder, local-dir:FOLDER, an open_clip model name "
        "or a model config JSON; may be left out where only finished runs are compared",
    )
    pretrained: str | None = flag(None, MODEL, "an open_clip tag or a checkpoint file, for a model name or JSON")
    data: str = flag(SCENES, DATA, "evaluation data: a folder in clip-benchmark's layout, shards, a CSV, or builtin:…")
    split: str | None = flag(None, DATA, "split of a folder [test, else val]")
    dataset_type: str = flag("auto", DATA, "how to read the data", choices=("auto", "webdataset", "csv"))
    csv_img_key: str = flag("filepath", DATA, "CSV column of image paths")
    csv_caption_key: str = flag("title", DATA, "CSV column of captions")
    csv_separator: str = flag("\t", DATA, "CSV separator")
    batch_size: int = flag(64, RUN, "images and captions a batch", metavar="B")
    workers: int = flag(2, RUN, "processes that read and decode images", metavar="N")
    precision: str = flag("fp32", RUN, "autocast of the encoders; scores are always float32", choices=PRECISIONS)
    device: str = flag("auto", RUN, "auto, cpu, cuda or cuda:N")
    output: str | None = flag(
        None,
        RUN,
        "folder for results.json and per_query.npz [evaluations/DATA-SPLIT in the run, else in logs]",
        metavar="DIR",
    )
    compare: list[str] | None = flag(
        None, RUN, "finished runs to set beside it, on the same data", type=str, nargs="+", metavar="RUN"
    )
    control: str | None = flag(
        None,
        RUN,
        "the control run (same loss and seed, candidates normalized): was magnitude learned, is it useful?",
        metavar="RUN",
    )
    baseline: str | None = flag(None, RUN, "the sym/cosine run of that verdict", metavar="RUN")
    plot: str | None = flag(None, RUN, "write the trade-off picture of the compared runs here", metavar="PNG")
    seed: int = flag(0, RUN, "of the bootstrap")

    def __post_init__(self) -> None:
        for name, low in (("batch_size", 1), ("workers", 0), ("seed", 0)):
            if getattr(self, name) < low:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least {low}")
        if self.model is None and not self.compare:
            raise UsageError("nothing to do: give --model, or --compare with finished runs")
        if self.baseline is not None and self.control is None:
            raise UsageError("--baseline is the sym/cosine run of a verdict: it needs --control")
        if self.pretrained is not None and self.model is None:
            raise UsageError(f"--pretrained {self.pretrained} needs --model, the name of its architecture")


DESCRIPTION = """Evaluate a model in both retrieval directions under every scoring, with magnitudes, and compare runs.

Scorings: cosine, dot, qnorm, dnorm, and native, the normalization that the model was trained with. A plain CLIP is
native in cosine."""

EXAMPLES = """examples:
  python scripts/evaluate.py --model logs/demo-scenes-seed0/qnorm --data builtin:scenes
      an mmclip run on the built-in scenes

  python scripts/evaluate.py --model ViT-B-32 --pretrained laion2b_s34b_b79k --data DIR/flickr8k --output logs/zero-shot
      any open_clip model on your own data

  D=logs/demo-scenes-seed0; python scripts/evaluate.py --compare $D/baseline $D/qnorm $D/control \\
      --control $D/control --baseline $D/baseline --plot tradeoff.png
      finished runs, nothing encoded again: was magnitude learned, is it useful, and what did it cost?"""


def parse_evaluate(argv: Sequence[str] | None = None) -> EvaluateSettings:
    """The command line of evaluate.py. Errors: UsageError."""
    return parse(EvaluateSettings, argv, DESCRIPTION, EXAMPLES)
