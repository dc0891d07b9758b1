"""Why a run cannot go on, in a line each, with what to try. Words only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmclip.data.image_text import named
from mmclip.errors import UserError, printable


def not_finite(facts: Mapping[str, Any], known: Path, kept: bool) -> UserError:
    """A step whose loss or gradient is NaN or infinite. facts: mmclip.training.step.NotFinite's, written to ``known``; kept:
    whether the state before it is a checkpoint."""
    keys = facts["keys_with_non_finite_features"] or facts["keys"]
    shown = ", ".join(printable(k, 40) for k in keys[:4]) + (" …" if len(keys) > 4 else "")
    return UserError(
        f"step {facts['step']}: the loss is {facts['loss']}, and {len(facts['gradients_not_finite'])} gradients "
        f"are not finite; samples: {shown} (all {len(facts['keys'])} in {known})"
        f"{'; the state before it is kept as a checkpoint' if kept else ''}. "
        "Try a lower --lr, --grad-clip-norm 1 or --precision fp32"
        f"{', with --resume latest --may-change and its name' if kept else ''}"
    )


def out_of_memory(step: int, batch_size: int, error: Exception) -> UserError:
    return UserError(
        f"step {step}: out of memory with --batch-size {batch_size}: {printable(error, 120)}. A smaller one with a "
        "larger --accum-freq keeps the loss as it is; --grad-checkpointing saves memory, too"
    )


def no_pictures(steps: int, step: int, skipped: Mapping[str, str]) -> UserError:
    last = named(*list(skipped.items())[-1], 80) if skipped else "one on another process"
    return UserError(
        f"step {step}: no picture could be read in {steps} steps in a row; last: {last}. "
        "The state before them is kept: once the data are back, continue with --resume latest"
    )
