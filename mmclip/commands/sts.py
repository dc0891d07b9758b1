"""mmclip sts: score a file of pairs, train each normalization on pairs, and compare what became of their order."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmclip import distributed
from mmclip.config import StsConfig
from mmclip.config.text import AUTO
from mmclip.errors import printable
from mmclip.evaluation.results import NATIVE
from mmclip.io import flat, json_text, output_folder, write_text_atomically
from mmclip.metrics import over_seeds
from mmclip.models.metadata import versions, weights_key
from mmclip.models.text_encoder import TextEncoder, load_text_model, native_scoring
from mmclip.retrieval import as_floats
from mmclip.similarity import mean_norm_factor
from mmclip.tasks import sts as task
from mmclip.tasks.sts import PairBootstrap, StsPairs, Vectors

JSON_FILE, CSV_FILE, RUNS = "sts.json", "sts.csv", "runs"
UNTRAINED = "untrained"
# a run's numbers follow from these, the pairs, the weights, the norm and the seed
SETTINGS = ("scale", "effective_scale", "gamma_init", "head_only", "epochs", "batch_size", "lr", "gamma_lr", "wd",
            "warmup", "precision", "query_length", "document_length", "query_prompt", "document_prompt")  # fmt: skip
COLUMNS = ("scale", "norm", "seed", "scoring", "spearman", "lo", "hi", "symmetry", "exchanged", "alpha",
           "effective_scale_start", "effective_scale_end", "cosine_mean", "cosine_std", "length_mean", "length_cv",
           "squared_error")  # fmt: skip
Array = NDArray[Any]
Json = dict[str, Any]


def run(settings: StsConfig) -> Json:
    """Check the symmetry of a model; returns the content of sts.json (UserError in one line)."""
    device = distributed.start(settings.device)
    train, held = _pairs(settings)
    about = f"{Path(str(settings.model)).name}-{Path(str(settings.train or settings.data)).stem}"
    folder = output_folder(settings.output, Path("logs") / "sts" / flat(about))
    model = load_text_model(settings, device)
    bootstrap = PairBootstrap(held.scores, held.groups, seed=settings.seed)
    vectors = _encode(model, held, settings)
    before, scores = task.evaluate_sts(vectors, native_scoring(model)[0], bootstrap)
    report: Json = {
        "model": model.name,
        "removed": model.removed,
        "native": native_scoring(model)[0]._asdict(),
        "data": _about(held, settings),
        "bootstrap": {"resamples": bootstrap.resamples, "groups": int(held.groups.max()) + 1, "seed": settings.seed},
        UNTRAINED: before,
    }
    if train is not None:
        report["train"] = _about(train, settings) | {"label": f"score / {train.top:g}"}
        report["train"]["sha256"] = {"pairs": train.fingerprint(), "evaluation": held.fingerprint()}
        runs = _train_all(model, train, held, vectors, bootstrap, settings, folder / RUNS)
        report["norms"] = _over_seeds(runs, before["scorings"], scores, bootstrap)
        report["runs"] = [{k: v for k, v in run.items() if k != "scores"} for run in runs]
    report |= {"settings": settings.to_dict(), "versions": versions()}
    write_text_atomically(folder / JSON_FILE, json_text(report, indent=1))
    write_text_atomically(folder / CSV_FILE, csv_text(report))
    task.print_sts(report)
    print(f"results: {printable(folder / JSON_FILE)}")
    return report


def _pairs(settings: StsConfig) -> tuple[StsPairs | None, StsPairs]:
    """(pairs to train on, or None; pairs to evaluate on), without a sentence in common."""
    train = None if settings.train is None else task.open_sts(settings.train)
    if train is not None and settings.holdout is not None:
        train, held = task.split_pairs(train, settings.holdout, settings.seed)
    else:
        held = task.open_sts(str(settings.data))
        train = train and task.without_sentences_of(train, held)
    for note in [*(train.notes if train is not None else []), *held.notes]:
        print(f"note: {note}", file=sys.stderr)
    return train, held


def _about(pairs: StsPairs, settings: StsConfig) -> Json:
    split = {"holdout": settings.holdout, "split_seed": settings.seed} if settings.holdout is not None else {}
    scores = {"min": float(pairs.scores.min()), "max": float(pairs.scores.max())}
    return {"path": pairs.path, "n_pairs": len(pairs), **split, "scores": scores, "notes": pairs.notes}


def _encode(model: TextEncoder, pairs: StsPairs, settings: StsConfig) -> Vectors:
    """Raw vectors of both sides, [P, D] each, in float64: ties are then real ones."""
    batch, sides = settings.encode_batch_size, ((pairs.first, "query"), (pairs.second, "document"))
    first, second = (model.encode(side, role, batch, progress=False).double() for side, role in sides)
    return first, second


def _train_all(
    model: TextEncoder,
    train: StsPairs,
    held: StsPairs,
    before: Vectors,
    bootstrap: PairBootstrap,
    settings: StsConfig,
    folder: Path,
) -> list[Json]:
    """Every norm with every seed from the same weights; a run whose file exists already is read. ``before``: the
    untrained model's vectors of the held-out pairs."""
    folder.mkdir(exist_ok=True)
    start = {k: v.detach().clone() for k, v in model.encoder.state_dict().items()}
    common = [weights_key(model.encoder), train.fingerprint(), held.fingerprint(), bootstrap.seed]
    common += [getattr(settings, name) for name in SETTINGS]
    vectors = _encode(model, train, settings) if settings.head_only else None
    runs = []
    for seed, norm in ((seed, norm) for seed in settings.seeds for norm in settings.norms):
        key = hashlib.sha256(json.dumps([*common, norm, seed]).encode()).hexdigest()[:16]
        path = folder / f"{norm}-seed{seed}-{key[:8]}.json"
        run = _finished(path, key)
        if run is None:
            model.encoder.load_state_dict(start)
            begun = time.perf_counter()
            loss, head, history = task.train_pairs(model, norm, train, settings, seed, vectors)
            seconds = time.perf_counter() - begun
            exponents = as_floats(loss.similarity.exponents)
            after = _encode(model, held, settings) if head is None else head.cpu().transform(before)
            evaluation, scores = task.evaluate_sts(after, exponents, bootstrap)
            predicted, labels = loss.alpha * scores[NATIVE], held.scores / train.top
            effective = {"start": before, "end": after}
            run = {
                "key": key,
                "norm": norm,
                "seed": seed,
                "scale": loss.requested_scale,
                "alpha": loss.alpha,
                **exponents._asdict(),
                "effective_scale": {n: loss.alpha * mean_norm_factor(*v, exponents) for n, v in effective.items()},
                "loss": history,
                "predicted": {**_spread(predicted), "squared_error": float(np.square(predicted - labels).mean())},
                "label": _spread(labels),
                "evaluation": evaluation,
                "scores": {name: values.tolist() for name, values in scores.items()},
                "seconds": seconds,
            }
            write_text_atomically(path, json_text(run))
        runs.append(run)
        value = run["evaluation"]["scorings"][NATIVE]["spearman"]
        print(f"{norm} seed {seed}: Spearman {value:.3f} native, {run['seconds']:.0f} s", file=sys.stderr, flush=True)
    return runs


