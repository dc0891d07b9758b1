"""Answers judged as SQuAD does, and prompts that hold what they were given and fit."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mmclip.errors import UserError
from mmclip.tasks.rag import (
    DOCUMENTS,
    QUESTION,
    Template,
    TooLong,
    exact_match,
    first_line,
    fit,
    has_answer,
    normal,
    read_template,
    token_f1,
)

FIELDS = (DOCUMENTS, QUESTION)
# articles inside and beside words, punctuation, repeated words, nothing at all
pieces = st.sampled_from(["the", "The", "a", "an", "Paris", "paris.", "(Rome)", "U.S.", "é", "-", "!", "theatre", "\t"])
answers = st.lists(pieces, max_size=5).map(" ".join)


def squad_f1(prediction: str, accepted: str) -> float:
    """By pairing words off, one after the other; version 2.0's rule where a side is empty."""
    found, left = squad_normal(prediction).split(), squad_normal(accepted).split()
    if not found or not left:
        return float(found == left)
    same, rest = 0, list(left)
    for word in found:
        if word in rest:
            rest.remove(word)
            same += 1
    if same == 0:
        return 0.0
    precision, recall = same / len(found), same / len(left)
    return 2 * precision * recall / (precision + recall)


def squad_normal(text: str) -> str:
    """SQuAD's normalize_answer, written a second time: a character and a word at a time."""
    kept = "".join(c for c in text if c not in set(string.punctuation))
    return " ".join(word for word in kept.lower().split() if word not in ("a", "an", "the"))


@pytest.mark.parametrize(
    ("prediction", "accepted", "em", "f1"),
    [
        ("Paris", ["paris"], 1, 1),
        ("The  PARIS!", ["a paris"], 1, 1),
        ("in Paris", ["Paris"], 0, 2 / 3),
        ("Paris Paris", ["Paris"], 0, 2 / 3),  # a word counts as often as both have it
        ("Paris Paris", ["Paris of Paris"], 0, 4 / 5),
        ("Rome", ["Paris", "Rome"], 1, 1),
        ("city of Rome", ["Paris", "Rome city"], 0, 4 / 5),
        ("U.S.A.", ["USA"], 1, 1),
        ("well-known", ["well known"], 0, 0),  # punctuation goes without leaving a space
        ("theatre", ["atre"], 0, 0),
        ("the", ["a"], 1, 1),  # neither has a word left
        ("", ["Paris"], 0, 0),
        ("the", ["Paris", "!"], 1, 1),
        ("Paris", [], 0, 0),
    ],
)
def test_hand_made_answers(prediction: str, accepted: list[str], em: float, f1: float) -> None:
    assert exact_match(prediction, accepted) == em
    assert token_f1(prediction, accepted) == pytest.approx(f1)


@given(answers, st.lists(answers, min_size=1, max_size=3))
def test_em_and_f1_against_a_second_implementation(prediction: str, accepted: list[str]) -> None:
    assert normal(prediction) == squad_normal(prediction) == normal(normal(prediction))
    assert exact_match(prediction, accepted) == max(
        float(squad_normal(prediction) == squad_normal(a)) for a in accepted
    )
    assert token_f1(prediction, accepted) == pytest.approx(max(squad_f1(prediction, a) for a in accepted))


@given(answers, answers)
def test_f1_is_symmetric_within_bounds_and_one_for_equal_texts(a: str, b: str) -> None:
    assert token_f1(a, [b]) == pytest.approx(token_f1(b, [a]))
    assert exact_match(a, [b]) <= token_f1(a, [b]) <= 1
    assert token_f1(a, [a]) == exact_match(a, [a]) == 1


def test_an_answer_is_found_by_whole_words_in_one_document() -> None:
    assert has_answer(["They met in the city of Rome, in May."], ["City of Rome"])
    assert not has_answer(["a party"], ["art"])
    assert not has_answer(["city of", "Rome"], ["city of Rome"])
    assert not has_answer(["anything"], ["the", "!"])  # an answer without a word is in none
    assert not has_answer([], ["Rome"]) and not has_answer(["Rome"], [])


