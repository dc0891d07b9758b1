"""Between the steps: what the alarms remember is read back, a look that was due is made up for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmclip.commands.train_text import run as train_text
from mmclip.config import TextTrainConfig
from mmclip.errors import UserError
from mmclip.training import text_training
from mmclip.training.text_training import Run
from tests.helpers.texts import make_beir, make_bert

COLLAPSED = {"val_q2d_ndcg@10_native": 0.94, "val_q2d_ndcg@10_cosine": 0.0}
HEALTHY = {"val_q2d_ndcg@10_native": 0.94, "val_q2d_ndcg@10_cosine": 0.93}
Make = Callable[..., TextTrainConfig]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("all")
    beir, bert = make_beir(folder / "beir", queries=40, documents=40), make_bert(folder / "bert")

    def settings(logs: Path, **changed: Any) -> TextTrainConfig:
        known: dict[str, Any] = {
            "model": str(bert), "train_data": str(beir), "logs": str(logs), "name": "x", "batch_size": 4, "lr": 1e-4,
            "watch_queries": 8, "watch_steps": 2, "save_steps": 2, "max_steps": 6, "device": "cpu",
            "measure_start": False,
        }  # fmt: skip
        return TextTrainConfig(**known | changed)

    return settings


def watched(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    return [x for x in found if "loss" not in x]


def test_an_alarm_ends_a_strict_run_again_and_is_not_told_again_without(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []

    def numbers(*_: Any) -> dict[str, float]:
        seen.append(1)
        return HEALTHY if len(seen) == 1 else COLLAPSED

    monkeypatch.setattr(text_training, "quick_numbers", numbers)
    for resume in (None, "latest"):
        with pytest.raises(UserError, match=r"step 4: alarm \(--strict\): q2d finds 94\.0% natively and 0\.0% by"):
            train_text(make(tmp_path, strict=True, resume=resume))
    assert len(seen) == 2, "the continuation knows it from the lines"
    assert capsys.readouterr().err.count("alarm, step 4") == 1
    folder = train_text(make(tmp_path, resume="latest"))
    assert "alarm, step" not in capsys.readouterr().err
    assert [len(x.get("alarms", {})) for x in watched(folder)] == [0, 1, 0]


def test_a_look_that_was_cut_off_is_made_up_for_before_the_next_step(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_text(make(tmp_path, name="whole"))
    real, calls = Run._watch, []

    def dies_at_the_second(run: Run) -> None:
        calls.append(run.step)
        if len(calls) == 2:
            raise MemoryError
        real(run)

    monkeypatch.setattr(Run, "_watch", dies_at_the_second)
    with pytest.raises(MemoryError):
        train_text(make(tmp_path, name="cut"))
    assert [x["step"] for x in watched(tmp_path / "cut")] == [2]
    cut = train_text(make(tmp_path, name="cut", resume="latest"))
    assert calls == [2, 4, 4, 6]
    assert watched(cut) == watched(whole)


def test_a_run_whose_last_checkpoint_is_its_end_takes_no_further_step(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """max_steps in the middle of an epoch, and the end of the run cut off behind it."""
    monkeypatch.setattr("mmclip.commands.train_text.finish", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        train_text(make(tmp_path, max_steps=2))
    before = (tmp_path / "x" / "metrics.jsonl").read_text()
    weights = (tmp_path / "x" / "checkpoints" / "checkpoint-2" / "model.safetensors").read_bytes()
    monkeypatch.undo()
    folder = train_text(make(tmp_path, max_steps=2, resume="latest"))
    assert (folder / "metrics.jsonl").read_text() == before
    assert (folder / "model" / "model.safetensors").read_bytes() == weights
