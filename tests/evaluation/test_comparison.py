"""Comparing runs over the same data, verdicts on norms, and means over seeds, on planted embeddings."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from mmclip.embeddings.files import Distractors, Embeddings
from mmclip.errors import UserError
from mmclip.evaluation.comparison import against_first, compare, group_by_seed, verdict, verdicts
from mmclip.evaluation.results import CORRECTED, NATIVE, REVERSED, Results
from mmclip.metrics import holm
from mmclip.reporting.run_tables import seeds_table
from mmclip.retrieval.hubness import QueryBank
from mmclip.roles import Direction, Exponents
from tests.helpers.evaluating import CAPTIONS, COSINE, DIM, QNORM, N, eval_data, evaluate_clip, rich_data, run_of

Runs = tuple[Results, Results, Results]


def test_comparison_is_paired_and_says_what_is_noise():
    a, b = run_of(rich_data(noise=2.0)), run_of(rich_data(noise=1.2))
    report = compare(a, b)
    assert list(report) == ["retrieval", "full", "distractors"]
    change = report["retrieval"]["t2i"]["native"]["success@1"]
    one, other = (x.json["retrieval"]["t2i"]["native"]["success@1"] for x in (a, b))
    assert change["delta"] == pytest.approx(other - one, abs=1e-6)
    assert change["ci"][0] > 0 and not change["within_noise"]
    same = compare(a, a)["full"]["i2t"]["cosine"]["ndcg@10"]
    assert same == {"delta": 0.0, "ci": [0.0, 0.0], "within_noise": True}


def test_several_comparisons_are_corrected_and_one_is_not() -> None:
    rng = np.random.default_rng(2)
    first, *others = (rng.normal(m, 1, 50) for m in (0, 0.1, 0.6, 0.9))
    found = against_first([first, *others], flips=499)
    assert [f["p_holm"] for f in found] == holm([f["p"] for f in found])
    assert all(f["p_holm"] >= f["p"] for f in found) and found[2]["p_holm"] < 0.05
    assert found[1] | {"p_holm": 0} == against_first([first, others[1]], flips=499)[0] | {"p_holm": 0}


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
        compare(run_of(eval_data(), b=2), run_of(eval_data(**changes), b=2))


def test_runs_over_other_distractors_are_refused_and_runs_without_are_not() -> None:
    three, four = (
        run_of(eval_data(distractors=[Distractors("distractors", text=torch.ones(n, DIM))]), b=2) for n in (3, 4)
    )
    with pytest.raises(UserError, match="pool distractors is not the same in both"):
        compare(three, four)
    assert list(compare(three, run_of(eval_data(), b=2))) == ["retrieval"]


def magnitude_runs(informative: bool) -> Runs:
    """(run, control, baseline) over t2i: queries meet crowds of near-equal images, one of each pair the relevant one.

    Images come as twins, equal but for noise; captions describe the first. The run's images have larger norms where
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

    def data(norms):
        return Embeddings(unit * norms[:, None], text, pairs, [str(i) for i in range(2 * n)], ["c d"] * (2 * n))

    jitter = 1 + 0.05 * torch.randn(2 * n, generator=gen)
    run = run_of(data(jitter * (1 + 0.3 * longer)), QNORM, "asym-t2i", "run")
    control = run_of(data(jitter), COSINE, "asym-t2i", "control")
    return run, control, run_of(data(jitter), COSINE, "sym", "baseline")


@pytest.fixture(scope="module")
def informative() -> Runs:
    return magnitude_runs(informative=True)


def test_an_informative_norm_is_learned_and_useful(informative: Runs):
    found = verdict(*informative)
    assert (found["direction"], found["pool"]) == ("t2i", "retrieval")
    assert found["learned"]["verdict"] is True and found["useful"]["verdict"] is True
    assert found["learned"]["d_run"] > found["learned"]["d_control"]
    assert "The image norm was learned" in found["learned"]["sentence"]
    json.dumps(found, allow_nan=False)


