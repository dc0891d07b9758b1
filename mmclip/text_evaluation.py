"""Raw text vectors -> results.json of the one direction q2d, in the shape that CLIP's evaluation writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mmclip import metrics
from mmclip.results import Results
from mmclip.retrieval import BLOCK_BYTES
from mmclip.similarity import Exponents
from mmclip.text_data import TextCollection

DEPTH = 100  # documents that a run lists of every query


@dataclass
class TextEvaluation:
    """``results`` as :func:`evaluate_text` makes them; ``runs``: scoring -> its list of the best, for TREC files."""

    results: Results
    runs: dict[str, Any] = field(default_factory=dict)


def evaluate_text(
    collection: TextCollection,
    query: Tensor,
    document: Tensor,
    native: Exponents,
    facts: Mapping[str, Any],
    *,
    alpha: float | None = None,
    fisher: bool = False,
    depth: int = DEPTH,
    resamples: int = metrics.RESAMPLES,
    seed: int = 0,
    block_bytes: int = BLOCK_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> TextEvaluation:
    raise NotImplementedError


def quick_numbers(collection: TextCollection, query: Tensor, document: Tensor, native: Exponents) -> dict[str, float]:
    raise NotImplementedError
