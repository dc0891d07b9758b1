"""Every picture: trade-offs, norms by relevance, training curves, and those of a study.

A picture is one SVG for light and dark: it is drawn in light colours, and a style sheet exchanges them for dark ones
where the reader prefers those. Colours mean runs (or arms), and nothing else.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from mmclip.errors import UserError, printable
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import CORRECTED, NATIVE, Results
from mmclip.io import write_atomically, write_text_atomically
from mmclip.models.metadata import trained_directions
from mmclip.reporting.table import is_number, rate
from mmclip.similarity import CLIP_DIRECTIONS, Direction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mmclip.reporting.page import ReportRun

Array = NDArray[Any]
Json = dict[str, Any]
INK, SOFT, PAPER, GREY = "#1c2024", "#8b929a", "#ffffff", "#9aa1a9"
# The first seven are Okabe and Ito's, told apart by colour-blind readers; no twelve are, so markers differ as well.
RUNS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#050505", "#7a1f00", "#5a1ea5", "#7d8400",
        "#c4004e", "#5d656e")  # fmt: skip
ON_LIGHT, ON_DARK = "#010101", "#fdfdfd"  # text on colours that are the same on light and dark paper
DARK = {
    **{INK: "#e6e8eb", SOFT: "#79818b", PAPER: "#171a1f", GREY: "#767e88"},
    **dict(zip(RUNS, ("#56b4e9", "#e8703a", "#2bbe94", "#de9ac0", "#f0e442", "#e69f00", "#fefefe", "#8f5cff",
                      "#d2203f", "#7d9422", "#8b929a", "#e33fc0"), strict=True)),
}  # fmt: skip
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">")
NORM_MARKERS = {"qnorm": "o", "cosine": "s", "dot": "^", "dnorm": "v", "learned": "D"}
LABELS = {"i2t": "image → text, R@1", "t2i": "text → image, R@1"}
WIDTH, HEIGHT = 3.4, 2.6  # inches of a small picture: several stand side by side
BINS = 36
FEW_POINTS = 8  # of a curve whose points are marked
MAX_POINTS = 300  # of a kind in a scatter
LEAST_SPAN = 0.1  # of a curve's value: an axis around a constant shows a constant
SHOWN_ARMS = 8  # arms with a name in a frontier; the others are dots


# --- one picture ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """An SVG element to stand in a page, and the sentence under it."""

    svg: Markup
    caption: str

    def to_html(self) -> Markup:
        return Markup("<figure>{}<figcaption>{}</figcaption></figure>").format(self.svg, self.caption)


def style_sheet() -> Markup:
    """CSS of pictures: font, dark colours in the place of light ones; .r0, .r1, …: runs' colours."""
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    runs = ("".join(f".r{i}{{color:{colour}}}" for i, colour in enumerate(of)) for of in (RUNS, map(DARK.get, RUNS)))
    font = ".plot text{font-family:system-ui,sans-serif}"
    light, dark = runs
    return Markup(f"{font}.plot *{{stroke-linejoin:round}}{light}@media(prefers-color-scheme:dark){{{rules}{dark}}}")


