"""Answers of a local reader from retrieved documents, scored as SQuAD does, scorings compared on the same queries.

**Answers** (Rajpurkar et al. 2016, arXiv 1606.05250; version 2.0's script): a text is lower-cased, ASCII punctuation
and the articles a, an, the are removed, white space is collapsed.

    EM         1 if the prediction equals an accepted answer, both normalized
    F1         2 P R / (P + R) over the words that the two share, with multiplicity; the best over accepted answers
    empty      where prediction or answer has no word left, F1 is 1 if neither has one, else 0
    recall@k   1 if an accepted answer's words stand in a row in one of the k documents, normalized as well

**Predictions** are kept under a key of the reader and the whole prompt: scorings that retrieve the same documents for a
query share one, and a continued run reads nothing twice.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import os
import re
import string
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mmclip import metrics
from mmclip.config import RagConfig
from mmclip.console import progress_bar
from mmclip.data.beir import BeirCollection, read_objects
from mmclip.errors import UserError, printable
from mmclip.evaluation.comparison import change
from mmclip.models.text_encoder import NO_LIMIT, quiet
from mmclip.roles import Direction
from mmclip.training.log import LINE_SECONDS

PROMPT = """Answer the question in a few words, with the help of the documents.

{documents}

Question: {question}
Answer:"""
CLOSED_PROMPT = """Answer the question in a few words.

