"""evaluate.py: a model and a data set -> results; finished runs -> a comparison and a verdict."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from mmclip import distributed
from mmclip.config import DiagnoseConfig, EncodeConfig, EvaluateConfig
from mmclip.data.datasets import open_bank, open_evaluation
from mmclip.data.distractors import parse_distractors
from mmclip.embeddings.encode import Runner
from mmclip.embeddings.features import Source
from mmclip.embeddings.files import load_embeddings
from mmclip.errors import UserError, printable
from mmclip.evaluation.comparison import verdicts
from mmclip.evaluation.eval_set import EvalSource, draw_bank, image_text_sets, saved_bank
from mmclip.evaluation.evaluate import evaluate, evaluate_model, ranking_bars
from mmclip.evaluation.results import Results, load_results, load_runs, save_results
from mmclip.evaluation.zero_shot import ZeroShot, open_classes, told_zero_shot
from mmclip.io import default_output, flat, output_folder
from mmclip.models import metadata
from mmclip.models.factory import load_clip
from mmclip.models.metadata import native_exponents, trained_scales
from mmclip.reporting.run_tables import diagnostics_tables
from mmclip.reporting.summary import print_ending
from mmclip.reporting.table import show
from mmclip.retrieval.hubness import TRANSDUCTIVE, Bank, bank_side
from mmclip.similarity import CLIP_DIRECTIONS, Direction


def run(settings: EvaluateConfig) -> None:
    """Everything that evaluate.py does. Errors: UserError, one line."""
    if settings.plot is not None:
        plot = Path(settings.plot)
        if plot.suffix.lower() != ".png" or plot.is_dir() or not plot.parent.is_dir():
            raise UserError(f"--plot {settings.plot!r}: the name of a .png file in a folder that exists is expected")
    runs: dict[str, Results] = {}
    others = load_runs(settings.compare or [])
    control = load_results(settings.control) if settings.control else None
    baseline = load_results(settings.baseline) if settings.baseline else None
    if settings.model is not None or settings.embeddings is not None:
        name, results = _evaluate(settings)
        runs[name] = results
    runs |= {n if n not in runs else f"{n} (compared)": r for n, r in others.items()}
    found = [v for r in runs.values() for v in verdicts(r, control, baseline)] if control is not None else []
    if settings.control is not None and not found:
        raise UserError(
            f"--control {printable(settings.control)}: none of the runs has its loss and seed and keeps its documents' "
            "length (gamma_d below 1), so there is nothing to give a verdict on"
        )
    new = settings.model is not None or settings.embeddings is not None
    if not new or len(runs) > 1 or found:  # one evaluated model alone has had its ending
        print_ending(runs, next(iter(runs)) if new else None, verdicts=found, verbose=settings.verbose)
    if settings.plot is not None:
        from mmclip.reporting.figures import tradeoff_figure, write_png

        write_png(tradeoff_figure(runs), settings.plot)
        print(f"picture: {printable(settings.plot)}")


def _evaluate(settings: EvaluateConfig) -> tuple[str, Results]:
    if settings.embeddings is not None:
        return _evaluate_embeddings(settings, settings.embeddings)
    assert settings.model is not None
    folder = run_folder(settings.model)
    device = distributed.start(settings.device)
    kinds, _ = parse_distractors(settings.distractors or [])
    data, distractors = open_evaluation(settings)
    bank_data = open_bank(settings, data) if settings.bank not in (None, TRANSDUCTIVE) else None
    classes = (
        open_classes(settings.zeroshot_data, settings.zeroshot_split) if settings.zeroshot_data is not None else None
    )
    extra = "".join(f" and {len(d):,} {printable(name, 60)}" for name, d in distractors.items())
    print(
        f"evaluating on {len(data):,} images of {printable(data.path)} [{printable(data.split, 60)}]{extra}",
        file=sys.stderr,
    )
    model = load_clip(settings.model, settings.pretrained)
    model.towers.to(device)
    runner = make_runner(settings, device)
    name = folder.name if folder else settings.model
    told_name = name if settings.pretrained is None else f"{name}-{Path(settings.pretrained).stem}"
    where = output_folder(settings.output, default_output(folder, told_name, data.path, data.split))
    source = EvalSource.open(data, distractors, model, runner, kinds=kinds)
    bank = Bank(TRANSDUCTIVE) if settings.bank == TRANSDUCTIVE else None
    if bank_data is not None:
        sides = sorted(bank_side(d.opposite) for d in trained_scales(model.metadata))
        bank = draw_bank(Source(bank_data), sides, settings.bank_size, model, runner, settings.seed, data)
    results = evaluate_model(
        source,
        model,
        runner,
        model.metadata,
        {
            "model": settings.model,
            "pretrained": settings.pretrained,
            "weights": "random" if model.loaded_scale is None else "loaded",
            "versions": metadata.versions(),
        },
        classes=ZeroShot.open(classes, model, runner) if classes else None,
        bank=bank,
        **_how(settings),
    )
    return name, _report(settings, results, name, where)


def _evaluate_embeddings(settings: EvaluateConfig, file: str) -> tuple[str, Results]:
    saved = load_embeddings(file)
    sets = image_text_sets(saved, {"path": file, "split": None})
    scales = trained_scales(saved.metadata) | {
        Direction(d): alpha for d, alpha in saved.alpha.items() if alpha is not None
    }
    bank = None
    if settings.bank is None and saved.evidence:
        evidence = {Direction(d): x for d, x in saved.evidence.items()}
        bank = Bank(str(saved.bank.get("name", "not told")), evidence=evidence, sizes=saved.bank_counts("size"))
        bank.overlap = saved.bank_counts("overlap")
    elif settings.bank is not None:
        sides = sorted(bank_side(d.opposite) for d in scales)
        bank = (
            Bank(TRANSDUCTIVE)
            if settings.bank == TRANSDUCTIVE
            else saved_bank(settings.bank, sides, settings.bank_size, saved, settings.seed)
        )
    name = Path(file).stem
    where = output_folder(settings.output, Path("logs") / "evaluations" / flat(str(Path(file).resolve())))
    print(f"evaluating {len(saved.image):,} images and {len(saved.text):,} texts of {printable(file)}", file=sys.stderr)
    about = {"model": saved.model or name, "trained_with": dict(saved.metadata), "versions": metadata.versions()}
    native = native_exponents(saved.metadata)
    with ranking_bars() as progress:
        results = evaluate(sets, native, CLIP_DIRECTIONS, scales=scales, bank=bank, metadata=about,
                           progress=progress, **_how(settings))  # fmt: skip
    return name, _report(settings, results, name, where)


def _how(settings: EvaluateConfig) -> dict[str, Any]:
    """What ``evaluate`` is told by flags alone."""
    fisher = isinstance(settings, DiagnoseConfig) and settings.fisher
    return {"fisher": fisher, "seed": settings.seed, "block_bytes": settings.block_bytes}


def make_runner(settings: EncodeConfig, device: torch.device) -> Runner:
    """How the scripts that only encode run a model; "auto" is float32 for them."""
    precision = "fp32" if settings.precision == "auto" else settings.precision
    return Runner(device, precision, settings.batch_size, settings.workers)


def _report(settings: EvaluateConfig, results: Results, name: str, where: Path) -> Results:
    if isinstance(settings, DiagnoseConfig):
        show([t[0] for pool in results.pools if (t := diagnostics_tables({name: results}, pool)) is not None])
    if not settings.compare or settings.verbose:
        print_ending({name: results}, verbose=settings.verbose)
    print_zero_shot(results)
    print(f"results: {printable(save_results(results, where))}")
    if settings.report:
        print_report(name, where)
    return results


def run_folder(model: str) -> Path | None:
    """The run that a --model names, by its own folder or by its model/ folder; None for any other model."""
    path = Path(model.removeprefix("local-dir:"))
    if (path / "model" / "open_clip_config.json").is_file():
        return path
    if path.name == "model" and (path / "mmclip.json").is_file() and (path.parent / "config.yaml").is_file():
        return path.parent
    return None


def print_zero_shot(results: Results) -> None:
    """Print zero-shot accuracy, where it was measured."""
    if "zero_shot" in results.json:
        print(told_zero_shot(results.json["zero_shot"]))


def print_report(name: str, folder: Path) -> None:
    """Write the page of a run whose results are saved; a fault of it is printed and ends nothing."""
    from mmclip.reporting.page import REPORT_FILE, write_report  # matplotlib and jinja2 take a second to import

    try:
        print(f"report: {printable(write_report({name: folder}, folder / REPORT_FILE))}")
    except UserError as error:
        print(f"no report: {error}", file=sys.stderr)
