"""Exported models: folders that stock open_clip and stock sentence-transformers open, with mmclip.json beside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mmclip.io import write_atomically
from mmclip.models.factory import ClipModel
from mmclip.models.metadata import METADATA_FILE
from mmclip.models.text_encoder import TextEncoder, quiet


def export_clip(folder: Path, model: ClipModel, log_alpha: float, metadata: dict[str, Any]) -> None:
    """Write a trained CLIP as a folder that open_clip opens as ``local-dir:FOLDER``, with mmclip.json beside.

    Its ``logit_scale`` is ``log_alpha``. The config and tokenizer of a Hugging Face text tower are written with "." as
    ``hf_model_name``: mmclip resolves it to the folder, stock open_clip does so when it is started inside the folder.
    """
    clip: Any = model.towers.clip
    with torch.no_grad():
        clip.logit_scale.fill_(log_alpha)
    weights: dict[str, Tensor] = {k: v.detach().cpu().contiguous() for k, v in clip.state_dict().items()}

    def write(partial: Path) -> None:
        partial.mkdir()
        model_cfg = json.loads(json.dumps(model.towers.model_cfg))
        if "hf_model_name" in model_cfg["text_cfg"]:
            model_cfg["text_cfg"] |= {"hf_model_name": ".", "hf_model_pretrained": False}
            clip.text.config.save_pretrained(partial)
        if "hf_tokenizer_name" in model_cfg["text_cfg"]:
            model_cfg["text_cfg"]["hf_tokenizer_name"] = "."
            model.tokenize.save_pretrained(str(partial))
        config = {"model_cfg": model_cfg, "preprocess_cfg": model.preprocess_cfg}
        (partial / "open_clip_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        save_file(weights, str(partial / "open_clip_model.safetensors"), metadata={"format": "pt"})
        shutil.copymode(partial / "open_clip_config.json", partial / "open_clip_model.safetensors")  # it is made 0600
        (partial / METADATA_FILE).write_text(json.dumps(metadata, indent=2, allow_nan=False), encoding="utf-8")

    folder.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(folder, write, "free some space and repeat the end of the run with --resume latest")


def export_text(folder: Path, model: TextEncoder, metadata: dict[str, Any]) -> None:
    """Write a text encoder with its prompts as a sentence-transformers folder with mmclip.json in it.

    ``similarity_fn_name`` is cosine for cosine and dnorm, dot for dot and qnorm, and for a learned gamma_d the nearer.
    """
    model.encoder.similarity_fn_name = "cosine" if float(metadata["gamma_d"]) > 0.5 else "dot"
    model.encoder.prompts.update(model.prompts)

    def write(partial: Path) -> None:
        with quiet():
            model.encoder.save_pretrained(str(partial), create_model_card=False)
        (partial / METADATA_FILE).write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")

    write_atomically(folder, write)