Question: {question}
Answer:"""
FIELDS = ("documents", "question")
COSINE, CLOSED = "cosine", "closed_book"
EM, F1, RECALL = "em", "f1", "answer_recall"
Q2D = Direction.Q2D.value
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
Array = NDArray[Any]
Json = dict[str, Any]
CPU = torch.device("cpu")
Lists = list[list[int]]  # document rows of every query's prompt, best first


def normalize(text: str) -> str:
    """A text as answers are compared.

    >>> normalize("The  U.S. president, an actor!")
    'us president actor'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 or 0.

    >>> exact_match("the Eiffel Tower.", ["Tour Eiffel", "Eiffel tower"])
    1.0
    """
    return float(normalize(prediction) in map(normalize, answers))


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """The best F1 over the accepted answers; 0 where there are none.

    >>> token_f1("in Paris, France", ["Paris", "the city of Rome"])
    0.5
    """

    def f1(a: list[str], b: list[str]) -> float:
        return 2 * (Counter(a) & Counter(b)).total() / (len(a) + len(b)) if a and b else float(a == b)

    words = normalize(prediction).split()
    return max((f1(words, normalize(a).split()) for a in answers), default=0.0)


def has_answer(documents: Sequence[str], answers: Sequence[str]) -> bool:
    """Whether a document has an accepted answer's words in a row. An answer without a word is in none.

    >>> has_answer(["A party in Parisian style"], ["Paris", "art"]), has_answer(["They met in Paris."], ["PARIS"])
    (False, True)
    """
    wanted = [f" {a} " for a in map(normalize, answers) if a]
    return any(a in f" {normalize(d)} " for d in documents for a in wanted)


def first_line(text: str) -> str:
    """The first line with a word: readers may go on with questions of their own.

    >>> first_line(" Paris\\n\\nQuestion: And Rome?")
    'Paris'
    """
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def read_template(path: str | None, default: str, fields: Sequence[str], flag: str) -> str:
    """Read a prompt with fields, as Python's format strings have them ({{ and }} are braces), or take ``default``.

    UserError for no text, a field that is missing or not one of ``fields``, and a brace that stands alone.
    """
    where = flag if path is None else f"{flag} {printable(path)}"
    valid, twice = " and ".join(f"{{{f}}}" for f in fields), "a brace that belongs to the text is written twice"
    try:
        text = default if path is None else Path(path).read_bytes().decode().removesuffix("\n")
        parts = [part[1:] for part in string.Formatter().parse(text) if part[1] is not None]
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8: {error.reason}") from None
    except ValueError as error:
        raise UserError(f"{where}: {error}; {twice}") from None
    for name, spec, conversion in parts:
        if name not in fields or spec or conversion:
            shown = f"{name}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}"
            raise UserError(f"{where}: unknown field {{{printable(shown, 60)}}}; valid: {valid} ({twice})")
    if missing := [f for f in fields if f not in [name for name, _, _ in parts]]:
        raise UserError(f"{where}: no {{{missing[0]}}} in it; needed: {valid}")
    return text


def fill(template: str, question: str, documents: Sequence[str] = ()) -> str:
    """A prompt: documents as numbered lines, white space in texts collapsed; texts are never read as a template."""
    lines = "\n".join(f"[{i}] {' '.join(d.split())}" for i, d in enumerate(documents, 1))
    return template.format(documents=lines, question=" ".join(question.split()))


class Prompt(NamedTuple):
    """A prompt that fits: ``shortened`` documents lost their end, ``dropped`` ones are not in it."""

    text: str
    shortened: int = 0
    dropped: int = 0


def fit(
    write: Callable[[Sequence[str]], str], documents: Sequence[str], size: Callable[[str], int], limit: int | None
) -> Prompt | None:
    """Put as much of the documents, best first, into a prompt as ``limit`` has room for (None: not even none of them).

    The last document is shortened, by whole words where it has several, then dropped, then the one before it.
    ``write``: documents -> prompt; ``size``: prompt -> tokens.
    """
    kept = list(documents)
    if limit is None or size(write(kept)) <= limit:
        return Prompt(write(kept))
    while kept:
        last = kept.pop()
        if size(write(kept)) <= limit:
            break
    else:
        return None
    words, space = (last.split(), " ") if len(last.split()) > 1 else (list(last.strip()), "")

    def shortened(n: int) -> str:
        return write([*kept, space.join(words[:n])])

    n = bisect.bisect_right(range(1, len(words)), limit, key=lambda n: size(shortened(n)))
    dropped = len(documents) - len(kept)
    return Prompt(shortened(n), 1, dropped - 1) if n else Prompt(write(kept), 0, dropped)


class Reader:
    """A transformers text-to-text or causal model that answers prompts, decoding greedily (UserError for faults).

    Configuration and tokenizer are read at once, so that faults show early; the weights at the first prompt, so that
    they need not lie in memory beside the encoder's, and not at all where every prediction is kept already. No code of
    a folder is run. ``metadata``: what its answers depend on beside the prompt; ``limit``: tokens of a prompt.
    """

    def __init__(self, settings: RagConfig, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoConfig, AutoTokenizer

        name = str(settings.reader)
        folder = Path(name).expanduser()
        self.name = str(folder) if name.startswith("~") else name
        self.template = read_template(settings.prompt_file, PROMPT, FIELDS, "--prompt-file")
        self.closed = read_template(settings.closed_prompt_file, CLOSED_PROMPT, FIELDS[1:], "--closed-prompt-file")
        self.batch_size, self.max_new_tokens = settings.reader_batch_size, settings.max_new_tokens
        self.device, self.dtype = device, dtype
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise self._error("no config.json in it; a transformers folder is expected")
        if not folder.is_dir() and name.startswith((".", "/", "~")):
            raise self._error("no such folder")
        self.config: Any = self._load(AutoConfig)
        self.tokenizer: Any = self._load(AutoTokenizer)
        self.text_to_text, self.chat = bool(self.config.is_encoder_decoder), bool(self.tokenizer.chat_template)
        if not self.text_to_text:
            self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token_id is None:
            if self.tokenizer.eos_token_id is None:
                raise self._error("its tokenizer has neither a padding nor an end token")
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.limit = self._limit(settings.max_input_tokens)
        version: Any = str(getattr(self.config, "_commit_hash", None))  # of a hub name; a folder has its files
        if folder.is_dir():
            files = (p for p in folder.iterdir() if p.is_file())
            version = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files)
        self.metadata = {
            "name": self.name,
            "kind": "text-to-text" if self.text_to_text else "causal",
            "model_type": str(self.config.model_type),
            "revision": hashlib.sha256(f"{version}{self.config.to_json_string()}".encode()).hexdigest()[:16],
            "dtype": str(dtype).removeprefix("torch."),
            "chat_template": self.chat,
            "max_input_tokens": self.limit,
            "max_new_tokens": self.max_new_tokens,
        }
        special = {t.content for t in self.tokenizer.added_tokens_decoder.values() if t.special and t.content}
        longest_first = sorted(special, key=lambda token: (-len(token), token))
        self._special = re.compile("|".join(map(re.escape, longest_first))) if special else None

    def prompt(self, question: str, documents: Sequence[str] | None) -> Prompt:
        """The prompt of a question, with documents, cut from the last until it fits (or UserError); (None) without."""
        template = self.closed if documents is None else self.template

        def write(kept: Sequence[str]) -> str:
            return self._chat(fill(template, question, kept))

        # texts lose what the tokenizer would take for one of its special tokens, such as the end of a turn
        question, *texts = (self._special.sub(" ", t) if self._special else t for t in (question, *(documents or ())))
        if (prompt := fit(write, texts, self._size, self.limit)) is None:
            raise self._error(
                f"takes {self.limit} tokens, and without any document the prompt of {printable(question, 60)!r} has "
                f"{self._size(write(()))}: --max-input-tokens, or a shorter --prompt-file"
            )
        return prompt

    @torch.inference_mode()
    def generate(self, prompts: Sequence[str]) -> list[str]:
        """What the reader writes after each prompt of a batch, without special tokens (UserError)."""
        model = self._model
        inputs = self._tokens(list(prompts), padding=True, return_tensors="pt").to(self.device)
        ids = model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        answers = ids if self.text_to_text else ids[:, inputs["input_ids"].shape[1] :]
        return list(self.tokenizer.batch_decode(answers, skip_special_tokens=True))

    @functools.cached_property
    def _model(self) -> Any:
        """The weights, decoding greedily whatever their folder says of sampling."""
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig

        kind = AutoModelForSeq2SeqLM if self.text_to_text else AutoModelForCausalLM
        model, loading = self._load(kind, weights_only=True, dtype=self.dtype, output_loading_info=True)
        if missing := sorted(loading["missing_keys"]):
            raise self._error(
                f"{len(missing)} weights are not in its files, the first {printable(missing[0], 80)}: no "
                f"{self.metadata['kind']} model, or a damaged one"
            )
        names = ("bos_token_id", "eos_token_id", "decoder_start_token_id")
        ids = {name: getattr(model.generation_config, name) for name in names}
        ids |= {"pad_token_id": self.tokenizer.pad_token_id}
        if ids["eos_token_id"] is None:
            ids["eos_token_id"] = self.tokenizer.eos_token_id
        greedy = {"do_sample": False, "num_beams": 1, "max_new_tokens": self.max_new_tokens}
        model.generation_config = GenerationConfig(**greedy, **ids)
        return model.to(self.device).eval()

    def _load(self, kind: Any, **options: Any) -> Any:
        with quiet():
            try:
                return kind.from_pretrained(self.name, trust_remote_code=False, **options)
            except Exception as error:  # a folder may hold anything, a hub may be away
                raise self._error(f"cannot be loaded: {printable(error, 240)}") from None

    def _limit(self, requested: int | None) -> int | None:
        """Tokens of a prompt: the tokenizer's own limit, or the requested one, within the model's positions, which a
        causal model's answer shares."""
        places = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        own = [n for n in (places, self.tokenizer.model_max_length) if n is not None and n < NO_LIMIT]
        new, room = self.max_new_tokens, 0 if self.text_to_text else self.max_new_tokens
        limit = requested if requested is not None else min(own) - room if own else None
        if (limit is not None and limit < 1) or (
            places is not None and (places <= new or (limit or 0) + room > places)
        ):
            most = f"has {places} positions" if places is not None else f"takes {min(own)} tokens"
            wanted = f"--max-input-tokens {requested} and " if requested else ""
            raise self._error(f"{most}; {wanted}--max-new-tokens {new} {'do not fit' if requested else 'leaves none'}")
        return limit

    def _tokens(self, text: str | list[str], **options: Any) -> Any:
        return self.tokenizer(text, add_special_tokens=not self.chat, verbose=False, **options)

    def _size(self, text: str) -> int:
        return len(self._tokens(text)["input_ids"])

    def _chat(self, text: str) -> str:
        if not self.chat:
            return text
        options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}  # one line is read
        try:
            return str(self.tokenizer.apply_chat_template([{"role": "user", "content": text}], **options))
        except Exception as error:  # a template is a program of the folder's, run in transformers' sandbox
            raise self._error(f"its chat template cannot be used: {printable(error, 200)}") from None

    def _error(self, text: str) -> UserError:
        return UserError(f"--reader {printable(self.name)}: {text}")


