"""CLIP models by name, tag, config or folder, built by open_clip: towers, transforms and tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.transform import AugmentationCfg, PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from mmclip.config.model_config import (
    WEIGHT_SUFFIXES,
    check_model,
    check_sizes,
    read_metadata,
    read_model_config,
    refuse_coca,
    weights_of,
)
from mmclip.errors import UserError, nearest, printable
from mmclip.models.text_encoder import quiet
from mmclip.models.towers import Pixels, Towers


class Tokenizer:
    """A stock tokenizer of captions cut far behind its context: BPE takes time quadratic in a word's length."""

    def __init__(self, stock: Any) -> None:
        self.stock, self.longest = stock, max(1000, 32 * stock.context_length)

    def __call__(self, captions: str | list[str]) -> Tensor:
        """[B, context_length] token ids."""
        captions, n = [captions] if isinstance(captions, str) else captions, self.longest
        tokens: Tensor = self.stock([c if len(c) <= n else " ".join(c.split())[:n] for c in captions])
        return tokens

    def save_pretrained(self, folder: str) -> None:
        self.stock.save_pretrained(folder)


@dataclasses.dataclass
class ClipModel:
    """Towers with their preprocessing.

    Attributes:
        towers: Both towers, raw features.
        preprocess_cfg: open_clip's (size, mean, std, interpolation, resize_mode).
        tokenize: Captions -> token ids [B, context_length].
        loaded_scale: exp(logit_scale) of a loaded CLIP checkpoint; None for random or trunk-only weights.
        metadata: mmclip.json of an mmclip export, else {}.
        initial: The run that --init-from started from (``metadata.initial_run``), else {}.
    """

    towers: Towers
    preprocess_cfg: dict[str, Any]
    tokenize: Tokenizer
    loaded_scale: float | None
    metadata: dict[str, Any]
    initial: dict[str, Any] = dataclasses.field(default_factory=dict)

    def transform(self, train: bool = False, aug_cfg: dict[str, Any] | None = None) -> Callable[[Any], Tensor]:
        """open_clip's image transform, PIL image -> [3, H, W]; ``aug_cfg`` {"none": 1} trains without augmentation."""
        cfg = PreprocessCfg(**self.preprocess_cfg)
        if not train or (aug_cfg and aug_cfg.get("none")):
            return image_transform_v2(cfg, is_train=False)
        options = {k: v for k, v in (aug_cfg or {}).items() if k != "none"}
        try:
            transform = image_transform_v2(cfg, is_train=True, aug_cfg=AugmentationCfg(**options))
            transform(Image.new("RGB", (64, 64)))
        except Exception as error:  # whatever torchvision and timm raise for numbers that they cannot use
            raise UserError(f"--aug-cfg {printable(aug_cfg)}: open_clip cannot use it: {_why(error)}") from None
        return transform

    def tokens(self, captions: list[str]) -> Tensor:
        """Token ids [B, L], L no more than these captions need."""
        return self.towers.shortened(self.tokenize(captions))

    @functools.cached_property
    def pixels(self) -> Pixels:
        """Input of the image tower from a batch of ``transform``'s images, or of its bytes (``as_bytes``)."""
        return Pixels(self.transform(), self.towers.clip.visual)


def load_clip(model: str, pretrained: str | None = None) -> ClipModel:
    """A trained model for evaluation: on the CPU, in float32 and evaluation mode.

    Args:
        model: A run's folder, its ``model/`` folder, ``local-dir:FOLDER``, an open_clip name or a model config JSON.
        pretrained: An open_clip tag or a checkpoint file.

    Raises:
        UserError: No such model.
    """
    path = Path(model)
    name = printable(model)
    if path.is_dir():
        inner = path / "model" if (path / "model").is_dir() else path
        if not (inner / "open_clip_config.json").is_file():
            raise UserError(f"--model {name}: a folder without open_clip_config.json and without model/")
        model = f"local-dir:{inner}"
    elif path.suffix in WEIGHT_SUFFIXES and path.is_file() and pretrained is None:
        how = f"name it: --model NAME --pretrained {name}"
        raise UserError(f"--model {name}: a checkpoint file does not name its architecture; {how}")
    built = build_model(model, pretrained)
    built.towers.eval()
    if built.loaded_scale is None:
        advice = "so its results are chance: give --pretrained, a tag or a checkpoint file"
        print(f"warning: {printable(model)} has random weights, {advice}", file=sys.stderr)
    return built


