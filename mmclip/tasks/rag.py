"""What the RAG check is made of: how an answer is judged, and how a prompt is put together and cut.

**Answers** are judged as SQuAD's evaluation does (Rajpurkar et al. 2016, arXiv 1606.05250; version 2.0's script): a
text is lower-cased, punctuation (ASCII) and the articles a, an, the are removed, white space is collapsed.

    EM         1 if the prediction equals an accepted answer, both normalized
    F1         2 P R / (P + R) over the words that the two share, with multiplicity; the best over accepted answers
    empty      where prediction or answer has no word left, F1 is 1 if neither has one, else 0
    recall@k   1 if an accepted answer's words stand in a row in one of the k documents, normalized as well

**Prompts** are templates with {documents} and {question}. Texts are put in and never read as a template: a brace in a
document is a brace.

The reader of the RAG check: any transformers text-to-text or causal model, by folder or hub name, decoding greedily.

Configuration and tokenizer are read at once, so that what is wrong is found early; the weights at the first prompt, so
that they need not lie in memory beside the encoder's, and not at all where every prediction is there already. No code
of a folder is run, pickled weights are read with weights_only.

The RAG check on ranked lists: answers of a reader are scored, and scorings are compared on the same queries.

A prediction is kept under a key made of the reader and the whole prompt: scorings that retrieve the same documents for
a query share it, and so does a run that goes on where another stopped.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import string
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mmclip import metrics
from mmclip.console import progress_bar
from mmclip.data.beir import BeirCollection
from mmclip.errors import UserError, printable
from mmclip.io import write_text_atomically
from mmclip.models.text_encoder import quiet
from mmclip.similarity import Direction
from mmclip.training.log import LINE_SECONDS

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
UNLIMITED = 10**9  # tokenizers that know no limit name a number above it
COSINE, CLOSED = "cosine", "closed_book"
EM, F1, RECALL = "em", "f1", "answer_recall"
Q2D = Direction.Q2D.value
Array = NDArray[Any]
Json = dict[str, Any]
Lists = list[list[int]]  # for every query the document rows of its prompt, best first


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
        for _, name, spec, conversion in parts:
            if name is not None and (name not in fields or spec or conversion):
                shown = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
                raise UserError(
                    f"{where}: unknown field {{{printable(shown, 60)}}}; valid: {valid} (a brace that belongs to the "
                    "text is written twice)"
                )
        self._parts = [(literal, name) for literal, name, _, _ in parts]
        missing = [f for f in fields if f not in (name for _, name in self._parts)]
        if missing:
            raise UserError(f"{where}: no {{{missing[0]}}} in it; needed: {valid}")

    def fill(self, question: str, documents: Sequence[str] = ()) -> str:
        """The prompt: documents as numbered lines, white space in texts collapsed."""
        lines = "\n".join(f"[{i}] {_one_space(d)}" for i, d in enumerate(documents, 1))
        values = {DOCUMENTS: lines, QUESTION: _one_space(question), None: ""}
        return "".join(literal + values[name] for literal, name in self._parts)


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


@dataclass
class Reader:
    """A reader: ``prompt`` puts a question and documents together, ``generate`` answers prompts, a batch at a time.

    limit: tokens of a prompt at most; None: no limit is known. chat: prompts go through the tokenizer's chat template.
    revision: what tells its files from others of the same name. Templates: with documents, and without (closed book).
    """

    name: str
    config: Any
    tokenizer: Any
    template: Template
    closed: Template
    limit: int | None
    max_new_tokens: int
    batch_size: int
    device: torch.device
    dtype: torch.dtype
    revision: str
    _model: Any = field(default=None, repr=False)

    @property
    def text_to_text(self) -> bool:
        return bool(self.config.is_encoder_decoder)

    @property
    def chat(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def facts(self) -> dict[str, Any]:
        """What its answers depend on beside the prompt, as plain values."""
        return {
            "name": self.name,
            "kind": "text-to-text" if self.text_to_text else "causal",
            "model_type": str(self.config.model_type),
            "revision": self.revision,
            "dtype": str(self.dtype).removeprefix("torch."),
            "chat_template": self.chat,
            "max_input_tokens": self.limit,
            "max_new_tokens": self.max_new_tokens,
        }

    def prompt(self, question: str, documents: Sequence[str] | None) -> Prompt:
        """The prompt of a question, with documents or (None) without; the last documents are cut until it fits.

        Errors: UserError where the question and the instruction alone are too long.
        """
        question = self._plain(question)
        template = self.closed if documents is None else self.template
        try:
            return fit(
                lambda kept: self._chat(template.fill(question, kept)),
                [self._plain(d) for d in documents or ()],
                self._size,
                self.limit,
            )
        except TooLong as error:
            raise UserError(
                f"--reader {printable(self.name)}: takes {self.limit} tokens, and without any document the prompt of "
                f"{printable(question, 60)!r} has {error.size}: --max-input-tokens, or a shorter --prompt-file"
            ) from None

    @torch.inference_mode()
    def generate(self, prompts: Sequence[str]) -> list[str]:
        """One batch: what the reader writes after each prompt, without special tokens. Errors: UserError."""
        if self._model is None:
            self._model = _weights(self)
        inputs = self.tokenizer(
            list(prompts), add_special_tokens=not self.chat, padding=True, return_tensors="pt", verbose=False
        ).to(self.device)
        found = self._model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        if not self.text_to_text:
            found = found[:, inputs["input_ids"].shape[1] :]
        return list(self.tokenizer.batch_decode(found, skip_special_tokens=True))

    def _size(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=not self.chat, verbose=False)["input_ids"])

    def _chat(self, text: str) -> str:
        if not self.chat:
            return text
        try:  # without a thinking phase, because only the first line counts
            return str(
                self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}],
                    tokenize=False,
                    add_generation_prompt=True,
                    enable_thinking=False,
                )
            )
        except Exception as error:  # a template is a program of the folder's, run in transformers' sandbox
            raise UserError(
                f"--reader {printable(self.name)}: its chat template cannot be used: {printable(error, 200)}"
            ) from None

    def _plain(self, text: str) -> str:
        """Without what the tokenizer would take for one of its special tokens, such as the end of a turn."""
        return self._special.sub(" ", text) if self._special else text

    @functools.cached_property
    def _special(self) -> re.Pattern[str] | None:
        tokens = [t.content for t in self.tokenizer.added_tokens_decoder.values() if t.special and t.content]
        return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None


def open_reader(
    name: str,
    template: Template,
    closed: Template,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_new_tokens: int = 32,
    max_input_tokens: int | None = None,
    batch_size: int = 8,
) -> Reader:
    """A reader's configuration and tokenizer, checked. Errors: UserError, one line."""
    from transformers import AutoConfig, AutoTokenizer

    require_reader(name)
    name = str(Path(name).expanduser()) if name.startswith("~") else name
    with quiet():
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except Exception as error:  # a folder may hold anything, a hub may be away
            raise UserError(f"--reader {printable(name)}: cannot be loaded: {printable(error, 240)}") from None
    if not config.is_encoder_decoder:
        tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError(f"--reader {printable(name)}: its tokenizer has neither a padding nor an end token")
        tokenizer.pad_token = tokenizer.eos_token
    limit = _limit(name, config, tokenizer, max_input_tokens, max_new_tokens)
    return Reader(
        name, config, tokenizer, template, closed, limit, max_new_tokens, batch_size, torch.device(device), dtype,
        _revision(name, config),
    )  # fmt: skip


