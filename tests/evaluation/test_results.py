"""Results on disk: exactly what was saved, or one line."""

from __future__ import annotations

import numpy as np
import pytest

from mmclip.errors import UserError
from mmclip.evaluation.results import Results, load_results, save_results
from tests.helpers.evaluating import collection_of, eval_data, evaluated, rich_data, run_of


@pytest.fixture(scope="module")
def results() -> Results:
    return run_of(eval_data(), b=2)


@pytest.mark.parametrize("make", [lambda: run_of(rich_data(), b=2), lambda: evaluated(collection_of(), resamples=2)])
def test_results_survive_the_disk_exactly(make, tmp_path):
    results = make()
    path = save_results(results, tmp_path / "run")
    assert sorted(p.name for p in path.parent.iterdir()) == ["items.json", "per_query.npz", "results.json"]
    for source in (path, path.parent):
        loaded = load_results(source)
        assert loaded.json == results.json and loaded.items == results.items
        assert loaded.per_query.keys() == results.per_query.keys()
        assert all(np.array_equal(v, results.per_query[k]) for k, v in loaded.per_query.items())


def test_bad_files_are_one_line(results, tmp_path):
    with pytest.raises(UserError, match="no file"):
        load_results(tmp_path)
    path = save_results(results, tmp_path)
    good = path.read_text()
    for text, words in (("{", "not a results.json"), ("[]", "not a"), ("{}", "no retrieval"), ("3", "not a")):
        path.write_text(text)
        with pytest.raises(UserError, match=words):
            load_results(path)
    path.write_text(good)
    np.savez(tmp_path / "per_query.npz", x=np.array([object()], dtype=object))  # would need pickle
    for content in (None, b"PK"):
        if content is not None:
            (tmp_path / "per_query.npz").write_bytes(content)
        with pytest.raises(UserError, match="read safely"):
            load_results(path)


def test_missing_per_query_numbers_name_the_valid_ones(results):
    with pytest.raises(UserError, match="retrieval/t2i/native"):
        results.query_values("retrieval", "t2i", "learned", "success@1")


def test_results_that_cannot_be_written_replace_none_of_the_old_files(results, tmp_path):
    save_results(results, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    broken = Results(results.json | {"broken": float("nan")}, results.per_query | {"more": np.ones(3)})
    with pytest.raises(ValueError, match="JSON"):
        save_results(broken, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
