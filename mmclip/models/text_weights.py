"""Where a text model's files come from: a folder, the hub or its cache, or a config with weights drawn at random."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

HUB_SECONDS = 10.0  # the hub's first answer is waited for this long
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".onnx", ".msgpack", ".ot", ".gguf", ".index.json")
UNUSED_WEIGHTS = "pooler"  # a head that checkpoints often lack and that no pooling module reads


@functools.cache
def hub_answers(name: str) -> bool:
    """Whether the hub says anything of a name. Without a network its client alone would try for more than a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_SECONDS)
    except HfHubHTTPError:
        return True
    except Exception:  # no network, a name that is none, a person who asked for no network: its kinds are the client's
        return False
    return True


def cached(name: str) -> Path | None:
    """The folder of a hub name in the hub's cache, which is looked at without a network."""
    from huggingface_hub import snapshot_download

    for repository in _repositories(name):
        with contextlib.suppress(Exception):  # not there, or a name that is none
            folder = os.getenv("SENTENCE_TRANSFORMERS_HOME")
            return Path(snapshot_download(repository, cache_dir=folder, local_files_only=True))
    return None


def find_file(source: str, file: str) -> Path | None:
    """A file of a folder, or of a hub name that the hub knows; None where there is none."""
    if Path(source).is_dir():
        path = Path(source) / file
        return path if path.is_file() else None
    from sentence_transformers.util import load_file_path

    for repository in _repositories(source):
        with contextlib.suppress(OSError):  # no such repository: whoever loads it says so
            if found := load_file_path(repository, file):
                return Path(found)
    return None


def _repositories(name: str) -> tuple[str, ...]:
    """sentence-transformers writes its own models without their owner."""
    return (name,) if "/" in name else (name, f"sentence-transformers/{name}")


def random_weights(source: str, scratch: Path, seed: int) -> str:
    """A folder with the files of the folder ``source`` and random weights of its transformer in float32."""
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
    """Random weights of what follows the transformer, a Dense module for one."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for part in list(encoder.children())[1:]:
            for module in part.modules():
                if callable(reset := getattr(module, "reset_parameters", None)):
                    reset()


def _trunk_folder(root: Path) -> str:
    """The folder of the first module, inside ``root``; "" for the root itself."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        path = json.loads((root / "modules.json").read_text(encoding="utf-8"))[0]["path"]
        if path in {p.name for p in root.iterdir() if p.is_dir()}:
            return str(path)
    return ""


class _Missing(logging.Handler):
    """Takes what the libraries log while they load, and keeps which weights they did not find."""

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
    """transformers and sentence-transformers log every step of loading and draw bars for it; what is given is the list
    of weights that a checkpoint lacked, filled meanwhile."""
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
