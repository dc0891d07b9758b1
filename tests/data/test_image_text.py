"""Pictures that decode, pictures that are refused; subsets, permutations and the fingerprint of a data set."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmclip.data.image_text import BadSample, ImageTextData, by_key, skipped_line
from mmclip.data.shards import open_data
from mmclip.embeddings.encode import EncodeOptions, encode_images
from mmclip.errors import UserError
from mmclip.training.monitors import BadSamples, no_samples
from tests.helpers.shards import encoded, folder, good, jpeg, write_tar


def of_picture(path: Path, content: bytes) -> ImageTextData:
    return open_data(str(write_tar(path / "0.tar", [("b.png", content), ("b.txt", b"x"), *good(1)])))


@pytest.mark.parametrize("mode", ["P", "L", "LA", "RGBA", "CMYK", "1", "I;16"])
def test_every_picture_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    picture = Image.new("I;16", (9, 7), 900) if mode == "I;16" else Image.new("L", (9, 7), 90).convert(mode)
    read = of_picture(tmp_path, encoded(picture, "TIFF" if mode == "CMYK" else "PNG")).read_image(0)
    assert (read.mode, read.size) == ("RGB", (9, 7))


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, extra: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(bytes(400))) + chunk(b"IEND", b"")


def animated(path: Path, form: str) -> bytes:
    frames = [Image.new("RGB", (40, 30), (i, 0, 0)) for i in range(1, 9)]
    frames[0].save(path / "a", form, save_all=True, append_images=frames[1:])
    return (path / "a").read_bytes()


BOMB = zlib.compress(bytes(100_000_000))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "an empty picture"),
        (b"no image", "not a readable picture of a known kind"),
        (jpeg()[:150], ""),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a readable picture of a known kind"),
        (encoded(Image.new("1", (20_000, 10_000))), "pixels"),
        (encoded(Image.new("L", (1, 100_000))), "200 to 1"),
        (png(50_000, 50_000), "pixels"),
        (png(0, 0), "not a readable picture"),
        (png(10, 10, chunk(b"zTXt", b"k\0\0" + BOMB)), "too large"),
        (png(10, 10, chunk(b"iTXt", b"k\0\1\0\0\0" + BOMB)), "too large"),
        (png(10, 10, chunk(b"iCCP", b"k\0\0" + BOMB)), "too large"),
        (jpeg(1, (200, 200)).replace(b"\x00\xc8\x00\xc8", b"\xff\xdc\xff\xdc"), "pixels"),
        (jpeg(1, (200, 200))[:3000], "truncated"),
    ],
)
def test_unreadable_and_hostile_pictures_are_bad_samples(tmp_path: Path, content: bytes, message: str) -> None:
    data = of_picture(tmp_path, content)
    with pytest.raises(BadSample) as error:
        data.read_image(0)
    shown = str(error.value)
    assert shown.startswith(f"b in {tmp_path}/0.tar: ") and message in shown and "\n" not in shown
    assert data.read_image(1).size == (20, 12)


def test_of_an_animation_the_first_picture_is_read(tmp_path: Path) -> None:
    for content in (animated(tmp_path, "GIF"), animated(tmp_path, "WEBP"), png(10, 10)):
        assert of_picture(tmp_path, content).read_image(0).mode == "RGB"
    large = animated(tmp_path, "GIF").replace(b"\x28\x00\x1e\x00", b"\xff\xff\xff\xff")
    with pytest.raises(BadSample, match="pixels"):
        of_picture(tmp_path, large).read_image(0)


@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("fault", ["damaged", "gone", "no image", "in a folder's place"])
def test_a_bad_picture_of_a_csv_is_named_once_in_every_message(tmp_path: Path, absolute: bool, fault: str) -> None:
    picture, table = tmp_path / "shown" / "bad.jpg", tmp_path / "pairs.csv"
    picture.parent.mkdir()
    picture.write_bytes(b"no image" if fault == "no image" else jpeg()[:150])
    table.write_text(f"filepath\ttitle\n{picture if absolute else 'shown/bad.jpg'}\tone\n", encoding="utf-8")
    data = open_data(str(table))
    if fault in ("gone", "in a folder's place"):
        picture.unlink()
    if fault == "in a folder's place":
        picture.mkdir()
    with pytest.raises(BadSample) as error:
        data.read_image(0)
    with pytest.raises(UserError) as none:  # embed.py, the evaluation, and training with --cache-features
        encode_images(torch.flatten, data, lambda x: x, EncodeOptions(torch.device("cpu"), progress=False))
    bad = by_key([error.value])
    (line,) = BadSamples().add([error.value])  # training
    for text in (str(error.value), line, skipped_line(bad), str(none.value), str(no_samples(1, 1, bad))):
        assert text.count("bad.jpg") == 1 and str(picture) in text and "Errno" not in text, text


def test_fingerprint_is_the_same_for_a_copy_and_another_for_other_data(tmp_path: Path) -> None:
    def opened(name: str, members: list[tuple[str, bytes]]) -> ImageTextData:
        return open_data(str(folder(tmp_path / name, shards=[members])))

    one, copy = opened("a", good()), opened("b", good())
    other = opened("c", [(n, c.replace(b"caption 0", b"caption O")) for n, c in good()])
    assert one.fingerprint() == copy.fingerprint() != other.fingerprint()
    greys = [encoded(Image.new("L", (9, 7), value)) for value in (90, 91)]
    assert len(greys[0]) == len(greys[1])
    parts = [opened(f"p{i}", [("a.png", grey), ("a.txt", b"x")]).fingerprint() for i, grey in enumerate(greys)]
    assert parts[0] != parts[1] and one.subset([1, 2]).fingerprint() != one.fingerprint()


def made(counts: list[int]) -> ImageTextData:
    captions = [[f"{row}.{i}" for i in range(n)] for row, n in enumerate(counts)]
    keys = [f"k{row}" for row in range(len(counts))]
    return ImageTextData("x", "train", keys, captions, [("x.tar", row, 1) for row in range(len(counts))])


@given(st.lists(st.integers(1, 4), min_size=2, max_size=12), st.integers(0, 5), st.data())
def test_rows_of_a_part_are_those_of_the_whole_however_it_was_taken(
    counts: list[int], seed: int, draw: st.DataObject
) -> None:
    whole = part = made(counts)
    for _ in range(3):
        if len(part) > 1 and draw.draw(st.booleans()):
            part = part.permute(seed)
        rows = draw.draw(st.lists(st.integers(0, len(part) - 1), min_size=1, max_size=len(part), unique=True))
        part = part.subset(rows)
    flat = [c for image in whole.captions for c in image]
    origin = part.origin()
    assert origin.whole is whole
    assert [whole.keys[r] for r in origin.pictures] == part.keys
    assert [whole.places[r] for r in origin.pictures] == part.places
    assert [flat[t] for t in origin.texts] == [c for image in part.captions for c in image]


@given(st.integers(2, 40), st.integers(0, 5))
def test_permuted_pairs_leave_no_image_its_captions_and_all_captions_together(n: int, seed: int) -> None:
    data = made([1 + row % 3 for row in range(n)])
    mixed = data.permute(seed)
    assert mixed.permuted and mixed.split == "train (pairs permuted)" and mixed.keys == data.keys
    assert all(a != b for a, b in zip(mixed.captions, data.captions, strict=True))
    assert sorted(mixed.captions) == sorted(data.captions), "captions of one image stay together"
    assert mixed.captions == data.permute(seed).captions
    assert n < 8 or mixed.captions != data.permute(seed + 1).captions, "the seed draws it"
    assert mixed.fingerprint() != data.fingerprint()


def test_a_single_image_cannot_be_permuted() -> None:
    with pytest.raises(ValueError, match="no other one"):
        made([2]).permute(0)
