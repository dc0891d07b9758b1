"""Arms of a text study for tests: planted embeddings of two small collections, evaluated as every run is."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmclip.config import TextTrainConfig
from mmclip.data.beir import BeirCollection
from mmclip.evaluation.results import Results
from mmclip.similarity import Exponents, Normalization
from mmclip.study.arms import Arm
from tests.helpers.evaluating import evaluate_text

N, QUERIES, DIM = 90, 70, 12
INSIDE, OUTSIDE = "scifact-test", "cranfield-test"


def collection(name: str, queries: int = QUERIES) -> BeirCollection:
    """Each query has one relevant document, the first ones two queries; half of the documents answer nothing."""
    asked = np.arange(queries)
    return BeirCollection(
        path=name,
        split="test",
        query_ids=[f"q{i}" for i in asked],
        queries=[f"query {'word ' * (i % 4)}{i}" for i in asked],
        document_ids=[f"d{i}" for i in range(N)],
        documents=[f"document {'word ' * (i % 7)}{i}" for i in range(N)],
        titles=[""] * N,
        pairs=np.stack([asked, asked % (N // 3)], axis=1),
        gains=np.ones(queries),
    )


@functools.cache
def planted(name: str, n: int, seed: int, norm: str, noise: float, lengths: float, queries_vary: float) -> Results:
    """noise: of the queries' angles; lengths: how much longer a relevant document is; queries_vary: spread of the
    queries' lengths."""
    data = collection(name, n)
    same = torch.Generator().manual_seed(5)
    gen = torch.Generator().manual_seed(100 * seed + 7)
    document = torch.nn.functional.normalize(torch.randn(N, DIM, generator=same), dim=1)
    right = torch.as_tensor(data.pairs[:, 1])
    query = document[right] + noise / DIM**0.5 * torch.randn(len(right), DIM, generator=same)
    query = query + 0.1 * torch.randn(query.shape, generator=gen)
    relevant = torch.zeros(N, 1)
    relevant[right] = 1.0
    document = document * (1 + 0.1 * torch.rand(N, 1, generator=gen) + lengths * relevant)
    query = query * (1 + queries_vary * torch.rand(len(query), 1, generator=gen))
    exponents = Exponents(0.4, 0.42) if norm == "learned" else Normalization(norm).exponents
    facts: dict[str, Any] = {
        "model": "planted",
        "seed": seed,
        "trained_with": {"task": "text", "loss": "q2d", "norm": norm, "q2d_weight": 1.0} | exponents._asdict(),
    }
    return evaluate_text(data, query, document, exponents, facts, resamples=40)


def settings(norm: str, **more: Any) -> TextTrainConfig:
    here = str(Path(__file__).parent)
    return TextTrainConfig(model=here, train_data=here, val_data=["a/scifact", "a/cranfield"], norm=norm, **more)


def arm(
    norm: str,
    seeds: Sequence[int] = (0, 1),
    noise: float = 2.0,
    lengths: float = 0.0,
    queries_vary: float = 0.2,
    outside: bool = True,
    starts: dict[int, Any] | None = None,
    **changes: Any,
) -> Arm:
    runs = {
        name: {s: planted(name, n, s, norm, noise, lengths, queries_vary) for s in seeds}
        for name, n in ((INSIDE, QUERIES), (OUTSIDE, QUERIES - 4))[: 2 if outside else 1]
    }
    values = settings(norm, **changes).to_dict()
    return Arm(f"q2d {norm}", values, runs, starts=starts or {}, seconds=dict.fromkeys(seeds, 9.5))


def family(lengths: float = 0.0, **more: Any) -> list[Arm]:
    """The five norms; those that keep the documents' length have ``lengths`` in it."""
    kept = {"dot": lengths, "qnorm": lengths, "learned": lengths}
    varied = {"dnorm": 0.8}
    return [
        arm(n, lengths=kept.get(n, 0.0), queries_vary=varied.get(n, 0.2), **more)
        for n in ("cosine", "dot", "qnorm", "dnorm", "learned")
    ]


def start(q2d: dict[str, Any], numbers: dict[str, float] | None = None, other: bool = False) -> dict[str, Any]:
    """A start.json."""
    told = dict.fromkeys(("ndcg@10", "recall@100", "mrr@10"), 0.25) | (numbers or {})
    scoring = told | {"ci": {m: [v - 0.05, v + 0.05] for m, v in told.items()}}
    retrieval = {"retrieval": {"q2d": {"cosine": scoring, "dot": scoring}}}
    more = {"evaluations": {OUTSIDE: retrieval}} if other else {}
    return {**retrieval, **more, "fisher": {"q2d": q2d}}


UNDETERMINED = {"status": "undetermined", "reason": "565 matched pairs, 1536 needed", "n_available": 565,
                "n_needed": 1536, "dim": 384}  # fmt: skip
