"""What a run's model knows before its first step: start.json."""

from __future__ import annotations

import sys

from mmclip import distributed, facts
from mmclip.errors import one_line
from mmclip.files import write_text_atomically
from mmclip.finish import evaluate_source
from mmclip.results import json_text
from mmclip.training import Trainer
from mmclip.zero_shot import ZeroShot

START_FILE = "start.json"


def measure_start(trainer: Trainer, classes: ZeroShot | None) -> None:
    """Write start.json: what results.json holds, of the weights before the first step, with the Fisher condition
    numbers and ``classes``' zero-shot accuracy. ``native`` is the run's own normalization. No weight is changed.

    A run that goes on after its first step keeps what it has. Rank 0 works, others wait.
    """
    path = trainer.folder / START_FILE
    if trainer.step:
        if distributed.world()[0] == 0 and not path.is_file():
            print(f"no {START_FILE}: --measure-start came after step {trainer.step}", file=sys.stderr)
        return
    if distributed.world()[0] == 0 and trainer.val_source is not None:
        settings = trainer.settings
        results = evaluate_source(
            trainer.val_source,
            trainer.model,
            trainer.runner,
            facts.trained_with(trainer.loss, settings, trainer.model.initial),
            {"model": settings.model, "seed": settings.seed, "steps": 0, "versions": facts.versions()},
            classes=classes,
            fisher=True,
            seed=settings.seed,
        )
        write_text_atomically(path, json_text(results.json, indent=1))
        print(f"before the first step: {one_line(path)}", file=sys.stderr, flush=True)
    distributed.barrier()
