"""mmclip advise: embeddings -> trial and evidence, on the terminal, in advise.json and in a picture."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmclip import metrics
from mmclip.config import AdviseConfig
from mmclip.console import progress_bar
from mmclip.errors import UserError, printable
from mmclip.io import flat, json_text, output_folder, write_text_atomically
from mmclip.metrics.fisher import PER_DIMENSION, fisher_report
from mmclip.models.metadata import versions
from mmclip.roles import NORMS, Direction, Normalization
from mmclip.similarity import TINY, magnitude, mean_norm_factor
from mmclip.tasks import advise as task
from mmclip.tasks.advise import MIN_QUERIES, Matched

JSON_FILE, PICTURE = "advise.json", "advise.png"
NOT_COVERED = (
    "linear heads on frozen vectors are not fine-tuning: an encoder that trains may learn norms that no head can, and "
    "other norms at another batch size, learning rate or number of steps"
)

Array = NDArray[Any]
Json = dict[str, Any]


def run(settings: AdviseConfig) -> Json:
    """Advise on a model and its data; returns the content of advise.json (UserError in one line)."""
    times = [time.monotonic()]
    about = "-".join(flat(Path(str(x)).name) for x in (settings.model, settings.data))
    folder = output_folder(settings.output, Path("logs") / "advice" / about)
    data, stand_in, described = task.encode(settings, folder)
    times.append(time.monotonic())
    dim = next(iter(data.embeddings.values())).shape[1]
    if settings.rank is not None and settings.rank > dim:
        raise UserError(f"--rank {settings.rank}: the vectors have {dim} dimensions")
    judged, rest = task.judged_units(data, settings)
    sections, chosen = _decide(data, len(judged), len(rest), settings)
    times.append(time.monotonic())
    fisher = {d.value: kappa(data, stand_in, d, settings.seed) for d in settings.weights if settings.fisher}
    evidence = {"lengths": norm_spread(data), "zero_shot": zero_shot(data, judged, settings), "fisher": fisher}
    times.append(time.monotonic())
    keys = ("answer", "because", "sure", "detectable", "ties")
    report: Json = {k: sections[settings.target][k] for k in keys} | {"direction": settings.target}
    report |= {"sections": sections, "evidence": evidence}
    report["trial"] = {
        "units": "queries" if settings.kind == "text" else "images",
        "n_judged": len(judged),
        "n_training_and_choosing": len(rest),
        "head": "full" if settings.rank is None else f"identity plus rank {settings.rank}",
        "scale_init": data.scale,
        "learning_rates": list(task.LEARNING_RATES),
        **{k: getattr(settings, k) for k in ("seeds", "steps", "batch_size", "metric", "margin", "held_out", "seed")},
        "chosen": chosen,
    }
    seconds = dict(zip(("encode", "trial", "evidence"), np.diff(times).round(1).tolist(), strict=True))
    report |= described | {"not_covered": NOT_COVERED, "seconds": seconds, "versions": versions()}
    write_text_atomically(folder / JSON_FILE, json_text(report, indent=1))
    if sections[settings.target]["norms"]:
        task.draw(report, folder / PICTURE)
    task.show(report)
    print(f"advice: {printable(folder / JSON_FILE)}")
    return report


def _decide(data: Matched, n_judged: int, n_rest: int, settings: AdviseConfig) -> tuple[dict[str, Json], list[Json]]:
    """(decision of every direction, chosen heads); without a trial where there are too few queries for one."""
    names = dict.fromkeys([*(d.value for d in settings.weights), settings.target])
    if n_judged < MIN_QUERIES or n_rest < MIN_QUERIES // 2:
        why = f"{n_judged} held-out queries and {n_rest} others: {MIN_QUERIES} and {MIN_QUERIES // 2} are needed"
        return dict.fromkeys(names, task.undecided(why, n_judged, settings)), []
    total = settings.seeds * len(NORMS) * len(task.LEARNING_RATES)
    threads = torch.get_num_threads()
    with progress_bar() as bar:
        progress = bar.add_task("trial: heads", total=total, note="")
        print(f"trial: {total} heads of at most {settings.steps} steps", file=sys.stderr, flush=True)
        torch.set_num_threads(1)  # thousands of small products: where cores are shared, threads wait for each other
        try:
            values, chosen = task.run_trial(data, settings, progress=lambda n: bar.advance(progress, n))
        finally:
            torch.set_num_threads(threads)
    return {name: task.decide(values[name], settings) for name in names}, chosen


def norm_spread(data: Matched) -> Json:
    """side -> coefficient of variation of its norms, with an interval over units: {"cv", "ci", "n", "reference"}."""
    report = {}
    for side, rows in data.embeddings.items():
        x = magnitude(rows).double().numpy()
        x = x / x.mean() if x.mean() > 0 else x  # sums of squares keep their digits
        sums = metrics.cluster_sums(np.column_stack([x, x**2, np.ones(len(x))]), data.clusters(side))
        mean, square = sums[:, 0] / sums[:, 2], sums[:, 1] / sums[:, 2]
        report[side] = {
            "cv": float(x.std(ddof=1) / max(x.mean(), TINY)) if len(x) > 1 else None,
            "ci": list(metrics.interval(np.sqrt(np.maximum(square - mean**2, 0)) / np.maximum(mean, TINY))),
            "n": len(x),
            "reference": f"all encoded {side} vectors of the training split",
        }
    return report


def zero_shot(data: Matched, judged: Array, settings: AdviseConfig) -> Json:
    """direction -> scoring -> {"value", "ci", "minus_cosine", "minus_cosine_ci"} on the judging units, untrained."""
    report: Json = {}
    scored = task.measure(data.part(judged), task.make_heads(data), task.FIXED, settings)
    for direction, values in scored.items():
        queries = np.arange(len(values["cosine"]))
        report[direction] = {"n": len(queries), "reference": "the held-out units that judge", "scorings": {}}
        for name, x in values.items():
            mean, *ci = metrics.mean_intervals(x[:, None], queries, seed=settings.seed)[0]
            delta, *delta_ci = metrics.paired_difference(values["cosine"], x, queries, seed=settings.seed)
            row = {"value": mean, "ci": ci, "minus_cosine": delta, "minus_cosine_ci": delta_ci}
            report[direction]["scorings"][name] = row
    return report


def kappa(data: Matched, stand_in: Matched | None, direction: Direction, seed: int) -> Json:
    """fisher_report of the training pairs or, where they are too few, of the stand-in.

    Also "reference" and, of both kinds of matrices, "larger": the side of the larger condition number, "within noise"
    where the intervals meet, None where one is missing.
    """
    report = _fisher(data, direction, seed) | {"reference": "pairs of the training split"}
    if report["status"] == "undetermined" and stand_in and len(stand_in.pairs) >= PER_DIMENSION * report["dim"]:
        why = f"a stand-in that is not the task: {report['n_available']} pairs of the split are too few"
        report = _fisher(stand_in, direction, seed) | {"reference": f"titles as queries of their own texts, {why}"}
    report["larger"] = {}
    for kind in ("raw", "normalized"):
        q, d = (((report.get(f"{role}_{kind}") or {}).get("log10_kappa") or {}).get("ci") for role in task.SIDES)
        larger = q and d and ("query" if q[0] > d[1] else "document" if d[0] > q[1] else "within noise")
        report["larger"][kind] = larger or None
    return report


def _fisher(data: Matched, direction: Direction, seed: int) -> Json:
    query, document = direction.roles(data.embeddings)
    rows = direction.roles(dict(zip(data.embeddings, data.pairs.T, strict=True)))
    cosine = Normalization.COSINE.exponents
    alpha = data.scale / max(mean_norm_factor(query, document, cosine), TINY)
    return fisher_report(query, document, rows, data.clusters(direction.query_side), cosine, alpha, seed=seed)
