"""Vectors for an index: inner products rank as mmclip does, in torch, in FAISS, and where an engine normalizes."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip.embeddings.files import Embeddings
from mmclip.embeddings.serving import (
    SCORINGS,
    MagnitudeLost,
    best_scores,
    check_engine,
    index_vectors,
    norm_augmentation,
    recall_at_k,
)
from mmclip.errors import UserError
from mmclip.models.metadata import native_exponents
from mmclip.retrieval.hubness import document_offsets, reversed_exponents
from mmclip.retrieval.ranking import rank
from mmclip.similarity import Direction, Exponents, Normalization, normalize, score

ALPHA = 3.0


def saved(gamma_q: float = 1.0, gamma_d: float = 0.0, seed: int = 0, n: int = 200, dim: int = 16) -> Embeddings:
    """Random vectors, none twice, of varied norms; two captions an image; the bank is other texts."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(n, dim, generator=generator) * (0.5 + torch.rand(n, 1, generator=generator))
    text = (image.repeat_interleave(2, 0) + torch.randn(2 * n, dim, generator=generator)) * 0.7
    bank = torch.randn(50, dim, generator=generator)
    facts = {"loss": "asym-i2t", "gamma_q": gamma_q, "gamma_d": gamma_d, "logit_scale_i2t": ALPHA}
    owner = torch.arange(2 * n) // 2
    return Embeddings(
        image,
        text,
        torch.stack([owner, torch.arange(2 * n)], dim=1),
        [f"i{i}" for i in range(n)],
        owner=owner.tolist(),
        evidence={"t2i": document_offsets(image, bank, native_exponents(facts), ALPHA)},
        metadata=facts,
        alpha={"i2t": ALPHA},
    )


@pytest.fixture
def faiss() -> Any:
    return pytest.importorskip("faiss", reason="faiss is not installed: pip install -e '.[serving]'")


@given(st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from(list(SCORINGS)))
def test_inner_products_are_the_scores_over_alpha(gamma_q: float, gamma_d: float, scoring: str) -> None:
    data = saved(gamma_q, gamma_d, n=9)
    native = Exponents(gamma_q, gamma_d)
    documents, prepare = index_vectors(data, Direction.T2I, scoring)
    found = prepare(data.text).double() @ documents.double().T
    backwards = score(data.image.double(), data.text.double(), native).T  # the trained matrix, i2t
    if scoring == "corrected":
        wanted = backwards - (data.evidence["t2i"] - data.evidence["t2i"].mean()) / ALPHA
    elif scoring == "reversed":
        wanted = backwards
    else:
        exponents = native if scoring == "native" else Normalization(scoring).exponents
        wanted = score(data.text.double(), data.image.double(), exponents)
    assert documents.dtype == torch.float32 and torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_documents_that_join_later_need_the_first_zero_point() -> None:
    data = saved(n=20)
    whole, _ = index_vectors(data, Direction.T2I, "corrected")
    later = dataclasses.replace(
        data,
        image=data.image[:5],
        image_ids=data.image_ids[:5],
        pairs=data.pairs[:10],
        owner=None,
        evidence={"t2i": data.evidence["t2i"][:5]},
    )
    zero_point = float(data.evidence["t2i"].mean())
    assert torch.equal(index_vectors(later, Direction.T2I, "corrected", zero_point)[0], whole[:5])
    assert abs(float(index_vectors(later, Direction.T2I, "corrected")[0][:, -1].mean())) < 1e-6


def test_a_plain_clip_is_native_in_cosine() -> None:
    data = saved(n=5)
    data.metadata = {}
    assert torch.equal(index_vectors(data, Direction.I2T)[0], normalize(data.text.double(), 1.0).float())


