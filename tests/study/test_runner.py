"""Runs of a study: each once, several at once, failures apart, read back, and again only what is missing or damaged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mmclip.commands.study import run as study
from mmclip.config import StudyConfig
from mmclip.data.beir import EVALUATIONS
from mmclip.errors import UserError
from mmclip.evaluation.results import Results, load_results, save_results
from mmclip.study.arms import gather, read_run
from mmclip.study.plan import StudyRun, is_finished, plan_study, seconds_of
from mmclip.study.runner import run_study, set_damaged_aside
from tests.helpers import tiny
from tests.helpers.studying import INSIDE, OUTSIDE, QUERIES, planted_run, planted_text

# What mmclip train does as far as a study sees it: a config, lines, a checkpoint, results. It notes its starts
STAND_IN = """
import json, os, shutil, sys, time, pathlib, yaml
s = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))
folder = pathlib.Path(s["logs"]) / s["name"]
folder.mkdir(parents=True, exist_ok=True)
how = "again" if "--resume" in sys.argv else "first"
here = pathlib.Path(__file__).parent
with open(here / "starts.txt", "a") as f:
    threads, gpu = [os.environ.get(k) for k in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")]
    f.write(f"{how} {s['norm']} {s['seed']} {threads} {gpu} {s['measure_start']}\\n")
(folder / "config.yaml").write_text(yaml.safe_dump(s))
(folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "epoch": 0}) + "\\n" + '{"step": 2, "epo')
if s["norm"] == "dnorm":
    print("step 1"); sys.exit("error: a planted fault\\nmore")
mark = here / f"running-{os.getpid()}"; mark.touch()
with open(here / "at_once.txt", "a") as f:
    f.write(f"{len(list(here.glob('running-*')))}\\n")
