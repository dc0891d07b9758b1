"""From a trial's numbers to an answer: which norm to train, or "can't tell". No model and no data here.

The rule was fixed on planted data, before any real number was seen; after the first ones only the words of "can't tell"
changed. For each norm X other than cosine, over the same held-out queries and the same seeds, with 95% intervals over
queries and seeds (mmclip.metrics.bootstrap):

    gain           native(X) - native(cosine): what training X instead of cosine changes
    over control   native(X) - native(X's control), which is X but for documents that are normalized, of the same seed:
                   dnorm for dot, cosine for qnorm and for learned
    by length      native(X) - cosine(X), of the same trained head: what its documents' length adds to the angle

1. Fewer than ``MIN_QUERIES`` held-out queries (images, for CLIP) for which any head finds anything: can't tell.
   Percentiles of so few are no interval, and where nothing is found no norm can differ.
2. X is recommended where ``gain`` lies above 0 with its whole interval, and, where X keeps documents' length (dnorm
   does not), ``over control`` and ``by length`` do so, too: length, and not luck, is then what helps. Of several, the
   one whose ``gain`` has the largest lower end; norms whose paired difference to it holds 0 are named beside it.
3. Else cosine is recommended where every other norm's gain ends below the margin, a gain that does not matter: those
   whose interval lies below 0 are among them.
4. Else: can't tell, and the smallest effect that these queries and seeds could show, ``DETECTABLE`` standard errors of
   the paired difference (5% two-sided, power 80%), the largest of the norms that may still gain the margin.

Told, and no part of the rule: ``trained``, by length less what the cosine head of the same seed, whose lengths no loss
saw, gains when its dot products rank. Where it holds 0 the encoder's own lengths do as much as trained ones, and a
cosine model ranked by dot would have them. Fisher condition numbers take no part either: which side they favour is a
hypothesis to be tested. Four norms are compared with cosine, and intervals are not widened for it.

The adviser's trial: linear heads on frozen raw vectors, every norm by the same batches, judged on held-out queries.

A head starts as the identity, so before its first step it has the encoder's own numbers exactly: x + x R^T with R = 0,
or, of a rank, x + (x V^T) U^T with U = 0. Text sides share one head, as they share their encoder; image and text have
one each. Everything goes by **units**, which are never divided: a query with its relevant documents, or an image with
its captions. A seed divides the units that are not judged anew into those that train and those that choose, draws the
batches, and, of a rank, V; learning rate and number of steps are, for each norm and seed, those of the best number
on the units that choose (0 steps among them). So intervals over seeds cover that choice, too.

The adviser's data: a model and a training split become raw vectors with what matches, text and CLIP alike.

They are kept in the output folder as ``vectors.safetensors`` under a key of the model's weights, the data and every
setting that they depend on: a second run with the same key encodes nothing.

What advise.py shows: the answer first, then the evidence in a table; and a picture of the norms' differences.
"""

from __future__ import annotations

import copy
import hashlib
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.text import Text
from torch import Tensor, nn

from mmclip import distributed, metrics
from mmclip.config import AdviseConfig
from mmclip.data.shards import open_data
from mmclip.embeddings.encode import EncodeOptions
from mmclip.errors import UserError, printable
from mmclip.evaluation.eval_set import EvalSource
from mmclip.io import json_array, read_arrays, read_json_array, write_arrays
from mmclip.losses import ContrastiveLoss, PositiveMask, mask_from_matrix
from mmclip.metrics import DETECTABLE, mean_samples, over_seeds
from mmclip.metrics.fisher import PER_DIMENSION
from mmclip.models.factory import load_clip
from mmclip.reporting.table import NO, Cell, Table, make_console
from mmclip.retrieval import Qrels, as_floats, rank
from mmclip.roles import FIXED_NORMALIZATIONS, NORMS, SCALE_INIT, Direction, Exponents, Normalization
from mmclip.similarity import Similarity

if TYPE_CHECKING:
    from mmclip.data.beir import BeirCollection
    from mmclip.models.text_encoder import TextEncoder