def test_random_norms_and_permuted_relevance_give_no_positive_verdict():
    found = verdict(*magnitude_runs(informative=False))
    assert found["learned"]["verdict"] is False and found["useful"]["verdict"] is False
    rng = np.random.default_rng(0)
    for seed in range(3):
        data = eval_data(pairs=torch.tensor(np.column_stack([rng.permutation(600) // CAPTIONS, np.arange(600)])))
        scaled = dataclasses.replace(data, image=data.image * torch.tensor(rng.uniform(0.5, 2, (N, 1))).float())
        runs = run_of(scaled, b=2), run_of(data, COSINE, b=2), run_of(data, COSINE, "sym", b=2)
        found = verdict(*runs, seed=seed)
        assert found["useful"]["verdict"] is False
        assert found["learned"]["verdict"] is not True


def test_verdicts_that_cannot_be_given_say_why(informative: Runs):
    run, control, baseline = informative
    alone = verdict(run, control)["useful"]
    assert alone["verdict"] is None and "sym/cosine" in alone["reason"]
    flat = eval_data(image=torch.nn.functional.normalize(eval_data().image, dim=1))
    found = verdict(run_of(flat, b=2), run_of(flat, COSINE, b=2))
    assert found["learned"]["verdict"] is None and "norms are equal" in found["learned"]["reason"]
    assert found["useful"]["verdict"] is False
    blind = verdict(control, control, baseline)  # dot costs the control something, yet nothing was learned or used
    assert blind["useful"]["verdict"] is False and blind["learned"]["verdict"] is False
    assert verdict(baseline, baseline, direction=Direction.I2T)["direction"] == "i2t"
    for pair, words in (
        ((run, run), "gamma_d"), ((run, baseline), "the loss sym"), ((baseline, baseline), "name one of")
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            verdict(*pair)


def test_level_with_the_baseline_is_not_useful_without_evidence(informative: Runs):
    # Native equals sym/cosine's cosine, and the control loses by dot: condition (1) holds, (2) has no margin.
    run, control, baseline = informative
    level = dataclasses.replace(baseline, per_query=dict(baseline.per_query))
    hits = run.query_values("retrieval", "t2i", "native", "success@1").copy()
    level.per_query["retrieval/t2i/cosine/success@1"] = np.roll(hits, 7)
    found = verdict(run, control, level)["useful"]
    assert found["gain"]["ci"][0] > 0
    assert found["native_minus_baseline_cosine"]["delta"] == 0
    assert found["verdict"] is None and "within noise" in found["reason"]


def test_norms_that_give_nothing_are_not_useful_however_the_control_loses_by_its_own():
    # The run's norms are nearly equal and its angles better than the others'; the control's norms are noise.
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
        assert (found[kind]["verdict"], found[kind]["reason"]) == (None, "all queries belong to one image")


def test_a_control_of_another_seed_and_a_baseline_that_is_none_are_refused():
    run, control, baseline = (
        run_of(eval_data(), native, loss, b=2)
        for native, loss in ((QNORM, "asym-t2i"), (COSINE, "asym-t2i"), (COSINE, "sym"))
    )
    run.json["seed"], control.json["seed"] = 0, 1
    with pytest.raises(UserError, match="trained with seed 1, the run with 0"):
        verdict(run, control, baseline)
    run.json["trained_with"]["gamma_d"] = 0.0
    assert verdicts(run, control, baseline) == []
    control.json["seed"] = 0
    assert verdicts(run, control, baseline)
    for other in (control, run_of(eval_data(), QNORM, "sym", b=2)):
        with pytest.raises(UserError, match="a baseline is a sym/cosine run"):
            verdict(run, control, other)
    control.json["trained_with"]["gamma_from"] = "dot"
    with pytest.raises(UserError, match="after dot: a control normalizes its documents"):
        verdict(run, control)


def test_a_handful_of_relevant_documents_gives_no_verdict_on_learning():
    """As a model of permuted pairs has them: eight norms, whose percentiles know no spread."""
    data = eval_data()
    pairs = data.pairs[torch.randperm(len(data.pairs), generator=torch.Generator().manual_seed(3))]
    lost = dataclasses.replace(data, pairs=torch.stack([data.pairs[:, 0], pairs[:, 1]], 1)[:12])
    learned = verdict(run_of(lost), run_of(lost, native=COSINE), direction=Direction.T2I, resamples=50)["learned"]
    assert learned["verdict"] is None
    assert "relevant or irrelevant images among the run's 10 best by cosine; at least 30" in learned["reason"]


def seed_run(seed: int, loss: str = "asym-i2t", norm: str = "qnorm", noise: float = 0.8, model: str = "m") -> Results:
    gen = torch.Generator().manual_seed(seed)
    image = torch.randn(60, 8, generator=torch.Generator().manual_seed(9))
    text = image + noise * torch.randn(60, 8, generator=gen)
    names = [str(i) for i in range(60)]
    data = Embeddings(image, text, torch.arange(60)[:, None].repeat(1, 2), names, names)
    metadata = {"model": model, "seed": seed, "trained_with": {"loss": loss, "norm": norm, "i2t_weight": 1.0}}
    bank = QueryBank("train", {"text": torch.randn(50, 8, generator=gen)})
    return evaluate_clip(data, QNORM, metadata, scales={Direction.I2T: 2.0}, bank=bank, resamples=50)


@pytest.fixture
def seeds() -> dict[str, Results]:
    return {str(s): seed_run(s) for s in range(5)}


def test_seeds_of_one_kind_form_a_group_and_others_do_not(seeds) -> None:
    others = {"other loss": seed_run(0, "sym"), "other model": seed_run(2, model="n"), "again": seeds["0"]}
    (group,) = group_by_seed({"a": seeds["0"], "b": seeds["1"], **others})
    assert group.name == "asym-i2t qnorm" and group.runs == [seeds["0"], seeds["1"]]
    assert not group_by_seed({"a": seeds["0"], "again": seeds["0"]}), "one seed twice is one seed"
    for seed in "01":  # an evaluation of a run's model has its seed from the export
        run = seeds[seed]
        run.json["trained_with"] |= {"seed": run.json.pop("seed"), "model": "m"}
        run.json["model"] = f"logs/{seed}"
    assert len(group_by_seed({seed: seeds[seed] for seed in "01"})) == 1


def test_other_schedules_and_other_starts_are_other_kinds(seeds) -> None:
    seeds["1"].json["trained_with"] |= {"focal": 2.0}
    seeds["2"].json["trained_with"] |= {"gamma_schedule": "switch", "gamma_from": "cosine", "gamma_start": 0.5}
    for seed in "34":
        start = {"loss": "sym", "norm": "cosine", "key": seed, "seed": int(seed)}
        seeds[seed].json["trained_with"] |= {"initial": start}
    (group,) = group_by_seed(seeds)
    assert group.runs == [seeds["3"], seeds["4"]]


def test_a_mean_is_of_the_seeds_its_interval_of_the_queries_and_gains_are_paired(seeds) -> None:
    better = {f"better {s}": seed_run(s, norm="dot", noise=0.5) for s in range(3)}
    first, other = group_by_seed(seeds | better)
    each = [r.json["retrieval"]["t2i"][NATIVE]["success@1"] for r in first.runs]
    numbers = first.numbers("retrieval", "t2i", NATIVE)
    assert numbers["mean"] == pytest.approx(np.mean(each), abs=1e-7)
    assert (numbers["low"], numbers["high"]) == (min(each), max(each))
    lone = [np.ptp(r.json["retrieval"]["t2i"][NATIVE]["ci"]["success@1"]) for r in first.runs]
    assert 0 < np.ptp(numbers["ci"]) < np.mean(lone), "the seeds' own noise is averaged out"
    gain = other.gain("retrieval", "i2t", NATIVE, first, NATIVE)
    assert gain is not None and gain["ci"][0] > 0 and not gain["within_noise"]
    means = [g.numbers("retrieval", "i2t", NATIVE)["mean"] for g in (first, other)]
    assert gain["delta"] == pytest.approx(means[1] - means[0])
    assert first.gain("retrieval", "i2t", CORRECTED, first, REVERSED) is None, "i2t's opposite was not trained"


def test_the_table_shows_the_means_and_is_left_out_where_nothing_is_repeated(seeds) -> None:
    table = seeds_table(seeds, "retrieval")
    (group,) = group_by_seed(seeds)
    mean = group.numbers("retrieval", "t2i", CORRECTED)["mean"]
    assert table is not None
    cells = next(cells for head, cells in table.rows if head == "text → image")
    assert f"{mean:.3f}".removeprefix("0") in [cell.text for cell in cells]
    assert seeds_table({"a": seeds["0"]}, "retrieval") is None
