"""Where evaluations go when nobody says: never over a run's own results.json, which may be of other data."""

from __future__ import annotations

import re
from pathlib import Path

from mmclip.errors import UserError, printable


def output_folder(asked: str | None, default: Path) -> Path:
    """--output, made: a place that cannot be written is found before the work, not after. Errors: UserError."""
    where = Path(asked) if asked else default
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {printable(where)}: cannot be made a folder: {error.strerror}") from None
    return where


def default_output(run: Path | None, model: str, data: str, split: str) -> Path:
    """In the run that is evaluated, or, for any other model, in logs."""
    parent = run / "evaluations" if run else Path("logs") / "evaluations" / flat(model)
    return parent / flat(f"{Path(data).resolve().name}-{split}")


def flat(name: str) -> str:
    """A name that is one folder's.

    >>> flat("sentence-transformers/all-MiniLM-L6-v2")
    'sentence-transformers-all-MiniLM-L6-v2'
    """
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")
