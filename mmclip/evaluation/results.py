"""Results of an evaluation and their files: results.json, per_query.npz and items.json."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmclip import metrics
from mmclip.errors import UserError, printable, reason
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.io import json_text, write_atomically, write_text_atomically
from mmclip.retrieval import Ranking
from mmclip.roles import TEXT_DIRECTIONS, Direction, Exponents

NATIVE, REVERSED, CORRECTED = "native", "reversed", "corrected"
RESULTS_FILE, PER_QUERY_FILE, ITEMS_FILE = "results.json", "per_query.npz", "items.json"
START_FILE = "start.json"  # the same of the untrained model, by --measure-start
ITEMS = (("image_keys", "captions", "owner"), ("query_ids", "queries", "document_ids", "titles"))

Array = NDArray[Any]
Json = dict[str, Any]


@dataclass
class Results:
    """Results of an evaluation: the numbers, those of every query, and the items that were ranked.

    Attributes:
        json: The content of results.json.
        per_query: Arrays, named
            POOL/DIRECTION/queries, clusters [Q]        rows of the queries; what a bootstrap draws together
            POOL/DIRECTION/topk_moments [Q, 6]          what d(topk) is made of (metrics.magnitude.split_moments)
            POOL/DIRECTION/length_level [1]             mean norm, which the moments are centred on
            POOL/DIRECTION/SCORING/METRIC [Q]           METRIC of metrics.RATES (text: TEXT_RATES), or first_rank
            POOL/DIRECTION/SCORING/top_ids, top_relevant [Q, k]    the best by cosine and natively: rows, relevance
            POOL/DIRECTION/cosine/top_scores [Q, k]     cosines of the best by cosine
            POOL/lengths/SIDE [n]                       norms, in the order of the rows
        items: The main pool's rows: {"image_keys": [N], "captions": [M], "owner": [M]} or, of text, {"query_ids": [Q],
            "queries": [Q], "document_ids": [N], "titles": [N]}.
        lists: scoring -> the main pool's ranking with its lists, where ``evaluate`` has a depth; not saved.
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
    def trained_with(self) -> Json:
        """The model's training metadata; {} for a plain CLIP."""
        return self.json.get("trained_with") or {}

    @property
    def native(self) -> Exponents:
        return Exponents(**self.json["evaluation"]["native"])

    @property
    def seed(self) -> int | None:
        """Of the training, None where unknown: from the run itself, or from its model's export."""
        seed = self.json.get("seed", self.trained_with.get("seed"))
        return seed if isinstance(seed, int) else None

    def clusters(self, pool: str, direction: str) -> Array:
        """[Q]: queries with one number are resampled together."""
        return self.array(f"{pool}/{direction}/clusters")

    def query_values(self, pool: str, direction: str, scoring: str, metric: str) -> Array:
        """[Q] values of every query. Raises UserError as :meth:`array`."""
        return self.array(f"{pool}/{direction}/{scoring}/{metric}")

    def array(self, name: str) -> Array:
        """An array of ``per_query``. Raises UserError naming what the run has."""
        if name not in self.per_query:
            names = ", ".join(sorted({k.rsplit("/", 1)[0] for k in self.per_query}))
            raise UserError(f"no per-query numbers {printable(name)!r}; valid are those of: {printable(names, 900)}")
        return self.per_query[name]


