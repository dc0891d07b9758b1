"""Training batches (every image once an epoch, with one of its captions) and images in row order for encoding.

All random draws are functions of (seed, epoch, row): neither the number of workers nor the rank that reads a sample
changes them, and a run can start in the middle of an epoch.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice, pairwise
from typing import Any, Generic, TypeVar

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
Part = tuple[list[int], Tensor | None, Tensor | None, list[BadSample]]  # readable rows, images, token ids, the others
Bad = list[tuple[int, BadSample]]
PARTS = 2  # of a batch for each worker, so that a slow image delays the others less
MIN_PART = 8  # rows; smaller parts cost more to hand over than they spread


@dataclass
class Batch:
    """B pairs of an image and one of its captions.

    Where no image could be read, B is 0 and the tensors have no rows: the batch still comes, and ranks stay in step.

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
        columns = (self.images, self.tokens, self.image_id, self.caption_row, self.text_id, self.keys)
        return [Batch(*(x if x is None else x[start:end] for x in columns)) for start, end in pairwise(bounds)]  # type: ignore[arg-type]


@dataclass(eq=False)
class TrainBatches:
    """The batches of a training run, in a deterministic order.

    Attributes:
        data: Training data.
        transform: Image transform; None where images are not read (their features are cached).
        tokenize: Captions -> token ids; None where texts are not read.
        batch_size: Pairs of a process and forward pass.
        seed: Of all draws.
        workers: Reading processes.
        drop_last: Drop the last, partial global batch.
        rank: This process.
        world_size: Number of processes.
        accum_freq: Forward passes a step; the global batch is batch_size * accum_freq * world_size.
        loss_batch_size: Size of the global batch instead, split over the processes as evenly as possible.
        shorten: Removes the padding that no text of a batch needs.
        pin: Batches in pinned memory, for a CUDA device.

    Raises:
        UserError: The batch is larger than the data.
    """

    data: ImageTextData
    transform: Transform | None
    tokenize: Tokenize | None
    batch_size: int
    seed: int = 0
    workers: int = 0
    drop_last: bool = True
    rank: int = 0
    world_size: int = 1
    accum_freq: int = 1
    loss_batch_size: int | None = None
    shorten: Callable[[Tensor], Tensor] | None = None
    pin: bool = False

    def __post_init__(self) -> None:
        self.joint = self.loss_batch_size or self.batch_size * self.accum_freq * self.world_size  # images of a step
        if self.joint < self.world_size:
            raise UserError(f"--loss-batch-size {self.joint}: fewer pairs than the {self.world_size} processes")
        full, rest = divmod(len(self.data), self.joint)
        # A partial global batch needs a sample for each rank, and two pairs for a contrast.
        self.steps_per_epoch = full + (not self.drop_last and rest >= max(self.world_size, 2))
        if self.steps_per_epoch == 0:
            accumulated = f" x --accum-freq {self.accum_freq}" if self.accum_freq > 1 else ""
            batch = f"--batch-size {self.batch_size}{accumulated} x {self.world_size} processes"
            raise UserError(
                f"{f'--loss-batch-size {self.joint}' if self.loss_batch_size else batch} is more than the "
                f"{len(self.data)} images of {printable(self.data.path)}: choose a smaller one, or keep the partial "
                "batch with --keep-last"
            )

    @cached_property
    def first_caption(self) -> np.ndarray:
        """[N + 1] first flat caption row of each image."""
        return np.cumsum([0, *map(len, self.data.captions)])

    @cached_property
    def text_ids(self) -> Tensor:
        """[M] numbers of the flattened captions, equal for equal strings."""
        known: dict[str, int] = {}
        return torch.tensor([known.setdefault(c, len(known)) for texts in self.data.captions for c in texts])

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
        workers = self.workers if self.transform else 0
        largest = -(-self.joint // self.world_size)
        size = max(-(-largest // (PARTS * workers)), MIN_PART) if workers else largest
        parts = [[rows[i : i + size] for i in range(0, len(rows), size)] for rows in steps]
        read = _read(partial(self._part, epoch), [part for step in parts for part in step], workers, 2 * PARTS)
        for step in parts:
            yield self._joined(epoch, list(islice(read, len(step))))
        next(read, None)  # its end closes the workers

    def _part(self, epoch: int, rows: list[int]) -> Part:
        images: Tensor | None = None
        bad: Bad = []
        if self.transform is not None:
            seeds = [np.random.SeedSequence([self.seed, 3, epoch, r]) for r in rows]
            rows, images, bad = read_images(self.data.read_image, rows, self.transform, seeds)
        tokens = None
        if self.tokenize is not None:
            flat = self.drawn(epoch, rows).tolist()
            captions = [self.data.captions[r][f - int(self.first_caption[r])] for r, f in zip(rows, flat, strict=True)]
            tokens = self.tokenize(captions) if captions else self.tokenize([""])[:0]
        return rows, images, tokens, [sample for _, sample in bad]

    def _joined(self, epoch: int, parts: list[Part]) -> Batch:
        rows = [row for part in parts for row in part[0]]
        images = [part[1] for part in parts if part[1] is not None]
        if not images and self.transform is not None:  # none could be read: no rows, of the right shape
            _, blank, _ = read_images(
                lambda _: Image.new("RGB", (64, 64)), [0], self.transform, [np.random.SeedSequence(0)]
            )
            images = [] if blank is None else [blank[:0]]
        flat = self.drawn(epoch, rows)
        tokens = self._cat([part[2] for part in parts if part[2] is not None]) if self.tokenize else None
        return Batch(
            self._cat(images) if images else None,
            self.shorten(tokens) if self.shorten and tokens is not None else tokens,
            torch.tensor(rows, dtype=torch.long),
            torch.from_numpy(flat),
            self.text_ids[flat],
            [self.data.keys[r] for r in rows],
            [bad for part in parts for bad in part[3]],
        )

    def _cat(self, parts: list[Tensor]) -> Tensor:
        """Concatenation; pinned memory is copied to a GPU while the GPU works."""
        if not self.pin:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        return torch.cat(parts, out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=True))


def _mixed(seeds: Sequence[int], rows: np.ndarray) -> np.ndarray:
    """A uniform uint64 hash of (seeds, row) for each row: splitmix64's finalizer, faster than a generator a row."""
    start = np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]
    z = start + rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def iterate_images(
    data: ImageTextData, transform: Transform, batch_size: int, workers: int = 0, rows: range | None = None
) -> Iterator[tuple[Tensor, Tensor | None, list[tuple[int, BadSample]]]]:
    """Images in row order: (rows [B], images [B, 3, H, W] or None where B = 0, [(row, BadSample)])."""
    rows = range(len(data)) if rows is None else rows
    batches = [list(rows[s : s + batch_size]) for s in range(0, len(rows), batch_size)]
    for read, images, bad in _read(partial(read_images, data.read_image, transform=transform), batches, workers):
        yield torch.tensor(read, dtype=torch.long), images, bad


def iterate_texts(captions: Sequence[str], tokenize: Tokenize, batch_size: int) -> Iterator[Tensor]:
    """Token ids [B, L] of captions in order."""
    for start in range(0, len(captions), batch_size):
        yield tokenize(list(captions[start : start + batch_size]))


# --- reading, in this process or in workers ---------------------------------------------------------------------------


class ReaderDied(UserError):
    """A worker process was killed, for instance by the system where memory is short."""


@dataclass
class _Items(Dataset[T], Generic[T]):
    """Item k is ``make`` of the k-th list of rows."""

    make: Callable[[list[int]], T]
    rows: list[list[int]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, k: int) -> T:
        return self.make(self.rows[k])


def _read(make: Callable[[list[int]], T], rows: list[list[int]], workers: int, prefetch_factor: int = 2) -> Iterator[T]:
    """``make`` of each list of rows in order (ReaderDied, raised here only).

    torch reports a dead worker from a signal handler, in the middle of a step or of writing a checkpoint. Without that
    handler the loader notices by itself within seconds.
    """
    loader = DataLoader(
        _Items(make, rows),
        batch_size=None,
        shuffle=False,
        num_workers=workers,
        prefetch_factor=prefetch_factor if workers else None,
        worker_init_fn=_ignore_sigint,
        generator=torch.Generator(),
    )
    iterator = iter(loader)
    if workers and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield from iterator
    except (RuntimeError, OSError, EOFError) as error:
        # OSError, EOFError: a batch was announced, and its worker died with the tensors
        raised_in_worker = str(error).startswith("Caught ")
        if raised_in_worker or not workers:
            raise
        raise ReaderDied(
            f"a reading process was ended from outside (out of memory?), "
            f"{printable(error, 120) or type(error).__name__}: try fewer --workers"
        ) from None


def _ignore_sigint(worker: int) -> None:
    """Leave Ctrl-C to the main process, which may save first; SIGTERM still ends workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def read_images(
    read: Callable[[int], Image.Image],
    rows: Sequence[int],
    transform: Transform,
    seeds: Sequence[np.random.SeedSequence] | None = None,
) -> tuple[list[int], Tensor | None, Bad]:
    """Read and transform images.

    Args:
        read: Row -> decoded image, or BadSample.
        rows: Rows to read.
        transform: Image transform.
        seeds: A random state for each transform; the caller's states are restored.

    Returns:
        Readable rows, their images [B, 3, H, W] (None for no row), and (row, BadSample) of the others.
    """
    good: list[int] = []
    images: list[Tensor] = []
    bad: Bad = []
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()
    try:
        for i, row in enumerate(rows):
            try:
                image = read(row)
            except BadSample as error:
                bad.append((row, error))
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
