"""A sentence-transformers model as raw vectors: Normalize modules taken off, weights in float32, no code of others run.

``--model`` names a sentence-transformers folder or hub name, or a plain transformers folder with ``--pooling``. What
mmclip trained carries ``mmclip.json`` beside ``modules.json``, which says how its vectors are to be scored.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmclip.errors import UsageError, one_line
from mmclip.files import write_text_atomically

FACTS_FILE = "mmclip.json"
ROLES = ("query", "document")
POOLINGS = ("mean", "cls", "lasttoken")
COSINE_LIKE = ("cosine", "dnorm")  # they rank documents by angle alone


@dataclass
class TextModel:
    """``encoder``: a SentenceTransformer in float32, in evaluation mode, whose vectors are raw.

    name          as it was asked for
    removed       the Normalize modules that were taken off its end, by their class; [] where there was none
    facts         mmclip.json's content, {} for any other model
    lengths       role -> tokens that a text is cut to; None: the model's own limit
    prompts       role -> what is put before every text
    """

    encoder: Any
    name: str
    removed: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, int | None] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)

    @property
    def dim(self) -> int:
        return int(self.encoder.get_embedding_dimension())

    def length_of(self, role: str) -> int | None:
        """Tokens that a text of a role is cut to; None: no limit is known."""
        asked, own = self.lengths.get(role), self.encoder.max_seq_length
        return own if asked is None else asked if own is None else min(asked, own)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str], role: str, batch_size: int = 64, progress: bool = True) -> Tensor:
        """Raw vectors of texts in the role "query" or "document": [N, D], float32, on the CPU.

        Errors: UsageError where a vector is not finite, naming the first text.
        """
        own = self.encoder.max_seq_length
        self.encoder.max_seq_length = self.length_of(role)
        try:
            rows = self.encoder.encode(
                list(texts),
                prompt=self.prompts.get(role, ""),
                batch_size=batch_size,
                show_progress_bar=progress and sys.stderr.isatty(),
                convert_to_tensor=True,
                normalize_embeddings=False,
            )
        finally:
            self.encoder.max_seq_length = own
        rows = rows.float().cpu() if len(texts) else torch.zeros(0, self.dim)
        bad = torch.nonzero(~rows.isfinite().all(dim=1)).flatten()
        if len(bad):
            raise UsageError(
                f"--model {one_line(self.name)}: {len(bad)} vectors are not finite, the first of "
                f"{role} {int(bad[0])}: {one_line(texts[int(bad[0])], 60)}"
            )
        return rows


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
    seed: int = 0,
) -> TextModel:
    """A model by folder or hub name, ready to encode raw vectors.

    pooling: of a plain transformers folder, which has none of its own. random_init: architecture and tokenizer are the
    folder's, weights are drawn from ``seed``. keep_normalize leaves Normalize modules where they are. lengths and
    prompts: by role; None: the model's own. Errors: UsageError, one line.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    with _quiet(), tempfile.TemporaryDirectory() as scratch:
        try:
            source = name
            if random_init:
                source = _without_weights(name, Path(scratch), seed)
            if is_plain(source):
                if pooling is None:
                    raise UsageError(
                        f"--model {one_line(name)}: no pooling: a plain transformers model needs --pooling, one of "
                        f"{', '.join(POOLINGS)}"
                    )
                trunk = Transformer(source, model_kwargs={"dtype": torch.float32})
                width = trunk.get_embedding_dimension()
                encoder = SentenceTransformer(modules=[trunk, Pooling(width, pooling)], device=str(device))
            else:
                encoder = SentenceTransformer(
                    source, device=str(device), trust_remote_code=False, model_kwargs={"dtype": torch.float32}
                )
        except UsageError:
            raise
        except Exception as error:  # a folder may hold anything, a hub may be away
            raise UsageError(f"--model {one_line(name)}: cannot be loaded: {one_line(error, 240)}") from None
    encoder.float().eval()
    removed = [] if keep_normalize else _remove_normalize(encoder, Normalize)
    prompts = {"query": query_prompt, "document": document_prompt}
    model = TextModel(
        encoder,
        name,
        removed,
        read_text_facts(name),
        {"query": query_length, "document": document_length},
        {role: asked if asked is not None else str(encoder.prompts.get(role) or "") for role, asked in prompts.items()},
    )
    _try_out(model)
    return model


