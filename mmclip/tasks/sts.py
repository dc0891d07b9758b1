"""Semantic textual similarity: scored pairs of sentences, how each scoring orders them, and training on them.

Two sentences of a pair have the same role, so a normalization that treats the sides differently has no reason to work
here (docs/symmetry.md). sentence1 is the query, sentence2 the document of mmclip.similarity, and, exchanged, the other
way round. A pair is compared with other pairs, so the query's norm counts, too: dnorm orders pairs by |q| cos, qnorm by
|d| cos, dot by both.

Training minimizes the paper's squared error (Feng & Watanabe 2026, which takes alpha = 0.01):

    loss = mean_i (s(q_i, d_i) - label_i)**2,   s(q, d) = alpha q . d / (|q|**gamma_q |d|**gamma_d)

alpha is never trained: it is a number, or what brings the effective scale of the first batch to a given value.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse, stats
from torch import Tensor, nn

from mmclip import metrics
from mmclip.config import StsConfig
from mmclip.config.text import AUTO, PAPER_SCALE
from mmclip.data.beir import read_lines
from mmclip.errors import UserError, printable
from mmclip.evaluation.results import NATIVE
from mmclip.metrics.magnitude import summary
from mmclip.models.text_encoder import ROLES, TextEncoder
from mmclip.reporting.table import NO, Cell, Table, change_cell, rate_cell, show
from mmclip.roles import FIXED_NORMALIZATIONS, Direction, Exponents, Normalization
from mmclip.similarity import TINY, Similarity, magnitude, score
from mmclip.training.optimizer import cosine_factor, set_learning_rate, warmup_steps

SCORE_NAMES = ("score", "label", "similarity")  # the benchmark's file, GLUE on the hub, others
SENTENCES = ("sentence1", "sentence2")
FEWEST = 3  # pairs that have a rank correlation worth the name
Q2D = Direction.Q2D
BLOCK = 256  # pairs whose scores are the diagonal of one call of the similarity
Array = NDArray[Any]
Json = dict[str, Any]
Vectors = tuple[Tensor, Tensor]  # raw embeddings [P, D] of sentence1 and of sentence2


@dataclass
class StsPairs:
    """P sentence pairs in the file's order with their scores [P], and ``notes`` for the user."""

    path: str
    first: list[str]
    second: list[str]
    scores: Array
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.first)

    @functools.cached_property
    def groups(self) -> Array:
        """[P] int64, equal for pairs that a chain of shared sentences connects; drawn and split together."""
        return sentence_groups(self.first, self.second)

    @property
    def sentences(self) -> set[str]:
        """Sentences as they are compared with others."""
        return set(map(same_sentence, self.first + self.second))

    @property
    def top(self) -> float:
        """Divisor of scores to labels: the top of the range that they seem to be of.

        >>> [StsPairs("", ["a"], ["b"], np.array([x])).top for x in (0.8, 4.2, 10.0)]
        [1.0, 5.0, 10.0]
        """
        top = float(np.max(np.abs(self.scores)))
        return next((limit for limit in (1.0, 5.0) if top <= limit), top)

    def take(self, rows: Array, what: str) -> StsPairs:
        """The pairs of some rows, checked; ``what`` names them."""
        first, second = ([side[i] for i in rows] for side in (self.first, self.second))
        return StsPairs(self.path, first, second, self.scores[rows]).checked(what)

    def checked(self, what: str) -> StsPairs:
        """Itself; UserError where there is no order: fewer than 3 pairs, or one score for all."""
        if len(self) < FEWEST:
            raise UserError(f"{what}: {len(self)} pair{'s' * (len(self) != 1)}; at least {FEWEST} are needed")
        if np.ptp(self.scores) == 0:
            raise UserError(f"{what}: all {len(self)} scores are {self.scores[0]:g}: there is no order to find")
        return self

    def fingerprint(self) -> str:
        """16 hex digits of sentences and scores."""
        digest = hashlib.sha256(json.dumps([self.first, self.second]).encode())
        digest.update(self.scores.astype("<f8").tobytes())
        return digest.hexdigest()[:16]


