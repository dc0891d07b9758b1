"""Semantic textual similarity: pairs of sentences with a score, and how well each scoring orders them.

Two sentences of a pair have the same role, so a normalization that treats the sides differently has no reason to work
here (docs/symmetry.md). Nothing else is defined for it: sentence1 is the query, sentence2 the document of
mmclip.similarity, and, exchanged, the other way round. A pair is compared with other pairs and not with documents of
its own query, so the query's length counts, too: dnorm orders pairs by |q| cos, qnorm by |d| cos, dot by both.

Training on scored pairs with the paper's squared error, from the one similarity, and the split that it needs.

    loss = mean_i (s(q_i, d_i) - label_i)**2,   s(q, d) = alpha q . d / (|q|**gamma_q |d|**gamma_d)

(Feng & Watanabe 2026, which takes alpha = 0.01.) sentence1 is the query, sentence2 the document. alpha is never
trained: it is a number, or what brings the effective scale of the first batch to a given value.

What sts.py shows on a terminal.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text
from scipy import stats
from torch import Tensor, nn

from mmclip import metrics
from mmclip.config import StsConfig
from mmclip.config.text import AUTO, PAPER_SCALE
from mmclip.data.beir import read_lines
from mmclip.errors import UserError, printable
from mmclip.metrics.magnitude import summary
from mmclip.models.text_encoder import ROLES, TextEncoder
from mmclip.reporting.table import NO, Cell, Table, change_cell, make_console, rate_cell, show
from mmclip.roles import FIXED_NORMALIZATIONS, Direction, Exponents, Normalization
from mmclip.similarity import TINY, Similarity, magnitude, score
from mmclip.training.optimizer import cosine_factor, set_learning_rate, warmup_steps

SCORE_NAMES = ("score", "label", "similarity")  # the benchmark's file, GLUE on the hub, others
SENTENCES = ("sentence1", "sentence2")
FEWEST = 3  # pairs that have a rank correlation worth the name
NATIVE = "native"
BLOCK = 256  # pairs whose scores are the diagonal of one call of the similarity
Array = NDArray[Any]
Json = dict[str, Any]
Vectors = tuple[Tensor, Tensor]  # raw vectors [P, D] of sentence1 and of sentence2


@dataclass
class StsPairs:
    """P pairs in the file's order: ``first`` and ``second`` sentences, ``scores`` [P] as the file has them.

    groups [P]   int64, equal for pairs that a chain of shared sentences connects; they are drawn and split together
    notes        what a person should know
    """

    path: str
    first: list[str]
    second: list[str]
    scores: Array
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.groups = sentence_groups(self.first, self.second)

    def __len__(self) -> int:
        return len(self.first)

    def take(self, rows: Array) -> StsPairs:
        """The pairs of some rows."""
        return StsPairs(self.path, [self.first[i] for i in rows], [self.second[i] for i in rows], self.scores[rows])

    def fingerprint(self) -> str:
        """16 hex digits of sentences and scores."""
        digest = hashlib.sha256(json.dumps([self.first, self.second]).encode())
        digest.update(self.scores.astype("<f8").tobytes())
        return digest.hexdigest()[:16]


def open_sts(path: str | Path) -> StsPairs:
    """Read a .csv, or tab-separated lines; the header names the columns, in any order, and others are not read.

    A tab-separated file has no quoting: a sentence may begin with a quote mark. In a .csv quote marks are syntax.
    Errors: UserError naming the file and the line.
    """
    path = Path(path)
    rows = _csv_rows(path) if path.suffix.lower() == ".csv" else ((n, x.split("\t")) for n, x in read_lines(path))
    number, header = next(rows, (1, []))
    names = [c.strip().lower() for c in header]
    column = {}
    for wanted in (SCORE_NAMES, *((s,) for s in SENTENCES)):
        found = [i for i, name in enumerate(names) if name in wanted]
        if len(found) != 1:
            raise UserError(f"{printable(path)}: line {number}: a header with one column of each of {SCORE_NAMES[0]} "
                             f"(or {', '.join(SCORE_NAMES[1:])}), {', '.join(SENTENCES)} was expected, got "
                             f"{printable(', '.join(header) or 'nothing', 120)}")  # fmt: skip
        column[wanted[0]] = found[0]
    first, second, scores = [], [], []
    for number, cells in rows:
        where = f"{printable(path)}: line {number}"
        if len(cells) != len(header):
            raise UserError(f"{where}: {len(header)} columns were expected, as in the header, got {len(cells)}: "
                             f"{printable(' | '.join(cells), 80)}")  # fmt: skip
        text = cells[column[SCORE_NAMES[0]]]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UserError(f"{where}: the score is a number, got {printable(text, 60)!r}")
        scores.append(value)
        first.append(cells[column["sentence1"]].strip())
        second.append(cells[column["sentence2"]].strip())
    pairs = StsPairs(str(path), first, second, np.array(scores, dtype=np.float64))
    require_order(pairs, printable(path))
    if empty := sum(not s for s in first + second):
        pairs.notes.append(f"{empty} empty sentence{'s' * (empty > 1)} in {printable(path)}, scored like all others")
    return pairs


def require_order(pairs: StsPairs, what: str) -> None:
    """Errors: UserError where there is nothing to order: fewer than 3 pairs, or one score for all."""
    if len(pairs) < FEWEST:
        raise UserError(f"{what}: {len(pairs)} pair{'s' * (len(pairs) != 1)}; at least {FEWEST} are needed")
    if np.ptp(pairs.scores) == 0:
        raise UserError(f"{what}: all {len(pairs)} scores are {pairs.scores[0]:g}: there is no order to find")


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line that a record begins in, cells)."""
    number = 0

    def lines() -> Iterator[str]:
        nonlocal number
        for at, line in read_lines(path):
            number = at
            yield line + "\n"

    reader = csv.reader(lines(), strict=True)
    while True:
        before = reader.line_num
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise UserError(f"{printable(path)}: line {number}: not CSV: {printable(error, 120)}") from None
        if cells is None:
            return
        yield number - (reader.line_num - before - 1), cells


