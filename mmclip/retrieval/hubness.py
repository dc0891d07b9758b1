"""Ranking against the trained direction: its own scores, less each candidate's log-evidence (docs/math.md).

A loss that trains i2t alone fits p(text | image) = softmax over texts of s(image, text): an offset of a whole image
row changes nothing in it. So a text that ranks images by those scores, the trained matrix read backwards
(``reversed``), compares numbers with different zero points. ``corrected`` takes the zero point away, estimated over a
bank B of the trained direction's documents:

    c(i, t) = s(i, t) - log mean_b exp s(i, b)

In what follows a **candidate** is ranked: it was the *query* of the trained direction. Who **asks** was its document.
Exponents and alpha are the trained direction's. Sum or mean over the bank is a constant and changes no ranking; the
mean keeps the number small.

The correction is one more dimension of an inner-product index, so it costs nothing when it is served:

    candidate [i / |i|**gamma_q ; -evidence_i / alpha]        who asks [t / |t|**gamma_d ; 1]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmclip.errors import UserError
from mmclip.roles import Direction, Exponents
from mmclip.similarity import normalize

TRANSDUCTIVE = "transductive"  # the name of the bank that is the evaluation's own items
_BLOCK_BYTES = 64 * 2**20


@dataclass
class Bank:
    """Documents of the trained direction that the zero points are estimated over.

    name: of its data, or ``TRANSDUCTIVE``: the pool's own items, which a real search engine does not have beforehand.
    vectors: side -> raw [B, D]; the sides that it has are those that can be corrected for. overlap: side -> how many
    of its items are the evaluation's, too. evidence: direction -> that of every candidate of the main pool, computed
    before with its opposite's alpha over a bank of ``sizes``; it stands in for vectors that are not there.
    """

    name: str
    vectors: dict[str, Tensor] = field(default_factory=dict)
    overlap: dict[str, int] = field(default_factory=dict)
    evidence: dict[Direction, Tensor] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def transductive(self) -> bool:
        return self.name == TRANSDUCTIVE

    def of(self, side: str, pool: Mapping[str, Tensor]) -> Tensor | None:
        """The side's rows, of the ``pool`` where the bank is transductive; None where it has none."""
        return pool[side] if self.transductive else self.vectors.get(side)


def reversed_exponents(exponents: Exponents) -> Exponents:
    """The trained matrix read backwards: who was document asks, and each side keeps the exponent that it had.

    >>> reversed_exponents(Exponents(1.0, 0.0))
    Exponents(gamma_q=0.0, gamma_d=1.0)
    """
    return Exponents(exponents.gamma_d, exponents.gamma_q)


def bank_side(direction: Direction) -> str:
    """The side of the bank that corrects ``direction``: the documents of its opposite, which was trained.

    >>> bank_side(Direction.T2I)
    'text'
    """
    return direction.opposite.document_side


@torch.no_grad()
def log_evidence(
    candidate: Tensor, bank: Tensor, exponents: Exponents, alpha: float, block_bytes: int = _BLOCK_BYTES
) -> Tensor:
    """log mean_b exp s(i, b) of every candidate: raw candidate [N, D] and bank [B, D] -> [N] float64.

    exponents, alpha: of the trained direction, in which the candidates are queries. Working memory is about
    ``block_bytes``. Errors: UserError for another D, an empty bank, or a scale that is not above 0.
    """
    if bank.ndim != 2 or not len(bank) or bank.shape[1] != candidate.shape[-1]:
        raise UserError(
            f"a bank of shape {list(bank.shape)} for candidates of shape {list(candidate.shape)}: at least one row and "
            "their dimension are needed"
        )
    if not alpha > 0:
        raise UserError(f"alpha {alpha}: the correction needs a scale above 0")
    b = normalize(bank.double(), exponents.gamma_d).T * alpha
    found = candidate.new_empty(len(candidate), dtype=torch.float64)
    rows = max(1, block_bytes // (8 * 3 * len(bank)))  # scores, and what logsumexp makes of them
    for start in range(0, len(candidate), rows):
        part = normalize(candidate[start : start + rows].double(), exponents.gamma_q)
        found[start : start + rows] = torch.logsumexp(part @ b, dim=1)
    return found - torch.tensor(float(len(bank)), dtype=torch.float64).log()


@torch.no_grad()
def corrected_candidates(candidate: Tensor, evidence: Tensor, exponents: Exponents, alpha: float) -> Tensor:
    """[N, D] raw -> [N, D + 1] float32: what an inner-product index holds. Never normalize it again."""
    extra = (-evidence / alpha).unsqueeze(1)
    return torch.cat([normalize(candidate.double(), exponents.gamma_q), extra], dim=1).float()


@torch.no_grad()
def corrected_queries(query: Tensor, exponents: Exponents) -> Tensor:
    """Who asks: [Q, D] raw -> [Q, D + 1] float32, the inner product of which with a candidate is its corrected score
    over alpha. Never normalize it again."""
    one = query.new_ones((len(query), 1), dtype=torch.float64)
    return torch.cat([normalize(query.double(), exponents.gamma_d), one], dim=1).float()
