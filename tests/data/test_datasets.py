"""Which images a run trains on and is evaluated on: held out, a fraction of them, permuted."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmclip.config import TrainConfig
from mmclip.data.datasets import open_training
from mmclip.data.image_text import ImageTextData
from mmclip.data.shards import open_data
from mmclip.errors import UserError


def opened(data: Path, **flags: object) -> tuple[ImageTextData, ImageTextData | None]:
    train, val, _ = open_training(TrainConfig(train_data=str(data), batch_size=16, **flags))  # type: ignore[arg-type]
    return train, val


def test_held_out_images_are_the_last_and_are_not_trained_on(tiny_data: Path) -> None:
    whole = open_data(str(tiny_data))
    train, val = opened(tiny_data, val_holdout=20)
    assert val is not None and val.split == "train[holdout 20]"
    assert train.keys == whole.keys[:-20] and val.keys == whole.keys[-20:]
    assert val.captions == whole.captions[-20:]
    again = open_data(str(tiny_data), val.split, "eval")
    assert again.keys == val.keys and again.fingerprint() == val.fingerprint(), "its name finds it again"


def test_a_fraction_is_taken_of_what_the_holdout_leaves(tiny_data: Path) -> None:
    whole = open_data(str(tiny_data))
    train, val = opened(tiny_data, val_holdout=20, train_fraction=0.33)
    assert train.keys == whole.keys[:25], "a third of 76 images, rounded"
    assert val is not None and len(val) == 20
    assert opened(tiny_data, train_fraction=1.0)[0].keys == whole.keys


def test_pairs_are_permuted_among_the_images_that_are_trained_on(tiny_data: Path) -> None:
    plain, val = opened(tiny_data, val_holdout=20, train_num_samples=40)
    train, held = opened(tiny_data, val_holdout=20, train_num_samples=40, permute_pairs=True)
    assert train.keys == plain.keys and sorted(train.captions) == sorted(plain.captions)
    assert all(a is not b for a, b in zip(train.captions, plain.captions, strict=True))
    assert train.truth is None
    assert held is not None and val is not None and held.fingerprint() == val.fingerprint(), "evaluation data stay"
    other, _ = opened(tiny_data, val_holdout=20, train_num_samples=40, permute_pairs=True, seed=1)
    assert len({d.fingerprint() for d in (plain, train, other)}) == 3


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"val_holdout": 81}, "--val-holdout 81: of the 96 images .* leaves 15 to train on, less than a batch of 16"),
        ({"val_holdout": 500}, "--val-holdout 500: .* leaves 0 "),
        ({"val_holdout": 65, "accum_freq": 2}, "less than a batch of 32"),
        ({"train_fraction": 0.1}, r"--train-fraction 0\.1: 10 of the 96 images .*, less than a batch of 16"),
        ({"train_num_samples": 97}, "--train-num-samples 97: .* only 96 images"),
        ({"train_num_samples": 1, "permute_pairs": True}, "--permute-pairs: 1 image"),
    ],
)
def test_what_cannot_be_taken_is_one_line(tiny_data: Path, flags: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told) as error:
        opened(tiny_data, **flags)
    assert "\n" not in str(error.value)


def test_what_an_evaluation_is_needed_for_is_refused_without_one(tiny_data: Path) -> None:
    for flags in ({"zeroshot_data": "x"}, {"measure_start": True}):
        with pytest.raises(UserError, match=r"no evaluation split: give --val-data or --val-holdout"):
            opened(tiny_data / "train" / "0.tar", **flags)


@pytest.mark.parametrize("n", [0, 97])
def test_a_holdout_that_the_split_does_not_hold_is_one_line(tiny_data: Path, n: int) -> None:
    with pytest.raises(UserError, match=rf"train\[holdout {n}\].*of 96 images"):
        open_data(str(tiny_data), f"train[holdout {n}]", "eval")
