"""The end of a run: export, evaluation in both directions, results.json and the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mmclip.data.image_text import skipped_line
from mmclip.errors import UserError, printable
from mmclip.evaluation.eval_set import draw_bank
from mmclip.evaluation.evaluate import evaluate_model
from mmclip.evaluation.results import START_FILE, Results, save_results
from mmclip.evaluation.zero_shot import ZeroShot, told_zero_shot
from mmclip.models import metadata
from mmclip.models.export import export_clip
from mmclip.models.metadata import trained_directions
from mmclip.reporting.summary import print_ending
from mmclip.retrieval.hubness import bank_side
from mmclip.similarity import CLIP_DIRECTIONS
from mmclip.training.trainer import Trainer


def finish(trainer: Trainer, others: dict[str, Results], classes: ZeroShot | None = None) -> Results | None:
    """Write ``model/``, evaluate, also on ``classes``, write results.json and per_query.npz, print the tables,
    ``others`` (finished runs by name) beside this one's. Rank 0 only."""
    settings, loss, data = trainer.settings, trainer.loss, trainer.source.data
    trained = {
        **metadata.clip_metadata(settings, loss.similarity, loss.trained, trainer.model.initial),
        "data": {
            "path": data.path,
            "split": data.split,
            "key": trainer.fingerprints["data"],
            "n_images": len(data),
            "permuted_pairs": data.permuted,
        },
    }
    about = {
        **trained,
        "model": settings.model,
        "steps": trainer.step,
        "seed": settings.seed,
        "versions": metadata.versions(),
    }
    log_alpha = float(loss.similarity.logit_scale(metadata.main_direction(loss.trained)).detach())
    export_clip(trainer.folder / "model", trainer.model, log_alpha, about)
    if trainer.skipped.why:
        print(f"training data: {skipped_line(trainer.skipped.why)}", file=sys.stderr)
    print(f"model: {printable(trainer.folder / 'model')}", file=sys.stderr)
    if trainer.val_source is None:
        print("no evaluation data: give --val-data, or evaluate later with scripts/evaluate.py", file=sys.stderr)
        return None
    sides = {bank_side(d.opposite) for d in trained_directions(trained)} if settings.bank_size else set()
    results = evaluate_model(
        trainer.val_source,
        trainer.model,
        trainer.runner,
        trained,
        {"model": settings.model, "seed": settings.seed, "versions": metadata.versions()},
        classes=classes,
        bank=draw_bank(trainer.source, sorted(sides), settings.bank_size, trainer.model, trainer.runner, settings.seed),
        seed=settings.seed,
    )
    # the last validation: the run's alarms look at it, too
    last = {
        f"val_{d.value}_success@1_{scoring}": results.json["retrieval"][d.value][scoring]["success@1"]
        for d in CLIP_DIRECTIONS
        for scoring in ("native", "cosine")
    }
    for alarm in trainer.alarms.validation(last):
        print(f"alarm: {alarm.text}", file=sys.stderr)
        trainer.told.append(alarm)
    results.json["alarms"] = {a.name: a.text for a in trainer.told}
    save_results(results, trainer.folder)
    name = trainer.folder.name
    start = trainer.folder / START_FILE
    before = json.loads(start.read_text(encoding="utf-8")) if start.is_file() else None
    print_ending({name: results, **others}, name, before, verbose=settings.verbose)
    print_zero_shot(results)
    print(f"results: {printable(trainer.folder / 'results.json')}")
    if settings.report:
        print_report(name, trainer.folder)
    if settings.strict and trainer.told:
        raise UserError(f"alarm (--strict): {trainer.told[0].text}")
    return results


def print_zero_shot(results: Results) -> None:
    if "zero_shot" in results.json:
        print(told_zero_shot(results.json["zero_shot"]))


def print_report(name: str, folder: Path) -> None:
    """Write the page of a run whose results are saved; what is wrong with it is said and ends nothing."""
    from mmclip.reporting.page import REPORT_FILE, write_report  # matplotlib and jinja2 take a second to import

    try:
        print(f"report: {printable(write_report({name: folder}, folder / REPORT_FILE))}")
    except UserError as error:
        print(f"no report: {error}", file=sys.stderr)
