"""A sentence-transformers model as raw vectors: Normalize modules taken off, weights in float32, no code of others run.

``--model`` names a sentence-transformers folder or hub name, a run of train_text.py, or a plain transformers folder or
hub name with ``--pooling``. What mmclip trained carries ``mmclip.json`` beside ``modules.json``, which says how its
vectors are to be scored.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmclip.errors import UserError, printable
from mmclip.io import write_atomically
from mmclip.models.model_names import check_facts, read_json
from mmclip.models.text_weights import cached, find_file, hub_answers, quiet, random_weights, redraw

FACTS_FILE = "mmclip.json"
ROLES = ("query", "document")
POOLINGS = ("mean", "cls", "lasttoken")
COSINE_LIKE = ("cosine", "dnorm")  # they rank documents by angle alone
PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}  # encode_document's order
NO_LIMIT = 10**9  # a tokenizer that knows no limit says 10**30
SHOWN = 3  # examples that a message names


@dataclass
class TextModel:
    """``encoder``: a SentenceTransformer in float32, in evaluation mode, whose vectors are raw.

    name          as it was asked for
    removed       the Normalize modules that were taken off its end, by their class; [] where there was none
    facts         mmclip.json's content, {} for any other model
    lengths       role -> tokens that a text is cut to; None: the model's own limit
    prompts       role -> what is put before every text
    precision     of encoding: "fp32", or autocast to bfloat16 ("amp_bf16"); vectors are float32 in any case
    notes         what a person should know: weights that were not there, a Normalize module that could not be taken off
    """

    encoder: Any
    name: str
    removed: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, int | None] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)
    precision: str = "fp32"
    notes: list[str] = field(default_factory=list)

    @property
    def dim(self) -> int:
        return int(self.encoder.get_embedding_dimension())

    def length_of(self, role: str) -> int | None:
        """Tokens that a text of a role is cut to; None: no limit is known."""
        asked, own = self.lengths.get(role), self.encoder.max_seq_length
        own = None if own is None or own > NO_LIMIT else own
        return own if asked is None else asked if own is None else min(asked, own)

    def tokens(self, texts: Sequence[str], role: str) -> dict[str, Any]:
        """What the encoder takes of texts in a role, cut and prompted as ``encode`` does it."""
        with self._cut(role):
            found: dict[str, Any] = self.encoder.preprocess(list(texts), prompt=self.prompts.get(role, ""), task=role)
        return found

    @contextlib.contextmanager
    def _cut(self, role: str) -> Iterator[None]:
        """Inside, texts are cut to a role's length."""
        own, length = self.encoder.max_seq_length, self.length_of(role)
        try:
            if length is not None and length != own:
                self.encoder.max_seq_length = length
            yield
        finally:
            if self.encoder.max_seq_length != own:
                self.encoder.max_seq_length = own

    @torch.inference_mode()
    def encode(self, texts: Sequence[str], role: str, batch_size: int = 64, progress: bool = True) -> Tensor:
        """Raw vectors of texts in the role "query" or "document": [N, D], float32, on the CPU.

        A text that the tokenizer makes no token of has no direction: its vector is 0, and scores 0 with everything.
        Errors: UserError where a vector is not finite, naming the first text.
        """
        prompt = self.prompts.get(role, "")
        void = set() if prompt.strip() else self._without_tokens(texts)
        some = [i for i, text in enumerate(texts) if text not in void]
        device = self.encoder.device.type
        with self._cut(role), torch.autocast(device, dtype=torch.bfloat16, enabled=self.precision != "fp32"):
            found = self.encoder.encode(
                [texts[i] for i in some],
                prompt=prompt,
                batch_size=batch_size,
                show_progress_bar=progress and sys.stderr.isatty(),
                convert_to_tensor=True,
                normalize_embeddings=False,
                task=role,
            )
        rows = torch.zeros(len(texts), found.shape[1] if some else self.dim)
        if some:
            rows[some] = found.float().cpu()
        bad = torch.nonzero(~rows.isfinite().all(dim=1)).flatten()
        if len(bad):
            raise UserError(
                f"--model {printable(self.name)}: {len(bad)} vectors are not finite, the first of "
                f"{role} {int(bad[0])}: {printable(texts[int(bad[0])], 60)}"
            )
        return rows

    def _without_tokens(self, texts: Sequence[str]) -> set[str]:
        """Which blank texts the tokenizer makes nothing of; where it marks beginnings or ends there is none."""
        blank = sorted({text for text in texts if not text.strip()})
        if not blank:
            return set()
        mask = self.encoder.preprocess(["a", *blank]).get("attention_mask")
        return set() if mask is None else {t for t, some in zip(blank, mask[1:].any(dim=1), strict=True) if not some}


