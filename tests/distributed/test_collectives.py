"""Two and four gloo ranks of uneven batches, one without a pair, against one process on the joint batch, in float64."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmclip.config import LossConfig
from mmclip.distributed import all_sum, average_, gather_rows, start, world
from mmclip.errors import UserError
from mmclip.losses import ContrastiveLoss, clip_loss, contrastive_cross_entropy, mask_from_ids, tiled
from mmclip.losses.schedule import exponents_at, i2t_weight_at, start_exponents
from mmclip.roles import SCALE_INIT, Direction, Exponents, Normalization, Positives, direction_weights
from mmclip.similarity import magnitude
from tests.helpers.naive import CLIP_LOSSES, known_positives
from tests.helpers.ranks import off, run_ranks, worst

SIZES = {2: (7, 4), 4: (5, 0, 4, 2)}  # pairs of each rank
MORE = {"image": {2: (3, 2), 4: (0, 1, 4, 0)}, "text": {2: (2, 7), 4: (6, 3, 0, 0)}}  # and negatives
IMAGE_ID = torch.tensor([0, 1, 2, 0, 3, 4, 5, 1, 0, 5, 3])
TEXT_ID = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 2, 8, 8])
STEPS, SCALE_MAX = 3, 0.9 * SCALE_INIT
TOWERS = {f"{side}.{name}" for side in ("image", "text") for name in ("0.weight", "0.bias", "2.weight")}
Found = dict[str, Tensor]  # losses, gradients and norm statistics by name


class Case(NamedTuple):
    loss: str
    norm: str
    positives: str = "mask"
    focal: float = 0.0

    def build(self, gather: bool = True, **how: Any) -> ContrastiveLoss:
        name, weight = CLIP_LOSSES[self.loss]
        return clip_loss(name, self.norm, weight, self.positives, self.focal, gather=gather, **how).double()


POLICIES = (("mask", 0.0), ("multi", 2.0), ("none", 0.0))
CASES = [Case(loss, n.value, *policy) for loss, n, policy in product(CLIP_LOSSES, Normalization, POLICIES)]
STEP_CASES = [Case(loss, n.value) for loss, n in product(("sym 0.3", "asym-i2t"), Normalization)]


class Towers(nn.Module):
    """Both towers in one forward, as DDP needs it.

    No bias at the end: that of documents with a norm shifts all scores of a query alike, so its gradient is 0.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.image, self.text = (
            nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False)) for _ in range(2)
        )

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.image(image), self.text(text)


class Trained:
    """Towers and loss of a case, on this rank's share of the joint batches."""

    def __init__(self, loss: ContrastiveLoss) -> None:
        towers = Towers().double()
        self.loss, self.network = loss, nn.parallel.DistributedDataParallel(towers) if world()[1] > 1 else towers
        named = [*self.network.named_parameters(), *loss.named_parameters()]
        self.named = {n.removeprefix("module."): p for n, p in named}

    def features(self, step: int) -> tuple[dict[str, Tensor], slice]:
        """Of this rank's rows, and which rows of the joint batch they are."""
        g, rows = torch.Generator().manual_seed(step), share(SIZES)
        inputs = [torch.randn(len(IMAGE_ID), 6, generator=g, dtype=torch.float64)[rows] for _ in range(2)]
        return dict(zip(("image", "text"), self.network(*inputs), strict=True)), rows

    def backward(self, step: int, negatives: Found | None = None, exponents: Exponents | None = None) -> Found:
        """A training step up to its backward pass: the losses."""
        features, rows = self.features(step)
        if exponents is not None:
            norms = {s: gather_rows(magnitude(x)) for s, x in features.items()}
            self.loss.similarity.change_exponents(exponents, norms)
        ids = mask_from_ids(IMAGE_ID[rows], TEXT_ID[rows])
        out = self.loss(features, ids, negatives, untrained=step % 2 == 0)  # as in training, in some steps only
        out.loss.backward()
        return {"loss": out.loss.detach()} | {f"loss_{d.value}": v for d, v in out.by_direction.items()}

    def gradients(self) -> Found:
        """Every gradient, those of alpha and gamma averaged as in training, and the norm statistics."""
        average_([p.grad for p in self.loss.parameters() if p.grad is not None])
        return {n: p.grad for n, p in self.named.items() if p.grad is not None} | dict(self.loss.named_buffers())

    def state(self) -> Found:
        return {n: p.detach() for n, p in self.named.items()} | dict(self.loss.named_buffers())

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.named.values() if p.requires_grad], lr=1e-2)


def share(sizes: dict[int, tuple[int, ...]]) -> slice:
    rank, ranks = world()
    return slice(sum(sizes[ranks][:rank]), sum(sizes[ranks][: rank + 1])) if ranks > 1 else slice(None)


