"""A study's finished runs, read back: one whose files are damaged is put aside and run again."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mmclip.config.model_config import check_model, export_folder
from mmclip.errors import UserError, printable
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import PER_QUERY_FILE, START_FILE, Results, load_results, whole
from mmclip.study.arms import Arm
from mmclip.study.plan import Cell
from mmclip.study.runner import is_finished, is_locked, seconds_of
from mmclip.training.log import METRICS

Json = dict[str, Any]
DAMAGED = ".damaged"  # behind the name of a folder that is put aside
Read = Callable[[Cell], Any]  # a finished cell, whole, as gather and those after it take it: (numbers, lines, start)


def damaged(cells: Sequence[Cell], read: Read | None = None) -> dict[Cell, str]:
    """The finished cells that cannot be used, and why: their files are not whole, or a cell that is still to run starts
    from a model that is gone. What another process has open is left to it. ``cells``: each after its initial one.
    read: raises UserError or OSError for what is not whole (``read_run``)."""
    read = read or read_run
    found: dict[Cell, str] = {}
    starts = set()  # that something to be run needs
    for cell in reversed(cells):
        if is_finished(cell):
            if is_locked(cell.folder):
                continue
            try:
                read(cell)
                if cell in starts:
                    check_model(f"local-dir:{export_folder(str(cell.folder))}", None)
            except (UserError, OSError) as error:
                found[cell] = str(error)
        if not is_finished(cell) or cell in found:
            starts.add(cell.initial)
    return {cell: found[cell] for cell in cells if cell in found}


def put_aside(cells: Iterable[tuple[Cell, str]]) -> None:
    """Rename damaged cells' folders, over those that were put aside earlier, and say so: they are run again."""
    for cell, why in cells:
        aside = cell.folder.with_name(cell.folder.name + DAMAGED)
        shutil.rmtree(aside, ignore_errors=True)
        cell.folder.rename(aside)
        told = f"{printable(cell.name, 80)}: damaged, is run again; what is there is now {printable(aside.name, 120)}"
        print(f"{told}: {printable(why, 400)}", file=sys.stderr)


def gather(cells: Sequence[Cell]) -> tuple[list[Arm], dict[Cell, str]]:
    """(the finished runs of a study by arm, in the order of its file; the finished cells that cannot be read, and
    why)."""
    arms, unreadable = by_arm(cells, read_run)
    return [_arm(name, found) for name, found in arms.items()], unreadable


def by_arm(cells: Sequence[Cell], read: Read) -> tuple[dict[str, dict[Cell, Any]], dict[Cell, str]]:
    """(arm -> its finished cells as ``read`` gives them, arms without any left out; the unreadable ones, and why)."""
    arms: dict[str, dict[Cell, Any]] = {}
    unreadable: dict[Cell, str] = {}
    for cell in cells:
        found = arms.setdefault(cell.arm, {})
        if is_finished(cell):
            try:
                found[cell] = read(cell)
            except (UserError, OSError) as error:
                unreadable[cell] = str(error)
                continue
            if not found[cell][1]:
                print(f"{printable(cell.name, 80)}: no {METRICS}, so no curves", file=sys.stderr)
    return {name: found for name, found in arms.items() if found}, unreadable


def _arm(name: str, found: dict[Cell, tuple[Results, list[Json], Json]]) -> Arm:
    first = next(iter(found))
    return Arm(
        name,
        first.settings,
        {c.seed: results for c, (results, _, _) in found.items()},
        {c.seed: lines for c, (_, lines, _) in found.items()},
        {c.seed: start for c, (_, _, start) in found.items()},
        first.initial.arm if first.initial else None,
        seconds_by_seed(found),
    )


def seconds_by_seed(cells: Iterable[Cell]) -> dict[int, float]:
    return {c.seed: s for c in cells if (s := seconds_of(c)) is not None}


def read_run(cell: Cell) -> tuple[Results, list[Json], Json]:
    """(results, lines of metrics.jsonl, start.json or {}) of a finished cell, whole. Errors: UserError, OSError."""
    results = load_results(str(cell.folder))
    with whole(str(cell.folder)):
        require_lengths(results, str(cell.folder / PER_QUERY_FILE))
    return results, read_lines(cell.folder / METRICS), read_start(cell.folder / START_FILE)


def require_lengths(results: Results, where: str) -> None:
    """Errors: UserError where an array over queries has not a row for each."""
    for pool, section in results.pools.items():
        for direction in section["retrieval"]:
            n = len(results.array(f"{pool}/{direction}/queries"))
            asked = results.json["data"]["n_queries"][direction]
            if pool == MAIN_POOL and n != asked:
                raise UserError(f"{printable(where)}: {n:,} queries of {direction}, and {asked:,} in results.json")
            results.array(f"{pool}/{direction}/topk_moments")
            for name, values in results.per_query.items():
                rows = 1 if name.endswith("/length_level") else n
                if name.startswith(f"{pool}/{direction}/") and values.shape[:1] != (rows,):
                    shape = "x".join(map(str, values.shape))
                    raise UserError(f"{printable(where)}: {printable(name, 100)} is {shape}: expected {rows:,} rows")


def read_lines(path: Path) -> list[Json]:
    """metrics.jsonl; [] where there is none. A last line that was cut is left out. Errors: UserError naming the line
    that is none."""
    if not path.is_file():
        return []
    texts = [t for t in path.read_text(encoding="utf-8", errors="replace").split("\n") if t.strip()]
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            if number == len(texts):
                break
            line = None
        step = line.get("step") if isinstance(line, dict) else None
        if isinstance(step, bool) or not isinstance(step, int | float) or not math.isfinite(step):
            raise UserError(f"{printable(path)}: line {number} is no line of a run's log: {printable(text, 60)}")
        lines.append(line)
    return lines


def read_start(path: Path) -> Json:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{printable(path)}: not readable as JSON: {printable(error, 100)}") from None
    if not isinstance(found, dict):
        raise UserError(f"{printable(path)}: expected a JSON object, got {printable(found, 60)}")
    return found
