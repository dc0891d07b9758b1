from __future__ import annotations

import pytest
import torch

from mmclip.errors import UserError
from mmclip.models.factory import ClipModel, build_model
from mmclip.models.towers import Towers
from tests.helpers.tiny import MODEL as NATIVE

TIMM = {
    "embed_dim": 16,
    "vision_cfg": {
        "timm_model_name": "test_efficientnet",
        "timm_pool": "avg",
        "timm_proj": "mlp",
        "timm_drop": 0.5,
        "image_size": 32,
    },
    "text_cfg": NATIVE["text_cfg"],
    "custom_text": True,
}


@pytest.fixture
def build(tmp_path):  # type: ignore[no-untyped-def]
    import json

    def made(config: dict[str, object], **kwargs: object) -> ClipModel:
        path = tmp_path / "tiny.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        torch.manual_seed(0)
        return build_model(str(path), **kwargs)  # type: ignore[arg-type]

    return made


def inputs(model: ClipModel) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)), model.tokenize(
        ["a dog", "a", "two cats"]
    )


@pytest.mark.parametrize("config", [NATIVE, TIMM], ids=["native", "timm"])
def test_forward_is_open_clips_raw_features(build, config) -> None:  # type: ignore[no-untyped-def]
    model = build(config)
    model.towers.eval()
    image, text = inputs(model)
    raw_image, raw_text = model.towers(image, text)
    torch.testing.assert_close(raw_image, model.towers.clip.encode_image(image, normalize=False))
    torch.testing.assert_close(raw_text, model.towers.clip.encode_text(text, normalize=False))
    assert (raw_image.norm(dim=1) - 1).abs().min() > 1e-3, "raw, not normalized"
    assert model.towers(image=image)[1] is None and model.towers(text=text)[0] is None


@pytest.mark.parametrize("config", [NATIVE, TIMM], ids=["native", "timm"])
def test_head_of_trunk_is_the_tower_and_only_the_head_trains(build, config) -> None:  # type: ignore[no-untyped-def]
    model = build(config)
    towers: Towers = model.towers
    towers.eval()
    image, text = inputs(model)
    before = towers(image, text)
    towers.lock("image")
    towers.lock("text")
    for a, b in zip(before, towers(image, text), strict=True):
        torch.testing.assert_close(a, b)
    trunks = towers.trunk("image", image), towers.trunk("text", text)
    for a, b in zip(before, towers(*trunks, image_from_trunk=True, text_from_trunk=True), strict=True):
        torch.testing.assert_close(a, b)
    trained = {n for n, p in towers.named_parameters() if p.requires_grad}
    assert trained == towers.head_parameter_names("image") | towers.head_parameter_names("text")
    out = towers(image, text)
    (out[0].sum() + out[1].sum()).backward()
    assert {n for n, p in towers.named_parameters() if p.grad is not None} == trained


def test_locked_trunk_stays_in_evaluation_mode_and_its_head_trains(build) -> None:  # type: ignore[no-untyped-def]
    towers = build(TIMM).towers
    towers.lock("image")
    towers.train()
    image = torch.randn(4, 3, 32, 32)
    assert torch.equal(towers.trunk("image", image), towers.trunk("image", image))
    statistics = {k: v.clone() for k, v in towers.clip.visual.trunk.state_dict().items()}
    a, b = towers(image=image)[0], towers(image=image)[0]
    assert not torch.equal(a, b), "the head's dropout is on"
    for name, value in towers.clip.visual.trunk.state_dict().items():
        assert torch.equal(value, statistics[name]), f"{name}: batch statistics moved"


def test_lock_of_one_side_leaves_the_other_alone(build) -> None:  # type: ignore[no-untyped-def]
    towers = build(NATIVE).towers
    towers.lock("text")
    frozen = {n for n, p in towers.named_parameters() if not p.requires_grad}
    assert not any(n.startswith("clip.visual.") for n in frozen)
    assert "clip.token_embedding.weight" in frozen and "clip.text_projection" not in frozen


def test_tower_without_a_projection_cannot_be_locked(build) -> None:  # type: ignore[no-untyped-def]
    config = {**TIMM, "vision_cfg": {**TIMM["vision_cfg"], "timm_proj": ""}}
    with pytest.raises(UserError, match="image tower has no projection head"):
        build(config).towers.lock("image")


def test_scale_and_bias_of_the_model_never_train(build) -> None:  # type: ignore[no-untyped-def]
    towers = build({**NATIVE, "init_logit_bias": -10.0}).towers
    assert not towers.clip.logit_scale.requires_grad and not towers.clip.logit_bias.requires_grad


def test_fingerprint_follows_trunk_weights_and_not_the_head(build) -> None:  # type: ignore[no-untyped-def]
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
