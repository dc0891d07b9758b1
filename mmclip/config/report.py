"""The settings of report.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mmclip.config.clip import RUN
from mmclip.config.flags import flag, parse
from mmclip.errors import UserError


@dataclasses.dataclass
class ReportConfig:
    """Every flag of report.py."""

    runs: list[str] | None = flag(
        None,
        RUN,
        "finished runs: folders, or a results.json each; the others are compared with the first",
        type=str,
        nargs="+",
        metavar="RUN",
    )
    output: str | None = flag(
        None, RUN, "the page [report.html in the run's folder; of several runs, beside the first]", metavar="HTML"
    )
    control: str | None = flag(
        None,
        RUN,
        "the control run (same loss and seed, documents normalized): was magnitude learned, is it useful?",
        metavar="RUN",
    )
    baseline: str | None = flag(None, RUN, "the sym/cosine run of that verdict", metavar="RUN")

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError("nothing to report: give --runs with finished runs")
        if self.baseline is not None and self.control is None:
            raise UserError("--baseline is the sym/cosine run of a verdict: it needs --control")


DESCRIPTION = """One HTML page for one run, or for several over the same data: both directions with intervals,
lengths by relevance, training curves, the best and the worst retrievals with their pictures. It needs no network and
no other file; its pictures lie beside it, too, as SVG."""

EXAMPLES = """examples:
  python scripts/report.py --runs logs/demo-scenes-seed0/qnorm
      writes logs/demo-scenes-seed0/qnorm/report.html

  D=logs/demo-scenes-seed0; python scripts/report.py --runs $D/baseline $D/qnorm $D/control \\
      --control $D/control --baseline $D/baseline
      writes logs/demo-scenes-seed0/report.html: three runs, differences to the first, and the verdict"""


def parse_report(argv: Sequence[str] | None = None) -> ReportConfig:
    """The command line of report.py. Errors: UserError."""
    return parse(ReportConfig, argv, DESCRIPTION, EXAMPLES)
