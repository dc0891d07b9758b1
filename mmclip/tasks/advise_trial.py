"""The adviser's trial: linear heads on frozen raw vectors, every norm by the same batches, judged on held-out queries.

A head starts as the identity, so before its first step it has the encoder's own numbers exactly: x + x R^T with R = 0,
or, of a rank, x + (x V^T) U^T with U = 0. Text sides share one head, as they share their encoder; image and text have
one each. Everything goes by **units**, which are never divided: a query with its relevant documents, or an image with
its captions. A seed divides the units that are not judged anew into those that train and those that choose, draws the
batches, and, of a rank, V; learning rate and number of steps are, for each norm and seed, those of the best number
on the units that choose (0 steps among them). So intervals over seeds cover that choice, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mmclip import metrics
from mmclip.losses import ContrastiveLoss, PositiveMask, mask_from_matrix
from mmclip.retrieval import Qrels, as_floats, rank
from mmclip.similarity import FIXED_NORMALIZATIONS, SCALE_INIT, Direction, Exponents, Similarity
from mmclip.tasks.advise import NORMS

LEARNING_RATES = (3e-5, 2e-4, 1e-3)
LOOKS = (0.25, 0.5, 1.0)  # of the steps, where the units that choose are asked; and before the first
SCALE_LR = 1e-2  # of alpha and gamma
CHOOSING = 0.2  # of the units that are not judged

Array = NDArray[Any]
FIXED = {n.value: n.exponents for n in FIXED_NORMALIZATIONS}


@dataclass(frozen=True)
class Matched:
    """Raw vectors of two sides, and what matches.

    sides         their names, ("query", "document") or ("image", "text"); units are rows of the first
    first [U, D], second [N, D]
    pairs [P, 2]  (row of the first, row of the second); gains [P]: how relevant, above 0
    owner [N]     unit that a row of the second belongs to; None: all of them are candidates of every unit
    """

    sides: tuple[str, str]
    first: Tensor
    second: Tensor
    pairs: Array
    gains: Array
    owner: Array | None = None

    def part(self, units: Array) -> Matched:
        """Some units with what belongs to them, rows counted anew."""
        new_first = np.full(len(self.first), -1)
        new_first[units] = np.arange(len(units))
        rows = np.arange(len(self.second)) if self.owner is None else np.flatnonzero(new_first[self.owner] >= 0)
        new_second = np.full(len(self.second), -1)
        new_second[rows] = np.arange(len(rows))
        pairs = np.column_stack([new_first[self.pairs[:, 0]], new_second[self.pairs[:, 1]]])
        kept = (pairs >= 0).all(axis=1)
        owner = None if self.owner is None else new_first[self.owner[rows]]
        second = self.second if self.owner is None else self.second[torch.as_tensor(rows)]
        first = self.first[torch.as_tensor(units)]
        return Matched(self.sides, first, second, pairs[kept], self.gains[kept], owner)


@dataclass(frozen=True)
class Trial:
    """What is tried. directions: name -> weight in the loss; rank None: full D x D heads."""

    directions: Mapping[Direction, float]
    seeds: int = 3
    steps: int = 200
    batch: int = 128
    rank: int | None = None
    learning_rates: Sequence[float] = LEARNING_RATES
    metric: str = "ndcg@10"
    scale_init: float = SCALE_INIT
    norms: Sequence[str] = NORMS
    seed: int = 0


class Head(nn.Module):
    """x -> x + x R^T, R = 0 at first; of a rank r, R = U V, U [D, r] = 0 and V [r, D] random at first."""

    def __init__(self, dim: int, rank: int | None = None, seed: int = 0) -> None:
        super().__init__()
        self.down: nn.Parameter | None = None
        if rank is not None:
            generator = torch.Generator().manual_seed(seed)
            self.down = nn.Parameter(torch.randn(rank, dim, generator=generator) / dim**0.5)
        self.up = nn.Parameter(torch.zeros(dim, dim if rank is None else rank))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x if self.down is None else x @ self.down.T) @ self.up.T


class Heads(nn.Module):
    """A head for each side: one and the same for a query and its documents."""

    def __init__(self, sides: tuple[str, str], dim: int, rank: int | None = None, seed: int = 0) -> None:
        super().__init__()
        own = sides if "image" in sides else ("shared",)
        self.of = {side: own[min(i, len(own) - 1)] for i, side in enumerate(sides)}
        self.heads = nn.ModuleDict({name: Head(dim, rank, seed) for name in own})

    def forward(self, side: str, x: Tensor) -> Tensor:
        out: Tensor = self.heads[self.of[side]](x)
        return out


@dataclass(frozen=True)
class Batch:
    """Rows of the two sides, and the known positives."""

    first: Tensor
    second: Tensor
    known: PositiveMask


def draw_batches(data: Matched, units: Array, trial: Trial, rng: np.random.Generator) -> list[Batch]:
    """``trial.steps`` batches of distinct units, each with one of its matches: passes in random order, all norms'."""
    order = np.argsort(data.pairs[:, 0], kind="stable")
    starts = np.searchsorted(data.pairs[order, 0], np.arange(len(data.first) + 1))
    units = units[np.diff(starts)[units] > 0]  # a caption that is left out may have been an image's last
    size = min(trial.batch, len(units))
    codes = np.unique(data.pairs[:, 0] * len(data.second) + data.pairs[:, 1])
    batches = []
    queue = np.empty(0, dtype=np.int64)
    for _ in range(trial.steps):
        if len(queue) < size:
            queue = rng.permutation(units)
        rows, queue = queue[:size], queue[size:]
        chosen = order[starts[rows] + (rng.random(size) * (starts[rows + 1] - starts[rows])).astype(np.int64)]
        matches = data.pairs[chosen, 1]
        match = torch.as_tensor(np.isin(rows[:, None] * len(data.second) + matches[None, :], codes))
        batches.append(Batch(torch.as_tensor(rows), torch.as_tensor(matches), mask_from_matrix(match)))
    return batches


