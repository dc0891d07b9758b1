"""A study's pictures: the frontier, scorings as a heat map, γ over steps, data fractions. Rows in, figures out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmclip.reporting.plots import DPI
from mmclip.reporting.tradeoff import MARKERS, RUN_COLOURS, Theme, legend_label, new_figure

Array = NDArray[Any]
Json = dict[str, Any]
WIDTH = 5.0  # inches; half of it is shown on a telephone
NORM_MARKERS = {"qnorm": "o", "cosine": "s", "dot": "^", "dnorm": "v", "learned": "D"}
SPAN = {"light": (0.0, 0.88), "dark": (0.2, 1.0)}  # of viridis: what can be seen on the paper
LABEL_ROW = 0.17  # inches of a row of the legend
LONG_LABEL = 32  # characters beyond which the legend has one column


BAR_ENDS = ((-1, 0), (1, 0), (0, -1), (0, 1))  # of an error bar, in standard deviations
FILLS = (("native", "full"), ("corrected", "left"))


class Point(NamedTuple):
    """Where an arm stands: (t2i, i2t) natively and corrected, None where it has none; sd (t2i, i2t) over seeds of the
    native one; ``kept``: it is the sym/cosine that others are measured by."""

    number: int
    name: str
    norm: str
    i2t_weight: float
    native: tuple[float, float]
    sd: tuple[float, float] | None
    corrected: tuple[float, float] | None
    kept: bool


def colours(theme: Theme) -> Any:
    """viridis, perceptually uniform, less the end that is lost on the theme's paper."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["viridis"](np.linspace(*SPAN[theme.name], 256)))


