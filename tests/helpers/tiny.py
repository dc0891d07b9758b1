"""A tiny data set, a tiny model, and scripts run on them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
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


def untimed(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl without how fast it went."""
    timing = ("samples_per_second", "pairs_per_second", "data_wait")
    return [{k: v for k, v in line.items() if k not in timing} for line in logged(run)]


def disturbed(command: list[object], run: Path, lines: int, disturb: Callable[[int], object]) -> tuple[int, str]:
    """Start a script in a session of its own, call ``disturb(pid)`` once its run has logged ``lines`` lines.

    Returns:
        Exit code and stderr.
    """
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / str(command[0])), *map(str, command[1:])], cwd=ROOT, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.is_file() and metrics.read_text().count("\n") >= lines):
        assert process.poll() is None and time.monotonic() < deadline, "the run never got going"
        time.sleep(0.003)
    disturb(process.pid)
    said = process.communicate(timeout=200)[1]
    return process.returncode, said
