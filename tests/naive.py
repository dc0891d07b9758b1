"""Definitions as plain as they can be, which fast paths are held against."""

from __future__ import annotations

from torch import Tensor


def known_positives(image_id: Tensor | None, text_id: Tensor | None) -> Tensor | None:
    """Pairs of a batch with the same image or the same caption, ids [B] -> bool [B, B]; None where neither is known."""
    known = None
    for ids in (image_id, text_id):
        if ids is not None:
            same = ids[:, None] == ids[None, :]
            known = same if known is None else known | same
    return known
