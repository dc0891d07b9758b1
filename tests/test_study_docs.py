"""Every number of docs/study.md's results is in a table that run_study.py wrote; docs/study/ holds those tables."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import pytest

NUMBER = re.compile(r"(?<![\w.@])[−+-]?\d*\.\d+(?![\w.])")


def results_of(text: str) -> str:
    return re.sub(r"```.*?```", "", text[text.index("\n## Results") :], flags=re.DOTALL)


def known(folder: Path) -> list[float]:
    """Magnitudes of all numbers of all tables: a slip in a third digit is found, two digits are nearly always there."""
    found: list[float] = []
    for path in sorted(folder.glob("*/*.csv")):
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                values = {k: v for k, v in row.items() if k and v}
                found += [abs(float(v)) for v in values.values() if re.fullmatch(r"-?\d*\.?\d+(e-?\d+)?", v)]
    return sorted(found)


def is_known(number: str, values: list[float]) -> bool:
    digits = len(number.partition(".")[2])
    value = abs(float(number.replace("−", "-")))
    return any(math.isclose(round(v, digits), value, abs_tol=1e-9) for v in values)


def test_every_number_is_in_a_table(root: Path) -> None:
    values = known(root / "docs" / "study")
    numbers = NUMBER.findall(results_of((root / "docs" / "study.md").read_text(encoding="utf-8")))
    assert len(numbers) > 50
    assert [n for n in numbers if not is_known(n, values)] == []


@pytest.mark.parametrize(("number", "there"), [(".188", True), ("+.0381", True), ("−.038", True), (".189", False)])
def test_a_number_that_no_table_has_would_be_found(number: str, there: bool) -> None:
    assert is_known(number, [0.18812, 0.0381]) is there


def test_claims_are_stated_before_the_results(root: Path) -> None:
    text = (root / "docs" / "study.md").read_text(encoding="utf-8")
    before, after = text.split("\n## Results")
    for claim in [*(f"T{i}" for i in range(1, 13)), "T7b", "B1", "B2", "B3"]:
        assert f"| {claim} |" in before, claim
        assert re.search(rf"\b{claim}\b", after), f"{claim} has no answer"
