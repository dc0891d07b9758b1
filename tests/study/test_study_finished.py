"""Finished runs of a study: whatever is damaged is seen, run again or listed, and takes no page along."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mmclip.config import StudyConfig
from mmclip.errors import UserError
from mmclip.evaluation.results import Results, load_results, save_results
from mmclip.study.finished import damaged, gather, put_aside, read_lines, read_run
from mmclip.study.plan import Cell, plan_study
from mmclip.study.runner import is_finished
from mmclip.study.study import study
from tests.helpers.studying import planted_run

ARMS = "arms:\n  - {norm: [cosine, dot]}\n  - {norm: qnorm, init_from: sym cosine}\n"


@pytest.fixture(scope="module")
def results() -> Results:
    return planted_run()


@pytest.fixture
def cells(tmp_path: Path, results: Results) -> list[Cell]:
    """cosine, dot and qnorm, which starts from cosine: all finished."""
    (tmp_path / "s.yaml").write_text(ARMS, encoding="utf-8")
    found = plan_study(StudyConfig(config=str(tmp_path / "s.yaml"), logs=str(tmp_path / "logs"))).cells
    for cell in found:
        save_results(results, cell.folder)
        (cell.folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n', encoding="utf-8")
        (cell.folder / "start.json").write_text("{}", encoding="utf-8")
    return found


def cut(name: str, share: float = 0.5) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])

    return act


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def arrays(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        found = load_results(folder)
        change(found.per_query)
        save_results(found, folder)

    return act


def shorter(name: str) -> Callable[[Path], None]:
    return arrays(lambda a: a.update({name: a[name][:-1]}))


def all_shorter(a: dict[str, np.ndarray]) -> None:
    a.update({k: v[:-1] for k, v in a.items() if k.startswith("retrieval/i2t/") and "length_level" not in k})


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut("results.json"), "is not a results.json"),
        (write("results.json", '{"retrieval": {}, "magnitude": {}, "data": {}, "trained_with": {}}'), "not the whole"),
        (cut("per_query.npz"), "per_query.npz is not an array file"),
        (write("per_query.npz", ""), "per_query.npz is not an array file"),
        (lambda folder: (folder / "per_query.npz").unlink(), "no file"),
        (shorter("retrieval/i2t/native/success@1"), ""),
        (shorter("retrieval/i2t/cosine/first_rank"), "cosine/first_rank is 29: expected 30 rows"),
        (shorter("retrieval/t2i/topk_moments"), "topk_moments is 59x6: expected 60 rows"),
        (shorter("retrieval/i2t/clusters"), ""),
        (arrays(all_shorter), "queries of i2t, and"),
        (arrays(lambda a: a.pop("retrieval/i2t/topk_moments")), "topk_moments"),
        (write("metrics.jsonl", '{"step": 1}\nnonsense\n{"step": 2}\n'), "line 2 is no line of a run's log: nonsense"),
        (write("metrics.jsonl", '[1]\n{"step": 2}\n'), "line 1 is no line"),
        (write("metrics.jsonl", '{"step": 2}\n{"loss": 2}\n'), "line 2 is no line"),
        (write("start.json", '{"fish'), "start.json: not readable as JSON"),
        (write("start.json", "[" * 100_000), "start.json: not readable as JSON"),
        (write("start.json", "[]"), "start.json: expected a JSON object"),
    ],
)
def test_damage_is_seen_put_aside_and_run_again(
    cells: list[Cell], damage: Callable[[Path], object], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert damaged(cells) == {}
    damage(cells[1].folder)
    ((cell, why),) = damaged(cells).items()
    assert cell is cells[1] and told in why and "\n" not in why
    arms, unreadable = gather(cells)  # what is damaged while others run
    assert [a.name for a in arms] == [cells[0].arm, cells[2].arm] and unreadable == {cell: why}
    aside = cell.folder.with_name(cell.folder.name + ".damaged")
    aside.mkdir()  # of an earlier time
    (aside / "old").touch()
    put_aside([(cell, why)])
    assert not is_finished(cell) and (aside / "results.json").is_file() and not (aside / "old").exists()
    err = capsys.readouterr().err
    assert err.startswith(f"sym dot, seed 0: damaged, is run again; what is there is now {aside.name}: ")
    assert err.count("\n") == 1 and damaged(cells) == {}


def test_a_cut_last_line_is_left_out_and_no_log_gives_no_curves(
    cells: list[Cell], capsys: pytest.CaptureFixture[str]
) -> None:
    (cells[0].folder / "metrics.jsonl").write_bytes(b'{"step": 1}\n\n{"step": 2, "a": "\xc3')
    (cells[1].folder / "metrics.jsonl").unlink()
    (cells[1].folder / "start.json").unlink()
    assert read_lines(cells[0].folder / "metrics.jsonl") == [{"step": 1}]
    arms, unreadable = gather(cells)
    assert unreadable == {} and arms[1].logs == {0: []} and arms[1].starts == {0: {}}
    assert capsys.readouterr().err == "sym dot, seed 0: no metrics.jsonl, so no curves\n"


def test_a_model_that_is_gone_counts_where_a_run_is_still_to_start_from_it(cells: list[Cell]) -> None:
    assert damaged(cells) == {}  # none has a model, and nothing is left to run
    shutil.rmtree(cells[2].folder)
    assert list(damaged(cells)) == [cells[0]]
    model = cells[0].folder / "model"
    model.mkdir()
    (model / "open_clip_config.json").write_text('{"model_cfg": {', encoding="utf-8")
    assert list(damaged(cells)) == [cells[0]]


def test_a_damaged_run_has_what_it_starts_from_looked_at(cells: list[Cell]) -> None:
    cut("per_query.npz")(cells[2].folder)
    assert list(damaged(cells)) == [cells[0], cells[2]]


def test_the_page_is_written_without_the_run_that_cannot_be_redone(
    cells: list[Cell], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut("results.json")(cells[1].folder)
    failing = tmp_path / "fails.py"
    failing.write_text("raise SystemExit('error: planted')", encoding="utf-8")
    settings = StudyConfig(config=str(tmp_path / "s.yaml"), logs=str(tmp_path / "logs"), jobs=1)
    settings.dry_run = True
    assert study(settings, failing) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["finished", "damaged", "finished"]
    settings.dry_run = False
    assert study(settings, failing) == 1
    state = json.loads((tmp_path / "logs" / "s" / "study.json").read_text(encoding="utf-8"))
    assert [r["state"] for r in state["runs"]] == ["finished", "failed", "finished"]
    assert "planted" in state["runs"][1]["reason"]
    assert "sym dot" in (tmp_path / "logs" / "s" / "tables" / "failed.csv").read_text(encoding="utf-8")


def test_a_study_that_another_process_runs_is_left_alone(cells: list[Cell], tmp_path: Path) -> None:
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path / "logs" / "s" / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(UserError, match="logs/s: another process runs this study: wait for it, or end it first"):
            study(StudyConfig(config=str(tmp_path / "s.yaml"), logs=str(tmp_path / "logs")), tmp_path / "none.py")


def test_a_whole_run_is_read_as_it_is(cells: list[Cell], results: Results) -> None:
    found, lines, start = read_run(cells[0])
    assert found.json == json.loads(json.dumps(results.json)) and lines == [{"step": 1}, {"step": 2}] and start == {}