class Predictions:
    """Texts of a reader by key, kept in a file of JSON lines as they come.

    A torn last line, which a killed run leaves, is dropped; another line that is no prediction is a UserError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.texts: dict[str, str] = {}
        if not path.exists():
            return
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        for number, (_, entry) in enumerate(read_objects(path), 1):
            if not isinstance(entry.get("key"), str) or not isinstance(entry.get("text"), str):
                advice = "take the line out, or choose another --output"
                raise UserError(f"{printable(path)}: line {number} has no text with its key: {advice}")
            self.texts[entry["key"]] = entry["text"]

    def add(self, entries: Sequence[Json]) -> None:
        """Append objects with a key and a text."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(e) + "\n" for e in entries))
        self.texts |= {e["key"]: e["text"] for e in entries}


def check(
    collection: BeirCollection,
    lists: Mapping[str, Lists],
    reader: Reader,
    store: Predictions,
    *,
    closed_book: bool = True,
    seed: int = 0,
) -> Json:
    """Read, score and compare the lists of scorings, cosine's among them.

    Returns:
        rag          {"q2d": {scoring: numbers}, "closed_book": numbers}: the means em, f1 and answer_recall (None
                     without documents), their intervals "ci", and how many prompts were cut, documents shortened or
                     left out in all of them
        to_cosine    scoring or closed_book -> metric -> {"delta", "ci", "within_noise"}, paired by query
        alike        scoring -> the one whose lists, hence all numbers, it shares
        per_query    the others -> metric, documents (their ids), key and prediction -> [Q], in the order of query_ids
    """
    answers, texts, ids = collection.answers or [], collection.documents, collection.document_ids
    rows: dict[str, Sequence[list[int] | None]] = {}
    for name in sorted(lists, key=lambda n: n != COSINE):
        if lists[name] not in rows.values():
            rows[name] = lists[name]
    first = {name: next(n for n in rows if rows[n] == lists[name]) for name in lists}
    if closed_book:
        rows[CLOSED] = [None] * len(answers)
    documents = {name: [None if r is None else [texts[d] for d in r] for r in of] for name, of in rows.items()}
    prompts = {name: list(map(reader.prompt, collection.queries, of)) for name, of in documents.items()}
    about = json.dumps(reader.metadata, sort_keys=True)
    keys = {name: [_key(about, prompt) for prompt in of] for name, of in prompts.items()}
    entries = [
        {"key": key, "query": query, "prompt": prompt.text}
        for name in rows
        for key, query, prompt in zip(keys[name], collection.query_ids, prompts[name], strict=True)
    ]
    read(reader, {entry["key"]: entry for entry in entries}, store)
    numbers, changes = {}, {}
    values: dict[str, dict[str, Array]] = {}
    shown: Json = {"query_ids": collection.query_ids}
    for name in rows:
        said = [first_line(store.texts[key]) for key in keys[name]]
        columns: dict[str, Iterable[float]] = {EM: map(exact_match, said, answers), F1: map(token_f1, said, answers)}
        if name != CLOSED:
            columns[RECALL] = map(has_answer, [d or [] for d in documents[name]], answers)
        values[name] = {metric: np.array(list(column), dtype=np.float64) for metric, column in columns.items()}
        numbers[name] = _numbers(values[name], prompts[name], seed)
        pairs = [(metric, values[COSINE][metric], x) for metric, x in values[name].items()]
        changes[name] = {metric: change(a, b, np.arange(len(b)), seed) for metric, a, b in pairs}
        shown[name] = {metric: x.tolist() for metric, x in values[name].items()}
        shown[name]["documents"] = [None if r is None else [ids[d] for d in r] for r in rows[name]]
        shown[name] |= {"key": keys[name], "prediction": said}
    closed = [CLOSED] if closed_book else []
    return {
        "rag": {Q2D: {n: numbers[a] for n, a in first.items()}, **{n: numbers[n] for n in closed}},
        "to_cosine": {n: changes[first.get(n, n)] for n in [*first, *closed] if first.get(n) != COSINE},
        "alike": {n: a for n, a in first.items() if n != a},
        "per_query": shown,
    }


