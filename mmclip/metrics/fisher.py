"""Fisher information of the two roles' raw vectors, and how well conditioned it is.

**Matrices.** A query's model is p(j | i) = softmax_j s_ij over N documents, s of :mod:`mmclip.similarity`; the
parameter is one item's own raw vector x = q_i or d_j. The matrices are the mean over the items of a role of
E_{j ~ pi_i}[g g^T], g = d log p(j | i) / dx (the mean of the D x D diagonal blocks, not the information about one shift
shared by all items, which is 0). With q~ = q / |q|**gamma_q, d~ likewise, s_ij = alpha q~_i . d~_j, pi_ij = softmax_j
s_ij and unit vectors u = x / |x|:

    F_Q = alpha**2 / n  sum_i |q_i|**(-2 gamma_q) J_i C_i J_i,  J_i = I - gamma_q u_i u_i^T,  C_i = Cov_{j ~ pi_i}(d~_j)
    F_D = alpha**2 / nN sum_j |d_j|**(-2 gamma_d) J_j A_j J_j,  J_j = I - gamma_d u_j u_j^T,
                                                                A_j = sum_i pi_ij (1 - pi_ij) q~_i q~_i^T

gamma 0 is a raw role (J = I), gamma 1 a normalized one (J projects the vector's own direction out). J A J is expanded
in A, A u and u^T A u, so that every sum is a matrix product: O(n N D), in blocks of queries, no D x D matrix an item.

**Report.** The four matrices are one role's with its norm kept ("raw", exponent 0) or divided out ("normalized", 1),
the other role by its own exponent; alpha changes so that the effective scale stays. kappa depends on the number of
items, so that is part of the definition: n = N = 4 D matched pairs. With fewer it is "undetermined": the smallest
eigenvalue would measure the sample (isotropic noise with D = 384, n = 300, N = 5,183 has log10 kappa 0.48 and 4.65 on
its sides). Nulls, at the same n, N, D and effective scale:

    unpaired            the same queries with the documents of n other pairs (needs 2 n matched pairs); permuting pairs
                        within the sample changes nothing, since the matrices sum over all queries and all documents
    gaussian            both roles drawn anew, independently, with exactly the sample's means and covariances: what
                        first and second moments alone give; the mean of ``GAUSSIAN_DRAWS`` draws
    marchenko_pastur    isotropic vectors and a flat softmax, in closed form: what sampling alone gives

Which side kappa says to normalize is a hypothesis to be tested and is not decided here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mmclip.metrics.bootstrap import cluster_counts
from mmclip.metrics.geometry import participation_ratio
from mmclip.retrieval import BLOCK_BYTES
from mmclip.roles import Exponents
from mmclip.similarity import TINY, magnitude, mean_norm_factor, normalize, score

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

    Rows of norm 0 have no direction and are not allowed where the role's exponent is not 0.
    """
    q, d, gamma = query.double(), document.double(), float(exponents.gamma_q)
    candidates = normalize(d, float(exponents.gamma_d))
    centred = candidates - candidates.mean(0)  # changes no covariance, and its sums keep their digits
    total = q.new_zeros(q.shape[1], q.shape[1])
    weight = q.new_zeros(len(d))
    for rows, pi in _softmax(q, d, exponents, alpha, block_bytes):
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
    """F_D; arguments as of :func:`query_fisher`."""
    q, d, gamma = query.double(), document.double(), float(exponents.gamma_d)
    c = magnitude(d).clamp_min(TINY).pow(-2 * gamma).unsqueeze(1)
    u = normalize(d, 1.0)
    total = q.new_zeros(q.shape[1], q.shape[1])
    along = torch.zeros_like(d)  # A_j u_j
    for rows, pi in _softmax(q, d, exponents, alpha, block_bytes):
        entering = normalize(rows, float(exponents.gamma_q))
        variance = pi * (1 - pi)
        total += entering.T @ ((variance @ c) * entering)
        if gamma != 0.0:
            along += (variance * (entering @ u.T)).T @ entering
    if gamma != 0.0:
        total += _projection(u, c, along, gamma)
    return alpha**2 / (len(q) * len(d)) * total


