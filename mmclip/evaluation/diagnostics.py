"""The "diagnostics" section of results.json: norms, hubness, geometry and Fisher matrices of one ranked direction.

:func:`diagnose` composes mmclip.metrics and has no formula of its own but the regression of norms on text length.
Cohen's d itself stands in the section "magnitude". ``MEASURES`` are those that tables show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmclip.evaluation.eval_set import UNITS, EvalSet
from mmclip.metrics import RESAMPLES, fisher_report, geometry
from mmclip.metrics import magnitude as magnitudes
from mmclip.metrics.fisher import FISHER_RESAMPLES
from mmclip.metrics.magnitude import Json, spearman, with_reasons
from mmclip.retrieval.ranking import Ranking, as_floats
from mmclip.roles import FIXED_NORMALIZATIONS, SCALE_INIT, Direction, Exponents
from mmclip.similarity import TINY, magnitude, mean_norm_factor

ENTROPY_QUERIES = 1000  # queries whose softmax is sampled; each meets every document

Array = NDArray[Any]
NULL = "its null: queries and documents drawn apart"
# (path in a direction's diagnostics, name, meaning)
MEASURES = (
    ("auc topk", "AUC of norm, topk", "chance that the relevant one of a query's top 10 has the larger norm; .5: none"),
    ("auc corpus", "AUC of norm, corpus", "the same, relevant to some query against relevant to none"),
    ("relevance_count", "norm · relevance count", "rank correlation with how often a document is relevant"),
    ("text_length document words", "norm · words", "rank correlation of a document's norm and words"),
    ("text_length cohens_d topk", "d topk without text length", "Cohen's d with words and characters regressed out"),
    ("hubness cosine skewness", "hubness, cosine", "skewness of how often one is in a top 10; large: a few hubs"),
    ("hubness native skewness", "hubness, native", "the same, ranked as the model was trained"),
    ("anisotropy query", "anisotropy, queries", "mean cosine of two queries; 1: a single direction"),
    ("anisotropy document", "anisotropy, documents", "the same of two documents"),
    ("effective_rank query entropy", "effective rank, queries", "dimensions in use: exp of the spectrum's entropy"),
    ("effective_rank document entropy", "effective rank, documents", "the same of documents"),
    ("modality_gap", "modality gap", "distance of the centroids of the two sides' unit vectors, 0 to 2"),
    ("entanglement", "entanglement", "correlation of log norm with cosine over relevant pairs; 0: independent"),
    ("row_entropy native mean", "softmax entropy, native", "nats of a query's softmax over all documents"),
    ("row_entropy native uniform", "… of a uniform softmax", "its ceiling: log of the number of documents"),
    ("scale effective_scale", "effective scale", "α times the mean norm factors: how sharp the softmax is"),
    ("fisher query_raw log10_kappa", "log₁₀ κ, query raw", "condition number of its Fisher matrix, norm kept"),
    ("fisher query_raw unpaired", "… of unpaired sides", NULL),
    ("fisher query_normalized log10_kappa", "log₁₀ κ, query normalized", "the same with it divided out"),
    ("fisher query_normalized unpaired", "… of unpaired sides", NULL),
    ("fisher document_raw log10_kappa", "log₁₀ κ, document raw", "the same for the document's side"),
    ("fisher document_raw unpaired", "… of unpaired sides", NULL),
    ("fisher document_normalized log10_kappa", "log₁₀ κ, document normalized", "the same with it divided out"),
    ("fisher document_normalized unpaired", "… of unpaired sides", NULL),
    ("fisher marchenko_pastur", "… of isotropic noise", "Marchenko and Pastur's limit for as many samples"),
)


@torch.no_grad()
def diagnose(
    data: EvalSet,
    direction: Direction,
    rankings: Mapping[str, Ranking],
    native: Exponents,
    alpha: float | None = None,
    *,
    fisher: bool = True,
    resamples: int = RESAMPLES,
    fisher_resamples: int = FISHER_RESAMPLES,
    seed: int = 0,
) -> Json:
    """Diagnose one direction of one set; plain JSON values.

    Args:
        data, direction: The set and the direction in which it was ranked.
        rankings: scoring -> ranking; "cosine" must list its ``TOP_K`` best, "native" may.
        native: The trained exponents.
        alpha: Logit scale of this direction; None: calibrated so that the effective scale is ``SCALE_INIT``.
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
            hubness           {"cosine", "native": {skewness, largest, never, k}} of lists (Radovanovic et al. 2010)
            anisotropy        {role: mean cosine of two of its vectors} (Ethayarajh 2019)
            effective_rank    {role: {participation, entropy, at_most}}, dimensions (Roy & Vetterli 2007)
            modality_gap      distance of the centroids of unit vectors, 0 to 2 (Liang et al. 2022)
            entanglement      Pearson of log(|q| |d|) with the cosine over relevant pairs (PACE)
            row_entropy       {scoring: {mean, std, uniform, alpha, n_queries}}: nats of a query's softmax over all
                              documents, of ``ENTROPY_QUERIES`` random queries, each scoring at native's effective scale
            fisher            log10 kappa of the four Fisher matrices, or "undetermined" (metrics.fisher_report)
            scale             {alpha, alpha_source ("given" or "calibrated"), effective_scale} of native
    """
    cosine, native = rankings["cosine"], as_floats(native)
    every, document = direction.roles(data.embeddings)
    query = every[torch.as_tensor(cosine.queries, device=every.device)]
    sides = {"query": query, "document": document}
    norms = {role: magnitude(x.double()).cpu().numpy() for role, x in sides.items()}
    factors = max(mean_norm_factor(query, document, native), TINY)
    source, alpha = ("calibrated", SCALE_INIT / factors) if alpha is None else ("given", alpha)
    clusters = data.clusters[direction.query_side][cosine.queries]
    reference: Any = cosine, clusters, data.clusters[direction.document_side]
    how: Any = {"resamples": resamples, "seed": seed}
    pairs = np.repeat(np.arange(len(cosine.queries)), np.diff(cosine.offsets)), cosine.documents
    at = [torch.as_tensor(x, device=query.device) for x in pairs]
    lists = {name: rankings[name].top_ids for name in ("cosine", "native") if name in rankings}
    texts: dict[str, dict[str, Array]] = {}
    for role, side, rows in (
        ("query", direction.query_side, cosine.queries),
        ("document", direction.document_side, ...),
    ):
        texts[role] = {unit: v[rows] for unit, v in data.attributes.get(side, {}).items() if unit in UNITS}
    lengths: Json = {
        role: with_reasons({unit: spearman(norms[role][v >= 0], v[v >= 0]) for unit, v in units.items()})
        for role, units in texts.items()
        if units
    }
    if texts["document"]:
        left, reason = without_text_length(norms["document"], texts["document"])
        none: dict[str, magnitudes.Effect] = dict.fromkeys(("topk", "corpus", "pairs"), (None, reason))
        lengths["cohens_d"] = with_reasons(none if left is None else magnitudes.cohens_d(left, *reference, **how))
    times = np.bincount(cosine.documents, minlength=len(document))
    section: Json = {
        "magnitude": {role: magnitudes.summary(x) for role, x in norms.items()},
        "auc": with_reasons(magnitudes.magnitude_auc(norms["document"], *reference, **how)),
        "text_length": lengths,
        "hubness": with_reasons(
            {name: geometry.hubness(ids, len(document)) for name, ids in lists.items() if ids.shape[1]}
        ),
        "anisotropy": with_reasons({role: geometry.anisotropy(x) for role, x in sides.items()}),
        "effective_rank": with_reasons({role: geometry.effective_rank(x) for role, x in sides.items()}),
        "modality_gap": geometry.modality_gap(query, document),
        "row_entropy": _entropies(query, document, native, alpha * factors, seed),
        "scale": {"alpha": alpha, "alpha_source": source, "effective_scale": alpha * factors},
        **with_reasons(
            {
                "relevance_count": spearman(norms["document"], times),
                "entanglement": geometry.entanglement(query[at[0]], document[at[1]]),
            }
        ),
    }
    if fisher:
        options: Any = {"resamples": fisher_resamples, "seed": seed}
        section["fisher"] = fisher_report(query, document, pairs, clusters, native, alpha, **options)
    return section


def without_text_length(norms: Array, lengths: Mapping[str, Array]) -> tuple[Array | None, str | None]:
    """Subtract from norms [N] what least squares on text lengths (unit -> [N]) explains; their mean is kept.

    Only what is linear in text length goes. (None, reason) where a document has no text.
    """
    columns = np.column_stack([*lengths.values(), np.ones(len(norms))]).astype(np.float64)
    if unknown := int((columns < 0).any(axis=1).sum()):
        return None, f"{unknown} of {len(norms)} documents have no text"
    fit = columns @ np.linalg.lstsq(columns, norms, rcond=None)[0]
    return norms - fit + norms.mean(), None


def _entropies(query: Tensor, document: Tensor, native: Exponents, scale: float, seed: int) -> Json:
    n = min(len(query), ENTROPY_QUERIES)
    drawn = np.sort(np.random.default_rng(seed).choice(len(query), n, replace=False))
    sample = query[torch.as_tensor(drawn, device=query.device)]
    by_exponents: dict[Exponents, Json] = {}  # native is often one of the four
    section: Json = {}
    for name, exponents in {**{e.value: e.exponents for e in FIXED_NORMALIZATIONS}, "native": native}.items():
        if exponents not in by_exponents:
            alpha = scale / max(mean_norm_factor(query, document, exponents), TINY)
            entropies = geometry.row_entropy(sample, document, exponents, alpha)
            by_exponents[exponents] = {
                "mean": float(entropies.mean()),
                "std": float(entropies.std(ddof=1)) if n > 1 else None,
                "uniform": float(np.log(len(document))),
                "alpha": alpha,
                "n_queries": n,
            }
        section[name] = by_exponents[exponents]
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
    """Note on directions (name -> diagnostics) whose α was calibrated; None without any."""
    of = [name for name, section in sections.items() if value_at(section, ["scale", "alpha_source"])[0] == "calibrated"]
    return (
        None
        if not of
        else (
            f"α of {', '.join(of)} is not known (not trained, or not in the file): its effective scale is set to "
            f"{SCALE_INIT:.3g}, and its entropy and Fisher numbers depend on that"
        )
    )
