"""Relevance pairs: sorted, counted once, and what cannot be relevance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip.errors import UserError
from mmclip.retrieval import Qrels


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8), st.integers(1, 3)), min_size=1, max_size=30))
def test_each_pair_stands_once_with_its_largest_gain_in_either_direction(judged):
    expected: dict[tuple[int, int], int] = {}
    for q, d, gain in judged:
        expected[q, d] = max(gain, expected.get((q, d), 0))
    pairs = torch.tensor([pair[:2] for pair in judged])
    qrels = Qrels(pairs, [pair[2] for pair in judged])
    for found, turn in ((qrels, 1), (qrels.transposed(), -1)):
        assert list(map(tuple, found.pairs.tolist())) == sorted(pair[::turn] for pair in expected)
        assert dict(zip(map(tuple, found.pairs[:, ::turn].tolist()), found.gains, strict=True)) == expected
        assert found.queries[found.numbers].tolist() == found.pairs[:, 0].tolist()
        assert np.array_equal(np.diff(found.offsets), np.bincount(found.numbers))
    qrels.check(7, 9)


@pytest.mark.parametrize(
    ("pairs", "gains", "words"),
    [
        ([[0, 2]], None, "document row 2; valid rows are 0 to 1"),
        ([[3, 0]], None, "query row 3; valid rows are 0 to 2"),
        ([[-1, 0]], None, "query row -1"),
        (np.empty((0, 2)), None, "at least one"),
        ([0, 1], None, r"shape \[P, 2\]"),
        ([[0, 0]], [0.0], "above 0"),
        ([[0, 0]], [float("nan")], "finite"),
        ([[0, 0]], [1.0, 1.0], r"gains of shape \[2\] for 1"),
    ],
)
def test_unusable_relevance_is_one_line(pairs, gains, words):
    with pytest.raises(UserError, match=words) as error:
        Qrels(pairs, gains).check(3, 2)
    assert "\n" not in str(error.value)
