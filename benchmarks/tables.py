"""The tables of docs/performance.md, from the benchmarks' CSV files: never typed.

    python benchmarks/loss.py --csv docs/performance/loss.csv
    python benchmarks/tables.py

Between ``<!-- table: NAME.csv -->`` and ``<!-- /table -->`` everything becomes the machine and the rows of
docs/performance/NAME.csv; where that file does not exist, "not measured".
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from harness import Parser, read_csv, refuse

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
MARKED = re.compile(r"(<!-- table: (\S+\.csv) -->\n).*?(<!-- /table -->)", re.DOTALL)
HEADS = {"seconds": "s", "cpu": "s of CPU", "mib": "MiB"}


def cell(text: str) -> str:
    """A number in three digits, thousands set apart; anything else as it is.

    >>> cell("0.123456"), cell("16384"), cell("1234.56"), cell("sym cosine")
    ('0.123', '16,384', '1,235', 'sym cosine')
    """
    if re.fullmatch(r"-?\d+", text):
        return f"{int(text):,}"
    try:
        value = float(text)
    except ValueError:
        return text
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(path: Path) -> str:
    """A CSV file in Markdown, with what it says of the machine before it."""
    if not path.is_file():
        return "Not measured.\n"
    about, rows = read_csv(path)
    heads = list(rows[0])
    lines = [[next((h.replace(k, v, 1) for k, v in HEADS.items() if h.split()[0] == k), h) for h in heads]]
    lines += [["---"] * len(heads), *([cell(row[h]) for h in heads] for row in rows)]
    return f"{about}.\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def main() -> int:
    p = Parser(__doc__)
    p.add_argument("page", nargs="?", type=Path, default=PAGE, help="[docs/performance.md]")
    page = p.parse_args().page
    if not page.is_file():
        refuse(f"{page}: no such file")
    text = page.read_text(encoding="utf-8")
    page.write_text(MARKED.sub(lambda m: m[1] + table(page.with_suffix("") / m[2]) + m[3], text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
