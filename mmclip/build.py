"""Names, tags, configs and local files -> towers with weights, transforms and tokenizer; open_clip builds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.transform import AugmentationCfg, PreprocessCfg, image_transform_v2
from safetensors.torch import load_file
from torch import Tensor

from mmclip.errors import UsageError, one_line
from mmclip.flags import nearest
from mmclip.model_names import check_model, find_model_config, refuse_coca
from mmclip.towers import Towers

Tokenize = Callable[[list[str]], Tensor]
WEIGHT_ERRORS = (RuntimeError, OSError, ValueError, KeyError, TypeError, AttributeError, EOFError)


@dataclasses.dataclass
class Model:
    """Towers with what feeds them.

    preprocess_cfg is open_clip's (size, mean, std, interpolation, resize_mode); loaded_scale is exp(logit_scale) of a
    loaded CLIP checkpoint, None for random or trunk-only weights; facts is an mmclip export's mmclip.json, else {}.
    """

    towers: Towers
    preprocess_cfg: dict[str, Any]
    tokenize: Any
    loaded_scale: float | None
    facts: dict[str, Any]

    def transform(self, train: bool = False, aug_cfg: dict[str, Any] | None = None) -> Callable[[Any], Tensor]:
        """open_clip's image transform: PIL image -> [3, H, W]; ``aug_cfg`` {'none': 1} trains without augmentation."""
        cfg = PreprocessCfg(**self.preprocess_cfg)
        if not train or (aug_cfg and aug_cfg.get("none")):
            return image_transform_v2(cfg, is_train=False)
        return image_transform_v2(cfg, is_train=True, aug_cfg=AugmentationCfg(**(aug_cfg or {})))


def build_model(
    model: str,
    pretrained: str | None = None,
    image_trunk: str | None = None,
    text_trunk: str | None = None,
    pretrained_image: bool = False,
    pretrained_text: bool = True,
    force_image_size: int | None = None,
    force_context_length: int | None = None,
) -> Model:
    """Any open_clip model by name, model config JSON, or ``local-dir:FOLDER``, on the CPU in float32.

    pretrained: an open_clip tag or a checkpoint file (read as plain tensors; a pickle never runs). image_trunk: a timm
    state dict. text_trunk: a Hugging Face folder for trunk and tokenizer. Errors: UsageError, one line.
    """
    check_model(model, pretrained)
    config, folder = _find_config(model)
    refuse_coca(model, config["model_cfg"])
    tag = _known_tag(model, pretrained)
    if pretrained and not tag and not Path(pretrained).is_file():
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(model)) or "none for this model"
        raise UsageError(f"--pretrained {one_line(pretrained)}: neither a file nor a tag of {model}; tags: {tags}")
    text_cfg = config["model_cfg"]["text_cfg"]
    if text_trunk is not None:
        if "hf_model_name" not in text_cfg:
            raise UsageError(f"--text-trunk {one_line(text_trunk)}: {model} has no Hugging Face text tower")
        text_cfg["hf_model_name"] = text_cfg["hf_tokenizer_name"] = str(Path(text_trunk).resolve())
    elif folder is not None and text_cfg.get("hf_model_name") == ".":
        text_cfg["hf_model_name"] = str(folder.resolve())  # an mmclip export carries its text config along
    complete = pretrained is not None or folder is not None  # every weight comes from a checkpoint
    with tempfile.TemporaryDirectory() as scratch, _quiet():
        # One road for all kinds: a local-dir that holds just the config; weights follow below.
        (Path(scratch) / "open_clip_config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            clip = open_clip.create_model(
                f"local-dir:{scratch}",
                pretrained_image=pretrained_image and not complete and image_trunk is None,
                pretrained_text=pretrained_text and not complete,
                force_image_size=force_image_size,
                force_context_length=force_context_length,
            )
        except WEIGHT_ERRORS as error:
            raise UsageError(f"--model {one_line(model)}: open_clip cannot build it: {one_line(error)}") from None
    if force_context_length is not None:
        text_cfg["context_length"] = force_context_length
    if force_image_size is not None:
        config["model_cfg"]["vision_cfg"]["image_size"] = force_image_size
    clip.float()  # many trunks are stored as float16
    loaded_scale = None
    checkpoint = _checkpoint(model, tag, pretrained, folder)
    if checkpoint is not None:
        _load_clip(clip, checkpoint)
        loaded_scale = float(clip.logit_scale.detach().exp().mean())
    if image_trunk is not None:
        _load_image_trunk(clip, Path(image_trunk))
    return Model(
        Towers(clip, config["model_cfg"]),
        dict(clip.visual.preprocess_cfg),
        _tokenizer(model, config["model_cfg"]["text_cfg"], folder),
        loaded_scale,
        _facts(folder),
    )