def open_sts(path: str | Path) -> StsPairs:
    """Read a .csv, or tab-separated lines; the header names the columns in any order, others are ignored.

    A tab-separated file has no quoting: a sentence may begin with a quote mark. In a .csv quote marks are syntax.
    UserError names the file and the line.
    """
    path = Path(path)
    rows = _csv_rows(path) if path.suffix.lower() == ".csv" else ((n, x.split("\t")) for n, x in read_lines(path))
    number, header = next(rows, (1, []))
    names = [c.strip().lower() for c in header]
    columns = [[i for i, n in enumerate(names) if n in some] for some in (SCORE_NAMES, *((s,) for s in SENTENCES))]
    if any(len(places) != 1 for places in columns):
        raise UserError(
            f"{printable(path)}: line {number}: a header with one column of each of {SCORE_NAMES[0]} (or "
            f"{', '.join(SCORE_NAMES[1:])}), {', '.join(SENTENCES)} was expected, got "
            f"{printable(', '.join(header) or 'nothing', 120)}"
        )
    texts: list[list[str]] = []
    scores: list[float] = []
    for number, cells in rows:
        where = f"{printable(path)}: line {number}"
        if len(cells) != len(header):
            raise UserError(
                f"{where}: {len(header)} columns were expected, as in the header, got {len(cells)}: "
                f"{printable(' | '.join(cells), 80)}"
            )
        value, *sentences = (cells[place] for (place,) in columns)
        try:
            scores.append(float(value))
        except ValueError:
            scores.append(math.nan)
        if not math.isfinite(scores[-1]):
            raise UserError(f"{where}: the score is a number, got {printable(value, 60)!r}")
        texts.append([s.strip() for s in sentences])
    first, second = ([pair[i] for pair in texts] for i in range(2))
    pairs = StsPairs(str(path), first, second, np.array(scores, dtype=np.float64)).checked(printable(path))
    if empty := sum(not s for s in first + second):
        pairs.notes.append(f"{empty} empty sentence{'s' * (empty > 1)} in {printable(path)}, scored like all others")
    return pairs


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(first line of a record, its cells)."""
    numbers: list[int] = []  # of a record's lines

    def lines() -> Iterator[str]:
        for number, line in read_lines(path):
            numbers.append(number)
            yield line + "\n"

    try:
        for cells in csv.reader(lines(), strict=True):
            yield numbers[0], cells
            numbers.clear()
    except csv.Error as error:
        raise UserError(f"{printable(path)}: line {numbers[-1]}: not CSV: {printable(error, 120)}") from None


def sentence_groups(first: list[str], second: list[str]) -> Array:
    """Group of each pair, [P]: those that share a sentence, but for case and spaces, are in one.

    >>> sentence_groups(["a", "c", "E"], ["b", "d", "B"]).tolist()
    [0, 1, 0]
    """
    number: dict[str, int] = {}
    a, b = ([number.setdefault(same_sentence(s), len(number)) for s in side] for side in (first, second))
    graph = sparse.coo_array((np.ones(len(a)), (a, b)), shape=(len(number), len(number)))
    group: Array = sparse.csgraph.connected_components(graph, directed=False)[1][a]  # numbered as they first appear
    return group.astype(np.int64)


def same_sentence(sentence: str) -> str:
    """A sentence without case and repeated white space."""
    return " ".join(sentence.casefold().split())


def split_pairs(pairs: StsPairs, share: float, seed: int) -> tuple[StsPairs, StsPairs]:
    """(train, held out), without a common sentence: whole groups are drawn until ``share`` of the pairs is held out."""
    order = np.random.default_rng(seed).permutation(pairs.groups.max() + 1)
    sizes = np.bincount(pairs.groups)[order]
    enough = int(np.searchsorted(np.cumsum(sizes), share * len(pairs))) + 1
    held = np.isin(pairs.groups, order[:enough])
    what = f"--holdout {share:g} of {printable(pairs.path)}:"
    return pairs.take(np.flatnonzero(~held), f"{what} to train on"), pairs.take(
        np.flatnonzero(held), f"{what} held out"
    )


def without_sentences_of(pairs: StsPairs, others: StsPairs) -> StsPairs:
    """The pairs that share no sentence with the pairs of another file (UserError as for ``split_pairs``)."""
    known = others.sentences
    both = zip(map(same_sentence, pairs.first), map(same_sentence, pairs.second), strict=True)
    rows = np.flatnonzero([known.isdisjoint(two) for two in both])
    kept = pairs.take(rows, f"{printable(pairs.path)} without the sentences of {printable(others.path)}")
    if left := len(pairs) - len(kept):
        kept.notes.append(f"{left} training pairs left out: a sentence of theirs is in {printable(others.path)}")
    return kept


def pair_scores(query: Tensor, document: Tensor, exponents: Exponents, scale: float | Tensor = 1.0) -> Tensor:
    """s(q, d) of each query with the document of its own row: raw [P, D] twice -> [P], with gradients."""
    blocks = zip(query.split(BLOCK), document.split(BLOCK), strict=True)
    return torch.cat([score(q, d, exponents, scale).diagonal() for q, d in blocks])


def spearman(x: Array, y: Array) -> float | None:
    """Rank correlation of [P] with [P]; None where one of them is constant."""
    return None if np.ptp(x) == 0 or np.ptp(y) == 0 else float(stats.spearmanr(x, y).statistic)


class PairBootstrap:
    """Spearman with gold scores [P] over bootstrap samples of groups of pairs [P], the same samples for all scorings.

    A sample has all pairs of each drawn group and is ranked anew; a pair that was drawn n times is n tied pairs.
    """

    def __init__(self, gold: Array, groups: Array, *, resamples: int = metrics.RESAMPLES, seed: int = 0) -> None:
        names, member = np.unique(groups, return_inverse=True)
        self.gold, self.resamples, self.seed, self.several = gold, resamples, seed, len(names) > 1
        draws = metrics.cluster_counts(len(names), resamples=resamples, seed=seed)
        self.times = [times[:, member] for times in draws]  # chunks [b, P]: how often each pair is in a sample
        self._ranked = [_centred_ranks(gold, times) for times in self.times]

    def samples(self, scores: Array) -> Array:
        """[resamples], NaN where the correlation does not exist."""
        chunks = zip(self.times, self._ranked, strict=True)
        return np.concatenate([(t * gold * _centred_ranks(scores, t)).sum(axis=1) for t, gold in chunks])

    def interval(self, samples: Array) -> list[float] | None:
        """[lo, hi]; None of a single group, or where too few samples have a value."""
        bounds = metrics.finite_interval(samples) if self.several else None
        return None if bounds is None else list(bounds)


def _centred_ranks(x: Array, times: Array) -> Array:
    """Ranks [b, P] of x [P] in samples with each value times [b, P] often, of mean 0 and norm 1 (NaN: one value).

    >>> _centred_ranks(np.array([1.0, 9.0, 2.0]), np.array([[1.0, 1.0, 0.0]])).round(2)[0, :2]
    array([-0.71,  0.71])
    """
    _, first, inverse = np.unique(np.sort(x), return_index=True, return_inverse=True)
    order = np.argsort(x, kind="stable")
    held = np.add.reduceat(times[:, order], first, axis=1)  # [b, distinct values]
    ranks = np.empty_like(times)
    ranks[:, order] = (np.cumsum(held, axis=1) - held / 2)[:, inverse]
    ranks -= (times * ranks).sum(axis=1, keepdims=True) / times.sum(axis=1, keepdims=True)
    squares = (times * ranks**2).sum(axis=1, keepdims=True)
    return ranks / np.sqrt(np.where(squares > TINY, squares, np.nan))


def evaluate_sts(vectors: Vectors, native: Exponents, bootstrap: PairBootstrap) -> tuple[Json, dict[str, Array]]:
    """Measure how each scoring orders the pairs, against the gold scores of ``bootstrap``.

    Returns:
        (numbers, scores [P] by scoring). Of each scoring: Spearman and Pearson with the gold scores, Spearman's
        interval and its paired difference to cosine; "symmetry", the rank correlation of s(a, b) with s(b, a), 1 where
        the sides do not matter; "exchanged", Spearman of s(b, a). "lengths": norms of both sides.
    """
    first, second = vectors
    gold, scores, samples = bootstrap.gold, {}, {}
    report: dict[str, Json] = {}
    for name, exponents in ({n.value: n.exponents for n in FIXED_NORMALIZATIONS} | {NATIVE: native}).items():
        forward, back = (_numbers(pair_scores(*s, exponents)) for s in ((first, second), (second, first)))
        scores[name], samples[name], value = forward, bootstrap.samples(forward), spearman(forward, gold)
        numbers: Json = {"spearman": value, "ci": bootstrap.interval(samples[name])}
        numbers["pearson"] = None if value is None else float(stats.pearsonr(forward, gold).statistic)
        cosine = None if name == "cosine" or value is None else report["cosine"]["spearman"]
        ci = bootstrap.interval(samples[name] - samples["cosine"])
        numbers["minus_cosine"] = None if cosine is None else {"delta": value - cosine, "ci": ci}
        report[name] = numbers | {"symmetry": spearman(forward, back), "exchanged": spearman(back, gold)}
    sides = {"sentence1": first, "sentence2": second, "both": torch.cat([first, second])}
    norms = {side: summary(_numbers(magnitude(x))) for side, x in sides.items()}
    cosines = {k: summary(scores["cosine"])[k] for k in ("mean", "std")}
    return {"n_pairs": len(gold), "scorings": report, "lengths": norms, "cosines": cosines}, scores


def _numbers(x: Tensor) -> Array:
    return x.detach().cpu().double().numpy()


class RoleMSELoss(nn.Module):
    """Squared error of the role similarity, for SentenceTransformerTrainer with two columns and a label from 0 to 1.

    Args:
        model: A SentenceTransformer of raw vectors; a final Normalize module is a ValueError but for cosine.
        norm: One of the five; learned trains both gammas (with a learning rate of their own, if you can).
        scale: alpha; None: 1 for cosine, whose scores lie in -1 to 1, else 0.01, the paper's; "auto": set by the first
            batch so that the effective scale, alpha times the mean norms that are kept, is ``effective_scale``.
    """

    def __init__(
        self,
        model: Any,
        norm: Normalization | str = Normalization.COSINE,
        scale: float | str | None = None,
        effective_scale: float = 1.0,
        gamma_init: float = 0.5,
    ) -> None:
        super().__init__()
        norm = Normalization(norm)
        if scale is None:
            scale = 1.0 if norm is Normalization.COSINE else PAPER_SCALE
        if scale != AUTO and (isinstance(scale, str) or not 0 < scale < math.inf):
            raise ValueError(f"scale {printable(scale, 60)!r} is neither a number above 0 nor {AUTO!r}")
        if norm is not Normalization.COSINE and type(model[len(model) - 1]).__name__ == "Normalize":
            raise ValueError(f"norm {norm.value!r} needs raw vectors: take the model's final Normalize module off")
        self.model, self.requested_scale = model, scale
        least = most = effective_scale
        self.similarity = Similarity(norm, (Q2D,), least, most, gamma_init, learn_scale=False)
        if not isinstance(scale, str):
            self.similarity.logit_scale(Q2D).fill_(math.log(scale))

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        query, document = (self.model(features)["sentence_embedding"] for features in sentence_features)
        return self.of_vectors(query, document, labels)

    def of_vectors(self, query: Tensor, document: Tensor, labels: Tensor) -> Tensor:
        """The loss of raw vectors [B, D] with labels [B], 0-d."""
        if self.requested_scale == AUTO and self.training and not self.similarity.has_norm_stats(Q2D):
            self.similarity.update_norm_stats(Q2D, magnitude(query), magnitude(document))
        s = pair_scores(query, document, self.similarity.exponents, self.similarity.scale(Q2D))
        return nn.functional.mse_loss(s, labels.to(s))

    @property
    def alpha(self) -> float:
        return float(self.similarity.scale(Q2D))

    def get_config_dict(self) -> dict[str, Any]:
        """Settings for a model card."""
        similarity = self.similarity
        return {"norm": similarity.norm.value, "scale": self.requested_scale, "effective_scale": similarity.scale_init}


class ResidualHead(nn.Module):
    """x + f(x) on raw vectors [N, D], f of one hidden layer, with zeros in its last: at first it changes nothing."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        for parameter in self.layers[2].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)

    @torch.no_grad()
    def transform(self, vectors: Vectors) -> Vectors:
        """Vectors of both sides through the head, by way of float32, in the precision that they came in."""
        first, second = vectors
        return self(first.float()).to(first), self(second.float()).to(second)


