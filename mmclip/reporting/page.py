"""One page for one run or several: what it means, the pictures that show it, then numbers folded by pool.

The page is one file that needs nothing else: its pictures are in it, and lie beside it as SVG for other uses. It runs
no script and loads nothing; text from data is escaped, and its own policy would stop what was not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from mmclip.config import ReportConfig
from mmclip.errors import UserError, printable
from mmclip.evaluation.comparison import verdicts
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import CORRECTED, START_FILE, Results, load_results, run_names, whole
from mmclip.io import write_text_atomically
from mmclip.reporting import run_tables as tables
from mmclip.reporting.examples import examples
from mmclip.reporting.figures import curve_pictures, norm_pictures, style_sheet, tradeoff_picture
from mmclip.reporting.source import ReportRun, read_runs
from mmclip.reporting.summary import judged, summarize
from mmclip.reporting.table import templates

Json = dict[str, Any]
REPORT_FILE = "report.html"
DETAILED = 6  # runs whose norms and retrievals are shown one by one; a page of more would be too heavy to open
POOLS = {"retrieval": "all images and captions", "full": "only captions that describe everything"}


def write_page(
    runs: Mapping[str, str | Path],
    path: str | Path,
    *,
    control: str | Path | None = None,
    baseline: str | Path | None = None,
) -> Path:
    """Write the page of finished runs.

    Pictures are written to the folder of the page's name without its ending.

    Args:
        runs: name -> folder or results.json; the first is what others are compared with.
        path: an .html file.
        control, baseline: runs of comparison.verdict.

    Errors: UserError, one line, for runs that cannot be read or were evaluated on different data, for a control with
        nothing to control, and for a place that cannot be written.
    """
    path = Path(path)
    if not runs:
        raise UserError("a report needs at least one run")
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise UserError(f"{printable(path)}: the name of an .html file is expected")
    read = read_runs(runs)
    controls, baselines = (load_results(str(p)) if p is not None else None for p in (control, baseline))
    with whole(", ".join(str(run.folder) for run in read)):
        content = _content(read, path.with_suffix(""), controls, baselines)
    page = page_environment().get_template("report.html.j2").render(content)
    write_text_atomically(path, page.encode("utf-8", "backslashreplace").decode())  # a path that is not UTF-8
    return path


def page_environment() -> Environment:
    """Templates with the style of their pictures."""
    environment = templates()
    environment.globals["plot_css"] = style_sheet()
    return environment


def _content(runs: Sequence[ReportRun], folder: Path, control: Results | None, baseline: Results | None) -> Json:
    """What the template shows. The runs are refused, where they must be, before anything is written."""
    results = {run.name: run.results for run in runs}
    changes = tables.differences(results)
    main = next(run for run in runs if run.name == judged(results))
    judgements = [(run.name, v) for run in runs for v in verdicts(run.results, control, baseline)] if control else []
    if control is not None and not judgements:
        raise UserError(
            "the control is of none of the runs: none has its loss and keeps its documents' length (gamma_d below 1)"
        )
    start = _start(main) if len(runs) == 1 else None
    summary = summarize(results, main.name, start, [v for name, v in judgements if name == main.name])
    pools = tables.shared_pools(results)
    folder.mkdir(parents=True, exist_ok=True)
    norms = {run.name: norm_pictures(run, folder) for run in runs[:DETAILED]}
    retrievals = {run.name: examples(run) for run in runs[:DETAILED]}
    directions = tables.directions(results)
    return {
        "title": " · ".join(printable(run.name, 60) for run in runs[:4]) + (" …" if len(runs) > 4 else ""),
        "summary": summary,
        "runs": [(run.number, printable(run.name, 120), _about(run)) for run in runs],
        "colours": {run.name: run.number for run in runs},
        "main": main,
        "tradeoffs": [tradeoff_picture(runs, pool, folder, f"tradeoff-{i}") for i, pool in enumerate(pools)],
        "norms": norms,
        "retrievals": retrievals,
        "hidden": len(runs) - DETAILED,
        "alarms": [(run.name, alarms) for run in runs if (alarms := _alarms(run))],
        "verdicts": [(name, tables.verdict_lines([v])) for name, v in judgements],
        "overview": tables.overview(results, MAIN_POOL, changes),
        "corrected": any(CORRECTED in run.results.json["retrieval"][d] for run in runs for d in directions),
        "pools": [_pool(results, pool, changes) for pool in pools],
        "seeds": [seeds for pool in pools if (seeds := tables.seeds_table(results, pool)) is not None],
        "norm_tables": [(pool, tables.norms_table(results, pool)) for pool in pools],
        "curves": curve_pictures(runs, folder),
        "diagnostics": [(pool, t) for pool in pools if (t := tables.diagnostics_tables(results, pool)) is not None],
        "settings": tables.settings_tables(results, {run.name: run.settings for run in runs}),
        "missing": [text for run in runs for text in _missing(run, norms.get(run.name), retrievals.get(run.name))],
        "several": len(runs) > 1,
        "long": tables.LONG,
    }


def _start(run: ReportRun) -> Json | None:
    """start.json of a run, where it has one of the same data."""
    try:
        start = json.loads((run.folder / START_FILE).read_text(encoding="utf-8"))
        return start if start["data"]["fingerprint"] == run.results.json["data"]["fingerprint"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _about(run: ReportRun) -> str:
    trained, native = run.trained, run.results.json["evaluation"]["native"]
    how = (
        f"{trained['loss']} loss, {trained.get('norm')} normalization"
        if trained.get("loss")
        else "not trained by mmclip"
    )
    gammas = ", ".join(f"γ{role} {native[f'gamma_{role}']:.2f}" for role in "qd")
    seed = f", seed {run.results.json['seed']}" if "seed" in run.results.json else ""
    return printable(f"{run.results.json.get('model') or 'vectors'}: {how}, {gammas}{seed}", 200)


def _pool(runs: tables.Runs, pool: str, changes: Mapping[str, Json]) -> Json:
    return {
        "name": pool,
        "about": POOLS.get(pool, "with more candidates, which match nothing"),
        "overview": None if pool == MAIN_POOL else tables.overview(runs, pool, changes),
        "pairs": [
            (d, tables.retrieval_table(runs, pool, d), tables.change_table(runs, pool, d, changes) if changes else None)
            for d in tables.directions(runs)
        ],
    }


def _alarms(run: ReportRun) -> list[str]:
    alarms = run.results.json.get("alarms")
    return [printable(text, 600) for text in alarms.values()] if isinstance(alarms, dict) else []


def _missing(run: ReportRun, norms: object, retrievals: tuple[str, list[Any], str | None] | None) -> list[str]:
    """Sentences on what a run's folder does not have, and on why."""
    told = []
    if not run.lines:
        why = "its log is not in this folder" if run.trained.get("loss") else "only evaluated, not trained by mmclip"
        told.append(f"no training curves: no metrics.jsonl ({why})")
    if run.settings is None:
        told.append("no settings: no config.yaml that can be read")
    if norms == {}:
        told.append("no pictures of norms: not kept by its evaluation; evaluate it again")
    if retrievals is not None and retrievals[2]:
        told.append(retrievals[2])
    return [f"{printable(run.name, 120)}: {text}" for text in told]


def write_report(config: ReportConfig) -> None:
    """Everything that report.py does. Errors: UserError, one line."""
    runs = run_names(config.runs or [])
    first = Path((config.runs or [""])[0])
    folder = first if first.is_dir() else first.parent
    default = (folder if len(runs) == 1 else folder.absolute().parent) / REPORT_FILE
    page = Path(config.output) if config.output is not None else default
    page.parent.mkdir(parents=True, exist_ok=True)
    write_page(runs, page, control=config.control, baseline=config.baseline)
    print(f"report: {printable(page)}")
