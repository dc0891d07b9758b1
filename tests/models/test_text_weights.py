"""The weights of text models: random ones, halves, and those that a checkpoint lacks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmclip.models import text_encoder as text_model
from mmclip.models.text_encoder import load_text_model
from tests.helpers.texts import make_bert, make_decoder
from tests.models.test_text_model import TEXTS, add_dense, edit, refusal


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def copy(bert: Path, tmp_path: Path) -> Path:
    """A copy of the BERT folder to do harm to."""
    return Path(shutil.copytree(bert, tmp_path / "copy"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_decoder(tmp_path_factory.mktemp("decoder"))


def test_half_precision_checkpoints_are_float32_and_autocast_is_asked_for(copy: Path) -> None:
    whole = load_text_model(str(copy)).encode(TEXTS, "query")
    weights = load_file(copy / "model.safetensors")
    save_file({k: v.half() for k, v in weights.items()}, copy / "model.safetensors", metadata={"format": "pt"})
    edit(copy / "config.json", dtype="float16")
    model = load_text_model(str(copy))
    assert {p.dtype for p in model.encoder.parameters()} == {torch.float32}
    found = model.encode(TEXTS, "query")
    torch.testing.assert_close(found, whole, atol=0.02, rtol=0.02)
    rough = load_text_model(str(copy), precision="amp_bf16").encode(TEXTS, "query")
    assert rough.dtype == torch.float32 and not torch.equal(rough, found)
    torch.testing.assert_close(rough, found, atol=0.2, rtol=0.1)


def test_random_weights_follow_the_seed_and_need_no_weights(copy: Path, decoder: Path, tmp_path: Path) -> None:
    before = {p.name: p.read_bytes() for p in copy.iterdir() if p.is_file()}
    first, same, other = (
        load_text_model(str(copy), random_init=True, seed=s).encode(TEXTS, "query") for s in (1, 1, 2)
    )
    torch.testing.assert_close(first, same, atol=0, rtol=0)
    assert (first - other).abs().max() > 0.01
    assert {p.name: p.read_bytes() for p in copy.iterdir() if p.is_file()} == before
    (copy / "model.safetensors").unlink()
    bare = load_text_model(str(copy), random_init=True, seed=1)
    torch.testing.assert_close(bare.encode(TEXTS, "query"), first, atol=0, rtol=0)
    assert bare.notes == [] and "cannot be loaded" in refusal(copy)

    plain = make_decoder(tmp_path / "plain", pooling=None)
    for folder, pooling in ((decoder, None), (plain, "lasttoken")):
        a, b = (load_text_model(str(folder), pooling=pooling, random_init=True, seed=s) for s in (1, 2))
        assert (a.encode(TEXTS, "query") - b.encode(TEXTS, "query")).abs().max() > 1e-3


def test_random_weights_reach_what_follows_the_transformer(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_dense(copy)
    first, same, other = (
        load_text_model(str(copy), random_init=True, seed=s).encoder[2].state_dict() for s in (1, 1, 2)
    )
    assert torch.equal(first["linear.weight"], same["linear.weight"])
    assert not torch.equal(first["linear.weight"], other["linear.weight"])
    monkeypatch.setattr(text_model, "hub_answers", lambda name: True)
    assert "--random-init needs a folder" in refusal("org/name", random_init=True)


def test_weights_that_a_checkpoint_lacks_are_noted(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    lost = next(k for k in weights if "intermediate" in k)
    save_file({k: v for k, v in weights.items() if k != lost}, copy / "model.safetensors", metadata={"format": "pt"})
    model = load_text_model(str(copy))
    assert len(model.notes) == 1 and lost.rsplit(".", 2)[1] in model.notes[0]
    weights[lost].fill_(float("nan"))
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert "not finite" in refusal(copy)
