"""clip-benchmark's command line, stock and mmclip's, on small data, and the bounds of its numbers."""

from __future__ import annotations

import importlib
import io
import json
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from mmclip import load_model, metrics
from mmclip.data.shards import open_data
from mmclip.embeddings.encode import EncodeOptions
from mmclip.evaluation.clip_benchmark import main
from mmclip.evaluation.eval_set import EvalSource
from mmclip.models.metadata import native_exponents
from mmclip.retrieval.ranking import rank
from mmclip.roles import CLIP_DIRECTIONS, Normalization
from mmclip.similarity import score
from tests.helpers.tiny import add

KS = (1, 5, 10)
OURS = ("--model_type", "mmclip")
STOCK = ("--no_amp", "--task", "zeroshot_retrieval")
COLOURS = ("red", "lime", "blue", "yellow", "magenta", "cyan")


def make_classes(root: Path) -> Path:
    """40 pictures of one colour each in 6 classes, with three templates of different lengths."""
    (root / "test").mkdir(parents=True)
    (root / "test" / "nshards.txt").write_text("1\n", encoding="utf-8")
    with tarfile.open(root / "test" / "0.tar", "w") as tar:
        for i in range(40):
            picture = io.BytesIO()
            Image.new("RGB", (32, 32), COLOURS[i % 6]).save(picture, "PNG")
            add(tar, f"{i:03d}.png", picture.getvalue())
            add(tar, f"{i:03d}.cls", str(i % 6).encode())
    (root / "classnames.txt").write_text("\n".join(COLOURS) + "\n", encoding="utf-8")
    lines = "{c}\na photo of something {c} in every corner of it\nthe {c} square\n"
    (root / "zeroshot_classification_templates.txt").write_text(lines, encoding="utf-8")
    return root


def first_samples(source: Path, split: str, root: Path, samples: int) -> Path:
    """A data set folder with the first samples of one split of another."""
    shutil.copytree(source, root, ignore=lambda folder, names: [n for n in names if (Path(folder) / n).is_dir()])
    (root / split).mkdir()
    (root / split / "nshards.txt").write_text("1\n", encoding="utf-8")
    keys: set[str] = set()
    with tarfile.open(source / split / "0.tar") as shard, tarfile.open(root / split / "0.tar", "w") as tar:
        for member in shard:
            keys.add(member.name.partition(".")[0])
            if len(keys) > samples:
                break
            tar.addfile(member, shard.extractfile(member))
    return root


def flags(data: Path, model: object, output: Path, *more: object) -> list[str]:
    every = ["eval", "--model", model, "--dataset", f"wds/{data.name}", "--dataset_root", data, "--num_workers", 0,
             "--recall_k", *KS, "--output", output, *more]  # fmt: skip
    return [str(x) for x in every]


def metrics_of(path: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["metrics"]
    return found


def ours(data: Path, model: Path, scoring: str, folder: Path, *more: object) -> dict[str, float]:
    output = folder / f"{scoring}.json"
    main(flags(data, model, output, *OURS, "--scoring", scoring, *more))
    written = json.loads(output.read_text(encoding="utf-8"))
    assert (written["scoring"], written["model"], written["pretrained"]) == (scoring, str(model), "")
    return metrics_of(output)


def stock(monkeypatch: pytest.MonkeyPatch, *argv: object) -> None:
    """Run stock clip-benchmark in this process."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["clip_benchmark", *map(str, argv)])
        importlib.import_module("clip_benchmark.cli").main()


def assert_equal_within_ties(found: dict[str, float], run: Path, data: Path, scoring: str) -> dict[str, int]:
    """Assert that clip-benchmark's numbers are mmclip's own, or between the two ways to break ties.

    clip-benchmark multiplies in float32: scores that differ by less than its rounding count as ties.

    Returns:
        How many queries of each direction have an irrelevant document with exactly a relevant one's score.
    """
    model, options = load_model(str(run)), EncodeOptions(torch.device("cpu"), progress=False)
    rows = EvalSource.open(open_data(str(data), purpose="eval"), {}, model, options).embed(model, options)
    exponents = native_exponents(model.metadata) if scoring == "native" else Normalization(scoring).exponents
    tied = {}
    for direction in CLIP_DIRECTIONS:
        query, document = direction.roles({"image": rows.image, "text": rows.text})
        pairs = rows.pairs if direction.query_side == "image" else rows.pairs.flip(1)
        ranking = rank(query, document, pairs, {scoring: exponents})[scoring]
        tied[direction.value] = ranking.n_tied
        numbers = metrics.per_query(ranking.ranks, ranking.offsets)
        scores = score(query.double(), document.double(), exponents)
        relevant = torch.zeros(scores.shape, dtype=torch.bool)
        relevant[pairs[:, 0], pairs[:, 1]] = True
        noise = 1e-6 * scores.abs().amax(1, keepdim=True)
        best = scores.masked_fill(~relevant, -torch.inf).amax(1, keepdim=True)
        rivals = scores.masked_fill(relevant, -torch.inf)
        for k in KS:
            low, high = (float(((rivals > best + e).sum(1) < k).double().mean()) for e in (-noise, noise))
            for number in (numbers[f"success@{k}"].mean(), found[f"{direction.document_side}_retrieval_recall@{k}"]):
                assert low - 1e-6 <= number <= high + 1e-6, (direction, k, low, number, high)
    return tied
