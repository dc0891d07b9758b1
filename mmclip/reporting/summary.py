"""What a run or a comparison means: the lines that commands end with and pages open with."""

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
from mmclip.reporting import run_tables as tables
from mmclip.reporting.run_tables import FEW_CLUSTERS, LONG, Runs, main_metric, metric_cell, metric_heads
from mmclip.reporting.table import Cell, rate, show, signed

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

    def to_lines(self) -> list[str]:
        """At most nine plain lines for a terminal."""
        table = [self.columns, *([head, *(f"{c.text} {c.detail}" for c in cells)] for head, cells in self.rows)]
        wide = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, wide, strict=True)).rstrip() for row in table]
        return lines + [f"{head:<8}  {text}" for head, text in self.facts]


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
    head = metric_heads(directions[0])[metric]
    by_norm = {d: _by_norm(run, d, metric) for d in directions}
    own = {d: _paired(run, d, metric, "cosine", run, NATIVE if by_norm[d] else "dot") for d in directions}
    served_by, references = {d: served(run, d) for d in directions}, dict[str, str]()
    if reference is not None:
        other = runs[reference]
        same_data(other, run)
        references = {d: s if s in other.json["retrieval"][d] else NATIVE for d, s in served_by.items()}
        changes = {d: _paired(other, d, metric, references[d], run, served_by[d]) for d in directions}
        against = f"{printable(subject, 40)} against {printable(reference, 40)}"
    elif start is not None:
        changes = {d: _apart(start, run, d, metric, served_by[d]) for d in directions}
        against = f"{printable(subject, 40)} against the untrained model"
    else:
        changes, served_by = own, dict.fromkeys(directions, NATIVE)
        against = "ranking with norms against ranking by cosine"
        against = against if any(by_norm.values()) else "ranking by dot against cosine"
    because = [
        f"{LONG[d]} {signed(c['delta'])}" + (f" [{', '.join(map(signed, c['ci']))}]" if c["ci"] else "")
        for d, c in changes.items()
    ]
    norms = _norms(verdicts)
    if not norms and any(by_norm.values()) and changes is not own:
        norms = f"ranking with norms against ranking by cosine: {_relations(own)}"
    rows = []
    for name in [n for n in dict.fromkeys([reference, subject, *names]) if n is not None][:ROWS]:
        scorings = references if name == reference else {d: served(runs[name], d) for d in directions}
        rows.append((_called(name, runs[name]), [_cell(runs[name].json, d, metric, scorings[d]) for d in directions]))
    if start is not None and len(rows) < ROWS:
        rows.insert(0, ("the untrained model", [_cell(start, d, metric, NATIVE) for d in directions]))
    facts = {
        "answer": f"{against}: {_relations(changes, served_by)}",
        "because": f"{head} {', '.join(because)}",
        "norms": norms,
        "how sure": _sure(runs, changes, directions),
        "scope": _scope(run),
    }
    columns = [f"{head}, 95% interval", *(LONG[d] for d in directions)]
    return Summary(columns, rows, [(name, text) for name, text in facts.items() if text])


def judged(runs: Runs) -> str:
    """The run that a comparison is about: the second, or the first after it that keeps its documents' norms."""
    first, *others = runs
    keep = [name for name in others if runs[name].json["evaluation"]["native"]["gamma_d"] != 1]
    return next(iter([*keep, *others]), first)


def print_ending(
    runs: Runs,
    subject: str | None = None,
    start: Json | None = None,
    verdicts: Sequence[Json] = (),
    verbose: bool = False,
) -> None:
    """Print what every command ends with; ``verbose``: every table before it."""
    if verbose:
        show([*(tables.comparison_tables(runs) if len(runs) > 1 else []), *tables.run_tables(runs, groups=True)])
        print("\n".join(tables.verdict_lines(verdicts)), end="\n" * bool(verdicts))
    elif len(runs) > ROWS:
        show([tables.overview(runs)])
    print("\n".join(summarize(runs, subject, start, verdicts).to_lines()))


def served(run: Results, direction: str) -> str:
    """Scoring that serves a direction: corrected where only its opposite was trained, else native."""
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
    first = a.query_values(MAIN_POOL, direction, before, metric).astype(np.float64)
    second = b.query_values(MAIN_POOL, direction, after, metric).astype(np.float64)
    return change(first, second, b.clusters(MAIN_POOL, direction))


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
    words = {}
    for d, c in changes.items():
        words[d] = "within noise" if c["within_noise"] else "better" if c["delta"] > 0 else "worse"
    way = {d: f" ({s})" if s != NATIVE else "" for d, s in (scorings or dict.fromkeys(changes, NATIVE)).items()}
    if len(changes) == 2 and len({words[d] + way[d] for d in changes}) == 1:
        return next(f"{words[d]} in both directions{way[d]}" for d in changes)
    return "; ".join(f"{LONG[d]} {words[d]}{way[d]}" for d in changes)


def _norms(verdicts: Sequence[Json]) -> str:
    """Verdicts on the main pool in a line: learned, useful, and why."""
    verdict = next((v for v in verdicts if v["pool"] == MAIN_POOL), None)
    if verdict is None:
        return ""
    learned, useful = verdict["learned"], verdict["useful"]
    words = {True: "learned", False: "not shown to be learned", None: "learned or not: open"}[learned["verdict"]]
    if "d_run" in learned:
        words += f" (d {learned['d_run']:+.2f}, control {learned['d_control']:+.2f})"
    words += "; " + {True: "useful", False: "not shown to be useful", None: "useful or not: open"}[useful["verdict"]]
    if useful["verdict"] is None and useful.get("native_minus_baseline_cosine"):
        words += ", native is within noise of the baseline's cosine"
    return f"{words} ({LONG[verdict['direction']]})".replace("-", "−")


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
    return f"{printable(data.get('path') or 'data without a name', 60)}{split}, {tables.place({'': run}, MAIN_POOL)}"


def _called(name: str, run: Results) -> str:
    trained = run.json.get("trained_with") or {}
    how = "/".join(str(trained[k]) for k in ("loss", "norm") if trained.get(k))
    return printable(name, 40) + (f" ({printable(how, 30)})" if how else "")


def _cell(results: Json, direction: str, metric: str, scoring: str) -> Cell:
    cell = metric_cell(results["retrieval"].get(direction, {}).get(scoring), metric)
    cell.detail += f" {scoring}" if scoring != NATIVE and cell.kind != "none" else ""
    return cell


def zero_shot_line(section: Json) -> str:
    """One line: "zero-shot, cifar10 [test], 10 classes, 1,000 images, acc@1: native .104 ±.019, …"."""
    data = section["data"]
    where = f"{printable(Path(data['path']).name, 60)} [{printable(data['split'], 40)}]"
    rates = ", ".join(f"{name} {rate(value, section['ci'][name])}" for name, value in section["acc1"].items())
    skipped = f"; {len(section['skipped'])} skipped" if section["skipped"] else ""
    sizes = f"{section['n_classes']} classes, {section['n_images']:,} images"
    return f"zero-shot, {where}, {sizes}, acc@1: {rates}{skipped}"
