"""Relevance pairs: grouped, counted once, laid out slot by slot."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip.retrieval.qrels import Judged, Qrels, group_pairs
from mmclip.retrieval.ranking import rank
from mmclip.retrieval.sides import Side
from mmclip.similarity import FIXED_NORMALIZATIONS

SCORINGS = {n.value: n.exponents for n in FIXED_NORMALIZATIONS}


def test_repeated_pairs_count_once():
    queries, offsets, documents = group_pairs(np.array([[1, 0], [1, 0], [1, 2]]), 2, 3)
    assert (queries.tolist(), offsets.tolist(), documents.tolist()) == ([1], [0, 2], [0, 2])


def test_of_repeated_pairs_the_largest_gain_counts():
    x = torch.eye(3)
    found = rank(x, x, Qrels([[1, 0], [0, 2], [1, 0]], [1, 5, 2]), SCORINGS)["dot"]
    assert (found.queries.tolist(), found.documents.tolist(), found.gains.tolist()) == ([0, 1], [2, 0], [5, 2])


@given(pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8)), min_size=1, max_size=30))
def test_slots_hold_every_pair_once_and_in_runs(pairs):
    judged = Judged.read(np.array(pairs), None, 7, 9)
    asking = Side(torch.ones(7, 1), torch.ones(7, dtype=torch.float64), judged.order(7))
    answering = Side(torch.ones(9, 1), torch.ones(9, dtype=torch.float64), np.arange(9)[::-1].copy())
    slots = judged.slots(asking, answering)
    rows = list(zip(asking.order[slots.query].tolist(), answering.order[slots.document].tolist(), strict=True))
    assert sorted(rows) == sorted(set(pairs))
    for start, stop in ((0, 7), (1, 3), (4, 7)):
        inside = [rows[i] for at in slots.inside(start, stop) for i in range(at.start, at.stop)]
        own = asking.order[start:stop].tolist()
        assert sorted(inside) == sorted(p for p in set(pairs) if p[0] in own)
        for at in slots.inside(start, stop):  # a slot's queries are the first ones, in order
            assert slots.query[at].tolist() == list(range(start, start + at.stop - at.start))
    query = torch.arange(len(judged.queries))
    number, pair = slots.pairs_of(query)
    assert [rows[i] for i in pair] == [r for n in query for r in rows if r[0] == asking.order[n]]
    assert number.tolist() == slots.query[pair].tolist()


def test_the_turned_direction_has_the_same_pairs_and_gains():
    judged = Judged.read(np.array([[0, 2], [0, 1], [3, 2]]), [1, 2, 3], 4, 3).turned(4)
    assert judged.queries.tolist() == [1, 2]
    assert judged.documents.tolist() == [0, 0, 3]
    assert judged.gains.tolist() == [2, 1, 3]