time.sleep(float(os.environ.get("STAND_IN_SECONDS", "0.3")))
mark.unlink()
(folder / "checkpoints").mkdir(exist_ok=True)
shutil.copytree(here / "made", folder, dirs_exist_ok=True)
"""
Capture = pytest.CaptureFixture[str]
ARMS = "arms:\n  - {norm: [cosine, dot]}\n  - {norm: qnorm, init_from: sym cosine}\n"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def config(folder: Path, text: str, **more: Any) -> StudyConfig:
    (folder / "s.yaml").write_text(text, encoding="utf-8")
    return StudyConfig(config=str(folder / "s.yaml"), logs=str(folder / "logs"), jobs=1, **more)


def runs_of(folder: Path, text: str) -> list[StudyRun]:
    return plan_study(config(folder, text)).runs


@pytest.fixture(scope="module")
def results() -> Results:
    return planted_run()


@pytest.fixture
def script(tmp_path: Path, results: Results) -> list[str]:
    save_results(results, tmp_path / "made")
    (tmp_path / "stand_in.py").write_text(STAND_IN, encoding="utf-8")
    return [sys.executable, str(tmp_path / "stand_in.py")]


def starts(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "starts.txt").read_text(encoding="utf-8").splitlines()]


def wait_for(path: Path) -> None:
    until = time.monotonic() + 30
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.02)


# --- running ----------------------------------------------------------------------------------------------------------


def test_every_run_once_two_at_once_and_nothing_again(tmp_path: Path, script: list[str]) -> None:
    result = runs_of(tmp_path, "seeds: [0, 1]\narms:\n  - {norm: [cosine, qnorm]}\n")
    assert run_study(result, script, 2, ["4", "7"], 3) == ({}, 0)
    assert all(is_finished(c) for c in result)
    assert sorted(x[1:4] for x in starts(tmp_path)) == [[n, s, "3"] for n in ("cosine", "qnorm") for s in "01"]
    assert {x[4] for x in starts(tmp_path)} == {"4", "7"}
    assert max((tmp_path / "at_once.txt").read_text().split()) == "2"
    assert not any((c.folder / "checkpoints").exists() for c in result)
    assert all((seconds_of(c) or 0) >= 0.3 for c in result)
    assert run_study(result, script, 2) == ({}, 0) and len(starts(tmp_path)) == 4
    more = runs_of(tmp_path, "seeds: [0, 1]\narms:\n  - {norm: [cosine, qnorm, dot]}\n")
    assert run_study(more, script, 2) == ({}, 0)
    assert [x[1] for x in starts(tmp_path)[4:]] == ["dot", "dot"]


def test_a_failure_is_named_and_stops_what_starts_from_it(tmp_path: Path, script: list[str], capsys: Capture) -> None:
    text = "arms:\n  - {norm: [dnorm, cosine]}\n  - {norm: qnorm, init_from: sym dnorm}\n"
    result = runs_of(tmp_path, text)
    failed, signum = run_study(result, script, 1)
    why = {c.arm: w for c, w in failed.items()}
    assert signum == 0 and set(why) == {"sym dnorm", "sym qnorm init_from=sym dnorm"}
    assert why["sym dnorm"].startswith("a planted fault (exit code 1; ")
    assert why["sym qnorm init_from=sym dnorm"] == "its initial run failed: sym dnorm, seed 0"
    assert [c.arm for c in result if is_finished(c)] == ["sym cosine"]
    err = capsys.readouterr().err
    assert "failed: sym dnorm, seed 0: a planted fault" in err and "[1/3] sym cosine, seed 0" in err
    with pytest.raises(UserError, match="none of the 1 runs is finished: a planted fault"):
        study(config(tmp_path, "arms:\n  - {norm: dnorm}\n"), script)


def test_a_killed_run_is_continued(tmp_path: Path, script: list[str]) -> None:
    (one,) = runs_of(tmp_path, "arms:\n  - {norm: qnorm}\n")
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(one.config.to_dict()), encoding="utf-8")
    environment = {**os.environ, "STAND_IN_SECONDS": "30"}
    with subprocess.Popen([*script, "--config", str(tmp_path / "one.yaml")], env=environment) as killed:
        wait_for(one.folder / "config.yaml")
        killed.kill()
    assert run_study([one], script, 2) == ({}, 0)
    assert [x[0] for x in starts(tmp_path)] == ["first", "again"]


def test_a_signal_stops_the_runs_and_says_how_to_go_on(tmp_path: Path, script: list[str]) -> None:
    result = runs_of(tmp_path, "arms:\n  - {norm: [cosine, qnorm]}\n")
    code = (
        "import sys\nfrom mmclip.config import StudyConfig\nfrom mmclip.commands.study import run\n"
        f"sys.exit(run(StudyConfig(config={str(tmp_path / 's.yaml')!r}, logs={str(tmp_path / 'logs')!r}, jobs=1), "
        f"{script!r}))"
    )
    environment = {**os.environ, "STAND_IN_SECONDS": "60", "PYTHONPATH": str(tiny.ROOT)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tiny.ROOT, stderr=subprocess.PIPE, text=True, env=environment) as process:
        wait_for(result[0].folder / "config.yaml")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped with 2 runs left; the same command goes on" in err
    state = json.loads((tmp_path / "logs" / "s" / "study.json").read_text())
    assert [r["state"] for r in state["runs"]] == ["not run", "not run"]


# --- finished runs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path, results: Results) -> list[StudyRun]:
    """cosine, dot and qnorm, which starts from cosine: all finished."""
    result = runs_of(tmp_path, ARMS)
    for one in result:
        save_results(results, one.folder)
        (one.folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n', encoding="utf-8")
        (one.folder / "start.json").write_text("{}", encoding="utf-8")
    return result


Damage = Callable[[Path], object]


def cut(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:200])


def write(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def changed(change: Callable[[Results], object]) -> Damage:
    def act(folder: Path) -> None:
        result = load_results(folder)
        change(result)
        save_results(result, folder)

    return act


def shorter(*names: str) -> Damage:
    """Arrays of these beginnings lose their last value."""

    def change(result: Results) -> None:
        cut = {k: v[:-1] for k, v in result.per_query.items() if k.startswith(names) and "length_level" not in k}
        result.per_query.update(cut)

    return changed(change)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut("results.json"), "is not a results.json"),
        (write("results.json", '{"retrieval": {}, "magnitude": {}, "data": {}, "trained_with": {}}'), "not the whole"),
        (cut("per_query.npz"), "per_query.npz is not an array file"),
        (lambda folder: (folder / "per_query.npz").unlink(), "no file"),
        (shorter("retrieval/i2t/native/success@1"), "native/success@1"),
        (shorter("retrieval/t2i/topk_moments"), "topk_moments"),
        (shorter("retrieval/i2t/"), "retrieval/i2t/clusters has not 30 values"),
        (changed(lambda r: r.per_query.pop("retrieval/i2t/topk_moments")), "topk_moments"),
        (write("start.json", '{"fish'), "start.json: not readable as JSON"),
        (write("start.json", "[" * 100_000), "start.json: not readable as JSON"),
    ],
)
def test_damaged_runs_are_trained_again(runs: list[StudyRun], damage: Damage, message: str, capsys: Capture) -> None:
    set_damaged_aside(runs)
    assert all(map(is_finished, runs))
    damage(runs[1].folder)
    arms, unreadable = gather(runs)  # damaged while others run
    ((one, why),) = unreadable.items()
    assert one is runs[1] and message in why and "\n" not in why
    assert [a.name for a in arms] == [runs[0].arm, runs[2].arm]
    set_damaged_aside(runs)
    err = capsys.readouterr().err
    aside = runs[1].folder.with_name(f"{runs[1].folder.name}.damaged")
    assert err.startswith(f"sym dot, seed 0: damaged, moved to {aside.name}, is trained again: ")
    assert err.count("\n") == 1 and (aside / "results.json").is_file()
    assert [is_finished(r) for r in runs] == [True, False, True]


def test_runs_are_read_as_they_are(runs: list[StudyRun], results: Results, capsys: Capture) -> None:
    read, lines, start = read_run(runs[2])
    assert read[""].json == json.loads(json.dumps(results.json))
    assert (lines, start) == ([{"step": 1}, {"step": 2}], {})
    (runs[0].folder / "metrics.jsonl").write_bytes(b'{"step": 1}\n\nnonsense\n{"step": 2, "a": "\xc3')
    for name in ("metrics.jsonl", "start.json"):
        (runs[1].folder / name).unlink()
    arms, unreadable = gather(runs)
    assert unreadable == {} and arms[0].logs == {0: [{"step": 1}]}
    assert arms[1].logs == {0: []} and arms[1].starts == {0: {}}
    assert capsys.readouterr().err == "sym dot, seed 0: no metrics.jsonl, so no curves\n"


def test_the_page_is_written_without_a_lost_run(runs: list[StudyRun], tmp_path: Path, capsys: Capture) -> None:
    cut("results.json")(runs[1].folder)
    command, folder = [sys.executable, "-c", "raise SystemExit('error: planted')"], tmp_path / "logs" / "s"
    assert study(config(tmp_path, ARMS), command) == 1
    said = capsys.readouterr()
    assert "1 of 3 runs failed" in said.err and "page: " in said.out and len(said.out.splitlines()) <= 10
    state = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    assert [r["state"] for r in state["runs"]] == ["finished", "failed", "finished"]
    assert "planted" in state["runs"][1]["reason"]
    assert "sym dot" in (folder / "tables" / "failed.csv").read_text(encoding="utf-8")
    assert study(config(tmp_path, ARMS, dry_run=True), command) == 0
    assert [x.split()[0] for x in capsys.readouterr().out.splitlines()] == ["finished", "to", "finished"]


def test_tables_are_printed_where_file_or_flag_says_so(runs: list[StudyRun], tmp_path: Path, capsys: Capture) -> None:
    for show, verbose, both in (("table6", False, False), ("[table6]", True, True)):
        assert study(config(tmp_path, f"show: {show}\n{ARMS}", verbose=verbose), ["false"]) == 0
        said = capsys.readouterr().out
        assert "Table 6 of the paper" in said and "/ .384" in said and ("Both directions kept" in said) is both


def test_a_study_that_another_process_runs_is_left_alone(runs: list[StudyRun], tmp_path: Path) -> None:
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path / "logs" / "s" / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(UserError, match=r"logs/s: another process .*: wait for it, or end it first"):
            study(config(tmp_path, ARMS), ["none"])


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def text_study(tmp_path: Path) -> str:
    """A study's file over two folders that look like data; nothing reads them."""
    for name in ("scifact", "cranfield"):
        (tmp_path / name / "qrels").mkdir(parents=True)
        for file in ("corpus.jsonl", "queries.jsonl", "qrels/train.tsv", "qrels/test.tsv"):
            (tmp_path / name / file).touch()
    head = f"title: Tiny <b>text</b>\nscript: train_text\nmodel: {tmp_path}\ntrain_data: {tmp_path}/scifact\n"
    head += f'val_data: ["{tmp_path}/scifact:test", "{tmp_path}/cranfield"]\nseeds: [3, 4]\n'
    return head + "arms:\n  - {norm: cosine, measure_start: true}\n  - {norm: dot, measure_start: false}\n"


