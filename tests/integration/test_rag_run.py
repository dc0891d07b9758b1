"""rag.py as a user runs it, with tiny readers of both kinds; faults are one line before a model loads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmclip.commands.rag import answerable
from mmclip.commands.rag import run as run_rag
from mmclip.config import RagConfig, parse
from mmclip.data.beir import open_beir
from mmclip.errors import UserError
from mmclip.tasks.rag import CLOSED_PROMPT, PROMPT, exact_match, first_line, has_answer, token_f1
from tests.helpers.readers import make_causal, make_t5
from tests.helpers.texts import make_beir, make_bert, write_jsonl
from tests.helpers.tiny import run_script

Json = dict[str, Any]


def with_answers(folder: Path, leave: int = 0) -> Path:
    """A query's answer: the last two words of its first relevant document, or a word that is in none."""
    collection = open_beir(folder, "test")
    answers = {}
    for q, name in enumerate(collection.query_ids[leave:], leave):
        row = collection.pairs[collection.pairs[:, 0] == q][0, 1]
        answers[name] = [" ".join(collection.documents[row].split()[-2:]), "never"]
    rows = [json.loads(line) for line in (folder / "queries.jsonl").read_text().splitlines()]
    write_jsonl(folder / "queries.jsonl", (r | ({"answers": answers[r["_id"]]} if r["_id"] in answers else {})
                                           for r in rows))  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rag")
    with_answers(make_beir(root / "data", splits=("test",)))
    make_bert(root / "encoder")
    make_t5(root / "t5", model_max_length=40)
    make_causal(root / "chat", chat=True)
    return root


def usual(root: Path, reader: str = "t5", *more: object) -> list[str]:
    return ["--model", str(root / "encoder" / "st"), "--data", str(root / "data"), "--reader", str(root / reader),
            "--device", "cpu", *map(str, more)]  # fmt: skip


def predictions(folder: Path) -> dict[str, Json]:
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    return {line["key"]: line for line in lines}


def numbers_hold(found: Json, folder: Path, data: Path) -> None:
    """Every number from the predictions file and the data, judged once more."""
    collection = open_beir(data, "test")
    text_of = dict(zip(collection.document_ids, collection.documents, strict=True))
    answers = dict(zip(collection.query_ids, collection.answers, strict=True))
    held = predictions(folder)
    for name, numbers in {**found["rag"]["q2d"], "closed_book": found["rag"]["closed_book"]}.items():
        row = found["per_query"][found["alike"].get(name, name)]
        metrics: dict[str, list[float]] = {"em": [], "f1": [], "answer_recall": []}
        for i, q in enumerate(found["per_query"]["query_ids"]):
            texts, line = [text_of[d] for d in row["documents"][i] or ()], held[row["key"][i]]
            said = first_line(line["text"])
            assert said == row["prediction"][i]
            assert collection.queries[collection.query_ids.index(q)] in line["prompt"]
            assert numbers["prompts_cut"] or all(text in line["prompt"] for text in texts)
            for metric, value in zip(metrics, (exact_match(said, answers[q]), token_f1(said, answers[q]),
                                               has_answer(texts, answers[q])), strict=True):  # fmt: skip
                metrics[metric].append(value)
        for metric, values in metrics.items():
            if name == "closed_book" and metric == "answer_recall":
                continue
            assert row[metric] == values
            assert numbers[metric] == pytest.approx(np.mean(values))


def test_a_text_to_text_reader_end_to_end_and_again(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    done = run_script("rag.py", *usual(root, "t5", "--output", out, "--top-k", 3, "--max-new-tokens", 5))
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "rag.json").read_text())
    assert set(found["rag"]["q2d"]) == {"cosine", "dot", "qnorm", "dnorm", "native"}
    assert found["alike"]["dnorm"] == found["alike"]["native"] == "cosine" and found["alike"]["qnorm"] == "dot"
    assert found["reader"]["kind"] == "text-to-text" and found["top_k"] == 3
    numbers_hold(found, out, root / "data")
    n = found["data"]["n_queries"]
    assert n == 24 and len(predictions(out)) <= 3 * n
    assert all(len(d) == 3 for d in found["per_query"]["dot"]["documents"])
    assert found["rag"]["q2d"]["cosine"]["prompts_cut"] > 0  # 40 tokens hold less than three documents
    assert found["rag"]["closed_book"]["prompts_cut"] == 0
    for word in ("no documents", "cosine = dnorm", "dot = qnorm", "answer@3", "Normalize"):
        assert word in done.stdout + done.stderr
    # Half of what was read is lost, the last line torn: the rest is read again, and all is as it was
    path = out / "predictions.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    half = len(lines) // 2
    path.write_text("".join(lines[:half]) + lines[half][:20])
    run_rag(parse(RagConfig, usual(root, "t5", "--output", out, "--top-k", 3, "--max-new-tokens", 5)))
    assert f"{half} predictions are there already" in capsys.readouterr().err
    assert json.loads((out / "rag.json").read_text()) == found
    assert path.read_text().splitlines(keepends=True)[:half] == lines[:half] and len(predictions(out)) == len(lines)