def sentence_groups(first: list[str], second: list[str]) -> Array:
    """Group of each pair, [P] int64: pairs that share a sentence (but for case and spaces) are in one group.

    >>> sentence_groups(["a", "c", "E"], ["b", "d", "B"]).tolist()
    [0, 1, 0]
    """
    parent: dict[str, str] = {}

    def root(sentence: str) -> str:
        while parent.setdefault(sentence, sentence) != sentence:
            parent[sentence] = sentence = parent[parent[sentence]]
        return sentence

    ends = [(same_sentence(a), same_sentence(b)) for a, b in zip(first, second, strict=True)]
    for a, b in ends:
        parent[root(b)] = root(a)
    number: dict[str, int] = {}
    return np.array([number.setdefault(root(a), len(number)) for a, _ in ends], dtype=np.int64)


def same_sentence(sentence: str) -> str:
    """What two sentences that count as one have in common."""
    return " ".join(sentence.casefold().split())


def pair_scores(query: Tensor, document: Tensor, exponents: Exponents, scale: float | Tensor = 1.0) -> Tensor:
    """s(q, d) of each query with the document of its own row: raw [P, D] twice -> [P], with gradients.

    It is the diagonal of mmclip.similarity.score, block by block.
    """
    blocks = zip(query.split(BLOCK), document.split(BLOCK), strict=True)
    return torch.cat([score(q, d, exponents, scale).diagonal() for q, d in blocks])


def spearman(x: Array, y: Array) -> float | None:
    """Rank correlation of [P] with [P]; None where one of them is constant."""
    return None if np.ptp(x) == 0 or np.ptp(y) == 0 else float(stats.spearmanr(x, y).statistic)


class PairBootstrap:
    """Spearman with gold scores [P] over bootstrap samples of groups of pairs [P], the same samples for all scorings.

    A sample draws as many groups as there are, with replacement, takes all pairs of each (metrics.cluster_counts), and
    is ranked anew; a pair that was drawn n times is n tied pairs.
    """

    def __init__(self, gold: Array, groups: Array, *, resamples: int = metrics.RESAMPLES, seed: int = 0) -> None:
        names, member = np.unique(groups, return_inverse=True)
        self.resamples, self.seed, self.several = resamples, seed, len(names) > 1
        draws = metrics.cluster_counts(len(names), resamples=resamples, seed=seed)
        self.times = [times[:, member] for times in draws]  # chunks [b, P]: how often each pair is in a sample
        self.gold = [_centred_ranks(gold, times) for times in self.times]

    def samples(self, scores: Array) -> Array:
        """[resamples], NaN where the correlation does not exist."""
        return np.concatenate([
            (times * gold * _centred_ranks(scores, times)).sum(axis=1)
            for times, gold in zip(self.times, self.gold, strict=True)
        ])  # fmt: skip

    def interval(self, samples: Array) -> list[float] | None:
        """[lo, hi]; None of a single group, or where too few samples have a value."""
        bounds = metrics.finite_interval(samples) if self.several else None
        return None if bounds is None else list(bounds)


