"""The one similarity of a query and a document, and its trained parts. Roles and normalizations: mmclip.roles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from mmclip.roles import (
    CLIP_DIRECTIONS,
    FIXED_NORMALIZATIONS,
    SCALE_INIT,
    SCALE_MAX,
    TEXT_DIRECTIONS,
    Direction,
    Exponents,
    Normalization,
)

__all__ = [
    "CLIP_DIRECTIONS",
    "FIXED_NORMALIZATIONS",
    "SCALE_INIT",
    "SCALE_MAX",
    "TEXT_DIRECTIONS",
    "TINY",
    "Direction",
    "Exponents",
    "Normalization",
    "RoleSimilarity",
    "at_least_float32",
    "divisor",
    "magnitude",
    "mean_length_factors",
    "normalize",
    "score",
]

TINY = 1e-12  # the smallest norm divided by; a zero vector scores 0 everywhere instead of NaN


def at_least_float32(x: Tensor) -> Tensor:
    """float16 and bfloat16 become float32; float32 and float64 stay: raw dots overflow half precision."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def magnitude(x: Tensor) -> Tensor:
    """Euclidean length of each row: [..., D] -> [...], in float32 or wider.

    >>> magnitude(torch.tensor([[3.0, 4.0]]))
    tensor([5.])
    """
    return torch.linalg.vector_norm(at_least_float32(x), dim=-1)


def divisor(x: Tensor, gamma: float | Tensor) -> Tensor | None:
    """|x|**gamma of each row, [N, D] -> [N], in float32 or wider; None for ``gamma`` 0, which divides by nothing."""
    if not isinstance(gamma, Tensor) and gamma == 0.0:
        return None
    length = magnitude(x).clamp_min(TINY)
    return length if not isinstance(gamma, Tensor) and gamma == 1.0 else length.pow(gamma)


def normalize(x: Tensor, gamma: float | Tensor) -> Tensor:
    """x / |x|**gamma, a row at a time: [N, D] -> [N, D], in float32 or wider. ``gamma`` 0 returns x, 1 unit rows."""
    x, by = at_least_float32(x), divisor(x, gamma)
    return x if by is None else x / by.unsqueeze(-1)


def score(query: Tensor, document: Tensor, exponents: Exponents, scale: float | Tensor = 1.0) -> Tensor:
    """The similarity s(q, d) of every query with every document (eq. 3-7).

    query [Q, D], document [N, D] -> [Q, N]: row i holds query i's scores of all documents. Computed in float32 (in
    float64 for float64 features) with autocast switched off: half precision overflows on raw dots.

    >>> q, d = torch.tensor([[2.0, 0.0]]), torch.tensor([[3.0, 0.0], [3.0, 4.0]])
    >>> score(q, d, Normalization.QNORM.exponents)  # the query's length 2 is divided out, the documents' are kept
    tensor([[3., 3.]])
    >>> score(q, d, Normalization.DNORM.exponents)
    tensor([[2.0000, 1.2000]])
    """
    with torch.autocast(device_type=query.device.type, enabled=False):
        q = normalize(query, exponents.gamma_q)
        d = normalize(document, exponents.gamma_d)
        return scale * (q @ d.T)


def mean_length_factors(query: Tensor, document: Tensor, exponents: Exponents) -> Tensor:
    """[E[|q|**(1 - gamma_q)], E[|d|**(1 - gamma_d)]] of raw query [Q, D] and document [N, D], shape [2].

    alpha times their product is the effective scale: what alpha would be if every length that is kept were 1.
    """
    gamma_q, gamma_d = exponents
    return torch.stack([magnitude(query).pow(1 - gamma_q).mean(), magnitude(document).pow(1 - gamma_d).mean()])


MEMORY = 0.9  # share of the running length factors kept at each step


