"""mmclip evaluate, diagnose and evaluate-text: a model and data -> results; finished runs -> comparison and verdict."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmclip import distributed, metrics
from mmclip.config import DiagnoseConfig, EncodeConfig, EvaluateConfig, TextEvaluateConfig
from mmclip.data.beir import BeirCollection, open_beir
from mmclip.data.datasets import open_bank, open_evaluation
from mmclip.data.distractors import parse_distractors
from mmclip.embeddings.encode import EncodeOptions
from mmclip.embeddings.features import FeatureSource
from mmclip.embeddings.files import load_embeddings
from mmclip.errors import UserError, printable
from mmclip.evaluation import trec
from mmclip.evaluation.comparison import against_first, verdicts
from mmclip.evaluation.eval_set import EvalSource, draw_bank, image_text_sets, saved_bank, text_set
from mmclip.evaluation.evaluate import evaluate, evaluate_model, list_scores, ranking_bars
from mmclip.evaluation.results import NATIVE, Json, Results, load_results, run_names, save_results
from mmclip.evaluation.zero_shot import ZeroShot, open_classes
from mmclip.io import default_output, flat, output_folder
from mmclip.models.factory import load_clip
from mmclip.models.metadata import native_exponents, trained_scales, versions
from mmclip.models.text_encoder import encoding, load_text_model, native_scoring
from mmclip.reporting.run_tables import TEXT_HEADS, diagnostics_tables, files_table, main_metric
from mmclip.reporting.summary import print_ending, zero_shot_line
from mmclip.reporting.table import show
from mmclip.retrieval.hubness import TRANSDUCTIVE, QueryBank
from mmclip.similarity import CLIP_DIRECTIONS, Direction, Normalization

Config = EvaluateConfig | TextEvaluateConfig


def run(config: Config) -> None:
    """Evaluate what the flags name, and compare it with finished runs. Raises UserError."""
    picture = config.plot if isinstance(config, EvaluateConfig) else None
    plot = Path(picture) if picture is not None else None
    if plot is not None and (plot.suffix.lower() != ".png" or plot.is_dir() or not plot.parent.is_dir()):
        raise UserError(f"--plot {picture!r}: the name of a .png file in a folder that exists is expected")
    others = {name: _load(path, config) for name, path in run_names(config.compare or []).items()}
    control, baseline = (_load(path, config) if path else None for path in (config.control, config.baseline))
    runs = _text_runs(config) if isinstance(config, TextEvaluateConfig) else _image_text_runs(config)
    new = bool(runs)
    runs |= {n if n not in runs else f"{n} (compared)": r for n, r in others.items()}
    judged = [v for r in runs.values() for v in verdicts(r, control, baseline)] if control is not None else []
    if config.control is not None and not judged:
        raise UserError(
            f"--control {printable(config.control)}: none of the runs has its loss and seed and keeps its documents' "
            "norms (gamma_d below 1), so there is nothing to give a verdict on"
        )
    if runs and (not new or len(runs) > 1 or judged):  # one evaluated model alone has had its ending
        print_ending(runs, next(iter(runs)) if new else None, verdicts=judged, verbose=config.verbose)
    if plot is not None:
        from mmclip.reporting.figures import tradeoff_figure, write_png

        write_png(tradeoff_figure(runs), plot)
        print(f"picture: {printable(plot)}")


def _load(path: str, config: Config) -> Results:
    results = load_results(path)
    if isinstance(config, TextEvaluateConfig) and "q2d" not in results.json["retrieval"]:
        raise UserError(f"{printable(path)}: not a text evaluation: it has no direction q2d; see mmclip evaluate")
    return results


def _finish(config: Config, results: Results, name: str, where: Path) -> dict[str, Results]:
    """Print the ending and save; results by name."""
    if isinstance(config, TextEvaluateConfig):
        if config.fisher:
            show((diagnostics_tables({name: results}) or ())[:1])
    elif isinstance(config, DiagnoseConfig):
        show([t[0] for pool in results.pools if (t := diagnostics_tables({name: results}, pool)) is not None])
    if not config.compare or config.verbose:
        print_ending({name: results}, verbose=config.verbose)
    print_zero_shot(results)
    print(f"results: {printable(save_results(results, where))}")
    if isinstance(config, EvaluateConfig) and config.report:
        print_report(name, where)
    return {name: results}


def _image_text_runs(config: EvaluateConfig) -> dict[str, Results]:
    """The evaluated model or file of embeddings by name, {} without one."""
    if config.model is None:
        return {} if config.embeddings is None else _embeddings_run(config, config.embeddings)
    name = config.model
    folder, device = run_folder(name), distributed.start(config.device)
    kinds, _ = parse_distractors(config.distractors or [])
    data, distractors = open_evaluation(config)
    bank_data = open_bank(config, data) if config.bank not in (None, TRANSDUCTIVE) else None
    classes = open_classes(config.zeroshot_data, config.zeroshot_split) if config.zeroshot_data is not None else None
    extra = "".join(f" and {len(d):,} {printable(pool, 60)}" for pool, d in distractors.items())
    place = f"{printable(data.path)} [{printable(data.split, 60)}]"
    print(f"evaluating on {len(data):,} images of {place}{extra}", file=sys.stderr)
    model = load_clip(name, config.pretrained)
    model.towers.to(device)
    options = encode_options(config, device)
    run = folder.name if folder else name
    shown = run if config.pretrained is None else f"{run}-{Path(config.pretrained).stem}"
    where = output_folder(config.output, default_output(folder, shown, data.path, data.split))
    source = EvalSource.open(data, distractors, model, options, kinds=kinds)
    how = _options(config)
    if config.bank == TRANSDUCTIVE:
        how["bank"] = QueryBank(TRANSDUCTIVE)
    elif bank_data is not None:
        sides = sorted(d.document_side for d in trained_scales(model.metadata))
        bank = FeatureSource(bank_data)
        how["bank"] = draw_bank(bank, sides, config.bank_size, model, options, config.seed, data)
    weights = "random" if model.loaded_scale is None else "loaded"
    about = {"model": name, "pretrained": config.pretrained, "weights": weights, "versions": versions()}
    how["classes"] = ZeroShot.open(classes, model, options) if classes else None
    return _finish(config, evaluate_model(source, model, options, model.metadata, about, **how), run, where)


def _embeddings_run(config: EvaluateConfig, file: str) -> dict[str, Results]:
    saved = load_embeddings(file)
    sets = image_text_sets(saved, {"path": file, "split": None})
    known = {Direction(d): alpha for d, alpha in saved.alpha.items() if alpha is not None}
    scales = trained_scales(saved.metadata) | known
    bank = QueryBank(TRANSDUCTIVE) if config.bank == TRANSDUCTIVE else None
    if config.bank not in (None, TRANSDUCTIVE):
        sides = sorted(d.document_side for d in scales)
        bank = saved_bank(str(config.bank), sides, config.bank_size, saved, config.seed)
    elif bank is None and saved.evidence:
        bank = QueryBank(str(saved.bank.get("name", "unknown")), sizes=saved.bank_counts("size"))
        bank.offsets = {Direction(d): x for d, x in saved.evidence.items()}
        bank.overlap = saved.bank_counts("overlap")
    name = Path(file).stem
    where = output_folder(config.output, Path("logs") / "evaluations" / flat(str(Path(file).resolve())))
    print(f"evaluating {len(saved.image):,} images and {len(saved.text):,} texts of {printable(file)}", file=sys.stderr)
    about = {"model": saved.model or name, "trained_with": dict(saved.metadata), "versions": versions()}
    how = _options(config) | {"scales": scales, "bank": bank, "metadata": about}
    with ranking_bars() as progress:
        results = evaluate(sets, native_exponents(saved.metadata), CLIP_DIRECTIONS, progress=progress, **how)
    return _finish(config, results, name, where)


def _options(config: Config) -> dict[str, Any]:
    """Options of ``evaluate`` that are flags."""
    fisher = config.fisher if isinstance(config, DiagnoseConfig | TextEvaluateConfig) else False
    return {"fisher": fisher, "seed": config.seed, "block_bytes": config.block_bytes}


def encode_options(config: EncodeConfig, device: torch.device) -> EncodeOptions:
    """How commands that only encode run a model; their "auto" is float32."""
    precision = "fp32" if config.precision == "auto" else config.precision
    return EncodeOptions(device, precision, config.batch_size, config.workers)


def run_folder(model: str) -> Path | None:
    """The run that --model names, by its own folder or by its model/ folder; None for any other model."""
    path = Path(model.removeprefix("local-dir:"))
    if any((path / "model" / name).is_file() for name in ("open_clip_config.json", "modules.json")):
        return path
    if path.name == "model" and (path / "mmclip.json").is_file() and (path.parent / "config.yaml").is_file():
        return path.parent
    return None


def print_zero_shot(results: Results) -> None:
    """Print zero-shot accuracy, where it was measured."""
    if "zero_shot" in results.json:
        print(zero_shot_line(results.json["zero_shot"]))


def print_report(name: str, folder: Path) -> None:
    """Write the page of a run whose results are saved; a fault of it is printed and ends nothing."""
    from mmclip.reporting.page import REPORT_FILE, write_page  # matplotlib and jinja2 take a second to import

    try:
        print(f"report: {printable(write_page({name: folder}, folder / REPORT_FILE))}")
    except UserError as error:
        print(f"no report: {error}", file=sys.stderr)


def _text_runs(config: TextEvaluateConfig) -> dict[str, Results]:
    """The evaluated model by name, {} without one; TREC run files are measured beside it."""
    if config.data is None:
        return {}
    collection = open_beir(config.data, config.split)
    if config.model is not None and config.run_depth:
        trec.require_trec_ids(collection)
    files: dict[str, trec.Scored] = {}
    for name, path in run_names(config.run or []).items():
        files[name], notes = trec.read_run(Path(path), collection)
        for note in notes:
            print(f"warning: {printable(path)}: {note}", file=sys.stderr)
    runs = _text_run(config, config.model, collection) if config.model is not None else {}
    if files:
        _print_files(collection, runs, files)
    return runs


def _text_run(config: TextEvaluateConfig, name: str, collection: BeirCollection) -> dict[str, Results]:
    folder = run_folder(name)
    where = output_folder(config.output, default_output(folder, name, collection.path, collection.split))
    for note in collection.notes:
        print(f"warning: {printable(collection.path)}: {note}", file=sys.stderr)
    model = load_text_model(config, distributed.start(config.device))
    native, alpha = native_scoring(model)
    removed = f" ({', '.join(model.removed)} taken off)" if model.removed else ""
    queries, documents = collection.queries, collection.documents
    what = f"{len(queries):,} queries and {len(documents):,} documents"
    place = f"{printable(collection.path)} [{printable(collection.split, 60)}]"
    print(f"evaluating {printable(name)}{removed} on {what} of {place}", file=sys.stderr)
    batch = config.encode_batch_size
    vectors = model.encode(queries, "query", batch), model.encode(documents, "document", batch)
    about: Json = {"model": name, "weights": "random" if config.random_init else "loaded", "notes": list(model.notes)}
    about |= {**encoding(model), "trained_with": dict(model.metadata), "versions": versions()}
    data, q2d = text_set(collection, *vectors), Direction.Q2D
    how = _options(config) | {"scales": {q2d: alpha}, "metrics": metrics.TEXT_RATES, "metadata": about}
    with ranking_bars() as progress:
        results = evaluate([data], native, [q2d], depth=config.run_depth, progress=progress, **how)
    if config.run_depth:
        (where / trec.RUNS).mkdir(exist_ok=True)
        for scoring, ranking in results.lists.items():
            exponents = native if scoring == NATIVE else Normalization(scoring).exponents
            scores = list_scores(data, q2d, ranking, exponents)
            path = where / trec.RUNS / f"{scoring}{trec.RUN_ENDING}"
            trec.write_run(path, collection, ranking, scores, f"mmclip.{scoring}", config.run_depth)
        trec.write_qrels(where / trec.QRELS_FILE, collection)
    return _finish(config, results, folder.name if folder else name, where)


def _print_files(collection: BeirCollection, runs: Mapping[str, Results], files: Mapping[str, trec.Scored]) -> None:
    """TREC run files, below the model's native scoring where there is one: nDCG@10 paired with the first."""
    rates, main = trec.measurable(TEXT_HEADS, collection.gains), main_metric("q2d")
    if main not in rates:
        place = printable(collection.path)
        raise UserError(f"--run: {place} has gains that are no small whole numbers, which ir_measures needs")
    values = {
        f"{name} (native)": {k: r.query_values("retrieval", "q2d", NATIVE, k).astype(np.float64) for k in rates}
        for name, r in runs.items()
    }
    values |= {name: trec.measure_run(collection, scored, rates) for name, scored in files.items()}
    clusters, intervals = np.arange(len(collection.queries)), {}
    for name, v in values.items():
        means = metrics.mean_intervals(np.column_stack(list(v.values())), clusters)
        intervals[name] = dict(zip(rates, means, strict=True))
    show([files_table(intervals, [None, *against_first([v[main] for v in values.values()])])])