def one_step(case: Case, ranks: int) -> Found:
    """With negatives, whose gradients stand where they are in the joint batch."""
    g = torch.Generator().manual_seed(9)
    joint = {s: torch.randn(sum(n[ranks]), 4, generator=g, dtype=torch.float64) for s, n in MORE.items()}
    negatives = {s: x[share(MORE[s])].clone().requires_grad_() for s, x in joint.items()}
    trained = Trained(case.build(norm_drift=0.1))
    found = trained.backward(0, negatives) | trained.gradients()
    for side, x in negatives.items():
        whole = found[f"more {side}"] = torch.zeros_like(joint[side])
        whole[share(MORE[side])] = 0 if x.grad is None else x.grad / world()[1]
        whole.copy_(all_sum(whole))
    return found


def several_steps(case: Case) -> Found:
    """Everything trained after AdamW steps under a clamp that acts at once."""
    trained = Trained(case.build())
    trained.loss.similarity.scale_max = SCALE_MAX
    optimizer = trained.optimizer()
    for step in range(STEPS):
        optimizer.zero_grad()
        trained.backward(step)
        for p in trained.loss.parameters():
            if p.grad is not None:  # on other hardware ranks round differently: their alphas must not diverge
                p.grad *= 1 + 1e-14 * world()[0]
        trained.gradients()
        optimizer.step()
        trained.loss.similarity.clamp_logit_scale()
    return trained.state()


def scheduled_steps() -> Found:
    """Losses, gradients and end of a run with every schedule: an anneal to dot, lambda from 1 to 0, focal, drift."""
    config = LossConfig(norm="dot", gamma_schedule="anneal", gamma_start=0.0, i2t_weight=1.0, i2t_weight_end=0.0)
    how: Any = {"i2t_weight_end": 0.0, "gather": True, "start": start_exponents(config)}
    trained = Trained(clip_loss("sym", "dot", 1.0, "multi", 2.0, 0.3, **how).double())
    optimizer, found = trained.optimizer(), dict[str, Tensor]()
    for step in range(STEPS):
        optimizer.zero_grad()
        trained.loss.weights = direction_weights("sym", i2t_weight_at(config, step, STEPS))
        losses = trained.backward(step, exponents=exponents_at(config, step, STEPS))
        trained.gradients()
        found |= {f"{step} {n}": v for n, v in losses.items()}
        moved = {n: p.grad for n, p in trained.named.items() if p.grad is not None and p.grad.any()}
        found |= {f"{step} {n} grad": gradient.clone() for n, gradient in moved.items()}
        optimizer.step()
        trained.loss.similarity.clamp_logit_scale()
    state = trained.state()
    assert not state.pop("similarity.gammas").any(), "it arrived at dot"
    return found | state


def gathered_and_back() -> tuple[Tensor, Tensor]:
    """Rows of all ranks, and what comes back of their gradients."""
    rank, ranks = world()
    mine = torch.tensor([[10.0 * rank + k] for k in range(SIZES[ranks][rank])]).reshape(-1, 1).requires_grad_()
    rows = gather_rows(mine)
    return rows.detach(), torch.autograd.grad(rows.square().sum() / 2, mine)[0]


def plain_gather(rows: Tensor) -> Tensor:
    """torch.distributed's own gathering, which has no gradient, with this rank's rows put back: the planted fault."""
    rank, ranks = world()
    sizes = SIZES[ranks]
    padded = nn.functional.pad(rows.detach(), (0, 0, 0, max(sizes) - len(rows)))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([rows if r == rank else part[: sizes[r]] for r, part in enumerate(parts)])


def faulty(norm: str, own_queries: bool) -> Found:
    """asym-i2t on plainly gathered features: of the whole batch, or of each rank's own queries, the usual fault.

    Own queries are weighted by the rank's share, so that their tower's gradient is right, and the documents' is not.
    """
    trained = Trained(Case("asym-i2t", norm, "none").build(gather=False))
    features, rows = trained.features(0)
    every = {s: plain_gather(x) for s, x in features.items()}
    value = trained.loss(every).loss
    if own_queries:
        text = features["text"]
        candidates = torch.cat([text, every["text"][: rows.start], every["text"][rows.stop :]])
        scores = trained.loss.similarity(Direction.I2T, features["image"], candidates)
        value = contrastive_cross_entropy(scores) * len(text) * world()[1] / len(every["text"])
    value.backward()
    return {"loss": value.detach()} | trained.gradients()


def on_rank(folder: Path) -> dict[str, Any]:
    ranks = world()[1]
    # ranks have different numbers of blocks, and none waits for another's
    tiled.ROWS, tiled.BLOCK["cpu"], tiled.STRIP["cpu"] = 2, 1, 1
    found: dict[str, Any] = {"one": {tuple(c): one_step(c, ranks) for c in CASES}}
    found["steps"] = {tuple(c): several_steps(c) for c in STEP_CASES}
    found["scheduled"], found["rows"] = scheduled_steps(), gathered_and_back()
    if 0 not in SIZES[ranks]:
        found["faulty"] = {(n.value, own): faulty(n.value, own) for n, own in product(Normalization, (False, True))}
    return found


