"""A grid of text trainings: planned, started by its own script, read back whole, and what it leaves."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mmclip.commands.study import run as study
from mmclip.config import StudyConfig
from mmclip.data.beir import EVALUATIONS
from mmclip.errors import UserError
from mmclip.evaluation.results import load_results, save_results
from mmclip.study.arms import gather, read_run
from mmclip.study.plan import StudyPlan, StudyRun, is_finished, require_data
from tests.helpers.studying import plan
from tests.helpers.text_studying import INSIDE, OUTSIDE, QUERIES, planted

# What train_text.py does as far as a study sees it: it copies results that were made before
STAND_IN = """
import json, pathlib, shutil, sys, yaml
s = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))
here = pathlib.Path(__file__).parent
with open(here / "starts.txt", "a") as f:
    f.write(f"{s['norm']} {s['seed']} {s['measure_start']}\\n")
shutil.copytree(here / "made" / f"{s['norm']}-{s['seed']}", pathlib.Path(s["logs"]) / s["name"])
"""


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    """Two folders that look like data; nothing reads them."""
    for name in ("scifact", "cranfield"):
        (tmp_path / name / "qrels").mkdir(parents=True)
        for file in ("corpus.jsonl", "queries.jsonl", "qrels/train.tsv", "qrels/test.tsv"):
            (tmp_path / name / file).touch()
    return tmp_path


def text_plan(beir: Path, arms: str, **more: object) -> StudyPlan:
    head = f"script: train_text\nmodel: {beir}\ntrain_data: {beir}/scifact\n"
    return plan(beir, f'{head}val_data: ["{beir}/scifact:test", "{beir}/cranfield"]\n{arms}', **more)


def finished(folder: Path, norm: str, seed: int) -> None:
    save_results(planted(INSIDE, QUERIES, seed, norm, 2.0, 0.0, 0.2), folder)
    save_results(planted(OUTSIDE, QUERIES - 4, seed, norm, 2.0, 0.0, 0.2), folder / EVALUATIONS / OUTSIDE)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")


ARMS = "seeds: [3, 4]\narms:\n  - {norm: cosine, measure_start: true}\n  - {norm: dot, measure_start: false}\n"


def test_the_untrained_model_is_measured_with_an_arms_first_seed(beir: Path) -> None:
    found = text_plan(beir, ARMS)
    told = [(c.arm, c.seed, c.config.measure_start) for c in found.runs]
    assert told == [
        ("q2d cosine", 3, True),
        ("q2d dot", 3, False),
        ("q2d cosine", 4, False),
        ("q2d dot", 4, False),
    ]
    assert found.kind.script == "train_text" and len({c.folder for c in found.runs}) == 4
    again = text_plan(beir, ARMS, set=["random_init=true"]).runs  # every seed has weights of its own
    assert [c.config.measure_start for c in again if c.arm == "q2d cosine"] == [True, True]


def test_a_text_studys_losses_have_one_name_each_and_its_settings_are_train_texts(beir: Path) -> None:
    cells = text_plan(beir, "arms:\n  - {loss: both, norm: dot, q2d_weight: [0, 0.25, 0.5, 1]}\n").runs
    assert [c.arm for c in cells] == ["d2q dot", "both dot λ=0.25", "both dot", "q2d dot"]
    for text, told in (
        ("script: train_txt\narms:\n  - {norm: dot}\n", "script 'train_txt' is not one of train_clip, train_text"),
        ("script: [a]\narms:\n  - {norm: dot}\n", "script is a text, got no single value"),
    ):
        with pytest.raises(UserError, match=re.escape(told)):
            plan(beir, text)
    for arms, told in (
        ("arms:\n  - {i2t_weight: 0.5}\n", "unknown setting 'i2t_weight'"),
        ("bank_size: 3\narms:\n  - {norm: dot}\n", "unknown setting 'bank_size'"),
        ("arms:\n  - {norm: dot, val_data: []}\n", "val_data none: a study shows the evaluations of its runs"),
        ("arms:\n  - {norm: dot, keep_normalize: true}\n", "--keep-normalize with --norm dot"),
        ("arms:\n  - {norm: dot, logs: a}\n", "logs is set by the study"),
    ):
        with pytest.raises(UserError, match=re.escape(told)):
            text_plan(beir, arms)


def test_a_run_is_known_by_what_changes_its_numbers(beir: Path) -> None:
    one = text_plan(beir, "arms:\n  - {norm: dot}\n").runs[0].folder
    same = text_plan(beir, "arms:\n  - {norm: dot}\n", set=["save_steps=3", "strict=true", "device=cpu"])
    assert same.runs[0].folder == one
    for change in ("lr=1e-4", "document_length=32", "positives=none", "train_split=test"):
        assert text_plan(beir, "arms:\n  - {norm: dot}\n", set=[change]).runs[0].folder != one, change


def test_data_that_are_not_there_are_told_before_a_run(beir: Path) -> None:
    cells = text_plan(beir, ARMS).runs
    require_data(cells)
    (beir / "cranfield" / "qrels" / "test.tsv").unlink()
    with pytest.raises(UserError, match="cranfield: no split 'test'; splits in qrels/: train"):
        require_data(cells)
    (beir / "scifact" / "qrels" / "train.tsv").unlink()
    with pytest.raises(UserError, match="scifact: no split 'train'"):
        require_data(cells)
    (beir / "triples.tsv").touch()
    others = text_plan(beir, ARMS, set=[f"train_data={beir}/triples.tsv", f"val_data={beir}/scifact"]).runs
    require_data(others)  # triples have no splits


@pytest.fixture
def cells(beir: Path) -> list[StudyRun]:
    found = text_plan(beir, ARMS).runs
    for cell in found:
        finished(cell.folder, cell.config.norm, cell.seed)
    return found


def test_finished_runs_are_read_by_arm_and_data_set(cells: list[StudyRun]) -> None:
    arms, unreadable = gather(cells)
    assert not unreadable and [a.name for a in arms] == ["q2d cosine", "q2d dot"]
    assert list(arms[0].runs) == [INSIDE, OUTSIDE] and arms[0].seeds == [3, 4]
    run = load_results(cells[0].folder / EVALUATIONS / OUTSIDE)
    assert arms[0].runs[OUTSIDE][3].json == run.json
    native = [r.json["retrieval"]["q2d"]["native"]["ndcg@10"] for r in read_run(cells[0])[0].values()]
    assert native[0] == arms[0].runs[INSIDE][3].json["retrieval"]["q2d"]["native"]["ndcg@10"]


def cut_arrays(folder: Path) -> None:
    results = load_results(folder)
    name = "retrieval/q2d/native/ndcg@10"
    results.per_query[name] = results.per_query[name][:-1]
    save_results(results, folder)


def without(name: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        results = load_results(folder)
        del results.json[name]
        save_results(results, folder)

    return act


def nan_rate(folder: Path) -> None:
    results = load_results(folder)
    results.json["retrieval"]["q2d"]["native"]["mrr@10"] = None
    save_results(results, folder)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: (f / "results.json").write_text("{", encoding="utf-8"), "is not a results.json"),
        (lambda f: (f / "per_query.npz").unlink(), "no file"),
        (cut_arrays, f"native/ndcg@10 has not {QUERIES - 4} values"),
        (without("evaluation"), "not the whole results of an evaluated run: KeyError"),
        (nan_rate, "TypeError"),
        (lambda f: (f / "results.json").unlink(), "no file"),
    ],
)
def test_a_damaged_run_is_seen_in_either_evaluation(
    cells: list[StudyRun], damage: Callable[[Path], object], told: str
) -> None:
    damage(cells[1].folder / EVALUATIONS / OUTSIDE)
    arms, unreadable = gather(cells)
    ((cell, why),) = unreadable.items()
    assert cell is cells[1] and told in why and "\n" not in why
    assert [a.seeds for a in arms] == [[3, 4], [4]]


def test_a_study_starts_its_script_once_a_run_and_writes_its_page(
    beir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (beir / "train_text.py").write_text(STAND_IN, encoding="utf-8")
    command = [sys.executable, str(beir / "train_text.py")]
    for norm in ("cosine", "dot"):
        for seed in (3, 4):
            finished(beir / "made" / f"{norm}-{seed}", norm, seed)
    made = text_plan(beir, f"title: Tiny <b>text</b>\n{ARMS}")
    settings = StudyConfig(config=str(beir / "study_tiny.yaml"), logs=str(beir / "logs"), jobs=2)
    assert study(settings, command) == 0
    said = capsys.readouterr()
    assert "is best with" in said.out and "page: " in said.out and len(said.out.splitlines()) <= 10
    assert "[4/4]" in said.err and f"{INSIDE} q2d 0." in said.err
    assert sorted((beir / "starts.txt").read_text().splitlines()) == [
        "cosine 3 True",
        "cosine 4 False",
        "dot 3 False",
        "dot 4 False",
    ]
    assert all(is_finished(c) for c in made.runs)
    page = (made.folder / "study.html").read_text(encoding="utf-8")
    assert "Tiny &lt;b&gt;text" in page and "<script" not in page
    with (made.folder / "tables" / "retrieval.csv").open(encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if r["arm"] == "q2d dot" and r["scoring"] == "native"]
    each = [
        load_results(c.folder).json["retrieval"]["q2d"]["native"]["ndcg@10"] for c in made.runs if c.arm == "q2d dot"
    ]
    assert float(rows[0]["ndcg@10"]) == pytest.approx(np.mean(each)) and rows[0]["n_seeds"] == "2"
    assert study(settings, command) == 0  # nothing again
    assert len((beir / "starts.txt").read_text().splitlines()) == 4
    assert study(StudyConfig(**(vars(settings) | {"dry_run": True})), command) == 0
    assert capsys.readouterr().out.count("finished  q2d-") == 4
