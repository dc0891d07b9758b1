"""Which side to normalize: linear heads on frozen embeddings, trained with every norm, judged on held-out queries.

The rule is in the help of ``mmclip advise``; it was fixed on planted data before any real number was computed. For each
norm X other than cosine, over the same held-out queries and training seeds (mmclip.metrics.bootstrap), it reads

    gain           native(X) - native(cosine): what training X instead of cosine changes
    over control   native(X) - native(X's control), which is X with documents normalized: dnorm for dot, else cosine
    by length      native(X) - cosine(X) of the same head: what its documents' norms add to the angle

No part of it: ``trained``, by length less what the cosine head of the same seed gains by its dot products (where it
holds 0, a cosine model ranked by dot would do as well), and Fisher condition numbers, whose meaning is a hypothesis.
Intervals are not widened for four comparisons.

**Units** are never divided: a query with its relevant documents, an image with its captions. A seed divides those that
do not judge into training and choosing ones, and draws batches; learning rate and number of steps are, for each norm
and seed, the best on the choosing units, so that intervals over seeds cover that choice, too.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.text import Text
from torch import Tensor, nn

from mmclip import distributed, metrics
from mmclip.config import AdviseConfig
from mmclip.data.beir import QRELS, BeirCollection, open_beir, require_beir
from mmclip.data.shards import open_data
from mmclip.embeddings.encode import EncodeOptions
from mmclip.embeddings.features import FeatureSource
from mmclip.errors import UserError, printable
from mmclip.io import json_array, read_arrays, read_json_array, write_arrays
from mmclip.losses import ContrastiveLoss, PositiveMask, mask_from_matrix
from mmclip.metrics.fisher import PER_DIMENSION
from mmclip.models.factory import load_clip
from mmclip.models.metadata import weights_key
from mmclip.models.text_encoder import encoding, load_text_model
from mmclip.reporting.figures import intervals_figure, write_png
from mmclip.reporting.table import NO, Cell, Table, change_cell, make_console, rate_cell, value_cell
from mmclip.reporting.table import show as show_tables
from mmclip.retrieval import Qrels, as_floats, rank
from mmclip.roles import FIXED_NORMALIZATIONS, NORMS, SCALE_INIT, SCALE_MAX, Exponents, Normalization
from mmclip.similarity import Similarity

MIN_QUERIES = 30
CANNOT_TELL = "can't tell"
LEARNING_RATES = (3e-5, 2e-4, 1e-3)
LOOKS = (0.25, 0.5, 1.0)  # fractions of the steps after which a head is validated, besides before the first
SCALE_LR = 1e-2  # of alpha and gamma
CHOOSING = 0.2  # of the units that do not judge
FIXED = {n.value: n.exponents for n in FIXED_NORMALIZATIONS}
VECTORS_FILE = "vectors.safetensors"
TEXT_SCALE = 20.0  # initial effective scale, that of train-text
QUERY_SHARE = 3  # of --max-items at most one in so many is a query
SEEN = "the model was trained on these very {}: its vectors fit those that judge, too, so differences are of seen data"
LENT = (
    "no train split: some of the queries of {!r} train the trial and others judge it, so that split is not unseen by "
    "what follows this advice"
)
KAPPAS = ("log10_kappa", "unpaired", "gaussian")
SIDES = {"query": "qnorm", "document": "dnorm"}  # role -> the norm that normalizes it alone
KAPPA = (
    "the paper's hypothesis is that kappa says which side to normalize; its sign is not public, so it is to be tested "
    "and decided nothing here"
)
Array = NDArray[Any]
Json = dict[str, Any]
Batch = tuple[dict[str, Tensor], PositiveMask]  # rows by side, and the known positives among them
Values = Mapping[str, Mapping[str, Array]]  # norm -> scoring ("native", "cosine", "dot") -> [S, Q]


def estimate(values: Array, *, resamples: int = metrics.RESAMPLES, seed: int = 0) -> Json:
    """Mean of values [S, Q], a row a training seed: {"value", "ci", "se", "above": share of samples above 0}."""
    samples = _samples(values, resamples, seed)
    ci, se = list(metrics.interval(samples)), float(samples.std(ddof=1))
    return {"value": float(values.mean()), "ci": ci, "se": se, "above": float((samples > 0).mean())}


def _samples(values: Array, resamples: int, seed: int) -> Array:
    means = metrics.mean_samples(values.T, np.arange(values.shape[1]), resamples=resamples, seed=seed)
    return metrics.over_seeds(means, seed=seed)


def compare(values: Values, **how: Any) -> Json:
    """norm -> {"native"}, of all but cosine {"gain", "detectable"} and, of those that keep the documents' norms,
    {"over_control", "by_length", "trained"}, as :func:`estimate` has them. A control that is missing is cosine."""
    cosine = values["cosine"]
    report: Json = {}
    for norm, scorings in values.items():
        native = scorings["native"]
        numbers = {"native": native}
        if norm != "cosine":
            numbers["gain"] = native - cosine["native"]
        if control := Normalization(norm).control:
            by_norm = native - scorings["cosine"]
            numbers["over_control"] = native - values.get(control.value, cosine)["native"]
            numbers |= {"by_length": by_norm, "trained": by_norm - (cosine["dot"] - cosine["cosine"])}
        report[norm] = {name: estimate(v, **how) for name, v in numbers.items()}
        if norm != "cosine":
            report[norm]["detectable"] = metrics.DETECTABLE * report[norm]["gain"]["se"]
    return report


def decide(values: Values, settings: AdviseConfig, resamples: int = metrics.RESAMPLES) -> Json:
    """Apply the rule to the values of cosine and at least one other norm.

    Returns:
        A section of advise.json. answer: a norm or ``CANNOT_TELL``. sure: the share of resamples in which it beats
        cosine (of cosine: in which no norm gains the margin; None without an answer). norms: :func:`compare`.
    """
    n_seeds, n_queries = values["cosine"]["native"].shape
    margin, metric = settings.margin, settings.metric
    report = undecided("", n_queries, settings)
    answered = int(np.any([scorings["native"] > 0 for scorings in values.values()], axis=(0, 1)).sum())
    if answered < MIN_QUERIES:
        why = f"{metric} is above 0 for {answered} of {n_queries} held-out queries: {MIN_QUERIES} are needed"
        return report | {"because": why}
    how: Any = {"resamples": resamples, "seed": settings.seed}
    norms = report["norms"] = compare(values, **how)
    others = [norm for norm in norms if norm != "cosine"]
    gains = {n: norms[n]["gain"] for n in others}
    tests = ("gain", "over_control", "by_length")
    if able := [n for n in others if all(norms[n][k]["ci"][0] > 0 for k in tests if k in norms[n])]:
        best = max(able, key=lambda n: gains[n]["ci"][0])
        rest = {n: estimate(values[best]["native"] - values[n]["native"], **how) for n in others if n != best}
        ties = [n for n, difference in rest.items() if difference["ci"][0] <= 0 <= difference["ci"][1]]
        by_norm = norms[best].get("by_length")
        why = f"{metric} {ranged(gains[best])} over cosine, "
        why += f"{ranged(by_norm)} by norm in its own head" if by_norm else "by training alone: it ranks by angle"
        return report | {"answer": best, "because": why, "sure": gains[best]["above"], "ties": ties}
    tops = {n: gain["ci"][1] for n, gain in gains.items()}
    top = max(tops, key=lambda n: tops[n])
    if tops[top] < margin:
        samples = np.stack([_samples(values[n]["native"] - values["cosine"]["native"], **how) for n in others])
        why = f"no other norm can gain {margin:g} {metric}: the best case is {top}, at most {tops[top]:+.3f}"
        return report | {"answer": "cosine", "because": why, "sure": float((samples < margin).all(axis=0).mean())}
    still = [n for n in others if tops[n] >= margin]
    detectable = max(norms[n]["detectable"] for n in still)
    why = f"at most ±{detectable:.3f} {metric} was detectable with {n_queries} queries and {n_seeds} seeds"
    if len(still) < len(others):
        out = ", ".join(n for n in others if n not in still)
        why += f"; {', '.join(still)} may gain {margin:g} (at most {tops[top]:+.3f}), {out} cannot"
    if gaining := [n for n in still if gains[n]["ci"][0] > 0]:
        why += f"; {', '.join(gaining)} gained, but not shown by norm"
    return report | {"because": why, "detectable": detectable}


def undecided(why: str, n_queries: int, settings: AdviseConfig) -> Json:
    """A decision of :func:`decide` without an answer."""
    report: Json = {"answer": CANNOT_TELL, "because": why, "sure": None, "detectable": None, "ties": [], "norms": {}}
    report |= {"n_queries": n_queries, "n_seeds": settings.seeds}
    return report | {"margin": settings.margin, "metric": settings.metric}


@dataclass(frozen=True)
class Matched:
    """Raw embeddings of two sides, ("query", "document") or ("image", "text"), and which of their rows match.

    Attributes:
        embeddings: side -> [N, D]; rows of the first side are the units.
        pairs: [P, 2] matching rows of the two sides, in the order of the data.
        gains: [P], above 0.
        owner: [N] unit of each row of the second side; None where all of them are candidates of every unit.
        scale: Effective scale at the start of a trial.
    """

    embeddings: dict[str, Tensor]
    pairs: Array
    gains: Array
    owner: Array | None = None
    scale: float = SCALE_INIT

    def part(self, units: Array) -> Matched:
        """Some units with what belongs to them, rows renumbered."""
        first, second = self.embeddings.values()
        of_first, of_second = np.full(len(first), -1), np.full(len(second), -1)
        of_first[units] = np.arange(len(units))
        rows = np.arange(len(second)) if self.owner is None else np.flatnonzero(of_first[self.owner] >= 0)
        of_second[rows] = np.arange(len(rows))
        pairs = np.column_stack([of_first[self.pairs[:, 0]], of_second[self.pairs[:, 1]]])
        kept = (pairs >= 0).all(axis=1)
        embeddings = {
            s: x[torch.as_tensor(r)] for (s, x), r in zip(self.embeddings.items(), (units, rows), strict=True)
        }
        owner = None if self.owner is None else of_first[self.owner[rows]]
        return Matched(embeddings, pairs[kept], self.gains[kept], owner, self.scale)

    def clusters(self, side: str) -> Array:
        """[N]: unit of each row of a side; a row of no unit is its own."""
        own = self.owner is None or side == next(iter(self.embeddings))
        return np.arange(len(self.embeddings[side])) if own else np.asarray(self.owner)


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


def make_heads(data: Matched, rank: int | None = None, seed: int = 0) -> nn.ModuleDict:
    """A head for each side: one and the same for a query and its documents."""
    (first, x), (second, _) = data.embeddings.items()
    head = Head(x.shape[1], rank, seed)
    return nn.ModuleDict({first: head, second: head if first == "query" else Head(x.shape[1], rank, seed)})


def draw_batches(data: Matched, units: Array, settings: AdviseConfig, rng: np.random.Generator) -> list[Batch]:
    """``settings.steps`` batches of distinct units, each with one of its matches, in passes of random order."""
    n_first, n_second = map(len, data.embeddings.values())
    order = np.argsort(data.pairs[:, 0], kind="stable")
    starts = np.searchsorted(data.pairs[order, 0], np.arange(n_first + 1))
    units = units[np.diff(starts)[units] > 0]  # a caption that is left out may have been an image's last
    size = min(settings.batch_size, len(units))
    codes = np.unique(data.pairs[:, 0] * n_second + data.pairs[:, 1])
    batches = []
    queue = np.empty(0, dtype=np.int64)
    for _ in range(settings.steps):
        if len(queue) < size:
            queue = rng.permutation(units)
        rows, queue = queue[:size], queue[size:]
        chosen = order[starts[rows] + (rng.random(size) * (starts[rows + 1] - starts[rows])).astype(np.int64)]
        matches = data.pairs[chosen, 1]
        positives = torch.as_tensor(np.isin(rows[:, None] * n_second + matches[None, :], codes))
        sides = zip(data.embeddings, map(torch.as_tensor, (rows, matches)), strict=True)
        batches.append((dict(sides), mask_from_matrix(positives)))
    return batches


@torch.no_grad()
def measure(
    data: Matched, heads: nn.ModuleDict, scorings: Mapping[str, Exponents], settings: AdviseConfig
) -> dict[str, dict[str, Array]]:
    """The metric of every unit with a query: direction -> scoring -> [units].

    Of an image it is the mean over its captions where texts are the queries; with two directions "both" is their mean.
    """
    embeddings = {side: heads[side](x) for side, x in data.embeddings.items()}
    n = len(next(iter(embeddings.values())))
    report: dict[str, dict[str, Array]] = {}
    for direction in settings.weights:
        forward = direction.query_side == next(iter(embeddings))
        qrels = Qrels(data.pairs if forward else data.pairs[:, ::-1], data.gains)
        values = report[direction.value] = {}
        for name, ranking in rank(*direction.roles(embeddings), qrels, scorings).items():
            of_queries = metrics.per_query(ranking.ranks, ranking.offsets, ranking.gains, [settings.metric])
            unit = data.clusters(direction.query_side)[ranking.queries]
            times, sums = (np.bincount(unit, w, minlength=n) for w in (None, of_queries[settings.metric]))
            values[name] = np.divide(sums, times, out=np.full(n, np.nan), where=times > 0)
    if len(report) > 1:
        report["both"] = {s: np.mean([values[s] for values in report.values()], axis=0) for s in scorings}
    return {d: {s: v[~np.isnan(v)] for s, v in values.items()} for d, values in report.items()}


def fit(
    data: Matched, choosing: Matched, batches: Sequence[Batch], norm: str, seed: int, settings: AdviseConfig
) -> Iterator[tuple[float, float | None, int, nn.ModuleDict, Exponents]]:
    """(mean metric on ``choosing``, learning rate, steps, heads, exponents) at first and at each rate's ``LOOKS``."""
    looks = {max(1, round(share * len(batches))) for share in LOOKS}
    for i, lr in enumerate(LEARNING_RATES):
        heads = make_heads(data, settings.rank, seed)
        loss = ContrastiveLoss(Similarity(norm, settings.weights, data.scale), settings.weights)
        optimizer = torch.optim.AdamW(
            [{"params": heads.parameters(), "lr": lr}, {"params": loss.parameters(), "lr": SCALE_LR}], weight_decay=0.0
        )
        for step, batch in enumerate([None, *batches]):
            if batch is not None:
                features = {side: heads[side](data.embeddings[side][rows]) for side, rows in batch[0].items()}
                optimizer.zero_grad(set_to_none=True)
                loss(features, batch[1]).loss.backward()
                optimizer.step()
                loss.similarity.clamp_logit_scale()
            if step in looks or step == i == 0:  # untrained heads are the same for every rate
                exponents = as_floats(loss.similarity.exponents)
                rates = measure(choosing, heads, {"native": exponents}, settings)[settings.target]["native"]
                yield float(rates.mean()), lr if step else None, step, copy.deepcopy(heads), exponents


