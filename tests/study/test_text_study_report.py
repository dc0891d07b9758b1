"""A text study's page: its tables, pictures and verdicts; text of data is escaped, what is missing is told."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from mmclip.errors import UserError
from mmclip.study.text_report import PAGE, print_verdicts, write_text_study
from tests.helpers.text_studying import INSIDE, OUTSIDE, UNDETERMINED, arm, start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("text")
    evil = dataclasses.replace(arm("dot", lengths=0.4), name="<script>dot\n$x$")
    arms = [arm("cosine", starts={0: start(UNDETERMINED)}), evil, arm("dnorm", queries_vary=0.8)]
    failed = [{"arm": "q2d <b>", "seed": 2, "reason": "a planted fault"}]
    assert write_text_study(arms, place, title="Tiny <i>", failed=failed) == place / PAGE
    return place


def test_every_table_is_a_file_and_on_the_page(folder: Path) -> None:
    page = (folder / PAGE).read_text(encoding="utf-8")
    names = ("runs", "retrieval", "differences", "magnitude", "delta_cv", "fisher", "claims", "failed")
    for name in names:
        assert f'href="tables/{name}.csv"' in page, name
        with (folder / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            assert len(list(csv.DictReader(file))) > 0, name
    assert "<script" not in page and "q2d &lt;b&gt;" in page and "Tiny &lt;i&gt;" in page
    assert "565 matched pairs" in page and "undetermined" in page
    assert "TX1" in page and "detectable" in page and "http" not in page.replace("http-equiv", "")


def test_a_picture_a_data_set_in_one_scale(folder: Path) -> None:
    for data in (INSIDE, OUTSIDE):
        assert "nDCG@10 less cosine" in (folder / "figures" / f"differences-{data}.svg").read_text()


def test_the_verdicts_are_said(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    with (folder / "tables" / "claims.csv").open(encoding="utf-8", newline="") as file:
        rows = [
            {
                k: float(v) if k in ("value", "value_lo", "value_hi", "smallest_effect") and v else v
                for k, v in r.items()
            }
            for r in csv.DictReader(file)
        ]
    print_verdicts(rows)
    said = capsys.readouterr().out
    row = next(r for r in rows if r["claim"] == "TX1" and r["norm"] == "dot")
    shown = f"{row['value']:+.3f} [{row['value_lo']:+.3f}, {row['value_hi']:+.3f}]".replace("-", "−")
    assert shown in said and "not asked" in said
    assert max(map(len, said.splitlines())) <= 140


def test_a_study_of_nothing_and_of_one_run_has_its_page(tmp_path: Path) -> None:
    for i, arms in enumerate(([], [arm("cosine", seeds=(3,), outside=False)], [arm("dot", seeds=(3,))])):
        path = write_text_study(arms, tmp_path / str(i), title="t")
        assert "nothing to compare with" in path.read_text(encoding="utf-8") or len(arms)
    (tmp_path / "3").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="cannot be made"):
        write_text_study([], tmp_path / "3", title="t")
