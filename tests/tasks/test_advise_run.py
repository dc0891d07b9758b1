"""advise.py from a model and data to an answer, both kinds; its vectors are kept, its evidence is what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmclip.commands.advise import lengths, zero_shot
from mmclip.commands.advise import run as advise
from mmclip.config import AdviseConfig, parse
from mmclip.data.beir import open_beir
from mmclip.errors import UserError
from mmclip.similarity import Direction, Normalization
from mmclip.tasks.advise import CANNOT_TELL, NORMS, Matched, drawn, encode, text_split, weights_key
from tests.helpers.texts import make_beir, make_bert
from tests.helpers.tiny import run_script

# map: random models find something for every query, however late
QUICK = ("--seeds", 2, "--steps", 2, "--batch-size", 16, "--metric", "map", "--device", "cpu")
ANSWERS = (*NORMS, CANNOT_TELL)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices: threads would wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_beir(tmp_path_factory.mktemp("beir"), queries=160, documents=200)


@pytest.fixture(scope="module")
def text_advice(bert: Path, beir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("advice")
    done = run_script("advise.py", "--model", bert, "--data", beir, "--output", folder, *QUICK)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "advise.json").read_text(encoding="utf-8"))
    return found


def settings(*arguments: object) -> AdviseConfig:
    return parse(AdviseConfig, [str(a) for a in arguments])


def test_text_gives_an_answer_with_evidence(text_advice: tuple[Path, str]) -> None:
    folder, shown = text_advice
    report = read(folder)
    assert shown.startswith("answer    ")
    assert report["answer"] in ANSWERS
    assert report["answer"] in shown.splitlines()[0]
    assert report["direction"] == "q2d"
    assert report["data"]["split"] == "train"
    assert set(report["sections"]["q2d"]["norms"]) == set(NORMS)
    assert report["trial"]["n_judged"] == 32
    assert {c["norm"] for c in report["trial"]["chosen"]} == set(NORMS)
    assert set(report["evidence"]["lengths"]) == {"query", "document"}
    assert "is not fine-tuning" in report["not_covered"] or "are not fine-tuning" in report["not_covered"]
    assert (folder / "advise.png").read_bytes().startswith(b"\x89PNG")
    for word in ("CV of query lengths", "untrained q2d", "kappa", "hypothesis", "scope"):
        assert word in shown


def test_kappa_of_too_few_queries_is_that_of_titles_and_labelled(text_advice: tuple[Path, str]) -> None:
    fisher = read(text_advice[0])["evidence"]["fisher"]["q2d"]
    assert fisher["status"] == "determined"
    assert fisher["n"] == 4 * 32
    assert fisher["reference"].startswith("titles as queries of their own texts, a stand-in that is not the task: ")
    assert fisher["larger"]["raw"] in ("query", "document", "within noise")


def test_a_second_run_encodes_nothing_and_says_the_same(
    text_advice: tuple[Path, str], bert: Path, beir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = text_advice
    before = read(folder)
    report = advise(settings("--model", bert, "--data", beir, "--output", folder, *QUICK))
    told = capsys.readouterr().err
    assert "taken from" in told
    assert "encoding" not in told
    assert {k: v for k, v in report.items() if k != "seconds"} == {k: v for k, v in before.items() if k != "seconds"}


def test_other_settings_or_a_damaged_file_are_encoded_anew(
    bert: Path, beir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def encoding(*more: object) -> bool:
        encode(settings("--model", bert, "--data", beir, "--no-fisher", *QUICK, *more), tmp_path)
        return "encoding" in capsys.readouterr().err

    assert encoding()
    assert not encoding()
    assert encoding("--document-length", 5)
    assert not encoding("--document-length", 5)
    assert encoding("--max-items", 100)
    (tmp_path / "vectors.safetensors").write_bytes(b"damaged")
    assert encoding("--max-items", 100)


def test_clip_is_judged_in_both_directions_and_their_mean(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    done = run_script("advise.py", "--model", tiny_model, "--data", tiny_data, "--output", tmp_path, "--workers", 0,
                      "--rank", 3, *QUICK)  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = read(tmp_path)
    assert report["direction"] == "both"
    assert list(report["sections"]) == ["i2t", "t2i", "both"]
    assert report["answer"] == report["sections"]["both"]["answer"] in ANSWERS
    assert report["data"]["split"] == "train"
    assert report["data"]["n_images"] == 96
    assert report["trial"]["n_judged"] == 38
    assert set(report["evidence"]["fisher"]) == {"i2t", "t2i"}
    assert report["evidence"]["fisher"]["t2i"]["status"] == "determined"
    assert "by direction: i2t" in done.stdout


def test_a_run_that_was_trained_on_the_same_images_says_so(learned_run: Path, plain: Path, tmp_path: Path) -> None:
    for split, seen in (("train", True), ("test", False)):
        report = advise(settings("--model", learned_run, "--data", plain, "--split", split, "--output", tmp_path,
                                 "--workers", 0, "--no-fisher", "--direction", "i2t", *QUICK))  # fmt: skip
        assert list(report["sections"]) == ["i2t"]
        assert any("trained on these very images" in note for note in report["notes"]) is seen


def test_a_folder_without_a_train_split_lends_its_test_queries(bert: Path, tmp_path: Path) -> None:
    folder = make_beir(tmp_path / "data", queries=20, documents=60, splits=("test",))
    assert text_split(folder, None) == ("test", True)
    report = advise(settings("--model", bert, "--data", folder, "--output", tmp_path / "out", "--no-fisher", *QUICK))
    assert report["answer"] == CANNOT_TELL
    assert report["because"] == "8 held-out queries and 12 others: 30 and 15 are needed"
    assert any("no train split" in note for note in report["notes"])
    assert not (tmp_path / "out" / "advise.png").exists()


def test_what_is_drawn_holds_every_document_that_its_queries_need(beir: Path) -> None:
    data = open_beir(beir, "train")
    assert [len(x) for x in drawn(data, 1000, 0)] == [80, 200]
    queries, documents = drawn(data, 100, 0)
    assert (len(queries), len(documents)) == (33, 100)
    needed = data.pairs[np.isin(data.pairs[:, 0], queries), 1]
    assert set(needed) <= set(documents)
    assert np.array_equal(drawn(data, 100, 0)[1], documents)


def test_evidence_is_plain_algebra() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(40, 8, generator=generator), 3 * torch.randn(60, 8, generator=generator)
    pairs = np.column_stack([np.arange(40), np.arange(40)])
    data = Matched(("query", "document"), first, second, pairs, np.ones(40))
    found = lengths(data)
    for side, rows in (("query", first), ("document", second)):
        x = rows.double().norm(dim=1)
        assert found[side]["cv"] == pytest.approx(float(x.std() / x.mean()))
        assert found[side]["ci"][0] < found[side]["cv"] < found[side]["ci"][1]
    scorings = zero_shot(data, np.arange(40), [Direction.Q2D], "mrr@10", 0)["q2d"]["scorings"]
    assert scorings["cosine"] == scorings["dnorm"]
    assert scorings["dot"] == scorings["qnorm"]
    assert scorings["cosine"]["minus_cosine"] == 0
    assert set(scorings) == {n.value for n in Normalization} - {"learned"}


def test_a_weight_that_changes_changes_the_key() -> None:
    layer = torch.nn.Linear(3, 2)
    before = weights_key(layer)
    assert weights_key(layer) == before
    with torch.no_grad():
        layer.bias[0] += 1
    assert weights_key(layer) != before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--data is missing"),
        (("--data", "x"), "--model is missing"),
        (("--data", "x", "--model", "m", "--seeds", 1), "--seeds 1: expected a whole number of at least 2"),
        (("--data", "x", "--model", "m", "--direction", "q2d"), "--direction q2d of clip data: expected both or i2t"),
        (("--data", "x", "--model", "m", "--task", "text", "--direction", "i2t"), "expected q2d"),
        (("--data", "x", "--model", "m", "--held-out", 0.9), "--held-out 0.9: expected a number from 0.1 to 0.8"),
        (("--data", "x", "--model", "m", "--metric", "ndcg"), "--metric ndcg: "),
        (("--data", "x", "--model", "/no/such", "--task", "text"), "--model /no/such: no such folder"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(arguments: tuple[object, ...], told: str) -> None:
    with pytest.raises(UserError, match="^" + ".*" + told.replace("(", r"\(")) as error:
        settings(*arguments)
    assert "\n" not in str(error.value)


def test_the_task_is_seen_in_the_data(beir: Path, tiny_data: Path) -> None:
    assert settings("--model", "m", "--data", beir).kind == "text"
    assert settings("--model", "m", "--data", tiny_data).kind == "clip"
    assert settings("--model", "m", "--data", "x" * 5000).kind == "clip"


def test_a_rank_above_the_dimensions_and_a_split_that_is_not_there(bert: Path, beir: Path, tmp_path: Path) -> None:
    usual = ("--model", bert, "--data", beir, "--output", tmp_path, "--no-fisher", *QUICK)
    with pytest.raises(UserError, match="--rank 33: the vectors have 32 dimensions"):
        advise(settings(*usual, "--rank", 33))
    with pytest.raises(UserError, match="no split 'dev'; splits in qrels/: test, train"):
        advise(settings(*usual, "--split", "dev"))
