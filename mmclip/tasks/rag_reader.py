"""The reader of the RAG check: any transformers text-to-text or causal model, by folder or hub name, decoding greedily.

Configuration and tokenizer are read at once, so that what is wrong is found early; the weights at the first prompt, so
that they need not lie in memory beside the encoder's, and not at all where every prediction is there already. No code
of a folder is run, pickled weights are read with weights_only.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mmclip.errors import UserError, printable
from mmclip.models.text_encoder import quiet
from mmclip.tasks.rag import Prompt, Template, TooLong, fit

UNLIMITED = 10**9  # tokenizers that know no limit name a number above it


@dataclass
class Reader:
    """A reader: ``prompt`` puts a question and documents together, ``generate`` answers prompts, a batch at a time.

    limit: tokens of a prompt at most; None: no limit is known. chat: prompts go through the tokenizer's chat template.
    revision: what tells its files from others of the same name. Templates: with documents, and without (closed book).
    """

    name: str
    config: Any
    tokenizer: Any
    template: Template
    closed: Template
    limit: int | None
    max_new_tokens: int
    batch_size: int
    device: torch.device
    dtype: torch.dtype
    revision: str
    _model: Any = field(default=None, repr=False)

    @property
    def text_to_text(self) -> bool:
        return bool(self.config.is_encoder_decoder)

    @property
    def chat(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def facts(self) -> dict[str, Any]:
        """What its answers depend on beside the prompt, as plain values."""
        return {
            "name": self.name,
            "kind": "text-to-text" if self.text_to_text else "causal",
            "model_type": str(self.config.model_type),
            "revision": self.revision,
            "dtype": str(self.dtype).removeprefix("torch."),
            "chat_template": self.chat,
            "max_input_tokens": self.limit,
            "max_new_tokens": self.max_new_tokens,
        }

    def prompt(self, question: str, documents: Sequence[str] | None) -> Prompt:
        """What is asked, as the model reads it; None: without documents. It fits: documents are cut from the last one.

        Errors: UserError where the question and the instruction alone are too long.
        """
        question = self._plain(question)
        template = self.closed if documents is None else self.template
        try:
            return fit(
                lambda kept: self._chat(template.fill(question, kept)),
                [self._plain(d) for d in documents or ()],
                self._size,
                self.limit,
            )
        except TooLong as error:
            raise UserError(
                f"--reader {printable(self.name)}: takes {self.limit} tokens, and without any document the prompt of "
                f"{printable(question, 60)!r} has {error.size}: --max-input-tokens, or a shorter --prompt-file"
            ) from None

    @torch.inference_mode()
    def generate(self, prompts: Sequence[str]) -> list[str]:
        """One batch: what the reader writes after each prompt, without special tokens. Errors: UserError."""
        if self._model is None:
            self._model = _weights(self)
        inputs = self.tokenizer(
            list(prompts), add_special_tokens=not self.chat, padding=True, return_tensors="pt", verbose=False
        ).to(self.device)
        found = self._model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        if not self.text_to_text:
            found = found[:, inputs["input_ids"].shape[1] :]
        return list(self.tokenizer.batch_decode(found, skip_special_tokens=True))

    def _size(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=not self.chat, verbose=False)["input_ids"])

    def _chat(self, text: str) -> str:
        if not self.chat:
            return text
        try:  # readers that can think aloud are asked not to: what counts is the first line
            return str(
                self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}],
                    tokenize=False,
                    add_generation_prompt=True,
                    enable_thinking=False,
                )
            )
        except Exception as error:  # a template is a program of the folder's, run in transformers' sandbox
            raise UserError(
                f"--reader {printable(self.name)}: its chat template cannot be used: {printable(error, 200)}"
            ) from None

    def _plain(self, text: str) -> str:
        """Without what the tokenizer would take for one of its special tokens, such as the end of a turn."""
        return self._special.sub(" ", text) if self._special else text

    @functools.cached_property
    def _special(self) -> re.Pattern[str] | None:
        tokens = [t.content for t in self.tokenizer.added_tokens_decoder.values() if t.special and t.content]
        return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None


def open_reader(
    name: str,
    template: Template,
    closed: Template,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_new_tokens: int = 32,
    max_input_tokens: int | None = None,
    batch_size: int = 8,
) -> Reader:
    """A reader's configuration and tokenizer, checked. Errors: UserError, one line."""
    from transformers import AutoConfig, AutoTokenizer

    require_reader(name)
    name = str(Path(name).expanduser()) if name.startswith("~") else name
    with quiet():
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except Exception as error:  # a folder may hold anything, a hub may be away
            raise UserError(f"--reader {printable(name)}: cannot be loaded: {printable(error, 240)}") from None
    if not config.is_encoder_decoder:
        tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError(f"--reader {printable(name)}: its tokenizer has neither a padding nor an end token")
        tokenizer.pad_token = tokenizer.eos_token
    limit = _limit(name, config, tokenizer, max_input_tokens, max_new_tokens)
    return Reader(
        name, config, tokenizer, template, closed, limit, max_new_tokens, batch_size, torch.device(device), dtype,
        _revision(name, config),
    )  # fmt: skip


