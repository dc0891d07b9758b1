"""Parameter groups and schedules of both modalities."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mmclip.config import TextTrainConfig, TrainConfig
from mmclip.errors import UserError
from mmclip.models.factory import build_model
from mmclip.models.text_encoder import load_text_model
from mmclip.roles import Direction
from mmclip.training import clip_task, text_task
from mmclip.training.optimizer import (
    build_adamw,
    clip_groups,
    cosine_factor,
    linear_factor,
    set_learning_rate,
    text_groups,
    warmup_steps,
)
from tests.helpers.texts import make_bert


def clip(tiny_model: Path, norm: str, **settings: Any) -> dict[str, dict[str, Any]]:
    model = build_model(str(tiny_model))
    config = TrainConfig(norm=norm, lr=1e-3, gamma_lr=0.05, wd=0.2, **settings)
    loss = clip_task.build_loss(config, model)
    optimizer = build_adamw(clip_groups(model.towers, loss, config), (0.9, 0.98), 1e-6)
    names = {id(p): n for n, p in [*model.towers.named_parameters(), *loss.named_parameters()]}
    trained = {id(p) for p in [*model.towers.parameters(), *loss.parameters()] if p.requires_grad}
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(trained), "every trained parameter is in one group"
    return {g["name"]: {**g, "names": {names[id(p)] for p in g["params"]}} for g in optimizer.param_groups}


def test_projections_can_be_exempt_and_gamma_has_its_own_rate(tiny_model: Path) -> None:
    groups = clip(tiny_model, "learned", proj_wd=0.0)
    assert groups["projections"]["names"] == {"clip.visual.proj", "clip.text_projection"}
    assert (groups["projections"]["weight_decay"], groups["matrices"]["weight_decay"]) == (0.0, 0.2)
    assert groups["gamma"]["names"] == {"similarity.gamma_hat_q", "similarity.gamma_hat_d"}
    assert (groups["gamma"]["lr"], groups["gamma"]["weight_decay"]) == (0.05, 0.0)
    assert groups["alpha"]["names"] == {"similarity.logit_scale_i2t", "similarity.logit_scale_t2i"}
    assert groups["vectors"]["weight_decay"] == 0.0
    assert "clip.positional_embedding" in groups["vectors"]["names"], "open_clip exempts it, although it is a matrix"
    assert clip(tiny_model, "cosine")["projections"]["weight_decay"] == 0.2, "like matrices by default"
    assert "gamma" not in clip(tiny_model, "cosine")


def test_gamma_and_alpha_of_text_have_no_weight_decay_and_gamma_a_rate_of_its_own(tmp_path: Path) -> None:
    config = TextTrainConfig(model="m", train_data=str(tmp_path), norm="learned", learn_scale=True, wd=0.3, lr=1e-4,
                             gamma_lr=0.05)  # fmt: skip
    encoder = load_text_model(str(make_bert(tmp_path / "bert"))).encoder
    loss = text_task.build_loss(config)
    groups = build_adamw(text_groups(encoder, loss, config), (0.9, 0.999), 1e-8).param_groups
    for parameter, rate in ((loss.similarity.gamma_hat_q, 0.05), (loss.similarity.logit_scale(Direction.Q2D), 1e-4)):
        (group,) = [g for g in groups if any(p is parameter for p in g["params"])]
        assert (group["weight_decay"], group["lr"]) == (0, rate)
    decayed = {id(p) for g in groups if g["weight_decay"] == 0.3 for p in g["params"]}
    named = dict(encoder.named_parameters())
    assert {n for n, p in named.items() if id(p) not in decayed} == {
        n for n in named if n.endswith("bias") or "LayerNorm" in n
    }


def test_schedules_rise_then_fall_and_scale_every_group() -> None:
    cosine, linear = ([f(s, 10, 100) for s in range(100)] for f in (cosine_factor, linear_factor))
    assert (cosine[0], cosine[9], linear[0], linear[10]) == (0.1, 1.0, 0.0, 1.0)
    for factors, peak in ((cosine, 9), (linear, 10)):
        assert max(factors) == 1.0 and all(a >= b for a, b in itertools.pairwise(factors[peak:]))
    assert cosine[-1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 89 / 90))) and linear[-1] == 1 / 90
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = build_adamw([("a", [a], 1.0, 0.0), ("none", [], 1.0, 0.0), ("b", [b], 4.0, 0.0)], (0.9, 0.98), 1e-6)
    set_learning_rate(optimizer, 0.25)
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, 1.0]


@pytest.mark.parametrize("warmup", [100.0, 5000.0])
def test_warmup_that_fills_the_run_is_refused(warmup: float) -> None:
    with pytest.raises(UserError, match="never reach its peak"):
        warmup_steps(warmup, 100)
