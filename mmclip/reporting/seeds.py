"""The report's numbers over seeds: runs that differ in their seed only, taken together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmclip.errors import printable
from mmclip.evaluation.seeds import Group, group_by_seed
from mmclip.reporting.cells import NO, Cell, Row, Table, change_cell
from mmclip.reporting.formats import rate, span
from mmclip.reporting.source import ReportRun
from mmclip.similarity import CLIP_DIRECTIONS

Json = dict[str, Any]
COLUMNS = ("runs", "native", "lowest–highest", "reversed", "corrected")
GAINS = ("corrected less reversed", "native less the first's", "corrected less the first's native")


def seeds(runs: Sequence[ReportRun], pool: str) -> Table | None:
    """success@1 of every group of seeds in both directions; None where no two runs differ in their seed only."""
    groups = group_by_seed({run.name: run.results for run in runs})
    if not groups:
        return None
    rows = []
    for group in groups:
        of = {id(results) for results in group.runs}
        names = ", ".join(run.name for run in runs if id(run.results) in of)
        rows.append(Row(f"{printable(group.name, 80)}: {printable(names, 300)}", []))
        for direction in CLIP_DIRECTIONS:
            rows.append(Row(direction.value, _cells(group, groups[0], pool, direction.value)))
    return Table(f"success@1 over seeds, pool {pool}", ["mean of seeds", *COLUMNS, *GAINS], rows)


def _cells(group: Group, first: Group, pool: str, direction: str) -> list[Cell]:
    (native, *others), gains = group.row(pool, direction, first)
    apart = Cell(f"{rate(native['low'])}–{rate(native['high'])}") if native else Cell(NO, kind="none")
    return [
        Cell(str(len(group.runs))),
        _mean_cell(native),
        apart,
        *map(_mean_cell, others),
        *(change_cell(gain) if gain else Cell(NO, kind="none") for gain in gains),
    ]


def _mean_cell(found: Json | None) -> Cell:
    return Cell(rate(found["mean"]), span(found["ci"])) if found else Cell(NO, kind="none")
