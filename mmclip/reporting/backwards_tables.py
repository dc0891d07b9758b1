"""Tables of the direction that was not trained: native, reversed and corrected, run by run and over seeds."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group
from rich.text import Text

from mmclip.evaluation.comparison import scoring_gain
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import CORRECTED, NATIVE, REVERSED, Results
from mmclip.evaluation.seeds import group_by_seed
from mmclip.reporting.formats import delta, rate
from mmclip.reporting.table_parts import column, name_cell, new_table, row, titled
from mmclip.similarity import CLIP_DIRECTIONS

BACKWARDS = (NATIVE, REVERSED, CORRECTED)


def backwards_table(runs: Mapping[str, Results], pool: str = MAIN_POOL) -> Group | None:
    """success@1 of the directions whose opposite was trained: native, reversed, corrected, and what the correction
    gains over reversed, paired. None where no run has a correction."""
    rows: list[list[Text | str]] = []
    for name, run in runs.items():
        for direction in CLIP_DIRECTIONS:
            numbers = run.pools[pool]["retrieval"][direction.value]
            if CORRECTED not in numbers:
                continue
            gain = scoring_gain(run, pool, direction.value, REVERSED, CORRECTED)
            shown = [rate(numbers[s]["success@1"], numbers[s]["ci"]["success@1"]) for s in BACKWARDS]
            rows.append([name_cell(name), direction.value, *shown, delta(gain)])
    if not rows:
        return None
    table = new_table("run")
    for top, bottom in (("", "direction"), ("", "native"), ("trained scores", "reversed"), ("", "corrected"),
                        ("corrected", "- reversed")):  # fmt: skip
        column(table, top, bottom)
    for cells in rows:
        row(table, cells)
    return titled("the trained direction read backwards, success@1", next(iter(runs.values())), pool, table)


def seeds_table(runs: Mapping[str, Results], pool: str = MAIN_POOL) -> Group | None:
    """success@1 of runs that differ in their seed only: the mean of the seeds with its interval over queries, how far
    the seeds are apart, and paired differences. None where there are no such runs."""
    groups = group_by_seed(runs)
    if not groups:
        return None
    table = new_table("mean of seeds")
    for top, bottom in (("", "direction"), ("", "seeds"), ("", "native"), ("lowest", "highest"),
                        ("trained scores", "reversed"), ("", "corrected"), ("corrected", "- reversed"),
                        ("native", "- the first's"), ("corrected", "- the first's native")):  # fmt: skip
        column(table, top, bottom)
    for group in groups:
        for direction in CLIP_DIRECTIONS:
            (native, *others), gains = group.row(pool, direction.value, groups[0])
            assert native is not None
            row(
                table,
                [
                    name_cell(group.name),
                    direction.value,
                    str(len(group.runs)),
                    rate(native["mean"], native["ci"]),
                    f"{rate(native['low'])}-{rate(native['high'])}",
                    *(rate(n["mean"], n["ci"]) if n else "" for n in others),
                    *(delta(g) if g else "" for g in gains),
                ],
            )
    return titled("success@1 over seeds", groups[0].runs[0], pool, table)
