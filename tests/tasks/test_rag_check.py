"""A planted reader proves the plumbing: what a ranking retrieves is what is answered, judged, kept and compared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip.commands.rag import best_documents
from mmclip.data.beir import BeirCollection
from mmclip.errors import UserError
from mmclip.metrics import mean_intervals, paired_difference
from mmclip.similarity import Normalization
from mmclip.tasks.rag import CLOSED, Predictions, check, exact_match, has_answer, token_f1
from tests.helpers.readers import Repeats

SCORINGS = {n: Normalization(n).exponents for n in ("cosine", "dot", "qnorm", "dnorm")}


def planted(queries: int = 12) -> tuple[BeirCollection, torch.Tensor, torch.Tensor]:
    """Document 2i answers query i and is long; document 2i + 1 has the better angle and says something else."""
    angle = torch.arange(queries) * 0.5
    query = torch.stack([angle.cos(), angle.sin()], 1)
    good = 9 * torch.stack([(angle + 0.05).cos(), (angle + 0.05).sin()], 1)
    bad = torch.stack([(angle + 0.01).cos(), (angle + 0.01).sin()], 1)
    document = torch.stack([good, bad], 1).reshape(-1, 2)
    texts = [t for i in range(queries) for t in (f"answer {i}", f"other thing {i}")]
    collection = BeirCollection(
        "planted", "test", [f"q{i}" for i in range(queries)], [f"question {i}?" for i in range(queries)],
        [f"d{i}" for i in range(2 * queries)], texts, [""] * (2 * queries),
        np.array([(i, 2 * i) for i in range(queries)]), np.ones(queries),
        answers=[[f"The answer {i}", "never"] for i in range(queries)],
    )  # fmt: skip
    return collection, query, document


def test_the_scoring_that_retrieves_the_answer_wins(tmp_path: Path) -> None:
    collection, query, document = planted()
    lists = best_documents(query, document, collection, SCORINGS, 1)
    assert lists["qnorm"] == [[2 * i] for i in range(12)] and lists["cosine"] == [[2 * i + 1] for i in range(12)]
    reader = Repeats()
    found = check(collection, lists, reader, Predictions(tmp_path / "p.jsonl"))
    section = found["rag"]["q2d"]
    assert (section["qnorm"]["em"], section["qnorm"]["f1"], section["qnorm"]["answer_recall"]) == (1, 1, 1)
    assert (section["cosine"]["em"], section["cosine"]["answer_recall"]) == (0, 0)
    assert section["cosine"]["f1"] == pytest.approx(np.mean([token_f1(f"other thing {i}", [f"answer {i}"])
                                                             for i in range(12)]))  # fmt: skip
    assert found["rag"][CLOSED]["em"] == 0 and found["rag"][CLOSED]["answer_recall"] is None
    assert found["to_cosine"]["qnorm"]["em"] == {"delta": 1.0, "ci": [1.0, 1.0], "within_noise": False}
    assert found["alike"] == {"dnorm": "cosine", "qnorm": "dot"}
    assert section["dnorm"] == section["cosine"] and section["qnorm"] == section["dot"]
    assert len(reader.asked) == len(set(reader.asked)) == 3 * 12  # two lists and no documents; equal lists share


def test_reversed_answers_let_cosine_win(tmp_path: Path) -> None:
    """The same plumbing the other way round: nothing in it favours length."""
    collection, query, document = planted()
    collection.answers = [[f"other thing {i}"] for i in range(12)]
    found = check(collection, best_documents(query, document, collection, SCORINGS, 1), Repeats(),
                  Predictions(tmp_path / "p.jsonl"), closed_book=False)  # fmt: skip
    assert found["rag"]["q2d"]["cosine"]["em"] == 1 and found["to_cosine"]["qnorm"]["em"]["delta"] == -1
    assert CLOSED not in found["rag"] and CLOSED not in found["to_cosine"]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=6), st.integers(0, 3))
def test_numbers_against_a_plain_loop(
    tmp_path_factory: pytest.TempPathFactory, first: list[tuple[int, int]], seed: int
) -> None:
    n = len(first)
    collection, _, _ = planted(n)
    lists = {"cosine": [[a % (2 * n)] for a, _ in first], "dot": [[b % (2 * n), a % (2 * n)] for a, b in first]}
    store = Predictions(tmp_path_factory.mktemp("p") / "p.jsonl")
    found = check(collection, lists, Repeats(), store, seed=seed)
    em, f1, recall = {}, {}, {}
    for name, rows in lists.items():
        said = [collection.documents[r[0]] for r in rows]
        em[name] = [exact_match(s, a) for s, a in zip(said, collection.answers, strict=True)]
        f1[name] = [token_f1(s, a) for s, a in zip(said, collection.answers, strict=True)]
        recall[name] = [
            has_answer([collection.documents[d] for d in r], a) for r, a in zip(rows, collection.answers, strict=True)
        ]
        values = np.column_stack([em[name], f1[name], recall[name]]).astype(float)
        for metric, column, (mean, lo, hi) in zip(
            ("em", "f1", "answer_recall"), values.T, mean_intervals(values, np.arange(n), seed=seed), strict=True
        ):
            numbers = found["rag"]["q2d"][name]
            assert numbers[metric] == pytest.approx(column.mean()) == pytest.approx(mean)
            assert numbers["ci"][metric] == pytest.approx([lo, hi])
    if lists["dot"] != lists["cosine"]:
        delta, lo, hi = paired_difference(em["cosine"], em["dot"], np.arange(n), seed=seed)
        assert found["to_cosine"]["dot"]["em"] == {"delta": delta, "ci": [lo, hi], "within_noise": lo <= 0 <= hi}
        assert found["per_query"]["dot"]["em"] == em["dot"]


def test_one_query_has_no_interval(tmp_path: Path) -> None:
    collection, query, document = planted(1)
    found = check(collection, best_documents(query, document, collection, SCORINGS, 1), Repeats(),
                  Predictions(tmp_path / "p.jsonl"))  # fmt: skip
    assert found["rag"]["q2d"]["dot"]["ci"] == {"em": None, "f1": None, "answer_recall": None}
    assert found["to_cosine"]["dot"]["em"] == {"delta": 1.0, "ci": None, "within_noise": True}


def test_excluded_documents_are_not_read() -> None:
    collection, query, document = planted(4)
    collection.excluded = {1: [2, 3], 3: [7]}
    lists = best_documents(query, document, collection, SCORINGS, 3)
    for name, found in lists.items():
        full = best_documents(query, document, planted(4)[0], {name: SCORINGS[name]}, 8)[name]
        for q, rows in enumerate(found):
            assert rows == [d for d in full[q] if d not in collection.excluded.get(q, [])][:3]


def test_predictions_outlive_a_killed_run(tmp_path: Path) -> None:
    collection, query, document = planted()
    lists = best_documents(query, document, collection, SCORINGS, 1)
    path = tmp_path / "p.jsonl"

    class Killed(Repeats):
        def generate(self, prompts):
            if len(self.asked) >= 9:
                raise KeyboardInterrupt
            return super().generate(prompts)

    killed = Killed()
    with pytest.raises(KeyboardInterrupt):
        check(collection, lists, killed, Predictions(path))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key": "abc", "te')  # torn as it was written
    reader = Repeats()
    found = check(collection, lists, reader, Predictions(path))
    assert not set(reader.asked) & set(killed.asked) and len(reader.asked) + len(killed.asked) == 36
    assert path.read_bytes().startswith(whole)
    assert len({json.loads(line)["key"] for line in path.read_text().splitlines()}) == 36
    assert found == check(collection, lists, Repeats(), Predictions(tmp_path / "fresh.jsonl"))
    again = Repeats()
    assert check(collection, lists, again, Predictions(path)) == found and again.asked == []
    other = Repeats()
    other.facts = {"name": "another reader"}  # its answers are its own
    check(collection, lists, other, Predictions(path))
    assert len(other.asked) == 36


def test_a_multibyte_character_may_be_torn(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"key": "a", "text": "x"}\n{"key": "b", "text": "' + "é".encode()[:1])
    assert Predictions(path).texts == {"a": "x"}
    assert path.read_bytes() == b'{"key": "a", "text": "x"}\n'


@pytest.mark.parametrize("line", [b"nonsense", b"[1]", b'{"key": "a"}', b'{"key": 1, "text": "x"}', b"\xff"])
def test_a_line_that_is_no_prediction_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"key": "a", "text": "x"}\n' + line + b'\n{"key": "b", "text": "x"}\n')
    with pytest.raises(UserError, match=re.escape("line 2 is no prediction")):
        Predictions(path)
