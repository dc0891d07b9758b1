"""Text retrieval data: a BEIR folder -> queries, documents and judgments in rows, every fault named with its line.

A BEIR folder holds ``corpus.jsonl`` (``_id``, ``title``, ``text``), ``queries.jsonl`` (``_id``, ``text``) and
``qrels/SPLIT.tsv`` (a header, then query id, document id, score). A query may name ``excluded_ids``, documents that are
not ranked for it (as BRIGHT does), and ``answers`` (mmclip.tasks.rag). A document is its title and its text with a space
between, as in BEIR. A score above 0 is a gain; 0 or below is a judged irrelevant document, and is dropped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmclip.errors import UserError, printable

CORPUS, QUERIES, QRELS = "corpus.jsonl", "queries.jsonl", "qrels"
SHOWN = 3  # examples that a message names

Array = NDArray[Any]


@dataclass
class TextCollection:
    """What is searched and what is asked, in rows.

    path, split          where it came from
    query_ids, queries   Q strings each: the split's queries that have a relevant document
    document_ids, documents, titles    N strings each, empty documents included
    pairs [P, 2]         int64 (query row, document row) of what is relevant
    gains [P]            how relevant, above 0
    excluded             query row -> document rows that are not ranked for it
    answers              Q lists of accepted answers, or None where no query has any
    notes                what a person should know: empty documents, queries left out
    """

    path: str
    split: str
    query_ids: list[str]
    queries: list[str]
    document_ids: list[str]
    documents: list[str]
    titles: list[str]
    pairs: Array
    gains: Array
    excluded: dict[int, list[int]] = field(default_factory=dict)
    answers: list[list[str]] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def empty(self) -> Array:
        """Rows of documents without a word; they are indexed like all others."""
        return np.flatnonzero([not d.strip() for d in self.documents])

    def fingerprint(self) -> str:
        """16 hex digits of ids, texts and judgments: equal when runs can be paired."""
        digest = hashlib.sha256()
        for texts in (self.query_ids, self.queries, self.document_ids, self.documents):
            digest.update(len(texts).to_bytes(8, "little"))
            for text in texts:
                digest.update(len(content := text.encode()).to_bytes(8, "little") + content)
        digest.update(json.dumps(sorted(self.excluded.items())).encode())
        digest.update(self.pairs.astype("<i8").tobytes() + self.gains.astype("<f8").tobytes())
        return digest.hexdigest()[:16]


def open_beir(folder: str | Path, split: str) -> TextCollection:
    """Read a BEIR folder's ``split``. Errors: UserError, one line, naming the file, the line and the id."""
    root = Path(folder)
    require_beir(root, split)
    documents = _texts(root / CORPUS, "document")
    queries = _texts(root / QUERIES, "query")
    row_of = {name: row for row, name in enumerate(documents)}
    judged, unasked = _judgments(root / QRELS / f"{split}.tsv", set(queries), row_of)
    asked = {name: row for row, name in enumerate(judged)}
    pairs = [(asked[q], d) for q, found in judged.items() for d in found]
    gains = [g for found in judged.values() for g in found.values()]
    collection = TextCollection(
        path=str(folder),
        split=split,
        query_ids=list(asked),
        queries=[queries[q]["text"] for q in asked],
        document_ids=list(documents),
        documents=[joined(d.get("title", ""), d["text"]) for d in documents.values()],
        titles=[d.get("title", "") for d in documents.values()],
        pairs=np.array(pairs, dtype=np.int64).reshape(-1, 2),
        gains=np.array(gains, dtype=np.float64),
    )
    unknown = 0
    for row, name in enumerate(asked):
        ids = _excluded(queries[name], root / QUERIES, name)
        unknown += sum(d not in row_of for d in ids)
        if found := sorted({row_of[d] for d in ids if d in row_of}):
            collection.excluded[row] = found
    _require_findable(collection)
    if any("answers" in queries[q] for q in asked):
        collection.answers = [_answers(queries[q], root / QUERIES, q) for q in asked]
    collection.notes = _notes(collection, unasked, unknown)
    return collection


