"""Every sample once an epoch, whatever the workers and ranks; everything a function of the seed."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision import transforms

from mmclip.data import loading as loader
from mmclip.data.image_text import ImageTextData
from mmclip.data.loading import Batch, TrainBatches, text_ids
from mmclip.data.shards import open_data
from mmclip.errors import UserError
from tests.data.test_data import good, jpeg, write_tar

TRANSFORM = transforms.Compose([transforms.RandomResizedCrop(8, scale=(0.5, 1.0)), transforms.ToTensor()])


def tokenize(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(c), sum(map(ord, c))] for c in captions])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ImageTextData:
    return open_data(str(write_tar(tmp_path_factory.mktemp("tar") / "0.tar", good(23))))


def in_memory(n: int) -> ImageTextData:
    """Captions without pictures: enough for the order of batches."""
    keys = [f"k{i}" for i in range(n)]
    return ImageTextData("memory", "train", keys, [[f"a {i}", f"b {i}"] for i in range(n)], [("", -1, 0)] * n)


def order(batches: list[Batch]) -> list[int]:
    return [int(i) for b in batches for i in b.image_id]


def batches(data: ImageTextData, epoch: int = 0, start: int = 0, **kwargs: object) -> list[Batch]:
    defaults: dict[str, object] = {"batch_size": 4, "images": False}
    return list(TrainBatches(data, TRANSFORM, tokenize, **(defaults | kwargs)).batches(epoch, start))  # type: ignore[arg-type]


@settings(max_examples=60)
@given(
    n=st.integers(1, 40), size=st.integers(1, 7), ranks=st.integers(1, 4), keep=st.booleans(), epoch=st.integers(0, 3)
)
def test_ranks_share_an_epoch_without_overlap(n: int, size: int, ranks: int, keep: bool, epoch: int) -> None:
    data = in_memory(n)
    kwargs = {"batch_size": size, "world_size": ranks, "drop_last": not keep}
    if n < size * ranks and not (keep and n >= max(ranks, 2)):
        with pytest.raises(UserError, match=f"more than the {n} images"):
            batches(data, **kwargs)
        return
    shares = [batches(data, epoch, rank=r, **kwargs) for r in range(ranks)]
    assert len({len(s) for s in shares}) == 1, "every rank takes the same number of steps"
    seen = Counter(i for s in shares for i in order(s))
    assert max(seen.values()) == 1
    rest = n % (size * ranks)
    expected = n if keep and (rest >= max(ranks, 2) or rest == 0) else n - rest
    assert len(seen) == expected
    assert all(len(b.image_id) >= 1 for s in shares for b in s)


def test_joint_batches_do_not_depend_on_the_number_of_ranks() -> None:
    data = in_memory(24)
    one = batches(data, batch_size=8)
    two = [batches(data, batch_size=4, world_size=2, rank=r) for r in range(2)]
    for joint, a, b in zip(one, *two, strict=True):
        assert joint.caption_row.tolist() == [*a.caption_row.tolist(), *b.caption_row.tolist()]


@given(start=st.integers(0, 5), seed=st.integers(0, 99))
def test_starting_in_the_middle_gives_the_rest(start: int, seed: int) -> None:
    data = in_memory(24)
    assert order(batches(data, 1, start, seed=seed)) == order(batches(data, 1, seed=seed))[start * 4 :]


def test_epochs_and_seeds_shuffle_differently_and_draw_other_captions() -> None:
    data = in_memory(24)
    first, second, other = batches(data), batches(data, 1), batches(data, seed=1)
    assert order(first) == order(batches(data))
    assert len({tuple(order(b)) for b in (first, second, other)}) == 3
    captions = [
        {int(i): int(c) for b in e for i, c in zip(b.image_id, b.caption_row, strict=True)} for e in (first, second)
    ]
    changed = sum(captions[0][i] != captions[1][i] for i in captions[0])
    assert 3 < changed < 21, "one of two captions is drawn anew in each epoch"
    assert all(row // 2 == image for e in captions for image, row in e.items()), "a caption of that very image"


def test_workers_change_nothing_and_leave_random_states_alone(data: ImageTextData) -> None:
    torch.manual_seed(7)
    random.seed(7)
    states = torch.get_rng_state(), random.getstate()
    alone = batches(data, images=True, seed=3)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    shared_work = batches(data, images=True, seed=3, workers=2)
    assert len(alone) == len(shared_work) == 5
    for a, b in zip(alone, shared_work, strict=True):
        assert a.images is not None and b.images is not None and a.tokens is not None and b.tokens is not None
        assert torch.equal(a.images, b.images) and torch.equal(a.tokens, b.tokens) and a.keys == b.keys
    again = batches(data, 1, images=True, seed=3)
    row = int(alone[0].image_id[0])
    later = next(b for b in again if row in b.image_id)
    assert later.images is not None and alone[0].images is not None
    assert not torch.equal(alone[0].images[0], later.images[later.image_id.tolist().index(row)]), "augmented anew"


def test_ids_name_equal_captions_and_rows_of_the_flat_list(data: ImageTextData) -> None:
    captions = [["a", "b"], ["c"], ["b", "a"]]
    assert text_ids(captions).tolist() == [0, 1, 2, 1, 0]
    for batch in batches(data):
        flat = [c for image in data.captions for c in image]
        shown = tokenize([flat[i] for i in batch.caption_row])
        assert batch.tokens is not None and torch.equal(batch.tokens, shown)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_pictures_are_left_out_and_named(tmp_path: Path, workers: int) -> None:
    members = [*good(6), ("bad.jpg", jpeg()[:90]), ("bad.txt", b"x"), ("zero.jpg", b""), ("zero.txt", b"x")]
    data = open_data(str(write_tar(tmp_path / "0.tar", members)))
    found = batches(data, images=True, workers=workers, batch_size=2)
    assert sorted(order(found)) == list(range(6))
    assert sorted(s.key for b in found for s in b.bad) == ["bad", "zero"]
    for batch in found:
        assert len(batch.image_id) == len(batch.keys) == (0 if batch.images is None else len(batch.images))


def test_a_batch_without_a_readable_picture_has_no_rows(tmp_path: Path) -> None:
    members = [("bad.jpg", jpeg()[:90]), ("bad.txt", b"x"), *good(1)]
    data = open_data(str(write_tar(tmp_path / "0.tar", members)))
    empty = next(b for b in batches(data, images=True, batch_size=1) if b.bad)
    assert empty.images is not None and empty.images.shape == (0, 3, 8, 8)
    assert empty.tokens is not None and empty.tokens.shape == (0, 2)
    assert len(empty.image_id) == len(empty.caption_row) == len(empty.text_id) == len(empty.keys) == 0


def test_numpy_augmentations_are_reproducible_and_its_state_left_alone(data: ImageTextData) -> None:
    def noisy(picture: object) -> torch.Tensor:
        return torch.tensor(np.random.random(3))

    state = np.random.get_state()[1].tolist()
    one, two = (list(TrainBatches(data, noisy, None, batch_size=4, text=False, workers=w).batches(0)) for w in (0, 2))
    for a, b in zip(one, two, strict=True):
        assert a.images is not None and b.images is not None and torch.equal(a.images, b.images)
    assert np.random.get_state()[1].tolist() == state


def test_states_are_put_back_when_a_transform_fails(data: ImageTextData) -> None:
    def fails(picture: object) -> torch.Tensor:
        raise RuntimeError("a bug of the transform")

    state = random.getstate()
    with pytest.raises(RuntimeError, match="a bug"):
        list(TrainBatches(data, fails, None, batch_size=4, text=False).batches(0))
    assert random.getstate() == state


def test_captions_are_drawn_evenly() -> None:
    n = 3000
    data = ImageTextData("m", "s", [str(i) for i in range(n)], [[f"{i} {j}" for j in range(5)] for i in range(n)], [])
    order = TrainBatches(data, None, None, batch_size=1, images=False, text=False)
    drawn = np.stack([order.drawn(epoch, range(n)) % 5 for epoch in range(20)])
    counts = np.bincount(drawn.ravel(), minlength=5)
    assert abs(counts - 20 * n / 5).max() < 5 * (20 * n * 0.16) ** 0.5
    for a, b in ((drawn[:-1], drawn[1:]), (drawn[:, :-1], drawn[:, 1:])):  # epochs and rows independent of their next
        assert abs((a == b).mean() - 0.2) < 5 * (0.16 / a.size) ** 0.5


@pytest.mark.parametrize(("keep", "left"), [(False, 3), (True, 0)])
def test_left_out_counts_what_no_step_takes(keep: bool, left: int) -> None:
    assert TrainBatches(in_memory(23), None, None, batch_size=5, drop_last=not keep).left_out == left
    assert TrainBatches(in_memory(9), None, None, batch_size=4, world_size=2, drop_last=not keep).left_out == 1


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("accum_freq", [1, 3])
def test_a_batch_is_joined_from_readers_parts_whatever_their_size(
    data: ImageTextData, monkeypatch: pytest.MonkeyPatch, accum_freq: int, keep: bool
) -> None:
    made = []
    for workers, least in ((0, 8), (1, 1), (2, 1), (2, 3)):
        monkeypatch.setattr(loader, "MIN_PART", least)
        made.append(
            batches(data, images=True, workers=workers, accum_freq=accum_freq, drop_last=not keep, batch_size=5)
        )
    assert len(made[0]) == (23 + keep * 4) // 5 if accum_freq == 1 else len(made[0]) == 1 + keep
    for other in made[1:]:
        for a, b in zip(made[0], other, strict=True):
            assert a.keys == b.keys and not b.bad
            for name in ("images", "tokens", "image_id", "caption_row", "text_id"):
                assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_readers_hold_two_batches_at_most(data: ImageTextData, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, object] = {}

    class Seen(loader.DataLoader):  # type: ignore[type-arg]
        def __init__(self, dataset: object, **kwargs: object) -> None:
            told.update(kwargs, parts=dataset.parts)  # type: ignore[attr-defined]
            super().__init__(dataset, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loader, "MIN_PART", 1)
    monkeypatch.setattr(loader, "DataLoader", Seen)
    assert len(batches(data, images=True, workers=2, batch_size=4, accum_freq=2)) == 2
    assert [len(p) for p in told["parts"]] == [2] * 8  # type: ignore[attr-defined]
    ahead = told["num_workers"] * told["prefetch_factor"]  # type: ignore[operator]
    assert ahead * 2 == 2 * 8, "rows that are read before they are asked for: two steps'"


def test_padding_is_left_out_of_a_whole_batch(data: ImageTextData) -> None:
    whole = batches(data, workers=0)
    short = batches(data, workers=0, shorten=lambda tokens: tokens[:, :1])
    for a, b in zip(whole, short, strict=True):
        assert a.tokens is not None and b.tokens is not None and torch.equal(a.tokens[:, :1], b.tokens)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory is CUDA's")
def test_pinned_batches_are_the_same(data: ImageTextData) -> None:
    for a, b in zip(batches(data, images=True), batches(data, images=True, pin=True), strict=True):
        assert a.images is not None and b.images is not None and b.images.is_pinned()
        assert torch.equal(a.images, b.images)
