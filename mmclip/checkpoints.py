"""What a run leaves on disk: resumable checkpoints and the ``model/`` export. Nothing read here can run code."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mmclip.build import Model
from mmclip.errors import UsageError, one_line

LATEST = "latest"  # a text file that names the newest checkpoint


def write_text_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, finds the old text or the new one and nothing between."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int = 3) -> Path:
    """Write ``step_NNNNNNNN.pt`` atomically, point ``latest`` at it, and drop all but the newest ``keep``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:08d}.pt"
    partial = folder / f".{path.name}.partial"
    with open(partial, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    write_text_atomically(folder / LATEST, path.name + "\n")
    for old in sorted(folder.glob("step_*.pt"))[:-keep]:
        old.unlink()
    return path


def find_checkpoint(resume: str, folder: Path) -> Path:
    """The file that ``--resume`` means: 'latest' follows the pointer in ``folder``, else a path."""
    if resume != LATEST:
        path = Path(resume)
        if not path.is_file():
            raise UsageError(f"--resume {one_line(resume)}: no such file (a checkpoint's path, or 'latest')")
        return path
    pointer = folder / LATEST
    if not pointer.is_file():
        raise UsageError(f"--resume latest: {folder} holds no checkpoint")
    return folder / Path(pointer.read_text(encoding="utf-8").strip()).name


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Tensors and plain values only: a pickle that would run code is refused. Errors: UsageError naming the file."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and file errors of every kind mean the same to the user
        raise UsageError(f"{path}: not a checkpoint that can be read safely: {one_line(error, 200)}") from None
    if not isinstance(state, dict) or state.get("format") != "mmclip-checkpoint-1":
        raise UsageError(f"{path}: not an mmclip training checkpoint (model weights go to --pretrained)")
    return state


def export_model(folder: Path, model: Model, log_alpha: float, facts: dict[str, Any]) -> None:
    """Write the trained model as a folder that open_clip opens as ``local-dir:FOLDER`` and mmclip by its name.

    open_clip_config.json and open_clip_model.safetensors hold a plain CLIP (``logit_scale`` = ``log_alpha``);
    mmclip.json holds what plain CLIP has no place for: loss, normalization, exponents, alpha of each direction. A
    Hugging Face text tower's config and tokenizer are put beside them, and ``hf_model_name`` is "." there: mmclip
    resolves it to the folder; stock open_clip does so when started inside the folder.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    towers = model.towers
    clip: Any = towers.clip
    with torch.no_grad():
        clip.logit_scale.fill_(log_alpha)
    model_cfg = json.loads(json.dumps(towers.model_cfg))
    if "hf_model_name" in model_cfg["text_cfg"]:
        model_cfg["text_cfg"] |= {"hf_model_name": ".", "hf_model_pretrained": False}
        clip.text.config.save_pretrained(partial)
    if "hf_tokenizer_name" in model_cfg["text_cfg"]:
        model_cfg["text_cfg"]["hf_tokenizer_name"] = "."
        model.tokenize.save_pretrained(str(partial))
    config = {"model_cfg": model_cfg, "preprocess_cfg": model.preprocess_cfg}
    (partial / "open_clip_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    weights: dict[str, Tensor] = {k: v.detach().cpu().contiguous() for k, v in clip.state_dict().items()}
    save_file(weights, str(partial / "open_clip_model.safetensors"), metadata={"format": "pt"})
    (partial / "mmclip.json").write_text(json.dumps(facts, indent=2, allow_nan=False), encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(partial, folder)
