"""A text model as flags ask for it: cut as it was trained, unless they say otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmclip.config import TextModelConfig
from mmclip.models.export import export_text
from mmclip.models.text_encoder import load_text_model, text_precision
from tests.helpers.texts import make_bert

FACTS = {"gamma_q": 1.0, "gamma_d": 0.0, "lengths": {"query": 8, "document": 12}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    export_text(folder / "model", load_text_model(str(make_bert(folder / "base"))), FACTS)
    return folder / "model"


def test_texts_are_cut_as_in_training_unless_flags_say_otherwise(trained: Path) -> None:
    cpu = torch.device("cpu")
    model = load_text_model(TextModelConfig(model=str(trained), document_length=10), cpu)
    assert [model.length_of(role) for role in ("query", "document")] == [8, 10]
    assert model.tokens(["w " * 40], "document")["input_ids"].shape[1] == 10
    assert model.tokens(["w " * 40], "query")["input_ids"].shape[1] == 8


@pytest.mark.parametrize("lengths", [None, "long", {"query": "8"}, {"query": -1, "document": None}])
def test_lengths_that_are_no_numbers_are_nobodys(trained: Path, tmp_path: Path, lengths: object) -> None:
    model = load_text_model(str(trained))
    export_text(tmp_path / "model", model, {**FACTS, "lengths": lengths})
    found = load_text_model(TextModelConfig(model=str(tmp_path / "model")), torch.device("cpu"))
    assert found.length_of("query") == found.length_of("document") == model.encoder.max_seq_length


def test_auto_is_bfloat16_on_cuda_alone() -> None:
    assert [text_precision("auto", torch.device(d)) for d in ("cpu", "cuda", "mps")] == ["fp32", "amp_bf16", "fp32"]
    assert text_precision("fp32", torch.device("cuda")) == "fp32"
    assert text_precision("amp_bf16", torch.device("cpu")) == "amp_bf16"
