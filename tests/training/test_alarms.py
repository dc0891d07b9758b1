"""Alarms: each is raised by the run it is meant for, once, and by no healthy one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mmclip.training.monitors import TEXT_ADVICE, Alarms
from tests.helpers.tiny import run_script

HEALTHY = {"gamma_q": 0.4, "gamma_d": 0.7, "effective_scale_i2t": 30.0, "effective_scale_t2i": 30.0, "data_wait": 0.1}


def alarms(**changed: Any) -> Alarms:
    known: dict[str, Any] = {
        "batch": 128, "weights": {"i2t": 1.0, "t2i": 0.0}, "learned": True, "gamma_init": 0.5, "scale_max": 100.0,
        "warmup": 20, "total_steps": 400, "queries": {"i2t": 1000, "t2i": 5000},
    }  # fmt: skip
    return Alarms(**known | changed)


def raised(rules: Alarms, numbers: Any, steps: int = 400, seconds: float = 1.0) -> list[tuple[int, str]]:
    """(step, name) of every alarm of a run logged every 10 steps; ``numbers(step)`` over the healthy ones."""
    found = []
    for step in range(10, steps + 1, 10):
        line = HEALTHY | {"loss": 4.6 * 0.98 ** (step / 5)} | numbers(step)
        found += [(step, a.name) for a in rules.training(step, line, seconds)]
    return found


def test_a_healthy_run_raises_nothing() -> None:
    assert raised(alarms(), lambda step: {}) == []


def test_a_loss_that_stands_at_ln_batch_is_told_once_and_after_the_warmup() -> None:
    stuck = raised(alarms(), lambda step: {"loss": math.log(128) * (1 + 0.01 * math.sin(step))})
    assert stuck == [(80, "loss_stuck")], "50 steps from the first one behind the warm-up, step 30"


def test_a_loss_on_its_way_through_ln_batch_is_not_stuck() -> None:
    assert raised(alarms(), lambda step: {"loss": 5.5 - 0.005 * step}) == []
    assert raised(alarms(batch=64), lambda step: {"loss": math.log(128)}) == [], "of another batch size"


def test_a_pinned_gamma_is_named_with_its_role() -> None:
    rules = alarms()
    assert raised(rules, lambda step: {"gamma_d": 0.5 if step < 100 else 0.99}) == [(120, "gamma_pinned")]
    again = alarms().training(10, HEALTHY | {"loss": 3.0, "gamma_q": 0.001}, 1.0)
    assert again == [], "one logged step is not enough"


def test_gammas_that_never_moved_are_told_at_half_time_and_only_where_they_are_learned() -> None:
    still = {"gamma_q": 0.499, "gamma_d": 0.502}  # the paper's, at the encoders' learning rate
    assert raised(alarms(), lambda step: still) == [(200, "gamma_unmoved")]
    assert raised(alarms(gamma_init=(0.3, 0.7)), lambda step: {"gamma_q": 0.3, "gamma_d": 0.7}) == [
        (200, "gamma_unmoved")
    ]
    assert raised(alarms(gamma_init=(0.3, 0.7)), lambda step: {"gamma_q": 0.3, "gamma_d": 0.3}) == []
    assert raised(alarms(learned=False), lambda step: {"gamma_q": 1.0, "gamma_d": 0.0}) == []


def test_the_clamp_counts_for_trained_directions_only() -> None:
    assert raised(alarms(), lambda step: {"effective_scale_t2i": 100.0}) == []
    assert raised(alarms(), lambda step: {"effective_scale_i2t": 100.0}) == [(30, "scale_clamped")]


def test_waiting_for_data_must_last() -> None:
    assert raised(alarms(), lambda step: {"data_wait": 0.9}, seconds=0.1, steps=300) == []
    assert raised(alarms(), lambda step: {"data_wait": 0.9}, seconds=4.0) == [(30, "data_starved")]
    assert raised(alarms(), lambda step: {"data_wait": 0.9 if step % 30 else 0.1}, seconds=9.0) == []


def success(i2t: float, t2i: float, i2t_cosine: float, t2i_cosine: float) -> dict[str, float]:
    return {
        "val_i2t_success@1_native": i2t,
        "val_t2i_success@1_native": t2i,
        "val_i2t_success@1_cosine": i2t_cosine,
        "val_t2i_success@1_cosine": t2i_cosine,
    }


@pytest.mark.parametrize(
    ("numbers", "names"),
    [
        (success(0.321, 0.003, 0.305, 0.003), ["direction_dead"]),  # the paper's ImgNorm-I2T
        (success(0.94, 0.30, 0.23, 0.28), ["magnitude_collapse"]),  # the paper's E5
        (success(0.760, 0.363, 0.480, 0.360), []),  # qnorm on the scenes: by cosine lower, not collapsed
        (success(0.171, 0.083, 0.165, 0.090), []),  # heads on Flickr8k: half of it, alive
        (success(0.004, 0.000, 0.001, 0.000), []),  # nothing learned yet: all of it is noise
        (success(0.30, 0.29, 0.28, 0.05), []),  # the untrained direction's cosine is not watched
    ],
)
def test_validation_alarms_know_a_price_from_a_collapse(numbers: dict[str, float], names: list[str]) -> None:
    rules = alarms()
    assert [a.name for a in rules.validation(numbers)] == names
    assert rules.validation(numbers) == [], "told once"
    assert alarms(raised=names).validation(numbers) == [], "nor again after a resumption"


def text_alarms(queries: int = 100, **changed: Any) -> Alarms:
    known: dict[str, Any] = {"weights": {"q2d": 1.0, "d2q": 0.0}, "queries": {"q2d": queries}, "metric": "ndcg@10",
                             "watched": ["q2d"], "advice": TEXT_ADVICE}  # fmt: skip
    return alarms(**known | changed)


def ndcg(native: float, cosine: float) -> dict[str, float]:
    return {"val_q2d_ndcg@10_native": native, "val_q2d_ndcg@10_cosine": cosine, "val_q2d_success@1_native": 0.9}


@pytest.mark.parametrize(
    ("numbers", "queries", "names"),
    [
        (ndcg(0.94, 0.23), 100, ["magnitude_collapse"]),  # the paper's E5: dot stayed, cosine fell
        (ndcg(0.94, 0.94), 100, []),
        (ndcg(0.65, 0.40), 100, []),  # a price
        (ndcg(0.94, 0.23), 4, []),  # four queries are no proof
        (ndcg(0.30, 0.14), 50, []),  # nor are fifty of so small a difference
        (ndcg(0.23, 0.94), 100, []),
    ],
)
def test_the_collapse_of_text_is_told_once_in_its_own_metric_and_flags(
    numbers: dict[str, float], queries: int, names: list[str]
) -> None:
    rules = text_alarms(queries)
    found = rules.validation(numbers)
    assert [a.name for a in found] == names
    assert rules.validation(numbers) == [], "told once"
    for alarm in found:
        assert "94.0% natively and 23.0% by cosine (ndcg@10)" in alarm.text
        assert "--proj-wd" not in alarm.text and "--pretrained" not in alarm.text, "flags that train_text.py lacks"
    assert [a.name for a in text_alarms(queries, weights={"d2q": 1.0}).validation(numbers)] == names, "--loss d2q, too"


def test_a_text_run_that_waits_for_no_data_tells_of_its_loss() -> None:
    line = {"gamma_q": 0.4, "gamma_d": 0.7, "effective_scale_q2d": 30.0, "loss": math.log(128)}
    rules = text_alarms()
    found = [a for step in range(10, 100, 10) for a in rules.training(step, line, 1.0)]
    assert [a.name for a in found] == ["loss_stuck"] and "documents belong to their queries" in found[0].text


def test_few_queries_prove_no_death() -> None:
    assert alarms(queries={"i2t": 100, "t2i": 4}).validation(success(0.3, 0.02, 0.3, 0.02)) == []


def test_a_run_tells_its_alarms_and_strict_ends_it(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    """gammas that cannot move, at a learning rate of next to nothing."""
    flags = ["--train-data", tiny_data, "--model", tiny_model, "--logs", tmp_path, "--batch-size", 32, "--workers", 0,
             "--norm", "learned", "--gamma-lr", "1e-9", "--epochs", 8, "--log-every-n-steps", 1, "--device", "cpu",
             "--save-steps", 5]  # fmt: skip
    done = run_script("train_clip.py", *flags, "--name", "told")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("both gammas stand where they started") == 1
    lines = [json.loads(x) for x in (tmp_path / "told" / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if "gamma_unmoved" in x.get("alarms", {})] == [12]
    assert "gamma_unmoved" in json.loads((tmp_path / "told" / "results.json").read_text())["alarms"]
    strict = run_script("train_clip.py", *flags, "--name", "strict", "--strict")
    last = strict.stderr.strip().splitlines()[-1]
    assert strict.returncode == 2 and "Traceback" not in strict.stderr
    assert last.startswith("error: step 12: alarm (--strict): after half of the run both gammas")
    assert (tmp_path / "strict" / "checkpoints" / "latest").read_text() == "step_00000012.pt\n", "nothing is lost"
    again = run_script("train_clip.py", *flags, "--name", "strict", "--strict", "--resume", "latest")
    assert again.returncode == 2 and "alarm (--strict): after half of the run" in again.stderr, "still an error"
    gone_on = run_script("train_clip.py", *flags, "--name", "strict", "--resume", "latest", "--no-strict")
    assert gone_on.returncode == 0, gone_on.stderr[-2000:]
    assert "gamma_unmoved" in json.loads((tmp_path / "strict" / "results.json").read_text())["alarms"], "not forgotten"


def test_a_run_that_overflows_stops_with_its_samples_and_the_state_before(
    tiny_data: Path, tiny_model: Path, tmp_path: Path
) -> None:
    done = run_script(
        "train_clip.py", "--train-data", tiny_data, "--model", tiny_model, "--logs", tmp_path, "--name", "x",
        "--batch-size", 32, "--workers", 2, "--norm", "dot", "--lr", "1e18", "--epochs", 8, "--device", "cpu",
        "--save-steps", 1,
    )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("error: step ") and "Traceback" not in done.stderr
    assert "not finite" in last and "Try a lower --lr" in last
