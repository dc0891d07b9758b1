"""Output of a run while it trains: metrics.jsonl, TensorBoard and a progress line."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmclip.console import progress_bar
from mmclip.errors import UserError, printable
from mmclip.io import write_text_atomically

METRICS = "metrics.jsonl"
LINE_SECONDS = 15.0  # between plain progress lines where stderr is no terminal


def truncate_metrics(path: Path, step: int) -> None:
    """Remove the lines of metrics.jsonl after a step, which a continuation writes again, and a torn last line."""
    if not path.is_file():
        return
    kept = ""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            if json.loads(line)["step"] > step:
                break
            kept += line
    write_text_atomically(path, kept)


class RunLog:
    """Writer of a run's metrics and progress; without a ``folder``, as on all ranks but 0, it writes nothing."""

    def __init__(self, folder: Path | None = None, total: int = 0, start: int = 0, tensorboard: bool = False) -> None:
        self.total_steps, self.last_line = total, -math.inf
        self.file = self.progress = None
        self.writer: Any = None
        if folder is None:
            return
        truncate_metrics(folder / METRICS, start)
        self.file = open(folder / METRICS, "a", encoding="utf-8")  # noqa: SIM115
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)
        self.progress = progress_bar()
        self.progress.start()
        self.task = self.progress.add_task("training", total=total, completed=start, note="")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl, none for no values; numbers that are not finite become null."""
        if self.file is None or not values:
            return
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        try:
            self.file.write(json.dumps({"step": step, **clean}, allow_nan=False) + "\n")
            self.file.flush()
        except OSError as error:
            fault = f"{printable(self.file.name)}: cannot be written: {error.strerror}"
            advice = "free some space and continue from the last checkpoint with --resume latest"
            raise UserError(f"{fault}: {advice}") from None
        for name, value in clean.items() if self.writer else ():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, step)

    def show(self, step: int, note: str) -> None:
        """Move the bar; without a terminal, print a line now and then."""
        if self.progress is None:
            return
        self.progress.update(self.task, completed=step, note=note)
        now = time.monotonic()
        if self.progress.disable and (now - self.last_line > LINE_SECONDS or step == self.total_steps):
            print(f"step {step}/{self.total_steps}  {note}", file=sys.stderr, flush=True)
            self.last_line = now

    def say(self, text: str) -> None:
        """Print a line that stays, above the bar if there is one."""
        if self.progress and self.progress.disable:
            print(text, file=sys.stderr, flush=True)
        elif self.progress:
            self.progress.console.print(text, markup=False, highlight=False)

    def flush(self) -> None:
        """Put all lines on the disk: a checkpoint must not outlive the lines before it."""
        if self.file:
            os.fsync(self.file.fileno())

    def close(self) -> None:
        if self.progress:
            self.progress.stop()
        for sink in (self.writer, self.file):
            if sink:
                sink.close()
