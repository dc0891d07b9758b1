"""The one exception that means "what was asked for cannot be done": bad flags, bad data, bad files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any


class UserError(ValueError):
    """One line for a person: names what was received and what is valid.

    Scripts print it after ``error:`` and leave with exit code 2; library users catch it as a ValueError. Whatever a
    message took from data or a path, it is shown on one line and cannot control a terminal.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, 4000))


def printable(text: object, limit: int = 300) -> str:
    """``text`` on one line with control and direction-changing characters escaped, cut at ``limit`` characters.

    Used wherever a message shows something that came from data (a caption, a key, a path).

    >>> printable("two\\nlines")
    'two\\\\nlines'
    """
    start = str(text)[: limit + 1]  # no more can be shown, and a text may be a megabyte
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in start)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def reason(error: Exception, limit: int = 300) -> str:
    """What an error says, on one line, to stand behind a path: an OSError's own message names that path again.

    >>> reason(FileNotFoundError(2, "No such file or directory", "a.png"))
    'No such file or directory'
    >>> reason(AssertionError())
    'AssertionError'
    """
    told = error.strerror if isinstance(error, OSError) else None
    return printable(told or str(error) or type(error).__name__, limit)


def require(settings: Any, names: Iterable[str], valid: str, ok: Callable[[Any], bool]) -> None:
    """Numbers that are not given are right. Errors: UserError naming the flag, what it was given and what is valid."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not (math.isfinite(value) and ok(value)):
            finite = "" if math.isfinite(value) else ", and a finite one"
            raise UserError(f"--{name.replace('_', '-')} {value}: expected {valid}{finite}")
