"""mmclip report: one page for finished runs."""

from __future__ import annotations

from pathlib import Path

from mmclip.config import ReportConfig
from mmclip.errors import printable
from mmclip.evaluation.results import run_names
from mmclip.reporting.page import REPORT_FILE, write_page


def run(config: ReportConfig) -> None:
    """Write the page beside the first run, or where --output names. Errors: UserError, one line."""
    runs = run_names(config.runs or [])
    first = Path((config.runs or [""])[0])
    folder = first if first.is_dir() else first.parent
    default = (folder if len(runs) == 1 else folder.absolute().parent) / REPORT_FILE
    page = Path(config.output) if config.output is not None else default
    page.parent.mkdir(parents=True, exist_ok=True)
    write_page(runs, page, control=config.control, baseline=config.baseline)
    print(f"report: {printable(page)}")
