"""Which documents of a text batch are known to be relevant to which queries, by ids, without a matrix of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from mmclip.errors import UserError
from mmclip.losses.gram_way import Relation
from mmclip.similarity import Direction

ID_BITS = 31


def known_by_id(relevant: Tensor, query: Tensor, document: Tensor, negative: Tensor) -> dict[Direction, Relation]:
    """By direction, for ids of queries and their documents [B] and of further candidates [H]: what is judged relevant
    (``relevant``, codes_of), and what stands with the same query elsewhere in the batch."""
    candidate = torch.cat([document, negative])
    paired = _codes(query, document).sort().values

    def q2d(queries: Tensor, candidates: Tensor) -> Tensor:
        codes = _codes(query[queries][:, None], candidate[candidates])
        return _within(codes, relevant) | _within(codes, paired)

    return {Direction.Q2D: q2d, Direction.D2Q: lambda documents, queries: q2d(queries, documents).T}


def _codes(query: Tensor, document: Tensor) -> Tensor:
    """One number for each pair of ids."""
    return (query.long() << (ID_BITS + 1)) + document.long()


def codes_of(relevant: Tensor | None) -> Tensor:
    """Judgments [M, 2] as numbers [M], sorted, for ``known_by_id``. Errors: UserError for ids that are none."""
    if relevant is None:
        return torch.zeros(0, dtype=torch.long)
    if relevant.ndim != 2 or relevant.shape[1] != 2 or relevant.is_floating_point():
        raise UserError(f"relevant of shape {list(relevant.shape)}, {relevant.dtype}: whole numbers [M, 2] expected, "
                         "query id and document id")  # fmt: skip
    if len(relevant) and not 0 <= int(relevant.min()) <= int(relevant.max()) < 2**ID_BITS:
        raise UserError(f"relevant: ids from {int(relevant.min())} to {int(relevant.max())}; valid: 0 to 2**31 - 1")
    return _codes(*relevant.unbind(1)).sort().values


def _within(codes: Tensor, ordered: Tensor) -> Tensor:
    """Whether each number is one of the sorted ones."""
    if not len(ordered):
        return torch.zeros_like(codes, dtype=torch.bool)
    place = torch.searchsorted(ordered, codes).clamp_max(len(ordered) - 1)
    return ordered[place] == codes
