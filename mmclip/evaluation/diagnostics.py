"""Everything that can be said of one direction's raw vectors, as the section "diagnostics" of results.json.

:func:`diagnose` composes diagnostics, auc, geometry and fisher over one ranked direction of one pool; it holds no
formula of its own but the regression of length on text length. Roles only: a query ranks documents. Cohen's d itself
stands in the section "magnitude".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mmclip.metrics import RESAMPLES, auc, geometry
from mmclip.metrics import magnitude as diagnostics
from mmclip.metrics.fisher_report import RESAMPLES as FISHER_RESAMPLES
from mmclip.metrics.fisher_report import fisher_report
from mmclip.metrics.magnitude import Effect, Json
from mmclip.retrieval.ranking import Ranking, as_floats
from mmclip.similarity import (
    FIXED_NORMALIZATIONS,
    SCALE_INIT,
    TINY,
    Exponents,
    magnitude,
    mean_length_factors,
)

ENTROPY_QUERIES = 1000  # queries whose softmax is looked at; each meets every document

Array = NDArray[Any]
TextLengths = Mapping[str, Array]  # unit -> [n], -1 where there is no text


@torch.no_grad()
def diagnose(
    query: Tensor,
    document: Tensor,
    rankings: Mapping[str, Ranking],
    clusters: ArrayLike,
    document_clusters: ArrayLike,
    native: Exponents,
    alpha: float | None = None,
    *,
    text_length: Mapping[str, TextLengths] | None = None,
    fisher: bool = True,
    resamples: int = RESAMPLES,
    fisher_resamples: int = FISHER_RESAMPLES,
    seed: int = 0,
) -> Json:
    """The diagnostics of one direction of one pool, plain JSON values.

    query [n, D], document [N, D]   raw vectors, as they were ranked
    rankings                        scoring -> its ranking; "cosine" must list its ``TOP_K`` best, "native" may
    clusters [Q]                    of rankings' queries, document_clusters [N]: what a bootstrap draws together
    native, alpha                   the trained exponents, and alpha of this direction; None: calibrated on these
                                    vectors so that the effective scale is ``SCALE_INIT``
    text_length                     role ("query": [n] a unit, "document": [N]) -> pools.text_lengths; a role is left
                                    out where it has no text
    fisher                          False leaves the costliest part out
    resamples, fisher_resamples, seed   of the bootstraps, and of what is sampled

    Keys; "x" / "x_reason": a value that does not exist is None, with a reason. Lengths are in the unit of the raw
    features. Intervals, where a value has "ci", are 95% over clusters.

    magnitude         {role: summary of |x|}: of the queries that were asked, of all documents
    auc               {topk, corpus, pairs}: documents' length as a classifier of relevance, 0 to 1 (auc.py)
    relevance_count   Spearman of a document's length with the number of its relevant queries, -1 to 1
    text_length       {role: {unit: Spearman of length with text length}, "cohens_d": {topk, corpus, pairs}}: d of the
                      documents' lengths after linear regression on their text lengths, in standard deviations
    hubness           {"cosine" and "native", if listed: {skewness, largest, never, k}} (Radovanovic et al. 2010)
    anisotropy        {role: mean cosine of two of its vectors}, -1 to 1 (Ethayarajh 2019)
    effective_rank    {role: {participation, entropy, at_most}}, dimensions (Roy & Vetterli 2007)
    modality_gap      distance of the centroids of unit vectors, 0 to 2 (Liang et al. 2022)
    entanglement      Pearson of log(|q| |d|) with cos over the relevant pairs, -1 to 1 (PACE)
    row_entropy       {scoring: {mean, std, uniform, alpha, n_queries}}, nats, of a query's softmax over all documents,
                      of at most ``ENTROPY_QUERIES`` queries at random; every scoring at native's effective scale
    fisher            log10 kappa of the four Fisher matrices, or "undetermined" (fisher_report.py)
    scale             {alpha, alpha_source ("given" or "calibrated"), effective_scale} of native on these vectors
    """
    cosine = rankings["cosine"]
    native = as_floats(native)
    rows = torch.as_tensor(cosine.queries, device=query.device)
    asked = query[rows]
    lengths = {role: _lengths(x) for role, x in (("query", asked), ("document", document))}
    factors = max(float(mean_length_factors(asked, document, native).prod()), TINY)
    source = "calibrated" if alpha is None else "given"
    alpha = SCALE_INIT / factors if alpha is None else alpha
    scale = alpha * factors
    how: Any = {"resamples": resamples, "seed": seed}
    reference = (cosine, clusters, document_clusters)
    times = np.bincount(cosine.documents, minlength=len(document))
    pair_rows = np.repeat(np.arange(len(cosine.queries)), np.diff(cosine.offsets)), cosine.documents
    texts = dict(text_length or {})
    if "query" in texts:
        texts["query"] = {unit: v[cosine.queries] for unit, v in texts["query"].items()}
    sides = {"query": asked, "document": document}
    at = [torch.as_tensor(x, device=query.device) for x in pair_rows]
    section: Json = {
        "magnitude": {role: diagnostics.summary(x) for role, x in lengths.items()},
        "auc": diagnostics.with_reasons(auc.length_auc(lengths["document"], *reference, **how)),
        "text_length": _text_length(lengths, texts, reference, how),
        "hubness": diagnostics.with_reasons(
            {
                name: geometry.hubness(rankings[name].top_ids, len(document))
                for name in ("cosine", "native")
                if name in rankings and rankings[name].top_ids.shape[1]
            }
        ),
        "anisotropy": diagnostics.with_reasons({role: geometry.anisotropy(x) for role, x in sides.items()}),
        "effective_rank": diagnostics.with_reasons({role: geometry.effective_rank(x) for role, x in sides.items()}),
        "modality_gap": geometry.modality_gap(asked, document),
        "row_entropy": _entropies(asked, document, native, scale, seed),
        "scale": {"alpha": alpha, "alpha_source": source, "effective_scale": scale},
    }
    section |= diagnostics.with_reasons(
        {
            "relevance_count": diagnostics.spearman(lengths["document"], times),
            "entanglement": geometry.entanglement(asked[at[0]], document[at[1]]),
        }
    )
    if fisher:
        options: Any = {"resamples": fisher_resamples, "seed": seed}
        section["fisher"] = fisher_report(asked, document, pair_rows, clusters, native, alpha, **options)
    return section


def _lengths(x: Tensor) -> Array:
    return magnitude(x.double()).cpu().numpy()


def _text_length(
    lengths: Mapping[str, Array], texts: Mapping[str, TextLengths], reference: Any, how: Mapping[str, Any]
) -> Json:
    """How length follows text length, and d of the documents without it."""
    section: Json = {}
    for role, units in texts.items():
        x = lengths[role]
        section[role] = diagnostics.with_reasons(
            {unit: diagnostics.spearman(x[v >= 0], v[v >= 0]) for unit, v in units.items()}
        )
    if "document" in texts:
        left, reason = without_text_length(lengths["document"], texts["document"])
        effects: dict[str, Effect] = dict.fromkeys(("topk", "corpus", "pairs"), (None, reason))
        if left is not None:
            effects = diagnostics.length_effects(left, *reference, **how)
        section["cohens_d"] = diagnostics.with_reasons(effects)
    return section


def without_text_length(lengths: Array, texts: TextLengths) -> tuple[Array | None, str | None]:
    """Lengths [N] less what least squares on all units of text length (and a constant) explains, their mean kept.

    Only what is linear in text length goes. (None, reason) where a document has no text.
    """
    columns = np.column_stack([*texts.values(), np.ones(len(lengths))]).astype(np.float64)
    unknown = int((columns < 0).any(axis=1).sum())
    if unknown:
        return None, f"{unknown} of {len(lengths)} documents have no text"
    fit = columns @ np.linalg.lstsq(columns, lengths, rcond=None)[0]
    return lengths - fit + lengths.mean(), None


def _entropies(query: Tensor, document: Tensor, native: Exponents, scale: float, seed: int) -> Json:
    n = min(len(query), ENTROPY_QUERIES)
    drawn = np.sort(np.random.default_rng(seed).choice(len(query), n, replace=False))
    sample = query[torch.as_tensor(drawn, device=query.device)]
    section: Json = {}
    seen: dict[Exponents, str] = {}
    for name, exponents in {**{e.value: e.exponents for e in FIXED_NORMALIZATIONS}, "native": native}.items():
        if exponents in seen:  # native is often one of the four
            section[name] = section[seen[exponents]]
            continue
        seen[exponents] = name
        alpha = scale / max(float(mean_length_factors(query, document, exponents).prod()), TINY)
        entropies = geometry.row_entropy(sample, document, exponents, alpha)
        section[name] = geometry.entropy_summary(entropies, len(document), alpha)
    return section
