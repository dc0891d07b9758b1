"""Encode once: pictures and captions -> raw vectors (or a trunk's outputs), in row order. No scoring here."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmclip.console import progress_bar
from mmclip.data.image_text import ImageTextData, named
from mmclip.data.loading import iterate_images, iterate_texts
from mmclip.errors import UserError, printable
from mmclip.models.factory import ClipModel

Encode = Callable[[Tensor], Tensor]  # a batch on the device -> [B, W]


@dataclass(frozen=True)
class Runner:
    """How to run an encoder: device, autocast, batch size, reading processes, and whether to show a bar."""

    device: torch.device
    precision: str = "fp32"
    batch_size: int = 64
    workers: int = 0
    progress: bool = True

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision != "fp32")

    def _say(self, text: str) -> None:
        """Where there is no terminal for a bar, a line for each piece of work."""
        if self.progress and not sys.stderr.isatty():
            print(text, file=sys.stderr, flush=True)

    @torch.no_grad()
    def images(
        self,
        encode: Encode,
        data: ImageTextData,
        transform: Callable[[Any], Tensor],
        rows: range | None = None,
        label: str = "images",
    ) -> tuple[Tensor, dict[int, str]]:
        """([N, W] float32 on the CPU, {row: why}) for all images of ``data`` or those of ``rows``.

        An image that cannot be read leaves a row of NaN and its reason.
        """
        rows = range(len(data)) if rows is None else rows
        out: Tensor | None = None
        bad: dict[int, str] = {}
        with progress_bar() as bar:
            bar.disable = bar.disable or not self.progress
            task = bar.add_task(label, total=len(rows), note="")
            for batch_rows, images, failed in iterate_images(data, transform, self.batch_size, self.workers, rows):
                for row, sample in failed:
                    bad[row] = sample.why
                if images is not None:
                    with self.autocast():
                        features = encode(images.to(self.device, non_blocking=True)).float().cpu()
                    if out is None:
                        out = torch.full((len(rows), features.shape[1]), torch.nan)
                    out[batch_rows - rows.start] = features
                bar.advance(task, len(batch_rows) + len(failed))
        self._say(f"{label}: {len(rows)} done")
        if out is None:
            first = next((named(data.keys[row], why, 80, 300) for row, why in bad.items()), "the split is empty")
            raise UserError(f"{printable(data.path)}: none of {len(rows)} images can be read; first: {first}")
        return out, bad

    @torch.no_grad()
    def texts(
        self, encode: Encode, captions: Sequence[str], tokenize: Callable[[list[str]], Tensor], label: str = "captions"
    ) -> Tensor:
        """[M, W] float32 on the CPU, a row a caption.

        Equal captions are encoded once, and captions of like length together, the longest first: what a batch costs is
        its longest one's (mmclip.models.towers).
        """
        different = sorted(set(captions), key=lambda c: (-len(c), c))
        parts: list[Tensor] = []
        with progress_bar() as bar:
            bar.disable = bar.disable or not self.progress
            task = bar.add_task(label, total=len(different), note="")
            for tokens in iterate_texts(different, tokenize, self.batch_size):
                with self.autocast():
                    parts.append(encode(tokens.to(self.device, non_blocking=True)).float().cpu())
                bar.advance(task, len(tokens))
        self._say(f"{label}: {len(captions)} done")
        if not parts:
            raise UserError("there are no captions to encode")
        place = {caption: row for row, caption in enumerate(different)}
        return torch.cat(parts)[[place[caption] for caption in captions]]


def encode_image(model: ClipModel) -> Encode:
    """Raw image features of a model, pictures in."""
    return lambda images: model.towers(image=model.pixels(images))[0]


def encode_text(model: ClipModel) -> Encode:
    """Raw text features of a model, token ids in."""
    return lambda tokens: model.towers(text=tokens)[1]
