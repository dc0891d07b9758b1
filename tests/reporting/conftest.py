"""Three finished runs over the same pictures, made once and never changed."""

from __future__ import annotations

import pytest

from tests.helpers.reporting import COSINE, make_pictures, make_run


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def folders(pictures, tmp_path_factory):
    """Name -> folder: sym/cosine, a run whose captions' norms were trained (with a query bank), and its control."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "baseline", pictures, COSINE, "sym", "cosine", 1.4)
    make_run(folder / "qnorm", pictures, bank=True)
    make_run(folder / "control", pictures, COSINE, norm="cosine")
    return {name: folder / name for name in ("baseline", "qnorm", "control")}