def judged_units(data: Matched, settings: AdviseConfig) -> tuple[Array, Array]:
    """(units that judge, all others), each ascending: the same for every seed of the trial."""
    n = len(next(iter(data.embeddings.values())))
    order = np.random.default_rng([settings.seed, 0]).permutation(n)
    cut = round(settings.held_out * n)
    return np.sort(order[:cut]), np.sort(order[cut:])


def run_trial(
    data: Matched,
    settings: AdviseConfig,
    norms: Sequence[str] = NORMS,
    progress: Callable[[int], None] = lambda n: None,
) -> tuple[Mapping[str, Values], list[Json]]:
    """Train and choose the heads of every norm and seed, and measure them on the units that judge.

    Returns ({direction: values}, what each norm and seed chose); ``progress`` is called with the number of new heads.
    """
    judged, rest = judged_units(data, settings)
    held = data.part(judged)
    measured: dict[str, list[dict[str, dict[str, Array]]]] = {norm: [] for norm in norms}
    chosen = []
    for number in range(settings.seeds):
        rng = np.random.default_rng([settings.seed, 1, number])
        order = rng.permutation(rest)
        choosing, training = np.split(order, [max(1, round(CHOOSING * len(order)))])
        choosing_data, batches = data.part(np.sort(choosing)), draw_batches(data, np.sort(training), settings, rng)
        for norm in norms:
            tried = fit(data, choosing_data, batches, norm, number, settings)
            value, lr, steps, heads, exponents = max(tried, key=lambda candidate: candidate[0])
            about: Json = {"norm": norm, "seed": number, "lr": lr, "steps": steps, "value": value}
            chosen.append(about | exponents._asdict())
            scorings = {"native": exponents, "cosine": FIXED["cosine"], "dot": FIXED["dot"]}
            measured[norm].append(measure(held, heads, scorings, settings))
            progress(len(LEARNING_RATES))
    values = {
        d: {n: {s: np.stack([m[d][s] for m in seeds]) for s in seeds[0][d]} for n, seeds in measured.items()}
        for d in measured[norms[0]][0]
    }
    return values, chosen


