"""train_text's own process: what it refuses before a model loads, and what a run leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mmclip.commands.train import run as train_text
from mmclip.config import TextTrainConfig
from mmclip.data.beir import folder_and_split
from mmclip.errors import UserError
from mmclip.models.text_encoder import load_text_model
from mmclip.roles import Direction
from mmclip.training.checkpoint import load_checkpoint
from mmclip.training.text_task import TextTask, build_loss
from tests.helpers.texts import make_beir, make_bert

Make = Callable[..., TextTrainConfig]


@pytest.fixture(scope="module")
def beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_beir(tmp_path_factory.mktemp("data") / "beir", queries=40, documents=80)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(beir: Path, bert: Path, tmp_path: Path) -> Make:
    def settings(**changed: Any) -> TextTrainConfig:
        known: dict[str, Any] = {
            "model": str(bert), "train_data": str(beir), "val_data": [str(beir)], "logs": str(tmp_path), "name": "x",
            "batch_size": 4, "epochs": 2, "watch_queries": 5, "lr": 1e-3, "device": "cpu", "measure_start": False,
        }  # fmt: skip
        return TextTrainConfig(**known | changed)

    return settings


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"batch_size": 64}, "--batch-size 64: there are only 20 training pairs in"),
        ({"batch_size": 22, "train_fraction": 0.5}, "--batch-size 22: there are only"),
        ({"val_data": ["BEIR:dev"]}, "no split 'dev'; splits in qrels/: test, train"),
        ({"val_data": ["BEIR:train", "BEIR:test", "BEIR"]}, "--val-data: beir-test is named twice"),
        ({"val_data": ["/nowhere"]}, "/nowhere: no such folder; a BEIR folder has"),
        ({"train_split": "dev"}, "no split 'dev'"),
        ({"watch_queries": 15}, "--watch-queries 15"),
        ({"resume": "latest"}, "holds no run; check --logs and --name"),
    ],
)
def test_faults_of_data_are_told_before_a_model_loads(
    make: Make, beir: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], told: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(TextTask, "load_model", lambda *_: pytest.fail("a model was loaded"))
    if "val_data" in changed:
        changed = {"val_data": [text.replace("BEIR", str(beir)) for text in changed["val_data"]]}
    with pytest.raises(UserError) as error:
        train_text(make(**changed))
    assert told in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_a_split_without_a_judgment_is_told_before_a_model_loads(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextTask, "load_model", lambda *_: pytest.fail("a model was loaded"))
    folder = make_beir(tmp_path / "beir", splits=("train", "test"))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td2\t0\n", encoding="utf-8")
    with pytest.raises(UserError, match="no query with a relevant document"):
        train_text(make(val_data=[str(folder)]))


def test_a_folder_with_a_colon_in_its_name_is_one(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    assert folder_and_split(str(tmp_path / "a:b")) == (tmp_path / "a:b", "test")
    assert folder_and_split(f"{tmp_path / 'a:b'}:dev") == (tmp_path / "a:b", "dev")


def test_a_continuation_names_each_setting_that_is_another(make: Make) -> None:
    train_text(make(max_steps=1, val_data=None))
    train_text(make(max_steps=1, resume="latest", save_steps=1, strict=True, val_data=None))
    with pytest.raises(UserError, match=r"norm was cosine, is dot, lr was 0\.001, is 0\.002$"):
        train_text(make(max_steps=1, resume="latest", lr=0.002, norm="dot"))


def test_the_loss_is_the_one_of_the_flags(make: Make) -> None:
    config = make(loss="both", q2d_weight=0.75, norm="learned", gamma_init=0.3, mini_batch_size=2)
    data, loss = TextTask.open_data(config), build_loss(config)
    assert loss.weights == {Direction.Q2D: 0.75, Direction.D2Q: 0.25}
    trained = [n for n, p in loss.named_parameters() if p.requires_grad]
    assert trained == ["similarity.gamma_hat_q", "similarity.gamma_hat_d"], "alpha is held"
    assert data.held_out is not None and len(data.held_out.queries) == 5
    assert not set(data.held_out.queries) & set(data.pairs.queries), "what is watched is not trained on"


def test_gamma_moves_at_its_own_rate_alpha_not_at_all_and_a_finished_run_is_left_alone(
    make: Make, beir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = make(norm="learned", gamma_lr=0.1, lr=1e-6, warmup=0, max_steps=4, measure_start=True,
                    val_data=[str(beir), f"{beir}:train"])  # fmt: skip
    folder = train_text(settings)
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [x for x in lines if "loss" in x]
    assert [x["step"] for x in steps] == [1, 2, 3, 4] and {x["epoch"] for x in steps} == {0}
    assert len({x["logit_scale_q2d"] for x in steps}) == 1
    assert 0.02 < abs(steps[0]["gamma_d"] - 0.5) < 0.03, "Adam's first step: 0.1 of gamma_hat, a quarter of it in gamma"
    assert steps[0]["effective_scale_q2d"] == pytest.approx(20, rel=1e-4)
    for name in ("loss_q2d", "norm_query_mean", "norm_document_mean", "lr", "pairs_per_second"):
        assert all(x[name] > 0 for x in steps), name
    watched = [x for x in lines if "val_q2d_ndcg@10_cosine" in x]
    assert [x["step"] for x in watched] == [4] and 0 <= watched[0]["val_q2d_ndcg@10_cosine"] <= 1
    facts = json.loads((folder / "model" / "mmclip.json").read_text())
    assert facts["removed"] == ["Normalize"] and facts["steps"] == 4 and facts["model"] == settings.model
    assert facts["gamma_d"] == steps[-1]["gamma_d"] and f"{facts['gamma_d']:.4g}" in facts["scoring"]
    results, start = (json.loads((folder / f"{n}.json").read_text()) for n in ("results", "start"))
    assert results["trained_with"]["gamma_d"] == facts["gamma_d"] and results["seconds"] > 0
    assert (results["steps"], results["seed"], start["steps"]) == (4, 0, 0)
    assert start["trained_with"]["gamma_d"] == 0.5 and start["fisher"]["q2d"]["status"] == "undetermined"
    other = json.loads((folder / "evaluations" / "beir-train" / "results.json").read_text())
    assert other["data"]["split"] == "train" and results["data"]["split"] == "test"
    assert yaml.safe_load((folder / "config.yaml").read_text()) == settings.to_dict() | {"resume": None}
    saved = load_text_model(str(folder))
    assert saved.removed == [] and saved.metadata["gamma_q"] == facts["gamma_q"]
    stamp = (folder / "results.json").stat().st_mtime_ns
    capsys.readouterr()
    train_text(make(**settings.to_dict() | {"resume": "latest"}))
    assert "this run is finished" in capsys.readouterr().err
    assert (folder / "results.json").stat().st_mtime_ns == stamp


def test_normalize_stays_where_it_is_asked_for(make: Make) -> None:
    folder = train_text(make(keep_normalize=True, max_steps=1, val_data=None, watch_queries=0))
    facts = json.loads((folder / "model" / "mmclip.json").read_text())
    assert facts["removed"] == [] and facts["scoring"] == "rank documents by cosine"
    assert torch.allclose(load_text_model(str(folder), keep_normalize=True).encode(["bal"], "query").norm(),
                          torch.ones(()))  # fmt: skip
    assert not (folder / "results.json").exists()
    with pytest.raises(UserError, match="--keep-normalize with --norm dot"):
        make(keep_normalize=True, norm="dot")


def test_a_loss_that_is_not_finite_ends_the_run_with_one_line(make: Make) -> None:
    with pytest.raises(
        UserError, match=r"^step \d+: the loss is (nan|inf), and \d+ gradients are not finite; samples: "
    ):
        train_text(make(norm="dot", lr=1e30, warmup=0, epochs=8, val_data=None, watch_queries=0, grad_clip_norm=0))


def test_weights_that_are_not_finite_are_no_result(make: Make) -> None:
    with pytest.raises(UserError, match=r"^step 1: \d+ weights are not finite, such as .*; no checkpoint is made"):
        train_text(make(norm="dot", lr=1e38, warmup=0, max_steps=1, val_data=None, watch_queries=0))
    assert not list(Path(make().logs).glob("*/model")) and not list(Path(make().logs).glob("*/checkpoints/step*"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), "not a checkpoint that can be read safely"),
        (lambda path: path.write_bytes(b"\x80\x02"), "not a checkpoint that can be read safely"),
        (lambda path: torch.save(load_checkpoint(path) | {"ranks": 2}, path), "the run had 2 processes, now there"),
        (lambda path: torch.save(load_checkpoint(path) | {"step": 99}, path), "step 99 of a run of 2"),
    ],
)
def test_a_checkpoint_that_cannot_be_gone_on_from_is_one_line(
    make: Make, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Any], told: str
) -> None:
    config = make(max_steps=2, val_data=None, watch_queries=0)
    with monkeypatch.context() as patched:
        patched.setattr("mmclip.commands.train._finish", lambda *_: None)  # killed before the model was saved
        folder = train_text(config)
    change(folder / "checkpoints" / "step_00000002.pt")
    with pytest.raises(UserError, match=told):
        train_text(make(**config.to_dict() | {"resume": "latest"}))
