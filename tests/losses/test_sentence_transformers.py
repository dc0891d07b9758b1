"""The drop-in loss against loops in float64, against sentence-transformers' own losses, and in its trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses as theirs
from torch import Tensor, nn
from transformers import TrainerCallback

from mmclip.config import TextTrainConfig
from mmclip.errors import UserError
from mmclip.losses.sentence_transformers import CachedRoleRankingLoss, RoleRankingLoss
from mmclip.models.metadata import text_metadata
from mmclip.roles import Direction, Exponents, Normalization, Positives, direction_weights
from mmclip.similarity import mean_norm_factor, score
from tests.helpers.naive import naive_loss
from tests.helpers.texts import WORDS, make_bert

Q2D = Direction.Q2D
WEIGHTS = {name: direction_weights(name, w, text=True) for name, w in (("q2d", None), ("d2q", None), ("both", 0.3))}
BOTH = direction_weights("both", text=True)
KINDS = (RoleRankingLoss, CachedRoleRankingLoss)


class Given(nn.Sequential):
    """The features are the sentence embeddings."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["rows"]}


GIVEN = Given(nn.Identity())


def vectors(pairs: int, negatives: int) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    rows = [torch.randn(pairs, 4, generator=g, dtype=torch.float64) * (1 + c) for c in range(2 + negatives)]
    return [{"rows": r.requires_grad_()} for r in rows]


def naive(rows: list[Tensor], ids: Tensor | None, judged: set[tuple[int, int]], loss: RoleRankingLoss) -> float:
    """The loss of a first batch, with loops over queries and candidates; documents first, then negatives by column."""
    total = 0.0
    queries = [None] * len(rows[0]) if ids is None else ids[:, 0].tolist()
    documents = [None] * len(rows[0]) * (len(rows) - 1) if ids is None else ids[:, 1 : len(rows)].T.flatten().tolist()
    positive = judged | ({(int(q), int(d)) for q, d in ids[:, :2]} if ids is not None else set())
    known = [[(q, d) in positive for d in documents] for q in queries]
    exponents = Exponents(*(torch.as_tensor(g).item() for g in loss.loss.similarity.exponents))
    for direction, weight in loss.loss.weights.items():
        forward = direction is Q2D
        query, document = (rows[0], torch.cat(rows[1:])) if forward else (rows[1], rows[0])
        alpha = 20.0 / mean_norm_factor(query, document, exponents)
        if weight > 0:
            assert loss.loss.similarity.scale(direction).item() == pytest.approx(alpha, rel=1e-12)
            matches = known if forward else [list(column) for column in zip(*known, strict=True)][: len(query)]
            scores = score(query, document, exponents, alpha)
            total += weight * naive_loss(scores, matches, loss.loss.positives.value)
    return total


@given(
    ids=st.lists(st.tuples(st.integers(0, 2), *[st.integers(0, 3)] * 3), min_size=2, max_size=5),
    judged=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=5),
    shape=st.tuples(st.integers(0, 2), st.booleans()),
    how=st.tuples(
        st.sampled_from(list(WEIGHTS)), st.sampled_from(list(Normalization)), st.sampled_from(list(Positives))
    ),
)
def test_values_equal_the_naive_loops_and_cached_gradients_the_plain_ones(
    ids: list[Any], judged: set[tuple[int, int]], shape: tuple[int, bool], how: tuple[str, Normalization, Positives]
) -> None:
    (negatives, has_ids), (name, norm, policy) = shape, how
    labels, judged = (torch.tensor(ids)[:, : 2 + negatives], judged) if has_ids else (None, set())
    relevant = torch.tensor(sorted(judged), dtype=torch.long).reshape(-1, 2)
    found = []
    for kind in KINDS:
        own = {"gamma_init": 0.3, "learn_scale": True, "relevant": relevant}
        loss = kind(GIVEN, WEIGHTS[name], norm, policy, **own).double()
        features = vectors(len(ids), negatives)
        value = loss(features, labels)
        value.backward()
        rows = [f["rows"].detach() for f in features[: 2 if name == "d2q" else None]]
        assert value.item() == pytest.approx(naive(rows, labels, judged, loss), rel=1e-10)
        loss.loss.focal = 1.0
        (loss(features, labels) / 4).backward()  # as a trainer scales a loss that it accumulates
        leaves = [*(f["rows"] for f in features), *loss._own()]
        assert len(loss._own()) == len(loss.loss.trained) + 2 * (norm == "learned")
        found.append([torch.zeros(()) if leaf.grad is None else leaf.grad for leaf in leaves])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("labels", [None, torch.zeros(3), torch.zeros(3, 3), torch.zeros(3, 2, dtype=torch.long)])
