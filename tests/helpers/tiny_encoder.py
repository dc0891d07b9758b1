"""A tiny random sentence-transformers model and sentences of its forty words."""

from __future__ import annotations

from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(40)]


def tiny_encoder(folder: Path) -> SentenceTransformer:
    """One layer of width 32, without dropout; its files lie in ``folder``."""
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=16, **special).save_pretrained(str(folder))
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config).save_pretrained(str(folder))
    return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(32, "mean")], device="cpu")


def sentences(rows: int, columns: int, seed: int = 0) -> list[list[str]]:
    """Columns of ``rows`` sentences of two to five words."""
    g = torch.Generator().manual_seed(seed)
    return [
        [" ".join(WORDS[int(w)] for w in torch.randint(40, (2 + (i + c) % 4,), generator=g)) for i in range(rows)]
        for c in range(columns)
    ]
