"""Raw vectors and relevance -> the exact rank of every relevant document and the best k, in blocks of queries.

Everything here is in roles: a query ranks documents. With 2 captions a picture, texts 0 and 1 belong to picture 0 and
texts 2 and 3 to picture 1; as (query row, document row) the pairs are

    i2t: (0, 0) (0, 1) (1, 2) (1, 3)        t2i: (0, 0) (1, 0) (2, 1) (3, 1)

**Order.** By float32 score, best first; a tie is an equal float32 score, and ties count against the relevant
document: among equals the irrelevant stand first, then the smaller document row. So

    rank(r) = 1 + #(irrelevant with score >= s_r) + #(relevant placed before r)

**One product.** For one query gamma_q only rescales every score, so a ranking depends on gamma_d alone and all
scorings of a direction come from one matrix product of raw vectors, s = (q . d) / |d|**gamma_d. ``shared=False``
evaluates each formula by itself with :func:`mmclip.similarity.score`; the tests hold the two equal.

Products are accumulated in float64 and rounded to float32 once. float32 kernels differ in the last bit between the
middle and the edge of a tile, so equal vectors would get unequal scores, and a collapsed model would look better than
it is; rounded once, the result depends neither on the block size nor on a vector's place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmclip.errors import UsageError
from mmclip.similarity import TINY, Exponents, Normalization, magnitude, score

BLOCK_BYTES = 64 * 2**20  # working memory of one block of queries
_BYTES_PER_SCORE = 24  # float64 product, its scaled copy, float32 scores, the comparison's booleans
_COUNT_SLOTS = 40  # up to so many relevant documents a query, counting is faster than sorting the row

Array = NDArray[Any]


@dataclass(frozen=True)
class Ranking:
    """One scoring's ranks. Q queries with a relevant document, P (query, relevant document) pairs, grouped by query.

    queries [Q]       rows of the queries that have a relevant document, ascending
    offsets [Q + 1]   query i's pairs are offsets[i] : offsets[i + 1]
    documents [P]     document rows of the pairs, ascending within a query
    ranks [P]         rank of that document among all n_documents; 1 is best
    tied [Q]          True where an irrelevant document has exactly the score of a relevant one
    top_ids [Q, k]    rows of the best k documents in order, k clamped to n_documents (k = 0 where none were asked)
    top_relevant [Q, k]  which of those are relevant
    """

    queries: Array
    offsets: Array
    documents: Array
    ranks: Array
    tied: Array
    top_ids: Array
    top_relevant: Array
    n_documents: int

    @property
    def n_tied(self) -> int:
        """Number of queries whose numbers depend on how ties are broken."""
        return int(self.tied.sum())


def check_finite(x: Tensor, side: str) -> None:
    """Errors: UsageError naming the first row of ``x`` [N, D] that holds a NaN or an infinity."""
    bad = ~torch.isfinite(x).all(dim=-1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise UsageError(
            f"{side} embeddings: row {row} holds NaN or infinity ({int(bad.sum())} of {len(x)} rows do); "
            "every value must be finite"
        )


def group_pairs(pairs: Tensor | Array, n_queries: int, n_documents: int) -> tuple[Array, Array, Array]:
    """(queries [Q], offsets [Q + 1], documents [P]) of pairs [P, 2] of (query row, document row); repeats count once.

    Errors: UsageError for a pair outside the rows, or no pair at all.

    >>> group_pairs(np.array([[3, 1], [0, 2], [3, 0], [3, 1]]), 4, 3)
    (array([0, 3]), array([0, 1, 3]), array([2, 0, 1]))
    """
    pairs = np.asarray(pairs, dtype=np.int64)
    if pairs.ndim != 2 or pairs.shape[1:] != (2,) or len(pairs) == 0:
        raise UsageError(
            f"relevance pairs of shape {list(pairs.shape)}: at least one (query row, document row) pair is needed, "
            "as an array of shape [P, 2]"
        )
    for column, (name, n) in enumerate((("query", n_queries), ("document", n_documents))):
        outside = (pairs[:, column] < 0) | (pairs[:, column] >= n)
        if outside.any():
            at = int(outside.argmax())
            raise UsageError(
                f"relevance pair {at} names {name} row {int(pairs[at, column])}; valid rows are 0 to {n - 1}"
            )
    code = np.unique(pairs[:, 0] * n_documents + pairs[:, 1])
    query, documents = np.divmod(code, n_documents)
    queries, starts = np.unique(query, return_index=True)
    return queries, np.append(starts, len(code)), documents


def as_floats(exponents: Exponents) -> Exponents:
    """The exponents as numbers, whether fixed or learned (0-d tensors)."""
    return Exponents(*(float(g.detach()) if isinstance(g, Tensor) else float(g) for g in exponents))


@torch.no_grad()
def rank(
    query: Tensor,
    document: Tensor,
    pairs: Tensor | Array,
    scorings: Mapping[str, Exponents],
    *,
    top_k: Mapping[str, int] | None = None,
    block_bytes: int = BLOCK_BYTES,
    shared: bool = True,
) -> dict[str, Ranking]:
    """Rank the documents of every query that has a relevant one, once for every scoring.

    query [Q, D], document [N, D]: raw vectors; pairs [P, 2]: (query row, document row); scorings: name -> exponents;
    top_k: scoring -> how many of the best documents to list, none by default.
    Memory beside the vectors in float64 is about ``block_bytes``, and never less than one query needs.
    Errors: UsageError for embeddings that are not finite or whose D differ, and for unusable pairs.

    >>> q, d = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [4.0, 3.0]])
    >>> scorings = {n.value: n.exponents for n in (Normalization.COSINE, Normalization.DOT)}
    >>> {name: r.ranks.tolist() for name, r in rank(q, d, [[0, 1]], scorings).items()}
    {'cosine': [2], 'dot': [1]}
    """
    if query.ndim != 2 or document.ndim != 2 or query.shape[1] != document.shape[1]:
        raise UsageError(
            f"embeddings of shapes {list(query.shape)} and {list(document.shape)}: "
            "queries [Q, D] and documents [N, D] must share D"
        )
    check_finite(query, "query")
    check_finite(document, "document")
    queries, offsets, documents = group_pairs(pairs, len(query), len(document))
    q, d = query.double()[torch.as_tensor(queries, device=query.device)], document.double()
    if shared:
        # A power of two, so exact: the rounding to float32 cannot overflow and no tie appears or disappears.
        q = torch.ldexp(q, -torch.frexp(magnitude(q)).exponent.unsqueeze(1))
    length = magnitude(d).clamp_min(TINY)
    exponents = {name: as_floats(e) for name, e in scorings.items()}
    # Scorings that share a ranking share a key, and the longest list asked of any of them.
    keys = {name: Exponents(1.0 if shared else e.gamma_q, e.gamma_d) for name, e in exponents.items()}
    listed = {key: max((top_k or {}).get(n, 0) for n in keys if keys[n] == key) for key in keys.values()}
    done: dict[Exponents, list[tuple[Array, ...]]] = {key: [] for key in listed}
    block = max(1, block_bytes // (_BYTES_PER_SCORE * len(d)))
    for start in range(0, len(q), block):
        stop = min(start + block, len(q))
        at = offsets[start : stop + 1] - offsets[start]
        relevant = documents[offsets[start] : offsets[stop]]
        dots = score(q[start:stop], d, Normalization.DOT.exponents) if shared else None
        for key, parts in done.items():
            if dots is None:
                s = score(q[start:stop], d, key)
            else:
                s = dots if key.gamma_d == 0.0 else dots / length.pow(key.gamma_d)
            parts.append(_rank_block(s.float(), at, relevant, min(listed[key], len(d))))
    rankings = {}
    for key, parts in done.items():
        ranks, tied, top_ids, top_relevant = (np.concatenate(p) for p in zip(*parts, strict=True))
        rankings[key] = Ranking(queries, offsets, documents, ranks, tied, top_ids, top_relevant, len(d))
    return {name: rankings[key] for name, key in keys.items()}


def _rank_block(s: Tensor, offsets: Array, documents: Array, top_k: int) -> tuple[Array, Array, Array, Array]:
    """(ranks [p], tied [b], top_ids [b, k], top_relevant [b, k]) of scores s [b, N] and the block's pairs."""
    per_query = np.diff(offsets)
    row = np.repeat(np.arange(len(per_query)), per_query)
    row_t, doc_t = (torch.as_tensor(x, device=s.device) for x in (row, documents))
    s_rel = s[row_t, doc_t]
    slot = np.arange(len(row)) - offsets[row]
    slot_t = torch.as_tensor(slot, device=s.device)
    padded = torch.full((len(s), int(per_query.max())), torch.inf, device=s.device)
    padded[row_t, slot_t] = s_rel
    at_least, above = (c[row_t, slot_t].cpu().numpy() for c in _count(s, padded))

    # Among a query's relevant documents: how many stand before, how many score at least as much, how many more.
    value = s_rel.cpu().numpy()
    order = np.lexsort((documents, -value, row))
    new = np.ones(len(order), dtype=bool)  # starts of runs of equal (query, score)
    new[1:] = (np.diff(row[order]) != 0) | (np.diff(value[order]) != 0)
    starts = np.flatnonzero(new)
    run = np.cumsum(new) - 1
    before, rel_above, rel_at_least = (np.empty(len(order), dtype=np.int64) for _ in range(3))
    first = offsets[row[order]]
    before[order] = np.arange(len(order)) - first
    rel_above[order] = starts[run] - first
    rel_at_least[order] = np.append(starts[1:], len(order))[run] - first

    ranks = 1 + (at_least - rel_at_least) + before
    pair_tied = (at_least - above) > (rel_at_least - rel_above)
    tied = np.logical_or.reduceat(pair_tied, offsets[:-1])
    top_ids, top_relevant = _best(s, row_t, doc_t, top_k)
    return ranks, tied, top_ids, top_relevant