@pytest.fixture(scope="module", params=SIZES, ids=lambda n: f"{n} ranks")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank found, all cases in one start."""
    return run_ranks(on_rank, request.param, tmp_path_factory.mktemp("ranks"))


def test_uneven_ranks_have_the_joint_batchs_loss_gradients_and_norm_statistics(run: list[dict[str, Any]]) -> None:
    joint = {c: one_step(c, len(run)) for c in CASES}
    for rank, found in enumerate(run):
        for case, expected in joint.items():
            far, name = worst(found["one"][case], expected)
            assert far <= 1e-11, f"rank {rank}, {case}: {name} is off by {far:.1e}"
    for case, found in joint.items():  # and the joint batch has all that ranks could get wrong
        trained = {d.value for d, weight in case.build().weights.items() if weight > 0}
        expected = TOWERS | {f"similarity.logit_scale_{d}" for d in trained}
        if case.norm == "learned":
            expected |= {"similarity.gamma_hat_q", "similarity.gamma_hat_d"}
        assert expected <= found.keys() and all(found[n].abs().max() > 1e-4 for n in expected), case
    losses = [one_step(Case("sym", "qnorm", p.value), len(run))["loss"].item() for p in Positives]
    assert len(set(losses)) == 3, "known positives are there"


@pytest.mark.parametrize("sizes", SIZES.values(), ids=str)
def test_known_positives_cross_every_two_ranks(sizes: tuple[int, ...]) -> None:
    rank_of = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    known = known_positives(IMAGE_ID, TEXT_ID)
    assert known is not None
    crossed = {tuple(pair) for pair in rank_of[known.nonzero()].tolist() if pair[0] < pair[1]}
    assert crossed == set(combinations([r for r, n in enumerate(sizes) if n], 2))


def test_ranks_stay_equal_to_the_last_bit_and_end_where_one_process_ends(run: list[dict[str, Any]]) -> None:
    for case in STEP_CASES:
        first, *others = (found["steps"][case] for found in run)
        assert all(torch.equal(first[n], other[n]) for other in others for n in first | other), (
            f"{case}: ranks diverged"
        )
        far, name = worst(first, several_steps(case))
        assert far <= 1e-11, f"{case}: {name} is off by {far:.1e} after {STEPS} steps"
        for d in ("i2t", "t2i"):
            log_alpha, stats = (first[f"similarity.{name}_{d}"] for name in ("logit_scale", "length_factors"))
            # alpha begins 11 % above this, and three steps of 1 % would not bring it below: the clamp has acted
            assert float(log_alpha.exp() * stats.prod()) <= SCALE_MAX * (1 + 1e-3), f"{case}: no clamp"


def test_a_scheduled_run_on_uneven_ranks_is_that_of_one_process(run: list[dict[str, Any]]) -> None:
    first, *others = (found["scheduled"] for found in run)
    assert all(torch.equal(first[n], other[n]) for other in others for n in first | other), "the ranks diverged"
    expected = scheduled_steps()
    far, name = worst(first, expected)
    assert far <= 1e-10, f"{name} is off by {far:.1e}"
    assert "1 similarity.logit_scale_t2i grad" in expected and "0 similarity.logit_scale_t2i grad" not in expected
    assert {"log_length_image", "log_length_text"} <= expected.keys()


def test_a_gather_without_gradient_fails_the_comparison(run: list[dict[str, Any]]) -> None:
    for norm in Normalization if "faulty" in run[0] else ():
        trained = Trained(Case("asym-i2t", norm.value, "none").build())
        expected = trained.backward(0) | trained.gradients()
        for found in run:
            plain, local = (found["faulty"][norm.value, own] for own in (False, True))
            assert off(plain["loss"], expected["loss"]) <= 1e-12, "the loss itself does not show the fault"
            for name in sorted(TOWERS):
                # a row has a gradient on its own rank only, and DDP divides that by the number of ranks
                assert off(plain[name], expected[name]) == pytest.approx(1 - 1 / len(run))
                if name.startswith("image"):  # where a rank scores its own queries, their tower is right
                    assert off(local[name], expected[name]) <= 1e-11
                else:  # and the documents' is no multiple of right
                    assert off(local[name], expected[name]) > 0.02
                    assert nn.functional.cosine_similarity(local[name].ravel(), expected[name].ravel(), dim=0) < 0.9999


def test_rows_are_gathered_in_rank_order_and_their_gradients_summed(run: list[dict[str, Any]]) -> None:
    sizes = SIZES[len(run)]
    for r, found in enumerate(run):
        gathered, back = (t[:, 0].tolist() for t in found["rows"])
        assert gathered == [10.0 * rank + k for rank, n in enumerate(sizes) for k in range(n)]
        assert back == [len(run) * (10.0 * r + k) for k in range(sizes[r])]


@pytest.mark.parametrize("device", ["cuda", "cuda:9", "gpu", "meta"])
def test_a_device_that_this_machine_does_not_have_is_refused(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(UserError, match=f"--device {device}"):
        start(device)
