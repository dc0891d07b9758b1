"""What a run says before its first step and after its last: the words for scoring, vectors encoded once, titles."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mmclip.data.beir import BeirCollection
from mmclip.data.text_pairs import open_pairs
from mmclip.training.text_finish import Evaluations, _title_vectors, _training_vectors, how_to_score
from tests.helpers.texts import make_beir


class Encoder:
    """Counts what it is given; a text's vector is (its words, the role)."""

    dim = 2

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str]]] = []

    def encode(self, texts: list[str], role: str, batch_size: int) -> torch.Tensor:
        self.asked.append((role, texts))
        return torch.tensor([[len(t.split()), float(role == "document")] for t in texts])


def collection(titles: list[str], texts: list[str], split: str = "test") -> BeirCollection:
    documents = [f"{a} {b}".strip() for a, b in zip(titles, texts, strict=True)]
    names = [f"d{i}" for i in range(len(documents))]
    return BeirCollection("p", split, ["q"], ["what"], names, documents, titles, np.array([[0, 0]]), np.ones(1))


@pytest.mark.parametrize(
    ("norm", "gamma_d", "words"),
    [
        ("cosine", 1.0, "by cosine"),
        ("dnorm", 1.0, "by cosine"),
        ("dot", 0.0, "raw vectors"),
        ("qnorm", 0.0, "raw vectors"),
        ("learned", 0.25, "to the power of 0.25"),
    ],
)
def test_the_model_says_how_to_score_it(norm: str, gamma_d: float, words: str) -> None:
    assert words in how_to_score(norm, gamma_d)


def test_documents_of_another_split_are_encoded_once_until_the_model_changes() -> None:
    model = Encoder()
    evaluations = Evaluations(SimpleNamespace(encode_batch_size=8), model)  # type: ignore[arg-type]
    for split in ("test", "dev"):
        _, document = evaluations.vectors_of(collection(["a", ""], ["b c", "d"], split))
        assert document[:, 0].tolist() == [3, 1]
    assert [role for role, _ in model.asked] == ["document", "query", "query"]
    evaluations.vectors_of(collection(["a", ""], ["b c", "other words"]))
    evaluations.forget()
    evaluations.vectors_of(collection(["a", ""], ["b c", "other words"]))
    assert [role for role, _ in model.asked].count("document") == 3


def run_of(model: Encoder) -> Any:
    return SimpleNamespace(model=model, settings=SimpleNamespace(seed=0, encode_batch_size=8))


def test_a_title_asks_for_its_text_alone_where_there_are_enough() -> None:
    titles = [f"title {i}" for i in range(10)] + ["title 0", "", "alone"]
    texts = [f"text of {i}" for i in range(10)] + ["twice", "untitled", ""]
    model = Encoder()
    assert _title_vectors(run_of(model), collection(titles, texts)) is not None
    (query, asked), (document, answers) = model.asked
    assert (query, document) == ("query", "document")
    assert asked == [f"title {i}" for i in range(10)] and answers == [f"text of {i}" for i in range(10)]
    assert _title_vectors(run_of(Encoder()), collection(titles[:7], texts[:7])) is None, "8 are needed, 4 a dimension"


def test_training_pairs_are_measured_with_each_text_once(tmp_path: Path) -> None:
    pairs = open_pairs(make_beir(tmp_path / "beir"), "train")
    model = Encoder()
    query, document, (queries, documents) = _training_vectors(run_of(model), pairs)
    assert len(queries) == len(documents) == min(len(pairs), 16) and len(query) == queries.max() + 1
    for rows, (_, texts), column in zip((queries, documents), model.asked, ("queries", "documents"), strict=True):
        assert len(texts) == len(set(texts))
        assert {texts[row] for row in rows} <= set(getattr(pairs, column))
    judged = set(zip(pairs.queries, pairs.documents, strict=True))
    assert {(model.asked[0][1][q], model.asked[1][1][d]) for q, d in zip(queries, documents, strict=True)} <= judged
    assert document[:, 1].eq(1).all() and query[:, 1].eq(0).all()
