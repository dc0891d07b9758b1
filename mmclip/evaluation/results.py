"""What an evaluation leaves on disk, and reads back: results.json, per_query.npz and items.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmclip.errors import UserError, printable, reason
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.io import write_atomically, write_text_atomically
from mmclip.retrieval.ranking import Ranking

NATIVE, REVERSED, CORRECTED = "native", "reversed", "corrected"
RESULTS_FILE = "results.json"
PER_QUERY_FILE = "per_query.npz"
ITEMS_FILE = "items.json"
START_FILE = "start.json"  # what --measure-start leaves beside them
ITEMS = ("image_keys", "captions", "owner")
TEXT_ITEMS = ("query_ids", "queries", "document_ids", "titles")

Array = NDArray[Any]
Json = dict[str, Any]


@dataclass
class Results:
    """``json``: the content of results.json. ``per_query``: arrays over queries, named

    POOL/DIRECTION/queries [Q]             rows of the queries
    POOL/DIRECTION/clusters [Q]            whose numbers are drawn together in a bootstrap
    POOL/DIRECTION/topk_moments [Q, 6]     what d(topk) is made of (diagnostics.split_moments)
    POOL/DIRECTION/length_level [1]        mean length, which the moments are centred on
    POOL/DIRECTION/SCORING/METRIC [Q]      METRIC of metrics.RATES (text: TEXT_RATES), or first_rank
    POOL/DIRECTION/SCORING/top_ids, top_relevant [Q, k]    the best by cosine and natively: rows, relevance
    POOL/DIRECTION/cosine/top_scores [Q, k]                cosines of the best by cosine
    POOL/lengths/SIDE [n]                  raw lengths, in the order of the rows

    ``items``: what the main pool's rows are, {"image_keys": [N], "captions": [M], "owner": [M]}, or, of text,
    {"query_ids": [Q], "queries": [Q], "document_ids": [N], "titles": [N]}, to show them by. ``lists``: scoring -> the
    main pool's ranking with its lists, where a depth was given; not saved.
    """

    json: Json
    per_query: dict[str, Array]
    items: dict[str, list[Any]] = field(default_factory=dict)
    lists: dict[str, Ranking] = field(default_factory=dict)

    @property
    def pools(self) -> dict[str, Json]:
        """Pool name -> {"retrieval", "magnitude", "diagnostics"}, the main pool first."""
        main = {k: self.json[k] for k in ("retrieval", "magnitude")}
        main["diagnostics"] = self.json.get("diagnostics", {})
        return {MAIN_POOL: main, **self.json.get("pools", {})}

    @property
    def seed(self) -> int | None:
        """Of the training, None where it is not told: a run says it, and its model's export for later evaluations."""
        found = self.json.get("seed", (self.json.get("trained_with") or {}).get("seed"))
        return found if isinstance(found, int) else None

    def query_values(self, pool: str, direction: str, scoring: str, metric: str) -> Array:
        """[Q] numbers of every query. Errors: UserError naming what is there."""
        return self.array(f"{pool}/{direction}/{scoring}/{metric}")

    def array(self, name: str) -> Array:
        if name not in self.per_query:
            there = sorted({k.rsplit("/", 1)[0] for k in self.per_query})
            raise UserError(
                f"no per-query numbers {printable(name)!r}; there are those of: {printable(', '.join(there), 900)}"
            )
        return self.per_query[name]


def save_results(results: Results, folder: str | Path) -> Path:
    """Write results.json, per_query.npz and items.json into ``folder``, each whole or not at all; returns the first's
    path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    document, items = (
        json_text(results.json, indent=1),
        json_text(results.items),
    )  # what cannot be written replaces none

    def write(partial: Path) -> None:
        with partial.open("wb") as file:  # given a name, numpy would add its own ending
            np.savez_compressed(file, **results.per_query)  # type: ignore[arg-type]

    write_atomically(folder / PER_QUERY_FILE, write)
    write_text_atomically(folder / ITEMS_FILE, items)
    write_text_atomically(folder / RESULTS_FILE, document)
    return folder / RESULTS_FILE


def json_text(content: Json, indent: int | None = None) -> str:
    """A document as it is written. Errors: ValueError for NaN or infinity."""
    text = json.dumps(content, indent=indent, allow_nan=False, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode() + "\n"  # a name that is not UTF-8: JSON escapes it alike


def load_results(path: str | Path) -> Results:
    """Read a run's folder, or its results.json with per_query.npz beside it. Nothing is unpickled.

    Errors: UserError, one line, where a file is missing or is not what its name says.
    """
    path = Path(path)
    document = path / RESULTS_FILE if path.is_dir() else path
    arrays = document.parent / PER_QUERY_FILE
    for file in (document, arrays):
        if not file.is_file():
            raise UserError(f"no file {printable(file)}; an evaluated run has {RESULTS_FILE} and {PER_QUERY_FILE}")
    try:
        content = json.loads(document.read_text(encoding="utf-8"))
        missing = [
            k for k in ("retrieval", "magnitude", "data", "trained_with") if not isinstance(content.get(k), dict)
        ]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{printable(document)} is not a results.json: {printable(error)}") from None
    if missing:
        raise UserError(f"{printable(document)} is not a results.json: it has no {', '.join(missing)}")
    try:
        with arrays.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            per_query = {name: file[name] for name in file.files}
    except Exception as error:  # damaged content makes numpy, zipfile and zlib raise nearly anything
        kind = "" if isinstance(error, ValueError) else f": {reason(error)}"  # numpy's advice there is to unpickle it
        raise UserError(f"{printable(arrays)} is not an array file that can be read safely{kind}") from None
    return Results(content, per_query, _items(document.parent / ITEMS_FILE))


def _items(path: Path) -> dict[str, list[Any]]:
    """{} where there are none, or what stands there is something else: numbers do not need them."""
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    for names in (ITEMS, TEXT_ITEMS):
        if isinstance(items, dict) and all(isinstance(items.get(k), list) for k in names):
            return {k: items[k] for k in names}
    return {}
