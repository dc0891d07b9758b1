"""The four condition numbers of a direction, with intervals and nulls, or "undetermined" with the reason.

Each of the four asks what one role's raw vectors would meet with their length kept ("raw", exponent 0) or divided out
("normalized", exponent 1), the other role as the given exponents have it. Where an exponent is exchanged, alpha changes
so that the effective scale stays: the softmax is then about as sharp, and kappa, which depends on sharpness, compares.

kappa depends on how many items there are, so that number is part of the definition: n = N = 4 D matched pairs (distinct
queries, each with a relevant document of its own, as in a training batch), drawn from those that there are. With fewer
the answer is "undetermined": the smallest eigenvalue would speak of the sample (isotropic noise with D = 384, n = 300
queries and N = 5,183 documents has log10 kappa 0.48 on one side and 4.65 on the other).

Nulls, at the same n, N, D and effective scale:

    permuted pairs      not computed: the matrices are sums over all queries and all documents, so permuting which
                        document belongs to which query changes nothing, to the last bit but summation order
    unpaired            the same queries with the documents of n other pairs: what is left of "permuted pairs" when the
                        right answers are really taken from among the candidates (needs 2 n matched pairs)
    gaussian            both roles drawn anew, independently, with exactly the sample's means and covariances: what
                        first and second moments alone give; the mean of ``GAUSSIAN_DRAWS`` draws
    marchenko_pastur    isotropic vectors and a flat softmax, in closed form: what sampling alone gives

Which side kappa says to normalize, if it says so, is a hypothesis to be tested and is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mmclip.metrics import bootstrap as metrics
from mmclip.metrics.fisher import (
    EPSILON,
    document_fisher,
    log10_kappa,
    marchenko_pastur,
    query_fisher,
    vanishing_trace,
)
from mmclip.metrics.geometry import participation_ratio
from mmclip.retrieval.ranking import BLOCK_BYTES
from mmclip.similarity import TINY, Exponents, magnitude, mean_norm_factor

PER_DIMENSION = 4  # matched pairs for each of D dimensions
SENSITIVITY = (1e-3, 1e-5)  # other epsilons, to show what the regularization does
RESAMPLES = 100
GROUPS = 40  # queries are drawn in so many random groups: their D x D sums are kept, and a resample adds them up
GAUSSIAN_DRAWS = 5
NORMAL_95 = 1.959964

Array = NDArray[Any]
Json = dict[str, Any]
Matrix = Callable[..., Tensor]  # query_fisher or document_fisher


def matched_pairs(query_rows: ArrayLike, documents: ArrayLike, rng: np.random.Generator) -> tuple[Array, Array]:
    """Pairs [P] and [P] -> (query rows [m], document rows [m]) in random order, every query and every document once.

    One random document of each query, then one random query of each document: all that can be had where each document
    belongs to one query or each query to one document, nearly all otherwise.
    """
    pairs = np.column_stack([query_rows, documents])
    for column in (0, 1):
        pairs = rng.permutation(pairs)
        pairs = pairs[np.unique(pairs[:, column], return_index=True)[1]]
    pairs = rng.permutation(pairs)
    return pairs[:, 0], pairs[:, 1]


def four_matrices(exponents: Exponents) -> dict[str, tuple[Matrix, Exponents]]:
    """name -> (which role's matrix, the exponents it is taken at)."""
    gamma_q, gamma_d = exponents
    return {
        "query_raw": (query_fisher, Exponents(0.0, gamma_d)),
        "query_normalized": (query_fisher, Exponents(1.0, gamma_d)),
        "document_raw": (document_fisher, Exponents(gamma_q, 0.0)),
        "document_normalized": (document_fisher, Exponents(gamma_q, 1.0)),
    }


@torch.no_grad()
def fisher_report(
    query: Tensor,
    document: Tensor,
    pairs: tuple[ArrayLike, ArrayLike],
    clusters: ArrayLike,
    exponents: Exponents,
    alpha: float,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    block_bytes: int = BLOCK_BYTES,
) -> Json:
    """log10 kappa of the four Fisher matrices of raw query [Q, D] and document [N, D].

    pairs: (query rows [P], document rows [P]) of relevance; clusters [Q]: queries that are drawn together; exponents,
    alpha: of the scoring. Returns {"status": "undetermined", "reason", "n_available", "n_needed", "dim"}, or

        status            "determined"
        n, n_available    matched pairs used, and how many there were; dim: D
        effective_scale   alpha times the mean length factors over the sample; equal for all four
        epsilon           of kappa, as a fraction of the mean eigenvalue
        NAME, each of four:
            exponents, alpha      that the matrix is taken at
            log10_kappa           {"value", "ci"}
            sensitivity           {epsilon: log10 kappa}
            effective_rank        tr(F)**2 / |F|_F**2
            unpaired, gaussian    log10 kappa of the nulls
        marchenko_pastur  log10 kappa

    A matrix that vanishes has "log10_kappa": None with a reason, and so has "unpaired" with too few pairs (its reason
    stands beside "marchenko_pastur"). In memory: GROUPS D x D matrices beside the sample and the block.

    "ci" covers the draw of the queries, the documents held: the value plus and minus 1.96 standard deviations of the
    bootstrap. Its percentiles would not do: a resample has fewer distinct queries, which by itself raises kappa.
    """
    rng = np.random.default_rng(seed)
    rows, documents = matched_pairs(*pairs, rng)
    dim = query.shape[1]
    n = PER_DIMENSION * dim
    size: Json = {"n_available": len(rows), "n_needed": n, "dim": dim}
    if len(rows) < n:
        return _undetermined(f"{len(rows)} matched pairs: {n} are needed, {PER_DIMENSION} a dimension", size)
    q, d = query[torch.as_tensor(rows[:n])].double(), document[torch.as_tensor(documents[:n])].double()
    empty = int((magnitude(q) == 0).sum() + (magnitude(d) == 0).sum())
    if empty:
        return _undetermined(f"{empty} sampled vectors have length 0 and no direction", size)
    scale = alpha * mean_norm_factor(q, d, exponents)
    others = documents[n : 2 * n]
    unpaired = [(q, document[torch.as_tensor(others)].double())] if len(others) == n else []
    gaussians = [(_gaussian_like(q, rng), _gaussian_like(d, rng)) for _ in range(GAUSSIAN_DRAWS)]
    groups = _groups(np.asarray(clusters)[rows[:n]], rng)
    report: Json = {"status": "determined", "n": n, **size, "effective_scale": scale, "epsilon": EPSILON}
    report["bootstrap"] = {"resamples": resamples, "groups": len(groups), "seed": seed}
    for name, (matrix, at) in four_matrices(exponents).items():
        here = _alpha(q, d, at, scale)
        # a Fisher matrix is a mean over queries, so that of all is the groups', weighted by their sizes
        parts = q.new_empty(len(groups), dim, dim)
        for part, rows_g in zip(parts, groups, strict=True):
            part.copy_(len(rows_g) * matrix(q[rows_g], d, at, here, block_bytes=block_bytes))
        f = parts.sum(0) / n
        section: Json = {"exponents": {"gamma_q": float(at.gamma_q), "gamma_d": float(at.gamma_d)}, "alpha": here}
        report[name] = section
        if _vanished(f, matrix, q, d, at, here):
            section["log10_kappa"] = None
            section["log10_kappa_reason"] = (
                "nothing but rounding is left: the softmax is saturated or vectors are equal"
            )
            continue
        eigenvalues = torch.linalg.eigvalsh(f)
        value = log10_kappa(eigenvalues)
        section |= {
            "log10_kappa": {"value": value, "ci": _interval(value, parts, groups, resamples, seed)},
            "sensitivity": {f"{e:g}": log10_kappa(eigenvalues, e) for e in SENSITIVITY},
            "effective_rank": participation_ratio(eigenvalues),
            "unpaired": _mean_kappa(unpaired, matrix, at, scale, block_bytes),
            "gaussian": _mean_kappa(gaussians, matrix, at, scale, block_bytes),
        }
    if not unpaired:
        report["unpaired_reason"] = f"{len(rows)} matched pairs: {2 * n} are needed"
    report["marchenko_pastur"] = marchenko_pastur(dim, n)
    return report


def _mean_kappa(
    samples: list[tuple[Tensor, Tensor]], matrix: Matrix, at: Exponents, scale: float, block_bytes: int
) -> float | None:
    """Mean log10 kappa over (query, document) samples; None where there is no sample, or a matrix vanishes in one."""
    values = []
    for q, d in samples:
        alpha = _alpha(q, d, at, scale)
        f = matrix(q, d, at, alpha, block_bytes=block_bytes)
        if _vanished(f, matrix, q, d, at, alpha):
            return None
        values.append(log10_kappa(torch.linalg.eigvalsh(f)))
    return float(np.mean(values)) if values else None


def _vanished(f: Tensor, matrix: Matrix, query: Tensor, document: Tensor, at: Exponents, alpha: float) -> bool:
    bounds = vanishing_trace(query, document, at, alpha)
    return float(f.trace()) <= bounds[0 if matrix is query_fisher else 1]


def _undetermined(reason: str, size: Json) -> Json:
    return {"status": "undetermined", "reason": reason, **size}


def _alpha(query: Tensor, document: Tensor, exponents: Exponents, scale: float) -> float:
    """The alpha that gives these vectors this effective scale."""
    return scale / max(mean_norm_factor(query, document, exponents), TINY)


def _gaussian_like(x: Tensor, rng: np.random.Generator) -> Tensor:
    """As many rows as x [n, D], Gaussian but for having exactly its mean and covariance, n > D.

    Rows drawn freely from that covariance would have it only up to sampling, as x has its own already: their kappa
    would count the sampling twice.
    """
    mean = x.mean(0)
    noise = torch.as_tensor(rng.standard_normal(x.shape), device=x.device)
    orthonormal = torch.linalg.qr(noise - noise.mean(0)).Q  # its columns sum to 0
    _, s, v = torch.linalg.svd(x - mean, full_matrices=False)
    return mean + orthonormal @ (s.unsqueeze(1) * v)


def _groups(clusters: Array, rng: np.random.Generator) -> list[Tensor]:
    """Row numbers of at most GROUPS random groups of whole clusters; clusters [n]."""
    names, member = np.unique(clusters, return_inverse=True)
    n_groups = min(GROUPS, len(names))
    group = (rng.permutation(len(names)) % n_groups)[member]
    return [torch.as_tensor(np.flatnonzero(group == g)) for g in range(n_groups)]


def _interval(value: float, parts: Tensor, groups: list[Tensor], resamples: int, seed: int) -> list[float] | None:
    """value +- 1.96 standard deviations of log10 kappa over bootstrap samples of the groups' sums, parts [G, D, D]."""
    if len(groups) < 2 or resamples < 2:
        return None
    counts = np.array([len(g) for g in groups], dtype=np.float64)
    samples = []
    for chunk in metrics.cluster_counts(len(groups), resamples=resamples, seed=seed):
        for times in chunk:
            weights = torch.as_tensor(times / (times @ counts), device=parts.device)
            samples.append(log10_kappa(torch.linalg.eigvalsh(torch.tensordot(weights, parts, dims=1))))
    half = NORMAL_95 * float(np.std(samples, ddof=1))
    return [value - half, value + half]
