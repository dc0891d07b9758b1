"""Pictures that decode, and pictures that cannot be used or were made to do harm; what tells two data sets apart."""

from __future__ import annotations

import io
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
from tests.data.test_data import folder, good, jpeg, write_tar
from tests.data.test_loader import TRANSFORM


def grey(value: int) -> bytes:
    out = io.BytesIO()
    Image.new("L", (9, 7), value).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize("mode", ["P", "L", "LA", "RGBA", "CMYK", "1", "I;16"])
def test_every_picture_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    out = io.BytesIO()
    image = Image.new("L", (9, 7), 90)
    picture = Image.new("I;16", (9, 7), 900) if mode == "I;16" else image.convert(mode)
    picture.save(out, "TIFF" if mode == "CMYK" else "PNG")
    path = write_tar(tmp_path / "0.tar", [("a.png", out.getvalue()), ("a.txt", b"grey")])
    read = open_data(str(path)).read_image(0)
    assert (read.mode, read.size) == ("RGB", (9, 7))


@pytest.mark.parametrize(
    "content", [b"", b"no image", jpeg()[:150], b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"]
)
def test_an_unreadable_picture_is_a_bad_sample_when_it_is_read(tmp_path: Path, content: bytes) -> None:
    data = open_data(str(write_tar(tmp_path / "0.tar", [("b.jpg", content), ("b.txt", b"x"), *good(1)])))
    with pytest.raises(BadSample) as error:
        data.read_image(0)
    assert error.value.key == "b" and "0.tar" in str(error.value) and "\n" not in str(error.value)
    assert data.read_image(1).size == (20, 12)


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("1", (20_000, 10_000)).save(out, "PNG")
    data = open_data(str(write_tar(tmp_path / "0.tar", [("b.png", out.getvalue()), ("b.txt", b"x")])))
    with pytest.raises(BadSample, match="pixels"):
        data.read_image(0)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, extra: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(bytes(400))) + chunk(b"IEND", b"")


def animated(form: str) -> bytes:
    out, frames = io.BytesIO(), [Image.new("RGB", (40, 30), (i, 0, 0)) for i in range(1, 9)]
    frames[0].save(out, form, save_all=True, append_images=frames[1:])
    return out.getvalue()


BOMB = zlib.compress(bytes(100_000_000))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (png(50_000, 50_000), "pixels"),
        (png(0, 0), "not a readable picture"),
        (png(10, 10, chunk(b"zTXt", b"k\0\0" + BOMB)), "too large"),
        (png(10, 10, chunk(b"iTXt", b"k\0\1\0\0\0" + BOMB)), "too large"),
        (png(10, 10, chunk(b"iCCP", b"k\0\0" + BOMB)), "too large"),
        (jpeg(1, (200, 200)).replace(b"\x00\xc8\x00\xc8", b"\xff\xdc\xff\xdc"), "pixels"),
        (jpeg(1, (200, 200))[:3000], "truncated"),
        (animated("GIF").replace(b"\x28\x00\x1e\x00", b"\xff\xff\xff\xff"), "pixels"),
        (animated("GIF"), None),
        (animated("WEBP"), None),
        (png(10, 10), None),
    ],
)
def test_pictures_made_to_fill_memory_or_hours_are_bad_samples(
    tmp_path: Path, content: bytes, told: str | None
) -> None:
    data = open_data(str(write_tar(tmp_path / "0.tar", [("b.png", content), ("b.txt", b"x")])))
    if told is None:
        assert data.read_image(0).mode == "RGB", "of an animation the first picture"
        return
    with pytest.raises(BadSample) as error:
        data.read_image(0)
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["absolute", "beside the CSV"])
@pytest.mark.parametrize("fault", ["damaged", "gone", "no image", "in a folder's place"])
def test_a_bad_picture_of_a_csv_is_named_once_wherever_it_is_told(tmp_path: Path, key: str, fault: str) -> None:
    picture, table = tmp_path / "shown" / "bad.jpg", tmp_path / "pairs.csv"
    picture.parent.mkdir()
    picture.write_bytes(b"no image" if fault == "no picture" else jpeg()[:150])
    table.write_text(f"filepath\ttitle\n{picture if key == 'absolute' else 'shown/bad.jpg'}\tone\n", encoding="utf-8")
    data = open_data(str(table))
    if fault in ("gone", "in a folder's place"):
        picture.unlink()
    if fault == "in a folder's place":
        picture.mkdir()
    with pytest.raises(BadSample) as error:
        data.read_image(0)
    with pytest.raises(UserError) as none:  # embed.py, the evaluation, and training with --cache-features
        encode_images(lambda x: x.flatten(1), data, TRANSFORM, EncodeOptions(torch.device("cpu"), progress=False))
    (line,) = BadSamples().add([error.value])  # training
    for text in (str(error.value), line, skipped_line(by_key([error.value])), str(none.value),
                 str(no_samples(1, 1, by_key([error.value])))):  # fmt: skip
        assert text.count("bad.jpg") == 1 and str(picture) in text, text
        assert "Errno" not in text, text


def test_a_bad_picture_of_a_shard_is_named_by_key_and_shard(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "0.tar", [("b.jpg", b"no image"), ("b.txt", b"x")])
    with pytest.raises(BadSample) as error:
        open_data(str(shard)).read_image(0)
    assert str(error.value).startswith(f"b in {shard}: not a readable picture")


def test_a_line_of_pixels_is_refused_since_resizing_it_would_take_gigabytes(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("L", (1, 100_000)).save(out, "PNG")
    data = open_data(str(write_tar(tmp_path / "0.tar", [("b.png", out.getvalue()), ("b.txt", b"x")])))
    with pytest.raises(BadSample, match="200 to 1"):
        data.read_image(0)


def test_fingerprint_is_the_same_for_a_copy_and_another_for_other_data(tmp_path: Path) -> None:
    one = open_data(str(folder(tmp_path / "a")))
    copy = open_data(str(folder(tmp_path / "b")))
    changed = [(n, c.replace(b"caption 0", b"caption O")) for n, c in good()]
    other = open_data(str(folder(tmp_path / "c", shards=[changed])))
    assert one.fingerprint() == copy.fingerprint() != other.fingerprint()
    plain = [[("a.png", grey(value)), ("a.txt", b"x")] for value in (90, 91)]
    assert len({len(p[0][1]) for p in plain}) == 1, "pictures of one size"
    assert len({open_data(str(folder(tmp_path / f"p{i}", shards=[p]))).fingerprint() for i, p in enumerate(plain)}) == 2
    assert one.subset([1, 2]).fingerprint() != one.fingerprint()
    assert one.subset([3, 1]).keys == ["k3", "k1"]


def made(counts: list[int]) -> ImageTextData:
    captions = [[f"{row}.{i}" for i in range(n)] for row, n in enumerate(counts)]
    return ImageTextData(
        "x", "train", [f"k{r}" for r in range(len(counts))], captions, [("x.tar", r, 1) for r in range(len(counts))]
    )


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