def _centred_ranks(x: Array, times: Array) -> Array:
    """Ranks of x [P] in samples that hold each value times [b, P] often, ties sharing their mean: [b, P], in each
    sample of mean 0 and length 1; NaN where all values of a sample are one.

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


def scorings(native: Exponents) -> dict[str, Exponents]:
    """Every scoring by its name: the four fixed ones, and native, a model's own."""
    return {n.value: n.exponents for n in FIXED_NORMALIZATIONS} | {NATIVE: native}


def evaluate_sts(
    first: Tensor, second: Tensor, gold: Array, native: Exponents, bootstrap: PairBootstrap
) -> tuple[Json, dict[str, Array]]:
    """(numbers, scores [P] by scoring) of raw vectors [P, D] of both sentences.

    Of each scoring: Spearman and Pearson with the gold scores, Spearman's interval and its paired difference to cosine;
    "symmetry", the rank correlation of s(a, b) with s(b, a), 1 where the sides do not matter; "exchanged", Spearman of
    s(b, a). Beside them the lengths of both sides, and mean and spread of the angles.
    """
    both = {n: [_numbers(pair_scores(*s, e)) for s in ((first, second), (second, first))]
            for n, e in scorings(native).items()}  # fmt: skip
    samples = {name: bootstrap.samples(forward) for name, (forward, _) in both.items()}
    found: dict[str, Json] = {}
    for name, (forward, back) in both.items():
        value = spearman(forward, gold)
        found[name] = {
            "spearman": value,
            "ci": bootstrap.interval(samples[name]),
            "pearson": None if value is None else float(stats.pearsonr(forward, gold).statistic),
            "minus_cosine": _difference(found, name, value, samples, bootstrap),
            "symmetry": spearman(forward, back),
            "exchanged": spearman(back, gold),
        }
    cosine = both["cosine"][0]
    lengths = {
        "sentence1": summary(_numbers(magnitude(first))),
        "sentence2": summary(_numbers(magnitude(second))),
        "both": summary(_numbers(magnitude(torch.cat([first, second])))),
    }
    angles = {"mean": float(cosine.mean()), "std": float(cosine.std(ddof=1))}
    report: Json = {"n_pairs": len(gold), "scorings": found, "lengths": lengths, "cosines": angles}
    return report, {name: forward for name, (forward, _) in both.items()}


def _difference(
    found: Mapping[str, Json], name: str, value: float | None, samples: Mapping[str, Array], bootstrap: PairBootstrap
) -> Json | None:
    """{"delta", "ci"}: Spearman of a scoring less cosine's, over the same samples."""
    if name == "cosine" or value is None or found["cosine"]["spearman"] is None:
        return None
    ci = bootstrap.interval(samples[name] - samples["cosine"])
    return {"delta": value - found["cosine"]["spearman"], "ci": ci}


def _numbers(x: Tensor) -> Array:
    return x.detach().cpu().double().numpy()


