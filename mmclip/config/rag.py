"""The settings of rag.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from mmclip.config.clip import RUN
from mmclip.config.flags import flag, parse
from mmclip.config.text_model import TEXT_DATA, TextModelConfig
from mmclip.errors import UserError, printable, require
from mmclip.roles import FIXED_NORMS

READER = "reader"
SCORINGS = (*FIXED_NORMS, "native")


@dataclasses.dataclass
class RagConfig(TextModelConfig):
    """Every flag of rag.py."""

    data: str | None = flag(None, TEXT_DATA, "a BEIR folder whose queries.jsonl has answers, a list of texts each")
    split: str = flag("test", TEXT_DATA, "split of the BEIR folder")
    limit: int | None = flag(None, TEXT_DATA, "ask only N queries, drawn by --seed", type=int, metavar="N")
    scorings: list[str] | None = flag(
        None,
        TEXT_DATA,
        "how documents are ranked; cosine, which all are compared to, is always among them [all]",
        choices=SCORINGS,
        nargs="+",
        metavar="SCORING",
    )
    top_k: int = flag(5, TEXT_DATA, "documents in a prompt", metavar="K")
    reader: str | None = flag(
        None, READER, "a transformers text-to-text or causal model: a folder or a hub name", metavar="MODEL"
    )
    prompt_file: str | None = flag(
        None, READER, "a prompt template with {documents} and {question} [a built-in one]", metavar="FILE"
    )
    closed_prompt_file: str | None = flag(
        None, READER, "the template without documents, with {question} [a built-in one]", metavar="FILE"
    )
    closed_book: bool = flag(True, READER, "ask without documents, too: what the reader knows by itself")
    max_input_tokens: int | None = flag(
        None, READER, "cut prompts to so many tokens [the reader's own limit]", type=int, metavar="TOKENS"
    )
    max_new_tokens: int = flag(32, READER, "tokens of an answer at most", metavar="TOKENS")
    reader_batch_size: int = flag(8, READER, "prompts a batch", metavar="B")
    output: str | None = flag(
        None, RUN, "folder for rag.json and predictions.jsonl [logs/rag/MODEL-DATA-SPLIT-READER]", metavar="DIR"
    )

    def __post_init__(self) -> None:
        self.check_model()
        at_least_one = ("top_k", "limit", "max_input_tokens", "max_new_tokens", "reader_batch_size")
        require(self, at_least_one, "a whole number of at least 1", lambda v: v >= 1)
        if self.data is None:
            raise UserError("--data is missing: a BEIR folder whose queries.jsonl has answers")
        if not Path(self.data).is_dir():
            raise UserError(f"--data {printable(self.data)}: no such folder")
        if self.reader is None:
            raise UserError("--reader is missing: a transformers folder or hub name, such as google/flan-t5-large")
        for name in ("prompt_file", "closed_prompt_file"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise UserError(f"--{name.replace('_', '-')} {printable(path)}: no such file")


DESCRIPTION = """Does a better ranking give better answers? The best K documents of every query, under each scoring, go
into the prompt of a local reader, whose answers are judged by exact match and token F1 (docs/rag.md).

Scorings that retrieve the same documents share their answers; finished answers are kept, so a stopped run goes on."""

EXAMPLES = """examples:
  python scripts/rag.py --model logs/my-text-run --data DIR/triviaqa --reader google/flan-t5-large
      under every scoring, against cosine and against no documents at all

  python scripts/rag.py --model DIR/all-MiniLM-L6-v2 --data DIR/nq --reader DIR/Qwen3-0.6B --scorings cosine qnorm \\
      --limit 500
      a causal reader from a folder, on 500 queries"""


def parse_rag(argv: Sequence[str] | None = None) -> RagConfig:
    """The command line of rag.py. Errors: UserError, before any model or data is touched."""
    return parse(RagConfig, argv, DESCRIPTION, EXAMPLES)
