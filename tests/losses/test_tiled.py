from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip.losses.contrastive import clip_loss
from mmclip.losses.tiled import relation_of, same_ids
from mmclip.similarity import Direction


@given(first=st.lists(st.integers(0, 3), min_size=2, max_size=6), further=st.integers(0, 3), seed=st.integers(0, 99))
def test_a_relation_says_of_any_numbers_what_the_whole_matrix_says(first: list[int], further: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    pairs, ids = len(first), torch.tensor(first)
    others = torch.randint(0, 3, (pairs,), generator=g)
    whole = torch.zeros(pairs, pairs + further, dtype=torch.bool)
    whole[:, :pairs] = (ids[:, None] == ids) | (others[:, None] == others)
    query, document = torch.randperm(pairs, generator=g)[:2], torch.randperm(pairs + further, generator=g)[:3]
    by_ids = same_ids(ids, None, others)
    if by_ids is None:
        assert torch.equal(whole[:, :pairs], torch.eye(pairs, dtype=torch.bool)), "no two are equal"
    else:
        found, wanted = by_ids(query, document), whole[query][:, document]
        own = query[:, None] == document  # a pair matches itself, which nobody asks of a relation
        assert torch.equal(found | own, wanted | own)
    by_matrix = relation_of(whole[:, :pairs])
    assert by_matrix is not None and torch.equal(by_matrix(query, document), whole[query][:, document])
    assert relation_of(None) is None


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize(
    ("sides", "more", "told"),
    [
        (
            {"image": (8, 4), "text": (9, 4)},
            {},
            r"image \[8, 4\], text \[9, 4\]: raw features \[B, D\]",
        ),
        ({"image": (8, 4), "text": (8, 5)}, {}, r"text \[8, 5\]"),
        ({"image": (8,), "text": (8,)}, {}, r"image \[8\]"),
        ({"image": (8, 4), "txt": (8, 4)}, {}, "text missing"),
        ({"image": (0, 4), "text": (0, 4)}, {}, "no pairs"),
        ({"image": (8, 4), "text": (8, 4)}, {"image_id": torch.arange(7)}, r"image_id \[7\]: \[8\] is expected"),
        ({"image": (8, 4), "text": (8, 4)}, {"text_id": torch.arange(9)}, r"text_id \[9\]"),
        (
            {"image": (8, 4), "text": (8, 4)},
            {"extra": {"txt": torch.ones(2, 4)}},
            "further candidates are of image or text",
        ),
        ({"image": (8, 4), "text": (8, 4)}, {"extra": {"text": torch.ones(2, 3)}}, r"extra text \[2, 3\]"),
        (
            {"image": (8, 4), "text": (8, 4)},
            {"known": {Direction.I2T: torch.ones(8, 9, dtype=torch.bool)}},
            r"known i2t \[8, 9\]: \[8, 8\] is expected",
        ),
    ],
    ids=str,
)
def test_a_batch_that_does_not_fit_itself_is_refused(
    tiled: bool, sides: dict[str, tuple[int, ...]], more: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        clip_loss("sym", "qnorm", tiled=tiled)({s: torch.ones(shape) for s, shape in sides.items()}, **more)
