"""Pictures as PNG: the trade-off of compared runs, and what every picture has in common, for light and dark pages."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mmclip.errors import printable
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import CORRECTED, NATIVE, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">")


class Theme(NamedTuple):
    """Colours of a picture and, ``runs``, of the page around it. The first seven runs have Okabe and Ito's, told apart
    by colour-blind readers; no twelve are, so markers tell runs apart as well. relevant and irrelevant differ in
    lightness, too."""

    name: str
    paper: str
    ink: str
    soft: str  # axes and grid
    relevant: str
    irrelevant: str
    runs: tuple[str, ...]


LIGHT = Theme(
    "light",
    "#ffffff",
    "#1c2024",
    "#8b929a",
    "#0072B2",
    "#9aa1a9",
    (
        *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"),
        *("#7A1F00", "#5A1EA5", "#7D8400", "#C4004E", "#5D656E"),
    ),
)
DARK = Theme(
    "dark",
    "#171a1f",
    "#e6e8eb",
    "#79818b",
    "#56B4E9",
    "#767e88",
    (
        *("#56B4E9", "#E8703A", "#2BBE94", "#DE9AC0", "#F0E442", "#E69F00", "#ffffff"),
        *("#8F5CFF", "#D2203F", "#7D9422", "#8B929A", "#E33FC0"),
    ),
)
RUN_COLOURS = len(LIGHT.runs)  # runs before a colour comes again; with 9 markers a pair of both comes again after 36


def new_figure(theme: Theme, width: float, height: float, dpi: int = 130) -> tuple[Figure, Axes]:
    """A figure of inches with one plot area in it, in a theme's colours, without a display or pyplot."""
    # Imported here: a library user who never draws does not pay for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained", facecolor=theme.paper)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor=theme.paper)
    axes.grid(alpha=0.25, color=theme.soft, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.soft)
    axes.tick_params(colors=theme.ink, color=theme.soft, labelsize=9)
    for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
        label.set_color(theme.ink)
        label.set_fontsize(10)
    return figure, axes


def write_png(figure: Any, path: Path) -> Path:
    """Write a figure as PNG, whole or not at all; returns ``path``."""
    partial = path.with_name(f".{path.name}.tmp")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a name in a script that the font lacks
        figure.canvas.print_png(partial)
    os.replace(partial, path)
    return path


def legend_label(name: str) -> str:
    """A run's name as matplotlib shows it: "$" would open mathematics, and a leading "_" would hide the run.

    >>> legend_label("_$x$")
    ' _\\\\$x\\\\$'
    """
    label = printable(name, 40).replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


def plot_tradeoff(
    results_by_name: Mapping[str, Results],
    path: str | Path,
    pool: str = MAIN_POOL,
    theme: Theme = LIGHT,
    size: tuple[float, float] = (6.4, 5.6),
) -> Path:
    """Write a PNG: success@1 of t2i across, of i2t up; native filled with 95% intervals, cosine hollow.

    A line joins the two scorings of a run: its length is what the embeddings' lengths do. A run with corrected scores
    has a third point, half filled: corrected in the directions that have it, native in the others. size: inches.
    Returns ``path``.
    """
    from matplotlib.lines import Line2D

    figure, axes = new_figure(theme, *size)
    handles = []
    corrected = False
    for i, (name, results) in enumerate(results_by_name.items()):
        colour, marker = theme.runs[i % RUN_COLOURS], MARKERS[i % len(MARKERS)]
        points = {s: _point(results, s, pool) for s in ("cosine", NATIVE, CORRECTED)}
        for scoring, numbers in points.items():
            if numbers is None:
                continue
            corrected |= scoring == CORRECTED
            x, y = (n["success@1"] for n in numbers)
            cis = [n["ci"]["success@1"] or [n["success@1"]] * 2 for n in numbers]
            # A percentile interval need not hold the mean; an error bar cannot be negative.
            bars = [[[max(v - lo, 0.0)], [max(hi - v, 0.0)]] for v, (lo, hi) in zip((x, y), cis, strict=True)]
            axes.errorbar(
                x,
                y,
                xerr=bars[0] if scoring == NATIVE else None,
                yerr=bars[1] if scoring == NATIVE else None,
                marker=marker,
                markersize=8,
                color=colour,
                markerfacecolor=theme.paper if scoring == "cosine" else colour,
                markerfacecoloralt=theme.paper,
                fillstyle="left" if scoring == CORRECTED else "full",
                elinewidth=1,
                capsize=2,
                linestyle="none",
                zorder=3,
            )
        for scoring, style in (("cosine", "-"), (CORRECTED, ":")):
            ends = [points[s] for s in (scoring, NATIVE)]
            if None not in ends:
                across = zip(*((n["success@1"] for n in at) for at in ends if at is not None), strict=True)
                axes.plot(*across, color=colour, linewidth=1, linestyle=style, zorder=2)
        handles.append(Line2D([], [], color=colour, marker=marker, linestyle="none", label=legend_label(name)))
    kinds = [(NATIVE, "full", theme.soft), ("cosine", "full", theme.paper)]
    for label, fill, face in [*kinds, (CORRECTED, "left", theme.soft)] if corrected else kinds:
        face_colours = {"markerfacecolor": face, "markerfacecoloralt": theme.paper, "color": theme.soft}
        handles.append(Line2D([], [], marker="o", linestyle="none", label=label, fillstyle=fill, **face_colours))  # type: ignore[arg-type]
    axes.set_xlabel("text → image, success@1")
    axes.set_ylabel("image → text, success@1")
    axes.set_title(f"Both directions, pool {printable(pool, 40)}", loc="left", fontsize=11, color=theme.ink)
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9, labelcolor=theme.ink)
    return write_png(figure, Path(path))


def _point(results: Results, scoring: str, pool: str) -> list[dict[str, Any]] | None:
    """The numbers (t2i, i2t) of a point; where corrected exists in one direction, it stands beside the other's native.
    None where the run has none of it."""
    retrieval = results.pools[pool]["retrieval"]
    if all(scoring not in retrieval[d] for d in ("t2i", "i2t")):
        return None
    return [retrieval[d].get(scoring, retrieval[d][NATIVE]) for d in ("t2i", "i2t")]