def _count(s: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """How many of each row's scores are at least, and above, each of its thresholds: [b, N], [b, R] -> 2 x [b, R]."""
    if thresholds.shape[1] > _COUNT_SLOTS:
        ordered = s.sort(dim=1).values
        below = torch.searchsorted(ordered, thresholds, right=False)
        not_above = torch.searchsorted(ordered, thresholds, right=True)
        return s.shape[1] - below, s.shape[1] - not_above
    columns = [t.unsqueeze(1) for t in thresholds.unbind(1)]
    at_least = torch.stack([(s >= t).sum(1, dtype=torch.int32) for t in columns], dim=1)
    above = torch.stack([(s > t).sum(1, dtype=torch.int32) for t in columns], dim=1)
    return at_least.long(), above.long()


def _best(s: Tensor, row: Tensor, document: Tensor, k: int) -> tuple[Array, Array]:
    """(ids [b, k], relevant [b, k]) of the best k in the module's order; row, document [p]: the relevant pairs."""
    if k == 0:
        none = np.empty((len(s), 0), dtype=np.int64)
        return none, none.astype(bool)
    relevant = torch.zeros(s.shape, dtype=torch.bool, device=s.device)
    relevant[row, document] = True
    top, ids = s.topk(k, dim=1)
    keys = _order_keys(top, ids, relevant.gather(1, ids))
    # topk breaks ties at its border arbitrarily: those rows are ordered whole.
    border = ((s >= top[:, -1:]).sum(1) > k).nonzero().squeeze(1)
    if len(border):
        every = torch.arange(s.shape[1], device=s.device).expand(len(border), -1)
        best, at = _order_keys(s[border], every, relevant[border]).topk(k, dim=1)
        keys[border], ids[border] = best, at
    ids = ids.gather(1, keys.argsort(dim=1, descending=True))
    return ids.cpu().numpy(), relevant.gather(1, ids).cpu().numpy()


def _order_keys(s: Tensor, ids: Tensor, relevant: Tensor) -> Tensor:
    """int64 keys, larger first: score in the high half, then irrelevant before relevant, then the smaller id."""
    bits = (s + 0.0).view(torch.int32)  # adding 0 turns -0.0 into 0.0, which is equal to it
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # negative floats order backwards as integers
    return (bits.long() << 32) + ((~relevant).long() << 31) + (2**31 - 1 - ids)
