"""A tiny data set and a tiny model for tests that run real scripts: seconds, not minutes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from pathlib import Path

from PIL import Image

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


def run_script(
    name: str, *arguments: object, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A script as a user starts it, on one thread; without its page, which takes seconds, unless --report is given."""
    command = [str(ROOT / "scripts" / name), *map(str, arguments)]
    if name in ("train_clip.py", "evaluate.py", "diagnose.py") and "--report" not in command:
        command.append("--no-report")
    return run_warm(command, ROOT, {**os.environ, "OMP_NUM_THREADS": "1", **environment}, timeout)