def test_labels_that_are_no_ids_are_ignored_and_refused_where_judgments_are_known(labels: Tensor | None) -> None:
    features = vectors(3, 1)
    plain = RoleRankingLoss(GIVEN, positives="none")(features).item()
    assert RoleRankingLoss(GIVEN, positives="mask")(features, labels).item() == plain
    relevant = torch.tensor([[0, 0]])
    assert RoleRankingLoss(GIVEN, positives="none", relevant=relevant)(features, labels).item() == plain
    with pytest.raises(UserError, match=r"labels of shape .*whole numbers \[3, 3\]"):
        RoleRankingLoss(GIVEN, relevant=relevant)(features, labels)


def test_weights_of_no_text_direction_are_refused() -> None:
    for weights in ({Direction.I2T: 1.0}, {Q2D: 0.0}, {}):
        with pytest.raises(UserError, match="a weight above 0 of q2d, d2q or both"):
            RoleRankingLoss(GIVEN, weights)
    with pytest.raises(UserError, match="1 text column"):
        RoleRankingLoss(GIVEN)(vectors(2, 0)[:1])


# --- sentence-transformers' own losses --------------------------------------------------------------------------------


def tiny_encoder(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(make_bert(folder, normalize=False)), device="cpu")


def sentences(rows: int, columns: int, seed: int = 0) -> list[list[str]]:
    """Columns of ``rows`` sentences of two to five words."""
    rng = np.random.default_rng(seed)
    return [[" ".join(rng.choice(WORDS, 2 + (i + c) % 4)) for i in range(rows)] for c in range(columns)]


@pytest.fixture
def tiny(tmp_path: Path) -> SentenceTransformer:
    return tiny_encoder(tmp_path / "encoder")


def value_and_gradient(loss: nn.Module, columns: list[list[str]]) -> tuple[float, Tensor]:
    """Of the model's parameters, all in one row."""
    model: Any = loss.model
    model.zero_grad()
    value = loss([model.preprocess(c) for c in columns], None)
    value.backward()
    return value.item(), torch.cat([p.grad.ravel() for p in model.parameters() if p.grad is not None])


def assert_same(ours: nn.Module, reference: nn.Module, columns: list[list[str]]) -> None:
    (a, gradient), (b, expected) = (value_and_gradient(loss, columns) for loss in (ours, reference))
    assert a == pytest.approx(b, rel=1e-5) and len(gradient) == len(expected) and expected.abs().max() > 1e-3
    assert float((gradient - expected).abs().max() / expected.abs().max()) <= 1e-5


PLAIN: dict[str, Any] = {"norm": "cosine", "positives": "none", "scale_init": 20.0}


@pytest.mark.parametrize("columns", [2, 4])
def test_cosine_q2d_and_both_are_the_multiple_negatives_ranking_losses(tiny: SentenceTransformer, columns: int) -> None:
    batch = sentences(7, columns)
    symmetric = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    for weights, how in ((None, {}), (BOTH, symmetric)):
        reference = theirs.MultipleNegativesRankingLoss(tiny, **how)
        assert_same(RoleRankingLoss(tiny, weights, **PLAIN), reference, batch)
        cached = theirs.CachedMultipleNegativesRankingLoss(tiny, **how, mini_batch_size=3)
        assert_same(CachedRoleRankingLoss(tiny, weights, **PLAIN, mini_batch_size=3), cached, batch)
    with pytest.deprecated_call():
        reference = theirs.MultipleNegativesSymmetricRankingLoss(tiny)
    assert_same(RoleRankingLoss(tiny, BOTH, **PLAIN), reference, batch)
    with pytest.raises(AssertionError):  # another scale is another loss
        other = RoleRankingLoss(tiny, **PLAIN | {"scale_init": 20.1})
        assert_same(other, theirs.MultipleNegativesRankingLoss(tiny), batch)


# --- in the trainer ---------------------------------------------------------------------------------------------------


class Clamp(TrainerCallback):
    def __init__(self, loss: RoleRankingLoss) -> None:
        self.loss = loss
        self.steps: list[dict[str, float]] = []

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.loss.clamp_logit_scale()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        similarity = self.loss.loss.similarity
        gammas = {n: torch.as_tensor(g).item() for n, g in similarity.exponents._asdict().items()}
        self.steps.append({"alpha": similarity.scale(Q2D).item(), **gammas})


