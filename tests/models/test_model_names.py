"""Model configs and export facts: what is refused in one line before anything of their size is built."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import open_clip
import pytest

from mmclip.config.model_config import check_sizes, read_json
from mmclip.errors import UserError
from mmclip.models.export import export_clip
from mmclip.models.factory import build_model
from tests.helpers.tiny import MODEL


def write(path: Path, config: dict[str, Any]) -> str:
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"embed_dim": 4}',
        '{"embed_dim": 4, "vision_cfg": {}, "text_cfg": 3}',
        json.dumps({**MODEL, "vision_cfg": {"layerz": 3}}),
        '{"embed_dim": NaN}',
        '{"embed_dim": 1e999}',
        '{"a":' * 100_000,
        "[" * 100_000,
        '{"embed_dim": ' + "9" * 5000 + "}",
        " " * 2_000_000 + "{}",
        "\0\0",
        json.dumps({"model_cfg": []}),
        json.dumps({"model_cfg": MODEL, "preprocess_cfg": 3}),
    ],
)
def test_a_faulty_model_config_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "m.json").write_text(content, encoding="utf-8")
    (tmp_path / "open_clip_config.json").write_text(content, encoding="utf-8")
    for model in (str(tmp_path / "m.json"), f"local-dir:{tmp_path}"):
        with pytest.raises(UserError, match="json") as error:
            build_model(model)
        assert "\n" not in str(error.value) and len(str(error.value)) < 800


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("side", "name", "value", "told"),
    [
        ("vision_cfg", "layers", "many", 'layers is "many": expected a whole number from 1 to 1,000'),
        ("vision_cfg", "layers", 10**9, "layers is 1000000000: expected"),
        ("vision_cfg", "layers", [1, 1], "open_clip cannot build it"),
        ("vision_cfg", "width", -1, "width is -1: expected"),
        ("vision_cfg", "width", [64], "width is a list"),
        ("vision_cfg", "image_size", 10**9, "image_size is 1000000000: expected"),
        ("vision_cfg", "image_size", [32], "image_size is a list: expected a number, or [height, width]"),
        ("vision_cfg", "image_size", 8, "cannot be run"),
        ("vision_cfg", "image_size", True, "image_size is true: expected"),
        ("vision_cfg", "image_size", 4000, "images of 16,000,000 patches: expected at most 16,384"),
        ("vision_cfg", "mlp_ratio", 1e9, "mlp_ratio is 1000000000.0: expected a number above 0, at most 100"),
        ("vision_cfg", "pool_type", "none of them", "open_clip cannot build it: AssertionError"),
        ("vision_cfg", "output_tokens", True, "cannot be run"),
        ("vision_cfg", "timm_model_name", 3, "timm_model_name is 3, not a name"),
        ("text_cfg", "vocab_size", 5, "vocab_size is 5, its tokenizer has 49408 tokens"),
        ("text_cfg", "vocab_size", 10**12, "vocab_size is 1000000000000: expected"),
        ("text_cfg", "heads", 3, "open_clip cannot build it: embed_dim must be divisible"),
        ("text_cfg", "layers", [1], "layers is a list: expected"),
        ("text_cfg", "width", 65_536, "its weights would take"),
        ("text_cfg", "tokenizer_kwargs", 3, "tokenizer"),
        ("text_cfg", "tokenizer_kwargs", {"clean": "x"}, "cannot be loaded: Invalid clean function"),
        ("preprocess_cfg", "std", [0, 0, 0], "cannot be run: std evaluated to zero"),
        ("preprocess_cfg", "mean", "red", "cannot be run"),
        ("preprocess_cfg", "mean", [1e300] * 3, "features whose norm is not finite"),
    ],
)
def test_sizes_and_parts_that_cannot_be_are_refused_before_they_cost(
    tmp_path: Path, side: str, name: str, value: object, told: str
) -> None:
    config: dict[str, Any] = {"model_cfg": copy.deepcopy(MODEL), "preprocess_cfg": {}}
    owner = config["preprocess_cfg"] if side == "preprocess_cfg" else config["model_cfg"][side]
    owner |= {name: value} | ({"patch_size": 1} if value == 4000 else {"layers": 1000} if value == 65_536 else {})
    with pytest.raises(UserError) as error:
        build_model(write(tmp_path / "m.json", config))
    assert told in str(error.value) and "\n" not in str(error.value)


def test_no_registered_model_is_refused_for_its_sizes() -> None:
    for name in open_clip.list_models():
        check_sizes(name, open_clip.get_model_config(name))
    with pytest.raises(UserError, match="--model ViT-B-32: image_size is 1000000000"):
        build_model("ViT-B-32", force_image_size=10**9)


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ('{"gamma_q": "one", "gamma_d": 0}', 'gamma_q is "one": expected a number from 0 to 1'),
        ('{"gamma_q": 1, "gamma_d": 1e300}', "gamma_d is 1e+300: expected"),
        ('{"gamma_q": 1, "gamma_d": NaN}', "NaN is not a finite number"),
        ('{"effective_scale": -1}', "effective_scale is -1: expected a number above 0"),
        ('{"logit_scale_i2t": [1]}', "logit_scale_i2t is a list: expected"),
        ('{"loss": {}}', "loss is an object: expected a text"),
        ("[1]", "a JSON object is expected, got a list"),
    ],
)
def test_an_exports_facts_are_what_they_should_be(tmp_path: Path, facts: str, told: str) -> None:
    export_clip(tmp_path / "out", build_model(write(tmp_path / "m.json", MODEL)), 1.0, {"gamma_q": 1.0})
    assert build_model(f"local-dir:{tmp_path / 'out'}").metadata == {"gamma_q": 1.0}
    (tmp_path / "out" / "mmclip.json").write_text(facts, encoding="utf-8")
    with pytest.raises(UserError, match=r"mmclip\.json") as error:
        build_model(f"local-dir:{tmp_path / 'out'}")
    assert told in str(error.value)


def test_a_path_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read_json(tmp_path)
    assert str(error.value) == f"{tmp_path}: not readable as JSON: Is a directory"
