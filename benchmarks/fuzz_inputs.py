"""The good inputs that are damaged: tiny data of every form, a model, a config, and checkpoints of a real run."""

from __future__ import annotations

import csv
import io
import json
import random
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

STEPS = 2
# Flags win over a config file: whatever a damaged one says, a case is short and small and writes below logs/ alone.
FLAGS = (
    *("--config", "config.yaml", "--logs", "logs", "--name", "run", "--cache-dir", "logs/cache", "--device", "cpu"),
    *("--workers", "0", "--batch-size", "8", "--epochs", "50", "--max-steps", str(STEPS), "--warmup", "1"),
    *("--log-every-n-steps", "1", "--save-steps", "1", "--report-to", "none", "--no-torchcompile"),
)
CONFIG = {
    "train_data": "data.tar",
    "val_data": "none",
    "model": "model.json",
    "loss": "sym",
    "norm": "qnorm",
    "positives": "mask",
    "lr": 1e-3,
    "wd": 0.1,
    "grad_clip_norm": 1.0,
    "seed": 3,
    "keep_last": False,
    "aug_cfg": ["scale=0.9,1.0"],
    "csv_separator": "\t",
}
MODEL = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1},
}


@dataclass(frozen=True)
class Kind:
    """One of ``targets`` is damaged in a case; ``flags`` make a run read it; ``inputs`` are what it needs besides."""

    name: str
    targets: tuple[str, ...]
    flags: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ("data.tar",)


_CSV = ("pairs.csv", "pictures")
KINDS = (
    Kind("yaml", ("config.yaml",), ("--model", "model.json"), ("data.tar", "folder", *_CSV)),
    Kind("csv", ("pairs.csv",), ("--train-data", "pairs.csv"), _CSV),
    Kind("picture", ("pictures/0.png", "pictures/1.jpg", "pictures/2.webp"), ("--train-data", "pairs.csv"), _CSV),
    Kind("tar", ("data.tar",)),
    Kind(
        "folder",
        ("folder/test/0.tar", "folder/test/truth.jsonl", "folder/test/nshards.txt", "folder/train/0.tar"),
        ("--train-data", "folder", "--val-data", "folder"),
        ("folder",),
    ),
    Kind("model", ("model.json",)),
    Kind(
        "export",
        ("export/open_clip_config.json", "export/mmclip.json", "export/open_clip_model.safetensors"),
        ("--model", "local-dir:export"),
        ("data.tar", "export"),
    ),
    Kind("pt", ("weights.pt",), ("--pretrained", "weights.pt")),
    Kind("safetensors", ("weights.safetensors",), ("--pretrained", "weights.safetensors")),
    Kind("resume", ("resume.pt",), ("--resume", "resume.pt")),
)


def make_data(root: Path) -> None:
    """Everything but the checkpoints: the same bytes each time."""
    samples = [(str(i), suffix, _picture(i, suffix), f"caption {i}\nanother of {i}\n") for i, suffix in _names(24)]
    _write_tar(root / "data.tar", samples)
    (root / "pictures").mkdir()
    with (root / "pairs.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, delimiter="\t")
        rows.writerow(["filepath", "title"])
        for key, suffix, picture, captions in samples:
            (root / "pictures" / f"{key}.{suffix}").write_bytes(picture)
            rows.writerows([f"pictures/{key}.{suffix}", caption] for caption in captions.splitlines())
    for split, chosen in (("train", samples[:16]), ("test", samples[16:])):
        (root / "folder" / split).mkdir(parents=True)
        _write_tar(root / "folder" / split / "0.tar", chosen)
        (root / "folder" / split / "nshards.txt").write_text("1\n", encoding="utf-8")
        truths = [
            {"key": key, "n_objects": i % 3, "captions": [{"level": "full", "relevant": [key]}, {"level": "vague"}]}
            for i, (key, *_) in enumerate(chosen)
        ]
        lines = "".join(json.dumps(truth) + "\n" for truth in truths)
        (root / "folder" / split / "truth.jsonl").write_text(lines, encoding="utf-8")
    (root / "model.json").write_text(json.dumps(MODEL, indent=1), encoding="utf-8")
    config = yaml.safe_dump(CONFIG, sort_keys=False, default_flow_style=None)
    (root / "config.yaml").write_text(config, encoding="utf-8")


def keep_checkpoints(run: Path, root: Path) -> None:
    """A finished run's checkpoint to resume from, its export, and the export's weights as open_clip keeps them."""
    shutil.copy(run / "checkpoints" / "step_00000001.pt", root / "resume.pt")
    shutil.copytree(run / "model", root / "export")
    shutil.copy(root / "export" / "open_clip_model.safetensors", root / "weights.safetensors")
    state = {f"module.{name}": tensor for name, tensor in load_file(root / "weights.safetensors").items()}
    torch.save({"epoch": 1, "name": "run", "state_dict": state}, root / "weights.pt")


def _names(n: int) -> list[tuple[int, str]]:
    return [(i, ("png", "jpg", "webp")[i % 3]) for i in range(n)]


def _picture(number: int, suffix: str) -> bytes:
    pixels = random.Random(number).randbytes(40 * 36 * 3)
    out = io.BytesIO()
    Image.frombytes("RGB", (40, 36), pixels).save(out, {"png": "PNG", "jpg": "JPEG", "webp": "WEBP"}[suffix])
    return out.getvalue()


def _write_tar(path: Path, samples: list[tuple[str, str, bytes, str]]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, suffix, picture, captions in samples:
            for name, content in ((f"{key}.{suffix}", picture), (f"{key}.txt", captions.encode())):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
