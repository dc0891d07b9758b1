"""Exact ranks, ties and lists whatever the tiles: against oracles that order all float64 scores."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip.errors import UserError
from mmclip.retrieval import Qrels, Ranking, rank, rank_both
from mmclip.retrieval import ranking as module
from mmclip.roles import FIXED_NORMALIZATIONS, Exponents, Normalization
from mmclip.similarity import score

SCORINGS = {n.value: n.exponents for n in FIXED_NORMALIZATIONS} | {"native": Exponents(0.3, 0.6)}
FIELDS = ("queries", "documents", "gains", "ranks", "tied", "top_ids", "top_relevant", "top_scores")


def oracle_scores(query: torch.Tensor, document: torch.Tensor, name: str) -> np.ndarray:
    """Scores in float64 by the formula that ``name`` stands for, one by one, written out again on purpose."""

    def one(q: list[float], d: list[float]) -> float:
        dot = sum(a * b for a, b in zip(q, d, strict=True))
        nq, nd = math.sqrt(sum(a**2 for a in q)), math.sqrt(sum(b**2 for b in d))
        by = {"cosine": (1, 1), "dot": (0, 0), "qnorm": (1, 0), "dnorm": (0, 1), "native": (0.3, 0.6)}[name]
        return 0.0 if dot == 0 else dot / (nq ** by[0] * nd ** by[1])

    return np.array([[one(q, d) for d in document.tolist()] for q in query.tolist()])


def dense_scores(query: torch.Tensor, document: torch.Tensor, name: str) -> np.ndarray:
    exponents = Exponents(1.0, float(SCORINGS[name].gamma_d))
    return score(query.double(), document.double(), exponents).float().numpy()


def check(ranking: Ranking, scores: np.ndarray, pairs: np.ndarray, k: int) -> None:
    """Against an ordering of all scores [Q, N]: as float32, irrelevant before relevant, then the row."""
    relevant = np.zeros(scores.shape, dtype=bool)
    relevant[pairs[:, 0], pairs[:, 1]] = True
    scores = scores.astype(np.float32)
    assert ranking.queries.tolist() == np.unique(pairs[:, 0]).tolist()
    for i, q in enumerate(ranking.queries):
        order = np.lexsort((np.arange(scores.shape[1]), relevant[q], -scores[q]))
        place = np.argsort(order) + 1
        at = slice(ranking.offsets[i], ranking.offsets[i + 1])
        assert ranking.documents[at].tolist() == np.flatnonzero(relevant[q]).tolist()
        assert ranking.ranks[at].tolist() == place[ranking.documents[at]].tolist()
        assert ranking.top_ids[i].tolist() == order[:k].tolist()
        assert ranking.top_relevant[i].tolist() == relevant[q, order[:k]].tolist()
        assert bool(ranking.tied[i]) == np.isin(scores[q][~relevant[q]], scores[q][relevant[q]]).any()


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Integer vectors: exact scores, many ties, zero vectors; several relevant documents; any block size."""
    n, m, dim = draw(st.integers(1, 6)), draw(st.integers(1, 9)), draw(st.integers(1, 3))
    # Norms like 5 and 13 make normalized scores tie, too, and float64 rounding cannot split those after one rounding to
    # float32.
    value = st.sampled_from([0, 3, 4, -3, 5, 12])
    image = np.array(draw(st.lists(st.lists(value, min_size=dim, max_size=dim), min_size=n, max_size=n)))
    text = np.array(draw(st.lists(st.lists(value, min_size=dim, max_size=dim), min_size=m, max_size=m)))
    pairs = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, m - 1)), min_size=1, max_size=12))
    return image.astype(np.float32), text.astype(np.float32), np.array(pairs), draw(st.sampled_from([1, 500, 1 << 20]))


