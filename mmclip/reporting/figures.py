"""Which pictures a report has: from runs to arrays to :mod:`mmclip.reporting.plots`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mmclip.errors import UserError
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.models.metadata import trained_directions
from mmclip.reporting.plots import (
    Picture,
    Series,
    curves_figure,
    height,
    lengths_figure,
    picture_of,
    scatter_figure,
    write_picture,
)
from mmclip.reporting.source import ReportRun, is_number
from mmclip.reporting.tradeoff import DARK, LIGHT, plot_tradeoff
from mmclip.similarity import CLIP_DIRECTIONS, Direction

# Panels of training curves: name of the file, axis, logarithmic or not, [(key in metrics.jsonl, label, dashed)].
# {main} is the direction whose scale counts: the trained one, i2t where both are.
_PANELS: tuple[tuple[str, str, bool, tuple[tuple[str, str, bool], ...]], ...] = (
    ("loss", "loss, nats", False, (("loss", "", False),)),
    ("scale", "effective scale", False, (("effective_scale_{main}", "", False),)),
    ("alpha", "α, logit scale", True, (("logit_scale", "", False),)),
    ("norm-image", "mean |image|", False, (("norm_image_mean", "", False),)),
    ("norm-text", "mean |text|", False, (("norm_text_mean", "", False),)),
    ("gamma", "γ", False, (("gamma_q", "γq", False), ("gamma_d", "γd", True))),
    *(
        (
            f"val-{d.value}",
            f"success@1, {d.value}",
            False,
            ((f"val_{d.value}_success@1_native", "native", False), (f"val_{d.value}_success@1_cosine", "cosine", True)),
        )
        for d in CLIP_DIRECTIONS
    ),
)

_VALIDATION = re.compile(r"val_(\w+)_success@1_(\w+)")


def length_pictures(run: ReportRun, folder: Path) -> list[Picture]:
    """Histograms of length and scatters of cosine against length, of each side; [] without the arrays."""
    pictures = []
    for direction in reversed(CLIP_DIRECTIONS):
        arrays = _best_lengths(run, direction)
        if arrays is None:
            return []
        lengths, cosines, relevant = arrays
        side, n = direction.document_side, run.number
        counts = f"{relevant.sum():,} relevant, {(~relevant).sum():,} irrelevant"
        pictures.append(
            write_picture(
                folder,
                f"lengths-{side}-{n}",
                f"Histograms of the length of {run.name}'s {side} embeddings, relevant against irrelevant.",
                f"|{side}| by relevance, {direction.value} top 10: {counts}.",
                partial(lengths_figure, relevant=lengths[relevant], irrelevant=lengths[~relevant], side=side),
            )
        )
        pictures.append(
            write_picture(
                folder,
                f"scatter-{side}-{n}",
                f"Scatter of cosine with the query against {side} length for {run.name}, relevant against irrelevant.",
                f"cosine against |{side}|, {direction.value} top 10.",
                partial(scatter_figure, lengths=lengths, cosines=cosines, relevant=relevant, side=side),
            )
        )
    return pictures


def _best_lengths(run: ReportRun, direction: Direction) -> tuple[Any, Any, Any] | None:
    """(lengths, cosines, relevant), each [Q, 10], of every query's best by cosine in the main pool."""
    where = f"{MAIN_POOL}/{direction.value}/cosine"
    names = [f"{where}/top_ids", f"{where}/top_scores", f"{where}/top_relevant"]
    names.append(f"{MAIN_POOL}/lengths/{direction.document_side}")
    if any(name not in run.results.per_query for name in names):
        return None
    ids, scores, relevant, lengths = (run.results.array(name) for name in names)
    if ids.shape != scores.shape or ids.shape != relevant.shape or (ids.size and ids.max() >= len(lengths)):
        return None
    return lengths[ids], np.asarray(scores), relevant.astype(bool)


def curve_pictures(runs: Sequence[ReportRun], folder: Path) -> list[Picture]:
    """Training curves of the runs that have metrics.jsonl, one colour a run; [] where none has."""
    pictures = []
    for name, ylabel, log, kinds in _PANELS:
        series = []
        for run in runs:
            for key, label, dashed in kinds:
                if name == "gamma" and run.trained.get("norm") != "learned":
                    continue  # it stands still: the table of runs has its value
                words = label if len(runs) == 1 else "" if dashed else run.name  # colours are the runs'
                series.append(_series(run, key.format(main=_main_direction(run)), words, dashed))
        series = [s for s in series if len(s.steps)]
        if not series:
            continue
        what = ylabel if len(runs) > 1 else f"{ylabel} of {runs[0].name}"
        dashes = f" Dashed: {kinds[1][1]}." if len(kinds) > 1 else ""
        pictures.append(
            write_picture(
                folder,
                f"curve-{name}",
                f"Training curve: {what} over steps.",
                f"{ylabel}.{dashes}",
                partial(curves_figure, series=series, ylabel=ylabel, log=log),
            )
        )
    return pictures


def _main_direction(run: ReportRun) -> str:
    try:
        return trained_directions(run.trained)[0].value
    except UserError:
        return Direction.I2T.value


def _series(run: ReportRun, key: str, label: str, dashed: bool) -> Series:
    points = [(float(line["step"]), float(line[key])) for line in run.lines if is_number(line.get(key))]
    match = _VALIDATION.fullmatch(key)
    if match and run.lines:  # the last validation is the evaluation itself
        last = run.results.json["retrieval"][match[1]][match[2]]["success@1"]
        points += [(float(run.lines[-1]["step"]), float(last))] if is_number(last) else []
    return Series(label, run.number, dashed, [s for s, _ in points], [v for _, v in points])


def tradeoff_pictures(runs: Sequence[ReportRun], pools: Sequence[str], folder: Path) -> list[Picture]:
    """The trade-off of compared runs, a picture for each pool."""
    results = {run.name: run.results for run in runs}
    pictures = []
    for i, pool in enumerate(pools):
        size = (5.0, height(len(runs), 4.9))
        files = [plot_tradeoff(results, folder / f"tradeoff-{i}-{t.name}.png", pool, t, size) for t in (LIGHT, DARK)]
        alt = f"Trade-off of {len(runs)} runs: success@1 of text to image across, of image to text up, pool {pool}."
        pictures.append(picture_of(files, alt, f"pool {pool}: up and to the right is better."))
    return pictures