def _find_config(model: str) -> tuple[dict[str, Any], Path | None]:
    """({"model_cfg", "preprocess_cfg"}, folder of a local-dir or None)."""
    if model.startswith("local-dir:"):
        folder = Path(model.removeprefix("local-dir:"))
        config = json.loads((folder / "open_clip_config.json").read_text(encoding="utf-8"))
        if "model_cfg" not in config:
            raise UsageError(f"--model {one_line(model)}: open_clip_config.json has no model_cfg")
        return config, folder
    if model.endswith(".json"):
        config = json.loads(find_model_config(model).read_text(encoding="utf-8"))
        return (config if "model_cfg" in config else {"model_cfg": config, "preprocess_cfg": {}}), None
    model_cfg = open_clip.get_model_config(model.replace("/", "-"))
    if model_cfg is None:
        raise UsageError(
            f"--model {one_line(model)}: unknown to open_clip{nearest(model, open_clip.list_models())} "
            "(or a model config JSON, or local-dir:FOLDER)"
        )
    return {"model_cfg": model_cfg, "preprocess_cfg": {}}, None


def _known_tag(model: str, pretrained: str | None) -> dict[str, Any]:
    """open_clip's entry for a tag, {} where ``pretrained`` is no tag of the model."""
    return open_clip.get_pretrained_cfg(model, pretrained) if pretrained else {}


def _checkpoint(model: str, tag: dict[str, Any], pretrained: str | None, folder: Path | None) -> Path | None:
    if tag:
        try:
            with _quiet():
                return Path(open_clip.download_pretrained(tag))
        except Exception as error:  # whatever the hub client raises: no network, no access, no such revision
            raise UsageError(
                f"--pretrained {one_line(pretrained)}: its weights could not be fetched for {model}: {one_line(error)}"
            ) from None
    if pretrained:
        return Path(pretrained)
    if folder is not None:
        for name in (
            "open_clip_model.safetensors",
            "open_clip_pytorch_model.safetensors",
            "open_clip_pytorch_model.bin",
        ):
            if (folder / name).is_file():
                return folder / name
        raise UsageError(f"--model local-dir:{folder}: no open_clip_model.safetensors in it")
    return None


def _load_clip(clip: torch.nn.Module, path: Path) -> None:
    try:
        with _quiet():
            open_clip.load_checkpoint(clip, str(path), strict=True, weights_only=True, device="cpu")
    except Exception as error:  # pickle, safetensors and shape errors of every kind mean the same to the user
        raise UsageError(f"{path}: not a checkpoint of this model: {one_line(error, 240)}") from None


def _load_image_trunk(clip: torch.nn.Module, path: Path) -> None:
    """timm weights into the image trunk: every tensor of the trunk must be there; a classifier may be left over."""
    trunk = getattr(clip.visual, "trunk", None)
    if trunk is None:
        raise UsageError(f"--image-trunk {path}: this model's image tower is not a timm model")
    try:
        if path.suffix == ".safetensors":
            state = load_file(str(path))
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
            state = state.get("state_dict", state)
        missing, unexpected = trunk.load_state_dict(state, strict=False)
    except Exception as error:  # a file of any kind may stand there
        raise UsageError(f"--image-trunk {path}: not loadable: {one_line(error, 240)}") from None
    unexpected = [k for k in unexpected if not k.startswith(("classifier.", "fc.", "head.", "head_dist."))]
    if missing or unexpected:
        raise UsageError(
            f"--image-trunk {path}: does not fit {type(trunk).__name__}: {len(missing)} tensors missing "
            f"{missing[:2]}, {len(unexpected)} left over {unexpected[:2]}"
        )


def _tokenizer(model: str, text_cfg: dict[str, Any], folder: Path | None) -> Any:
    context_length = text_cfg.get("context_length", 77)
    name = text_cfg.get("hf_tokenizer_name")
    try:
        if not name or (folder is None and not model.endswith(".json") and not Path(name).is_dir()):
            if folder is None and not model.endswith(".json"):
                return open_clip.get_tokenizer(model, context_length=context_length)
            return open_clip.SimpleTokenizer(context_length=context_length, **text_cfg.get("tokenizer_kwargs", {}))
        source = str(folder) if folder is not None else name  # open_clip's rule: a local-dir holds its tokenizer
        return open_clip.tokenizer.HFTokenizer(
            source,
            context_length=context_length,
            tokenizer_mode=text_cfg.get("tokenizer_mode"),
            **text_cfg.get("tokenizer_kwargs", {}),
        )
    except WEIGHT_ERRORS as error:
        raise UsageError(f"the tokenizer {one_line(name or model)} cannot be loaded: {one_line(error)}") from None


def _facts(folder: Path | None) -> dict[str, Any]:
    if folder is None or not (folder / "mmclip.json").is_file():
        return {}
    facts = json.loads((folder / "mmclip.json").read_text(encoding="utf-8"))
    return facts if isinstance(facts, dict) else {}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """open_clip logs each step of building, and warns of "no weights" where weights are loaded afterwards."""
    from transformers.utils import logging as hf_logging  # slow to import, and only builders need it

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(before)
        hf_logging.enable_progress_bar()
