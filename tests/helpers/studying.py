"""Arms of a study for tests: planted embeddings, evaluated as every run is; seconds, no training."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from mmclip.config import StudyConfig, TextTrainConfig, TrainConfig
from mmclip.data.beir import BeirCollection
from mmclip.embeddings.files import Embeddings
from mmclip.evaluation.results import Results
from mmclip.retrieval.hubness import QueryBank
from mmclip.roles import LOSS_WEIGHTS
from mmclip.similarity import Direction, Exponents, Normalization
from mmclip.study.arms import Arm
from mmclip.study.plan import TEXT, StudyPlan, plan_study
from tests.helpers.evaluating import evaluate_clip, evaluate_text

ARMS = "arms:\n  - {loss: sym, norm: cosine}\n"
MATRICES = ("query_raw", "query_normalized", "document_raw", "document_normalized")
N, CAPTIONS, DIM = 60, 2, 16


def plan(folder: Path, text: str, **more: object) -> StudyPlan:
    """What a study's file of this text asks for, its runs in folder/logs."""
    file = folder / "study_tiny.yaml"
    file.write_text(text, encoding="utf-8")
    return plan_study(StudyConfig(config=str(file), logs=str(folder / "logs"), **more))  # type: ignore[arg-type]


def of(records: Sequence[dict[str, Any]], **values: Any) -> dict[str, Any]:
    """The one record with these values."""
    (row,) = [r for r in records if all(r[k] == v for k, v in values.items())]
    return row


# --- CLIP -------------------------------------------------------------------------------------------------------------


