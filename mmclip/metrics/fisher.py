"""Fisher information of the two roles' raw vectors, and how well conditioned it is.

**What the matrices are.** The model of one query is p(j | i) = softmax_j s_ij over N documents, with the similarity
s of :mod:`mmclip.similarity`. The parameter is one item's own raw vector, the others held: x = q_i, or x = d_j. Its
Fisher information is the expectation, under the model, of the outer product of d log p / dx; the matrices here are its
mean over the items of a role, D x D:

    F_Q = 1/n  sum_i      E_{j ~ pi_i}[g g^T],  g = d log p(j | i) / dq_i
    F_D = 1/nN sum_i sum_k E_{j ~ pi_i}[g g^T],  g = d log p(j | i) / dd_k

(the mean of the D x D diagonal blocks, and not the information about one shift shared by all items: every softmax is
blind to a shift of all raw documents, whose information is 0). With q~ = q / |q|**gamma_q, d~ likewise, s_ij = alpha
q~_i . d~_j, pi_ij = softmax_j s_ij, unit vectors u = x / |x| and d(x / |x|**gamma)/dx = |x|**-gamma (I - gamma u u^T):

    F_Q = alpha**2 / n  sum_i |q_i|**(-2 gamma_q) J_i C_i J_i,  J_i = I - gamma_q u_i u_i^T,  C_i = Cov_{j ~ pi_i}(d~_j)
    F_D = alpha**2 / nN sum_j |d_j|**(-2 gamma_d) J_j A_j J_j,  J_j = I - gamma_d u_j u_j^T,
                                                                A_j = sum_i pi_ij (1 - pi_ij) q~_i q~_i^T

gamma 0 is a raw role (J = I), gamma 1 a normalized one (J projects the vector's own direction out), and learned
exponents lie between. J A J is written out in A, A u and u^T A u, so that every sum is a matrix product: O(n N D) and
no D x D matrix an item. Neither matrix knows which document belongs to which query.

**Blocks.** Both are means over queries, so they are summed over blocks of them: memory is O(block N + (n + N + D) D).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmclip.retrieval.ranking import BLOCK_BYTES
from mmclip.similarity import TINY, Exponents, magnitude, normalize, score

EPSILON = 1e-4  # regularization of kappa, as a fraction of the mean eigenvalue
_BYTES_PER_SCORE = 48  # float64 scores, probabilities, their variances, cosines and two products
VANISHED = 1e-10  # below this fraction of what an unsaturated softmax would give, a matrix is rounding


def query_fisher(
    query: Tensor, document: Tensor, exponents: Exponents, alpha: float, *, block_bytes: int = BLOCK_BYTES
) -> Tensor:
    """F_Q of raw query [n, D] and document [N, D] under ``exponents`` and scale ``alpha``: [D, D] float64.

    gamma_q = 0 is "query raw", gamma_q = 1 "query normalized"; gamma_d says how the documents enter the score.
    Rows of length 0 have no direction and are not allowed where the query's exponent is not 0.
    """
    q, d = query.double(), document.double()
    gamma = float(exponents.gamma_q)
    candidates = normalize(d, float(exponents.gamma_d))
    centred = candidates - candidates.mean(0)  # a covariance does not see it, and its sums keep their digits
    dim = q.shape[1]
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
            total += _projection(u, c, along, (along * u).sum(1, keepdim=True), gamma)
    total += centred.T @ (weight.unsqueeze(1) * centred)
    return alpha**2 / len(q) * total


def document_fisher(
    query: Tensor, document: Tensor, exponents: Exponents, alpha: float, *, block_bytes: int = BLOCK_BYTES
) -> Tensor:
    """F_D of raw query [n, D] and document [N, D] under ``exponents`` and scale ``alpha``: [D, D] float64.

    gamma_d = 0 is "document raw", gamma_d = 1 "document normalized"; gamma_q says how the queries enter the score.
    Rows of length 0 have no direction and are not allowed where the document's exponent is not 0.
    """
    q, d = query.double(), document.double()
    gamma = float(exponents.gamma_d)
    c = magnitude(d).clamp_min(TINY).pow(-2 * gamma).unsqueeze(1)
    u = normalize(d, 1.0)
    total = torch.zeros(q.shape[1], q.shape[1], dtype=torch.float64, device=q.device)
    along = torch.zeros_like(d)  # A_j u_j
    for rows in q.split(_rows(len(d), block_bytes)):
        pi = score(rows, d, exponents, alpha).softmax(dim=1)
        asking = normalize(rows, float(exponents.gamma_q))
        variance = pi * (1 - pi)
        total += asking.T @ ((variance @ c) * asking)
        if gamma != 0.0:
            along += (variance * (asking @ u.T)).T @ asking
    if gamma != 0.0:
        total += _projection(u, c, along, (along * u).sum(1, keepdim=True), gamma)
    return alpha**2 / (len(q) * len(d)) * total


def _projection(u: Tensor, c: Tensor, along: Tensor, within: Tensor, gamma: float) -> Tensor:
    """sum_i c_i (J_i A_i J_i - A_i), J_i = I - gamma u_i u_i^T, from along_i = A_i u_i and within_i = u_i^T A_i u_i."""
    cross = u.T @ (c * along)
    return gamma**2 * u.T @ (c * within * u) - gamma * (cross + cross.T)


def _rows(n_documents: int, block_bytes: int) -> int:
    return max(1, block_bytes // (_BYTES_PER_SCORE * n_documents))


def vanishing_trace(query: Tensor, document: Tensor, exponents: Exponents, alpha: float) -> tuple[float, float]:
    """Traces of F_Q and F_D below which nothing is left of them but rounding: a saturated softmax, or equal vectors."""
    lengths = [magnitude(x.double()).clamp_min(TINY) for x in (query, document)]
    gammas = [float(g) for g in exponents]
    own = [float(x.pow(-2 * g).mean()) for x, g in zip(lengths, gammas, strict=True)]
    entering = [float(x.pow(2 - 2 * g).mean()) for x, g in zip(lengths, gammas, strict=True)]
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
    """log10 kappa of the covariance of n isotropic vectors in ``dim`` dimensions, without regularization, in the limit
    of large sizes: ((1 + sqrt(D/n)) / (1 - sqrt(D/n)))**2. What sampling alone does. Errors: ValueError unless n > dim.

    >>> round(marchenko_pastur(64, 256), 4)  # (1.5 / 0.5)**2
    0.9542
    """
    if n <= dim:
        raise ValueError(f"n {n} is not above D {dim}: the smallest eigenvalue is 0")
    edge = math.sqrt(dim / n)
    return 2 * math.log10((1 + edge) / (1 - edge))
