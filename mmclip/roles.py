"""Directions, normalizations and losses by name, without torch: the vocabulary that every other module reads here.

A **direction** assigns the roles. In ``i2t`` an image is the query and texts are the documents; ``t2i`` is the reverse.
Text retrieval ranks documents in ``q2d``; training may add ``d2q``, in which documents are the queries. A
**normalization** acts on roles, never on modalities, by two exponents (Feng & Watanabe, arXiv 2602.09229, eq. 3-7):

    s(q, d) = alpha * (q . d) / (|q|**gamma_q * |d|**gamma_d)

    name     gamma_q  gamma_d   ranking of a query's documents
    cosine   1        1         by cos
    dot      0        0         by |d| cos
    qnorm    1        0         by |d| cos
    dnorm    0        1         by cos
    learned  trained  trained   by |d|**(1 - gamma_d) cos

For one query gamma_q only rescales all of its scores: cosine and dnorm rank alike, and so do dot and qnorm
(Prop. 4.1). The two directions of one normalization are two different matrices: never transpose one to get the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mmclip.errors import UserError, printable

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
SCALE_INIT = 1 / 0.07  # CLIP's initial temperature, as an effective scale
SCALE_MAX = 100.0  # CLIP's clamp, as an effective scale


class Direction(StrEnum):
    """Retrieval direction: which side holds the queries and which the documents."""

    I2T = "i2t"
    T2I = "t2i"
    Q2D = "q2d"
    D2Q = "d2q"

    @property
    def query_side(self) -> str:
        return {"i2t": "image", "t2i": "text", "q2d": "query", "d2q": "document"}[self.value]

    @property
    def document_side(self) -> str:
        return self.opposite.query_side

    @property
    def opposite(self) -> Direction:
        """The direction with the roles exchanged.

        >>> Direction.Q2D.opposite.value
        'd2q'
        """
        first, second = CLIP_DIRECTIONS if self in CLIP_DIRECTIONS else TEXT_DIRECTIONS
        return second if self is first else first

    def roles(self, sides: Mapping[str, T]) -> tuple[T, T]:
        """(query, document) from a mapping by side.

        >>> Direction.T2I.roles({"image": "photos", "text": "captions"})
        ('captions', 'photos')
        """
        return sides[self.query_side], sides[self.document_side]


CLIP_DIRECTIONS = (Direction.I2T, Direction.T2I)
TEXT_DIRECTIONS = (Direction.Q2D, Direction.D2Q)


class Exponents(NamedTuple):
    """Share of each role's norm that is divided out: 1 all of it, 0 none. Floats, or 0-d tensors while learned."""

    gamma_q: float | Tensor
    gamma_d: float | Tensor


class Normalization(StrEnum):
    """The five normalizations of the table above."""

    COSINE = "cosine"
    DOT = "dot"
    QNORM = "qnorm"
    DNORM = "dnorm"
    LEARNED = "learned"

    @property
    def exponents(self) -> Exponents:
        """The fixed exponents. Raises ValueError for ``learned``, whose exponents belong to a trained model."""
        fixed = {"cosine": (1.0, 1.0), "dot": (0.0, 0.0), "qnorm": (1.0, 0.0), "dnorm": (0.0, 1.0)}
        if self not in fixed:
            raise ValueError(f"normalization {self.value!r} has no fixed exponents; valid here: {', '.join(fixed)}")
        return Exponents(*fixed[self])

    @property
    def control(self) -> Normalization | None:
        """The same normalization with documents normalized, too; None where they are already.

        >>> {n.value: n.control.value for n in Normalization if n.control}
        {'dot': 'dnorm', 'qnorm': 'cosine', 'learned': 'cosine'}
        """
        return None if self in ("cosine", "dnorm") else Normalization.DNORM if self == "dot" else Normalization.COSINE


FIXED_NORMALIZATIONS = tuple(n for n in Normalization if n is not Normalization.LEARNED)
NORMS, FIXED_NORMS = (tuple(n.value for n in of) for of in (Normalization, FIXED_NORMALIZATIONS))


class Positives(StrEnum):
    """Policy for known positives other than the pair itself: another caption of the image, an exact duplicate."""

    MASK = "mask"  # leave them out of the denominator
    MULTI = "multi"  # they are targets too, each with the same weight
    NONE = "none"  # treat them as negatives, like open_clip's ClipLoss and MultipleNegativesRankingLoss


POSITIVES = tuple(p.value for p in Positives)
LOSS_WEIGHTS = {"sym": 0.5, "asym-i2t": 1.0, "asym-t2i": 0.0}  # loss -> lambda, the weight of i2t
TEXT_LOSS_WEIGHTS = {"q2d": 1.0, "d2q": 0.0, "both": 0.5}  # loss -> weight of q2d


def direction_weights(loss: str, weight: float | None = None, text: bool = False) -> dict[Direction, float]:
    """Weights of the two directions of a loss.

    Args:
        loss: a name of ``LOSS_WEIGHTS``, or of ``TEXT_LOSS_WEIGHTS`` with ``text``.
        weight: another weight of i2t (q2d) for the loss that trains both directions, from 0 to 1.

    Raises:
        UserError: an unknown loss, a weight outside 0 to 1, or one beside a one-direction loss.

    >>> {d.value: w for d, w in direction_weights("both", 0.75, text=True).items()}
    {'q2d': 0.75, 'd2q': 0.25}
    """
    names, first = (TEXT_LOSS_WEIGHTS, Direction.Q2D) if text else (LOSS_WEIGHTS, Direction.I2T)
    if loss not in names:
        raise UserError(f"unknown loss {printable(loss, 60)!r}; valid: {', '.join(names)}")
    own = names[loss]
    weight = own if weight is None else weight
    if not 0 <= weight <= 1:
        raise UserError(f"{first.value} weight {weight} is outside 0 to 1")
    if weight != own != 0.5:
        both = "both" if text else "sym"
        raise UserError(f"loss {loss!r} fixes the {first.value} weight at {own:g}; give {weight:g} with loss {both!r}")
    return {first: weight, first.opposite: 1.0 - weight}
