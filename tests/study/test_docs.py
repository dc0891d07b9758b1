"""Every number of docs/study.md's and docs/text_study.md's results is in a table that a study wrote; docs/study/ and
docs/text_study/ hold those tables. Claims are stated before the results, and judged by the rules as they are now."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mmclip.metrics.bootstrap import Estimate
from mmclip.study.claims import judged
from mmclip.study.plan import CLIP, TEXT, Kind
from mmclip.study.tables import load_claims

NUMBER = re.compile(r"(?<![\w.@])[−+-]?\d*\.\d+(?![\w.])")
PAGES = pytest.mark.parametrize(("kind", "page"), [(CLIP, "study"), (TEXT, "text_study")])


def rows_of(folder: Path, name: str = "*") -> Iterator[dict[str, str]]:
    for path in sorted(folder.rglob(f"{name}.csv")):
        with path.open(encoding="utf-8") as file:
            yield from csv.DictReader(file)


def unknown(numbers: list[str], values: list[float]) -> list[str]:
    """Numbers that no value rounds to: a slip in a third digit is found, two digits are nearly always there."""
    rounded = {digits: set(np.abs(np.round(values, digits)).round(9)) for digits in range(1, 8)}
    return [n for n in numbers if round(abs(float(n.replace("−", "-"))), 9) not in rounded[len(n.partition(".")[2])]]


@PAGES
def test_every_number_is_in_a_table_and_every_claim_is_stated_and_answered(root: Path, kind: Kind, page: str) -> None:
    before, after = (root / "docs" / f"{page}.md").read_text(encoding="utf-8").split("\n## Results")
    texts = (v for row in rows_of(root / "docs" / page) for k, v in row.items() if k and v)
    values = [float(v) for v in texts if re.fullmatch(r"-?\d*\.?\d+(e-?\d+)?", v)]
    numbers = NUMBER.findall(re.sub(r"```.*?```", "", after, flags=re.DOTALL))
    assert len(numbers) > 20 and unknown(numbers, values) == []
    ids = [entry["id"] for entry in load_claims(kind)["claims"]]
    stated = re.findall(r"^\| ((?:T|TX|B)\d\w*) \|", before, re.MULTILINE)
    assert set(stated) == set(ids) and len(ids) == len(set(ids))
    assert [claim for claim in ids if not re.search(rf"\b{claim}\b", after)] == [], "without an answer"


def test_a_number_that_no_table_has_would_be_found() -> None:
    assert unknown([".188", "+.0381", "−.038", ".189"], [0.18812, 0.0381]) == [".189"]


@PAGES
def test_the_rules_give_the_committed_verdicts(root: Path, kind: Kind, page: str) -> None:
    file = load_claims(kind)
    entries = {entry["id"]: {"verdicts": file["verdicts"]} | entry for entry in file["claims"] if "expected" in entry}
    by_two = ("TX5", "TX10")  # judged by two numbers
    rows = [r for r in rows_of(root / "docs" / page, "claims") if r["claim"] in entries and r["value_lo"]]
    rows = [r for r in rows if r["claim"] not in by_two]
    for row in rows:
        result = Estimate(*(float(row[k]) for k in ("value", "value_lo", "value_hi")), 1)
        entry = entries[row["claim"]]
        place = judged(result, entry, float(row["paper"]) if row["paper"] else None)
        assert entry["verdicts"][place] == row["verdict"], row
    assert len(rows) > 20


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
