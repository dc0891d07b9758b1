"""Whether embedding length separates relevant documents from irrelevant ones, and what else it follows.

Cohen's d = (mean of relevant - mean of irrelevant) / pooled standard deviation, with sample variances (Feng & Watanabe
2026, eq. 8), of the *documents'* lengths. Its value depends on the reference set, so every d is named by one:

    topk    relevant vs irrelevant among each query's k best by *cosine*, so that length does not choose its evidence
    corpus  documents relevant to some query vs documents relevant to none: exists only with distractors
    pairs   all (query, document) pairs: 0 by construction where every candidate is relevant to equally many queries

The null of any of them is a control model, not zero. A number that cannot be computed is None with a reason beside it.

A group of lengths travels as its **moments** (count, sum, sum of squares): sums of moments over resampled queries give
the bootstrap of d without touching a length again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from mmclip.metrics import bootstrap as metrics
from mmclip.metrics.bootstrap import MIN_DEFINED
from mmclip.retrieval.ranking import Ranking

TOP_K = 10
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
FLAT_CV = 1e-6  # below this spread, lengths are one number and its rounding
ALL_RELEVANT = "every candidate is relevant to some query"

Array = NDArray[Any]
Json = dict[str, Any]
Effect = tuple[Json | None, str | None]  # a value, or None and the reason


def summary(lengths: ArrayLike) -> Json:
    """{"n", "mean", "std", "cv", "quantiles"} of lengths [N]; sample standard deviation; None where it does not exist.

    >>> summary([3.0, 5.0])["mean"], summary([3.0])["std"], summary([3.0, 5.0, 6.0])["quantiles"]["0.5"]
    (4.0, None, 5.0)
    """
    x = np.asarray(lengths, dtype=np.float64)
    mean = float(x.mean()) if len(x) else None
    std = float(x.std(ddof=1)) if len(x) > 1 else None
    cv = std / mean if std is not None and mean else None
    quantiles = dict(zip(map(str, QUANTILES), np.quantile(x, QUANTILES).tolist(), strict=True)) if len(x) else None
    return {"n": len(x), "mean": mean, "std": std, "cv": cv, "quantiles": quantiles}


def centred(lengths: ArrayLike) -> tuple[Array, float]:
    """(lengths - their mean, their mean): d does not change, and sums of squares keep their digits."""
    x = np.asarray(lengths, dtype=np.float64)
    return x - x.mean(), float(x.mean())


def split_moments(lengths: Array, relevant: Array) -> Array:
    """Moments of the relevant, then of the irrelevant: lengths [Q, k], relevant bool [Q, k] -> [Q, 6].

    >>> split_moments(np.array([[2.0, 3.0, 4.0]]), np.array([[True, False, False]]))
    array([[ 1.,  2.,  4.,  2.,  7., 25.]])
    """
    halves = []
    for w in (relevant.astype(np.float64), (~relevant).astype(np.float64)):
        halves += [w.sum(-1), (w * lengths).sum(-1), (w * lengths**2).sum(-1)]
    return np.stack(halves, axis=-1)


def d_from_moments(moments: Array, level: float | Array) -> Array:
    """Cohen's d of moments [..., 6] of centred lengths whose mean was ``level`` [...]; NaN where it does not exist."""
    n1, s1, q1, n2, s2, q2 = np.moveaxis(moments, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean1, mean2 = s1 / n1, s2 / n2
        within = np.maximum(q1 - s1 * mean1, 0.0) + np.maximum(q2 - s2 * mean2, 0.0)
        pooled = np.sqrt(within / (n1 + n2 - 2.0))
        d = (mean1 - mean2) / pooled
    exists = (n1 >= 1) & (n2 >= 1) & (n1 + n2 > 2) & (pooled > FLAT_CV * np.abs(level))
    return np.where(exists, d, np.nan)


def effect(moments: Array, level: float, clusters: ArrayLike, *, what: str, resamples: int, seed: int) -> Effect:
    """Cohen's d of all rows of moments [Q, 6] together, with an interval over clusters [Q].

    Returns ({"value", "ci", "n_relevant", "n_irrelevant"}, None), or (None, reason). ``what`` names the group in the
    reason. "ci" is None where d does not exist in enough resamples, and where all rows are one cluster: no spread is
    not certainty.
    """
    return effects(moments[:, None, :], level, clusters, whats=[what], resamples=resamples, seed=seed)[0]


def effects(
    moments: Array, level: float, clusters: ArrayLike, *, whats: list[str], resamples: int, seed: int
) -> list[Effect]:
    """:func:`effect` of G groups over the same queries: moments [Q, G, 6] -> G effects."""
    flat = moments.reshape(len(moments), -1)
    total = moments.sum(axis=0)
    value = d_from_moments(total, level)
    sums = metrics.cluster_sums(flat, clusters, resamples=resamples, seed=seed).reshape(resamples, *total.shape)
    samples = d_from_moments(sums, level)
    several = len(np.unique(clusters)) > 1
    found: list[Effect] = []
    for g, what in enumerate(whats):
        n_rel, n_irr = int(total[g, 0]), int(total[g, 3])
        if not np.isfinite(value[g]):
            found.append(
                (None, empty_group(n_rel, n_irr, what) or f"lengths do not vary within the groups among {what}")
            )
            continue
        defined = samples[:, g][np.isfinite(samples[:, g])]
        ci = list(metrics.interval(defined)) if several and len(defined) >= MIN_DEFINED * resamples else None
        found.append(({"value": float(value[g]), "ci": ci, "n_relevant": n_rel, "n_irrelevant": n_irr}, None))
    return found


def empty_group(n_relevant: int, n_irrelevant: int, what: str) -> str | None:
    """The reason where one of the two groups among ``what`` holds nothing."""
    if n_relevant and n_irrelevant:
        return None
    return f"no {'irrelevant' if n_relevant else 'relevant'} document among {what}"


def balanced_relevance(documents: Array, n: int) -> str | None:
    """The reason why pairs with the document rows ``documents`` [P] cannot tell lengths of n documents apart: all
    documents are relevant equally often, and then relevant and irrelevant lengths are the same list."""
    times = np.bincount(documents, minlength=n)
    if (times == times[0]).all():
        return f"degenerate: every candidate is relevant to {times[0]} quer{'y' if times[0] == 1 else 'ies'}"
    return None


def pair_moments(lengths: Array, offsets: Array, documents: Array) -> Array:
    """Moments over all (query, document) pairs: centred lengths [N] and a Ranking's pairs -> [Q, 6]."""
    x = lengths[documents]
    relevant = np.stack([np.add.reduceat(v, offsets[:-1]) for v in (np.ones_like(x), x, x**2)], axis=1)
    every = np.array([len(lengths), lengths.sum(), (lengths**2).sum()])
    return np.concatenate([relevant, every - relevant], axis=1)


def pairs_effect(
    lengths: ArrayLike, offsets: Array, documents: Array, clusters: ArrayLike, *, resamples: int, seed: int
) -> Effect:
    """d over all pairs, or None with the reason where relevance is balanced: then it is 0 whatever the lengths."""
    x, level = centred(lengths)
    degenerate = balanced_relevance(documents, len(x))
    if degenerate is not None:
        return None, degenerate
    moments = pair_moments(x, offsets, documents)
    return effect(moments, level, clusters, what="all pairs", resamples=resamples, seed=seed)


def corpus_effect(lengths: ArrayLike, documents: Array, clusters: ArrayLike, *, resamples: int, seed: int) -> Effect:
    """d of documents relevant to some query (rows in ``documents``) vs to none; clusters [N] of the *documents*.

    The interval draws documents (those of one image together): drawing queries would call a relevant document
    irrelevant whenever its queries were not drawn.
    """
    x, level = centred(lengths)
    relevant = np.zeros(len(x), dtype=bool)
    relevant[documents] = True
    if relevant.all():
        return None, ALL_RELEVANT
    moments = split_moments(x[:, None], relevant[:, None])
    return effect(moments, level, clusters, what="the candidates", resamples=resamples, seed=seed)


def length_effects(
    lengths: ArrayLike, cosine: Ranking, clusters: ArrayLike, document_clusters: ArrayLike, *, resamples: int, seed: int
) -> dict[str, Effect]:
    """d of the documents' lengths [N] on every reference set: {"topk", "corpus", "pairs"}.

    cosine: the ranking by cosine, which lists the k best; clusters [Q] of its queries; document_clusters [N].
    """
    x, level = centred(lengths)
    how: Any = {"resamples": resamples, "seed": seed}
    moments = split_moments(x[cosine.top_ids], cosine.top_relevant)
    return {
        "topk": effect(moments, level, clusters, what=best_by_cosine(cosine), **how),
        "corpus": corpus_effect(lengths, cosine.documents, document_clusters, **how),
        "pairs": pairs_effect(lengths, cosine.offsets, cosine.documents, clusters, **how),
    }


def best_by_cosine(cosine: Ranking) -> str:
    return f"the queries' {cosine.top_ids.shape[1]} best by cosine"


def with_reasons(effects: Mapping[str, tuple[Any, str | None]]) -> Json:
    """{name: value}; where the value is None, {name: None, name_reason: why}."""
    section: Json = {}
    for name, (value, reason) in effects.items():
        section[name] = value
        if reason is not None:
            section[f"{name}_reason"] = reason
    return section


def spearman(x: ArrayLike, y: ArrayLike) -> Effect:
    """({"value", "n"}, None): rank correlation of x [N] and y [N] with mean ranks for ties; or (None, reason).

    >>> spearman([1, 2, 3], [10, 20, 40])
    ({'value': 1.0, 'n': 3}, None)
    """
    a, b = (np.asarray(v, dtype=np.float64) for v in (x, y))
    if len(a) < 3:
        return None, f"{len(a)} items: a correlation needs 3"
    if np.ptp(b) == 0 or np.ptp(a) <= FLAT_CV * abs(a.mean()):
        return None, "one of the two does not vary"
    return {"value": float(np.corrcoef(rankdata(a), rankdata(b))[0, 1]), "n": len(a)}, None


def number_bins(values: ArrayLike, at_most: int = 5) -> tuple[Array, list[str]]:
    """(bin of each value [N], names): every whole number by itself where few, else bins of about equal size.

    Negative values mean "unknown" and get bin -1.

    >>> number_bins([3, -1, 5, 3])
    (array([ 0, -1,  1,  0]), ['3', '5'])
    """
    v = np.asarray(values, dtype=np.int64)
    known = v[v >= 0]
    distinct = np.unique(known)
    if len(distinct) > at_most:
        cuts = np.quantile(known, np.arange(at_most) / at_most, method="higher")
        starts = np.unique(cuts.astype(np.int64))
    else:
        starts = distinct
    names = []
    for i, lo in enumerate(starts):
        hi = starts[i + 1] - 1 if i + 1 < len(starts) else distinct[-1]
        hi = distinct[distinct <= hi][-1]
        names.append(str(lo) if lo == hi else f"{lo}-{hi}")
    bins = np.where(v >= 0, np.searchsorted(starts, v, side="right") - 1, -1)
    return bins, names


def by_document_group(
    lengths: ArrayLike,
    group: Array,
    names: list[str],
    top_ids: Array,
    top_relevant: Array,
    clusters: ArrayLike,
    *,
    resamples: int,
    seed: int,
) -> list[Json]:
    """Mean length, and d(topk) among the documents of each group only: one {"group", "n", "mean", ...} a name.

    lengths [N]; group [N] numbers names, -1 for none; top_ids, top_relevant [Q, k]; clusters [Q].
    """
    raw = np.asarray(lengths, dtype=np.float64)
    x, level = centred(raw)
    top_group = group[top_ids]
    halves = []
    for g in range(len(names)):
        inside = top_group == g
        kept = split_moments(x[top_ids], top_relevant & inside)[:, :3]
        halves.append(np.concatenate([kept, split_moments(x[top_ids], ~top_relevant & inside)[:, :3]], axis=1))
    return _rows(halves, level, [raw[group == g] for g in range(len(names))], names, clusters, resamples, seed)


def by_query_group(
    lengths: ArrayLike,
    group: Array,
    names: list[str],
    top_ids: Array,
    top_relevant: Array,
    clusters: ArrayLike,
    *,
    resamples: int,
    seed: int,
) -> list[Json]:
    """d(topk) over the queries of each group only. group [Q]; "n" counts queries, "mean" is of their relevant hits."""
    raw = np.asarray(lengths, dtype=np.float64)
    x, level = centred(raw)
    moments = split_moments(x[top_ids], top_relevant)
    halves = [moments * (group == g)[:, None] for g in range(len(names))]
    rows = _rows(halves, level, [raw[:0]] * len(names), names, clusters, resamples, seed)
    for g, row in enumerate(rows):
        hits = raw[top_ids[group == g]][top_relevant[group == g]]
        row.update(n=int((group == g).sum()), mean=float(hits.mean()) if len(hits) else None)
    return rows


def _rows(
    moments: list[Array], level: float, members: list[Array], names: list[str], clusters: ArrayLike, b: int, seed: int
) -> list[Json]:
    if not names:
        return []
    whats = [f"the {TOP_K} best of group {name}" for name in names]
    found = effects(np.stack(moments, axis=1), level, clusters, whats=whats, resamples=b, seed=seed)
    rows = []
    for name, x, (value, reason) in zip(names, members, found, strict=True):
        row: Json = {"group": name, "n": len(x), "mean": float(x.mean()) if len(x) else None, "topk": value}
        if reason is not None:
            row["topk_reason"] = reason
        rows.append(row)
    return rows
