"""mmclip rag: encode once, rank under every scoring, read the best documents, and compare the answers."""

from __future__ import annotations

import gc
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
from mmclip.io import flat, json_text, lock_folder, output_folder, write_text_atomically
from mmclip.models.metadata import versions
from mmclip.models.text_encoder import load_text_model, native_scoring, text_precision
from mmclip.reporting.table import Cell, Table, change_cell, rate_cell, show
from mmclip.retrieval import Qrels, rank
from mmclip.roles import Exponents, Normalization
from mmclip.tasks.rag import CLOSED, COSINE, EM, F1, Q2D, RECALL, Lists, Predictions, Reader, check

RAG_FILE, PREDICTIONS_FILE = "rag.json", "predictions.jsonl"
Json = dict[str, Any]


def run(settings: RagConfig) -> Json:
    """Check the answers that each scoring leads to; returns the content of rag.json (UserError in one line)."""
    device = distributed.start(settings.device)
    half = text_precision(settings.precision, device) != "fp32"
    collection = answerable(open_beir(str(settings.data), settings.split), settings.limit, settings.seed)
    n_documents = len(collection.documents)
    if settings.top_k > n_documents:
        raise UserError(f"--top-k {settings.top_k}: {printable(settings.data)} has {n_documents} documents")
    reader = Reader(settings, device, torch.bfloat16 if half else torch.float32)
    for question in collection.queries:
        reader.prompt(question, ())  # too long a question is refused before anything is encoded
    names = (settings.model, settings.data, settings.split, settings.reader)
    folder = output_folder(settings.output, Path("logs") / "rag" / "-".join(flat(Path(str(n)).name) for n in names))
    lock = lock_folder(folder)
    store = Predictions(folder / PREDICTIONS_FILE)
    for note in collection.notes:
        print(f"note: {note}", file=sys.stderr)
    source = f"{printable(collection.path)} [{printable(collection.split, 60)}]"
    print(
        f"{len(collection.queries):,} queries of {source}, {n_documents:,} documents -> {printable(folder)}",
        file=sys.stderr,
    )
    lists, native = _retrieve(settings, collection, device)
    results = {
        "model": settings.model,
        "native": {"gamma_q": float(native.gamma_q), "gamma_d": float(native.gamma_d)},
        "data": {
            "path": collection.path,
            "split": collection.split,
            "fingerprint": collection.fingerprint(),
            "n_queries": len(collection.queries),
            "n_documents": n_documents,
            "notes": collection.notes,
        },
        "reader": reader.metadata,
        "prompt": reader.template,
        "closed_prompt": reader.closed if settings.closed_book else None,
        "top_k": settings.top_k,
        **check(collection, lists, reader, store, closed_book=settings.closed_book, seed=settings.seed),
        "versions": versions(),
    }
    write_text_atomically(folder / RAG_FILE, json_text(results, indent=1))
    show([rag_table(results)])
    print(f"results: {printable(folder / RAG_FILE)}")
    lock.close()
    return results


def answerable(collection: BeirCollection, limit: int | None = None, seed: int = 0) -> BeirCollection:
    """The queries that have accepted answers, ``limit`` of them drawn by ``seed`` (UserError for none)."""
    kept = [row for row, accepted in enumerate(collection.answers or ()) if accepted]
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
    rows = np.isin(collection.pairs[:, 0], kept)
    assert collection.answers is not None
    return replace(
        collection,
        query_ids=[collection.query_ids[q] for q in kept],
        queries=[collection.queries[q] for q in kept],
        pairs=np.column_stack([np.searchsorted(kept, collection.pairs[rows, 0]), collection.pairs[rows, 1]]),
        gains=collection.gains[rows],
        excluded={i: collection.excluded[q] for i, q in enumerate(kept) if q in collection.excluded},
        answers=[collection.answers[q] for q in kept],
        notes=notes,
    )


def _retrieve(
    settings: RagConfig, collection: BeirCollection, device: torch.device
) -> tuple[dict[str, Lists], Exponents]:
    """(each scoring's lists, native's exponents); the encoder is freed before the reader's weights come."""
    model = load_text_model(settings, device)
    native, _ = native_scoring(model)
    if model.removed:
        print(f"note: {', '.join(model.removed)} taken off the end of {printable(settings.model)}", file=sys.stderr)
    query = model.encode(collection.queries, "query", settings.encode_batch_size)
    document = model.encode(collection.documents, "document", settings.encode_batch_size)
    del model
    gc.collect()
    names = dict.fromkeys([COSINE, *(settings.scorings or SCORINGS)])
    scorings = {s: native if s == NATIVE else Normalization(s).exponents for s in names}
    return best_documents(query.to(device), document.to(device), collection, scorings, settings.top_k), native


def best_documents(
    query: Tensor, document: Tensor, collection: BeirCollection, scorings: Mapping[str, Exponents], top_k: int
) -> dict[str, Lists]:
    """The best ``top_k`` document rows of every query under each scoring, without those that it excludes.

    Args:
        query: [Q, D] raw embeddings.
        document: [N, D] raw embeddings.
    """
    more = max(map(len, collection.excluded.values()), default=0)
    qrels = Qrels(collection.pairs, collection.gains)
    rankings = rank(query, document, qrels, scorings, top_k=dict.fromkeys(scorings, top_k + more))
    return {
        name: [
            [d for d in ids if d not in collection.excluded.get(q, ())][:top_k]
            for q, ids in enumerate(ranking.top_ids.tolist())
        ]
        for name, ranking in rankings.items()
    }


def rag_table(results: Json) -> Table:
    """No documents, then each list once with all scorings that have it."""
    section, k, data = results["rag"], results["top_k"], results["data"]
    names = {name: [name] for name in section if name == CLOSED}
    for name in section[Q2D]:
        names.setdefault(results["alike"].get(name, name), []).append(name)
    rows: list[tuple[str, list[Cell]]] = []
    for name, alike in names.items():
        numbers = section[CLOSED] if name == CLOSED else section[Q2D][name]
        changes = results["to_cosine"].get(name, {})
        cells = [rate_cell(numbers[m], numbers["ci"].get(m)) for m in (EM, F1, RECALL)]
        cells += [change_cell(changes.get(m)) for m in (EM, F1, RECALL)]
        title = "no documents" if name == CLOSED else " = ".join(alike)
        rows.append((title, [*cells, Cell(f"{numbers['prompts_cut']:,}")]))
    heads = [EM.upper(), F1.upper(), f"answer@{k}"]
    columns = ["documents by", *heads, *(f"less cosine\n{head}" for head in heads), "cut"]
    title = f"{printable(results['model'], 60)} · reader {results['reader']['name']}, "
    title += f"top {k} of {data['n_documents']:,}, {data['n_queries']:,} queries"
    note = "answer@k: an accepted answer stands in a document; cut: prompts whose documents were cut"
    return Table(title, columns, rows, [note])