class RoleMSELoss(nn.Module):
    """Squared error of the role similarity: a loss for SentenceTransformerTrainer, on two columns and a label.

    model   a SentenceTransformer whose vectors are raw; a final Normalize module is refused but for cosine
    norm    one of the five; learned trains both gammas (give them a learning rate of their own, if you can)
    scale   alpha; None: 1 for cosine, whose scores lie in -1 to 1 as they are, else 0.01, the paper's; "auto": alpha is
            set on the first batch so that the effective scale, alpha times the mean lengths kept, is effective_scale

    Labels lie in 0 to 1 (a 0 to 5 score divided by 5). Errors: ValueError.
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
        number = math.inf if isinstance(scale, str) else scale
        if scale != AUTO and not 0 < number < math.inf:
            raise ValueError(f"scale {printable(scale, 60)!r} is neither a number above 0 nor {AUTO!r}")
        if norm is not Normalization.COSINE and type(model[len(model) - 1]).__name__ == "Normalize":
            raise ValueError(f"norm {norm.value!r} needs raw vectors: take the model's final Normalize module off")
        self.model = model
        self.asked = scale
        self.similarity = Similarity(norm, (Direction.Q2D,), effective_scale, effective_scale, gamma_init)
        logit_scale = self.similarity.logit_scale(Direction.Q2D).requires_grad_(False)
        if scale != AUTO:
            logit_scale.fill_(math.log(number))

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        query, document = (self.model(features)["sentence_embedding"] for features in sentence_features)
        return self.of_vectors(query, document, labels)

    def of_vectors(self, query: Tensor, document: Tensor, labels: Tensor) -> Tensor:
        """The loss of raw vectors [B, D] with labels [B], 0-d."""
        if self.asked == AUTO and self.training and not self.similarity.has_norm_stats(Direction.Q2D):
            self.similarity.update_norm_stats(Direction.Q2D, magnitude(query), magnitude(document))
        s = pair_scores(query, document, self.similarity.exponents, self.similarity.scale(Direction.Q2D))
        return nn.functional.mse_loss(s, labels.to(s))

    @property
    def alpha(self) -> float:
        return float(self.similarity.scale(Direction.Q2D))

    def get_config_dict(self) -> dict[str, Any]:
        """What a model card says of it."""
        return {"norm": self.similarity.norm.value, "scale": self.asked, "effective_scale": self.similarity.scale_init}


class ResidualHead(nn.Module):
    """x + f(x) on raw vectors [N, D], f of one hidden layer, with zeros in its last: at first it changes nothing.

    An encoder's final linear layer alone cannot set the length of a vector apart from its direction.
    """

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


def label_top(scores: Array) -> float:
    """What a file's scores are divided by to be labels: the top of the range that they seem to be of.

    >>> label_top(np.array([0.0, 0.8])), label_top(np.array([0.0, 4.2])), label_top(np.array([0.0, 10.0]))
    (1.0, 5.0, 10.0)
    """
    top = float(np.max(np.abs(scores)))
    return next((limit for limit in (1.0, 5.0) if top <= limit), top)


def split_pairs(pairs: StsPairs, share: float, seed: int) -> tuple[StsPairs, StsPairs]:
    """(train, held out): whole groups of pairs that share sentences, drawn until ``share`` of the pairs is held out.

    Errors: UserError where one of them has too few pairs, or no order.
    """
    order = np.random.default_rng(seed).permutation(pairs.groups.max() + 1)
    sizes = np.bincount(pairs.groups)[order]
    enough = int(np.searchsorted(np.cumsum(sizes), share * len(pairs))) + 1
    held = np.isin(pairs.groups, order[:enough])
    parts = pairs.take(np.flatnonzero(~held)), pairs.take(np.flatnonzero(held))
    for name, part in zip(("to train on", "held out"), parts, strict=True):
        require_order(part, f"--holdout {share:g} of {printable(pairs.path)}: {name}")
    return parts


def without_sentences_of(pairs: StsPairs, others: StsPairs) -> StsPairs:
    """The pairs that share no sentence with the pairs of another file."""
    known = {same_sentence(s) for s in others.first + others.second}
    rows = [i for i, two in enumerate(zip(pairs.first, pairs.second, strict=True))
            if not known & {same_sentence(s) for s in two}]  # fmt: skip
    kept = pairs.take(np.array(rows, dtype=np.int64))
    if left := len(pairs) - len(kept):
        kept.notes.append(f"{left} training pairs left out: a sentence of theirs is in {printable(others.path)}")
    require_order(kept, f"{printable(pairs.path)} without the sentences of {printable(others.path)}")
    return kept


def train_pairs(
    model: TextEncoder,
    norm: str,
    pairs: StsPairs,
    settings: StsConfig,
    seed: int,
    vectors: Vectors | None = None,
) -> tuple[RoleMSELoss, ResidualHead | None, list[float]]:
    """Train a model in place, on the batches that ``seed`` draws (the same for every norm): (loss, head, the loss of
    every step).

    vectors: raw [P, D] of both sides, where a head on them is trained instead of the model; else the head is None.
    Errors: UserError where the loss is not finite.
    """
    encoder = model.encoder
    total = settings.epochs * math.ceil(len(pairs) / settings.batch_size)
    warmup = warmup_steps(settings.warmup, total)
    device = encoder.device
    bf16 = model.precision != "fp32"
    labels = torch.tensor(pairs.scores / label_top(pairs.scores), dtype=torch.float32, device=device)
    order = torch.Generator().manual_seed(seed)
    history: list[float] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)  # the head, dropout
        head = None if vectors is None else ResidualHead(model.dim).to(device)
        loss = RoleMSELoss(encoder, norm, settings.scale, settings.effective_scale, settings.gamma_init).to(device)
        optimizer = _optimizer(encoder if head is None else head, loss, settings)
        loss.train()
        for _ in range(settings.epochs):
            for rows in torch.randperm(len(pairs), generator=order).split(settings.batch_size):
                set_learning_rate(optimizer, cosine_factor(len(history), warmup, total))
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
                    goal = labels[rows.to(device)]
                    if head is None or vectors is None:
                        value = loss(_features(model, pairs, rows.tolist()), goal)
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


def _optimizer(trained: nn.Module, loss: RoleMSELoss, settings: StsConfig) -> torch.optim.AdamW:
    """AdamW: decay on matrices alone, gamma with a learning rate of its own."""
    parameters = [p for p in trained.parameters() if p.requires_grad]
    gammas = [p for p in loss.similarity.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "peak_lr": settings.lr, "weight_decay": settings.wd},
        {"params": [p for p in parameters if p.ndim < 2], "peak_lr": settings.lr, "weight_decay": 0.0},
        {"params": gammas, "peak_lr": settings.gamma_lr, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([{**g, "lr": g["peak_lr"]} for g in groups if g["params"]])


def _features(model: TextEncoder, pairs: StsPairs, rows: list[int]) -> list[dict[str, Tensor]]:
    """Tokens of both sides of some pairs, cut and prompted by role as TextEncoder.encode does."""
    encoder, found = model.encoder, []
    own = encoder.max_seq_length
    for role, side in zip(ROLES, (pairs.first, pairs.second), strict=True):
        encoder.max_seq_length = model.length_of(role)
        tokens = encoder.preprocess([side[i] for i in rows], prompt=model.prompts.get(role) or None)
        found.append({k: v.to(encoder.device) if isinstance(v, Tensor) else v for k, v in tokens.items()})
    encoder.max_seq_length = own
    return found


def print_sts(report: Json, console: Console | None = None) -> None:
    """The untrained model's scorings and, where any were trained, each norm's native scores over its seeds."""
    console = console or make_console()
    data, before = report["data"], report["untrained"]
    head = f"{printable(report['model'], 80)} on {data['n_pairs']} pairs of {printable(data['path'], 120)}"
    columns = ["scoring", "Spearman", "less\ncosine", "Pearson", "s(a,b) with\ns(b,a)", "Spearman\nexchanged"]
    rows = [
        (name, [rate_cell(found["spearman"], found["ci"]), _change(found["minus_cosine"]),
                *(rate_cell(found[k]) for k in ("pearson", "symmetry", "exchanged"))])
        for name, found in before["scorings"].items()
    ]  # fmt: skip
    norms = ", ".join(
        f"{side} {NO if s['mean'] is None else format(s['mean'], '.2f')} (CV {rate_cell(s['cv']).text})"
        for side, s in before["lengths"].items()
    )
    show([Table(head, columns, rows, [f"norms: {norms}"])], console)
    if "norms" not in report:
        return
    seeds = len(report["settings"]["seeds"])
    console.print(Text(f"trained on {report['train']['n_pairs']} pairs, {seeds} seed{'s' * (seeds > 1)}; "
                       f"label = {report['train']['label']}"))  # fmt: skip
    columns = ["norm", "native\nSpearman", "less\ncosine's", "less\ndot's", "less\nuntrained", "by its\ncosine",
               "scale at\nstart, end"]  # fmt: skip
    rows = []
    for norm, found in report["norms"].items():
        native = found["native"]
        scales = [run["effective_scale"] for run in report["runs"] if run["norm"] == norm]
        ends = [sum(s[when] for s in scales) / len(scales) for when in ("start", "end")]
        less = [_change(native["minus"].get(k)) for k in ("native of cosine", "native of dot", "untrained")]
        cells = [rate_cell(native["spearman"], native["ci"]), *less, rate_cell(found["cosine"]["spearman"])]
        rows.append((norm, [*cells, Cell(f"{ends[0]:.3g}, {ends[1]:.3g}")]))
    show([Table("trained heads", columns, rows)], console)


def _change(found: Json | None) -> Cell:
    """{"delta", "ci"}: within noise where the interval holds 0."""
    if found is None or found["ci"] is None:
        return change_cell(found and {**found, "within_noise": True})
    return change_cell({**found, "within_noise": found["ci"][0] <= 0 <= found["ci"][1]})
