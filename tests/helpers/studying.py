"""Arms of a study for tests: planted embeddings, evaluated as every run is; seconds, no training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mmclip.config import StudyConfig, TrainConfig
from mmclip.embeddings.files import Embeddings
from mmclip.evaluation.results import Results
from mmclip.retrieval.hubness import QueryBank
from mmclip.similarity import Direction, Exponents, Normalization
from mmclip.study.arms import Arm
from mmclip.study.plan import StudyPlan, plan_study
from tests.helpers.evaluating import evaluate_clip

ARMS = "arms:\n  - {loss: sym, norm: cosine}\n"
N, CAPTIONS, DIM = 60, 2, 16
WEIGHTS = {"sym": 0.5, "asym-i2t": 1.0, "asym-t2i": 0.0}


def plan(folder: Path, text: str, **more: object) -> StudyPlan:
    """What a study's file of this text asks for, its runs in folder/logs."""
    file = folder / "study_tiny.yaml"
    file.write_text(text, encoding="utf-8")
    return plan_study(StudyConfig(config=str(file), logs=str(folder / "logs"), **more))  # type: ignore[arg-type]


def planted_run(
    seed: int = 0,
    loss: str = "sym",
    norm: str = "cosine",
    noise: float = 0.9,
    lengths: float = 0.0,
    weight: float | None = None,
    permuted: bool = False,
    bank: bool = True,
    resamples: int = 20,
) -> Results:
    """A run over pictures that come as twins, whose captions describe the first of each; all seeds and arms answer the
    same queries.

    noise: of the texts' angles, which the seed draws. lengths: how much longer the right twin is (and a text of less
    noise), what a magnitude may say. permuted: captions are of any picture, as a model of permuted pairs finds them.
    """
    same = torch.Generator().manual_seed(5)
    base = torch.randn(N // 2, DIM, generator=same).repeat_interleave(2, 0)
    image = torch.nn.functional.normalize(base + 0.25 * torch.randn(N, DIM, generator=same), dim=1)
    gen = torch.Generator().manual_seed(100 * seed + 7)
    own = torch.arange(N // 2 * CAPTIONS) // CAPTIONS * 2
    text = image[own if not permuted else own[torch.randperm(len(own), generator=gen)]]
    spread = torch.rand(len(text), 1, generator=same) + 0.1
    text = torch.nn.functional.normalize(
        text + noise / DIM**0.5 * spread * torch.randn(text.shape, generator=gen), dim=1
    )
    jitter = [1 + 0.05 * torch.randn(n, 1, generator=gen) for n in (len(image), len(text))]
    image = image * jitter[0] * (1 + lengths * (torch.arange(N) % 2 == 0).float()[:, None])
    text = text * jitter[1] * (1 + lengths * (0.6 - spread))
    weight = WEIGHTS[loss] if weight is None else weight
    exponents = Exponents(0.5, 0.5) if norm == "learned" else Normalization(norm).exponents
    facts: dict[str, Any] = {
        "model": "planted",
        "seed": seed,
        "trained_with": {"loss": loss, "norm": norm, "i2t_weight": weight}
        | {"gamma_q": exponents.gamma_q, "gamma_d": exponents.gamma_d},
        "data": {"path": "planted", "split": "val"},
    }
    directions = [d for d, w in ((Direction.I2T, weight), (Direction.T2I, 1 - weight)) if w > 0]
    evidence = QueryBank("train", {"text": text[::2], "image": image[::2]}) if bank else None
    pairs = torch.stack([own, torch.arange(len(own))], 1)
    keys, captions = [f"k{i}" for i in range(N)], [f"caption {t}" for t in range(len(own))]
    data = Embeddings(image, text, pairs, keys, captions)
    return evaluate_clip(
        data, exponents, facts, resamples=resamples, scales=dict.fromkeys(directions, 14.0), bank=evidence
    )


def planted_arm(
    name: str | None = None,
    loss: str = "sym",
    norm: str = "cosine",
    seeds: Sequence[int] = (0, 1),
    initial: str | None = None,
    starts: dict[int, dict[str, Any]] | None = None,
    logs: bool = True,
    changes: dict[str, Any] | None = None,
    **run: Any,
) -> Arm:
    """An arm of planted runs. changes: of its settings."""
    weight = run.get("weight") if loss == "sym" else None
    settings = TrainConfig(loss=loss, norm=norm, i2t_weight=weight, **changes or {})
    runs = {seed: planted_run(seed, loss, norm, **run) for seed in seeds}
    moves = norm == "learned"
    lines = [{"step": s, "gamma_q": 0.5 + moves * s / 100, "gamma_d": 0.5 - moves * s / 100} for s in (10, 20, 30)]
    kept = dict.fromkeys(seeds, lines) if logs else {}
    return Arm(name or f"{loss} {norm}", settings.to_dict(), {"": runs}, kept, starts or {}, initial)


def start(kappas: Sequence[float], before: float | None = None) -> dict[str, Any]:
    """A start.json: log10 κ of query raw, query normalized, document raw, document normalized; zero-shot accuracy."""
    names = ("query_raw", "query_normalized", "document_raw", "document_normalized")
    matrices = {n: {"log10_kappa": {"value": k, "ci": None}} for n, k in zip(names, kappas, strict=True)}
    section = {"status": "determined", **matrices}
    found: dict[str, Any] = {"fisher": {"i2t": section, "t2i": section}}
    return found | ({"zero_shot": {"acc1": {"native": before, "cosine": before}}} if before is not None else {})
