from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from mmclip.config import TrainConfig
from mmclip.errors import UserError
from mmclip.losses.contrastive import clip_loss
from mmclip.models.factory import build_model
from mmclip.training.optimizer import build_optimizer, learning_rate_factor, set_learning_rate, warmup_steps
from tests.helpers.tiny import MODEL as NATIVE


def groups(tmp_path: Path, norm: str, **settings: object) -> dict[str, dict[str, object]]:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(NATIVE), encoding="utf-8")
    towers = build_model(str(path)).towers
    loss = clip_loss("sym", norm)
    optimizer = build_optimizer(towers, loss, TrainConfig(lr=1e-3, gamma_lr=0.05, wd=0.2, **settings))  # type: ignore[arg-type]
    names = {id(p): n for n, p in [*towers.named_parameters(), *loss.named_parameters()]}
    trained = {id(p) for p in [*towers.parameters(), *loss.parameters()] if p.requires_grad}
    grouped = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert sorted(grouped) == sorted(trained), "every trained parameter is in one group"
    return {g["name"]: {**g, "names": {names[id(p)] for p in g["params"]}} for g in optimizer.param_groups}


def test_projections_can_be_exempt_and_gamma_has_its_own_rate(tmp_path: Path) -> None:
    found = groups(tmp_path, "learned", proj_wd=0.0)
    assert found["projections"]["names"] == {"clip.visual.proj", "clip.text_projection"}
    assert (found["projections"]["weight_decay"], found["matrices"]["weight_decay"]) == (0.0, 0.2)
    assert found["gamma"]["names"] == {"similarity.gamma_hat_q", "similarity.gamma_hat_d"}
    assert (found["gamma"]["lr"], found["gamma"]["weight_decay"]) == (0.05, 0.0)
    assert found["alpha"]["names"] == {"similarity.logit_scale_i2t", "similarity.logit_scale_t2i"}
    assert found["vectors"]["weight_decay"] == 0.0
    assert "clip.positional_embedding" in found["vectors"]["names"], "open_clip exempts it, although it is a matrix"


def test_projections_decay_like_matrices_by_default(tmp_path: Path) -> None:
    found = groups(tmp_path, "cosine")
    assert found["projections"]["weight_decay"] == 0.2
    assert "gamma" not in found


def test_schedule_rises_then_falls_and_scales_every_group() -> None:
    factors = [learning_rate_factor(s, 10, 100) for s in range(100)]
    assert factors[0] == 0.1 and factors[9] == 1.0 and max(factors) == 1.0
    assert all(a >= b for a, b in itertools.pairwise(factors[9:]))
    assert factors[-1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 89 / 90)))
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW(
        [{"params": [a], "lr": 1.0, "peak_lr": 1.0}, {"params": [b], "lr": 4.0, "peak_lr": 4.0}]
    )
    set_learning_rate(optimizer, 0.25)
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, 1.0]


@pytest.mark.parametrize("warmup", [100.0, 5000.0])
def test_warmup_that_fills_the_run_is_refused(warmup: float) -> None:
    with pytest.raises(UserError, match="never reach its peak"):
        warmup_steps(warmup, 100)
