"""Two and three gloo ranks with uneven rows against one process on the joint batch.

Error of a tensor: max|ranks - reference| / max|reference|. The reference is one process in float64 for both dtypes:
initial weights and features are drawn in float32, so both dtypes start from the same numbers, and float32 ranks are
held to the true value rather than to another rounding of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from multiprocessing import set_forkserver_preload
from typing import Any, NamedTuple

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from mmclip.distributed.collectives import gather_rows
from mmclip.roles import Positives
from mmclip.similarity import Normalization
from tests.helpers.naive import known_positives
from tests.helpers.ranks import (
    CASES,
    IMAGE_ID,
    SCALE_MAX,
    SPLITS,
    STEP_CASES,
    STEPS,
    TEXT_ID,
    TOLERANCE,
    TOWERS,
    Case,
    Found,
    curriculum_steps,
    on_rank,
    one_step,
    several_steps,
)


class Run(NamedTuple):
    ranks: int
    found: list[dict[str, dict[Any, Found]]]  # of every rank


@pytest.fixture(scope="module", params=SPLITS, ids=lambda n: f"{n} ranks")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All cases in one start for a number of ranks, forked from one process that has imported what takes the time."""
    folder, ranks = tmp_path_factory.mktemp("ranks"), request.param
    set_forkserver_preload(["torch._dynamo"])  # an optimizer imports it
    mp.start_processes(on_rank, args=(str(folder), ranks), nprocs=ranks, start_method="forkserver")
    return Run(ranks, [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(ranks)])


@pytest.fixture(scope="module")
def joint() -> dict[Case, Found]:
    return {c: one_step(c, torch.float64) for c in CASES}


def error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape and got.isfinite().all() and expected.isfinite().all()
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


def errors(found: Found, expected: Found) -> Iterator[tuple[float, str]]:
    assert found.keys() == expected.keys()
    return ((error(found[name], value), name) for name, value in expected.items())


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_uneven_ranks_have_the_joint_batchs_loss_gradients_and_running_lengths(
    run: Run, joint: dict[Case, Found], dtype: torch.dtype
) -> None:
    for rank, found in enumerate(run.found):
        for case, expected in joint.items():
            worst, name = max(errors(found[str(dtype)][case], expected))
            assert worst <= TOLERANCE[dtype], f"rank {rank}, {' '.join(case)}: {name} is off by {worst:.1e}"


def test_the_joint_batch_has_what_ranks_could_get_wrong(joint: dict[Case, Found]) -> None:
    assert len(joint) == 4 * 5 * 3
    for sizes in SPLITS.values():  # known positives of both kinds cross ranks, and some cross every two ranks
        rank_of = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        by_image, by_text, both = (
            {tuple(pair) for pair in rank_of[known_positives(*ids).nonzero()].tolist() if pair[0] < pair[1]}
            for ids in ((IMAGE_ID, None), (None, TEXT_ID), (IMAGE_ID, TEXT_ID))
        )
        assert by_image and by_text and both == set(combinations(range(len(sizes)), 2))
    for case, found in joint.items():
        trained = {d.value for d, weight in case.build(torch.float64).weights.items() if weight > 0}
        expected = TOWERS | {f"similarity.logit_scale_{d}" for d in trained}
        if case.norm == "learned":
            expected |= {"similarity.gamma_hat_q", "similarity.gamma_hat_d"}
        gradients = {n for n in found if not n.startswith(("loss", "similarity.length_factors"))}
        assert gradients == expected, case
        assert all(found[n].abs().max() > 1e-3 for n in gradients), f"{case}: a gradient of 0 shows nothing"
        others = [joint[case._replace(positives=p.value)] for p in Positives if p.value != case.positives]
        assert all((o["loss"] - found["loss"]).abs() > 1e-3 for o in others), "every policy is another loss"


def test_ranks_stay_equal_to_the_last_bit_over_optimizer_steps_and_end_where_one_process_ends(run: Run) -> None:
    for case in STEP_CASES:
        first, *others = (found["steps"][case] for found in run.found)
        for other in others:
            assert all(torch.equal(first[n], other[n]) for n in first | other), f"{' '.join(case)}: the ranks parted"
        worst, name = max(errors(first, several_steps(case)))
        assert worst <= 1e-12, f"{' '.join(case)}: {name} is off by {worst:.1e} after {STEPS} steps"
        for d in ("i2t", "t2i"):
            log_alpha, lengths = (first[f"similarity.{name}_{d}"] for name in ("logit_scale", "length_factors"))
            # alpha begins 11 % above this, and three steps of 1 % would not bring it below: the clamp has acted
            assert float(log_alpha.exp() * lengths.prod()) <= SCALE_MAX * (1 + 1e-3), f"{' '.join(case)}: no clamp"


def test_a_curriculum_on_uneven_ranks_is_that_of_one_process(run: Run) -> None:
    first, *others = (found["curriculum"]["all"] for found in run.found)
    for other in others:
        assert all(torch.equal(first[n], other[n]) for n in first | other), "the ranks parted"
    expected = curriculum_steps()
    worst, name = max(errors(first, expected))
    assert worst <= 1e-10, f"{name} is off by {worst:.1e}"
    assert "1 similarity.logit_scale_t2i grad" in expected and "0 similarity.logit_scale_t2i grad" not in expected
    assert {"log_length_image", "log_length_text"} <= expected.keys()


def test_a_gather_without_gradient_fails_the_comparison(run: Run, joint: dict[Case, Found]) -> None:
    for norm in Normalization:
        expected = joint[Case("asym-i2t", norm.value, "none")]
        for found in run.found:
            plain, local = found["plain gather"][norm.value], found["own queries"][norm.value]
            assert error(plain["loss"], expected["loss"]) <= 1e-12, "the loss itself does not show the fault"
            for name in sorted(TOWERS):
                # A row has a gradient on its own rank only, and DDP divides that by the number of ranks.
                assert error(plain[name], expected[name]) == pytest.approx(1 - 1 / run.ranks)
                # Where a rank scores its own queries, their tower is right and the documents' is no multiple of right.
                if name.startswith("image"):
                    assert error(local[name], expected[name]) <= 1e-12
                else:
                    assert error(local[name], expected[name]) > 0.1
                    assert nn.functional.cosine_similarity(local[name].ravel(), expected[name].ravel(), dim=0) < 0.99


def test_a_single_process_gathers_nothing() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    assert gather_rows(x) is x


@pytest.mark.parametrize("device", ["cuda", "cuda:9", "gpu", "meta"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    from mmclip.distributed.collectives import start
    from mmclip.errors import UserError

    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(UserError, match=f"--device {device}"):
        start(device)
