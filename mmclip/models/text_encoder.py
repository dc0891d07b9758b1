"""Text encoders as raw embeddings: any sentence-transformers or transformers model, without its Normalize modules.

A model is a sentence-transformers folder or hub name, a run of ``mmclip train-text``, or a plain transformers folder or
hub name with ``--pooling``. Weights are float32, and no code that comes with a model runs. A model that mmclip trained
has ``mmclip.json`` beside ``modules.json``, with the scoring of its embeddings.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmclip.config import TextModelConfig
from mmclip.config.model_config import check_metadata, read_json
from mmclip.errors import UserError, printable
from mmclip.models.metadata import METADATA_FILE, native_exponents
from mmclip.similarity import Exponents, Normalization

ROLES = ("query", "document")
POOLINGS = ("mean", "cls", "lasttoken")
PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}  # encode_document's order
NO_LIMIT = 10**9  # a tokenizer that knows no limit says 10**30
SHOWN = 3  # examples that a message names
HUB_SECONDS = 10.0  # timeout of the hub's first answer
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".onnx", ".msgpack", ".ot", ".gguf", ".index.json")
UNUSED_WEIGHTS = "pooler"  # a head that checkpoints often lack and that no pooling module reads


@dataclass
class TextEncoder:
    """A SentenceTransformer whose embeddings are raw.

    Attributes:
        encoder: The SentenceTransformer, in float32 and evaluation mode.
        name: The requested name.
        removed: Class names of the Normalize modules that were removed from its end.
        metadata: mmclip.json, {} for any other model.
        lengths: Tokens that a text is cut to, by role; None is the model's own limit.
        prompts: Prompt before every text, by role.
        precision: Of encoding, "fp32" or "amp_bf16" (autocast); embeddings are float32 in any case.
        notes: Warnings for the user: weights drawn at random, a Normalize module that could not be removed.
    """

    encoder: Any
    name: str
    removed: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, int | None] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)
    precision: str = "fp32"
    notes: list[str] = field(default_factory=list)

    @property
    def dim(self) -> int:
        return int(self.encoder.get_embedding_dimension())

    def length_of(self, role: str) -> int | None:
        """Tokens that a text of a role is cut to; None: no limit is known."""
        limits = [self.lengths.get(role), self.encoder.max_seq_length]
        return min((n for n in limits if n is not None and n <= NO_LIMIT), default=None)

    def tokens(self, texts: Sequence[str], role: str) -> dict[str, Any]:
        """Encoder inputs of texts in a role, cut and prompted as in ``encode``."""
        with self._cut(role):
            inputs: dict[str, Any] = self.encoder.preprocess(list(texts), prompt=self.prompts.get(role, ""), task=role)
        return inputs

    @contextlib.contextmanager
    def _cut(self, role: str) -> Iterator[None]:
        """Cut texts to a role's length inside the block."""
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
        """Raw embeddings of texts in the role "query" or "document".

        A text without any token has the embedding 0, and the score 0 with everything.

        Returns:
            [N, D], float32, on the CPU.

        Raises:
            UserError: An embedding is not finite; names the first text.
        """
        prompt = self.prompts.get(role, "")
        void = set() if prompt.strip() else self._without_tokens(texts)
        some = [i for i, text in enumerate(texts) if text not in void]
        device = self.encoder.device.type
        with self._cut(role), torch.autocast(device, dtype=torch.bfloat16, enabled=self.precision != "fp32"):
            encoded = self.encoder.encode(
                [texts[i] for i in some],
                prompt=prompt,
                batch_size=batch_size,
                show_progress_bar=progress and sys.stderr.isatty(),
                convert_to_tensor=True,
                normalize_embeddings=False,
                task=role,
            )
        rows = torch.zeros(len(texts), encoded.shape[1] if some else self.dim)
        if some:
            rows[some] = encoded.float().cpu()
        bad = torch.nonzero(~rows.isfinite().all(dim=1)).flatten()
        if len(bad):
            raise UserError(
                f"--model {printable(self.name)}: {len(bad)} embeddings are not finite, the first of "
                f"{role} {int(bad[0])}: {printable(texts[int(bad[0])], 60)}"
            )
        return rows

    def _without_tokens(self, texts: Sequence[str]) -> set[str]:
        """Blank texts without any token; none for a tokenizer that adds begin or end tokens."""
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
) -> TextEncoder:
    """Load a model by folder or hub name, ready to encode raw embeddings.

    Args:
        name: Folder or hub name.
        device: Torch device.
        pooling: Pooling of a plain transformers model, which has none of its own: one of POOLINGS.
        random_init: Keep architecture and tokenizer of the folder, and draw the weights from ``seed``.
        keep_normalize: Leave Normalize modules in place.
        query_length: Tokens of a query; None is the model's own limit.
        document_length: Tokens of a document; None is the model's own limit.
        query_prompt: Prompt of queries; None is the model's own.
        document_prompt: Prompt of documents; None is the model's own.
        precision: "fp32" or "amp_bf16".
        seed: Of random weights.

    Raises:
        UserError: No such model, or one that cannot be run. One line.
    """
    source = resolve_model(name)
    if random_init and not Path(source).is_dir():
        raise UserError(f"--model {printable(name)}: --random-init needs a folder, with a config and a tokenizer in it")
    metadata, plain = read_text_metadata(source), is_plain(source)
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
    removed, notes = ([], []) if keep_normalize else _remove_normalize(encoder)
    if missing and not random_init:
        names = ", ".join(printable(n, 60) for n in missing[:SHOWN]) + ", …" * (len(missing) > SHOWN)
        notes.append(f"weights that its files lack were drawn at random ({len(missing)}: {names})")
    prompts = {"query": query_prompt, "document": document_prompt}
    model = TextEncoder(
        encoder,
        name,
        removed,
        metadata,
        {"query": query_length, "document": document_length},
        {role: _own_prompt(encoder, role) if prompt is None else prompt for role, prompt in prompts.items()},
        precision,
        notes,
    )
    _try_out(model)
    return model