def build_model(
    model: str,
    pretrained: str | None = None,
    image_trunk: str | None = None,
    text_trunk: str | None = None,
    pretrained_image: bool = False,
    pretrained_text: bool = True,
    force_image_size: int | None = None,
    force_context_length: int | None = None,
) -> ClipModel:
    """Build any open_clip model on the CPU in float32.

    Args:
        model: An open_clip name, a model config JSON, or ``local-dir:FOLDER``.
        pretrained: An open_clip tag or a checkpoint file, read as plain tensors (a pickle never runs).
        image_trunk: A timm state dict for the image trunk.
        text_trunk: A Hugging Face folder for text trunk and tokenizer.
        pretrained_image: Load timm's own pretrained weights.
        pretrained_text: Load the Hugging Face weights of a Hugging Face text trunk.
        force_image_size: Overrides the config's image size, in pixels.
        force_context_length: Overrides the config's context length, in tokens.

    Raises:
        UserError: No such model, or parts that do not fit. One line.
    """
    check_model(model, pretrained)
    config, folder = _find_config(model)
    name, model_cfg = f"--model {printable(model)}", config["model_cfg"]
    text_cfg = model_cfg["text_cfg"]
    refuse_coca(model, model_cfg)
    if force_context_length is not None:
        text_cfg["context_length"] = force_context_length
    if force_image_size is not None:
        model_cfg["vision_cfg"]["image_size"] = force_image_size
    check_sizes(name, model_cfg)
    tag = open_clip.get_pretrained_cfg(model, pretrained) if pretrained else {}
    if pretrained and not tag and not Path(pretrained).is_file():
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(model)) or "none for this model"
        raise UserError(f"--pretrained {printable(pretrained)}: neither a file nor a tag of {model}; tags: {tags}")
    if text_trunk is not None:
        if "hf_model_name" not in text_cfg:
            raise UserError(f"--text-trunk {printable(text_trunk)}: {model} has no Hugging Face text tower")
        text_cfg["hf_model_name"] = text_cfg["hf_tokenizer_name"] = str(Path(text_trunk).resolve())
    elif folder is not None and text_cfg.get("hf_model_name") == ".":
        text_cfg["hf_model_name"] = str(folder.resolve())  # an mmclip export carries its text config along
    complete = pretrained is not None or folder is not None  # every weight comes from a checkpoint
    with tempfile.TemporaryDirectory() as scratch, quiet():
        # All kinds of names become a local-dir that holds just the config; weights follow below.
        (Path(scratch) / "open_clip_config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            clip = open_clip.create_model(
                f"local-dir:{scratch}",
                pretrained_image=pretrained_image and not complete and image_trunk is None,
                pretrained_text=pretrained_text and not complete,
                force_image_size=force_image_size,
                force_context_length=force_context_length,
            )
        except Exception as error:  # open_clip, timm and transformers check little of what a config says
            raise UserError(f"{name}: open_clip cannot build it: {_why(error)}") from None
    clip.float()  # many trunks are stored as float16
    checkpoint = _checkpoint(model, tag, pretrained, folder)
    loaded_scale = None if checkpoint is None else _load_clip(clip, checkpoint)
    if image_trunk is not None:
        _load_image_trunk(clip, Path(image_trunk))
    tokenizer, metadata = _tokenizer(model, text_cfg, folder), read_metadata(folder) if folder is not None else {}
    built = ClipModel(Towers(clip, model_cfg), dict(clip.visual.preprocess_cfg), tokenizer, loaded_scale, metadata)
    _try_out(built, name + (f" --pretrained {printable(pretrained)}" if pretrained else ""))
    return built


@torch.no_grad()
def _try_out(model: ClipModel, name: str) -> None:
    """Encode one image and one text (UserError where that fails): parts of a valid config may not fit together."""
    training, stock, text_cfg = model.towers.training, model.tokenize.stock, model.towers.model_cfg["text_cfg"]
    model.towers.eval()
    try:
        rows, own = text_cfg.get("vocab_size", 49_408), isinstance(stock, open_clip.SimpleTokenizer)
        if own and not text_cfg.get("hf_model_name") and rows < stock.vocab_size:
            raise ValueError(f"vocab_size is {rows}, its tokenizer has {stock.vocab_size} tokens")
        pixels = model.transform()(Image.new("RGB", (64, 64)))
        image, text = model.towers(pixels[None], model.tokenize(["a"]))
        if image.shape != text.shape:
            raise ValueError(f"image and text features differ in shape: {list(image.shape)}, {list(text.shape)}")
    except Exception as error:  # any of its parts may be what does not fit
        raise UserError(f"{name}: cannot be run: {_why(error)}") from None
    finally:
        model.towers.train(training)
    if not (image.norm().isfinite() and text.norm().isfinite()):
        raise UserError(f"{name}: features whose norm is not finite: its weights or its preprocessing are damaged")


