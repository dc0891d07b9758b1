"""Damaged and hostile tars: one line or the samples that are whole, never a hang."""

from __future__ import annotations

import gzip
import io
import random
import struct
import tarfile
from pathlib import Path

import pytest

from mmclip.data.shards import open_data
from mmclip.errors import UserError
from tests.data.test_data import good, jpeg, write_tar


def with_size(path: Path, number: int, size: bytes) -> Path:
    """The tar with another size in the header of a member, its checksum right."""
    content = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        at = tar.getmembers()[number].offset
    header = content[at : at + 512]
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    content[at : at + 512] = header
    path.write_bytes(content)
    return path


@pytest.mark.timeout(20)
def test_a_negative_size_does_not_send_the_reader_round_for_ever(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "0.tar", [(f"k{i}.{e}", b"hello") for i in range(3) for e in ("jpg", "txt")])
    back_to_the_second = b"\xff" * 4 + struct.pack(">q", -(3 * 1024 + 512 - 1024))
    with pytest.raises(UserError, match="negative size"):
        open_data(str(with_size(path, 3, back_to_the_second)))


def test_joined_compressed_and_deeply_nested_tars_are_one_line_errors(tmp_path: Path) -> None:
    one, two = (
        write_tar(tmp_path / "1.tar", good(2)),
        write_tar(tmp_path / "2.tar", [("z.jpg", jpeg()), ("z.txt", b"z")]),
    )
    nested = tarfile.TarInfo("x")
    nested.type = b"x"
    for content, told in (
        (one.read_bytes() + two.read_bytes(), "joined by cat"),
        (gzip.compress(one.read_bytes()), "compressed \\(gzip\\)"),
        (nested.tobuf(tarfile.USTAR_FORMAT) * 3000 + bytes(1024), "not a readable tar"),
    ):
        (tmp_path / "0.tar").write_bytes(content)
        with pytest.raises(UserError, match=told) as error:
            open_data(str(tmp_path / "0.tar"))
        assert "\n" not in str(error.value)


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
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        header += bytes(512)
    content = write_tar(tmp_path / "0.tar", good(1)).read_bytes()
    with tarfile.open(tmp_path / "0.tar") as tar:
        end = max(m.offset_data + -(-m.size // 512) * 512 for m in tar)
    members = bytes(header) + text.tobuf(tarfile.GNU_FORMAT) + b"x".ljust(512, b"\0")
    (tmp_path / "0.tar").write_bytes(content[:end] + members + bytes(1024))
    data = open_data(str(tmp_path / "0.tar"))
    assert data.keys == ["k0"]
    (bad,) = data.skipped
    assert bad.key == "odd" and "odd.jpg is a link, a device or a sparse file" in bad.reason


@pytest.mark.timeout(20)
def test_long_names_and_pax_headers_of_ordinary_size_are_read(tmp_path: Path) -> None:
    name = "d" * 200 + "/" + "k" * 200
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(tmp_path / "0.tar", "w", format=form) as tar:
            for suffix, content in (("jpg", jpeg()), ("txt", "caf\u00e9".encode())):
                info = tarfile.TarInfo(f"{name}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        assert open_data(str(tmp_path / "0.tar")).keys == [name]


@pytest.mark.timeout(60)
def test_damaged_tars_and_csvs_give_data_or_one_line(tmp_path: Path) -> None:
    rng = random.Random(0)
    tar, table = write_tar(tmp_path / "0.tar", good(2)), tmp_path / "a.csv"
    (tmp_path / "i.jpg").write_bytes(jpeg())
    table.write_text('filepath\ttitle\ni.jpg\tone\ni.jpg\t"two"\n', encoding="utf-8")
    for path, whole in ((tar, tar.read_bytes()), (table, table.read_bytes())):
        for _ in range(250):
            content = bytearray(whole[: rng.randrange(len(whole)) if rng.random() < 0.2 else len(whole)])
            for _ in range(rng.randint(0, 5) if content else 0):
                content[rng.randrange(len(content))] = rng.choice([0, 9, 10, 34, 255, rng.randrange(256)])
            path.write_bytes(content)
            try:
                data = open_data(str(path))
                assert len(data) > 0, "no silent empty data"
            except UserError as error:
                assert "\n" not in str(error)


def test_a_tar_cut_anywhere_is_an_error_that_names_it(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "0.tar", good(2))
    with tarfile.open(whole) as tar:
        end = max(m.offset_data + -(-m.size // 512) * 512 for m in tar)
    content = whole.read_bytes()
    for length in (0, 1, 300, 512, 700, 1024, end - 600, end - 1, end, end + 512):
        whole.write_bytes(content[:length])
        with pytest.raises(UserError, match=r"0\.tar") as error:
            open_data(str(whole))
        assert "\n" not in str(error.value), length
    whole.write_bytes(content[: end + 1024])
    assert len(open_data(str(whole))) == 2
