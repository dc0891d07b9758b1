"""Finished runs, read back to be compared: all of what a comparison needs is tried when they are loaded."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

from mmclip.errors import UserError, printable
from mmclip.evaluation.comparison import compare
from mmclip.evaluation.results import Results, load_results
from mmclip.reporting.table_parts import make_console
from mmclip.reporting.tables import print_run


def load_runs(paths: list[str]) -> dict[str, Results]:
    """Finished runs by a short name: the folder's, or the whole path where two folders are called alike. Errors:
    UserError, as of ``load_run``."""
    return {name: load_run(path) for name, path in run_names(paths).items()}


def run_names(paths: list[str]) -> dict[str, str]:
    """Short name -> path: the folder's name, or the whole path where two are called alike.

    >>> run_names(["logs/a", "logs/b"]), run_names(["old/a", "new/a"])
    ({'a': 'logs/a', 'b': 'logs/b'}, {'old/a': 'old/a', 'new/a': 'new/a'})
    """
    names = [Path(p).name for p in paths]
    return {n if names.count(n) == 1 else p: p for n, p in zip(names, paths, strict=True)}


def load_run(path: str) -> Results:
    """A finished run's results. Errors: UserError for files that are missing, damaged, or not whole."""
    results = load_results(path)
    _require_whole(results, path)
    return results


@contextlib.contextmanager
def told_of(where: str) -> Iterator[None]:
    """What a results.json of somebody else, or a damaged one, lacks shows only where it is used."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError, OverflowError) as error:
        why = f"{type(error).__name__} {printable(error, 100)}"
        raise UserError(f"{printable(where)}: not the whole results of an evaluated run: {why}") from None


def _require_whole(results: Results, where: str) -> None:
    """Show a run to nobody and compare it with itself, so that a fault is its own and no other run's."""
    with told_of(where):
        print_run(results, console=make_console(io.StringIO()), groups=True)
        compare(results, results, resamples=2)
        float(results.json["evaluation"]["native"]["gamma_d"])
