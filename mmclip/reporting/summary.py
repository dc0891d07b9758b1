"""What a run or a comparison means: the few plain lines that every command ends with and every page opens with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmclip.errors import UserError, printable
from mmclip.evaluation.comparison import change, same_data
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import CORRECTED, NATIVE, Results
from mmclip.models.metadata import trained_directions
from mmclip.reporting.run_tables import (
    FEW_CLUSTERS,
    HEADS,
    LONG,
    TEXT_HEADS,
    Runs,
    comparison_tables,
    main_metric,
    overview,
    place,
    run_tables,
    verdict_lines,
)
from mmclip.reporting.table import Cell, rate, rate_cell, show, signed, text_cell

Json = dict[str, Any]
ROWS = 3  # runs of a summary: the reference, the judged one, and one more


@dataclass
class Summary:
    """Rates of runs and what they mean.

    Attributes:
        columns: what is shown, and each direction.
        rows: (run, its rates by direction).
        facts: (heading, sentence): answer, because, norms, how sure, scope.
    """

    columns: list[str]
    rows: list[tuple[str, list[Cell]]]
    facts: list[tuple[str, str]]


def summarize(
    runs: Runs, subject: str | None = None, start: Json | None = None, verdicts: Sequence[Json] = ()
) -> Summary:
    """What a run is worth beside another one, or beside itself without norms.

    Args:
        runs: name -> results over the same data.
        subject: the run that is judged [of several the first after the first that keeps its documents' norms]. The
            first other run is its reference; a single run is compared with what it was before training, or with its
            own ranking by cosine.
        start: content of start.json: the judged run before its first step.
        verdicts: of comparison.verdict on the judged run.

    Errors: UserError where the runs were not evaluated on the same data.
    """
    names = list(runs)
    subject = subject or judged(runs)
    run, reference = runs[subject], next((n for n in names if n != subject), None)
    directions = list(run.json["retrieval"])
    metric = main_metric(directions[0])
    heads = TEXT_HEADS if directions == ["q2d"] else HEADS
    own = {d: _paired(run, d, metric, "cosine", run, NATIVE if _by_norm(run, d, metric) else "dot") for d in directions}
    uses = any(_by_norm(run, d, metric) for d in directions)
    changes, against = own, "ranking with norms against ranking by cosine" if uses else "ranking by dot against cosine"
    ways, theirs = dict.fromkeys(directions, NATIVE), {}
    if reference is not None:
        same_data(runs[reference], run)
        ways = {d: served(run, d) for d in directions}
        theirs = {d: ways[d] if ways[d] in runs[reference].json["retrieval"][d] else NATIVE for d in directions}
        changes = {d: _paired(runs[reference], d, metric, theirs[d], run, ways[d]) for d in directions}
        against = f"{printable(subject, 40)} against {printable(reference, 40)}"
    elif start is not None:
        ways = {d: served(run, d) for d in directions}
        changes = {d: _apart(start, run, d, metric, ways[d]) for d in directions}
        against = f"{printable(subject, 40)} against the untrained model"
    because = ", ".join(f"{LONG[d]} {signed(c['delta'])}" + (f" [{', '.join(map(signed, c['ci']))}]" if c["ci"] else "")
                        for d, c in changes.items())  # fmt: skip
    norms = _norms(verdicts)
    if not norms and uses and changes is not own:
        norms = f"ranking with norms against ranking by cosine: {_relations(own)}"
    shown = [n for n in dict.fromkeys([reference, subject, *names]) if n is not None][:ROWS]
    by = {n: theirs if n == reference else {d: served(runs[n], d) for d in directions} for n in shown}
    rows = [(_called(n, runs[n]), [_cell(runs[n], d, metric, by[n][d]) for d in directions]) for n in shown]
    if start is not None and len(rows) < ROWS:
        rows.insert(0, ("the untrained model", [_cell(Results(start, {}), d, metric, NATIVE) for d in directions]))
    facts = [("answer", f"{against}: {_relations(changes, ways)}"), ("because", f"{heads[metric]} {because}"), ("norms", norms),
             ("how sure", _sure(runs, changes, directions)), ("scope", _scope(run))]  # fmt: skip
    columns = [f"{heads[metric]}, 95% interval", *(LONG[d] for d in directions)]
    return Summary(columns, rows, [(head, text) for head, text in facts if text])


def judged(runs: Runs) -> str:
    """The run that a comparison is about: the first after the first that keeps its documents' norms, else the second."""
    first, *others = runs
    keep = [name for name in others if runs[name].json["evaluation"]["native"]["gamma_d"] != 1]
    return next(iter([*keep, *others]), first)


def summary_lines(
    runs: Runs, subject: str | None = None, start: Json | None = None, verdicts: Sequence[Json] = ()
) -> list[str]:
    """:func:`summarize` as at most nine plain lines for a terminal."""
    summary = summarize(runs, subject, start, verdicts)
    table = [summary.columns, *([head, *(f"{c.text} {c.detail}" for c in cells)] for head, cells in summary.rows)]
    wide = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, wide, strict=True)).rstrip() for row in table]
    return lines + [f"{head:<8}  {text}" for head, text in summary.facts]


def print_ending(
    runs: Runs,
    subject: str | None = None,
    start: Json | None = None,
    verdicts: Sequence[Json] = (),
    verbose: bool = False,
) -> None:
    """Print what every command ends with; ``verbose``: every table before it."""
    if verbose:
        show([*(comparison_tables(runs) if len(runs) > 1 else []), *run_tables(runs, groups=True)])
        print("\n".join(verdict_lines(verdicts)), end="\n" * bool(verdicts))
    elif len(runs) > ROWS:
        show([overview(runs)])
    print("\n".join(summary_lines(runs, subject, start, verdicts)))


