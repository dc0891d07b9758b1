"""A CSV of paths and captions: what it gives, what is skipped, what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mmclip.data.shards import open_data
from mmclip.errors import UserError
from tests.helpers.shards import jpeg


def test_csv_rows_of_one_path_are_one_image(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg(1))
    (tmp_path / "b.jpg").write_bytes(jpeg(2))
    path = tmp_path / "pairs.csv"
    path.write_text("filepath\ttitle\na.jpg\tone\nb.jpg\ttwo\na.jpg\tthree\nb.jpg\t\n", encoding="utf-8")
    data = open_data(str(path))
    assert (data.keys, data.captions) == (["a.jpg", "b.jpg"], [["one", "three"], ["two"]])
    assert data.read_image(1).size == (20, 12)
    assert "line 5" in data.skipped[0].reason
    path.write_text('image,text\na.jpg,"one, two"\n', encoding="utf-8")
    assert open_data(str(path), img_key="image", caption_key="text", separator=",").captions == [["one, two"]]


def test_faulty_rows_of_a_csv_are_skipped_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg(1))
    os.mkfifo(tmp_path / "pipe.jpg")
    rows = [
        (b"a.jpg\tcaf\xe9", "undecodable"),
        (b"a.jpg\tone\ttwo", "more fields"),
        (b"a.jpg", "no caption"),
        (b"a.jpg\t" + b"x" * 1_000_001, "1,000,001 characters"),
        (b"none.jpg\tx", "no such image"),
        (b"x" * 5000 + b"\tx", "too long"),
        (b"pipe.jpg\tx", "not a plain file"),
        (b"/dev/zero\tx", "not a plain file"),
    ]
    path = tmp_path / "pairs.tsv"
    path.write_bytes(b"\xef\xbb\xbffilepath\ttitle\n" + b"\n".join([r for r, _ in rows] + [b"a.jpg\tright"]))
    data = open_data(str(path), separator="\\t")
    assert (data.keys, data.captions) == (["a.jpg"], [["right"]])
    assert len(data.skipped) == len(rows)
    for number, (bad, (_, reason)) in enumerate(zip(data.skipped, rows, strict=True), start=2):
        assert reason in bad.reason and f"line {number}" in bad.reason and "\n" not in str(bad)
    for separator in ("", "ab", '"', "\n"):
        with pytest.raises(UserError, match="single character"):
            open_data(str(path), separator=separator)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the file is empty"),
        ("filepath\ttitle\n", "empty: no image"),
        ("file\ttitle\nx\ty\n", "no column 'filepath'"),
        ("filepath,title\nx,y\n", "no column"),
        ('filepath\t"ti\ntle"\nx\ty\n', "no column 'title'"),
        ('filepath\ttitle\nx\t"open\ny\tz\n', "line 2 or later: a quote that is never closed"),
        ("filepath\ttitle\nx\ty\n", "no such image, line 2"),
        ("filepath\ttitle\ttitle\nx\ty\tz\n", "2 columns are called 'title' (--csv-caption-key)"),
        ("filepath\tfilepath\ttitle\nx\ty\tz\n", "2 columns are called 'filepath' (--csv-img-key)"),
        ("filepath\ttitle\n\x02end\x03\nx\ty\n", "line 2 or later"),
        ("\0\x1b[31m\u202e\n", "its columns are: \\x00\\x1b[31m\\u202e"),
    ],
)
def test_csv_faults_are_one_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"pairs\.csv") as error:
        open_data(str(path))
    assert told in str(error.value) and "\n" not in str(error.value)


def test_hostile_paths_and_captions_are_named_safely_or_read(tmp_path: Path) -> None:
    (tmp_path / "[red]\u202e.jpg").write_bytes(jpeg(1))
    path = tmp_path / "pairs.tsv"
    rows = ["[red]\u202e.jpg\t[/]\u200b\x1b[31m", "a\0.jpg\tx", "\x1b[31mgone.jpg\tx"]
    path.write_text("unnamed\tunnamed\tfilepath\ttitle\n" + "".join(f"0\t0\t{r}\n" for r in rows), encoding="utf-8")
    data = open_data(str(path))
    assert data.captions == [["[/]\u200b\x1b[31m"]] and data.read_image(0).size == (20, 12)
    told = [str(bad) for bad in data.skipped]
    assert "a\\x00.jpg" in told[0] and "\\x1b[31mgone.jpg" in told[1] and all(t.isprintable() for t in told)
