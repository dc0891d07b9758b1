"""Names, tags, files and folders of models: what is built, and what is refused in one line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import save_file

from mmclip.errors import UserError
from mmclip.models.export import export_clip
from mmclip.models.factory import build_model
from mmclip.training.checkpoint import FORMAT, find_checkpoint, load_checkpoint, save_checkpoint
from tests.helpers.tiny import MODEL

TIMM = {**MODEL, "vision_cfg": {"timm_model_name": "test_efficientnet", "timm_proj": "linear", "image_size": 32}}


def write(path: Path, config: dict[str, Any]) -> str:
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def test_a_registered_name_is_open_clips_own_model() -> None:
    torch.manual_seed(3)
    ours = build_model("RN50")
    torch.manual_seed(3)
    theirs = open_clip.create_model("RN50")
    assert all(torch.equal(v, theirs.state_dict()[k]) for k, v in ours.towers.clip.state_dict().items())
    assert ours.preprocess_cfg == dict(theirs.visual.preprocess_cfg)
    assert ours.loaded_scale is None and ours.metadata == {}


def test_json_with_preprocessing_and_forced_sizes(tmp_path: Path) -> None:
    path = write(tmp_path / "m.json", {"model_cfg": MODEL, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}})
    model = build_model(path, force_image_size=48, force_context_length=9)
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
    model = build_model(write(tmp_path / "m.json", TIMM), image_trunk=str(path))
    loaded = model.towers.clip.visual.trunk.state_dict()
    assert all(torch.equal(loaded[k], state[k].to(loaded[k].dtype)) for k in loaded)
    torch.save({"x": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(UserError, match="does not fit"):
        build_model(write(tmp_path / "m.json", TIMM), image_trunk=str(tmp_path / "other.pt"))
    with pytest.raises(UserError, match="not a timm model"):
        build_model(write(tmp_path / "n.json", MODEL), image_trunk=str(path))


def test_siglip_models_are_supported_their_bias_cancels(tmp_path: Path) -> None:
    model = build_model(write(tmp_path / "m.json", {**MODEL, "init_logit_bias": -10.0}))
    export_clip(tmp_path / "out", model, 1.0, {"gamma_q": 1.0})
    again = open_clip.create_model(f"local-dir:{tmp_path / 'out'}")
    assert again.logit_bias.item() == -10 and again.logit_scale.item() == 1.0


@pytest.mark.parametrize(
    ("model", "pretrained", "told"),
    [
        ("ViT-B-33", None, "did you mean ViT-B-32?"),
        ("ViT-B-32", "laion9b", "neither a file nor a tag of ViT-B-32; tags: openai"),
        ("coca_ViT-B-32", None, "CoCa models are not supported"),
        ("COCA", None, "CoCa models are not supported"),
        ("hf-hub:org/model", None, "local-dir:FOLDER"),
    ],
)
def test_unknown_names_and_tags_are_refused(model: str, pretrained: str | None, told: str) -> None:
    with pytest.raises(UserError) as error:
        build_model(model, pretrained)
    assert told in str(error.value) and "\n" not in str(error.value)


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
    with pytest.raises(UserError, match="evil"):
        build_model(write(tmp_path / "m.json", MODEL), pretrained=str(path))
    with pytest.raises(UserError, match="evil"):
        build_model(write(tmp_path / "t.json", TIMM), image_trunk=str(path))
    assert not (tmp_path / "PWNED").exists()


def test_code_that_comes_with_a_hugging_face_folder_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evil, asked = tmp_path / "evil", {"trust_remote_code": True}
    evil.mkdir()
    (evil / "code.py").write_text("open('PWNED', 'w')\nclass C: pass\n", encoding="utf-8")
    for name, what in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        kinds = "code.C" if what == "AutoConfig" else ["code.C", "code.C"]
        write(evil / name, {"model_type": "evil", "auto_map": {what: kinds}, "tokenizer_class": "C"})
    for text in (
        {"hf_model_name": str(evil), "hf_tokenizer_name": str(evil), "tokenizer_kwargs": asked},
        {**MODEL["text_cfg"], "hf_tokenizer_name": str(evil), "tokenizer_kwargs": asked},
    ):
        with pytest.raises(UserError):
            build_model(write(tmp_path / "m.json", {**MODEL, "text_cfg": text}), pretrained_text=False)
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("content", [b"\xff" * 8 + b"{}", b"\x10" + bytes(7) + b"[" * 16, bytes(4), b""])
def test_a_safetensors_file_whose_header_lies_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="not a checkpoint of this model") as error:
        build_model(write(tmp_path / "m.json", MODEL), str(tmp_path / "x.safetensors"))
    assert "\n" not in str(error.value)


def test_a_checkpoint_that_is_no_zip_is_named_without_the_librarys_advice(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"PK\003\004 and no more")
    with pytest.raises(UserError, match=r"not a checkpoint of this model: [^.]*zip archive[^.]*\.$"):
        build_model(write(tmp_path / "m.json", MODEL), str(tmp_path / "x.pt"))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e30])
def test_a_checkpoint_of_damaged_weights_is_one_line(tmp_path: Path, scale: float) -> None:
    path, weights = write(tmp_path / "m.json", MODEL), tmp_path / "x.safetensors"
    state = build_model(path).towers.clip.state_dict()
    save_file({**state, "logit_scale": torch.tensor(scale)}, str(weights))
    with pytest.raises(UserError, match="logit_scale"):
        build_model(path, str(weights))
    for number in (torch.nan, torch.inf, 1e30):
        save_file({**state, "visual.proj": torch.full_like(state["visual.proj"], number)}, str(weights))
        with pytest.raises(UserError, match=r"x\.safetensors: features whose norm is not finite"):
            build_model(path, str(weights))


@pytest.mark.timeout(60)
def test_a_caption_of_any_length_is_tokenized_at_once_and_others_as_open_clip_does(tmp_path: Path) -> None:
    ours = build_model(write(tmp_path / "m.json", MODEL)).tokenize
    stock = open_clip.SimpleTokenizer(context_length=16)
    prose = (
        "A caf\u00e9 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 &amp; three red-brown dogs, 12 of them;  they're off. "
        * 500
    )
    captions = ["a dog", "", "x" * 999, "word " * 190, prose[:1000], prose]
    assert len(prose) > 30_000 and torch.equal(ours(captions), stock(captions))
    assert torch.equal(ours("a dog"), stock("a dog"))
    started = time.monotonic()
    for word in ("x" * 900_000, "ab" * 450_000, "\u202e" * 900_000, " " * 900_000 + "x", "1" * 900_000):
        assert ours([word]).shape == (1, 16)
    assert time.monotonic() - started < 5
    assert ours(["a" + " " * 2000 + "dog"]).equal(stock(["a dog"]))


@pytest.mark.parametrize("aug_cfg", [{"scale": 5.0}, {"color_jitter": -1.0}, {"ratio": (0.0, 0.0)}])
def test_an_augmentation_that_open_clip_cannot_use_is_one_line(tmp_path: Path, aug_cfg: dict[str, Any]) -> None:
    model = build_model(write(tmp_path / "m.json", MODEL))
    with pytest.raises(UserError, match=f"--aug-cfg .*{next(iter(aug_cfg))}"):
        model.transform(train=True, aug_cfg=aug_cfg)
    model.transform(train=True, aug_cfg={"none": 0, "scale": (0.5, 1.0)})


def test_coca_is_refused_by_its_config_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="CoCa"):
        build_model(write(tmp_path / "m.json", {**MODEL, "multimodal_cfg": {}}))


def test_a_checkpoint_of_another_model_is_one_line(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2)}, str(tmp_path / "x.safetensors"))
    with pytest.raises(UserError, match="not a checkpoint of this model") as error:
        build_model(write(tmp_path / "m.json", MODEL), str(tmp_path / "x.safetensors"))
    assert "\n" not in str(error.value)


def test_a_checkpoint_is_found_as_the_latest_or_by_its_path(tmp_path: Path) -> None:
    assert find_checkpoint("latest", tmp_path) is None, "a run that was stopped before its first one"
    for step in (4, 5):
        save_checkpoint(tmp_path, step, {"format": FORMAT, "step": step, "encoder": {}}, keep=2)
    latest, named = find_checkpoint("latest", tmp_path), str(tmp_path / "step_00000004.pt")
    assert latest is not None and load_checkpoint(latest)["step"] == 5
    assert find_checkpoint(named, Path("elsewhere")) == Path(named)
    with pytest.raises(UserError, match=r"--resume nowhere\.pt"):
        find_checkpoint("nowhere.pt", tmp_path)
    (tmp_path / "latest").write_text("step_00000009.pt", encoding="utf-8")
    with pytest.raises(UserError, match=r"step_00000009\.pt, a missing file; there: step_00000004\.pt"):
        find_checkpoint("latest", tmp_path)


def test_weights_of_a_model_are_no_training_checkpoint(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="not an mmclip training checkpoint"):
        load_checkpoint(tmp_path / "x.pt")
