"""Tiny text models and collections: a BERT, a Qwen3-style decoder, a BEIR folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmclip.data.text_pairs import TextPairs

WORDS = tuple(
    a + b
    for a in ["ba", "de", "fi", "go", "ku", "la", "me", "no", "pi", "ru"]
    for b in ["ck", "l", "mp", "nd", "r", "st"]
)
BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
END = "<|endoftext|>"
QWEN3 = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16, "bos_token_id": None}  # fmt: skip


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_qrels(path: Path, rows: Iterable[tuple[Any, ...]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_beir(
    folder: Path, queries: int = 24, documents: int = 60, splits: Sequence[str] = ("train", "test"), seed: int = 0
) -> Path:
    """Queries of three words, which their relevant documents (one, every third query two) hold among others.

    Queries q0, q1… take turns among the splits; documents are d0, d1…; the second relevant document has score 2.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    texts = [list(rng.choice(WORDS, 8)) for _ in range(documents)]
    rows, judged = [], {split: [] for split in splits}
    for q in range(queries):
        words = list(rng.choice(WORDS, 3, replace=False))
        rows.append({"_id": f"q{q}", "text": " ".join(words)})
        for score, d in enumerate([2 * q % documents, (2 * q + 1) % documents][: 1 if q % 3 else 2], 1):
            texts[d][:3] = words
            judged[splits[q % len(splits)]].append((f"q{q}", f"d{d}", score))
    corpus = ({"_id": f"d{d}", "title": text[0], "text": " ".join(text)} for d, text in enumerate(texts))
    write_jsonl(folder / "corpus.jsonl", corpus)
    write_jsonl(folder / "queries.jsonl", rows)
    for split, lines in judged.items():
        write_qrels(folder / "qrels" / f"{split}.tsv", lines)
    return folder


def make_bert(
    folder: Path, pooling: str | None = "mean", normalize: bool = True, seed: int = 0, prompts: Any = None
) -> Path:
    """A one-layer BERT of width 32 as a sentence-transformers folder, with or without a Normalize module at its end.

    ``pooling`` None: a plain transformers folder.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,"
    tokens = [*BERT_SPECIAL, *letters, *(f"##{c}" for c in letters), *WORDS]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), BERT_SPECIAL, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names)
    config = BertConfig(vocab_size=len(tokens), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=64, max_position_embeddings=64, hidden_dropout_prob=0.0,
                        attention_probs_dropout_prob=0.0, initializer_range=0.2)  # fmt: skip
    return _save_encoder(folder, BertModel, config, fast, pooling, normalize, seed, prompts)


def make_decoder(
    folder: Path,
    pooling: str | None = "lasttoken",
    normalize: bool = True,
    seed: int = 0,
    prompts: Any = None,
    padding_side: str = "left",
) -> Path:
    """A one-layer Qwen3-style decoder of width 32 over bytes, whose tokenizer ends every text in one token."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

    tokenizer = byte_tokenizer(END)
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, end)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, padding_side=padding_side, model_max_length=128
    )
    config = Qwen3Config(vocab_size=end + 1, max_position_embeddings=128, pad_token_id=end, eos_token_id=end,
                         initializer_range=0.2, **QWEN3)  # fmt: skip
    return _save_encoder(folder, Qwen3Model, config, fast, pooling, normalize, seed, prompts)


def byte_tokenizer(*special: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def save_random(folder: Path, kind: Any, config: Any, tokenizer: Any, seed: int, adjust: Callable[[Any], None]) -> Path:
    """Save a random network of seed ``seed``, which ``adjust`` changes before, and its tokenizer."""
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = kind(config)
        adjust(network)
    network.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


def _save_encoder(
    folder: Path, kind: Any, config: Any, tokenizer: Any, pooling: str | None, normalize: bool, seed: int, prompts: Any
) -> Path:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    def adjust(network: Any) -> None:
        torch.nn.init.normal_(network.get_input_embeddings().weight, std=0.2)  # padding's row, too
        for name, weight in network.named_parameters():
            if weight.ndim == 1 and name.endswith("weight"):  # of its norms: all ones would make all norms equal
                torch.nn.init.uniform_(weight, 0.5, 1.5)

    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    plain = save_random(folder if pooling is None else folder / "plain", kind, config, tokenizer, seed, adjust)
    if pooling is None:
        return folder
    trunk = Transformer(str(plain))
    modules = [trunk, Pooling(trunk.get_embedding_dimension(), pooling), *([Normalize()] if normalize else [])]
    model = SentenceTransformer(modules=modules, device="cpu", prompts=prompts)
    model.save_pretrained(str(folder / "st"), create_model_card=False)
    return folder / "st"


def dataset_of(pairs: TextPairs) -> Any:
    """The datasets.Dataset that a SentenceTransformerTrainer reads, with ids of query, document, negatives as label."""
    from datasets import Dataset

    columns: dict[str, Any] = {"query": pairs.queries, "positive": pairs.documents}
    columns |= {f"negative_{k + 1}": [row[k] for row in pairs.negatives] for k in range(pairs.n_negatives)}
    return Dataset.from_dict(columns | {"label": np.column_stack([pairs.query_ids, pairs.document_ids]).tolist()})