def _why(error: Exception, limit: int = 300) -> str:
    """A short reason: an assertion may have no text, and torch's advice on a pickle is to run it."""
    if isinstance(error, pickle.UnpicklingError):
        return "not a file of plain tensors"
    return printable(str(error).partition(" This is an internal miniz error")[0] or type(error).__name__, limit)


def _find_config(model: str) -> tuple[dict[str, Any], Path | None]:
    """({"model_cfg", "preprocess_cfg"}, folder of a local-dir or None)."""
    config = read_model_config(model)
    if config is not None:
        return config, Path(model.removeprefix("local-dir:")) if model.startswith("local-dir:") else None
    model_cfg = open_clip.get_model_config(model.replace("/", "-"))
    if model_cfg is None:
        close = f"{nearest(model, open_clip.list_models())} (or a model config JSON, or local-dir:FOLDER)"
        raise UserError(f"--model {printable(model)}: unknown to open_clip{close}")
    return {"model_cfg": model_cfg, "preprocess_cfg": {}}, None


def _checkpoint(model: str, tag: dict[str, Any], pretrained: str | None, folder: Path | None) -> Path | None:
    if tag:
        try:
            with quiet():
                return Path(open_clip.download_pretrained(tag))
        except Exception as error:  # whatever the hub client raises: no network, no access, no such revision
            why = f"its weights could not be fetched for {model}: {printable(error)}"
            raise UserError(f"--pretrained {printable(pretrained)}: {why}") from None
    if pretrained or folder is None:
        return Path(pretrained) if pretrained else None
    if path := weights_of(folder):
        return path
    raise UserError(f"--model local-dir:{folder}: no open_clip_model.safetensors in it")


def _load_clip(clip: torch.nn.Module, path: Path) -> float:
    """Load every weight of a checkpoint; returns exp(logit_scale)."""
    try:
        with quiet():
            open_clip.load_checkpoint(clip, str(path), strict=True, weights_only=True, device="cpu")
        scale = float(clip.logit_scale.detach().exp().mean())  # type: ignore[operator]
        if not 0 < scale < math.inf:
            raise ValueError(f"its logit_scale is the logarithm of {scale}")
    except Exception as error:  # pickle, safetensors and shape errors of every kind mean the same to the user
        raise UserError(f"{path}: not a checkpoint of this model: {_why(error, 240)}") from None
    return scale


def _load_image_trunk(clip: torch.nn.Module, path: Path) -> None:
    """Load timm weights into the image trunk: all of its tensors are needed, a classifier may be left over."""
    trunk = getattr(clip.visual, "trunk", None)
    if trunk is None:
        raise UserError(f"--image-trunk {path}: this model's image tower is not a timm model")
    try:
        kind = path.suffix == ".safetensors"
        state = load_file(str(path)) if kind else torch.load(path, map_location="cpu", weights_only=True)
        missing, unexpected = trunk.load_state_dict(state.get("state_dict", state), strict=False)
    except Exception as error:  # a file of any kind may stand there
        raise UserError(f"--image-trunk {path}: not loadable: {_why(error, 240)}") from None
    unexpected = [k for k in unexpected if not k.startswith(("classifier.", "fc.", "head.", "head_dist."))]
    if missing or unexpected:
        why = f"{len(missing)} tensors missing {missing[:2]}, {len(unexpected)} left over {unexpected[:2]}"
        raise UserError(f"--image-trunk {path}: does not fit {type(trunk).__name__}: {why}")


def _tokenizer(model: str, text_cfg: dict[str, Any], folder: Path | None) -> Tokenizer:
    context_length = text_cfg.get("context_length", 77)
    name, kwargs = text_cfg.get("hf_tokenizer_name"), text_cfg.get("tokenizer_kwargs") or {}
    local = folder is not None or model.endswith(".json")
    try:
        with quiet():
            if not local and not (name and Path(name).is_dir()):
                return Tokenizer(open_clip.get_tokenizer(model, context_length=context_length))
            if not name:
                return Tokenizer(open_clip.SimpleTokenizer(context_length=context_length, **kwargs))
            path = str(folder) if folder is not None else name  # open_clip's rule: a local-dir holds its tokenizer
            kwargs = {**kwargs, "trust_remote_code": False, "tokenizer_mode": text_cfg.get("tokenizer_mode")}
            return Tokenizer(open_clip.tokenizer.HFTokenizer(path, context_length=context_length, **kwargs))
    except Exception as error:  # files and arguments come with the model
        raise UserError(f"the tokenizer {printable(name or model)} cannot be loaded: {_why(error)}") from None
