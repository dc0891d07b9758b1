"""A checkpoint is believed only as far as it was checked."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmclip.config import TrainConfig
from mmclip.config.clip import CHANGEABLE
from mmclip.errors import UserError
from mmclip.losses.contrastive import clip_loss
from mmclip.models.factory import build_model
from mmclip.training import resume
from mmclip.training.optimizer import build_optimizer

PATH = Path("step_00000003.pt")
FINGERPRINTS = {"data": "abc", "image trunk": "def"}
Parts = tuple[Any, Any, Any]


@pytest.fixture(scope="module")
def parts(tiny_model: Path) -> Parts:
    torch.manual_seed(0)
    towers = build_model(str(tiny_model)).towers
    towers.lock("image")
    loss = clip_loss("sym", "learned")
    loss({s: torch.randn(4, 16) for s in ("image", "text")})  # the first batch sets alpha and the running lengths
    optimizer = build_optimizer(towers, loss, TrainConfig())
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return towers, loss, optimizer


@pytest.fixture
def state(parts: Parts) -> dict[str, Any]:
    towers, loss, optimizer = parts
    locked = towers.locked_names()
    return copy.deepcopy({
        "format": resume.FORMAT, "step": 3, "taken": 3, "ranks": 1, "skipped": {}, "alarms": {}, "pending": {},
        "towers": {k: v for k, v in towers.state_dict().items() if k not in locked}, "loss": loss.state_dict(),
        "optimizer": optimizer.state_dict(), "settings": TrainConfig().to_dict(), "fingerprints": FINGERPRINTS,
    })  # fmt: skip


def test_a_good_checkpoint_restores_every_trained_tensor(parts: Parts, state: dict[str, Any], tiny_model: Path) -> None:
    torch.manual_seed(1)  # other weights
    towers = build_model(str(tiny_model)).towers
    towers.lock("image")
    loss = clip_loss("sym", "learned")
    optimizer = build_optimizer(towers, loss, TrainConfig())
    resume.check(state, PATH, TrainConfig(workers=7, strict=True, val_steps=9).to_dict(), 1)
    resume.check_run(state, PATH, FINGERPRINTS, 10)
    resume.load(state, PATH, towers, loss, optimizer)
    locked = towers.locked_names()
    assert locked and all(
        torch.equal(v, parts[0].state_dict()[k]) for k, v in towers.state_dict().items() if k not in locked
    )
    assert all(torch.equal(v, parts[1].state_dict()[k]) or v.isnan().all() for k, v in loss.state_dict().items())
    for ours, theirs in zip(optimizer.state.values(), parts[2].state.values(), strict=True):
        assert all(torch.equal(ours[k], theirs[k]) for k in theirs)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(TrainConfig)])
def test_every_setting_is_either_free_to_change_or_named_when_it_has(name: str, state: dict[str, Any]) -> None:
    now = TrainConfig().to_dict()
    now[name] = ["lr"] if name == "may_change" else "another"
    if name in resume.FREE_TO_CHANGE:
        resume.check(state, PATH, now, 1)
    else:
        with pytest.raises(UserError, match=f"other settings than the run's: {name} was .*, is another"):
            resume.check(state, PATH, now, 1)


def test_what_may_change_on_purpose_is_asked_for_by_name(state: dict[str, Any]) -> None:
    now = TrainConfig(lr=1e-6, epochs=99).to_dict()
    with pytest.raises(UserError, match=r"lr was 0.0005, is 1e-06 \(meant\? --may-change epochs lr\)"):
        resume.check(state, PATH, now, 1)
    with pytest.raises(UserError, match="epochs was 32, is 99"):
        resume.check(state, PATH, now | {"may_change": ["lr"]}, 1)
    resume.check(state, PATH, now | {"may_change": ["lr", "epochs"]}, 1)
    with pytest.raises(UserError, match=r"norm was cosine, is dot$"):
        resume.check(state, PATH, TrainConfig(norm="dot").to_dict(), 1)
    assert {f.name for f in dataclasses.fields(TrainConfig)} >= set(CHANGEABLE)


def test_a_flag_newer_than_the_checkpoint_is_at_its_default_or_told(state: dict[str, Any]) -> None:
    older = {k: v for k, v in state["settings"].items() if k != "keep_last"}
    resume.check(state | {"settings": older}, PATH, TrainConfig().to_dict(), 1)
    with pytest.raises(UserError, match="keep_last was not there, is True"):
        resume.check(state | {"settings": older}, PATH, TrainConfig(keep_last=True).to_dict(), 1)


def test_names_of_settings_that_are_free_to_change_exist() -> None:
    assert {f.name for f in dataclasses.fields(TrainConfig)} >= resume.FREE_TO_CHANGE


@pytest.mark.parametrize("key", list(resume.CONTENT))
def test_missing_and_odd_content_is_named(key: str, state: dict[str, Any]) -> None:
    for broken in ({k: v for k, v in state.items() if k != key}, state | {key: "odd"}):
        with pytest.raises(UserError, match=f"a damaged checkpoint: {key} missing or of another kind"):
            resume.check(broken, PATH, TrainConfig().to_dict(), 1)


def test_other_processes_data_trunks_and_steps_are_refused(state: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="the run had 1 processes, now there are 2"):
        resume.check(state, PATH, TrainConfig().to_dict(), 2)
    for fingerprints, total, told in (
        (FINGERPRINTS | {"data": "x"}, 10, "training data are not the run's"),
        (FINGERPRINTS | {"image trunk": "x"}, 10, "weights of the locked image trunk are not"),
        (FINGERPRINTS | {"text trunk": "x"}, 10, "weights of the locked text trunk are not"),
        (FINGERPRINTS, 2, "step 3 of a run of 2"),
    ):
        with pytest.raises(UserError, match=told):
            resume.check_run(state, PATH, fingerprints, total)


def spoil(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        *way, last = path.split("/")
        for step in way:
            state = state[int(step) if step.isdigit() else step]
        state[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        spoil("towers/clip.text_projection", torch.zeros(3)),
        spoil("towers/clip.text_projection", "no tensor"),
        spoil("towers/clip.text_projection", torch.zeros(32, 16, dtype=torch.long)),
        spoil("towers/clip.text_projection", torch.zeros(32, 16, device="meta")),
        spoil("towers/clip.ln_final.bias", torch.full((32,), torch.nan)),
        spoil("loss/similarity.gamma_hat_q", torch.tensor(torch.inf)),
        lambda state: state["optimizer"]["state"][0]["exp_avg"].fill_(torch.nan),
        lambda state: state["optimizer"]["state"][0]["exp_avg_sq"].sub_(1),
        spoil("towers/more", torch.zeros(3)),
        lambda state: state["towers"].pop("clip.text_projection"),
        spoil("loss/similarity.gamma_hat_q", torch.zeros(2)),
        lambda state: state["loss"].clear(),
        spoil("optimizer/state", []),
        lambda state: state["optimizer"]["state"].pop(0),
        spoil("optimizer/state/0/exp_avg", torch.zeros(1)),
        lambda state: state["optimizer"]["state"][0].pop("step"),
        spoil("optimizer/state", {"a": 1}),
    ],
)
def test_tensors_that_are_not_this_runs_are_refused_and_nothing_is_loaded(
    change: Callable[[dict[str, Any]], None], parts: Parts, state: dict[str, Any]
) -> None:
    towers, loss, optimizer = parts
    before = {k: v.clone() for k, v in towers.state_dict().items()}
    state["towers"]["clip.token_embedding.weight"].zero_()
    change(state)
    with pytest.raises(UserError, match=r"--resume step_00000003.pt: (not a checkpoint of this model|a damaged)"):
        resume.load(state, PATH, towers, loss, optimizer)
    assert all(torch.equal(v, before[k]) for k, v in towers.state_dict().items())


def test_a_file_does_not_choose_learning_rates(parts: Parts, state: dict[str, Any]) -> None:
    towers, loss, optimizer = parts
    before = [g["peak_lr"] for g in optimizer.param_groups]
    for group in state["optimizer"]["param_groups"]:
        group["peak_lr"] = 1e9
    resume.load(state, PATH, towers, loss, optimizer)
    assert [g["peak_lr"] for g in optimizer.param_groups] == before
