"""Training pairs for text retrieval: the judgments of a BEIR folder, or MS MARCO style triples.

Triples are a .tsv (query TAB positive TAB negative…, no header) or a .jsonl (``query`` or ``anchor``, ``positive``, and
``negative``, ``negative_1``… or a list ``negatives``). Equal texts have equal ids, so that known positives of a query are
recognized wherever they stand in a batch. Faults name their line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmclip.data.beir import BeirCollection, check_text, open_beir, read_lines, read_objects
from mmclip.errors import UserError, printable

WATCHED_DOCUMENTS = 2000
_NEGATIVE = re.compile(r"negative(?:_(\d{1,4}))?")

Array = NDArray[Any]


@dataclass
class TextPairs:
    """n pairs of a query and a relevant document, with K hard negatives each.

    Attributes:
        path: Source.
        queries: n texts.
        documents: n texts.
        negatives: n lists of K texts.
        query_ids: int64 [n], equal for equal texts.
        document_ids: int64 [n, 1 + K] of the document and the negatives, equal for equal texts.
        relevant: int64 [m, 2] (query id, document id), all known positives, each once.
        notes: Remarks for the user, such as empty documents that were left out.
    """

    path: str
    queries: list[str]
    documents: list[str]
    negatives: list[list[str]]
    query_ids: Array
    document_ids: Array
    relevant: Array
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def n_negatives(self) -> int:
        return int(self.document_ids.shape[1]) - 1

    @property
    def n_queries(self) -> int:
        return len(np.unique(self.query_ids))

    def dataset(self) -> Any:
        """A datasets.Dataset of query, positive, negative_1…, and label [query id, document id, negatives' ids…]."""
        from datasets import Dataset

        columns: dict[str, Any] = {"query": self.queries, "positive": self.documents}
        for k in range(self.n_negatives):
            columns[f"negative_{k + 1}"] = [row[k] for row in self.negatives]
        return Dataset.from_dict(columns | {"label": np.column_stack([self.query_ids, self.document_ids]).tolist()})

    def subset(self, rows: Array | list[int]) -> TextPairs:
        """Pairs of ``rows`` in that order; ``relevant`` stays whole."""
        rows = np.asarray(rows, dtype=np.int64)
        return replace(
            self,
            queries=[self.queries[row] for row in rows],
            documents=[self.documents[row] for row in rows],
            negatives=[self.negatives[row] for row in rows],
            query_ids=self.query_ids[rows],
            document_ids=self.document_ids[rows],
        )

    def take_fraction(self, fraction: float, seed: int) -> TextPairs:
        """All pairs of a random share of the queries, at least one; smaller shares are subsets of larger ones."""
        if not 0 < fraction <= 1:
            raise UserError(f"--train-fraction {fraction:g}: expected a number above 0 and at most 1")
        ids = np.unique(self.query_ids)
        kept = np.random.default_rng(seed).permutation(ids)[: math.ceil(fraction * len(ids))]
        return self.subset(np.flatnonzero(np.isin(self.query_ids, kept)))


class _Ids:
    """Ids of texts, equal for equal texts."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self.texts: list[str] = []

    def __call__(self, text: str) -> int:
        number = self.of.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number


def open_pairs(path: str | Path, split: str = "train") -> TextPairs:
    """Open a split of a BEIR folder, a pair for each judgment above 0, or a file of triples."""
    return _read(Path(path), split)[0]


def hold_out(
    folder: str | Path, split: str, n_queries: int, seed: int, documents: int = WATCHED_DOCUMENTS
) -> tuple[TextPairs, BeirCollection | None]:
    """Hold out random queries with all their pairs.

    Args:
        folder: BEIR folder or file of triples.
        split: Split of a BEIR folder.
        n_queries: Held-out queries, fewer than half of all.
        seed: Of the draws.
        documents: Size of the held-out collection: relevant documents and random others.

    Returns:
        Training pairs, and the held-out collection (None for ``n_queries`` 0).
    """
    pairs, collection = _read(Path(folder), split)
    if n_queries == 0:
        return pairs, None
    collection = _collection(pairs) if collection is None else collection
    total = len(collection.queries)
    if 2 * n_queries >= total:
        raise UserError(
            f"--watch-queries {n_queries}: {printable(folder)} has {total} training quer{'y' if total == 1 else 'ies'}, "
            "and fewer than half of them can be held out; 0 holds out none"
        )
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(total, n_queries, replace=False))
    held_out = {collection.queries[row] for row in rows}
    rest = pairs.subset([row for row, query in enumerate(pairs.queries) if query not in held_out])
    if not len(rest):
        raise UserError(f"{printable(folder)}: no pair is left to train on beside {n_queries} held-out queries")
    return rest, _sample(collection, rows, documents, rng)


def _read(path: Path, split: str) -> tuple[TextPairs, BeirCollection | None]:
    if path.is_dir():
        collection = open_beir(path, split)
        return _judged_pairs(collection), collection
    rows = {".tsv": _tsv_rows, ".jsonl": _jsonl_rows}.get(path.suffix)
    if rows is None or not path.is_file():
        why = "no such file or folder" if not path.exists() else "unknown file type"
        raise UserError(f"{printable(path)}: {why}: a BEIR folder, a .tsv or a .jsonl of triples is expected")
    return _triples(path, rows(path)), None


def _judged_pairs(collection: BeirCollection) -> TextPairs:
    query, document = _Ids(), _Ids()
    queries = [query(text) for text in collection.queries]
    documents = [document(text) for text in collection.documents]
    ids = np.array([(queries[q], documents[d]) for q, d in collection.pairs], dtype=np.int64)
    worded = np.array([bool(query.texts[q].strip() and document.texts[d].strip()) for q, d in ids])
    notes = []
    if left := int((~worded).sum()):
        notes.append(f"{left} judgment{'s' * (left > 1)} of an empty document or query left out of training")
    ids = ids[worded]
    if not len(ids):
        raise UserError(f"{printable(collection.path)}: every judgment above 0 is of an empty document or query")
    return TextPairs(
        collection.path,
        [query.texts[q] for q, _ in ids],
        [document.texts[d] for _, d in ids],
        [[] for _ in ids],
        ids[:, 0],
        ids[:, 1:],
        np.unique(ids, axis=0),
        notes,
    )


def _triples(path: Path, rows: Iterator[tuple[int, list[str]]]) -> TextPairs:
    """Pairs from (line number, [query, positive, negatives…])."""
    query, document = _Ids(), _Ids()
    query_ids: list[int] = []
    document_ids: list[list[int]] = []
    for number, (text_of_query, *texts) in rows:
        where = f"{printable(path)}: line {number}"
        for name, text in zip(_names(len(texts)), (text_of_query, *texts), strict=True):
            check_text(text, f"{where}: the {name}")
            if not text.strip():
                raise UserError(f"{where}: the {name} is empty")
        if document_ids and len(texts) != len(document_ids[0]):
            raise UserError(
                f"{where}: {_negatives(len(texts) - 1)}, and {_negatives(len(document_ids[0]) - 1)} in the first: "
                "every line must have equally many"
            )
        query_ids.append(query(text_of_query))
        document_ids.append([document(text) for text in texts])
    if not query_ids:
        raise UserError(f"{printable(path)}: no pair in it")
    queries, documents = np.array(query_ids, dtype=np.int64), np.array(document_ids, dtype=np.int64)
    return TextPairs(
        str(path),
        [query.texts[q] for q in query_ids],
        [document.texts[row[0]] for row in document_ids],
        [[document.texts[d] for d in row[1:]] for row in document_ids],
        queries,
        documents,
        np.unique(np.column_stack([queries, documents[:, 0]]), axis=0),
    )


def _names(documents: int) -> list[str]:
    return ["query", "positive", *(f"negative {k}" for k in range(1, documents))]


def _negatives(count: int) -> str:
    return f"{count} negative{'s' * (count != 1)}"


def _tsv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    for number, line in read_lines(path):
        cells = line.split("\t")
        if len(cells) < 2:
            raise UserError(
                f"{printable(path)}: line {number}: query, positive and any negatives with tabs between were expected, "
                f"got 1 column: {printable(line, 80)}"
            )
        if number == 1 and cells[0].lower() in ("query", "anchor") and cells[1].lower() == "positive":
            raise UserError(f"{printable(path)}: line 1 names columns: triples in a .tsv have no header")
        yield number, cells


def _jsonl_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    for number, entry in read_objects(path):
        where = f"{printable(path)}: line {number}"
        keys = [name for name in ("query", "anchor") if name in entry]
        if len(keys) != 1 or "positive" not in entry:
            raise UserError(
                f"{where}: query (or anchor), positive and any negatives were expected, got the keys "
                f"{printable(', '.join(entry) or 'none', 80)}"
            )
        single = sorted((int(m[1] or 0), name) for name in entry if (m := _NEGATIVE.fullmatch(name)))
        listed = entry.get("negatives", [])
        if not isinstance(listed, list) or (single and listed):
            raise UserError(f"{where}: negatives is a list of texts, and stands alone or not at all")
        texts = [entry[keys[0]], entry["positive"], *(entry[name] for _, name in single), *listed]
        for name, text in zip(_names(len(texts) - 1), texts, strict=True):
            if not isinstance(text, str):
                raise UserError(f"{where}: the {name} is a text, got {printable(repr(text), 60)}")
        yield number, texts


def _collection(pairs: TextPairs) -> BeirCollection:
    """A collection of triples: all queries, with all positives as documents."""
    query = dict(zip(pairs.query_ids.tolist(), pairs.queries, strict=True))
    document = dict(zip(pairs.document_ids[:, 0].tolist(), pairs.documents, strict=True))
    row, place = ({number: at for at, number in enumerate(side)} for side in (query, document))
    return BeirCollection(
        pairs.path,
        "triples",
        [str(number) for number in query],
        list(query.values()),
        [str(number) for number in document],
        list(document.values()),
        [""] * len(document),
        np.array([(row[q], place[d]) for q, d in pairs.relevant.tolist()], dtype=np.int64),
        np.ones(len(pairs.relevant)),
    )


def _sample(whole: BeirCollection, rows: Array, documents: int, rng: np.random.Generator) -> BeirCollection:
    """Queries ``rows`` with their relevant documents and random others, in the order of ``whole``."""
    of_rows = np.isin(whole.pairs[:, 0], rows)
    relevant = np.unique(whole.pairs[of_rows, 1])
    others = np.setdiff1d(np.arange(len(whole.documents)), relevant)
    more = rng.choice(others, min(len(others), max(0, documents - len(relevant))), replace=False)
    kept = np.sort(np.concatenate([relevant, more]))
    place = {int(d): at for at, d in enumerate(kept)}
    pairs = whole.pairs[of_rows]
    excluded = {
        at: [place[d] for d in whole.excluded[row] if d in place]
        for at, row in enumerate(rows.tolist())
        if row in whole.excluded
    }
    return BeirCollection(
        whole.path,
        whole.split,
        [whole.query_ids[row] for row in rows],
        [whole.queries[row] for row in rows],
        [whole.document_ids[d] for d in kept],
        [whole.documents[d] for d in kept],
        [whole.titles[d] for d in kept],
        np.column_stack([np.searchsorted(rows, pairs[:, 0]), np.searchsorted(kept, pairs[:, 1])]),
        whole.gains[of_rows],
        {row: ids for row, ids in excluded.items() if ids},
        None if whole.answers is None else [whole.answers[row] for row in rows],
        [
            f"a sample: {len(rows)} of {len(whole.queries)} training queries, held out, against their {len(relevant)} "
            f"relevant documents and {len(more)} random others of {len(whole.documents)}"
        ],
    )
