"""Whether the norms of embeddings separate relevant documents from irrelevant ones, and what else norms follow.

Cohen's d = (mean of relevant - mean of irrelevant) / pooled standard deviation, with sample variances (Feng & Watanabe
2026, eq. 8), of the *documents'* norms. AUC = P(norm of a relevant document > norm of an irrelevant one) + P(equal) / 2,
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

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from mmclip.metrics.bootstrap import cluster_counts, cluster_sums, finite_interval, several
from mmclip.retrieval import Ranking

TOP_K = 10
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
FLAT_CV = 1e-6  # below this spread, norms are one number and its rounding
ALL_RELEVANT = "every candidate is relevant to some query"

Array = NDArray[Any]
Json = dict[str, Any]
Effect = tuple[Json | None, str | None]  # a value, or None and the reason


def summary(norms: ArrayLike) -> Json:
    """{"n", "mean", "std", "cv", "quantiles"} of norms [N]; sample standard deviation; None where it does not exist.

    >>> summary([3.0, 5.0])["mean"], summary([3.0])["std"], summary([3.0, 5.0, 6.0])["quantiles"]["0.5"]
    (4.0, None, 5.0)
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
    halves = []
    for w in ((relevant & counted).astype(np.float64), (~relevant & counted).astype(np.float64)):
        halves += [w.sum(-1), (w * norms).sum(-1), (w * norms**2).sum(-1)]
    return np.stack(halves, axis=-1)


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
    """Cohen's d of G groups over the same queries, with intervals over clusters.

    Args:
        moments: [Q, G, 6] of centred norms whose mean was ``level``.
        clusters: [Q] queries that are drawn together.
        whats: G names of the groups, for reasons.

    Returns:
        G times ({"value", "ci", "n_relevant", "n_irrelevant"}, None) or (None, reason). "ci" is None where d exists in
        too few resamples, and where all queries are one cluster: no spread is not certainty.
    """
    total = moments.sum(axis=0)
    value = d_from_moments(total, level)
    sums = cluster_sums(moments.reshape(len(moments), -1), clusters, resamples=resamples, seed=seed)
    samples = d_from_moments(sums.reshape(resamples, *total.shape), level)
    found: list[Effect] = []
    for g, what in enumerate(whats):
        n_relevant, n_irrelevant = int(total[g, 0]), int(total[g, 3])
        reason = _empty_group(n_relevant, n_irrelevant, what)
        if not np.isfinite(value[g]):
            found.append((None, reason or f"norms do not vary within the groups among {what}"))
        else:
            found.append((_value(value[g], samples[:, g], several(clusters), n_relevant, n_irrelevant), None))
    return found


def effect(moments: Array, level: float, clusters: ArrayLike, *, what: str, resamples: int, seed: int) -> Effect:
    """:func:`effects` of one group: moments [Q, 6]."""
    return effects(moments[:, None, :], level, clusters, whats=[what], resamples=resamples, seed=seed)[0]


def _value(value: float, samples: Array, spread: bool, n_relevant: int, n_irrelevant: int) -> Json:
    ci = finite_interval(samples) if spread else None
    bounds = None if ci is None else list(ci)
    return {"value": float(value), "ci": bounds, "n_relevant": n_relevant, "n_irrelevant": n_irrelevant}


def _empty_group(n_relevant: int, n_irrelevant: int, what: str) -> str | None:
    """The reason where one of the two groups among ``what`` is empty."""
    if n_relevant and n_irrelevant:
        return None
    return f"no {'irrelevant' if n_relevant else 'relevant'} document among {what}"


def _balanced(documents: Array, n: int) -> str | None:
    """The reason where all n documents are relevant equally often: relevant and irrelevant norms are the same list."""
    times = np.bincount(documents, minlength=n)
    if (times == times[0]).all():
        return f"degenerate: every candidate is relevant to {times[0]} quer{'y' if times[0] == 1 else 'ies'}"
    return None


def _relevant_to_any(cosine: Ranking, n: int) -> Array:
    relevant = np.zeros(n, dtype=bool)
    relevant[cosine.documents] = True
    return relevant


def _best(cosine: Ranking) -> str:
    return f"the queries' {cosine.top_ids.shape[1]} best by cosine"


