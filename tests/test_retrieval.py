"""Ranks against a float64 oracle that computes every formula by itself, in each direction."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip.errors import UsageError
from mmclip.relevance import group_pairs
from mmclip.retrieval import Ranking, rank, rank_both_ways
from mmclip.similarity import FIXED_NORMALIZATIONS, Exponents, Normalization, score

SCORINGS = {n.value: n.exponents for n in FIXED_NORMALIZATIONS} | {"native": Exponents(0.3, 0.6)}


def oracle_score(q: np.ndarray, d: np.ndarray, name: str) -> float:
    """One score in float64 by the formula that ``name`` stands for, written out again on purpose."""
    dot = sum(float(a) * float(b) for a, b in zip(q, d, strict=True))
    nq, nd = math.sqrt(sum(float(a) ** 2 for a in q)), math.sqrt(sum(float(b) ** 2 for b in d))
    if dot == 0:
        return 0.0
    return {
        "cosine": lambda: dot / (nq * nd),
        "dot": lambda: dot,
        "qnorm": lambda: dot / nq,
        "dnorm": lambda: dot / nd,
        "native": lambda: dot / (nq**0.3 * nd**0.6),
    }[name]()


def oracle_order(scores: list[float], relevant: set[int]) -> list[int]:
    """Documents in order: score as float32, irrelevant before relevant, then the row."""
    return sorted(range(len(scores)), key=lambda j: (-np.float32(scores[j]), j in relevant, j))


def check(ranking: Ranking, query: np.ndarray, document: np.ndarray, pairs: list[tuple[int, int]], name: str) -> None:
    relevant: dict[int, set[int]] = {}
    for q, d in pairs:
        relevant.setdefault(q, set()).add(d)
    assert ranking.queries.tolist() == sorted(relevant)
    for i, q in enumerate(ranking.queries):
        scores = [oracle_score(query[q], d, name) for d in document]
        order = oracle_order(scores, relevant[q])
        at = slice(ranking.offsets[i], ranking.offsets[i + 1])
        got = dict(zip(ranking.documents[at].tolist(), ranking.ranks[at].tolist(), strict=True))
        assert got == {d: order.index(d) + 1 for d in relevant[q]}, name
        k = ranking.top_ids.shape[1]
        assert ranking.top_ids[i].tolist() == order[:k]
        assert ranking.top_relevant[i].tolist() == [d in relevant[q] for d in order[:k]]
        rel = {np.float32(scores[d]) for d in relevant[q]}
        tied = any(np.float32(scores[d]) in rel for d in range(len(scores)) if d not in relevant[q])
        assert bool(ranking.tied[i]) == tied


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]], int]:
    """Integer vectors: exact scores, many ties, zero vectors; several relevant documents; any block size."""
    n, m, dim = draw(st.integers(1, 6)), draw(st.integers(1, 9)), draw(st.integers(1, 3))
    # 0, 3, 4, 5, 12: lengths like 5 and 13 make normalized scores tie too, and float64 rounding cannot split those
    # ties after one rounding to float32.
    value = st.sampled_from([0, 3, 4, -3, 5, 12])
    image = np.array(draw(st.lists(st.lists(value, min_size=dim, max_size=dim), min_size=n, max_size=n)))
    text = np.array(draw(st.lists(st.lists(value, min_size=dim, max_size=dim), min_size=m, max_size=m)))
    pair = st.tuples(st.integers(0, n - 1), st.integers(0, m - 1))
    pairs = draw(st.lists(pair, min_size=1, max_size=12))
    return image, text, pairs, draw(st.sampled_from([1, 500, 1 << 20]))


def both_directions(image, text, pairs, **options):
    """direction -> (query, document, (query row, document row) pairs, rankings), by one product for both."""
    i2t, t2i = rank_both_ways(torch.as_tensor(image), torch.as_tensor(text), np.array(pairs), SCORINGS, **options)
    turned = [(t, i) for i, t in pairs]
    return {"i2t": (image, text, pairs, i2t), "t2i": (text, image, turned, t2i)}


@given(case=cases())
def test_ranks_and_best_equal_the_oracle_in_both_directions(case):
    image, text, pairs, block_bytes = case
    image, text = image.astype(np.float32), text.astype(np.float32)
    options = {"top_k": dict.fromkeys(SCORINGS, 4), "block_bytes": block_bytes}
    for query, document, own, found in both_directions(image, text, pairs, **options).values():
        alone = rank(torch.tensor(query), torch.tensor(document), np.array(own), SCORINGS, **options)
        for name in SCORINGS:
            # Integer vectors: the oracle's own scores are either equal or clearly apart.
            check(found[name], query, document, own, name)
            check(alone[name], query, document, own, name)


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


def real_case(kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
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
    image, text, pairs = real_case(kind, KINDS.index(kind))
    options = {"top_k": dict.fromkeys(SCORINGS, 7), "block_bytes": block_bytes}
    ways = rank_both_ways(image, text, pairs, SCORINGS, **options)
    for (query, document, own), found in zip(((image, text, pairs), (text, image, pairs[:, ::-1])), ways, strict=True):
        alone = rank(query, document, own, SCORINGS, **options)
        for name, exponents in SCORINGS.items():
            assert_naive(found[name], query, document, own, exponents, 7)
            assert_naive(alone[name], query, document, own, exponents, 7)
        for one, other in (("cosine", "dnorm"), ("dot", "qnorm")):
            assert np.array_equal(found[one].ranks, found[other].ranks)  # Prop. 4.1
    if kind == "random":
        assert not np.array_equal(ways[0]["cosine"].ranks, ways[0]["dot"].ranks)


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
    ways = rank_both_ways(image, text, pairs, SCORINGS, **options)
    for name, exponents in SCORINGS.items():
        assert_naive(ways[0][name], image, text, pairs, exponents, k)
        assert_naive(ways[1][name], text, image, pairs[:, ::-1], exponents, k)


def test_less_relevant_documents_stand_first_among_equals():
    query, document = torch.ones(1, 2), torch.ones(4, 2)
    found = rank(query, document, [[0, 0], [0, 2], [0, 3]], SCORINGS, gains=[3, 1, 2], top_k={"dot": 4})["dot"]
    assert found.gains.tolist() == [3, 1, 2]
    assert found.ranks.tolist() == [4, 2, 3]
    assert found.top_ids.tolist() == [[1, 2, 3, 0]]


def test_of_repeated_pairs_the_largest_gain_counts():
    x = torch.eye(3)
    found = rank(x, x, [[1, 0], [0, 2], [1, 0]], SCORINGS, gains=[1, 5, 2])["dot"]
    assert (found.queries.tolist(), found.documents.tolist(), found.gains.tolist()) == ([0, 1], [2, 0], [5, 2])


def test_reduced_precision_that_is_allowed_is_not_used_and_stays_allowed():
    image, text, pairs = real_case("random", 1)
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
from mmclip.retrieval import rank_both_ways
from mmclip.similarity import FIXED_NORMALIZATIONS
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
torch.set_num_threads(1)
x, n = torch.randn(8000, 8), 8000
scorings = {n.value: n.exponents for n in FIXED_NORMALIZATIONS}
def run(n): rank_both_ways(x[:n], x[:n], numpy.array([[i, i] for i in range(n)]), scorings, block_bytes=4 << 20,
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


def test_progress_ends_at_all_scores():
    x, told = torch.randn(9, 3), []
    rank_both_ways(x, x[:5], [[0, 0]], SCORINGS, block_bytes=1, progress=lambda *a: told.append(a))
    assert len(told) > 1 and told == sorted(told) and told[-1] == (45, 45)


def test_the_two_directions_of_qnorm_are_two_matrices():
    gen = torch.Generator().manual_seed(0)
    image, text = torch.randn(6, 4, generator=gen), 3 * torch.randn(6, 4, generator=gen)
    i2t, t2i = (score(*x, Normalization.QNORM.exponents) for x in ((image, text), (text, image)))
    assert not torch.allclose(i2t, t2i.T, rtol=1e-2)
    pairs = np.array([[i, i] for i in range(6)])
    ranks = [rank(*x, pairs, SCORINGS)["qnorm"].ranks for x in ((image, text), (text, image))]
    transposed = [1 + int((i2t[:, j] > i2t[j, j]).sum()) for j in range(6)]
    assert ranks[1].tolist() != transposed  # what a transpose of i2t would have said


def test_equal_vectors_tie_wherever_they_stand_and_whatever_the_block():
    gen = torch.Generator().manual_seed(1)
    one = torch.randn(1, 33, generator=gen)
    query, document = torch.randn(50, 33, generator=gen), one.expand(203, 33).contiguous()
    pairs = np.array([[i, i] for i in range(50)])
    for block_bytes in (1, 30_000, 1 << 26):
        found = rank(query, document, pairs, SCORINGS, top_k={"dot": 3}, block_bytes=block_bytes)
        for ranking in found.values():
            assert (ranking.ranks == 203).all()  # a collapsed model is at the bottom
            assert ranking.n_tied == 50
        assert found["dot"].top_ids[7].tolist() == [0, 1, 2]
        assert found["dot"].top_ids[1].tolist() == [0, 2, 3]  # the relevant one stands behind its equals


def test_huge_and_tiny_vectors_do_not_overflow():
    query = torch.tensor([[1e30, 2e30], [1e-30, 2e-30]])
    document = torch.tensor([[1e30, 2e30], [2e30, 1e30], [1e-20, 3e-20]])
    # In float32 both of query 0's large products are infinite, hence equal, and query 1's with document 2 is 0.
    for ranking in rank(query, document, [[0, 0], [1, 2]], SCORINGS).values():
        assert ranking.ranks[0] == 1
        assert ranking.n_tied == 0


def test_half_precision_embeddings_and_learned_exponents_are_accepted():
    x = torch.eye(3, dtype=torch.float16) * 300
    learned = {"native": Exponents(torch.tensor(0.5, requires_grad=True), torch.tensor(0.5))}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rank(x, x, [[i, i] for i in range(3)], learned)["native"].ranks.tolist() == [1, 1, 1]


def test_k_above_the_candidates_is_clamped():
    x = torch.eye(3)
    assert rank(x, x, [[0, 0]], SCORINGS, top_k={"dot": 10})["dot"].top_ids.shape == (1, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": torch.full((3, 2), math.nan)}, "query embeddings: row 0"),
        ({"document": torch.tensor([[0.0, 1.0], [math.inf, 0.0]])}, "document embeddings: row 1"),
        ({"document": torch.ones(2, 5)}, "share D"),
        ({"pairs": [[0, 2]]}, "document row 2; valid rows are 0 to 1"),
        ({"pairs": [[-1, 0]]}, "query row -1"),
        ({"pairs": np.empty((0, 2))}, "at least one"),
        ({"pairs": [0, 1]}, r"shape \[P, 2\]"),
        ({"gains": [0.0]}, "above 0"),
        ({"gains": [1.0, 1.0]}, r"gains of shape \[2\] for 1"),
    ],
)
def test_bad_input_is_one_line(change, words):
    given_ = {"query": torch.ones(3, 2), "document": torch.ones(2, 2), "pairs": [[0, 0]]} | change
    with pytest.raises(UsageError, match=words) as error:
        rank(given_["query"], given_["document"], given_["pairs"], SCORINGS, gains=given_.get("gains"))
    assert "\n" not in str(error.value)


def test_repeated_pairs_count_once():
    queries, offsets, documents = group_pairs(np.array([[1, 0], [1, 0], [1, 2]]), 2, 3)
    assert (queries.tolist(), offsets.tolist(), documents.tolist()) == ([1], [0, 2], [0, 2])


def test_cosine_hits_equal_clip_benchmark():
    metrics_cb = pytest.importorskip("clip_benchmark.metrics.zeroshot_retrieval")
    for captions in (1, 5):
        gen = torch.Generator().manual_seed(captions)
        image = torch.randn(80, 16, generator=gen)
        text = image.repeat_interleave(captions, 0) + 1.5 * torch.randn(80 * captions, 16, generator=gen)
        pairs = np.array([[j // captions, j] for j in range(len(text))])
        positive = torch.zeros(len(text), len(image), dtype=torch.bool)
        positive[pairs[:, 1], pairs[:, 0]] = True
        norm = torch.nn.functional.normalize
        scores = norm(text, dim=-1) @ norm(image, dim=-1).T  # the tool's own: texts x images
        for query, document, own, s, p in (
            (text, image, pairs[:, ::-1], scores, positive),
            (image, text, pairs, scores.T, positive.T),
        ):
            ranking = rank(query, document, own, SCORINGS)["cosine"]
            first = np.minimum.reduceat(ranking.ranks, ranking.offsets[:-1])
            for k in (1, 5, 10):
                theirs = metrics_cb.batchify(metrics_cb.recall_at_k, s, p, 32, "cpu", k=k)
                assert float((theirs > 0).float().mean()) == pytest.approx(float((first <= k).mean()), abs=1e-7)
