"""Batches for training: every image once an epoch, one caption of each.

All that is random is a function of (seed, epoch, row): neither the number of workers nor the rank that reads a sample
changes it, and a run can start in the middle of an epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mmclip.data.image_text import BadSample, ImageTextData
from mmclip.data.reading import Blank, Tokenize, Transform, leave_interrupts, read_all, read_images
from mmclip.errors import UserError, printable

PARTS = 2  # of a batch for each reader: a slow picture holds up the others less
MIN_PART = 8  # rows, below which handing over costs more than it spreads


@dataclass
class Batch:
    """B pairs of an image and one of its captions.

    images [B, 3, H, W] and tokens [B, L], or None where the loader does not read them; image_id [B]: row of the image;
    caption_row [B]: row of the caption in the flattened list of captions; text_id [B]: equal for equal captions;
    keys: B strings; bad: samples that could not be read and are missing here. Where none could be read, B is 0 and
    the tensors have no rows: the batch still comes, so that ranks stay in step.
    """

    images: Tensor | None
    tokens: Tensor | None
    image_id: Tensor
    caption_row: Tensor
    text_id: Tensor
    keys: list[str]
    bad: list[BadSample] = field(default_factory=list)

    def split(self, size: int, parts: int | None = None) -> list[Batch]:
        """The batch in parts of at most ``size`` rows, in order; or in ``parts`` even ones, where that is given."""
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
    """Steps of an epoch. Errors: UserError where a step's batch is larger than the data, or has no pair for a rank."""
    joint = loss_batch_size or batch_size * accum_freq * world_size
    if joint < world_size:
        raise UserError(f"--loss-batch-size {joint}: fewer pairs than the {world_size} processes")
    full, rest = divmod(len(data), joint)
    # A partial global batch with fewer samples than ranks would leave a rank without any; a single pair has no rival.
    steps = full + (not drop_last and rest >= max(world_size, 2))
    if steps == 0:
        accumulated = f" x --accum-freq {accum_freq}" if accum_freq > 1 else ""
        asked = f"--batch-size {batch_size}{accumulated} x {world_size} processes"
        if loss_batch_size is not None:
            asked = f"--loss-batch-size {loss_batch_size}"
        raise UserError(
            f"{asked} is more than the {len(data)} images of {printable(data.path)}: choose a smaller one, or keep the "
            "partial batch with --keep-last"
        )
    return steps


class TrainBatches:
    """The training order of a data set.

    batch_size is a process's and forward pass's; the global batch is batch_size * accum_freq * world_size, or
    ``loss_batch_size``, shared out as evenly as it goes: one item of ``batches`` a process. ``drop_last`` False keeps
    the last, partial global batch. ``shorten`` takes from a batch's token ids the padding that none of its texts needs.
    ``pin``: batches lie in pinned memory, for a CUDA device.
    ``images`` or ``text`` False: that side is not read (its features are cached elsewhere). Errors: UserError for a
    batch larger than the data.
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
        """The permutation of all rows in an epoch, the same on every rank."""
        return np.random.default_rng([self.seed, 1, epoch]).permutation(len(self.data))

    @property
    def left_out(self) -> int:
        """Images of an epoch that no step takes: the dropped partial batch, or fewer of them than ranks."""
        return max(len(self.data) - self.steps_per_epoch * self.joint, 0)

    def drawn(self, epoch: int, rows: Sequence[int]) -> np.ndarray:
        """The flat caption row that is drawn for each image row in an epoch."""
        index = np.asarray(rows, dtype=np.int64)
        first = self.first_caption[index]
        counts = self.first_caption[index + 1] - first
        return first + (_mixed([self.seed, 2, epoch], index) % counts.astype(np.uint64)).astype(np.int64)

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from ``start_step`` on; what comes before is not read.

        Readers are given parts of a batch, so that all of them work on the next one, and hold about two batches' parts
        in advance, however many of them there are and whatever --accum-freq.
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
            worker_init_fn=leave_interrupts,
            generator=torch.Generator(),
        )
        read = read_all(loader)
        for step in parts:
            yield self._joined(epoch, list(itertools.islice(read, len(step))))
        next(read, None)  # its end: readers are let go

    def _joined(self, epoch: int, parts: list[_Part]) -> Batch:
        rows = [row for part in parts for row in part.rows]
        images = [part.images for part in parts if part.images is not None]
        if not images and self.transform is not None:
            _, blank, _ = read_images(Blank(), [0], self.transform, [np.random.SeedSequence(0)])
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
        """One tensor of several; pinned, it is copied to a GPU while the GPU works."""
        if not self.pin:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        return torch.cat(parts, out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=True))


@dataclass
class _Part:
    """What a reader makes of some rows of a batch: those that could be read, their pictures and drawn captions."""

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
    """An even hash of (seeds, row) for each row, uint64: splitmix64's finalizer, a thousand times faster than a
    generator a row."""
    z = np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0] + rows.astype(np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def text_ids(captions: Sequence[Sequence[str]]) -> Tensor:
    """A number for each caption of the flattened list, equal for equal strings: [M]."""
    known: dict[str, int] = {}
    return torch.tensor([known.setdefault(c, len(known)) for image in captions for c in image], dtype=torch.long)
