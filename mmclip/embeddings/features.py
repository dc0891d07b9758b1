"""Features of a data set, live or from cached outputs of locked trunks, for training and for evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mmclip import distributed
from mmclip.config import TrainConfig
from mmclip.config.clip import parse_aug_cfg
from mmclip.data.image_text import ImageTextData, by_key
from mmclip.data.loading import Batch, Tokenize, TrainBatches, Transform
from mmclip.embeddings.encode import EncodeOptions, encode_images, encode_texts, image_encoder, text_encoder
from mmclip.embeddings.files import Embeddings
from mmclip.embeddings.trunk_cache import cached_trunk
from mmclip.models.factory import ClipModel
from mmclip.models.towers import as_bytes


@dataclasses.dataclass
class FeatureSource:
    """Images with captions, and cached trunk outputs.

    Attributes:
        data: N images with M captions.
        cached: Side -> trunk outputs, [N, W] for "image" and [M, W] for "text".
        skipped: Key -> reason, of images that were left out.
    """

    data: ImageTextData
    cached: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def open(
        cls,
        data: ImageTextData,
        model: ClipModel,
        options: EncodeOptions,
        cache_dir: Path | None,
        label: str,
        sides: Sequence[str] = ("image", "text"),
    ) -> FeatureSource:
        """Wrap ``data``; with a ``cache_dir``, replace every locked trunk of ``sides`` by its cached outputs.

        The cache covers the data as they were opened, of which ``data`` may be a subset. Images that a trunk cannot
        read are left out of the data. Under torchrun rank 0 fills the cache.
        """
        source = cls(data, skipped=by_key(data.skipped))
        if cache_dir is None:
            return source
        first = distributed.world()[0] == 0
        for side in [s for s, locked in model.towers.locked.items() if locked and s in sides]:
            origin = source.data.origin()
            rows = origin.pictures if side == "image" else origin.texts
            if not first:
                distributed.barrier()
            features, bad = cached_trunk(side, model, origin.whole, cache_dir, options, f"{label}: {side} trunk", rows)
            if first:
                distributed.barrier()
            source.cached[side] = features
            if bad:
                kept = [row for row, picture in enumerate(origin.pictures) if picture not in bad]
                source.skipped |= {origin.whole.keys[picture]: why for picture, why in bad.items()}
                source.cached[side], source.data = features[kept], source.data.subset(kept)
        return source

    def inputs(self, side: str, batch: Batch, device: torch.device) -> tuple[Tensor, bool]:
        """(inputs of a side of a batch on the device, whether they are trunk outputs); pixels stay bytes."""
        if side in self.cached:
            rows = batch.image_id if side == "image" else batch.caption_row
            return self.cached[side][rows].to(device, non_blocking=True), True
        live = batch.images if side == "image" else batch.tokens
        assert live is not None, "the loader reads every side that is not cached"
        return live.to(device, non_blocking=True), False

    def batches(self, settings: TrainConfig, model: ClipModel, pin: bool = False) -> TrainBatches:
        """Training batches of the sides that are not cached."""
        transform = as_bytes(model.transform(train=True, aug_cfg=parse_aug_cfg(settings.aug_cfg)))
        return train_batches(
            settings,
            self.data,
            None if "image" in self.cached else transform,
            None if "text" in self.cached else model.tokenize,
            shorten=None if settings.torchcompile else model.towers.shortened,  # compiled once, for one shape
            pin=pin,
        )

    def vectors(
        self, side: str, model: ClipModel, options: EncodeOptions, label: str, rows: Sequence[int] | None = None
    ) -> tuple[Tensor, dict[int, str]]:
        """Raw embeddings of a side, or of its ``rows`` (captions are counted over all images).

        Returns:
            [n, D], and {row: reason} of images that cannot be read, whose rows are NaN.
        """
        model.towers.eval()
        if side in self.cached:
            inputs = self.cached[side] if rows is None else self.cached[side][rows]
            return torch.cat([options.run(partial(model.towers.head, side), part) for part in inputs.split(4096)]), {}
        if side == "image":
            data, transform = self.data if rows is None else self.data.subset(rows), as_bytes(model.transform())
            return encode_images(image_encoder(model), data, transform, options, label=f"{label}: images")
        captions = [c for image in self.data.captions for c in image]
        captions = captions if rows is None else [captions[row] for row in rows]
        return encode_texts(text_encoder(model), captions, model.tokens, options, label=f"{label}: captions"), {}

    def embed(self, model: ClipModel, options: EncodeOptions, label: str) -> Embeddings:
        """Raw embeddings of all images and captions; an image that cannot be read goes with its captions."""
        image, bad = self.vectors("image", model, options, label)
        text, _ = self.vectors("text", model, options, label)
        kept = [row for row in range(len(self.data)) if row not in bad]
        data, truth = self.data.subset(kept), self.data.subset(kept).truth
        owner = [row for row, texts in enumerate(data.captions) for _ in texts]
        read = torch.tensor([row not in bad for row, texts in enumerate(self.data.captions) for _ in texts])
        counts = [t.n_objects for t in truth or [] if t.n_objects is not None]
        return Embeddings(
            image[kept],
            text[read],
            _relevant_pairs(data, owner),
            data.keys,
            captions=[c for texts in data.captions for c in texts],
            levels=None if truth is None else [c.level for t in truth for c in t.captions],
            n_objects=counts if truth and len(counts) == len(truth) else None,
            owner=owner,
            skipped=self.skipped | {self.data.keys[row]: why for row, why in bad.items()},
        )


def train_batches(
    settings: TrainConfig,
    data: ImageTextData,
    transform: Transform | None,
    tokenize: Tokenize | None,
    shorten: Callable[[Tensor], Tensor] | None = None,
    pin: bool = False,
) -> TrainBatches:
    """Training batches of this rank by a run's settings (UserError where the batch is larger than the data)."""
    rank, ranks = distributed.world()
    return TrainBatches(
        data,
        transform,
        tokenize,
        settings.batch_size,
        settings.seed,
        settings.workers,
        not settings.keep_last,
        rank,
        ranks,
        settings.accum_freq,
        settings.loss_batch_size,
        shorten,
        pin,
    )


def _relevant_pairs(data: ImageTextData, owner: Sequence[int]) -> Tensor:
    """[P, 2] (image row, text row): the ground truth's, by default each caption with its own image."""
    if data.truth is None:
        return torch.tensor([[image, text] for text, image in enumerate(owner)])
    row_of = {key: row for row, key in enumerate(data.keys)}
    relevant = [
        [key] if c.relevant is None else c.relevant
        for key, t in zip(data.keys, data.truth, strict=True)
        for c in t.captions
    ]
    pairs = [[row_of[k], text] for text, keys in enumerate(relevant) for k in keys if k in row_of]
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