def served(run: Results, direction: str) -> str:
    """Scoring that serves a direction: native where it was trained, corrected where only its opposite was."""
    try:
        trained = [d.value for d in trained_directions(run.json.get("trained_with") or {})]
    except UserError:
        return NATIVE
    return CORRECTED if CORRECTED in run.json["retrieval"][direction] and direction not in trained else NATIVE


def _by_norm(run: Results, direction: str, metric: str) -> bool:
    """Whether the native ranking of a direction is another one than by cosine."""
    native, cosine = (run.query_values(MAIN_POOL, direction, s, metric) for s in (NATIVE, "cosine"))
    return not np.array_equal(native, cosine)


def _paired(a: Results, direction: str, metric: str, before: str, b: Results, after: str) -> Json:
    first, second = (
        a.query_values(MAIN_POOL, direction, before, metric),
        b.query_values(MAIN_POOL, direction, after, metric),
    )
    return change(first.astype(np.float64), second.astype(np.float64), b.clusters(MAIN_POOL, direction))


def _apart(start: Json, run: Results, direction: str, metric: str, scoring: str) -> Json:
    """Difference to the untrained model, whose queries' numbers are not kept: noise where the intervals overlap."""
    before, after = start["retrieval"][direction][NATIVE], run.json["retrieval"][direction][scoring]
    delta, ends = after[metric] - before[metric], [n["ci"][metric] or [0.0, 1.0] for n in (before, after)]
    return {"delta": delta, "ci": None, "within_noise": ends[0][0] <= ends[1][1] and ends[1][0] <= ends[0][1]}


def _relations(changes: dict[str, Json], scorings: Mapping[str, str] | None = None) -> str:
    """What differences come to in words, with scorings other than native.

    >>> noise, up = {"delta": 0.1, "within_noise": True}, {"delta": 0.1, "within_noise": False}
    >>> _relations({"i2t": noise, "t2i": noise})
    'within noise in both directions'
    >>> _relations({"i2t": up, "t2i": noise}, {"i2t": "native", "t2i": "corrected"})
    'image → text better; text → image within noise (corrected)'
    """
    words = {
        d: "within noise" if c["within_noise"] else "better" if c["delta"] > 0 else "worse" for d, c in changes.items()
    }
    way = {d: f" ({s})" if s != NATIVE else "" for d, s in (scorings or dict.fromkeys(changes, NATIVE)).items()}
    if len(changes) == 2 and len({(words[d], way[d]) for d in changes}) == 1:
        first = next(iter(changes))
        return f"{words[first]} in both directions{way[first]}"
    return "; ".join(f"{LONG[d]} {words[d]}{way[d]}" for d in changes)


def _norms(verdicts: Sequence[Json]) -> str:
    """Verdicts on the main pool in a line: learned, useful, and why."""
    found = next((v for v in verdicts if v["pool"] == MAIN_POOL), None)
    if found is None:
        return ""
    learned, useful = found["learned"], found["useful"]
    words = {True: "learned", False: "not shown to be learned", None: "learned or not: open"}[learned["verdict"]]
    if "d_run" in learned:
        words += f" (d {learned['d_run']:+.2f}, control {learned['d_control']:+.2f})"
    words += "; " + {True: "useful", False: "not shown to be useful", None: "useful or not: open"}[useful["verdict"]]
    if useful["verdict"] is None and useful.get("native_minus_baseline_cosine"):
        words += ", native is within noise of the baseline's cosine"
    return f"{words} ({LONG[found['direction']]})".replace("-", "−")


def _sure(runs: Runs, changes: dict[str, Json], directions: Sequence[str]) -> str:
    first = next(iter(runs.values()))
    clusters = len(np.unique(first.array(f"{MAIN_POOL}/{directions[0]}/clusters")))
    paired = any(c["ci"] for c in changes.values())
    words = "within noise: " + ("the paired 95% interval holds 0" if paired else "the 95% intervals overlap")
    words += f" ({clusters:,} {'queries' if directions == ['q2d'] else 'images with their captions'}"
    words += ", which are few: intervals are too narrow" if clusters < FEW_CLUSTERS else ""
    return words + ("); another training seed may differ by more" if len(runs) > 1 else ")")


def _scope(run: Results) -> str:
    data = run.json["data"]
    split = f" [{printable(data['split'], 40)}]" if data.get("split") is not None else ""
    return f"{printable(data.get('path') or 'data without a name', 60)}{split}, {place({'': run}, MAIN_POOL)}"


def _called(name: str, run: Results) -> str:
    trained = run.json.get("trained_with") or {}
    how = "/".join(str(trained[k]) for k in ("loss", "norm") if trained.get(k))
    return printable(name, 40) + (f" ({printable(how, 30)})" if how else "")


def _cell(run: Results, direction: str, metric: str, scoring: str) -> Cell:
    numbers = run.json["retrieval"].get(direction, {}).get(scoring)
    if numbers is None:
        return text_cell(None)
    cell = rate_cell(numbers[metric], (numbers.get("ci") or {}).get(metric))
    cell.detail += f" {scoring}" if scoring != NATIVE else ""
    return cell


def zero_shot_line(section: Json) -> str:
    """One line: "zero-shot, cifar10 [test], 10 classes, 1,000 images, acc@1: native .104 ±.019, …"."""
    data = section["data"]
    where = f"{printable(Path(data['path']).name, 60)} [{printable(data['split'], 40)}]"
    rates = ", ".join(f"{name} {rate(value, section['ci'][name])}" for name, value in section["acc1"].items())
    skipped = f"; {len(section['skipped'])} skipped" if section["skipped"] else ""
    return (
        f"zero-shot, {where}, {section['n_classes']} classes, {section['n_images']:,} images, acc@1: {rates}{skipped}"
    )
