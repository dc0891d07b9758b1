"""What sts.py shows on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from mmclip.errors import printable
from mmclip.reporting.table import NO, Cell, Table, change_cell, make_console, rate_cell, show

Json = dict[str, Any]


def print_sts(report: Json, console: Console | None = None) -> None:
    """The untrained model's scorings and, where any were trained, each norm's native scores over its seeds."""
    console = console or make_console()
    data, before = report["data"], report["untrained"]
    head = f"{printable(report['model'], 80)} on {data['n_pairs']} pairs of {printable(data['path'], 120)}"
    columns = ["scoring", "Spearman", "less\ncosine", "Pearson", "s(a,b) with\ns(b,a)", "Spearman\nexchanged"]
    rows = [
        (name, [rate_cell(found["spearman"], found["ci"]), _change(found["minus_cosine"]),
                *(rate_cell(found[k]) for k in ("pearson", "symmetry", "exchanged"))])
        for name, found in before["scorings"].items()
    ]  # fmt: skip
    norms = ", ".join(
        f"{side} {NO if s['mean'] is None else format(s['mean'], '.2f')} (CV {rate_cell(s['cv']).text})"
        for side, s in before["lengths"].items()
    )
    show([Table(head, columns, rows, [f"norms: {norms}"])], console)
    if "norms" not in report:
        return
    seeds = len(report["settings"]["seeds"])
    console.print(Text(f"trained on {report['train']['n_pairs']} pairs, {seeds} seed{'s' * (seeds > 1)}; "
                       f"label = {report['train']['label']}"))  # fmt: skip
    columns = ["norm", "native\nSpearman", "less\ncosine's", "less\ndot's", "less\nuntrained", "by its\ncosine",
               "scale at\nstart, end"]  # fmt: skip
    rows = []
    for norm, found in report["norms"].items():
        native = found["native"]
        scales = [run["effective_scale"] for run in report["runs"] if run["norm"] == norm]
        ends = [sum(s[when] for s in scales) / len(scales) for when in ("start", "end")]
        less = [_change(native["minus"].get(k)) for k in ("native of cosine", "native of dot", "untrained")]
        cells = [rate_cell(native["spearman"], native["ci"]), *less, rate_cell(found["cosine"]["spearman"])]
        rows.append((norm, [*cells, Cell(f"{ends[0]:.3g}, {ends[1]:.3g}")]))
    show([Table("trained heads", columns, rows)], console)


def _change(found: Json | None) -> Cell:
    """{"delta", "ci"}: within noise where the interval holds 0."""
    if found is None or found["ci"] is None:
        return change_cell(found and {**found, "within_noise": True})
    return change_cell({**found, "within_noise": found["ci"][0] <= 0 <= found["ci"][1]})