OTHERS = NORMS[1:]
CONTROLS = {n.value: n.control.value for n in Normalization if n.control}
MIN_QUERIES = 30
CANNOT_TELL = "can't tell"
Array = NDArray[Any]
Json = dict[str, Any]
Values = Mapping[str, Mapping[str, Array]]  # norm -> scoring ("native", "cosine", "dot") -> [S, Q]
LEARNING_RATES = (3e-5, 2e-4, 1e-3)
LOOKS = (0.25, 0.5, 1.0)  # fractions of the steps after which a head is validated, besides before the first
SCALE_LR = 1e-2  # of alpha and gamma
CHOOSING = 0.2  # of the units that are not judged
FIXED = {n.value: n.exponents for n in FIXED_NORMALIZATIONS}
VECTORS_FILE = "vectors.safetensors"
TEXT_SCALE = 20.0  # effective scale, 1 / temperature, as train_text.py starts
QUERY_SHARE = 3  # of --max-items at most one in so many is a query
SEEN = "the model was trained on these very {}: its vectors fit those that judge, too, so differences are of seen data"
WIDTH = 118
SIDES = {"query": "qnorm", "document": "dnorm"}  # a side, and the norm that normalizes it alone
KAPPA = (
    "the paper's hypothesis is that kappa says which side to normalize; its sign is not public, so it is to be tested "
    "and decided nothing here"
)


def estimate(values: Array, *, resamples: int = metrics.RESAMPLES, seed: int = 0) -> Json:
    """Mean of values [S, Q], a row a seed, a column a held-out query: {"value", "ci", "se", "above"}.

    "ci" is that of metrics.mean_interval, "se" the standard deviation of its samples, "above" the share of them
    above 0.
    """
    samples = _samples(values, resamples, seed)
    lo, hi = metrics.interval(samples)
    return {
        "value": float(values.mean()),
        "ci": [lo, hi],
        "se": float(samples.std(ddof=1)),
        "above": float((samples > 0).mean()),
    }


def _samples(values: Array, resamples: int, seed: int) -> Array:
    v = np.asarray(values, dtype=np.float64)
    return over_seeds(mean_samples(v.T, np.arange(v.shape[1]), resamples=resamples, seed=seed), seed=seed)


def compare(values: Values, *, resamples: int = metrics.RESAMPLES, seed: int = 0) -> Json:
    """norm -> {"native"} and, of all but cosine, {"gain", "detectable"} and, of those that keep documents' length,
    {"over_control", "by_length", "trained"}, as :func:`estimate` has them. A control that is missing is cosine."""
    cosine = values["cosine"]
    luck = cosine["dot"] - cosine["cosine"]
    report: Json = {}
    for norm, found in values.items():
        native, by_length = found["native"], found["native"] - found["cosine"]
        differences = {"native": native}
        if norm != "cosine":
            differences["gain"] = native - cosine["native"]
        if norm in CONTROLS:
            differences["over_control"] = native - values.get(CONTROLS[norm], cosine)["native"]
            differences |= {"by_length": by_length, "trained": by_length - luck}
        row = {k: estimate(v, resamples=resamples, seed=seed) for k, v in differences.items()}
        report[norm] = row | ({"detectable": DETECTABLE * row["gain"]["se"]} if "gain" in row else {})
    return report


