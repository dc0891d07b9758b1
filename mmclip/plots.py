"""The trade-off picture: what a run gives up in one direction for the other."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

from mmclip.errors import one_line
from mmclip.pools import MAIN_POOL
from mmclip.results import NATIVE, Results

# Okabe and Ito's colours: told apart by colour-blind readers; markers tell runs apart where colours repeat.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">")


def plot_tradeoff(results_by_name: Mapping[str, Results], path: str | Path, pool: str = MAIN_POOL) -> Path:
    """Write a PNG: success@1 of t2i across, of i2t up; native filled with 95% intervals, cosine hollow.

    A line joins the two scorings of a run: its length is what the embeddings' lengths do. Returns ``path``.
    """
    # Imported here: a library user who never draws does not pay for it. Figure draws without a display or pyplot.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    path = Path(path)
    figure = Figure(figsize=(6.4, 5.6), dpi=130, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    handles = []
    for i, (name, results) in enumerate(results_by_name.items()):
        colour, marker = _COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]
        retrieval = results.pools[pool]["retrieval"]
        points = {}
        for scoring in ("cosine", NATIVE):
            at = [retrieval[d][scoring] for d in ("t2i", "i2t")]
            points[scoring] = [n["success@1"] for n in at]
            cis = [n["ci"]["success@1"] or [n["success@1"]] * 2 for n in at]
            # A percentile interval need not hold the mean; an error bar cannot be negative.
            bars = [[[max(v - lo, 0.0)], [max(hi - v, 0.0)]] for v, (lo, hi) in zip(points[scoring], cis, strict=True)]
            x, y = points[scoring]
            axes.errorbar(
                x,
                y,
                xerr=bars[0] if scoring == NATIVE else None,
                yerr=bars[1] if scoring == NATIVE else None,
                marker=marker,
                markersize=8,
                color=colour,
                markerfacecolor=colour if scoring == NATIVE else "white",
                elinewidth=1,
                capsize=2,
                linestyle="none",
                zorder=3,
            )
        axes.plot(*zip(points["cosine"], points[NATIVE], strict=True), color=colour, linewidth=1, zorder=2)
        # "$" would open mathematics, and a leading "_" would hide the run.
        label = one_line(name, 40).replace("$", r"\$")
        label = f" {label}" if label.startswith("_") else label
        handles.append(Line2D([], [], color=colour, marker=marker, linestyle="none", label=label))
    for label, face in (("native", "0.4"), ("cosine", "white")):
        handles.append(Line2D([], [], color="0.4", marker="o", linestyle="none", markerfacecolor=face, label=label))
    axes.set_xlabel("text → image, success@1")
    axes.set_ylabel("image → text, success@1")
    axes.set_title(f"Both directions, pool {one_line(pool, 40)}", loc="left", fontsize=11)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    partial = path.with_name(f".{path.name}.tmp")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a name in a script that the font lacks
        canvas.print_png(partial)
    os.replace(partial, path)
    return path
