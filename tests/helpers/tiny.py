"""A tiny data set, a tiny model, and scripts run on them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

from mmclip.data.loading import Batch
from mmclip.data.scenes.build import SceneSizes, build_scenes
from tests.helpers.warm import run_warm

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


def make_data(folder: Path) -> Path:
    """96 training images, 24 test images with five captions each, 20 distractors: the built-in layout."""
    return build_scenes(folder, "scenes", sizes=SceneSizes(train=96, test=24, distractors=20))


def make_model(folder: Path) -> Path:
    path = folder / "tiny.json"
    path.write_text(json.dumps(MODEL), encoding="utf-8")
    return path


def jpeg() -> bytes:
    file = io.BytesIO()
    Image.radial_gradient("L").convert("RGB").resize((40, 32)).save(file, "JPEG")
    return file.getvalue()


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


class LiveSource:
    """A FeatureSource that passes on a batch's own tensors, of a data set with ``steps`` steps an epoch."""

    def __init__(self, steps: int) -> None:
        self.steps, self.skipped = steps, dict[str, str]()
        self.data = SimpleNamespace(fingerprint=lambda: "none")

    def batches(self, config: Any, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(steps_per_epoch=self.steps, joint=config.joint_batch(1))

    def inputs(self, side: str, batch: Batch, device: torch.device) -> tuple[torch.Tensor | None, bool]:
        return (batch.images if side == "image" else batch.tokens), False


def run_script(
    name: str, *arguments: object, timeout: float = 300, ranks: int = 1, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script on one thread a rank; without its page, which takes seconds, unless --report is given."""
    command = [str(ROOT / "scripts" / name), *map(str, arguments)]
    if name in ("train_clip.py", "evaluate.py", "diagnose.py") and "--report" not in command:
        command.append("--no-report")
    return run_warm(command, ROOT, {**os.environ, "OMP_NUM_THREADS": "1", **environment}, timeout, ranks)


def logged(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