@pytest.mark.parametrize(
    ("direction", "scoring", "message"),
    [
        ("q2d", "native", "direction 'q2d': expected i2t or t2i"),
        ("t2i", "cos", "scoring 'cos': expected one of native, corrected, reversed, cosine"),
        ("i2t", "corrected", "corrected of i2t needs evidence_i2t; there: evidence_t2i"),
    ],
)
def test_what_cannot_be_served_is_refused(direction: str, scoring: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        index_vectors(saved(n=3), direction, scoring)


@given(st.integers(0, 20))
def test_the_augmentation_ranks_as_the_inner_product_even_after_normalizing(seed: int) -> None:
    data = saved(seed=seed, n=30)
    documents, prepare = index_vectors(data, Direction.T2I, "corrected")
    queries = prepare(data.text)
    rows, augment = norm_augmentation(documents)
    assert torch.allclose(rows.norm(dim=1), torch.ones(len(rows)), atol=1e-6)
    plain = queries.double() @ documents.double().T
    unit = normalize(augment(queries).double(), 1.0) @ normalize(rows.double(), 1.0).T
    length = queries.double().norm(dim=1, keepdim=True) * documents.double().norm(dim=1).max()
    assert torch.allclose(unit * length, plain, atol=1e-5)
    assert recall_at_k(documents, queries, best_scores(normalize(rows, 1.0), augment(queries), 5)[1], 5) == 1.0


@pytest.mark.parametrize("longest", [4.9, float("nan"), float("inf"), 0.0])
def test_later_documents_need_room(longest: float) -> None:
    documents = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    assert torch.allclose(norm_augmentation(documents, longest=10.0)[0][0], torch.tensor([0.3, 0.4, 0.75**0.5]))
    with pytest.raises(UserError, match="document norms are up to 5"):
        norm_augmentation(documents, longest)
    with pytest.raises(UserError, match="norms are up to 0"):
        norm_augmentation(documents * 0)


def test_recall_counts_ties_as_equal_and_gaps_and_repeats_as_misses() -> None:
    documents, query = torch.tensor([[2.0], [1.0], [2.0], [2.0], [0.0]]), torch.tensor([[1.0]])
    for ids, share in (([0, 2], 1.0), ([3, 2], 1.0), ([0, 1], 0.5), ([0, -1], 0.5), ([3, 3], 0.5), ([4, 1], 0.0)):
        assert recall_at_k(documents, query, np.array([ids]), 2) == share
    assert recall_at_k(documents, query, np.array([[4, 3, 2, 1, 0]]), 9) == 1.0  # k is clamped
    for ids in ([[5]], [[0], [0]]):
        with pytest.raises(UserError, match="rows of up to 1 documents for each of 1 queries, below 5"):
            recall_at_k(documents, query, np.array(ids), 1)


def test_a_normalizing_engine_is_warned_of_and_an_honest_one_is_not() -> None:
    data = saved()
    documents, prepare = index_vectors(data, Direction.T2I, "native")
    queries = prepare(data.text)

    def engine(rows: torch.Tensor) -> Any:
        return lambda q, k: (torch.from_numpy(q) @ rows.T).topk(k).indices.numpy()

    with pytest.warns(MagnitudeLost, match="ranks by cosine: .* choose inner product"):
        lost = check_engine(engine(normalize(documents, 1.0)), documents, queries)
    assert lost.cosine_recall == 1.0 and lost.recall == lost.kept_by_cosine < 0.8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_engine(engine(documents), documents, queries).recall == 1.0
        unit = normalize(documents, 1.0)
        assert check_engine(engine(unit), unit, queries) == (1.0, 1.0, 1.0)  # nothing to lose


@pytest.mark.parametrize(
    ("direction", "scoring"), [(Direction.I2T, "native"), (Direction.T2I, "native"), (Direction.T2I, "corrected")]
)
def test_faiss_flat_returns_the_exact_ids(faiss: Any, direction: Direction, scoring: str) -> None:
    data = saved()
    documents, prepare = index_vectors(data, direction, scoring)
    query, document = direction.roles({"image": data.image, "text": data.text})
    pairs = data.pairs if direction is Direction.I2T else data.pairs.flip(1)
    if scoring == "corrected":
        bias = (data.evidence["t2i"] / ALPHA)[None]
        scores = score(query.double(), document.double(), reversed_exponents(native_exponents(data.metadata))) - bias
        top_ids = scores.topk(10).indices.numpy()
        ranked = rank(prepare(query), documents, pairs, {"x": Normalization.DOT.exponents}, top_k={"x": 10})["x"]
        assert (ranked.top_ids == top_ids).all()
    else:
        top_ids = rank(query, document, pairs, {"x": native_exponents(data.metadata)}, top_k={"x": 10})["x"].top_ids
    index = faiss.IndexFlatIP(documents.shape[1])
    index.add(documents.numpy())
    assert (index.search(prepare(query).numpy(), 10)[1] == top_ids).all()


def test_faiss_that_normalizes_both_sides_ranks_the_augmented_as_inner_products(faiss: Any) -> None:
    data = saved()
    documents, prepare = index_vectors(data, Direction.T2I, "corrected")
    queries = prepare(data.text)

    def normalizing(rows: torch.Tensor, augment: Any) -> Any:
        stored = rows.numpy().copy()
        faiss.normalize_L2(stored)
        index = faiss.IndexFlatIP(stored.shape[1])
        index.add(stored)

        def search(q: np.ndarray[Any, Any], k: int) -> Any:
            asked = augment(torch.from_numpy(q)).numpy().copy()
            faiss.normalize_L2(asked)
            return index.search(asked, k)[1]

        return search

    rows, augment = norm_augmentation(documents)
    assert check_engine(normalizing(rows, augment), documents, queries).recall == 1.0
    with pytest.warns(MagnitudeLost):
        check_engine(normalizing(documents, lambda q: q), documents, queries)


def test_faiss_hnsw_and_int8_find_most(faiss: Any) -> None:
    data = saved(n=1000)
    documents, prepare = index_vectors(data, Direction.T2I, "corrected")
    queries = prepare(data.text)
    graph = faiss.IndexHNSWFlat(documents.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction, graph.hnsw.efSearch = 200, 256
    kind = faiss.ScalarQuantizer.QT_8bit
    int8 = faiss.IndexScalarQuantizer(documents.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
    int8.train(documents.numpy())
    for index in (graph, int8):
        index.add(documents.numpy())
        assert recall_at_k(documents, queries, index.search(queries.numpy(), 10)[1]) > 0.95
