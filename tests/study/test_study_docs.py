"""Every number of docs/study.md's and docs/text_study.md's results is in a table that run_study.py wrote; docs/study/
and docs/text_study/ hold those tables."""

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
    for path in sorted(folder.rglob("*.csv")):
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


def test_every_number_on_text_is_in_a_table(root: Path) -> None:
    values = known(root / "docs" / "text_study")
    numbers = NUMBER.findall(results_of((root / "docs" / "text_study.md").read_text(encoding="utf-8")))
    assert bool(numbers) is bool(values), "results without tables, or tables that nobody tells of"
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


def test_claims_about_text_are_stated_before_the_results_and_are_those_that_are_judged(root: Path) -> None:
    text = (root / "docs" / "text_study.md").read_text(encoding="utf-8")
    before, after = text.split("\n## Results")
    stated = set(re.findall(r"^\| (TX\w+) \|", before, re.MULTILINE))
    judged = set(re.findall(r'"(TX\d+\w?)"', (root / "mmclip" / "text_study_claims.py").read_text(encoding="utf-8")))
    assert stated == judged and len(stated) == 13
    if (root / "docs" / "text_study").is_dir():
        assert {claim for claim in stated if not re.search(rf"\b{claim}\b", after)} == set()
