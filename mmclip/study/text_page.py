"""A text study's tables as its page shows them: rounded, intervals beneath."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmclip.reporting.cells import NO, Cell, Table
from mmclip.reporting.formats import rate
from mmclip.reporting.table import is_number
from mmclip.study.judgements import MATRICES
from mmclip.study.sheets import estimate_cell, mean_cell, minus, page_table, text_cell
from mmclip.study.text_claims import NO as REFUTED
from mmclip.study.text_claims import YES
from mmclip.study.text_study import SHOWN

Json = dict[str, Any]
Rows = Sequence[Json]
NAMES = {"ndcg@10": "nDCG@10", "recall@100": "R@100", "mrr@10": "MRR@10"}


def page_tables(sheets: Mapping[str, Rows]) -> dict[str, Table]:
    """Name of the sheet -> its table."""
    return {name: make(sheets[name]) for name, make in _MAKERS.items()}


def failed_table(failed: Sequence[Mapping[str, Any]]) -> Table | None:
    """Of the cells without a result, None where there are none."""
    told = [(str(f.get("arm", "–")), "", [text_cell(f.get(k), 300) for k in ("seed", "reason")]) for f in failed]
    return page_table("failed cells", "arm", told, ["seed", "reason"]) if failed else None


def _plain(value: Any, digits: int = 3, small: str = "") -> Cell:
    return Cell(minus(f"{value:.{digits}f}"), small) if is_number(value) else Cell(NO, small, kind="none")


def _retrieval(rows: Rows) -> Table:
    told = []
    for r in rows:
        cells = []
        for metric in SHOWN:
            cell = estimate_cell(r, metric)._replace(kind="" if is_number(r.get(metric)) else "none")
            lo, hi = r.get(f"{metric}_min"), r.get(f"{metric}_max")
            seeds = f" · seeds {rate(lo)}–{rate(hi)}" if is_number(lo) and is_number(hi) else ""
            cells.append(cell._replace(small=cell.small + seeds))
        told.append((f"{r['arm']}, {r['scoring']}", r["data"], [*cells, text_cell(r["n_seeds"])]))
    return page_table("retrieval", "arm, scoring", told, [*NAMES.values(), "seeds"])


def _differences(rows: Rows) -> Table:
    told = []
    for r in rows:
        cells = []
        for metric in SHOWN:
            cell, smallest = estimate_cell(r, metric, signed=True), r[f"{metric}_smallest"]
            more = f" · detectable {rate(smallest)}" if is_number(smallest) else ""
            cells.append(cell._replace(small=cell.small + more))
        told.append(
            (f"{r['arm']}, {r['scoring']}", f"{r['data']}; less {r['baseline']}", [*cells, text_cell(r["n_seeds"])])
        )
    return page_table("differences to cosine", "arm, scoring", told, [*NAMES.values(), "seeds"])


def _magnitude(rows: Rows) -> Table:
    told = []
    for r in rows:
        cells = [estimate_cell(r, "d_corpus", signed=True), mean_cell(r, "d_topk", signed=True)]
        cells += [mean_cell(r, f"cv_{side}") for side in ("query", "document")]
        cells.append(estimate_cell(r, "relevance_count", signed=True))
        cells += [mean_cell(r, gamma) for gamma in ("gamma_q", "gamma_d")]
        cells += [_plain(r["effective_scale_mean"], 1), _plain(r["seconds_mean"], 0)]
        told.append((r["arm"], r["data"], cells))
    columns = ["d corpus", "d topk", "CV query", "CV document", "relevance count", "γq", "γd", "effective scale",
               "seconds"]  # fmt: skip
    return page_table("lengths", "arm", told, columns)


def _delta_cv(rows: Rows) -> Table:
    told = []
    for r in rows:
        cells = [estimate_cell(r, "delta_cv", around=1.0), _plain(r["delta_cv_smallest"]), text_cell(r["n_seeds"])]
        told.append((r["data"], "", cells))
    return page_table("ΔCV of queries", "data", told, ["dnorm over dot", "smallest detectable", "seeds"])


def _fisher(rows: Rows) -> Table:
    told = []
    for r in rows:
        cells = [text_cell(r["status"]), text_cell(r.get("n_available")), text_cell(r.get("n_needed") or r.get("n"))]
        cells += [estimate_cell(r, f"log10_kappa_{name}")._replace(kind="") for name in MATRICES]
        told.append((r["question"], r["reason"], cells))
    columns = ["κ is", "pairs", "used or needed", *(name.replace("_", " ") for name in MATRICES)]
    return page_table("log₁₀ κ before training", "who asks", told, columns)


def _runs(rows: Rows) -> Table:
    names = [n for n in dict.fromkeys(k for r in rows for k in r) if n.startswith("ndcg@10_")]
    told = []
    for r in rows:
        cells = [_plain(r.get(name)) for name in names]
        cells += [_plain(r.get(k)) for k in ("gamma_q", "gamma_d")] + [_plain(r["seconds"], 0)]
        told.append((f"{r['arm']}, seed {r['seed']}", "", cells))
    columns = [*(f"nDCG@10 {n.removeprefix('ndcg@10_')}" for n in names), "γq", "γd", "seconds"]
    return page_table("runs", "arm, seed", told, columns)


RATIOS = ("TX6", "TX9")  # claims about a ratio, which is 1 where there is no effect


def _claims(rows: Rows) -> Table:
    told = []
    for r in rows:
        kind = {YES: "up", REFUTED: "down"}.get(r["verdict"], "")
        cells = [Cell(r["verdict"], kind=kind), text_cell(r["norm"]), text_cell(r["data"])]
        ratio = r["claim"] in RATIOS
        value = estimate_cell(r, "value", signed=not ratio, around=1.0 if ratio else 0.0)
        cells += [value, _plain(r["smallest_effect"]), _plain(r["paper"])]
        cells.append(text_cell(r["counts"] or r["reason"], 300))
        told.append((r["claim"], r["statement"], cells))
    columns = ["verdict", "norm", "data", "value", "smallest detectable", "the paper", "beside it"]
    return page_table("claims", "claim", told, columns)


_MAKERS = {
    "runs": _runs,
    "retrieval": _retrieval,
    "differences": _differences,
    "magnitude": _magnitude,
    "delta_cv": _delta_cv,
    "fisher": _fisher,
    "claims": _claims,
}
