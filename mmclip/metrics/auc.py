"""AUC of embedding length as a relevance classifier, on the reference sets that Cohen's d is given on.

AUC = P(length of a relevant document > length of an irrelevant one) + P(equal) / 2, the Mann-Whitney form: 0.5 where
length says nothing, 1 where every relevant document is longer than every irrelevant one, 0 where it is the reverse.
Unlike d it does not change under a monotone rescaling of length. Reference sets, clusters and reasons are those of
:mod:`mmclip.metrics.magnitude`.

Counts of relevant and irrelevant documents at each distinct length, in ascending order, are all that AUC needs: a
bootstrap sample is one weighted count, linear in the items, and nothing is sorted twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmclip.metrics import bootstrap as metrics
from mmclip.metrics import magnitude as diagnostics
from mmclip.metrics.magnitude import Effect
from mmclip.retrieval.ranking import Ranking

Array = NDArray[Any]


def auc(relevant: ArrayLike, irrelevant: ArrayLike) -> float:
    """AUC from counts (or weights) at ascending distinct lengths, [U] each; NaN where a group is empty.

    >>> auc([0, 1, 1], [2, 1, 0])  # one relevant at the second length, tied with one of three irrelevant; one above all
    0.9166666666666666
    """
    rel, irr = np.asarray(relevant, dtype=np.float64), np.asarray(irrelevant, dtype=np.float64)
    pairs = rel.sum() * irr.sum()
    shorter = np.cumsum(irr) - irr / 2  # irrelevant documents below each length, those at it by half
    return float((rel * shorter).sum() / pairs) if pairs > 0 else float("nan")


def length_auc(
    lengths: ArrayLike, cosine: Ranking, clusters: ArrayLike, document_clusters: ArrayLike, *, resamples: int, seed: int
) -> dict[str, Effect]:
    """AUC of the documents' lengths [N] on every reference set: {"topk", "corpus", "pairs"}.

    Arguments as of :func:`mmclip.metrics.magnitude.length_effects`. A value is {"value", "ci", "n_relevant",
    "n_irrelevant"}, or None with the reason.
    """
    x = np.asarray(lengths, dtype=np.float64)
    if np.ptp(x) <= diagnostics.FLAT_CV * abs(x.mean()):
        return dict.fromkeys(("topk", "corpus", "pairs"), (None, "lengths do not vary"))
    place = np.unique(x, return_inverse=True)[1]  # the documents' places among the distinct lengths
    asking = np.asarray(clusters)
    how: Any = {"resamples": resamples, "seed": seed}
    what = diagnostics.best_by_cosine(cosine)
    k = cosine.top_ids.shape[1]
    found = {
        "topk": _auc_of_items(
            place[cosine.top_ids.ravel()], cosine.top_relevant.ravel(), np.repeat(asking, k), what=what, **how
        )
    }
    relevant = np.zeros(len(x), dtype=bool)
    relevant[cosine.documents] = True
    if relevant.all():
        found["corpus"] = None, diagnostics.ALL_RELEVANT
    else:
        found["corpus"] = _auc_of_items(place, relevant, document_clusters, what="the candidates", **how)
    degenerate = diagnostics.balanced_relevance(cosine.documents, len(x))
    found["pairs"] = (None, degenerate) if degenerate else _auc_of_pairs(place, cosine, asking, **how)
    return found


def _auc_of_items(
    place: Array, relevant: Array, clusters: ArrayLike, *, what: str, resamples: int, seed: int
) -> Effect:
    """Items [I]: place among the distinct lengths, relevance, and the cluster that each is drawn with."""
    size = int(place.max()) + 1
    slot = np.where(relevant, place, size + place)
    names, member = np.unique(np.asarray(clusters), return_inverse=True)

    def split(times: Array) -> tuple[Array, Array]:
        counts = np.bincount(slot, weights=times[member], minlength=2 * size)
        return counts[:size], counts[size:]

    return _bootstrap(split, len(names), what, resamples, seed)


def _auc_of_pairs(place: Array, cosine: Ranking, clusters: Array, *, resamples: int, seed: int) -> Effect:
    """All (query, document) pairs: what is not relevant to a query is every document less its own, so only the
    relevant pairs are ever listed."""
    size = int(place.max()) + 1
    every = np.bincount(place, minlength=size)
    names, member = np.unique(clusters, return_inverse=True)
    slot, asked_by = place[cosine.documents], np.repeat(member, np.diff(cosine.offsets))

    def split(times: Array) -> tuple[Array, Array]:
        own = np.bincount(slot, weights=times[asked_by], minlength=size)
        return own, times[member].sum() * every - own

    return _bootstrap(split, len(names), "all pairs", resamples, seed)


def _bootstrap(
    split: Callable[[Array], tuple[Array, Array]], n_clusters: int, what: str, resamples: int, seed: int
) -> Effect:
    """split(times [C] a cluster is drawn) -> (relevant [U], irrelevant [U]) counts at ascending lengths."""
    relevant, irrelevant = split(np.ones(n_clusters))
    n_rel, n_irr = int(relevant.sum()), int(irrelevant.sum())
    reason = diagnostics.empty_group(n_rel, n_irr, what)
    if reason is not None:
        return None, reason
    samples = np.array(
        [
            auc(*split(times))
            for chunk in metrics.cluster_counts(n_clusters, resamples=resamples, seed=seed)
            for times in chunk
        ]
    )
    defined = samples[np.isfinite(samples)]
    enough = n_clusters > 1 and len(defined) >= metrics.MIN_DEFINED * resamples
    ci = list(metrics.interval(defined)) if enough else None
    return {"value": auc(relevant, irrelevant), "ci": ci, "n_relevant": n_rel, "n_irrelevant": n_irr}, None
