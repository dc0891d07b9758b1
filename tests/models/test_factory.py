"""Names, tags, files and folders of CLIP models: what is built, and what is refused in one line before it costs."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import save_file

from mmclip.config.model_config import check_sizes, read_json
from mmclip.errors import UserError
from mmclip.models.export import export_clip
from mmclip.models.factory import ClipModel, build_model
from tests.helpers.tiny import MODEL

TIMM = {**MODEL, "vision_cfg": {"timm_model_name": "test_efficientnet", "timm_proj": "linear", "image_size": 32}}


def write(path: Path, config: dict[str, Any]) -> str:
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def build(folder: Path, config: dict[str, Any] = MODEL, *arguments: Any, **how: Any) -> ClipModel:
    return build_model(write(folder / "m.json", config), *arguments, **how)


def refusal(*arguments: Any, **how: Any) -> str:
    with pytest.raises(UserError) as error:
        (build if isinstance(arguments[0], Path) else build_model)(*arguments, **how)
    assert "\n" not in str(error.value) and len(str(error.value)) < 800
    return str(error.value)


def test_a_registered_name_is_open_clips_own_model() -> None:
    torch.manual_seed(3)
    ours = build_model("RN50")
    torch.manual_seed(3)
    theirs = open_clip.create_model("RN50")
    assert all(torch.equal(v, theirs.state_dict()[k]) for k, v in ours.towers.clip.state_dict().items())
    assert ours.preprocess_cfg == dict(theirs.visual.preprocess_cfg)
    assert ours.loaded_scale is None and ours.metadata == {}


def test_json_with_preprocessing_and_forced_sizes(tmp_path: Path) -> None:
    config = {"model_cfg": MODEL, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    model = build(tmp_path, config, force_image_size=48, force_context_length=9)
    assert model.preprocess_cfg["mean"] == [0.5] * 3 and model.preprocess_cfg["size"] == (48, 48)
    assert model.tokenize(["a"]).shape == (1, 9)
    assert model.towers(torch.zeros(1, 3, 48, 48), model.tokenize(["a"]))[0].shape == (1, 16)
    assert model.towers.model_cfg["vision_cfg"]["image_size"] == 48, "the export says so too"


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_image_trunk_weights_come_from_a_local_file(tmp_path: Path, suffix: str) -> None:
    import timm

    torch.manual_seed(9)
    trunk = timm.create_model("test_efficientnet")
    state = {k: v.half() if v.is_floating_point() else v for k, v in trunk.state_dict().items()}
    path = tmp_path / f"trunk{suffix}"
    save_file(state, str(path)) if suffix == ".safetensors" else torch.save({"state_dict": state}, path)
    loaded = build(tmp_path, TIMM, image_trunk=str(path)).towers.clip.visual.trunk.state_dict()
    assert all(torch.equal(loaded[k], state[k].to(loaded[k].dtype)) for k in loaded)
    torch.save({"x": torch.zeros(1)}, tmp_path / "other.pt")
    assert "does not fit" in refusal(tmp_path, TIMM, image_trunk=str(tmp_path / "other.pt"))
    assert "not a timm model" in refusal(tmp_path, image_trunk=str(path))


def test_siglip_models_are_supported_their_bias_cancels(tmp_path: Path) -> None:
    model = build(tmp_path, {**MODEL, "init_logit_bias": -10.0})
    export_clip(tmp_path / "out", model, 1.0, {"gamma_q": 1.0})
    again = open_clip.create_model(f"local-dir:{tmp_path / 'out'}")
    assert again.logit_bias.item() == -10 and again.logit_scale.item() == 1.0
    assert not model.towers.clip.logit_scale.requires_grad and not model.towers.clip.logit_bias.requires_grad


def test_unknown_names_tags_and_coca_are_refused(tmp_path: Path) -> None:
    for model, pretrained, message in (
        ("ViT-B-33", None, "did you mean ViT-B-32?"),
        ("ViT-B-32", "laion9b", "neither a file nor a tag of ViT-B-32; tags: openai"),
        ("coca_ViT-B-32", None, "CoCa models are not supported"),
        ("COCA", None, "CoCa models are not supported"),
        ("hf-hub:org/model", None, "local-dir:FOLDER"),
    ):
        assert message in refusal(model, pretrained)
    assert "CoCa" in refusal(tmp_path, {**MODEL, "multimodal_cfg": {}})


class Evil:
    """A pickle that would write a file when it is loaded."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return __import__("os").system, ("touch PWNED",)


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".npz", ".safetensors", ".json"])
def test_weights_never_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"evil{suffix}"
    with path.open("wb") as file:
        torch.save(Evil(), file)
    assert "evil" in refusal(tmp_path, pretrained=str(path))
    assert "evil" in refusal(tmp_path, TIMM, image_trunk=str(path))
    assert not (tmp_path / "PWNED").exists()


