"""The trainer's parts: texts cut by role as in evaluation, batches of an epoch, whole checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmclip.text_model import TextModel, load_text_model
from mmclip.text_trainer import EpochBatches, RoleCollator, checkpoints
from tests.texts import WORDS, make_bert, make_decoder

LONG = " ".join(WORDS[:40])
ROWS = [
    {"query": LONG, "positive": LONG, "negative_1": WORDS[3], "label": [0, 4, 5]},
    {"query": WORDS[1], "positive": " ".join(WORDS[5:9]), "negative_1": LONG, "label": [1, 6, 4]},
]


@pytest.fixture(scope="module", params=["bert", "decoder"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    make = make_bert if request.param == "bert" else make_decoder
    folder = make(tmp_path_factory.mktemp(request.param))
    return load_text_model(str(folder), query_length=6, document_length=11, query_prompt="no ", document_prompt="")


def test_a_batch_is_cut_by_role_and_prompted_as_evaluation_does_it(model: TextModel) -> None:
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


def test_only_whole_checkpoints_are_found_the_newest_last(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-100", ".checkpoint-200.77.partial", "checkpoint-x", "checkpoint-3.tmp"):
        (tmp_path / name).mkdir()
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-100"]
    assert checkpoints(tmp_path / "none") == []
