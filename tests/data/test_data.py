"""Readers against planted faults, the reference reader, and real shards."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmclip.data.shards import open_data
from mmclip.errors import UserError

# The reference reader leaves its files to the garbage collector.
LEAKY = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


def jpeg(seed: int = 0, size: tuple[int, int] = (20, 12)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()


FITS = '{"key": "k0", "captions": [{"level": "full", "relevant": []}, {"level": "vague"}]}\n'


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def good(n: int = 4) -> list[tuple[str, bytes]]:
    members = []
    for i in range(n):
        members += [(f"k{i}.jpg", jpeg(i)), (f"k{i}.txt", f"caption {i}\nanother {i}\n".encode())]
    return members


def folder(root: Path, split: str = "train", shards: list[list[tuple[str, bytes]]] | None = None) -> Path:
    shards = [good()] if shards is None else shards
    for i, members in enumerate(shards):
        write_tar(root / split / f"{i}.tar", members)
    (root / split / "nshards.txt").write_text(f"{len(shards)}\n")
    return root


def test_folder_pattern_and_single_shard_read_alike(tmp_path: Path) -> None:
    more = [(n.replace("k", "m"), c) for n, c in good(3)]
    root = folder(tmp_path, shards=[good(), more])
    expected = [f"k{i}" for i in range(4)] + [f"m{i}" for i in range(3)]
    for source in (
        str(root),
        str(root / "train"),
        f"{root}/train/{{0..1}}.tar",
        f"{root}/train/0.tar::{root}/train/1.tar",
    ):
        data = open_data(source)
        assert data.keys == expected
        assert data.captions[5] == ["caption 1", "another 1"]
        assert data.read_image(5).size == (20, 12)
    assert open_data(f"{root}/train/1.tar").keys == expected[4:]


def test_wildcards_and_a_byte_order_mark(tmp_path: Path) -> None:
    for i in (10, 2):
        write_tar(tmp_path / f"{i}.tar", [(f"s{i}.jpg", jpeg(i)), (f"s{i}.txt", b"\xef\xbb\xbfa caption")])
    data = open_data(f"{tmp_path}/*.tar")
    assert (data.keys, data.captions[0]) == (["s2", "s10"], ["a caption"])


def test_ten_and_more_shards_are_in_numeric_order(tmp_path: Path) -> None:
    shards = [[(f"s{i}.jpg", jpeg(i)), (f"s{i}.txt", b"x")] for i in range(12)]
    assert open_data(str(folder(tmp_path, shards=shards))).keys == [f"s{i}" for i in range(12)]


def test_evaluation_takes_test_then_val_and_training_takes_train(tmp_path: Path) -> None:
    for split in ("train", "val"):
        folder(tmp_path, split)
    assert open_data(str(tmp_path), purpose="eval").split == "val"
    folder(tmp_path, "test")
    assert open_data(str(tmp_path), purpose="eval").split == "test"
    assert open_data(str(tmp_path)).split == "train"
    assert open_data(str(tmp_path), "val").split == "val"


@LEAKY
def test_reads_what_the_webdataset_library_reads(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a" / "0.tar", good(5))
    theirs = list(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))
    data = open_data(str(path))
    assert data.keys == [s["__key__"] for s in theirs]
    assert data.captions == [s["txt"].decode().strip().split("\n") for s in theirs]
    for i, sample in enumerate(theirs):
        assert data.read_image(i).tobytes() == Image.open(io.BytesIO(sample["jpg"])).convert("RGB").tobytes()


@given(lines=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\0"), max_size=12)))
def test_captions_break_at_newlines_only(lines: list[str]) -> None:
    from mmclip.data.shards import _captions

    found, fault = _captions("\n".join(lines).encode())
    expected = [line.strip() for line in lines if line.strip()]
    assert found == expected and (fault is None) == bool(expected)


@pytest.mark.parametrize(
    ("members", "key", "reason"),
    [
        ([("b.jpg", jpeg())], "b", "KEY.txt is missing"),
        ([("b.jpg", jpeg()), ("b.txt", b"\n \n")], "b", "KEY.txt is empty"),
        ([("b.jpg", jpeg()), ("b.txt", b"caf\xe9")], "b", "undecodable caption"),
        ([("b.jpg", jpeg()), ("b.txt", b"x" * 1_000_001)], "b", "1,000,001 bytes"),
        ([("b.txt", b"x")], "b", "no image"),
        ([("k0.jpg", jpeg(9)), ("k0.txt", b"again")], "k0", "two images: the first one is kept"),
        ([("k0.png", jpeg(9))], "k0", "two images"),
        ([("b\udce9.jpg", jpeg()), ("b\udce9.txt", b"x")], "b\udce9", "not UTF-8"),
        ([("../b.jpg", jpeg()), ("../b.txt", b"x")], "../b", "leaves the archive"),
        ([("/etc/b.jpg", jpeg()), ("/etc/b.txt", b"x")], "/etc/b", "leaves the archive"),
    ],
)
def test_faulty_samples_are_skipped_and_named(
    tmp_path: Path, members: list[tuple[str, bytes]], key: str, reason: str
) -> None:
    data = open_data(str(write_tar(tmp_path / "0.tar", good() + members)))
    assert data.keys == ["k0", "k1", "k2", "k3"] and data.captions[0] == ["caption 0", "another 0"]
    assert data.read_image(0).tobytes() == Image.open(io.BytesIO(jpeg(0))).tobytes()
    (bad,) = data.skipped
    assert bad.key == key and reason in bad.reason and bad.where.endswith("0.tar")
    assert pickle.loads(pickle.dumps(bad)).reason == bad.reason, "it crosses a worker's process boundary"


def test_a_duplicate_key_in_another_shard_is_skipped(tmp_path: Path) -> None:
    data = open_data(str(folder(tmp_path, shards=[good(2), good(3)])))
    assert data.keys == ["k0", "k1", "k2"]
    assert [b.key for b in data.skipped] == ["k0", "k1"]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda p: write_tar(p / "0.tar", []), "empty"),
        (lambda p: write_tar(p / "0.tar", [("a.jpg", jpeg())]), "no captions"),
        (lambda p: f"{p}/{{0..3}}.tar", "missing shard"),
        (lambda p: p / "nothing", "no such data; valid: a shard pattern"),
        (lambda p: "https://host/x.tar", "remote data are not read"),
        (lambda p: "pipe:cat x.tar", "remote data are not read"),
        (lambda p: "", "no data named"),
        (lambda p: "x" * 5000, "no such data"),
        (lambda p: f"{p}/{'x' * 5000}.tar", "too long"),
        (lambda p: f"{p}/{'{a,b}' * 40}.tar", "more than 1,000,000 shards"),
        (lambda p: f"{p}/{{{'{a,b}' * 40},c}}.tar", "more than 1,000,000 shards"),
        (lambda p: f"{p}/{'{' * 3000}a,b{'}' * 3000}.tar", "not a shard pattern"),
        (lambda p: f"{p}/{{1..{'9' * 5000}}}.tar", "not a shard pattern"),
        (lambda p: f"{p}/a\0b\n\u202e.tar", "missing shard"),
        (lambda p: f"{p}/{{0..2.tar", "not a shard pattern"),
        (lambda p: f"{p}/{{0..999999999}}.tar", "more than 1,000,000 shards"),
        (lambda p: f"{p}/*.tar", "missing shard"),
        (lambda p: write_tar(p / "0.tar", [("/a.jpg", jpeg()), ("/a.txt", b"x")]), "leaves the archive"),
        (lambda p: "builtin:scene", "builtin:scenes, builtin:scenes-uninformative"),
        (lambda p: folder(p, "other"), "no split train with shards in it; there: other"),
    ],
)
def test_faults_of_the_whole_are_one_line(tmp_path: Path, make, told: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError) as error:
        open_data(str(make(tmp_path)))
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("pattern", ["{0..99999999}.tar", "{000..10000000..1}.tar"])
def test_a_pattern_of_too_many_shards_is_refused_at_once(pattern: str) -> None:
    with pytest.raises(UserError, match="more than 1,000,000 shards"):
        open_data(pattern)


def test_a_pattern_longer_than_a_file_name_is_read(tmp_path: Path) -> None:
    write_tar(tmp_path / "7.tar", good(1))
    more = "::".join([f"{tmp_path}/7.tar"] * 300)
    assert len(more) > 4096 and len(open_data(more)) == 1


@pytest.mark.parametrize(
    ("count", "told"),
    [
        ("1", "not counted: 1.tar"),
        ("3", "missing: 2.tar"),
        ("x", "a number"),
        ("²", "a number"),
        ("0", "a number"),
        ("9" * 12, "a number"),
        ("9" * 5000, "a number"),
    ],
)
def test_nshards_that_disagrees_with_the_shards_is_refused(tmp_path: Path, count: str, told: str) -> None:
    root = folder(tmp_path, shards=[good(1), good(2)])
    (root / "train" / "nshards.txt").write_text(count, encoding="utf-8")
    with pytest.raises(UserError, match=r"nshards\.txt") as error:
        open_data(str(root))
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('{"key": "k0", "captions": [{"level": "full"}]}\n', "k0 has 2 captions, 1 there"),
        ("", "no line there"),
        ("{", "line 1"),
        ('{"key": "k0"}\n', "line 1"),
        ("[1]\n", "line 1"),
        ("[" * 100_000, "line 1"),
        ("{}", "line 1: not a truth of an image: no 'key'"),
        (f"{FITS}{FITS}", "line 2: not a truth of an image: 'k0' has a line already, line 1"),
        (FITS.replace("[]", '["zz"]'), "line 1: relevant names zz, which has no line"),
        (FITS.replace("[]", '"k0"'), "relevant must be a list of keys"),
        (FITS.replace("[]", "[0]"), "relevant must be a list of keys"),
        (FITS.replace('"k0",', '"k0", "n_objects": "2",'), "n_objects a whole number"),
        (FITS.replace('"k0",', '"k0", "n_objects": true,'), "n_objects a whole number"),
        (FITS.replace('"k0",', f'"k0", "n_objects": {10**30},'), "n_objects a whole number"),
        (FITS.replace("full", "\udcff"), "line 1: not a truth of an image: 'utf-8'"),
    ],
)
def test_truth_that_does_not_fit_is_refused(tmp_path: Path, lines: str, told: str) -> None:
    root = folder(tmp_path, shards=[good(1)])
    (root / "train" / "truth.jsonl").write_text(lines, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError, match=r"truth\.jsonl") as error:
        open_data(str(root))
    assert told in str(error.value)


@LEAKY
@pytest.mark.real
def test_real_shards_read_like_the_reference_reader(shared: Path) -> None:
    root = shared / "data" / "flickr8k"
    data = open_data(str(root), purpose="eval")
    theirs = list(webdataset.WebDataset(str(root / "val" / "0.tar"), shardshuffle=False, empty_check=False))
    assert (data.split, len(data), sum(map(len, data.captions))) == ("val", 1000, 5000)
    assert data.keys == [s["__key__"] for s in theirs]
    assert data.captions == [s["txt"].decode().strip().split("\n") for s in theirs]
    assert data.read_image(7).tobytes() == Image.open(io.BytesIO(theirs[7]["jpg"])).convert("RGB").tobytes()
