"""BEIR folders: what is written is read back, and every planted fault is one line that says where."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmclip.data.beir import BeirCollection, joined, open_beir
from mmclip.errors import UserError
from tests.helpers.texts import make_beir, write_jsonl, write_qrels

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ID = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\r"), min_size=1, max_size=6)


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    """q0 … q5 of split test, d0 … d9; line 2 of test.tsv judges q0 and d0."""
    return make_beir(tmp_path / "beir", queries=6, documents=10, splits=("test",))


def refusal(folder: Path, split: str = "test") -> str:
    with pytest.raises(UserError) as error:
        open_beir(folder, split)
    assert "\n" not in str(error.value)
    return str(error.value)


def change(path: Path, line: int, text: str | bytes) -> None:
    """Put ``text`` in place of a line, counted from 1."""
    lines = path.read_bytes().split(b"\n")
    lines[line - 1] = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    path.write_bytes(b"\n".join(lines))


@st.composite
def collections(draw: st.DrawFn) -> dict[str, Any]:
    queries = draw(st.dictionaries(ID, TEXT, min_size=1, max_size=5))
    documents = draw(st.dictionaries(ID, st.tuples(TEXT, TEXT), min_size=1, max_size=6))
    pairs = st.tuples(st.sampled_from(sorted(queries)), st.sampled_from(sorted(documents)))
    judged = draw(st.dictionaries(pairs, st.sampled_from([-1, 0, 1, 2, 0.5]), min_size=1, max_size=12))
    excluded = draw(st.dictionaries(st.sampled_from(sorted(queries)), st.lists(st.sampled_from(sorted(documents)))))
    # what is relevant may not be excluded, and an empty list would read as "none"
    excluded = {q: [d for d in found if judged.get((q, d), 0) <= 0] for q, found in excluded.items()}
    return {"queries": queries, "documents": documents, "judged": judged, "excluded": excluded}


def write(folder: Path, made: dict[str, Any], end: str, header: bool, last: bool) -> Path:
    queries = [
        {"_id": q, "text": t, "excluded_ids": made["excluded"].get(q) or ["N/A"]} for q, t in made["queries"].items()
    ]
    documents = [{"_id": d, "title": a, "text": b} for d, (a, b) in made["documents"].items()]
    rows = [f"{q}\t{d}\t{score}" for (q, d), score in made["judged"].items()]
    lines = ["query-id\tcorpus-id\tscore"] * header + rows
    (folder / "qrels").mkdir()
    for name, content in (
        ("queries.jsonl", [json.dumps(q, ensure_ascii=False) for q in queries]),
        ("corpus.jsonl", [json.dumps(d, ensure_ascii=False) for d in documents]),
        ("qrels/test.tsv", lines),
    ):
        (folder / name).write_bytes((end.join(content) + end * last).encode("utf-8-sig" if end == "\r\n" else "utf-8"))
    return folder


@given(collections(), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans())
def test_what_is_written_is_read(made: dict[str, Any], end: str, header: bool, last: bool) -> None:
    positive = {pair: score for pair, score in made["judged"].items() if score > 0}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write(Path(scratch), made, end, header, last)
        if not positive:
            assert "no query with a relevant document" in refusal(folder)
            return
        found = open_beir(folder, "test")
    assert dict(zip(found.document_ids, zip(found.titles, found.documents, strict=True), strict=True)) == {
        d: (a, joined(a, b)) for d, (a, b) in made["documents"].items()
    }
    assert list(dict.fromkeys(q for q, _ in positive)) == sorted(found.query_ids, key=[q for q, _ in positive].index)
    assert dict(zip(found.query_ids, found.queries, strict=True)) == {
        q: t for q, t in made["queries"].items() if q in found.query_ids
    }
    read = {
        (found.query_ids[q], found.document_ids[d]): gain
        for (q, d), gain in zip(found.pairs.tolist(), found.gains.tolist(), strict=True)
    }
    assert read == positive
    assert {found.query_ids[q]: {found.document_ids[d] for d in rows} for q, rows in found.excluded.items()} == {
        q: set(d) for q, d in made["excluded"].items() if d and q in found.query_ids
    }


def test_texts_may_hold_every_other_break_and_be_huge(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\u0085four\x0bfive\x0csix\x1cseven " + "word " * 400_000
    document = json.dumps({"_id": 7, "title": None, "text": text}, ensure_ascii=False)
    (tmp_path / "corpus.jsonl").write_text(document, encoding="utf-8")
    write_jsonl(tmp_path / "queries.jsonl", [{"_id": "q", "text": "\r\n" + text, "metadata": {"x": 1}}])
    write_qrels(tmp_path / "qrels" / "test.tsv", [("q", 7, 1)])
    opened = open_beir(tmp_path, "test")
    assert opened.documents == [text.strip()] and opened.queries == ["\r\n" + text]
    assert opened.titles == [""] and opened.document_ids == ["7"]
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": ' + text)
    assert len(refusal(tmp_path)) < 400


def test_empty_documents_and_judgments_of_nothing_are_noted(beir: Path) -> None:
    change(beir / "corpus.jsonl", 1, '{"_id": "d0", "title": "", "text": ""}')
    change(beir / "corpus.jsonl", 10, '{"_id": "d9", "text": " \\n"}')
    change(beir / "queries.jsonl", 1, '{"_id": "q0", "text": ""}')
    rows = [("q0", "d0", 4), ("q0", "d1", 0), ("q1", "d1", 0), ("q2", "d2", -1), ("q0", "d3", 2)]
    write_qrels(beir / "qrels" / "test.tsv", rows)
    found = open_beir(beir, "test")
    assert found.empty.tolist() == [0, 9] and len(found.documents) == 10
    assert found.pairs.tolist() == [[0, 0], [0, 3]] and found.gains.tolist() == [4, 2]
    assert found.notes == [
        "2 empty documents (d0, d9) indexed, 1 of them judged relevant",
        "2 judged queries without a relevant document left out",
        "1 query without a word, ranked like all others",
    ]


def test_excluded_ids_and_answers_follow_their_query(beir: Path) -> None:
    change(beir / "queries.jsonl", 1, '{"_id": "q0", "text": "a", "excluded_ids": ["d5", "gone", "d4"]}')
    change(beir / "queries.jsonl", 2, '{"_id": "q1", "text": "b", "excluded_ids": ["N/A"], "answers": ["x", "y"]}')
    found = open_beir(beir, "test")
    assert found.excluded == {0: [4, 5]}
    assert found.answers is not None and found.answers[:2] == [[], ["x", "y"]]
    assert found.notes == ["1 excluded id not in corpus.jsonl"]
    change(beir / "queries.jsonl", 1, '{"_id": "q0", "text": "a", "excluded_ids": ["d0"]}')
    with pytest.raises(UserError, match="query 'q0' excludes document 'd0', which is judged relevant"):
        open_beir(beir, "test")


def fingerprint_of(folder: Path) -> str:
    return open_beir(folder, "test").fingerprint()


def test_the_fingerprint_tells_collections_apart(beir: Path, tmp_path: Path) -> None:
    same = make_beir(tmp_path / "same", queries=6, documents=10, splits=("test",))
    first = fingerprint_of(beir)
    assert fingerprint_of(same) == first and len(first) == 16
    qrels = (same / "qrels" / "test.tsv").read_text()
    (same / "qrels" / "test.tsv").write_text(qrels.replace("\t2\n", "\t3\n"))
    second = fingerprint_of(same)
    change(same / "queries.jsonl", 1, '{"_id": "q0", "text": "ab", "excluded_ids": ["d5"]}')
    assert len({first, second, fingerprint_of(same)}) == 3
    one, two = (BeirCollection("", "", ["q"], texts, ["d"], ["x"], [""], np.zeros((1, 2)), np.ones(1))
                for texts in (["a", "b"], ["ab", ""]))  # fmt: skip
    assert one.fingerprint() != two.fingerprint()


CORPUS, QUERIES, QRELS = "corpus.jsonl", "queries.jsonl", "qrels/test.tsv"
FAULTS = [
    (CORPUS, 3, '{"_id": "d2", "text": ', "corpus.jsonl: line 3: not JSON"),
    (CORPUS, 3, '["d2"]', 'corpus.jsonl: line 3: an object was expected, got ["d2"]'),
    (CORPUS, 3, "[" * 100_000, "corpus.jsonl: line 3: not JSON"),
    (CORPUS, 3, '{"_id": "d0", "text": ""}', "corpus.jsonl: line 3: document id 'd0' is that of line 1, too"),
    (CORPUS, 3, '{"text": ""}', "corpus.jsonl: line 3: a document has an _id, got null"),
    (CORPUS, 3, '{"_id": true, "text": ""}', "corpus.jsonl: line 3: a document has an _id, got true"),
    (CORPUS, 3, '{"_id": "d2"}', "corpus.jsonl: line 3: text of document 'd2' is a text, got null"),
    (CORPUS, 3, '{"_id": "d2", "text": "", "title": 5}', "line 3: title of document 'd2' is a text, got 5"),
    (CORPUS, 3, '{"_id": "d2", "text": "\\ud800"}', "line 3: text of document 'd2' holds half of a surrogate pair"),
    (CORPUS, 3, b'{"_id": "d2", "text": "\xe9"}', "corpus.jsonl: line 3: not UTF-8"),
    (CORPUS, 1, b'\xff\xfe{\x00', "corpus.jsonl: line 1: not UTF-8"),
    (QUERIES, 2, '{"_id": "q0", "text": ""}', "queries.jsonl: line 2: query id 'q0' is that of line 1, too"),
    (QUERIES, 2, '{"_id": "q1", "text": "", "excluded_ids": "d1"}', "excluded_ids of query 'q1' is not a list"),
    (QUERIES, 2, '{"_id": "q1", "text": "", "excluded_ids": [[1]]}', "excluded_ids of query 'q1' is not a list"),
    (QUERIES, 2, '{"_id": "q1", "text": "", "answers": [1]}', "answers of query 'q1' is not a list of texts"),
    (QRELS, 3, "q1\td2", "test.tsv: line 3: query id, document id and score with tabs between were expected, got 2"),
    (QRELS, 3, "q1 0 d2 1", "line 3: query id, document id and score with tabs between were expected, got 1"),
    (QRELS, 3, "q1\td2\tyes", "test.tsv: line 3: the score is a number, got 'yes'"),
    (QRELS, 3, "q1\td2\tnan", "test.tsv: line 3: the score is a number, got 'nan'"),
    (QRELS, 1, "q1\td2\tx", "test.tsv: line 1: the score is a number, got 'x'"),
    (QRELS, 3, "q0\td0\t1", "test.tsv: line 3: query 'q0' and document 'd0' were judged in line 2 already"),
    (QRELS, 3, "q0\tnone\x1b\t1", "test.tsv: 1 document id not in corpus.jsonl: 'none\\\\x1b'"),
    (QRELS, 3, "nobody\td0\t1", "test.tsv: 1 query id not in queries.jsonl: 'nobody'"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "line", "text", "told"), FAULTS)
def test_faults_are_one_line(beir: Path, file: str, line: int, text: str | bytes, told: str) -> None:
    change(beir / file, line, text)
    assert told in refusal(beir)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (CORPUS, "", "no document in it"),
        (QUERIES, "\n\n", "no query in it"),
        (QRELS, "", "no query with a relevant document"),
        (QRELS, "query-id\tcorpus-id\tscore\n", "no query with a relevant document"),
        (QRELS, "q0\td0\t0\n", "no query with a relevant document"),
        (QRELS, "".join(f"q0\tx{i}\t1\n" for i in range(5)), "5 document ids not in corpus.jsonl: 'x0', 'x1', 'x2', …"),
    ],
)
def test_files_without_content_or_with_unknown_ids(beir: Path, file: str, content: str, message: str) -> None:
    (beir / file).write_text(content)
    assert message in refusal(beir)


def test_what_is_not_there_is_named(beir: Path, tmp_path: Path) -> None:
    assert "splits in qrels/: test" in refusal(beir, "dev")
    assert "no such folder" in refusal(tmp_path / "nowhere")
    (beir / CORPUS).unlink()
    assert "no corpus.jsonl in it" in refusal(beir)


@pytest.mark.parametrize(
    ("name", "split", "queries", "documents", "judged"),
    [("scifact", "test", 300, 5183, 339), ("scifact", "train", 809, 5183, 919), ("cranfield", "test", 225, 1400, 1837)],
)
def test_real_folders(shared: Path, name: str, split: str, queries: int, documents: int, judged: int) -> None:
    found = open_beir(shared / "data" / name, split)
    assert (len(found.queries), len(found.documents), len(found.pairs)) == (queries, documents, judged)
    if name == "cranfield":
        assert len(found.empty) == 2 and "1 of them judged relevant" in found.notes[0]
        assert set(found.gains) == {1, 2, 3, 4}
