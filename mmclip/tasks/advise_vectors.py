"""The adviser's data: a model and a training split become raw vectors with what matches, text and CLIP alike.

They are kept in the output folder as ``vectors.safetensors`` under a key of the model's weights, the data and every
setting that they depend on: a second run with the same key encodes nothing.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from mmclip import distributed
from mmclip.config import AdviseConfig
from mmclip.data.shards import open_data
from mmclip.embeddings.encode import EncodeOptions
from mmclip.errors import UserError, printable
from mmclip.evaluation.eval_set import EvalSource
from mmclip.io import json_array, read_arrays, read_json_array, write_arrays
from mmclip.metrics.fisher_report import PER_DIMENSION
from mmclip.models.factory import load_clip
from mmclip.similarity import SCALE_INIT
from mmclip.tasks.advise_trial import Matched

if TYPE_CHECKING:
    from mmclip.data.beir import BeirCollection
    from mmclip.models.text_encoder import TextEncoder

VECTORS_FILE = "vectors.safetensors"
TEXT_SCALE = 20.0  # effective scale, 1 / temperature, as train_text.py starts
QUERY_SHARE = 3  # of --max-items at most one in so many is a query
SEEN = "the model was trained on these very {}: its vectors fit those that judge, too, so differences are of seen data"

Json = dict[str, Any]


@dataclass
class Encoded:
    """matched: the training split. titles, texts [n, D]: of documents that have both, a stand-in for matched pairs, or
    None. scale: effective, that a trial starts from. notes: what a person should know."""

    matched: Matched
    titles: Tensor | None
    texts: Tensor | None
    scale: float
    model: Json
    data: Json
    notes: list[str] = field(default_factory=list)


def encode(settings: AdviseConfig, folder: Path) -> Encoded:
    """Vectors from the folder's cache where they are there. Errors: UserError, one line."""
    return _encode_text(settings, folder) if settings.kind == "text" else _encode_clip(settings, folder)


def _encode_text(settings: AdviseConfig, folder: Path) -> Encoded:
    from mmclip.data.beir import open_beir
    from mmclip.models.text_encoder import open_text_model

    assert settings.model is not None and settings.data is not None
    split, lent = text_split(Path(settings.data), settings.split)
    data = open_beir(settings.data, split)
    notes = list(data.notes)
    if lent:
        notes.append(f"no train split: some of the queries of {split!r} train the trial and others judge it, so that "
                     f"split is not unseen by what follows this advice")  # fmt: skip
    if data.excluded:
        notes.append(f"excluded_ids of {len(data.excluded)} queries are not heeded here")
    queries, documents = drawn(data, settings.limit, settings.seed)
    device = distributed.start(settings.device)
    model = open_text_model(settings, device)
    stand_in = stand_in_rows(data, queries, model.dim, settings)
    key = {
        "kind": "text",
        "model": weights_key(model.encoder),
        "data": data.fingerprint(),
        "lengths": [model.length_of(role) for role in ("query", "document")],
        "precision": model.precision,
        "prompts": model.prompts,
        "rows": _digest([queries, documents, stand_in]),
    }
    arrays = _cached(folder, key)
    if arrays is None:
        texts: dict[str, tuple[str, list[str]]] = {
            "first": ("query", [data.queries[r] for r in queries]),
            "second": ("document", [data.documents[r] for r in documents]),
        }
        if len(stand_in):
            texts["titles"] = ("query", [data.titles[r] for r in stand_in])
            texts["texts"] = ("document", [data.documents[r][len(data.titles[r]) :].strip() for r in stand_in])
        arrays = {name: _texts(model, *what, settings).numpy() for name, what in texts.items()}
        write_arrays(folder / VECTORS_FILE, arrays | {"key": json_array(key)})
    vectors = {name: torch.from_numpy(x) for name, x in arrays.items()}
    new = [{int(row): i for i, row in enumerate(rows)} for rows in (queries, documents)]
    kept = [i for i, (q, d) in enumerate(data.pairs.tolist()) if q in new[0] and d in new[1]]
    pairs = np.array([[new[0][q], new[1][d]] for q, d in data.pairs[kept].tolist()], dtype=np.int64)
    matched = Matched(("query", "document"), vectors["first"], vectors["second"], pairs, data.gains[kept])
    known = model.metadata.get("data")
    if isinstance(known, dict) and (known.get("split"), _place(known.get("path"))) == (split, _place(settings.data)):
        notes.append(SEEN.format("queries") + "; advise on the model that the run started from")
    if model.removed:
        notes.append("the model's final Normalize was taken off: its own vectors have no length")
    about: Json = {"path": settings.data, "split": split, "key": key["data"]}
    about |= {"n_queries": len(queries), "of_queries": len(data.queries)}
    about |= {"n_documents": len(documents), "of_documents": len(data.documents)}
    told = {"name": settings.model, "key": key["model"], "dim": model.dim, "removed": model.removed,
            "document_length": model.length_of("document")}  # fmt: skip
    return Encoded(matched, vectors.get("titles"), vectors.get("texts"), TEXT_SCALE, told, about, notes)


