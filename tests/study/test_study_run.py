"""Runs of a study: each once, several at once, failures apart, and again only what is missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmclip.commands.study import run as study
from mmclip.config import StudyConfig
from mmclip.evaluation.results import save_results
from mmclip.study.plan import StudyRun, is_finished, plan_study, seconds_of
from mmclip.study.runner import run_study
from tests.helpers import tiny
from tests.helpers.studying import planted_run

# What train_clip.py does as far as a study sees it: a lock, a config, lines, a checkpoint, results. It notes its starts
STAND_IN = """
import fcntl, json, os, sys, time, pathlib, yaml
s = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))
folder = pathlib.Path(s["logs"]) / s["name"]
folder.mkdir(parents=True, exist_ok=True)
lock = open(folder / ".lock", "w"); fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
how = "again" if "--resume" in sys.argv else "first"
here = pathlib.Path(__file__).parent
with open(here / "starts.txt", "a") as f:
    told = [os.environ.get(k) for k in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")]
    f.write(f"{how} {s['norm']} {s['seed']} {told[0]} {told[1]}\\n")
(folder / "config.yaml").write_text(yaml.safe_dump(s))
(folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "epoch": 0}) + "\\n" + '{"step": 2, "epo')
if s["norm"] == "dot":
    print("step 1"); sys.exit("error: a planted fault\\nmore")
running = len(list(here.glob("running-*"))) + 1
mark = here / f"running-{os.getpid()}"; mark.touch()
with open(here / "at_once.txt", "a") as f:
    f.write(f"{running}\\n")
time.sleep(float(os.environ.get("STAND_IN_SECONDS", "0.5")))
mark.unlink()
(folder / "checkpoints").mkdir(exist_ok=True)
for name in ("per_query.npz", "results.json"):
    (folder / name).write_bytes((here / "made" / name).read_bytes())
"""


def runs(folder: Path, text: str) -> list[StudyRun]:
    file = folder / "s.yaml"
    file.write_text(text, encoding="utf-8")
    return plan_study(StudyConfig(config=str(file), logs=str(folder / "logs"))).runs


def stand_in(folder: Path) -> list[str]:
    save_results(planted_run(), folder / "made")
    (folder / "stand_in.py").write_text(STAND_IN, encoding="utf-8")
    return [sys.executable, str(folder / "stand_in.py")]


def starts(folder: Path) -> list[str]:
    return (folder / "starts.txt").read_text(encoding="utf-8").splitlines()


@pytest.fixture
def no_threads_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_every_run_once_two_at_once_and_nothing_again(tmp_path: Path, no_threads_asked: None) -> None:
    found = runs(tmp_path, "seeds: [0, 1]\narms:\n  - {norm: [cosine, qnorm]}\n")
    script = stand_in(tmp_path)
    assert run_study(found, script, 2, ["4", "7"], 3) == ({}, 0)
    assert all(is_finished(c) for c in found)
    assert sorted(x.split()[1:4] for x in starts(tmp_path)) == sorted(
        [n, str(s), "3"] for n in ("cosine", "qnorm") for s in (0, 1)
    )
    assert {x.split()[4] for x in starts(tmp_path)} == {"4", "7"}
    assert max((tmp_path / "at_once.txt").read_text().split()) == "2"
    assert not any((c.folder / "checkpoints").exists() for c in found)
    took = [seconds_of(c) for c in found]
    assert all(t is not None and t >= 0.5 for t in took)
    assert run_study(found, script, 2) == ({}, 0)
    assert len(starts(tmp_path)) == 4
    more = runs(tmp_path, "seeds: [0, 1]\narms:\n  - {norm: [cosine, qnorm, dnorm]}\n")
    assert run_study(more, script, 2) == ({}, 0)
    assert [x.split()[1] for x in starts(tmp_path)[4:]] == ["dnorm", "dnorm"]


def test_a_failure_is_named_and_stops_only_what_starts_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "arms:\n  - {norm: [dot, cosine]}\n  - {norm: qnorm, init_from: sym dot}\n"
    found = runs(tmp_path, text)
    failed, signum = run_study(found, stand_in(tmp_path), 1)
    why = {c.arm: w for c, w in failed.items()}
    assert signum == 0
    assert set(why) == {"sym dot", "sym qnorm init_from=sym dot"}
    assert why["sym dot"].startswith("a planted fault (exit code 1; ")
    assert why["sym qnorm init_from=sym dot"] == "its initial run failed: sym dot, seed 0"
    assert [c.arm for c in found if is_finished(c)] == ["sym cosine"]
    told = capsys.readouterr().err
    assert "failed: sym dot, seed 0: a planted fault" in told and "[1/3] sym cosine, seed 0" in told


def test_a_run_that_was_cut_is_continued_and_one_that_another_process_trains_is_waited_for(tmp_path: Path) -> None:
    found = runs(tmp_path, "arms:\n  - {norm: [cosine, qnorm]}\n")
    script = stand_in(tmp_path)
    plans = tmp_path / "logs" / "s" / "settings"
    environment = {**os.environ, "STAND_IN_SECONDS": "4"}
    import yaml

    plans.mkdir(parents=True)
    file = plans / "orphan.yaml"
    file.write_text(yaml.safe_dump(found[0].config.to_dict()), encoding="utf-8")
    orphan = subprocess.Popen([*script, "--config", str(file)], env=environment)
    while not (found[0].folder / "config.yaml").exists():
        time.sleep(0.05)
    cut = subprocess.Popen([*script, "--config", str(_plan(found[1], plans))], env=environment)
    while not (found[1].folder / "config.yaml").exists():
        time.sleep(0.05)
    cut.kill()
    cut.wait()
    (tmp_path / f"running-{cut.pid}").unlink(missing_ok=True)
    assert run_study(found, script, 2) == ({}, 0)
    assert orphan.wait(20) == 0
    assert [x.split()[:2] for x in starts(tmp_path)] == [["first", "cosine"], ["first", "qnorm"], ["again", "qnorm"]]


def _plan(cell: StudyRun, folder: Path) -> Path:
    import yaml

    path = folder / f"{cell.folder.name}.yaml"
    path.write_text(yaml.safe_dump(cell.config.to_dict()), encoding="utf-8")
    return path


def test_a_signal_stops_the_runs_and_says_how_to_go_on(tmp_path: Path) -> None:
    found = runs(tmp_path, "arms:\n  - {norm: [cosine, qnorm]}\n")
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from pathlib import Path\nfrom mmclip.config import StudyConfig\nfrom mmclip.commands.study import run\n"
        f"sys.exit(run(StudyConfig(config={str(tmp_path / 's.yaml')!r}, logs={str(tmp_path / 'logs')!r}, jobs=1), "
        f"{stand_in(tmp_path)!r}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tiny.ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "STAND_IN_SECONDS": "60", "PYTHONPATH": str(tiny.ROOT)},
    )
    while not (found[0].folder / "config.yaml").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped with 2 runs left; the same command goes on" in told
    state = json.loads((tmp_path / "logs" / "s" / "study.json").read_text())
    assert [r["state"] for r in state["runs"]] == ["not run", "not run"]


def test_where_every_run_failed_there_is_no_page(tmp_path: Path) -> None:
    runs(tmp_path, "arms:\n  - {norm: dot}\n")
    with pytest.raises(Exception, match="none of the 1 runs is finished: a planted fault"):
        study(StudyConfig(config=str(tmp_path / "s.yaml"), logs=str(tmp_path / "logs"), jobs=1), stand_in(tmp_path))
