"""Ranks against a float64 oracle that computes every formula by itself, in each direction."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip.errors import UserError
from mmclip.retrieval import Qrels, Ranking, rank, rank_both
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
    i2t, t2i = rank_both(torch.as_tensor(image), torch.as_tensor(text), np.array(pairs), SCORINGS, **options)
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


def test_less_relevant_documents_stand_first_among_equals():
    query, document = torch.ones(1, 2), torch.ones(4, 2)
    found = rank(query, document, Qrels([[0, 0], [0, 2], [0, 3]], [3, 1, 2]), SCORINGS, top_k={"dot": 4})["dot"]
    assert found.gains.tolist() == [3, 1, 2]
    assert found.ranks.tolist() == [4, 2, 3]
    assert found.top_ids.tolist() == [[1, 2, 3, 0]]


def test_progress_ends_at_all_scores():
    x, told = torch.randn(9, 3), []
    rank_both(x, x[:5], [[0, 0]], SCORINGS, block_bytes=1, progress=lambda *a: told.append(a))
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
    for block_bytes in (100_000, 1 << 26):
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
    with pytest.raises(UserError, match=words) as error:
        rank(given_["query"], given_["document"], Qrels(given_["pairs"], given_.get("gains")), SCORINGS)
    assert "\n" not in str(error.value)


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


@pytest.mark.parametrize("seed", range(6))
def test_excluded_documents_are_as_good_as_not_there(seed: int) -> None:
    """Against ranking every query by itself over the documents that are left, ties and duplicates included."""
    rng = np.random.default_rng(seed)
    n_q, n_d = 9, 30
    query, document = (torch.tensor(rng.integers(-2, 3, (n, 4)).astype(np.float32)) for n in (n_q, n_d))
    pairs = np.array([(q, d) for q in range(n_q) for d in rng.choice(n_d, 1 + q % 4, replace=False)])
    gains = rng.integers(1, 4, len(pairs)).astype(float)
    taken = set(map(tuple, pairs.tolist()))
    excluded = np.array([(q, d) for q in range(0, n_q, 2) for d in range(n_d)
                         if (q, d) not in taken and rng.random() < 0.4])  # fmt: skip
    top = dict.fromkeys(SCORINGS, 8)
    found = rank(query, document, Qrels(pairs, gains), SCORINGS, top_k=top, excluded=excluded)
    for name, ranking in found.items():
        for i, q in enumerate(ranking.queries):
            left = np.setdiff1d(np.arange(n_d), excluded[excluded[:, 0] == q, 1])
            own = pairs[:, 0] == q
            alone = rank(
                query[[q]],
                document[torch.tensor(left)],
                Qrels(np.column_stack([np.zeros(own.sum(), int), np.searchsorted(left, pairs[own, 1])]), gains[own]),
                {name: SCORINGS[name]},
                top_k={name: 8},
            )[name]
            at = slice(ranking.offsets[i], ranking.offsets[i + 1])
            assert ranking.ranks[at].tolist() == alone.ranks.tolist()
            assert ranking.gains[at].tolist() == alone.gains.tolist()
            assert bool(ranking.tied[i]) == bool(alone.tied[0])
            assert ranking.top_ids[i].tolist() == left[alone.top_ids[0]].tolist()
            assert ranking.top_relevant[i].tolist() == alone.top_relevant[0].tolist()


def test_exclusion_cuts_lists_and_refuses_a_relevant_document() -> None:
    query, document = torch.ones(2, 2), torch.rand(5, 2)
    how = {"top_k": {"cosine": 5}, "excluded": np.array([[0, 2], [0, 3], [0, 3]])}
    cosine = {"cosine": Normalization.COSINE.exponents}
    assert rank(query, document, [[0, 0], [1, 1]], cosine, **how)["cosine"].top_ids.shape == (2, 3)
    with pytest.raises(UserError, match="document row 3 is relevant to query row 0 and excluded"):
        rank(query, document, [[0, 3], [1, 1]], cosine, **how)
    with pytest.raises(UserError, match="document row 9"):
        rank(query, document, [[0, 0]], cosine, excluded=np.array([[0, 9]]))
