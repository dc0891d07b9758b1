"""Saved embeddings -> what an index of vectors holds, so that its plain inner product ranks as a scoring of mmclip.

    scoring      documents                                queries
    native...    d / |d|**gamma_d                         q / |q|**gamma_q
    corrected    [d / |d|**gamma_q ; (z - e) / alpha]     [q / |q|**gamma_d ; 1]     exponents: the trained direction's

e is a document's log-evidence and z, their mean, is a constant that changes no ranking. A graph needs it: HNSW links
documents by *their* inner products, and a common large number in the last place would link all of them to those that
no query wants (docs/serving.md has figures).

An engine that normalizes vectors ("cosine" in most) throws away what the length says, and normalizes the correction in.
:func:`norm_augmentation` makes rows of length 1 whose cosines rank as the inner products did; :func:`check_engine` asks
an engine what it does.
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
    """Shares of the right best k, over all queries: what an engine found of the inner products' best k and of the
    cosines'; and how many of the inner products' best k are among the cosines', which says what normalizing costs."""

    recall: float
    cosine_recall: float
    kept_by_cosine: float


def index_vectors(
    saved: Embeddings, direction: Direction | str, scoring: str = "native", zero_point: float | None = None
) -> tuple[Tensor, Prepare]:
    """(documents [N, D'] float32 for an inner-product index, what makes queries of raw vectors [Q, D]).

    Never normalize either again. Scores are the model's over alpha, up to a constant. scoring: one of SCORINGS;
    native and the four fixed ones act on the roles of ``direction``; corrected and reversed read the opposite
    direction's trained scores backwards (mmclip.retrieval.hubness). zero_point: z above, by default the mean of this file's
    evidence; documents that join an index later need that of the first, ``float(first.evidence["t2i"].mean())``.
    Errors: UserError for an unknown scoring, and for ``corrected`` without evidence in the file.
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
            there = ", ".join(f"evidence_{d}" for d in saved.evidence) or "none"
            raise UserError(
                f"scoring corrected of {direction.value} needs evidence_{direction.value}; there: {there}. "
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
    """Documents [N, D'] for inner products -> (rows [N, D' + 1] of length 1, queries [Q, D'] -> [Q, D' + 1]).

        [d / L, sqrt(1 - |d / L|**2)]        [q, 0]        L = ``longest``, or the longest document's length

    Their cosine is q . d / (|q| L): for one query it ranks as q . d does, whether or not the engine normalizes the two.
    Documents that come later must not be longer than L: leave room by ``longest``.
    (Bachrach et al. 2014; Neyshabur & Srebro 2015, arXiv:1410.5518.)
    Errors: UserError for a document above ``longest``, and for documents that are all 0.
    """
    length = magnitude(documents.double())
    top = float(length.max())
    scale = top if longest is None else float(longest)
    if not 0 < scale < float("inf") or top > scale:
        raise UserError(
            f"longest {longest}: documents are up to {top:g} long; a finite bound at or above that, and above 0"
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
    """How many of ids [Q, k] are among the best k by inner product: a share. Equal scores, up to float32 rounding, are
    equally good; an id of -1 (an approximate index found fewer), or a repeated one, is a miss.

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
    """Ask an engine that holds ``documents`` for the best k of ``queries``, and warn where it normalized them.

    search: (float32 queries [Q, D'], k) -> ids [Q, k], row numbers of the documents.
    Warns: MagnitudeLost, where the answers are the cosines' rather than the inner products'.
    """
    ids = np.asarray(search(queries.numpy(), min(k, len(documents))))
    unit = normalize(documents, 1.0)
    _, by_cosine = best_scores(unit, queries, k)
    found = EngineCheck(
        recall_at_k(documents, queries, ids, k),
        recall_at_k(unit, queries, ids, k),
        recall_at_k(documents, queries, by_cosine, k),
    )
    if found.cosine_recall > found.recall:
        warnings.warn(
            f"the engine answers as a cosine does: {found.recall:.1%} of its best {k} are the inner products' best, "
            f"{found.cosine_recall:.1%} the cosines'. If it normalizes lengths away, choose inner product (dot) as its "
            "metric, or give it mmclip.embeddings.serving.norm_augmentation's vectors",
            MagnitudeLost,
            stacklevel=2,
        )
    return found
