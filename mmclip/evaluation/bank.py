"""The bank of the correction: some of a data set's captions or images, drawn and embedded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from mmclip.data.image_text import ImageTextData
from mmclip.embeddings.encode import Runner
from mmclip.embeddings.features import Source
from mmclip.embeddings.files import SavedEmbeddings, load_embeddings
from mmclip.errors import UserError, printable
from mmclip.models.factory import ClipModel
from mmclip.retrieval.hubness import Bank


def draw_bank(
    source: Source,
    sides: Iterable[str],
    size: int,
    model: ClipModel,
    runner: Runner,
    seed: int = 0,
    evaluated: ImageTextData | None = None,
) -> Bank:
    """``size`` items of each of ``sides`` at random, all of them where there are fewer; images that cannot be read are
    left out. ``evaluated``: whose captions are counted in the bank as its overlap.

    Errors: UserError where every caption of the bank is the evaluation's: nothing is left that it could be but the
    evaluation set, or a part of it, under another name.
    """
    captions = [c for image in source.data.captions for c in image]
    known = {c for image in evaluated.captions for c in image} if evaluated is not None else set()
    name = f"{source.data.path} [{source.data.split}]" if source.data.split else source.data.path
    bank = Bank(name)
    for side in sides:
        n = {"image": len(source.data), "text": len(captions)}[side]
        rows = np.sort(np.random.default_rng(seed).choice(n, min(size, n), replace=False)).tolist()
        if evaluated is not None:
            bank.overlap[side] = _overlap(source, side, rows, captions, known)
        vectors, bad = source.vectors(side, model, runner, "bank", rows)
        bank.vectors[side] = vectors[[i for i in range(len(rows)) if i not in bad]]
    return bank


def _overlap(source: Source, side: str, rows: Sequence[int], captions: list[str], known: set[str]) -> int:
    """How many of the rows say what the evaluation says; an image does if all of its captions do."""
    told = [[captions[row]] for row in rows] if side == "text" else [source.data.captions[row] for row in rows]
    same = sum(all(c in known for c in own) for own in told)
    if same == len(told):
        raise UserError(
            f"the bank {printable(source.data.path)} is the evaluation set, or a part of it: all of {same} captions are "
            "in it, too; take training data, or name it: --bank transductive"
        )
    return same


def saved_bank(path: str, sides: Iterable[str], size: int, evaluated: SavedEmbeddings, seed: int = 0) -> Bank:
    """As :func:`draw_bank`, out of a file of saved embeddings; items are the same where their vectors are.

    Errors: UserError for a file of another D, and where all drawn vectors are the evaluation's.
    """
    try:
        saved = load_embeddings(path)
    except UserError as error:
        raise UserError(f"--bank of saved embeddings: {error}") from None
    bank = Bank(path)
    for side in sides:
        rows, known = getattr(saved, side), getattr(evaluated, side)
        if rows.shape[1] != known.shape[1]:
            raise UserError(
                f"--bank {printable(path)}: vectors of {rows.shape[1]} dimensions; the evaluation has {known.shape[1]}"
            )
        drawn = np.sort(np.random.default_rng(seed).choice(len(rows), min(size, len(rows)), replace=False))
        bank.vectors[side] = rows[torch.from_numpy(drawn)]
        own = {row.tobytes() for row in known.float().numpy()}
        bank.overlap[side] = sum(row.tobytes() in own for row in bank.vectors[side].float().numpy())
        if bank.overlap[side] == len(drawn):
            raise UserError(
                f"--bank {printable(path)}: the evaluation set, or a part of it: all of {len(drawn)} vectors are in it, "
                "too; take training data, or name it: --bank transductive"
            )
    return bank
