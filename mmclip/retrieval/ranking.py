"""Raw vectors and relevance -> the exact rank of every relevant document and the best k, in tiles of bounded memory.

Everything here is in roles: a query ranks documents. With 2 captions a picture, texts 0 and 1 belong to picture 0 and
texts 2 and 3 to picture 1; as (query row, document row) the pairs are

    i2t: (0, 0) (0, 1) (1, 2) (1, 3)        t2i: (0, 0) (1, 0) (2, 1) (3, 1)

**Order.** By score, best first; a tie is an equal float32 score, and ties count against the model: among equals the
irrelevant stand first, then the less relevant, then the smaller document row. So

    rank(r) = 1 + #(irrelevant with score >= s_r) + #(relevant placed before r)

**One product.** For one query gamma_q only rescales every score, so a ranking depends on gamma_d alone:

    s(q, d) = (q . d) / (|q| |d|**gamma_d)

and all scorings come from one matrix product, those of the other direction too: :func:`rank` has one direction,
:func:`rank_both` two. Scores are exact, float64 rounded to float32 once (:mod:`mmclip.retrieval.rank_blocks` says how), so
ranks depend neither on the tiles nor on which side is cut into rows: equal vectors tie wherever they stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mmclip.errors import UserError
from mmclip.retrieval.qrels import Judged, Qrels
from mmclip.retrieval.rank_blocks import Asked, Progress, Ranked, count_tiles
from mmclip.retrieval.sides import Scoring, Side, exact_dots, inverse, lengths
from mmclip.retrieval.tiles import bfloat16_pays, full_float32, rough_error, tile_error
from mmclip.retrieval.top_lists import TopList, insert_relevant
from mmclip.similarity import Exponents

BLOCK_BYTES = 64 * 2**20  # working memory beside the vectors, about
_LARGE = 10**9  # multiplications from which on it is worth asking how to do them

Array = NDArray[Any]


@dataclass(frozen=True)
class Ranking:
    """One scoring's ranks. Q queries with a relevant document, P (query, relevant document) pairs, grouped by query.

    queries [Q]       rows of the queries that have a relevant document, ascending
    offsets [Q + 1]   query i's pairs are offsets[i] : offsets[i + 1]
    documents [P]     document rows of the pairs, ascending within a query
    gains [P]         how relevant each is, above 0; 1 where nothing was said
    ranks [P]         rank of that document among all n_documents; 1 is best
    tied [Q]          True where an irrelevant document has exactly the score of a relevant one
    top_ids [Q, k]    rows of the best k documents in order, k clamped to n_documents (k = 0 where none were asked)
    top_relevant [Q, k]  which of those are relevant
    """

    queries: Array
    offsets: Array
    documents: Array
    gains: Array
    ranks: Array
    tied: Array
    top_ids: Array
    top_relevant: Array
    n_documents: int

    @property
    def n_tied(self) -> int:
        """Number of queries whose numbers depend on how ties are broken."""
        return int(self.tied.sum())


def as_floats(exponents: Exponents) -> Exponents:
    """The exponents as numbers, whether fixed or learned (0-d tensors)."""
    return Exponents(*(float(g.detach()) if isinstance(g, Tensor) else float(g) for g in exponents))


def rank(
    query: Tensor,
    document: Tensor,
    qrels: Qrels | ArrayLike | Tensor,
    scorings: Mapping[str, Exponents],
    *,
    top_k: Mapping[str, int] | None = None,
    excluded: Array | None = None,
    block_bytes: int = BLOCK_BYTES,
    progress: Progress | None = None,
) -> dict[str, Ranking]:
    """Rank the documents of every query that has a relevant one, once for every scoring.

    query [Q, D], document [N, D]: raw vectors on one device; qrels: graded relevance, or pairs [P, 2] of (query row,
    document row) that are equally relevant; scorings: name -> exponents; top_k: scoring -> how many of the best
    documents to list, none by default. excluded [X, 2]: (query row, document row) of documents that do not exist for a query, neither listed
    nor counted in its ranks; no list is then longer than the documents that are left to any query.
    progress: called with (scores done, scores in all) after each tile.
    Memory beside the vectors and the result is about ``block_bytes``.
    Errors: UserError for embeddings that are not finite or whose D differ, and for pairs of rows that do not exist; also where
    a relevant document is excluded.

    >>> from mmclip.similarity import Normalization
    >>> q, d = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [4.0, 3.0]])
    >>> scorings = {n.value: n.exponents for n in (Normalization.COSINE, Normalization.DOT)}
    >>> {name: r.ranks.tolist() for name, r in rank(q, d, [[0, 1]], scorings).items()}
    {'cosine': [2], 'dot': [1]}
    """
    return _rank(query, document, qrels, scorings, top_k, block_bytes, progress, False, excluded)[0]


def rank_both(
    query: Tensor,
    document: Tensor,
    qrels: Qrels | ArrayLike | Tensor,
    scorings: Mapping[str, Exponents],
    *,
    top_k: Mapping[str, int] | None = None,
    block_bytes: int = BLOCK_BYTES,
    progress: Progress | None = None,
) -> tuple[dict[str, Ranking], dict[str, Ranking]]:
    """:func:`rank`, and the direction in which the two sides exchange their roles, from one matrix product.

    The same two results as ``rank(query, document, qrels, ...)`` and ``rank(document, query, qrels.transposed(), ...)``:
    exponents belong to roles, so under qnorm the first divides by |query|, the second by |document|.
    """
    first, second = _rank(query, document, qrels, scorings, top_k, block_bytes, progress, True)
    return first, second


@torch.no_grad()
def _rank(
    query: Tensor,
    document: Tensor,
    qrels: Qrels | ArrayLike | Tensor,
    scorings: Mapping[str, Exponents],
    top_k: Mapping[str, int] | None,
    block_bytes: int,
    progress: Progress | None,
    both: bool,
    excluded: Array | None = None,
) -> list[dict[str, Ranking]]:
    if query.ndim != 2 or document.ndim != 2 or query.shape[1] != document.shape[1]:
        raise UserError(
            f"embeddings of shapes {list(query.shape)} and {list(document.shape)}: "
            "queries [Q, D] and documents [N, D] must share D"
        )
    length = lengths(query, "query"), lengths(document, "document")
    qrels = qrels if isinstance(qrels, Qrels) else Qrels(qrels)
    qrels.check(len(query), len(document))
    judged = [Judged.read(qrels.pairs, qrels.gains, len(query), len(document))]
    out = None
    if excluded is not None and len(excluded):
        judged[0], out = judged[0].with_excluded(excluded, len(query))
        most = int(np.add.reduceat(out.astype(np.int64), judged[0].offsets[:-1]).max())
        top_k = {name: min(k, len(document) - most) for name, k in (top_k or {}).items()}
    # Cosines of the relevant pairs, in their order in the first direction and in that of the second.
    pair_rows = [torch.as_tensor(x, device=query.device) for x in (judged[0].pair_queries, judged[0].documents)]
    cosine = exact_dots(query, document, *pair_rows)
    cosine *= inverse(length[0])[pair_rows[0]] * inverse(length[1])[pair_rows[1]]
    turn = torch.as_tensor(np.lexsort((judged[0].pair_queries, judged[0].documents)), device=query.device)
    cosines = [cosine, cosine[turn]]
    # Neighbours among the rows are searched together, so they had better be as hard as each other.
    hard = np.minimum.reduceat(cosine.cpu().numpy(), judged[0].offsets[:-1])
    judged[0] = replace(judged[0], priority=hard)
    if both:
        judged.append(judged[0].turned(len(query)))
    # A query that is no document of the other direction and has no relevant document takes no part.
    rows = Side(query, length[0], judged[0].order(len(query) if both else 0))
    columns = Side(document, length[1], judged[1].order(len(document)) if both else np.arange(len(document)))

    gamma_d = {name: float(as_floats(e).gamma_d) for name, e in scorings.items()}
    # Scorings that share a ranking share the longest list asked of any of them.
    listed = {g: max((top_k or {}).get(name, 0) for name in gamma_d if gamma_d[name] == g) for g in gamma_d.values()}
    dim = query.shape[1]
    error = tile_error(dim)
    large = len(rows) * len(columns) * dim > _LARGE and query.device.type == "cpu"
    half = large and not any(listed.values()) and bfloat16_pays(dim, torch.get_num_threads())
    directions, counted = [], []
    for one, own, asking, answering in zip(judged, cosines, (rows, columns), (columns, rows), strict=False):
        slots = one.slots(asking, answering)
        own = own[torch.as_tensor(one.by_slot, device=own.device)]
        way = {}
        for gamma, k in listed.items():
            scoring = Scoring(asking, answering, gamma)
            top = TopList(k, slots, scoring, error) if k else None
            way[gamma] = Ranked(slots, scoring, own, error, top)
        counted.append(way)
        rankings = list(way.values())
        directions.append(Asked(slots, asking is rows, len(asking), rankings, rough_error(dim) if half else error))
    with full_float32():
        count_tiles(rows, columns, directions, block_bytes, half, progress)
    found = []
    for one, way in zip(judged, counted, strict=True):
        done = {gamma: _ranking(one, ranked, block_bytes, out) for gamma, ranked in way.items()}
        found.append({name: done[gamma] for name, gamma in gamma_d.items()})
    return found


def _ranking(judged: Judged, ranked: Ranked, block_bytes: int, out: Array | None) -> Ranking:
    """Counts -> ranks and lists, in the queries' own order. out [P]: pairs whose document is excluded; None: none."""
    value, at_least, above = (
        x.cpu().numpy()[np.argsort(judged.by_slot)] for x in (ranked.threshold, ranked.at_least, ranked.above)
    )
    before = np.empty(len(value), dtype=np.int64)
    before[np.lexsort((judged.documents, judged.gains, -value, judged.number))] = np.arange(len(value))
    ranks = 1 + at_least + before - judged.offsets[:-1][judged.number]
    most_first, ties = judged.most_first, at_least > above
    if out is not None:  # who stands before a relevant document and is excluded is not there
        order = np.argsort(before)
        gone = np.empty_like(ranks)
        gone[order] = np.cumsum(out[order])
        gone -= np.concatenate([[0], np.cumsum(out)])[judged.offsets[:-1]][judged.number]
        judged, ranks, ties = judged.only(~out), (ranks - gone)[~out], ties[~out]
    tied = np.logical_or.reduceat(ties, judged.offsets[:-1])
    ids, relevant = (np.empty((len(judged.queries), 0), dtype=t) for t in (np.int64, bool))
    if ranked.top is not None:
        best = ranked.top.rows(block_bytes).cpu().numpy()
        ids, relevant = insert_relevant(best[np.argsort(most_first)], judged.number, judged.documents, ranks)
    return Ranking(
        judged.queries,
        judged.offsets,
        judged.documents,
        judged.gains,
        ranks,
        tied,
        top_ids=ids,
        top_relevant=relevant,
        n_documents=judged.n_documents,
    )