def load_text_model(
    name: str,
    device: str | torch.device = "cpu",
    *,
    pooling: str | None = None,
    random_init: bool = False,
    keep_normalize: bool = False,
    query_length: int | None = None,
    document_length: int | None = None,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
    precision: str = "fp32",
    seed: int = 0,
) -> TextModel:
    """A model by folder or hub name, ready to encode raw vectors.

    pooling: of a plain transformers model, which has none of its own. random_init: architecture and tokenizer are the
    folder's, weights are drawn from ``seed``. keep_normalize leaves Normalize modules where they are. lengths and
    prompts: by role; None: the model's own. Errors: UserError, one line.
    """
    source = resolve_model(name)
    if random_init and not Path(source).is_dir():
        raise UserError(f"--model {printable(name)}: --random-init needs a folder, with a config and a tokenizer in it")
    facts, plain = read_text_facts(source), is_plain(source)
    if plain and pooling is None:
        raise UserError(
            f"--model {printable(name)}: no pooling: a plain transformers model needs --pooling, one of "
            f"{', '.join(POOLINGS)}"
        )
    # only now: it takes seconds
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    with quiet() as missing, tempfile.TemporaryDirectory() as scratch:
        try:
            if random_init:
                source = random_weights(source, Path(scratch), seed)
            if plain and pooling is not None:
                own = {"trust_remote_code": False}  # left out, transformers would ask at the terminal
                trunk = Transformer(
                    source, model_kwargs={"dtype": torch.float32, **own}, processor_kwargs=own, config_kwargs=own
                )
                modules = [trunk, Pooling(trunk.get_embedding_dimension(), pooling)]
                encoder = SentenceTransformer(modules=modules, device=str(device))
            else:
                encoder = SentenceTransformer(
                    source,
                    device=str(device),
                    trust_remote_code=False,
                    model_kwargs={"dtype": torch.float32},
                )
        except Exception as error:  # a folder may hold anything, a hub may be away
            raise UserError(f"--model {printable(name)}: cannot be loaded: {printable(error, 240)}") from None
    if random_init:
        redraw(encoder, seed)
    encoder.float().eval()
    removed, notes = ([], []) if keep_normalize else _take_off_normalize(encoder)
    if missing and not random_init:
        told = ", ".join(printable(n, 60) for n in missing[:SHOWN]) + ", …" * (len(missing) > SHOWN)
        notes.append(f"weights that its files lack were drawn at random ({len(missing)}: {told})")
    prompts = {"query": query_prompt, "document": document_prompt}
    model = TextModel(
        encoder,
        name,
        removed,
        facts,
        {"query": query_length, "document": document_length},
        {role: _own_prompt(encoder, role) if asked is None else asked for role, asked in prompts.items()},
        precision,
        notes,
    )
    _try_out(model)
    return model


def resolve_model(name: str) -> str:
    """A name as it is loaded: of a run of train_text.py its folder ``model``, with ~ written out; a hub name as it is,
    or its folder in the hub's cache where the hub does not answer. Errors: UserError where nothing is found."""
    path = Path(name).expanduser() if name.startswith("~") else Path(name)
    if not (path / "modules.json").is_file() and (path / "model" / "modules.json").is_file():
        path = path / "model"
    if path.is_dir():
        return str(path)
    if not path.exists() and name.count("/") <= 1 and hub_answers(name):
        return name
    if (found := None if path.exists() else cached(name)) is None:
        raise UserError(
            f"--model {printable(name)}: no such folder, and no model of this name in the hub's cache; the hub does not "
            "answer"
        )
    return str(found)


def is_plain(name: str) -> bool:
    """A transformers model without sentence-transformers' list of modules; False where nothing is found."""
    source = resolve_model(name)
    return find_file(source, "modules.json") is None and (
        Path(source).is_dir() or find_file(source, "config.json") is not None
    )


def read_text_facts(name: str) -> dict[str, Any]:
    """mmclip.json of a model; {} where there is none.

    Errors: UserError for one that is no object, or holds a value that others compute with and that is no such number.
    """
    path = find_file(resolve_model(name), FACTS_FILE)
    return {} if path is None else check_facts(read_json(path), printable(path))


def save_text_model(model: TextModel, folder: Path, facts: dict[str, Any]) -> None:
    """A sentence-transformers folder with mmclip.json in it: any sentence-transformers user can load it.

    ``similarity_fn_name`` says how to rank with it where one of theirs does: cosine for cosine and dnorm, dot for dot
    and qnorm; a learned gamma_d between 0 and 1 has none there, and the nearer one is named (mmclip.json has it all).
    The prompts are those that ``model`` encodes with.
    """
    model.encoder.similarity_fn_name = "cosine" if float(facts["gamma_d"]) > 0.5 else "dot"
    model.encoder.prompts.update(model.prompts)

    def write(partial: Path) -> None:
        with quiet():
            model.encoder.save_pretrained(str(partial), create_model_card=False)
        (partial / FACTS_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    write_atomically(folder, write)


def _take_off_normalize(encoder: Any) -> tuple[list[str], list[str]]:
    """(Normalize modules taken off the end of a pipeline, a note on those that something else follows)."""
    from sentence_transformers.sentence_transformer.modules import Normalize

    def hides_length(module: Any) -> bool:
        return isinstance(module, Normalize) and module.module_output_name == "sentence_embedding"

    removed = []
    while len(encoder) > 1 and hides_length(encoder[-1]):
        last = list(encoder._modules)[-1]
        removed.append(type(encoder._modules[last]).__name__)
        del encoder._modules[last]
    inside = [i for i, module in enumerate(encoder) if hides_length(module)]
    return removed, [
        f"a Normalize module was left where it is, before {type(encoder[i + 1]).__name__}: what follows sees no length "
        "of the vectors before it"
        for i in inside
    ]


def _own_prompt(encoder: Any, role: str) -> str:
    """What encode_query and encode_document of sentence-transformers put before a text."""
    return str(next((encoder.prompts[n] for n in PROMPT_NAMES[role] if n in encoder.prompts), "") or "")


def _try_out(model: TextModel) -> None:
    """A text of each role through the model: its parts may not fit together, or give no vector. Errors: UserError."""
    for role in ROLES:
        try:
            model.encode(["a"], role, progress=False)
        except UserError:
            raise
        except Exception as error:  # any of its parts may be what does not fit
            known = isinstance(error, KeyError) and "sentence_embedding" in str(error)
            why = "no pooling among its modules, so no vector of a text" if known else printable(error, 240)
            raise UserError(f"--model {printable(model.name)}: cannot be run: {why}") from None