def encode(settings: AdviseConfig, folder: Path) -> tuple[Matched, Matched | None, Json]:
    """Embeddings of the training split, from the folder's file where it has them (UserError).

    Returns (the split; titles as queries of their own texts, a stand-in for kappa where the split has too few pairs;
    {"model", "data", "notes"} of advise.json).
    """
    return (_encode_text if settings.kind == "text" else _encode_clip)(settings, folder)


def _encode_text(settings: AdviseConfig, folder: Path) -> tuple[Matched, Matched | None, Json]:
    split, lent = text_split(Path(str(settings.data)), settings.split)
    data = open_beir(str(settings.data), split)
    notes = list(data.notes)
    notes += [LENT.format(split)] if lent else []
    if data.excluded:
        notes.append(f"excluded_ids of {len(data.excluded)} queries are not heeded here")
    queries, documents = drawn(data, settings.limit, settings.seed)
    model = load_text_model(settings, distributed.start(settings.device))
    titled = _titled_rows(data, queries, model.dim, settings)
    rows = hashlib.sha256(b"|".join(r.astype("<i8").tobytes() for r in (queries, documents, titled))).hexdigest()
    key = {"model": weights_key(model.encoder)[:16], "data": data.fingerprint(), "rows": rows}
    texts = {
        "query": ("query", [data.queries[r] for r in queries]),
        "document": ("document", [data.documents[r] for r in documents]),
        "titles": ("query", [data.titles[r] for r in titled]),
        "texts": ("document", [data.documents[r][len(data.titles[r]) :].strip() for r in titled]),
    }

    def compute() -> Iterator[tuple[str, Array]]:
        for name, (role, lines) in texts.items():
            if lines:
                print(f"encoding {len(lines):,} texts as {role}", file=sys.stderr, flush=True)
                yield name, model.encode(lines, role, settings.encode_batch_size).numpy()

    arrays = _cached(folder, key | {"kind": "text", "precision": model.precision, **encoding(model)}, compute)
    kept = np.isin(data.pairs[:, 0], queries)
    pairs = np.column_stack(
        [np.searchsorted(r, p) for r, p in zip((queries, documents), data.pairs[kept].T, strict=True)]
    )
    vectors = {name: torch.from_numpy(x) for name, x in arrays.items()}
    matched = Matched({side: vectors[side] for side in SIDES}, pairs, data.gains[kept], scale=TEXT_SCALE)
    stand_in = None
    if len(titled):
        sides = {"query": vectors["titles"], "document": vectors["texts"]}
        stand_in = Matched(
            sides, np.arange(len(titled)).repeat(2).reshape(-1, 2), np.ones(len(titled)), scale=TEXT_SCALE
        )
    trained = model.metadata.get("data")
    source = (trained.get("split"), trained.get("path")) if isinstance(trained, dict) else (None, None)
    if source[0] == split and Path(str(source[1])).resolve() == Path(str(settings.data)).resolve():
        notes.append(SEEN.format("queries") + "; advise on the model that the run started from")
    if model.removed:
        notes.append("the model's final Normalize was taken off: its own vectors have norm 1")
    about: Json = {"path": settings.data, "split": split, "key": key["data"]}
    about |= {"n_queries": len(queries), "of_queries": len(data.queries), "n_documents": len(documents)}
    about |= {"of_documents": len(data.documents)}
    described = {"name": settings.model, "key": key["model"], "dim": model.dim, "removed": model.removed}
    described["document_length"] = model.length_of("document")
    return matched, stand_in, {"model": described, "data": about, "notes": notes}