def require_beir(root: Path, split: str) -> None:
    """Look for the files and read none. Errors: UserError naming what is there."""
    if not root.is_dir():
        raise UserError(f"{printable(root)}: no such folder; a BEIR folder has {CORPUS}, {QUERIES} and {QRELS}/")
    for name in (CORPUS, QUERIES):
        if not (root / name).is_file():
            raise UserError(f"{printable(root)}: no {name} in it; a BEIR folder has {CORPUS}, {QUERIES} and {QRELS}/")
    if not (root / QRELS / f"{split}.tsv").is_file():
        there = ", ".join(sorted(p.stem for p in (root / QRELS).glob("*.tsv"))) or "none"
        raise UserError(f"{printable(root)}: no split {printable(split, 60)!r}; splits in {QRELS}/: {printable(there)}")


def joined(title: str, text: str) -> str:
    """A document as it is encoded.

    >>> joined("On wings", "They lift."), joined("", "They lift.")
    ('On wings They lift.', 'They lift.')
    """
    return f"{title} {text}".strip()


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, line) of a text file, without empty lines; numbers count from 1. Lines end in LF or CRLF alone: other
    breaks belong to texts. Errors: UserError for a file that cannot be read as UTF-8, with the line."""
    number = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\n").removesuffix("\r")
                if line.strip(" "):
                    yield number, line
    except UnicodeDecodeError as error:
        raise UserError(f"{printable(path)}: line {number}: not UTF-8: {error.reason}") from None
    except OSError as error:
        raise UserError(f"{printable(path)}: cannot be read: {error.strerror}") from None


def check_text(text: str, what: str) -> None:
    """Errors: UserError for a text that no tokenizer takes and no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{what} holds half of a surrogate pair, {text[error.start]!a}, which is no character"
        ) from None


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSON-lines file. Errors: UserError naming the line."""
    for number, line in read_lines(path):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{printable(path)}: line {number}: not JSON: {printable(error, 120)}") from None
        if not isinstance(found, dict):
            raise UserError(f"{printable(path)}: line {number}: an object was expected, got {printable(line, 60)}")
        yield number, found


def _texts(path: Path, kind: str) -> dict[str, dict[str, Any]]:
    """id -> object, in the file's order."""
    found: dict[str, dict[str, Any]] = {}
    first: dict[str, int] = {}
    for number, entry in read_objects(path):
        where = f"{printable(path)}: line {number}"
        name = entry.get("_id")
        if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
            raise UserError(f"{where}: a {kind} has an _id, got {printable(json.dumps(name), 60)}")
        name = str(name)
        check_text(name, f"{where}: the _id of a {kind}")
        if name in found:
            raise UserError(f"{where}: {kind} id {printable(name, 60)!r} is that of line {first[name]}, too")
        for key in ("text", "title"):
            value = entry.get(key, None if key == "text" else "")
            if value is None and key == "title":
                value = entry[key] = ""
            if not isinstance(value, str):
                raise UserError(f"{where}: {key} of {kind} {printable(name, 60)!r} is a text, got "
                                 f"{printable(json.dumps(value), 60)}")  # fmt: skip
            check_text(value, f"{where}: {key} of {kind} {printable(name, 60)!r}")
        found[name], first[name] = entry, number
    if not found:
        raise UserError(f"{printable(path)}: no {kind} in it")
    return found


