"""Hubness correction over a query bank: the inverted softmax, as one more dimension of an inner-product index.

A loss that trains i2t alone fits p(text | image) = softmax over texts of s(image, text), which does not change with a
constant added to all scores of an image. A text that ranks images by the same scores, the trained matrix by columns
(``reversed``), compares numbers with different zero points. Subtracting each document's log-normalizer over a bank B of
queries removes them:

    c(q, d) = alpha s(q, d) - log mean_b exp(alpha s(b, d))

This is the inverted softmax (Smith et al. 2017, arXiv 1702.03859), with a bank of training queries known as Querybank
Normalisation, QB-Norm (Bogolin et al. 2022, arXiv 2112.12777); results.json calls it ``corrected``. A mean in place of
the sum changes no ranking.

Roles are those of the direction that ranks: its **document** was the *query* of the trained direction and its **query**
was the *document*. Exponents and alpha stay the trained direction's. An index needs one more dimension:

    document [d / |d|**gamma_q ; -offset_d / alpha]        query [q / |q|**gamma_d ; 1]
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


@dataclass
class QueryBank:
    """Queries that log-normalizers are computed over.

    Attributes:
        name: the data set, or ``TRANSDUCTIVE``: the candidate pool's own items, which a search engine cannot know.
        vectors: side -> raw [B, D] embeddings.
        overlap: side -> number of items that are also the evaluation's.
        offsets: direction -> precomputed offsets of all documents of the main pool, in place of vectors.
        sizes: side -> size of the bank that ``offsets`` were computed over.
    """

    name: str
    vectors: dict[str, Tensor] = field(default_factory=dict)
    overlap: dict[str, int] = field(default_factory=dict)
    offsets: dict[Direction, Tensor] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def transductive(self) -> bool:
        return self.name == TRANSDUCTIVE

    def of(self, side: str, pool: Mapping[str, Tensor]) -> Tensor | None:
        """Rows of a side, of the ``pool`` where the bank is transductive; None where it has none."""
        return pool[side] if self.transductive else self.vectors.get(side)


def reversed_exponents(exponents: Exponents) -> Exponents:
    """Exponents of the trained matrix read by columns: roles are exchanged, each side keeps its exponent.

    >>> reversed_exponents(Exponents(1.0, 0.0))
    Exponents(gamma_q=0.0, gamma_d=1.0)
    """
    return Exponents(exponents.gamma_d, exponents.gamma_q)


@torch.no_grad()
def document_offsets(
    document: Tensor, bank: Tensor, exponents: Exponents, alpha: float, block_bytes: int = 64 * 2**20
) -> Tensor:
    """Log-normalizer of every document over a query bank, log mean_b exp(alpha s(b, d)): [N] float64.

    Args:
        document, bank: Raw [N, D] and [B, D].
        exponents, alpha: Of the trained direction, in which the documents are queries.
        block_bytes: Working memory, about.

    Raises:
        UserError: Another D, an empty bank, or a scale that is not above 0.

    >>> document_offsets(torch.tensor([[2.0, 0.0]]), torch.tensor([[3.0, 4.0]]), Exponents(1.0, 0.0), 2.0).tolist()
    [6.0]
    """
    if bank.ndim != 2 or not len(bank) or bank.shape[1] != document.shape[-1]:
        raise UserError(
            f"a bank of shape {list(bank.shape)} for candidates of shape {list(document.shape)}: at least one row and "
            "their dimension are needed"
        )
    if not alpha > 0:
        raise UserError(f"alpha {alpha}: the correction needs a scale above 0")
    b = normalize(bank.double(), exponents.gamma_d).T * alpha
    rows = max(1, block_bytes // (8 * 3 * len(bank)))  # scores, and what logsumexp makes of them
    sums = [torch.logsumexp(normalize(part.double(), exponents.gamma_q) @ b, dim=1) for part in document.split(rows)]
    return torch.cat(sums) - torch.tensor(float(len(bank)), dtype=torch.float64).log()


@torch.no_grad()
def with_offset(document: Tensor, offsets: Tensor, exponents: Exponents, alpha: float) -> Tensor:
    """Documents of a corrected index: raw [N, D] -> [N, D + 1] float32. Never normalize them again."""
    return torch.cat([normalize(document.double(), exponents.gamma_q), (-offsets / alpha).unsqueeze(1)], dim=1).float()


@torch.no_grad()
def with_one(query: Tensor, exponents: Exponents) -> Tensor:
    """Queries of a corrected index: raw [Q, D] -> [Q, D + 1] float32; products are corrected scores over alpha."""
    one = query.new_ones((len(query), 1), dtype=torch.float64)
    return torch.cat([normalize(query.double(), exponents.gamma_d), one], dim=1).float()
