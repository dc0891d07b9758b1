"""The report's pictures: lengths by relevance, cosine against length, training curves. Arrays in, figures out.

Each is small, so that several stand side by side on a wide page and under one another on a telephone, and is drawn
for a light and for a dark page. Files are written beside the page, and the page holds the same bytes.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmclip.io import write_atomically
from mmclip.reporting.tradeoff import DARK, LIGHT, MARKERS, RUN_COLOURS, Theme, legend_label, new_figure, write_png

Array = NDArray[Any]
WIDTH, HEIGHT, DPI = 3.4, 2.6, 190  # inches, pixels an inch: sharp where a pixel of the page is two of the screen
LEGEND_ROW, FREE_ROWS = 0.18, 2  # inches that a row of the legend adds to a figure, after the first ones
BINS = 36
FEW_POINTS = 8  # of a curve: all are marked
MARKS = 6  # of a longer curve
GOLDEN = 0.618  # its multiples, less their whole parts, spread evenly however many there are
MAX_POINTS = 1500  # of a kind in a scatter; more hide each other
COLOURS = 96  # of a picture's palette: a third of the bytes, and nothing that an eye could tell


@dataclass(frozen=True)
class Picture:
    """A picture of the page: alt says what it shows, caption stands beneath; data URIs for light and dark."""

    alt: str
    caption: str
    light: str
    dark: str
    width: int
    height: int


class Series(NamedTuple):
    """A curve: ``run`` is its run's number (its colour), ``dashed`` tells two curves of one run apart."""

    label: str
    run: int
    dashed: bool
    steps: Sequence[float]
    values: Sequence[float]


def write_picture(
    folder: Path, name: str, alt: str, caption: str, draw: Callable[[Theme], Any], *, palette: bool = True
) -> Picture:
    """``draw`` a figure for both kinds of page into folder/NAME-light.png and -dark.png; palette: as of
    :func:`small_png`."""
    files = [write_png(draw(theme), folder / f"{name}-{theme.name}.png") for theme in (LIGHT, DARK)]
    return picture_of(files, alt, caption, palette=palette)


def picture_of(files: Sequence[Path], alt: str, caption: str, *, palette: bool = True) -> Picture:
    """The PNGs for light and for dark, made smaller where they are, as a picture of the page."""
    uris, size = [], (0, 0)
    for path in files:
        content, size = small_png(path, palette)
        write_atomically(path, partial(_write, content=content))
        uris.append(data_uri(content, "png"))
    return Picture(alt, caption, uris[0], uris[1], *size)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def data_uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


def small_png(path: Path, palette: bool = True) -> tuple[bytes, tuple[int, int]]:
    """(a PNG with a palette, (width, height) in the page's pixels) of a PNG; without ``palette`` every colour is kept,
    which a colour map needs."""
    small = io.BytesIO()
    with Image.open(path) as image:
        found = image.convert("RGB")
        found = found.quantize(COLOURS, dither=Image.Dither.NONE) if palette else found
        found.save(small, "PNG", optimize=True)
        return small.getvalue(), (image.width // 2, image.height // 2)


def lengths_figure(theme: Theme, relevant: Array, irrelevant: Array, side: str) -> Any:
    """Two histograms of lengths, each of area 1: relevant [n] and irrelevant [m] documents, any may be empty."""
    figure, axes = _axes(theme, f"length of the {side} embedding", "density")
    both = np.concatenate([relevant, irrelevant])
    if len(both):
        lo, hi = np.quantile(both, [0.002, 0.998])
        edges = np.linspace(lo, hi if hi > lo else lo + max(abs(lo), 1.0) * 1e-3, BINS + 1)
        for x, colour, label, z in (
            (irrelevant, theme.irrelevant, "irrelevant", 2),
            (relevant, theme.relevant, "relevant", 3),
        ):
            if not len(x):
                continue
            heights = np.histogram(np.clip(x, edges[0], edges[-1]), edges)[0] / (len(x) * np.diff(edges))
            axes.stairs(heights, edges, fill=True, color=colour, alpha=0.35, zorder=z)
            axes.stairs(heights, edges, color=colour, linewidth=1.6, label=label, zorder=z)
    return _with_legend(figure, axes, theme)


def scatter_figure(theme: Theme, lengths: Array, cosines: Array, relevant: Array, side: str) -> Any:
    """Cosine with the query against the document's length; lengths, cosines, relevant bool, all [Q, k]."""
    figure, axes = _axes(theme, f"length of the {side} embedding", "cosine with the query")
    rng = np.random.default_rng(0)
    for keep, colour, label, alpha, marker in (
        (~relevant, theme.irrelevant, "irrelevant", 0.5, "o"),
        (relevant, theme.relevant, "relevant", 0.65, "D"),
    ):
        x, y = lengths[keep], cosines[keep]
        if not len(x):
            continue
        at = rng.choice(len(x), min(len(x), MAX_POINTS), replace=False)
        axes.scatter(x[at], y[at], s=7, color=colour, alpha=alpha, linewidths=0, label=label, marker=marker)
    return _with_legend(figure, axes, theme)


def curves_figure(theme: Theme, series: Sequence[Series], ylabel: str, log: bool = False) -> Any:
    """Curves over training steps; "" is no entry of the legend. Every point is marked where there are few of them, and
    a few points of a long curve where runs must be told apart."""
    from matplotlib.ticker import LogLocator

    figure, axes = _axes(theme, "step", ylabel, height(sum(bool(one.label) for one in series)))
    several = len({one.run for one in series}) > 1
    for one in series:
        few = len(one.steps) <= FEW_POINTS
        apart = max(len(one.steps) // MARKS, 1)
        axes.plot(
            one.steps,
            one.values,
            color=theme.runs[one.run % RUN_COLOURS],
            linestyle="--" if one.dashed else "-",
            linewidth=1.5,
            marker=MARKERS[one.run % len(MARKERS)] if few or several else None,
            # each run begins elsewhere, so that marks of curves that lie together do not hide each other
            markevery=1 if few else (int(one.run * GOLDEN % 1 * apart), apart),
            markersize=4,
            label=legend_label(one.label) if one.label else None,
        )
    if log:
        axes.set_yscale("log", subs=[])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.02)
    return _with_legend(figure, axes, theme)


def height(entries: int, least: float = HEIGHT) -> float:
    """Inches of a figure with a legend of so many entries in two columns: many runs leave the curves their room.

    >>> height(4) == HEIGHT, round(height(12) - HEIGHT, 2)
    (True, 0.72)
    """
    return least + LEGEND_ROW * max(-(-entries // 2) - FREE_ROWS, 0)


def _axes(theme: Theme, xlabel: str, ylabel: str, inches: float = HEIGHT) -> tuple[Any, Any]:
    figure, axes = new_figure(theme, WIDTH, inches, DPI)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return figure, axes


def _with_legend(figure: Any, axes: Any, theme: Theme) -> Any:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        legend = figure.legend(
            handles,
            labels,
            loc="outside upper left",
            ncols=2,
            frameon=False,
            fontsize=8.5,
            labelcolor=theme.ink,
            handlelength=1.6,
        )
        for handle in legend.legend_handles:
            handle.set_alpha(1)
    return figure
