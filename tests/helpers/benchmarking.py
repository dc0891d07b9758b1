"""clip-benchmark's command line as it is and as mmclip has it, on small data, and what its numbers are held against."""

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
from tests.helpers.tiny import run_script

KS = (1, 5, 10)
OURS = ("--model_type", "mmclip")
STOCK = ("--no_amp", "--task", "zeroshot_retrieval")
COLOURS = ("red", "lime", "blue", "yellow", "magenta", "cyan")


def make_plain(data: Path, root: Path) -> Path:
    """The scenes without truth.jsonl: clip-benchmark knows of a caption's own image only."""
    shutil.copytree(data, root, ignore=shutil.ignore_patterns("truth.jsonl", "distractors"))
    return root


def make_run(data: Path, model: Path, logs: Path) -> Path:
    """A run whose learned exponents are neither 0 nor 1."""
    done = run_script("train_clip.py", "--train-data", data, "--val-data", "none", "--model", model, "--epochs", 12,
                      "--batch-size", 32, "--lr", "1e-3", "--gamma-lr", "0.05", "--workers", 0, "--device", "cpu",
                      "--loss", "asym-i2t", "--norm", "learned", "--logs", logs, "--name", "run")  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return logs / "run"


def make_classes(root: Path) -> Path:
    """40 pictures of one colour each in 6 classes, with three templates of different lengths."""
    folder = root / "test"
    folder.mkdir(parents=True)
    (folder / "nshards.txt").write_text("1\n", encoding="utf-8")
    with tarfile.open(folder / "0.tar", "w") as tar:
        for i in range(40):
            picture = io.BytesIO()
            Image.new("RGB", (32, 32), COLOURS[i % 6]).save(picture, "PNG")
            for ending, content in (("png", picture.getvalue()), ("cls", str(i % 6).encode())):
                info = tarfile.TarInfo(f"{i:03d}.{ending}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
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
    """clip-benchmark as it is, in this process."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["clip_benchmark", *map(str, argv)])
        importlib.import_module("clip_benchmark.cli").main()


def assert_equal_within_ties(found: dict[str, float], run: Path, data: Path, scoring: str) -> dict[str, int]:
    """clip-benchmark's numbers are mmclip's own where no tie decides a hit, else between the two ways to break it.

    Returns how many queries of each direction have a tie: an irrelevant document with exactly a relevant one's score.
    clip-benchmark multiplies in float32: scores that differ by less than its rounding are taken for ties here.
    """
    model, options = load_model(str(run)), EncodeOptions(torch.device("cpu"), progress=False)
    opened = open_data(str(data), purpose="eval")
    rows = EvalSource.open(opened, {}, model, options).embed(model, options)
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
            theirs, mine = found[f"{direction.document_side}_retrieval_recall@{k}"], numbers[f"success@{k}"].mean()
            assert low - 1e-6 <= mine <= high + 1e-6, (direction, k, low, mine, high)
            assert low - 1e-6 <= theirs <= high + 1e-6, (direction, k, low, theirs, high)
    return tied
