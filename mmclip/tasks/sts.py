"""Semantic textual similarity: pairs of sentences with a score, and how well each scoring orders them.

Two sentences of a pair have the same role, so a normalization that treats the sides differently has no reason to work
here (docs/symmetry.md). Nothing else is defined for it: sentence1 is the query, sentence2 the document of
mmclip.similarity, and, exchanged, the other way round. A pair is compared with other pairs and not with documents of
its own query, so the query's length counts, too: dnorm orders pairs by |q| cos, qnorm by |d| cos, dot by both.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from mmclip import metrics
from mmclip.data.beir import read_lines
from mmclip.errors import UserError, printable
from mmclip.metrics.magnitude import summary
from mmclip.similarity import FIXED_NORMALIZATIONS, TINY, Exponents, magnitude, score

SCORE_NAMES = ("score", "label", "similarity")  # the benchmark's file, GLUE on the hub, others
SENTENCES = ("sentence1", "sentence2")
FEWEST = 3  # pairs that have a rank correlation worth the name
NATIVE = "native"
BLOCK = 256  # pairs whose scores are the diagonal of one call of the similarity

Array = NDArray[Any]
Json = dict[str, Any]


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
