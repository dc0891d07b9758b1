"""Text retrieval collections: BEIR folders as queries, documents and relevance judgments in rows.

A BEIR folder holds ``corpus.jsonl`` (``_id``, ``title``, ``text``), ``queries.jsonl`` (``_id``, ``text``) and
``qrels/SPLIT.tsv`` (a header, then query id, document id, score). A query may have ``excluded_ids``, documents that are
not ranked for it (as in BRIGHT), and ``answers`` (mmclip.tasks.rag). A document is its title and its text with a space
between, as in BEIR. A score above 0 is a gain; others are judged irrelevant, and dropped. Faults name their line.
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
SHOWN = 3  # examples in a message
EVALUATIONS = "evaluations"  # folder of a run: a subfolder for each further evaluation set

Array = NDArray[Any]


@dataclass
class BeirCollection:
    """Q queries with relevant documents among N documents.

    Attributes:
        path: Source.
        split: Split of the judgments.
        query_ids: Q ids of the split's queries that have a relevant document.
        queries: Q texts.
        document_ids: N ids.
        documents: N texts, empty ones included.
        titles: N titles.
        pairs: int64 [P, 2] (query row, document row) of relevant pairs.
        gains: [P] gains, above 0.
        excluded: Query row -> document rows that are not ranked for it.
        answers: Q lists of accepted answers, or None where no query has any.
        notes: Remarks for the user, such as empty documents.
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
        """Rows of documents without a word; they are indexed like others."""
        return np.flatnonzero([not d.strip() for d in self.documents])

    def fingerprint(self) -> str:
        """16 hex digits of ids, texts and judgments; runs with equal ones can be paired."""
        digest = hashlib.sha256()
        for texts in (self.query_ids, self.queries, self.document_ids, self.documents):
            digest.update(len(texts).to_bytes(8, "little"))
            for text in texts:
                digest.update(len(content := text.encode()).to_bytes(8, "little") + content)
        digest.update(json.dumps(sorted(self.excluded.items())).encode())
        digest.update(self.pairs.astype("<i8").tobytes() + self.gains.astype("<f8").tobytes())
        return digest.hexdigest()[:16]


def open_beir(folder: str | Path, split: str) -> BeirCollection:
    """Read a split of a BEIR folder (UserError names the file, the line and the id)."""
    root = Path(folder)
    require_beir(root, split)
    documents = _texts(root / CORPUS, "document")
    queries = _texts(root / QUERIES, "query")
    row_of = {name: row for row, name in enumerate(documents)}
    judged, without = _judgments(root / QRELS / f"{split}.tsv", set(queries), row_of)
    query_row = {name: row for row, name in enumerate(judged)}
    pairs = [(query_row[q], d) for q, gains in judged.items() for d in gains]
    gains = [gain for by_row in judged.values() for gain in by_row.values()]
    collection = BeirCollection(
        path=str(folder),
        split=split,
        query_ids=list(query_row),
        queries=[queries[q]["text"] for q in query_row],
        document_ids=list(documents),
        documents=[joined(d.get("title", ""), d["text"]) for d in documents.values()],
        titles=[d.get("title", "") for d in documents.values()],
        pairs=np.array(pairs, dtype=np.int64).reshape(-1, 2),
        gains=np.array(gains, dtype=np.float64),
    )
    unknown = 0
    for row, name in enumerate(query_row):
        ids = _excluded(queries[name], root / QUERIES, name)
        unknown += sum(d not in row_of for d in ids)
        if rows := sorted({row_of[d] for d in ids if d in row_of}):
            collection.excluded[row] = rows
    _require_findable(collection)
    if any("answers" in queries[q] for q in query_row):
        collection.answers = [_answers(queries[q], root / QUERIES, q) for q in query_row]
    collection.notes = _notes(collection, without, unknown)
    return collection


def require_beir(root: Path, split: str) -> None:
    """Check that the files exist, without reading them."""
    if not root.is_dir():
        raise UserError(f"{printable(root)}: no such folder; a BEIR folder has {CORPUS}, {QUERIES} and {QRELS}/")
    for name in (CORPUS, QUERIES):
        if not (root / name).is_file():
            raise UserError(f"{printable(root)}: no {name} in it; a BEIR folder has {CORPUS}, {QUERIES} and {QRELS}/")
    if not (root / QRELS / f"{split}.tsv").is_file():
        splits = ", ".join(sorted(p.stem for p in (root / QRELS).glob("*.tsv"))) or "none"
        raise UserError(
            f"{printable(root)}: no split {printable(split, 60)!r}; splits in {QRELS}/: {printable(splits)}"
        )


