"""Contact sheets: who is in them, in which order, and what is said where there can be none."""

from __future__ import annotations

import base64
import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from mmclip.reporting.examples import QUERIES, SIDE, examples
from mmclip.reporting.page import read_runs


@pytest.fixture(scope="module")
def run(folders):
    return read_runs({"run": folders["qnorm"]})[0]


def sheet(run, direction, kind):
    _, every, missing = examples(run)
    assert missing is None
    return [e for e in every if (e.direction, e.kind) == (direction, kind)]


def test_worst_are_the_largest_first_ranks_each_of_another_picture(run):
    first = run.results.array("retrieval/t2i/native/first_rank")
    owner = run.items.owner
    found = sheet(run, "t2i", "worst")
    rows = [run.items.captions.index(e.query.text) for e in found]
    assert len({owner[r] for r in rows}) == len(rows) == QUERIES
    queries = run.results.array("retrieval/t2i/queries").tolist()
    ranks = [first[queries.index(r)] for r in rows]
    assert ranks[0] == first.max() and ranks == sorted(ranks, reverse=True)
    for example, row in zip(found, rows, strict=True):
        last = example.documents[-1]
        assert not example.documents[0].relevant and any(a.relevant for a in example.documents)
        assert not last.missed or last.text == run.items.image_keys[owner[row]]


def test_best_have_a_relevant_document_first_and_the_largest_lead(run):
    for direction in ("i2t", "t2i"):
        found = sheet(run, direction, "best")
        leads = [float(e.words.removeprefix("ahead by ")) for e in found]
        assert leads == sorted(leads, reverse=True) and leads[0] > 0
        assert all(e.documents[0].relevant and e.documents[0].rank == 1 for e in found)


def test_a_lead_by_cosine_is_a_difference_of_cosines(folders):
    (run,) = read_runs({"run": folders["baseline"]})
    scores = run.results.array("retrieval/i2t/cosine/top_scores")
    relevant = run.results.array("retrieval/i2t/cosine/top_relevant")
    leads = [s[0] - s[~r][0] for s, r in zip(scores, relevant, strict=True) if r[0]]
    assert sheet(run, "i2t", "best")[0].words == f"ahead by {max(leads):.3f}"


def test_documents_are_the_rankings_with_norms_and_pictures(run):
    example = sheet(run, "t2i", "best")[0]
    query = run.items.captions.index(example.query.text)
    at = run.results.array("retrieval/t2i/queries").tolist().index(query)
    ids = run.results.array("retrieval/t2i/native/top_ids")[at]
    lengths = run.results.array("retrieval/lengths/image")
    assert [a.text for a in example.documents] == [run.items.image_keys[i] for i in ids[: len(example.documents)]]
    norms = [a.numbers.split(" · ")[0] for a in example.documents]
    assert norms == [f"norm {lengths[i]:.2f}" for i in ids[: len(norms)]]
    kind, _, content = example.documents[0].uri.partition(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as picture:
        assert max(picture.size) <= SIDE
        row = int(run.items.image_keys[ids[0]][1:4])
        assert np.allclose(np.asarray(picture)[10, 10], (6 * row, 255 - 6 * row, 90), atol=6)


def test_what_is_missing_is_a_sentence(run):
    without = dataclasses.replace(run, items=None)
    assert "evaluate it again" in examples(without)[2]
    arrays = run.results.per_query | {"retrieval/lengths/image": np.ones(3, np.float32)}
    torn = dataclasses.replace(run, results=dataclasses.replace(run.results, per_query=arrays))
    assert "not of one evaluation" in examples(torn)[2]
    others = dataclasses.replace(run, items=run.items._replace(image_keys=["x"] * 40))
    assert "none of the pictures" in examples(others)[2]


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("logs/heads.safetensors", "A file of embeddings holds no pictures: the keys"),
        ("nowhere.NPZ", "A file of embeddings holds no pictures: the keys"),
        ("nowhere.csv", "cannot be opened here, so the keys of the pictures stand in their places. Why: nowhere.csv"),
        ("builtin:scenes", "builtin:scenes is not a folder"),
    ],
)
def test_without_pictures_the_sheets_are_the_same_with_keys(run, path, sentence):
    json = run.results.json | {"data": run.results.json["data"] | {"path": path}}
    bare = dataclasses.replace(run, results=dataclasses.replace(run.results, json=json))
    scoring, sheets, missing = examples(bare)
    assert sentence in missing and missing.endswith(".") and not missing.endswith("..")
    pictured = examples(run)
    assert scoring == pictured[0] and sheets
    for a, b in zip(sheets, pictured[1], strict=True):
        assert a.words == b.words
        for x, y in zip((a.query, *a.documents), (b.query, *b.documents), strict=True):
            assert x == y._replace(uri=None if y.is_picture else "")