def _softmax(
    query: Tensor, document: Tensor, exponents: Exponents, alpha: float, block_bytes: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of queries [b, D] with their softmax over all documents [b, N]."""
    for rows in query.split(max(1, block_bytes // (_BYTES_PER_SCORE * len(document)))):
        yield rows, score(rows, document, exponents, alpha).softmax(dim=1)


def _projection(u: Tensor, c: Tensor, along: Tensor, gamma: float) -> Tensor:
    """sum_i c_i (J_i A_i J_i - A_i), J_i = I - gamma u_i u_i^T, from along_i = A_i u_i."""
    within = (along * u).sum(1, keepdim=True)
    cross = u.T @ (c * along)
    return gamma**2 * u.T @ (c * within * u) - gamma * (cross + cross.T)


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
    """Draw pairs [m], [m] of pairs [P], [P] in random order, every query and every document once.

    One random document of each query, then one random query of each document: all that exist where each document
    belongs to one query or each query to one document, nearly all otherwise.
    """
    pairs = np.column_stack([query_rows, documents])
    for column in (0, 1):
        pairs = rng.permutation(pairs)
        pairs = pairs[np.unique(pairs[:, column], return_index=True)[1]]
    pairs = rng.permutation(pairs)
    return pairs[:, 0], pairs[:, 1]


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

    Args:
        query, document: Raw [Q, D] and [N, D].
        pairs: Query rows [P] and document rows [P] of relevance.
        clusters: [Q] queries that are drawn together.
        exponents, alpha: Of the scoring.
        resamples, seed: Of the bootstrap, and of what is sampled.
        block_bytes: Working memory beside GROUPS matrices [D, D] and the sample, about.

    Returns:
        {"status": "undetermined", "reason", "n_available", "n_needed", "dim"}, or
            status            "determined"
            n, n_available    matched pairs used, and how many exist; dim: D
            effective_scale   alpha times the mean norm factor of the sample; equal for all four
            epsilon           of kappa, as a fraction of the mean eigenvalue
            NAME, each of four: the exponents and alpha that the matrix is taken at; log10_kappa {"value", "ci"};
                sensitivity {epsilon: log10 kappa}; effective_rank tr(F)**2 / |F|_F**2; the nulls unpaired, gaussian
            marchenko_pastur  log10 kappa
        What does not exist is None with a reason. "ci" covers the draw of the queries, the documents held: the value
        plus and minus 1.96 standard deviations of the bootstrap. Its percentiles would not do: a resample has fewer
        distinct queries, which by itself raises kappa.
    """
    rng = np.random.default_rng(seed)
    rows, documents = matched_pairs(*pairs, rng)
    dim = query.shape[1]
    n = PER_DIMENSION * dim
    size: Json = {"n_available": len(rows), "n_needed": n, "dim": dim}
    q, d = query[torch.as_tensor(rows[:n])].double(), document[torch.as_tensor(documents[:n])].double()
    reason = f"{len(rows)} matched pairs: {n} are needed, {PER_DIMENSION} a dimension" if len(rows) < n else ""
    if not reason and (empty := int((magnitude(q) == 0).sum() + (magnitude(d) == 0).sum())):
        reason = f"{empty} sampled vectors have norm 0 and no direction"
    if reason:
        return {"status": "undetermined", "reason": reason, **size}
    scale = alpha * mean_norm_factor(q, d, exponents)
    others = documents[n : 2 * n]
    unpaired = [(q, document[torch.as_tensor(others)].double())] if len(others) == n else []
    gaussians = [(_gaussian_like(q, rng), _gaussian_like(d, rng)) for _ in range(GAUSSIAN_DRAWS)]
    groups = _groups(np.asarray(clusters)[rows[:n]], rng)
    report: Json = {"status": "determined", "n": n, **size, "effective_scale": scale, "epsilon": EPSILON}
    report["bootstrap"] = {"resamples": resamples, "groups": len(groups), "seed": seed}
    gamma_q, gamma_d = exponents
    four: dict[str, tuple[Matrix, Exponents]] = {
        "query_raw": (query_fisher, Exponents(0.0, gamma_d)),
        "query_normalized": (query_fisher, Exponents(1.0, gamma_d)),
        "document_raw": (document_fisher, Exponents(gamma_q, 0.0)),
        "document_normalized": (document_fisher, Exponents(gamma_q, 1.0)),
    }
    for name, (matrix, at) in four.items():
        here = _alpha(q, d, at, scale)
        # A Fisher matrix is a mean over queries: that of all is the groups', weighted by their sizes.
        parts = q.new_empty(len(groups), dim, dim)
        for part, own in zip(parts, groups, strict=True):
            part.copy_(len(own) * matrix(q[own], d, at, here, block_bytes=block_bytes))
        eigenvalues = _spectrum(parts.sum(0) / n, matrix, q, d, at, here)
        report[name] = {"exponents": {"gamma_q": float(at.gamma_q), "gamma_d": float(at.gamma_d)}, "alpha": here}
        if eigenvalues is None:
            reason = "only rounding is left: the softmax is saturated or vectors are equal"
            report[name] |= {"log10_kappa": None, "log10_kappa_reason": reason}
            continue
        value = log10_kappa(eigenvalues)
        report[name] |= {
            "log10_kappa": {"value": value, "ci": _interval(value, parts, groups, resamples, seed)},
            "sensitivity": {f"{e:g}": log10_kappa(eigenvalues, e) for e in SENSITIVITY},
            "effective_rank": participation_ratio(eigenvalues),
        }
        for null, samples in {"unpaired": unpaired, "gaussian": gaussians}.items():
            kappas: list[float] = []
            for x, y in samples:
                other = _alpha(x, y, at, scale)
                spectrum = _spectrum(matrix(x, y, at, other, block_bytes=block_bytes), matrix, x, y, at, other)
                kappas += [] if spectrum is None else [log10_kappa(spectrum)]
            report[name][null] = float(np.mean(kappas)) if kappas and len(kappas) == len(samples) else None
    if not unpaired:
        report["unpaired_reason"] = f"{len(rows)} matched pairs: {2 * n} are needed"
    return report | {"marchenko_pastur": marchenko_pastur(dim, n)}


def _spectrum(
    f: Tensor, matrix: Matrix, query: Tensor, document: Tensor, exponents: Exponents, alpha: float
) -> Tensor | None:
    """Eigenvalues [D] of a Fisher matrix; None where it vanishes."""
    bounds = vanishing_trace(query, document, exponents, alpha)
    return None if float(f.trace()) <= bounds[matrix is document_fisher] else torch.linalg.eigvalsh(f)


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
