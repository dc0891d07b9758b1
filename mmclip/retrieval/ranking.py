"""Exact ranks of relevant documents and the best k documents of every query, from tiles of one matrix product.

Everything is in roles: a query ranks documents. Where texts 0 and 1 describe image 0, and text 2 image 1, the relevant
(query row, document row) pairs are i2t (0, 0) (0, 1) (1, 2) and t2i (0, 0) (1, 0) (2, 1).

**Order.** By score, best first. A tie is an equal float32 score and counts against the model: among equals irrelevant
documents stand first, then less relevant ones, then smaller document rows. For one query gamma_q only rescales all
scores, so that with w_d = |d|**(1 - gamma_d), times a power of two that makes the largest w at most 1,

    rank(r) = 1 + #(irrelevant with s >= s_r) + #(relevant placed before r),        s(q, d) = cos(q, d) * w_d

Scores are computed in float64 and rounded once to float32: equal vectors tie wherever they stand, and ranks depend
neither on tiles nor on which side is cut into rows.

**Tiles.** All scorings of both directions share one float32 product, in tiles. Most documents score below every
relevant one: the largest cosine of each ``_GROUP`` documents, compared with the lowest threshold of the query less the
tile's error, finds the few that may not, and these get exact scores. A tile with many is computed again in float64.
Both sides are sorted by norm, so that one weight bounds all documents of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from math import inf, sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mmclip.errors import UserError
from mmclip.retrieval.qrels import Qrels
from mmclip.roles import Exponents
from mmclip.similarity import TINY

BLOCK_BYTES = 64 * 2**20  # working memory beside the vectors, about
_PER_SCORE, _PER_VALUE = 24, 24  # bytes of a tile, and of its rows and columns
_GROUP = 16  # documents searched together; also the float32 numbers in a cache line
_OFTEN = 4  # a tile in which more than one group in so many may matter is counted whole
_WAITING = 2**14  # documents that wait to be compared together
_AT_ONCE = 2**18  # comparisons made together

Array = NDArray[Any]
Progress = Callable[[int, int], None]
Relevance = Qrels | ArrayLike | Tensor


@dataclass(frozen=True)
class Ranking:
    """Ranks under one scoring. queries [Q], offsets [Q + 1], documents [P], gains [P]: as of :class:`Qrels`.

    Attributes:
        ranks: [P] rank of each relevant document among all n_documents; 1 is best.
        tied: [Q] whether an irrelevant document has exactly the score of a relevant one.
        top_ids: [Q, k] rows of the best k documents in order (k = 0 where no list was requested).
        top_relevant, top_scores: [Q, k] which of those are relevant, and cos * |document|**(1 - gamma_d) of each.
    """

    queries: Array
    offsets: Array
    documents: Array
    gains: Array
    ranks: Array
    tied: Array
    top_ids: Array
    top_relevant: Array
    top_scores: Array
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
    qrels: Relevance,
    scorings: Mapping[str, Exponents],
    *,
    top_k: Mapping[str, int] | None = None,
    excluded: Array | None = None,
    block_bytes: int = BLOCK_BYTES,
    progress: Progress | None = None,
) -> dict[str, Ranking]:
    """Rank the documents of every query that has a relevant one, under each scoring.

    Args:
        query, document: Raw [Q, D] and [N, D] of any real floating type, on one device.
        qrels: Graded relevance, or [P, 2] pairs of (query row, document row) that are equally relevant.
        scorings: name -> exponents.
        top_k: name -> how many of the best documents to list, at most N; none by default.
        excluded: [X, 2] (query row, document row) of documents that are no candidates of a query: neither listed nor
            counted in its ranks. No list is then longer than the candidates that every query has left.
        block_bytes: Working memory beside the embeddings and the result, about.
        progress: Called with (scores done, scores in all) after each tile.

    Raises:
        UserError: Embeddings that are not finite or differ in D, rows that do not exist, or an excluded relevant
            document.

    >>> from mmclip.similarity import Normalization
    >>> q, d = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [4.0, 3.0]])
    >>> scorings = {n.value: n.exponents for n in (Normalization.COSINE, Normalization.DOT)}
    >>> {name: r.ranks.tolist() for name, r in rank(q, d, [[0, 1]], scorings).items()}
    {'cosine': [2], 'dot': [1]}
    """
    return _rank(query, document, qrels, scorings, top_k, excluded, block_bytes, progress, both=False)[0]


def rank_both(
    query: Tensor,
    document: Tensor,
    qrels: Relevance,
    scorings: Mapping[str, Exponents],
    *,
    top_k: Mapping[str, int] | None = None,
    block_bytes: int = BLOCK_BYTES,
    progress: Progress | None = None,
) -> tuple[dict[str, Ranking], dict[str, Ranking]]:
    """:func:`rank` in this direction and, with ``qrels`` transposed, in the opposite one, from one matrix product.

    Exponents belong to roles, so under qnorm the first divides by |query|, the second by |document|.
    """
    first, second = _rank(query, document, qrels, scorings, top_k, None, block_bytes, progress, both=True)
    return first, second


def norms(x: Tensor, side: str) -> Tensor:
    """Euclidean norms [N] in float64 of x [N, D]. Raises UserError naming a row of ``side`` that is not finite."""
    norm = torch.cat([torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64) for part in x.split(4096)])
    bad = (~torch.isfinite(norm)).nonzero()
    if len(bad):
        raise UserError(
            f"{side} embeddings: row {int(bad[0, 0])} holds NaN or infinity, or numbers too large to have a norm "
            f"({len(bad)} of {len(x)} rows do); every value must be finite"
        )
    return norm


@torch.no_grad()
def _rank(
    query: Tensor,
    document: Tensor,
    qrels: Relevance,
    scorings: Mapping[str, Exponents],
    top_k: Mapping[str, int] | None,
    excluded: Array | None,
    block_bytes: int,
    progress: Progress | None,
    both: bool,
) -> list[dict[str, Ranking]]:
    if query.ndim != 2 or document.ndim != 2 or query.shape[1] != document.shape[1]:
        raise UserError(
            f"embeddings of shapes {list(query.shape)} and {list(document.shape)}: "
            "queries [Q, D] and documents [N, D] must share D"
        )
    qrels = qrels if isinstance(qrels, Qrels) else Qrels(qrels)
    qrels.check(len(query), len(document))
    hidden, most = _hidden(qrels, excluded, len(query), len(document))
    gamma_d = {name: float(as_floats(e).gamma_d) for name, e in scorings.items()}
    # Scorings that rank alike share the longest of their lists.
    lists = dict.fromkeys(gamma_d.values(), 0)
    for name, k in (top_k or {}).items():
        lists[gamma_d[name]] = max(lists[gamma_d[name]], k if both else min(k, len(document) - most))
    # Queries without a relevant document take part only as documents of the opposite direction.
    rows = _Side(query, norms(query, "query"), np.arange(len(query)) if both else qrels.queries)
    columns = _Side(document, norms(document, "document"), np.arange(len(document)))
    every = []
    for judged, asking, answering in ((qrels, rows, columns), (qrels.transposed(), columns, rows))[: 1 + both]:
        pairs = asking.places(judged.pairs[:, 0]), answering.places(judged.documents)
        known = *pairs, _cosines(asking, answering, *pairs)
        every.append({g: _Scoring(judged, asking, answering, known, g, k) for g, k in lists.items()})
    n, m, a, b = len(rows), len(columns), _PER_SCORE, _PER_VALUE * query.shape[1]
    height = min(n, max(1, int((sqrt(b * b + a * block_bytes) - b) / a)))  # a square, where the rows suffice
    width = min(m, 2**24, max(1, int((block_bytes - b * height) / (a * height + b))))  # float32 counts no further
    row, column = rows.places(hidden[:, 0]), columns.places(hidden[:, 1])
    tile_of, order = (row // height * -(-m // width) + column // width).sort()
    row, column = row[order] % height, column[order] % width
    # Whole groups in both directions, filled up with -inf. Rows lie an odd number of cache lines apart: other distances
    # slow products and sums, by up to half.
    shape = _GROUP * -(-height // _GROUP), _GROUP * (-(-width // _GROUP) | 1)
    room, *spare = (torch.full(shape, -inf, device=row.device) for _ in range(3))
    with _full_float32():
        for t, (i, j) in enumerate((i, j) for i in range(0, n, height) for j in range(0, m, width)):
            spans = slice(i, min(i + height, n)), slice(j, min(j + width, m))
            h, w = (span.stop - span.start for span in spans)
            if j == 0:
                unit = rows.unit(spans[0])
            if (h, w) != (height, width):
                room.fill_(-inf)
            torch.mm(unit, columns.unit(spans[1]).T, out=room[:h, :w])
            at = slice(*torch.searchsorted(tile_of, torch.tensor([t, t + 1], device=row.device)).tolist())
            room[row[at], column[at]] = -inf
            exact = cache(partial(_exact_cosines, rows, columns, *spans, (row[at], column[at])))
            turned: Callable[[], Tensor] = lambda: exact().T  # noqa: B023, E731 - called before the next tile
            for d, scorings_of in enumerate(every):
                peaks = room.unflatten(1 - d, (_GROUP, -1)).amax(1 - d)  # groups interleave
                views = [x.T if d else x for x in (room, peaks, *spare)]
                for scoring in scorings_of.values():
                    scoring.take(views, turned if d else exact, *spans[:: -1 if d else 1])
            if progress is not None:
                progress(i * m + h * spans[1].stop, n * m)
    rankings = [{gamma: scoring.ranking() for gamma, scoring in scorings_of.items()} for scorings_of in every]
    return [{name: by_gamma[gamma] for name, gamma in gamma_d.items()} for by_gamma in rankings]


def _hidden(qrels: Qrels, excluded: Array | None, n_queries: int, n_documents: int) -> tuple[Array, int]:
    """(relevant and excluded pairs [H, 2], which do not count as irrelevant; the most that are excluded of a query)."""
    if excluded is None or not len(excluded):
        return qrels.pairs, 0
    out = Qrels(excluded)
    out.check(n_queries, n_documents)
    pairs = out.pairs[np.isin(out.pairs[:, 0], qrels.queries)]
    both = np.isin(*(x[:, 0] * n_documents + x[:, 1] for x in (pairs, qrels.pairs)))
    if both.any():
        raise UserError("document row {1} is relevant to query row {0} and excluded for it".format(*pairs[both][0]))
    return np.concatenate([qrels.pairs, pairs]), int(np.bincount(pairs[:, 0], minlength=1).max())


def _exact_cosines(rows: _Side, columns: _Side, here: slice, there: slice, hidden: tuple[Tensor, Tensor]) -> Tensor:
    """float64 cosines [r, c] of a tile, -inf for hidden pairs. Products come first: what is 0 stays 0."""
    cosines = rows.x[rows.rows[here]].double() @ columns.x[columns.rows[there]].double().T
    cosines *= rows.inverse[here, None]
    cosines *= columns.inverse[there]
    cosines[hidden] = -inf
    return cosines


@contextmanager
def _full_float32() -> Iterator[None]:
    """float32 products are float32 inside: neither TF32 nor bfloat16, whatever was allowed, nor autocast."""
    with ExitStack() as stack:
        for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):  # type: ignore[attr-defined]
            stack.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
            backend.fp32_precision = "ieee"
        for device in ("cuda", "cpu"):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


class _Side:
    """The vectors x [N, D] of one side: ``rows`` [n] of them in the order of tiles, by norm; ``place`` [N] inverts."""

    def __init__(self, x: Tensor, norm: Tensor, rows: Array) -> None:
        self.x, every = x, torch.as_tensor(rows, device=x.device)
        self.rows = every[norm[every].argsort(stable=True)]
        self.place = torch.full((len(x),), -1, device=x.device)
        self.place[self.rows] = torch.arange(len(self), device=x.device)
        self.norm = norm[self.rows]
        self.inverse = torch.where(self.norm > 0, 1 / self.norm, 0.0)  # a zero vector stays one
        # Where float32 can hold all of it, unit rows are made in float32: three roundings, and no float64 copy.
        safe = ((self.norm > 1e-25) & (self.norm < 1e25)) | (self.norm == 0)
        self.factor = self.inverse.float() if x.dtype != torch.float64 and bool(safe.all()) else self.inverse

    def __len__(self) -> int:
        return len(self.rows)

    def places(self, rows: Array) -> Tensor:
        return self.place[torch.as_tensor(rows, device=self.x.device)]

    def unit(self, at: slice) -> Tensor:
        """float32 rows of norm 1, or 0."""
        return self.x.index_select(0, self.rows[at]).to(self.factor.dtype).mul_(self.factor[at, None]).float()

    def weight(self, gamma_d: float) -> tuple[Tensor, float]:
        """(w [n] float64, 1e-38 or more, 1 for zero vectors, which score 0 anyway; the power of two divided out)."""
        w = torch.where(self.norm > 0, self.norm / self.norm.clamp_min(TINY).pow(gamma_d), 1.0)
        if bool(((w - 1).abs() < 1e-9).all()):
            return torch.ones_like(w), 1.0
        power = 2.0 ** int(torch.frexp(w.max()).exponent)
        return (w / power).clamp_min(torch.finfo(torch.float32).tiny), power


def _cosines(asking: _Side, answering: _Side, query: Tensor, document: Tensor) -> Tensor:
    """Exact cosines [n] of single pairs of positions, each by itself and always the same."""
    x, y, step = asking.x, answering.x, max(1, 2**16 // max(1, asking.x.shape[1]))  # stays in the cache
    rows = zip(asking.rows[query].split(step), answering.rows[document].split(step), strict=True)
    dots = torch.cat([x.index_select(0, i).double().mul_(y.index_select(0, j)).sum(1) for i, j in rows])
    return dots * (asking.inverse[query] * answering.inverse[document])


class _Scoring:
    """One ranking of one direction: thresholds, counts against them, and the best k.

    Of the P relevant pairs: threshold [P] float32, their scores; at_least [P]: irrelevant documents that score at least
    that much; tied [P]: whether one scores exactly that. Of the queries by position: start, many [n], first pair and
    number of pairs; least [n], the lowest threshold; kth [n], the least score among the best [n, k], which are keys.
    """

    def __init__(
        self, qrels: Qrels, asking: _Side, answering: _Side, pairs: tuple[Tensor, ...], gamma_d: float, k: int
    ) -> None:
        """pairs: query and document [P] of the relevant pairs by position, and their exact cosines."""
        asker, answer, cosine = pairs
        self.qrels, self.asking, self.answering, self.k = qrels, asking, answering, min(k, len(answering))
        self.error = (asking.x.shape[1] + 16) * 2.0**-24  # D roundings; unit rows, weights and thresholds: 16
        self.weight, self.power = answering.weight(gamma_d)
        self.weight32 = self.weight.float()
        query, offsets = asking.places(qrels.queries), torch.as_tensor(qrels.offsets, device=cosine.device)
        self.start, self.many = torch.zeros((2, len(asking)), dtype=torch.int64, device=cosine.device)
        self.start[query], self.many[query] = offsets[:-1], offsets.diff()
        self.threshold = (cosine * self.weight[answer]).float()
        self.at_least = torch.zeros_like(cosine, dtype=torch.int64)
        self.tied = torch.zeros_like(cosine, dtype=torch.bool)
        self.least, self.kth = self.threshold.new_full((2, len(asking)), inf)
        self.least.scatter_reduce_(0, asker, self.threshold, "amin")
        self.kth[query] = -inf if k else inf
        self.best = _keys(self.least.new_full((len(asking), self.k), -inf), self.start.new_zeros(()))
        self.waiting, self.n_waiting = list[tuple[Tensor, Tensor]](), 0

    def take(self, views: list[Tensor], exact: Callable[[], Tensor], queries: slice, documents: slice) -> None:
        """Find the few documents of a tile that may matter; where they are many, count all.

        views: the tile's cosines, largest cosines of groups, and room, all [q, d]; exact: makes its float64 cosines.
        """
        cosines, peaks, flags, scores = views
        q, d, n = queries.stop - queries.start, documents.stop - documents.start, peaks.shape[1]
        bottom, top = self.weight32[documents].aminmax()
        if 0 < self.k <= n and bool((self.kth[queries] == -inf).any()):
            peak = peaks[:q].topk(self.k, dim=1).values[:, -1] - self.error  # at least k documents reach it
            self.kth[queries] = self.kth[queries].maximum(peak * torch.where(peak > 0, bottom, top))
        # A document with a lower cosine reaches neither bound. Not below -2: -inf marks the hidden.
        floor = self.least[queries].minimum(self.kth[queries])
        floor = (floor / torch.where(floor > 0, top, bottom) - self.error).clamp_min(-2)
        hit = peaks[:q] >= floor[:, None]
        if int(hit.sum()) * _OFTEN > hit.numel():
            self.count_all(torch.mul(exact(), self.weight[documents], out=scores[:q, :d]), flags, queries, documents)
            return
        query, group = hit.nonzero(as_tuple=True)
        member = n * torch.arange(_GROUP, device=group.device)
        down, right = cosines.stride()
        at = (down * query + right * group)[:, None] + right * member
        every = cosines.as_strided((cosines.numel(),), (1,))  # one index is quicker than two
        which, of = (every.index_select(0, at.flatten()).view(at.shape) >= floor[query, None]).nonzero(as_tuple=True)
        self.waiting.append((query[which] + queries.start, group[which] + member[of] + documents.start))
        self.n_waiting += len(which)
        if self.n_waiting > _WAITING:
            self.compare()

    def compare(self) -> None:
        """Count the waiting documents against the thresholds of their queries, and offer them to the lists."""
        if not self.waiting:
            return
        query, document = (torch.cat(x) for x in zip(*self.waiting, strict=True))
        self.waiting, self.n_waiting = [], 0
        score = (_cosines(self.asking, self.answering, query, document) * self.weight[document]).float()
        self.offer(query, document, score)
        near = (score >= self.least[query]).nonzero().squeeze(1)
        for at in near.split(max(1, _AT_ONCE // int(self.many.max()))):
            times = self.many[query[at]]
            at, pair = torch.repeat_interleave(at, times), _numbered(times)
            pair += self.start[query[at]]
            reached = score[at] >= self.threshold[pair]
            self.at_least.index_add_(0, pair[reached], torch.ones_like(pair[reached]))
            self.tied[pair[score[at] == self.threshold[pair]]] = True

    def count_all(self, scores: Tensor, flags: Tensor, queries: slice, documents: slice) -> None:
        """Compare a tile's scores [q, d] with all thresholds: the first of each query, the second, ..."""
        if self.k:
            bound = scores.topk(min(self.k, scores.shape[1]), dim=1).values[:, -1].maximum(self.kth[queries])
            query, document = (scores >= bound[:, None]).nonzero(as_tuple=True)
            self.offer(query + queries.start, document + documents.start, scores[query, document])
        start, many = self.start[queries], self.many[queries]
        for slot in range(int(many.max())):
            row = (many > slot).nonzero().squeeze(1)
            pair, part = start[row] + slot, scores if len(row) == len(scores) else scores[row]
            room, bound = flags[: len(row), : part.shape[1]], self.threshold[pair, None]  # quicker than bool
            reach, above = (op(part, bound, out=room).sum(1).long() for op in (torch.ge, torch.gt))
            self.at_least[pair] += reach
            self.tied[pair] |= reach > above

    def offer(self, query: Tensor, document: Tensor, score: Tensor) -> None:
        """Offer single documents [n] to the lists of the best."""
        better = (score >= self.kth[query]).nonzero().squeeze(1)
        if not len(better):
            return
        query, order = query[better].sort()
        better = better[order]
        rows, many = query.unique_consecutive(return_counts=True)
        keys = self.best.new_full((len(rows), self.k + int(many.max())), torch.iinfo(torch.int64).min)
        keys[:, : self.k] = self.best[rows]
        own = _keys(score[better], self.answering.rows[document[better]])
        keys[torch.repeat_interleave(many), self.k + _numbered(many)] = own
        self.best[rows] = keys = keys.topk(self.k, dim=1).values
        self.kth[rows] = self.kth[rows].maximum(_of_keys(keys[:, -1])[0])

    def ranking(self) -> Ranking:
        """Counts -> ranks and lists, relevant documents where they rank."""
        self.compare()
        qrels, first = self.qrels, self.qrels.offsets[:-1]
        best = _of_keys(self.best[self.asking.places(qrels.queries)])
        arrays = (self.threshold, self.at_least, self.tied, *best)
        value, at_least, tied, scores, ids = (x.cpu().numpy() for x in arrays)
        before = np.empty(len(value), dtype=np.int64)
        before[np.lexsort((qrels.documents, qrels.gains, -value, qrels.numbers))] = np.arange(len(value))
        ranks = 1 + at_least + before - first[qrels.numbers]
        inside = ranks <= self.k
        at, relevant = (qrels.numbers[inside], ranks[inside] - 1), np.zeros(ids.shape, dtype=bool)
        relevant[at] = True
        place = np.maximum(np.cumsum(~relevant, axis=1) - 1, 0)
        ids, scores = (np.take_along_axis(x, place, axis=1) for x in (ids, scores))
        ids[at], scores[at] = qrels.documents[inside], value[inside]
        tied, top_scores = np.logical_or.reduceat(tied, first), self.power * scores.astype(np.float64)
        judged = qrels.queries, qrels.offsets, qrels.documents, qrels.gains
        return Ranking(*judged, ranks, tied, ids, relevant, top_scores, n_documents=len(self.answering.x))


def _numbered(many: Tensor) -> Tensor:
    """0, 1, ... of each count in turn: [2, 0, 3] -> [0, 1, 0, 1, 2]."""
    return torch.arange(int(many.sum()), device=many.device) - torch.repeat_interleave(many.cumsum(0) - many, many)


def _keys(scores: Tensor, rows: Tensor) -> Tensor:
    """int64, larger for a better float32 score (in the high half), then for a smaller row."""
    bits = (scores + 0.0).view(torch.int32)  # adding 0 turns -0.0 into 0.0, which is equal to it
    return (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32) - rows  # negative floats order backwards


def _of_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """(scores, rows) of :func:`_keys`."""
    high = -(-keys >> 32)
    bits = high.int()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32), (high << 32) - keys
