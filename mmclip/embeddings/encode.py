"""Encode once: images and captions -> raw embeddings (or a trunk's outputs), in row order. No scoring here."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
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
class EncodeOptions:
    """How to run an encoder: device, autocast, batch size, reading processes, and whether to show a progress bar."""

    device: torch.device
    precision: str = "fp32"
    batch_size: int = 64
    workers: int = 0
    progress: bool = True

    def run(self, encode: Encode, batch: Tensor) -> Tensor:
        """A batch through an encoder: [B, W] float32 on the CPU."""
        autocast = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision != "fp32")
        with torch.no_grad(), autocast:
            return encode(batch.to(self.device, non_blocking=True)).float().cpu()

    @contextlib.contextmanager
    def bar(self, label: str, total: int, n: int) -> Iterator[Callable[[int], None]]:
        """A progress bar of ``total`` steps, without a terminal a line in the end; yields a function to advance it."""
        with progress_bar() as bar:
            bar.disable = bar.disable or not self.progress
            task = bar.add_task(label, total=total, note="")
            yield lambda steps: bar.advance(task, steps)
        if self.progress and not sys.stderr.isatty():
            print(f"{label}: {n} done", file=sys.stderr, flush=True)


def encode_images(
    encode: Encode,
    data: ImageTextData,
    transform: Callable[[Any], Tensor],
    options: EncodeOptions,
    rows: range | None = None,
    label: str = "images",
) -> tuple[Tensor, dict[int, str]]:
    """Encode all images of ``data``, or those of ``rows``.

    Returns:
        [N, W] float32 on the CPU, and {row: reason} of images that cannot be read, whose rows are NaN.

    Raises:
        UserError: Where none can be read.
    """
    rows = range(len(data)) if rows is None else rows
    out: Tensor | None = None
    bad: dict[int, str] = {}
    with options.bar(label, len(rows), len(rows)) as advance:
        for batch_rows, images, failed in iterate_images(data, transform, options.batch_size, options.workers, rows):
            bad |= {row: sample.why for row, sample in failed}
            if images is not None:
                features = options.run(encode, images)
                if out is None:
                    out = torch.full((len(rows), features.shape[1]), torch.nan)
                out[batch_rows - rows.start] = features
            advance(len(batch_rows) + len(failed))
    if out is None:
        first = next((named(data.keys[row], why, 80, 300) for row, why in bad.items()), "the split is empty")
        raise UserError(f"{printable(data.path)}: none of {len(rows)} images can be read; first: {first}")
    return out, bad


def encode_texts(
    encode: Encode,
    captions: Sequence[str],
    tokenize: Callable[[list[str]], Tensor],
    options: EncodeOptions,
    label: str = "captions",
) -> Tensor:
    """Encode captions: [M, W] float32 on the CPU.

    Equal captions are encoded once, and captions of similar length together, the longest first: a batch is as wide as
    its longest caption (mmclip.models.towers.shorten_tokens).
    """
    if not captions:
        raise UserError("there are no captions to encode")
    different = sorted(set(captions), key=lambda c: (-len(c), c))
    parts: list[Tensor] = []
    with options.bar(label, len(different), len(captions)) as advance:
        for tokens in iterate_texts(different, tokenize, options.batch_size):
            parts.append(options.run(encode, tokens))
            advance(len(tokens))
    place = {caption: row for row, caption in enumerate(different)}
    return torch.cat(parts)[[place[caption] for caption in captions]]


def image_encoder(model: ClipModel) -> Encode:
    """Raw image features of a model, from images."""
    return lambda images: model.towers(image=model.pixels(images))[0]


def text_encoder(model: ClipModel) -> Encode:
    """Raw text features of a model, from token ids."""
    return lambda tokens: model.towers(text=tokens)[1]