def decide(
    values: Values, margin: float, *, metric: str = "ndcg@10", resamples: int = metrics.RESAMPLES, seed: int = 0
) -> Json:
    """The rule above: {"answer", "because", "sure", "detectable", "ties", "n_queries", "n_seeds", "norms"}.

    values: of cosine and at least one other norm. answer: a norm or ``CANNOT_TELL``. sure: the share of resamples in
    which it beats cosine (of cosine: in which none gains the margin; None where there is no answer). ties: norms that
    cannot be told from a recommended one. norms: :func:`compare`.
    """
    n_seeds, n_queries = values["cosine"]["native"].shape
    answered = int(np.any([found["native"] > 0 for found in values.values()], axis=(0, 1)).sum())
    if answered < MIN_QUERIES:
        why = f"{metric} is above 0 for {answered} of {n_queries} held-out queries: {MIN_QUERIES} are needed"
        return undecided(why, n_queries, n_seeds, margin, metric)
    report = undecided("", n_queries, n_seeds, margin, metric)
    options: Any = {"resamples": resamples, "seed": seed}
    norms = compare(values, **options)
    others = [norm for norm in norms if norm != "cosine"]
    report["norms"] = norms
    able = [norm for norm in others if _recommended(norms[norm])]
    if able:
        best = max(able, key=lambda n: norms[n]["gain"]["ci"][0])
        difference = {n: estimate(values[best]["native"] - values[n]["native"], **options) for n in others if n != best}
        report["ties"] = [n for n, d in difference.items() if d["ci"][0] <= 0 <= d["ci"][1]]
        gain = norms[best]["gain"]
        length = norms[best].get("by_length")
        why = f"{metric} {_signed(gain)} over cosine, "
        why += f"{_signed(length)} by length in its own head" if length else "by training alone: it ranks by angle"
        return report | {"answer": best, "because": why, "sure": gain["above"]}
    tops = {norm: norms[norm]["gain"]["ci"][1] for norm in others}
    top = max(tops, key=lambda n: tops[n])
    if tops[top] < margin:
        samples = np.stack([_samples(values[n]["native"] - values["cosine"]["native"], **options) for n in others])
        why = f"no other norm can gain {margin:g} {metric}: the best case is {top}, at most {tops[top]:+.3f}"
        return report | {"answer": "cosine", "because": why, "sure": float((samples < margin).all(axis=0).mean())}
    still = [n for n in others if tops[n] >= margin]
    report["detectable"] = max(norms[n]["detectable"] for n in still)
    why = f"at most ±{report['detectable']:.3f} {metric} was detectable with {n_queries} queries and {n_seeds} seeds"
    if len(still) < len(others):
        out = ", ".join(n for n in others if n not in still)
        why += f"; {', '.join(still)} may gain {margin:g} (at most {tops[top]:+.3f}), {out} cannot"
    if gaining := [n for n in still if norms[n]["gain"]["ci"][0] > 0]:
        why += f"; {', '.join(gaining)} gained, but not shown by length"
    return report | {"because": why}


def undecided(why: str, n_queries: int, n_seeds: int, margin: float, metric: str) -> Json:
    """What :func:`decide` returns where it cannot tell, or before it can."""
    report: Json = {"answer": CANNOT_TELL, "because": why, "sure": None, "detectable": None, "ties": [], "norms": {}}
    return report | {"n_queries": n_queries, "n_seeds": n_seeds, "margin": margin, "metric": metric}


def _recommended(row: Json) -> bool:
    return all(row[k]["ci"][0] > 0 for k in ("gain", "over_control", "by_length") if k in row)


def _signed(found: Json) -> str:
    return f"{found['value']:+.3f} [{found['ci'][0]:+.3f}, {found['ci'][1]:+.3f}]"


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


@dataclass
class Encoded:
    """matched: the training split. titles, texts [n, D]: of documents that have both, a stand-in for matched pairs, or
    None. scale: effective, that a trial starts from. notes: what a person should know."""

    matched: Matched
    titles: Tensor | None
    texts: Tensor | None
    scale: float
    model: Json
    data: Json
    notes: list[str] = field(default_factory=list)


def encode(settings: AdviseConfig, folder: Path) -> Encoded:
    """Vectors from the folder's cache where they are there. Errors: UserError, one line."""
    return _encode_text(settings, folder) if settings.kind == "text" else _encode_clip(settings, folder)


