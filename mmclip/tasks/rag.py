"""What the RAG check is made of: how an answer is judged, and how a prompt is put together and cut.

**Answers** are judged as SQuAD's evaluation does (Rajpurkar et al. 2016, arXiv 1606.05250; version 2.0's script): a
text is lower-cased, punctuation (ASCII) and the articles a, an, the are removed, white space is collapsed.

    EM         1 if the prediction equals an accepted answer, both normalized
    F1         2 P R / (P + R) over the words that the two share, with multiplicity; the best over accepted answers
    empty      where prediction or answer has no word left, F1 is 1 if neither has one, else 0
    recall@k   1 if an accepted answer's words stand in a row in one of the k documents, normalized as well

**Prompts** are templates with {documents} and {question}. Texts are put in and never read as a template: a brace in a
document is a brace.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from mmclip.errors import UserError, printable

DOCUMENTS, QUESTION = "documents", "question"
PROMPT = """Answer the question in a few words, with the help of the documents.

{documents}

Question: {question}
Answer:"""
CLOSED_PROMPT = """Answer the question in a few words.

Question: {question}
Answer:"""
MAX_PROMPT_BYTES = 100_000
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normal(text: str) -> str:
    """A text as answers are compared.

    >>> normal("The  U.S. president, an actor!")
    'us president actor'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 or 0.

    >>> exact_match("the Eiffel Tower.", ["Tour Eiffel", "Eiffel tower"])
    1.0
    """
    found = normal(prediction)
    return float(any(found == normal(a) for a in answers))


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """The best F1 over the accepted answers; 0 where there are none.

    >>> token_f1("in Paris, France", ["Paris", "the city of Rome"])
    0.5
    """
    return max((_f1(normal(prediction).split(), normal(a).split()) for a in answers), default=0.0)


def _f1(found: list[str], accepted: list[str]) -> float:
    if not found or not accepted:
        return float(found == accepted)
    same = (Counter(found) & Counter(accepted)).total()
    return 2 * same / (len(found) + len(accepted))


def has_answer(documents: Sequence[str], answers: Sequence[str]) -> bool:
    """Whether a document holds an accepted answer, word for word in a row. One without a word is in none.

    >>> has_answer(["A party in Parisian style"], ["Paris", "art"]), has_answer(["They met in Paris."], ["PARIS"])
    (False, True)
    """
    wanted = [f" {a} " for a in map(normal, answers) if a]
    return any(a in f" {normal(d)} " for d in documents for a in wanted)


def first_line(text: str) -> str:
    """What counts of a generated text: its first line with a word; readers may go on with questions of their own.

    >>> first_line(" Paris\\n\\nQuestion: And Rome?")
    'Paris'
    """
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


class Template:
    """A prompt with fields, as Python's format strings have them: {{ and }} are braces.

    text: the template; fields: every field that has to be in it, and no other. Errors: UserError naming ``where``.
    """

    def __init__(self, text: str, fields: Sequence[str], where: str) -> None:
        self.text = text
        valid = " and ".join(f"{{{f}}}" for f in fields)
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise UserError(f"{where}: {error}; a brace that belongs to the text is written twice") from None
        for _, field, spec, conversion in parts:
            if field is not None and (field not in fields or spec or conversion):
                shown = field + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
                raise UserError(
                    f"{where}: unknown field {{{printable(shown, 60)}}}; valid: {valid} (a brace that belongs to the "
                    "text is written twice)"
                )
        self._parts = [(literal, field) for literal, field, _, _ in parts]
        missing = [f for f in fields if f not in (field for _, field in self._parts)]
        if missing:
            raise UserError(f"{where}: no {{{missing[0]}}} in it; needed: {valid}")

    def fill(self, question: str, documents: Sequence[str] = ()) -> str:
        """The prompt: documents as numbered lines, white space in texts collapsed."""
        lines = "\n".join(f"[{i}] {_one_space(d)}" for i, d in enumerate(documents, 1))
        values = {DOCUMENTS: lines, QUESTION: _one_space(question), None: ""}
        return "".join(literal + values[field] for literal, field in self._parts)


def read_template(path: str | None, default: str, fields: Sequence[str], flag: str) -> Template:
    """The template of a file, ``default`` where none is named. Errors: UserError naming the flag."""
    if path is None:
        return Template(default, fields, flag)
    where = f"{flag} {printable(path)}"
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_PROMPT_BYTES + 1)
        if len(text) > MAX_PROMPT_BYTES:
            raise UserError(f"{where}: more than {MAX_PROMPT_BYTES:,} bytes; a prompt template is a few lines")
        return Template(text.decode("utf-8").removesuffix("\n"), fields, where)
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8: {error.reason}") from None


class Prompt(NamedTuple):
    """A prompt that fits: ``shortened`` documents lost their end, ``dropped`` are not in it at all."""

    text: str
    shortened: int = 0
    dropped: int = 0


class TooLong(Exception):
    """Question and instruction alone are longer than a reader takes."""

    def __init__(self, size: int) -> None:
        self.size = size


def fit(
    fill: Callable[[Sequence[str]], str], documents: Sequence[str], size: Callable[[str], int], limit: int | None
) -> Prompt:
    """The prompt with as much of the documents, best first, as ``limit`` has room for: the last is shortened, at a
    word's end, then dropped, then the one before it.

    fill: documents -> prompt; size: prompt -> tokens. Errors: TooLong where no document is left and it is too long.
    """
    kept = list(documents)
    text = fill(kept)
    if limit is None:
        return Prompt(text)
    tokens = size(text)
    if tokens <= limit:
        return Prompt(text)
    while kept:
        last = kept.pop()
        text = fill(kept)
        tokens = size(text)
        if tokens > limit:
            continue
        low, high = 0, len(last)  # so many characters fit, so many do not
        while high - low > 1:
            middle = (low + high) // 2
            if size(fill([*kept, last[:middle]])) <= limit:
                low = middle
            else:
                high = middle
        dropped = len(documents) - len(kept)
        if start := _whole_words(last, low):
            longer = fill([*kept, start])
            if size(longer) <= limit:
                return Prompt(longer, 1, dropped - 1)
        return Prompt(text, 0, dropped)
    raise TooLong(tokens)


def _whole_words(text: str, end: int) -> str:
    """text[:end] without the word that ``end`` cuts; a text without white space is cut where it is."""
    start = text[:end]
    words = start.split()
    if words and end < len(text) and not text[end].isspace() and not start[-1].isspace() and len(text.split()) > 1:
        words.pop()
    return " ".join(words)


def _one_space(text: str) -> str:
    return " ".join(text.split())
