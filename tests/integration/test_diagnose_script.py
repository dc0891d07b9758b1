"""evaluate.py and diagnose.py as a user runs them: saved embeddings, banks, distractors, wrong input of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

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


def test_five_numpy_arrays_are_diagnosed_in_one_command(tmp_path: Path) -> None:
    file, bank = write(tmp_path / "x.npz"), tmp_path / "bank.npz"
    write(bank, text=np.random.default_rng(5).normal(size=(M, D)), image=np.random.default_rng(6).normal(size=(N, D)))
    done = run_script("diagnose.py", "--embeddings", file, "--bank", bank, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    for direction in ("i2t", "t2i"):
        numbers = results["retrieval"][direction]
        assert set(numbers) == {"cosine", "dot", "qnorm", "dnorm", "native", "reversed", "corrected"}
        assert numbers["native"] == numbers["cosine"], "nothing says otherwise: a plain CLIP"
        assert numbers["corrected"]["alpha_source"] == "calibrated"
        assert results["diagnostics"][direction]["fisher"]["status"] == "determined"
    assert "diagnostics · pool retrieval" in done.stdout and "log\u2081\u2080 \u03ba, query raw" in done.stdout


def test_distractor_kinds_are_pools_of_their_own(tmp_path: Path, tiny_data: Path, tiny_model: Path) -> None:
    kinds = ("blank", "shuffled", "boilerplate", "shuffled-words")
    done = run_script(
        "diagnose.py", "--model", tiny_model, "--data", tiny_data, "--workers", 0, "--no-fisher",
        "--distractors", *kinds, "--output", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert list(results["pools"]) == ["full", "distractors", *kinds]
    for kind, side in zip(kinds, ("image", "image", "text", "text"), strict=True):
        pool = results["pools"][kind]
        assert pool["n_images"] + pool["n_texts"] > results["data"]["n_images"] + results["data"]["n_texts"]
        assert pool["magnitude"][side]["cohens_d"]["corpus"] is not None
        assert "fisher" not in pool["diagnostics"]["i2t"]
    assert "fisher" not in results["diagnostics"]["i2t"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text": np.ones((M, D + 1), np.float32)}, "text embeddings of shape [80, 9]"),
        ({"text_image_ids": np.array([f"x{t}" for t in range(M)])}, "x0"),
        ({"image": np.full((N, D), np.nan, np.float32)}, "row 0"),
        ({"image_ids": None}, "no array 'image_ids'"),
        ({"image": np.zeros((N, 0), np.float32), "text": np.zeros((M, 0), np.float32)}, "one dimension for all"),
        ({"image": np.full((N, D), 1e19, np.float32)}, "overflow in float32"),
        ({"image": np.ones((N, D), np.int8)}, "astype('float32')"),
        (
            {"text": np.ones((0, D), np.float32), "text_ids": np.array([], str), "text_image_ids": np.array([], str)},
            "0",
        ),
    ],
)
def test_embeddings_that_cannot_be_evaluated_are_one_line(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    done = run_script("diagnose.py", "--embeddings", write(tmp_path / "x.npz", **changes), "--output", tmp_path / "o")
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert "x.npz" in done.stderr


def test_a_bank_that_is_the_evaluation_set_is_one_line(tmp_path: Path, tiny_data: Path, tiny_model: Path) -> None:
    file = write(tmp_path / "x.npz")
    model = ("--model", tiny_model, "--data", tiny_data, "--output", tmp_path / "o")
    for args in (
        ("--embeddings", file, "--bank", file),
        (*model, "--bank", tiny_data, "--bank-split", "test"),
    ):
        done = run_script("evaluate.py", *args)
        assert done.returncode == 2 and "--bank transductive" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_wrong_flags_are_found_before_anything_is_read() -> None:
    for args, says in (
        (("--model", "ViT-B-32", "--distractors", "blnk"), "blnk"),
        (("--embeddings", "x.npz", "--distractors", "blank"), "with --distractors"),
        (("--model", "ViT-B-32", "--bank-size", 0), "--bank-size 0"),
        (("--model", "ViT-B-32", "--block-bytes", 5), "--block-bytes 5"),
        (("--embeddings", "x.npz", "--data", "d.csv"), "with --data"),
        (("--compare", "x", "--plot", "no/such/x.png"), "--plot 'no/such/x.png'"),
        (("--compare", "x", "--plot", "x.foo"), "--plot 'x.foo'"),
        ((), "--embeddings"),
    ):
        done = run_script("evaluate.py", *args)
        assert done.returncode == 2 and says in done.stderr, done.stderr


def test_a_k_above_the_candidates_takes_all_of_them_and_says_so(tmp_path: Path) -> None:
    few = {
        "image": np.eye(3, dtype="f4"), "text": np.eye(3, dtype="f4"), "image_ids": np.array(["a", "b", "c"]),
        "text_ids": np.array(["1", "2", "3"]), "text_image_ids": np.array(["a", "b", "c"]),
    }  # fmt: skip
    done = run_script(
        "evaluate.py", "--embeddings", write(tmp_path / "x.npz", **few), "--output", tmp_path / "o", "--verbose"
    )
    assert done.returncode == 0, done.stderr
    assert "3 candidates: success@5" in done.stdout and "3 images with their captions, which are few" in done.stdout
    numbers = json.loads((tmp_path / "o" / "results.json").read_text())["retrieval"]["i2t"]["native"]
    assert numbers["success@5"] == 1.0 and numbers["clamped_k"]["success@5"] == 3


def test_random_weights_are_told_on_the_screen_and_in_the_results(
    tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    done = run_script("evaluate.py", "--model", tiny_model, "--data", tiny_data, "--output", tmp_path)
    assert done.returncode == 0 and "random weights, so its results are chance" in done.stderr
    assert json.loads((tmp_path / "results.json").read_text())["weights"] == "random"


def test_evidence_in_a_file_corrects_as_its_bank_does(tmp_path: Path, tiny_data: Path) -> None:
    from tests.helpers.tiny import make_model, run_script

    model = make_model(tmp_path)
    trained = run_script(
        "train_clip.py", "--train-data", tiny_data, "--model", model, "--logs", tmp_path, "--name", "x", "--loss",
        "asym-i2t", "--norm", "qnorm", "--batch-size", 24, "--epochs", 1, "--workers", 0, "--device", "cpu",
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    found = {}
    for bank in (tiny_data, "transductive"):
        file = tmp_path / "x.safetensors"
        made = run_script("embed.py", "--model", tmp_path / "x", "--data", tiny_data, "--bank", bank, "--output", file)
        assert made.returncode == 0, made.stderr
        for name, flags in (
            ("file", ("--embeddings", file)),
            ("live", ("--model", tmp_path / "x", "--data", tiny_data, "--bank", bank)),
        ):
            done = run_script("evaluate.py", *flags, "--output", tmp_path / name)
            assert done.returncode == 0, done.stderr
            results = json.loads((tmp_path / name / "results.json").read_text())
            found[name] = results["retrieval"]["t2i"]["corrected"]
        assert found["file"] == found["live"]
        assert found["file"]["transductive"] == (bank == "transductive")
