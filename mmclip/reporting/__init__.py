"""Results for readers: tables, pictures, the ending lines of commands, and one HTML page.

Main types: :class:`Table` of :class:`Cell` (terminal, page, CSV), figures.Picture (one SVG for light and dark) and
summary.Summary (answer, because, how sure, scope). May import evaluation and what is below it, never training, study or
tasks.
"""

from __future__ import annotations

from typing import Any

_PLACES = {"Table": "table", "Cell": "table", "run_tables": "run_tables", "comparison_tables": "run_tables",
           "print_ending": "summary", "summarize": "summary", "write_page": "page"}  # fmt: skip
__all__ = ["Cell", "Table", "comparison_tables", "print_ending", "run_tables", "summarize", "write_page"]


def __getattr__(name: str) -> Any:
    """Names of ``__all__``, imported when they are used: a page needs far more than a table."""
    from importlib import import_module

    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