def save_results(results: Results, folder: str | Path) -> Path:
    """Write the three files into ``folder``, each whole or not at all; returns the path of results.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # before any file is replaced: NaN cannot be written
    document, items = json_text(results.json, indent=1), json_text(results.items)

    def write(partial: Path) -> None:
        with partial.open("wb") as file:  # of a name numpy would add its own ending
            np.savez_compressed(file, **results.per_query)  # type: ignore[arg-type]

    write_atomically(folder / PER_QUERY_FILE, write)
    write_text_atomically(folder / ITEMS_FILE, items)
    write_text_atomically(folder / RESULTS_FILE, document)
    return folder / RESULTS_FILE


def load_results(path: str | Path) -> Results:
    """Read a run's folder, or its results.json with per_query.npz beside it; nothing is unpickled.

    Raises:
        UserError: One line, where a file is missing, damaged, or lacks what tables and comparisons need.
    """
    path = Path(path)
    document = path / RESULTS_FILE if path.is_dir() else path
    arrays = document.parent / PER_QUERY_FILE
    for file in (document, arrays):
        if not file.is_file():
            raise UserError(f"no file {printable(file)}; an evaluated run has {RESULTS_FILE} and {PER_QUERY_FILE}")
    try:
        content = json.loads(document.read_text(encoding="utf-8"))
        sections = ("retrieval", "magnitude", "data", "trained_with")
        missing = [k for k in sections if not isinstance(content.get(k), dict)]
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
    results = Results(content, per_query, _load_items(document.parent / ITEMS_FILE))
    with whole(path):
        _check(results)
    return results


def load_runs(paths: Sequence[str]) -> dict[str, Results]:
    """Load finished runs by :func:`run_names`. Raises UserError as :func:`load_results`."""
    return {name: load_results(path) for name, path in run_names(paths).items()}


def run_names(paths: Sequence[str]) -> dict[str, str]:
    """Short name -> path: the folder's name, or the whole path where two have the same.

    >>> run_names(["logs/a", "logs/b"]), run_names(["old/a", "new/a"])
    ({'a': 'logs/a', 'b': 'logs/b'}, {'old/a': 'old/a', 'new/a': 'new/a'})
    """
    names = [Path(p).name for p in paths]
    return {n if names.count(n) == 1 else p: p for n, p in zip(names, paths, strict=True)}


@contextlib.contextmanager
def whole(where: str | Path) -> Iterator[None]:
    """Turn what a damaged or foreign results.json makes the body raise into one UserError that names the run."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError, OverflowError) as error:
        why = f"{type(error).__name__} {printable(error, 100)}"
        raise UserError(f"{printable(where)}: not the whole results of an evaluated run: {why}") from None


def _check(results: Results) -> None:
    """Require everything that tables and comparisons read; raises what a missing or odd value raises."""
    list(map(float, results.native))
    for pool, section in results.pools.items():
        n_queries = (results.json["data"] if pool == MAIN_POOL else section)["n_queries"]
        if set(section["retrieval"]) != set(n_queries):
            raise ValueError(f"directions of {pool}: queries of {sorted(n_queries)}")
        for direction, scorings in section["retrieval"].items():
            n = int(n_queries[direction])
            rates = metrics.TEXT_RATES if direction in TEXT_DIRECTIONS else metrics.RATES
            shapes: dict[str, tuple[int, ...]] = {"clusters": (n,)}
            shapes |= {f"{scoring}/{rate}": (n,) for scoring in scorings for rate in rates} | {"topk_moments": (n, 6)}
            for name, shape in shapes.items():
                if results.array(f"{pool}/{direction}/{name}").shape != shape:
                    raise ValueError(f"{pool}/{direction}/{name} has not {n} values")
            for numbers in (scorings["cosine"], scorings[NATIVE], *scorings.values()):
                list(map(float, (numbers[name] for name in (*rates, "median_rank", "tied_queries"))))
                _optional(numbers["ci"][rate] for rate in rates)
            if CORRECTED in scorings:
                scorings[CORRECTED]["bank"], scorings[CORRECTED]["bank_size"], scorings[CORRECTED]["transductive"]
        documents = {Direction(direction).document_side for direction in section["retrieval"]}
        for side, norms in section["magnitude"].items():
            _optional((norms["mean"], norms["cv"]))
            if side in documents:
                groups = [g for by in ("by_document", "by_query") for rows in norms[by].values() for g in rows]
                effects = [norms["cohens_d"]["topk"], norms["cohens_d"]["corpus"], *(g["topk"] for g in groups)]
                correlations = filter(None, (norms["spearman"].get(name) for name in norms["by_document"]))
                _optional(effect[key] for effect in effects if effect is not None for key in ("value", "ci"))
                _optional(group[key] for group in groups for key in ("n", "mean"))
                _optional(correlation["value"] for correlation in correlations)


def _optional(values: Iterable[Any]) -> None:
    """Require numbers, intervals of two, or None."""
    for value in values:
        lo, hi = value if isinstance(value, list) else (0, 0 if value is None else value)
        float(hi) - float(lo)


def _load_items(path: Path) -> dict[str, list[Any]]:
    """Items of a run; {} where there are none, or the file holds something else: numbers do not need them."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        items = json.loads(path.read_text(encoding="utf-8"))
        for names in ITEMS:
            if isinstance(items, dict) and all(isinstance(items.get(k), list) for k in names):
                return {k: items[k] for k in names}
    return {}
