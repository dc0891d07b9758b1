"""One call from raw embeddings to results, of images and texts and of text retrieval, and planted data for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmclip.data.beir import BeirCollection
from mmclip.embeddings.files import Distractors, Embeddings
from mmclip.evaluation.eval_set import image_text_sets, text_set
from mmclip.evaluation.evaluate import evaluate
from mmclip.evaluation.results import Results
from mmclip.metrics.rank import TEXT_RATES
from mmclip.roles import CLIP_DIRECTIONS, Direction, Exponents

COSINE, QNORM = Exponents(1.0, 1.0), Exponents(1.0, 0.0)
N, CAPTIONS, DIM = 120, 5, 32


def evaluate_clip(
    data: Embeddings, native: Exponents, metadata: Mapping[str, Any] | None = None, **how: Any
) -> Results:
    return evaluate(image_text_sets(data), native, CLIP_DIRECTIONS, metadata=metadata, **how)


def evaluate_text(
    collection: BeirCollection,
    query: Tensor,
    document: Tensor,
    native: Exponents,
    metadata: Mapping[str, Any] | None = None,
    alpha: float | None = None,
    **how: Any,
) -> Results:
    how = {"scales": {Direction.Q2D: alpha}, "metrics": TEXT_RATES, "metadata": metadata, **how}
    return evaluate([text_set(collection, query, document)], native, [Direction.Q2D], **how)


def eval_data(seed: int = 0, noise: float = 2.0, **changes: Any) -> Embeddings:
    """N images with CAPTIONS noisy captions each."""
    gen = torch.Generator().manual_seed(seed)
    image = torch.randn(N, DIM, generator=gen)
    text = image.repeat_interleave(CAPTIONS, 0) + noise * torch.randn(N * CAPTIONS, DIM, generator=gen)
    fields: dict[str, Any] = {
        "image": image,
        "text": text,
        "pairs": torch.tensor([[t // CAPTIONS, t] for t in range(len(text))]),
        "image_ids": [f"k{i}" for i in range(N)],
        "captions": [" ".join(["word"] * (2 + t % 7)) for t in range(len(text))],
    }
    return Embeddings(**fields | changes)


def rich_data(**changes: Any) -> Embeddings:
    """:func:`eval_data` with levels, numbers of objects and short distractors."""
    gen = torch.Generator().manual_seed(9)
    extra = (0.5 * torch.randn(n, DIM, generator=gen) for n in (40, 50))
    fields: dict[str, Any] = {
        "levels": ["full", "full", "partial", "vague", "full"] * N,
        "n_objects": [1 + i % 3 for i in range(N)],
        "distractors": [Distractors("distractors", *extra)],
    }
    return eval_data(**fields | changes)


def run_of(
    data: Embeddings, native: Exponents = QNORM, loss: str = "asym-t2i", name: str = "m", b: int = 100
) -> Results:
    return evaluate_clip(data, native, {"model": name, "trained_with": {"loss": loss}}, resamples=b)


def collection_of(n_q: int = 12, n_d: int = 40, seed: int = 0, graded: bool = True, **changes: Any) -> BeirCollection:
    rng = np.random.default_rng(seed)
    pairs = np.array([(q, d) for q in range(n_q) for d in rng.choice(n_d, min(n_d, rng.integers(1, 9)), replace=False)])
    fields: dict[str, Any] = {
        "path": "p",
        "split": "test",
        "query_ids": [f"q{i}" for i in range(n_q)],
        "queries": [" ".join(["why"] * (1 + i % 5)) for i in range(n_q)],
        "document_ids": [f"d{i}" for i in range(n_d)],
        "documents": [" ".join(["word"] * (i % 11)) for i in range(n_d)],
        "titles": [f"t{i}" for i in range(n_d)],
        "pairs": pairs,
        "gains": rng.integers(1, 5, len(pairs)).astype(float) if graded else np.ones(len(pairs)),
    }
    return BeirCollection(**fields | changes)


def vectors_of(collection: BeirCollection, seed: int = 0, dim: int = 6, coarse: bool = False) -> list[Tensor]:
    """Random query and document vectors; coarse ones tie."""
    gen = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(len(x), dim, generator=gen) for x in (collection.queries, collection.documents)]
    return [x.round() for x in vectors] if coarse else vectors


def evaluated(
    collection: BeirCollection, native: Exponents = QNORM, seed: int = 0, coarse: bool = False, **how: Any
) -> Results:
    vectors = vectors_of(collection, seed, coarse=coarse)
    return evaluate_text(collection, *vectors, native, {"model": "m"}, **{"resamples": 20, **how})
