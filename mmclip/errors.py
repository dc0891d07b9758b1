"""The one exception that means "what was asked for cannot be done": bad flags, bad data, bad files."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


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


def nearest(name: str, valid: Sequence[str]) -> str:
    """'; did you mean X?' for the valid name closest to ``name``, else ''.

    >>> nearest("lrr", ["lr", "wd"])
    '; did you mean lr?'
    """
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