IDS = [[i // 2, i, 23 - i] for i in range(24)]
JUDGED = torch.tensor(IDS)[:, :2]


def train(loss: RoleRankingLoss, folder: Path, steps: int = 6, **settings: Any) -> list[dict[str, float]]:
    """Train on 24 rows with ids; alpha and the exponents after each step."""
    query, document, negative = sentences(24, 3)
    data = Dataset.from_dict({"query": query, "document": document, "negative": negative, "label": IDS})
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, per_device_eval_batch_size=8,
        learning_rate=1e-3, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
        learning_rate_mapping={"gamma_hat": 5e-2} if loss.loss.similarity.norm == "learned" else {}, seed=0,
        dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    clamp, held_out = Clamp(loss), data.select(range(16))
    SentenceTransformerTrainer(model=loss.model, args=arguments, train_dataset=data, eval_dataset=held_out, loss=loss,
                               callbacks=[clamp]).train()  # fmt: skip
    return clamp.steps


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_in_the_trainer_and_gamma_moves_at_its_own_rate(
    tiny: SentenceTransformer, tmp_path: Path, kind: type[RoleRankingLoss]
) -> None:
    loss = kind(tiny, BOTH, "learned", relevant=JUDGED)
    before = {n: p.detach().clone() for n, p in tiny.named_parameters()}
    steps = train(loss, tmp_path / "run", weight_decay=0.0)
    assert len(steps) == 6
    assert abs(steps[-1]["gamma_q"] - 0.5) > 0.02 and abs(steps[-1]["gamma_d"] - 0.5) > 0.02, steps
    assert len({s["alpha"] for s in steps}) == 1, "the first batch sets alpha, and nothing moves it"
    assert any((p - before[n]).abs().max() > 1e-4 for n, p in tiny.named_parameters())
    batch = [tiny.preprocess(c) for c in sentences(24, 3)]
    with torch.no_grad():
        trained = float(loss(batch, torch.tensor(IDS)))
        fresh = kind(tiny_encoder(tmp_path / "again"), BOTH, "learned", relevant=JUDGED)
        assert trained < 0.8 * float(fresh(batch, torch.tensor(IDS)))


def test_accumulated_steps_of_the_cached_loss_move_everything_as_the_plain_ones_do(tmp_path: Path) -> None:
    """The trainer divides an accumulated loss: the gradients of gamma and alpha must be divided, too."""
    found = []
    for kind in KINDS:
        loss = kind(tiny_encoder(tmp_path / kind.__name__), None, "learned", learn_scale=True, relevant=JUDGED)
        # the clip acts on every parameter's gradient, and plain SGD shows its size
        found.append(train(loss, tmp_path / "run", 3, gradient_accumulation_steps=3, optim="sgd", weight_decay=0.0))
    for plain, cached in zip(*found, strict=True):
        assert plain == pytest.approx(cached, rel=1e-5)
    assert found[0][-1]["gamma_d"] != pytest.approx(0.5, rel=1e-4)


def test_evaluation_leaves_the_loss_as_it_is(tiny: SentenceTransformer, tmp_path: Path) -> None:
    how: dict[str, Any] = {"norm": "dot", "norm_drift": 0.1}
    loss = RoleRankingLoss(tiny, **how)
    before = {n: v.clone() for n, v in loss.loss.state_dict().items()}
    batch = [tiny.preprocess(c) for c in sentences(5, 2)]
    with torch.no_grad():
        value = float(loss(batch))
    assert all(torch.equal(v, before[n]) or v.isnan().all() for n, v in loss.loss.state_dict().items())
    assert loss(batch).item() == pytest.approx(value, rel=1e-6), "before the first step alpha is its own"
    assert loss.loss.similarity.has_norm_stats(Q2D)
    plain = train(RoleRankingLoss(tiny_encoder(tmp_path / "a"), **how), tmp_path / "run", 3)
    often: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    assert plain == train(RoleRankingLoss(tiny_encoder(tmp_path / "b"), **how), tmp_path / "run", 3, **often)


def test_a_held_alpha_has_no_gradient_and_the_clamp_brings_it_back() -> None:
    loss = RoleRankingLoss(GIVEN, norm="qnorm", scale_init=20.0, scale_max=30.0)
    assert [n for n, p in loss.named_parameters() if p.requires_grad] == []
    loss(vectors(5, 0))
    similarity = loss.loss.similarity
    similarity.norm_stats(Q2D).mul_(2)  # norms grew
    assert similarity.effective_scale(Q2D) == pytest.approx(80, rel=1e-6)
    loss.clamp_logit_scale()
    assert similarity.effective_scale(Q2D) == pytest.approx(30, rel=1e-6)


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_metadata_and_model_card_have_the_losss_settings(name: str, tmp_path: Path) -> None:
    config = TextTrainConfig(model="m", train_data=str(tmp_path), loss=name, norm="qnorm", positives="multi", focal=2.0)
    weights = direction_weights(name, text=True)
    loss = CachedRoleRankingLoss(GIVEN, weights, config.norm, config.positives, focal=2.0, mini_batch_size=4)
    before = text_metadata(config, loss.loss.similarity, loss.loss.trained)
    assert {v for k, v in before.items() if "scale" in k} == {None}, "before the first batch"
    loss(vectors(5, 0))
    found = text_metadata(config, loss.loss.similarity, loss.loss.trained)
    trained = {d.value: w > 0 for d, w in weights.items()}
    assert {d: found[f"logit_scale_{d}"] is not None for d in trained} == trained
    assert {d: found[f"effective_scale_{d}"] == pytest.approx(20, rel=1e-6) for d in trained} == trained
    assert found.items() >= {"task": "text", "loss": name, "q2d_weight": weights[Q2D], "focal": 2.0}.items()
    card = loss.get_config_dict()
    assert card["weights"] == {d.value: w for d, w in weights.items()}
    assert (card["mini_batch_size"], card["focal"], card["norm"]) == (4, 2.0, "qnorm")