def cohens_d(
    norms: ArrayLike, cosine: Ranking, clusters: ArrayLike, document_clusters: ArrayLike, *, resamples: int, seed: int
) -> dict[str, Effect]:
    """d of the documents' norms [N] on every reference set: {"topk", "corpus", "pairs"}, each as :func:`effects`.

    Args:
        norms: [N].
        cosine: the ranking by cosine, which lists the k best.
        clusters: [Q] of its queries, for topk and pairs.
        document_clusters: [N], for corpus. Its interval draws documents: drawing queries would call a relevant document
            irrelevant whenever its queries were not drawn.
    """
    x, level = centred(norms)
    how: Any = {"resamples": resamples, "seed": seed}
    topk = split_moments(x[cosine.top_ids], cosine.top_relevant)
    found = {"topk": effect(topk, level, clusters, what=_best(cosine), **how)}
    relevant = _relevant_to_any(cosine, len(x))
    if relevant.all():
        found["corpus"] = None, ALL_RELEVANT
    else:
        corpus = split_moments(x[:, None], relevant[:, None])
        found["corpus"] = effect(corpus, level, document_clusters, what="the candidates", **how)
    if reason := _balanced(cosine.documents, len(x)):
        return found | {"pairs": (None, reason)}
    own = x[cosine.documents]
    sums = [np.add.reduceat(v, cosine.offsets[:-1]) for v in (np.ones_like(own), own, own**2)]
    mine, every = np.stack(sums, axis=1), np.array([len(x), x.sum(), (x**2).sum()])
    pairs = np.concatenate([mine, every - mine], axis=1)
    return found | {"pairs": effect(pairs, level, clusters, what="all pairs", **how)}


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
    size = int(place.max()) + 1
    how: Any = {"resamples": resamples, "seed": seed}

    def of_items(place: Array, relevant: Array, clusters: ArrayLike, what: str) -> Effect:
        slot = np.where(relevant, place, size + place)
        names, member = np.unique(np.asarray(clusters), return_inverse=True)

        def split(times: Array) -> tuple[Array, Array]:
            counts = np.bincount(slot, weights=times[member], minlength=2 * size)
            return counts[:size], counts[size:]

        return _auc_effect(split, len(names), what, **how)

    def of_pairs() -> Effect:
        every, own = np.bincount(place, minlength=size), place[cosine.documents]
        names, member = np.unique(np.asarray(clusters), return_inverse=True)
        pair_member = np.repeat(member, np.diff(cosine.offsets))

        def split(times: Array) -> tuple[Array, Array]:  # irrelevant to a query: all documents less its own
            counts = np.bincount(own, weights=times[pair_member], minlength=size)
            return counts, times[member].sum() * every - counts

        return _auc_effect(split, len(names), "all pairs", **how)

    top, k = cosine.top_ids.ravel(), cosine.top_ids.shape[1]
    relevant, reason = _relevant_to_any(cosine, len(x)), _balanced(cosine.documents, len(x))
    return {
        "topk": of_items(place[top], cosine.top_relevant.ravel(), np.repeat(np.asarray(clusters), k), _best(cosine)),
        "corpus": (None, ALL_RELEVANT)
        if relevant.all()
        else of_items(place, relevant, document_clusters, "the candidates"),
        "pairs": (None, reason) if reason else of_pairs(),
    }


def _auc_effect(
    split: Callable[[Array], tuple[Array, Array]], n_clusters: int, what: str, resamples: int, seed: int
) -> Effect:
    """split: times that each cluster is drawn [C] -> (relevant [U], irrelevant [U]) counts at ascending norms."""
    relevant, irrelevant = split(np.ones(n_clusters))
    n_relevant, n_irrelevant = int(relevant.sum()), int(irrelevant.sum())
    if reason := _empty_group(n_relevant, n_irrelevant, what):
        return None, reason
    chunks = cluster_counts(n_clusters, resamples=resamples, seed=seed)
    samples = np.array([auc(*split(times)) for chunk in chunks for times in chunk])
    return _value(auc(relevant, irrelevant), samples, n_clusters > 1, n_relevant, n_irrelevant), None


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
    distinct = starts = np.unique(known)
    if len(distinct) > at_most:
        starts = np.unique(np.quantile(known, np.arange(at_most) / at_most, method="higher").astype(np.int64))
    names = []
    for i, lo in enumerate(starts):
        hi = starts[i + 1] - 1 if i + 1 < len(starts) else distinct[-1]
        hi = distinct[distinct <= hi][-1]
        names.append(str(lo) if lo == hi else f"{lo}-{hi}")
    return np.where(v >= 0, np.searchsorted(starts, v, side="right") - 1, -1), names


def by_document_group(
    norms: ArrayLike, group: Array, names: list[str], cosine: Ranking, clusters: ArrayLike, **how: Any
) -> list[Json]:
    """{"group", "n", "mean", "topk"} of each group: count and mean norm of its documents, d(topk) among them only.

    group [N] numbers ``names``, -1 for none; how: resamples and seed.
    """
    raw = np.asarray(norms, dtype=np.float64)
    x, level = centred(raw)
    of = [split_moments(x[cosine.top_ids], cosine.top_relevant, group[cosine.top_ids] == g) for g in range(len(names))]
    return _rows(of, level, [raw[group == g] for g in range(len(names))], names, clusters, how)


def by_query_group(
    norms: ArrayLike, group: Array, names: list[str], cosine: Ranking, clusters: ArrayLike, **how: Any
) -> list[Json]:
    """:func:`by_document_group` for groups of queries, group [Q]: "n" counts queries, "mean" is of their relevant
    documents among the k best."""
    raw = np.asarray(norms, dtype=np.float64)
    x, level = centred(raw)
    moments = split_moments(x[cosine.top_ids], cosine.top_relevant)
    inside = [group == g for g in range(len(names))]
    hits = [raw[cosine.top_ids[own]][cosine.top_relevant[own]] for own in inside]
    rows = _rows([moments * own[:, None] for own in inside], level, hits, names, clusters, how)
    return [row | {"n": int(own.sum())} for row, own in zip(rows, inside, strict=True)]


def _rows(
    moments: list[Array], level: float, members: list[Array], names: list[str], clusters: ArrayLike, how: Json
) -> list[Json]:
    if not names:
        return []
    whats = [f"the {TOP_K} best of group {name}" for name in names]
    found = effects(np.stack(moments, axis=1), level, clusters, whats=whats, **how)
    means = [float(x.mean()) if len(x) else None for x in members]
    return [
        {"group": name, "n": len(x), "mean": mean, **with_reasons({"topk": topk})}
        for name, x, mean, topk in zip(names, members, means, found, strict=True)
    ]
