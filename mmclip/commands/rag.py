"""rag.py: encode once, rank under every scoring, ask a reader with the best documents, and tell what it answered."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmclip import distributed
from mmclip.config import RagConfig
from mmclip.config.text import SCORINGS
from mmclip.data.beir import QUERIES, BeirCollection, open_beir
from mmclip.errors import UserError, printable
from mmclip.evaluation.results import NATIVE
from mmclip.io import json_text, lock_folder, write_text_atomically
from mmclip.models import metadata
from mmclip.models.text_encoder import load_text_model, native_scoring, text_precision
from mmclip.reporting.table import Cell, Table, change_cell, rate_cell, show
from mmclip.retrieval import Qrels, rank
from mmclip.similarity import Exponents, Normalization
from mmclip.tasks.rag import (
    CLOSED,
    CLOSED_PROMPT,
    COSINE,
    DOCUMENTS,
    EM,
    F1,
    PROMPT,
    Q2D,
    QUESTION,
    RECALL,
    Lists,
    Predictions,
    check,
    open_reader,
    read_template,
)

RAG_FILE, PREDICTIONS_FILE = "rag.json", "predictions.jsonl"
Json = dict[str, Any]


def run(settings: RagConfig) -> Json:
    """Everything that rag.py does; returns rag.json's content. Errors: UserError, one line."""
    assert settings.data is not None and settings.reader is not None and settings.model is not None
    template = read_template(settings.prompt_file, PROMPT, (DOCUMENTS, QUESTION), "--prompt-file")
    closed = read_template(settings.closed_prompt_file, CLOSED_PROMPT, (QUESTION,), "--closed-prompt-file")
    device = distributed.start(settings.device)
    half = text_precision(settings.precision, device) != "fp32"
    collection = answerable(open_beir(settings.data, settings.split), settings.limit, settings.seed)
    if settings.top_k > len(collection.documents):
        raise UserError(
            f"--top-k {settings.top_k}: {printable(settings.data)} has {len(collection.documents)} documents"
        )
    reader = open_reader(
        settings.reader, template, closed, device=device, dtype=torch.bfloat16 if half else torch.float32,
        max_new_tokens=settings.max_new_tokens, max_input_tokens=settings.max_input_tokens,
        batch_size=settings.reader_batch_size,
    )  # fmt: skip
    for question in collection.queries:
        reader.prompt(question, ())  # one that is too long by itself is told before anything is encoded
    where = _folder(settings)
    lock = lock_folder(where)
    store = Predictions(where / PREDICTIONS_FILE)
    for note in collection.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{len(collection.queries):,} queries of {printable(collection.path)} [{printable(collection.split, 60)}], "
          f"{len(collection.documents):,} documents -> {printable(where)}", file=sys.stderr)  # fmt: skip
    lists, native = _retrieve(settings, collection, device)
    results = {
        "model": settings.model,
        "native": {"gamma_q": float(native.gamma_q), "gamma_d": float(native.gamma_d)},
        "data": {
            "path": collection.path,
            "split": collection.split,
            "fingerprint": collection.fingerprint(),
            "n_queries": len(collection.queries),
            "n_documents": len(collection.documents),
            "notes": collection.notes,
        },
        "reader": reader.facts,
        "prompt": template.text,
        "closed_prompt": closed.text if settings.closed_book else None,
        "top_k": settings.top_k,
        **check(collection, lists, reader, store, closed_book=settings.closed_book, seed=settings.seed),
        "versions": metadata.versions(),
    }
    write_text_atomically(where / RAG_FILE, json_text(results, indent=1))
    print_rag(results)
    print(f"results: {printable(where / RAG_FILE)}")
    lock.close()
    return results


