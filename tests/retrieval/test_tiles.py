"""Tiles: within their error, within their memory, and every large score is found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip.retrieval.sides import Scoring, Side, lengths
from mmclip.retrieval.tiles import Search, Tile, bfloat16_pays, full_float32, rough_error, tile_error, tile_size
from mmclip.similarity import TINY


def side(x: torch.Tensor) -> Side:
    return Side(x, lengths(x, "x"), np.arange(len(x)))


@pytest.mark.parametrize("dim", [1, 7, 64, 512, 4096])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_tile_is_within_its_error_of_the_exact_scores(dim, dtype):
    gen = torch.Generator().manual_seed(dim)
    # All of one sign and alike: roundings add up as badly as they can.
    x = (1 + 0.3 * torch.rand(60, dim, generator=gen)).to(dtype)
    y = (torch.cat([x[:30], torch.randn(33, dim, generator=gen)]) * 3).to(dtype)
    rows, columns = side(x), side(y)
    for half, error in ((True, rough_error(dim)), (False, tile_error(dim))):
        tile = Tile(rows, columns, 60, 63, half)
        with full_float32():
            tile.take_rows(0, 60)
            tile.take_columns(0, 63, np.array([1]), np.array([2]))
            for gamma_d in (1.0, 0.0, 0.4):
                scoring = Scoring(rows, columns, gamma_d)
                exact = tile.exact_scores(scoring, True).double()
                weight = torch.ones(63) if scoring.weight is None else scoring.weight
                assert ((tile.scores(scoring, True) - exact).abs().nan_to_num() <= tile_error(dim) * weight).all()
                back = Scoring(columns, rows, gamma_d)
                assert torch.allclose(
                    tile.scores(back, False), tile.exact_scores(back, False), atol=tile_error(dim), rtol=0
                )
            cosine = tile.exact_scores(Scoring(rows, columns, 1.0), True)
            assert ((tile.rough - cosine).abs().nan_to_num() <= error).all()
            assert tile.rough[1, 2] == tile.cosine[1, 2] == -torch.inf


@given(
    n=st.integers(1, 90), m=st.integers(1, 90), seed=st.integers(0, 999), by_row=st.booleans(), share=st.floats(0.8, 1)
)
def test_every_score_that_reaches_the_floor_is_found_or_the_search_given_up(n, m, seed, by_row, share):
    gen = torch.Generator().manual_seed(seed)
    scores = torch.randn(n, m, generator=gen)
    asked = scores if by_row else scores.T
    floor = asked.quantile(share, dim=1)
    floor[torch.rand(len(floor), generator=gen) < 0.3] = torch.inf
    found = Search(scores).reaching(floor, by_row)
    if found is None:
        assert (asked >= floor[:, None]).any()
        return
    query, document, score = found
    expected = (asked >= floor[:, None]).nonzero().tolist()
    assert sorted(zip(query.tolist(), document.tolist(), strict=True)) == [tuple(x) for x in expected]
    assert torch.equal(score, asked[query, document])


@given(n=st.integers(1, 10**6), m=st.integers(1, 10**6), dim=st.integers(1, 5000), block=st.integers(1, 2**31))
def test_tiles_fit_the_memory_and_the_sides(n, m, dim, block):
    height, width = tile_size(n, m, dim, block)
    assert 1 <= height <= n and 1 <= width <= m
    need = 32 * height * width + 24 * dim * (height + width)
    assert need <= block or (height, width) == (1, 1) or (min(height, width) == 1 and need <= block + 56 * dim + 64)


def test_zero_and_tiny_vectors_have_a_weight():
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0], [1e-30, 0.0]])
    assert side(x[:2]).weight(1.0) is None
    assert side(x).weight(1.0).tolist() == [0.5, 0.5, pytest.approx(0.5e-30 / TINY)]
    assert side(x[:2]).weight(0.0).tolist() == [1 / 8, 5 / 8]


def test_whether_bfloat16_pays_is_asked_once():
    assert bfloat16_pays(8, 1) in (True, False)
    assert bfloat16_pays.cache_info().currsize >= 1