def resolve_model(name: str) -> str:
    """The loadable name of a model.

    A run of ``mmclip train-text`` becomes its folder ``model``; a hub name stays, or becomes its folder in the hub's
    cache where the hub does not answer. UserError where there is neither.
    """
    path = Path(name).expanduser() if name.startswith("~") else Path(name)
    if not (path / "modules.json").is_file() and (path / "model" / "modules.json").is_file():
        path = path / "model"
    if path.is_dir():
        return str(path)
    if not path.exists() and name.count("/") <= 1 and hub_answers(name):
        return name
    if (folder := None if path.exists() else cached(name)) is None:
        raise UserError(
            f"--model {printable(name)}: no such folder, and no model of this name in the hub's cache; the hub does not "
            "answer"
        )
    return str(folder)


def is_plain(name: str) -> bool:
    """Whether a name is a transformers model without the modules of sentence-transformers; False for no model at all."""
    source = resolve_model(name)
    return find_file(source, "modules.json") is None and (
        Path(source).is_dir() or find_file(source, "config.json") is not None
    )


def read_text_metadata(name: str) -> dict[str, Any]:
    """mmclip.json of a model, {} where there is none (UserError for values of the wrong kind)."""
    path = find_file(resolve_model(name), METADATA_FILE)
    return {} if path is None else check_metadata(read_json(path), printable(path))


def _remove_normalize(encoder: Any) -> tuple[list[str], list[str]]:
    """Remove the Normalize modules at the end of a pipeline; returns their names, and notes on others inside it."""
    from sentence_transformers.sentence_transformer.modules import Normalize

    def normalizes(module: Any) -> bool:
        return isinstance(module, Normalize) and module.module_output_name == "sentence_embedding"

    removed = []
    while len(encoder) > 1 and normalizes(encoder[-1]):
        last = list(encoder._modules)[-1]
        removed.append(type(encoder._modules[last]).__name__)
        del encoder._modules[last]
    inside = [i for i, module in enumerate(encoder) if normalizes(module)]
    return removed, [
        f"a Normalize module was left in place before {type(encoder[i + 1]).__name__}, which therefore sees unit vectors "
        "only"
        for i in inside
    ]


