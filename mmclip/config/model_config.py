"""Model names, open_clip model configs and mmclip.json, checked before anything is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mmclip.errors import UserError, parse_json, printable, reason

_HERE = Path(__file__).resolve().parent.parent
CONFIGS = _HERE / "configs" if (_HERE / "configs").is_dir() else _HERE.parent / "configs"  # installed, or a checkout
WEIGHT_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")
WEIGHT_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors", "open_clip_pytorch_model.bin")
MAX_JSON_BYTES = 1_000_000  # a model config has a kilobyte
# The largest value of each number that sizes a tower, far above any CLIP's: more is a slip or an attack.
_LIMITS = {
    65_536: "embed_dim width head_width",
    4_096: "image_size patch_size heads attn_pooler_heads",
    16_384: "context_length attn_pooler_queries",
    1_000: "layers",
    10_000_000: "vocab_size",
    100: "mlp_ratio",
}
MAX_SIZES = {name: limit for limit, names in _LIMITS.items() for name in names.split()}
_TEXTS = ("loss", "norm", "positives")
_SHARES = ("gamma_q", "gamma_d", "i2t_weight", "i2t_weight_end")
MAX_PATCHES = 16_384  # attention costs their square


def check_model(model: str, pretrained: str | None) -> None:
    """Check a --model and --pretrained without loading anything; names and tags of open_clip are checked when built.

    Raises:
        UserError: The model config is missing or damaged, the model is a CoCa, the checkpoint file does not exist.
    """
    config = read_model_config(model)
    refuse_coca(model, config["model_cfg"] if config else {})
    if pretrained is not None and names_a_file(pretrained) and not Path(pretrained).is_file():
        raise UserError(f"--pretrained {printable(pretrained)}: no such file")


def names_a_file(pretrained: str) -> bool:
    """Whether a --pretrained is a checkpoint file rather than one of open_clip's tags."""
    return "/" in pretrained or Path(pretrained).suffix in WEIGHT_SUFFIXES


def refuse_coca(model: str, config: dict[str, Any]) -> None:
    """Refuse CoCa models, whose caption decoder would stay untrained beside a contrastive loss."""
    if "multimodal_cfg" in config or model.lower().startswith("coca"):
        raise UserError(f"--model {printable(model)}: CoCa models are not supported (mmclip trains the two contrastive "
                        "towers, never a caption decoder); take a CLIP or SigLIP model")  # fmt: skip


def read_model_config(model: str) -> dict[str, Any] | None:
    """Read the config of a ``local-dir:FOLDER`` or a model config JSON.

    Returns:
        {"model_cfg", "preprocess_cfg"}, or None for any other name.

    Raises:
        UserError: The file does not exist, is no model config, or has sizes that no model has.
    """
    if model.startswith("local-dir:"):
        path = Path(model.removeprefix("local-dir:")) / "open_clip_config.json"
        if not path.is_file():
            raise UserError(f"--model {printable(model)}: {path} does not exist")
    elif model.startswith("hf-hub:"):
        raise UserError(f"--model {printable(model)}: download the repository and name its folder, local-dir:FOLDER")
    elif model.endswith(".json"):
        path = find_model_config(model)
    else:
        return None
    loaded = read_json(path)
    if "model_cfg" not in loaded and model.endswith(".json"):
        loaded = {"model_cfg": loaded}  # a bare model config, as open_clip registers them
    config = {"preprocess_cfg": {}, **loaded}
    _check_objects(path, config, ("model_cfg", "preprocess_cfg"))
    _check_objects(path, config["model_cfg"], ("vision_cfg", "text_cfg"))
    for side, names in {"vision_cfg": ["timm_model_name"], "text_cfg": ["hf_model_name", "hf_tokenizer_name"]}.items():
        for name in names:
            if not isinstance(value := config["model_cfg"][side].get(name), str | None):
                raise UserError(f"{path}: {name} is {shown(value)}, not a name")
    check_sizes(str(path), config["model_cfg"])
    return config


