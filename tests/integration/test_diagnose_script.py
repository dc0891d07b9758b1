"""evaluate.py and diagnose.py as a user runs them: saved embeddings, banks, distractors, wrong input of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmclip.commands.evaluate import run as evaluate
from mmclip.config import EvaluateConfig, parse
from mmclip.errors import UserError
from tests.helpers.tiny import run_script

N, M, D = 40, 80, 8


def write(path: Path, **changes: object) -> Path:
    rng = np.random.default_rng(0)
    image = rng.normal(size=(N, D)).astype(np.float32)
    arrays: dict[str, object] = {
        "image": image,
        "text": image.repeat(2, 0) + 0.7 * rng.normal(size=(M, D)).astype(np.float32),
        "image_ids": np.array([f"i{i}" for i in range(N)]),
        "text_ids": np.array([f"t{t}" for t in range(M)]),
        "text_image_ids": np.array([f"i{t // 2}" for t in range(M)]),
    }
    np.savez(path, **{k: v for k, v in (arrays | changes).items() if v is not None})  # type: ignore[arg-type]
    return path


def results_of(script: str, output: Path, *arguments: object) -> tuple[dict[str, Any], str, str]:
    """(results.json, output, errors) of a script."""
    done = run_script(script, *arguments, "--output", output)
    assert done.returncode == 0, done.stderr
    return json.loads((output / "results.json").read_text(encoding="utf-8")), done.stdout, done.stderr


def test_five_numpy_arrays_are_diagnosed_in_one_command(tmp_path: Path) -> None:
    file, bank = write(tmp_path / "x.npz"), tmp_path / "bank.npz"
    write(bank, text=np.random.default_rng(5).normal(size=(M, D)), image=np.random.default_rng(6).normal(size=(N, D)))
    results, output, _ = results_of("diagnose.py", tmp_path / "out", "--embeddings", file, "--bank", bank)
    for direction in ("i2t", "t2i"):
        numbers = results["retrieval"][direction]
        assert set(numbers) == {"cosine", "dot", "qnorm", "dnorm", "native", "reversed", "corrected"}
        assert numbers["native"] == numbers["cosine"], "without metadata: a plain CLIP"
        assert numbers["corrected"]["alpha_source"] == "calibrated"
        assert results["diagnostics"][direction]["fisher"]["status"] == "determined"
    assert "diagnostics · pool retrieval" in output and "log\u2081\u2080 \u03ba, query raw" in output


def test_distractor_kinds_are_pools_of_their_own(tmp_path: Path, tiny_data: Path, tiny_model: Path) -> None:
    kinds = ("blank", "shuffled", "boilerplate", "shuffled-words")
    model = ("--model", tiny_model, "--data", tiny_data, "--workers", 0)
    results, _, errors = results_of("diagnose.py", tmp_path, *model, "--no-fisher", "--distractors", *kinds)
    assert list(results["pools"]) == ["full", "distractors", *kinds]
    for kind, side in zip(kinds, ("image", "image", "text", "text"), strict=True):
        pool = results["pools"][kind]
        assert pool["n_images"] + pool["n_texts"] > results["data"]["n_images"] + results["data"]["n_texts"]
        assert pool["magnitude"][side]["cohens_d"]["corpus"] is not None
        assert "fisher" not in pool["diagnostics"]["i2t"]
    assert "fisher" not in results["diagnostics"]["i2t"]
    assert "random weights, so its results are chance" in errors and results["weights"] == "random"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": np.ones((M, D + 1), np.float32)}, "text embeddings of shape [80, 9]"),
        ({"text_image_ids": np.array([f"x{t}" for t in range(M)])}, "x0"),
        ({"image": np.full((N, D), np.nan, np.float32)}, "row 0"),
        ({"image_ids": None}, "no array 'image_ids'"),
        ({"image": np.zeros((N, 0), np.float32), "text": np.zeros((M, 0), np.float32)}, "one dimension for all"),
        ({"image": np.full((N, D), 1e19, np.float32)}, "overflow in float32"),
        ({"image": np.ones((N, D), np.int8)}, "astype('float32')"),
        ({"text": np.ones((0, D), np.float32)} | dict.fromkeys(("text_ids", "text_image_ids"), np.array([], str)), "0"),
    ],
)
def test_embeddings_that_cannot_be_evaluated_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], message: str
) -> None:
    file = write(tmp_path / "x.npz", **changes)
    with pytest.raises(UserError) as error:
        evaluate(EvaluateConfig(embeddings=str(file), output=str(tmp_path / "o"), report=False))
    line = str(error.value)
    assert message in line and "x.npz" in line and "\n" not in line
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("source", ["file", "model"])
def test_a_bank_that_is_the_evaluation_set_is_one_line(
    tmp_path: Path, tiny_data: Path, tiny_model: Path, source: str
) -> None:
    file = write(tmp_path / "x.npz")
    model = ("--model", tiny_model, "--data", tiny_data, "--output", tmp_path / "o", "--bank", tiny_data)
    flags = ("--embeddings", file, "--bank", file) if source == "file" else (*model, "--bank-split", "test")
    done = run_script("evaluate.py", *flags)
    assert done.returncode == 2 and "--bank transductive" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model ViT-B-32 --distractors blnk", "blnk"),
        ("--embeddings x.npz --distractors blank", "--embeddings x.npz beside --distractors blank"),
        ("--model ViT-B-32 --bank-size 0", "--bank-size 0"),
        ("--model ViT-B-32 --block-bytes 5", "--block-bytes 5"),
        ("--embeddings x.npz --data d.csv", "--embeddings x.npz beside --data d.csv"),
        ("--compare x --plot no/such/x.png", "--plot 'no/such/x.png'"),
        ("--compare x --plot x.foo", "--plot 'x.foo'"),
        ("", "--embeddings"),
    ],
)
def test_wrong_flags_are_found_before_anything_is_read(flags: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        evaluate(parse(EvaluateConfig, flags.split()))
    assert message in str(error.value)


def test_a_k_above_the_candidates_takes_all_of_them_and_says_so(tmp_path: Path) -> None:
    eye, ids = np.eye(3, dtype="f4"), np.array(["a", "b", "c"])
    file = write(tmp_path / "x.npz", image=eye, text=eye, image_ids=ids, text_ids=ids, text_image_ids=ids)
    results, output, _ = results_of("evaluate.py", tmp_path / "o", "--embeddings", file, "--verbose")
    assert "3 candidates: success@5" in output and "3 images with their captions, which are few" in output
    numbers = results["retrieval"]["i2t"]["native"]
    assert numbers["success@5"] == 1.0 and numbers["clamped_k"]["success@5"] == 3
