"""Damaged inputs of every kind: the opener returns what it opens or refuses in one line, in process.

Two kinds of damage: bytes anywhere in a file, and values in files that hold named values (JSON, YAML, tables), where
they reach the code behind the parser.
"""

from __future__ import annotations

import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save_file

from mmclip.config import StudyConfig, TrainConfig, load_config
from mmclip.config.model_config import read_model_config
from mmclip.data.beir import open_beir
from mmclip.data.image_text import BadSample
from mmclip.data.shards import open_data
from mmclip.data.text_pairs import open_pairs
from mmclip.embeddings.files import load_embeddings
from mmclip.errors import UserError
from mmclip.evaluation.eval_set import image_text_sets
from mmclip.study.plan import plan_study
from mmclip.tasks.sts import open_sts
from mmclip.training.checkpoint import FORMAT, load_checkpoint
from tests.helpers.texts import write_jsonl, write_qrels
from tests.helpers.tiny import MODEL, add, jpeg

SPECIAL = (b"", b"\0", b"\xff\xfe", b"\n", b"\r\n", b'"', b"\t", b"{", b"[" * 500, b"9" * 400, b"-1", b"NaN", b"1e999",
           b"null", b"\x1b[31m", "\u202e".encode(), b"../../x", b"/dev/zero",
           b"!!python/object/apply:os.system [touch PWNED]")  # fmt: skip
VALUES = ("", " ", "\0", "a\nb", "-1", "0", "1e999", "nan", "null", "~", "true", "[]", "{}", "[a, [b]]", "x" * 5000,
          "../../x", "/dev/zero", "{0..99999999}.tar", "${NO_SUCH", "${NO_SUCH}", "\u202eabc", 0, -1, 7.5, 1e300,
          10**30, True, None, [], {}, ["x"], [[1]], {"x": 1})  # fmt: skip


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for i in range(4):
            add(tar, f"{i}.jpg", jpeg())
            add(tar, f"{i}.txt", f"caption {i}".encode())


def write_csv(path: Path) -> None:
    Image.new("RGB", (20, 20), "red").save(path.parent / "0.png")
    path.write_text("filepath\ttitle\n" + "".join(f"0.png\tcaption {i}\n" for i in range(4)), encoding="utf-8")


ARRAYS = {
    "image": np.eye(4, dtype=np.float32),
    "text": np.ones((6, 4), np.float32),
    "image_ids": np.array(list("abcd")),
    "text_ids": np.array(list("uvwxyz")),
    "text_image_ids": np.array(list("aabbcd")),
}


def write_safetensors(path: Path) -> None:
    names = {
        k: np.frombuffer(json.dumps(v.tolist()).encode(), np.uint8) for k, v in ARRAYS.items() if v.dtype.kind == "U"
    }
    save_file({"image": ARRAYS["image"], "text": ARRAYS["text"], **names}, path)


def write_beir(path: Path) -> None:
    write_jsonl(path, ({"_id": f"d{i}", "title": "", "text": f"text {i}"} for i in range(4)))
    write_jsonl(path.parent / "queries.jsonl", ({"_id": f"q{i}", "text": f"query {i}"} for i in range(2)))
    write_qrels(path.parent / "qrels" / "test.tsv", [("q0", "d0", 1), ("q1", "d3", 2)])


def read_images(path: Path) -> Any:
    data = open_data(str(path), None, "train")
    for row in range(len(data)):
        try:
            data.read_image(row)
        except BadSample as error:  # skipped, counted and named
            assert str(error).isprintable()
    return data


def read_sets(path: Path) -> Any:
    return image_text_sets(load_embeddings(path), {"path": str(path), "split": None})


class Case(NamedTuple):
    """A good file and its opener. damaged: another file of the folder that is damaged instead."""

    name: str
    write: Callable[[Path], object]
    open: Callable[[Path], object]
    damaged: str = ""


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content, encoding="utf-8")


