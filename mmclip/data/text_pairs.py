"""Training pairs for text retrieval: the judgments of a BEIR folder, or MS MARCO style triples.

Triples are a .tsv (query TAB positive TAB negative…, no header) or a .jsonl (``query`` or ``anchor``, ``positive``, and
``negative``, ``negative_1``… or a list ``negatives``). Equal texts have equal ids: known positives of a query are
recognized in any place of a batch. Faults name their line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
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
            f"--watch-queries {n_queries}: {printable(folder)} has {total} training quer"
            f"{'y' if total == 1 else 'ies'}, and fewer than half of them can be held out; 0 holds out none"
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
    read = {".tsv": _tsv_rows, ".jsonl": _jsonl_rows}.get(path.suffix)
    if read is None or not path.is_file():
        why = "no such file or folder" if not path.exists() else "unknown file type"
        raise UserError(f"{printable(path)}: {why}: a BEIR folder, a .tsv or a .jsonl of triples is expected")
    rows: list[list[str]] = []
    equal: dict[str, str] = {}  # one string for equal texts
    for where, texts in read(path):
        for name, text in zip(_names(texts), texts, strict=True):
            if not check_text(text, f"{where}: the {name}").strip():
                raise UserError(f"{where}: the {name} is empty")
        if rows and len(texts) != len(rows[0]):
            here, first = (f"{n} negative{'s' * (n != 1)}" for n in (len(texts) - 2, len(rows[0]) - 2))
            raise UserError(f"{where}: {here}, and {first} in the first: every line must have equally many")
        rows.append([equal.setdefault(text, text) for text in texts])
    if not rows:
        raise UserError(f"{printable(path)}: no pair in it")
    query_ids = _ids(row[0] for row in rows)
    document_ids = _ids(chain.from_iterable(row[1:] for row in rows)).reshape(len(rows), -1)
    return TextPairs(
        str(path),
        [row[0] for row in rows],
        [row[1] for row in rows],
        [row[2:] for row in rows],
        query_ids,
        document_ids,
        np.unique(np.column_stack([query_ids, document_ids[:, 0]]), axis=0),
    ), None


def _ids(texts: Iterable[str]) -> Array:
    """int64 numbers of texts, equal for equal ones."""
    known: dict[str, int] = {}
    return np.array([known.setdefault(text, len(known)) for text in texts], dtype=np.int64)


def _judged_pairs(collection: BeirCollection) -> TextPairs:
    queries, documents = collection.queries, collection.documents
    pairs = [(q, d) for q, d in collection.pairs.tolist() if queries[q].strip() and documents[d].strip()]
    if not pairs:
        raise UserError(f"{printable(collection.path)}: every judgment above 0 is of an empty document or query")
    notes = []
    if left := len(collection.pairs) - len(pairs):
        notes.append(f"{left} judgment{'s' * (left > 1)} of an empty document or query left out of training")
    rows = np.array(pairs, dtype=np.int64)
    ids = np.column_stack([_ids(queries)[rows[:, 0]], _ids(documents)[rows[:, 1]]])
    return TextPairs(
        collection.path,
        [queries[q] for q, _ in pairs],
        [documents[d] for _, d in pairs],
        [[] for _ in pairs],
        ids[:, 0],
        ids[:, 1:],
        np.unique(ids, axis=0),
        notes,
    )


def _names(texts: list[str]) -> list[str]:
    return ["query", "positive", *(f"negative {k}" for k in range(1, len(texts) - 1))]


def _tsv_rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    for number, line in read_lines(path):
        where, cells = f"{printable(path)}: line {number}", line.split("\t")
        if len(cells) < 2:
            raise UserError(
                f"{where}: query, positive and any negatives with tabs between were expected, got 1 column: "
                f"{printable(line, 80)}"
            )
        if number == 1 and cells[0].lower() in ("query", "anchor") and cells[1].lower() == "positive":
            raise UserError(f"{where} names columns: triples in a .tsv have no header")
        yield where, cells


def _jsonl_rows(path: Path) -> Iterator[tuple[str, list[Any]]]:
    for where, entry in read_objects(path):
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
        yield where, [entry[keys[0]], entry["positive"], *(entry[name] for _, name in single), *listed]


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
    pairs = whole.pairs[of_rows]
    relevant = np.unique(pairs[:, 1])
    others = np.setdiff1d(np.arange(len(whole.documents)), relevant)
    more = rng.choice(others, min(len(others), max(0, documents - len(relevant))), replace=False)
    kept = np.sort(np.concatenate([relevant, more]))
    place = {int(d): at for at, d in enumerate(kept)}
    excluded = {
        at: [place[d] for d in whole.excluded.get(row, ()) if d in place] for at, row in enumerate(rows.tolist())
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
