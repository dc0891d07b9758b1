"""One page for one run or several: numbers with intervals, lengths, curves, the best and the worst retrievals.

The page is one file that needs nothing else: its pictures are in it, and lie beside it as PNGs for other uses. It runs
no script and asks nobody for anything; text from data is escaped, and its own policy would stop what was not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from mmclip.config import ReportConfig
from mmclip.errors import UserError, printable
from mmclip.evaluation.comparison import verdicts
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import CORRECTED, Results
from mmclip.evaluation.runs import load_run, run_names, told_of
from mmclip.io import write_text_atomically
from mmclip.reporting import cells as tables
from mmclip.reporting.diagnostics import diagnostics
from mmclip.reporting.examples import contact_sheets
from mmclip.reporting.figures import RUNS, curve_pictures, norm_pictures, style_sheet, tradeoff_picture
from mmclip.reporting.seeds import seeds
from mmclip.reporting.source import ReportRun, data_words, is_number, read_runs
from mmclip.similarity import CLIP_DIRECTIONS

Json = dict[str, Any]
REPORT_FILE = "report.html"
DETAILED = 6  # runs whose lengths and retrievals are shown one by one; a page of more would be too heavy to open
POOLS = {
    "retrieval": "all images and captions",
    "full": "only captions that describe everything",
}


def write_report(
    runs: Mapping[str, str | Path],
    path: str | Path,
    *,
    control: str | Path | None = None,
    baseline: str | Path | None = None,
) -> Path:
    """Write the page of finished runs (name -> folder or results.json), the first being what others are compared with.

    control, baseline: the runs of comparison.verdict. Pictures are written to the folder of the page's name without
    its ending. Returns ``path``. Errors: UserError, one line, for runs that cannot be read or were evaluated on
    different data, for a control with nothing to control, and for a place that cannot be written.
    """
    path = Path(path)
    if not runs:
        raise UserError("a report needs at least one run")
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise UserError(f"{printable(path)}: the name of an .html file is expected")
    found = read_runs(runs)
    controls, baselines = (load_run(str(p)) if p is not None else None for p in (control, baseline))
    with told_of(", ".join(str(r.folder) for r in found)):
        content = _content(found, path.with_suffix(""), controls, baselines)
    page = page_environment().get_template("report.html.j2").render(content)
    write_text_atomically(path, page.encode("utf-8", "backslashreplace").decode())  # a path that is not UTF-8
    return path


def page_environment() -> Environment:
    """Of the templates: everything is escaped, and a name that is not there is an error."""
    environment = Environment(
        loader=PackageLoader("mmclip.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"plot_css": style_sheet(), "run_colours": len(RUNS)}
    return environment


def _content(runs: Sequence[ReportRun], folder: Path, control: Results | None, baseline: Results | None) -> Json:
    """What the template shows. The runs are refused, where they must be, before anything is written."""
    pools = tables.shared_pools(runs)
    differences = tables.changes(runs)
    told = _verdicts(runs, control, baseline)
    folder.mkdir(parents=True, exist_ok=True)
    detailed = runs[:DETAILED]
    settings = tables.settings(runs)
    return {
        "title": " · ".join(printable(run.name, 60) for run in runs[:4]) + (" …" if len(runs) > 4 else ""),
        "runs": [_head(run) for run in runs],
        "several": len(runs) > 1,
        "corrected": any(CORRECTED in run.results.json["retrieval"][d.value] for run in runs for d in CLIP_DIRECTIONS),
        "data": data_words(runs[0]),
        "verdicts": told,
        "glance": tables.glance(runs),
        "pools": [_pool(runs, pool, differences) for pool in pools],
        "seeds": [(pool, table) for pool in pools if (table := seeds(runs, pool)) is not None],
        "lengths": [(pool, tables.lengths(runs, pool)) for pool in pools],
        "pictures": [
            (run.number, run.name, [p for ps in norm_pictures(run, folder).values() for p in ps]) for run in detailed
        ],
        "detailed": DETAILED if len(runs) > DETAILED else None,
        "curves": curve_pictures(runs, folder),
        "no_curves": _without_curves(runs),
        "tradeoff": [tradeoff_picture(runs, pool, folder, f"tradeoff-{i}") for i, pool in enumerate(pools)]
        if len(runs) > 1
        else [],
        "examples": [(run.number, run.name, *contact_sheets(run)) for run in detailed],
        "diagnostics": [(pool, tables_) for pool in pools if (tables_ := diagnostics(runs, pool)) is not None],
        "alarms": [(run.name, _alarms(run)) for run in runs if _alarms(run)],
        "differ": settings[0],
        "settings": settings[1],
        "no_settings": [run.name for run in runs if run.settings is None],
        "directions": [d.value for d in CLIP_DIRECTIONS],
    }


def _head(run: ReportRun) -> Json:
    trained = run.trained
    native = run.results.json["evaluation"]["native"]
    return {
        "number": run.number,
        "name": printable(run.name, 120),
        "model": printable(run.results.json.get("model") or "–", 120),
        "loss": printable(trained.get("loss") or "not trained here", 60),
        "norm": printable(trained.get("norm") or "cosine", 60),
        "gammas": ", ".join(f"{g:.2f}" if is_number(g) else "–" for g in (native["gamma_q"], native["gamma_d"])),
        "seed": printable(run.results.json.get("seed", "–"), 30),
    }


def _pool(runs: Sequence[ReportRun], pool: str, differences: Json) -> Json:
    first = runs[0].results
    place = first.json["data"] if pool == MAIN_POOL else first.json["pools"][pool]
    asked = place["n_queries"]
    return {
        "name": printable(pool, 60),
        "about": POOLS.get(pool, "more candidates, which match nothing"),
        "counts": f"{place['n_images']:,} images and {place['n_texts']:,} texts; "
        f"{asked['i2t']:,} images and {asked['t2i']:,} texts ask",
        "notes": tables.few_images(runs, pool),
        "numbers": {d.value: tables.numbers(runs, pool, d.value) for d in CLIP_DIRECTIONS},
        "changes": differences.get(pool, {}),
    }


def _without_curves(runs: Sequence[ReportRun]) -> list[str]:
    """A sentence for the runs that were trained and have no log of it here, and one for those that mmclip never
    trained."""
    reasons = {
        True: "trained, but its log is not in this folder: it is gone, or the run was evaluated into another folder",
        False: "only evaluated: not trained by mmclip",
    }
    found = []
    for trained, reason in reasons.items():
        names = [printable(r.name, 120) for r in runs if not r.lines and bool(r.trained.get("loss")) is trained]
        if names:
            found.append(f"No metrics.jsonl, so no curves: {', '.join(names)} ({reason}).")
    return found


def _verdicts(runs: Sequence[ReportRun], control: Results | None, baseline: Results | None) -> list[Json]:
    """Every verdict's two answers. Errors: UserError where the control is of no run."""
    if control is None:
        return []
    found = [(run.name, v) for run in runs for v in verdicts(run.results, control, baseline)]
    if not found:
        raise UserError(
            "the control is of none of the runs: none has its loss and keeps its documents' length (gamma_d below 1)"
        )
    # a verdict of False is no proof of the opposite
    words = {True: ("yes", "Yes"), False: ("no", "Not shown"), None: ("open", "Open")}
    return [
        {
            "run": printable(name, 60),
            "main": verdict["pool"] == MAIN_POOL,
            "question": "Was length learned?" if kind == "learned" else "Is length useful?",
            "kind": words[verdict[kind]["verdict"]][0],
            "answer": words[verdict[kind]["verdict"]][1],
            "place": f"{verdict['direction']}, pool {printable(verdict['pool'], 40)}",
            "sentence": _sentence(verdict[kind]["sentence"]),
        }
        for name, verdict in found
        for kind in ("learned", "useful")
    ]


def _sentence(text: str) -> str:
    return printable(text[:1].upper() + text[1:], 600)


def _alarms(run: ReportRun) -> list[str]:
    alarms = run.results.json.get("alarms")
    return [printable(text, 600) for text in alarms.values()] if isinstance(alarms, dict) else []


def write_asked_report(settings: ReportConfig) -> None:
    """Everything that report.py does. Errors: UserError, one line."""
    runs = run_names(settings.runs or [])
    first = Path((settings.runs or [""])[0])
    folder = first if first.is_dir() else first.parent
    default = (folder if len(runs) == 1 else folder.absolute().parent) / REPORT_FILE
    page = Path(settings.output) if settings.output is not None else default
    page.parent.mkdir(parents=True, exist_ok=True)
    write_report(runs, page, control=settings.control, baseline=settings.baseline)
    print(f"report: {printable(page)}")
