"""The directional loss by one Gram matrix: what a similarity's directions are of its inner products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from mmclip.losses.gram import gram_loss
from mmclip.losses.gram_way import Factors, Plan, Relation, Way
from mmclip.similarity import Direction, RoleSimilarity, at_least_float32, divisor

Known = Tensor | Relation  # bool [queries, candidates], or the same by their numbers


def same_ids(*ids: Tensor | None) -> Relation | None:
    """Pairs with an equal id in one of ``ids``, [B] each or None; None where no two are equal. Further candidates, from
    number B on, have no id."""
    repeated = [i for i in ids if i is not None and len(i.unique()) < len(i)]
    if not repeated:
        return None

    def relation(query: Tensor, document: Tensor) -> Tensor:
        query, inside = (n.clamp_max(len(repeated[0]) - 1) for n in (query, document))
        known = torch.zeros(len(query), len(document), dtype=torch.bool, device=query.device)
        for ids in repeated:
            known |= ids[query][:, None] == ids[inside]
        return known & (inside == document)

    return relation


def relation_of(known: Known | None) -> Relation | None:
    """Of a matrix [Q, n]; candidates from number n on are not known to match."""
    if not isinstance(known, Tensor):
        return known
    matrix = known

    def relation(query: Tensor, document: Tensor) -> Tensor:
        inside = document.clamp_max(matrix.shape[1] - 1)
        return matrix[query][:, inside] & (inside == document)

    return relation


def check_batch(
    directions: Iterable[Direction],
    sides: Mapping[str, Tensor],
    ids: Mapping[str, Tensor | None],
    extra: Mapping[str, Tensor],
    known: Mapping[Direction, Known] | None,
    across_ranks: bool,
) -> None:
    """Errors: ValueError with the shapes received. Tiles would otherwise take the first rows of the longer side."""
    names = list(dict.fromkeys(s for d in directions for s in (d.query_side, d.document_side)))
    given = {**{s: sides.get(s) for s in names}, **{f"extra {s}": x for s, x in extra.items()}}
    told = ", ".join(f"{n} {'missing' if x is None else list(x.shape)}" for n, x in given.items())
    shapes = [() if x is None else tuple(x.shape) for x in given.values()]
    first = shapes[0]
    if any(len(shape) != 2 or shape[1] != first[1] for shape in shapes) or shapes[1] != first:
        raise ValueError(f"{told}: raw features [B, D] of {' and '.join(names)} are expected, row i the pair i")
    if not set(extra) <= set(names):
        raise ValueError(f"{told}: further candidates are of {' or '.join(names)}")
    pairs = first[0]
    if pairs == 0 and not across_ranks:
        raise ValueError(f"{told}: no pairs")
    for name, i in ids.items():
        if i is not None and i.shape != (pairs,):
            raise ValueError(f"{name} {list(i.shape)}: [{pairs}] is expected, a number a pair")
    for direction, matrix in (known or {}).items():
        widths = sorted({pairs, pairs + len(extra.get(direction.document_side, ()))})
        if isinstance(matrix, Tensor) and not across_ranks and matrix.shape not in [(pairs, w) for w in widths]:
            expected = " or ".join(str([pairs, w]) for w in widths)
            raise ValueError(f"known {direction.value} {list(matrix.shape)}: {expected} is expected")


def takes_half(rows: Tensor) -> bool:
    """Whether rows can be multiplied into float32 as they are. float16 cannot: the loss's gradient in a single inner
    product is below its smallest number where batches are large."""
    return rows.is_cuda and rows.dtype == torch.bfloat16


def tiled_losses(
    similarity: RoleSimilarity,
    weights: Mapping[Direction, float | None],
    sides: Mapping[str, Tensor],
    extra: Mapping[str, Tensor],
    relations: Mapping[Direction, Relation | None],
    multi: bool,
    focal: Callable[[Tensor], Tensor] | None,
    across_ranks: bool,
) -> tuple[Tensor, dict[Direction, Tensor]]:
    """(weighted total, each direction's loss without gradient) of raw rows by side, see ContrastiveLoss.forward.

    weights: the first direction asks by rows; None: the direction's value only.
    """
    first, *others = weights
    row_side, column_side = first.roles({s: s for s in sides})
    rows, columns = sides[row_side], sides[column_side]
    if row_side in extra and others:
        rows = torch.cat([rows, extra[row_side].to(rows.dtype)])
    if column_side in extra:
        columns = torch.cat([columns, extra[column_side].to(columns.dtype)])
    if not (rows.dtype == columns.dtype and takes_half(rows)):
        dtype = torch.promote_types(at_least_float32(rows[:0]).dtype, at_least_float32(columns[:0]).dtype)
        rows, columns = rows.to(dtype), columns.to(dtype)
    gamma_q, gamma_d = similarity.exponents
    forth_divisors = divisor(rows, gamma_q), divisor(columns, gamma_d)
    alike = not isinstance(gamma_q, Tensor) and gamma_q == gamma_d
    ways = [Way(Factors(similarity.scale(first), *forth_divisors), weights[first], relations.get(first))]
    for other in others:  # there the columns are the queries
        divisors = forth_divisors if alike else (divisor(rows, gamma_d), divisor(columns, gamma_q))
        ways.append(Way(Factors(similarity.scale(other), *divisors), weights[other], relations.get(other)))
    plan = Plan(len(sides[row_side]), multi, focal, alike, across_ranks)
    total, values = gram_loss(rows, columns, ways[0], ways[1] if others else None, plan)
    return total, dict(zip(weights, values.unbind(), strict=True))
