"""Towers: raw features, trunk and head, texts without needless padding, images as bytes."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from open_clip.transform import AugmentationCfg, PreprocessCfg, image_transform_v2
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms

from mmclip.embeddings.encode import EncodeOptions, encode_texts, text_encoder
from mmclip.errors import UserError
from mmclip.models.factory import ClipModel, build_model
from mmclip.models.towers import Pixels, as_bytes, shorten_tokens
from tests.helpers.tiny import MODEL

NATIVE: dict[str, Any] = MODEL
TIMM: dict[str, Any] = {
    "embed_dim": 16, "text_cfg": NATIVE["text_cfg"], "custom_text": True,
    "vision_cfg": {"timm_model_name": "test_efficientnet", "timm_pool": "avg", "timm_proj": "mlp", "timm_drop": 0.5,
                   "image_size": 32},
}  # fmt: skip
BOTH = pytest.mark.parametrize("config", [NATIVE, TIMM], ids=["native", "timm"])
Build = Callable[[dict[str, Any]], ClipModel]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def made(config: dict[str, Any]) -> ClipModel:
        path = tmp_path / "tiny.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        torch.manual_seed(0)
        model = build_model(str(path))
        model.towers.eval()
        return model

    return made


def inputs(model: ClipModel) -> tuple[Tensor, Tensor]:
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return images, model.tokenize(["a dog", "a", "two cats"])


@BOTH
def test_features_are_open_clips_raw_ones_and_only_a_locked_towers_head_trains(
    build: Build, config: dict[str, Any]
) -> None:
    model = build(config)
    towers, (image, text) = model.towers, inputs(model)
    before = towers(image, text)
    raw = towers.clip.encode_image(image, normalize=False), towers.clip.encode_text(text, normalize=False)
    torch.testing.assert_close(before, raw)
    assert (before[0].norm(dim=1) - 1).abs().min() > 1e-3, "raw, not normalized"
    assert towers(image=image)[1] is None and towers(text=text)[0] is None
    towers.lock("image")
    towers.lock("text")
    torch.testing.assert_close(towers(image, text), before)
    trunks = towers.trunk("image", image), towers.trunk("text", text)
    torch.testing.assert_close(towers(*trunks, image_from_trunk=True, text_from_trunk=True), before)
    trained = {n for n, p in towers.named_parameters() if p.requires_grad}
    assert trained == towers.head_parameter_names("image") | towers.head_parameter_names("text")
    sum(x.sum() for x in towers(image, text)).backward()
    assert {n for n, p in towers.named_parameters() if p.grad is not None} == trained


def test_a_locked_trunk_stays_in_evaluation_mode_and_its_head_trains(build: Build) -> None:
    towers = build(TIMM).towers
    towers.lock("image")
    towers.train()
    image = torch.randn(4, 3, 32, 32)
    assert torch.equal(towers.trunk("image", image), towers.trunk("image", image))
    statistics = {k: v.clone() for k, v in towers.clip.visual.trunk.state_dict().items()}
    assert not torch.equal(towers(image=image)[0], towers(image=image)[0]), "the head's dropout is on"
    for name, value in towers.clip.visual.trunk.state_dict().items():
        assert torch.equal(value, statistics[name]), f"{name}: batch statistics moved"


def test_lock_of_one_side_leaves_the_other_alone_and_needs_a_projection(build: Build) -> None:
    towers = build(NATIVE).towers
    towers.lock("text")
    frozen = {n for n, p in towers.named_parameters() if not p.requires_grad}
    assert not any(n.startswith("clip.visual.") for n in frozen)
    assert "clip.token_embedding.weight" in frozen and "clip.text_projection" not in frozen
    assert frozen - {"clip.logit_scale"} <= towers.locked_names()
    bare = {**TIMM, "vision_cfg": {**TIMM["vision_cfg"], "timm_proj": ""}}
    with pytest.raises(UserError, match="image tower has no projection head"):
        build(bare).towers.lock("image")


def test_fingerprint_follows_trunk_weights_and_not_the_head(build: Build) -> None:
    towers = build(NATIVE).towers
    first = {s: towers.trunk_fingerprint(s) for s in ("image", "text")}
    with torch.no_grad():
        towers.clip.visual.proj.add_(1)
        towers.clip.text_projection.add_(1)
    assert {s: towers.trunk_fingerprint(s) for s in ("image", "text")} == first
    with torch.no_grad():
        towers.clip.visual.conv1.weight[0, 0, 0, 0] += 1
    assert towers.trunk_fingerprint("image") != first["image"]
    assert towers.trunk_fingerprint("text") == first["text"]


# --- texts up to the longest of their batch ---------------------------------------------------------------------------

CAPTIONS = ["a dog", "two cats on a red mat", "a", "", "two cats on a red mat", "a dog and a very long lawn mower"]
SHORTENED: dict[str, dict[str, Any]] = {
    "clip": {},
    "custom": {"custom_text": True},
    "bias": {"text_cfg": {"proj_type": "linear", "proj_bias": True}, "custom_text": True},
    "eos": {"text_cfg": {"pool_type": "eos", "eos_id": 49407}},
}
WHOLE: list[dict[str, Any]] = [
    {"text_cfg": {"pool_type": "last", "no_causal_mask": True}, "custom_text": True},
    {"text_cfg": {"no_causal_mask": True}},
    {"text_cfg": {"embed_cls": True}, "custom_text": True},
]


def longer(change: dict[str, Any]) -> dict[str, Any]:
    return NATIVE | change | {"text_cfg": NATIVE["text_cfg"] | {"context_length": 32} | change.get("text_cfg", {})}


@pytest.mark.parametrize("kind", SHORTENED)
def test_features_and_gradients_are_those_of_the_whole_context(build: Build, kind: str) -> None:
    model = build(longer(SHORTENED[kind]))
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
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=1e-4)
    model.towers.lock("text")
    torch.testing.assert_close(model.towers(text=short)[1], found[0][0], atol=1e-5, rtol=1e-5)


def test_what_reads_all_positions_gets_them_and_lengths_are_multiples(build: Build) -> None:
    for change in WHOLE:
        model = build(longer(change))
        assert torch.equal(model.tokens(CAPTIONS), model.tokenize(CAPTIONS))
    model = build(longer({}))
    assert model.towers.shortened(model.tokenize(["a"])[:0]).shape == (0, 32)
    assert model.tokens(["word " * 50]).shape == (1, 32)
    nine = model.tokenize(["one two three four five six seven"])
    lengths = [shorten_tokens(model.towers.text_module, nine, multiple).shape[1] for multiple in (1, 8, 20, 40)]
    assert lengths == [9, 16, 20, 32]


def test_a_hugging_face_tower_masks_what_is_left_out(shared: Path) -> None:
    torch.manual_seed(0)
    model = build_model("effnet_lite0-minilm.json", text_trunk=str(shared / "models" / "all-MiniLM-L6-v2"))
    model.towers.eval()
    whole, short = model.tokenize(CAPTIONS), model.tokens(CAPTIONS)
    padding = model.towers.text_module.config.pad_token_id
    assert whole.shape == (6, 40) and torch.equal(short, whole[:, : int((whole != padding).sum(dim=1).max())])
    with torch.no_grad():
        torch.testing.assert_close(model.towers(text=short)[1], model.towers(text=whole)[1], atol=1e-5, rtol=1e-4)


def test_equal_captions_are_encoded_once_and_all_come_back_in_their_order(build: Build) -> None:
    model = build(longer({}))
    options = EncodeOptions(torch.device("cpu"), batch_size=2, progress=False)
    batches: list[Tensor] = []

    def encode(tokens: Tensor) -> Tensor:
        batches.append(tokens)
        return text_encoder(model)(tokens)

    found = encode_texts(encode, CAPTIONS, model.tokens, options)
    assert sum(len(t) for t in batches) == 5 and batches[-1].shape[1] == 2, "the shortest last"
    with torch.no_grad():
        torch.testing.assert_close(found, model.towers(text=model.tokenize(CAPTIONS))[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(found[1], found[4])
    assert found.requires_grad is False and (found + 0).requires_grad_().requires_grad


# --- images as bytes --------------------------------------------------------------------------------------------------

PREPROCESSING: list[dict[str, Any]] = [
    {},
    {"size": 64, "mean": (0.5,) * 3, "std": (0.5,) * 3, "resize_mode": "squash", "interpolation": "bilinear"},
    {"size": 48, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
    {"size": (40, 40), "resize_mode": "longest", "fill_color": 7},
    {"size": (40, 56)},
]
AUGMENTATIONS: list[dict[str, Any] | None] = [
    None,
    {},
    {"color_jitter": (0.4, 0.4, 0.4, 0.1), "color_jitter_prob": 0.9, "gray_scale_prob": 0.3},
    {"use_timm": True, "scale": (0.3, 1.0), "color_jitter": 0.4},
]


def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    found = [Image.fromarray(rng.integers(0, 256, (*s, 3), dtype=np.uint8)) for s in ((70, 90), (64, 64), (200, 31))]
    return [*found, Image.new("RGB", (50, 60)), Image.new("RGB", (50, 60), (255, 255, 255))]


def seeded(transform: Any, picture: Image.Image) -> Tensor:
    torch.manual_seed(3)
    random.seed(3)
    made: Tensor = transform(picture)
    return made


@pytest.mark.parametrize("augmentation", AUGMENTATIONS, ids=str)
@pytest.mark.parametrize("config", PREPROCESSING, ids=str)
def test_bytes_and_normalization_are_the_stock_transform(
    config: dict[str, Any], augmentation: dict[str, Any] | None
) -> None:
    cfg = PreprocessCfg(**config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # open_clip tells of settings that it leaves to timm
        aug = None if augmentation is None else AugmentationCfg(**augmentation)
        stock = image_transform_v2(cfg, is_train=aug is not None, aug_cfg=aug)
    pixels, reader = Pixels(image_transform_v2(cfg, is_train=False), nn.Identity()), as_bytes(stock)
    for picture in pictures():
        expected, made = seeded(stock, picture), seeded(reader, picture)
        assert made.dtype == torch.uint8 and made.shape == expected.shape
        found = pixels(made[None])
        assert found.is_contiguous() and torch.equal(found[0], expected)


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-16-SigLIP"])
def test_bytes_are_exact_for_models_of_open_clip(name: str) -> None:
    config = open_clip.get_model_config(name)
    assert config is not None
    vision = {"timm_model_name": "test_vit", "timm_pool": "avg"} if "timm_model_name" in config["vision_cfg"] else {}
    _, _, stock = open_clip.create_model_and_transforms(
        name, vision_cfg=vision or {"layers": 1, "width": 64, "patch_size": 16, "image_size": 64},
        text_cfg={"layers": 1, "width": 32, "heads": 2, "context_length": 8, "vocab_size": 64}, embed_dim=8,
    )  # fmt: skip
    for picture in pictures():
        assert torch.equal(Pixels(stock, nn.Identity())(as_bytes(stock)(picture)[None])[0], stock(picture))


def test_every_byte_is_exact_and_other_transforms_stay_as_they_are() -> None:
    normalize = transforms.Normalize((0.1, 0.2, 0.3), (0.7, 0.3, 0.9))
    pixels = Pixels(transforms.Compose([transforms.ToTensor(), normalize]), nn.Identity())
    every = torch.arange(256, dtype=torch.uint8).expand(3, 256)[:, None]
    picture = np.ascontiguousarray(every.permute(1, 2, 0).numpy())
    assert torch.equal(pixels(every[None])[0], normalize(transforms.ToTensor()(picture)))
    erasing = image_transform_v2(PreprocessCfg(), True, AugmentationCfg(use_timm=True, re_prob=1.0))
    own = transforms.Compose([transforms.ToTensor()])
    assert all(as_bytes(transform) is transform for transform in (erasing, own, seeded))
    pixels, floats = Pixels(own, nn.Identity()), torch.randn(2, 3, 4, 4)
    assert torch.equal(pixels(floats), floats)
    with pytest.raises(ValueError, match="does not end in ToTensor and Normalize"):
        pixels(floats.byte())


def test_a_convolutional_trunk_gets_channels_last_with_its_values_unchanged() -> None:
    stock = image_transform_v2(PreprocessCfg(size=32), is_train=False)
    trunk = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    plain, last = Pixels(stock, nn.Conv2d(3, 4, 16, 16)), Pixels(stock, trunk)
    batch = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert plain(batch).is_contiguous() and torch.equal(plain(batch), last(batch))
    assert last(batch).is_contiguous(memory_format=torch.channels_last)
    assert last(batch.float()).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(trunk(last(batch)), copy.deepcopy(trunk)(plain(batch)), atol=1e-5, rtol=1e-5)
