"""A study's tables as its page shows them: rounded, an arm a row, intervals beneath."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmclip.evaluation.results import CORRECTED, NATIVE, REVERSED
from mmclip.reporting.cells import NO, Cell, Table
from mmclip.reporting.formats import rate
from mmclip.reporting.table import is_number
from mmclip.study.judgements import KEPT, MATRICES
from mmclip.study.numbers import METRIC
from mmclip.study.sheets import estimate_cell, mean_cell, minus, page_table, text_cell
from mmclip.study.tables import DIRECTIONS, SCORINGS, SIDES, TABLE6_RATES

Json = dict[str, Any]
Rows = Sequence[Json]
SHOWN = 8  # settings that come nearest to keeping both directions; the table's file has all


def page_tables(sheets: Mapping[str, Rows]) -> dict[str, Table]:
    """Name of the sheet -> its table."""
    return {name: make(sheets[name]) for name, make in _MAKERS.items()}


def _d_cell(value: Any, small: str = "") -> Cell:
    return Cell(minus(f"{value:+.2f}"), small) if is_number(value) else Cell(NO, small, kind="none")


def _rate_cell(value: Any) -> Cell:
    return Cell(rate(value)) if is_number(value) else Cell(NO, kind="none")


def _cells(rows: Rows) -> Table:
    """An arm a row: its seeds' runs stand together."""
    arms: dict[str, list[Json]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    told = []
    for name, runs in arms.items():
        first = runs[0]
        gammas = [_mean([run[key] for run in runs]) for key in ("gamma_q", "gamma_d")]
        told.append(
            (
                name,
                "trained on permuted pairs: a null" if first["permute_pairs"] else "",
                [
                    Cell(f"{first['i2t_weight']:g}"),
                    text_cell(first["norm"]),
                    Cell(", ".join(NO if g is None else f"{g:.2f}" for g in gammas)),
                    text_cell(first["curriculum"], 120),
                    Cell(f"{first['train_fraction']:g}"),
                    text_cell(first["initial"], 60),
                    text_cell(", ".join(str(run["seed"]) for run in runs)),
                    text_cell(", ".join(f"{n:g}" for n in sorted({r["steps"] for r in runs if is_number(r["steps"])}))),
                ],
            )
        )
    columns = ["λ of i2t", "norm", "γq, γd at the end", "other settings", "data share", "starts from", "seeds", "steps"]
    return page_table("arms of the study", "arm", told, columns)


def _mean(values: Sequence[Any]) -> float | None:
    known = [v for v in values if is_number(v)]
    return sum(known) / len(known) if len(known) == len(values) else None


def _table6(rows: Rows) -> Table:
    told = []
    for row in rows:
        cells = []
        for side in SIDES:
            sd, paper = row[f"d_topk_{side}_sd"], row[f"paper_d_{side}"]
            small = _beneath(
                f"{sd:.2f}" if is_number(sd) else None, minus(f"{paper:+.2f}") if is_number(paper) else None
            )
            cells.append(_d_cell(row[f"d_topk_{side}_mean"], small))
        for scoring, direction in TABLE6_RATES:
            name = f"{METRIC}_{scoring}_{direction}"
            cell, paper = mean_cell(row, name), row[f"paper_R@1_{scoring}_{direction}"]
            sd = row[f"{name}_sd"]
            small = _beneath(rate(sd) if is_number(sd) else None, rate(paper) if is_number(paper) else None)
            cells.append(cell._replace(small=small))
        cells.append(Cell(str(row["n_seeds"])))
        about = row["arm"] or row["reason"] if row["paper_config"] else ""
        told.append((row["paper_config"] or row["arm"], about, cells))
    columns = [*(f"d {side}" for side in SIDES), *(f"{s} {d}" for s, d in TABLE6_RATES), "seeds"]
    return page_table("Table 6 of the paper, and these runs", "configuration", told, columns)


def _beneath(sd: str | None, paper: str | None) -> str:
    return " · ".join(filter(None, (sd and f"±{sd}", paper and f"paper {paper}")))


def _frontier(rows: Rows) -> Table:
    told = []
    for native, corrected in zip(rows[::2], rows[1::2], strict=True):
        cells = [mean_cell(row, direction) for direction in ("t2i", "i2t") for row in (native, corrected)]
        told.append((f"{native['number']}  {native['arm']}", "", cells))
    columns = [f"{direction} {point}" for direction in ("t2i", "i2t") for point in (NATIVE, CORRECTED)]
    return page_table("points of the frontier", "arm", told, columns)


def _matrix(rows: Rows) -> Table:
    told = [
        (
            f"{row['arm']}, {row['direction']}",
            "" if row["trained"] else "not trained",
            [mean_cell(row, s) for s in SCORINGS],
        )
        for row in rows
    ]
    return page_table("success@1, trained with by scored with", "trained with", told, SCORINGS)


def _gamma(rows: Rows) -> Table:
    """The first and the last γ of every run."""
    runs: dict[tuple[str, int], list[Json]] = {}
    for row in rows:
        runs.setdefault((row["arm"], row["seed"]), []).append(row)
    told = [
        (
            f"{arm}, seed {seed}",
            "",
            [Cell(f"{line[k]:.3f}") for k in ("gamma_q", "gamma_d") for line in (lines[0], lines[-1])],
        )
        for (arm, seed), lines in runs.items()
    ]
    return page_table(
        "γ at the first and last logged step", "run", told, ["γq first", "γq last", "γd first", "γd last"]
    )


def _cv(rows: Rows) -> Table:
    told = [(row["arm"], "", [mean_cell(row, f"cv_{side}") for side in SIDES]) for row in rows]
    return page_table("CV of the lengths", "arm", told, [f"CV {side}" for side in SIDES])


def _delta_cv(rows: Rows) -> Table:
    told = []
    for row in rows:
        mean, sd = row["delta_cv_mean"], row["delta_cv_sd"]
        found = Cell(f"{mean:.2f}", f"±{sd:.2f}" if is_number(sd) else "") if is_number(mean) else Cell(NO, kind="none")
        about = f"{row['dnorm_arm']} over {row['dot_arm']}"
        told.append((f"λ {row['i2t_weight']:g}, {row['query_side']}", about, [found, Cell(str(row["n_seeds"]))]))
    return page_table("ΔCV", "loss and query's side", told, ["ΔCV", "seeds"])


def _correction(rows: Rows) -> Table:
    told = []
    for row in rows:
        cells = [mean_cell(row, scoring) for scoring in (NATIVE, REVERSED, CORRECTED)]
        cells.append(estimate_cell(row, "corrected_minus_reversed", signed=True))
        cells.append(estimate_cell(row, "corrected_minus_baseline_native", signed=True))
        about = "trained both ways" if row["trained"] else "not trained"
        told.append((f"{row['arm']}, {row['direction']}", about, [*cells, Cell(str(row["n_seeds"]))]))
    columns = [NATIVE, REVERSED, CORRECTED, "corrected less reversed", "corrected less sym/cosine's native", "seeds"]
    return page_table("the correction's gain", "arm, direction", told, columns)


def _verdicts(rows: Rows) -> Table:
    told = []
    for row in rows:
        cells = [_word(row["learned"]), _d_cell(row["d_arm"]), _d_cell(row["d_control"])]
        cells.append(estimate_cell(row, "d_difference", signed=True))
        cells.append(_word(row["useful"]))
        for name in ("native_minus_cosine", "gain_over_control", "native_minus_baseline_cosine"):
            cells.append(estimate_cell(row, name, signed=True))
        control, baseline = row["control"] or "none", row["baseline"] or "none"
        about = f"{'null; ' if row['null'] else ''}control: {control}; baseline: {baseline}"
        told.append((f"{row['arm']}, {row['direction']}", about, [*cells, Cell(str(row["n_seeds"]))]))
    columns = ["learned", "d", "control's d", "difference", "useful", "native less cosine", "… less the control's",
               "native less sym/cosine's cosine", "seeds"]  # fmt: skip
    return page_table("learned and useful", "arm, direction", told, columns)


def _word(word: str) -> Cell:
    return Cell(word, kind={"yes": "up"}.get(word, "")) if word else Cell(NO, kind="none")


def _keeps_both(rows: Rows) -> Table:
    told = []
    for row in rows:
        kept = row["keeps_both"]
        word = Cell(NO, kind="none") if kept is None else Cell("yes" if kept else "no", kind="up" if kept else "")
        cells = [
            estimate_cell(row, f"{d}_ratio_to_{to}", around=around)
            for to, around in ((NATIVE, KEPT), (CORRECTED, KEPT))
            for d in DIRECTIONS
        ]
        about = row["served"] + ("" if row["by_rule"] else "; for comparison, decides nothing")
        about += "; sym/cosine itself" if row["arm"] == row["baseline"] else ""
        told.append((row["arm"], about, [word, *cells, Cell(str(row["n_seeds"]))]))
    columns = ["keeps both", *(f"{d}, to sym/cosine's {to}" for to in (NATIVE, CORRECTED) for d in DIRECTIONS), "seeds"]
    return page_table("both directions kept", "arm, how it is served", told, columns)


def _pretrained(rows: Rows) -> Table:
    told = []
    for row in rows:
        cells = [mean_cell(row, f"{METRIC}_native_{d}") for d in DIRECTIONS]
        cells += [estimate_cell(row, f"minus_from_random_{d}", signed=True) for d in DIRECTIONS]
        cells += [mean_cell(row, f"zero_shot_{when}_native") for when in ("before", "after")]
        cells.append(mean_cell(row, "zero_shot_change_native", signed=True))
        told.append((row["arm"], f"from {row['initial']}; random: {row['from_random'] or 'none'}", cells))
    columns = [*(f"{d} native" for d in DIRECTIONS), *(f"{d} less from random" for d in DIRECTIONS)]
    columns += ["zero-shot before", "after", "change"]
    return page_table("from trained weights", "arm", told, columns)


def _fractions(rows: Rows) -> Table:
    told = []
    for row in rows:
        cells = [Cell(f"{row['train_fraction']:g}"), mean_cell(row, METRIC), Cell(str(row["n_seeds"]))]
        told.append((f"{row['setting']}, {row['direction']}", row["scoring"], cells))
    return page_table("success@1 by data share", "setting, direction", told, ["data share", METRIC, "seeds"])


def _fisher(rows: Rows) -> Table:
    told = []
    for row in rows:
        kappas = [row[f"log10_kappa_{name}"] for name in MATRICES]
        cells = [Cell(f"{k:.2f}") if is_number(k) else Cell(NO, kind="none") for k in kappas]
        cells += [estimate_cell(row, "qnorm_minus_dnorm", signed=True), text_cell(row["winner"])]
        about = f"{row['qnorm_arm']} against {row['dnorm_arm']}; κ of {row['kappa_of'] or 'none'}"
        told.append((f"λ {row['i2t_weight']:g}, {row['direction']}, seed {row['seed']}", about, cells))
    columns = [*(name.replace("_", " ") for name in MATRICES), "qnorm less dnorm", "winner"]
    return page_table("κ before training", "loss, direction, seed", told, columns)


def _claims(rows: Rows) -> Table:
    told = []
    both = [row for row in rows if row["claim"] == "B2"]
    for row in rows:
        if row in both[SHOWN:]:
            continue
        around = 1.0 if row["claim"].startswith(("T1", "T2", "T3", "T4", "T5", "T6", "T7")) else 0.0
        value = estimate_cell(row, "value", around=around) if row["value_lo"] is not None else _rate_cell(row["value"])
        cells = [Cell(row["verdict"], kind=_VERDICTS.get(row["verdict"], "")), value]
        cells += [*(_rate_cell(row[key]) for key in ("paper", "smallest_effect")), text_cell(row.get("counts"), 120)]
        told.append((f"{row['claim']} {row['direction']}", row["statement"], cells))
    columns = ["verdict", "here", "the paper", "smallest effect that these data show", "counts"]
    return page_table("claims", "claim", told, columns)


_VERDICTS = {"reproduced": "up", "yes": "up", "clean": "up", "not reproduced": "down", "no": "down", "found": "down"}
_MAKERS = {
    "claims": _claims,
    "cells": _cells,
    "table6": _table6,
    "frontier": _frontier,
    "matrix": _matrix,
    "gamma": _gamma,
    "cv": _cv,
    "delta_cv": _delta_cv,
    "correction": _correction,
    "verdicts": _verdicts,
    "keeps_both": _keeps_both,
    "pretrained": _pretrained,
    "fractions": _fractions,
    "fisher": _fisher,
}
