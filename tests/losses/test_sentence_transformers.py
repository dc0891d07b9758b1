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
            assert float(loss.loss.similarity.scale(direction)) == pytest.approx(alpha, rel=1e-12)
            matches = known if forward else [list(column) for column in zip(*known, strict=True)][: len(query)]
            scores = score(query, document, exponents, alpha)
            total += weight * naive_loss(scores, matches, loss.loss.positives.value)
    return total


@given(
    queries=st.lists(st.integers(0, 2), min_size=2, max_size=5),
    documents=st.lists(st.integers(0, 3), min_size=15, max_size=15),
    judged=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=5),
    negatives=st.integers(0, 2),
    name=st.sampled_from(list(WEIGHTS)),
    policy=st.sampled_from(list(Positives)),
    norm=st.sampled_from(list(Normalization)),
    has_ids=st.booleans(),
)
def test_values_equal_the_naive_loops_and_cached_gradients_the_plain_ones(
    queries: list[int],
    documents: list[int],
    judged: set[tuple[int, int]],
    negatives: int,
    name: str,
    policy: Positives,
    norm: Normalization,
    has_ids: bool,
) -> None:
    pairs, judged = len(queries), judged if has_ids else set()
    ids = torch.tensor([queries, *(documents[c * pairs : (c + 1) * pairs] for c in range(1 + negatives))]).T
    relevant = torch.tensor(sorted(judged), dtype=torch.long).reshape(-1, 2)
    found = []
    for kind in KINDS:
        loss = kind(GIVEN, WEIGHTS[name], norm, policy, gamma_init=0.3, relevant=relevant).double()
        features = vectors(pairs, negatives)
        value = loss(features, ids if has_ids else None)
        value.backward()
        rows = [f["rows"].detach() for f in features[: 2 if name == "d2q" else None]]
        assert value.item() == pytest.approx(naive(rows, ids if has_ids else None, judged, loss), rel=1e-10)
        leaves = [f["rows"] for f in features] + [p for n, p in loss.named_parameters() if "gamma_hat" in n]
        found.append([torch.zeros(()) if leaf.grad is None else leaf.grad for leaf in leaves])
    for plain, cached in zip(*found, strict=True):
        torch.testing.assert_close(plain, cached, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("labels", [None, torch.zeros(3), torch.zeros(3, 3), torch.zeros(3, 2, dtype=torch.long)])
def test_labels_that_are_no_ids_are_ignored_and_refused_where_judgments_are_known(labels: Tensor | None) -> None:
    features = vectors(3, 1)
    plain = RoleRankingLoss(GIVEN, positives="none")(features).item()
    assert RoleRankingLoss(GIVEN, positives="mask")(features, labels).item() == plain
    relevant = torch.tensor([[0, 0]])
    assert RoleRankingLoss(GIVEN, positives="none", relevant=relevant)(features, labels).item() == plain
    with pytest.raises(UserError, match=r"labels of shape .*whole numbers \[3, 3\]"):
        RoleRankingLoss(GIVEN, relevant=relevant)(features, labels)


@pytest.mark.parametrize("weights", [{Direction.I2T: 1.0}, {Q2D: 0.0}, {}], ids=str)
def test_weights_of_no_text_direction_are_refused(weights: dict[Direction, float]) -> None:
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


@pytest.mark.parametrize(("norm", "name"), [("dot", "q2d"), ("learned", "d2q"), ("learned", "both")])
def test_cached_gradients_equal_those_of_the_whole_batch(tiny: SentenceTransformer, norm: str, name: str) -> None:
    """In float32, alpha's and gamma's own among them, scaled as the trainer scales a loss that it accumulates."""
    how = {"weights": WEIGHTS[name], "norm": norm, "learn_scale": True, "norm_drift": 0.2, "focal": 1.0}
    labels = torch.tensor([[i % 5, i % 4, 9 - i] for i in range(7)])
    whole, cached = RoleRankingLoss(tiny, **how), CachedRoleRankingLoss(tiny, **how, mini_batch_size=3)
    for step in range(2):
        found = []
        for loss in (whole, cached):
            loss.zero_grad()
            value = loss([tiny.preprocess(c) for c in sentences(7, 3, step)], labels)
            (value / 4).backward()
            found.append((value.item(), {n: p.grad.clone() for n, p in loss.named_parameters() if p.grad is not None}))
        (a, expected), (b, gradients) = found
        assert a == pytest.approx(b, rel=1e-6) and gradients.keys() == expected.keys()
        assert sum("loss." in n for n in expected) == len(whole.loss.trained) + 2 * (norm == "learned")
        for n, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[n], rtol=1e-5, atol=1e-6, msg=n)
        for n, buffer in cached.loss.named_buffers():
            torch.testing.assert_close(buffer, whole.loss.get_buffer(n), rtol=1e-6, atol=0)


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


def test_a_held_alpha_has_no_gradient_and_the_clamp_brings_it_back(tiny: SentenceTransformer) -> None:
    loss = RoleRankingLoss(tiny, norm="qnorm", scale_init=20.0, scale_max=30.0)
    assert [n for n, p in loss.named_parameters() if p.requires_grad and n.startswith("loss.")] == []
    loss([tiny.preprocess(c) for c in sentences(5, 2)])
    similarity = loss.loss.similarity
    similarity.norm_stats(Q2D).mul_(2)  # norms grew
    assert similarity.effective_scale(Q2D) == pytest.approx(80, rel=1e-6)
    loss.clamp_logit_scale()
    assert similarity.effective_scale(Q2D) == pytest.approx(30, rel=1e-6)


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_metadata_and_model_card_have_the_losss_settings(name: str, tmp_path: Path) -> None:
    data = str(tmp_path)
    config = TextTrainConfig(model="m", train_data=data, loss=name, norm="qnorm", positives="multi", focal=2.0)
    weights = direction_weights(name, text=True)
    loss = CachedRoleRankingLoss(GIVEN, weights, config.norm, config.positives, focal=2.0, mini_batch_size=4)
    before = text_metadata(config, loss.loss.similarity, loss.loss.trained)
    assert {v for k, v in before.items() if "scale" in k} == {None}, "before the first batch"
    loss(vectors(5, 0))
    found = text_metadata(config, loss.loss.similarity, loss.loss.trained)
    scales = {k: found.pop(k) for k in list(found) if "_scale" in k}
    trained = {f"effective_scale_{d.value}" for d, w in weights.items() if w > 0} | {"effective_scale"}
    assert {k for k, v in scales.items() if v == pytest.approx(20, rel=1e-6)} == trained
    assert sum(v is None for v in scales.values()) == 2 * (len(trained) < 3)
    assert found == {"task": "text", "loss": name, "q2d_weight": weights[Q2D], "norm": "qnorm", "gamma_q": 1.0,
                     "gamma_d": 0.0, "positives": "multi", "focal": 2.0}  # fmt: skip
    card = loss.get_config_dict()
    assert card["weights"] == {d.value: w for d, w in weights.items()}
    assert (card["mini_batch_size"], card["focal"], card["norm"]) == (4, 2.0, "qnorm")
