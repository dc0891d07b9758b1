"""A checkpoint is believed only as far as it was checked."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmclip.config import TextTrainConfig, TrainConfig
from mmclip.config.sections import CHANGEABLE
from mmclip.errors import UserError
from mmclip.losses.contrastive import clip_loss
from mmclip.models.factory import build_model
from mmclip.training.checkpoint import CONTENT, FORMAT, FREE_TO_CHANGE, check_run, check_settings, restore
from mmclip.training.optimizer import build_adamw, clip_groups

PATH = Path("step_00000003.pt")
FINGERPRINTS = {"data": "abc", "image trunk": "def"}
State = dict[str, Any]


def build(tiny_model: Path, seed: int, partial: bool = False) -> Any:
    """What ``restore`` needs of a TrainStep."""
    torch.manual_seed(seed)
    towers, loss = build_model(str(tiny_model)).towers, clip_loss("sym", "learned")
    towers.lock("image")
    optimizer = build_adamw(clip_groups(towers, loss, TrainConfig()), (0.9, 0.98), 1e-6)
    task = SimpleNamespace(encoder=towers, loss=loss, locked=towers.locked_names(), partial_gradients=partial)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return SimpleNamespace(task=task, optimizer=optimizer, parameters=parameters)


@pytest.fixture(scope="module")
def step(tiny_model: Path) -> Any:
    step = build(tiny_model, 0)
    # the first batch sets alpha and the norm statistics
    step.task.loss({s: torch.randn(4, 16) for s in ("image", "text")})
    for parameter in step.parameters:
        parameter.grad = torch.ones_like(parameter)
    step.optimizer.step()
    return step


@pytest.fixture
def state(step: Any) -> State:
    encoder = {k: v for k, v in step.task.encoder.state_dict().items() if k not in step.task.locked}
    return copy.deepcopy({
        "format": FORMAT, "step": 3, "taken": 3, "seconds": 1.0, "ranks": 1, "bad_samples": {}, "monitors": {},
        "pending": {}, "encoder": encoder, "loss": step.task.loss.state_dict(), "fingerprints": FINGERPRINTS,
        "optimizer": step.optimizer.state_dict(), "settings": TrainConfig().to_dict(),
    })  # fmt: skip


def test_a_good_checkpoint_restores_every_trained_tensor_and_chooses_no_learning_rate(
    step: Any, state: State, tiny_model: Path
) -> None:
    ours = build(tiny_model, 1)  # other weights
    rates = [g["peak_lr"] for g in ours.optimizer.param_groups]
    for group in state["optimizer"]["param_groups"]:
        group["peak_lr"] = 1e9
    check_settings(state, PATH, TrainConfig(workers=7, strict=True, val_steps=9), 1)
    check_run(state, PATH, FINGERPRINTS, 10)
    restore(state, PATH, ours)
    weights, loss = (x.state_dict() for x in (step.task.encoder, step.task.loss))
    restored = {k: v for k, v in ours.task.encoder.state_dict().items() if k not in step.task.locked}
    assert step.task.locked and all(torch.equal(v, weights[k]) for k, v in restored.items())
    assert all(torch.equal(v, loss[k]) or v.isnan().all() for k, v in ours.task.loss.state_dict().items())
    for mine, theirs in zip(ours.optimizer.state.values(), step.optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[k], theirs[k]) for k in theirs)
    assert [g["peak_lr"] for g in ours.optimizer.param_groups] == rates


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(TrainConfig)])
def test_every_setting_is_either_free_to_change_or_named_when_it_has(name: str, state: State) -> None:
    now = TrainConfig()
    setattr(now, name, ["lr"] if name == "may_change" else "another")
    if name in FREE_TO_CHANGE:
        check_settings(state, PATH, now, 1)
    else:
        with pytest.raises(UserError, match=f"other settings than the run's: {name} was .*, is another"):
            check_settings(state, PATH, now, 1)


def test_what_may_change_on_purpose_is_named(state: State) -> None:
    now = TrainConfig(lr=1e-6, epochs=99)
    with pytest.raises(UserError, match=r"lr was 0.0005, is 1e-06 \(intended\? --may-change epochs lr\)"):
        check_settings(state, PATH, now, 1)
    now.may_change = ["lr"]
    with pytest.raises(UserError, match="epochs was 32, is 99"):
        check_settings(state, PATH, now, 1)
    now.may_change = ["lr", "epochs"]
    check_settings(state, PATH, now, 1)
    with pytest.raises(UserError, match=r"norm was cosine, is dot$"):
        check_settings(state, PATH, TrainConfig(norm="dot"), 1)
    names = {f.name for config in (TrainConfig, TextTrainConfig) for f in dataclasses.fields(config)}
    assert names >= FREE_TO_CHANGE | set(CHANGEABLE)
    del state["settings"]["keep_last"]  # a flag that is newer than the checkpoint
    check_settings(state, PATH, TrainConfig(), 1)
    with pytest.raises(UserError, match="keep_last was missing, is True"):
        check_settings(state, PATH, TrainConfig(keep_last=True), 1)


@pytest.mark.parametrize("key", list(CONTENT))
def test_missing_and_odd_content_is_named(key: str, state: State) -> None:
    for broken in ({k: v for k, v in state.items() if k != key}, state | {key: "odd"}):
        with pytest.raises(UserError, match=f"a damaged checkpoint: {key} missing or of another kind"):
            check_settings(broken, PATH, TrainConfig(), 1)


@pytest.mark.parametrize(
    ("fingerprints", "total", "text"),
    [
        (FINGERPRINTS | {"data": "x"}, 10, "training data are not the run's"),
        (FINGERPRINTS | {"image trunk": "x"}, 10, "weights of the locked image trunk are not"),
        (FINGERPRINTS | {"text trunk": "x"}, 10, "weights of the locked text trunk are not"),
        (FINGERPRINTS, 2, "step 3 of a run of 2"),
    ],
)
def test_other_processes_data_trunks_and_steps_are_refused(
    state: State, fingerprints: dict[str, str], total: int, text: str
) -> None:
    with pytest.raises(UserError, match="the run had 1 processes, now there are 2"):
        check_settings(state, PATH, TrainConfig(), 2)
    with pytest.raises(UserError, match=text):
        check_run(state, PATH, fingerprints, total)


def spoil(path: str, value: Any) -> Callable[[State], None]:
    def change(state: State) -> None:
        *keys, last = path.split("/")
        for key in keys:
            state = state[int(key) if key.isdigit() else key]
        state[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        spoil("encoder/clip.text_projection", torch.zeros(3)),
        spoil("encoder/clip.text_projection", "no tensor"),
        spoil("encoder/clip.text_projection", torch.zeros(32, 16, dtype=torch.long)),
        spoil("encoder/clip.text_projection", torch.zeros(32, 16, device="meta")),
        spoil("encoder/clip.ln_final.bias", torch.full((32,), torch.nan)),
        spoil("loss/similarity.gamma_hat_q", torch.tensor(torch.inf)),
        lambda state: state["optimizer"]["state"][0]["exp_avg"].fill_(torch.nan),
        lambda state: state["optimizer"]["state"][0]["exp_avg_sq"].sub_(1),
        spoil("encoder/more", torch.zeros(3)),
        lambda state: state["encoder"].pop("clip.text_projection"),
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
    change: Callable[[State], None], step: Any, state: State
) -> None:
    before = {k: v.clone() for k, v in step.task.encoder.state_dict().items()}
    state["encoder"]["clip.token_embedding.weight"].zero_()
    change(state)
    with pytest.raises(UserError, match=r"--resume step_00000003.pt: (not a checkpoint of this model|a damaged)"):
        restore(state, PATH, step)
    assert all(torch.equal(v, before[k]) for k, v in step.task.encoder.state_dict().items())


def test_moments_may_be_missing_where_steps_leave_parameters_without_gradient(state: State, tiny_model: Path) -> None:
    del state["optimizer"]["state"][0]
    step = build(tiny_model, 1, partial=True)
    restore(state, PATH, step)
    assert len(step.optimizer.state) == len(state["optimizer"]["state"])