def planted_run(
    seed: int = 0,
    loss: str = "sym",
    norm: str = "cosine",
    noise: float = 0.9,
    lengths: float = 0.0,
    weight: float | None = None,
    permuted: bool = False,
    bank: bool = True,
) -> Results:
    """A run over pictures that come as twins, whose captions describe the first of each; all seeds and arms answer the
    same queries.

    noise: of the texts' angles, which the seed draws. lengths: how much longer the right twin is (and a text of less
    noise), what a magnitude may say. permuted: captions are of any picture, as a model of permuted pairs finds them.
    """
    same = torch.Generator().manual_seed(5)
    base = torch.randn(N // 2, DIM, generator=same).repeat_interleave(2, 0)
    image = normalize(base + 0.25 * torch.randn(N, DIM, generator=same), dim=1)
    gen = torch.Generator().manual_seed(100 * seed + 7)
    own = torch.arange(N // 2 * CAPTIONS) // CAPTIONS * 2
    text = image[own[torch.randperm(len(own), generator=gen)] if permuted else own]
    spread = torch.rand(len(text), 1, generator=same) + 0.1
    text = normalize(text + noise / DIM**0.5 * spread * torch.randn(text.shape, generator=gen), dim=1)
    jitter = [1 + 0.05 * torch.randn(n, 1, generator=gen) for n in (len(image), len(text))]
    image = image * jitter[0] * (1 + lengths * (torch.arange(N) % 2 == 0).float()[:, None])
    text = text * jitter[1] * (1 + lengths * (0.6 - spread))
    weight = LOSS_WEIGHTS[loss] if weight is None else weight
    exponents = Exponents(0.5, 0.5) if norm == "learned" else Normalization(norm).exponents
    trained = {"loss": loss, "norm": norm, "i2t_weight": weight} | exponents._asdict()
    facts = {"model": "planted", "seed": seed, "trained_with": trained, "data": {"path": "planted", "split": "val"}}
    scales = {d: 14.0 for d, w in ((Direction.I2T, weight), (Direction.T2I, 1 - weight)) if w > 0}
    keys, captions = [f"k{i}" for i in range(N)], [f"caption {t}" for t in range(len(own))]
    data = Embeddings(image, text, torch.stack([own, torch.arange(len(own))], 1), keys, captions)
    evidence = QueryBank("train", {"text": text[::2], "image": image[::2]}) if bank else None
    return evaluate_clip(data, exponents, facts, resamples=20, scales=scales, bank=evidence)


def planted_arm(
    name: str | None = None,
    loss: str = "sym",
    norm: str = "cosine",
    seeds: Sequence[int] = (0, 1),
    initial: str | None = None,
    starts: dict[int, dict[str, Any]] | None = None,
    logs: bool = True,
    **run: Any,
) -> Arm:
    """An arm of planted runs. Keywords that a planted run does not have are settings."""
    changes = {k: run.pop(k) for k in list(run) if k in TrainConfig.flags}
    weight = run.get("weight") if loss == "sym" else None
    settings = TrainConfig(loss=loss, norm=norm, i2t_weight=weight, **changes)
    if changes.get("permute_pairs") and "permuted" not in run:
        run["permuted"] = True
    runs = {seed: planted_run(seed, loss, norm, **run) for seed in seeds}
    moves = norm == "learned"
    lines = [{"step": s, "gamma_q": 0.5 + moves * s / 100, "gamma_d": 0.5 - moves * s / 100} for s in (10, 20, 30)]
    kept = dict.fromkeys(seeds, lines) if logs else {}
    return Arm(name or f"{loss} {norm}", settings.to_dict(), {"": runs}, kept, starts or {}, initial)


def nulls(*arms: tuple[str, str, str]) -> list[Arm]:
    """Arms (name, loss, norm) that were trained on permuted pairs."""
    return [planted_arm(*arm, permute_pairs=True) for arm in arms]


def kappa_section(kappas: Sequence[float], **more: Any) -> dict[str, Any]:
    """log10 κ of query raw, query normalized, document raw, document normalized."""
    matrices = {
        n: {"log10_kappa": {"value": k, "ci": [k - 0.1, k + 0.1]}} for n, k in zip(MATRICES, kappas, strict=True)
    }
    return {"status": "determined", **matrices, **more}


def start(kappas: Sequence[float], before: float | None = None) -> dict[str, Any]:
    """A start.json of κ and zero-shot accuracy."""
    result: dict[str, Any] = {"fisher": dict.fromkeys(("i2t", "t2i"), kappa_section(kappas))}
    return result | ({"zero_shot": {"acc1": {"native": before, "cosine": before}}} if before is not None else {})


# --- text -------------------------------------------------------------------------------------------------------------

INSIDE, OUTSIDE = "scifact-test", "cranfield-test"
DOCUMENTS, QUERIES, TEXT_DIM = 90, 70, 12
UNDETERMINED = {"status": "undetermined", "reason": "565 matched pairs, 1536 needed"}
UNDETERMINED |= {"n_available": 565, "n_needed": 1536, "dim": 384}  # type: ignore[dict-item]


def collection(name: str, queries: int = QUERIES) -> BeirCollection:
    """Each query has one relevant document, the first ones two queries; half of the documents answer nothing."""
    rows = np.arange(queries)
    return BeirCollection(
        path=name,
        split="test",
        query_ids=[f"q{i}" for i in rows],
        queries=[f"query {'word ' * (i % 4)}{i}" for i in rows],
        document_ids=[f"d{i}" for i in range(DOCUMENTS)],
        documents=[f"document {'word ' * (i % 7)}{i}" for i in range(DOCUMENTS)],
        titles=[""] * DOCUMENTS,
        pairs=np.stack([rows, rows % (DOCUMENTS // 3)], axis=1),
        gains=np.ones(queries),
    )


@functools.cache
def planted_text(
    name: str, seed: int, norm: str, noise: float = 2.0, lengths: float = 0.0, queries_vary: float = 0.2
) -> Results:
    """noise: of the queries' angles; lengths: how much longer a relevant document is; queries_vary: spread of the
    queries' norms."""
    data = collection(name, QUERIES if name == INSIDE else QUERIES - 4)
    same, gen = torch.Generator().manual_seed(5), torch.Generator().manual_seed(100 * seed + 7)
    document = normalize(torch.randn(DOCUMENTS, TEXT_DIM, generator=same), dim=1)
    right = torch.as_tensor(data.pairs[:, 1])
    query = document[right] + noise / TEXT_DIM**0.5 * torch.randn(len(right), TEXT_DIM, generator=same)
    query = query + 0.1 * torch.randn(query.shape, generator=gen)
    relevant = torch.zeros(DOCUMENTS, 1)
    relevant[right] = 1.0
    document = document * (1 + 0.1 * torch.rand(DOCUMENTS, 1, generator=gen) + lengths * relevant)
    query = query * (1 + queries_vary * torch.rand(len(query), 1, generator=gen))
    exponents = Exponents(0.4, 0.42) if norm == "learned" else Normalization(norm).exponents
    trained = {"task": "text", "loss": "q2d", "norm": norm, "q2d_weight": 1.0} | exponents._asdict()
    facts = {"model": "planted", "seed": seed, "trained_with": trained}
    return evaluate_text(data, query, document, exponents, facts, resamples=40)


def text_settings(norm: str, **more: Any) -> dict[str, Any]:
    here = str(Path(__file__).parent)
    config = TextTrainConfig(model=here, train_data=here, val_data=["a/scifact", "a/cranfield"], norm=norm, **more)
    return config.to_dict()


def text_arm(norm: str, seeds: Sequence[int] = (0, 1), outside: bool = True, starts: Any = None, **more: Any) -> Arm:
    """An arm of planted runs. Keywords that a planted run does not have are settings."""
    changes = {k: more.pop(k) for k in list(more) if k in TEXT.config.flags}
    runs = {d: {s: planted_text(d, s, norm, **more) for s in seeds} for d in (INSIDE, OUTSIDE)[: 1 + outside]}
    values = text_settings(norm, **changes)
    return Arm(f"q2d {norm}", values, runs, starts=starts or {}, seconds=dict.fromkeys(seeds, 9.5))


def text_family(lengths: float = 0.0, **more: Any) -> list[Arm]:
    """The five norms; those that keep the documents' norm have ``lengths`` in it."""
    varied = {"cosine": {}, "dot": {"lengths": lengths}, "qnorm": {"lengths": lengths}, "dnorm": {"queries_vary": 0.8}}
    return [text_arm(n, **v, **more) for n, v in (varied | {"learned": {"lengths": lengths}}).items()]


def text_start(q2d: dict[str, Any], numbers: dict[str, float] | None = None, other: bool = False) -> dict[str, Any]:
    """A start.json."""
    rates = dict.fromkeys(TEXT.metrics, 0.25) | (numbers or {})
    scoring = rates | {"ci": {m: [v - 0.05, v + 0.05] for m, v in rates.items()}}
    retrieval = {"retrieval": {"q2d": {"cosine": scoring, "dot": scoring}}}
    return {**retrieval, **({"evaluations": {OUTSIDE: retrieval}} if other else {}), "fisher": {"q2d": q2d}}