def joined(title: str, text: str) -> str:
    """A document as it is encoded: title and text.

    >>> joined("On wings", "They lift."), joined("", "They lift.")
    ('On wings They lift.', 'They lift.')
    """
    return f"{title} {text}".strip()


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, line) of a UTF-8 text file without empty lines; numbers count from 1.

    Lines end in LF or CRLF only: other breaks belong to texts. UserError names the line.
    """
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
    """Refuse a text with an unpaired surrogate, which no tokenizer or file can hold (UserError)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{what} holds half of a surrogate pair, {text[error.start]!a}, which is no character"
        ) from None


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSON-lines file (UserError names the line)."""
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
    """Query id -> {document row: gain} of queries with a relevant document, and the number of those without one."""
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
            gains = judged.setdefault(query, {})
            if score > 0:
                gains[row_of[document]] = score
    for kind, names in unknown.items():
        if names := list(dict.fromkeys(names)):
            shown = ", ".join(repr(printable(n, 60)) for n in names[:SHOWN]) + ", …" * (len(names) > SHOWN)
            other = QUERIES if kind == "query" else CORPUS
            raise UserError(
                f"{printable(path)}: {len(names)} {kind} id{'s' * (len(names) > 1)} not in {other}: {shown}"
            )
    relevant = {q: gains for q, gains in judged.items() if gains}
    if not relevant:
        raise UserError(f"{printable(path)}: no query with a relevant document (a score above 0) in it")
    return relevant, len(judged) - len(relevant)


def _is_header(cells: list[str], queries: set[str]) -> bool:
    """Whether a first line names columns: its first cell is no query id, its third no number."""
    try:
        float(cells[-1])
    except ValueError:
        return len(cells) == 3 and cells[0] not in queries
    return False


def _excluded(query: dict[str, Any], path: Path, name: str) -> list[str]:
    """Document ids that a query excludes; BRIGHT writes ["N/A"] for none."""
    ids = query.get("excluded_ids") or []
    if not isinstance(ids, list) or not all(isinstance(d, str | int) for d in ids):
        raise UserError(f"{printable(path)}: excluded_ids of query {printable(name, 60)!r} is not a list of ids")
    return [] if ids == ["N/A"] else [str(d) for d in ids]


def _require_findable(collection: BeirCollection) -> None:
    """Refuse a relevant document that its query excludes, which no ranking could return (UserError)."""
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


def _notes(collection: BeirCollection, without: int, unknown: int) -> list[str]:
    notes = []
    empty = collection.empty
    if len(empty):
        names = ", ".join(printable(collection.document_ids[row], 60) for row in empty[:SHOWN])
        judged = len(np.intersect1d(empty, collection.pairs[:, 1]))
        notes.append(f"{len(empty)} empty document{'s' * (len(empty) > 1)} ({names}{', …' * (len(empty) > SHOWN)}) "
                     f"indexed, {judged} of them judged relevant")  # fmt: skip
    if without:
        notes.append(f"{without} judged quer{'y' if without == 1 else 'ies'} without a relevant document left out")
    if blank := sum(not q.strip() for q in collection.queries):
        notes.append(f"{blank} quer{'y' if blank == 1 else 'ies'} without a word, ranked like all others")
    if unknown:
        notes.append(f"{unknown} excluded id{'s' * (unknown > 1)} not in {CORPUS}")
    return notes


def folder_and_split(name: str) -> tuple[Path, str]:
    """Split an entry of --val-data, FOLDER or FOLDER:SPLIT, into folder and split (test).

    >>> folder_and_split("data/scifact:dev"), folder_and_split("data/scifact")
    ((PosixPath('data/scifact'), 'dev'), (PosixPath('data/scifact'), 'test'))
    """
    folder, colon, split = name.rpartition(":")
    return (Path(folder), split) if colon and not Path(name).is_dir() else (Path(name), "test")


def evaluation_name(folder: Path | str, split: str) -> str:
    """Name of an evaluation set, for its table and its folder.

    >>> evaluation_name("data/scifact", "test")
    'scifact-test'
    """
    return f"{Path(folder).resolve().name}-{split}"
