"""Training: one Trainer for both modalities, each a Task.

A ``Task`` (``ClipTask``, ``TextTask``) has the network, loss, batches, schedule, validation and export of a modality;
``TrainStep`` takes one exact optimizer step, ``Trainer`` all of them, with logs, checkpoints, signals and ``Monitors``.
Imports evaluation and what is below it; prints no tables. The names here are imported when they are used.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "ClipTask": "clip_task",
    "Monitors": "monitors",
    "Task": "task",
    "TextTask": "text_task",
    "TrainStep": "step",
    "Trainer": "trainer",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
