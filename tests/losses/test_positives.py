"""Lookups of known positives against the whole matrix, and against sets of judgments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip.errors import UserError
from mmclip.losses import PositiveMask, mask_from_ids, mask_from_judgments, mask_from_matrix
from mmclip.losses.positives import Lookup, codes_of, oriented
from mmclip.roles import Direction
from tests.helpers.naive import known_positives


def lookup_of(mask: PositiveMask) -> Lookup:
    found = mask.lookup(False)
    assert found is not None
    return found


@given(
    first=st.lists(st.integers(-1, 3), min_size=2, max_size=6),
    more=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    seed=st.integers(0, 99),
)
def test_a_lookup_has_any_part_of_the_whole_matrix(first: list[int], more: tuple[int, int], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    pairs, ids = len(first), torch.tensor(first)
    others = torch.randint(0, 3, (pairs,), generator=g)
    whole = torch.zeros(pairs + more[0], pairs + more[1], dtype=torch.bool)  # negatives match nothing
    whole[:pairs, :pairs] = known_positives(ids, others)
    rows = torch.randperm(pairs + more[0], generator=g)[:3]
    columns = torch.randperm(pairs + more[1], generator=g)[:3]
    mask = mask_from_ids(ids, None, others)
    if mask.lookup(False) is None:
        assert torch.equal(whole[:pairs, :pairs], torch.eye(pairs, dtype=torch.bool)), "no two are equal"
    else:
        found, own = lookup_of(mask)(rows, columns), rows[:, None] == columns  # a pair matches itself, marked or not
        assert torch.equal(found | own, whole[rows][:, columns] | own)
    found = lookup_of(mask_from_matrix(whole[:pairs, :pairs]))(rows, columns)
    assert torch.equal(found, whole[rows][:, columns])


def test_judgments_and_pairs_of_the_same_query_match_anywhere_in_the_batch() -> None:
    query, document, negative = torch.tensor([5, 6]), torch.tensor([0, 1]), torch.tensor([9, 3])
    judged = codes_of(torch.tensor([[5, 3], [5, 8], [6, 1]]))  # the other row's negative, and one that is not there
    lookup = lookup_of(mask_from_judgments(judged, query, document, negative))
    two, four = torch.arange(2), torch.arange(4)
    assert oriented(lookup, Direction.Q2D)(two, four).int().tolist() == [[1, 0, 0, 1], [0, 1, 0, 0]]
    assert oriented(lookup, Direction.D2Q)(two, two).int().tolist() == [[1, 0], [0, 1]]
    repeated = lookup_of(mask_from_judgments(codes_of(None), torch.tensor([5, 5]), document, negative))
    assert repeated(two, four).int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]


def test_membership_by_search_equals_sets_at_the_ends_of_the_ids() -> None:
    top = 2**31 - 1
    pairs = {(0, 0), (0, top), (1, 0), (top, top), (7, 3)}
    query, document = torch.tensor([0, 1, 7, top]), torch.tensor([2, 4, 5, 6])  # pairs of the batch, none judged
    candidate = torch.tensor([0, 1, 3, top])
    mask = mask_from_judgments(codes_of(torch.tensor(sorted(pairs))), query, document, candidate)
    known = lookup_of(mask)(torch.arange(4), torch.arange(4, 8))
    expected = [[(q, d) in pairs for d in candidate.tolist()] for q in query.tolist()]
    assert known.tolist() == expected and known.any() and not known.all()


def test_ids_that_do_not_fit_are_refused() -> None:
    for ids in ((), (None,), (torch.arange(3), torch.arange(4)), (torch.ones(3, 1),)):
        with pytest.raises(ValueError, match="a number a pair"):
            mask_from_ids(*ids)
    for relevant, message in (
        (torch.zeros(3), r"shape \[3\]"),
        (torch.zeros(3, 2), "float32"),
        (torch.tensor([[0, 2**31]]), "ids from 0 to 2147483648"),
        (torch.tensor([[-1, 0]]), "ids from -1 to 0"),
    ):
        with pytest.raises(UserError, match=message):
            codes_of(relevant)