def check_both(image, text, pairs: np.ndarray, k: int, scores_of, **options) -> tuple[dict, dict]:
    """Both directions together and each alone, against scores_of(query, document, scoring); the rankings."""
    options |= {"top_k": dict.fromkeys(SCORINGS, k)}
    both = rank_both(image, text, pairs, SCORINGS, **options)
    for (query, document, own), found in zip(((image, text, pairs), (text, image, pairs[:, ::-1])), both, strict=True):
        alone = rank(query, document, own, SCORINGS, **options)
        for name in SCORINGS:
            scores = scores_of(query, document, name)
            check(found[name], scores, own, k)
            check(alone[name], scores, own, k)
            listed = np.take_along_axis(scores[found[name].queries], found[name].top_ids, axis=1)
            if scores_of is dense_scores:
                assert found[name].top_scores == pytest.approx(listed, rel=1e-6, abs=1e-12)
        for one, other in (("cosine", "dnorm"), ("dot", "qnorm")):
            assert np.array_equal(found[one].ranks, found[other].ranks)  # Prop. 4.1
    return both


@given(case=cases(), often=st.sampled_from([0, 4, 10**9]))
def test_tie_heavy_integers_rank_as_the_written_out_formulas(case, often):
    image, text, pairs, block_bytes = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_OFTEN", often)  # documents one by one, as usual, all of a tile
        check_both(torch.tensor(image), torch.tensor(text), pairs, 4, oracle_scores, block_bytes=block_bytes)


