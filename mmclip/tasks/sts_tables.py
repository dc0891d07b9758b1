"""What sts.py shows on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from mmclip.errors import printable
from mmclip.reporting.table_parts import column, make_console, new_table, row

Json = dict[str, Any]


def print_sts(report: Json, console: Console | None = None) -> None:
    """The untrained model's scorings and, where any were trained, each norm's native scores over its seeds."""
    console = console or make_console()
    data, before = report["data"], report["untrained"]
    console.print(
        Text(f"{printable(report['model'], 80)} on {data['n_pairs']} pairs of {printable(data['path'], 120)}")
    )
    table = new_table("scoring")
    for top, bottom in (("Spearman", "[95 %]"), ("less", "cosine"), ("", "Pearson"), ("s(a,b) with", "s(b,a)"),
                        ("Spearman", "exchanged")):  # fmt: skip
        column(table, top, bottom)
    for name, found in before["scorings"].items():
        row(table, [name, _with_interval(found["spearman"], found["ci"]), _difference(found["minus_cosine"]),
                    *(_number(found[k]) for k in ("pearson", "symmetry", "exchanged"))])  # fmt: skip
    console.print(table)
    lengths = before["lengths"]
    told = ", ".join(f"{side} {_number(s['mean'], 2)} (CV {_number(s['cv'])})" for side, s in lengths.items())
    console.print(Text(f"lengths: {told}\n"))
    if "norms" not in report:
        return
    seeds = len(report["settings"]["seeds"])
    console.print(Text(f"trained on {report['train']['n_pairs']} pairs, {seeds} seed{'s' * (seeds > 1)}; "
                       f"label = {report['train']['label']}"))  # fmt: skip
    table = new_table("norm")
    for top, bottom in (("native", "Spearman"), ("less", "cosine's"), ("less", "dot's"), ("less", "untrained"),
                        ("by its", "cosine"), ("scale at", "start, end")):  # fmt: skip
        column(table, top, bottom)
    for norm, found in report["norms"].items():
        native = found["native"]
        scales = [run["effective_scale"] for run in report["runs"] if run["norm"] == norm]
        ends = [sum(s[when] for s in scales) / len(scales) for when in ("start", "end")]
        row(table, [norm, _with_interval(native["spearman"], native["ci"]),
                    *(_difference(native["minus"].get(k)) for k in ("native of cosine", "native of dot", "untrained")),
                    _number(found["cosine"]["spearman"]),
                    f"{ends[0]:.3g}, {ends[1]:.3g}"])  # fmt: skip
    console.print(table)


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _with_interval(value: float | None, ci: list[float] | None) -> str:
    return _number(value) if ci is None else f"{_number(value)} [{ci[0]:.3f}, {ci[1]:.3f}]"


def _difference(found: Json | None) -> str:
    if found is None:
        return "–"
    interval = "" if found["ci"] is None else f" [{found['ci'][0]:+.3f}, {found['ci'][1]:+.3f}]"
    return f"{found['delta']:+.3f}{interval}"
