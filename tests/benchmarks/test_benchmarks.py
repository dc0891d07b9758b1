"""The benchmarks at a small size: both contestants compute the same, faults and failures are reported."""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mmclip.config import TrainConfig, parse
from mmclip.data.shards import open_data
from mmclip.losses import tiled
from mmclip.losses.contrastive import ContrastiveLoss
from mmclip.roles import Exponents
from tests.helpers.warm import run_warm

pytestmark = pytest.mark.filterwarnings("default")  # other people's code runs here, in this process
NAMES = ("harness", "loss", "training_step", "encoding", "retrieval", "diagnostics", "serving", "soak")
NUMBER = r"\d+\.\d+"


@pytest.fixture
def load(root, monkeypatch):
    """Import a benchmark beside its siblings."""
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    monkeypatch.setattr("mmclip.losses.tiled.KEEP", {**tiled.KEEP})  # a contestant may change it for its process
    return importlib.import_module


@pytest.fixture
def small(tiny_data, tiny_model) -> list[str]:
    """Flags of benchmarks that run two programs."""
    return ["--data", str(tiny_data), "--model", str(tiny_model), "--device", "cpu", "--precision", "fp32"]


@pytest.fixture
def run(root, load, monkeypatch, capsys) -> Callable[..., tuple[int, list[str]]]:
    """Run a benchmark in this process, its contestants too; ``fails``: a pattern of the tasks that fail."""
    harness = load("harness")
    stock = harness.Parser.run

    def start(name: str, *flags: object, fails: str = "") -> tuple[int, list[str]]:
        def inside(parser: Any, measure: Callable[[Any], Any], compete: Any):
            def measured(script: str, spec: dict[str, Any], name: str, python: str = "") -> Any:
                if fails and re.search(fails, json.dumps(spec)):
                    harness.FAILED.append(f"{name}: failed: planted")
                    return None
                return measure(json.loads(json.dumps(spec)))

            monkeypatch.setattr(harness, "measured", measured)
            stock(parser, measure, compete)

        monkeypatch.setattr(harness, "FAILED", [])
        monkeypatch.setattr(harness.Parser, "run", inside)
        monkeypatch.setattr(sys, "argv", [name, *map(str, flags)])
        code = 0
        try:
            runpy.run_path(str(root / "benchmarks" / f"{name}.py"), run_name="__main__")
        except SystemExit as left:
            code = left.code
        shown = capsys.readouterr()
        return code, [*shown.out.splitlines(), *shown.err.splitlines()]

    return start


@pytest.mark.parametrize("name", NAMES)
def test_help_names_the_command(run, name: str):
    code, lines = run(name, "--help")
    assert code == 0 and any(f"python benchmarks/{name}.py" in line for line in lines)


@pytest.mark.parametrize(("name", "flags", "message"), [
    ("loss", ["--batch-sizes", 1], "argument --batch-sizes: '1': a whole number of at least 2 is expected"),
    ("encoding", ["--model", "x"], "--model x: neither a model config JSON nor a name that open_clip knows"),
    ("serving", ["--embeddings", "nofile.npz"], "nofile.npz: no such file"),
])  # fmt: skip
def test_errors_are_one_line_before_anything_is_drawn(
    run, tmp_path, monkeypatch, name: str, flags: list[object], message: str
):
    if name == "serving":
        pytest.importorskip("faiss")
    monkeypatch.setenv("MMCLIP_DATA", str(tmp_path))
    code, lines = run(name, *flags)
    assert code == 2 and lines[-1] == f"error: {message}"
    assert not list(tmp_path.iterdir())


# --- harness ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("print('x'); print('{\"seconds\": 1}')", ""),
        ("print('null')", "a: does not fit into memory"),
        ("os.kill(os.getpid(), 9)", "a: does not fit into memory"),
        ("os.kill(os.getpid(), 11)", "a: failed: ended by SIGSEGV"),
        ("print('no JSON')", "a: failed: no result"),
        (
            "print('a warning\\nplanted: the last line', file=sys.stderr); sys.exit(3)",
            "a: failed: planted: the last line",
        ),
    ],
)
def test_a_process_that_ends_without_a_result_has_failed(load, monkeypatch, capsys, tmp_path, code: str, line: str):
    harness = load("harness")
    monkeypatch.setattr(harness, "FAILED", [])
    (tmp_path / "x.py").write_text(f"import os, sys\n{code}\n")
    found = harness.measured(tmp_path / "x.py", {"threads": 1}, "a")
    assert found == (None if line else {"seconds": 1})
    assert capsys.readouterr().out == (f"{line}\n" if line else "")
    assert ([line] if "failed" in line else []) == harness.FAILED


