"""Known positives of a batch besides the pairs themselves, looked up tile by tile: no [B, B] matrix is held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmclip import distributed
from mmclip.errors import UserError
from mmclip.roles import Direction

ID_BITS = 31
Lookup = Callable[[Tensor, Tensor], Tensor]  # row numbers [k], column numbers [n] -> bool [k, n]
Sides = Mapping[str, Tensor]


@dataclass(frozen=True)
class PositiveMask:
    """Known positives of a batch: ``mask_from_ids``, ``mask_from_matrix`` or ``mask_from_judgments``.

    Rows number the first side (image, query), columns the second: pair i is row i and column i, and negatives follow
    the pairs, across ranks those of all ranks in rank order. A pair always matches itself.

    Attributes:
        lookup: (gather over ranks?) -> the lookup of the batch, or None if only pairs match.
        pairs: expected number of pairs B of this process.
        columns: expected number of columns, B or B + H, of a mask that has them all; then no rank gathers it.
    """

    lookup: Callable[[bool], Lookup | None]
    pairs: int
    columns: int | None = None


def with_negatives(side: str, features: Sides, negatives: Sides) -> Tensor:
    """A side's features, negatives behind them."""
    x, more = features[side], negatives.get(side)
    return x if more is None else torch.cat([x, more.to(x.dtype)])


def oriented(lookup: Lookup, direction: Direction) -> Lookup:
    """The same by (query numbers, document numbers) of a direction."""
    if direction in (Direction.I2T, Direction.Q2D):
        return lookup
    return lambda query, document: lookup(document, query).T


def mask_from_ids(*ids: Tensor | None) -> PositiveMask:
    """Pairs with an equal id, ids [B] each or None; negatives have no id and match nothing.

    >>> lookup = mask_from_ids(torch.tensor([7, 8, 7])).lookup(False)
    >>> lookup(torch.arange(3), torch.arange(3)).int().tolist()
    [[1, 0, 1], [0, 1, 0], [1, 0, 1]]
    """
    own = [i for i in ids if i is not None]
    if not own or len({i.shape for i in own}) > 1 or own[0].ndim != 1:
        raise ValueError(f"ids {[list(i.shape) for i in own]}: [B] each is expected, a number a pair")

    def lookup_of(gather: bool) -> Lookup | None:
        known = [i for i in _gathered(own, gather) if len(i.unique()) < len(i)]
        if not known:
            return None
        pairs, one = len(known[0]), known[0].new_ones(1)
        padded = [(torch.cat([i, i.min() - one]), torch.cat([i, i.min() - 2 * one])) for i in known]

        def lookup(rows: Tensor, columns: Tensor) -> Tensor:
            rows, columns = rows.clamp_max(pairs), columns.clamp_max(pairs)
            (a, b), *others = ((of_rows[rows][:, None], of_columns[columns]) for of_rows, of_columns in padded)
            same = a == b
            for a, b in others:
                same |= a == b
            return same

        return lookup

    return PositiveMask(lookup_of, len(own[0]))


def mask_from_matrix(matrix: Tensor) -> PositiveMask:
    """Known positives as bool [B, B] or, with the second side's negatives, [B, B + H]; of the whole batch."""
    padded, (height, width) = nn.functional.pad(matrix, (0, 1, 0, 1)), matrix.shape
    return PositiveMask(lambda gather: lambda r, c: padded[r.clamp_max(height)][:, c.clamp_max(width)], height, width)


def mask_from_judgments(judged: Tensor, query: Tensor, document: Tensor, negative: Tensor) -> PositiveMask:
    """Documents judged relevant to a query (``codes_of``), or paired with the same query elsewhere in the batch.

    ``query`` and ``document`` are ids [B] of the pairs, ``negative`` those of the negatives, [H], by their rows.
    """

    def lookup_of(gather: bool) -> Lookup:
        queries, documents, negatives = _gathered([query, document, negative], gather)
        candidates, paired = torch.cat([documents, negatives]), _codes(queries, documents).sort().values

        def lookup(rows: Tensor, columns: Tensor) -> Tensor:
            codes = _codes(queries[rows][:, None], candidates[columns])
            return _is_one_of(codes, judged) | _is_one_of(codes, paired)

        return lookup

    return PositiveMask(lookup_of, len(query))


def _gathered(ids: list[Tensor], gather: bool) -> list[Tensor]:
    return [distributed.gather_rows(i) if gather else i for i in ids]


def codes_of(relevant: Tensor | None) -> Tensor:
    """Judgments, int [M, 2] of query id and document id, as one sorted number each, [M] (UserError for others)."""
    relevant = torch.zeros(0, 2, dtype=torch.long) if relevant is None else relevant
    if relevant.ndim != 2 or relevant.shape[1] != 2 or relevant.is_floating_point():
        shape = f"{list(relevant.shape)}, {relevant.dtype}"
        raise UserError(f"relevant of shape {shape}: whole numbers [M, 2] expected, query id and document id")
    if len(relevant) and not 0 <= int(relevant.min()) <= int(relevant.max()) < 2**ID_BITS:
        raise UserError(f"relevant: ids from {int(relevant.min())} to {int(relevant.max())}; valid: 0 to 2**31 - 1")
    return _codes(*relevant.unbind(1)).sort().values


def _codes(query: Tensor, document: Tensor) -> Tensor:
    """One number for each pair of ids."""
    return (query.long() << (ID_BITS + 1)) + document.long()


def _is_one_of(codes: Tensor, ordered: Tensor) -> Tensor:
    padded = torch.cat([ordered, ordered.new_full((1,), -1)])  # no code is negative
    return padded[torch.searchsorted(ordered, codes)] == codes