def new_figure(width: float, height: float, xlabel: str = "", ylabel: str = "") -> tuple[Figure, Axes]:
    """Figure of so many inches with one plot area, without a display or pyplot."""
    from matplotlib.figure import Figure  # here: a user who never draws does not wait for it

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.grid(alpha=0.25, color=SOFT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(colors=INK, color=SOFT, labelsize=9)
    axes.set_xlabel(xlabel, color=INK, fontsize=10)
    axes.set_ylabel(ylabel, color=INK, fontsize=10)
    return figure, axes


def write_picture(figure: Figure, folder: Path, name: str, alt: str, caption: str) -> Picture:
    """Write ``folder``/NAME.svg and return it as an element of a page; ``alt``: what it shows."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        _save(figure, text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text.getvalue(), flags=re.DOTALL)
    used = set(re.findall(r'="(?:url\()?#([^")]+)', svg))

    def shorter(tag: re.Match[str]) -> str:
        plain = re.sub(r' id="([^"]*)"', lambda i: i[0] if i[1] in used else "", tag[0])
        return re.sub(r"font-family: [^;\"]*;? ?|(?<=\.\d\d)\d+", "", plain)

    svg = re.sub(r"<[^>]+>", shorter, svg[svg.index("<svg") :]).replace(" xlink:href=", " href=")
    (box,) = re.findall(r'viewBox="[^"]*"', svg)[:1]
    head = Markup('<svg class="plot" role="img" aria-label="{}" ').format(alt) + Markup(box)
    body = svg[svg.index(">") + 1 :]
    style = f":root{{color-scheme:light dark;background:{PAPER}}}{style_sheet()}"
    style += f"@media(prefers-color-scheme:dark){{:root{{background:{DARK[PAPER]}}}}}"
    alone = f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{body}'
    write_text_atomically(folder / f"{name}.svg", alone)
    return Picture(head + Markup(">" + body), caption)


def write_png(figure: Figure, path: str | Path) -> Path:
    """Write a figure in light colours as PNG, whole or not at all; returns ``path``."""
    write_atomically(Path(path), lambda partial: _save(figure, partial, format="png", dpi=190, facecolor=PAPER))
    return Path(path)


def _save(figure: Figure, to: Any, **how: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a name in a script that the font lacks
        figure.savefig(to, **how)


def legend_label(name: str) -> str:
    """A run's name for matplotlib: "$" would open mathematics, a leading "_" would hide the run.

    >>> legend_label("_$x$")
    ' _\\\\$x\\\\$'
    """
    label = printable(name, 40).replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


def run_style(number: int) -> Json:
    """Colour and marker of a run, or of an arm."""
    return {"color": RUNS[number % len(RUNS)], "marker": MARKERS[number % len(MARKERS)]}


def _legend(figure: Figure, handles: Sequence[Any], columns: int = 2) -> None:
    if handles:
        close: Json = {"handletextpad": 0.3, "labelspacing": 0.25, "columnspacing": 1.0, "handlelength": 1.6}
        style: Json = {"frameon": False, "fontsize": 8.5, "labelcolor": INK}
        figure.legend(handles=handles, loc="outside lower left", ncols=columns, **close, **style)


# --- pictures of runs -------------------------------------------------------------------------------------------------


def tradeoff_figure(results_by_name: Mapping[str, Results], pool: str = MAIN_POOL) -> Figure:
    """R@1 (success@1) of t2i across, of i2t up; native filled with 95% intervals, cosine hollow.

    A line joins the two scorings of a run: it is what the embeddings' norms do. A run with corrected scores has a third
    point, half filled: corrected in the directions that have it, native in the others.
    """
    from matplotlib.lines import Line2D

    figure, axes = new_figure(3.8, 3.2 + 0.18 * ((len(results_by_name) + 4) // 2), LABELS["t2i"], LABELS["i2t"])
    handles, shown = [], set()
    for i, (name, results) in enumerate(results_by_name.items()):
        style = run_style(i) | {"linestyle": "none"}
        points = {scoring: _point(results, scoring, pool) for scoring in ("cosine", NATIVE, CORRECTED)}
        for scoring, numbers in points.items():
            if numbers is None:
                continue
            shown.add(scoring)
            at = [n["success@1"] for n in numbers]
            bars: Json = {}
            if scoring == NATIVE:  # a percentile interval need not hold the mean; an error bar cannot be negative
                cis = [n["ci"]["success@1"] or [v, v] for n, v in zip(numbers, at, strict=True)]
                ends = [[[max(v - lo, 0.0)], [max(hi - v, 0.0)]] for v, (lo, hi) in zip(at, cis, strict=True)]
                bars = dict(zip(("xerr", "yerr"), ends, strict=True))
            how: Json = {"elinewidth": 1, "capsize": 2, "markersize": 7, "zorder": 3}
            axes.errorbar(at[0], at[1], **how, **bars, **style, **_FILLS[scoring])
            if scoring != NATIVE and (native := points[NATIVE]) is not None:
                across = [[v, n["success@1"]] for v, n in zip(at, native, strict=True)]
                axes.plot(*across, color=style["color"], linewidth=1, linestyle=_LINES[scoring], zorder=2)
        handles.append(Line2D([], [], label=legend_label(name), **style))
    kinds = [s for s in _FILLS if s in shown]
    handles += [Line2D([], [], marker="o", color=SOFT, linestyle="none", label=s, **_FILLS[s]) for s in kinds]
    axes.margins(0.09)
    _legend(figure, handles)
    return figure


_FILLS: dict[str, Json] = {
    NATIVE: {"fillstyle": "full"},
    "cosine": {"fillstyle": "full", "markerfacecolor": PAPER},
    CORRECTED: {"fillstyle": "left", "markerfacecoloralt": PAPER},
}
_LINES = {"cosine": "-", CORRECTED: ":"}


def _point(results: Results, scoring: str, pool: str) -> list[Json] | None:
    """The numbers (t2i, i2t) of a point; where corrected exists in one direction, it stands beside the other's native.
    None where the run has none of it."""
    retrieval = results.pools[pool]["retrieval"]
    if all(scoring not in retrieval[d] for d in ("t2i", "i2t")):
        return None
    return [retrieval[d].get(scoring, retrieval[d][NATIVE]) for d in ("t2i", "i2t")]


def norms_figure(relevant: Array, irrelevant: Array, side: str, colour: str = RUNS[0]) -> Figure:
    """Histograms of norms, each of area 1: relevant [n] coloured, irrelevant [m] grey."""
    figure, axes = new_figure(WIDTH, HEIGHT, f"norm of the {side} embedding", "density")
    both = np.concatenate([relevant, irrelevant])
    lo, hi = np.quantile(both, [0.002, 0.998]) if len(both) else (0.0, 1.0)
    edges = np.linspace(lo, hi if hi > lo else lo + max(abs(lo), 1.0) * 1e-3, BINS + 1)
    handles = []
    for x, shade, label in ((irrelevant, GREY, "irrelevant"), (relevant, colour, "relevant")):
        if len(x):
            heights = np.histogram(np.clip(x, edges[0], edges[-1]), edges)[0] / (len(x) * np.diff(edges))
            axes.stairs(heights, edges, fill=True, color=shade, alpha=0.35)
            handles.append(axes.stairs(heights, edges, color=shade, linewidth=1.6, label=label))
    _legend(figure, handles)
    return figure


def scatter_figure(norms: Array, cosines: Array, relevant: Array, side: str, colour: str = RUNS[0]) -> Figure:
    """Cosine with the query against the document's norm; all three arrays [Q, k]."""
    figure, axes = new_figure(WIDTH, HEIGHT, f"norm of the {side} embedding", "cosine with the query")
    rng = np.random.default_rng(0)
    handles = []
    for keep, shade, label, marker in ((~relevant, GREY, "irrelevant", "o"), (relevant, colour, "relevant", "D")):
        x, y = norms[keep], cosines[keep]
        if len(x):
            at = rng.choice(len(x), min(len(x), MAX_POINTS), replace=False)
            handles += axes.plot(
                x[at], y[at], marker, color=shade, markeredgewidth=0, alpha=0.6, markersize=3, label=label
            )
    _legend(figure, handles)
    return figure


class Series(NamedTuple):
    """A curve: ``run`` is its run's number (its colour); ``dashed`` marks a run's second curve."""

    label: str
    run: int
    dashed: bool
    steps: Sequence[float]
    values: Sequence[float]


def curves_figure(series: Sequence[Series], ylabel: str) -> Figure:
    """Curves over training steps; a label "" is no entry of the legend, few points are marked."""
    labels = sum(bool(one.label) for one in series)
    figure, axes = new_figure(WIDTH, HEIGHT + 0.18 * max(-(-labels // 2) - 2, 0), "step", ylabel)
    handles = []
    for one in series:
        style = run_style(one.run) | {"linestyle": "--" if one.dashed else "-", "linewidth": 1.5, "markersize": 4}
        style |= {} if len(one.steps) <= FEW_POINTS else {"marker": None}
        (line,) = axes.plot(one.steps, one.values, label=legend_label(one.label), **style)
        handles += [line] if one.label else []
    values = [v for one in series for v in one.values]
    middle, span = (max(values) + min(values)) / 2, LEAST_SPAN * max(map(abs, values))
    if max(values) - min(values) < span:
        axes.set_ylim(middle - span / 2, middle + span / 2)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.margins(x=0.02)
    _legend(figure, handles)
    return figure


# --- which pictures a report has --------------------------------------------------------------------------------------

# file -> (axis, {key of metrics.jsonl: label}), the second key dashed; {main}: the trained direction, i2t of both
_PANELS: dict[str, tuple[str, dict[str, str]]] = {
    "loss": ("loss, nats", {"loss": ""}),
    "scale": ("effective scale", {"effective_scale_{main}": ""}),
    "alpha": ("α, logit scale", {"logit_scale": ""}),
    "norm-image": ("mean image norm", {"norm_image_mean": ""}),
    "norm-text": ("mean text norm", {"norm_text_mean": ""}),
    "gamma": ("γ", {"gamma_q": "γq", "gamma_d": "γd"}),
    **{f"val-{d}": (LABELS[d], {f"val_{d}_success@1_{s}": s for s in (NATIVE, "cosine")}) for d in ("i2t", "t2i")},
}


def norm_pictures(run: ReportRun, folder: Path) -> dict[str, list[Picture]]:
    """Direction -> [histograms of documents' norms, cosine against norm]; {} without the arrays."""
    pictures = {}
    for direction in reversed(CLIP_DIRECTIONS):
        arrays = _best_norms(run, direction)
        if arrays is None:
            return {}
        norms, cosines, relevant = arrays
        side, colour = direction.document_side, RUNS[run.number % len(RUNS)]
        name, top = printable(run.name, 60), f"{direction.value}, the 10 best of each query by cosine"
        counts = f"{relevant.sum():,} relevant, {(~relevant).sum():,} irrelevant"
        histogram = norms_figure(norms[relevant], norms[~relevant], side, colour)
        scatter = scatter_figure(norms, cosines, relevant, side, colour)
        pictures[direction.value] = [
            write_picture(figure, folder, f"{kind}-{side}-{run.number}", words, words)
            for kind, figure, words in (
                ("norms", histogram, f"{name}: {side} norms by relevance; {top}: {counts}."),
                ("scatter", scatter, f"{name}: cosine against {side} norm; {top}; at most {MAX_POINTS} of a kind."),
            )
        ]
    return pictures


def _best_norms(run: ReportRun, direction: Direction) -> tuple[Array, Array, Array] | None:
    """(norms, cosines, relevant), each [Q, 10], of every query's best by cosine in the main pool."""
    where = f"{MAIN_POOL}/{direction.value}/cosine"
    names = [f"{where}/top_ids", f"{where}/top_scores", f"{where}/top_relevant"]
    names.append(f"{MAIN_POOL}/lengths/{direction.document_side}")
    if any(name not in run.results.per_query for name in names):
        return None
    ids, scores, relevant, norms = (run.results.array(name) for name in names)
    if ids.shape != scores.shape or ids.shape != relevant.shape or (ids.size and ids.max() >= len(norms)):
        return None
    return norms[ids], np.asarray(scores), relevant.astype(bool)


def curve_pictures(runs: Sequence[ReportRun], folder: Path) -> list[Picture]:
    """Training curves of the runs that have metrics.jsonl, one colour a run; [] where none has."""
    pictures = []
    for name, (ylabel, kinds) in _PANELS.items():
        series = []
        for run in runs:
            if name == "gamma" and run.trained.get("norm") != "learned":
                continue  # it stands still: the table of runs has its value
            for dashed, (key, label) in enumerate(kinds.items()):
                words = label if len(runs) == 1 else "" if dashed else run.name  # colours are the runs'
                series.append(_series(run, key.format(main=_main_direction(run)), words, bool(dashed)))
        if series := [s for s in series if len(s.steps)]:
            dashes = f" Dashed: {list(kinds.values())[1]}." if len(kinds) > 1 else ""
            alt = f"Training curves: {ylabel} over steps."
            pictures.append(write_picture(curves_figure(series, ylabel), folder, f"curve-{name}", alt, ylabel + dashes))
    return pictures


def _main_direction(run: ReportRun) -> str:
    try:
        return trained_directions(run.trained)[0].value
    except UserError:
        return Direction.I2T.value


def _series(run: ReportRun, key: str, label: str, dashed: bool) -> Series:
    points = [(float(line["step"]), float(line[key])) for line in run.lines if is_number(line.get(key))]
    if run.lines and (match := re.fullmatch(r"val_(\w+)_success@1_(\w+)", key)):
        last = run.results.json["retrieval"][match[1]][match[2]]["success@1"]  # the evaluation itself
        points += [(float(run.lines[-1]["step"]), float(last))] if is_number(last) else []
    return Series(label, run.number, dashed, [s for s, _ in points], [v for _, v in points])


def tradeoff_picture(runs: Sequence[ReportRun], pool: str, folder: Path, name: str) -> Picture:
    """The trade-off of runs in a pool."""
    alt = f"Trade-off of {len(runs)} runs: R@1 of text to image across, of image to text up, pool {printable(pool)}."
    figure = tradeoff_figure({run.name: run.results for run in runs}, pool)
    return write_picture(figure, folder, name, alt, f"Pool {printable(pool)}: up and to the right is better.")


# --- pictures of a study ----------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """Where an arm stands in a frontier; pairs are of (t2i, i2t).

    Attributes:
        native, corrected: R@1; corrected is None where the arm has none.
        error: half widths of the native point's bars: a standard deviation over seeds, or, of one seed, half of the
            interval over queries; None for no bars.
        kept: whether it is the sym/cosine that others are measured by.
    """

    number: int
    name: str
    norm: str
    i2t_weight: float
    native: tuple[float, float]
    error: tuple[float, float] | None
    corrected: tuple[float, float] | None
    kept: bool


def colours() -> Any:
    """viridis in 32 steps, less the ends that are lost on dark and on light paper."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["viridis"](np.linspace(0.2, 0.88, 32)))


def named_points(points: Sequence[Point], most: int = SHOWN_ARMS) -> list[Point]:
    """Points that a frontier names: baselines, and arms that no other one exceeds in both directions, natively or
    corrected; of more than ``most`` those with the best mean of both."""
    best = {p.number: [p.native, *([p.corrected] if p.corrected else [])] for p in points}
    ends = [at for ats in best.values() for at in ats]
    front = [p for p in points if any(not any(x > a and y > b for x, y in ends) for a, b in best[p.number])]
    front.sort(key=lambda p: -max(map(sum, best[p.number])))
    shown = [p for p in front if not p.kept][:most]
    return [p for p in points if p.kept or p in shown]


def _light(colour: Sequence[float]) -> float:
    """Relative luminance of (red, green, blue, ...)."""
    return float(np.dot(colour[:3], [0.2126, 0.7152, 0.0722]))


def frontier_figure(points: Sequence[Point], share: float) -> Figure:
    """R@1 of t2i across, of i2t up; λ of qnorm arms as colour. Named points hold their numbers."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.lines import Line2D

    named = named_points(points)
    names = [f"{p.number}  {legend_label(p.name)}" for p in named]
    columns = 1 if max(map(len, names), default=0) > 32 else 2
    figure, axes = new_figure(5.0, 4.2 + 0.17 * -(-(len(named) + 3) // columns), LABELS["t2i"], LABELS["i2t"])
    scale, handles = colours(), []
    for p in points:
        if p not in named:
            axes.plot(*p.native, "o", color=GREY, alpha=0.6, markersize=3, zorder=1)
    for p, name in zip(named, names, strict=True):
        colour: Any = scale(p.i2t_weight) if p.norm == "qnorm" else INK if p.kept else SOFT
        style: Json = {"color": colour, "marker": NORM_MARKERS[p.norm], "linestyle": "none"}
        xerr, yerr = p.error or (None, None)
        axes.errorbar(*p.native, xerr=xerr, yerr=yerr, elinewidth=0.8, capsize=1.5, zorder=4, markersize=11, **style)
        ink = PAPER if p.norm != "qnorm" else ON_DARK if _light(colour) < 0.45 else ON_LIGHT
        axes.text(*p.native, str(p.number), ha="center", va="center_baseline", zorder=5, fontsize=7, color=ink)
        style["markersize"] = 6.5
        if p.corrected is not None:
            axes.plot(*zip(p.native, p.corrected, strict=True), color=colour, linewidth=0.9, linestyle=":", zorder=2)
            axes.plot(*p.corrected, zorder=3, **style, **_FILLS[CORRECTED])
        if p.kept:
            for line, at in zip((axes.axvline, axes.axhline), p.native, strict=True):
                line(share * at, color=SOFT, linewidth=0.9, linestyle="--", zorder=1)
        handles.append(Line2D([], [], label=name, **style))
    kinds: Json = {"color": SOFT, "marker": "o", "linestyle": "none"}
    handles += [Line2D([], [], label=s, **kinds, **_FILLS[s]) for s in (NATIVE, CORRECTED)]
    if len(named) < len(points):
        handles.append(Line2D([], [], label="other arms", **kinds | {"color": GREY, "markersize": 3}))
    axes.margins(0.09)
    if any(p.norm == "qnorm" for p in named):
        bar = figure.colorbar(ScalarMappable(cmap=scale), ax=axes, fraction=0.04, pad=0.02)
        bar.set_label("λ of qnorm: 0 trains t2i only, 1 i2t only", color=INK, fontsize=9)
        bar.ax.tick_params(colors=INK, labelsize=8)
        bar.outline.set_visible(False)
    _legend(figure, handles, columns)
    return figure


def heat_figure(names: Sequence[str], scorings: Sequence[str], values: Array, top: float) -> Figure:
    """R@1 of arms, down, by scorings, across: values [A, S] or NaN; colours range to ``top``."""
    labels = [legend_label(name) for name in names]
    figure, axes = new_figure(4.3 + 0.062 * max(map(len, labels)), 0.7 + 0.235 * len(names))
    axes.grid(False)
    scale = colours()
    axes.pcolormesh(np.ma.masked_invalid(values), cmap=scale, vmin=0, vmax=top)
    for (i, j), value in np.ndenumerate(values):
        text = rate(value if np.isfinite(value) else None)
        ink = SOFT if np.isnan(value) else ON_LIGHT if _light(scale(value / top)) > 0.45 else ON_DARK
        axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", fontsize=7.5, color=ink)
    axes.set_xticks(np.arange(len(scorings)) + 0.5, scorings)
    axes.set_yticks(np.arange(len(names)) + 0.5, labels)
    axes.invert_yaxis()
    axes.tick_params(length=0, labelsize=8, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    return figure


def fractions_figure(rows: Sequence[Json]) -> Figure:
    """R@1 over the share of training data, a curve a setting and scoring; bars: sd over seeds."""
    curves: dict[tuple[str, str], list[Json]] = {}
    for row in rows:
        if row["success@1_mean"] is not None:
            curves.setdefault((row["setting"], row["scoring"]), []).append(row)
    settings = list(dict.fromkeys(name for name, _ in curves))
    figure, axes = new_figure(5.0, 3.2 + 0.17 * len(curves), "share of the training pictures", "R@1")
    for (name, scoring), members in curves.items():
        keys = ("train_fraction", "success@1_mean", "success@1_sd")
        share, mean, sd = ([row[k] or 0.0 for row in members] for k in keys)
        native = scoring == NATIVE
        line: Json = {"linestyle": "-" if native else ":", "linewidth": 1.3, "elinewidth": 0.8, "capsize": 2}
        style = line | run_style(settings.index(name)) | _FILLS[NATIVE if native else CORRECTED]
        axes.errorbar(share, mean, yerr=sd, label=f"{legend_label(name)}, {scoring}", markersize=5, **style)
    axes.set_xscale("log")
    ticks = sorted({row["train_fraction"] for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    _legend(figure, axes.get_legend_handles_labels()[0], 1)
    return figure


def intervals_figure(
    labels: Sequence[str],
    values: Sequence[float],
    cis: Sequence[Sequence[float]],
    bands: Sequence[float],
    xlabel: str,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Differences with their intervals, a label a line, and bands of half width ``bands`` around 0."""
    figure, axes = new_figure(5.0, 0.9 + 0.34 * len(labels), xlabel)
    axes.barh(range(len(labels)), np.multiply(bands, 2), 0.62, np.negative(bands), color=SOFT, alpha=0.25, linewidth=0)
    for y, (value, ci) in enumerate(zip(values, cis, strict=True)):
        colour = RUNS[y % len(RUNS)]
        axes.plot(ci, [y, y], color=colour, linewidth=1.6)
        axes.plot(value, y, "o", color=colour, markersize=6)
    axes.axvline(0, color=SOFT, linewidth=0.9, linestyle="--")
    axes.set_yticks(range(len(labels)), [legend_label(label) for label in labels])
    axes.invert_yaxis()
    axes.set_xlim(limits)
    return figure
