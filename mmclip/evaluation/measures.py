"""The diagnostics of results.json that a reader should meet first: where each stands, its name, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmclip.similarity import SCALE_INIT

# (path in a direction's diagnostics, what it is called, what it says)
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
