"""The settings that every text script shares: which model, how it encodes, where it runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mmclip.config.clip import MODEL, PRECISIONS, RUN
from mmclip.config.flags import flag
from mmclip.errors import UserError, printable, require

TEXT_DATA = "data"
POOLINGS = ("mean", "cls", "lasttoken")


@dataclasses.dataclass
class TextModelConfig:
    """The flags of a text model."""

    model: str | None = flag(
        None,
        MODEL,
        "a sentence-transformers folder or hub name, a run of train_text.py, or a plain transformers folder with "
        "--pooling",
    )
    pooling: str | None = flag(
        None,
        MODEL,
        "how a plain transformers model makes one vector of a text: lasttoken for decoder LLMs",
        choices=POOLINGS,
    )
    random_init: bool = flag(False, MODEL, "random weights: --model is a folder with a config and a tokenizer")
    query_length: int | None = flag(
        None, MODEL, "cut queries to so many tokens [the model's own]", type=int, metavar="TOKENS"
    )
    document_length: int | None = flag(
        None, MODEL, "cut documents to so many tokens [the model's own]", type=int, metavar="TOKENS"
    )
    query_prompt: str | None = flag(None, MODEL, "put before every query [the model's own]", metavar="TEXT")
    document_prompt: str | None = flag(None, MODEL, "put before every document [the model's own]", metavar="TEXT")
    encode_batch_size: int = flag(64, RUN, "texts a batch where nothing is trained", metavar="B")
    precision: str = flag(
        "auto",
        RUN,
        "auto is bf16 autocast on CUDA and float32 on CPU; scores are always float32",
        choices=PRECISIONS,
    )
    device: str = flag("auto", RUN, "auto, cpu, cuda or cuda:N")
    seed: int = flag(0, RUN, "everything random follows from it")

    def check_model(self) -> None:
        """What can be said of the model before it is loaded. Errors: UserError."""
        require(self, ("query_length", "document_length"), "a whole number of at least 4 tokens", lambda v: v >= 4)
        require(self, ("encode_batch_size",), "a whole number of at least 1", lambda v: v >= 1)
        require(self, ("seed",), "a whole number of at least 0", lambda v: v >= 0)
        if self.model is None:
            raise UserError("--model is missing: a sentence-transformers folder or hub name")
        if self.model.startswith((".", "/", "~")) and not Path(self.model).expanduser().is_dir():
            raise UserError(f"--model {printable(self.model)}: no such folder")