def test_code_that_comes_with_a_hugging_face_folder_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evil, trusting = tmp_path / "evil", {"trust_remote_code": True}
    evil.mkdir()
    (evil / "code.py").write_text("open('PWNED', 'w')\nclass C: pass\n", encoding="utf-8")
    for name, what in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        kinds = "code.C" if what == "AutoConfig" else ["code.C", "code.C"]
        write(evil / name, {"model_type": "evil", "auto_map": {what: kinds}, "tokenizer_class": "C"})
    tower = {"hf_model_name": str(evil), "hf_tokenizer_name": str(evil), "tokenizer_kwargs": trusting}
    tokenizer = {**MODEL["text_cfg"], "hf_tokenizer_name": str(evil), "tokenizer_kwargs": trusting}
    for text in (tower, tokenizer):
        refusal(tmp_path, {**MODEL, "text_cfg": text}, pretrained_text=False)
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("x.safetensors", c) for c in (b"\xff" * 8 + b"{}", b"\x10" + bytes(7) + b"[" * 16, bytes(4), b"")),
        ("x.pt", b"PK\003\004 and no more"),
        ("x.safetensors", None),
    ],
)
def test_a_file_that_is_no_checkpoint_of_the_model_is_one_line(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    if content is None:
        save_file({"x": torch.zeros(2)}, str(tmp_path / name))
    else:
        (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path, MODEL, str(tmp_path / name))
    assert "not a checkpoint of this model" in message and "miniz" not in message


def test_a_checkpoint_of_damaged_weights_is_one_line(tmp_path: Path) -> None:
    weights, state = tmp_path / "x.safetensors", build(tmp_path).towers.clip.state_dict()
    for name, message in (("logit_scale", "logit_scale"), ("visual.proj", "features whose norm is not finite")):
        for number in (torch.nan, torch.inf, 1e30):
            save_file({**state, name: torch.full_like(state[name], number)}, str(weights))
            assert message in refusal(tmp_path, MODEL, str(weights))


@pytest.mark.timeout(60)
def test_a_caption_of_any_length_is_tokenized_at_once_and_others_as_open_clip_does(tmp_path: Path) -> None:
    ours = build(tmp_path).tokenize
    stock = open_clip.SimpleTokenizer(context_length=16)
    prose = "A caf\u00e9 \u0627\u0644\u0639\u0631\u0628 &amp; three red-brown dogs, 12 of them;  they're off. " * 600
    captions = ["a dog", "", "x" * 999, "word " * 190, prose[:1000], prose]
    assert len(prose) > 30_000 and torch.equal(ours(captions), stock(captions))
    assert torch.equal(ours("a dog"), stock("a dog"))
    started = time.monotonic()
    for word in ("x" * 900_000, "ab" * 450_000, "\u202e" * 900_000, " " * 900_000 + "x", "1" * 900_000):
        assert ours([word]).shape == (1, 16)
    assert time.monotonic() - started < 5
    assert ours(["a" + " " * 2000 + "dog"]).equal(stock(["a dog"]))


def test_an_augmentation_that_open_clip_cannot_use_is_one_line(tmp_path: Path) -> None:
    model = build(tmp_path)
    for aug_cfg in ({"scale": 5.0}, {"color_jitter": -1.0}, {"ratio": (0.0, 0.0)}):
        with pytest.raises(UserError, match=f"--aug-cfg .*{next(iter(aug_cfg))}"):
            model.transform(train=True, aug_cfg=aug_cfg)
    model.transform(train=True, aug_cfg={"none": 0, "scale": (0.5, 1.0)})


# --- model configs and metadata ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", '{"embed_dim": 4}', '{"embed_dim": 4, "vision_cfg": {}, "text_cfg": 3}', "\0\0",
        json.dumps({**MODEL, "vision_cfg": {"layerz": 3}}), '{"embed_dim": NaN}', '{"embed_dim": 1e999}',
        '{"a":' * 100_000, "[" * 100_000, '{"embed_dim": ' + "9" * 5000 + "}", " " * 2_000_000 + "{}",
        json.dumps({"model_cfg": []}), json.dumps({"model_cfg": MODEL, "preprocess_cfg": 3}),
    ],
)  # fmt: skip
def test_a_faulty_model_config_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "m.json").write_text(content, encoding="utf-8")
    (tmp_path / "open_clip_config.json").write_text(content, encoding="utf-8")
    for model in (str(tmp_path / "m.json"), f"local-dir:{tmp_path}"):
        assert "json" in refusal(model)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("side", "name", "value", "message"),
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
    tmp_path: Path, side: str, name: str, value: object, message: str
) -> None:
    config: dict[str, Any] = {"model_cfg": copy.deepcopy(MODEL), "preprocess_cfg": {}}
    owner = config["preprocess_cfg"] if side == "preprocess_cfg" else config["model_cfg"][side]
    owner |= {name: value} | ({"patch_size": 1} if value == 4000 else {"layers": 1000} if value == 65_536 else {})
    assert message in refusal(tmp_path, config)


def test_no_registered_model_is_refused_for_its_sizes(tmp_path: Path) -> None:
    for name in open_clip.list_models():
        check_sizes(name, open_clip.get_model_config(name))
    assert "--model ViT-B-32: image_size is 1000000000" in refusal("ViT-B-32", force_image_size=10**9)
    with pytest.raises(UserError) as error:
        read_json(tmp_path)
    assert str(error.value) == f"{tmp_path}: not readable as JSON: Is a directory"


def test_metadata_of_an_export_are_what_they_should_be(tmp_path: Path) -> None:
    export_clip(tmp_path / "out", build(tmp_path), 1.0, {"gamma_q": 1.0})
    assert build_model(f"local-dir:{tmp_path / 'out'}").metadata == {"gamma_q": 1.0}
    for metadata, message in (
        ('{"gamma_q": "one", "gamma_d": 0}', 'gamma_q is "one": expected a number from 0 to 1'),
        ('{"gamma_q": 1, "gamma_d": 1e300}', "gamma_d is 1e+300: expected"),
        ('{"gamma_q": 1, "gamma_d": NaN}', "NaN is not a finite number"),
        ('{"effective_scale": -1}', "effective_scale is -1: expected a number above 0"),
        ('{"logit_scale_i2t": [1]}', "logit_scale_i2t is a list: expected"),
        ('{"loss": {}}', "loss is an object: expected a text"),
        ("[1]", "a JSON object is expected, got a list"),
    ):
        (tmp_path / "out" / "mmclip.json").write_text(metadata, encoding="utf-8")
        found = refusal(f"local-dir:{tmp_path / 'out'}")
        assert message in found and "mmclip.json" in found