def test_memory_that_cannot_be_measured_has_no_ratio(load):
    of_memory = load("harness").of_memory
    assert of_memory(1.0, 8.0) == "0.125 of its memory"
    assert of_memory(0.0, 8.0) == of_memory(1.0, 0.0) == "memory too small to compare"


def test_tables_are_written_between_their_marks(run, tmp_path):
    page, marks = tmp_path / "page.md", "<!-- table: {}.csv -->\n{}<!-- /table -->\n"
    page.write_text("before\n" + marks.format("a", "old\n") + "between\n" + marks.format("b", "") + "after\n")
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "a.csv").write_text("# a machine\nB,loss,cpu\n16384,sym,0.123456\n")
    filled = "a machine.\n\n| B | loss | s of CPU |\n| --- | --- | --- |\n| 16,384 | sym | 0.123 |\n\n"
    wanted = "before\n" + marks.format("a", filled) + "between\n" + marks.format("b", "Not measured.\n") + "after\n"
    for _ in range(2):
        assert run("harness", page) == (0, [])
        assert page.read_text() == wanted


def test_both_layouts_hold_the_same_images_and_captions(load, tiny_data, tmp_path):
    found = load("harness").export(str(tiny_data), "test", "eval", 10, tmp_path / "data", 2, 3)
    assert (found["images"], found["captions"]) == (10, 20)
    whole, files, shards = open_data(str(tiny_data), "test"), open_data(found["csv"]), open_data(found["tar"])
    assert files.captions == shards.captions == [c[:2] for c in whole.captions[:10]]
    for row in range(10):
        image = whole.read_image(row).tobytes()
        assert files.read_image(row).tobytes() == image == shards.read_image(row).tobytes()


def test_clocks_count_the_work_of_running_readers(load):
    clocks = load("harness").clocks
    reader = multiprocessing.get_context("spawn").Process(target=exec, args=("x = 0\nwhile True: x += 1",))
    reader.start()
    try:
        before = clocks()[1]
        for _ in range(100):
            reader.join(0.1)
            if clocks()[1] > before + 0.3:
                break
        assert clocks()[1] > before + 0.3
    finally:
        reader.kill()
        reader.join()


SMALL_LOSS = ("--batch-sizes", 16, 48, "--dim", 8, "--rounds", 1, "--losses", "sym", "--norms", "cosine", "learned")
SMALL_DIAGNOSTICS = ("--measures", "anisotropy", "--sizes", 60, 90, "--dim", 5, "--rounds", 1)


@pytest.mark.parametrize(("name", "fails", "flags"), [
    ("loss", '"agreement"|"ClipLoss"', SMALL_LOSS),
    ("loss", '"bytes"', ("--ranks", 2, *SMALL_LOSS)),
    ("diagnostics", '"dense"', SMALL_DIAGNOSTICS),
    ("diagnostics", '"name": "mmclip"', SMALL_DIAGNOSTICS),
    ("retrieval", '"clip-benchmark"', ("--images", 40, "--dim", 8, "--rounds", 1)),
    ("encoding", '"contestant": "open_clip"', ("--images", 8, "--batch-size", 4, "--rounds", 2, "--workers", 0)),
])  # fmt: skip
def test_the_others_go_on_where_a_contestant_fails(run, small, name: str, fails: str, flags: tuple[object, ...]):
    code, lines = run(name, *flags, *(small if name == "encoding" else ()), fails=fails)
    assert code == 1 and lines[-1].startswith("error: ") and lines[-1].endswith(": failed: planted")
    if fails != '"bytes"':
        assert any("median" in line for line in lines)
    if "ClipLoss" in fails:
        assert lines.count(lines[-1]) == 2, "measured no more in a size"
        assert any("other norms to cosine: learned" in line for line in lines)


# --- loss -------------------------------------------------------------------------------------------------------------


