"""Vectors for an inner-product index that ranks as a scoring of mmclip, from saved embeddings.

    scoring      documents                                queries
    native...    d / |d|**gamma_d                         q / |q|**gamma_q
    corrected    [d / |d|**gamma_q ; (z - e) / alpha]     [q / |q|**gamma_d ; 1]     exponents: the trained direction's

e is a document's log-normalizer and z, their mean, is a constant that changes no ranking. A graph needs it: HNSW links
documents by *their* inner products, and a common large number in the last place would link all of them to the documents
that no query retrieves (docs/serving.md has figures).

An engine that normalizes vectors ("cosine" in most) discards the norm, and normalizes the correction in.
:func:`norm_augmentation` makes unit rows whose cosines rank as the inner products did; :func:`check_engine` tests an
engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmclip.embeddings.files import Embeddings
from mmclip.errors import UserError, printable
from mmclip.models.metadata import native_exponents
from mmclip.retrieval.hubness import reversed_exponents, with_offset, with_one
from mmclip.roles import CLIP_DIRECTIONS, FIXED_NORMALIZATIONS, Direction, Normalization
from mmclip.similarity import magnitude, normalize

Prepare = Callable[[Tensor], Tensor]  # queries [Q, D] -> [Q, D'] float32
Array = NDArray[Any]
SCORINGS = ("native", "corrected", "reversed", *(n.value for n in FIXED_NORMALIZATIONS))
ROUNDING = 1e-6  # of |q||d|: float32 products of a thousand numbers differ by less
_BLOCK = 2**22  # scores at once


class MagnitudeLost(UserWarning):
    """An engine ranks by cosine what was to be ranked by inner product."""


class EngineCheck(NamedTuple):
    """Recall@k over all queries.

    Attributes:
        recall: Of the engine, against the inner products' best k.
        cosine_recall: Of the engine, against the cosines' best k.
        kept_by_cosine: Of the cosines' best k, against the inner products': what normalizing costs.
    """

    recall: float
    cosine_recall: float
    kept_by_cosine: float


def index_vectors(
    saved: Embeddings, direction: Direction | str, scoring: str = "native", zero_point: float | None = None
) -> tuple[Tensor, Prepare]:
    """Documents of an inner-product index, and the function that prepares its queries; never normalize either again.

    Args:
        saved: Raw embeddings.
        direction: Retrieval direction.
        scoring: One of SCORINGS. native and the four fixed ones act on the roles of ``direction``; corrected and
            reversed use the trained scores of the opposite direction (mmclip.retrieval.hubness).
        zero_point: z above, by default the mean of this file's evidence; documents that join an index later need that
            of the first, ``float(first.evidence["t2i"].mean())``.

    Returns:
        [N, D'] float32, and raw queries [Q, D] -> [Q, D']. Scores are the model's over alpha, up to a constant.

    Raises:
        UserError: An unknown scoring, or ``corrected`` without evidence in the file.
    """
    if direction not in list(CLIP_DIRECTIONS):
        raise UserError(f"direction {printable(direction, 60)!r}: expected i2t or t2i")
    direction = Direction(direction)
    if scoring not in SCORINGS:
        raise UserError(f"scoring {printable(scoring, 60)!r}: expected one of {', '.join(SCORINGS)}")
    _, document = direction.roles({"image": saved.image, "text": saved.text})
    native = native_exponents(saved.metadata)
    if scoring == "corrected":
        alpha = saved.alpha[direction.opposite.value]
        if direction.value not in saved.evidence or alpha is None:
            available = ", ".join(f"evidence_{d}" for d in saved.evidence) or "none"
            raise UserError(
                f"scoring corrected of {direction.value} needs evidence_{direction.value}; there: {available}. "
                "scripts/embed.py --bank DATA writes it where the model's loss trained the opposite direction"
            )
        evidence = saved.evidence[direction.value]
        evidence = evidence - (evidence.mean() if zero_point is None else zero_point)
        return with_offset(document, evidence, native, alpha), lambda query: with_one(query, native)
    if scoring == "reversed":
        exponents = reversed_exponents(native)
    else:
        exponents = native if scoring == "native" else Normalization(scoring).exponents
    return _scaled(document, exponents.gamma_d), lambda query: _scaled(query, exponents.gamma_q)


def _scaled(x: Tensor, gamma: float | Tensor) -> Tensor:
    return normalize(x.double(), gamma).float()


def norm_augmentation(documents: Tensor, longest: float | None = None) -> tuple[Tensor, Prepare]:
    """Unit rows whose cosines rank as the inner products of ``documents``.

        [d / L, sqrt(1 - |d / L|**2)]        [q, 0]        L = ``longest``, or the largest document norm

    Their cosine is q . d / (|q| L): for one query it ranks as q . d does, whether or not the engine normalizes the two
    (Bachrach et al. 2014; Neyshabur & Srebro 2015, arXiv:1410.5518).

    Args:
        documents: [N, D'].
        longest: Upper bound of the norms, with room for documents that join later.

    Returns:
        [N, D' + 1], and queries [Q, D'] -> [Q, D' + 1].

    Raises:
        UserError: A document's norm is above ``longest``, or all documents are 0.
    """
    top = float(magnitude(documents.double()).max())
    scale = top if longest is None else float(longest)
    if not 0 < scale < float("inf") or top > scale:
        raise UserError(
            f"longest {longest}: document norms are up to {top:g}; a finite bound at or above that is needed"
        )
    unit = documents.double() / scale
    rest = (1 - unit.square().sum(dim=1)).clamp_min(0).sqrt().unsqueeze(1)
    return torch.cat([unit, rest], dim=1).float(), lambda q: torch.cat([q, q.new_zeros(len(q), 1)], dim=1).float()


def best_scores(documents: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Inner products' (k-th best score [Q] in float64, ids of the best k [Q, k]), k clamped to N."""
    documents, k = documents.double(), min(k, len(documents))
    scores, ids = [], []
    for part in queries.double().split(max(1, _BLOCK // len(documents))):
        best = (part @ documents.T).topk(k, dim=1)
        scores.append(best.values[:, -1])
        ids.append(best.indices)
    return torch.cat(scores), torch.cat(ids)


def recall_at_k(documents: Tensor, queries: Tensor, ids: Tensor | Array, k: int = 10) -> float:
    """Share of ids [Q, k] among the best k by inner product.

    Scores that are equal up to float32 rounding are equally good; an id of -1 (an approximate index returned fewer), or
    a repeated one, is a miss.

    >>> recall_at_k(torch.tensor([[1.0], [3.0], [2.0]]), torch.tensor([[1.0]]), np.array([[1, 0]]), k=2)
    0.5
    """
    k = min(k, len(documents))
    ids = torch.as_tensor(np.asarray(ids), dtype=torch.int64)[:, :k]
    if ids.ndim != 2 or len(ids) != len(queries) or int(ids.max()) >= len(documents):
        raise UserError(
            f"ids of shape {list(ids.shape)}: the rows of up to {k} documents for each of {len(queries)} queries, "
            f"below {len(documents)}, are expected"
        )
    threshold, _ = best_scores(documents, queries, k)
    room = ROUNDING * magnitude(queries.double()) * magnitude(documents.double()).max()
    step = max(1, _BLOCK // (k * documents.shape[1]))
    hits = 0
    for at in range(0, len(ids), step):
        rows = ids[at : at + step]
        scores = (documents[rows.clamp_min(0)].double() @ queries[at : at + step].double().unsqueeze(2)).squeeze(2)
        good = scores >= (threshold - room)[at : at + step, None]
        ordered = rows.sort(dim=1)
        new = torch.ones_like(rows, dtype=torch.bool)
        new[:, 1:] = ordered.values[:, 1:] != ordered.values[:, :-1]
        hits += int((good.gather(1, ordered.indices) & new & (ordered.values >= 0)).sum())
    return hits / (len(queries) * k)


def check_engine(search: Callable[[Array, int], Any], documents: Tensor, queries: Tensor, k: int = 10) -> EngineCheck:
    """Query an engine that holds ``documents``; warn (MagnitudeLost) where it ranks by cosine.

    Args:
        search: (float32 queries [Q, D'], k) -> ids [Q, k], row numbers of the documents.
        documents: [N, D'] as they were indexed.
        queries: [Q, D'].
        k: Results of a query.
    """
    ids = np.asarray(search(queries.numpy(), min(k, len(documents))))
    unit = normalize(documents, 1.0)
    by_cosine = best_scores(unit, queries, k)[1]
    check = EngineCheck(
        *(recall_at_k(x, queries, i, k) for x, i in ((documents, ids), (unit, ids), (documents, by_cosine)))
    )
    if check.cosine_recall > check.recall:
        warnings.warn(
            f"the engine ranks by cosine: {check.recall:.1%} of its best {k} are the inner products' best, "
            f"{check.cosine_recall:.1%} the cosines'. If it normalizes vectors, choose inner product (dot) as its "
            "metric, or give it mmclip.embeddings.serving.norm_augmentation's vectors",
            MagnitudeLost,
            stacklevel=2,
        )
    return check
