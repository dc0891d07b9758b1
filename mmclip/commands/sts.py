"""What sts.py does: score a file of pairs, train each normalization on pairs, and tell what became of their order."""

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
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmclip import distributed
from mmclip.config import StsConfig
from mmclip.config.text import AUTO
from mmclip.errors import printable
from mmclip.io import flat, json_text, output_folder, write_text_atomically
from mmclip.metrics import over_seeds
from mmclip.models.metadata import versions
from mmclip.models.text_encoder import TextEncoder, load_text_model, native_scoring
from mmclip.similarity import Exponents, Normalization, mean_norm_factor
from mmclip.tasks.sts import (
    NATIVE,
    PairBootstrap,
    StsPairs,
    Vectors,
    evaluate_sts,
    label_top,
    open_sts,
    print_sts,
    scorings,
    split_pairs,
    train_pairs,
    without_sentences_of,
)

JSON_FILE, CSV_FILE, RUNS = "sts.json", "sts.csv", "runs"
UNTRAINED = "untrained"
# what a run's numbers follow from, beside the pairs, the weights, the norm and the seed
SETTINGS = ("scale", "effective_scale", "gamma_init", "head_only", "epochs", "batch_size", "lr", "gamma_lr", "wd",
            "warmup", "precision", "query_length", "document_length", "query_prompt", "document_prompt")  # fmt: skip

Array = NDArray[Any]
Json = dict[str, Any]


def run(settings: StsConfig) -> Json:
    """Everything that sts.py does; what sts.json holds. Errors: UserError, one line."""
    device = distributed.start(settings.device)
    train, held = _pairs(settings)
    about = f"{Path(str(settings.model)).name}-{Path(str(settings.train or settings.data)).stem}"
    folder = output_folder(settings.output, Path("logs") / "sts" / flat(about))
    model = load_text_model(settings, device)
    bootstrap = PairBootstrap(held.scores, held.groups, seed=settings.seed)
    native, _ = native_scoring(model)
    vectors = _encode(model, held, settings)
    before, scores = evaluate_sts(*vectors, held.scores, native, bootstrap)
    report: Json = {
        "model": model.name,
        "removed": model.removed,
        "native": native._asdict(),
        "data": _about(held, settings),
        "bootstrap": {"resamples": bootstrap.resamples, "groups": int(held.groups.max()) + 1, "seed": settings.seed},
        UNTRAINED: before,
    }
    if train is not None:
        top = label_top(train.scores)
        report["train"] = {
            **_about(train, settings),
            "label": f"score / {top:g}",
            "sha256": {"pairs": train.fingerprint(), "evaluation": held.fingerprint()},
        }
        runs = _train_all(model, train, held, vectors, bootstrap, settings, folder / RUNS)
        report["norms"] = _over_seeds(runs, before["scorings"], scores, bootstrap)
        report["runs"] = [{k: v for k, v in run.items() if k != "scores"} for run in runs]
    report |= {"settings": settings.to_dict(), "versions": versions()}
    write_text_atomically(folder / JSON_FILE, json_text(report, indent=1))
    write_text_atomically(folder / CSV_FILE, csv_text(report))
    print_sts(report)
    print(f"results: {printable(folder / JSON_FILE)}")
    return report


def _pairs(settings: StsConfig) -> tuple[StsPairs | None, StsPairs]:
    """(what is trained on, or None, what is evaluated on), without a sentence in common."""
    if settings.train is None:
        train, held = None, open_sts(str(settings.data))
    elif settings.holdout is not None:
        train, held = split_pairs(open_sts(settings.train), settings.holdout, settings.seed)
    else:
        held = open_sts(str(settings.data))
        train = without_sentences_of(open_sts(settings.train), held)
    for note in [*(train.notes if train is not None else []), *held.notes]:
        print(f"note: {note}", file=sys.stderr)
    return train, held