def _encode_text(settings: AdviseConfig, folder: Path) -> Encoded:
    from mmclip.data.beir import open_beir
    from mmclip.models.text_encoder import load_text_model

    assert settings.model is not None and settings.data is not None
    split, lent = text_split(Path(settings.data), settings.split)
    data = open_beir(settings.data, split)
    notes = list(data.notes)
    if lent:
        notes.append(f"no train split: some of the queries of {split!r} train the trial and others judge it, so that "
                     f"split is not unseen by what follows this advice")  # fmt: skip
    if data.excluded:
        notes.append(f"excluded_ids of {len(data.excluded)} queries are not heeded here")
    queries, documents = drawn(data, settings.limit, settings.seed)
    device = distributed.start(settings.device)
    model = load_text_model(settings, device)
    stand_in = stand_in_rows(data, queries, model.dim, settings)
    key = {
        "kind": "text",
        "model": weights_key(model.encoder),
        "data": data.fingerprint(),
        "lengths": [model.length_of(role) for role in ("query", "document")],
        "precision": model.precision,
        "prompts": model.prompts,
        "rows": _digest([queries, documents, stand_in]),
    }
    arrays = _cached(folder, key)
    if arrays is None:
        texts: dict[str, tuple[str, list[str]]] = {
            "first": ("query", [data.queries[r] for r in queries]),
            "second": ("document", [data.documents[r] for r in documents]),
        }
        if len(stand_in):
            texts["titles"] = ("query", [data.titles[r] for r in stand_in])
            texts["texts"] = ("document", [data.documents[r][len(data.titles[r]) :].strip() for r in stand_in])
        arrays = {name: _texts(model, *what, settings).numpy() for name, what in texts.items()}
        write_arrays(folder / VECTORS_FILE, arrays | {"key": json_array(key)})
    vectors = {name: torch.from_numpy(x) for name, x in arrays.items()}
    new = [{int(row): i for i, row in enumerate(rows)} for rows in (queries, documents)]
    kept = [i for i, (q, d) in enumerate(data.pairs.tolist()) if q in new[0] and d in new[1]]
    pairs = np.array([[new[0][q], new[1][d]] for q, d in data.pairs[kept].tolist()], dtype=np.int64)
    matched = Matched(("query", "document"), vectors["first"], vectors["second"], pairs, data.gains[kept])
    known = model.metadata.get("data")
    if isinstance(known, dict) and (known.get("split"), _place(known.get("path"))) == (split, _place(settings.data)):
        notes.append(SEEN.format("queries") + "; advise on the model that the run started from")
    if model.removed:
        notes.append("the model's final Normalize was taken off: its own vectors have no length")
    about: Json = {"path": settings.data, "split": split, "key": key["data"]}
    about |= {"n_queries": len(queries), "of_queries": len(data.queries)}
    about |= {"n_documents": len(documents), "of_documents": len(data.documents)}
    told = {"name": settings.model, "key": key["model"], "dim": model.dim, "removed": model.removed,
            "document_length": model.length_of("document")}  # fmt: skip
    return Encoded(matched, vectors.get("titles"), vectors.get("texts"), TEXT_SCALE, told, about, notes)


def text_split(root: Path, asked: str | None) -> tuple[str, bool]:
    """(split of a BEIR folder to try on, whether it is lent because there is no training split). Errors: UserError."""
    from mmclip.data.beir import QRELS, require_beir

    there = sorted(p.stem for p in (root / QRELS).glob("*.tsv"))
    split = asked or next((s for s in ("train", "dev", "test") if s in there), there[0] if there else "train")
    require_beir(root, split)
    return split, "train" not in there


