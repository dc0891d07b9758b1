"""The drop-in loss against loops in float64, against sentence-transformers' own losses, and in its trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses as theirs
from torch import Tensor, nn

from mmclip.data.beir import open_beir
from mmclip.errors import UserError
from mmclip.losses.sentence_transformers import CachedRoleRankingLoss, RoleRankingLoss
from mmclip.models.text_encoder import load_text_model
from mmclip.roles import Direction, Normalization, Positives, direction_weights
from tests.helpers.tiny_encoder import sentences, tiny_encoder

WEIGHTS = {
    "q2d": direction_weights("q2d", text=True),
    "d2q": direction_weights("d2q", text=True),
    "both": direction_weights("both", 0.3, text=True),
}
NAMES = ("q2d", "d2q", "both")
Features = list[dict[str, Tensor]]


class Given(nn.Sequential):
    """The vectors are the features themselves."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["rows"]}


GIVEN = Given(nn.Identity())


def vectors(pairs: int, negatives: int, seed: int = 0) -> Features:
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randn(pairs, 4, generator=g, dtype=torch.float64) * (1 + c) for c in range(2 + negatives)]
    return [{"rows": r.requires_grad_()} for r in rows]


def naive(
    features: Features, ids: list[list[int]] | None, judged: set[tuple[int, int]], loss: RoleRankingLoss
) -> tuple[Tensor, dict[str, float]]:
    """(the loss, alpha by direction) of a first batch, with loops over queries and candidates."""
    norm = loss.loss.similarity.norm.value
    hats = [p for n, p in loss.named_parameters() if "gamma_hat" in n]
    fixed = {"cosine": (1, 1), "dot": (0, 0), "qnorm": (1, 0), "dnorm": (0, 1)}
    gamma_q, gamma_d = (h.sigmoid() for h in hats) if hats else map(torch.tensor, fixed[norm])
    queries, documents, *negatives = (f["rows"] for f in features)
    pairs = len(queries)
    positive = set(judged) | {(i[0], i[1]) for i in ids or []}
    total, alphas = torch.zeros((), dtype=torch.float64), {}
    for name, weight in loss.loss.weights.items():
        if weight == 0:
            continue
        forward = name.value == "q2d"
        asked = queries if forward else documents
        candidates = [*documents, *(row for column in negatives for row in column)] if forward else [*queries]
        kept = [
            sum(float(row.detach().norm()) ** (1 - gamma.item()) for row in rows) / len(rows)
            for rows, gamma in ((asked, gamma_q), (candidates, gamma_d))
        ]
        alphas[name.value] = 20.0 / (kept[0] * kept[1])
        for i in range(pairs):
            scores = []
            for c in candidates:
                length = asked[i].norm() ** gamma_q * c.norm() ** gamma_d
                scores.append(alphas[name.value] * (asked[i] @ c) / length)
            known = []
            for j in range(len(candidates)):
                if ids is None or j == i:
                    continue
                if forward:  # documents first, then the first negatives of all rows, then the second
                    asker, other = ids[i][0], ids[j % pairs][1 + j // pairs]
                else:
                    asker, other = ids[j][0], ids[i][1]
                if (asker, other) in positive:
                    known.append(j)
            policy = loss.loss.positives.value
            rivals = [s for j, s in enumerate(scores) if policy != "mask" or j not in known]
            targets = [i, *known] if policy == "multi" else [i]
            log_sum = sum(s.exp() for s in rivals).log()  # type: ignore[union-attr]
            total = total + weight * sum(log_sum - scores[j] for j in targets) / len(targets) / pairs
    return total, alphas


@given(
    queries=st.lists(st.integers(0, 2), min_size=2, max_size=5),
    documents=st.lists(st.integers(0, 3), min_size=15, max_size=15),
    judged=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=5),
    negatives=st.integers(0, 2),
    name=st.sampled_from(NAMES),
    policy=st.sampled_from(list(Positives)),
    norm=st.sampled_from(list(Normalization)),
    has_ids=st.booleans(),
)
def test_value_and_gradients_equal_the_naive_loops(
    queries: list[int],
    documents: list[int],
    judged: set[tuple[int, int]],
    negatives: int,
    name: str,
    policy: Positives,
    norm: Normalization,
    has_ids: bool,
) -> None:
    check(queries, documents, judged if has_ids else set(), negatives, name, policy, norm, has_ids)


