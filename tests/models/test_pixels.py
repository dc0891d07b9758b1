"""Bytes and the device's normalization are open_clip's transform, bit for bit."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from open_clip.transform import AugmentationCfg, PreprocessCfg, image_transform_v2
from PIL import Image
from torch import nn
from torchvision import transforms

from mmclip.models.towers import Pixels, as_bytes

CONFIGS: dict[str, dict[str, Any]] = {
    "openai": {},
    "siglip": {"size": 64, "mean": (0.5,) * 3, "std": (0.5,) * 3, "resize_mode": "squash", "interpolation": "bilinear"},
    "imagenet": {"size": 48, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
    "longest": {"size": (40, 40), "resize_mode": "longest", "fill_color": 7},
    "not-square": {"size": (40, 56)},
}
AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "stock": {},
    "jitter": {"color_jitter": (0.4, 0.4, 0.4, 0.1), "color_jitter_prob": 0.9, "gray_scale_prob": 0.3},
    "timm": {"use_timm": True, "scale": (0.3, 1.0), "color_jitter": 0.4},
}


def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    shapes = ((70, 90), (64, 64), (200, 31))
    found = [Image.fromarray(rng.integers(0, 256, (*s, 3), dtype=np.uint8)) for s in shapes]
    return [*found, Image.new("RGB", (50, 60)), Image.new("RGB", (50, 60), (255, 255, 255))]


def seeded(transform: Any, picture: Image.Image) -> torch.Tensor:
    torch.manual_seed(3)
    np.random.seed(3)
    import random

    random.seed(3)
    made: torch.Tensor = transform(picture)
    return made


@pytest.mark.parametrize("augmentation", [None, *AUGMENTATIONS])
@pytest.mark.parametrize("config", CONFIGS)
def test_bytes_and_normalization_are_the_stock_transform(config: str, augmentation: str | None) -> None:
    cfg = PreprocessCfg(**CONFIGS[config])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # open_clip tells of settings that it leaves to timm
        aug = None if augmentation is None else AugmentationCfg(**AUGMENTATIONS[augmentation])
        stock = image_transform_v2(cfg, is_train=aug is not None, aug_cfg=aug)
    pixels = Pixels(image_transform_v2(cfg, is_train=False), nn.Identity())
    reader = as_bytes(stock)
    for picture in pictures():
        expected, made = seeded(stock, picture), seeded(reader, picture)
        assert made.dtype == torch.uint8 and made.shape == expected.shape
        found = pixels(made[None])
        assert found.is_contiguous() and torch.equal(found[0], expected)


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-16-SigLIP"])
def test_models_of_open_clip(name: str) -> None:
    config = open_clip.get_model_config(name)
    assert config is not None
    vision = {"timm_model_name": "test_vit", "timm_pool": "avg"} if "timm_model_name" in config["vision_cfg"] else {}
    _, _, stock = open_clip.create_model_and_transforms(
        name, vision_cfg=vision or {"layers": 1, "width": 64, "patch_size": 16, "image_size": 64},
        text_cfg={"layers": 1, "width": 32, "heads": 2, "context_length": 8, "vocab_size": 64}, embed_dim=8,
    )  # fmt: skip
    for picture in pictures():
        assert torch.equal(Pixels(stock, nn.Identity())(as_bytes(stock)(picture)[None])[0], stock(picture))


def test_every_byte_is_exact() -> None:
    normalize = transforms.Normalize((0.1, 0.2, 0.3), (0.7, 0.3, 0.9))
    pixels = Pixels(transforms.Compose([transforms.ToTensor(), normalize]), nn.Identity())
    every = torch.arange(256, dtype=torch.uint8).expand(3, 256)[:, None]
    picture = np.ascontiguousarray(every.permute(1, 2, 0).numpy())
    assert torch.equal(pixels(every[None])[0], normalize(transforms.ToTensor()(picture)))


def test_what_does_not_end_in_both_stays_as_it_is() -> None:
    erasing = image_transform_v2(PreprocessCfg(), True, AugmentationCfg(use_timm=True, re_prob=1.0))
    own = transforms.Compose([transforms.ToTensor()])
    for transform in (erasing, own, seeded):
        assert as_bytes(transform) is transform
    pixels = Pixels(own, nn.Identity())
    floats = torch.randn(2, 3, 4, 4)
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
