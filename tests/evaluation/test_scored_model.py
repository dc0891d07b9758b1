"""What a judge of cosines makes of the embeddings is what mmclip's own evaluation says, in both directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize as unit

from mmclip import metrics
from mmclip.errors import UserError
from mmclip.evaluation.clip_benchmark import M, ScoredModel
from mmclip.retrieval.ranking import rank
from mmclip.roles import CLIP_DIRECTIONS, Exponents, Normalization

classification = pytest.importorskip("clip_benchmark.metrics.zeroshot_classification")
retrieval = pytest.importorskip("clip_benchmark.metrics.zeroshot_retrieval")
selection = pytest.importorskip("clip_benchmark.metrics.image_caption_selection")

KS = (1, 5, 10)
IMAGES, CAPTIONS, DIM = 60, 3, 16
GAMMAS = [0.0, 0.37, 1.0]


class Planted(nn.Module):
    """Towers that know their features: an input is the number of a row."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        image = torch.randn(IMAGES, DIM, generator=gen)
        text = image.repeat_interleave(CAPTIONS, 0) + 1.2 * torch.randn(IMAGES * CAPTIONS, DIM, generator=gen)
        # lengths over two orders of magnitude, so that every exponent ranks otherwise
        self.image, self.text = (x * torch.randn(len(x), 1, generator=gen).exp() for x in (image, text))

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        return (None if image is None else self.image[image.flatten()], None if text is None else self.text[text])


def tokenize(rows: list[str]) -> Tensor:
    return torch.tensor([int(r) for r in rows])


def success(data: dict[str, Tensor], pairs: Tensor, gamma_d: float) -> tuple[dict[str, float], dict[str, int]]:
    """(clip-benchmark's names for the numbers of mmclip's own evaluation, tied queries of each direction)."""
    numbers, tied = {}, {}
    for direction in CLIP_DIRECTIONS:
        query, document = direction.roles(data)
        own = pairs if direction.query_side == "image" else pairs.flip(1)
        found = rank(query, document, own, {"it": Exponents(1.0, gamma_d)})["it"]
        every = metrics.per_query(found.ranks, found.offsets)
        for k in KS:
            numbers[f"{direction.document_side}_retrieval_recall@{k}"] = float(every[f"success@{k}"].mean())
        tied[direction.document_side] = found.n_tied
    return numbers, tied


@pytest.mark.parametrize("gamma_d", GAMMAS)
def test_one_pair_of_embeddings_ranks_like_mmclip_in_both_directions(gamma_d: float) -> None:
    towers = Planted()
    batches = [
        (torch.arange(s, s + 20)[:, None], [[str(CAPTIONS * i + c) for c in range(CAPTIONS)] for i in range(s, s + 20)])
        for s in range(0, IMAGES, 20)
    ]
    model = ScoredModel(towers, Exponents(0.5, gamma_d))
    found = retrieval.evaluate(model, batches, tokenize, "cpu", amp=False, recall_k_list=list(KS))
    pairs = torch.tensor([[t // CAPTIONS, t] for t in range(IMAGES * CAPTIONS)])
    sides = {"image": towers.image, "text": towers.text}
    numbers, tied = success(sides, pairs, gamma_d)
    assert tied == {"text": 0, "image": 0}
    assert found == pytest.approx(numbers, abs=1e-6)
    others = [success(sides, pairs, g)[0] for g in GAMMAS if g != gamma_d]
    assert all(
        abs(found[k] - o[k]) > 0.01 for o in others for k in ("text_retrieval_recall@5", "image_retrieval_recall@5")
    )


@pytest.mark.parametrize("gamma_d", GAMMAS)
def test_class_vectors_of_several_templates_equal_a_naive_float64_computation(gamma_d: float) -> None:
    towers, classes, templates = Planted(), [str(i) for i in range(9)], ["{c}", "1{c}", "2{c}"]
    model = ScoredModel(towers, Exponents(1.0, gamma_d))
    vectors = classification.zero_shot_classifier(model, tokenize, classes, templates, "cpu", amp=False)
    rows = torch.tensor([[int(t.format(c=c)) for t in templates] for c in classes])
    batch = [(torch.arange(IMAGES)[:, None], torch.zeros(IMAGES, dtype=torch.long))]
    logits, _ = classification.run_classification(model, vectors, batch, "cpu", amp=False)
    image, text = towers.image.double(), towers.text.double()[rows]  # [9, 3, D]
    if gamma_d == 1.0:
        expected = 100 * unit(image, dim=-1) @ unit(unit(text, dim=-1).mean(1), dim=-1).T
    else:
        scored = text / text.norm(dim=-1, keepdim=True) ** gamma_d
        image = image / image.norm(dim=-1, keepdim=True) ** gamma_d  # the image's own factor: constant for a query
        expected = 100 * image @ scored.mean(1).T / M**2
        renormalized = image @ unit(scored.mean(1), dim=-1).T
        assert (renormalized.argmax(1) != expected.argmax(1)).any(), "this test would not see a length that is lost"
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    assert torch.equal(logits.argmax(1), expected.argmax(1))


def test_image_caption_pairs_are_scored_in_both_directions() -> None:
    towers = Planted()
    model = ScoredModel(towers, Normalization.DOT.exponents)
    batch = [(torch.arange(40).view(20, 2, 1, 1, 1), [[str(6 * i), str(6 * i + 3)] for i in range(20)])]
    found = selection.evaluate(model, batch, tokenize, "cpu", amp=False)
    dots = torch.stack([towers.image[2 * i : 2 * i + 2] @ towers.text[[6 * i, 6 * i + 3]].T for i in range(20)])
    own = torch.arange(2)
    assert found["text_acc"] == pytest.approx(float((dots.argmax(2) == own).all(1).float().mean()))
    assert found["image_acc"] == pytest.approx(float((dots.argmax(1) == own).all(1).float().mean()))


def test_lengths_pass_the_normalization_exactly_and_the_limit_is_told() -> None:
    towers = Planted()
    towers.image = unit(towers.image, dim=-1) * torch.logspace(-6, 17 - 1e-3, IMAGES, base=2)[:, None]
    model, every = ScoredModel(towers, Normalization.DOT.exponents), torch.arange(IMAGES)
    assert torch.equal(unit(model.encode_image(every), dim=-1)[:, :DIM] * M, towers.image)
    towers.image[-1] *= 1.1
    with pytest.raises(UserError, match=r"image embeddings: a norm of .*131,072"):
        model.encode_image(every)
    towers.text[5, 1] = torch.nan
    with pytest.raises(UserError, match="text embeddings hold NaN"):
        model.encode_text(every)


def test_autocast_does_not_reach_the_towers() -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> tuple[Any, Any]:
            return (self.layer(image) if image is not None else None, self.layer(text) if text is not None else None)

    towers, x = Linear(), torch.randn(3, 8)
    model, plain = ScoredModel(towers, Normalization.QNORM.exponents), towers.layer(x).detach()
    with torch.autocast("cpu"):
        assert towers.layer(x).dtype == torch.bfloat16
        assert torch.equal(model.encode_image(x)[:, :4], plain) and torch.equal(model.encode_text(x)[:, :4], plain)