def text_split(root: Path, asked: str | None) -> tuple[str, bool]:
    """(split of a BEIR folder to try on, whether it is lent because there is no training split). Errors: UserError."""
    from mmclip.data.beir import QRELS, require_beir

    there = sorted(p.stem for p in (root / QRELS).glob("*.tsv"))
    split = asked or next((s for s in ("train", "dev", "test") if s in there), there[0] if there else "train")
    require_beir(root, split)
    return split, "train" not in there


def drawn(data: BeirCollection, limit: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(query rows, document rows) to encode, ascending: every document that is relevant to a drawn query and, up to
    ``limit``, others at random."""
    rng = np.random.default_rng([seed, 2])
    n = min(len(data.queries), max(1, limit // QUERY_SHARE))
    queries = np.sort(rng.permutation(len(data.queries))[:n])
    needed = np.unique(data.pairs[np.isin(data.pairs[:, 0], queries), 1])
    others = rng.permutation(np.setdiff1d(np.arange(len(data.documents)), needed))
    return queries, np.sort(np.concatenate([needed, others[: max(0, limit - len(needed))]]))


def stand_in_rows(data: BeirCollection, queries: np.ndarray, dim: int, settings: AdviseConfig) -> np.ndarray:
    """Documents with a title and a text, for kappa where the queries are too few for it; enough for its nulls."""
    if not settings.fisher or len(queries) >= PER_DIMENSION * dim:
        return np.empty(0, dtype=np.int64)
    both = [r for r, (t, d) in enumerate(zip(data.titles, data.documents, strict=True)) if t and len(d) > len(t)]
    rng = np.random.default_rng([settings.seed, 3])
    return np.sort(rng.permutation(both)[: min(2 * PER_DIMENSION * dim, settings.limit)]).astype(np.int64)


def _texts(model: TextEncoder, role: str, texts: Sequence[str], settings: AdviseConfig) -> Tensor:
    print(f"encoding {len(texts):,} texts as {role}", file=sys.stderr, flush=True)
    return model.encode(texts, role, settings.encode_batch_size)


def _encode_clip(settings: AdviseConfig, folder: Path) -> Encoded:
    assert settings.model is not None and settings.data is not None
    csv = (settings.dataset_type, settings.csv_img_key, settings.csv_caption_key, settings.csv_separator)
    whole = open_data(settings.data, settings.split, "train", *csv)
    n = min(len(whole), settings.limit)
    data = whole.subset(np.sort(np.random.default_rng([settings.seed, 2]).permutation(len(whole))[:n]).tolist())
    device = distributed.start(settings.device)
    model = load_clip(settings.model, settings.pretrained)
    notes = []
    known = model.metadata.get("data")
    trained_on = known.get("key") if isinstance(known, dict) else None
    if trained_on == whole.fingerprint():
        notes.append(SEEN.format("images") + "; of a run with --val-holdout N, --split 'train[holdout N]' is unseen")
    key = {
        "kind": "clip",
        "model": weights_key(model.towers),
        "preprocess": str(sorted(model.preprocess_cfg.items())),
        "data": data.fingerprint(),
        "precision": settings.precision,
    }
    arrays = _cached(folder, key)
    if arrays is None:
        precision = "fp32" if settings.precision == "auto" else settings.precision
        options = EncodeOptions(device, precision, settings.encode_batch_size, settings.workers)
        model.towers.to(device)
        found = EvalSource.open(data, {}, model, options).embed(model, options, with_distractors=False)
        assert found.owner is not None
        arrays = {"first": found.image.numpy(), "second": found.text.numpy(), "pairs": found.pairs.numpy(),
                  "owner": np.array(found.owner)}  # fmt: skip
        write_arrays(folder / VECTORS_FILE, arrays | {"key": json_array(key)})
    first, second = torch.from_numpy(arrays["first"]), torch.from_numpy(arrays["second"])
    pairs = arrays["pairs"]
    matched = Matched(("image", "text"), first, second, pairs, np.ones(len(pairs)), arrays["owner"])
    scale = model.metadata.get("effective_scale") or model.loaded_scale or SCALE_INIT
    if len(first) < n:
        notes.append(f"{n - len(first)} images that cannot be read were left out")
    about = {"path": settings.data, "split": whole.split, "key": key["data"], "n_images": len(first),
             "n_texts": len(second), "of_images": len(whole)}  # fmt: skip
    told = {"name": settings.model, "pretrained": settings.pretrained, "key": key["model"], "dim": first.shape[1],
            "norm": model.metadata.get("norm")}  # fmt: skip
    return Encoded(matched, None, None, min(float(scale), 100.0), told, about, notes)


def weights_key(module: nn.Module) -> str:
    """16 hex digits of every weight and buffer, by name."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _place(path: Any) -> Path | None:
    return Path(path).resolve() if isinstance(path, str) else None


def _digest(rows: Sequence[np.ndarray]) -> str:
    return hashlib.sha256(b"|".join(r.astype("<i8").tobytes() for r in rows)).hexdigest()[:16]


def _cached(folder: Path, key: Json) -> dict[str, np.ndarray] | None:
    """The vectors of ``key``; None where the folder has none, or others, or a damaged file."""
    path = folder / VECTORS_FILE
    if not path.is_file():
        return None
    try:
        arrays = read_arrays(path)
        if read_json_array(arrays.pop("key"), "key") != key:
            return None
    except (UserError, KeyError):
        return None
    print(f"vectors: taken from {printable(path)}", file=sys.stderr)
    return arrays