def test_the_loss_agrees_with_the_plain_form_and_clip_loss_and_ends_with_the_ratio(run, tmp_path):
    code, lines = run("loss", *SMALL_LOSS, "--csv", tmp_path / "x.csv", "--plot", tmp_path / "x.png")
    assert code == 0
    assert re.fullmatch(r"\d+ values and gradients against the plain form .*: they agree", lines[2])
    assert sum(line.startswith("loss ") and line.endswith("they agree") for line in lines) == 2
    assert re.fullmatch(rf"B = 48, other norms to cosine: learned {NUMBER} \({NUMBER}\)", lines[-3])
    ratio = rf"B = 48, ratio: {NUMBER} \({NUMBER}\) times as fast as ClipLoss, ({NUMBER} of its m|m)emory.*"
    assert re.fullmatch(ratio, lines[-1])
    machine, heads, *rows = (tmp_path / "x.csv").read_text().splitlines()
    assert machine.startswith("# ") and heads.startswith("B,loss,seconds,cpu,mib,seconds of ClipLoss's")
    names = ["ClipLoss", "sym cosine", "sym learned", '"sym cosine, ids"', '"sym cosine, again"']
    assert [row[3:].startswith(name) for row, name in zip(rows, 2 * names, strict=True)] == [True] * 10
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("planted", [0.0, 1e-6, math.nan])
def test_a_planted_gradient_is_found(load, monkeypatch, planted: float):
    stock = ContrastiveLoss.forward

    def off(self: Any, sides: Any, *args: Any, **kwargs: Any) -> Any:
        out = stock(self, sides, *args, **kwargs)
        return out._replace(loss=out.loss + planted * sides["image"].sum())

    monkeypatch.setattr(ContrastiveLoss, "forward", off)
    found = load("loss").agreement({"losses": ["asym-t2i"], "norms": ["qnorm"], "batch": 30, "dim": 4})
    assert found["compared"] == 3 * 6  # policies x values, features' and alpha's gradients
    worst = found["worst"]
    assert math.isnan(worst) if math.isnan(planted) else worst > 1e-8 if planted else worst < 1e-12


def test_clip_loss_sends_what_two_gathers_and_their_backward_send(load):
    rows, dim, ranks = 16, 4096, 2
    spec = {"ranks": ranks, "batch": rows, "dim": dim, "threads": 1, "losses": ["sym"], "norms": ["cosine"]}
    found = {name: sum(by.values()) for name, by in load("loss").sent(spec).items()}
    side = rows * dim * 4 * (ranks - 1) // ranks  # float32
    assert found["ClipLoss"] == 4 * side, "two sides and their gradients"
    assert 2 * side <= found["sym cosine"] < 2.05 * side, "one side and its gradient"


# --- diagnostics, retrieval, serving ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["hubness", "d of norms", "anisotropy", "effective rank", "row entropy", "Fisher query", "Fisher document"],
)
def test_diagnostics_agree_with_their_dense_forms(load, name: str):
    module = load("diagnostics")
    what = (name, *module.vectors(60, 5), Exponents(0.3, 0.8), 2.0)
    ours, dense = module.mmclip_form(*what), module.dense_form(*what)
    assert ours == pytest.approx(dense, rel=module.MEASURES[name][0]) and all(ours)


def test_diagnostics_end_with_ratio_and_growth(run):
    code, lines = run("diagnostics", *SMALL_DIAGNOSTICS)
    last = r"at N = 90 [\d.]+ times as fast as the dense form .*; growth N\^-?[\d.]+ from 60 to 90"
    assert code == 0 and re.search(last, lines[-1])


def test_retrieval_agrees_with_clip_benchmark_and_ends_with_the_ratio(run, tmp_path):
    pytest.importorskip("clip_benchmark")
    flags = ("--dim", 16, "--rounds", 1, "--lists", 3, "--plot", tmp_path / "x.png")
    code, lines = run("retrieval", "--images", 60, 120, *flags)
    assert code == 0 and lines.count("the numbers agree") == 2
    ratio = rf"N = 120, ratio: {NUMBER} times as fast \({NUMBER} by CPU time\), ({NUMBER} of its m|m)emory.*"
    assert re.fullmatch(ratio, lines[-1])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_serving_measures_every_index_of_every_scoring(run):
    pytest.importorskip("faiss", reason="faiss is not installed: pip install -e '.[serving]'")
    code, lines = run("serving", "--images", 60, "--dim", 8, "--k", 3)
    blocks = [block.splitlines() for block in "\n".join(lines).strip().split("\n\n")]
    assert code == 0 and [b[0].split(":")[0] for b in blocks] == ["i2t native", "t2i native", "t2i corrected"]
    for head, *rows in blocks:
        assert len(rows) == 7 + ("corrected" in head)
        assert [r for r in rows if r.endswith("beyond rounding 0")] == [rows[0], rows[2]]
        assert all("recall@3 1.0000" in r for r in (rows[0], rows[2]))


# --- encoding ---------------------------------------------------------------------------------------------------------


def test_encoding_agrees_with_open_clip_and_ends_with_the_ratio(run, small, tmp_path):
    flags = ("--quick", "--workers", 0, "--batch-size", 9, "--csv", tmp_path / "rows.csv")
    code, lines = run("encoding", *small, *flags)
    assert code == 0 and "the vectors agree" in lines and "24 images and 120 captions" in lines[1]
    ratio = rf"ratio: ours {NUMBER} times open_clip's \({NUMBER} by CPU time\); images {NUMBER}, captions {NUMBER}"
    assert re.fullmatch(ratio, lines[-1])
    rows = (tmp_path / "rows.csv").read_text().splitlines()[2:]
    assert [row.split(",")[0] for row in rows] == ["ours", "open_clip"]