CONFIG = "model: ViT-B-32\ntrain_data: data.tar\nlr: 1e-3\nlock_image: true\naug_cfg: [scale=0.9]\nwarmup: 0.1\n"
STUDY = "seeds: [0, 1]\nlr: 1e-3\narms:\n  - {loss: sym, norm: [cosine, dot]}\n"
CHECKPOINT = {"format": FORMAT, "step": 3, "weights": {"a": torch.ones(9)}}
TRIPLE = '{"query": "q", "positive": "p", "negative": "n"}\n'
CASES = [
    Case("data.tar", write_tar, read_images),
    Case("pairs.csv", write_csv, read_images),
    Case("arrays.npz", lambda path: np.savez(path, **ARRAYS), read_sets),
    Case("arrays.safetensors", write_safetensors, read_sets),
    *(
        Case("corpus.jsonl", write_beir, lambda path: open_beir(path.parent, "test"), damaged)
        for damaged in ("", "queries.jsonl", "qrels/test.tsv")
    ),
    Case("triples.tsv", text("q0\tp0\tn0\nq1\tp1\tn1\n"), open_pairs),
    Case("triples.jsonl", text(TRIPLE * 3), open_pairs),
    Case("pairs.tsv", text("score\tsentence1\tsentence2\n1.0\ta\tb\n0.5\tc\td\n0\te\tf\n"), open_sts),
    Case("model.json", text(json.dumps(MODEL)), lambda path: read_model_config(str(path))),
    Case("config.yaml", text(CONFIG), lambda path: load_config(TrainConfig, path)),
    Case("study_x.yaml", text(STUDY), lambda path: plan_study(StudyConfig(config=str(path), logs=str(path.parent)))),
    Case("step.pt", lambda path: torch.save(CHECKPOINT, path), load_checkpoint),
]


def check(case: Case, path: Path) -> None:
    """Open it; any other exception, or an unprintable message, is a fault."""
    try:
        assert case.open(path) is not None
    except UserError as error:
        assert str(error) and str(error).isprintable() and len(str(error)) <= 4000, repr(str(error))
    except OSError as error:
        assert error.strerror or str(error)
    assert not Path("PWNED").exists()


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(content) + 1)
        end = min(len(content), at + rng.choice((0, 1, 1, 8, 512)))
        piece = rng.choice(
            (rng.choice(SPECIAL), bytes([rng.randrange(256)]), content[at:end] * 2, rng.randbytes(end - at))
        )
        content = rng.choice((content[:at] + piece + content[end:], content[:at] + piece + content[end:], content[:at]))
    return content


def damaged_value(value: Any, rng: random.Random) -> Any:
    """A copy with one thing replaced, dropped or added, at any depth."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.2:
        return rng.choice(VALUES)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = rng.choice(keys)
    copy = dict(value) if isinstance(value, dict) else list(value)
    if rng.random() < 0.15:
        del copy[key]
    elif isinstance(copy, dict) and rng.random() < 0.2:
        copy[str(rng.choice(VALUES))] = copy.pop(key)
    else:
        copy[key] = damaged_value(value[key], rng)
    return copy


def damaged_text(content: bytes, rng: random.Random, suffix: str) -> bytes:
    """Replace one value of one line."""
    lines = content.decode().splitlines()
    at = rng.randrange(len(lines))
    if suffix == ".json":
        lines = [json.dumps(damaged_value(json.loads(content), rng))]
    elif suffix == ".jsonl":
        lines[at] = json.dumps(damaged_value(json.loads(lines[at]), rng))
    elif suffix == ".yaml":
        value = rng.choice(VALUES)
        lines[at] = f"{lines[at].partition(':')[0]}: {value if isinstance(value, str) else json.dumps(value)}"
    else:
        cells = lines[at].split("\t")
        cells[rng.randrange(len(cells))] = str(rng.choice(VALUES))
        lines[at] = "\t".join(rng.choice((cells, cells[::-1], cells[1:], [*cells, "x"])))
    return ("\n".join(lines) + "\n").encode()


def name_of(case: Case) -> str:
    return case.damaged or case.name


NAMED = [case for case in CASES if Path(name_of(case)).suffix in (".json", ".jsonl", ".yaml", ".csv", ".tsv")]


@pytest.mark.filterwarnings("ignore")  # libraries warn of what they read
@pytest.mark.parametrize(
    ("case", "values"),
    [(case, values) for values, cases in ((False, CASES), (True, NAMED)) for case in cases],
    ids=lambda v: name_of(v) if isinstance(v, Case) else ("bytes", "values")[v],
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_damaged_files_are_read_or_refused_in_a_line(case: Case, values: bool, tmp_path: Path, seed: int) -> None:
    path, target, rng = tmp_path / case.name, tmp_path / name_of(case), random.Random(seed)
    case.write(path)
    content = target.read_bytes()
    target.write_bytes(damaged_text(content, rng, target.suffix) if values else damaged_bytes(content, rng))
    check(case, path)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_good_file_opens(case: Case, tmp_path: Path) -> None:
    case.write(tmp_path / case.name)
    assert case.open(tmp_path / case.name) is not None


def test_a_planted_fault_is_noticed(tmp_path: Path) -> None:
    def breaks(path: Path) -> None:
        raise KeyError("planted")

    for opener, error in ((breaks, KeyError), (lambda path: None, AssertionError)):
        with pytest.raises(error):
            check(Case("x", lambda path: None, opener), tmp_path)
