"""Comparing runs over the same data, and the verdict on length, on planted embeddings."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from mmclip.embeddings.files import Distractors, Embeddings
from mmclip.errors import UserError
from mmclip.evaluation.comparison import compare, verdict, verdicts
from mmclip.evaluation.results import Results
from mmclip.roles import Direction, Exponents
from tests.helpers.evaluating import evaluate_clip

COSINE, QNORM = Exponents(1.0, 1.0), Exponents(1.0, 0.0)
N, CAPTIONS, DIM = 120, 5, 32


def eval_data(seed: int = 0, noise: float = 2.0, **changes) -> Embeddings:
    gen = torch.Generator().manual_seed(seed)
    image = torch.randn(N, DIM, generator=gen)
    text = image.repeat_interleave(CAPTIONS, 0) + noise * torch.randn(N * CAPTIONS, DIM, generator=gen)
    fields = {
        "image": image,
        "text": text,
        "pairs": torch.tensor([[t // CAPTIONS, t] for t in range(len(text))]),
        "image_ids": [f"k{i}" for i in range(N)],
        "captions": [" ".join(["word"] * (2 + t % 7)) for t in range(len(text))],
    }
    return Embeddings(**fields | changes)


def rich_data(**changes) -> Embeddings:
    gen = torch.Generator().manual_seed(9)
    fields = {
        "levels": ["full", "full", "partial", "vague", "full"] * N,
        "n_objects": [1 + i % 3 for i in range(N)],
        "distractors": [
            Distractors(
                "distractors",
                0.5 * torch.randn(40, DIM, generator=gen),
                0.5 * torch.randn(50, DIM, generator=gen),
            )
        ],
    }
    return eval_data(**fields | changes)


def run_of(
    data: Embeddings, native: Exponents = QNORM, loss: str = "asym-t2i", name: str = "m", b: int = 200
) -> Results:
    return evaluate_clip(data, native, {"model": name, "trained_with": {"loss": loss}}, resamples=b)


def test_comparison_is_paired_and_says_what_is_noise():
    a, b = run_of(rich_data(noise=2.0)), run_of(rich_data(noise=1.2))
    report = compare(a, b)
    assert list(report) == ["retrieval", "full", "distractors"]
    change = report["retrieval"]["t2i"]["native"]["success@1"]
    one, other = (x.json["retrieval"]["t2i"]["native"]["success@1"] for x in (a, b))
    assert change["delta"] == pytest.approx(other - one, abs=1e-6)
    assert change["ci"][0] > 0
    assert not change["within_noise"]
    same = compare(a, a)["full"]["i2t"]["cosine"]["ndcg@10"]
    assert same == {"delta": 0.0, "ci": [0.0, 0.0], "within_noise": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"captions": ["other"] * 600},
        {"image_ids": [f"x{i}" for i in range(N)]},
        {"pairs": torch.tensor([[t // CAPTIONS, t] for t in range(595)])},
    ],
)
def test_runs_over_different_data_are_refused(changes):
    with pytest.raises(UserError, match="different data"):
        compare(run_of(eval_data(), b=20), run_of(eval_data(**changes), b=20))


def magnitude_runs(informative: bool):
    """(run, control, baseline) over t2i: queries meet crowds of near-equal images, one of each pair the relevant one.

    Images come as twins, equal but for noise; captions describe the first. The run's images are longer where
    ``informative`` says so: the first of each twin. Otherwise at random.
    """
    gen = torch.Generator().manual_seed(3)
    n = 200
    base = torch.randn(n, DIM, generator=gen).repeat_interleave(2, 0)
    image = base + 0.3 * torch.randn(2 * n, DIM, generator=gen)
    text = base[::2].repeat_interleave(2, 0) + 0.8 * torch.randn(2 * n, DIM, generator=gen)
    pairs = torch.tensor([[2 * (t // 2), t] for t in range(2 * n)])
    first = torch.arange(2 * n) % 2 == 0
    longer = first if informative else first[torch.randperm(2 * n, generator=gen)]
    unit = torch.nn.functional.normalize(image, dim=1)

    def data(lengths):
        return Embeddings(unit * lengths[:, None], text, pairs, [str(i) for i in range(2 * n)], ["c d"] * (2 * n))

    jitter = 1 + 0.05 * torch.randn(2 * n, generator=gen)
    run = run_of(data(jitter * (1 + 0.3 * longer)), QNORM, "asym-t2i", "run")
    control = run_of(data(jitter), COSINE, "asym-t2i", "control")
    return run, control, run_of(data(jitter), COSINE, "sym", "baseline")


def test_informative_length_is_learned_and_useful():
    found = verdict(*magnitude_runs(informative=True))
    assert (found["direction"], found["pool"]) == ("t2i", "retrieval")
    assert found["learned"]["verdict"] is True
    assert found["learned"]["d_run"] > found["learned"]["d_control"]
    assert found["useful"]["verdict"] is True
    assert "The image norm was learned" in found["learned"]["sentence"]
    json.dumps(found, allow_nan=False)


def test_random_length_and_permuted_relevance_give_no_positive_verdict():
    run, control, baseline = magnitude_runs(informative=False)
    found = verdict(run, control, baseline)
    assert found["learned"]["verdict"] is False
    assert found["useful"]["verdict"] is False
    rng = np.random.default_rng(0)
    for seed in range(4):
        data = eval_data(pairs=torch.tensor(np.column_stack([rng.permutation(600) // CAPTIONS, np.arange(600)])))
        scaled = dataclasses.replace(data, image=data.image * torch.tensor(rng.uniform(0.5, 2, (N, 1))).float())
        found = verdict(run_of(scaled), run_of(data, COSINE), run_of(data, COSINE, "sym"), seed=seed)
        assert found["useful"]["verdict"] is False
        assert found["learned"]["verdict"] is not True


def test_verdicts_that_cannot_be_given_say_why():
    run, control, baseline = magnitude_runs(informative=True)
    assert verdict(run, control)["useful"]["verdict"] is None  # without sym/cosine
    assert "sym/cosine" in verdict(run, control)["useful"]["reason"]
    flat = rich_data(image=torch.nn.functional.normalize(rich_data().image, dim=1))
    found = verdict(run_of(flat), run_of(flat, COSINE))
    assert found["learned"]["verdict"] is None
    assert "norms are equal" in found["learned"]["reason"]
    assert found["useful"]["verdict"] is False
    with pytest.raises(UserError, match="gamma_d"):
        verdict(run, run)
    blind = verdict(control, control, baseline)  # dot costs the control something, yet nothing was learned or used
    assert blind["useful"]["verdict"] is False
    assert blind["learned"]["verdict"] is False
    with pytest.raises(UserError, match="the loss sym"):
        verdict(run, baseline)
    with pytest.raises(UserError, match="name one of"):
        verdict(baseline, baseline)
    assert verdict(baseline, baseline, direction=Direction.I2T)["direction"] == "i2t"


def test_level_with_the_baseline_is_not_useful_without_evidence():
    # Native equals sym/cosine's cosine, and the control loses by dot: condition (1) holds, (2) has no margin.
    run, control, baseline = magnitude_runs(informative=True)
    level = dataclasses.replace(baseline, per_query=dict(baseline.per_query))
    hits = run.query_values("retrieval", "t2i", "native", "success@1").copy()
    level.per_query["retrieval/t2i/cosine/success@1"] = np.roll(hits, 7)
    found = verdict(run, control, level)["useful"]
    assert found["gain"]["ci"][0] > 0
    assert found["native_minus_baseline_cosine"]["delta"] == 0
    assert found["verdict"] is None and "within noise" in found["reason"]


def test_runs_over_other_distractors_are_refused_and_runs_without_are_not() -> None:
    def with_texts(n: int) -> Results:
        extra = Distractors("distractors", text=torch.ones(n, DIM))
        return run_of(eval_data(distractors=[extra]), b=20)

    with pytest.raises(UserError, match="pool distractors is not the same in both"):
        compare(with_texts(3), with_texts(4))
    assert list(compare(with_texts(3), run_of(eval_data(), b=20))) == ["retrieval"]


def test_lengths_that_give_nothing_are_not_useful_however_the_control_loses_by_its_own():
    # The run's lengths are nearly equal and its angles better than the others'; the control's lengths are noise.
    def run(seed: int, noise: float, spread: float, native: Exponents, loss: str) -> Results:
        gen = torch.Generator().manual_seed(seed)
        text = torch.nn.functional.normalize(torch.randn(150, 16, generator=torch.Generator().manual_seed(0)), dim=1)
        image = text * (spread * torch.randn(150, 1, generator=gen)).exp()
        text = text + noise * torch.randn(150, 16, generator=gen)
        keys = [str(i) for i in range(150)]
        return run_of(Embeddings(image, text, torch.arange(150)[:, None].repeat(1, 2), keys, keys), native, loss)

    control, baseline = run(1, 0.2, 0.3, COSINE, "asym-t2i"), run(2, 0.2, 0.3, COSINE, "sym")
    found = verdict(run(3, 0.14, 0.005, QNORM, "asym-t2i"), control, baseline)["useful"]
    assert found["gain"]["ci"][0] > 0.2  # the control's loss alone
    assert found["native_minus_baseline_cosine"]["ci"][0] > 0  # better angles alone
    assert found["verdict"] is False
    assert found["native_minus_cosine_run_ci"][0] <= 0


def test_one_images_queries_have_no_spread_and_decide_nothing():
    data = eval_data(pairs=torch.tensor([[0, t] for t in range(CAPTIONS)]), owner=[t // CAPTIONS for t in range(600)])
    longer = data.image * torch.where(torch.arange(N) == 0, 30.0, 1.0)[:, None]
    run, control = run_of(dataclasses.replace(data, image=longer)), run_of(data, COSINE)
    change = compare(control, run)["retrieval"]["t2i"]["native"]["success@1"]
    assert change["delta"] > 0
    assert (change["ci"], change["within_noise"]) == (None, True)
    assert run.json["magnitude"]["image"]["cohens_d"]["topk"]["ci"] is None
    found = verdict(run, control, run_of(data, COSINE, "sym"))
    for kind in ("learned", "useful"):
        assert found[kind]["verdict"] is None
        assert found[kind]["reason"] == "all queries belong to one image"


def test_a_control_of_another_seed_and_a_baseline_that_is_none_are_refused():
    run, control, baseline = run_of(eval_data()), run_of(eval_data(), COSINE), run_of(eval_data(), COSINE, "sym")
    run.json["seed"], control.json["seed"] = 0, 1
    with pytest.raises(UserError, match="trained with seed 1, the run with 0"):
        verdict(run, control, baseline)
    run.json["trained_with"]["gamma_d"] = 0.0
    assert verdicts(run, control, baseline) == []
    control.json["seed"] = 0
    assert verdicts(run, control, baseline)
    for other in (run_of(eval_data(), COSINE), run_of(eval_data(), QNORM, "sym")):
        with pytest.raises(UserError, match="a baseline is a sym/cosine run"):
            verdict(run, control, other)


def test_a_handful_of_relevant_documents_gives_no_verdict_on_learning():
    """As a model of permuted pairs has them: eight lengths, whose percentiles know no spread."""
    data = eval_data()
    pairs = data.pairs[torch.randperm(len(data.pairs), generator=torch.Generator().manual_seed(3))]
    lost = dataclasses.replace(data, pairs=torch.stack([data.pairs[:, 0], pairs[:, 1]], 1)[:12])
    report = verdict(run_of(lost), run_of(lost, native=COSINE), direction=Direction.T2I, resamples=50)
    learned = report["learned"]
    assert learned["verdict"] is None
    assert (
        "relevant or irrelevant images among the run's 10 best by cosine; at least 30 are needed" in learned["reason"]
    )
