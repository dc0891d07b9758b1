"""advise.py: vectors -> evidence, trial and answer, on the terminal, in advise.json and in a picture."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmclip import metrics
from mmclip.config import AdviseConfig
from mmclip.console import progress_bar
from mmclip.errors import UserError, printable
from mmclip.io import flat, json_text, output_folder, write_text_atomically
from mmclip.metrics.fisher import PER_DIMENSION, fisher_report
from mmclip.models import metadata
from mmclip.similarity import TINY, Direction, Normalization, magnitude, mean_norm_factor
from mmclip.tasks.advise import (
    FIXED,
    MIN_QUERIES,
    Encoded,
    Heads,
    Matched,
    Trial,
    answer,
    decide,
    draw,
    encode,
    judged_units,
    run_trial,
    show,
    undecided,
    without_silent,
)

JSON_FILE, PICTURE = "advise.json", "advise.png"
NOT_COVERED = (
    "linear heads on frozen vectors are not fine-tuning: an encoder that trains may learn lengths that no head can, "
    "and other lengths at another batch size, learning rate or number of steps"
)

Array = NDArray[Any]
Json = dict[str, Any]


def run(settings: AdviseConfig) -> Json:
    """Everything that advise.py does; returns the content of advise.json. Errors: UserError, one line."""
    began = time.monotonic()
    about = "-".join(flat(Path(str(x)).name) for x in (settings.model, settings.data))
    folder = output_folder(settings.output, Path("logs") / "advice" / about)
    encoded = encode(settings, folder)
    seconds = {"encode": time.monotonic() - began}
    directions = _directions(settings.asked)
    judged, rest = judged_units(len(encoded.matched.first), settings.held_out, settings.seed)
    trial = Trial(
        directions,
        seeds=settings.seeds,
        steps=settings.steps,
        batch=settings.batch_size,
        rank=settings.rank,
        metric=settings.metric,
        scale_init=encoded.scale,
        seed=settings.seed,
    )
    if settings.rank is not None and settings.rank > encoded.matched.first.shape[1]:
        raise UserError(f"--rank {settings.rank}: the vectors have {encoded.matched.first.shape[1]} dimensions")
    sections, chosen = _trial(encoded.matched, judged, rest, trial, settings)
    seconds["trial"] = time.monotonic() - began - sum(seconds.values())
    target = "both" if len(directions) > 1 else next(iter(directions)).value
    report: Json = {k: sections[target][k] for k in ("answer", "because", "sure", "detectable", "ties")}
    report |= {"direction": target, "sections": sections}
    report["evidence"] = {
        "lengths": lengths(encoded.matched),
        "zero_shot": zero_shot(encoded.matched, judged, tuple(directions), settings.metric, settings.seed),
        "fisher": {d.value: kappa(encoded, d, settings) for d in directions} if settings.fisher else {},
    }
    seconds["evidence"] = time.monotonic() - began - sum(seconds.values())
    report["trial"] = {
        "units": "queries" if settings.kind == "text" else "images",
        "n_judged": len(judged),
        "n_training_and_choosing": len(rest),
        "head": "full" if trial.rank is None else f"identity plus rank {trial.rank}",
        "scale_init": trial.scale_init,
        "learning_rates": list(trial.learning_rates),
        **{k: getattr(settings, k) for k in ("seeds", "steps", "batch_size", "metric", "margin", "held_out", "seed")},
        "chosen": chosen,
    }
    report |= {"model": encoded.model, "data": encoded.data, "notes": encoded.notes, "not_covered": NOT_COVERED}
    report |= {"seconds": {k: round(v, 1) for k, v in seconds.items()}, "versions": metadata.versions()}
    write_text_atomically(folder / JSON_FILE, json_text(report, indent=1))
    if sections[target]["norms"]:
        draw(report, folder / PICTURE)
    show(report)
    print(f"advice: {printable(folder / JSON_FILE)}")
    return report


def _directions(asked: str) -> dict[Direction, float]:
    if asked == "both":
        return {Direction.I2T: 0.5, Direction.T2I: 0.5}
    return {Direction(asked): 1.0}


def _trial(
    data: Matched, judged: Array, rest: Array, trial: Trial, settings: AdviseConfig
) -> tuple[dict[str, Json], list[Json]]:
    """Every direction's decision; without a trial where there are too few queries for one."""
    names = [d.value for d in trial.directions] + ["both"] * (len(trial.directions) > 1)
    if len(judged) < MIN_QUERIES or len(rest) < MIN_QUERIES // 2:
        why = f"{len(judged)} held-out queries and {len(rest)} others: {MIN_QUERIES} and {MIN_QUERIES // 2} are needed"
        found = undecided(why, len(judged), trial.seeds, settings.margin, trial.metric)
        return dict.fromkeys(names, found), []
    total = trial.seeds * len(trial.norms) * len(trial.learning_rates)
    with progress_bar() as bar:
        task = bar.add_task("trial: heads", total=total, note="")
        print(f"trial: {total} heads of at most {trial.steps} steps", file=sys.stderr, flush=True)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # thousands of small products: where cores are shared, threads wait for each other
        try:
            values, chosen = run_trial(data, judged, rest, trial, lambda: bar.advance(task))
        finally:
            torch.set_num_threads(threads)
    options: Any = {"metric": trial.metric, "seed": settings.seed}
    return {name: decide(values[name], settings.margin, **options) for name in names}, chosen


