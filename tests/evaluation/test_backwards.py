"""Reversed and corrected rankings of a pool against naive matrices of the trained direction."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmclip.embeddings.files import Distractors, Embeddings
from mmclip.evaluation.results import CORRECTED, NATIVE, REVERSED, Results
from mmclip.retrieval.hubness import TRANSDUCTIVE, QueryBank
from mmclip.roles import SCALE_INIT, Direction, Exponents
from mmclip.similarity import mean_norm_factor, score
from tests.helpers.evaluating import evaluate_clip

N, M, DIM = 40, 80, 8
QNORM = Exponents(1.0, 0.0)


def vectors(seed: int, n: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(n, DIM, generator=gen) * (0.5 + torch.rand(n, 1, generator=gen) * 3)


def data(**changes: object) -> Embeddings:
    image = vectors(0, N)
    fields = {
        "image": image,
        "text": image.repeat_interleave(2, 0) + vectors(1, M),
        "pairs": torch.tensor([[t // 2, t] for t in range(M)]),
        "image_ids": [f"i{i}" for i in range(N)],
        "captions": [f"t{t}" for t in range(M)],
    }
    return Embeddings(**fields | changes)  # type: ignore[arg-type]


def first_ranks(matrix: torch.Tensor, relevant: list[int]) -> np.ndarray:
    """Rank of one relevant column in each row, ties against it."""
    own = matrix[torch.arange(len(matrix)), relevant]
    return (matrix >= own[:, None]).sum(1).numpy()


def run(d: Embeddings, native: Exponents, **how: object) -> Results:
    return evaluate_clip(d, native, {"model": "m"}, resamples=20, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("native", [QNORM, Exponents(0.0, 0.0), Exponents(0.4, 0.7), Exponents(1.0, 1.0)])
def test_t2i_is_ranked_by_the_trained_i2t_matrix(native: Exponents) -> None:
    d, bank = data(), vectors(9, 30)
    results = run(d, native, scales={Direction.I2T: 2.5}, bank=QueryBank("train", {"text": bank}))
    trained = score(d.image.double(), d.text.double(), native, 2.5)
    evidence = score(d.image.double(), bank.double(), native, 2.5).logsumexp(1)
    owner = [t // 2 for t in range(M)]
    for scoring, matrix in ((REVERSED, trained.T), (CORRECTED, (trained - evidence[:, None]).T)):
        found = results.query_values("retrieval", "t2i", scoring, "first_rank")
        assert (found == first_ranks(matrix, owner)).mean() == 1, scoring
    assert not {REVERSED, CORRECTED} & set(results.json["retrieval"]["i2t"]), "its opposite was not trained"
    facts = results.json["retrieval"]["t2i"][CORRECTED]
    assert {k: facts[k] for k in ("bank", "bank_size", "transductive", "alpha", "alpha_source")} == {
        "bank": "train", "bank_size": 30, "transductive": False, "alpha": 2.5, "alpha_source": "given",
    }  # fmt: skip


def test_asym_t2i_is_the_mirror_image() -> None:
    d, bank = data(), vectors(9, 30)
    results = run(d, QNORM, scales={Direction.T2I: 2.5}, bank=QueryBank("train", {"image": bank}))
    trained = score(d.text.double(), d.image.double(), QNORM, 2.5)  # texts ask
    corrected = (trained - score(d.text.double(), bank.double(), QNORM, 2.5).logsumexp(1)[:, None]).T
    best = [min(int((row >= row[t]).sum()) for t in (2 * i, 2 * i + 1)) for i, row in enumerate(corrected)]
    assert results.query_values("retrieval", "i2t", CORRECTED, "first_rank").tolist() == best
    assert CORRECTED not in results.json["retrieval"]["t2i"]


def test_a_model_trained_both_ways_is_corrected_both_ways() -> None:
    bank = QueryBank("train", {"image": vectors(8, 20), "text": vectors(9, 20)})
    results = run(data(), Exponents(1.0, 1.0), scales={Direction.I2T: 9.0, Direction.T2I: 9.0}, bank=bank)
    for direction in ("i2t", "t2i"):
        numbers = results.json["retrieval"][direction]
        assert numbers[REVERSED] == numbers[NATIVE], "cosine reads the same both ways"
        assert numbers[CORRECTED]["bank_size"] == 20


def test_a_transductive_bank_is_the_pools_own_items_and_says_so() -> None:
    extra = Distractors("more", text=vectors(5, 10))
    results = run(data(distractors=[extra]), QNORM, scales={Direction.I2T: 2.5}, bank=QueryBank(TRANSDUCTIVE))
    for pool, size in (("retrieval", M), ("more", M + 10)):
        facts = results.pools[pool]["retrieval"]["t2i"][CORRECTED]
        assert facts["transductive"] and facts["bank_size"] == size


def test_a_scale_that_is_not_told_is_calibrated_and_says_so() -> None:
    d = data()
    results = run(d, QNORM, scales={Direction.I2T: None}, bank=QueryBank("train", {"text": vectors(9, 30)}))
    facts = results.json["retrieval"]["t2i"][CORRECTED]
    lengths = mean_norm_factor(d.image, d.text, QNORM)
    assert facts["alpha"] == pytest.approx(SCALE_INIT / lengths) and facts["alpha_source"] == "calibrated"


def test_without_a_bank_or_without_training_nothing_is_corrected() -> None:
    bank = QueryBank("train", {"image": vectors(8, 20), "text": vectors(9, 20)})
    assert set(run(data(), QNORM, scales={Direction.I2T: 2.5}).json["retrieval"]["t2i"]) & {REVERSED, CORRECTED} == {
        REVERSED
    }
    assert not set(run(data(), QNORM, bank=bank).json["retrieval"]["t2i"]) & {REVERSED, CORRECTED}
