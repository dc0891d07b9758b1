"""One call from raw embeddings to results, of images and texts and of text retrieval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmclip.data.beir import BeirCollection
from mmclip.embeddings.files import Embeddings
from mmclip.evaluation.eval_set import image_text_sets, text_set
from mmclip.evaluation.evaluate import evaluate
from mmclip.evaluation.results import Results
from mmclip.metrics.rank import TEXT_RATES
from mmclip.roles import CLIP_DIRECTIONS, Direction, Exponents


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
