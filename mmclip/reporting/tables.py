"""Names that a few callers still use; see :mod:`mmclip.reporting.run_tables`."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from mmclip.evaluation.results import Results
from mmclip.reporting.run_tables import comparison_tables, run_tables
from mmclip.reporting.table import show


def print_run(results: Results, name: str | None = None, console: Console | None = None, groups: bool = False) -> None:
    show(run_tables({name or str(results.json.get("model")): results}, groups), console)


def print_comparison(runs: Mapping[str, Results]) -> None:
    show(comparison_tables(runs))
