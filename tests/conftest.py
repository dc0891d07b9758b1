"""Session fixtures, and one thread per test process: two cores are shared with the scripts under test."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import tests.helpers.warm  # noqa: F401 - before anything starts the server

settings.register_profile(
    "mmclip", deadline=None, max_examples=50, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("mmclip")
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent
SLOW = ("integration", "benchmarks", "distributed", "training")  # folders whose files take longest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slow files first, so that both workers are busy to the end."""
    items.sort(key=lambda item: item.path.parent.name not in SLOW)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and models: MMCLIP_SHARED, else ../shared beside the checkout."""
    folder = Path(os.environ.get("MMCLIP_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"no real data at {folder} (set MMCLIP_SHARED to run this test)")
    return folder


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.helpers.tiny import make_data

    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.helpers.tiny import make_model

    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def plain(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scenes without truth.jsonl: clip-benchmark knows a caption's own image only."""
    folder = tmp_path_factory.mktemp("plain") / "plain"
    return shutil.copytree(tiny_data, folder, ignore=shutil.ignore_patterns("truth.jsonl", "distractors"))


@pytest.fixture(scope="session")
def learned_run(plain: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose learned exponents are neither 0 nor 1."""
    from tests.helpers.tiny import run_script

    logs = tmp_path_factory.mktemp("logs")
    how = "--val-data none --epochs 12 --batch-size 32 --lr 1e-3 --gamma-lr 0.05 --workers 0 --device cpu --name run"
    done = run_script("train_clip.py", "--train-data", plain, "--model", tiny_model, "--logs", logs, *how.split(),
                      "--loss", "asym-i2t", "--norm", "learned")  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return logs / "run"


@pytest.fixture(scope="session")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.helpers.benchmarking import make_classes

    return make_classes(tmp_path_factory.mktemp("classes") / "colours")
