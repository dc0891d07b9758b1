"""Candidate pools and what cannot be one; the query bank: drawn by a seed, and never the evaluation itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from mmclip.data.image_text import ImageTextData
from mmclip.data.shards import open_data
from mmclip.embeddings.encode import EncodeOptions
from mmclip.embeddings.features import FeatureSource
from mmclip.embeddings.files import Distractors, Embeddings, save_embeddings
from mmclip.errors import UserError
from mmclip.evaluation.eval_set import draw_bank, image_text_sets, saved_bank
from mmclip.models.factory import ClipModel, load_clip
from tests.helpers.evaluating import DIM, N, eval_data

OPTIONS = EncodeOptions(torch.device("cpu"), batch_size=16, progress=False)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ClipModel:
    return load_clip(str(tiny_model))


@pytest.fixture(scope="module")
def train(tiny_data: Path) -> ImageTextData:
    return open_data(str(tiny_data), "train", "train")


@pytest.fixture(scope="module")
def test(tiny_data: Path) -> ImageTextData:
    return open_data(str(tiny_data), "test", "eval")


def test_the_bank_holds_rows_of_the_data_drawn_by_the_seed(model: ClipModel, train: ImageTextData) -> None:
    source = FeatureSource(train)
    whole = source.embed(model, OPTIONS, "all")
    every = {"image": whole.image, "text": whole.text}
    bank = draw_bank(source, ("image", "text"), 20, model, OPTIONS, seed=3)
    assert bank.name == f"{train.path} [train]" and not bank.transductive and not bank.overlap
    for side, rows in bank.vectors.items():
        assert len(rows) == 20
        distance = torch.cdist(rows.double(), every[side].double()).min(dim=1).values
        assert float(distance.max()) < 1e-4 * float(every[side].norm(dim=1).mean())
    again, other = (draw_bank(source, ("text",), 20, model, OPTIONS, seed=s).vectors["text"] for s in (3, 4))
    assert torch.equal(again, bank.vectors["text"]) and not torch.equal(other, again)


@pytest.mark.parametrize("side", ["image", "text"])
def test_the_evaluation_set_is_no_bank_under_any_name(model: ClipModel, test: ImageTextData, side: str) -> None:
    part = dataclasses.replace(test.subset(range(5, 15)), path="elsewhere")
    with pytest.raises(UserError, match=r"elsewhere is the evaluation set, or a part of it.*transductive"):
        draw_bank(FeatureSource(part), (side,), 50, model, OPTIONS, evaluated=test)


def test_a_bank_larger_than_its_data_is_all_of_it_and_common_captions_are_counted(
    model: ClipModel, train: ImageTextData, test: ImageTextData
) -> None:
    known = {c for image in test.captions for c in image}
    expected = sum(c in known for image in train.captions for c in image)
    bank = draw_bank(FeatureSource(train), ("text",), 10_000, model, OPTIONS, evaluated=test)
    assert bank.overlap == {"text": expected} and len(bank.vectors["text"]) == sum(map(len, train.captions))


def test_an_image_that_cannot_be_read_is_left_out_of_the_bank(
    model: ClipModel, train: ImageTextData, tmp_path: Path
) -> None:
    damaged = train.subset(range(12))
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    damaged.places[3] = (str(tmp_path / "bad.jpg"), -1, 0)
    bank = draw_bank(FeatureSource(damaged), ("image",), 12, model, OPTIONS)
    assert len(bank.vectors["image"]) == 11 and bool(bank.vectors["image"].isfinite().all())


def saved(seed: int, n: int, dim: int = 4) -> Embeddings:
    gen = torch.Generator().manual_seed(seed)
    names = [str(i) for i in range(n)]
    pairs = torch.arange(n)[:, None].repeat(1, 2)
    return Embeddings(
        torch.randn(n, dim, generator=gen), torch.randn(n, dim, generator=gen), pairs, names, text_ids=names
    )


def test_a_file_of_embeddings_is_a_bank_too(tmp_path: Path) -> None:
    own, train = saved(0, 9), saved(1, 30)
    train.text[:5] = own.text[:5]
    save_embeddings(tmp_path / "train.npz", train)
    bank = saved_bank(str(tmp_path / "train.npz"), ("text",), 100, own)
    assert torch.equal(bank.vectors["text"], train.text) and bank.overlap == {"text": 5}


@pytest.mark.parametrize(
    ("other", "says"), [(saved(0, 9), "all of 9 vectors are in it"), (saved(1, 9, 5), "vectors of 5 dimensions")]
)
def test_a_file_that_can_be_no_bank_is_one_line(tmp_path: Path, other: Embeddings, says: str) -> None:
    save_embeddings(tmp_path / "x.safetensors", other)
    with pytest.raises(UserError, match=says):
        saved_bank(str(tmp_path / "x.safetensors"), ("text",), 100, saved(0, 9))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": torch.ones(600, DIM + 1)}, "text embeddings of shape"),
        ({"image": torch.full((N, DIM), float("nan"))}, "image embeddings: row 0"),
        ({"distractors": [Distractors("x", text=torch.full((2, DIM), float("inf")))]}, "x text embeddings: row 0"),
        ({"distractors": [Distractors("retrieval", image=torch.ones(2, DIM))]}, "'retrieval' twice, or like another"),
        ({"pairs": torch.empty(0, 2)}, "at least one"),
        ({"pairs": torch.tensor([[0, 600]])}, "document row 600"),
        ({"image_ids": ["a"]}, "image_ids has 1 entries"),
        ({"levels": ["full"]}, "levels has 1"),
        ({"owner": [N] * 600}, f"owner names image row {N}"),
    ],
)
def test_unusable_data_is_one_line(changes, words):
    with pytest.raises(UserError, match=words) as error:
        image_text_sets(eval_data(**changes))
    assert "\n" not in str(error.value)


def test_twins_share_their_images_cluster():
    extra = Distractors("twins", image=torch.randn(3, DIM), owner={"image": [4, 5, 6]}, twins=True)
    pool = image_text_sets(eval_data(distractors=[extra]))[-1]
    assert pool.clusters["image"][-3:].tolist() == [4, 5, 6]
    with pytest.raises(UserError, match=f"one from 0 to {N - 1} for each"):
        eval_data(distractors=[Distractors("x", image=torch.ones(1, DIM), owner={"image": [N]}, twins=True)])