def finish_text(folder: Path, norm: str, seed: int) -> None:
    save_results(planted_text(INSIDE, seed, norm), folder)
    save_results(planted_text(OUTSIDE, seed, norm), folder / EVALUATIONS / OUTSIDE)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shorter("retrieval/q2d/native/ndcg@10"), f"native/ndcg@10 has not {QUERIES - 4} values"),
        (changed(lambda r: r.json.pop("evaluation")), "not the whole results of an evaluated run: KeyError"),
        (changed(lambda r: r.json["retrieval"]["q2d"]["native"].update({"mrr@10": None})), "TypeError"),
        (lambda f: (f / "results.json").unlink(), "no file"),
    ],
)
def test_text_runs_are_read_by_data_set(tmp_path: Path, text_study: str, damage: Damage, message: str) -> None:
    result = runs_of(tmp_path, text_study)
    for one in result:
        finish_text(one.folder, one.config.norm, one.seed)
    arms, unreadable = gather(result)
    assert not unreadable and [(a.name, a.seeds) for a in arms] == [("q2d cosine", [3, 4]), ("q2d dot", [3, 4])]
    assert list(arms[0].runs) == [INSIDE, OUTSIDE]
    assert arms[0].runs[OUTSIDE][3].json == load_results(result[0].folder / EVALUATIONS / OUTSIDE).json
    damage(result[1].folder / EVALUATIONS / OUTSIDE)
    arms, unreadable = gather(result)
    ((one, why),) = unreadable.items()
    assert one is result[1] and message in why and "\n" not in why and [a.seeds for a in arms] == [[3, 4], [4]]


def test_a_text_study_trains_each_run_once(tmp_path: Path, text_study: str, script: list[str], capsys: Capture) -> None:
    for file in (tmp_path / "made").iterdir():
        file.unlink()
    finish_text(tmp_path / "made", "cosine", 3)
    settings = config(tmp_path, text_study)
    assert study(settings, script) == 0
    said = capsys.readouterr()
    assert "is best with" in said.out and "page: " in said.out and len(said.out.splitlines()) <= 10
    assert "[4/4]" in said.err and f"{INSIDE} q2d ." in said.err
    measured = [["cosine", "3", "True"], ["cosine", "4", "False"], ["dot", "3", "False"], ["dot", "4", "False"]]
    assert sorted([x[1], x[2], x[5]] for x in starts(tmp_path)) == measured
    folder = tmp_path / "logs" / "s"
    page = (folder / "study.html").read_text(encoding="utf-8")
    assert "Tiny &lt;b&gt;text" in page and "<script" not in page
    assert np.loadtxt(folder / "tables" / "retrieval.csv", str, delimiter=",").shape[0] > 1
    assert study(settings, script) == 0 and len(starts(tmp_path)) == 4  # nothing again