def drawn(data: BeirCollection, limit: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(query rows, document rows) to encode, ascending: every document that is relevant to a drawn query and, up to
    ``limit``, others at random."""
    rng = np.random.default_rng([seed, 2])
    n = min(len(data.queries), max(1, limit // QUERY_SHARE))
    queries = np.sort(rng.permutation(len(data.queries))[:n])
    needed = np.unique(data.pairs[np.isin(data.pairs[:, 0], queries), 1])
    others = rng.permutation(np.setdiff1d(np.arange(len(data.documents)), needed))
    return queries, np.sort(np.concatenate([needed, others[: max(0, limit - len(needed))]]))


def stand_in_rows(data: BeirCollection, queries: np.ndarray, dim: int, settings: AdviseConfig) -> np.ndarray:
    """Documents with a title and a text, for kappa where the queries are too few for it; enough for its nulls."""
    if not settings.fisher or len(queries) >= PER_DIMENSION * dim:
        return np.empty(0, dtype=np.int64)
    both = [r for r, (t, d) in enumerate(zip(data.titles, data.documents, strict=True)) if t and len(d) > len(t)]
    rng = np.random.default_rng([settings.seed, 3])
    return np.sort(rng.permutation(both)[: min(2 * PER_DIMENSION * dim, settings.limit)]).astype(np.int64)


def _texts(model: TextEncoder, role: str, texts: Sequence[str], settings: AdviseConfig) -> Tensor:
    print(f"encoding {len(texts):,} texts as {role}", file=sys.stderr, flush=True)
    return model.encode(texts, role, settings.encode_batch_size)


def _encode_clip(settings: AdviseConfig, folder: Path) -> Encoded:
    assert settings.model is not None and settings.data is not None
    csv = (settings.dataset_type, settings.csv_img_key, settings.csv_caption_key, settings.csv_separator)
    whole = open_data(settings.data, settings.split, "train", *csv)
    n = min(len(whole), settings.limit)
    data = whole.subset(np.sort(np.random.default_rng([settings.seed, 2]).permutation(len(whole))[:n]).tolist())
    device = distributed.start(settings.device)
    model = load_clip(settings.model, settings.pretrained)
    notes = []
    known = model.metadata.get("data")
    trained_on = known.get("key") if isinstance(known, dict) else None
    if trained_on == whole.fingerprint():
        notes.append(SEEN.format("images") + "; of a run with --val-holdout N, --split 'train[holdout N]' is unseen")
    key = {
        "kind": "clip",
        "model": weights_key(model.towers),
        "preprocess": str(sorted(model.preprocess_cfg.items())),
        "data": data.fingerprint(),
        "precision": settings.precision,
    }
    arrays = _cached(folder, key)
    if arrays is None:
        precision = "fp32" if settings.precision == "auto" else settings.precision
        options = EncodeOptions(device, precision, settings.encode_batch_size, settings.workers)
        model.towers.to(device)
        found = EvalSource.open(data, {}, model, options).embed(model, options, with_distractors=False)
        assert found.owner is not None
        arrays = {"first": found.image.numpy(), "second": found.text.numpy(), "pairs": found.pairs.numpy(),
                  "owner": np.array(found.owner)}  # fmt: skip
        write_arrays(folder / VECTORS_FILE, arrays | {"key": json_array(key)})
    first, second = torch.from_numpy(arrays["first"]), torch.from_numpy(arrays["second"])
    pairs = arrays["pairs"]
    matched = Matched(("image", "text"), first, second, pairs, np.ones(len(pairs)), arrays["owner"])
    scale = model.metadata.get("effective_scale") or model.loaded_scale or SCALE_INIT
    if len(first) < n:
        notes.append(f"{n - len(first)} images that cannot be read were left out")
    about = {"path": settings.data, "split": whole.split, "key": key["data"], "n_images": len(first),
             "n_texts": len(second), "of_images": len(whole)}  # fmt: skip
    told = {"name": settings.model, "pretrained": settings.pretrained, "key": key["model"], "dim": first.shape[1],
            "norm": model.metadata.get("norm")}  # fmt: skip
    return Encoded(matched, None, None, min(float(scale), 100.0), told, about, notes)


def weights_key(module: nn.Module) -> str:
    """16 hex digits of every weight and buffer, by name."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _place(path: Any) -> Path | None:
    return Path(path).resolve() if isinstance(path, str) else None


def _digest(rows: Sequence[np.ndarray]) -> str:
    return hashlib.sha256(b"|".join(r.astype("<i8").tobytes() for r in rows)).hexdigest()[:16]


def _cached(folder: Path, key: Json) -> dict[str, np.ndarray] | None:
    """The vectors of ``key``; None where the folder has none, or others, or a damaged file."""
    path = folder / VECTORS_FILE
    if not path.is_file():
        return None
    try:
        arrays = read_arrays(path)
        if read_json_array(arrays.pop("key"), "key") != key:
            return None
    except (UserError, KeyError):
        return None
    print(f"vectors: taken from {printable(path)}", file=sys.stderr)
    return arrays


def answer_lines(report: Json) -> list[str]:
    """The answer, why, how sure, and what is not told from it."""
    answer = report["answer"]
    told = answer if answer == CANNOT_TELL else f"train with --norm {answer}"
    lines = [f"{told} ({report['direction']})", f"because   {report['because']}"]
    if report["sure"] is not None:
        what = "no other norm gains the margin" if answer == "cosine" else f"{answer} is above cosine"
        lines.append(f"how sure  {what} in {100 * report['sure']:.0f}% of resamples of queries and seeds")
    if report["ties"]:
        lines.append(f"not told from it: {', '.join(report['ties'])}")
    trained = (report["sections"][report["direction"]]["norms"].get(answer) or {}).get("trained")
    if trained is not None and trained["ci"][0] <= 0:
        lines.append(
            f"beside it  a cosine-trained head ranked by dot may gain as much: trained length adds {ranged(trained)}"
        )
    each = {d: s["answer"] for d, s in report["sections"].items() if d != report["direction"]}
    if each:
        lines.append("by direction: " + ", ".join(f"{d} {a}" for d, a in each.items()))
    return lines


def show(report: Json) -> None:
    console = make_console()
    first, *rest = answer_lines(report)
    console.print(Text.assemble("answer    ", (first, "bold")))
    for line in rest:
        console.print(Text(line))
    trial = report["trial"]
    for direction, section in report["sections"].items():
        if not section["norms"]:
            continue
        title = f"trial of {direction}: {section['n_queries']} held-out {trial['units']}, {section['n_seeds']} seeds"
        columns = ["norm", "native", "minus\ncosine", "minus\ncontrol", "by norm\nown head", "detectable"]
        rows = []
        for norm, found in section["norms"].items():
            cells = [Cell(f"{found['native']['value']:.3f}")]
            cells += [Cell(ranged(found.get(k))) for k in ("gain", "over_control", "by_length")]
            rows.append((norm, [*cells, Cell(f"±{found['detectable']:.3f}" if "detectable" in found else NO)]))
        console.print()
        console.print(Table(f"{title}, {section['metric']}; 95% intervals", columns, rows))
    for line in evidence_lines(report):
        console.print(Text("\n".join(textwrap.wrap(line, WIDTH, subsequent_indent="          "))))


def evidence_lines(report: Json) -> list[str]:
    """One line for each piece of evidence that took no part, for each note and for what is not covered."""
    found = report["evidence"]
    lines = [f"lengths   CV of {side} lengths {x['cv']:.3f} [{x['ci'][0]:.3f}, {x['ci'][1]:.3f}], {x['n']:,} vectors"
             for side, x in found["lengths"].items()]  # fmt: skip
    for direction, section in found["zero_shot"].items():
        scorings = dict(section["scorings"])
        told = f"cosine {scorings.pop('cosine')['value']:.3f}"
        for name, x in scorings.items():
            lo, hi = x["minus_cosine_ci"]
            told += f", {name} {x['minus_cosine']:+.3f} [{lo:+.3f}, {hi:+.3f}]"
        lines.append(f"untrained {direction}: {told}, {section['n']} held out")
    for direction, section in found["fisher"].items():
        lines.append(f"kappa     {direction}: {kappa_words(section)}")
    if found["fisher"]:
        lines.append(f"          {KAPPA}")
    lines += [f"note      {printable(note, 400)}" for note in report["notes"]]
    lines.append(f"scope     {report['not_covered']}")
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in report["seconds"].items())
    return [*lines, f"time      {took}"]