def _about(pairs: StsPairs, settings: StsConfig) -> Json:
    split = {"holdout": settings.holdout, "split_seed": settings.seed} if settings.holdout is not None else {}
    scores = {"min": float(pairs.scores.min()), "max": float(pairs.scores.max())}
    return {"path": pairs.path, "n_pairs": len(pairs), **split, "scores": scores, "notes": pairs.notes}


def _encode(model: TextEncoder, pairs: StsPairs, settings: StsConfig) -> Vectors:
    """Raw vectors of both sides, [P, D] each, in float64: ties are then real ones."""
    size = settings.encode_batch_size
    return (model.encode(pairs.first, "query", size, progress=False).double(),
            model.encode(pairs.second, "document", size, progress=False).double())  # fmt: skip


def _train_all(
    model: TextEncoder,
    train: StsPairs,
    held: StsPairs,
    before: Vectors,
    bootstrap: PairBootstrap,
    settings: StsConfig,
    folder: Path,
) -> list[Json]:
    """Every norm with every seed from the same weights; a run whose file is there already is read."""
    folder.mkdir(exist_ok=True)
    start = {k: v.detach().clone() for k, v in model.encoder.state_dict().items()}
    common = [_weights_key(start), train.fingerprint(), held.fingerprint(), bootstrap.seed,
              *(getattr(settings, name) for name in SETTINGS)]  # fmt: skip
    given = _encode(model, train, settings) if settings.head_only else None
    runs = []
    for seed in settings.seeds:
        for norm in settings.norms:
            key = hashlib.sha256(json.dumps([*common, norm, seed]).encode()).hexdigest()[:16]
            path = folder / f"{norm}-seed{seed}-{key[:8]}.json"
            run = _finished(path, key)
            if run is None:
                model.encoder.load_state_dict(start)
                run = {"key": key, **_train_one(model, norm, seed, train, held, before, given, bootstrap, settings)}
                write_text_atomically(path, json_text(run))
            runs.append(run)
            print(f"{norm} seed {seed}: Spearman {run['evaluation']['scorings'][NATIVE]['spearman']:.3f} native, "
                  f"{run['seconds']:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
    return runs


def _train_one(
    model: TextEncoder,
    norm: str,
    seed: int,
    train: StsPairs,
    held: StsPairs,
    before: Vectors,
    given: Vectors | None,
    bootstrap: PairBootstrap,
    settings: StsConfig,
) -> Json:
    """One run; ``before`` and ``given`` are the untrained model's vectors of the held-out pairs and, where only a head
    is trained, of the training pairs."""
    begun = time.perf_counter()
    loss, head, history = train_pairs(model, norm, train, settings, seed, given)
    seconds = time.perf_counter() - begun
    with torch.no_grad():
        exponents = Exponents(*(float(gamma) for gamma in loss.similarity.exponents))
    after = _encode(model, held, settings) if head is None else head.cpu().transform(before)
    evaluation, scores = evaluate_sts(*after, held.scores, exponents, bootstrap)
    predicted, labels = loss.alpha * scores[NATIVE], held.scores / label_top(train.scores)
    return {
        "norm": norm,
        "seed": seed,
        "scale": loss.asked,
        "alpha": loss.alpha,
        **exponents._asdict(),
        "effective_scale": {n: loss.alpha * mean_norm_factor(*v, exponents)
                            for n, v in (("start", before), ("end", after))},
        "loss": history,
        "predicted": {"mean": float(predicted.mean()), "std": float(predicted.std()),
                      "squared_error": float(np.square(predicted - labels).mean())},
        "label": {"mean": float(labels.mean()), "std": float(labels.std())},
        "evaluation": evaluation,
        "scores": {name: values.tolist() for name, values in scores.items()},
        "seconds": seconds,
    }  # fmt: skip


def _finished(path: Path, key: str) -> Json | None:
    """A run that was trained already; None where there is none, or what is there is not it."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return run if isinstance(run, dict) and run.get("key") == key else None


def _weights_key(state: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in state.items():
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _over_seeds(runs: list[Json], before: Json, untrained: Mapping[str, Array], bootstrap: PairBootstrap) -> Json:
    """norm -> scoring -> Spearman over seeds, intervals over groups of pairs and seeds (metrics.bootstrap).

    Of native also its paired differences: to the same scoring before training, and to native of cosine and of dot.
    """
    seeds = list(dict.fromkeys(run["seed"] for run in runs))
    of = {(run["norm"], run["seed"]): run for run in runs}
    samples = {
        (norm, scoring): np.stack([bootstrap.samples(np.array(of[norm, s]["scores"][scoring])) for s in seeds], axis=1)
        for norm in dict.fromkeys(run["norm"] for run in runs)
        for scoring in scorings(Normalization.COSINE.exponents)
    }
    values = {(n, k): [of[n, s]["evaluation"]["scorings"][k]["spearman"] for s in seeds] for n, k in samples}
    start = {name: bootstrap.samples(scores)[:, None] for name, scores in untrained.items()}
    found: dict[str, Json] = {}
    for (norm, scoring), drawn in samples.items():
        mean = float(np.mean(values[norm, scoring]))
        about: Json = {"spearman": mean, "ci": bootstrap.interval(over_seeds(drawn, seed=bootstrap.seed)),
                       "seeds": dict(zip(map(str, seeds), values[norm, scoring], strict=True))}  # fmt: skip
        others = {f"{NATIVE} of {n}": (samples[n, NATIVE], float(np.mean(values[n, NATIVE])))
                  for n in ("cosine", "dot") if (n, NATIVE) in samples and n != norm}  # fmt: skip
        if norm in start:
            others[UNTRAINED] = (start[norm], before[norm]["spearman"])
        if scoring == NATIVE:
            about["minus"] = {
                name: {"delta": mean - value,
                       "ci": bootstrap.interval(over_seeds(drawn - theirs, seed=bootstrap.seed))}
                for name, (theirs, value) in others.items()
            }  # fmt: skip
        found.setdefault(norm, {})[scoring] = about
    return found


def csv_text(report: Json) -> str:
    """Every Spearman of a report, a line each: untrained, of each run, and over seeds (seed "all")."""
    names = ("scale", "norm", "seed", "scoring", "spearman", "lo", "hi", "symmetry", "exchanged", "alpha",
             "effective_scale_start", "effective_scale_end", "cosine_mean", "cosine_std", "length_mean", "length_cv",
             "squared_error")  # fmt: skip
    asked = report["settings"]["scale"]
    asked = (
        "default" if asked is None else f"{AUTO} {report['settings']['effective_scale']:g}" if asked == AUTO else asked
    )
    lines = []
    singles = [({"norm": UNTRAINED}, report[UNTRAINED])]
    for run in report.get("runs", []):
        about = {k: run[k] for k in ("norm", "seed", "alpha")}
        about |= {f"effective_scale_{when}": value for when, value in run["effective_scale"].items()}
        singles.append((about | {"squared_error": run["predicted"]["squared_error"]}, run["evaluation"]))
    for about, evaluation in singles:
        both = evaluation["lengths"]["both"]
        about |= {"cosine_mean": evaluation["cosines"]["mean"], "cosine_std": evaluation["cosines"]["std"],
                  "length_mean": both["mean"], "length_cv": both["cv"]}  # fmt: skip
        lines += [about | {"scoring": name} | numbers for name, numbers in evaluation["scorings"].items()]
    for norm, by_scoring in report.get("norms", {}).items():
        lines += [{"norm": norm, "seed": "all", "scoring": name} | numbers for name, numbers in by_scoring.items()]
    file = io.StringIO()
    writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for line in lines:
        lo, hi = line["ci"] or (None, None)
        line |= {"scale": asked, "lo": lo, "hi": hi}
        writer.writerow({k: f"{v:.4f}" if isinstance(v, float) else v for k, v in line.items()})
    return file.getvalue()
