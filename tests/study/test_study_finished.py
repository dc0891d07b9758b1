"""Finished runs of a study: whatever is damaged is run again or listed, and stops no page."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mmclip.commands.study import run
from mmclip.config import StudyConfig
from mmclip.errors import UserError
from mmclip.evaluation.results import Results, load_results, save_results
from mmclip.study.arms import gather, read_run
from mmclip.study.plan import StudyRun, is_finished, plan_study
from mmclip.study.runner import remove_damaged
from tests.helpers.studying import planted_run

ARMS = "arms:\n  - {norm: [cosine, dot]}\n  - {norm: qnorm, init_from: sym cosine}\n"


@pytest.fixture(scope="module")
def results() -> Results:
    return planted_run()


@pytest.fixture
def config(tmp_path: Path) -> StudyConfig:
    (tmp_path / "s.yaml").write_text(ARMS, encoding="utf-8")
    return StudyConfig(config=str(tmp_path / "s.yaml"), logs=str(tmp_path / "logs"), jobs=1)


@pytest.fixture
def runs(config: StudyConfig, results: Results) -> list[StudyRun]:
    """cosine, dot and qnorm, which starts from cosine: all finished."""
    found = plan_study(config).runs
    for one in found:
        save_results(results, one.folder)
        (one.folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n', encoding="utf-8")
        (one.folder / "start.json").write_text("{}", encoding="utf-8")
    return found


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:200])


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
        (lambda folder: (folder / "per_query.npz").unlink(), "no file"),
        (shorter("retrieval/i2t/native/success@1"), "native/success@1"),
        (shorter("retrieval/t2i/topk_moments"), "topk_moments"),
        (arrays(all_shorter), "retrieval/i2t/clusters has not 30 values"),
        (arrays(lambda a: a.pop("retrieval/i2t/topk_moments")), "topk_moments"),
        (write("start.json", '{"fish'), "start.json: not readable as JSON"),
        (write("start.json", "[" * 100_000), "start.json: not readable as JSON"),
    ],
)
def test_damage_is_seen_and_the_run_is_trained_again(
    runs: list[StudyRun], damage: Callable[[Path], object], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    remove_damaged(runs)
    assert all(map(is_finished, runs))
    damage(runs[1].folder)
    arms, unreadable = gather(runs)  # damaged while others run
    ((one, why),) = unreadable.items()
    assert one is runs[1] and told in why and "\n" not in why
    assert [a.name for a in arms] == [runs[0].arm, runs[2].arm]
    remove_damaged(runs)
    err = capsys.readouterr().err
    assert err.startswith("sym dot, seed 0: damaged, is trained again: ") and err.count("\n") == 1
    assert [is_finished(r) for r in runs] == [True, False, True]


def test_a_run_without_a_log_or_start_has_no_curves(runs: list[StudyRun], capsys: pytest.CaptureFixture[str]) -> None:
    (runs[0].folder / "metrics.jsonl").write_bytes(b'{"step": 1}\n\nnonsense\n{"step": 2, "a": "\xc3')
    for name in ("metrics.jsonl", "start.json"):
        (runs[1].folder / name).unlink()
    arms, unreadable = gather(runs)
    assert unreadable == {} and arms[0].logs == {0: [{"step": 1}]}
    assert arms[1].logs == {0: []} and arms[1].starts == {0: {}}
    assert capsys.readouterr().err == "sym dot, seed 0: no metrics.jsonl, so no curves\n"


def test_the_page_is_written_without_the_run_that_cannot_be_redone(
    runs: list[StudyRun], config: StudyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut("results.json")(runs[1].folder)
    command = [sys.executable, "-c", "raise SystemExit('error: planted')"]
    assert run(config, command) == 1
    said = capsys.readouterr()
    assert "1 of 3 runs failed" in said.err and "page: " in said.out and len(said.out.splitlines()) <= 10
    state = json.loads((tmp_path / "logs" / "s" / "study.json").read_text(encoding="utf-8"))
    assert [r["state"] for r in state["runs"]] == ["finished", "failed", "finished"]
    assert "planted" in state["runs"][1]["reason"]
    assert "sym dot" in (tmp_path / "logs" / "s" / "tables" / "failed.csv").read_text(encoding="utf-8")
    config.dry_run = True
    assert run(config, command) == 0
    assert [x.split()[0] for x in capsys.readouterr().out.splitlines()] == ["finished", "to", "finished"]


def test_tables_are_printed_where_the_file_or_verbose_says_so(
    runs: list[StudyRun], config: StudyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.yaml").write_text(f"show: table6\n{ARMS}", encoding="utf-8")
    assert run(config, ["false"]) == 0
    said = capsys.readouterr().out
    assert "Table 6 of the paper" in said and "/ .384" in said and "Both directions kept" not in said
    config.verbose = True
    assert run(config, ["false"]) == 0
    said = capsys.readouterr().out
    assert "Table 6 of the paper" in said and "Both directions kept" in said


def test_a_study_that_another_process_runs_is_left_alone(
    runs: list[StudyRun], config: StudyConfig, tmp_path: Path
) -> None:
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path / "logs" / "s" / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(UserError, match="logs/s: another process runs this study: wait for it, or end it first"):
            run(config, ["none"])


def test_a_whole_run_is_read_as_it_is(runs: list[StudyRun], results: Results) -> None:
    found, lines, start = read_run(runs[0])
    assert (
        found[""].json == json.loads(json.dumps(results.json)) and lines == [{"step": 1}, {"step": 2}] and start == {}
    )