def test_what_counts_is_the_first_line_with_a_word() -> None:
    assert first_line("\n\n  Rome \nQuestion: why?") == "Rome"
    assert first_line(" \n ") == "" and first_line("") == ""


def test_a_template_takes_texts_as_they_are() -> None:
    template = Template("{{json}} {documents} | {question}", FIELDS, "--prompt-file x")
    assert template.fill("Why {documents}?", ["{question} {0} }{", "two\n\nlines"]) == (
        "{json} [1] {question} {0} }{\n[2] two lines | Why {documents}?"
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{documents} {question} {context}", "unknown field {context}; valid: {documents} and {question}"),
        ("{documents.__class__} {question}", "unknown field {documents.__class__}"),
        ("{documents} {question!r}", "unknown field {question!r}"),
        ("{documents:>9} {question}", "unknown field {documents:>9}"),
        ("{documents[0]} {question}", "unknown field {documents[0]}"),
        ("{} {documents} {question}", "unknown field {}"),
        ("{documents} why", "no {question} in it"),
        ("{question} }", "a brace that belongs to the text is written twice"),
        ("{question} {", "a brace that belongs to the text is written twice"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(told)) as error:
        read_template(str(path), "", FIELDS, "--prompt-file")
    assert "prompt.txt" in str(error.value)


def test_a_template_file_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Ü {question}\n{documents}\n", encoding="utf-8")
    assert read_template(str(path), "", FIELDS, "--prompt-file").fill("q", ["d"]) == "Ü q\n[1] d"
    path.write_bytes(b"\xff {question} {documents}")
    with pytest.raises(UserError, match="not UTF-8"):
        read_template(str(path), "", FIELDS, "--prompt-file")
    path.write_bytes(b"{question} {documents}" + b" " * 100_000)
    with pytest.raises(UserError, match="more than 100,000 bytes"):
        read_template(str(path), "", FIELDS, "--prompt-file")
    assert read_template(None, "{question}", (QUESTION,), "--closed-prompt-file").fill("q") == "q"


texts = st.lists(st.sampled_from(["one", "two", "Three", "x" * 9, "é"]), max_size=12).map(" ".join)


def characters(text: str) -> int:
    return len(text)


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("size", [characters, words])
@given(documents=st.lists(texts, max_size=4), limit=st.integers(1, 150))
def test_a_prompt_fits_and_loses_documents_from_the_last_one(size, documents: Sequence[str], limit: int) -> None:
    template = Template("Instruction {documents} Question {question} End", FIELDS, "")
    empty = size(template.fill("why"))
    if empty > limit:
        with pytest.raises(TooLong):
            fit(lambda kept: template.fill("why", kept), documents, size, limit)
        return
    found = fit(lambda kept: template.fill("why", kept), documents, size, limit)
    assert size(found.text) <= limit
    assert found.text.startswith("Instruction ") and found.text.endswith(" Question why End")
    whole = len(documents) - found.shortened - found.dropped
    kept = list(documents[:whole])
    if found.shortened:
        start = found.text.split(f"[{whole + 1}] ")[1].removesuffix(" Question why End")
        assert start and documents[whole].split()[: len(start.split())] == start.split()  # whole words
        assert len(start) < len(documents[whole])
        kept.append(start)
    assert found.text == template.fill("why", kept)
    if found.shortened or found.dropped:  # nothing is cut that has room: one more word, or the whole prompt, has none
        assert size(template.fill("why", documents)) > limit
        more = documents[len(kept) - 1 if found.shortened else whole].split()
        longer = [*documents[:whole], " ".join(more[: len(kept[-1].split()) + 1 if found.shortened else 1])]
        assert size(template.fill("why", longer)) > limit


@given(st.lists(texts, max_size=4))
def test_without_a_limit_nothing_is_cut(documents: Sequence[str]) -> None:
    assume(documents)
    found = fit(" ".join, documents, characters, None)
    assert found == (" ".join(documents), 0, 0)


def test_a_text_without_spaces_is_cut_where_it_must_be() -> None:
    found = fit(lambda kept: "|".join(kept), ["字" * 50], characters, 20)
    assert found == ("字" * 20, 1, 0)