def lengths(data: Matched) -> Json:
    """side -> coefficient of variation of its lengths, with an interval over units: {"cv", "ci", "n", "reference"}."""
    report = {}
    owners = (np.arange(len(data.first)), np.arange(len(data.second)) if data.owner is None else data.owner)
    for side, rows, clusters in zip(data.sides, (data.first, data.second), owners, strict=True):
        x = magnitude(rows).double().numpy()
        x = x / x.mean() if x.mean() > 0 else x  # sums of squares keep their digits
        sums = metrics.cluster_sums(np.column_stack([x, x**2, np.ones(len(x))]), clusters)
        mean, square = sums[:, 0] / sums[:, 2], sums[:, 1] / sums[:, 2]
        cv = np.sqrt(np.maximum(square - mean**2, 0)) / np.maximum(mean, TINY)
        report[side] = {
            "cv": float(x.std(ddof=1) / max(x.mean(), TINY)) if len(x) > 1 else None,
            "ci": list(metrics.interval(cv)),
            "n": len(x),
            "reference": f"all encoded {side} vectors of the training split",
        }
    return report


def zero_shot(data: Matched, judged: Array, directions: Sequence[Direction], metric: str, seed: int) -> Json:
    """direction -> scoring -> {"value", "ci", "minus_cosine", "minus_cosine_ci"} on the judging units, untrained.

    As rankings dnorm is cosine and qnorm is dot (mmclip.similarity).
    """
    heads = Heads(data.sides, data.first.shape[1])
    report: Json = {}
    for direction, found in answer(data.part(judged), heads, FIXED, directions, metric).items():
        asked = {name: without_silent(v[None])[0] for name, v in found.items()}
        clusters = np.arange(len(asked["cosine"]))
        report[direction] = {"n": len(clusters), "reference": "the held-out units that judge", "scorings": {}}
        for name, values in asked.items():
            mean, *ci = metrics.mean_intervals(values[:, None], clusters, seed=seed)[0]
            delta, *delta_ci = metrics.paired_difference(asked["cosine"], values, clusters, seed=seed)
            row = {"value": mean, "ci": ci, "minus_cosine": delta, "minus_cosine_ci": delta_ci}
            report[direction]["scorings"][name] = row
    return report


def kappa(encoded: Encoded, direction: Direction, settings: AdviseConfig) -> Json:
    """fisher_report of the training pairs or, where they are too few, of the stand-in, with "reference" and, of the two
    kinds of matrices, "larger": which side's condition number is larger, or "within noise"."""
    data = encoded.matched
    first, second = torch.as_tensor(data.pairs[:, 0]), torch.as_tensor(data.pairs[:, 1])
    if direction.query_side == data.sides[0]:
        query, document, rows, owner = data.first, data.second, (first, second), np.arange(len(data.first))
    else:
        query, document, rows = data.second, data.first, (second, first)
        owner = np.arange(len(query)) if data.owner is None else data.owner
    reference = "pairs of the training split"
    report = _fisher(query, document, rows, owner, encoded.scale, settings.seed)
    if report["status"] == "undetermined" and encoded.titles is not None and encoded.texts is not None:
        n = len(encoded.titles)
        if n >= PER_DIMENSION * query.shape[1]:
            instead = torch.arange(n)
            why = f"{report['n_available']} pairs of the split are too few"
            report = _fisher(encoded.titles, encoded.texts, (instead, instead), np.arange(n), encoded.scale,
                             settings.seed)  # fmt: skip
            reference = f"titles as queries of their own texts, a stand-in that is not the task: {why}"
    report["reference"] = reference
    report["larger"] = {kind: _larger(report, kind) for kind in ("raw", "normalized")}
    return report


def _fisher(
    query: Tensor, document: Tensor, rows: tuple[Tensor, Tensor], owner: Array, scale: float, seed: int
) -> Json:
    exponents = Normalization.COSINE.exponents
    alpha = scale / max(mean_norm_factor(query, document, exponents), TINY)
    return fisher_report(query, document, (rows[0].numpy(), rows[1].numpy()), owner, exponents, alpha, seed=seed)


def _larger(report: Json, kind: str) -> str | None:
    """The side of the larger condition number, "within noise" where the intervals meet, None where one is missing."""
    told = []
    for role in ("query", "document"):
        found = (report.get(f"{role}_{kind}") or {}).get("log10_kappa")
        if found is None or found["ci"] is None:
            return None
        told.append(found["ci"])
    (q_lo, q_hi), (d_lo, d_hi) = told
    return "query" if q_lo > d_hi else "document" if d_lo > q_hi else "within noise"
