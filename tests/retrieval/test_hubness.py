from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip.errors import UserError
from mmclip.models.metadata import trained_directions, trained_scales
from mmclip.retrieval.hubness import (
    bank_side,
    document_offsets,
    reversed_exponents,
    with_offset,
    with_one,
)
from mmclip.similarity import Direction, Exponents, Normalization, score

GAMMAS = st.sampled_from([0.0, 0.3, 1.0])


def _vectors(seed: int, n: int, dim: int = 6) -> torch.Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)) * 3


@given(GAMMAS, GAMMAS, st.floats(0.1, 3), st.integers(0, 5))
def test_the_extra_dimension_gives_the_scores_less_the_evidence(gq, gd, alpha, seed):
    exponents = Exponents(gq, gd)
    image, text, bank = (_vectors(seed + i, n) for i, n in enumerate((7, 5, 9)))
    trained = score(image.double(), text.double(), exponents, alpha)  # [image, text]: the trained direction, i2t
    naive = trained - score(image.double(), bank.double(), exponents, alpha).exp().mean(1).log()[:, None]
    evidence = document_offsets(image, bank, exponents, alpha)
    found = with_one(text, exponents).double() @ with_offset(image, evidence, exponents, alpha).double().T
    assert torch.allclose(alpha * found, naive.T, rtol=1e-5, atol=1e-4 * alpha)


def test_blocks_change_nothing():
    image, bank = _vectors(0, 50), _vectors(1, 40)
    whole = document_offsets(image, bank, Normalization.QNORM.exponents, 2.0)
    assert torch.allclose(
        whole, document_offsets(image, bank, Normalization.QNORM.exponents, 2.0, block_bytes=1), atol=1e-12
    )


@given(GAMMAS, GAMMAS)
def test_reversed_ranks_by_the_trained_matrix_read_backwards(gq, gd):
    exponents = Exponents(gq, gd)
    image, text = _vectors(3, 8).double(), _vectors(4, 6).double()
    backwards = score(image, text, exponents).T
    assert torch.allclose(score(text, image, reversed_exponents(exponents)), backwards, rtol=1e-6)


def test_an_offset_of_a_whole_row_is_taken_away():
    """What the loss cannot see: a candidate all of whose scores are shifted is ranked as before."""
    image, bank = _vectors(0, 4, 3), _vectors(1, 30, 3)
    shift = torch.tensor([0.0, 5.0, -2.0, 1.0])
    # A dimension that is 1 for every text shifts an image's scores by its own value there.
    ones = lambda x: torch.cat([x, torch.ones(len(x), 1)], dim=1)  # noqa: E731
    shifted = torch.cat([image, shift[:, None]], dim=1)
    flat = torch.cat([image, torch.zeros(4, 1)], dim=1)
    dot = Normalization.DOT.exponents
    assert torch.allclose(
        document_offsets(shifted, ones(bank), dot, 1.0) - shift, document_offsets(flat, ones(bank), dot, 1.0)
    )


def test_huge_scores_stay_finite():
    image, bank = _vectors(0, 4) * 1e3, _vectors(1, 30) * 1e3
    assert document_offsets(image, bank, Normalization.DOT.exponents, 100.0).isfinite().all()


def test_the_bank_holds_documents_of_the_trained_direction():
    assert (bank_side(Direction.T2I), bank_side(Direction.I2T)) == ("text", "image")


@pytest.mark.parametrize(
    ("bank", "alpha", "says"),
    [
        (torch.ones(3, 5), 1.0, r"\[3, 5\]"),
        (torch.ones(0, 6), 1.0, "at least one row"),
        (torch.ones(3, 6), 0.0, "above 0"),
    ],
)
def test_unusable_banks_are_told(bank, alpha, says):
    with pytest.raises(UserError, match=says):
        document_offsets(_vectors(0, 4), bank, Normalization.DOT.exponents, alpha)


def test_trained_directions_follow_loss_and_weight():
    def of(**facts):
        return trained_directions(facts)

    assert of(loss="sym", i2t_weight=0.5) == (Direction.I2T, Direction.T2I)
    assert of(loss="sym", i2t_weight=1.0) == (Direction.I2T,)
    assert of(loss="sym", i2t_weight=1.0, i2t_weight_end=0.0) == (Direction.I2T, Direction.T2I)
    assert of(loss="sym", i2t_weight=0.0, i2t_weight_end=0.0) == (Direction.T2I,)
    assert of(loss="sym", i2t_weight=0.0, i2t_weight_end=0.5) == (Direction.I2T, Direction.T2I)
    assert of(loss="asym-t2i") == (Direction.T2I,)
    with pytest.raises(UserError, match="asym-i2t"):
        of()


def test_scales_are_those_of_the_trained_directions() -> None:
    facts = {"loss": "asym-i2t", "i2t_weight": 1.0, "logit_scale_i2t": 2.5, "logit_scale_t2i": None}
    assert trained_scales(facts, 100.0) == {Direction.I2T: 2.5}
    assert trained_scales({}, 100.0) == {Direction.I2T: 100.0, Direction.T2I: 100.0}
    assert trained_scales({"loss": "unknown"}, 100.0) == {}
