"""Every sample once an epoch and everything a function of the seed; readers that fail, are signalled or killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision import transforms

from mmclip.data import loading
from mmclip.data.image_text import ImageTextData
from mmclip.data.loading import Batch, ReaderDied, TrainBatches, iterate_images, iterate_texts
from mmclip.data.shards import open_data
from mmclip.errors import UserError
from tests.helpers.shards import good, jpeg, write_tar

TRANSFORM = transforms.Compose([transforms.RandomResizedCrop(8, scale=(0.5, 1.0)), transforms.ToTensor()])
BAD = [("bad.jpg", jpeg()[:90]), ("bad.txt", b"x"), ("zero.jpg", b""), ("zero.txt", b"x")]


def tokenize(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(c), sum(map(ord, c))] for c in captions])


def fails(picture: object) -> torch.Tensor:
    raise RuntimeError("a bug of the transform")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ImageTextData:
    return open_data(str(write_tar(tmp_path_factory.mktemp("tar") / "0.tar", good(23))))


@pytest.fixture
def damaged(tmp_path: Path) -> ImageTextData:
    """Rows 0 to 5 are readable, 6 and 7 are not."""
    return open_data(str(write_tar(tmp_path / "0.tar", [*good(6), *BAD])))


def in_memory(n: int, captions: int = 2) -> ImageTextData:
    """Captions without pictures: enough for the order of batches."""
    texts = [[f"{i} {j}" for j in range(captions)] for i in range(n)]
    return ImageTextData("memory", "train", [f"k{i}" for i in range(n)], texts, [("", -1, 0)] * n)


def order(batches: list[Batch]) -> list[int]:
    return [int(i) for b in batches for i in b.image_id]


def batches(data: ImageTextData, epoch: int = 0, start: int = 0, images: bool = False, **kwargs: object) -> list[Batch]:
    loader = TrainBatches(data, TRANSFORM if images else None, tokenize, **({"batch_size": 4} | kwargs))  # type: ignore[arg-type]
    return list(loader.batches(epoch, start))


def assert_equal(one: list[Batch], two: list[Batch]) -> None:
    for a, b in zip(one, two, strict=True):
        assert a.keys == b.keys and not a.bad and not b.bad
        for name in ("images", "tokens", "image_id", "caption_row", "text_id"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


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
    counts = Counter(i for s in shares for i in order(s))
    rest = n % (size * ranks)
    expected = n if keep and (rest >= max(ranks, 2) or rest == 0) else n - rest
    assert max(counts.values()) == 1 and len(counts) == expected
    assert all(len(b.image_id) >= 1 for s in shares for b in s)
    assert TrainBatches(data, None, None, **kwargs).left_out == n - expected  # type: ignore[arg-type]


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


def test_captions_are_drawn_evenly() -> None:
    n = 3000
    loader = TrainBatches(in_memory(n, 5), None, None, batch_size=1)
    drawn = np.stack([loader.drawn(epoch, range(n)) % 5 for epoch in range(20)])
    counts = np.bincount(drawn.ravel(), minlength=5)
    assert abs(counts - 20 * n / 5).max() < 5 * (20 * n * 0.16) ** 0.5
    for a, b in ((drawn[:-1], drawn[1:]), (drawn[:, :-1], drawn[:, 1:])):  # epochs and rows independent of their next
        assert abs((a == b).mean() - 0.2) < 5 * (0.16 / a.size) ** 0.5


def test_an_image_is_augmented_anew_in_each_epoch(data: ImageTextData) -> None:
    first, later = ({k: x for b in batches(data, e, images=True) for k, x in zip(b.keys, b.images, strict=True)}  # type: ignore[arg-type]
                    for e in (0, 1))  # fmt: skip
    both = first.keys() & later.keys()
    assert len(both) > 10 and not any(torch.equal(first[k], later[k]) for k in both)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("accum_freq", [1, 3])
def test_workers_parts_and_numpy_augmentations_change_nothing_and_states_stay(
    data: ImageTextData, monkeypatch: pytest.MonkeyPatch, accum_freq: int, keep: bool
) -> None:
    noisy = transforms.Compose(
        [TRANSFORM, transforms.Lambda(lambda x: x + torch.tensor(np.random.random(3))[:, None, None])]
    )
    torch.manual_seed(7)
    random.seed(7)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    made = []
    for workers, least in ((0, 8), (1, 1), (2, 1), (2, 3)):
        monkeypatch.setattr(loading, "MIN_PART", least)
        loader = TrainBatches(data, noisy, tokenize, 5, 3, workers, not keep, accum_freq=accum_freq)
        made.append(list(loader.batches(0)))
    assert len(made[0]) == ((23 + keep * 4) // 5 if accum_freq == 1 else 1 + keep)
    for other in made[1:]:
        assert_equal(made[0], other)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_states_are_put_back_when_a_transform_fails(data: ImageTextData) -> None:
    state = random.getstate()
    with pytest.raises(RuntimeError, match="a bug"):
        list(TrainBatches(data, fails, None, batch_size=4).batches(0))
    assert random.getstate() == state


def test_ids_name_equal_captions_and_rows_of_the_flat_list(data: ImageTextData) -> None:
    texts = ImageTextData("x", "x", list("xyz"), [["a", "b"], ["c"], ["b", "a"]], [])
    assert TrainBatches(texts, None, None, 1).text_ids.tolist() == [0, 1, 2, 1, 0]
    flat = [c for image in data.captions for c in image]
    short = batches(data, shorten=lambda tokens: tokens[:, :1])
    for batch, narrow in zip(batches(data), short, strict=True):
        expected = tokenize([flat[i] for i in batch.caption_row])
        assert batch.tokens is not None and torch.equal(batch.tokens, expected)
        assert narrow.tokens is not None and torch.equal(narrow.tokens, expected[:, :1])


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_pictures_are_left_out_and_named(damaged: ImageTextData, workers: int) -> None:
    made = batches(damaged, images=True, workers=workers, batch_size=2)
    assert sorted(order(made)) == list(range(6))
    assert sorted(s.key for b in made for s in b.bad) == ["bad", "zero"]
    for batch in made:
        assert batch.images is not None and len(batch.image_id) == len(batch.keys) == len(batch.images)
    rows, bad = [], []
    for read, images, failed in iterate_images(damaged, TRANSFORM, 3, workers):
        rows += read.tolist()
        bad += [(row, sample.key) for row, sample in failed]
        assert images is None or len(images) == len(read)
    assert rows == list(range(6)) and bad == [(6, "bad"), (7, "zero")]


def test_a_batch_without_a_readable_picture_has_no_rows(damaged: ImageTextData) -> None:
    empty = next(b for b in batches(damaged, images=True, batch_size=1) if b.bad)
    assert empty.images is not None and empty.images.shape == (0, 3, 8, 8)
    assert empty.tokens is not None and empty.tokens.shape == (0, 2)
    assert len(empty.image_id) == len(empty.caption_row) == len(empty.text_id) == len(empty.keys) == 0


def test_readers_hold_two_batches_at_most(data: ImageTextData, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, object] = {}

    class Recorded(loading.DataLoader):  # type: ignore[type-arg]
        def __init__(self, dataset: object, **kwargs: object) -> None:
            arguments.update(kwargs, parts=dataset.rows)  # type: ignore[attr-defined]
            super().__init__(dataset, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "MIN_PART", 1)
    monkeypatch.setattr(loading, "DataLoader", Recorded)
    assert len(batches(data, images=True, workers=2, batch_size=4, accum_freq=2)) == 2
    assert [len(p) for p in arguments["parts"]] == [2] * 8  # type: ignore[attr-defined]
    ahead = arguments["num_workers"] * arguments["prefetch_factor"]  # type: ignore[operator]
    assert ahead * 2 == 2 * 8, "rows that are read in advance: two steps'"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory is CUDA's")
def test_pinned_batches_are_the_same(data: ImageTextData) -> None:
    pinned = batches(data, images=True, pin=True)
    assert_equal(batches(data, images=True), pinned)
    assert all(b.images is not None and b.images.is_pinned() for b in pinned)


def test_rows_and_captions_come_in_order(data: ImageTextData) -> None:
    part = [r for rows, _, _ in iterate_images(data, TRANSFORM, 4, rows=range(5, 14)) for r in rows.tolist()]
    assert part == list(range(5, 14))
    captions = [c for image in data.captions for c in image]
    assert torch.equal(torch.cat(list(iterate_texts(captions, tokenize, 7))), tokenize(captions))


def test_an_interrupt_is_left_to_the_main_process(data: ImageTextData) -> None:
    iterator = iter(iterate_images(data, TRANSFORM, 1, workers=2))
    for _ in range(2):  # a batch of each reader: both are past their start
        next(iterator)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid or 0, signal.SIGINT)
    assert len(list(iterator)) == 21


def test_a_killed_reader_is_an_error_of_the_next_batch_and_of_nothing_else(data: ImageTextData) -> None:
    iterator = iter(iterate_images(data, TRANSFORM, 1, workers=1))
    next(iterator)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid or 0, signal.SIGKILL)
        worker.join()
    torch.randn(10).sum()  # would be where torch's own signal handler speaks
    with pytest.raises(ReaderDied, match=r"ended from outside \(out of memory\?\), .*: try fewer --workers"):
        list(iterator)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_inside_a_reader_stays_what_it_is(data: ImageTextData, workers: int) -> None:
    with pytest.raises(RuntimeError, match="a bug of the transform") as error:
        list(iterate_images(data, fails, 4, workers))
    assert not isinstance(error.value, ReaderDied)
