"""evaluate.py's compared runs: damaged results are one line that names the run, and nothing is printed of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmclip.commands.evaluate import run as run_evaluate
from mmclip.config import EvaluateConfig
from mmclip.errors import UserError
from mmclip.evaluation.results import load_results, save_results
from mmclip.roles import Exponents
from tests.helpers.reporting import clip_run as run_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    results = run_of(Exponents(1.0, 0.0), "asym-i2t", "run")
    results.json["trained_with"] |= {"gamma_d": 0.0}
    save_results(results, tmp_path / "run")
    return tmp_path / "run"


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    "edit",
    [
        lambda r: r["retrieval"].pop("i2t"),
        lambda r: r["retrieval"]["i2t"]["native"].update({"success@1": "many"}),
        lambda r: r["magnitude"]["text"].pop("cohens_d"),
        lambda r: r["magnitude"].update({"text": []}),
        lambda r: r["data"].update({"n_queries": 3}),
        lambda r: r.update({"pools": [1]}),
        lambda r: r["pools"].update({"full": {}}),
        lambda r: r["evaluation"]["native"].pop("gamma_d"),
        lambda r: r["magnitude"]["text"]["by_document"].update({"n_words": [3]}),
    ],
)
def test_damaged_results_are_one_line_that_names_the_run(
    run: Path, capsys: pytest.CaptureFixture[str], edit: Callable[[dict[str, Any]], object]
) -> None:
    change(run / "results.json", edit)
    with pytest.raises(UserError, match=r"run: not the whole results of an evaluated run|results\.json") as error:
        run_evaluate(EvaluateConfig(compare=[str(run)]))
    assert "\n" not in str(error.value) and capsys.readouterr().out == ""


def test_damaged_arrays_and_deep_json_are_one_line(run: Path) -> None:
    arrays = bytearray((run / "per_query.npz").read_bytes())
    arrays[200:-200:97] = bytes(x ^ 255 for x in arrays[200:-200:97])
    (run / "per_query.npz").write_bytes(arrays)
    with pytest.raises(UserError, match=r"per_query\.npz is not an array file"):
        load_results(run)
    (run / "results.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(UserError, match=r"results\.json is not a results\.json"):
        load_results(run)


def test_results_of_files_whose_names_are_not_utf8_are_kept(tmp_path: Path) -> None:
    results = run_of(Exponents(1.0, 0.0), "asym-i2t", "run")
    results.json["skipped"] = {"caf\udce9": "no caption", "caf\u00e9": "\u202e"}
    save_results(results, tmp_path)
    assert load_results(tmp_path).json["skipped"] == results.json["skipped"]


def test_a_picture_without_a_name_is_refused_before_anything_is_read() -> None:
    with pytest.raises(UserError, match="--plot ''"):
        run_evaluate(EvaluateConfig(compare=["nowhere"], plot=""))