def _check_objects(path: Path, config: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if not isinstance(config.get(name), dict):
            problem = f"is {shown(config[name])}, not an object" if name in config else "is missing"
            raise UserError(f"{path}: not an open_clip model config: {name} {problem}")


def check_sizes(where: str, model_cfg: dict[str, Any]) -> None:
    """Refuse a model of impossible sizes before memory of its size is allocated (UserError)."""
    if "embed_dim" not in model_cfg:
        raise UserError(f"{where}: not an open_clip model config: embed_dim is missing")
    vision, text = model_cfg["vision_cfg"], model_cfg["text_cfg"]
    for part in (model_cfg, vision, text):
        for name in part.keys() & MAX_SIZES.keys():
            listed = part is vision and isinstance(part[name], list)
            if listed and name != "layers" and (name != "image_size" or len(part[name]) != 2):
                raise UserError(f"{where}: {name} is a list: expected a number, or [height, width] of an image")
            kind, types = (
                ("number above 0, at most", int | float) if name == "mlp_ratio" else ("whole number from 1 to", int)
            )
            for value in part[name] if listed else [part[name]]:
                fits = isinstance(value, types) and not isinstance(value, bool) and 0 < value <= MAX_SIZES[name]
                if value is not None and not fits:  # null: not said; open_clip's ResNets have no patch_size
                    raise UserError(f"{where}: {name} is {shown(value)}: expected a {kind} {MAX_SIZES[name]:,}")
    patches, weights = _patches_and_weights(vision, text)
    if patches > MAX_PATCHES:
        raise UserError(f"{where}: images of {patches:,} patches: expected at most {MAX_PATCHES:,}")
    gigabytes = 4 * weights / 1e9
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    if gigabytes > memory:
        raise UserError(f"{where}: its weights would take {gigabytes:,.0f} GB at least; there are {memory:,.0f} GB")


def _patches_and_weights(vision: dict[str, Any], text: dict[str, Any]) -> tuple[int, float]:
    """(patches of an image, lower bound of the weights); 0 of towers of timm or Hugging Face."""

    def size(tower: dict[str, Any], name: str, default: Any) -> Any:
        return default if tower.get(name) is None else tower[name]

    patches, weights = 0, 0.0
    for tower, width in ((vision, 768), (text, 512)):
        if tower.get("timm_model_name" if tower is vision else "hf_model_name"):
            continue
        width, layers = size(tower, "width", width), size(tower, "layers", 12)
        depth = sum(layers) if isinstance(layers, list) else layers
        weights += depth * width**2 * (4 + 2 * size(tower, "mlp_ratio", 4.0))
        if tower is text:
            context = size(text, "context_length", 77)
            weights += width * size(text, "vocab_size", 49_408) + context**2  # the causal mask
        elif not isinstance(layers, list):  # a ResNet has no patches
            side, patch = size(vision, "image_size", 224), size(vision, "patch_size", 16)
            height, length = side if isinstance(side, list) else (side, side)
            patches = (height // patch) * (length // patch)
            weights += width * (patches + 3 * patch**2)
    return patches, weights


def find_model_config(model: str) -> Path:
    """A model config JSON: a path, or the name of one in configs/models."""
    for candidate in (Path(model), CONFIGS / "models" / model):
        if candidate.is_file():
            return candidate
    shipped = ", ".join(sorted(p.name for p in (CONFIGS / "models").glob("*.json")))
    raise UserError(f"--model {printable(model)}: no such file; shipped model configs: {shipped}")


def export_folder(run: str) -> Path:
    """The model folder of --init-from, a finished run or its model folder. Errors: UserError."""
    for folder in (Path(run) / "model", Path(run)):
        if (folder / "open_clip_config.json").is_file():
            return folder
    raise UserError(f"--init-from {printable(run)}: no model there: the folder of a finished run, or its model folder, "
                    "is expected (one with open_clip_config.json)")  # fmt: skip


def weights_of(folder: Path) -> Path | None:
    """The weights of an exported model, None where there are none."""
    return next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)


def read_metadata(folder: Path) -> dict[str, Any]:
    """mmclip.json of an exported model, {} for a folder without it. Errors: UserError."""
    path = folder / "mmclip.json"
    return check_metadata(read_json(path), str(path)) if path.is_file() else {}


def check_metadata(metadata: dict[str, Any], where: str) -> dict[str, Any]:
    """Return ``metadata`` if its values are of the right kind. Errors: UserError with ``where``."""
    for name, value in metadata.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        expected = None
        if name in _SHARES:
            expected = None if number and 0 <= value <= 1 else "a number from 0 to 1"
        elif "_scale" in name:
            expected = None if value is None or (number and value > 0) else "a number above 0"
        elif name in _TEXTS and not isinstance(value, str):
            expected = "a text"
        if expected:
            raise UserError(f"{where}: {printable(name, 60)} is {shown(value)}: expected {expected}")
    return metadata


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object with finite numbers (UserError naming the file)."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise ValueError(f"more than {MAX_JSON_BYTES:,} bytes")
        loaded = parse_json(content)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON: {reason(error)}") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: a JSON object is expected, got {shown(loaded)}")
    return loaded


def shown(value: Any) -> str:
    """A value of a JSON file for a message; nested values are named, not written out."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return printable(json.dumps(value, ensure_ascii=False), 60)
