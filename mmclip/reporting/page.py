"""One page for one run or several: what it means, pictures, then numbers folded by pool.

The page is one file that needs nothing else: its pictures are in it, and lie beside it as SVG for other uses. It runs
no script and loads nothing; text from data is escaped, and its own policy would stop what was not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment

from mmclip.config import TrainConfig, read_yaml, values_of
from mmclip.errors import UserError, printable
from mmclip.evaluation.comparison import verdicts
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import CORRECTED, START_FILE, Results, load_results, whole
from mmclip.io import write_text_atomically
from mmclip.reporting import run_tables as tables
from mmclip.reporting.examples import examples
from mmclip.reporting.figures import curve_pictures, norm_pictures, style_sheet, tradeoff_picture
from mmclip.reporting.summary import judged, summarize
from mmclip.reporting.table import is_number, templates

Json = dict[str, Any]
REPORT_FILE, CONFIG_FILE, METRICS = "report.html", "config.yaml", "metrics.jsonl"
MAX_LINES = 200_000  # of metrics.jsonl; more are more than a curve can show
DETAILED = 6  # runs whose norms and retrievals are shown one by one; a page of more would be too heavy to open
POOLS = {"retrieval": "all images and captions", "full": "only captions that describe everything"}


class Items(NamedTuple):
    """Rows of the main pool: image_keys [N], captions [M], owner [M] (row of its image, -1 without one)."""

    image_keys: list[str]
    captions: list[str]
    owner: list[int]


@dataclass(frozen=True)
class ReportRun:
    """A finished run, as far as its folder can be read.

    Attributes:
        number: place in the report, which is its colour and in the names of its pictures.
        lines: of metrics.jsonl, by rising step; [] without one.
        settings: of config.yaml; None without one.
        items: None where items.json is missing, or is not of these results.
    """

    number: int
    name: str
    folder: Path
    results: Results
    lines: list[Json]
    settings: Json | None
    items: Items | None

    @property
    def trained(self) -> Json:
        return dict(self.results.json.get("trained_with") or {})


def read_runs(runs: Mapping[str, str | Path]) -> list[ReportRun]:
    """Finished runs by name, a folder or results.json each. Errors: as of ``load_results``."""
    read = []
    for number, (name, place) in enumerate(runs.items()):
        folder = Path(place) if Path(place).is_dir() else Path(place).parent
        results = load_results(str(place))
        more = read_lines(folder / METRICS), read_settings(folder), read_items(results)
        read.append(ReportRun(number, name, folder, results, *more))
    return read


def read_lines(path: Path) -> list[Json]:
    """Objects of metrics.jsonl that have a step, by rising step; torn or odd lines are skipped."""
    lines: list[Json] = []
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for text in islice(file, MAX_LINES):
            with suppress(ValueError, RecursionError):
                line = json.loads(text)
                lines += [line] if isinstance(line, dict) and is_number(line.get("step")) else []
    return sorted(lines, key=lambda line: float(line["step"]))


def read_settings(folder: Path) -> Json | None:
    """Settings in a run's config.yaml; None where it is missing or is no settings file."""
    path = folder / CONFIG_FILE
    with suppress(UserError, OSError):
        return values_of(TrainConfig, read_yaml(path)) if path.is_file() else None
    return None


def read_items(results: Results) -> Items | None:
    """Content of items.json; None without one, or where its rows are not those of the results."""
    with suppress(ValueError, KeyError, TypeError):
        keys, captions, owner = (results.items[k] for k in ("image_keys", "captions", "owner"))
        n, m = (results.json["data"][f"n_{side}"] for side in ("images", "texts"))
        if [len(keys), len(captions), len(owner)] == [n, m, m]:
            return Items([str(k) for k in keys], [str(c) for c in captions], [int(o) for o in owner])
    return None


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
    """What the template shows. Runs are refused, where they must be, before a file is written."""
    results = {run.name: run.results for run in runs}
    changes = tables.differences(results)
    main = next(run for run in runs if run.name == judged(results))
    judgements = [(run.name, v) for run in runs for v in verdicts(run.results, control, baseline)] if control else []
    if control is not None and not judgements:
        why = "none has its loss and keeps its documents' norms (gamma_d below 1)"
        raise UserError(f"the control is of none of the runs: {why}")
    start = _start(main) if len(runs) == 1 else None
    summary = summarize(results, main.name, start, [v for name, v in judgements if name == main.name])
    pools, directions = tables.shared_pools(results), tables.directions(results)
    folder.mkdir(parents=True, exist_ok=True)
    norms = {run.name: norm_pictures(run, folder) for run in runs[:DETAILED]}
    retrievals = {run.name: examples(run) for run in runs[:DETAILED]}
    alarms = {run.name: a for run in runs if isinstance(a := run.results.json.get("alarms"), dict)}
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
        "alarms": [
            (name, [printable(text, 600) for text in texts.values()]) for name, texts in alarms.items() if texts
        ],
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
    with suppress(OSError, ValueError, KeyError, TypeError):
        start: Json = json.loads((run.folder / START_FILE).read_text(encoding="utf-8"))
        return start if start["data"]["fingerprint"] == run.results.json["data"]["fingerprint"] else None
    return None


def _about(run: ReportRun) -> str:
    trained, results = run.trained, run.results.json
    how = (
        f"{trained['loss']} loss, {trained.get('norm')} normalization"
        if trained.get("loss")
        else "not trained by mmclip"
    )
    gammas = ", ".join(f"γ{role} {results['evaluation']['native'][f'gamma_{role}']:.2f}" for role in "qd")
    seed = f", seed {results['seed']}" if "seed" in results else ""
    return printable(f"{results.get('model') or 'vectors'}: {how}, {gammas}{seed}", 200)


def _pool(runs: tables.Runs, pool: str, changes: Mapping[str, Json]) -> Json:
    pairs = [
        (d, tables.retrieval_table(runs, pool, d), tables.change_table(runs, pool, d, changes) if changes else None)
        for d in tables.directions(runs)
    ]
    overview = None if pool == MAIN_POOL else tables.overview(runs, pool, changes)
    about = POOLS.get(pool, "with more candidates, which match nothing")
    return {"name": pool, "about": about, "overview": overview, "pairs": pairs}


def _missing(run: ReportRun, norms: object, retrievals: tuple[str, list[Any], str | None] | None) -> list[str]:
    """Sentences on what a run's folder does not have, and on why."""
    why = "its log is not in this folder" if run.trained.get("loss") else "only evaluated, not trained by mmclip"
    sentences = [
        None if run.lines else f"no training curves: no metrics.jsonl ({why})",
        None if run.settings is not None else "no settings: no config.yaml that can be read",
        None if norms != {} else "no pictures of norms: not kept by its evaluation; evaluate it again",
        retrievals[2] if retrievals is not None else None,
    ]
    return [f"{printable(run.name, 120)}: {text}" for text in sentences if text]
