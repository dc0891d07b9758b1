"""TREC run and judgment files: written for other tools, read from other systems and measured by ir_measures.

ir_measures (pytrec_eval underneath) sorts a run by score and ties by id; mmclip.retrieval.ranking puts irrelevant
documents first among ties. The files written here have the exact scores, and mmclip's order as their ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmclip.data.beir import BeirCollection, read_lines
from mmclip.errors import UserError, printable
from mmclip.io import write_text_atomically
from mmclip.metrics.rank import cutoff
from mmclip.retrieval import Ranking

RUNS, RUN_ENDING, QRELS_FILE = "runs", ".trec", "qrels.trec"
LARGEST_GAIN = 1000  # trec_eval counts by level of relevance, and keeps a list as long as the highest
_MEASURES = {"success": "Success", "recall": "R", "mrr": "RR", "ndcg": "nDCG"}

Array = NDArray[Any]
Scored = Mapping[str, Mapping[str, float]]  # query -> document -> score


def measure_run(collection: BeirCollection, run: Scored, rates: Iterable[str]) -> dict[str, Array]:
    """Measure a run (:func:`read_run`) with ir_measures: rate -> [Q], of the ``measurable`` rates.

    Queries of the collection that the run has no documents for count as 0.
    """
    import ir_measures

    rates, names = measurable(rates, collection.gains), collection.query_ids
    if not rates:
        return {}
    qrels: dict[str, dict[str, int]] = {name: {} for name in names}
    for (query, document), gain in zip(collection.pairs.tolist(), collection.gains.tolist(), strict=True):
        qrels[names[query]][collection.document_ids[document]] = max(1, int(gain))
    rate_of = {getattr(ir_measures, _MEASURES[r.partition("@")[0]]) @ cutoff(r): r for r in rates}
    place = {name: i for i, name in enumerate(names)}
    values = {rate: np.zeros(len(names)) for rate in rates}
    for one in ir_measures.iter_calc(list(rate_of), qrels, run):
        values[rate_of[one.measure]][place[one.query_id]] = one.value
    return values


def measurable(rates: Iterable[str], gains: Array) -> list[str]:
    """Select the rates that ir_measures computes: no map, which needs a list of all documents, and ndcg only where
    gains are small whole numbers.

    >>> measurable(("map", "mrr@10", "ndcg@10"), np.array([1.0, 0.5]))
    ['mrr@10']
    """
    whole = bool(((gains == np.round(gains)) & (gains <= LARGEST_GAIN)).all())
    return [r for r in rates if cutoff(r) is not None and (whole or not r.startswith("ndcg"))]


def require_trec_ids(collection: BeirCollection) -> None:
    """Raise UserError naming the first id with white space, which a line of a TREC file cannot hold."""
    for kind, ids in (("query", collection.query_ids), ("document", collection.document_ids)):
        for name in ids:
            if len(name.split()) != 1 or name != name.strip():
                raise UserError(
                    f"{printable(collection.path)}: {kind} id {printable(name, 60)!r} has white space in it, which a "
                    "TREC file cannot hold; --run-depth 0 writes none"
                )


def write_run(path: Path, collection: BeirCollection, ranking: Ranking, scores: Array, tag: str, depth: int) -> None:
    """Write ``qid Q0 docid rank score tag`` lines, the ``depth`` best of a query; scores [Q, k] of the ranking's lists.

    Raises:
        UserError: As :func:`require_trec_ids`.
    """
    require_trec_ids(collection)
    lines = []
    for query, ids, values in zip(ranking.queries, ranking.top_ids.tolist(), scores.tolist(), strict=True):
        name = collection.query_ids[query]
        for place, (document, score) in enumerate(zip(ids[:depth], values[:depth], strict=True), 1):
            lines.append(f"{name} Q0 {collection.document_ids[document]} {place} {score:.10g} {tag}\n")
    write_text_atomically(path, "".join(lines))


def write_qrels(path: Path, collection: BeirCollection) -> None:
    """Write ``qid 0 docid gain`` lines, relevant documents only. Raises UserError as :func:`require_trec_ids`."""
    require_trec_ids(collection)
    judged = zip(collection.pairs.tolist(), collection.gains.tolist(), strict=True)
    lines = (f"{collection.query_ids[q]} 0 {collection.document_ids[d]} {gain:g}\n" for (q, d), gain in judged)
    write_text_atomically(path, "".join(lines))


def read_run(path: Path, collection: BeirCollection) -> tuple[dict[str, dict[str, float]], list[str]]:
    """({query id: {document id: score}} of the collection's queries, remarks for the user).

    Documents that a query excludes are dropped.

    Raises:
        UserError: The line and its fault: no six columns, a score that is no number, a document that is not in the
            corpus or listed twice for a query; or no line of any query of the collection.
    """
    row_of = {name: row for row, name in enumerate(collection.document_ids)}
    query_of = {name: row for row, name in enumerate(collection.query_ids)}
    excluded = {row: set(rows) for row, rows in collection.excluded.items()}
    run: dict[str, dict[str, float]] = {}
    others: set[str] = set()
    dropped = 0
    for number, line in read_lines(path):
        where, cells = f"{printable(path)}: line {number}", line.split()
        if len(cells) != 6:
            columns = f"{len(cells)} column{'s' * (len(cells) != 1)}"
            raise UserError(f"{where}: expected qid Q0 docid rank score tag, got {columns}: {printable(line, 80)}")
        query, _, document, _, text, _ = cells
        try:
            score = float(text)
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise UserError(f"{where}: the score is a number, got {printable(text, 60)!r}")
        if query not in query_of:
            others.add(query)
            continue
        named = f"{where}: document {printable(document, 60)!r}"
        if document not in row_of:
            raise UserError(f"{named} is not in the corpus of {printable(collection.path)}")
        if row_of[document] in excluded.get(query_of[query], ()):
            dropped += 1
        elif document in run.setdefault(query, {}):
            raise UserError(f"{named} is listed twice for query {printable(query, 60)!r}")
        else:
            run[query][document] = score
    if not run:
        where = f"{printable(collection.path)} [{printable(collection.split, 60)}]"
        raise UserError(f"{printable(path)}: no line of a query of {where}")
    missing = len(query_of) - len(run)
    notes = (
        (missing, f"{missing} of {len(query_of)} queries have no documents: all of their rates are 0"),
        (len(others), f"{len(others)} queries of other judgments left out"),
        (dropped, f"{dropped} documents that their queries exclude left out"),
    )
    return run, [note for n, note in notes if n]
