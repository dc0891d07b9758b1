"""The report's table of diagnostics: the numbers of diagnose.py that a reader should meet first, then all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmclip.errors import one_line
from mmclip.report_source import ReportRun, is_number
from mmclip.report_tables import NO, Cell, Row, Table, value_cell
from mmclip.similarity import CLIP_DIRECTIONS

Json = dict[str, Any]
# (path in a direction's diagnostics, what it is called, what it says)
_FIRST = (
    ("auc topk", "AUC of length, topk", "chance that the relevant one of two in the top 10 is longer; .5: no help"),
    ("auc corpus", "AUC of length, corpus", "the same, relevant to some query against relevant to none"),
    ("relevance_count", "length · relevance count", "rank correlation of length with how often a document is relevant"),
    ("text_length document words", "length · words", "rank correlation of a document's length with its word count"),
    ("text_length cohens_d topk", "d topk without text length", "Cohen's d, word and character counts regressed out"),
    ("hubness cosine skewness", "hubness, cosine", "how skewed the shares of the top 10 are; large: few answer all"),
    ("hubness native skewness", "hubness, native", "the same, ranked as the model was trained"),
    ("anisotropy query", "anisotropy, queries", "mean cosine of two queries: 0 fills the sphere, 1 is one direction"),
    ("anisotropy document", "anisotropy, documents", "the same of two documents"),
    ("effective_rank query entropy", "effective rank, queries", "dimensions in use: exp of the spectrum's entropy"),
    ("effective_rank document entropy", "effective rank, documents", "the same of documents"),
    ("modality_gap", "modality gap", "distance of the centroids of the two sides' unit vectors, 0 to 2"),
    ("entanglement", "entanglement", "correlation of log length with cosine over relevant pairs: 0 keeps them apart"),
    ("row_entropy native mean", "softmax entropy, native", "nats of a query's softmax over all documents"),
    ("row_entropy native uniform", "… of a uniform softmax", "log of the number of documents, the ceiling"),
    ("scale effective_scale", "effective scale", "α times the mean length factors: how sharp the softmax is"),
    ("fisher query_raw log10_kappa", "log₁₀ κ, query raw", "condition of the Fisher matrix, that side's length kept"),
    ("fisher query_normalized log10_kappa", "log₁₀ κ, query normalized", "the same with it divided out"),
    ("fisher document_raw log10_kappa", "log₁₀ κ, document raw", "the same for the document's side"),
    ("fisher document_normalized log10_kappa", "log₁₀ κ, document normalized", "the same with it divided out"),
)  # fmt: skip


def diagnostics(runs: Sequence[ReportRun]) -> tuple[Table, Table] | None:
    """(the first ones with what they say, all numbers by their names in results.json); None where no run has any."""
    sections = {
        (run.number, d.value): section
        for run in runs
        for d in CLIP_DIRECTIONS
        if isinstance(section := (run.results.json.get("diagnostics") or {}).get(d.value), dict)
    }
    if not sections:
        return None
    named = {run.number: run.name for run in runs}
    heads = [f"{named[n]} · {d}" if len(runs) > 1 else d for n, d in sections]
    reasons: dict[str, tuple[list[str], list[str]]] = {}  # what does not exist, and where
    rows = []
    for path, label, about in _FIRST:
        cells = []
        for head, section in zip(heads, sections.values(), strict=True):
            value, reason = _at(section, path.split())
            cells.append(value_cell(value))
            for known, new in zip(reasons.setdefault(reason, ([], [])), (label, head), strict=True) if reason else ():
                known += [new] if new not in known else []
        if any(cell.text != NO for cell in cells):
            rows.append(Row(label, cells, about=about))
    notes = [
        f"Does not exist: {', '.join(labels)}"
        + (f" ({', '.join(who)})" if len(who) < len(heads) else "")
        + f": {one_line(reason, 200)}."
        for reason, (labels, who) in reasons.items()
    ]
    flat = {key: _flat(section) for key, section in sections.items()}
    names = list(dict.fromkeys(name for values in flat.values() for name in values))
    every = [Row(name, [flat[key].get(name, Cell(NO, kind="none")) for key in sections]) for name in names]
    return Table("diagnostics", ["diagnostic", *heads], rows, notes), Table("all diagnostics", ["name", *heads], every)


def _at(section: Any, path: list[str]) -> tuple[Any, str | None]:
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


def _flat(section: Json, prefix: str = "") -> dict[str, Cell]:
    """Every value by the names that lead to it; a value with an interval is one."""
    found: dict[str, Cell] = {}
    for key, value in section.items():
        name = one_line(f"{prefix}{key}", 120)
        if isinstance(value, dict) and "ci" not in value:
            found |= _flat(value, f"{name} · ")
        elif isinstance(value, dict | float) or is_number(value):
            found[name] = value_cell(value)
        elif value is not None:
            found[name] = Cell(one_line(value, 160))
    return found
