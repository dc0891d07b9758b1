"""Every number of docs/study.md's and docs/text_study.md's results is in a table that run_study.py wrote; docs/study/
and docs/text_study/ hold those tables."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import pytest

from mmclip.metrics.bootstrap import Estimate
from mmclip.study.claims import judged
from mmclip.study.plan import CLIP, TEXT, Kind
from mmclip.study.tables import load_claims

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


@pytest.mark.parametrize(("kind", "page"), [(CLIP, "study.md"), (TEXT, "text_study.md")])
def test_claims_are_stated_before_the_results_and_are_those_that_are_judged(root: Path, kind: Kind, page: str) -> None:
    before, after = (root / "docs" / page).read_text(encoding="utf-8").split("\n## Results")
    ids = [entry["id"] for entry in load_claims(kind)["claims"]]
    stated = re.findall(r"^\| ((?:T|TX|B)\d\w*) \|", before, re.MULTILINE)
    assert set(stated) == set(ids) and len(ids) == len(set(ids))
    assert [claim for claim in ids if not re.search(rf"\b{claim}\b", after)] == [], "without an answer"


@pytest.mark.parametrize(("kind", "folder"), [(CLIP, "study"), (TEXT, "text_study")])
def test_the_rules_give_the_committed_verdicts(root: Path, kind: Kind, folder: str) -> None:
    file = load_claims(kind)
    entries = {entry["id"]: {"verdicts": file["verdicts"]} | entry for entry in file["claims"] if "expected" in entry}
    judged_rows = 0
    for path in (root / "docs" / folder).rglob("claims.csv"):
        with path.open(encoding="utf-8") as opened:
            rows = [row for row in csv.DictReader(opened) if row["claim"] in entries and row["value_lo"]]
        for row in rows:
            if row["claim"] not in ("TX5", "TX10"):  # judged by two numbers
                entry, ends = entries[row["claim"]], (float(row[k]) for k in ("value", "value_lo", "value_hi"))
                place = judged(Estimate(*ends, 1), entry, float(row["paper"]) if row["paper"] else None)
                assert entry["verdicts"][place] == row["verdict"], (path, row["claim"], row)
                judged_rows += 1
    assert judged_rows > 20


def test_the_papers_ratios_are_those_of_its_table() -> None:
    file = load_claims(CLIP)
    rows = {(row["loss"], row["norm"]): row for row in file["table6"]}
    for entry in (e for e in file["claims"] if e.get("statistic") == "ratio" and "paper" in e):
        for d, text in entry["paper"].items():
            where = {"i2t": "t2i", "t2i": "i2t"}[d] if "measured" in entry else d
            numbers = [
                rows[side.get("loss", "").format(loss=f"asym-{d}"), side["norm"]][f"{side['scoring']}_{where}"]
                for side in (entry["of"], entry["to"])
            ]
            assert [float(x) for x in text.split("/")] == numbers, (entry["id"], d)