@pytest.mark.parametrize("policy", list(Positives))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("norm", list(Normalization))
def test_every_norm_direction_and_policy_equals_the_naive_loops(norm: Normalization, name: str, policy: str) -> None:
    check([0, 1, 0, 2], [0, 1, 2, 3, 0, 3, 1, 2, 1, 1, 0, 2], {(1, 3), (2, 0), (0, 1)}, 2, name, policy, norm, True)


def check(
    queries: Sequence[int],
    documents: Sequence[int],
    judged: set[tuple[int, int]],
    negatives: int,
    name: str,
    policy: str,
    norm: Normalization,
    has_ids: bool,
) -> None:
    pairs = len(queries)
    columns = [documents[c * pairs : (c + 1) * pairs] for c in range(1 + negatives)]
    ids = [[queries[i], *(c[i] for c in columns)] for i in range(pairs)]
    relevant = torch.tensor(sorted(judged), dtype=torch.long).reshape(-1, 2)
    for kind in (RoleRankingLoss, CachedRoleRankingLoss):
        loss = kind(GIVEN, WEIGHTS[name], norm, policy, gamma_init=0.3, relevant=relevant).double()
        features = vectors(pairs, negatives)
        expected, alphas = naive(features, ids if has_ids else None, judged, loss)
        leaves = [f["rows"] for f in features[: 2 if name == "d2q" else None]]
        leaves += [p for n, p in loss.named_parameters() if "gamma_hat" in n]
        reference = torch.autograd.grad(expected, leaves)
        value = loss(features, torch.tensor(ids) if has_ids else None)
        value.backward()
        assert value.item() == pytest.approx(expected.item(), rel=1e-10)
        for got, right in zip((leaf.grad for leaf in leaves), reference, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-8, atol=1e-11)
        for direction, alpha in alphas.items():
            assert float(loss.loss.similarity.scale(Direction(direction))) == pytest.approx(alpha, rel=1e-12)


def test_a_known_positive_among_hard_negatives_of_any_row_is_masked_a_target_or_a_negative() -> None:
    labels = torch.tensor([[5, 0, 9], [6, 1, 3]])  # query 5 also has documents 3 (a negative of the other row) and 8
    relevant = torch.tensor([[5, 3], [5, 8], [6, 1]])
    found = {}
    for policy in Positives:
        loss = RoleRankingLoss(GIVEN, positives=policy, relevant=relevant)
        features = vectors(2, 1)
        found[policy] = loss(features, labels).item()
        gradient = torch.autograd.grad(loss(features, labels), [f["rows"] for f in features])[2][1]
        assert gradient.any(), "query 6 has it as a negative under every policy"
    assert len(set(found.values())) == 3


@pytest.mark.parametrize("labels", [None, torch.zeros(3), torch.zeros(3, 3), torch.zeros(3, 2, dtype=torch.long)])
def test_labels_of_another_shape_say_nothing_and_are_refused_where_judgments_are_known(labels: Tensor | None) -> None:
    features = vectors(3, 1)
    plain = RoleRankingLoss(GIVEN, positives="none")(features).item()
    assert RoleRankingLoss(GIVEN, positives="mask")(features, labels).item() == plain
    relevant = torch.tensor([[0, 0]])
    assert RoleRankingLoss(GIVEN, positives="none", relevant=relevant)(features, labels).item() == plain
    with pytest.raises(UserError, match=r"labels of shape .*whole numbers \[3, 3\]"):
        RoleRankingLoss(GIVEN, relevant=relevant)(features, labels)


