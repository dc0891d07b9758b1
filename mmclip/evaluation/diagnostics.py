"""The "diagnostics" section of results.json: norms, hubness, geometry and Fisher matrices of one ranked direction.

:func:`diagnose` composes mmclip.metrics and has no formula of its own but the regression of norms on text length. Roles
only: a query ranks documents. Cohen's d itself stands in the section "magnitude". ``MEASURES`` are what a reader should
meet first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mmclip.metrics import RESAMPLES, fisher_report, geometry
from mmclip.metrics import magnitude as diagnostics
from mmclip.metrics.fisher import FISHER_RESAMPLES
from mmclip.metrics.magnitude import Effect, Json
from mmclip.retrieval.ranking import Ranking, as_floats
from mmclip.roles import FIXED_NORMALIZATIONS, SCALE_INIT, Exponents
from mmclip.similarity import TINY, magnitude, mean_norm_factor

ENTROPY_QUERIES = 1000  # queries whose softmax is looked at; each meets every document

Array = NDArray[Any]
TextLengths = Mapping[str, Array]  # unit -> [n], -1 where there is no text
# (path in a direction's diagnostics, name, meaning)
MEASURES = (
    ("auc topk", "AUC of length, topk", "chance that the relevant one of a query's top 10 is longer; .5: none"),
    ("auc corpus", "AUC of length, corpus", "the same, relevant to some query against relevant to none"),
    ("relevance_count", "length · relevance count", "rank correlation with how often a document is relevant"),
    ("text_length document words", "length · words", "rank correlation of a document's length and words"),
    ("text_length cohens_d topk", "d topk without text length", "Cohen's d with words and characters regressed out"),
    ("hubness cosine skewness", "hubness, cosine", "skewness of how often one is in a top 10; large: a few answer all"),
    ("hubness native skewness", "hubness, native", "the same, ranked as the model was trained"),
    ("anisotropy query", "anisotropy, queries", "mean cosine of two queries; 1: a single direction"),
    ("anisotropy document", "anisotropy, documents", "the same of two documents"),
    ("effective_rank query entropy", "effective rank, queries", "dimensions in use: exp of the spectrum's entropy"),
    ("effective_rank document entropy", "effective rank, documents", "the same of documents"),
    ("modality_gap", "modality gap", "distance of the centroids of the two sides' unit vectors, 0 to 2"),
    ("entanglement", "entanglement", "correlation of log length with cosine over relevant pairs: 0 keeps them apart"),
    ("row_entropy native mean", "softmax entropy, native", "nats of a query's softmax over all documents"),
    ("row_entropy native uniform", "… of a uniform softmax", "its ceiling: log of the number of documents"),
    ("scale effective_scale", "effective scale", "α times the mean length factors: how sharp the softmax is"),
    ("fisher query_raw log10_kappa", "log₁₀ κ, query raw", "condition number of its Fisher matrix, length kept"),
    ("fisher query_raw unpaired", "… of unpaired sides", "its null: queries and documents drawn apart"),
    ("fisher query_normalized log10_kappa", "log₁₀ κ, query normalized", "the same with it divided out"),
    ("fisher query_normalized unpaired", "… of unpaired sides", "its null: queries and documents drawn apart"),
    ("fisher document_raw log10_kappa", "log₁₀ κ, document raw", "the same for the document's side"),
    ("fisher document_raw unpaired", "… of unpaired sides", "its null: queries and documents drawn apart"),
    ("fisher document_normalized log10_kappa", "log₁₀ κ, document normalized", "the same with it divided out"),
    ("fisher document_normalized unpaired", "… of unpaired sides", "its null: queries and documents drawn apart"),
    ("fisher marchenko_pastur", "… of isotropic noise", "Marchenko and Pastur's limit for as many samples"),
)  # fmt: skip


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
    """Diagnose one direction of one set; plain JSON values.

    Args:
        query, document: Raw [n, D] and [N, D], as they were ranked.
        rankings: scoring -> ranking; "cosine" must list its ``TOP_K`` best, "native" may.
        clusters, document_clusters: [Q] of the ranked queries, and [N]; a bootstrap draws one number's rows together.
        native: The trained exponents.
        alpha: Logit scale of this direction; None: calibrated so that the effective scale is ``SCALE_INIT``.
        text_length: role -> unit -> [n] or [N] text lengths, -1 unknown; without a role that has no texts.
        fisher: Whether to add the Fisher matrices, the costliest part.
        resamples, fisher_resamples, seed: Of the bootstraps, and of what is sampled.

    Returns:
        Values of these keys; one that does not exist is None, its reason under KEY_reason. Intervals ("ci") are 95 %
        over clusters.
            magnitude         {role: summary of norms}, of the judged queries and of all documents
            auc               {topk, corpus, pairs}: documents' norm as a classifier of relevance, 0 to 1
            relevance_count   Spearman of a document's norm with the number of its relevant queries
            text_length       {role: {unit: Spearman of norm and text length}, "cohens_d": {topk, corpus, pairs}}: d of
                              the documents' norms with text lengths regressed out, in standard deviations
            hubness           {"cosine" and "native", if listed: {skewness, largest, never, k}} (Radovanovic et al. 2010)
            anisotropy        {role: mean cosine of two of its vectors} (Ethayarajh 2019)
            effective_rank    {role: {participation, entropy, at_most}}, dimensions (Roy & Vetterli 2007)
            modality_gap      distance of the centroids of unit vectors, 0 to 2 (Liang et al. 2022)
            entanglement      Pearson of log(|q| |d|) with the cosine over relevant pairs (PACE)
            row_entropy       {scoring: {mean, std, uniform, alpha, n_queries}}: nats of a query's softmax over all
                              documents, of ``ENTROPY_QUERIES`` random queries, each scoring at native's effective scale
            fisher            log10 kappa of the four Fisher matrices, or "undetermined" (metrics.fisher_report)
            scale             {alpha, alpha_source ("given" or "calibrated"), effective_scale} of native
    """
    cosine = rankings["cosine"]
    native = as_floats(native)
    rows = torch.as_tensor(cosine.queries, device=query.device)
    asked = query[rows]
    lengths = {role: _lengths(x) for role, x in (("query", asked), ("document", document))}
    factors = max(mean_norm_factor(asked, document, native), TINY)
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
        "auc": diagnostics.with_reasons(diagnostics.magnitude_auc(lengths["document"], *reference, **how)),
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
            effects = diagnostics.cohens_d(left, *reference, **how)
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
        alpha = scale / max(mean_norm_factor(query, document, exponents), TINY)
        entropies = geometry.row_entropy(sample, document, exponents, alpha)
        section[name] = geometry.entropy_summary(entropies, len(document), alpha)
    return section


def value_at(section: Any, path: list[str]) -> tuple[Any, str | None]:
    """(value, None) at a path, or (None, the reason that stands beside a missing one)."""
    for name in path:
        if not isinstance(section, dict):
            return None, None
        if section.get("status") == "undetermined":
            return None, str(section.get("reason"))
        reason = section.get(f"{name}_reason")
        section = section.get(name)
        if section is None:
            return None, None if reason is None else str(reason)
    return section, None


def alpha_note(sections: Mapping[str, Any]) -> str | None:
    """What to say of directions (name -> diagnostics) whose α was not told; None where every one was."""
    of = [name for name, section in sections.items() if value_at(section, ["scale", "alpha_source"])[0] == "calibrated"]
    if not of:
        return None
    return (
        f"α of {', '.join(of)} is not known (it was not trained, or the file does not say): its effective scale is set "
        f"to {SCALE_INIT:.3g}, and its entropy and Fisher numbers hang on that"
    )