def case_of(kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """150 images and 400 texts; most kinds have scores that a float32 product puts in the wrong order."""
    gen = torch.Generator().manual_seed(seed)
    image, text = torch.randn(150, 24, generator=gen), torch.randn(400, 24, generator=gen)
    if kind == "planted":
        text = image.repeat_interleave(3, 0)[:400] + 0.5 * text[: min(400, 450)]
    elif kind == "collapsed":
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
    if kind == "planted":
        pairs = torch.stack([torch.arange(400) // 3, torch.arange(400)], 1)
    crowd = torch.stack([torch.full((30,), 3), torch.arange(30)], 1)  # one image with many texts
    return image, text, np.unique(torch.cat([pairs, crowd]).numpy(), axis=0)


KINDS = ["random", "planted", "collapsed", "duplicates", "near duplicates", "one giant", "zeros"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("block_bytes", "often"), [(200_000, 0), (200_000, 4), (200_000, 10**9), (1 << 26, 4)])
def test_close_scores_rank_as_in_float64_however_they_are_counted(kind, block_bytes, often, monkeypatch):
    monkeypatch.setattr(module, "_OFTEN", often)
    monkeypatch.setattr(module, "_WAITING", 3000)
    both = check_both(*case_of(kind, KINDS.index(kind)), 7, dense_scores, block_bytes=block_bytes)
    if kind == "random":
        assert not np.array_equal(both[0]["cosine"].ranks, both[0]["dot"].ranks)


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 50), m=st.integers(1, 60), data=st.data())
def test_random_vectors_and_relevance_rank_as_in_float64(seed, n, m, data):
    gen = torch.Generator().manual_seed(seed)
    image, text = torch.randn(n, 5, generator=gen), torch.randn(m, 5, generator=gen)
    image[torch.rand(n, generator=gen) < 0.1] = 0.0
    text = torch.where(torch.rand(m, 1, generator=gen) < 0.3, text[:1], text)
    pairs = torch.stack([torch.randint(0, n, (40,), generator=gen), torch.randint(0, m, (40,), generator=gen)], 1)
    k, block = data.draw(st.integers(1, 70)), data.draw(st.sampled_from([4_000, 20_000, 1 << 22]))
    check_both(image, text, np.unique(pairs.numpy(), axis=0), k, dense_scores, block_bytes=block)


def test_the_result_is_the_same_whichever_side_is_cut_into_rows():
    gen = torch.Generator().manual_seed(0)
    image, text = torch.randn(700, 48, generator=gen), torch.randn(1100, 48, generator=gen)
    qrels = Qrels(np.array([[t % 700, t] for t in range(1100)]), 1 + np.arange(1100) % 3)
    options = {"top_k": {"cosine": 5}, "block_bytes": 1 << 20}
    one = rank_both(image, text, qrels, SCORINGS, **options)
    other = rank_both(text, image, qrels.transposed(), SCORINGS, **options)
    for a, b in zip(one, reversed(other), strict=True):
        for name in SCORINGS:
            for field in FIELDS:
                assert np.array_equal(getattr(a[name], field), getattr(b[name], field)), (name, field)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("first", DTYPES)
@pytest.mark.parametrize("second", DTYPES)
def test_all_real_floating_types_and_their_mixtures_rank_by_their_exact_values(first, second, monkeypatch):
    gen = torch.Generator().manual_seed(5)
    image, text = torch.randn(60, 16, generator=gen).to(first), (40 * torch.randn(90, 16, generator=gen)).to(second)
    learned = {"native": Exponents(torch.tensor(0.3, requires_grad=True), torch.tensor(0.6))}
    monkeypatch.setattr(sys.modules[__name__], "SCORINGS", SCORINGS | learned)
    check_both(image, text, np.array([[i % 60, i] for i in range(90)]), 5, dense_scores, block_bytes=30_000)


def test_less_relevant_documents_stand_first_among_equals():
    query, document = torch.ones(1, 2), torch.ones(4, 2)
    found = rank(query, document, Qrels([[0, 0], [0, 2], [0, 3]], [3, 1, 2]), SCORINGS, top_k={"dot": 4})["dot"]
    assert found.gains.tolist() == [3, 1, 2]
    assert found.ranks.tolist() == [4, 2, 3]
    assert found.top_ids.tolist() == [[1, 2, 3, 0]]


@pytest.mark.parametrize("block_bytes", [100_000, 1 << 26])
def test_equal_vectors_tie_wherever_they_stand_and_whatever_the_block(block_bytes):
    gen = torch.Generator().manual_seed(1)
    query, document = torch.randn(50, 33, generator=gen), torch.randn(1, 33, generator=gen).expand(203, 33).contiguous()
    pairs = np.array([[i, i] for i in range(50)])
    found = rank(query, document, pairs, SCORINGS, top_k={"dot": 3}, block_bytes=block_bytes)
    for ranking in found.values():
        assert (ranking.ranks == 203).all() and ranking.n_tied == 50  # a collapsed model is at the bottom
    assert found["dot"].top_ids[7].tolist() == [0, 1, 2]
    assert found["dot"].top_ids[1].tolist() == [0, 2, 3]  # the relevant one stands behind its equals


def test_progress_ends_at_all_scores():
    x, calls = torch.randn(9, 3), []
    rank_both(x, x[:5], [[0, 0]], SCORINGS, block_bytes=1, progress=lambda *a: calls.append(a))
    assert len(calls) > 1 and calls == sorted(calls) and calls[-1] == (45, 45)


def test_huge_and_tiny_vectors_do_not_overflow():
    query = torch.tensor([[1e30, 2e30], [1e-30, 2e-30]])
    document = torch.tensor([[1e30, 2e30], [2e30, 1e30], [1e-20, 3e-20]])
    # In float32 both of query 0's large products are infinite, hence equal, and query 1's with document 2 is 0.
    for ranking in rank(query, document, [[0, 0], [1, 2]], SCORINGS).values():
        assert ranking.ranks[0] == 1
        assert ranking.n_tied == 0


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


@pytest.mark.parametrize(
    ("query", "document", "words"),
    [
        (torch.full((3, 2), math.nan), torch.ones(2, 2), "query embeddings: row 0"),
        (torch.ones(3, 2), torch.tensor([[0.0, 1.0], [math.inf, 0.0]]), "document embeddings: row 1"),
        (torch.ones(3, 2), torch.ones(2, 5), "share D"),
        (torch.ones(3, 2), torch.ones(1, 2), "document row 1; valid rows are 0 to 0"),
    ],
)
def test_bad_input_is_one_line(query, document, words):
    with pytest.raises(UserError, match=words) as error:
        rank(query, document, [[0, 1]], SCORINGS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("captions", [1, 5])
def test_cosine_hits_equal_clip_benchmark(captions):
    theirs = pytest.importorskip("clip_benchmark.metrics.zeroshot_retrieval")
    norm, gen = torch.nn.functional.normalize, torch.Generator().manual_seed(captions)
    image = torch.randn(80, 16, generator=gen)
    text = image.repeat_interleave(captions, 0) + 1.5 * torch.randn(80 * captions, 16, generator=gen)
    pairs = np.array([[j // captions, j] for j in range(len(text))])
    positive = torch.zeros(len(text), len(image), dtype=torch.bool)
    positive[pairs[:, 1], pairs[:, 0]] = True
    scores = norm(text, dim=-1) @ norm(image, dim=-1).T  # the tool's own: texts x images
    i2t, t2i = rank_both(image, text, pairs, SCORINGS)
    for ranking, s, p in ((t2i["cosine"], scores, positive), (i2t["cosine"], scores.T, positive.T)):
        first = np.minimum.reduceat(ranking.ranks, ranking.offsets[:-1])
        for k in (1, 5, 10):
            hits = theirs.batchify(theirs.recall_at_k, s, p, 32, "cpu", k=k)
            assert float((hits > 0).float().mean()) == pytest.approx(float((first <= k).mean()), abs=1e-7)


@pytest.mark.parametrize("seed", range(6))
def test_excluded_documents_are_as_good_as_not_there(seed: int) -> None:
    """Against ranking every query by itself over the documents that are left, ties and duplicates included."""
    rng = np.random.default_rng(seed)
    n_q, n_d = 9, 30
    query, document = (torch.tensor(rng.integers(-2, 3, (n, 4)).astype(np.float32)) for n in (n_q, n_d))
    pairs = np.array([(q, d) for q in range(n_q) for d in rng.choice(n_d, 1 + q % 4, replace=False)])
    gains = rng.integers(1, 4, len(pairs)).astype(float)
    relevant = set(map(tuple, pairs.tolist()))
    every = [(q, d) for q in range(0, n_q, 2) for d in range(n_d) if (q, d) not in relevant]
    excluded = np.array([pair for pair in every if rng.random() < 0.4])
    top = dict.fromkeys(SCORINGS, 8)
    found = rank(query, document, Qrels(pairs, gains), SCORINGS, top_k=top, excluded=excluded)
    for name, ranking in found.items():
        for i, q in enumerate(ranking.queries):
            left = np.setdiff1d(np.arange(n_d), excluded[excluded[:, 0] == q, 1])
            own = pairs[:, 0] == q
            qrels = Qrels(np.column_stack([np.zeros(own.sum(), int), np.searchsorted(left, pairs[own, 1])]), gains[own])
            alone = rank(query[[q]], document[torch.tensor(left)], qrels, {name: SCORINGS[name]}, top_k={name: 8})[name]
            at = slice(ranking.offsets[i], ranking.offsets[i + 1])
            mine = (
                ranking.ranks[at],
                ranking.gains[at],
                ranking.tied[[i]],
                ranking.top_ids[i],
                ranking.top_relevant[i],
            )
            theirs = (alone.ranks, alone.gains, alone.tied, left[alone.top_ids[0]], alone.top_relevant[0])
            assert all(np.array_equal(*pair) for pair in zip(mine, theirs, strict=True))


def test_exclusion_cuts_lists_and_refuses_a_relevant_document() -> None:
    query, document = torch.ones(2, 2), torch.rand(5, 2)
    how = {"top_k": {"cosine": 5}, "excluded": np.array([[0, 2], [0, 3], [0, 3]])}
    cosine = {"cosine": Normalization.COSINE.exponents}
    assert rank(query, document, [[0, 0], [1, 1]], cosine, **how)["cosine"].top_ids.shape == (2, 3)
    with pytest.raises(UserError, match="document row 3 is relevant to query row 0 and excluded"):
        rank(query, document, [[0, 3], [1, 1]], cosine, **how)
    with pytest.raises(UserError, match="document row 9"):
        rank(query, document, [[0, 0]], cosine, excluded=np.array([[0, 9]]))


MEMORY = """
import resource, numpy, torch
from mmclip.retrieval import rank_both
from mmclip.roles import FIXED_NORMALIZATIONS
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
