"""TREC run and judgment files: ours to write, other people's to read and to measure by ir_measures.

ir_measures (pytrec_eval underneath) sorts a run by its scores and equal ones by id; our order puts the irrelevant first
among equals (mmclip.retrieval.ranking). The files that we write have the real scores, and our order as their ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmclip import metrics
from mmclip.data.beir import BeirCollection, read_lines
from mmclip.errors import UserError, printable
from mmclip.io import write_text_atomically
from mmclip.retrieval import Ranking

RUNS, RUN_ENDING, QRELS_FILE = "runs", ".trec", "qrels.trec"
LARGEST_GAIN = 1000  # trec_eval counts by level of relevance, and keeps a list as long as the highest
_MEASURES = {"success": "Success", "recall": "R", "mrr": "RR", "ndcg": "nDCG"}

Array = NDArray[Any]
Scored = Mapping[str, Mapping[str, float]]  # query -> document -> score


def measure_run(collection: BeirCollection, run: Scored, rates: Iterable[str]) -> dict[str, Array]:
    """The same of somebody's run, by ids (:func:`read_run`), sorted as ir_measures does: rate -> [Q], of all queries of
    the collection, 0 for those that the run does not answer."""
    qrels: dict[str, dict[str, float]] = {name: {} for name in collection.query_ids}
    for (query, document), gain in zip(collection.pairs.tolist(), collection.gains.tolist(), strict=True):
        qrels[collection.query_ids[query]][collection.document_ids[document]] = gain
    return _measured(qrels, run, collection.query_ids, rates)


def measurable(rates: Iterable[str], gains: Array) -> list[str]:
    """The rates that ir_measures can tell: not map, whose list would have to hold every document, and, where gains are
    no small whole numbers, not ndcg: it takes none but them.

    >>> measurable(("map", "mrr@10", "ndcg@10"), np.array([1.0, 0.5]))
    ['mrr@10']
    """
    whole = bool(((gains == np.round(gains)) & (gains <= LARGEST_GAIN)).all())
    return [r for r in rates if metrics.cutoff(r) is not None and (whole or not r.startswith("ndcg"))]


def _measured(
    qrels: Mapping[str, Mapping[str, float]], run: Scored, names: Sequence[str], rates: Iterable[str]
) -> dict[str, Array]:
    import ir_measures

    rates = measurable(rates, np.array([g for found in qrels.values() for g in found.values()]))
    if not rates:
        return {}
    rate_of = {getattr(ir_measures, _MEASURES[r.partition("@")[0]]) @ metrics.cutoff(r): r for r in rates}
    place = {name: i for i, name in enumerate(names)}
    found = {rate: np.zeros(len(names)) for rate in rates}
    judged = {q: {d: max(1, int(g)) for d, g in of.items()} for q, of in qrels.items()}
    for one in ir_measures.iter_calc(list(rate_of), judged, run):
        found[rate_of[one.measure]][place[one.query_id]] = one.value
    return found


def require_trec_ids(collection: BeirCollection) -> None:
    """Errors: UserError naming the first id with white space in it, which a line of a TREC file cannot hold."""
    for kind, ids in (("query", collection.query_ids), ("document", collection.document_ids)):
        for name in ids:
            if len(name.split()) != 1 or name != name.strip():
                raise UserError(
                    f"{printable(collection.path)}: {kind} id {printable(name, 60)!r} has white space in it, which a "
                    "TREC file cannot hold; --run-depth 0 writes none"
                )


def write_run(path: Path, collection: BeirCollection, ranking: Ranking, scores: Array, tag: str, depth: int) -> None:
    """``qid Q0 docid rank score tag`` a line, the ``depth`` best of a query; scores [Q, k] of the ranking's lists.

    Errors: as :func:`require_trec_ids`.
    """
    require_trec_ids(collection)
    lines = []
    for query, ids, values in zip(ranking.queries, ranking.top_ids.tolist(), scores.tolist(), strict=True):
        name = collection.query_ids[query]
        for place, (document, score) in enumerate(zip(ids[:depth], values[:depth], strict=True), 1):
            lines.append(f"{name} Q0 {collection.document_ids[document]} {place} {score:.10g} {tag}\n")
    write_text_atomically(path, "".join(lines))


def write_qrels(path: Path, collection: BeirCollection) -> None:
    """``qid 0 docid gain`` a line, relevant documents only. Errors: as :func:`require_trec_ids`."""
    require_trec_ids(collection)
    told = zip(collection.pairs.tolist(), collection.gains.tolist(), strict=True)
    write_text_atomically(
        path,
        "".join(f"{collection.query_ids[q]} 0 {collection.document_ids[d]} {gain:g}\n" for (q, d), gain in told),
    )


def read_run(path: Path, collection: BeirCollection) -> tuple[dict[str, dict[str, float]], list[str]]:
    """({query id: {document id: score}} of the collection's queries, what a person should know).

    Documents that a query excludes are dropped. Errors: UserError naming the line: no six columns, a score that is no
    number, a document that is not in the corpus or named twice for a query, no query of the collection.
    """
    row_of = {name: row for row, name in enumerate(collection.document_ids)}
    query_of = {name: row for row, name in enumerate(collection.query_ids)}
    excluded = {row: set(rows) for row, rows in collection.excluded.items()}
    run: dict[str, dict[str, float]] = {}
    others: set[str] = set()
    dropped = 0
    for number, line in read_lines(path):
        where = f"{printable(path)}: line {number}"
        cells = line.split()
        if len(cells) != 6:
            raise UserError(f"{where}: qid Q0 docid rank score tag were expected, got {len(cells)} "
                             f"column{'s' * (len(cells) != 1)}: {printable(line, 80)}")  # fmt: skip
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
        if document not in row_of:
            raise UserError(
                f"{where}: document {printable(document, 60)!r} is not in the corpus of {printable(collection.path)}"
            )
        if row_of[document] in excluded.get(query_of[query], ()):
            dropped += 1
            continue
        found = run.setdefault(query, {})
        if document in found:
            raise UserError(f"{where}: document {printable(document, 60)!r} is named twice for query "
                             f"{printable(query, 60)!r}")  # fmt: skip
        found[document] = score
    if not run:
        raise UserError(f"{printable(path)}: no line of a query of {printable(collection.path)} "
                         f"[{printable(collection.split, 60)}]")  # fmt: skip
    unanswered = len(collection.query_ids) - len(run)
    notes = [
        text
        for n, text in (
            (
                unanswered,
                f"{unanswered} of {len(collection.query_ids)} queries are not answered: all of their rates are 0",
            ),
            (len(others), f"{len(others)} queries of other judgments left out"),
            (dropped, f"{dropped} documents that their queries exclude left out"),
        )
        if n
    ]
    return run, notes