@torch.no_grad()
def answer(
    data: Matched, heads: Heads, scorings: Mapping[str, Exponents], directions: Sequence[Direction], metric: str
) -> dict[str, dict[str, Array]]:
    """direction -> scoring -> the metric of each unit [units], NaN for one that asks nothing (an image's captions are
    averaged where texts ask); with two directions "both" is their mean."""
    first, second = heads(data.sides[0], data.first), heads(data.sides[1], data.second)
    report: dict[str, dict[str, Array]] = {}
    for direction in directions:
        forward = direction.query_side == data.sides[0]
        query, document, pairs = (first, second, data.pairs) if forward else (second, first, data.pairs[:, ::-1])
        found = report[direction.value] = {}
        for name, ranking in rank(query, document, Qrels(pairs, data.gains), scorings).items():
            values = metrics.per_query(ranking.ranks, ranking.offsets, ranking.gains, [metric])[metric]
            unit = ranking.queries if forward or data.owner is None else data.owner[ranking.queries]
            times = np.bincount(unit, minlength=len(data.first))
            sums = np.bincount(unit, values, minlength=len(data.first))
            found[name] = np.divide(sums, times, out=np.full(len(times), np.nan), where=times > 0)
    if len(directions) > 1:
        report["both"] = {s: np.mean([report[d.value][s] for d in directions], axis=0) for s in scorings}
    return report


def fit(
    data: Matched, batches: Sequence[Batch], trial: Trial, norm: str, lr: float, seed: int
) -> Iterator[tuple[int, Heads, Exponents]]:
    """(steps done, heads, exponents) before training and at ``LOOKS``; the heads are the ones that go on training."""
    heads = Heads(data.sides, data.first.shape[1], trial.rank, seed)
    loss = ContrastiveLoss(Similarity(norm, trial.directions, trial.scale_init), trial.directions)
    optimizer = torch.optim.AdamW(
        [{"params": heads.parameters(), "lr": lr}, {"params": loss.parameters(), "lr": SCALE_LR}], weight_decay=0.0
    )
    looks = {max(1, round(share * len(batches))) for share in LOOKS}
    yield 0, heads, as_floats(loss.similarity.exponents)
    for step, batch in enumerate(batches, 1):
        sides = dict(
            zip(data.sides, (heads(data.sides[0], data.first[batch.first]),
                             heads(data.sides[1], data.second[batch.second])), strict=True)
        )  # fmt: skip
        value = loss(sides, batch.known).loss
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        optimizer.step()
        loss.similarity.clamp_logit_scale()
        if step in looks:
            yield step, heads, as_floats(loss.similarity.exponents)


def judged_units(n: int, share: float, seed: int) -> tuple[Array, Array]:
    """(units that are judged, all others), each ascending: the same for every seed of the trial."""
    order = np.random.default_rng([seed, 0]).permutation(n)
    cut = round(share * n)
    return np.sort(order[:cut]), np.sort(order[cut:])


def run_trial(
    data: Matched, judged: Array, rest: Array, trial: Trial, progress: Callable[[], None] = lambda: None
) -> tuple[dict[str, dict[str, dict[str, Array]]], list[dict[str, Any]]]:
    """(direction -> norm -> scoring -> [S, judged units], what each norm and seed chose).

    Units of ``judged`` that ask nothing (no match among them) are left out. ``progress`` is called once for each norm,
    seed and learning rate.
    """
    directions = tuple(trial.directions)
    target = "both" if len(directions) > 1 else directions[0].value
    held = data.part(judged)
    rows: dict[str, dict[str, dict[str, list[Array]]]] = {}
    chosen = []
    for number in range(trial.seeds):
        rng = np.random.default_rng([trial.seed, 1, number])
        order = rng.permutation(rest)
        choosing, training = np.split(order, [max(1, round(CHOOSING * len(order)))])
        choosing_data = data.part(np.sort(choosing))
        batches = draw_batches(data, np.sort(training), trial, rng)
        for norm in trial.norms:
            best: tuple[float, float, int, Heads, Exponents] | None = None
            for lr in trial.learning_rates:
                for step, heads, exponents in fit(data, batches, trial, norm, lr, number):
                    if step == 0 and best is not None:
                        continue  # the same for every rate
                    found = answer(choosing_data, heads, {"native": exponents}, directions, trial.metric)
                    value = float(np.nanmean(found[target]["native"]))
                    if best is None or value > best[0]:
                        best = (value, lr, step, copy.deepcopy(heads), exponents)
                progress()
            assert best is not None
            value, lr, step, heads, exponents = best
            chosen.append({"norm": norm, "seed": number, "lr": lr if step else None, "steps": step, "value": value,
                           "gamma_q": exponents.gamma_q, "gamma_d": exponents.gamma_d})  # fmt: skip
            scored = {"native": exponents, "cosine": FIXED["cosine"], "dot": FIXED["dot"]}
            for direction, scorings in answer(held, heads, scored, directions, trial.metric).items():
                for scoring, values in scorings.items():
                    rows.setdefault(direction, {}).setdefault(norm, {}).setdefault(scoring, []).append(values)
    stacked = {
        direction: {norm: {s: without_silent(np.stack(v)) for s, v in found.items()} for norm, found in norms.items()}
        for direction, norms in rows.items()
    }
    return stacked, chosen


def without_silent(values: Array) -> Array:
    """[S, units] without the units that ask nothing, which are the same for every norm, seed and scoring."""
    return values[:, ~np.isnan(values).any(axis=0)]
