"""Pictures between reader and tower: bytes, which become numbers on the device.

open_clip's transforms end in ToTensor and Normalize. A reader that leaves both out hands over a quarter of the bytes,
and the device makes of them what the two would have made, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import transforms

Transform = Callable[[Any], Tensor]


def _splits(transform: Transform) -> bool:
    """Whether a transform ends in ToTensor and Normalize. timm's random erasing comes after both: it does not."""
    steps = transform.transforms if isinstance(transform, transforms.Compose) else []
    return (
        len(steps) >= 2 and isinstance(steps[-2], transforms.ToTensor) and isinstance(steps[-1], transforms.Normalize)
    )


def as_bytes(transform: Transform) -> Transform:
    """``transform`` up to its ToTensor and Normalize, picture -> [3, H, W] uint8; itself where it does not end so."""
    if not _splits(transform):
        return transform
    steps = transform.transforms  # type: ignore[attr-defined]
    return transforms.Compose([*steps[:-2], transforms.PILToTensor()])


def least_side(transform: Transform) -> int | None:
    """The shorter side that a picture must have so that ``transform`` never enlarges what it cuts out: that of the
    smallest random crop, or of the plain resize. None where that cannot be told."""
    first = transform.transforms[0] if isinstance(transform, transforms.Compose) else None
    if isinstance(first, transforms.RandomResizedCrop):
        narrowest = min(first.ratio[0], 1 / first.ratio[1])
        return math.ceil(max(first.size) / math.sqrt(min(first.scale) * narrowest))
    if isinstance(first, transforms.Resize):
        return max(first.size) if isinstance(first.size, Sequence) else int(first.size)
    return None


class Pixels:
    """What an image tower takes, of a batch that is on its device.

    uint8 [B, 3, H, W] becomes (x / 255 - mean) / std in float32, with ``transform``'s mean and std; floats stay. A
    convolutional trunk gets the batch channels-last, which changes results by rounding alone and is the layout
    that convolution kernels are written for. Its weights stay as they are, and so do checkpoints.
    """

    def __init__(self, transform: Transform, visual: nn.Module) -> None:
        self.normalize: transforms.Normalize | None = None
        if _splits(transform):
            self.normalize = transform.transforms[-1]  # type: ignore[attr-defined]
        convolutions = sum(isinstance(module, nn.Conv2d) for module in visual.modules())
        self.layout = torch.channels_last if convolutions > 1 else torch.contiguous_format  # a ViT has one: its patches
        self.constants: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8:
            return images.contiguous(memory_format=self.layout)
        if images.device not in self.constants:
            self.constants[images.device] = self._constants(images.device)
        full, mean, std = self.constants[images.device]
        return images.to(torch.float32, memory_format=self.layout).div_(full).sub_(mean).div_(std)

    def _constants(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """255, mean and std. All are tensors of the device: by a plain number CUDA divides inexactly."""
        if self.normalize is None:
            raise ValueError("bytes for a model whose transform does not end in ToTensor and Normalize")
        mean, std = (
            torch.as_tensor(x, dtype=torch.float32, device=device).view(-1, 1, 1)
            for x in (self.normalize.mean, self.normalize.std)
        )
        return torch.full((1, 1, 1), 255.0, device=device), mean, std