def train_pairs(
    model: TextEncoder, norm: str, pairs: StsPairs, settings: StsConfig, seed: int, vectors: Vectors | None = None
) -> tuple[RoleMSELoss, ResidualHead | None, list[float]]:
    """Train a model in place, or with ``vectors`` a head on them, on batches drawn by ``seed``, equal for all norms.

    Returns (loss, head or None, loss of every step); UserError where the loss is not finite.
    """
    encoder = model.encoder
    total = settings.epochs * math.ceil(len(pairs) / settings.batch_size)
    warmup = warmup_steps(settings.warmup, total)
    device = encoder.device
    labels = torch.tensor(pairs.scores / pairs.top, dtype=torch.float32, device=device)
    order = torch.Generator().manual_seed(seed)
    history: list[float] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)  # the head, dropout
        head = None if vectors is None else ResidualHead(model.dim).to(device)
        loss = RoleMSELoss(encoder, norm, settings.scale, settings.effective_scale, settings.gamma_init).to(device)
        parameters = [p for p in (head or encoder).parameters() if p.requires_grad]
        groups = (
            ([p for p in parameters if p.ndim > 1], settings.lr, settings.wd),
            ([p for p in parameters if p.ndim < 2], settings.lr, 0.0),
            ([p for p in loss.similarity.parameters() if p.requires_grad], settings.gamma_lr, 0.0),
        )
        optimizer = torch.optim.AdamW(
            [{"params": p, "lr": lr, "peak_lr": lr, "weight_decay": wd} for p, lr, wd in groups if p]
        )
        loss.train()
        for _ in range(settings.epochs):
            for rows in torch.randperm(len(pairs), generator=order).split(settings.batch_size):
                set_learning_rate(optimizer, cosine_factor(len(history), warmup, total))
                goal = labels[rows.to(device)]
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=model.precision != "fp32"):
                    if head is None or vectors is None:
                        value = loss(_inputs(model, pairs, rows.tolist()), goal)
                    else:
                        query, document = (head(v[rows].to(labels)) for v in vectors)
                        value = loss.of_vectors(query, document, goal)
                if not value.isfinite():
                    raise UserError(f"--norms {norm}: the loss is not finite at step {len(history)}; a smaller --lr?")
                optimizer.zero_grad(set_to_none=True)
                value.backward()
                optimizer.step()
                history.append(value.item())
    loss.eval()
    return loss, head, history


