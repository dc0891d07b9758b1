"""Tiny readers written on the spot: a T5, a Qwen3 with or without a chat template, and one that only repeats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mmclip.tasks.rag import Prompt
from tests.helpers.texts import END, WORDS

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


def make_t5(folder: Path, model_max_length: int = 128, seed: int = 0) -> Path:
    """A text-to-text model of one layer and width 32 over whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    tokens = ["<pad>", "</s>", "<unk>", *WORDS, "Question", "Answer", ":", "[", "]", *"0123456789"]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        model_max_length=model_max_length,
    )  # fmt: skip
    config = T5Config(vocab_size=len(tokens), d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2,
                      decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, dropout_rate=0.0)  # fmt: skip
    return _save(folder, T5ForConditionalGeneration, config, fast, seed, scale=8.0)


def make_causal(folder: Path, chat: bool = False, seed: int = 0, positions: int = 512) -> Path:
    """A Qwen3 of one layer and width 32 over bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (END, "<|im_start|>", "<|im_end|>")])
    end = tokenizer.token_to_id(END)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    if chat:
        fast.chat_template = CHAT
    config = Qwen3Config(vocab_size=len(letters) + 3, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=positions,
                         eos_token_id=end, bos_token_id=None, initializer_range=0.5)  # fmt: skip
    return _save(folder, Qwen3ForCausalLM, config, fast, seed)


def _save(folder: Path, kind: Any, config: Any, tokenizer: Any, seed: int, scale: float = 1.0) -> Path:
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = kind(config)
    for parameter in network.parameters():
        parameter.data.mul_(scale)
    network.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


class Repeats:
    """Says the first document of its prompt, and nothing where there is none: its answers follow from the ranking."""

    def __init__(self, batch_size: int = 3) -> None:
        self.batch_size = batch_size
        self.metadata = {"name": "repeats"}
        self.asked: list[str] = []

    def prompt(self, question: str, documents: Sequence[str] | None) -> Prompt:
        return Prompt(f"{question}\n{documents[0] if documents else ''}")

    def generate(self, prompts: Sequence[str]) -> list[str]:
        assert 0 < len(prompts) <= self.batch_size
        self.asked += prompts
        return [p.split("\n")[1] for p in prompts]
