"""The one similarity of a query and a document, and its trained parts. Roles and normalizations: see mmclip.roles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from mmclip.roles import CLIP_DIRECTIONS, SCALE_INIT, SCALE_MAX, Direction, Exponents, Normalization

TINY = 1e-12  # the smallest norm divided by: a zero vector scores 0 everywhere instead of NaN
MOMENTUM = 0.9  # of the running norm statistics, per step


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` with float16 and bfloat16 as float32: raw dot products overflow half precision."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def magnitude(x: Tensor) -> Tensor:
    """Euclidean norm of each row, [..., D] -> [...], in float32 or wider."""
    return torch.linalg.vector_norm(at_least_float32(x), dim=-1)


def divisor(x: Tensor, gamma: float | Tensor) -> Tensor | None:
    """|x|**gamma of each row, [N, D] -> [N], in float32 or wider; None for the float 0."""
    if not isinstance(gamma, Tensor) and gamma == 0.0:
        return None
    norm = magnitude(x).clamp_min(TINY)
    return norm if not isinstance(gamma, Tensor) and gamma == 1.0 else norm.pow(gamma)


def normalize(x: Tensor, gamma: float | Tensor) -> Tensor:
    """x / |x|**gamma of each row, [N, D] -> [N, D], in float32 or wider; ``gamma`` 1 gives unit rows."""
    x, by = at_least_float32(x), divisor(x, gamma)
    return x if by is None else x / by.unsqueeze(-1)


def score(query: Tensor, document: Tensor, exponents: Exponents, scale: float | Tensor = 1.0) -> Tensor:
    """Similarity s(q, d) of every query with every document (eq. 3-7), without autocast: raw products overflow it.

    Args:
        query: raw features [Q, D].
        document: raw features [N, D].
        exponents: gamma_q and gamma_d.
        scale: alpha.

    Returns:
        Scores [Q, N] in float32 (float64 for float64 features).

    >>> q, d = torch.tensor([[2.0, 0.0]]), torch.tensor([[3.0, 0.0], [3.0, 4.0]])
    >>> score(q, d, Normalization.QNORM.exponents)  # the query's norm 2 is divided out, the documents' are kept
    tensor([[3., 3.]])
    >>> score(q, d, Normalization.DNORM.exponents)
    tensor([[2.0000, 1.2000]])
    """
    with torch.autocast(device_type=query.device.type, enabled=False):
        return scale * (normalize(query, exponents.gamma_q) @ normalize(document, exponents.gamma_d).T)


def mean_norm_factor(query: Tensor, document: Tensor, exponents: Exponents) -> float:
    """E[|q|**(1 - gamma_q)] * E[|d|**(1 - gamma_d)] of raw features [Q, D] and [N, D]: effective scale over alpha.

    >>> mean_norm_factor(torch.tensor([[3.0, 4.0]]), torch.eye(2), Normalization.DOT.exponents)
    5.0
    """
    return float(_norm_stats(magnitude(query), magnitude(document), exponents).prod())


def _norm_stats(query: Tensor, document: Tensor, exponents: Exponents) -> Tensor:
    """[E[|q|**(1 - gamma_q)], E[|d|**(1 - gamma_d)]] of norms [Q] and [N], shape [2]."""
    gamma_q, gamma_d = exponents
    return torch.stack([query.pow(1 - gamma_q).mean(), document.pow(1 - gamma_d).mean()])


class Similarity(nn.Module):
    """The similarity with its trained parts: gamma per role (shared by the directions), alpha per direction.

    ``scale_init`` and ``scale_max`` are **effective scales**, alpha * E[|q|**(1 - gamma_q)] * E[|d|**(1 - gamma_d)]
    (docs/math.md: "Scale"). The first batch sets alpha so that it is ``scale_init`` (``update_norm_stats``), and
    ``clamp_logit_scale`` keeps it at or below ``scale_max``, by running norm statistics. log(alpha) may be negative.

    State: parameters ``logit_scale_DIRECTION``, log(alpha), and with ``learned`` ``gamma_hat_q`` and ``gamma_hat_d``,
    gamma = sigmoid(gamma_hat); buffers ``length_factors_DIRECTION`` (a name that checkpoints have), the running norm
    statistics [2], NaN before the first batch, and with ``start`` ``gammas`` [2], the scheduled exponents.
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
        learn_scale: bool = True,
    ) -> None:
        """Make the similarity of a normalization, uncalibrated.

        Args:
            norm: the normalization.
            directions: those with an alpha.
            scale_init: effective scale at the first batch.
            scale_max: upper bound of the effective scale.
            gamma_init: initial learned exponents, of both roles or (query's, document's).
            start: initial exponents of a schedule, which ``change_exponents`` moves.
            learn_scale: whether alpha gets gradients.

        Raises ValueError for an unknown normalization, or numbers outside their range.
        """
        super().__init__()
        if not 0 < scale_init <= scale_max:
            raise ValueError(f"scale_init {scale_init:g} is not above 0 and at most scale_max {scale_max:g}")
        if norm not in list(Normalization):
            raise ValueError(f"unknown normalization {norm!r}; valid: {', '.join(Normalization)}")
        self.norm, self.directions = Normalization(norm), tuple(directions)
        self.scale_init, self.scale_max, self.learn_scale = float(scale_init), float(scale_max), learn_scale
        if self.norm is Normalization.LEARNED:
            both = gamma_init if isinstance(gamma_init, tuple) else (gamma_init, gamma_init)
            if not all(0 < gamma < 1 for gamma in both):
                raise ValueError(f"gamma_init {gamma_init} is not between 0 and 1, where a sigmoid's values lie")
            for role, gamma in zip("qd", both, strict=True):
                self.register_parameter(f"gamma_hat_{role}", nn.Parameter(torch.tensor(math.log(gamma / (1 - gamma)))))
        self.register_buffer("gammas", None if start is None else torch.tensor(start))
        for direction in self.directions:
            log_alpha = nn.Parameter(torch.zeros(()), requires_grad=learn_scale)
            self.register_parameter(f"logit_scale_{direction.value}", log_alpha)
            self.register_buffer(f"length_factors_{direction.value}", torch.full((2,), math.nan))

    @property
    def exponents(self) -> Exponents:
        """Gamma per role: floats if fixed, 0-d tensors if scheduled or (with gradient) learned."""
        if self.norm is Normalization.LEARNED:
            return Exponents(*(self.get_parameter(f"gamma_hat_{role}").sigmoid() for role in "qd"))
        if self.gammas is not None:
            return Exponents(*self.gammas.unbind())
        return self.norm.exponents

    def logit_scale(self, direction: Direction) -> nn.Parameter:
        """log(alpha) of a direction, 0-d."""
        return self.get_parameter(f"logit_scale_{direction.value}")

    def scale(self, direction: Direction) -> Tensor:
        """Alpha of a direction, 0-d, with its gradient."""
        return self.logit_scale(direction).exp()

    def norm_stats(self, direction: Direction) -> Tensor:
        """Running [E[|q|**(1 - gamma_q)], E[|d|**(1 - gamma_d)]] of a direction, shape [2]."""
        return self.get_buffer(f"length_factors_{direction.value}")

    def has_norm_stats(self, direction: Direction) -> bool:
        """Whether a batch has set the direction's alpha."""
        return not bool(self.norm_stats(direction).isnan().any())

    def log_norm_factor(self, direction: Direction) -> Tensor:
        """log(effective scale / alpha) of a direction by its running statistics, 0-d."""
        return self.norm_stats(direction).clamp_min(TINY).log().sum()

    @torch.no_grad()
    def effective_scale(self, direction: Direction) -> float:
        """Alpha times the running norm statistics; NaN before the first batch."""
        return float(self.scale(direction) * self.norm_stats(direction).prod())

    @torch.no_grad()
    def update_norm_stats(self, direction: Direction, query: Tensor, document: Tensor) -> None:
        """Take a batch's norms into the running statistics; the first batch also sets alpha.

        ``query`` [Q] and ``document`` [N] are the norms of the raw features of all ranks, or the alphas would diverge.
        """
        if not len(query) or not len(document):
            return
        now, stats = _norm_stats(query, document, self.exponents), self.norm_stats(direction)
        if self.has_norm_stats(direction):
            stats.lerp_(now.to(stats), 1 - MOMENTUM)
        else:
            stats.copy_(now)
            self.logit_scale(direction).copy_(math.log(self.scale_init) - self.log_norm_factor(direction))

    @torch.no_grad()
    def change_exponents(self, to: Exponents, norms: Mapping[str, Tensor]) -> bool:
        """Move the scheduled exponents and keep every direction's effective scale; False if they are these already.

        ``norms``, side -> [B] of the raw global batch, rescale alpha and the running statistics.
        """
        assert self.gammas is not None, "made without exponents to start with"
        wanted = torch.tensor(to, dtype=self.gammas.dtype, device=self.gammas.device)
        if torch.equal(self.gammas, wanted):
            return False
        roles = {d: d.roles(norms) for d in self.directions if self.has_norm_stats(d)}
        before = {d: _norm_stats(*r, self.exponents).clamp_min(TINY) for d, r in roles.items()}
        self.gammas.copy_(wanted)
        for direction, r in roles.items():
            stats = self.norm_stats(direction)
            ratio = (_norm_stats(*r, self.exponents).clamp_min(TINY) / before[direction]).to(stats)
            stats.mul_(ratio)
            self.logit_scale(direction).sub_(ratio.log().sum())
        return True

    @torch.no_grad()
    def clamp_logit_scale(self) -> None:
        """Lower each alpha whose effective scale is above ``scale_max``. Call after every optimizer step."""
        for direction in self.directions:
            if self.has_norm_stats(direction):
                top = math.log(self.scale_max) - self.log_norm_factor(direction)
                self.logit_scale(direction).clamp_(max=float(top))

    def forward(self, direction: Direction, query: Tensor, document: Tensor) -> Tensor:
        """Scaled scores of a direction: query [Q, D], document [N, D] -> [Q, N]."""
        return score(query, document, self.exponents, self.scale(direction))