def require_reader(name: str) -> None:
    """Look for a folder and read nothing. Errors: UserError."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"--reader {printable(name)}: no config.json in it; a transformers folder is expected")
    elif name.startswith((".", "/", "~")):
        raise UserError(f"--reader {printable(name)}: no such folder")


def _limit(name: str, config: Any, tokenizer: Any, asked: int | None, new: int) -> int | None:
    """Tokens of a prompt: the tokenizer's own limit, or the requested one, within the positions that the model has. A
    causal model writes its answer into the same positions."""
    places = getattr(config.get_text_config(), "max_position_embeddings", None)
    own = tokenizer.model_max_length if tokenizer.model_max_length < UNLIMITED else None
    room = 0 if config.is_encoder_decoder else new
    if places is not None and (places <= new or (asked or 0) + room > places):
        raise UserError(
            f"--reader {printable(name)}: has {places} positions; --max-input-tokens {asked} and --max-new-tokens {new} "
            "do not fit" if asked else
            f"--reader {printable(name)}: has {places} positions; --max-new-tokens {new} leaves none for a prompt"
        )  # fmt: skip
    if asked is not None:
        return asked
    known = [n for n in (places, own) if n is not None]
    if not known:
        return None
    if min(known) <= room:
        raise UserError(f"--reader {printable(name)}: takes {min(known)} tokens; --max-new-tokens {new} leaves none")
    return min(known) - room


def _revision(name: str, config: Any) -> str:
    """16 hex digits: of a folder its files' names, sizes and times, of a hub name the commit."""
    folder = Path(name).expanduser()
    told: Any = str(getattr(config, "_commit_hash", None))
    if folder.is_dir():
        told = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir() if p.is_file())
    return hashlib.sha256(f"{told}{config.to_json_string()}".encode()).hexdigest()[:16]


