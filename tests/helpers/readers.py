"""Tiny readers: a T5, a Qwen3 with or without a chat template, and one that only repeats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmclip.tasks.rag import Prompt
from tests.helpers.texts import END, QWEN3, WORDS, byte_tokenizer, save_random

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


def make_t5(folder: Path, model_max_length: int = 128, seed: int = 0) -> Path:
    """A one-layer text-to-text model of width 32 over whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    tokens = ["<pad>", "</s>", "<unk>", *WORDS, "Question", "Answer", ":", "[", "]", *"0123456789"]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=model_max_length, **special)
    config = T5Config(vocab_size=len(tokens), d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2,
                      decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, dropout_rate=0.0)  # fmt: skip

    def scale(network: T5ForConditionalGeneration) -> None:
        for parameter in network.parameters():
            parameter.data.mul_(8.0)

    return save_random(folder, T5ForConditionalGeneration, config, fast, seed, scale)


def make_causal(folder: Path, chat: bool = False, seed: int = 0, positions: int = 512) -> Path:
    """A one-layer Qwen3 of width 32 over bytes."""
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer(END, "<|im_start|>", "<|im_end|>")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    if chat:
        fast.chat_template = CHAT
    config = Qwen3Config(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=positions,
                         eos_token_id=tokenizer.token_to_id(END), initializer_range=0.5, **QWEN3)  # fmt: skip
    return save_random(folder, Qwen3ForCausalLM, config, fast, seed, lambda network: None)


class Repeats:
    """Answers with the first document of its prompt, or "": its answers follow from the ranking."""

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
