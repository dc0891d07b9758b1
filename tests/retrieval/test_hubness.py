"""Log-normalizers over a bank against naive matrices, and as one more dimension of an index."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip.errors import UserError
from mmclip.models.metadata import trained_directions, trained_scales
from mmclip.retrieval.hubness import document_offsets, reversed_exponents, with_offset, with_one
from mmclip.roles import Direction, Exponents, Normalization
from mmclip.similarity import score

GAMMAS = st.sampled_from([0.0, 0.3, 1.0])
DOT = Normalization.DOT.exponents


def vectors(seed: int, n: int, dim: int = 6) -> torch.Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)) * 3


@given(GAMMAS, GAMMAS, st.floats(0.1, 3), st.integers(0, 5))
def test_the_extra_dimension_gives_the_scores_less_the_log_normalizers(gq, gd, alpha, seed):
    exponents = Exponents(gq, gd)
    image, text, bank = (vectors(seed + i, n) for i, n in enumerate((7, 5, 9)))
    trained = score(image.double(), text.double(), exponents, alpha)  # [image, text]: the trained direction, i2t
    naive = trained - score(image.double(), bank.double(), exponents, alpha).exp().mean(1).log()[:, None]
    offsets = document_offsets(image, bank, exponents, alpha)
    found = with_one(text, exponents).double() @ with_offset(image, offsets, exponents, alpha).double().T
    assert torch.allclose(alpha * found, naive.T, rtol=1e-5, atol=1e-4 * alpha)
    assert torch.allclose(offsets, document_offsets(image, bank, exponents, alpha, block_bytes=1), atol=1e-12)
    backwards = score(text.double(), image.double(), reversed_exponents(exponents), alpha)
    assert torch.allclose(backwards, trained.T, rtol=1e-6)


def test_an_offset_of_a_whole_row_is_subtracted():
    """What the loss is invariant to: a candidate all of whose scores are shifted is ranked as before."""
    image, bank = vectors(0, 4, 3), vectors(1, 30, 3)
    shift = torch.tensor([0.0, 5.0, -2.0, 1.0])
    # A dimension that is 1 for every text shifts an image's scores by its own value there.
    bank = torch.cat([bank, torch.ones(len(bank), 1)], dim=1)
    shifted, flat = (torch.cat([image, x[:, None]], dim=1) for x in (shift, torch.zeros(4)))
    assert torch.allclose(document_offsets(shifted, bank, DOT, 1.0) - shift, document_offsets(flat, bank, DOT, 1.0))


def test_huge_scores_stay_finite():
    assert document_offsets(vectors(0, 4) * 1e3, vectors(1, 30) * 1e3, DOT, 100.0).isfinite().all()


@pytest.mark.parametrize(
    ("bank", "alpha", "says"),
    [
        (torch.ones(3, 5), 1.0, r"\[3, 5\]"),
        (torch.ones(0, 6), 1.0, "at least one row"),
        (torch.ones(3, 6), 0.0, "above 0"),
    ],
)
def test_unusable_banks_are_refused(bank, alpha, says):
    with pytest.raises(UserError, match=says):
        document_offsets(vectors(0, 4), bank, DOT, alpha)


@pytest.mark.parametrize(
    ("metadata", "directions"),
    [
        ({"loss": "sym", "i2t_weight": 0.5}, (Direction.I2T, Direction.T2I)),
        ({"loss": "sym", "i2t_weight": 1.0}, (Direction.I2T,)),
        ({"loss": "sym", "i2t_weight": 1.0, "i2t_weight_end": 0.0}, (Direction.I2T, Direction.T2I)),
        ({"loss": "sym", "i2t_weight": 0.0, "i2t_weight_end": 0.0}, (Direction.T2I,)),
        ({"loss": "sym", "i2t_weight": 0.0, "i2t_weight_end": 0.5}, (Direction.I2T, Direction.T2I)),
        ({"loss": "asym-t2i"}, (Direction.T2I,)),
    ],
)
def test_trained_directions_and_their_scales_follow_loss_and_weight(metadata, directions):
    assert trained_directions(metadata) == directions
    scales = {"logit_scale_i2t": 2.5, "logit_scale_t2i": None}
    alphas = {Direction.I2T: 2.5, Direction.T2I: None}
    assert trained_scales(metadata | scales, 100.0) == {d: alphas[d] for d in directions}


def test_without_a_known_loss_no_direction_is_trained_but_clips():
    assert trained_scales({}, 100.0) == {Direction.I2T: 100.0, Direction.T2I: 100.0}
    assert trained_scales({"loss": "unknown"}, 100.0) == {}
    with pytest.raises(UserError, match="asym-i2t"):
        trained_directions({})