def test_a_chat_reader_end_to_end(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prompt = tmp_path / "prompt.txt"
    prompt.write_text('{{"ask": "{question}"}}\n{documents}', encoding="utf-8")
    more = ("--output", out, "--limit", 7, "--scorings", "qnorm", "--prompt-file", prompt, "--max-new-tokens", 4)
    found = run_rag(parse(RagConfig, usual(root, "chat", *more)))
    assert set(found["rag"]["q2d"]) == {"cosine", "qnorm"} and found["data"]["n_queries"] == 7
    assert found["reader"]["kind"] == "causal" and found["reader"]["chat_template"]
    assert found["prompt"].startswith('{{"ask"')
    assert found["rag"]["q2d"]["cosine"]["prompts_cut"] == 0
    numbers_hold(found, out, root / "data")


def test_queries_without_answers_are_left_out(root: Path, tmp_path: Path) -> None:
    folder = with_answers(make_beir(tmp_path / "data", splits=("test",)), leave=5)
    full = open_beir(folder, "test")
    kept, few = answerable(full), answerable(full, limit=4, seed=3)
    assert kept.query_ids == full.query_ids[5:] and kept.notes[-1] == "5 queries without answers left out"
    assert few.query_ids == [q for q in kept.query_ids if q in few.query_ids] and len(few.queries) == 4
    every = {(full.query_ids[q], d) for q, d in full.pairs.tolist()}
    for collection in (kept, few):
        assert all(collection.answers or [None])
        own = {(collection.query_ids[q], d) for q, d in collection.pairs.tolist()}
        assert own == {(q, d) for q, d in every if q in collection.query_ids}
    assert answerable(full, limit=4, seed=3).query_ids == few.query_ids
    assert {tuple(answerable(full, limit=4, seed=s).query_ids) for s in range(5)} != {tuple(few.query_ids)}
    make_beir(tmp_path / "plain", splits=("test",))
    with pytest.raises(UserError, match="no query of split 'test' has answers; add them to its line: ") as error:
        run_rag(parse(RagConfig, [*usual(root), "--data", str(tmp_path / "plain")]))
    assert str(error.value).endswith('{"_id": …, "text": …, "answers": ["an accepted answer", …]}')


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top-k", "61"], r"--top-k 61: .* has 60 documents"),
        (["--reader", "./nowhere"], r"--reader ./nowhere: no such folder"),
        (["--split", "dev"], r"no split 'dev'; splits in qrels/: test"),
        (["--max-input-tokens", "9"], r"takes 9 tokens, and without any document the prompt of .* has"),
    ],
)
def test_faults_show_before_a_model_loads(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("mmclip.commands.rag.load_text_model", load)
    monkeypatch.setattr("mmclip.tasks.rag.Reader._model", property(load))
    with pytest.raises(UserError, match=message) as error:
        run_rag(parse(RagConfig, [*usual(root), "--output", str(tmp_path / "out"), *flags]))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_the_documented_data_preparation_makes_such_a_folder(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "rag.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shared = {"title": "Emma", "text": "a novel", "psg_id": "7"}
    entries = [
        {"question": "Who?", "answers": ["Austen"], "positive_ctxs": [shared, shared], "negative_ctxs": [],
         "hard_negative_ctxs": [{"title": "Ü", "text": "x"}]},
        {"question": "What?", "answers": ["novel"], "positive_ctxs": [], "negative_ctxs": [shared],
         "hard_negative_ctxs": []},
        {"question": "Which?", "answers": ["Emma"], "positive_ctxs": [{"title": "", "text": "Emma"}],
         "negative_ctxs": [], "hard_negative_ctxs": [shared]},
    ]  # fmt: skip
    (tmp_path / "biencoder-trivia-dev.json").write_text(json.dumps(entries))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/rag.md", "exec"), {})
    found = answerable(open_beir("triviaqa", "test"))
    assert found.queries == ["Who?", "Which?"] and found.answers == [["Austen"], ["Emma"]]
    assert found.documents == ["Emma a novel", "Ü x", "Emma"] and found.pairs.tolist() == [[0, 0], [1, 2]]
    assert {*PROMPT.split(), *CLOSED_PROMPT.split()} <= set(page.split())  # the page shows the prompts that are used
