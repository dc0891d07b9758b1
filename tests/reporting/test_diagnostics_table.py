"""The table of diagnostics shows what results.json holds, and why a number is missing."""

from __future__ import annotations

import io

from mmclip.evaluation.measures import MEASURES, value_at
from mmclip.reporting.diagnostics_table import print_diagnostics
from mmclip.reporting.table_parts import make_console
from mmclip.similarity import Exponents
from tests.reporting.test_tables import run_of


def shown() -> tuple[str, dict]:
    results = run_of(Exponents(1.0, 0.0), "asym-i2t", "run")
    out = io.StringIO()
    print_diagnostics(results, "run", make_console(out))
    return out.getvalue(), results.json["diagnostics"]


def test_numbers_are_those_of_the_json() -> None:
    text, sections = shown()
    line = next(x for x in text.splitlines() if x.startswith("modality gap"))
    assert line.split()[2:4] == [f"{sections[d]['modality_gap']:.3f}" for d in ("i2t", "t2i")]
    auc = next(x for x in text.splitlines() if x.startswith("AUC of length, topk"))
    assert f"{sections['i2t']['auc']['topk']['value']:.3f} ±" in auc


def test_what_does_not_exist_has_its_reason() -> None:
    text, sections = shown()
    reason = sections["i2t"]["auc"]["corpus_reason"]
    assert f"AUC of length, corpus: {reason}" in text
    assert "log₁₀" not in text, "Fisher matrices were not asked for"


def test_every_measure_has_a_place_in_the_diagnostics() -> None:
    _, sections = shown()
    lost = [
        path
        for path, _, _ in MEASURES
        if not path.startswith("fisher") and value_at(sections["i2t"], path.split()) == (None, None)
    ]
    assert not lost