def _own_prompt(encoder: Any, role: str) -> str:
    """The prompt of sentence-transformers' encode_query or encode_document."""
    return str(next((encoder.prompts[n] for n in PROMPT_NAMES[role] if n in encoder.prompts), "") or "")


def _try_out(model: TextEncoder) -> None:
    """Encode one text of each role: the parts of a model may not fit together (UserError)."""
    for role in ROLES:
        try:
            model.encode(["a"], role, progress=False)
        except UserError:
            raise
        except Exception as error:  # any of its parts may be what does not fit
            known = isinstance(error, KeyError) and "sentence_embedding" in str(error)
            why = "no pooling among its modules, so no embedding of a text" if known else printable(error, 240)
            raise UserError(f"--model {printable(model.name)}: cannot be run: {why}") from None


# --- options ---------------------------------------------------------------------------------------------------------


def text_precision(precision: str, device: torch.device) -> str:
    """Resolve a --precision to "fp32" or "amp_bf16"; "auto" is bfloat16 on CUDA.

    >>> text_precision("auto", torch.device("cpu")), text_precision("amp_bfloat16", torch.device("cpu"))
    ('fp32', 'amp_bf16')
    """
    half = device.type == "cuda" if precision == "auto" else precision != "fp32"
    return "amp_bf16" if half else "fp32"


def open_text_model(settings: TextModelConfig, device: torch.device, keep_normalize: bool = False) -> TextEncoder:
    """Load the text encoder that the flags describe; its notes are printed to stderr.

    Texts are cut to the lengths of the flags, else, for a model that mmclip trained, to those of its training.
    """
    model = load_text_model(
        str(settings.model),
        device,
        pooling=settings.pooling,
        random_init=settings.random_init,
        keep_normalize=keep_normalize,
        query_length=settings.query_length,
        document_length=settings.document_length,
        query_prompt=settings.query_prompt,
        document_prompt=settings.document_prompt,
        seed=settings.seed,
        precision=text_precision(settings.precision, device),
    )
    trained: Any = model.metadata.get("lengths")
    for role in ROLES:
        length = trained.get(role) if isinstance(trained, dict) else None
        if model.lengths.get(role) is None and isinstance(length, int) and length > 0:
            model.lengths[role] = length
    for note in model.notes:
        print(f"warning: {printable(model.name)}: {printable(note)}", file=sys.stderr)
    return model


def encoding(model: TextEncoder) -> dict[str, Any]:
    """How texts were encoded, for results.json and mmclip.json: {"removed", "lengths", "prompts"}."""
    return {
        "removed": list(model.removed),
        "lengths": {role: model.length_of(role) for role in ROLES},
        "prompts": {role: model.prompts.get(role, "") for role in ROLES},
    }


def native_scoring(model: TextEncoder) -> tuple[Exponents, float | None]:
    """(exponents, alpha) that a model's vectors are to be scored with.

    What mmclip trained says it itself. Any other model has cosine where its Normalize was removed or its
    ``similarity_fn_name`` is cosine (sentence-transformers' default), dot where that says dot; alpha is not known.
    Errors: UserError for metadata without numbers, and for a similarity that is neither.
    """
    if model.metadata:
        alpha = model.metadata.get("logit_scale_q2d")
        return native_exponents(model.metadata), alpha if isinstance(alpha, int | float) else None
    said = str(model.encoder.similarity_fn_name)
    if model.removed or said == "cosine":
        return Normalization.COSINE.exponents, None
    if said == "dot":
        return Normalization.DOT.exponents, None
    raise UserError(
        f"--model {printable(model.name)}: its similarity is {printable(said, 40)}; cosine or dot can be evaluated"
    )


