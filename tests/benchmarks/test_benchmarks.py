"""The benchmarks run at a small size, and say what they are."""

from __future__ import annotations

import importlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mmclip.embeddings.files import Embeddings, save_embeddings
from mmclip.losses import contrastive as losses
from mmclip.similarity import Exponents


def run(root: Path, *flags: str, name: str = "retrieval.py") -> str:
    command = [sys.executable, str(root / "benchmarks" / name), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_says_what_is_measured_and_how(root):
    text = run(root, "--help")
    for word in ("python benchmarks/retrieval.py --large", "ru_maxrss", "all four scorings", "ties", "--threads"):
        assert word in text


def test_the_loss_is_held_against_the_plain_form_and_clip_loss_and_ends_with_the_ratio(root, tmp_path):
    small = ("--batch-sizes", "48", "--dim", "8", "--rounds", "1", "--losses", "sym", "--norms", "cosine", "learned")
    told = run(root, *small, "--csv", str(tmp_path / "x.csv"), name="loss.py").splitlines()
    assert re.fullmatch(r"\d+ values and gradients against the plain form .*: they agree", told[2])
    assert any(line.startswith("loss ") and line.endswith("they agree") for line in told)
    assert re.fullmatch(r"B = 48, other norms to cosine: learned [\d.]+ \([\d.]+\)", told[-3])
    assert re.fullmatch(
        r"B = 48, ratio: [\d.]+ \([\d.]+\) times as fast as ClipLoss, ([\d.]+ of its m|m)emory.*", told[-1]
    )
    machine, heads, *rows = (tmp_path / "x.csv").read_text().splitlines()
    assert machine.startswith("# ") and heads.startswith("B,loss,seconds,cpu,mib,seconds of ClipLoss's")
    names = ["ClipLoss", "sym cosine", "sym learned", '"sym cosine, ids"', '"sym cosine, again"']
    assert [row[3:].startswith(name) for row, name in zip(rows, names, strict=True)] == [True] * 5


def test_memory_that_is_not_to_be_seen_has_no_ratio(root, monkeypatch):
    of_memory = benchmark(monkeypatch, root, "harness").of_memory
    assert of_memory(1.0, 8.0) == "0.125 of its memory"
    assert of_memory(0.0, 8.0) == of_memory(1.0, 0.0) == "memory too small to compare"


@pytest.mark.parametrize(("name", "flags", "told"), [
    ("loss.py", ["--batch-sizes", "1"], "argument --batch-sizes: '1': a whole number of at least 2 is expected"),
    ("embedding.py", ["--model", "nomodel", "--quick"], "--model nomodel: neither a model config JSON nor a name that"),
])  # fmt: skip
def test_what_cannot_be_measured_is_told_at_once(root, tmp_path, name, flags, told):
    command = [sys.executable, str(root / "benchmarks" / name), *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "MMCLIP_DATA": str(tmp_path)}
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("error: ") and told in last, done.stderr
    assert not list(tmp_path.iterdir()), "no data are drawn for it"


def benchmark(monkeypatch: pytest.MonkeyPatch, root: Path, name: str) -> Any:
    """A benchmark as a module, beside its siblings."""
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    return importlib.import_module(name)


def agreement_of(monkeypatch: pytest.MonkeyPatch, root: Path, planted: float) -> dict[str, Any]:
    """The comparison with the plain form of a loss whose gradients of images are off by ``planted``."""
    module = benchmark(monkeypatch, root, "loss")
    stock = losses.ContrastiveLoss.forward

    def off(self: Any, sides: Any, *args: Any, **kwargs: Any) -> Any:
        out = stock(self, sides, *args, **kwargs)
        return out._replace(loss=out.loss + planted * sides["image"].sum())

    monkeypatch.setattr(losses.ContrastiveLoss, "forward", off)
    found: dict[str, Any] = module.agreement({"losses": ["asym-t2i"], "norms": ["qnorm"], "batch": 30, "dim": 4})
    return found


def test_a_loss_whose_gradient_is_off_is_found(root, monkeypatch):
    assert agreement_of(monkeypatch, root, 1e-6)["worst"] > 1e-8


def test_a_loss_that_is_the_plain_form_agrees_with_it(root, monkeypatch):
    found = agreement_of(monkeypatch, root, 0.0)
    assert found["worst"] < 1e-12 and found["compared"] == 3 * 6  # policies x values, features' and alpha's gradients


def test_a_loss_that_is_not_a_number_is_found(root, monkeypatch):
    assert math.isnan(agreement_of(monkeypatch, root, math.nan)["worst"])


def test_clip_loss_sends_what_two_gathers_and_their_backward_send(root, tmp_path):
    rows, dim, ranks, file = 40, 8, 2, tmp_path / "x.csv"
    run(root, "--ranks", str(ranks), "--batch-sizes", str(rows), "--dim", str(dim), "--csv", str(file), name="loss.py")
    found = {line.split(",")[2]: int(line.split(",")[3]) for line in file.read_text().splitlines()[2:]}
    assert found["ClipLoss"] == 4 * rows * dim * 4 * (ranks - 1) // ranks  # two sides there and back, float32


def fails(root: Path, tmp_path: Path, module: str, contestant: str, *flags: str) -> list[str]:
    """What a benchmark prints whose contestant dies: a package that it imports is damaged."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys\nif {contestant!r} in ' '.join(sys.argv[2:]) and sys.argv[1] in ('--measure', '--told'):\n"
        "    print('a warning\\nplanted: the last line', file=sys.stderr, flush=True)\n    os._exit(3)\n"
    )
    command = [sys.executable, str(root / "benchmarks" / module), *flags]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    return [*done.stdout.splitlines(), done.stderr.splitlines()[-1]]


def test_a_contestant_that_dies_is_named_and_the_others_are_shown(root, tmp_path):
    told = fails(root, tmp_path, "loss.py", "ClipLoss", "--batch-sizes", "16", "--dim", "4", "--rounds", "2",
                 "--losses", "sym", "--norms", "cosine", "dot")  # fmt: skip
    assert told.count("ClipLoss: failed: planted: the last line") == 1, "asked no more"
    assert told[-1] == "error: ClipLoss: failed: planted: the last line"
    medians = told[told.index("medians of 2:") + 1 :]
    assert medians[0].startswith("sym cosine ") and any("other norms to cosine: dot" in line for line in told)


@pytest.mark.parametrize(
    ("module", "contestant", "flags"),
    [
        ("loss.py", "agreement", ("--batch-sizes", "8", "--dim", "4", "--rounds", "1", "--norms", "cosine")),
        ("loss.py", '"bytes"', ("--ranks", "2", "--batch-sizes", "8", "--dim", "4", "--norms", "cosine")),
        ("diagnostics.py", "dense", ("--measures", "anisotropy", "--sizes", "60", "--dim", "5", "--rounds", "1")),
        ("diagnostics.py", '"mmclip"', ("--measures", "anisotropy", "--sizes", "60", "--dim", "5", "--rounds", "1")),
        ("retrieval.py", "clip-benchmark", ("--images", "40", "--dim", "8", "--rounds", "1")),
    ],
)
def test_whatever_dies_no_harness_does(root, tmp_path, module, contestant, flags):
    told = fails(root, tmp_path, module, contestant, *flags)
    assert any(line.endswith(": failed: planted: the last line") for line in told[:-1])


def test_side_by_side_a_contestant_that_dies_is_named_and_the_other_is_shown(root, tmp_path, tiny_data, tiny_model):
    flags = ("--data", str(tiny_data), "--model", str(tiny_model), "--images", "8", "--batch-size", "4",
             "--rounds", "2", "--workers", "0", "--threads", "1", "--device", "cpu")  # fmt: skip
    told = fails(root, tmp_path, "embedding.py", '"contestant": "open_clip"', *flags)
    assert told.count("open_clip: failed: planted: the last line") == 1, "asked no more"
    assert told[-2].startswith("ours, median of 2 ") and told[-1] == "error: open_clip: failed: planted: the last line"


def test_a_process_that_a_signal_ends_or_that_says_nothing_has_failed(monkeypatch, root, capsys):
    harness = benchmark(monkeypatch, root, "harness")
    monkeypatch.setattr(harness, "FAILED", [])
    done = subprocess.CompletedProcess
    assert harness.answer(done("", -11, "", "x\n"), "a") is None
    assert harness.answer(done("", 0, "no JSON\n", ""), "b") is None
    assert harness.answer(done("", 0, 'x\n{"seconds": 1}\n', ""), "c") == {"seconds": 1}
    assert capsys.readouterr().out == "a: failed: ended by SIGSEGV\nb: failed: exit code 0\n"
    assert harness.exit_code(True) == 1


@pytest.mark.parametrize(
    "name",
    ["hubness", "d of lengths", "anisotropy", "effective rank", "row entropy", "Fisher query", "Fisher document"],
)
def test_diagnostics_agree_with_their_dense_forms(root, monkeypatch, name):
    module = benchmark(monkeypatch, root, "diagnostics")
    what = (name, *module.vectors(60, 5), Exponents(0.3, 0.8), 2.0)
    ours, dense = module.mmclip_form(*what), module.dense_form(*what)
    assert ours == pytest.approx(dense, rel=module.MEASURES[name][0]) and all(ours)


def test_diagnostics_end_with_ratio_and_growth(root):
    small = ("--measures", "anisotropy", "--sizes", "60", "90", "--dim", "5", "--rounds", "1")
    last = run(root, *small, name="diagnostics.py").splitlines()[-1]
    assert re.search(r"at N = 90 [\d.]+ times as fast as the dense form .*; growth N\^-?[\d.]+ from 60 to 90", last)


def test_growth_is_measured_and_drawn_anew_from_its_points(root, tmp_path, monkeypatch):
    run(root, "loss", "--batch-sizes", "16", "--dim", "4", "--rounds", "1", "--folder", str(tmp_path), name="growth.py")
    assert len((tmp_path / "loss_growth.csv").read_text().splitlines()) == 2 + 2
    (tmp_path / "loss_growth.png").unlink()
    benchmark(monkeypatch, root, "growth").draw("loss", tmp_path)
    assert (tmp_path / "loss_growth.png").read_bytes().startswith(b"\x89PNG")


def test_tables_are_written_between_their_marks_and_say_what_was_not_measured(root, tmp_path):
    page, marks = tmp_path / "page.md", "<!-- table: {}.csv -->\n{}<!-- /table -->\n"
    page.write_text("before\n" + marks.format("a", "old\n") + "between\n" + marks.format("b", "") + "after\n")
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "a.csv").write_text("# a machine\nB,loss,cpu\n16384,sym,0.123456\n")
    filled = "a machine.\n\n| B | loss | s of CPU |\n| --- | --- | --- |\n| 16,384 | sym | 0.123 |\n\n"
    wanted = "before\n" + marks.format("a", filled) + "between\n" + marks.format("b", "Not measured.\n") + "after\n"
    for _ in range(2):
        run(root, str(page), name="tables.py")
        assert page.read_text() == wanted


def test_retrieval_agrees_with_clip_benchmark_and_ends_with_the_ratio(root):
    pytest.importorskip("clip_benchmark")
    lines = run(root, "--images", "120", "--dim", "16", "--rounds", "1", "--lists", "3").splitlines()
    assert "the numbers agree" in lines
    assert re.fullmatch(r"ratio: \d+\.\d times as fast \(\d+\.\d by CPU time\), \d+\.\d{3} of its memory", lines[-1])


def test_serving_measures_every_index_of_every_scoring(root):
    pytest.importorskip("faiss", reason="faiss is not installed: pip install -e '.[serving]'")
    text = run(root, "--images", "60", "--dim", "8", "--k", "3", name="serving.py")
    blocks = text.strip().split("\n\n")
    assert [b.split(":")[0] for b in blocks] == ["i2t native", "t2i native", "t2i corrected"]
    for block in blocks:
        rows = block.splitlines()[1:]
        assert len(rows) == 7 + ("corrected" in block)
        assert [r for r in rows if r.endswith("beyond rounding 0")] == [rows[0], rows[2]]
        assert all("recall@3 1.0000" in r for r in (rows[0], rows[2]))


def test_serving_tells_in_one_line_of_a_file_that_is_none(root, tmp_path):
    pytest.importorskip("faiss", reason="faiss is not installed: pip install -e '.[serving]'")
    command = [sys.executable, str(root / "benchmarks/serving.py"), "--embeddings", str(tmp_path / "x.npz")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path / 'x.npz'}: no such file\n")


def test_agreement_with_clip_benchmark_is_told_and_a_difference_is_an_error(root, tmp_path, monkeypatch, capsys):
    pytest.importorskip("clip_benchmark")
    from benchmarks import agreement

    gen = torch.Generator().manual_seed(0)
    image = torch.randn(50, 8, generator=gen) * torch.randn(50, 1, generator=gen).exp()
    text = image.repeat_interleave(2, 0) + torch.randn(100, 8, generator=gen)
    owner = [t // 2 for t in range(100)]
    pairs = torch.tensor([[i, t] for t, i in enumerate(owner)])
    names = [str(i) for i in range(100)]
    saved = Embeddings(image, text, pairs, names[:50], text_ids=names, owner=owner)
    save_embeddings(tmp_path / "x.npz", saved)
    assert run(root, "--embeddings", str(tmp_path / "x.npz"), name="agreement.py").endswith("the numbers agree\n")
    stock = agreement.theirs
    monkeypatch.setattr(agreement, "theirs", lambda *a: {k: v + 0.03 for k, v in stock(*a).items()})
    monkeypatch.setattr(sys, "argv", ["agreement.py", "--embeddings", str(tmp_path / "x.npz")])
    with pytest.raises(SystemExit) as left:
        agreement.main()
    assert left.value.code == 1 and "12 numbers are further apart" in capsys.readouterr().out
