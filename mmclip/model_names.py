"""What can be said of a model's name before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmclip.errors import UsageError, one_line

_HERE = Path(__file__).resolve().parent
CONFIGS = _HERE / "configs" if (_HERE / "configs").is_dir() else _HERE.parent / "configs"  # installed, or a checkout
WEIGHT_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")


def check_model(model: str, pretrained: str | None) -> None:
    """What can be said of a model's name without loading anything. Errors: UsageError.

    Registered names and tags are open_clip's to check (mmclip.towers does, before any weight is read).
    """
    config: dict[str, Any] = {}
    if model.startswith("local-dir:"):
        path = Path(model.removeprefix("local-dir:")) / "open_clip_config.json"
        if not path.is_file():
            raise UsageError(f"--model {one_line(model)}: {path} does not exist")
        config = _read_json(path).get("model_cfg", {})
    elif model.endswith(".json"):
        path = find_model_config(model)
        config = _read_json(path)
        config = config.get("model_cfg", config)  # a bare model config, or an open_clip_config.json
        missing = [k for k in ("embed_dim", "vision_cfg", "text_cfg") if k not in config]
        if missing:
            raise UsageError(f"--model {one_line(model)}: not an open_clip model config: {', '.join(missing)} missing")
        odd = [k for k in ("vision_cfg", "text_cfg") if not isinstance(config[k], dict)]
        if odd:
            raise UsageError(f"--model {one_line(model)}: {odd[0]} is {one_line(config[odd[0]], 40)}, not an object")
    refuse_coca(model, config)
    is_path = pretrained is not None and ("/" in pretrained or Path(pretrained).suffix in WEIGHT_SUFFIXES)
    if pretrained is not None and is_path and not Path(pretrained).is_file():
        raise UsageError(f"--pretrained {one_line(pretrained)}: no such file")


def refuse_coca(model: str, config: dict[str, Any]) -> None:
    """CoCa's caption decoder would stay untrained beside a contrastive loss alone: say so instead of half-training."""
    if "multimodal_cfg" in config or model.lower().startswith("coca"):
        raise UsageError(
            f"--model {one_line(model)}: CoCa models are not supported (mmclip trains the two contrastive "
            "towers, never a caption decoder); take a CLIP or SigLIP model"
        )


def find_model_config(model: str) -> Path:
    """A model config JSON: a path, or the name of one in configs/models."""
    for candidate in (Path(model), CONFIGS / "models" / model):
        if candidate.is_file():
            return candidate
    shipped = ", ".join(sorted(p.name for p in (CONFIGS / "models").glob("*.json")))
    raise UsageError(f"--model {one_line(model)}: no such file; shipped model configs: {shipped}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not readable as JSON: {one_line(error)}") from None
    if not isinstance(loaded, dict):
        raise UsageError(f"{path}: a JSON object is expected, got {type(loaded).__name__}")
    return loaded