def _weights(reader: Reader) -> Any:
    """The model, decoding greedily whatever its folder says of sampling. Errors: UserError."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig

    kind: Any = AutoModelForSeq2SeqLM if reader.text_to_text else AutoModelForCausalLM
    with quiet():
        try:
            model, loading = kind.from_pretrained(
                reader.name,
                trust_remote_code=False,
                weights_only=True,
                dtype=reader.dtype,
                output_loading_info=True,
            )
        except Exception as error:  # a folder may hold anything, a hub may be away
            raise UserError(f"--reader {printable(reader.name)}: cannot be loaded: {printable(error, 240)}") from None
    if missing := sorted(loading["missing_keys"]):
        raise UserError(
            f"--reader {printable(reader.name)}: {len(missing)} weights are not in its files, the first "
            f"{printable(missing[0], 80)}: no {reader.facts['kind']} model, or a damaged one"
        )
    own = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=reader.max_new_tokens,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id if own.eos_token_id is not None else reader.tokenizer.eos_token_id,
        pad_token_id=reader.tokenizer.pad_token_id,
        decoder_start_token_id=own.decoder_start_token_id,
    )
    return model.to(reader.device).eval()


class Asks(Protocol):
    """What is needed of a reader: mmclip.tasks.rag.Reader is one."""

    batch_size: int

    @property
    def facts(self) -> Json: ...

    def prompt(self, question: str, documents: Sequence[str] | None) -> Prompt: ...

    def generate(self, prompts: Sequence[str]) -> list[str]: ...


class Predictions:
    """What a reader wrote, key -> text, kept in a file of JSON lines as it comes.

    A torn last line, which a killed run leaves, is dropped. Errors: UserError naming any other line that is no
    prediction.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.texts: dict[str, str] = {}
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        for number, line in enumerate(lines[:-1], 1):
            try:
                entry = json.loads(line)
                key, text = entry["key"], entry["text"]
                if not isinstance(key, str) or not isinstance(text, str):
                    raise TypeError
            except (ValueError, TypeError, KeyError, RecursionError):
                raise UserError(
                    f"{printable(path)}: line {number} is no prediction: {printable(line.decode(errors='replace'), 60)}; "
                    "take the line out, or choose another --output"
                ) from None
            self.texts[key] = text
        if lines[-1]:
            write_text_atomically(path, b"".join(line + b"\n" for line in lines[:-1]).decode())

    def add(self, entries: Sequence[Json]) -> None:
        """Append objects with a key and a text. Errors: OSError where the disk is full."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(e) + "\n" for e in entries))
        self.texts |= {e["key"]: e["text"] for e in entries}


class Asked(NamedTuple):
    """One prompt and what it is about; documents None: closed book."""

    prompt: Prompt
    query: str
    documents: list[str] | None


def check(
    collection: BeirCollection,
    lists: Mapping[str, Lists],
    reader: Asks,
    store: Predictions,
    *,
    closed_book: bool = True,
    seed: int = 0,
) -> Json:
    """Ask, judge and compare: each scoring's lists, cosine's among them -> the numbers of rag.json.

    rag          {"q2d": {scoring: numbers}, "closed_book": numbers}: the means em, f1 and answer_recall (None where no
                 documents were given), their intervals "ci", and how many prompts were cut, documents shortened or
                 left out in all of them
    to_cosine    scoring or closed_book -> metric -> {"delta", "ci", "within_noise"}, paired by query
    alike        scoring -> the one whose lists, hence all numbers, it shares
    per_query    the others -> metric, documents (their ids), key and prediction -> [Q], in the order of query_ids
    """
    answers = collection.answers or []
    texts, ids = collection.documents, collection.document_ids
    distinct = _distinct(lists)
    asked = {
        name: [
            Asked(reader.prompt(question, [texts[d] for d in rows]), query, [ids[d] for d in rows])
            for query, question, rows in zip(collection.query_ids, collection.queries, found, strict=True)
        ]
        for name, found in distinct.items()
    }
    if closed_book:
        asked[CLOSED] = [
            Asked(reader.prompt(question, None), query, None)
            for query, question in zip(collection.query_ids, collection.queries, strict=True)
        ]
    told = json.dumps(reader.facts, sort_keys=True)
    ask(reader, told, [a for found in asked.values() for a in found], store)
    values: dict[str, dict[str, Array]] = {}
    shown: dict[str, Json] = {}
    for name, found in asked.items():
        keys = [key_of(told, a.prompt) for a in found]
        said = [first_line(store.texts[key]) for key in keys]
        values[name] = {
            EM: np.array([exact_match(s, a) for s, a in zip(said, answers, strict=True)]),
            F1: np.array([token_f1(s, a) for s, a in zip(said, answers, strict=True)]),
        }
        shown[name] = {"documents": [a.documents for a in found], "key": keys, "prediction": said}
        if name in distinct:
            given = ([texts[d] for d in rows] for rows in distinct[name])
            values[name][RECALL] = np.array([float(has_answer(d, a)) for d, a in zip(given, answers, strict=True)])
    first = {name: next(n for n, found in distinct.items() if found == lists[name]) for name in lists}
    numbers = {n: _numbers(values[n], [a.prompt for a in asked[n]], seed) for n in asked}
    changes = {n: _changes(values[COSINE], values[n], seed) for n in asked if n != COSINE}
    closed = {CLOSED: CLOSED} if closed_book else {}
    return {
        "rag": {Q2D: {n: numbers[a] for n, a in first.items()}, **{n: numbers[n] for n in closed}},
        "to_cosine": {n: changes[a] for n, a in (first | closed).items() if a != COSINE},
        "alike": {n: a for n, a in first.items() if n != a},
        "per_query": {
            "query_ids": collection.query_ids,
            **{n: {m: v.tolist() for m, v in values[n].items()} | shown[n] for n in asked},
        },
    }


def ask(reader: Asks, told: str, asked: Sequence[Asked], store: Predictions) -> None:
    """Fill the store with an answer to every prompt, each once, in batches of like length."""
    every = {key_of(told, a.prompt): a for a in asked}
    missing = sorted((k for k in every if k not in store.texts), key=lambda k: (len(every[k].prompt.text), k))
    if len(missing) < len(every):
        print(f"{len(every) - len(missing):,} predictions are there already", file=sys.stderr)
    last = time.monotonic()
    with progress_bar() as bar:
        task = bar.add_task("reading", total=len(missing), note="")
        for start in range(0, len(missing), reader.batch_size):
            keys = missing[start : start + reader.batch_size]
            texts = reader.generate([every[k].prompt.text for k in keys])
            store.add(
                [
                    {"key": k, "query": every[k].query, "prompt": every[k].prompt.text, "text": text}
                    for k, text in zip(keys, texts, strict=True)
                ]
            )
            bar.update(task, completed=start + len(keys))
            if bar.disable and time.monotonic() - last > LINE_SECONDS:
                last = time.monotonic()
                print(f"read {start + len(keys):,} of {len(missing):,} prompts", file=sys.stderr, flush=True)


def key_of(told: str, prompt: Prompt) -> str:
    """32 hex digits of a reader and a prompt."""
    return hashlib.sha256(f"{told}\n{prompt.text}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _distinct(lists: Mapping[str, Lists]) -> dict[str, Lists]:
    """Lists that no scoring before has, cosine first."""
    found: dict[str, Lists] = {}
    for name in sorted(lists, key=lambda n: n != COSINE):
        if lists[name] not in found.values():
            found[name] = lists[name]
    return found


def _numbers(values: Mapping[str, Array], prompts: Sequence[Prompt], seed: int) -> Json:
    means = metrics.mean_intervals(np.column_stack(list(values.values())), np.arange(len(prompts)), seed=seed)
    several = len(prompts) > 1  # one query has no spread to tell
    found: Json = {m: mean for m, (mean, _, _) in zip(values, means, strict=True)}
    found.setdefault(RECALL, None)
    return found | {
        "ci": {m: [lo, hi] if several else None for m, (_, lo, hi) in zip(values, means, strict=True)},
        "prompts_cut": sum(p.shortened + p.dropped > 0 for p in prompts),
        "documents_shortened": sum(p.shortened for p in prompts),
        "documents_left_out": sum(p.dropped for p in prompts),
    }


def _changes(cosine: Mapping[str, Array], other: Mapping[str, Array], seed: int) -> Json:
    """other - cosine of each metric that both have."""
    found = {}
    for metric, values in other.items():
        delta, lo, hi = metrics.paired_difference(cosine[metric], values, np.arange(len(values)), seed=seed)
        several = len(values) > 1
        found[metric] = {"delta": delta, "ci": [lo, hi] if several else None,
                         "within_noise": not several or lo <= 0 <= hi}  # fmt: skip
    return found
