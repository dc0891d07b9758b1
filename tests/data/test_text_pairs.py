"""Training pairs: numbers by text, triples and their faults, what trains and what is held out."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmclip.data.beir import open_beir
from mmclip.data.text_pairs import TextPairs, hold_out, open_pairs
from mmclip.errors import UserError
from tests.helpers.texts import make_beir, write_jsonl, write_qrels

WORD = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\r"), min_size=1).filter(str.strip)


def refusal(path: Path, content: str | bytes | None = None) -> str:
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        open_pairs(path)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def triples(tmp_path: Path) -> Path:
    rows = [f"query {q}\tpositive {q} {k}\tnegative {q}\tpositive 0 0\n" for q in range(10) for k in range(1 + q % 2)]
    path = tmp_path / "triples.tsv"
    path.write_text("".join(rows))
    return path


def check(pairs: TextPairs) -> None:
    """Equal numbers are equal texts, on each side, and every pair is known to be relevant."""
    assert pairs.query_ids.dtype == pairs.document_ids.dtype == pairs.relevant.dtype == np.int64
    texts = [[pairs.documents[i], *pairs.negatives[i]] for i in range(len(pairs))]
    for ids, said in (
        (pairs.query_ids.tolist(), pairs.queries),
        (pairs.document_ids.ravel().tolist(), [t for row in texts for t in row]),
    ):
        assert len(set(ids)) == len(set(said)) == len(set(zip(ids, said, strict=True)))
    known = set(map(tuple, pairs.relevant.tolist()))
    assert len(known) == len(pairs.relevant)
    assert set(zip(pairs.query_ids.tolist(), pairs.document_ids[:, 0].tolist(), strict=True)) <= known


@given(st.integers(0, 3).flatmap(lambda k: st.lists(st.lists(WORD, min_size=2 + k, max_size=2 + k), min_size=1)))
def test_triples_are_read_back_from_either_kind(rows: list[list[str]]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        tsv, jsonl, listed = (Path(scratch) / name for name in ("a.tsv", "a.jsonl", "b.jsonl"))
        tsv.write_bytes("\n".join("\t".join(row) for row in rows).encode())
        names = ["query", "positive", "negative", "negative_1", "negative_2"]
        write_jsonl(jsonl, (dict(reversed(list(zip(names[: len(row)], row, strict=True)))) for row in rows))
        write_jsonl(listed, ({"anchor": q, "positive": p, "negatives": n, "other": 1} for q, p, *n in rows))
        read = [open_pairs(path) for path in (tsv, jsonl, listed)]
    for pairs in read:
        assert [[q, p, *n] for q, p, n in zip(pairs.queries, pairs.documents, pairs.negatives, strict=True)] == rows
        assert pairs.n_negatives == len(rows[0]) - 2 and pairs.n_queries == len({row[0] for row in rows})
        assert len(pairs.relevant) == len({tuple(row[:2]) for row in rows})
        check(pairs)


def test_a_beir_folder_gives_a_pair_a_judgment(tmp_path: Path) -> None:
    folder = make_beir(tmp_path / "beir", splits=("train",))
    pairs, collection = open_pairs(folder, "train"), open_beir(folder, "train")
    check(pairs)
    assert len(pairs) == len(pairs.relevant) == len(collection.pairs) == 32 and pairs.n_negatives == 0
    assert pairs.queries == [collection.queries[q] for q, _ in collection.pairs]
    assert pairs.documents == [collection.documents[d] for _, d in collection.pairs]


def test_equal_texts_have_one_number_and_empty_ones_leave(tmp_path: Path) -> None:
    documents = [{"_id": f"d{i}", "text": t} for i, t in enumerate(["same", "same", "", "other"])]
    write_jsonl(tmp_path / "corpus.jsonl", documents)
    write_jsonl(tmp_path / "queries.jsonl", [{"_id": f"q{i}", "text": t} for i, t in enumerate(["a", "b", "a"])])
    rows = [("q0", "d0", 1), ("q1", "d1", 1), ("q2", "d2", 1), ("q2", "d3", 1), ("q1", "d3", 0)]
    write_qrels(tmp_path / "qrels" / "train.tsv", rows)
    pairs = open_pairs(tmp_path)
    check(pairs)
    assert pairs.queries == ["a", "b", "a"] and pairs.documents == ["same", "same", "other"]
    assert pairs.n_queries == 2 and len(pairs.relevant) == 3
    assert pairs.notes == ["1 judgment of an empty document or query left out of training"]
    write_qrels(tmp_path / "qrels" / "train.tsv", [("q0", "d2", 1)])
    assert "every judgment above 0 is of an empty document" in refusal(tmp_path)


def test_subsets_keep_what_is_known_and_fractions_whole_queries(triples: Path) -> None:
    pairs = open_pairs(triples)
    some = pairs.subset([4, 0])
    check(some)
    assert some.queries == [pairs.queries[4], pairs.queries[0]] and some.negatives[0] == pairs.negatives[4]
    assert np.array_equal(some.relevant, pairs.relevant)
    assert some.document_ids.tolist()[1] == pairs.document_ids[0].tolist()
    half, most = (set(pairs.take_fraction(f, 3).queries) for f in (0.5, 0.8))
    assert len(half) == 5 and len(most) == 8 and half < most
    assert half != set(pairs.take_fraction(0.5, 4).queries)
    assert len(pairs.take_fraction(0.5, 3)) == sum(q in half for q in pairs.queries)
    assert len(pairs.take_fraction(1e-9, 0)) in (1, 2) and len(pairs.take_fraction(1, 0)) == len(pairs)
    with pytest.raises(UserError, match="--train-fraction 0"):
        pairs.take_fraction(0, 0)


@pytest.mark.parametrize("kind", ["beir", "triples"])
def test_held_out_queries_leave_with_all_their_pairs(tmp_path: Path, triples: Path, kind: str) -> None:
    source = make_beir(tmp_path / "beir", splits=("train",)) if kind == "beir" else triples
    pairs = open_pairs(source)
    known = set(zip(pairs.queries, pairs.documents, strict=True))
    rest, watched = hold_out(source, "train", 4, seed=1, documents=9)
    assert watched is not None
    check(rest)
    assert len(watched.queries) == len(watched.query_ids) == 4 and len(watched.documents) == 9
    assert not set(watched.queries) & set(rest.queries)
    assert set(watched.queries) | set(rest.queries) == set(pairs.queries)
    assert np.array_equal(rest.relevant, pairs.relevant)
    judged = {(watched.queries[q], watched.documents[d]) for q, d in watched.pairs}
    assert judged == {(q, d) for q, d in known if q in watched.queries} and len(judged) == len(watched.pairs)
    assert "4 of" in watched.notes[0] and "a sample" in watched.notes[0]
    assert len(set(watched.document_ids)) == len(watched.titles) == 9

    again, other, few = (
        hold_out(source, "train", 4, seed, documents)[1] for seed, documents in ((1, 9), (2, 9), (1, 1))
    )
    assert again is not None and other is not None and few is not None
    assert again.fingerprint() == watched.fingerprint() != other.fingerprint()
    assert len(few.documents) == len({d for _, d in judged})
    nothing = hold_out(source, "train", 0, seed=1)
    assert nothing[1] is None and nothing[0].queries == pairs.queries
    total = pairs.n_queries
    with pytest.raises(UserError, match=f"--watch-queries {total // 2}: .* has {total} training queries"):
        hold_out(source, "train", total // 2, seed=1)


def test_held_out_queries_keep_gains_and_exclusions(tmp_path: Path) -> None:
    folder = make_beir(tmp_path / "beir", splits=("train",))
    queries = [json.loads(line) for line in (folder / "queries.jsonl").read_text().splitlines()]
    extra = ({**q, "excluded_ids": ["d58", "d59"], "answers": [q["_id"]]} for q in queries)
    write_jsonl(folder / "queries.jsonl", extra)
    whole, watched = open_beir(folder, "train"), hold_out(folder, "train", 6, seed=0)[1]
    assert watched is not None and len(watched.documents) == 60 and watched.answers == [[q] for q in watched.query_ids]
    assert watched.excluded == {row: [58, 59] for row in range(6)}
    gain = {(whole.query_ids[q], whole.document_ids[d]): g for (q, d), g in zip(whole.pairs, whole.gains, strict=True)}
    assert [gain[watched.query_ids[q], watched.document_ids[d]] for q, d in watched.pairs] == watched.gains.tolist()


TSV = [
    ("a\tb\nalone\n", "line 2: query, positive and any negatives with tabs between were expected, got 1 column: alone"),
    ("a\tb\n\n\tb\n", "line 3: the query is empty"),
    ("a\tb\na\t \n", "line 2: the positive is empty"),
    ("a\tb\tc\na\tb\t\n", "line 2: the negative 1 is empty"),
    ("a\tb\tc\na\tb\n", "line 2: 0 negatives, and 1 negative in the first"),
    ("a\tb\na\tb\tc\td\n", "line 2: 2 negatives, and 0 negatives in the first"),
    ("query\tpositive\tnegative\na\tb\tc\n", "line 1 names columns"),
    ("", "no pair in it"),
    (b"a\tb\na\t\xff\n", "line 2: not UTF-8"),
]
JSONL = [
    ('{"query": "a", "positive": "b"}\n{"query": "a"}', "line 2: query (or anchor), positive and any negatives were"),
    ('{"query": "a", "anchor": "a", "positive": "b"}', "line 1: query (or anchor), positive"),
    ('{"query": "a", "positive": ["b"]}', 'line 1: the positive is a text, got ["b"]'),
    ('{"query": null, "positive": "b"}', "line 1: the query is a text, got null"),
    ('{"query": "a", "positive": "b", "negative": 1}', "line 1: the negative 1 is a text, got 1"),
    ('{"query": "a", "positive": "b", "negatives": "c"}', "line 1: negatives is a list of texts"),
    ('{"query": "a", "positive": "b", "negative": "c", "negatives": ["d"]}', "line 1: negatives is a list of texts"),
    ('{"query": "a", "positive": "\\udc00"}', "line 1: the positive holds half of a surrogate pair"),
    ('{"query": "a"', "line 1: not JSON"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "message"), [("a.tsv", *fault) for fault in TSV] + [("a.jsonl", *fault) for fault in JSONL]
)
def test_faults_are_one_line(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    assert message in refusal(tmp_path / name, content)


def test_what_is_neither_is_named(tmp_path: Path) -> None:
    assert "no such file or folder" in refusal(tmp_path / "none.tsv")
    assert "unknown file type" in refusal(tmp_path / "a.csv", "a,b")
    assert "no corpus.jsonl in it" in refusal(tmp_path)


def test_scifact_in_pairs(shared: Path) -> None:
    rest, watched = hold_out(shared / "data" / "scifact", "train", 100, seed=0)
    assert watched is not None and len(watched.documents) == 2000 and len(watched.queries) == 100
    # two claims stand there twice; the twin of one that is held out leaves, too, with its three pairs
    assert rest.n_queries == 707 and len(rest) + len(watched.pairs) == 919 - 3
