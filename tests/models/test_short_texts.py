"""Texts without the padding that no feature depends on: the same features and gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmclip.embeddings.encode import EncodeOptions, encode_texts, text_encoder
from mmclip.models.factory import ClipModel, build_model
from mmclip.models.towers import shorten_tokens
from tests.helpers.tiny import MODEL

CAPTIONS = ["a dog", "two cats on a red mat", "a", "", "two cats on a red mat", "a dog and a very long lawn mower"]
KINDS: dict[str, dict[str, Any]] = {
    "clip": {},
    "custom": {"custom_text": True},
    "bias": {"text_cfg": {"proj_type": "linear", "proj_bias": True}, "custom_text": True},
    "eos": {"text_cfg": {"pool_type": "eos", "eos_id": 49407}},
}
WHOLE: dict[str, dict[str, Any]] = {
    "last": {"text_cfg": {"pool_type": "last", "no_causal_mask": True}, "custom_text": True},
    "both ways": {"text_cfg": {"no_causal_mask": True}},
    "class token": {"text_cfg": {"embed_cls": True}, "custom_text": True},
}


def build(folder: Path, change: dict[str, Any]) -> ClipModel:
    text_cfg = MODEL["text_cfg"] | {"context_length": 32} | change.get("text_cfg", {})  # type: ignore[operator]
    path = folder / "m.json"
    path.write_text(json.dumps(MODEL | change | {"text_cfg": text_cfg}), encoding="utf-8")
    torch.manual_seed(0)
    model = build_model(str(path))
    model.towers.eval()
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_features_and_gradients_are_those_of_the_whole_context(tmp_path: Path, kind: str) -> None:
    model = build(tmp_path, KINDS[kind])
    whole, short = model.tokenize(CAPTIONS), model.tokens(CAPTIONS)
    assert whole.shape == (6, 32) and short.shape == (6, 10)
    assert torch.equal(whole[:, :10], short)
    parameters = [p for n, p in model.towers.named_parameters() if "visual" not in n and p.requires_grad]
    weights = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    found = []
    for tokens in (whole, short):
        features = model.towers(text=tokens)[1]
        found.append((features.detach(), torch.autograd.grad((features * weights).sum(), parameters)))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    model.towers.lock("text")
    torch.testing.assert_close(model.towers(text=short)[1], found[0][0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", WHOLE)
def test_what_reads_all_positions_gets_them(tmp_path: Path, kind: str) -> None:
    model = build(tmp_path, WHOLE[kind])
    assert torch.equal(model.tokens(CAPTIONS), model.tokenize(CAPTIONS))


def test_a_hugging_face_tower_masks_what_is_left_out(shared: Path) -> None:
    torch.manual_seed(0)
    model = build_model("effnet_lite0-minilm.json", text_trunk=str(shared / "models" / "all-MiniLM-L6-v2"))
    model.towers.eval()
    whole, short = model.tokenize(CAPTIONS), model.tokens(CAPTIONS)
    padding = model.towers.text_module.config.pad_token_id
    assert whole.shape == (6, 40) and torch.equal(short, whole[:, : int((whole != padding).sum(dim=1).max())])
    with torch.no_grad():
        torch.testing.assert_close(model.towers(text=short)[1], model.towers(text=whole)[1], atol=1e-5, rtol=1e-4)


def test_no_texts_and_full_ones(tmp_path: Path) -> None:
    model = build(tmp_path, {})
    assert model.towers.shortened(model.tokenize(["a"])[:0]).shape == (0, 32)
    assert model.tokens(["word " * 50]).shape == (1, 32)
    nine = model.tokenize(["one two three four five six seven"])
    lengths = [shorten_tokens(model.towers.text_module, nine, multiple).shape[1] for multiple in (1, 8, 20, 40)]
    assert lengths == [9, 16, 20, 32]


def test_equal_captions_are_encoded_once_and_all_come_back_in_their_order(tmp_path: Path) -> None:
    model = build(tmp_path, {})
    options = EncodeOptions(torch.device("cpu"), batch_size=2, progress=False)
    seen: list[torch.Tensor] = []

    def encode(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens)
        return text_encoder(model)(tokens)

    found = encode_texts(encode, CAPTIONS, model.tokens, options)
    assert sum(len(t) for t in seen) == 5 and seen[-1].shape[1] == 2, "the shortest last"
    with torch.no_grad():
        torch.testing.assert_close(found, model.towers(text=model.tokenize(CAPTIONS))[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(found[1], found[4])
    assert found.requires_grad is False and (found + 0).requires_grad_().requires_grad
