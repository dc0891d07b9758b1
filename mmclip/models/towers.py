"""An open_clip model as two towers of raw features: no normalization, no scale, nothing of the loss.

open_clip builds every model. What is added is (1) ``forward`` that returns raw features, so that gradients flow through
DDP and torch.compile, and (2) the split of a tower into trunk and projection head, so that a locked trunk can run once
and its outputs be kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mmclip.errors import UserError
from mmclip.models import short_texts


class Towers(nn.Module):
    """Both towers of an open_clip CLIP or CustomTextCLIP.

    model_cfg is open_clip's model config (embed_dim, vision_cfg, text_cfg), kept for the export.
    """

    clip: Any  # open_clip's CLIP or CustomTextCLIP, whose parts differ too much for one type

    def __init__(self, clip: nn.Module, model_cfg: dict[str, Any]) -> None:
        super().__init__()
        self.clip = clip
        self.model_cfg = model_cfg
        self.locked = {"image": False, "text": False}
        # The loss owns scale and, in a softmax, a constant bias (SigLIP's) cancels: neither trains here, and an unused
        # parameter that asks for a gradient would break DDP.
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
        """Raw features [B, D] of images [B, 3, H, W] and token ids [B, L], which may be ``shortened``; None for a side
        that is not given.

        ``*_from_trunk``: the input is that trunk's output (``trunk``), so only the head runs.
        """
        out: list[Tensor | None] = []
        for side, inputs, from_trunk in (("image", image, image_from_trunk), ("text", text, text_from_trunk)):
            if inputs is None:
                out.append(None)
            elif from_trunk or self.locked[side]:
                out.append(self.head(side, inputs if from_trunk else self.trunk(side, inputs)))
            else:
                out.append(self._encode(side, inputs))
        return out[0], out[1]

    def shortened(self, tokens: Tensor) -> Tensor:
        """Token ids [B, L] on the CPU without the columns that change no feature."""
        on_cpu = (
            self.clip.logit_scale.device.type == "cpu"
        )  # where every position costs, and no shape more than another
        return short_texts.shortened(self.text_module, tokens, 1 if on_cpu else short_texts.MULTIPLE)

    def _encode(self, side: str, inputs: Tensor) -> Tensor:
        if side == "text" and short_texts.is_short(self.text_module, inputs):
            return short_texts.encode_short(self.text_module, inputs)
        encode = self.clip.encode_image if side == "image" else self.clip.encode_text
        features: Tensor = encode(inputs, normalize=False)
        return features

    # --- trunk and head -------------------------------------------------------------------------------------------

    def _head_owner(self, side: str) -> tuple[Any, str]:
        """The module that owns a side's projection head and the head's attribute name.

        Errors: UserError for a tower whose projection cannot be told from its trunk.
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
        """Names (in ``named_parameters`` of this module) of a side's output projection, which carries the magnitude;
        empty where the tower has none of its own."""
        try:
            owner, name = self._head_owner(side)
        except UserError:
            return set()
        prefix = next(n for n, m in self.named_modules() if m is owner) + f".{name}"
        return {n for n, _ in self.named_parameters() if n == prefix or n.startswith(prefix + ".")}

    def lock(self, side: str) -> None:
        """Freeze a side's trunk for good: no gradient, and evaluation mode (no dropout, no batch statistics).

        Unlike open_clip, which freezes a native tower whole, the projection head always stays trainable: it is what
        carries the magnitude.
        """
        self._head_owner(side)
        head = self.head_parameter_names(side)
        prefix = "clip.visual." if side == "image" else ""
        for name, parameter in self.named_parameters():
            belongs = name.startswith(prefix) if side == "image" else not name.startswith("clip.visual.")
            if belongs and name not in head:
                parameter.requires_grad_(False)
        self.locked[side] = True
        self.train(self.training)

    def locked_names(self) -> set[str]:
        """State-dict names of locked trunks: they never change, so a checkpoint need not hold them."""
        names = set()
        for side, locked in self.locked.items():
            if locked:
                head = self.head_parameter_names(side)
                names |= {
                    n for n in self.state_dict() if n not in head and n.startswith("clip.visual.") == (side == "image")
                }
        return names - {"clip.logit_scale", "clip.logit_bias"}

    def train(self, mode: bool = True) -> Towers:
        super().train(mode)
        for side, locked in self.locked.items():
            if locked:
                owner, name = self._head_owner(side)
                for child_name, child in owner.named_children():
                    if child_name != name and not (side == "text" and child_name == "visual"):
                        child.eval()
        return self

    @contextlib.contextmanager
    def _without_projection(self, side: str) -> Iterator[None]:
        """A native open_clip tower returns its pooled trunk output while its projection is None."""
        owner, name = self._head_owner(side)
        projection = getattr(owner, name)
        setattr(owner, name, None)
        try:
            yield
        finally:
            setattr(owner, name, projection)

    @torch.no_grad()
    def trunk(self, side: str, inputs: Tensor) -> Tensor:
        """A trunk's outputs [B, W], before the projection head, without gradient: images or token ids in."""
        owner, name = self._head_owner(side)
        if name == "head":  # timm
            return owner.trunk(inputs)
        if hasattr(owner, "pooler"):  # Hugging Face
            mask = (inputs != owner.config.pad_token_id).long()
            # Columns that are padding in every row change nothing but cost as much as words: most captions are short.
            used = int(mask.any(dim=0).nonzero().max()) + 1 if mask.any() else 1
            inputs, mask = inputs[:, :used], mask[:, :used]
            return owner.pooler(owner.transformer(input_ids=inputs, attention_mask=mask), mask)
        with self._without_projection(side):
            return self._encode(side, inputs)

    def head(self, side: str, trunk_output: Tensor) -> Tensor:
        """A side's projection head on its trunk's outputs: [B, W] -> [B, D]."""
        owner, name = self._head_owner(side)
        projection = getattr(owner, name)
        if isinstance(projection, nn.Parameter):
            return trunk_output @ projection
        features: Tensor = projection(trunk_output)
        return features

    def trunk_fingerprint(self, side: str) -> str:
        """Digest of what a trunk computes: its config and the bytes of its weights, the head left out."""
        cfg = self.model_cfg["vision_cfg" if side == "image" else "text_cfg"]
        cfg = {k: v for k, v in cfg.items() if not k.startswith("hf_") or k == "hf_pooler_type"}  # paths do not compute
        digest = hashlib.sha256(json.dumps(cfg, sort_keys=True, default=str).encode())
        head = self.head_parameter_names(side)
        for name, tensor in sorted(self.state_dict().items()):
            on_side = name.startswith("clip.visual.") == (side == "image")
            if on_side and name not in head and "logit_" not in name:
                digest.update(name.encode())
                digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]