def answerable(collection: BeirCollection, limit: int | None = None, seed: int = 0) -> BeirCollection:
    """The queries that have accepted answers, ``limit`` of them drawn by ``seed``. Errors: UserError for none."""
    kept = [row for row, found in enumerate(collection.answers or ()) if found]
    if not kept:
        raise UserError(
            f"{printable(Path(collection.path) / QUERIES)}: no query of split {printable(collection.split, 60)!r} has "
            'answers; add them to its line: {"_id": …, "text": …, "answers": ["an accepted answer", …]}'
        )
    notes = list(collection.notes)
    if left := len(collection.queries) - len(kept):
        notes.append(f"{left} quer{'y' if left == 1 else 'ies'} without answers left out")
    if limit is not None and limit < len(kept):
        kept = sorted(np.random.default_rng(seed).choice(kept, limit, replace=False).tolist())
    new = {old: i for i, old in enumerate(kept)}
    pairs = np.isin(collection.pairs[:, 0], kept)
    assert collection.answers is not None
    return replace(
        collection,
        query_ids=[collection.query_ids[q] for q in kept],
        queries=[collection.queries[q] for q in kept],
        pairs=np.array([(new[int(q)], d) for q, d in collection.pairs[pairs]], dtype=np.int64).reshape(-1, 2),
        gains=collection.gains[pairs],
        excluded={new[q]: rows for q, rows in collection.excluded.items() if q in new},
        answers=[collection.answers[q] for q in kept],
        notes=notes,
    )


def _retrieve(
    settings: RagConfig, collection: BeirCollection, device: torch.device
) -> tuple[dict[str, Lists], Exponents]:
    """(each scoring's lists, native's exponents); the encoder is let go of before the reader's weights come."""
    model = load_text_model(settings, device)
    native, _ = native_scoring(model)
    if model.removed:
        print(f"note: {', '.join(model.removed)} taken off the end of {printable(settings.model)}", file=sys.stderr)
    query, document = (
        model.encode(texts, role, settings.encode_batch_size)
        for texts, role in ((collection.queries, "query"), (collection.documents, "document"))
    )
    del model
    gc.collect()
    asked = dict.fromkeys([COSINE, *(settings.scorings or SCORINGS)])
    exponents = {s: native if s == NATIVE else Normalization(s).exponents for s in asked}
    return best_documents(query.to(device), document.to(device), collection, exponents, settings.top_k), native


def best_documents(
    query: Tensor, document: Tensor, collection: BeirCollection, scorings: Mapping[str, Exponents], top_k: int
) -> dict[str, Lists]:
    """The best ``top_k`` document rows of every query under each scoring, without those that it excludes.

    query [Q, D], document [N, D]: raw vectors.
    """
    more = max((len(rows) for rows in collection.excluded.values()), default=0)
    qrels = Qrels(collection.pairs, collection.gains)
    ranked = rank(query, document, qrels, scorings, top_k=dict.fromkeys(scorings, top_k + more))
    none: list[int] = []
    return {
        name: [
            [int(d) for d in ids if d not in collection.excluded.get(q, none)][:top_k]
            for q, ids in enumerate(found.top_ids)
        ]
        for name, found in ranked.items()
    }


def _folder(settings: RagConfig) -> Path:
    """--output, made. Errors: UserError."""
    names = (settings.model, settings.data, settings.split, settings.reader)
    default = "-".join(re.sub(r"[^\w.-]+", "-", Path(str(n)).name).strip("-.") for n in names)
    where = Path(settings.output) if settings.output else Path("logs") / "rag" / default
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {printable(where)}: cannot be made a folder: {error.strerror}") from None
    return where


def print_rag(results: Json) -> None:
    """The table: no documents, then each list once with all scorings that have it."""
    section, k = results["rag"], results["top_k"]
    groups: dict[str, list[str]] = {}
    for name in section[Q2D]:
        groups.setdefault(results["alike"].get(name, name), []).append(name)
    rows = {"no documents": (section[CLOSED], CLOSED)} if CLOSED in section else {}
    rows |= {" = ".join(names): (section[Q2D][first], first) for first, names in groups.items()}
    heads = [EM.upper(), F1.upper(), f"answer@{k}"]
    table: list[tuple[str, list[Cell]]] = []
    for title, (numbers, name) in rows.items():
        changes = results["to_cosine"].get(name, {})
        cells = [rate_cell(numbers[m], numbers["ci"].get(m)) for m in (EM, F1, RECALL)]
        cells += [change_cell(changes.get(m)) for m in (EM, F1, RECALL)]
        table.append((title, [*cells, Cell(f"{numbers['prompts_cut']:,}")]))
    data = results["data"]
    told = f"reader {results['reader']['name']}, top {k} of {data['n_documents']:,}, {data['n_queries']:,} queries"
    columns = ["documents by", *heads, *(f"less cosine\n{head}" for head in heads), "cut"]
    note = "answer@k: an accepted answer stands in a document; cut: prompts whose documents were cut"
    show([Table(f"{printable(results['model'], 60)} · {told}", columns, table, [note])])