def frontier_figure(theme: Theme, points: Sequence[Point], share: float) -> Any:
    """success@1 of t2i across, of i2t up; λ of qnorm arms as colour. Numbers stand beside native points."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.lines import Line2D

    names = [f"{p.number}  {legend_label(p.name)}" for p in points]
    columns = 1 if max(map(len, names)) > LONG_LABEL else 2
    rows = -(-(len(points) + 2) // columns)
    figure, axes = new_figure(theme, WIDTH, 4.2 + LABEL_ROW * rows, DPI)
    scale = colours(theme)
    handles = []
    for p, name in zip(points, names, strict=True):
        colour = scale(p.i2t_weight) if p.norm == "qnorm" else theme.ink if p.kept else theme.soft
        style: Json = {"color": colour, "marker": "*" if p.kept else NORM_MARKERS[p.norm], "linestyle": "none"}
        style["markersize"] = 11 if p.kept else 6.5
        x, y = p.native
        xerr, yerr = p.sd or (None, None)
        axes.errorbar(x, y, xerr=xerr, yerr=yerr, elinewidth=0.8, capsize=1.5, zorder=6 if p.kept else 4, **style)
        if p.corrected is not None:
            axes.plot(*zip(p.native, p.corrected, strict=True), color=colour, linewidth=0.9, linestyle=":", zorder=2)
            axes.plot(*p.corrected, fillstyle="left", markerfacecoloralt=theme.paper, zorder=3, **style)
        if p.kept:
            for line, at in ((axes.axvline, x), (axes.axhline, y)):
                line(share * at, color=theme.soft, linewidth=0.9, linestyle="--", zorder=1)
        handles.append(Line2D([], [], label=name, **style))
    kinds: Json = {"color": theme.soft, "marker": "o", "linestyle": "none", "markerfacecoloralt": theme.paper}
    handles += [Line2D([], [], label=label, **kinds | {"fillstyle": fill}) for label, fill in FILLS]
    axes.set_xlabel("text → image, success@1")
    axes.set_ylabel("image → text, success@1")
    axes.margins(0.09)
    if any(p.norm == "qnorm" for p in points):
        bar = figure.colorbar(ScalarMappable(cmap=scale), ax=axes, fraction=0.04, pad=0.02)
        bar.set_label("λ of qnorm: 0 trains t2i only, 1 i2t only", color=theme.ink, fontsize=9)
        bar.ax.tick_params(colors=theme.ink, labelsize=8)
        bar.outline.set_visible(False)
    _legend(figure, theme, handles, columns)
    _number_points(figure, axes, theme, points)
    return figure


def _number_points(figure: Any, axes: Any, theme: Theme, points: Sequence[Point]) -> None:
    """A number beside each native point, where it covers no point and no other number."""
    figure.draw_without_rendering()  # places the axes
    to_points = 72 / figure.dpi
    every = [p.native for p in points] + [p.corrected for p in points if p.corrected]
    at = axes.transData.transform(np.array(every)) * to_points
    bars = [(p.native[0] + a * p.sd[0], p.native[1] + b * p.sd[1]) for p in points if p.sd for a, b in BAR_ENDS]
    ends = axes.transData.transform(np.array(bars).reshape(-1, 2)) * to_points
    crosses = [_box(ends[i], ends[i + 1]) for i in range(0, len(ends), 2)]
    offsets = label_offsets(at, [str(p.number) for p in points], crosses)
    for p, (dx, dy) in zip(points, offsets, strict=True):
        far = math.hypot(dx, dy) > 13
        axes.annotate(
            str(p.number),
            p.native,
            (dx, dy),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=7.5,
            color=theme.ink,
            zorder=5,
            arrowprops={"arrowstyle": "-", "color": theme.soft, "linewidth": 0.5} if far else None,
        ).set_in_layout(False)


def _box(a: Array, b: Array) -> tuple[float, float, float, float]:
    """Centre, half width and half height of the box with the corners a and b."""
    (x, y), (w, h) = (a + b) / 2, np.abs(b - a) / 2
    return float(x), float(y), float(w), float(h)


def label_offsets(
    at: Array, labels: Sequence[str], taken: Sequence[tuple[float, float, float, float]] = ()
) -> list[tuple[float, float]]:
    """Where labels of the first points of at [P, 2] stand beside them, in points of a print (1/72 inch).

    Each takes the nearest place where its box meets no point, no earlier label and nothing that is ``taken`` (boxes:
    centre, half width and height); where there is none, the place that meets least.

    >>> [(x, y)] = label_offsets(np.array([[0.0, 0.0], [9.0, 0.0]]), ["1"])  # the right is taken: above it
    >>> round(x, 1), round(y, 1)
    (3.4, 8.3)
    """
    boxes = [*((x, y, 4.0, 4.0) for x, y in at), *taken]
    found = []
    for (x, y), label in zip(at, labels, strict=False):
        half = 2.4 * len(label) + 0.6
        best = (math.inf, 0.0, 0.0)
        for radius in (9, 12, 16, 21, 27, 34, 42):
            for turn in range(16):
                angle = turn * math.pi / 8
                dx, dy = round(radius * math.cos(angle), 6), round(radius * math.sin(angle), 6)
                hits = sum(abs(x + dx - bx) < half + bw and abs(y + dy - by) < 4 + bh for bx, by, bw, bh in boxes)
                best = min(best, (hits, dx, dy), key=lambda b: b[0])
            if best[0] == 0:
                break
        boxes.append((x + best[1], y + best[2], half, 4))
        found.append(best[1:])
    return found


def heat_figure(theme: Theme, names: Sequence[str], scorings: Sequence[str], values: Array, top: float) -> Any:
    """success@1 of arms, down, by scorings, across: values [A, S], NaN where there is none; ``top``: of the
    colours."""
    labels = [legend_label(name) for name in names]
    figure, axes = new_figure(theme, 4.3 + 0.062 * max(map(len, labels)), 0.7 + 0.235 * len(names), DPI)
    axes.grid(False)
    scale = colours(theme)
    axes.imshow(values, cmap=scale, vmin=0, vmax=top, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        known = bool(np.isfinite(value))
        r, g, b = scale(value / top)[:3] if known else (0.0, 0.0, 0.0)
        bright = 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.45
        colour = theme.soft if not known else "#000000" if bright else "#ffffff"
        text = f"{value:.3f}".removeprefix("0") if known else "–"
        axes.text(j, i, text, ha="center", va="center", fontsize=7.5, color=colour)
    axes.set_xticks(range(len(scorings)), scorings)
    axes.set_yticks(range(len(names)), labels)
    axes.tick_params(length=0, labelsize=8, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    return figure


def fractions_figure(theme: Theme, rows: Sequence[Json]) -> Any:
    """success@1 over the share of the training data, a curve a setting and scoring; bars are one sd over seeds."""
    curves: dict[tuple[str, str], list[Json]] = {}
    for row in rows:
        if row["success@1_mean"] is not None:
            curves.setdefault((row["setting"], row["scoring"]), []).append(row)
    settings = list(dict.fromkeys(name for name, _ in curves))
    figure, axes = new_figure(theme, WIDTH, 3.2 + LABEL_ROW * len(curves), DPI)
    for (name, scoring), members in curves.items():
        i = settings.index(name)
        native = scoring == "native"
        axes.errorbar(
            [row["train_fraction"] for row in members],
            [row["success@1_mean"] for row in members],
            yerr=[row["success@1_sd"] or 0.0 for row in members],
            color=theme.runs[i % RUN_COLOURS],
            marker=MARKERS[i % len(MARKERS)],
            fillstyle="full" if native else "left",
            markerfacecoloralt=theme.paper,
            linestyle="-" if native else ":",
            markersize=5,
            linewidth=1.3,
            elinewidth=0.8,
            capsize=2,
            label=f"{legend_label(name)}, {scoring}",
        )
    axes.set_xscale("log")
    ticks = sorted({row["train_fraction"] for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("share of the training pictures")
    axes.set_ylabel("success@1")
    _legend(figure, theme, axes.get_legend_handles_labels()[0], 1)
    return figure


def _legend(figure: Any, theme: Theme, handles: Sequence[Any], columns: int) -> None:
    close: Json = {"handletextpad": 0.3, "labelspacing": 0.25, "columnspacing": 1.0}
    style: Json = {"frameon": False, "fontsize": 8, "labelcolor": theme.ink}
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, **style, **close)
