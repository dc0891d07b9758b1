"""Pictures and token ids in row order; reading processes that are signalled, fail, or are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from mmclip.data.image_text import ImageTextData
from mmclip.data.loading import ReaderDied, iterate_images, iterate_texts
from mmclip.data.shards import open_data
from tests.data.test_data import good, jpeg, write_tar
from tests.data.test_loader import TRANSFORM, tokenize


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ImageTextData:
    return open_data(str(write_tar(tmp_path_factory.mktemp("tar") / "0.tar", good(23))))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_pictures_are_left_out_with_their_rows(tmp_path: Path, workers: int) -> None:
    members = [*good(6), ("bad.jpg", jpeg()[:90]), ("bad.txt", b"x"), ("zero.jpg", b""), ("zero.txt", b"x")]
    data = open_data(str(write_tar(tmp_path / "0.tar", members)))
    rows, bad = [], []
    for read, images, failed in iterate_images(data, TRANSFORM, 3, workers):
        rows += read.tolist()
        bad += [(row, sample.key) for row, sample in failed]
        assert images is None or len(images) == len(read)
    assert rows == list(range(6)) and bad == [(6, "bad"), (7, "zero")]


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


def test_a_reader_that_is_killed_is_told_by_the_next_batch_and_nowhere_else(data: ImageTextData) -> None:
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
    def fails(picture: object) -> torch.Tensor:
        raise RuntimeError("a bug of the transform")

    with pytest.raises(RuntimeError, match="a bug of the transform") as error:
        list(iterate_images(data, fails, 4, workers))
    assert not isinstance(error.value, ReaderDied)