def require_reader(name: str) -> None:
    """Look for a folder and read nothing. Errors: UserError."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"--reader {printable(name)}: no config.json in it; a transformers folder is expected")
    elif name.startswith((".", "/", "~")):
        raise UserError(f"--reader {printable(name)}: no such folder")


def _limit(name: str, config: Any, tokenizer: Any, asked: int | None, new: int) -> int | None:
    """Tokens of a prompt: the tokenizer's own limit, or what is asked, within the positions that the model has. A
    causal model writes its answer into the same positions."""
    places = getattr(config.get_text_config(), "max_position_embeddings", None)
    own = tokenizer.model_max_length if tokenizer.model_max_length < UNLIMITED else None
    room = 0 if config.is_encoder_decoder else new
    if places is not None and (places <= new or (asked or 0) + room > places):
        raise UserError(
            f"--reader {printable(name)}: has {places} positions; --max-input-tokens {asked} and --max-new-tokens {new} "
            "do not fit" if asked else
            f"--reader {printable(name)}: has {places} positions; --max-new-tokens {new} leaves none for a prompt"
        )  # fmt: skip
    if asked is not None:
        return asked
    known = [n for n in (places, own) if n is not None]
    if not known:
        return None
    if min(known) <= room:
        raise UserError(f"--reader {printable(name)}: takes {min(known)} tokens; --max-new-tokens {new} leaves none")
    return min(known) - room


def _revision(name: str, config: Any) -> str:
    """16 hex digits: of a folder its files' names, sizes and times, of a hub name the commit."""
    folder = Path(name).expanduser()
    told: Any = str(getattr(config, "_commit_hash", None))
    if folder.is_dir():
        told = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir() if p.is_file())
    return hashlib.sha256(f"{told}{config.to_json_string()}".encode()).hexdigest()[:16]


def _weights(reader: Reader) -> Any:
    """The model, decoding greedily whatever its folder says of sampling. Errors: UserError."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig

    kind: Any = AutoModelForSeq2SeqLM if reader.text_to_text else AutoModelForCausalLM
    with quiet():
        try:
            model, loading = kind.from_pretrained(
                reader.name,
                trust_remote_code=False,
                weights_only=True,
                dtype=reader.dtype,
                output_loading_info=True,
            )
        except Exception as error:  # a folder may hold anything, a hub may be away
            raise UserError(f"--reader {printable(reader.name)}: cannot be loaded: {printable(error, 240)}") from None
    if missing := sorted(loading["missing_keys"]):
        raise UserError(
            f"--reader {printable(reader.name)}: {len(missing)} weights are not in its files, the first "
            f"{printable(missing[0], 80)}: no {reader.facts['kind']} model, or a damaged one"
        )
    own = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=reader.max_new_tokens,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id if own.eos_token_id is not None else reader.tokenizer.eos_token_id,
        pad_token_id=reader.tokenizer.pad_token_id,
        decoder_start_token_id=own.decoder_start_token_id,
    )
    return model.to(reader.device).eval()
