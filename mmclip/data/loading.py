"""Training batches (every image once an epoch, with one of its captions) and images in row order for encoding.

All random draws are functions of (seed, epoch, row): neither the number of workers nor the rank that reads a sample
changes them, and a run can start in the middle of an epoch.
"""

from __future__ import annotations

import itertools
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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
PARTS = 2  # of a batch for each worker, so that a slow image delays the others less
MIN_PART = 8  # rows; smaller parts cost more to hand over than they spread


@dataclass
class Batch:
    """B pairs of an image and one of its captions.

    Where no image could be read, B is 0 and the tensors have no rows: the batch still comes, so that ranks stay in step.

    Attributes:
        images: [B, 3, H, W], or None where images are not read.
        tokens: [B, L], or None where texts are not read.
        image_id: [B] row of the image.
        caption_row: [B] row of the caption in the flattened list of captions.
        text_id: [B], equal for equal captions.
        keys: B sample keys.
        bad: Samples that could not be read and are missing here.
    """

    images: Tensor | None
    tokens: Tensor | None
    image_id: Tensor
    caption_row: Tensor
    text_id: Tensor
    keys: list[str]
    bad: list[BadSample] = field(default_factory=list)

    def split(self, size: int, parts: int | None = None) -> list[Batch]:
        """Parts of at most ``size`` rows in order, or ``parts`` even ones."""
        total = len(self.image_id)
        bounds = [*range(0, total, size), total] if parts is None else [total * i // parts for i in range(parts + 1)]

        def rows(x: Tensor | None, part: slice) -> Tensor | None:
            return None if x is None else x[part]

        return [
            Batch(
                rows(self.images, part),
                rows(self.tokens, part),
                self.image_id[part],
                self.caption_row[part],
                self.text_id[part],
                self.keys[part],
            )
            for part in (slice(start, end) for start, end in pairwise(bounds))
        ]


def steps_per_epoch(
    data: ImageTextData,
    batch_size: int,
    world_size: int,
    drop_last: bool,
    accum_freq: int = 1,
    loss_batch_size: int | None = None,
) -> int:
    """Steps of an epoch (UserError where the batch is larger than the data, or has no pair for a rank)."""
    joint = loss_batch_size or batch_size * accum_freq * world_size
    if joint < world_size:
        raise UserError(f"--loss-batch-size {joint}: fewer pairs than the {world_size} processes")
    full, rest = divmod(len(data), joint)
    # A partial global batch needs a sample for each rank, and two pairs for a contrast.
    steps = full + (not drop_last and rest >= max(world_size, 2))
    if steps == 0:
        accumulated = f" x --accum-freq {accum_freq}" if accum_freq > 1 else ""
        batch = f"--batch-size {batch_size}{accumulated} x {world_size} processes"
        if loss_batch_size is not None:
            batch = f"--loss-batch-size {loss_batch_size}"
        raise UserError(
            f"{batch} is more than the {len(data)} images of {printable(data.path)}: choose a smaller one, or keep the "
            "partial batch with --keep-last"
        )
    return steps


class TrainBatches:
    """The batches of a training run, in a deterministic order.

    Args:
        data: Training data.
        transform: Image transform; None with ``images`` False.
        tokenize: Captions -> token ids.
        batch_size: Pairs of a process and forward pass.
        seed: Of all draws.
        workers: Reading processes.
        drop_last: Drop the last, partial global batch.
        rank: This process.
        world_size: Number of processes.
        accum_freq: Forward passes a step; the global batch is batch_size * accum_freq * world_size.
        loss_batch_size: Size of the global batch instead, split over the processes as evenly as possible.
        images: Read images (False where their features are cached).
        text: Read texts (False where their features are cached).
        shorten: Removes the padding that no text of a batch needs.
        pin: Batches in pinned memory, for a CUDA device.

    Raises:
        UserError: The batch is larger than the data.
    """

    def __init__(
        self,
        data: ImageTextData,
        transform: Transform | None,
        tokenize: Tokenize | None,
        *,
        batch_size: int,
        seed: int = 0,
        workers: int = 0,
        drop_last: bool = True,
        rank: int = 0,
        world_size: int = 1,
        accum_freq: int = 1,
        loss_batch_size: int | None = None,
        images: bool = True,
        text: bool = True,
        shorten: Callable[[Tensor], Tensor] | None = None,
        pin: bool = False,
    ) -> None:
        self.data, self.transform, self.tokenize = data, transform if images else None, tokenize if text else None
        self.seed, self.workers, self.drop_last = seed, workers, drop_last
        self.joint = loss_batch_size or batch_size * accum_freq * world_size  # images of a step, of all processes
        self.rank, self.world_size = rank, world_size
        self.shorten, self.pin = shorten, pin
        counts = np.array([len(c) for c in data.captions])
        self.first_caption = np.concatenate([[0], np.cumsum(counts)])
        self.text_ids = text_ids(data.captions)
        self.steps_per_epoch = steps_per_epoch(data, batch_size, world_size, drop_last, accum_freq, loss_batch_size)

    def order(self, epoch: int) -> np.ndarray:
        """Permutation of all rows in an epoch, equal on every rank."""
        return np.random.default_rng([self.seed, 1, epoch]).permutation(len(self.data))

    @property
    def left_out(self) -> int:
        """Images of an epoch in no step: the dropped partial batch, or fewer of them than ranks."""
        return max(len(self.data) - self.steps_per_epoch * self.joint, 0)

    def drawn(self, epoch: int, rows: Sequence[int]) -> np.ndarray:
        """Flat caption row drawn for each image row in an epoch."""
        index = np.asarray(rows, dtype=np.int64)
        first = self.first_caption[index]
        counts = self.first_caption[index + 1] - first
        return first + (_mixed([self.seed, 2, epoch], index) % counts.astype(np.uint64)).astype(np.int64)

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Batches of an epoch from ``start_step`` on; earlier samples are not read.

        Workers read parts of a batch, so that all of them work on the next one, and hold about two batches in advance,
        whatever their number and --accum-freq.
        """
        order = self.order(epoch)
        steps = [
            np.array_split(order[s * self.joint : (s + 1) * self.joint], self.world_size)[self.rank].tolist()
            for s in range(start_step, self.steps_per_epoch)
        ]
        readers = self.workers if self.transform else 0
        largest = -(-self.joint // self.world_size)
        size = max(-(-largest // (PARTS * readers)), MIN_PART) if readers else largest
        parts = [[rows[i : i + size] for i in range(0, len(rows), size)] for rows in steps]
        loader = DataLoader(
            _Parts(self, epoch, [part for step in parts for part in step]),
            batch_size=None,
            shuffle=False,
            num_workers=readers,
            prefetch_factor=2 * PARTS if readers else None,
            worker_init_fn=_ignore_sigint,
            generator=torch.Generator(),
        )
        read = _read_all(loader)
        for step in parts:
            yield self._joined(epoch, list(itertools.islice(read, len(step))))
        next(read, None)  # its end closes the workers

    def _joined(self, epoch: int, parts: list[_Part]) -> Batch:
        rows = [row for part in parts for row in part.rows]
        images = [part.images for part in parts if part.images is not None]
        if not images and self.transform is not None:
            _, blank, _ = read_images(_Blank(), [0], self.transform, [np.random.SeedSequence(0)])
            images = [] if blank is None else [blank[:0]]
        flat = self.drawn(epoch, rows)
        tokens = self._cat([part.tokens for part in parts if part.tokens is not None]) if self.tokenize else None
        return Batch(
            self._cat(images) if images else None,
            self.shorten(tokens) if self.shorten and tokens is not None else tokens,
            torch.tensor(rows, dtype=torch.long),
            torch.from_numpy(flat),
            self.text_ids[flat],
            [self.data.keys[r] for r in rows],
            [bad for part in parts for bad in part.bad],
        )

    def _cat(self, parts: list[Tensor]) -> Tensor:
        """Concatenation; pinned memory is copied to a GPU while the GPU works."""
        if not self.pin:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        return torch.cat(parts, out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=True))


@dataclass
class _Part:
    """Readable rows of a part of a batch, with their images and the token ids of their captions."""

    rows: list[int]
    images: Tensor | None
    tokens: Tensor | None
    bad: list[BadSample]


class _Parts(Dataset[_Part]):
    """Item k is the k-th part of the epoch."""

    def __init__(self, order: TrainBatches, epoch: int, parts: list[list[int]]) -> None:
        self.order, self.epoch, self.parts = order, epoch, parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, part: int) -> _Part:
        o = self.order
        rows, images = self.parts[part], None
        bad: list[BadSample] = []
        if o.transform is not None:
            seeds = [np.random.SeedSequence([o.seed, 3, self.epoch, r]) for r in rows]
            rows, images, bad = read_images(o.data, rows, o.transform, seeds)
        tokens = None
        if o.tokenize is not None:
            flat = o.drawn(self.epoch, rows).tolist()
            captions = [o.data.captions[r][f - int(o.first_caption[r])] for r, f in zip(rows, flat, strict=True)]
            tokens = o.tokenize(captions) if captions else o.tokenize([""])[:0]
        return _Part(rows, images, tokens, bad)


def _mixed(seeds: Sequence[int], rows: np.ndarray) -> np.ndarray:
    """A uniform uint64 hash of (seeds, row) for each row: splitmix64's finalizer, much faster than a generator a row."""
    z = np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0] + rows.astype(np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def text_ids(captions: Sequence[Sequence[str]]) -> Tensor:
    """[M] numbers of the flattened captions, equal for equal strings."""
    known: dict[str, int] = {}
    return torch.tensor([known.setdefault(c, len(known)) for image in captions for c in image], dtype=torch.long)


# --- reading, in this process or in workers ---------------------------------------------------------------------------


class ReaderDied(UserError):
    """A worker process was killed, for instance by the system where memory is short."""


def _read_all(loader: DataLoader[T]) -> Iterator[T]:
    """The loader's items (ReaderDied, raised here only).

    torch reports a dead worker from a signal handler, in the middle of a step or of writing a checkpoint. Without that
    handler the loader notices by itself within seconds.
    """
    iterator = iter(loader)
    if loader.num_workers and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield from iterator
    except (RuntimeError, OSError, EOFError) as error:
        # OSError, EOFError: a batch was announced, and its worker died with the tensors
        raised_in_worker = str(error).startswith("Caught ")
        if raised_in_worker or not loader.num_workers:
            raise
        raise ReaderDied(
            f"a reading process was ended from outside (out of memory?), "
            f"{printable(error, 120) or type(error).__name__}: try fewer --workers"
        ) from None


class _Blank:
    """Data of one black image, which has the shape of an empty batch's images."""

    def read_image(self, row: int) -> Image.Image:
        return Image.new("RGB", (64, 64))


def _ignore_sigint(worker: int) -> None:
    """Leave Ctrl-C to the main process, which may save first; SIGTERM still ends workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def read_images(
    data: ImageTextData | _Blank,
    rows: Sequence[int],
    transform: Transform,
    seeds: Sequence[np.random.SeedSequence] | None = None,
) -> tuple[list[int], Tensor | None, list[BadSample]]:
    """Read and transform images.

    Args:
        data: The data.
        rows: Rows to read.
        transform: Image transform.
        seeds: A random state for each transform; the caller's states are restored.

    Returns:
        Readable rows, their images [B, 3, H, W] (None for no row), and the bad samples.
    """
    good: list[int] = []
    images: list[Tensor] = []
    bad: list[BadSample] = []
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()
    try:
        for i, row in enumerate(rows):
            try:
                image = data.read_image(row)
            except BadSample as error:
                bad.append(error)
                continue
            if seeds is not None:
                a, b, c = (int(x) for x in seeds[i].generate_state(3))
                random.seed(a)
                torch.default_generator.manual_seed(b)  # the CPU's only: seeding CUDA here would disturb dropout
                np.random.seed(c)  # some augmentations draw from it
            images.append(transform(image))
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
    """Images in row order: (rows [B], images [B, 3, H, W] or None where B = 0, [(row, BadSample)])."""
    rows = range(len(data)) if rows is None else rows
    batches = [list(rows[s : s + batch_size]) for s in range(0, len(rows), batch_size)]
    loader = DataLoader(
        _RowDataset(data, batches, transform),
        batch_size=None,
        num_workers=workers,
        worker_init_fn=_ignore_sigint,
        generator=torch.Generator(),
    )
    yield from _read_all(loader)


def iterate_texts(captions: Sequence[str], tokenize: Tokenize, batch_size: int) -> Iterator[Tensor]:
    """Token ids [B, L] of captions in order."""
    for start in range(0, len(captions), batch_size):
        yield tokenize(list(captions[start : start + batch_size]))
