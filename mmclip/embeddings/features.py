"""A data set as a run uses it: read live, or replaced by cached outputs of a locked trunk; for training and for
evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mmclip import distributed
from mmclip.config import TrainConfig
from mmclip.config.clip import parse_aug_cfg
from mmclip.data.image_text import ImageTextData, by_key
from mmclip.data.loading import Batch, TrainBatches
from mmclip.embeddings.encode import EncodeOptions, encode_images, encode_texts, image_encoder, text_encoder
from mmclip.embeddings.files import Embeddings
from mmclip.embeddings.trunk_cache import cached_trunk
from mmclip.models.factory import ClipModel
from mmclip.models.towers import as_bytes


@dataclasses.dataclass
class FeatureSource:
    """Images with captions; ``cached`` holds trunk outputs by side: a row an image, a row a caption."""

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
        """``data`` as it is, or, with a ``cache_dir``, with the outputs of every locked trunk of ``sides``.

        The cache is that of the whole data set, however small a part ``data`` is. Images that a trunk could not be
        given are left out of the data. Under torchrun rank 0 fills the cache.
        """
        source = cls(data, skipped=by_key(data.skipped))
        if cache_dir is None:
            return source
        for side in [s for s, locked in model.towers.locked.items() if locked and s in sides]:
            origin = source.data.origin()
            if distributed.world()[0] != 0:
                distributed.barrier()
            rows = origin.pictures if side == "image" else origin.texts
            features, bad = cached_trunk(side, model, origin.whole, cache_dir, options, f"{label}: {side} trunk", rows)
            if distributed.world()[0] == 0:
                distributed.barrier()
            source.cached[side] = features
            if bad:
                lost = [row for row, picture in enumerate(origin.pictures) if picture in bad]
                source.skipped |= {source.data.keys[row]: bad[origin.pictures[row]] for row in lost}
                kept = sorted(set(range(len(source.data))) - set(lost))
                source.cached[side] = features[kept]
                source.data = source.data.subset(kept)
        return source

    def inputs(self, side: str, batch: Batch, device: torch.device) -> tuple[Tensor, bool]:
        """(a side of a batch, pictures still as they were read; whether it is a trunk's output)."""
        if side in self.cached:
            rows = batch.image_id if side == "image" else batch.caption_row
            return self.cached[side][rows].to(device, non_blocking=True), True
        live = batch.images if side == "image" else batch.tokens
        assert live is not None, "the loader reads whatever is not cached"
        return live.to(device, non_blocking=True), False

    def batches(self, settings: TrainConfig, model: ClipModel, pin: bool = False) -> TrainBatches:
        rank, ranks = distributed.world()
        transform = model.transform(train=True, aug_cfg=parse_aug_cfg(settings.aug_cfg))
        return TrainBatches(
            self.data,
            as_bytes(transform),
            model.tokenize,
            batch_size=settings.batch_size,
            accum_freq=settings.accum_freq,
            loss_batch_size=settings.loss_batch_size,
            seed=settings.seed,
            workers=settings.workers,
            drop_last=not settings.keep_last,
            rank=rank,
            world_size=ranks,
            images="image" not in self.cached,
            text="text" not in self.cached,
            shorten=None if settings.torchcompile else model.towers.shortened,  # compiled once, for one shape
            pin=pin,
        )

    def vectors(
        self, side: str, model: ClipModel, options: EncodeOptions, label: str, rows: Sequence[int] | None = None
    ) -> tuple[Tensor, dict[int, str]]:
        """Raw vectors of a side, or of its ``rows`` (captions are counted through all images): ([n, D], {row: why}).

        An image that cannot be read leaves a row of NaN and its reason.
        """
        model.towers.eval()
        if side in self.cached:
            inputs = self.cached[side]
            return self._through_head(side, inputs if rows is None else inputs[rows], model, options), {}
        if side == "image":
            data = self.data if rows is None else self.data.subset(rows)
            return encode_images(
                image_encoder(model), data, as_bytes(model.transform()), options, label=f"{label}: images"
            )
        captions = [c for image in self.data.captions for c in image]
        captions = captions if rows is None else [captions[row] for row in rows]
        return encode_texts(text_encoder(model), captions, model.tokens, options, label=f"{label}: captions"), {}

    def embed(self, model: ClipModel, options: EncodeOptions, label: str) -> Embeddings:
        """Raw embeddings of every image and caption; an image that cannot be read goes with its captions."""
        image, bad = self.vectors("image", model, options, label)
        text, _ = self.vectors("text", model, options, label)
        kept = [row for row in range(len(self.data)) if row not in bad]
        data = self.data.subset(kept)
        owner = [row for row, texts in enumerate(data.captions) for _ in texts]
        rows = [row for row, texts in enumerate(self.data.captions) for _ in texts]
        truth = data.truth
        return Embeddings(
            image[kept],
            text[[i for i, row in enumerate(rows) if row not in bad]],
            _relevant_pairs(data, owner),
            data.keys,
            captions=[c for texts in data.captions for c in texts],
            levels=None if truth is None else [c.level for t in truth for c in t.captions],
            n_objects=None
            if truth is None or any(t.n_objects is None for t in truth)
            else [int(t.n_objects or 0) for t in truth],
            owner=owner,
            skipped=self.skipped | {self.data.keys[row]: why for row, why in bad.items()},
        )

    @torch.no_grad()
    def _through_head(self, side: str, inputs: Tensor, model: ClipModel, options: EncodeOptions) -> Tensor:
        with options.autocast():
            parts = [model.towers.head(side, rows.to(options.device)).float().cpu() for rows in inputs.split(4096)]
        return torch.cat(parts)


def _relevant_pairs(data: ImageTextData, owner: Sequence[int]) -> Tensor:
    """[P, 2] (image row, text row): the truth's where the data state one, else a caption's own image."""
    if data.truth is None:
        return torch.tensor([[image, text] for text, image in enumerate(owner)])
    row_of = {key: row for row, key in enumerate(data.keys)}
    relevant = [(c.relevant, key) for key, t in zip(data.keys, data.truth, strict=True) for c in t.captions]
    pairs = [[row_of[k], text] for text, (keys, own) in enumerate(relevant)
             for k in ([own] if keys is None else keys) if k in row_of]  # fmt: skip
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