def text_split(root: Path, split: str | None) -> tuple[str, bool]:
    """(split of a BEIR folder to train on, whether it is lent for want of a training split); UserError for none."""
    splits = sorted(p.stem for p in (root / QRELS).glob("*.tsv"))
    split = split or next((s for s in ("train", "dev", "test") if s in splits), splits[0] if splits else "train")
    require_beir(root, split)
    return split, "train" not in splits


def drawn(data: BeirCollection, limit: int, seed: int) -> tuple[Array, Array]:
    """(query rows, document rows) to encode, ascending: every document that is relevant to a drawn query and, up to
    ``limit``, others at random."""
    rng = np.random.default_rng([seed, 2])
    n = min(len(data.queries), max(1, limit // QUERY_SHARE))
    queries = np.sort(rng.permutation(len(data.queries))[:n])
    needed = np.unique(data.pairs[np.isin(data.pairs[:, 0], queries), 1])
    others = rng.permutation(np.setdiff1d(np.arange(len(data.documents)), needed))
    return queries, np.sort(np.concatenate([needed, others[: max(0, limit - len(needed))]]))


def _titled_rows(data: BeirCollection, queries: Array, dim: int, settings: AdviseConfig) -> Array:
    """Documents with a title and a text, where the queries are too few for kappa; enough for its nulls."""
    if not settings.fisher or len(queries) >= PER_DIMENSION * dim:
        return np.empty(0, dtype=np.int64)
    both = [r for r, (t, d) in enumerate(zip(data.titles, data.documents, strict=True)) if t and len(d) > len(t)]
    rng = np.random.default_rng([settings.seed, 3])
    return np.sort(rng.permutation(both)[: min(2 * PER_DIMENSION * dim, settings.limit)]).astype(np.int64)


def _encode_clip(settings: AdviseConfig, folder: Path) -> tuple[Matched, Matched | None, Json]:
    csv = (settings.dataset_type, settings.csv_img_key, settings.csv_caption_key, settings.csv_separator)
    whole = open_data(str(settings.data), settings.split, "train", *csv)
    n = min(len(whole), settings.limit)
    data = whole.subset(np.sort(np.random.default_rng([settings.seed, 2]).permutation(len(whole))[:n]).tolist())
    device = distributed.start(settings.device)
    model = load_clip(str(settings.model), settings.pretrained)
    notes = []
    trained = model.metadata.get("data")
    if isinstance(trained, dict) and trained.get("key") == whole.fingerprint():
        notes.append(SEEN.format("images") + "; of a run with --val-holdout N, --split 'train[holdout N]' is unseen")
    key = {"model": weights_key(model.towers)[:16], "data": data.fingerprint(), "precision": settings.precision}

    def compute() -> Iterator[tuple[str, Array]]:
        precision = "fp32" if settings.precision == "auto" else settings.precision
        options = EncodeOptions(device, precision, settings.encode_batch_size, settings.workers)
        model.towers.to(device)
        x = FeatureSource.open(data, model, options, None, "evaluation").embed(model, options, "evaluation")
        yield from {"image": x.image.numpy(), "text": x.text.numpy(), "pairs": x.pairs.numpy()}.items()
        yield "owner", x.owners()

    arrays = _cached(folder, key | {"kind": "clip", "preprocess": str(sorted(model.preprocess_cfg.items()))}, compute)
    sides = {side: torch.from_numpy(arrays[side]) for side in ("image", "text")}
    image, text = sides.values()
    scale = model.metadata.get("effective_scale") or model.loaded_scale or SCALE_INIT
    gains = np.ones(len(arrays["pairs"]))
    matched = Matched(sides, arrays["pairs"], gains, arrays["owner"], min(float(scale), SCALE_MAX))
    if len(image) < n:
        notes.append(f"{n - len(image)} images that cannot be read were left out")
    about: Json = {"path": settings.data, "split": whole.split, "key": key["data"]}
    about |= {"n_images": len(image), "n_texts": len(text), "of_images": len(whole)}
    described: Json = {"name": settings.model, "pretrained": settings.pretrained, "key": key["model"]}
    described |= {"dim": image.shape[1], "norm": model.metadata.get("norm")}
    return matched, None, {"model": described, "data": about, "notes": notes}


def _cached(folder: Path, key: Json, compute: Callable[[], Iterator[tuple[str, Array]]]) -> dict[str, Array]:
    """The folder's arrays where it has those of ``key``, undamaged; else computed ones, which are kept there."""
    path = folder / VECTORS_FILE
    with contextlib.suppress(UserError, KeyError):
        arrays = read_arrays(path)
        if read_json_array(arrays.pop("key"), "key") == key:
            print(f"vectors: taken from {printable(path)}", file=sys.stderr)
            return arrays
    arrays = dict(compute())
    write_arrays(path, arrays | {"key": json_array(key)})
    return arrays


def show(report: Json) -> None:
    """Print the answer, a table for each direction, then the evidence that took no part."""
    console = make_console()
    console.print(*map(Text, [*answer_lines(report), ""]), sep="\n")
    show_tables([*trial_tables(report), *evidence_tables(report)], console)
    seconds = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in report["seconds"].items())
    lines = [f"note: {printable(note, 400)}" for note in report["notes"]]
    console.print(*map(Text, [*lines, f"scope: {report['not_covered']}", f"time: {seconds}"]), sep="\n")


def answer_lines(report: Json) -> list[str]:
    """The answer, why, how sure, and what it cannot be told from."""
    best, target = report["answer"], report["direction"]
    lines = [f"answer    {best if best == CANNOT_TELL else f'train with --norm {best}'} ({target})"]
    lines.append(f"because   {report['because']}")
    if report["sure"] is not None:
        what = "no other norm gains the margin" if best == "cosine" else f"{best} is above cosine"
        lines.append(f"how sure  {what} in {100 * report['sure']:.0f}% of resamples of queries and seeds")
    if report["ties"]:
        lines.append(f"within noise of it: {', '.join(report['ties'])}")
    trained = report["sections"][target]["norms"].get(best, {}).get("trained")
    if trained is not None and trained["ci"][0] <= 0:
        lines.append(f"beside it a cosine head ranked by dot may gain as much: trained norms add {ranged(trained)}")
    each = [f"{d} {section['answer']}" for d, section in report["sections"].items() if d != target]
    return lines + ([f"by direction: {', '.join(each)}"] if each else [])


def trial_tables(report: Json) -> Iterator[Table]:
    """Each norm's native metric, and its differences with intervals."""
    columns = ["norm", "native", "minus\ncosine", "minus\ncontrol", "by norm\nown head", "detectable"]
    for direction, section in report["sections"].items():
        title = f"trial of {direction}: {section['n_queries']} held-out {report['trial']['units']}, "
        title += f"{section['n_seeds']} seeds, {section['metric']}; 95% intervals"
        rows = []
        for norm, row in section["norms"].items():
            cells = [rate_cell(row["native"]["value"], row["native"]["ci"])]
            cells += [_difference(row.get(k)) for k in ("gain", "over_control", "by_length")]
            rows.append((norm, [*cells, Cell(f"±{row['detectable']:.3f}" if "detectable" in row else NO)]))
        if rows:
            yield Table(title, columns, rows)


def evidence_tables(report: Json) -> Iterator[Table]:
    """Spread of the norms, the untrained model's scorings, and Fisher condition numbers."""
    evidence = report["evidence"]
    spreads = evidence["lengths"].items()
    rows = [(side, [rate_cell(x["cv"], x["ci"]), Cell(f"{x['n']:,}")]) for side, x in spreads]
    yield Table("evidence: coefficients of variation of the norms", ["side", "CV", "vectors"], rows)
    rows = []
    for direction, section in evidence["zero_shot"].items():
        cosine, *others = section["scorings"].values()
        cells = [_difference({"value": x["minus_cosine"], "ci": x["minus_cosine_ci"]}) for x in others]
        rows.append((f"{direction}, {section['n']} held out", [rate_cell(cosine["value"], cosine["ci"]), *cells]))
    columns = ["direction", "cosine", *(f"{n} less\ncosine" for n in FIXED if n != "cosine")]
    yield Table("evidence: the untrained model", columns, rows)
    rows, notes = [], [KAPPA]
    for direction, section in evidence["fisher"].items():
        if section["status"] != "determined":
            notes.append(f"{direction} undetermined: {section['reason']}")
            continue
        parts = {role: section[f"{role}_raw"] for role in SIDES}
        rows += [(f"{direction} {r}", [value_cell(p[k]) for k in KAPPAS]) for r, p in parts.items()]
        larger = section["larger"]["raw"]
        name = f"larger of the {larger}, which {SIDES[larger]} would normalize" if larger in SIDES else str(larger)
        notes.append(f"{direction}: {name}; sampling alone {section['marchenko_pastur']:.2f}; over {section['n']} "
                     f"{section['reference']}")  # fmt: skip
    if evidence["fisher"]:
        yield Table("evidence: log10 kappa of the raw sides, with its nulls", ["side", *KAPPAS], rows, notes)


def _difference(x: Json | None) -> Cell:
    return change_cell(x and {"delta": x["value"], "ci": x["ci"]})


def ranged(x: Json) -> str:
    """A signed estimate with its interval."""
    return f"{x['value']:+.3f} [{x['ci'][0]:+.3f}, {x['ci'][1]:+.3f}]"


def draw(report: Json, path: Path) -> None:
    """Draw each norm's gain over cosine with its interval, a row a norm and direction, the margin shaded."""
    rows = [
        (f"{norm} ({direction})", row["gain"], section["margin"])
        for direction, section in report["sections"].items()
        for norm, row in section["norms"].items()
        if "gain" in row
    ]
    labels, gains, margins = zip(*rows, strict=True)
    title = f"{report['trial']['metric']} minus cosine's, 95% interval; shaded: the margin"
    figure = intervals_figure(labels, [g["value"] for g in gains], [g["ci"] for g in gains], margins, title)
    figure.axes[0].set_title(f"advice: {report['answer']}")
    write_png(figure, path)
