"""Whether the norms of embeddings separate relevant documents from irrelevant ones, and what else norms follow.

Cohen's d = (mean of relevant - mean of irrelevant) / pooled standard deviation, with sample variances (Feng & Watanabe
2026, eq. 8), of the *documents'* norms. AUC = P(norm of a relevant document > norm of an irrelevant one) + P(equal)/2,
the Mann-Whitney form: 0.5 where norms carry nothing, 1 where every relevant document has the larger norm; unlike d it
does not change under a monotone rescaling. Both depend on the reference set, so each value is named by one:

    topk    relevant vs irrelevant among each query's k best by *cosine*, so that norms do not select their evidence
    corpus  documents relevant to some query vs documents relevant to none: exists only with distractors
    pairs   all (query, document) pairs: 0 by construction where every candidate is relevant to equally many queries

The null of any of them is a control model, not zero. A value that does not exist is None, with a reason beside it.

A bootstrap never touches a norm again: d needs sums of **moments** (count, sum, sum of squares) over resampled queries,
AUC the weighted counts of relevant and irrelevant documents at each distinct norm, in ascending order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from mmclip.metrics.bootstrap import cluster_counts, cluster_sums, finite_interval, several
from mmclip.retrieval import Ranking

TOP_K = 10
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
FLAT_CV = 1e-6  # below this spread, norms are one number and its rounding

Array = NDArray[Any]
Json = dict[str, Any]
Effect = tuple[Json | None, str | None]  # a value, or None and the reason


def summary(norms: ArrayLike) -> Json:
    """{"n", "mean", "std", "cv", "quantiles"} of norms [N]; sample standard deviation; None where undefined.

    >>> summary([3.0, 5.0])["mean"], summary([3.0])["std"]
    (4.0, None)
    """
    x = np.asarray(norms, dtype=np.float64)
    mean = float(x.mean()) if len(x) else None
    std = float(x.std(ddof=1)) if len(x) > 1 else None
    cv = std / mean if std is not None and mean else None
    quantiles = dict(zip(map(str, QUANTILES), np.quantile(x, QUANTILES).tolist(), strict=True)) if len(x) else None
    return {"n": len(x), "mean": mean, "std": std, "cv": cv, "quantiles": quantiles}


def centred(norms: ArrayLike) -> tuple[Array, float]:
    """(norms - their mean, their mean): d does not change, and sums of squares keep their digits."""
    x = np.asarray(norms, dtype=np.float64)
    return x - x.mean(), float(x.mean())


def split_moments(norms: Array, relevant: Array, counted: Array | bool = True) -> Array:
    """Moments of the relevant, then of the irrelevant: norms [Q, k], relevant and counted bool [Q, k] -> [Q, 6].

    >>> split_moments(np.array([[2.0, 3.0, 4.0]]), np.array([[True, False, False]]))
    array([[ 1.,  2.,  4.,  2.,  7., 25.]])
    """
    groups = [(half & counted).astype(np.float64) for half in (relevant, ~relevant)]
    return np.stack([(w * norms**power).sum(-1) if power else w.sum(-1) for w in groups for power in range(3)], axis=-1)


def d_from_moments(moments: Array, level: float | Array) -> Array:
    """Cohen's d of moments [..., 6] of centred norms whose mean was ``level`` [...]; NaN where it does not exist."""
    n1, s1, q1, n2, s2, q2 = np.moveaxis(moments, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean1, mean2 = s1 / n1, s2 / n2
        within = np.maximum(q1 - s1 * mean1, 0.0) + np.maximum(q2 - s2 * mean2, 0.0)
        pooled = np.sqrt(within / (n1 + n2 - 2.0))
        d = (mean1 - mean2) / pooled
    exists = (n1 >= 1) & (n2 >= 1) & (n1 + n2 > 2) & (pooled > FLAT_CV * np.abs(level))
    return np.where(exists, d, np.nan)


def effects(
    moments: Array, level: float, clusters: ArrayLike, *, whats: list[str], resamples: int, seed: int
) -> list[Effect]:
    """Cohen's d of G groups over the same queries, with intervals over clusters [Q].

    Args:
        moments: [Q, G, 6] of centred norms whose mean was ``level``.
        whats: G names of the groups, for reasons.

    Returns:
        G times ({"value", "ci", "n_relevant", "n_irrelevant"}, None) or (None, reason). "ci" is None where d exists in
        too few resamples, and where all queries are one cluster: no spread is not certainty.
    """
    total = moments.sum(axis=0)
    values = d_from_moments(total, level)
    sums = cluster_sums(moments.reshape(len(moments), -1), clusters, resamples=resamples, seed=seed)
    samples = d_from_moments(sums.reshape(resamples, *total.shape), level)
    spread = several(clusters)
    return [
        _effect(value, drawn if spread else None, int(row[0]), int(row[3]), what)
        for value, drawn, row, what in zip(values, samples.T, total, whats, strict=True)
    ]


def effect(moments: Array, level: float, clusters: ArrayLike, *, what: str, resamples: int, seed: int) -> Effect:
    """:func:`effects` of one group: moments [Q, 6]."""
    return effects(moments[:, None, :], level, clusters, whats=[what], resamples=resamples, seed=seed)[0]


def _effect(value: float, samples: Array | None, n_relevant: int, n_irrelevant: int, what: str) -> Effect:
    """A value with the interval of its bootstrap samples, or the reason why it does not exist among ``what``."""
    if not (n_relevant and n_irrelevant):
        return None, f"no {'irrelevant' if n_relevant else 'relevant'} document among {what}"
    if not np.isfinite(value):
        return None, f"norms do not vary within the groups among {what}"
    ci = None if samples is None else finite_interval(samples)
    bounds = None if ci is None else list(ci)
    return {"value": float(value), "ci": bounds, "n_relevant": n_relevant, "n_irrelevant": n_irrelevant}, None


def _reference_sets(cosine: Ranking, n: int) -> tuple[Array, str, str | None, str | None]:
    """(which of n documents are relevant to some query, the name of topk, why there is no corpus, why no pairs)."""
    times = np.bincount(cosine.documents, minlength=n)
    corpus = "every candidate is relevant to some query" if times.all() else None
    pairs = None
    if (times == times[0]).all():  # relevant and irrelevant norms are the same list
        pairs = f"degenerate: every candidate is relevant to {times[0]} quer{'y' if times[0] == 1 else 'ies'}"
    return times > 0, f"the queries' {cosine.top_ids.shape[1]} best by cosine", corpus, pairs


def cohens_d(
    norms: ArrayLike, cosine: Ranking, clusters: ArrayLike, document_clusters: ArrayLike, *, resamples: int, seed: int
) -> dict[str, Effect]:
    """d of the documents' norms [N] on every reference set: {"topk", "corpus", "pairs"}, each as :func:`effects`.

    Args:
        cosine: The ranking by cosine, which lists the k best.
        clusters: [Q] of its queries, for topk and pairs.
        document_clusters: [N], for corpus. Its interval draws documents: drawing queries would call a relevant document
            irrelevant whenever its queries were not drawn.
    """
    x, level = centred(norms)
    how: Any = {"resamples": resamples, "seed": seed}
    relevant, best, no_corpus, no_pairs = _reference_sets(cosine, len(x))
    topk = split_moments(x[cosine.top_ids], cosine.top_relevant)
    result: dict[str, Effect] = {"topk": effect(topk, level, clusters, what=best, **how)}
    result |= {"corpus": (None, no_corpus), "pairs": (None, no_pairs)}
    if no_corpus is None:
        corpus = split_moments(x[:, None], relevant[:, None])
        result["corpus"] = effect(corpus, level, document_clusters, what="the candidates", **how)
    if no_pairs is None:
        own = x[cosine.documents]
        sums = [np.add.reduceat(v, cosine.offsets[:-1]) for v in (np.ones_like(own), own, own**2)]
        mine, every = np.stack(sums, axis=1), np.array([len(x), x.sum(), (x**2).sum()])
        pairs = np.concatenate([mine, every - mine], axis=1)
        result["pairs"] = effect(pairs, level, clusters, what="all pairs", **how)
    return result


def auc(relevant: ArrayLike, irrelevant: ArrayLike) -> float:
    """AUC from counts (or weights) at ascending distinct norms, [U] each; NaN where a group is empty.

    >>> auc([0, 1, 1], [2, 1, 0])  # one relevant at the second norm, tied with one of three irrelevant; one above all
    0.9166666666666666
    """
    rel, irr = np.asarray(relevant, dtype=np.float64), np.asarray(irrelevant, dtype=np.float64)
    pairs = rel.sum() * irr.sum()
    smaller = np.cumsum(irr) - irr / 2  # irrelevant documents below each norm, those at it by half
    return float((rel * smaller).sum() / pairs) if pairs > 0 else float("nan")


def magnitude_auc(
    norms: ArrayLike, cosine: Ranking, clusters: ArrayLike, document_clusters: ArrayLike, *, resamples: int, seed: int
) -> dict[str, Effect]:
    """AUC of the documents' norms [N] on every reference set; arguments and values as of :func:`cohens_d`."""
    x = np.asarray(norms, dtype=np.float64)
    if np.ptp(x) <= FLAT_CV * abs(x.mean()):
        return dict.fromkeys(("topk", "corpus", "pairs"), (None, "norms do not vary"))
    place = np.unique(x, return_inverse=True)[1]  # of the documents among the distinct norms
    every = np.bincount(place)

    def on(rows: Array, relevant: Array, clusters: Array, what: str, queries: Array | None = None) -> Effect:
        """Of document ``rows`` [K] with their clusters; the complement of all for ``queries`` (their clusters)."""
        names, member = np.unique(clusters, return_inverse=True)
        slot = np.where(relevant, place[rows], len(every) + place[rows])
        asking = None if queries is None else np.searchsorted(names, queries)

        def counts(times: Array) -> Array:
            """[2, U] relevant and irrelevant at each norm, where clusters are drawn ``times``."""
            split = np.bincount(slot, weights=times[member], minlength=2 * len(every)).reshape(2, -1)
            if asking is not None:
                split[1] = times[asking].sum() * every - split[0]
            return split

        whole = counts(np.ones(len(names)))
        n_relevant, n_irrelevant = (int(n) for n in whole.sum(axis=1))
        samples = None
        if len(names) > 1 and n_relevant and n_irrelevant:
            chunks = cluster_counts(len(names), resamples=resamples, seed=seed)
            samples = np.array([auc(*counts(times)) for chunk in chunks for times in chunk])
        return _effect(auc(*whole), samples, n_relevant, n_irrelevant, what)

    relevant, best, no_corpus, no_pairs = _reference_sets(cosine, len(x))
    owners, every_row = np.asarray(clusters), np.arange(len(x))
    listed = np.repeat(owners, cosine.top_ids.shape[1])
    result = {"topk": on(cosine.top_ids.ravel(), cosine.top_relevant.ravel(), listed, best)}
    result |= {"corpus": (None, no_corpus), "pairs": (None, no_pairs)}
    if no_corpus is None:
        result["corpus"] = on(every_row, relevant, np.asarray(document_clusters), "the candidates")
    if no_pairs is None:
        pairs = cosine.documents, np.ones(len(cosine.documents), dtype=bool), np.repeat(owners, np.diff(cosine.offsets))
        result["pairs"] = on(*pairs, "all pairs", queries=owners)
    return result


def with_reasons(effects: Mapping[str, tuple[Any, str | None]]) -> Json:
    """{name: value}; where the value is None, {name: None, name_reason: why}."""
    section: Json = {}
    for name, (value, reason) in effects.items():
        section |= {name: value} if reason is None else {name: value, f"{name}_reason": reason}
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
    distinct = starts = np.unique(known)
    if len(distinct) > at_most:
        starts = np.unique(np.quantile(known, np.arange(at_most) / at_most, method="higher").astype(np.int64))
    ends = [int(distinct[distinct < following][-1]) for following in starts[1:]] + distinct[-1:].tolist()
    names = [str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in zip(starts, ends, strict=True)]
    return np.where(v >= 0, np.searchsorted(starts, v, side="right") - 1, -1), names


def by_group(
    norms: ArrayLike,
    group: Array,
    names: list[str],
    cosine: Ranking,
    clusters: ArrayLike,
    *,
    of_queries: bool = False,
    **how: Any,
) -> list[Json]:
    """{"group", "n", "mean", "topk"} of each group: its size, the mean norm, and d(topk) within it.

    Args:
        norms, cosine, clusters: As of :func:`cohens_d`.
        group: Numbers of ``names``, -1 for none: [N] of documents, or with ``of_queries`` [Q] of queries, whose "mean"
            is that of their relevant documents among the k best.
        how: resamples and seed.
    """
    if not names:
        return []
    raw = np.asarray(norms, dtype=np.float64)
    x, level = centred(raw)
    top, relevant = cosine.top_ids, cosine.top_relevant
    inside = [group == g for g in range(len(names))]
    counted = [own[:, None] if of_queries else own[top] for own in inside]
    moments = np.stack([split_moments(x[top], relevant, c) for c in counted], axis=1)
    whats = [f"the {TOP_K} best of group {name}" for name in names]
    rows: list[Json] = []
    for name, own, c, topk in zip(
        names, inside, counted, effects(moments, level, clusters, whats=whats, **how), strict=True
    ):
        members = raw[top][relevant & c] if of_queries else raw[own]
        mean = float(members.mean()) if len(members) else None
        rows.append({"group": name, "n": int(own.sum()), "mean": mean, **with_reasons({"topk": topk})})
    return rows
