"""Which of open_clip's architectures a bare checkpoint file fits, told by the shapes of its tensors."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import open_clip
import torch
from safetensors import safe_open

from mmclip.errors import UserError, printable

Shapes = dict[str, tuple[int, ...]]


def architecture_of(path: Path) -> str:
    """The one open_clip model name whose sizes are the checkpoint's. Nothing in the file is run.

    Only open_clip's own transformers can be told: sizes that timm or Hugging Face define stand in no config here.
    Errors: UserError where the file cannot be read, or fits no architecture, or several (they differ in what has no
    weights, as quickgelu and gelu do).
    """
    shapes = _shapes(path)
    fits = sorted(name for name in open_clip.list_models() if _fits(open_clip.get_model_config(name), shapes))
    if len(fits) == 1:
        return fits[0]
    told = f"its sizes fit {', '.join(fits)}" if fits else "its sizes fit none of open_clip's own transformers"
    raise UserError(
        f"--model {printable(path)}: a checkpoint file does not name its architecture, and {told}; name it: --model "
        f"{fits[0] if fits else 'NAME'} --pretrained {printable(path)}"
    )


def _shapes(path: Path) -> Shapes:
    """Shapes of a CLIP checkpoint's tensors, by open_clip's names."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(str(path), "pt") as file:
                found: Shapes = {k: tuple(file.get_slice(k).get_shape()) for k in file.keys()}  # noqa: SIM118
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
            state = state.get("state_dict", state)
            found = {k: tuple(v.shape) for k, v in state.items() if isinstance(v, torch.Tensor)}
    except pickle.UnpicklingError:  # torch's advice would be to run it
        raise UserError(f"--model {printable(path)}: not a file of plain tensors") from None
    except Exception as error:  # a file of any kind may stand there
        raise UserError(
            f"--model {printable(path)}: not a checkpoint that can be read: {printable(error, 240)}"
        ) from None
    found = {k.removeprefix("module."): shape for k, shape in found.items()}
    # CustomTextCLIP keeps its text tower under "text."
    return {k.removeprefix("text."): shape for k, shape in found.items()}


def _fits(config: dict[str, Any], shapes: Shapes) -> bool:
    vision, text = config["vision_cfg"], config["text_cfg"]
    if vision.get("timm_model_name") or text.get("hf_model_name") or isinstance(vision.get("layers"), list):
        return False
    if "multimodal_cfg" in config:
        return False
    width, patch = vision.get("width", 768), vision.get("patch_size", 16)
    sizes = vision.get("image_size", 224)
    height, length = sizes if isinstance(sizes, list) else (sizes, sizes)
    patches = (height // patch) * (length // patch)
    text_width = text.get("width", 512)
    expected = {
        "visual.conv1.weight": (width, 3, patch, patch),
        "token_embedding.weight": (text.get("vocab_size", 49408), text_width),
        "ln_final.weight": (text_width,),
    }
    if any(shapes.get(name) != shape for name, shape in expected.items()):
        return False
    if shapes.get("visual.positional_embedding", (0, 0))[0] not in (patches, patches + 1):  # with a class token
        return False
    if shapes.get("positional_embedding", (0,))[0] != text.get("context_length", 77):
        return False
    projection = shapes.get("text_projection", shapes.get("text_projection.weight", ()))
    if projection and config["embed_dim"] not in projection:
        return False
    depth = {
        "visual.transformer.resblocks.": vision.get("layers", 12),
        "transformer.resblocks.": text.get("layers", 12),
    }
    return all(_blocks(shapes, prefix) == n for prefix, n in depth.items())


def _blocks(shapes: Shapes, prefix: str) -> int:
    return len({k[len(prefix) :].split(".")[0] for k in shapes if k.startswith(prefix)})
