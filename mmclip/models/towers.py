"""An open_clip model as two towers of raw features, without normalization and without a scale.

Added to open_clip's models: a ``forward`` of raw features (so that gradients flow through DDP and torch.compile), the
split of a tower into trunk and projection head (so that a locked trunk's outputs can be cached), images as bytes, and
texts encoded up to the longest of their batch. The last two change features by rounding alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
from open_clip.transformer import text_global_pool
from torch import Tensor, nn
from torchvision import transforms

from mmclip.errors import UserError

Transform = Callable[[Any], Tensor]
GPU_LENGTH_MULTIPLE = 8  # token lengths on a GPU: few shapes, and attention masks stay aligned


class Towers(nn.Module):
    """Both towers of an open_clip CLIP or CustomTextCLIP; ``model_cfg`` is its config, kept for the export."""

    clip: Any  # CLIP or CustomTextCLIP, whose parts differ too much for one type

    def __init__(self, clip: nn.Module, model_cfg: dict[str, Any]) -> None:
        super().__init__()
        self.clip, self.model_cfg = clip, model_cfg
        self.locked = {"image": False, "text": False}
        # The loss owns the scale, and a constant bias (SigLIP's) cancels in a softmax: neither trains here, and an
        # unused parameter that requires a gradient would break DDP.
        for name in ("logit_scale", "logit_bias"):
            if isinstance(parameter := getattr(clip, name, None), nn.Parameter):
                parameter.requires_grad_(False)

    @property
    def text_module(self) -> Any:
        """The module that holds the text projection: CustomTextCLIP's text tower, or CLIP itself."""
        return getattr(self.clip, "text", None) or self.clip

    def forward(
        self,
        image: Tensor | None = None,
        text: Tensor | None = None,
        image_from_trunk: bool = False,
        text_from_trunk: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Raw features of both sides.

        Args:
            image: Images [B, 3, H, W], or trunk outputs [B, W] with ``image_from_trunk``.
            text: Token ids [B, L], possibly ``shortened``, or trunk outputs [B, W] with ``text_from_trunk``.

        Returns:
            Image and text features [B, D]; None for a side without input.
        """

        def features(side: str, inputs: Tensor | None, from_trunk: bool) -> Tensor | None:
            if inputs is None or not (from_trunk or self.locked[side]):
                return None if inputs is None else self._encode(side, inputs)
            return self.head(side, inputs if from_trunk else self.trunk(side, inputs))

        return features("image", image, image_from_trunk), features("text", text, text_from_trunk)

    def shortened(self, tokens: Tensor) -> Tensor:
        """Token ids [B, L] on the CPU without the columns that change no feature."""
        on_cpu = self.clip.logit_scale.device.type == "cpu"  # there every position costs, and no shape is better
        return shorten_tokens(self.text_module, tokens, 1 if on_cpu else GPU_LENGTH_MULTIPLE)

    def _encode(self, side: str, inputs: Tensor) -> Tensor:
        if side == "text" and _is_short(self.text_module, inputs):
            return _encode_short(self.text_module, inputs)
        encode = self.clip.encode_image if side == "image" else self.clip.encode_text
        features: Tensor = encode(inputs, normalize=False)
        return features

    def _head_owner(self, side: str) -> tuple[Any, str]:
        """The module that owns a side's projection head, and the head's attribute name.

        Raises:
            UserError: The projection of this tower cannot be told from its trunk.
        """
        if side == "image":
            visual = self.clip.visual
            if hasattr(visual, "trunk") and len(list(visual.head.parameters())):
                return visual, "head"
            if isinstance(getattr(visual, "proj", None), nn.Parameter):
                return visual, "proj"
        else:
            module = self.text_module
            if hasattr(module, "pooler") and len(list(module.proj.parameters())):
                return module, "proj"
            if getattr(module, "text_projection", None) is not None:
                return module, "text_projection"
        raise UserError(f"this model's {side} tower has no projection head of its own, so it cannot be locked")

    def head_parameter_names(self, side: str) -> set[str]:
        """Names (as in ``named_parameters``) of a side's output projection; empty where a tower has none."""
        try:
            owner, name = self._head_owner(side)
        except UserError:
            return set()
        prefix = next(n for n, m in self.named_modules() if m is owner) + f".{name}"
        return {n for n, _ in self.named_parameters() if n == prefix or n.startswith(prefix + ".")}

    def lock(self, side: str) -> None:
        """Freeze a side's trunk: no gradient, and evaluation mode (no dropout, no batch statistics).

        Unlike open_clip, which freezes a native tower whole, the projection head stays trainable, because it carries
        the magnitude.
        """
        self._head_owner(side)
        self.locked[side] = True
        locked = self.locked_names()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name not in locked)
        self.train(self.training)

    def _trunk_names(self, side: str) -> set[str]:
        """State-dict names of a side without its projection head."""
        on_side = {n for n in self.state_dict() if n.startswith("clip.visual.") == (side == "image")}
        return on_side - self.head_parameter_names(side) - {"clip.logit_scale", "clip.logit_bias"}

    def locked_names(self) -> set[str]:
        """State-dict names of locked trunks, which never change and are left out of checkpoints."""
        return {name for side, locked in self.locked.items() if locked for name in self._trunk_names(side)}

    def train(self, mode: bool = True) -> Towers:
        super().train(mode)
        for side in (s for s, locked in self.locked.items() if locked):
            owner, name = self._head_owner(side)
            for child_name, child in owner.named_children():
                if child_name != name and not (side == "text" and child_name == "visual"):
                    child.eval()
        return self

    @torch.no_grad()
    def trunk(self, side: str, inputs: Tensor) -> Tensor:
        """Outputs [B, W] of a trunk, before the projection head and without gradient, for images or token ids."""
        owner, name = self._head_owner(side)
        if name == "head":  # timm
            return owner.trunk(inputs)
        if hasattr(owner, "pooler"):  # Hugging Face
            inputs = shorten_tokens(owner, inputs)
            mask = (inputs != owner.config.pad_token_id).long()
            return owner.pooler(owner.transformer(input_ids=inputs, attention_mask=mask), mask)
        projection = getattr(owner, name)
        setattr(owner, name, None)  # a native tower returns its pooled trunk output while it has no projection
        try:
            return self._encode(side, inputs)
        finally:
            setattr(owner, name, projection)

    def head(self, side: str, trunk_output: Tensor) -> Tensor:
        """A side's projection head on trunk outputs: [B, W] -> [B, D]."""
        owner, name = self._head_owner(side)
        return _projected(trunk_output, getattr(owner, name))

    def trunk_fingerprint(self, side: str) -> str:
        """Digest of a trunk's config and weights, without its head."""
        cfg = self.model_cfg["vision_cfg" if side == "image" else "text_cfg"]
        cfg = {k: v for k, v in cfg.items() if not k.startswith("hf_") or k == "hf_pooler_type"}  # paths do not compute
        digest, state = hashlib.sha256(json.dumps(cfg, sort_keys=True, default=str).encode()), self.state_dict()
        for name in sorted(self._trunk_names(side)):
            digest.update(name.encode())
            digest.update(state[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


def shorten_tokens(module: Any, tokens: Tensor, multiple: int = 1) -> Tensor:
    """Token ids [B, L] of a ``text_module`` without the trailing columns that change no feature, [B, l].

    open_clip's towers compute all positions of their context (77 for a caption of 15). Where attention is causal and
    the feature is read at the end token, later positions are computed for nothing; a Hugging Face tower masks padding.
    Elsewhere all columns are needed. l is a multiple of ``multiple``, or L.
    """
    if not len(tokens):
        return tokens
    if hasattr(module, "pooler"):  # Hugging Face
        columns = (tokens != module.config.pad_token_id).any(dim=0).nonzero()
        used = int(columns.max()) + 1 if len(columns) else 1
    elif _reads_end_token(module):
        kind, end = _pooling(module)
        at_end = tokens.eq(end).int().argmax(dim=-1) if kind == "eos" else tokens.argmax(dim=-1)
        used = int(at_end.max()) + 1
    else:
        return tokens
    return tokens[:, : -(-used // multiple) * multiple]


def _is_short(module: Any, tokens: Tensor) -> bool:
    """Whether there are fewer token ids than open_clip's own tower takes; a Hugging Face tower takes any number."""
    return not hasattr(module, "pooler") and _reads_end_token(module) and tokens.shape[1] < len(module.attn_mask)


def _encode_short(module: Any, tokens: Tensor) -> Tensor:
    """Raw features [B, D] of open_clip's own text tower for shortened token ids [B, l]."""
    length, dtype = tokens.shape[1], module.transformer.get_cast_dtype()
    x = module.token_embedding(tokens).to(dtype) + module.positional_embedding[:length].to(dtype)
    x = module.ln_final(module.transformer(x, attn_mask=module.attn_mask[:length, :length]))
    kind, end = _pooling(module)
    pooled: Tensor = text_global_pool(x, tokens, kind, eos_token_id=end)
    projection = module.text_projection
    return pooled if projection is None else _projected(pooled, projection)


def _projected(x: Tensor, projection: Any) -> Tensor:
    return x @ projection if isinstance(projection, Tensor) else projection(x)


def _pooling(module: Any) -> tuple[str, int]:
    """open_clip's pool type and the end token's id: CLIP and TextTransformer name them differently."""
    prefix = "text_" if hasattr(module, "text_pool_type") else ""
    return getattr(module, f"{prefix}pool_type"), getattr(module, f"{prefix}eos_id")


def _reads_end_token(module: Any) -> bool:
    causal = getattr(module, "attn_mask", None) is not None
    plain = getattr(module, "cls_emb", None) is None and not getattr(module, "use_pad_mask", False)
    return causal and plain and not getattr(module, "output_tokens", False) and _pooling(module)[0] in ("argmax", "eos")


def _ends_in_normalize(transform: Transform) -> bool:
    """Whether a transform ends in ToTensor and Normalize, as open_clip's do; timm's random erasing follows both."""
    steps = transform.transforms if isinstance(transform, transforms.Compose) else []
    ends = (transforms.ToTensor, transforms.Normalize)
    return len(steps) >= 2 and all(isinstance(step, kind) for step, kind in zip(steps[-2:], ends, strict=True))


def as_bytes(transform: Transform) -> Transform:
    """``transform`` up to its ToTensor and Normalize, image -> uint8 [3, H, W]: a quarter of the bytes.

    A transform that does not end in these two is returned as it is.
    """
    if not _ends_in_normalize(transform):
        return transform
    steps = transform.transforms  # type: ignore[attr-defined]
    return transforms.Compose([*steps[:-2], transforms.PILToTensor()])


class Pixels:
    """Input of an image tower from a batch on its device.

    uint8 [B, 3, H, W] becomes (x / 255 - mean) / std in float32, bit for bit as the transform's ToTensor and Normalize
    compute it; floats stay. A convolutional trunk gets the batch channels-last, the layout that convolution kernels
    are written for; its weights and checkpoints stay as they are.
    """

    def __init__(self, transform: Transform, visual: nn.Module) -> None:
        stock: Any = transform
        self.normalize = stock.transforms[-1] if _ends_in_normalize(transform) else None
        convolutions = sum(isinstance(module, nn.Conv2d) for module in visual.modules())
        self.layout = torch.channels_last if convolutions > 1 else torch.contiguous_format  # a ViT has one: its patches
        self.constants: dict[torch.device, Tensor] = {}

    def __call__(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8:
            return images.contiguous(memory_format=self.layout)
        if self.normalize is None:
            raise ValueError("bytes for a model whose transform does not end in ToTensor and Normalize")
        if images.device not in self.constants:  # tensors: CUDA divides inexactly by a plain number
            numbers = ([255.0] * 3, self.normalize.mean, self.normalize.std)
            self.constants[images.device] = torch.tensor(numbers, device=images.device).view(3, -1, 1, 1)
        full, mean, std = self.constants[images.device]
        return images.to(torch.float32, memory_format=self.layout).div_(full).sub_(mean).div_(std)
