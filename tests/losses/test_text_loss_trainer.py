"""The drop-in loss in a real SentenceTransformerTrainer, what it saves and what it says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from transformers import TrainerCallback

from mmclip.config import TextTrainConfig
from mmclip.errors import UserError
from mmclip.losses.sentence_transformers import (
    CachedRoleRankingLoss,
    RoleRankingLoss,
)
from mmclip.models.metadata import text_metadata
from mmclip.roles import Direction, direction_weights
from tests.helpers.tiny_encoder import sentences, tiny_encoder


@pytest.fixture
def tiny(tmp_path: Path) -> SentenceTransformer:
    return tiny_encoder(tmp_path / "encoder")


class Clamp(TrainerCallback):
    def __init__(self, loss: RoleRankingLoss) -> None:
        self.loss = loss
        self.seen: list[dict[str, float]] = []

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.loss.clamp_logit_scale()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        similarity = self.loss.loss.similarity
        gammas = {n: torch.as_tensor(g).item() for n, g in similarity.exponents._asdict().items()}
        self.seen.append({"alpha": similarity.scale(Direction.Q2D).item(), **gammas})


def train(loss: RoleRankingLoss, folder: Path, steps: int = 6, **settings: Any) -> list[dict[str, float]]:
    """Train on 24 rows with ids; alpha and the exponents after each step."""
    query, document, negative = sentences(24, 3)
    ids = [[i // 2, i, 23 - i] for i in range(24)]
    data = Dataset.from_dict({"query": query, "document": document, "negative": negative, "label": ids})
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        learning_rate=1e-3,
        learning_rate_mapping={"gamma_hat": 5e-2} if loss.loss.similarity.norm == "learned" else {},
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        dataloader_pin_memory=False,
        **settings,
    )
    watch = Clamp(loss)
    model = loss.model
    SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data.select(range(16)), loss=loss,
        callbacks=[watch],
    ).train()  # fmt: skip
    return watch.seen


JUDGED = torch.tensor([[i // 2, i] for i in range(24)])


@pytest.mark.parametrize("kind", [RoleRankingLoss, CachedRoleRankingLoss])
def test_it_trains_in_the_trainer_and_gamma_moves_at_its_own_rate(
    tiny: SentenceTransformer, tmp_path: Path, kind: type[RoleRankingLoss]
) -> None:
    loss = kind(tiny, direction_weights("both", text=True), "learned", relevant=JUDGED)
    before = {n: p.detach().clone() for n, p in tiny.named_parameters()}
    seen = train(loss, tmp_path / "run", weight_decay=0.0)
    assert len(seen) == 6
    assert abs(seen[-1]["gamma_q"] - 0.5) > 0.02 and abs(seen[-1]["gamma_d"] - 0.5) > 0.02, seen
    assert len({s["alpha"] for s in seen}) == 1, "the first batch sets alpha, and nothing moves it"
    assert any((p - before[n]).abs().max() > 1e-4 for n, p in tiny.named_parameters())
    batch = [tiny.preprocess(c) for c in sentences(24, 3)]
    ids = torch.tensor([[i // 2, i, 23 - i] for i in range(24)])
    with torch.no_grad():
        trained = float(loss(batch, ids))
        fresh = kind(tiny_encoder(tmp_path / "again"), direction_weights("both", text=True), "learned", relevant=JUDGED)
        assert trained < 0.8 * float(fresh(batch, ids))


def test_accumulated_steps_of_the_cached_loss_move_everything_as_the_plain_ones_do(tmp_path: Path) -> None:
    """The trainer divides an accumulated loss: the gradients of gamma and alpha must hear of it."""
    found = []
    for kind in (RoleRankingLoss, CachedRoleRankingLoss):
        loss = kind(tiny_encoder(tmp_path / kind.__name__), None, "learned", learn_scale=True, relevant=JUDGED)
        # the clip acts on every parameter's gradient, and plain SGD shows its size
        found.append(train(loss, tmp_path / "run", 3, gradient_accumulation_steps=3, optim="sgd", weight_decay=0.0))
    for plain, cached in zip(*found, strict=True):
        assert plain == pytest.approx(cached, rel=1e-5)
    assert found[0][-1]["gamma_d"] != pytest.approx(0.5, rel=1e-4)


def test_evaluation_leaves_the_loss_as_it_is(tiny: SentenceTransformer, tmp_path: Path) -> None:
    settings = {"norm": "dot", "norm_drift": 0.1}
    loss = RoleRankingLoss(tiny, **settings)
    before = {n: v.clone() for n, v in loss.loss.state_dict().items()}
    batch = [tiny.preprocess(c) for c in sentences(5, 2)]
    with torch.no_grad():
        value = float(loss(batch))
    assert all(torch.equal(v, before[n]) or v.isnan().all() for n, v in loss.loss.state_dict().items())
    assert float(loss(batch).detach()) == pytest.approx(value, rel=1e-6), "before the first step alpha is its own"
    assert loss.loss.similarity.has_norm_stats(Direction.Q2D)
    plain = train(RoleRankingLoss(tiny_encoder(tmp_path / "a"), **settings), tmp_path / "run", 3)
    evaluated = train(
        RoleRankingLoss(tiny_encoder(tmp_path / "b"), **settings), tmp_path / "run", 3,
        eval_strategy="steps", eval_steps=1, eval_on_start=True,
    )  # fmt: skip
    assert plain == evaluated


def test_a_held_alpha_has_no_gradient_and_the_clamp_brings_it_back(tiny: SentenceTransformer) -> None:
    loss = RoleRankingLoss(tiny, norm="qnorm", scale_init=20.0, scale_max=30.0)
    assert [n for n, p in loss.named_parameters() if p.requires_grad and n.startswith("loss.")] == []
    batch = [tiny.preprocess(c) for c in sentences(5, 2)]
    loss(batch)
    similarity = loss.loss.similarity
    assert similarity.effective_scale(Direction.Q2D) == pytest.approx(20, rel=1e-6)
    similarity.norm_stats(Direction.Q2D).mul_(2)  # documents grew
    assert similarity.effective_scale(Direction.Q2D) == pytest.approx(80, rel=1e-6)
    loss.clamp_logit_scale()
    assert similarity.effective_scale(Direction.Q2D) == pytest.approx(30, rel=1e-6)


@pytest.mark.parametrize("name", ["q2d", "d2q", "both"])
def test_facts_say_how_it_was_trained(tiny: SentenceTransformer, tmp_path: Path, name: str) -> None:
    given = TextTrainConfig(model="m", train_data=str(tmp_path), loss=name, norm="qnorm", positives="multi")
    loss = RoleRankingLoss(
        tiny, direction_weights(name, text=True), given.norm, given.positives, given.logit_scale_init
    )
    assert {v for k, v in text_metadata(given, loss.loss.similarity, loss.loss.trained).items() if "scale" in k} == {
        None
    }, "no batch was seen"
    loss([tiny.preprocess(c) for c in sentences(5, 2)])
    facts = text_metadata(given, loss.loss.similarity, loss.loss.trained)
    trained = {"q2d": ["q2d"], "d2q": ["d2q"], "both": ["q2d", "d2q"]}[name]
    for direction in ("q2d", "d2q"):
        alpha, effective = (facts.pop(f"{kind}_{direction}") for kind in ("logit_scale", "effective_scale"))
        if direction in trained:
            assert effective == pytest.approx(20, rel=1e-6) and 0 < alpha != pytest.approx(20)
        else:
            assert alpha is effective is None
    assert facts.pop("effective_scale") == pytest.approx(20, rel=1e-6)
    weight = {"q2d": 1.0, "d2q": 0.0, "both": 0.5}[name]
    assert facts == {"task": "text", "loss": name, "q2d_weight": weight, "norm": "qnorm", "gamma_q": 1.0,
                     "gamma_d": 0.0, "positives": "multi"}  # fmt: skip
    cached = CachedRoleRankingLoss(tiny, norm="dot", mini_batch_size=4, focal=2.0, norm_drift=0.5)
    config = cached.get_config_dict()
    assert config["weights"] == {"q2d": 1.0, "d2q": 0.0} and config["mini_batch_size"] == 4 and config["focal"] == 2.0
    focused = TextTrainConfig(model="m", train_data=str(tmp_path), focal=2.0, norm_drift=0.5)
    metadata = text_metadata(focused, cached.loss.similarity, cached.loss.trained)
    assert (metadata["focal"], metadata["norm_drift"]) == (2.0, 0.5)


def test_what_cannot_be_trained_is_refused_in_one_line(tiny: SentenceTransformer) -> None:
    for weights in ({Direction.I2T: 1.0}, {Direction.Q2D: 0.0}, {}):
        with pytest.raises(UserError, match="a weight above 0 of q2d, d2q or both"):
            RoleRankingLoss(tiny, weights)
    with pytest.raises(UserError, match="1 text column"):
        RoleRankingLoss(tiny)([tiny.preprocess(["w1"])])