def _judgments(path: Path, queries: set[str], row_of: dict[str, int]) -> tuple[dict[str, dict[int, float]], int]:
    """(query id -> {document row: gain} of queries with a relevant document, number of judged queries without one)."""
    judged: dict[str, dict[int, float]] = {}
    seen: dict[tuple[str, str], int] = {}
    unknown: dict[str, list[str]] = {"query": [], "document": []}
    for number, line in read_lines(path):
        where = f"{printable(path)}: line {number}"
        cells = line.split("\t")
        if number == 1 and _is_header(cells, queries):
            continue
        if len(cells) != 3:
            raise UserError(f"{where}: query id, document id and score with tabs between were expected, got "
                             f"{len(cells)} column{'s' * (len(cells) != 1)}: {printable(line, 80)}")  # fmt: skip
        query, document, text = cells
        try:
            score = float(text)
        except ValueError:
            score = np.nan
        if not np.isfinite(score):
            raise UserError(f"{where}: the score is a number, got {printable(text, 60)!r}")
        if (query, document) in seen:
            raise UserError(f"{where}: query {printable(query, 60)!r} and document {printable(document, 60)!r} were "
                             f"judged in line {seen[query, document]} already")  # fmt: skip
        seen[query, document] = number
        if query not in queries:
            unknown["query"].append(query)
        elif document not in row_of:
            unknown["document"].append(document)
        else:
            found = judged.setdefault(query, {})
            if score > 0:
                found[row_of[document]] = score
    for kind, names in unknown.items():
        if names := list(dict.fromkeys(names)):
            told = ", ".join(repr(printable(n, 60)) for n in names[:SHOWN]) + ", …" * (len(names) > SHOWN)
            other = QUERIES if kind == "query" else CORPUS
            raise UserError(f"{printable(path)}: {len(names)} {kind} id{'s' * (len(names) > 1)} not in {other}: {told}")
    asked = {q: found for q, found in judged.items() if found}
    if not asked:
        raise UserError(f"{printable(path)}: no query with a relevant document (a score above 0) in it")
    return asked, len(judged) - len(asked)


def _is_header(cells: list[str], queries: set[str]) -> bool:
    """BEIR's first line names its columns: its first cell is no query's id, its third no number."""
    try:
        float(cells[-1])
    except ValueError:
        return len(cells) == 3 and cells[0] not in queries
    return False


def _excluded(query: dict[str, Any], path: Path, name: str) -> list[str]:
    """BRIGHT writes ["N/A"] where there is none."""
    ids = query.get("excluded_ids") or []
    if not isinstance(ids, list) or not all(isinstance(d, str | int) for d in ids):
        raise UserError(f"{printable(path)}: excluded_ids of query {printable(name, 60)!r} is not a list of ids")
    return [] if ids == ["N/A"] else [str(d) for d in ids]


def _require_findable(collection: TextCollection) -> None:
    """Errors: UserError for a relevant document that its query excludes: no ranking could have it."""
    for q, d in collection.pairs.tolist():
        if d in collection.excluded.get(q, ()):
            query, document = printable(collection.query_ids[q], 60), printable(collection.document_ids[d], 60)
            raise UserError(
                f"{printable(collection.path)}: query {query!r} excludes document {document!r}, which is judged relevant"
            )


def _answers(query: dict[str, Any], path: Path, name: str) -> list[str]:
    answers = query.get("answers", [])
    if not isinstance(answers, list) or not all(isinstance(a, str) for a in answers):
        raise UserError(f"{printable(path)}: answers of query {printable(name, 60)!r} is not a list of texts")
    return answers


def _notes(collection: TextCollection, unasked: int, unknown: int) -> list[str]:
    notes = []
    empty = collection.empty
    if len(empty):
        names = ", ".join(printable(collection.document_ids[row], 60) for row in empty[:SHOWN])
        judged = len(np.intersect1d(empty, collection.pairs[:, 1]))
        notes.append(f"{len(empty)} empty document{'s' * (len(empty) > 1)} ({names}{', …' * (len(empty) > SHOWN)}) "
                     f"indexed, {judged} of them judged relevant")  # fmt: skip
    if unasked:
        notes.append(f"{unasked} judged quer{'y' if unasked == 1 else 'ies'} without a relevant document left out")
    if blank := sum(not q.strip() for q in collection.queries):
        notes.append(f"{blank} quer{'y' if blank == 1 else 'ies'} without a word asked like all others")
    if unknown:
        notes.append(f"{unknown} excluded id{'s' * (unknown > 1)} not in {CORPUS}")
    return notes
