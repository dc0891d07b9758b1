"""Runs over seeds: means, intervals that are the queries', differences that are paired, and who belongs together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmclip.embeddings.files import Embeddings
from mmclip.evaluation.comparison import group_by_seed
from mmclip.evaluation.results import CORRECTED, NATIVE, REVERSED, Results
from mmclip.reporting.run_tables import seeds_table
from mmclip.retrieval.hubness import QueryBank
from mmclip.roles import Direction, Exponents
from tests.helpers.evaluating import evaluate_clip

N = 60


def run(seed: int, loss: str = "asym-i2t", norm: str = "qnorm", noise: float = 0.8, model: str = "m") -> Results:
    gen = torch.Generator().manual_seed(seed)
    image = torch.randn(N, 8, generator=torch.Generator().manual_seed(9))
    text = image + noise * torch.randn(N, 8, generator=gen)
    names = [str(i) for i in range(N)]
    data = Embeddings(image, text, torch.arange(N)[:, None].repeat(1, 2), names, names)
    facts = {"model": model, "seed": seed, "trained_with": {"loss": loss, "norm": norm, "i2t_weight": 1.0}}
    bank = QueryBank("train", {"text": torch.randn(50, 8, generator=gen)})
    return evaluate_clip(data, Exponents(1.0, 0.0), facts, scales={Direction.I2T: 2.0}, bank=bank, resamples=50)


def test_seeds_of_one_kind_belong_together_and_others_do_not() -> None:
    runs = {"a": run(0), "b": run(1), "other loss": run(0, "sym"), "other model": run(2, model="n"), "a again": run(0)}
    (group,) = group_by_seed(runs)
    assert group.name == "asym-i2t qnorm" and group.runs == [runs["a"], runs["b"]]
    assert not group_by_seed({"a": run(0), "again": run(0)}), "one seed twice is one seed"


def test_other_curricula_and_other_starts_are_other_kinds() -> None:
    runs = {str(s): run(s) for s in range(5)}
    runs["1"].json["trained_with"] |= {"focal": 2.0}
    runs["2"].json["trained_with"] |= {"gamma_schedule": "switch", "gamma_from": "cosine", "gamma_start": 0.5}
    for seed in ("3", "4"):
        runs[seed].json["trained_with"] |= {
            "initial": {"loss": "sym", "norm": "cosine", "key": seed, "seed": int(seed)}
        }
    (group,) = group_by_seed(runs)
    assert group.runs == [runs["3"], runs["4"]]


def test_an_evaluation_of_a_runs_model_has_its_seed_from_the_export() -> None:
    runs = {str(s): run(s, model=f"logs/{s}") for s in range(2)}
    for r in runs.values():
        r.json["trained_with"] |= {"seed": r.json.pop("seed"), "model": "m"}
    assert len(group_by_seed(runs)) == 1


def test_a_mean_is_of_the_seeds_and_its_interval_of_the_queries() -> None:
    (group,) = group_by_seed({str(s): run(s) for s in range(4)})
    each = [r.json["retrieval"]["t2i"][NATIVE]["success@1"] for r in group.runs]
    numbers = group.numbers("retrieval", "t2i", NATIVE)
    assert numbers is not None
    assert numbers["mean"] == pytest.approx(np.mean(each), abs=1e-7)
    assert (numbers["low"], numbers["high"]) == (min(each), max(each))
    lone = [np.ptp(r.json["retrieval"]["t2i"][NATIVE]["ci"]["success@1"]) for r in group.runs]
    assert 0 < np.ptp(numbers["ci"]) < np.mean(lone), "the seeds' own noise is averaged out"


def test_gains_are_paired_over_queries() -> None:
    runs = {str(s): run(s) for s in range(3)} | {f"better {s}": run(s, norm="dot", noise=0.5) for s in range(3)}
    first, better = group_by_seed(runs)
    gain = better.gain("retrieval", "i2t", NATIVE, first, NATIVE)
    assert gain is not None and gain["ci"][0] > 0 and not gain["within_noise"]
    means = [g.numbers("retrieval", "i2t", NATIVE)["mean"] for g in (first, better)]  # type: ignore[index]
    assert gain["delta"] == pytest.approx(means[1] - means[0])
    assert first.gain("retrieval", "i2t", CORRECTED, first, REVERSED) is None, "i2t's opposite was not trained"


def test_the_table_shows_the_means_and_is_left_out_where_nothing_is_repeated() -> None:
    runs = {str(s): run(s) for s in range(2)}
    table = seeds_table(runs, "retrieval")
    (group,) = group_by_seed(runs)
    mean = group.numbers("retrieval", "t2i", CORRECTED)["mean"]  # type: ignore[index]
    assert table is not None
    cells = next(cells for head, cells in table.rows if head == "text → image")
    assert f"{mean:.3f}".removeprefix("0") in [cell.text for cell in cells]
    assert seeds_table({"a": run(0)}, "retrieval") is None
