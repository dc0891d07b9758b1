"""Geometry of raw embeddings: anisotropy, effective rank, modality gap, hubness, entanglement, softmax entropy.

Every number is exact and costs time linear in the items for a fixed D, in blocks of ``BLOCK_ROWS`` rows; only the
entropy of score rows, which needs every document, is taken over queries that the caller chooses. A number that does not
exist is None with a reason beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import skew
from torch import Tensor

from mmclip.metrics.magnitude import Effect
from mmclip.retrieval import BLOCK_BYTES
from mmclip.roles import Exponents
from mmclip.similarity import magnitude, normalize, score

BLOCK_ROWS = 4096  # vectors handled at once
_BYTES_PER_SCORE = 32  # scores, and their float64 log-probabilities, probabilities and product

Array = NDArray[Any]


def _mean_direction(x: Tensor) -> Tensor:
    """The centroid of the unit vectors of x [N, D], [D] in float64; a zero vector counts as zero."""
    return torch.stack([normalize(b, 1.0).sum(0, dtype=torch.float64) for b in x.split(BLOCK_ROWS)]).sum(0) / len(x)


def anisotropy(x: Tensor) -> tuple[float | None, str | None]:
    """Mean cosine of two different rows of x [N, D], over all pairs, -1 to 1 (Ethayarajh 2019, by sampling).

    That is (|sum of unit vectors|**2 - N) / (N (N - 1)). A zero vector has cosine 0 with all.

    >>> round(anisotropy(torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0]]))[0], 6)  # cosines 0, 1, 0
    0.333333
    """
    n = len(x)
    if n < 2:
        return None, f"{n} vectors: a pair needs 2"
    with_themselves = int((magnitude(x) > 0).sum())
    total = float(_mean_direction(x).square().sum()) * n**2
    return (total - with_themselves) / (n * (n - 1)), None


def modality_gap(x: Tensor, y: Tensor) -> float:
    """Distance of the centroids of the unit vectors of x [N, D] and y [M, D], 0 to 2 (Liang et al. 2022)."""
    return float(torch.linalg.vector_norm(_mean_direction(x) - _mean_direction(y)))


def participation_ratio(eigenvalues: Tensor) -> float:
    """(sum of eigenvalues)**2 / sum of their squares, tr(C)**2 / |C|_F**2: D where all are equal, 1 where one is alone.

    >>> participation_ratio(torch.tensor([2.0, 2.0, 0.0]))
    2.0
    """
    return float(eigenvalues.sum() ** 2 / eigenvalues.square().sum())


def effective_rank(x: Tensor) -> Effect:
    """Number of dimensions that the raw rows of x [N, D] spread over: {"participation", "entropy", "at_most"}.

    participation    tr(C)**2 / |C|_F**2 of the covariance C: directions weighed by variance
    entropy          exp(entropy of s / sum s), s the singular values of the centred rows (Roy & Vetterli 2007)
    at_most          min(D, N - 1), which neither can exceed
    """
    n, dim = x.shape
    mean = torch.stack([b.sum(0, dtype=torch.float64) for b in x.split(BLOCK_ROWS)]).sum(0) / n
    scatter = torch.zeros(dim, dim, dtype=torch.float64, device=x.device)
    for block in x.split(BLOCK_ROWS):
        centred = block.double() - mean
        scatter.addmm_(centred.T, centred)
    eigenvalues = torch.linalg.eigvalsh(scatter).clamp_min(0.0)
    # what rounding leaves of equal rows is not a dimension
    if float(eigenvalues.sum()) <= 1e-20 * n * float(mean.square().sum()) or n < 2:
        return None, "the vectors do not vary"
    p = eigenvalues.sqrt() / eigenvalues.sqrt().sum()
    entropy = float(torch.special.entr(p).sum().exp())
    return {"participation": participation_ratio(eigenvalues), "entropy": entropy, "at_most": min(dim, n - 1)}, None


def hubness(top_ids: Array, n_documents: int) -> Effect:
    """Concentration of lists top_ids [Q, k] on few documents: {"skewness", "largest", "never", "k"}.

    N_k(j) counts the queries that have document j among their k best. "skewness" is its third standardized moment over
    the documents (Radovanovic et al. 2010): near 0 without hubs, large with them. "largest" is the greatest N_k as a
    fraction of the queries, "never" the fraction of documents with N_k = 0.

    >>> hubness(np.array([[0, 1], [0, 2], [0, 3]]), 4)[0]
    {'skewness': 1.1547005383792515, 'largest': 1.0, 'never': 0.0, 'k': 2}
    """
    counts = np.bincount(top_ids.ravel(), minlength=n_documents)
    if np.ptp(counts) == 0:
        return None, "every document is among the best equally often"
    return {
        "skewness": float(skew(counts)),
        "largest": float(counts.max() / len(top_ids)),
        "never": float((counts == 0).mean()),
        "k": top_ids.shape[1],
    }, None


def entanglement(query: Tensor, document: Tensor) -> Effect:
    """Pearson correlation of log(|q| |d|) with cos(q, d) over relevant pairs, query [P, D] and document [P, D]: PACE's,
    near 0 where norm and angle are separate channels, negative where the norm makes up for a wide angle."""
    log_norms, cosines = [], []
    for q, d in zip(query.split(BLOCK_ROWS), document.split(BLOCK_ROWS), strict=True):
        log_norms.append((magnitude(q.double()) * magnitude(d.double())).log())
        cosines.append((normalize(q.double(), 1.0) * normalize(d.double(), 1.0)).sum(-1))
    a, b = torch.cat(log_norms), torch.cat(cosines)
    if len(a) < 3:
        return None, f"{len(a)} pairs: a correlation needs 3"
    if not bool(a.isfinite().all()):
        return None, "a vector of norm 0 has no angle"
    if float(a.std()) < 1e-6 or float(b.std()) < 1e-6:
        return None, "norms or angles do not vary"
    return {"value": float(torch.corrcoef(torch.stack([a, b]))[0, 1]), "n": len(a)}, None


def row_entropy(
    query: Tensor, document: Tensor, exponents: Exponents, alpha: float, *, block_bytes: int = BLOCK_BYTES
) -> Array:
    """Entropy in nats of each query's softmax over all documents: query [Q, D], document [N, D] -> [Q]; 0 to log N."""
    rows = max(1, block_bytes // (_BYTES_PER_SCORE * len(document)))
    parts = []
    for block in query.split(rows):
        log_p = score(block, document, exponents, alpha).double().log_softmax(dim=1)
        parts.append(-(log_p.exp() * log_p).sum(1))
    return torch.cat(parts).cpu().numpy()
