"""Fisher information of the two roles' raw vectors, and how well conditioned it is.

**Matrices.** A query's model is p(j | i) = softmax_j s_ij over N documents, s of :mod:`mmclip.similarity`; the
parameter is one item's own raw vector x = q_i or d_j. The matrices are the mean over the items of a role of
E_{j ~ pi_i}[g g^T], g = d log p(j | i) / dx (the mean of the D x D diagonal blocks, not the information about one shift
shared by all items, which is 0). With q~ = q / |q|**gamma_q, d~ likewise, s_ij = alpha q~_i . d~_j, pi_ij = softmax_j
s_ij and unit vectors u = x / |x|:

    F_Q = alpha**2 / n  sum_i |q_i|**(-2 gamma_q) J_i C_i J_i,  J_i = I - gamma_q u_i u_i^T,  C_i = Cov_{j ~ pi_i}(d~_j)
    F_D = alpha**2 / nN sum_j |d_j|**(-2 gamma_d) J_j A_j J_j,  J_j = I - gamma_d u_j u_j^T,
                                                                A_j = sum_i pi_ij (1 - pi_ij) q~_i q~_i^T

gamma 0 is a raw role (J = I), gamma 1 a normalized one (J projects the vector's own direction out). J A J is written out
in A, A u and u^T A u, so that every sum is a matrix product: O(n N D), in blocks of queries, and no D x D matrix an item.

**Report.** The four matrices are one role's with its norm kept ("raw", exponent 0) or divided out ("normalized", 1), the
other role as the given exponents have it; alpha changes with an exponent so that the effective scale stays. kappa depends
on the number of items, so that is part of the definition: n = N = 4 D matched pairs. With fewer it is "undetermined": the
smallest eigenvalue would measure the sample (isotropic noise with D = 384, n = 300 and N = 5,183 has log10 kappa 0.48 on
one side and 4.65 on the other). Nulls, at the same n, N, D and effective scale:

    unpaired            the same queries with the documents of n other pairs (needs 2 n matched pairs); permuting pairs
                        within the sample changes nothing, since the matrices sum over all queries and all documents
    gaussian            both roles drawn anew, independently, with exactly the sample's means and covariances: what
                        first and second moments alone give; the mean of ``GAUSSIAN_DRAWS`` draws
    marchenko_pastur    isotropic vectors and a flat softmax, in closed form: what sampling alone gives

Which side kappa says to normalize is a hypothesis to be tested and is not decided here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mmclip.metrics.bootstrap import cluster_counts
from mmclip.metrics.geometry import participation_ratio
from mmclip.retrieval import BLOCK_BYTES
from mmclip.similarity import TINY, Exponents, magnitude, mean_norm_factor, normalize, score

EPSILON = 1e-4  # regularization of kappa, as a fraction of the mean eigenvalue
VANISHED = 1e-10  # below this fraction of what an unsaturated softmax would give, a matrix is rounding
PER_DIMENSION = 4  # matched pairs for each of D dimensions
SENSITIVITY = (1e-3, 1e-5)  # other epsilons, to show what the regularization does
FISHER_RESAMPLES = 100
GROUPS = 40  # queries are drawn in so many random groups: their D x D sums are kept, and a resample adds them up
GAUSSIAN_DRAWS = 5
NORMAL_95 = 1.959964
_BYTES_PER_SCORE = 48  # float64 scores, probabilities, their variances, cosines and two products

Array = NDArray[Any]
Json = dict[str, Any]
Matrix = Callable[..., Tensor]  # query_fisher or document_fisher


def query_fisher(
    query: Tensor, document: Tensor, exponents: Exponents, alpha: float, *, block_bytes: int = BLOCK_BYTES
) -> Tensor:
    """F_Q of raw query [n, D] and document [N, D] under ``exponents`` and scale ``alpha``: [D, D] float64.

    Rows of norm 0 have no direction and are not allowed where the query's exponent is not 0.
    """
    q, d = query.double(), document.double()
    gamma, dim = float(exponents.gamma_q), q.shape[1]
    candidates = normalize(d, float(exponents.gamma_d))
    centred = candidates - candidates.mean(0)  # changes no covariance, and its sums keep their digits
    total = torch.zeros(dim, dim, dtype=torch.float64, device=q.device)
    weight = torch.zeros(len(d), dtype=torch.float64, device=q.device)
    for rows in q.split(_rows(len(d), block_bytes)):
        pi = score(rows, d, exponents, alpha).softmax(dim=1)
        c = magnitude(rows).clamp_min(TINY).pow(-2 * gamma).unsqueeze(1)
        mean = pi @ centred
        weight += (c * pi).sum(0)
        total -= mean.T @ (c * mean)
        if gamma != 0.0:
            u = normalize(rows, 1.0)
            along = (pi * (u @ centred.T)) @ centred - mean * (mean * u).sum(1, keepdim=True)  # C_i u_i
            total += _projection(u, c, along, gamma)
    total += centred.T @ (weight.unsqueeze(1) * centred)
    return alpha**2 / len(q) * total


def document_fisher(
    query: Tensor, document: Tensor, exponents: Exponents, alpha: float, *, block_bytes: int = BLOCK_BYTES
) -> Tensor:
    """F_D of raw query [n, D] and document [N, D] under ``exponents`` and scale ``alpha``: [D, D] float64.

    Rows of norm 0 have no direction and are not allowed where the document's exponent is not 0.
    """
    q, d = query.double(), document.double()
    gamma, dim = float(exponents.gamma_d), q.shape[1]
    c = magnitude(d).clamp_min(TINY).pow(-2 * gamma).unsqueeze(1)
    u = normalize(d, 1.0)
    total = torch.zeros(dim, dim, dtype=torch.float64, device=q.device)
    along = torch.zeros_like(d)  # A_j u_j
    for rows in q.split(_rows(len(d), block_bytes)):
        pi = score(rows, d, exponents, alpha).softmax(dim=1)
        entering = normalize(rows, float(exponents.gamma_q))
        variance = pi * (1 - pi)
        total += entering.T @ ((variance @ c) * entering)
        if gamma != 0.0:
            along += (variance * (entering @ u.T)).T @ entering
    if gamma != 0.0:
        total += _projection(u, c, along, gamma)
    return alpha**2 / (len(q) * len(d)) * total


def _projection(u: Tensor, c: Tensor, along: Tensor, gamma: float) -> Tensor:
    """sum_i c_i (J_i A_i J_i - A_i), J_i = I - gamma u_i u_i^T, from along_i = A_i u_i."""
    within = (along * u).sum(1, keepdim=True)
    cross = u.T @ (c * along)
    return gamma**2 * u.T @ (c * within * u) - gamma * (cross + cross.T)


def _rows(n_documents: int, block_bytes: int) -> int:
    return max(1, block_bytes // (_BYTES_PER_SCORE * n_documents))


def vanishing_trace(query: Tensor, document: Tensor, exponents: Exponents, alpha: float) -> tuple[float, float]:
    """Traces of F_Q and F_D below which only rounding is left of them: a saturated softmax, or equal vectors."""
    norms = [magnitude(x.double()).clamp_min(TINY) for x in (query, document)]
    gammas = [float(g) for g in exponents]
    own = [float(x.pow(-2 * g).mean()) for x, g in zip(norms, gammas, strict=True)]
    entering = [float(x.pow(2 - 2 * g).mean()) for x, g in zip(norms, gammas, strict=True)]
    bound = VANISHED * alpha**2
    return bound * own[0] * entering[1], bound * own[1] * entering[0] / len(document)


def log10_kappa(eigenvalues: Tensor, epsilon: float = EPSILON) -> float:
    """log10((largest + e) / (smallest + e)), e = ``epsilon`` * mean eigenvalue; eigenvalues [D], not negative.

    e keeps a singular matrix's number finite: it is at most log10(1 + D / epsilon).

    >>> round(log10_kappa(torch.tensor([1.0, 100.0], dtype=torch.float64)), 3)
    1.998
    """
    values = eigenvalues.clamp_min(0.0)
    e = epsilon * values.mean()
    return float(torch.log10((values.max() + e) / (values.min() + e)))


def marchenko_pastur(dim: int, n: int) -> float:
    """log10 kappa of the covariance of n > dim isotropic vectors, ((1 + sqrt(D/n)) / (1 - sqrt(D/n)))**2 in the limit.

    >>> round(marchenko_pastur(64, 256), 4)  # (1.5 / 0.5)**2
    0.9542
    """
    if n <= dim:
        raise ValueError(f"n {n} is not above D {dim}: the smallest eigenvalue is 0")
    edge = math.sqrt(dim / n)
    return 2 * math.log10((1 + edge) / (1 - edge))


def matched_pairs(query_rows: ArrayLike, documents: ArrayLike, rng: np.random.Generator) -> tuple[Array, Array]:
    """Pairs [P] and [P] -> (query rows [m], document rows [m]) in random order, every query and every document once.

    One random document of each query, then one random query of each document: all that exist where each document
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
    resamples: int = FISHER_RESAMPLES,
    seed: int = 0,
    block_bytes: int = BLOCK_BYTES,
) -> Json:
    """log10 kappa of the four Fisher matrices of raw query [Q, D] and document [N, D], with intervals and nulls.

    pairs: (query rows [P], document rows [P]) of relevance; clusters [Q]: queries that are drawn together; exponents,
    alpha: of the scoring. Returns {"status": "undetermined", "reason", "n_available", "n_needed", "dim"}, or

        status            "determined"
        n, n_available    matched pairs used, and how many exist; dim: D
        effective_scale   alpha times the mean norm factor of the sample; equal for all four
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
        reason = f"{len(rows)} matched pairs: {n} are needed, {PER_DIMENSION} a dimension"
        return {"status": "undetermined", "reason": reason, **size}
    q, d = query[torch.as_tensor(rows[:n])].double(), document[torch.as_tensor(documents[:n])].double()
    if empty := int((magnitude(q) == 0).sum() + (magnitude(d) == 0).sum()):
        return {"status": "undetermined", "reason": f"{empty} sampled vectors have norm 0 and no direction", **size}
    scale = alpha * mean_norm_factor(q, d, exponents)
    others = documents[n : 2 * n]
    unpaired = [(q, document[torch.as_tensor(others)].double())] if len(others) == n else []
    gaussians = [(_gaussian_like(q, rng), _gaussian_like(d, rng)) for _ in range(GAUSSIAN_DRAWS)]
    groups = _groups(np.asarray(clusters)[rows[:n]], rng)
    report: Json = {"status": "determined", "n": n, **size, "effective_scale": scale, "epsilon": EPSILON}
    report["bootstrap"] = {"resamples": resamples, "groups": len(groups), "seed": seed}
    for name, (matrix, at) in four_matrices(exponents).items():
        here = _alpha(q, d, at, scale)
        # A Fisher matrix is a mean over queries: that of all is the groups', weighted by their sizes.
        parts = q.new_empty(len(groups), dim, dim)
        for part, own in zip(parts, groups, strict=True):
            part.copy_(len(own) * matrix(q[own], d, at, here, block_bytes=block_bytes))
        f = parts.sum(0) / n
        section: Json = {"exponents": {"gamma_q": float(at.gamma_q), "gamma_d": float(at.gamma_d)}, "alpha": here}
        report[name] = section
        if _vanished(f, matrix, q, d, at, here):
            section["log10_kappa"] = None
            section["log10_kappa_reason"] = "only rounding is left: the softmax is saturated or vectors are equal"
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
    return report | {"marchenko_pastur": marchenko_pastur(dim, n)}


def _mean_kappa(
    samples: list[tuple[Tensor, Tensor]], matrix: Matrix, at: Exponents, scale: float, block_bytes: int
) -> float | None:
    """Mean log10 kappa over (query, document) samples; None without a sample, or where a matrix vanishes."""
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


def _alpha(query: Tensor, document: Tensor, exponents: Exponents, scale: float) -> float:
    """The alpha that gives these vectors this effective scale."""
    return scale / max(mean_norm_factor(query, document, exponents), TINY)


def _gaussian_like(x: Tensor, rng: np.random.Generator) -> Tensor:
    """As many rows as x [n, D], Gaussian but for having exactly its mean and covariance, n > D.

    Rows drawn freely from that covariance would have it only up to sampling, and kappa would count sampling twice.
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
    for chunk in cluster_counts(len(groups), resamples=resamples, seed=seed):
        for times in chunk:
            weights = torch.as_tensor(times / (times @ counts), device=parts.device)
            samples.append(log10_kappa(torch.linalg.eigvalsh(torch.tensordot(weights, parts, dims=1))))
    half = NORMAL_95 * float(np.std(samples, ddof=1))
    return [value - half, value + half]