def _inputs(model: TextEncoder, pairs: StsPairs, rows: list[int]) -> Iterator[dict[str, Any]]:
    """Tokens of both sides of some pairs on the model's device."""
    for role, side in zip(ROLES, (pairs.first, pairs.second), strict=True):
        tokens = model.tokens([side[i] for i in rows], role)
        yield {k: v.to(model.encoder.device) if isinstance(v, Tensor) else v for k, v in tokens.items()}


def print_sts(report: Json) -> None:
    """Print the untrained model's scorings and, where any were trained, each norm's native scores over its seeds."""
    data, before = report["data"], report["untrained"]
    head = f"{printable(report['model'], 80)} on {data['n_pairs']} pairs of {printable(data['path'], 120)}"
    columns = ["scoring", "Spearman", "less\ncosine", "Pearson", "s(a,b) with\ns(b,a)", "Spearman\nexchanged"]
    rows = []
    for name, numbers in before["scorings"].items():
        cells = [rate_cell(numbers["spearman"], numbers["ci"]), change_cell(numbers["minus_cosine"])]
        rows.append((name, cells + [rate_cell(numbers[k]) for k in ("pearson", "symmetry", "exchanged")]))
    norms = ", ".join(
        f"{side} {NO if s['mean'] is None else format(s['mean'], '.2f')} (CV {rate_cell(s['cv']).text})"
        for side, s in before["lengths"].items()
    )
    show([Table(head, columns, rows, [f"norms: {norms}"])])
    if "norms" not in report:
        return
    seeds = len(report["settings"]["seeds"])
    head = f"trained on {report['train']['n_pairs']} pairs, {seeds} seed{'s' * (seeds > 1)}; "
    columns = ["norm", "native\nSpearman", "less\ncosine's", "less\ndot's", "less\nuntrained", "by its\ncosine"]
    rows = []
    for norm, numbers in report["norms"].items():
        native = numbers["native"]
        scales = [run["effective_scale"] for run in report["runs"] if run["norm"] == norm]
        start, end = (sum(s[when] for s in scales) / len(scales) for when in ("start", "end"))
        less = [change_cell(native["minus"].get(k)) for k in ("native of cosine", "native of dot", "untrained")]
        cells = [rate_cell(native["spearman"], native["ci"]), *less, rate_cell(numbers["cosine"]["spearman"])]
        rows.append((norm, [*cells, Cell(f"{start:.3g}, {end:.3g}")]))
    show([Table(f"{head}label = {report['train']['label']}", [*columns, "scale at\nstart, end"], rows)])