# --- sentence-transformers' own losses --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SentenceTransformer:
    return tiny_encoder(tmp_path_factory.mktemp("encoder"))


def value_and_gradient(loss: nn.Module, columns: list[list[str]]) -> tuple[float, Tensor]:
    """Of the model's parameters, all in one row."""
    model = loss.model
    model.zero_grad()
    value = loss([model.preprocess(c) for c in columns], None)
    value.backward()
    return value.item(), torch.cat([p.grad.ravel() for p in model.parameters() if p.grad is not None])


def is_equal(ours: nn.Module, reference: nn.Module, columns: list[list[str]]) -> None:
    (a, gradient), (b, expected) = (value_and_gradient(loss, columns) for loss in (ours, reference))
    assert a == pytest.approx(b, rel=1e-5) and len(gradient) == len(expected) and expected.abs().max() > 1e-3
    assert float((gradient - expected).abs().max() / expected.abs().max()) <= 1e-5


SYMMETRIC = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
PLAIN: dict[str, Any] = {"norm": "cosine", "positives": "none", "scale_init": 20.0}


def compare(model: nn.Module, columns: list[list[str]]) -> None:
    """The four of ours against the four of theirs."""
    both = {"weights": direction_weights("both", text=True), **PLAIN}
    small = {"mini_batch_size": 3}
    is_equal(RoleRankingLoss(model, **PLAIN), theirs.MultipleNegativesRankingLoss(model), columns)
    is_equal(RoleRankingLoss(model, **both), theirs.MultipleNegativesRankingLoss(model, **SYMMETRIC), columns)
    is_equal(
        CachedRoleRankingLoss(model, **PLAIN, **small),
        theirs.CachedMultipleNegativesRankingLoss(model, **small),
        columns,
    )
    is_equal(
        CachedRoleRankingLoss(model, **both, **small),
        theirs.CachedMultipleNegativesRankingLoss(model, **SYMMETRIC, **small),
        columns,
    )


@pytest.mark.parametrize("columns", [2, 3, 4])
def test_cosine_q2d_and_both_are_the_multiple_negatives_ranking_losses(tiny: SentenceTransformer, columns: int) -> None:
    batch = sentences(7, columns)
    compare(tiny, batch)
    with pytest.deprecated_call():
        symmetric = theirs.MultipleNegativesSymmetricRankingLoss(tiny)
    is_equal(RoleRankingLoss(tiny, direction_weights("both", text=True), **PLAIN), symmetric, batch)
    with pytest.raises(AssertionError):  # another scale is another loss
        is_equal(
            RoleRankingLoss(tiny, **PLAIN | {"scale_init": 20.1}), theirs.MultipleNegativesRankingLoss(tiny), batch
        )


@pytest.mark.real
@pytest.mark.parametrize("columns", [2, 3])
def test_on_minilm_and_scifact_they_are_equal_too(shared: Path, columns: int) -> None:
    data = open_beir(shared / "data" / "scifact", "test")
    encoder = load_text_model(str(shared / "models" / "all-MiniLM-L6-v2")).encoder
    encoder.max_seq_length = 16
    pairs = data.pairs[:4]
    batch = [[data.queries[q] for q, _ in pairs], [data.documents[d] for _, d in pairs], data.documents[100:104]]
    compare(encoder, batch[:columns])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("norm", list(Normalization))
def test_cached_gradients_equal_those_of_the_whole_batch(
    tiny: SentenceTransformer, norm: Normalization, name: str
) -> None:
    """In float32, alpha's and gamma's own among them, scaled as the trainer scales a loss that it accumulates."""
    settings = {"weights": WEIGHTS[name], "norm": norm, "learn_scale": True, "norm_drift": 0.2, "focal": 1.0}
    labels = torch.tensor([[i % 5, i % 4, 9 - i] for i in range(7)])
    whole, cached = RoleRankingLoss(tiny, **settings), CachedRoleRankingLoss(tiny, **settings, mini_batch_size=3)
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