def _spread(x: Array) -> Json:
    return {"mean": float(x.mean()), "std": float(x.std())}


def _finished(path: Path, key: str) -> Json | None:
    """A finished run of this key; None where there is none, or a damaged one."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return run if isinstance(run, dict) and run.get("key") == key else None


def _over_seeds(runs: list[Json], before: Json, untrained: Mapping[str, Array], bootstrap: PairBootstrap) -> Json:
    """norm -> scoring -> Spearman over seeds, intervals over groups of pairs and seeds (metrics.bootstrap).

    Of native also its paired differences: to the same scoring before training, and to native of cosine and of dot.
    """
    by_norm: dict[str, list[Json]] = {}
    for run in runs:
        by_norm.setdefault(run["norm"], []).append(run)
    numbers: dict[tuple[str, str], tuple[list[float], Array]] = {}  # Spearman of every seed, bootstrap samples [B, S]
    for norm, of in by_norm.items():
        for scoring in before:
            drawn = np.stack([bootstrap.samples(np.array(run["scores"][scoring])) for run in of], axis=1)
            numbers[norm, scoring] = [run["evaluation"]["scorings"][scoring]["spearman"] for run in of], drawn
    report: dict[str, Json] = {norm: {} for norm in by_norm}

    def interval(drawn: Array) -> list[float] | None:
        return bootstrap.interval(over_seeds(drawn, seed=bootstrap.seed))

    for (norm, scoring), (values, drawn) in numbers.items():
        mean = float(np.mean(values))
        seeds = {str(run["seed"]): value for run, value in zip(by_norm[norm], values, strict=True)}
        report[norm][scoring] = {"spearman": mean, "ci": interval(drawn), "seeds": seeds}
        if scoring == NATIVE:
            others = {f"{NATIVE} of {n}": numbers[n, NATIVE] for n in ("cosine", "dot") if n in by_norm and n != norm}
            if norm in untrained:
                others[UNTRAINED] = [before[norm]["spearman"]], bootstrap.samples(untrained[norm])[:, None]
            report[norm][scoring]["minus"] = {
                name: {"delta": mean - float(np.mean(x)), "ci": interval(drawn - theirs)}
                for name, (x, theirs) in others.items()
            }
    return report


def csv_text(report: Json) -> str:
    """Every Spearman of a report, a line each: untrained, of each run, and over seeds (seed "all")."""
    scale = report["settings"]["scale"]
    if scale is None or scale == AUTO:
        scale = "default" if scale is None else f"{AUTO} {report['settings']['effective_scale']:g}"
    lines = []
    for run in [{"norm": UNTRAINED, "evaluation": report[UNTRAINED]}, *report.get("runs", [])]:
        evaluation = run["evaluation"]
        both, cosines = evaluation["lengths"]["both"], evaluation["cosines"]
        about = {k: run.get(k) for k in ("norm", "seed", "alpha")}
        about |= {f"effective_scale_{when}": value for when, value in run.get("effective_scale", {}).items()}
        about |= {"squared_error": run.get("predicted", {}).get("squared_error")}
        about |= {"cosine_mean": cosines["mean"], "cosine_std": cosines["std"]}
        about |= {"length_mean": both["mean"], "length_cv": both["cv"]}
        lines += [about | {"scoring": name} | numbers for name, numbers in evaluation["scorings"].items()]
    for norm, by_scoring in report.get("norms", {}).items():
        lines += [{"norm": norm, "seed": "all", "scoring": name} | numbers for name, numbers in by_scoring.items()]
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for line in lines:
        lo, hi = line["ci"] or (None, None)
        line |= {"scale": scale, "lo": lo, "hi": hi}
        writer.writerow({k: f"{v:.4f}" if isinstance(v, float) else v for k, v in line.items()})
    return file.getvalue()
