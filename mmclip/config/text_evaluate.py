"""The settings of evaluate_text.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from mmclip.config.clip import RUN
from mmclip.config.flags import flag, parse
from mmclip.config.text_model import TEXT_DATA, TextModelConfig
from mmclip.errors import UserError, printable, require


@dataclasses.dataclass
class TextEvaluateConfig(TextModelConfig):
    """Every flag of evaluate_text.py. No model where finished runs are compared, or TREC run files are measured."""

    data: str | None = flag(
        None, TEXT_DATA, "a BEIR folder: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv", metavar="FOLDER"
    )
    split: str = flag("test", TEXT_DATA, "whose judgments are used")
    run: list[str] | None = flag(
        None,
        TEXT_DATA,
        "TREC run files, anybody's, measured by the same judgments",
        type=str,
        nargs="+",
        metavar="FILE",
    )
    output: str | None = flag(
        None,
        RUN,
        "folder for results.json and what lies beside it [evaluations/DATA-SPLIT in the run, else in logs]",
        metavar="DIR",
    )
    run_depth: int = flag(
        100, RUN, "documents of every query in the TREC run files that are written; 0 writes none", metavar="K"
    )
    fisher: bool = flag(False, RUN, "the condition numbers of the four Fisher matrices: seconds to minutes")
    compare: list[str] | None = flag(
        None, RUN, "finished runs to set beside it, on the same data", type=str, nargs="+", metavar="RUN"
    )
    control: str | None = flag(
        None,
        RUN,
        "the control run (same loss and seed, documents normalized): was magnitude learned, is it useful?",
        metavar="RUN",
    )
    baseline: str | None = flag(None, RUN, "the cosine run of the same loss, of that verdict", metavar="RUN")
    block_bytes: int = flag(64 * 2**20, RUN, "working memory of the ranking, beside the embeddings", metavar="BYTES")

    def __post_init__(self) -> None:
        if self.model is not None:
            self.check_model()
            if self.data is None:
                raise UserError("--data is missing: a BEIR folder to evaluate the model on")
        elif self.run is None and not self.compare:
            raise UserError("nothing to do: give --model and --data, --run with TREC files, or --compare with runs")
        if self.model is None:
            for name in ("output", "fisher"):
                if getattr(self, name):
                    raise UserError(f"--{name} needs --model: finished runs and run files are compared as they are")
        require(self, ("run_depth",), "a whole number of at least 0", lambda v: v >= 0)
        require(self, ("block_bytes",), f"a whole number of at least {2**20}", lambda v: v >= 2**20)
        if self.run and self.data is None:
            raise UserError("--run needs --data: the folder whose judgments the files are measured by")
        for path in self.run or []:
            if not Path(path).is_file():
                raise UserError(f"--run {printable(path)}: no such file")
        if self.baseline is not None and self.control is None:
            raise UserError("--baseline is the cosine run of a verdict: it needs --control")


DESCRIPTION = """Evaluate a text encoder's retrieval under every scoring, with magnitudes, and compare runs.

Scorings: cosine, dot, qnorm, dnorm, and native, the normalization that the model was trained with. nDCG@10, R@100 and
MRR@10 are ir_measures' over exact lists; TREC run files and judgments are written beside results.json."""

EXAMPLES = """examples:
  python scripts/evaluate_text.py --model DIR/all-MiniLM-L6-v2 --data DIR/scifact
      any sentence-transformers model on a BEIR folder

  L=logs; python scripts/evaluate_text.py --compare $L/cosine $L/qnorm $L/dnorm --control $L/dnorm --baseline $L/cosine
      finished runs, nothing encoded again: differences with p-values, and whether length was learned and is useful

  python scripts/evaluate_text.py --data DIR/scifact --run bm25.trec --model logs/qnorm
      somebody's run file beside a model"""


def parse_evaluate_text(argv: Sequence[str] | None = None) -> TextEvaluateConfig:
    """The command line of evaluate_text.py. Errors: UserError, before any model or data is touched."""
    return parse(TextEvaluateConfig, argv, DESCRIPTION, EXAMPLES)
