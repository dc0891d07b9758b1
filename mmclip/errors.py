"""The exception for bad flags, data and files, and what its messages are made of."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Sequence
from typing import Any


class UserError(ValueError):
    """One line for a person: names what was received and what is valid.

    Commands print it after ``error:`` and leave with exit code 2; library users catch it as a ValueError.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, 4000))


def printable(text: object, limit: int = 300) -> str:
    """``text`` on one line, control and direction-changing characters escaped, cut at ``limit`` characters.

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
    own = error.strerror if isinstance(error, OSError) else None
    return printable(own or str(error) or type(error).__name__, limit)


def nearest(name: str, valid: Sequence[str]) -> str:
    """'; did you mean X?' for the valid name closest to ``name``, else ''.

    >>> nearest("lrr", ["lr", "wd"])
    '; did you mean lr?'
    """
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def parse_json(text: bytes) -> Any:
    """Read a JSON document in which every number is finite. Raises ValueError for any other."""

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise ValueError(f"{printable(number, 40)} is not a finite number")
        return value

    try:
        return json.loads(text.decode("utf-8"), parse_float=finite, parse_constant=finite)
    except RecursionError:
        raise ValueError("nested too deep") from None
