#!/usr/bin/env python3
"""One HTML page for one run, or for several over the same data.

python scripts/report.py --runs logs/my-run
"""

from mmclip.config.flags import run_script
from mmclip.config.report import parse_report


def main() -> None:
    settings = parse_report()
    from mmclip.reporting.page import write_asked_report  # after the flags are known to be right

    write_asked_report(settings)


if __name__ == "__main__":
    run_script(main)
