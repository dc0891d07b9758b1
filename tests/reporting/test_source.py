"""What of a run's folder a report reads, and what it passes over."""

from __future__ import annotations

import pytest

from mmclip.evaluation.results import Results
from mmclip.reporting.page import read_items, read_lines, read_settings


def test_torn_and_odd_lines_are_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 2, "loss": 1}\n[]\n{"loss": 3}\n{"step": NaN}\n{"step": 1}\n\xff\xfe\n{"step": 3, "lo')
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    assert read_lines(tmp_path / "none") == []


@pytest.mark.parametrize(
    "text", ["no: such setting\n", "loss: [\n", "loss: !!python/object:os.system {}\n", "x" * 200_000]
)
def test_what_is_no_settings_file_is_none(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    assert read_settings(tmp_path) is None


def test_settings_are_read(tmp_path):
    assert read_settings(tmp_path) is None
    (tmp_path / "config.yaml").write_text("lr: 0.25\n", encoding="utf-8")
    assert read_settings(tmp_path) == {"lr": 0.25}


@pytest.mark.parametrize(
    "items",
    [
        {},
        {"image_keys": ["a"], "captions": [], "owner": []},
        {"image_keys": ["a"], "captions": ["b"], "owner": ["c"]},
    ],
)
def test_items_of_another_shape_are_none(items):
    results = Results({"data": {"n_images": 1, "n_texts": 1}}, {}, items)
    assert read_items(results) is None
