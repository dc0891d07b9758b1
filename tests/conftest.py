"""Where the real data lie, and one thread per test process: two cores are shared with the scripts under test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import tests.helpers.warm  # noqa: F401 - before anything starts the server

settings.register_profile(
    "mmclip", deadline=None, max_examples=50, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("mmclip")
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

ROOT = Path(__file__).resolve().parent.parent


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
    from tests.helpers.benchmarking import make_plain

    return make_plain(tiny_data, tmp_path_factory.mktemp("plain") / "plain")


@pytest.fixture(scope="session")
def learned_run(plain: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.helpers.benchmarking import make_run

    return make_run(plain, tiny_model, tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="session")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.helpers.benchmarking import make_classes

    return make_classes(tmp_path_factory.mktemp("classes") / "colours")
