"""evaluate_text.py: a text model and a BEIR folder -> results and TREC files; finished runs -> a comparison."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from mmclip import distributed, metrics
from mmclip.config import TextEvaluateConfig
from mmclip.data.beir import BeirCollection, open_beir
from mmclip.errors import UserError, printable
from mmclip.evaluation.comparison import against_first, verdicts
from mmclip.evaluation.eval_set import text_set
from mmclip.evaluation.evaluate import evaluate, list_scores, ranking_bars
from mmclip.evaluation.results import NATIVE, Results, load_results, run_names, save_results
from mmclip.evaluation.trec import (
    QRELS_FILE,
    RUN_ENDING,
    RUNS,
    measurable,
    measure_run,
    read_run,
    require_trec_ids,
    write_qrels,
    write_run,
)
from mmclip.io import default_output, output_folder
from mmclip.models.metadata import versions
from mmclip.models.text_encoder import TextEncoder, encoding, native_scoring, open_text_model
from mmclip.reporting.run_tables import TEXT_HEADS, diagnostics_tables, files_table, main_metric
from mmclip.reporting.summary import print_ending
from mmclip.reporting.table import show
from mmclip.similarity import Direction, Normalization

Json = dict[str, Any]


def run(settings: TextEvaluateConfig) -> None:
    """Everything that evaluate_text.py does. Errors: UserError, one line, before a model is loaded where possible."""
    others = {name: load_text_run(path) for name, path in run_names(settings.compare or []).items()}
    control = load_text_run(settings.control) if settings.control else None
    baseline = load_text_run(settings.baseline) if settings.baseline else None
    collection = open_beir(settings.data, settings.split) if settings.data is not None else None
    files: dict[str, dict[str, dict[str, float]]] = {}
    if collection is not None:
        if settings.model is not None and settings.run_depth:
            require_trec_ids(collection)
        for name, path in run_names(settings.run or []).items():
            files[name], notes = read_run(Path(path), collection)
            for note in notes:
                print(f"warning: {printable(path)}: {note}", file=sys.stderr)
    runs: dict[str, Results] = {}
    if settings.model is not None and collection is not None:
        name, results = _evaluate(settings, settings.model, collection)
        runs[name] = results
    if files and collection is not None:
        _print_files(collection, runs, files)
    runs |= {n if n not in runs else f"{n} (compared)": r for n, r in others.items()}
    found = [v for r in runs.values() for v in verdicts(r, control, baseline)] if control is not None else []
    if settings.control is not None and not found:
        raise UserError(
            f"--control {printable(settings.control)}: none of the runs has its loss and seed and keeps its documents' "
            "length (gamma_d below 1), so there is nothing to give a verdict on"
        )
    new = settings.model is not None
    if runs and (not new or len(runs) > 1 or found):  # one evaluated model alone has had its ending
        print_ending(runs, next(iter(runs)) if new else None, verdicts=found, verbose=settings.verbose)


def _evaluate(settings: TextEvaluateConfig, asked: str, collection: BeirCollection) -> tuple[str, Results]:
    folder = text_run_folder(asked)
    name = folder.name if folder else asked
    where = output_folder(settings.output, default_output(folder, asked, collection.path, collection.split))
    for note in collection.notes:
        print(f"warning: {printable(collection.path)}: {note}", file=sys.stderr)
    model = open_text_model(settings, distributed.start(settings.device))
    native, alpha = native_scoring(model)
    removed = f" ({', '.join(model.removed)} taken off)" if model.removed else ""
    print(
        f"evaluating {printable(asked)}{removed} on {len(collection.queries):,} queries and "
        f"{len(collection.documents):,} documents of {printable(collection.path)} [{printable(collection.split, 60)}]",
        file=sys.stderr,
    )
    query, document = (
        model.encode(texts, role, settings.encode_batch_size)
        for role, texts in (("query", collection.queries), ("document", collection.documents))
    )
    data = text_set(collection, query, document)
    with ranking_bars() as progress:
        results = evaluate(
            [data],
            native,
            [Direction.Q2D],
            scales={Direction.Q2D: alpha},
            metrics=metrics.TEXT_RATES,
            fisher=settings.fisher,
            depth=settings.run_depth,
            seed=settings.seed,
            metadata=_about(settings, asked, model),
            block_bytes=settings.block_bytes,
            progress=progress,
        )
    if settings.run_depth:
        (where / RUNS).mkdir(exist_ok=True)
        for scoring, ranking in results.lists.items():
            path = where / RUNS / f"{scoring}{RUN_ENDING}"
            exponents = native if scoring == NATIVE else Normalization(scoring).exponents
            scores = list_scores(data, Direction.Q2D, ranking, exponents)
            write_run(path, collection, ranking, scores, f"mmclip.{scoring}", settings.run_depth)
        write_qrels(where / QRELS_FILE, collection)
    if settings.fisher:
        show((diagnostics_tables({name: results}) or ())[:1])
    if not settings.compare or settings.verbose:
        print_ending({name: results}, verbose=settings.verbose)
    print(f"results: {printable(save_results(results, where))}")
    return name, results


def _about(settings: TextEvaluateConfig, asked: str, model: TextEncoder) -> Json:
    return {
        "model": asked,
        "weights": "random" if settings.random_init else "loaded",
        "notes": list(model.notes),
        **encoding(model),
        "trained_with": dict(model.metadata),
        "versions": versions(),
    }


def _print_files(
    collection: BeirCollection, runs: dict[str, Results], files: dict[str, dict[str, dict[str, float]]]
) -> None:
    """Somebody's run files, below what the model does natively where there is one: nDCG@10 paired with the first."""
    rates = measurable(TEXT_HEADS, collection.gains)
    if main_metric("q2d") not in rates:
        raise UserError(f"--run: {printable(collection.path)} has gains that are no small whole numbers, and "
                         "ir_measures takes none but them")  # fmt: skip
    values = {
        f"{name} (native)": {k: r.query_values("retrieval", "q2d", NATIVE, k).astype(np.float64) for k in rates}
        for name, r in runs.items()
    }
    values |= {name: measure_run(collection, run, rates) for name, run in files.items()}
    clusters = np.arange(len(collection.queries))
    told = {
        name: dict(zip(rates, metrics.mean_intervals(np.column_stack(list(v.values())), clusters), strict=True))
        for name, v in values.items()
    }
    paired = against_first([v[main_metric("q2d")] for v in values.values()])
    show([files_table(told, [None, *paired])])


def text_run_folder(model: str) -> Path | None:
    """The run that a --model names, by its own folder or by its model/ folder; None for any other model."""
    path = Path(model)
    if (path / "model" / "modules.json").is_file():
        return path
    if path.name == "model" and (path / "mmclip.json").is_file() and (path.parent / "config.yaml").is_file():
        return path.parent
    return None


def load_text_run(path: str) -> Results:
    """A finished text evaluation. Errors: UserError for files that are missing, damaged, not whole, or not of text."""
    results = load_results(path)
    if "q2d" not in results.json["retrieval"]:
        raise UserError(f"{printable(path)}: not a text evaluation: it has no direction q2d; see scripts/evaluate.py")
    return results