def kappa_words(section: Json) -> str:
    """log10 kappa of the raw sides with their nulls, and what the larger one would name."""
    if section["status"] != "determined":
        return f"undetermined: {section['reason']}"
    told = []
    for role in SIDES:
        part = section[f"{role}_raw"]
        if part["log10_kappa"] is None:
            told.append(f"{role} none ({part['log10_kappa_reason']})")
            continue
        lo, hi = part["log10_kappa"]["ci"]
        nulls = [f"{k} {part[k]:.2f}" for k in ("unpaired", "gaussian") if part[k] is not None]
        told.append(f"{role} {part['log10_kappa']['value']:.2f} [{lo:.2f}, {hi:.2f}] (nulls: {', '.join(nulls)})")
    larger = section["larger"]["raw"]
    name = f"larger of the {larger}, which {SIDES[larger]} would normalize" if larger in SIDES else str(larger)
    sampling = f"sampling alone {section['marchenko_pastur']:.2f}"
    return f"log10 {', '.join(told)}; {sampling}; {name}; over {section['n']} {section['reference']}"


def ranged(found: Json | None) -> str:
    return "–" if found is None else f"{found['value']:+.3f} [{found['ci'][0]:+.3f}, {found['ci'][1]:+.3f}]"


def draw(report: Json, path: Path) -> None:
    """Each norm's gain over cosine with its interval, a row a norm and direction, the margin shaded."""
    from mmclip.reporting.figures import intervals_figure, write_png

    sections = {d: s for d, s in report["sections"].items() if s["norms"]}
    norms = [n for n in next(iter(sections.values()))["norms"] if n != "cosine"]
    margin = next(iter(sections.values()))["margin"]
    rows = [(d, norm, section["norms"][norm]["gain"]) for d, section in sections.items() for norm in norms]
    figure = intervals_figure(
        [f"{norm} ({direction})" for direction, norm, _ in rows],
        [gain["value"] for *_, gain in rows],
        [gain["ci"] for *_, gain in rows],
        [margin] * len(rows),
        f"{report['trial']['metric']} minus cosine's, 95% interval; shaded: the margin",
    )
    figure.axes[0].set_title(f"advice: {report['answer']}")
    write_png(figure, path)
