"""Exact ranks, ties and lists whatever the tiles: against the whole float64 score matrix, ordered by numpy."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip.retrieval import ranking as retrieval
from mmclip.retrieval.rank_blocks import Ranked
from mmclip.retrieval.ranking import Ranking, rank, rank_both
from mmclip.similarity import FIXED_NORMALIZATIONS, Exponents, score

SCORINGS = {n.value: n.exponents for n in FIXED_NORMALIZATIONS} | {"native": Exponents(0.3, 0.6)}


def naive(query: torch.Tensor, document: torch.Tensor, pairs: np.ndarray, exponents: Exponents, k: int):
    """(ranks by pair, number of tied queries, best k by query) from the whole float64 score matrix."""
    scores = score(query.double(), document.double(), Exponents(1.0, exponents.gamma_d)).float().numpy()
    relevant = np.zeros(scores.shape, dtype=bool)
    relevant[pairs[:, 0], pairs[:, 1]] = True
    ranks, tied, best = {}, 0, {}
    for q in np.unique(pairs[:, 0]):
        order = np.lexsort((np.arange(len(document)), relevant[q], -scores[q]))
        best[q] = order[:k].tolist()
        ranks |= {(q, d): r + 1 for r, d in enumerate(order) if relevant[q, d]}
        tied += bool(np.isin(scores[q][~relevant[q]], scores[q][relevant[q]]).any())
    return ranks, tied, best


def assert_naive(ranking: Ranking, query, document, pairs, exponents, k):
    ranks, tied, best = naive(query, document, pairs, exponents, k)
    number = np.repeat(ranking.queries, np.diff(ranking.offsets))
    assert dict(zip(zip(number, ranking.documents, strict=True), ranking.ranks, strict=True)) == ranks
    assert ranking.n_tied == tied
    assert dict(zip(ranking.queries, ranking.top_ids.tolist(), strict=True)) == best


def case_of(kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """150 images and 400 texts whose float32 scores lie so close that a float32 product gets their order wrong."""
    gen = torch.Generator().manual_seed(seed)
    image, text = torch.randn(150, 24, generator=gen), torch.randn(400, 24, generator=gen)
    if kind == "collapsed":
        image, text = (torch.ones(1, 24) + 1e-5 * x for x in (image, text))
    elif kind == "duplicates":
        text = text[torch.randint(0, 40, (400,), generator=gen)] * 2.0 ** torch.randint(-3, 3, (400, 1), generator=gen)
    elif kind == "near duplicates":
        text = text[torch.randint(0, 5, (400,), generator=gen)] + 1e-7 * text
    elif kind == "one giant":
        text[7] *= 1e6
        text[::3] *= 1e-3
    elif kind == "zeros":
        image[::5], text[::4] = 0.0, 0.0
    pairs = torch.stack([torch.randint(0, 150, (300,), generator=gen), torch.randint(0, 390, (300,), generator=gen)], 1)
    crowd = torch.stack([torch.full((30,), 3), torch.arange(30)], 1)  # one image with many texts
    return image, text, np.unique(torch.cat([pairs, crowd]).numpy(), axis=0)


KINDS = ["random", "collapsed", "duplicates", "near duplicates", "one giant", "zeros"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_bytes", [200_000, 1 << 26])
def test_close_scores_rank_as_in_float64_whatever_the_block(kind, block_bytes):
    image, text, pairs = case_of(kind, KINDS.index(kind))
    options = {"top_k": dict.fromkeys(SCORINGS, 7), "block_bytes": block_bytes}
    ways = rank_both(image, text, pairs, SCORINGS, **options)
    for (query, document, own), found in zip(((image, text, pairs), (text, image, pairs[:, ::-1])), ways, strict=True):
        alone = rank(query, document, own, SCORINGS, **options)
        for name, exponents in SCORINGS.items():
            assert_naive(found[name], query, document, own, exponents, 7)
            assert_naive(alone[name], query, document, own, exponents, 7)
        for one, other in (("cosine", "dnorm"), ("dot", "qnorm")):
            assert np.array_equal(found[one].ranks, found[other].ranks)  # Prop. 4.1
    if kind == "random":
        assert not np.array_equal(ways[0]["cosine"].ranks, ways[0]["dot"].ranks)


@pytest.fixture
def half(monkeypatch):
    """Tiles are searched in bfloat16, whatever the size and the machine."""
    monkeypatch.setattr(retrieval, "_LARGE", 0)
    monkeypatch.setattr(retrieval, "bfloat16_pays", lambda dim, threads: True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_in_bfloat16_changes_nothing(kind, half):
    image, text, pairs = case_of(kind, 7)
    ways = rank_both(image, text, pairs, SCORINGS, block_bytes=200_000)
    for name, exponents in SCORINGS.items():
        assert_naive(ways[0][name], image, text, pairs, exponents, 0)
        assert_naive(ways[1][name], text, image, pairs[:, ::-1], exponents, 0)


def test_well_separated_captions_are_found_by_search_alone(half, monkeypatch):
    gen = torch.Generator().manual_seed(0)
    image = torch.randn(300, 64, generator=gen)
    image[10:20] = image[:10] + 0.1 * image[10:20]  # some have a double, so that something is found
    text = image.repeat_interleave(3, 0) + 0.9 * torch.randn(900, 64, generator=gen)
    pairs = np.array([[t // 3, t] for t in range(900)])
    monkeypatch.setattr(Ranked, "count", None)  # what counts whole tiles
    ways = rank_both(image, text, pairs, SCORINGS, block_bytes=1 << 20)
    for name, exponents in SCORINGS.items():
        assert_naive(ways[0][name], image, text, pairs, exponents, 0)
        assert_naive(ways[1][name], text, image, pairs[:, ::-1], exponents, 0)
    assert ways[0]["cosine"].ranks.max() > 3


def test_the_result_does_not_know_which_side_is_cut_into_rows():
    gen = torch.Generator().manual_seed(0)
    image, text = torch.randn(700, 48, generator=gen), torch.randn(1100, 48, generator=gen)
    pairs = np.array([[t % 700, t] for t in range(1100)])
    options = {"top_k": {"cosine": 5}, "block_bytes": 1 << 20}
    one = rank_both(image, text, pairs, SCORINGS, **options)
    other = rank_both(text, image, pairs[:, ::-1], SCORINGS, **options)
    for a, b in zip(one, reversed(other), strict=True):
        for name in SCORINGS:
            for field in ("queries", "documents", "ranks", "tied", "top_ids", "top_relevant"):
                assert np.array_equal(getattr(a[name], field), getattr(b[name], field)), (name, field)


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 50), m=st.integers(1, 60), data=st.data())
def test_random_vectors_and_relevance_rank_as_in_float64(seed, n, m, data):
    gen = torch.Generator().manual_seed(seed)
    image, text = torch.randn(n, 5, generator=gen), torch.randn(m, 5, generator=gen)
    image[torch.rand(n, generator=gen) < 0.1] = 0.0
    text = torch.where(torch.rand(m, 1, generator=gen) < 0.3, text[:1], text)
    pairs = torch.stack([torch.randint(0, n, (40,), generator=gen), torch.randint(0, m, (40,), generator=gen)], 1)
    pairs = np.unique(pairs.numpy(), axis=0)
    k, block = data.draw(st.integers(1, 70)), data.draw(st.sampled_from([4_000, 20_000, 1 << 22]))
    options = {"top_k": dict.fromkeys(SCORINGS, k), "block_bytes": block}
    ways = rank_both(image, text, pairs, SCORINGS, **options)
    for name, exponents in SCORINGS.items():
        assert_naive(ways[0][name], image, text, pairs, exponents, k)
        assert_naive(ways[1][name], text, image, pairs[:, ::-1], exponents, k)


def test_reduced_precision_that_is_allowed_is_not_used_and_stays_allowed():
    image, text, pairs = case_of("random", 1)
    expected = rank(image, text, pairs, SCORINGS)["dot"].ranks
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert np.array_equal(rank(image, text, pairs, SCORINGS)["dot"].ranks, expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


MEMORY = """
import resource, numpy, torch
from mmclip.retrieval.ranking import rank_both
from mmclip.similarity import FIXED_NORMALIZATIONS
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
torch.set_num_threads(1)
x, n = torch.randn(8000, 8), 8000
scorings = {n.value: n.exponents for n in FIXED_NORMALIZATIONS}
def run(n): rank_both(x[:n], x[:n], numpy.array([[i, i] for i in range(n)]), scorings, block_bytes=4 << 20,
                           top_k={"cosine": 10})
run(50)
before = peak()
run(n)
print(peak() - before)
"""


def test_memory_is_bounded_by_the_block_not_by_the_scores():
    # One score matrix would be 244 MiB.
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 40
