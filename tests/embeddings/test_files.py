"""Embeddings in a file: a user's own, ours in both kinds, and one line for each thing that can be wrong with one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from mmclip.embeddings.files import Distractors, Embeddings, load_embeddings, save_embeddings
from mmclip.errors import UserError
from mmclip.io import SUFFIXES
from mmclip.similarity import Exponents
from tests.helpers.evaluating import evaluate_clip

N, M, D = 4, 6, 3
FACTS = {"loss": "asym-i2t", "norm": "qnorm", "gamma_q": 1.0, "gamma_d": 0.0}
FACTS |= {"logit_scale_i2t": 5.0, "logit_scale_t2i": None}


def users() -> dict[str, Any]:
    """What a numpy script writes: the least that is needed."""
    rng = np.random.default_rng(0)
    return {
        "image": rng.normal(size=(N, D)).astype(np.float32),
        "text": rng.normal(size=(M, D)).astype(np.float32),
        "image_ids": np.array(["i0", "i1", "i2", "i3"]),
        "text_ids": np.arange(100, 100 + M),
        "text_image_ids": np.array(["i0", "i0", "i1", "i2", "i3", ""]),
    }


def whole() -> Embeddings:
    """Every field."""
    given = users()
    return Embeddings(
        torch.from_numpy(given["image"]),
        torch.from_numpy(given["text"]),
        torch.tensor([[0, 0], [0, 1], [1, 2], [3, 2]]),
        ["i0", "caf\udce9", "i2\0", "i\n3"],
        text_ids=[f"t{i}" for i in range(M)],
        owner=[0, 0, 1, 2, 3, -1],
        gains=np.array([1.0, 2.0, 1.0, 0.5]),
        captions=["a", "b " * 2000, "", "d", "é", "f"],
        levels=["full", "vague"] * 3,
        n_objects=[1, 2, 3, 4],
        distractors=[
            Distractors(
                "distractors",
                torch.ones(2, D),
                torch.ones(3, D),
                ["x", "", "y"],
                "mark",
                {"image": [0, 1], "text": [1, 1, 0]},
            )
        ],
        evidence={"t2i": torch.tensor([0.1, -3.0, 2.0, 4.0], dtype=torch.float64)},
        model="logs/x",
        metadata=FACTS,
        alpha={"i2t": 5.0, "t2i": None},
        bank={"texts": 7},
    )


def write(path: Path, **changes: Any) -> Path:
    arrays = {k: v for k, v in (users() | changes).items() if v is not None}
    np.savez(path, **arrays)
    return path


def test_a_numpy_script_writes_five_arrays(tmp_path: Path) -> None:
    found = load_embeddings(write(tmp_path / "x.npz"))
    assert found.text_ids == ["100", "101", "102", "103", "104", "105"]
    assert found.pairs.tolist() == [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4]]
    assert found.owner == [0, 0, 1, 2, 3, -1] and found.image_ids == ["i0", "i1", "i2", "i3"]
    assert found.texts == found.text_ids
    assert (found.model, found.metadata, found.alpha) == ("", {}, {"i2t": None, "t2i": None})
    assert torch.equal(found.image, torch.from_numpy(users()["image"]))
    assert evaluate_clip(found, Exponents(1.0, 1.0), {}, resamples=5).json["data"]["n_texts"] == M


def test_relevance_by_rows_or_by_ids_is_the_same(tmp_path: Path) -> None:
    rows = [[0, 0], [3, 0], [1, 5]]
    ids = [[f"i{i}", str(100 + t)] for i, t in rows]
    for name, pairs in (("rows", np.array(rows)), ("ids", np.array(ids)), ("bytes", np.array(ids, dtype="S"))):
        found = load_embeddings(write(tmp_path / f"{name}.npz", pairs=pairs, gains=np.array([1, 2, 3])))
        assert found.pairs.tolist() == rows and found.gains is not None and found.gains.tolist() == [1.0, 2.0, 3.0]
        assert found.owner == [0, 0, 1, 2, 3, -1]  # whose a caption is says nothing of relevance then
    assert load_embeddings(write(tmp_path / "alone.npz", pairs=np.array(rows), text_image_ids=None)).owner is None


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_field_survives(tmp_path: Path, suffix: str) -> None:
    saved = whole()
    save_embeddings(tmp_path / f"x{suffix}", saved)
    found = load_embeddings(tmp_path / f"x{suffix}")
    for field in dataclasses.fields(saved):
        a, b = getattr(saved, field.name), getattr(found, field.name)
        if field.name == "distractors":
            (a,), (b,) = a, b
            assert torch.equal(a.image, b.image) and torch.equal(a.text, b.text) and a.owner == b.owner
            assert a.fingerprint() == b.fingerprint()
        elif field.name == "evidence":
            assert a.keys() == b.keys() and torch.equal(a["t2i"], b["t2i"])
        elif isinstance(a, torch.Tensor):
            assert torch.equal(a, b) and a.dtype == b.dtype, field.name
        else:
            assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b, field.name
    assert found.fingerprint() == saved.fingerprint()


def test_a_safetensors_file_of_a_users_own(tmp_path: Path) -> None:
    given = users()
    arrays = {k: given[k] for k in ("image", "text")}
    arrays |= {k: np.frombuffer(json.dumps([str(v) for v in given[k]]).encode(), np.uint8)
               for k in ("image_ids", "text_ids", "text_image_ids")}  # fmt: skip
    save_file(arrays, tmp_path / "x.safetensors")
    assert load_embeddings(tmp_path / "x.safetensors").owner == [0, 0, 1, 2, 3, -1]


def test_meta_is_a_string_too_and_half_precision_becomes_float32(tmp_path: Path) -> None:
    image, text = users()["image"].astype(np.float16), users()["text"].astype(np.float64)
    meta = np.array(json.dumps({"model": "mine", "facts": FACTS}))
    opened = load_embeddings(write(tmp_path / "x.npz", meta=meta, image=image, text=text))
    assert (opened.model, opened.metadata, opened.alpha) == ("mine", FACTS, {"i2t": 5.0, "t2i": None})
    assert (opened.image.dtype, opened.text.dtype) == (torch.float32, torch.float64)
    plain = load_embeddings(write(tmp_path / "y.npz", meta=np.array('{"alpha": {"i2t": 100, "t2i": 100}}')))
    assert plain.alpha == {"i2t": 100, "t2i": 100} and plain.metadata == {}


FAULTS: list[tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = [
    (lambda g: {"text": None}, "no array 'text'; there: image, image_ids"),
    (lambda g: {"image_ids": None}, "no array 'image_ids'"),
    (lambda g: {"text_image_ids": None}, "nothing says what is relevant: text_image_ids or pairs"),
    (lambda g: {"text_image_id": g["text_ids"]}, "unknown array 'text_image_id'; did you mean text_image_ids"),
    (lambda g: {"gains": np.ones(5)}, "gains without pairs"),
    (lambda g: {"text": g["text"][:, :2]}, r"text embeddings of shape \[6, 2\].*the images' is 3"),
    (lambda g: {"image": g["image"][0]}, r"image of shape \[3\]"),
    (lambda g: {"image": g["image"].astype(np.int64)}, "image holds int64: floats"),
    (lambda g: {"image": g["image"].astype(complex)}, "image is no array of numbers or strings"),
    (lambda g: {"image": g["image"][:0], "image_ids": g["image_ids"][:0], "text_image_ids": np.array([""] * M)},
     "at least one .query row, document row. pair"),
    (lambda g: {"image": np.where(np.arange(N)[:, None] == 2, np.nan, g["image"])},
     "image embeddings: row 2 holds NaN or infinity"),
    (lambda g: {"text": np.where(np.arange(M)[:, None] == 2, np.inf, g["text"])},
     "text embeddings: row 2 holds NaN or infinity"),
    (lambda g: {"image_ids": np.array(["a", "b", "b", "c"]), "text_image_ids": np.array(["a"] * M)},
     "image_ids: 'b' stands there twice"),
    (lambda g: {"text_ids": np.array([7] * M)}, "text_ids: '7' stands there twice"),
    (lambda g: {"text_ids": g["text_ids"][:4]}, "text_ids has 4 entries for 6 embeddings"),
    (lambda g: {"text_ids": g["text_ids"].astype(float)}, r"text_ids of shape \[6\], float64: 6 strings"),
    (lambda g: {"text_ids": np.array(["a", 3], dtype=object)}, "text_ids: Object arrays cannot be loaded"),
    (lambda g: {"text_ids": np.arange(6, dtype=np.uint8)}, "text_ids: uint8 is read as the bytes of a JSON text"),
    (lambda g: {"text_image_ids": np.array(["i0", "x", "i1", "y", "i3", ""])},
     "text_image_ids: 2 of 6 match no image id, the first is 'x'"),
    (lambda g: {"text_image_ids": np.arange(M)}, "none of 6 matches an image id: '0', but image_ids has 'i0'"),
    (lambda g: {"text_image_ids": np.array([""] * M)}, r"relevance pairs of shape \[0, 2\]"),
    (lambda g: {"pairs": np.array([["i0", "100"], ["i0", "9"]])}, "pairs: 1 of 2 match no text id, the first is '9'"),
    (lambda g: {"pairs": np.array([["", "100"]])}, "pairs: none of 1 matches an image id"),
    (lambda g: {"pairs": np.array([[0, 6]])}, "document row 6; valid rows are 0 to 5"),
    (lambda g: {"pairs": np.array([0, 6])}, r"pairs of shape \[2\]"),
    (lambda g: {"pairs": np.array([[0.0, 1.0]])}, "pairs of shape .* float64"),
    (lambda g: {"pairs": np.array([[0, 1]]), "gains": np.array([0.0])}, "above 0"),
    (lambda g: {"pairs": np.array([[0, 1]]), "gains": np.ones(2)}, r"gains of shape \[2\]"),
    (lambda g: {"distractor_text": g["text"][:, :2]}, r"distractors text embeddings of shape \[6, 2\]"),
    (lambda g: {"distractor_text": g["text"], "distractor_owner": np.ones(2, int)}, r"distractor_owner of shape \[2\]"),
    (lambda g: {"captions": np.array(["a"])}, "captions has 1 entries"),
    (lambda g: {"n_objects": np.ones(N)}, "n_objects of shape .* float64"),
    (lambda g: {"meta": np.array("[1]")}, "meta is a list: expected an object"),
    (lambda g: {"meta": np.array('{"model": 3}')}, "meta: model is 3: expected a text"),
    (lambda g: {"meta": np.array('{"facts": {"gamma_q": 1}}')}, "facts without gamma_q and gamma_d"),
    (lambda g: {"meta": np.array('{"facts": {"gamma_q": 1, "gamma_d": "x"}}')},
     'gamma_d is "x": expected a number from 0'),
    (lambda g: {"meta": np.array('{"alpha": {"i2t": 0}}')}, "alpha i2t: 0: i2t and t2i are numbers above 0"),
    (lambda g: {"meta": np.array('{"alpha": {"i2t": 1e999}}')}, "not a finite number"),
    (lambda g: {"evidence_t2i": np.ones(N)}, "evidence_t2i without alpha of i2t"),
    (lambda g: {"evidence_t2i": np.ones(M), "meta": np.array('{"alpha": {"i2t": 1}}')},
     "evidence_t2i of shape .*each of the 4 images"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), FAULTS, ids=[says[:40] for _, says in FAULTS])
def test_a_fault_is_one_line_that_names_the_file(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], says: str
) -> None:
    path = write(tmp_path / "x.npz", **change(users()))
    with pytest.raises(UserError, match=says) as error:
        load_embeddings(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
    assert str(error.value).count("x.npz") == 1