@pytest.mark.parametrize("off", [0.0, 0.01])
def test_encoding_fails_where_vectors_differ(load, tmp_path, off: float):
    for name in ("ours", "open_clip"):
        vectors = {"image": torch.ones(4, 3), "text": torch.ones(20, 3)}
        vectors["text"][7, 2] += off if name == "ours" else 0
        save_file(vectors, tmp_path / f"{name}.safetensors")
    assert load("encoding").agree(tmp_path, "fp32") == (off == 0)


# --- training step ----------------------------------------------------------------------------------------------------


def test_training_does_the_same_work_as_open_clip_train_and_ends_with_the_ratio(
    load, small, root, tmp_path, monkeypatch, capsys
):
    training, harness = load("training_step"), load("harness")
    stock = harness.measured

    def measured(script: str, spec: dict[str, Any], name: str, python: str) -> Any:
        if python != sys.executable:
            return stock(script, spec, name, python)
        done = run_warm([script, "--measure", json.dumps(spec)], root, {"PYTHONPATH": str(root)}, 300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    monkeypatch.setattr(harness, "measured", measured)
    flags = [*small, "--quick", "--workers", "1", "--batch-size", "16", "--venv", str(tmp_path / "venv")]
    try:
        assert training.compete(training.parser().parse_args(flags), tmp_path) == 0
    except SystemExit as error:
        if "cannot be installed" not in str(error):
            raise
        pytest.skip(f"PyPI cannot be reached: {str(error)[-200:]}")
    lines = capsys.readouterr().out.splitlines()
    losses = [[float(x) for x in line.rpartition(": ")[2].split(", ")] for line in lines if "losses of 3" in line]
    assert len(losses) == 2 and losses[0] == pytest.approx(losses[1], abs=2e-3)
    assert len(set(losses[0])) == 3  # weights move
    assert lines[-2].endswith("apart: the same work")
    assert re.fullmatch(rf"ratio: ours {NUMBER} times open_clip_train's \({NUMBER} by CPU time\)", lines[-1])


def test_training_fails_where_first_losses_differ(load, small, tmp_path, monkeypatch, capsys):
    training = load("training_step")

    def measured(script: str, spec: dict[str, Any], name: str, python: str) -> dict[str, Any]:
        losses = [2.0 + 2e-4 * (name == "ours"), 1.0, 0.5]
        return {"samples_per_second": 2.0, "cpu_per_step": 1.0, "losses": losses, "flags": []}

    monkeypatch.setattr(load("harness"), "measured", measured)
    monkeypatch.setattr(training, "make_venv", lambda folder: sys.executable)
    assert training.compete(training.parser().parse_args([*small, "--batch-size", "8"]), tmp_path) == 1
    assert "NOT THE SAME WORK" in capsys.readouterr().out


def test_training_repeats_the_error_of_pip(load, tmp_path, monkeypatch):
    training = load("training_step")
    calls = []

    def call(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, int("pip" in command), "", "a\nERROR: no network\n")

    monkeypatch.setattr(training.subprocess, "run", call)
    monkeypatch.setattr(training.Path, "write_text", lambda *_, **__: None)
    with pytest.raises(SystemExit, match=r"open_clip_train's requirements \(.*webdataset.*ERROR: no network"):
        training.make_venv(tmp_path / "venv")
    assert any(word.startswith("webdataset") for word in calls[-1])


def test_the_timer_counts_the_steps_after_the_warm_up(load, monkeypatch):
    training = load("training_step")
    ticks = iter([(10.0, 1.0), (16.0, 5.0)])
    monkeypatch.setattr(load("harness"), "clocks", lambda: next(ticks))
    timer = training.Timer(2, 3, "cpu")
    for _ in range(4):
        timer()
    with pytest.raises(training.Enough):
        timer()
    assert timer.spent == {"seconds": 6.0, "cpu": 4.0}


def test_our_flags_are_the_loss_and_the_optimizer_of_the_other_side(load, tiny_model, tmp_path):
    training = load("training_step")
    (tmp_path / "w.safetensors").touch()
    spec = {"batch_size": 8, "workers": 1, "precision": "fp32", "device": "cpu", "epochs": 2, "logs": str(tmp_path)}
    spec |= {"warmup": 3, "layout": "csv", "csv": "x.csv", "check": False, "config": str(tiny_model)}
    flags, _ = training.ours(spec | {"weights": str(tmp_path / "w.safetensors")})
    settings = parse(TrainConfig, flags)
    assert {name: getattr(settings, name.replace("-", "_")) for name in training.OPTIMIZER} == training.OPTIMIZER
    assert (settings.loss, settings.norm, settings.positives) == ("sym", "cosine", "none")
    assert (settings.warmup, settings.val_data, settings.dataset_type, settings.workers) == (3, "none", "csv", 1)
