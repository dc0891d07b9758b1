"""Text retrieval collections: BEIR folders as queries, documents and relevance judgments in rows.

A BEIR folder holds ``corpus.jsonl`` (``_id``, ``title``, ``text``), ``queries.jsonl`` (``_id``, ``text``) and
``qrels/SPLIT.tsv`` (a header, then query id, document id, score). A query may have ``excluded_ids``, documents that are
not ranked for it (as in BRIGHT), and ``answers`` (mmclip.tasks.rag). A document is its title and its text with a space
between, as in BEIR. A score above 0 is a gain; others are judged irrelevant, and dropped. Faults name their line.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Container, Iterator
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
    documents, queries = _texts(root / CORPUS, "document"), _texts(root / QUERIES, "query")
    row_of = {name: row for row, name in enumerate(documents)}
    judged = _judgments(root / QRELS / f"{split}.tsv", queries, row_of)
    names = [q for q, gains in judged.items() if gains]
    if not names:
        raise UserError(
            f"{printable(root / QRELS / f'{split}.tsv')}: no query with a relevant document (a score above 0) in it"
        )
    pairs = [(row, d) for row, q in enumerate(names) for d in judged[q]]
    answers = [_listed(queries[q], "answers", root / QUERIES, str) for q in names]
    collection = BeirCollection(
        path=str(folder),
        split=split,
        query_ids=names,
        queries=[queries[q]["text"] for q in names],
        document_ids=list(documents),
        documents=[joined(d["title"], d["text"]) for d in documents.values()],
        titles=[d["title"] for d in documents.values()],
        pairs=np.array(pairs, dtype=np.int64).reshape(-1, 2),
        gains=np.array([gain for q in names for gain in judged[q].values()], dtype=np.float64),
        answers=answers if any("answers" in queries[q] for q in names) else None,
    )
    unknown = 0
    for row, q in enumerate(names):
        ids = [str(d) for d in _listed(queries[q], "excluded_ids", root / QUERIES, str | int)]
        ids = [] if ids == ["N/A"] else ids  # as BRIGHT writes none
        unknown += sum(d not in row_of for d in ids)
        if rows := sorted({row_of[d] for d in ids if d in row_of}):
            collection.excluded[row] = rows
        for d in set(rows) & judged[q].keys():  # which no ranking could return
            raise UserError(
                f"{printable(folder)}: query {printable(q, 60)!r} excludes document "
                f"{printable(collection.document_ids[d], 60)!r}, which is judged relevant"
            )
    notes = collection.notes
    if len(empty := collection.empty):
        shown = ", ".join(printable(collection.document_ids[row], 60) for row in empty[:SHOWN])
        relevant = len(np.intersect1d(empty, collection.pairs[:, 1]))
        more = ", …" * (len(empty) > SHOWN)
        notes.append(
            f"{_count(len(empty), 'empty document')} ({shown}{more}) indexed, {relevant} of them judged relevant"
        )
    if without := len(judged) - len(names):
        notes.append(f"{_count(without, 'judged quer', 'y', 'ies')} without a relevant document left out")
    if blank := sum(not q.strip() for q in collection.queries):
        notes.append(f"{_count(blank, 'quer', 'y', 'ies')} without a word, ranked like all others")
    if unknown:
        notes.append(f"{_count(unknown, 'excluded id')} not in {CORPUS}")
    return collection


def _count(n: int, noun: str, one: str = "", many: str = "s") -> str:
    return f"{n} {noun}{one if n == 1 else many}"


def _listed(query: dict[str, Any], key: str, path: Path, kind: Any) -> list[Any]:
    values = query.get(key) or []
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        what = "texts" if kind is str else "ids"
        raise UserError(f"{printable(path)}: {key} of query {printable(query['_id'], 60)!r} is not a list of {what}")
    return values


def require_beir(root: Path, split: str) -> None:
    """Check that the files exist, without reading them."""
    missing = next((f"no {name} in it" for name in (CORPUS, QUERIES) if not (root / name).is_file()), None)
    if not root.is_dir():
        missing = "no such folder"
    if missing:
        raise UserError(f"{printable(root)}: {missing}; a BEIR folder has {CORPUS}, {QUERIES} and {QRELS}/")
    if not (root / QRELS / f"{split}.tsv").is_file():
        splits = printable(", ".join(sorted(p.stem for p in (root / QRELS).glob("*.tsv"))) or "none")
        raise UserError(f"{printable(root)}: no split {printable(split, 60)!r}; splits in {QRELS}/: {splits}")


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


def check_text(text: Any, what: str) -> str:
    """Refuse no text, and one with an unpaired surrogate, which no tokenizer or file can hold (UserError)."""
    if not isinstance(text, str):
        raise UserError(f"{what} is a text, got {printable(json.dumps(text), 60)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{text[error.start]!a}, which is no character"
        raise UserError(f"{what} holds half of a surrogate pair, {half}") from None
    return text


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """('PATH: line N', object) of a JSON-lines file (UserError names the line)."""
    for number, line in read_lines(path):
        where = f"{printable(path)}: line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON: {printable(error, 120)}") from None
        if not isinstance(entry, dict):
            raise UserError(f"{where}: an object was expected, got {printable(line, 60)}")
        yield where, entry


def _texts(path: Path, kind: str) -> dict[str, dict[str, Any]]:
    """id -> object with text and title, in the file's order."""
    entries: dict[str, dict[str, Any]] = {}
    first: dict[str, str] = {}
    for where, entry in read_objects(path):
        name = entry.get("_id")
        if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
            raise UserError(f"{where}: a {kind} has an _id, got {printable(json.dumps(name), 60)}")
        name = check_text(str(name), f"{where}: the _id of a {kind}")
        shown = repr(printable(name, 60))
        if name in entries:
            raise UserError(f"{where}: {kind} id {shown} is that of {first[name].rpartition(': ')[2]}, too")
        title = entry.get("title")
        entry["title"] = "" if title is None else check_text(title, f"{where}: title of {kind} {shown}")
        check_text(entry.get("text"), f"{where}: text of {kind} {shown}")
        entries[name], first[name] = entry, where
    if not entries:
        raise UserError(f"{printable(path)}: no {kind} in it")
    return entries


def _judgments(path: Path, queries: Container[str], row_of: dict[str, int]) -> dict[str, dict[int, float]]:
    """Judged query id -> {document row: gain above 0}."""
    judged: dict[str, dict[int, float]] = {}
    line_of: dict[tuple[str, str], int] = {}
    unknown: dict[str, list[str]] = {"query": [], "document": []}
    for number, line in read_lines(path):
        where = f"{printable(path)}: line {number}"
        cells = line.split("\t")
        if number == 1 and len(cells) == 3 and cells[0] not in queries and _number(cells[2]) is None:
            continue  # a header
        if len(cells) != 3:
            raise UserError(
                f"{where}: query id, document id and score with tabs between were expected, got "
                f"{_count(len(cells), 'column')}: {printable(line, 80)}"
            )
        query, document, text = cells
        score = _number(text)
        if score is None or not math.isfinite(score):
            raise UserError(f"{where}: the score is a number, got {printable(text, 60)!r}")
        if (query, document) in line_of:
            pair = f"query {printable(query, 60)!r} and document {printable(document, 60)!r}"
            raise UserError(f"{where}: {pair} were judged in line {line_of[query, document]} already")
        line_of[query, document] = number
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
            file = QUERIES if kind == "query" else CORPUS
            raise UserError(f"{printable(path)}: {_count(len(names), f'{kind} id')} not in {file}: {shown}")
    return judged


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


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
