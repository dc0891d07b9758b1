"""The trainer's parts: texts cut by role as in evaluation, batches of an epoch, whole checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmclip.commands.train_text import build_loss
from mmclip.config import TextTrainConfig
from mmclip.data.text_pairs import open_pairs
from mmclip.models.text_encoder import TextEncoder, load_text_model
from mmclip.similarity import Direction
from mmclip.training.text_trainer import EpochBatches, RoleCollator, TextTrainer, checkpoints
from tests.helpers.texts import WORDS, make_beir, make_bert, make_decoder

LONG = " ".join(WORDS[:40])
ROWS = [
    {"query": LONG, "positive": LONG, "negative_1": WORDS[3], "label": [0, 4, 5]},
    {"query": WORDS[1], "positive": " ".join(WORDS[5:9]), "negative_1": LONG, "label": [1, 6, 4]},
]


@pytest.fixture(scope="module", params=["bert", "decoder"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    make = make_bert if request.param == "bert" else make_decoder
    folder = make(tmp_path_factory.mktemp(request.param))
    return load_text_model(str(folder), query_length=6, document_length=11, query_prompt="no ", document_prompt="")


def test_a_batch_is_cut_by_role_and_prompted_as_evaluation_does_it(model: TextEncoder) -> None:
    batch = RoleCollator(model)(ROWS)
    assert batch["label"].tolist() == [[0, 4, 5], [1, 6, 4]]
    widths = {column: batch[f"{column}_input_ids"].shape[1] for column in ("query", "positive", "negative_1")}
    assert widths == {"query": 6, "positive": 11, "negative_1": 11}
    for column, role in (("query", "query"), ("positive", "document"), ("negative_1", "document")):
        features = {k.removeprefix(f"{column}_"): v for k, v in batch.items() if k.startswith(f"{column}_")}
        with torch.no_grad():
            trained_on = model.encoder.eval()(features)["sentence_embedding"]
        evaluated = model.encode([row[column] for row in ROWS], role)
        torch.testing.assert_close(trained_on, evaluated, rtol=1e-5, atol=1e-6)
    unprompted = model.encode([row["query"] for row in ROWS], "document")
    assert not torch.allclose(unprompted, model.encode([row["query"] for row in ROWS], "query"), atol=1e-3)


def test_an_epoch_has_every_pair_once_in_an_order_of_its_own() -> None:
    batches = EpochBatches(range(23), 5, True, seed=3)
    orders = []
    for epoch in (0, 1, 0):
        batches.set_epoch(epoch)
        found = list(batches)
        assert [len(b) for b in found] == [5] * 4 and len(batches) == 4
        assert len({row for b in found for row in b}) == 20
        orders.append(found)
    assert orders[0] == orders[2] != orders[1]
    assert list(EpochBatches(range(23), 5, True, seed=4)) != orders[0]


def test_two_ranks_batches_side_by_side_are_one_process_batch() -> None:
    small, large = list(EpochBatches(range(24), 4, True)), list(EpochBatches(range(24), 8, True))
    assert [a + b for a, b in zip(small[::2], small[1::2], strict=True)] == large


def test_gamma_and_alpha_have_no_weight_decay_and_gamma_a_rate_of_its_own(tmp_path: Path) -> None:
    data = make_beir(tmp_path / "data")
    settings = TextTrainConfig(
        model=str(make_bert(tmp_path / "bert")), train_data=str(data), norm="learned", learn_scale=True,
        wd=0.3, lr=1e-4, gamma_lr=0.05,
    )  # fmt: skip
    model, pairs = load_text_model(str(settings.model)), open_pairs(data, "train")
    loss = build_loss(settings, model, pairs, 1)
    trainer = TextTrainer(settings, model, loss, pairs.dataset(), tmp_path / "checkpoints", 4, torch.device("cpu"))
    groups = trainer.create_optimizer().param_groups
    similarity = loss.loss.similarity
    for parameter, rate in ((similarity.gamma_hat_q, 0.05), (similarity.logit_scale(Direction.Q2D), 1e-4)):
        (group,) = [g for g in groups if any(p is parameter for p in g["params"])]
        assert (group["weight_decay"], group["lr"]) == (0, rate)
    assert {g["weight_decay"] for g in groups} == {0, 0.3}, "the encoder's matrices have it"


def test_only_whole_checkpoints_are_found_the_newest_last(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-100", ".checkpoint-200.77.partial", "checkpoint-x", "checkpoint-3.tmp"):
        (tmp_path / name).mkdir()
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-100"]
    assert checkpoints(tmp_path / "none") == []
