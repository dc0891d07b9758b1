"""Reading and decoding pictures, in this process or in others, and token ids, in the order asked for."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mmclip.data.image_text import BadSample, ImageTextData
from mmclip.errors import UserError, printable

T = TypeVar("T")
Transform = Callable[[Any], Tensor]
Tokenize = Callable[[list[str]], Tensor]


class ReaderDied(UserError):
    """A reading process was ended from outside, by the system where memory is short."""


def read_all(loader: DataLoader[T]) -> Iterator[T]:
    """The loader's items. Errors: ReaderDied, from here and from nowhere else.

    torch tells of a dead reader from a signal handler, hence in the middle of whatever the run is doing, a step or the
    writing of a checkpoint. Without that handler the loader finds out by itself, within seconds.
    """
    iterator = iter(loader)
    if loader.num_workers and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield from iterator
    except (RuntimeError, OSError, EOFError) as error:
        # OSError, EOFError: a batch was announced, and its reader was gone with the tensors
        raised_by_a_reader = str(error).startswith("Caught ")
        if raised_by_a_reader or not loader.num_workers:
            raise
        raise ReaderDied(
            f"a reading process was ended from outside (out of memory?), "
            f"{printable(error, 120) or type(error).__name__}: try fewer --workers"
        ) from None


class Blank:
    """Stands in for data where a batch is empty: its one picture shows what shape a transform gives."""

    def read_image(self, row: int) -> Image.Image:
        return Image.new("RGB", (64, 64))


def leave_interrupts(worker: int) -> None:
    """Ctrl-C is the main process's to answer, which may want to save first. SIGTERM stays: readers are ended by it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def read_images(
    data: ImageTextData | Blank,
    rows: Sequence[int],
    transform: Transform,
    seeds: Sequence[np.random.SeedSequence] | None = None,
) -> tuple[list[int], Tensor | None, list[BadSample]]:
    """(rows that could be read, their pictures [B, 3, H, W] or None for no row, the bad ones).

    With ``seeds`` each transform runs under its own random state, and the caller's states are left as they were.
    """
    good: list[int] = []
    images: list[Tensor] = []
    bad: list[BadSample] = []
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()
    try:
        for i, row in enumerate(rows):
            try:
                picture = data.read_image(row)
            except BadSample as error:
                bad.append(error)
                continue
            if seeds is not None:
                a, b, c = (int(x) for x in seeds[i].generate_state(3))
                random.seed(a)
                torch.default_generator.manual_seed(b)  # the CPU's only: seeding CUDA here would disturb dropout
                np.random.seed(c)  # some augmentations draw from it
            images.append(transform(picture))
            good.append(row)
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        np.random.set_state(states[2])
    return good, torch.stack(images) if images else None, bad


class _RowDataset(Dataset[tuple[Tensor, Tensor | None, list[tuple[int, BadSample]]]]):
    def __init__(self, data: ImageTextData, batches: list[list[int]], transform: Transform) -> None:
        self.data, self.batches, self.transform = data, batches, transform

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor | None, list[tuple[int, BadSample]]]:
        rows, images, bad = read_images(self.data, self.batches[i], self.transform)
        lost = [r for r in self.batches[i] if r not in set(rows)]
        return torch.tensor(rows, dtype=torch.long), images, list(zip(lost, bad, strict=True))


def iterate_images(
    data: ImageTextData, transform: Transform, batch_size: int, workers: int = 0, rows: range | None = None
) -> Iterator[tuple[Tensor, Tensor | None, list[tuple[int, BadSample]]]]:
    """Images in row order, each once: (rows [B], pictures [B, 3, H, W] or None where B = 0, [(row, BadSample)])."""
    rows = range(len(data)) if rows is None else rows
    batches = [list(rows[s : s + batch_size]) for s in range(0, len(rows), batch_size)]
    loader = DataLoader(
        _RowDataset(data, batches, transform),
        batch_size=None,
        num_workers=workers,
        worker_init_fn=leave_interrupts,
        generator=torch.Generator(),
    )
    yield from read_all(loader)


def iterate_texts(captions: Sequence[str], tokenize: Tokenize, batch_size: int) -> Iterator[Tensor]:
    """Token ids of captions in order, [B, L] a batch."""
    for start in range(0, len(captions), batch_size):
        yield tokenize(list(captions[start : start + batch_size]))
