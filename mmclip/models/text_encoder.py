"""Text encoders as raw embeddings: any sentence-transformers or transformers model, without its Normalize modules.

A model is a sentence-transformers folder or hub name, a run of ``mmclip train-text``, or a plain transformers folder or
hub name with ``--pooling``. Weights are float32, and no code that comes with a model runs.
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
        notes: Warnings: weights drawn at random, a Normalize module that could not be removed.
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
        if length in (None, own):
            yield
            return
        self.encoder.max_seq_length = length
        try:
            yield
        finally:
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
                task=role,
                batch_size=batch_size,
                convert_to_tensor=True,
                normalize_embeddings=False,
                show_progress_bar=progress and sys.stderr.isatty(),
            )
        rows = torch.zeros(len(texts), encoded.shape[1] if some else self.dim)
        if some:
            rows[some] = encoded.float().cpu()
        bad = (~rows.isfinite().all(dim=1)).nonzero().flatten().tolist()
        if bad:
            first = f"the first of {role} {bad[0]}: {printable(texts[bad[0]], 60)}"
            raise UserError(f"--model {printable(self.name)}: {len(bad)} embeddings are not finite, {first}")
        return rows

    def _without_tokens(self, texts: Sequence[str]) -> set[str]:
        """Blank texts without any token; none for a tokenizer that adds begin or end tokens."""
        blank = sorted({text for text in texts if not text.strip()})
        mask = self.encoder.preprocess(["a", *blank]).get("attention_mask") if blank else None
        return set() if mask is None else {t for t, some in zip(blank, mask[1:].any(dim=1), strict=True) if not some}


def load_text_model(
    model: str | TextModelConfig, device: str | torch.device = "cpu", keep_normalize: bool = False, **settings: Any
) -> TextEncoder:
    """Load a text encoder, ready to encode raw embeddings; its notes are printed to stderr.

    Texts are cut to the lengths of the settings, else, for a model that mmclip trained, to those of its training.

    Args:
        model: folder or hub name, or all settings.
        device: torch device.
        keep_normalize: leave Normalize modules in place.
        settings: fields of ``TextModelConfig`` beside a name, such as pooling or query_length; float32 by default.

    Raises:
        UserError: no such model, or one that cannot be run. One line.
    """
    if isinstance(model, str):
        model = TextModelConfig(**{"model": model, "precision": "fp32"} | settings)
    name = f"--model {printable(model.model)}"
    source = resolve_model(str(model.model))
    if model.random_init and not Path(source).is_dir():
        raise UserError(f"{name}: --random-init needs a folder, with a config and a tokenizer in it")
    metadata = read_text_metadata(source)
    plain = find_file(source, "modules.json") is None
    plain = plain and (Path(source).is_dir() or find_file(source, "config.json") is not None)
    if plain and model.pooling is None:
        pooling = "a plain transformers model needs --pooling, one of mean, cls, lasttoken"
        raise UserError(f"{name}: no pooling: {pooling}")
    # only now: it takes seconds
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    own = {"trust_remote_code": False}  # left out, transformers would ask at the terminal
    float32 = {"dtype": torch.float32}
    with quiet() as missing, tempfile.TemporaryDirectory() as scratch:
        try:
            if model.random_init:
                source = random_weights(source, Path(scratch), model.seed)
            if plain:
                trunk = Transformer(source, model_kwargs=float32 | own, processor_kwargs=own, config_kwargs=own)
                modules = [trunk, Pooling(trunk.get_embedding_dimension(), model.pooling)]
                encoder: Any = SentenceTransformer(modules=modules, device=str(device))
            else:
                encoder = SentenceTransformer(source, device=str(device), model_kwargs=float32, **own)
        except Exception as error:  # a folder may hold anything, a hub may be away
            raise UserError(f"{name}: cannot be loaded: {printable(error, 240)}") from None
    if model.random_init:
        redraw(encoder, model.seed)
    encoder.float().eval()
    removed, notes = ([], []) if keep_normalize else _remove_normalize(encoder)
    if missing and not model.random_init:
        names = ", ".join(printable(n, 60) for n in missing[:SHOWN]) + ", …" * (len(missing) > SHOWN)
        notes.append(f"weights that its files lack were drawn at random ({len(missing)}: {names})")
    for note in notes:
        print(f"warning: {printable(model.model)}: {printable(note)}", file=sys.stderr)
    loaded = TextEncoder(encoder, str(model.model), removed, metadata, notes=notes)
    loaded.precision = text_precision(model.precision, torch.device(device))
    trained = metadata.get("lengths")
    for role in ROLES:
        length, prompt = getattr(model, f"{role}_length"), getattr(model, f"{role}_prompt")
        if length is None and isinstance(trained, dict) and isinstance(trained.get(role), int) and trained[role] > 0:
            length = trained[role]
        if prompt is None:  # sentence-transformers' own, of encode_query or encode_document
            prompt = next((encoder.prompts[n] for n in PROMPT_NAMES[role] if n in encoder.prompts), None)
        loaded.lengths[role], loaded.prompts[role] = length, str(prompt or "")
    for role in ROLES:  # the parts of a model may not fit together
        try:
            loaded.encode(["a"], role, progress=False)
        except UserError:
            raise
        except Exception as error:  # any of its parts may be what does not fit
            known = isinstance(error, KeyError) and "sentence_embedding" in str(error)
            why = "no pooling among its modules, so no embedding of a text" if known else printable(error, 240)
            raise UserError(f"{name}: cannot be run: {why}") from None
    return loaded


def resolve_model(name: str) -> str:
    """The loadable name of a model: of a run its folder ``model``, of a hub name its cache where no hub answers.

    Raises UserError where there is neither.
    """
    path = Path(name).expanduser() if name.startswith("~") else Path(name)
    if path.is_dir():
        inner = not (path / "modules.json").is_file() and (path / "model" / "modules.json").is_file()
        return str(path / "model" if inner else path)
    if not path.exists() and name.count("/") <= 1 and hub_answers(name):
        return name
    if (folder := None if path.exists() else cached(name)) is None:
        cause = "no such folder, and no model of this name in the hub's cache; the hub does not answer"
        raise UserError(f"--model {printable(name)}: {cause}")
    return str(folder)


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
        removed.append(type(encoder._modules.popitem()[1]).__name__)
    inside = [type(encoder[i + 1]).__name__ for i, module in enumerate(encoder) if normalizes(module)]
    return removed, [
        f"a Normalize module was left in place before {name}, whose inputs are unit vectors" for name in inside
    ]


def text_precision(precision: str, device: torch.device) -> str:
    """Resolve a --precision to "fp32" or "amp_bf16"; "auto" is bfloat16 on CUDA.

    >>> text_precision("auto", torch.device("cpu")), text_precision("amp_bfloat16", torch.device("cpu"))
    ('fp32', 'amp_bf16')
    """
    half = device.type == "cuda" if precision == "auto" else precision != "fp32"
    return "amp_bf16" if half else "fp32"


def encoding(model: TextEncoder) -> dict[str, Any]:
    """How texts were encoded, for results.json and mmclip.json."""
    lengths = {role: model.length_of(role) for role in ROLES}
    return {"removed": [*model.removed], "lengths": lengths, "prompts": {r: model.prompts.get(r, "") for r in ROLES}}


def native_scoring(model: TextEncoder) -> tuple[Exponents, float | None]:
    """(Exponents, alpha) that a model's vectors are to be scored with: those of its training, if it is mmclip's.

    Any other model has cosine where its Normalize was removed or its ``similarity_fn_name`` is cosine
    (sentence-transformers' default), dot where that says dot; alpha is not known. UserError for any other similarity.
    """
    if model.metadata:
        alpha = model.metadata.get("logit_scale_q2d")
        return native_exponents(model.metadata), alpha if isinstance(alpha, int | float) else None
    said = str(model.encoder.similarity_fn_name)
    if model.removed or said == "cosine":
        return Normalization.COSINE.exponents, None
    if said == "dot":
        return Normalization.DOT.exponents, None
    name = printable(model.name)
    raise UserError(f"--model {name}: its similarity is {printable(said, 40)}; cosine or dot can be evaluated")


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
        return path if (path := Path(source) / file).is_file() else None
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
        return str(path) if path in {p.name for p in root.iterdir() if p.is_dir()} else ""
    return ""


@contextlib.contextmanager
def quiet() -> Iterator[list[str]]:
    """Silence the logs, warnings and progress bars of loading, and refuse code that comes with a model.

    Yields the (growing) list of weights that a checkpoint lacks, by transformers' log.
    """
    from transformers import dynamic_module_utils as remote  # slow to import, and only builders need it
    from transformers.utils import logging as hf_logging

    names: list[str] = []

    class Missing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            for line in record.getMessage().splitlines():
                cells = [c.strip() for c in re.sub(r"\x1b\[[0-9;]*m", "", line).split("|")]
                if len(cells) > 1 and cells[1] in ("MISSING", "MISMATCH") and UNUSED_WEIGHTS not in cells[0]:
                    names.append(cells[0])

    loggers = [logging.getLogger(name) for name in (None, "transformers", "sentence_transformers", "huggingface_hub")]
    before: list[tuple[Any, ...]] = [(log, log.handlers, log.propagate, log.level) for log in loggers]
    bars, patience = hf_logging.is_progress_bar_enabled(), remote.TIME_OUT_REMOTE_CODE
    hf_logging.disable_progress_bar()
    remote.TIME_OUT_REMOTE_CODE = 0  # transformers would ask at the terminal whether to run code
    for log in loggers:
        log.handlers, log.propagate = [Missing(logging.WARNING)], False
        log.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield names
    finally:
        remote.TIME_OUT_REMOTE_CODE = patience
        for log, handlers, propagate, level in before:
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(level)
        if bars:
            hf_logging.enable_progress_bar()