def is_plain(name: str) -> bool:
    """A transformers folder without sentence-transformers' list of modules."""
    folder = Path(name)
    return folder.is_dir() and not (folder / "modules.json").is_file()


def read_text_facts(name: str) -> dict[str, Any]:
    """mmclip.json of a model's folder; {} where there is none. Errors: UsageError for one that is no object."""
    path = Path(name) / FACTS_FILE
    if not path.is_file():
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise UsageError(f"{one_line(path)}: not a JSON object")
    return facts


def save_text_model(model: TextModel, folder: Path, facts: dict[str, Any]) -> None:
    """A sentence-transformers folder with mmclip.json in it: any sentence-transformers user can load it.

    ``similarity_fn_name`` says how to rank with it where one of theirs does: cosine for cosine and dnorm, dot for dot
    and qnorm; a learned gamma_d between 0 and 1 has none there, and the nearer one is named (mmclip.json has it all).
    """
    gamma_d = float(facts["gamma_d"])
    model.encoder.similarity_fn_name = "cosine" if gamma_d > 0.5 else "dot"
    model.encoder.save_pretrained(str(folder), create_model_card=False)
    write_text_atomically(folder / FACTS_FILE, json.dumps(facts, indent=1) + "\n")


def _remove_normalize(encoder: Any, normalize: type) -> list[str]:
    """Take the Normalize modules off the end of a pipeline."""
    removed = []
    while len(encoder) and isinstance(encoder[len(encoder) - 1], normalize):
        last = list(encoder._modules)[-1]
        removed.append(type(encoder._modules[last]).__name__)
        del encoder._modules[last]
    return removed


def _without_weights(name: str, scratch: Path, seed: int) -> str:
    """A folder with the files of ``name`` and random weights in float32."""
    from transformers import AutoConfig, AutoModel

    root = Path(name)
    if not root.is_dir():
        raise UsageError(f"--model {one_line(name)}: --random-init needs a folder, with a config and a tokenizer in it")
    target = scratch / "model"
    weights = shutil.ignore_patterns("*.safetensors", "*.bin", "*.pt", "*.h5", "*.onnx", "onnx", "openvino")
    shutil.copytree(root, target, ignore=weights)
    trunk = target / "0_Transformer" if (target / "0_Transformer" / "config.json").is_file() else target
    config = AutoConfig.from_pretrained(str(trunk), trust_remote_code=False)
    config.dtype = "float32"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModel.from_config(config, trust_remote_code=False).save_pretrained(str(trunk))
    return str(target)


@torch.inference_mode()
def _try_out(model: TextModel) -> None:
    """One text through the model: its parts may not fit together, or may give no vector. Errors: UsageError."""
    try:
        found = model.encoder.encode(["a"], convert_to_tensor=True, show_progress_bar=False)
    except Exception as error:  # any of its parts may be what does not fit
        known = isinstance(error, KeyError) and "sentence_embedding" in str(error)
        why = "no pooling among its modules, so no vector of a text" if known else one_line(error, 240)
        raise UsageError(f"--model {one_line(model.name)}: cannot be run: {why}") from None
    if found.ndim != 2 or not found.isfinite().all():
        raise UsageError(f"--model {one_line(model.name)}: its vectors are not finite, or of shape {list(found.shape)}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers and sentence-transformers log every step of loading, and draw bars for it."""
    from transformers.utils import logging as hf_logging

    before = logging.root.manager.disable
    bars = hf_logging.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        if bars:
            hf_logging.enable_progress_bar()
