"""The RAG check on ranked lists: a reader is asked, its answers are judged, scorings are compared on the same queries.

A prediction is kept under a key made of the reader and the whole prompt: scorings that retrieve the same documents for
a query share it, and so does a run that goes on where another stopped.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mmclip import metrics
from mmclip.console import progress_bar
from mmclip.data.beir import BeirCollection
from mmclip.errors import UserError, printable
from mmclip.io import write_text_atomically
from mmclip.similarity import Direction
from mmclip.tasks.rag import Prompt, exact_match, first_line, has_answer, token_f1
from mmclip.training.log import LINE_SECONDS

COSINE, CLOSED = "cosine", "closed_book"
EM, F1, RECALL = "em", "f1", "answer_recall"
Q2D = Direction.Q2D.value

Array = NDArray[Any]
Json = dict[str, Any]
Lists = list[list[int]]  # for every query the document rows of its prompt, best first


class Asks(Protocol):
    """What is needed of a reader: mmclip.tasks.rag_reader.Reader is one."""

    batch_size: int

    @property
    def facts(self) -> Json: ...

    def prompt(self, question: str, documents: Sequence[str] | None) -> Prompt: ...

    def generate(self, prompts: Sequence[str]) -> list[str]: ...


class Predictions:
    """What a reader wrote, key -> text, kept in a file of JSON lines as it comes.

    A torn last line, which a killed run leaves, is dropped. Errors: UserError naming any other line that is no
    prediction.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.texts: dict[str, str] = {}
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        for number, line in enumerate(lines[:-1], 1):
            try:
                entry = json.loads(line)
                key, text = entry["key"], entry["text"]
                if not isinstance(key, str) or not isinstance(text, str):
                    raise TypeError
            except (ValueError, TypeError, KeyError, RecursionError):
                raise UserError(
                    f"{printable(path)}: line {number} is no prediction: {printable(line.decode(errors='replace'), 60)}; "
                    "take the line out, or choose another --output"
                ) from None
            self.texts[key] = text
        if lines[-1]:
            write_text_atomically(path, b"".join(line + b"\n" for line in lines[:-1]).decode())

    def add(self, entries: Sequence[Json]) -> None:
        """Append objects with a key and a text. Errors: OSError where the disk is full."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(e) + "\n" for e in entries))
        self.texts |= {e["key"]: e["text"] for e in entries}


class Asked(NamedTuple):
    """One prompt and what it is about; documents None: closed book."""

    prompt: Prompt
    query: str
    documents: list[str] | None


def check(
    collection: BeirCollection,
    lists: Mapping[str, Lists],
    reader: Asks,
    store: Predictions,
    *,
    closed_book: bool = True,
    seed: int = 0,
) -> Json:
    """Ask, judge and compare: each scoring's lists, cosine's among them -> the numbers of rag.json.

    rag          {"q2d": {scoring: numbers}, "closed_book": numbers}: the means em, f1 and answer_recall (None where no
                 documents were given), their intervals "ci", and how many prompts were cut, documents shortened or
                 left out in all of them
    to_cosine    scoring or closed_book -> metric -> {"delta", "ci", "within_noise"}, paired by query
    alike        scoring -> the one whose lists, hence all numbers, it shares
    per_query    the others -> metric, documents (their ids), key and prediction -> [Q], in the order of query_ids
    """
    answers = collection.answers or []
    texts, ids = collection.documents, collection.document_ids
    distinct = _distinct(lists)
    asked = {
        name: [
            Asked(reader.prompt(question, [texts[d] for d in rows]), query, [ids[d] for d in rows])
            for query, question, rows in zip(collection.query_ids, collection.queries, found, strict=True)
        ]
        for name, found in distinct.items()
    }
    if closed_book:
        asked[CLOSED] = [
            Asked(reader.prompt(question, None), query, None)
            for query, question in zip(collection.query_ids, collection.queries, strict=True)
        ]
    told = json.dumps(reader.facts, sort_keys=True)
    ask(reader, told, [a for found in asked.values() for a in found], store)
    values: dict[str, dict[str, Array]] = {}
    shown: dict[str, Json] = {}
    for name, found in asked.items():
        keys = [key_of(told, a.prompt) for a in found]
        said = [first_line(store.texts[key]) for key in keys]
        values[name] = {
            EM: np.array([exact_match(s, a) for s, a in zip(said, answers, strict=True)]),
            F1: np.array([token_f1(s, a) for s, a in zip(said, answers, strict=True)]),
        }
        shown[name] = {"documents": [a.documents for a in found], "key": keys, "prediction": said}
        if name in distinct:
            given = ([texts[d] for d in rows] for rows in distinct[name])
            values[name][RECALL] = np.array([float(has_answer(d, a)) for d, a in zip(given, answers, strict=True)])
    first = {name: next(n for n, found in distinct.items() if found == lists[name]) for name in lists}
    numbers = {n: _numbers(values[n], [a.prompt for a in asked[n]], seed) for n in asked}
    changes = {n: _changes(values[COSINE], values[n], seed) for n in asked if n != COSINE}
    closed = {CLOSED: CLOSED} if closed_book else {}
    return {
        "rag": {Q2D: {n: numbers[a] for n, a in first.items()}, **{n: numbers[n] for n in closed}},
        "to_cosine": {n: changes[a] for n, a in (first | closed).items() if a != COSINE},
        "alike": {n: a for n, a in first.items() if n != a},
        "per_query": {
            "query_ids": collection.query_ids,
            **{n: {m: v.tolist() for m, v in values[n].items()} | shown[n] for n in asked},
        },
    }


def ask(reader: Asks, told: str, asked: Sequence[Asked], store: Predictions) -> None:
    """Have the store hold an answer to every prompt: each is asked once, those of like length together."""
    every = {key_of(told, a.prompt): a for a in asked}
    missing = sorted((k for k in every if k not in store.texts), key=lambda k: (len(every[k].prompt.text), k))
    if len(missing) < len(every):
        print(f"{len(every) - len(missing):,} predictions are there already", file=sys.stderr)
    last = time.monotonic()
    with progress_bar() as bar:
        task = bar.add_task("reading", total=len(missing), note="")
        for start in range(0, len(missing), reader.batch_size):
            keys = missing[start : start + reader.batch_size]
            texts = reader.generate([every[k].prompt.text for k in keys])
            store.add(
                [
                    {"key": k, "query": every[k].query, "prompt": every[k].prompt.text, "text": text}
                    for k, text in zip(keys, texts, strict=True)
                ]
            )
            bar.update(task, completed=start + len(keys))
            if bar.disable and time.monotonic() - last > LINE_SECONDS:
                last = time.monotonic()
                print(f"read {start + len(keys):,} of {len(missing):,} prompts", file=sys.stderr, flush=True)


def key_of(told: str, prompt: Prompt) -> str:
    """32 hex digits of a reader and a prompt."""
    return hashlib.sha256(f"{told}\n{prompt.text}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _distinct(lists: Mapping[str, Lists]) -> dict[str, Lists]:
    """Lists that no scoring before has, cosine first."""
    found: dict[str, Lists] = {}
    for name in sorted(lists, key=lambda n: n != COSINE):
        if lists[name] not in found.values():
            found[name] = lists[name]
    return found


def _numbers(values: Mapping[str, Array], prompts: Sequence[Prompt], seed: int) -> Json:
    means = metrics.mean_intervals(np.column_stack(list(values.values())), np.arange(len(prompts)), seed=seed)
    several = len(prompts) > 1  # one query has no spread to tell
    found: Json = {m: mean for m, (mean, _, _) in zip(values, means, strict=True)}
    found.setdefault(RECALL, None)
    return found | {
        "ci": {m: [lo, hi] if several else None for m, (_, lo, hi) in zip(values, means, strict=True)},
        "prompts_cut": sum(p.shortened + p.dropped > 0 for p in prompts),
        "documents_shortened": sum(p.shortened for p in prompts),
        "documents_left_out": sum(p.dropped for p in prompts),
    }


def _changes(cosine: Mapping[str, Array], other: Mapping[str, Array], seed: int) -> Json:
    """other - cosine of each metric that both have."""
    found = {}
    for metric, values in other.items():
        delta, lo, hi = metrics.paired_difference(cosine[metric], values, np.arange(len(values)), seed=seed)
        several = len(values) > 1
        found[metric] = {"delta": delta, "ci": [lo, hi] if several else None,
                         "within_noise": not several or lo <= 0 <= hi}  # fmt: skip
    return found