class RoleSimilarity(nn.Module):
    """The similarity with its trained parts: gamma per role (shared by the directions), alpha per direction.

    What CLIP calls logit scale is, for unit vectors, the whole scale of the scores. With raw lengths it is not, so
    ``scale_init`` and ``scale_max`` speak of the **effective scale** (docs/math.md: "Scale")

        alpha * E[|q|**(1 - gamma_q)] * E[|d|**(1 - gamma_d)]

    which ``observe`` sets to ``scale_init`` on the first batch that it sees and which ``clamp_`` keeps at or below
    ``scale_max``, by running length factors that are buffers, hence saved and restored with the state dict. log(alpha)
    may be negative.

    State: ``logit_scale_DIRECTION`` holds log(alpha), ``length_factors_DIRECTION`` the running [E_q, E_d] (NaN before
    the first batch); with ``learned`` also ``gamma_hat_q`` and ``gamma_hat_d``, gamma = sigmoid(gamma_hat). Where
    ``start`` is given, ``gammas`` [2] holds the exponents, which are ``start`` at first and which
    ``change_exponents`` moves: alpha and the running factors belong to them, so all are saved together.

    gamma_init: of both roles, or (query's, document's).
    """

    gammas: Tensor | None

    def __init__(
        self,
        norm: Normalization | str = Normalization.COSINE,
        directions: Iterable[Direction] = CLIP_DIRECTIONS,
        scale_init: float = SCALE_INIT,
        scale_max: float = SCALE_MAX,
        gamma_init: float | tuple[float, float] = 0.5,
        start: Exponents | None = None,
    ) -> None:
        super().__init__()
        if not 0 < scale_init <= scale_max:
            raise ValueError(f"scale_init {scale_init:g} is not above 0 and at most scale_max {scale_max:g}")
        if norm not in list(Normalization):
            raise ValueError(f"unknown normalization {norm!r}; valid: {', '.join(Normalization)}")
        self.norm = Normalization(norm)
        self.directions = tuple(directions)
        self.scale_init, self.scale_max = float(scale_init), float(scale_max)
        if self.norm is Normalization.LEARNED:
            both = gamma_init if isinstance(gamma_init, tuple) else (gamma_init, gamma_init)
            if not all(0 < gamma < 1 for gamma in both):
                raise ValueError(f"gamma_init {gamma_init} is not between 0 and 1, where a sigmoid's values lie")
            hat_q, hat_d = (math.log(gamma / (1 - gamma)) for gamma in both)
            self.gamma_hat_q = nn.Parameter(torch.tensor(hat_q))
            self.gamma_hat_d = nn.Parameter(torch.tensor(hat_d))
        self.register_buffer("gammas", None if start is None else torch.tensor(start))
        for direction in self.directions:
            self.register_parameter(f"logit_scale_{direction.value}", nn.Parameter(torch.zeros(())))
            self.register_buffer(f"length_factors_{direction.value}", torch.full((2,), math.nan))

    @property
    def exponents(self) -> Exponents:
        """gamma per role: floats where they are fixed, 0-d tensors where a schedule moves them, with a gradient where
        they are learned."""
        if self.norm is Normalization.LEARNED:
            return Exponents(self.gamma_hat_q.sigmoid(), self.gamma_hat_d.sigmoid())
        if self.gammas is not None:
            return Exponents(*self.gammas.unbind())
        return self.norm.exponents

    def logit_scale(self, direction: Direction) -> nn.Parameter:
        """log(alpha) of a direction, 0-d."""
        return self.get_parameter(f"logit_scale_{direction.value}")

    def scale(self, direction: Direction) -> Tensor:
        """alpha of a direction, 0-d, with its gradient."""
        return self.logit_scale(direction).exp()

    def length_factors(self, direction: Direction) -> Tensor:
        """The running [E[|q|**(1 - gamma_q)], E[|d|**(1 - gamma_d)]] of a direction, shape [2]."""
        return self.get_buffer(f"length_factors_{direction.value}")

    def log_lengths(self, direction: Direction) -> Tensor:
        """Logarithm of the product of a direction's length factors, 0-d: log(alpha) plus it is the log of the effective
        scale."""
        return self.length_factors(direction).clamp_min(TINY).log().sum()

    def is_calibrated(self, direction: Direction) -> bool:
        return not bool(self.length_factors(direction).isnan().any())

    @torch.no_grad()
    def effective_scale(self, direction: Direction) -> float:
        """alpha times the running length factors; NaN before the first batch."""
        return float(self.scale(direction) * self.length_factors(direction).prod())

    @torch.no_grad()
    def observe(self, direction: Direction, query: Tensor, document: Tensor) -> None:
        """Take the lengths of a (global) batch into the running factors; the first batch also sets alpha.

        query [Q, D] and document [N, D] are raw and, under data parallelism, gathered: each rank must see the same
        rows, or the ranks' alphas part.
        """
        if not len(query) or not len(document):
            return
        now = mean_length_factors(query, document, self.exponents)
        factors = self.length_factors(direction)
        if self.is_calibrated(direction):
            factors.lerp_(now.to(factors), 1 - MEMORY)
        else:
            factors.copy_(now)
            self.logit_scale(direction).copy_(math.log(self.scale_init) - self.log_lengths(direction))

    @torch.no_grad()
    def change_exponents(self, to: Exponents, sides: Mapping[str, Tensor]) -> bool:
        """Other exponents of both roles, and the same effective scale of every direction; False where they are these
        already.

        alpha and the running factors are multiplied by what the change does to the lengths of a (global) batch: raw
        rows by side, under data parallelism gathered. Before the first batch there is nothing to keep.
        """
        assert self.gammas is not None, "made without exponents to start with"
        wanted = torch.tensor(to, dtype=self.gammas.dtype, device=self.gammas.device)
        if torch.equal(self.gammas, wanted):
            return False
        roles = {d: d.roles(sides) for d in self.directions if self.is_calibrated(d)}
        before = {d: mean_length_factors(*r, self.exponents).clamp_min(TINY) for d, r in roles.items()}
        self.gammas.copy_(wanted)
        for direction, r in roles.items():
            factors = self.length_factors(direction)
            ratio = (mean_length_factors(*r, self.exponents).clamp_min(TINY) / before[direction]).to(factors)
            factors.mul_(ratio)
            self.logit_scale(direction).sub_(ratio.log().sum())
        return True

    @torch.no_grad()
    def clamp_(self) -> None:
        """Bring every effective scale above ``scale_max`` back to it, by its alpha. Call after an optimizer step."""
        for direction in self.directions:
            if self.is_calibrated(direction):
                top = math.log(self.scale_max) - self.log_lengths(direction)
                self.logit_scale(direction).clamp_(max=float(top))

    def forward(self, direction: Direction, query: Tensor, document: Tensor) -> Tensor:
        """Scaled scores of a direction: query [Q, D], document [N, D] -> [Q, N]."""
        return score(query, document, self.exponents, self.scale(direction))
