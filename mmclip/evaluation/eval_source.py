"""An evaluation set with a model -> :class:`EvalData`: embeddings, relevance, levels and distractors put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from mmclip import metrics
from mmclip.data.distractors import KINDS, TWINS, Corrupted, captions
from mmclip.data.image_text import ImageTextData
from mmclip.embeddings.encode import Embeddings, Runner, encode_image, encode_text
from mmclip.embeddings.features import Source
from mmclip.errors import UserError, printable
from mmclip.evaluation.eval_set import Distractors, EvalData
from mmclip.models.factory import ClipModel
from mmclip.models.towers import as_bytes
from mmclip.retrieval.ranking import rank_both
from mmclip.similarity import CLIP_DIRECTIONS, Exponents, Normalization


@dataclasses.dataclass
class EvalSource:
    """What a model is evaluated on: ``main`` holds queries and candidates; ``distractors``, by the name of their pool,
    and ``kinds``, made out of the main data (mmclip.data.distractors), candidates only."""

    main: Source
    distractors: dict[str, Source] = dataclasses.field(default_factory=dict)
    kinds: list[str] = dataclasses.field(default_factory=list)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def open(
        cls,
        data: ImageTextData,
        distractors: Mapping[str, ImageTextData],
        model: ClipModel,
        runner: Runner,
        cache_dir: Path | None = None,
        kinds: Sequence[str] = (),
    ) -> EvalSource:
        def source(content: ImageTextData, label: str) -> Source:
            return Source.open(content, model, runner, cache_dir, label)

        return cls(source(data, "evaluation"), {name: source(d, name) for name, d in distractors.items()}, list(kinds))

    def eval_data(self, model: ClipModel, runner: Runner, with_distractors: bool = True, seed: int = 0) -> EvalData:
        """Encode everything once and put the relevance beside it."""
        found = self.main.embed(model, runner, "evaluation")
        self.skipped = dict(found.skipped)
        distractors = []
        if with_distractors:
            for name, source in self.distractors.items():
                extra = source.embed(model, runner, name)
                owner = {"image": list(range(len(extra.image))), "text": extra.owner}
                mark = source.data.fingerprint()
                distractors.append(Distractors(name, extra.image, extra.text, extra.captions, mark, owner))
            distractors += [self._kind(kind, found, model, runner, seed) for kind in self.kinds]
        return EvalData(
            image=found.image,
            text=found.text,
            pairs=_pairs(self.main.data, found),
            image_keys=found.image_keys,
            captions=found.captions,
            levels=_levels(self.main.data, found),
            n_objects=_object_counts(self.main.data, found),
            owner=found.owner,
            distractors=distractors,
        )

    def _kind(self, kind: str, found: Embeddings, model: ClipModel, runner: Runner, seed: int) -> Distractors:
        """One built-in kind: as many pictures as the data have, made out of them, or as many captions."""
        mark = f"seed {seed}"
        if KINDS[kind] == "text":
            texts = captions(kind, found.captions, len(found.captions), seed)
            vectors = runner.texts(encode_text(model), texts, model.tokens, kind)
            return Distractors(kind, text=vectors, captions=texts, mark=mark)
        row_of = {key: row for row, key in enumerate(self.main.data.keys)}
        readable = self.main.data.subset([row_of[key] for key in found.image_keys])
        corrupted = Corrupted(kind, as_bytes(model.transform()), seed)
        image, bad = runner.images(encode_image(model), readable, corrupted, label=kind)
        kept = [row for row in range(len(image)) if row not in bad]
        twins = kind in TWINS
        owner = {"image": kept} if twins else {}
        return Distractors(kind, image=image[kept], mark=mark, owner=owner, twins=twins)

    def quick_numbers(self, model: ClipModel, native: Exponents, runner: Runner) -> dict[str, float]:
        """success@1 of both directions, natively and by cosine, on the main pool: what is watched while training."""
        data = self.eval_data(model, dataclasses.replace(runner, progress=False), with_distractors=False)
        scorings = {"native": Exponents(*(float(g) for g in native)), "cosine": Normalization.COSINE.exponents}
        numbers = {}
        for direction, rankings in zip(
            CLIP_DIRECTIONS, rank_both(data.image, data.text, data.pairs, scorings), strict=True
        ):
            for name, ranking in rankings.items():
                success = metrics.success_at(1, ranking.ranks, ranking.offsets).mean()
                numbers[f"val_{direction.value}_success@1_{name}"] = float(success)
        return numbers


def _pairs(data: ImageTextData, found: Embeddings) -> torch.Tensor:
    """Relevant pairs [P, 2] (image row, text row): the truth's where the data state one, else a caption's own image."""
    if data.truth is None:
        return torch.tensor([[image, text] for text, image in enumerate(found.owner)])
    row_of = {key: row for row, key in enumerate(found.image_keys)}
    known = {key: row for row, key in enumerate(data.keys)}
    pairs: list[list[int]] = []
    text = 0
    for image, key in enumerate(found.image_keys):
        for caption in data.truth[known[key]].captions:
            relevant = [key] if caption.relevant is None else caption.relevant
            pairs += [[row_of[k], text] for k in relevant if k in row_of]
            if caption.relevant is None and found.owner[text] != image:
                raise UserError(f"{printable(data.path)}: captions and truth are not aligned at {printable(key)}")
            text += 1
    return torch.from_numpy(np.array(pairs, dtype=np.int64).reshape(-1, 2))


def _levels(data: ImageTextData, found: Embeddings) -> list[str] | None:
    if data.truth is None:
        return None
    known = {key: row for row, key in enumerate(data.keys)}
    return [c.level for key in found.image_keys for c in data.truth[known[key]].captions]


def _object_counts(data: ImageTextData, found: Embeddings) -> list[int] | None:
    if data.truth is None or any(t.n_objects is None for t in data.truth):
        return None
    known = {key: row for row, key in enumerate(data.keys)}
    return [int(data.truth[known[key]].n_objects or 0) for key in found.image_keys]
