"""mmclip report: one page for finished runs."""

from __future__ import annotations

from mmclip.config import ReportConfig
from mmclip.reporting.page import write_report


def run(config: ReportConfig) -> None:
    write_report(config)