# --- files: a folder, the hub, its cache, or random weights ----------------------------------------------------------


@functools.cache
def hub_answers(name: str) -> bool:
    """Whether the hub answers for a name; without a network its own client would retry for more than a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_SECONDS)
    except HfHubHTTPError:
        return True
    except Exception:  # no network, an invalid name, offline mode: the kinds are the client's own
        return False
    return True


def cached(name: str) -> Path | None:
    """The folder of a hub name in the hub's local cache, None where it is not cached."""
    from huggingface_hub import snapshot_download

    for repository in _repositories(name):
        with contextlib.suppress(Exception):  # not cached, or an invalid name
            folder = os.getenv("SENTENCE_TRANSFORMERS_HOME")
            return Path(snapshot_download(repository, cache_dir=folder, local_files_only=True))
    return None


def find_file(source: str, file: str) -> Path | None:
    """The path of a file in a folder or hub repository; None where there is none."""
    if Path(source).is_dir():
        path = Path(source) / file
        return path if path.is_file() else None
    from sentence_transformers.util import load_file_path

    for repository in _repositories(source):
        with contextlib.suppress(OSError):  # no such repository; loading it raises the error
            if path_name := load_file_path(repository, file):
                return Path(path_name)
    return None


def _repositories(name: str) -> tuple[str, ...]:
    """sentence-transformers' own models may be named without their owner."""
    return (name,) if "/" in name else (name, f"sentence-transformers/{name}")


def random_weights(source: str, scratch: Path, seed: int) -> str:
    """A copy of the folder ``source`` whose transformer has random weights in float32."""
    from transformers import AutoConfig, AutoModel

    root = Path(source)
    trunk = _trunk_folder(root)
    target = scratch / "model"
    for path in sorted(root.rglob("*")):
        if path.is_file() and not (path.parent in (root, root / trunk) and path.name.endswith(WEIGHTS)):
            copy = target / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    config = AutoConfig.from_pretrained(str(target / trunk), trust_remote_code=False)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = AutoModel.from_config(config, trust_remote_code=False, dtype=torch.float32)
    network.save_pretrained(str(target / trunk))
    return str(target)


def redraw(encoder: nn.Module, seed: int) -> None:
    """Draw the weights of the modules behind the transformer (a Dense module, for one)."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for part in list(encoder.children())[1:]:
            for module in part.modules():
                if callable(reset := getattr(module, "reset_parameters", None)):
                    reset()


def _trunk_folder(root: Path) -> str:
    """The folder of the first module inside ``root``; "" for the root itself."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        path = json.loads((root / "modules.json").read_text(encoding="utf-8"))[0]["path"]
        if path in {p.name for p in root.iterdir() if p.is_dir()}:
            return str(path)
    return ""


class _Missing(logging.Handler):
    """Captures the log of loading libraries, and keeps the names of missing weights."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        for line in record.getMessage().splitlines():
            cells = [c.strip() for c in re.sub(r"\x1b\[[0-9;]*m", "", line).split("|")]
            if len(cells) > 1 and cells[1] in ("MISSING", "MISMATCH") and UNUSED_WEIGHTS not in cells[0]:
                self.names.append(cells[0])


@contextlib.contextmanager
def quiet() -> Iterator[list[str]]:
    """Silence the logs and progress bars of loading; yields the (growing) list of weights that a checkpoint lacks."""
    from transformers.utils import logging as hf_logging

    missing = _Missing()
    loggers = [logging.getLogger(name) for name in ("transformers", "sentence_transformers", "huggingface_hub")]
    before: list[tuple[Any, ...]] = [(log, log.handlers, log.propagate, log.level) for log in loggers]
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    for log in loggers:
        log.handlers, log.propagate = [missing], False
        log.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield missing.names
    finally:
        for log, handlers, propagate, level in before:
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(level)
        if bars:
            hf_logging.enable_progress_bar()