def read(reader: Reader, entries: Mapping[str, Json], store: Predictions) -> None:
    """Fill the store with the text of every prompt that it lacks, in batches of about equal length."""
    missing = sorted(entries.keys() - store.texts.keys(), key=lambda k: (len(entries[k]["prompt"]), k))
    if len(missing) < len(entries):
        print(f"{len(entries) - len(missing):,} predictions are there already", file=sys.stderr)
    last = time.monotonic()
    with progress_bar() as bar:
        task = bar.add_task("reading", total=len(missing), note="")
        for start in range(0, len(missing), reader.batch_size):
            batch = [entries[k] for k in missing[start : start + reader.batch_size]]
            texts = reader.generate([entry["prompt"] for entry in batch])
            store.add([entry | {"text": text} for entry, text in zip(batch, texts, strict=True)])
            bar.update(task, completed=start + len(batch))
            if bar.disable and time.monotonic() - last > LINE_SECONDS:
                last = time.monotonic()
                print(f"read {start + len(batch):,} of {len(missing):,} prompts", file=sys.stderr, flush=True)


def _key(about: str, prompt: Prompt) -> str:
    """32 hex digits of a reader and a prompt."""
    return hashlib.sha256(f"{about}\n{prompt.text}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _numbers(values: Mapping[str, Array], prompts: Sequence[Prompt], seed: int) -> Json:
    means = metrics.mean_intervals(np.column_stack(list(values.values())), np.arange(len(prompts)), seed=seed)
    several = len(prompts) > 1  # one query has no spread
    return {
        **{m: mean for m, (mean, _, _) in zip(values, means, strict=True)},
        **({} if RECALL in values else {RECALL: None}),
        "ci": {m: [lo, hi] if several else None for m, (_, lo, hi) in zip(values, means, strict=True)},
        "prompts_cut": sum(p.shortened + p.dropped > 0 for p in prompts),
        "documents_shortened": sum(p.shortened for p in prompts),
        "documents_left_out": sum(p.dropped for p in prompts),
    }
