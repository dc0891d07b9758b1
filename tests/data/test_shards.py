"""Shards against planted faults, damage, the reference reader and real data."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmclip.data.shards import _captions, open_data
from mmclip.errors import UserError
from tests.helpers.shards import folder, good, jpeg, write_tar

FITS = '{"key": "k0", "captions": [{"level": "full", "relevant": []}, {"level": "vague"}]}\n'


def refusal(source: object, split: str | None = None) -> str:
    with pytest.raises(UserError) as error:
        open_data(str(source), split)
    assert "\n" not in str(error.value)
    return str(error.value)


def checksum(header: bytearray) -> bytearray:
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return header


def test_folder_pattern_and_single_shard_read_alike(tmp_path: Path) -> None:
    more = [(n.replace("k", "m"), c) for n, c in good(3)]
    train = folder(tmp_path, shards=[good(), more]) / "train"
    keys = [f"k{i}" for i in range(4)] + [f"m{i}" for i in range(3)]
    for source in (tmp_path, train, f"{train}/{{0..1}}.tar", f"{train}/0.tar::{train}/1.tar"):
        data = open_data(str(source))
        assert data.keys == keys and data.captions[5] == ["caption 1", "another 1"]
        assert data.read_image(5).size == (20, 12)
    assert open_data(f"{train}/1.tar").keys == keys[4:]


@pytest.mark.parametrize("pattern", ["*.tar", ""])
def test_shards_are_in_numeric_order(tmp_path: Path, pattern: str) -> None:
    shards = [[(f"s{i}.jpg", jpeg(i)), (f"s{i}.txt", b"\xef\xbb\xbfa caption")] for i in range(12)]
    data = open_data(f"{folder(tmp_path, shards=shards)}/train/{pattern}")
    assert (data.keys, data.captions[0]) == ([f"s{i}" for i in range(12)], ["a caption"])


def test_evaluation_takes_test_then_val_and_training_takes_train(tmp_path: Path) -> None:
    for split in ("train", "val"):
        folder(tmp_path, split)
    assert open_data(str(tmp_path), purpose="eval").split == "val"
    folder(tmp_path, "test")
    assert open_data(str(tmp_path), purpose="eval").split == "test"
    assert open_data(str(tmp_path)).split == "train"
    assert open_data(str(tmp_path), "val").split == "val"


# The reference reader leaves its files to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.real)])
def test_reads_what_the_webdataset_library_reads(tmp_path: Path, real: bool, request: pytest.FixtureRequest) -> None:
    root = request.getfixturevalue("shared") / "data" / "flickr8k" if real else folder(tmp_path, "val")
    data = open_data(str(root), purpose="eval")
    theirs = list(webdataset.WebDataset(str(root / "val" / "0.tar"), shardshuffle=False, empty_check=False))
    assert (data.split, len(data), sum(map(len, data.captions))) == ("val", *((1000, 5000) if real else (4, 8)))
    assert data.keys == [s["__key__"] for s in theirs]
    assert data.captions == [s["txt"].decode().strip().split("\n") for s in theirs]
    for i in range(4):
        assert data.read_image(i).tobytes() == Image.open(io.BytesIO(theirs[i]["jpg"])).convert("RGB").tobytes()


@given(lines=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\0"), max_size=12)))
def test_captions_break_at_newlines_only(lines: list[str]) -> None:
    captions, fault = _captions("\n".join(lines).encode())
    expected = [line.strip() for line in lines if line.strip()]
    assert captions == expected and (fault is None) == bool(expected)


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
    assert data.keys == ["k0", "k1", "k2"] and [b.key for b in data.skipped] == ["k0", "k1"]


def test_a_pattern_longer_than_a_file_name_is_read(tmp_path: Path) -> None:
    write_tar(tmp_path / "7.tar", good(1))
    more = "::".join([f"{tmp_path}/7.tar"] * 300)
    assert len(more) > 4096 and len(open_data(more)) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: write_tar(p / "0.tar", []), "empty"),
        (lambda p: write_tar(p / "0.tar", [("a.jpg", jpeg())]), "no captions"),
        (lambda p: write_tar(p / "0.tar", [("/a.jpg", jpeg()), ("/a.txt", b"x")]), "leaves the archive"),
        (lambda p: f"{p}/{{0..3}}.tar", "missing shard"),
        (lambda p: f"{p}/*.tar", "missing shard"),
        (lambda p: f"{p}/a\0b\n\u202e.tar", "missing shard"),
        (lambda p: p / "nothing", "no such data; valid: a shard pattern"),
        (lambda p: "x" * 5000, "no such data"),
        (lambda p: f"{p}/{'x' * 5000}.tar", "too long"),
        (lambda p: "https://host/x.tar", "remote data are not read"),
        (lambda p: "pipe:cat x.tar", "remote data are not read"),
        (lambda p: "", "no data named"),
        (lambda p: "{0..99999999}.tar", "more than 1,000,000 shards"),
        (lambda p: "{000..10000000..1}.tar", "more than 1,000,000 shards"),
        (lambda p: f"{{{'{a,b}' * 40},c}}.tar", "more than 1,000,000 shards"),
        (lambda p: "{0..999}{0..999}{0..9}.tar", "more than 1,000,000 shards"),
        (lambda p: f"{{1..{'9' * 5000}}}.tar", "not a shard pattern"),
        (lambda p: "{0..2.tar", "not a shard pattern"),
        (lambda p: "builtin:scene", "builtin:scenes, builtin:scenes-uninformative"),
        (lambda p: folder(p, "other"), "no split train with shards in it; there: other"),
    ],
)
def test_faults_of_the_whole_are_one_line(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    assert message in refusal(make(tmp_path))


@pytest.mark.parametrize(
    ("count", "message"),
    [("1", "not counted: 1.tar"), ("3", "missing: 2.tar"), *((n, "a number") for n in ("x", "²", "0", "9" * 5000))],
)
def test_nshards_that_disagrees_with_the_shards_is_refused(tmp_path: Path, count: str, message: str) -> None:
    root = folder(tmp_path, shards=[good(1), good(2)])
    (root / "train" / "nshards.txt").write_text(count, encoding="utf-8")
    assert message in (shown := refusal(root)) and "nshards.txt" in shown


@pytest.mark.parametrize(
    ("lines", "message"),
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
def test_truth_that_does_not_fit_is_refused(tmp_path: Path, lines: str, message: str) -> None:
    root = folder(tmp_path, shards=[good(1)])
    (root / "train" / "truth.jsonl").write_text(lines, encoding="utf-8", errors="surrogateescape")
    assert message in (shown := refusal(root)) and "truth.jsonl" in shown


# --- damaged and hostile tars -----------------------------------------------------------------------------------------


@pytest.mark.timeout(20)
def test_a_negative_size_does_not_send_the_reader_round_for_ever(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "0.tar", [(f"k{i}.{e}", b"hello") for i in range(3) for e in ("jpg", "txt")])
    content = bytearray(path.read_bytes())
    header = content[3 * 1024 : 3 * 1024 + 512]
    header[124:136] = b"\xff" * 4 + struct.pack(">q", -(3 * 1024 + 512 - 1024))  # back to the second
    content[3 * 1024 : 3 * 1024 + 512] = checksum(header)
    path.write_bytes(content)
    assert "negative size" in refusal(path)


def test_joined_compressed_and_deeply_nested_tars_are_one_line_errors(tmp_path: Path) -> None:
    one, two = (write_tar(tmp_path / f"{i}.tar", good(i)).read_bytes() for i in (1, 2))
    nested = tarfile.TarInfo("x")
    nested.type = b"x"
    for content, message in (
        (one + two, "joined by cat"),
        (gzip.compress(one), "compressed (gzip)"),
        (nested.tobuf(tarfile.USTAR_FORMAT) * 3000 + bytes(1024), "not a readable tar"),
    ):
        (tmp_path / "0.tar").write_bytes(content)
        assert message in refusal(tmp_path / "0.tar")


@pytest.mark.parametrize(
    "kind",
    [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE],
)
def test_links_devices_and_sparse_files_are_faults_of_their_sample(tmp_path: Path, kind: bytes) -> None:
    odd, text = tarfile.TarInfo("odd.jpg"), tarfile.TarInfo("odd.txt")
    odd.type, odd.linkname, text.size = kind, "/etc/passwd", 1
    header = bytearray(odd.tobuf(tarfile.GNU_FORMAT))
    if kind == tarfile.GNUTYPE_SPARSE:  # one stored block of a file of a gigabyte
        header[124:136] = header[398:410] = b"00000001000\0"
        header[386:398], header[483:495] = b"00000000000\0", b"10000000000\0"
        header = checksum(header) + bytes(512)
    content = write_tar(tmp_path / "0.tar", good(1)).read_bytes()
    members = bytes(header) + text.tobuf(tarfile.GNU_FORMAT) + b"x".ljust(512, b"\0")
    (tmp_path / "0.tar").write_bytes(content[: end_of(tmp_path / "0.tar")] + members + bytes(1024))
    data = open_data(str(tmp_path / "0.tar"))
    assert data.keys == ["k0"]
    (bad,) = data.skipped
    assert bad.key == "odd" and "odd.jpg is a link, a device or a sparse file" in bad.reason


def end_of(path: Path) -> int:
    """The byte behind the last member."""
    with tarfile.open(path) as tar:
        return max(m.offset_data + -(-m.size // 512) * 512 for m in tar)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_pax_headers_of_ordinary_size_are_read(tmp_path: Path, form: int) -> None:
    name = "d" * 200 + "/" + "k" * 200
    members = [(f"{name}.jpg", jpeg()), (f"{name}.txt", "café".encode())]
    assert open_data(str(write_tar(tmp_path / "0.tar", members, form))).keys == [name]


def test_a_tar_cut_anywhere_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "0.tar", good(2))
    content, end = path.read_bytes(), end_of(path)
    for size in (0, 1, 300, 512, 700, 1024, end - 600, end - 1, end, end + 512):
        path.write_bytes(content[:size])
        assert "0.tar" in refusal(path), size
    path.write_bytes(content[: end + 1024])
    assert len(open_data(str(path))) == 2
