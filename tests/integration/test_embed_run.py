"""embed.py: a model and data become a file that is evaluated as the model is, and can be served."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from mmclip import load_model
from mmclip.commands.embed import run as embed
from mmclip.commands.evaluate import run as evaluate
from mmclip.config import EmbedConfig, EvaluateConfig
from mmclip.data.shards import open_data
from mmclip.embeddings.encode import EncodeOptions
from mmclip.embeddings.features import FeatureSource
from mmclip.embeddings.files import Embeddings, load_embeddings
from mmclip.errors import UserError
from mmclip.evaluation.eval_set import EvalSource, draw_bank
from mmclip.evaluation.results import load_results
from mmclip.models.factory import ClipModel
from mmclip.models.metadata import native_exponents
from mmclip.retrieval.hubness import document_offsets
from tests.helpers.evaluating import evaluate_clip
from tests.helpers.tiny import run_script
from tests.helpers.warm import run_warm

OPTIONS = EncodeOptions(torch.device("cpu"), progress=False)
BANK_SIZE = 40


def bank_of(data: Path, side: str, model: ClipModel, size: int) -> torch.Tensor:
    source = FeatureSource.open(open_data(str(data), "train"), model, OPTIONS, None, "bank")
    return draw_bank(source, [side], size, model, OPTIONS).vectors[side]


@pytest.fixture(scope="module")
def written(learned_run, tiny_data, tmp_path_factory) -> Path:
    """x.safetensors of a run that trained i2t, with log-normalizers."""
    path = tmp_path_factory.mktemp("embed") / "made" / "x.safetensors"
    done = run_script("embed.py", "--model", learned_run, "--data", tiny_data, "--bank", tiny_data, "--bank-size",
                      BANK_SIZE, "--workers", 0, "--device", "cpu", "--output", path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"embeddings: {path}: 24 images, 120 texts, D = 16, evidence of t2i\n"
    return path


@pytest.fixture(scope="module")
def saved(written: Path) -> Embeddings:
    return load_embeddings(written)


@pytest.fixture(scope="module")
def model(learned_run: Path) -> ClipModel:
    return load_model(str(learned_run))


def test_the_file_is_evaluated_as_the_model_is(saved: Embeddings, model: ClipModel, tiny_data: Path) -> None:
    main, extra = (open_data(str(tiny_data), split, "eval") for split in ("test", "distractors"))
    live = EvalSource.open(main, {"distractors": extra}, model, OPTIONS).embed(model, OPTIONS)
    assert saved.fingerprint() == live.fingerprint()
    native = native_exponents(saved.metadata)
    assert native == native_exponents(model.metadata)
    found, wanted = (evaluate_clip(d, native, {}, resamples=20).json for d in (saved, live))
    assert found == wanted and set(found["pools"]) == {"full", "distractors"}
    # a caption's id is its image's and a number
    assert len(set(saved.image_ids)) == 24 and saved.owner == [row for row in range(24) for _ in range(5)]
    assert saved.text_ids[:6] == [f"{saved.image_ids[0]}#{n}" for n in range(5)] + [f"{saved.image_ids[1]}#0"]


@pytest.mark.parametrize("bank", ["data", "transductive"])
def test_log_normalizers_in_a_file_correct_as_the_bank_does(learned_run, tiny_data, tmp_path, bank: str) -> None:
    bank = str(tiny_data) if bank == "data" else bank
    model = {"model": str(learned_run), "data": str(tiny_data), "bank": bank, "workers": 0, "device": "cpu"}
    embed(EmbedConfig(**model, output=str(tmp_path / "x.npz")))
    found = []
    for name, source in (("file", {"embeddings": str(tmp_path / "x.npz")}), ("live", model)):
        evaluate(EvaluateConfig(**source, output=str(tmp_path / name), report=False))
        found.append(load_results(tmp_path / name).json["retrieval"]["t2i"]["corrected"])
    assert found[0] == found[1] and found[0]["transductive"] == (bank == "transductive")


def test_the_log_normalizers_are_those_of_drawn_training_captions(saved, model, tiny_data, learned_run) -> None:
    assert saved.metadata == model.metadata and saved.model == str(learned_run)
    alpha = model.metadata["logit_scale_i2t"]
    assert saved.alpha == {"i2t": alpha, "t2i": None}
    bank = bank_of(tiny_data, "text", model, BANK_SIZE)
    wanted = document_offsets(saved.image, bank, native_exponents(model.metadata), alpha)
    assert torch.allclose(saved.evidence["t2i"], wanted, atol=1e-4)
    assert saved.bank["size"] == {"text": BANK_SIZE} and saved.bank["name"].endswith("[train]")


def changed(run: Path, folder: Path, **facts: object) -> Path:
    """A run's model with other metadata."""
    shutil.copytree(run / "model", folder)
    metadata = json.loads((folder / "mmclip.json").read_text(encoding="utf-8"))
    (folder / "mmclip.json").write_text(json.dumps(metadata | facts), encoding="utf-8")
    return folder


def test_a_model_of_both_directions_has_log_normalizers_of_both(learned_run, tiny_data, tmp_path) -> None:
    folder = changed(learned_run, tmp_path / "model", loss="sym", i2t_weight=0.5, logit_scale_t2i=2.0)
    how = {"bank": str(tiny_data), "bank_size": 9, "workers": 0, "device": "cpu", "output": str(tmp_path / "x.npz")}
    embed(EmbedConfig(model=str(folder), data=str(tiny_data), **how))
    found, other = load_embeddings(tmp_path / "x.npz"), load_model(str(folder))
    assert {d: len(e) for d, e in found.evidence.items()} == {"i2t": 120, "t2i": 24}
    images = bank_of(tiny_data, "image", other, 9)
    wanted = document_offsets(found.text, images, native_exponents(other.metadata), 2.0)  # text queries: trained t2i
    assert torch.allclose(found.evidence["i2t"], wanted, atol=1e-4)
    assert found.bank["size"] == {"image": 9, "text": 9} and found.bank["overlap"] == {"image": 0, "text": 0}


def test_random_weights_are_written_without_log_normalizers(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    flags = ["--model", tiny_model, "--data", tiny_data, "--workers", 0, "--output", tmp_path / "x.npz"]
    done = run_script("embed.py", *flags)
    assert done.returncode == 0, done.stderr
    found = load_embeddings(tmp_path / "x.npz")
    assert (found.metadata, found.alpha, found.evidence) == ({}, {"i2t": None, "t2i": None}, {})
    done = run_script("embed.py", *flags, "--bank", tiny_data)
    assert done.returncode == 2 and "has no scale of" in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.splitlines()[-1].startswith("error: --bank: ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output": "x.npz"}, "--model is missing"),
        ({"model": "m"}, r"--output is missing: a file ending in \.safetensors or \.npz"),
        ({"model": "m", "output": "x.pt"}, r"--output x\.pt"),
        ({"model": "m", "output": "x.npz", "bank_size": 0}, "--bank-size 0: expected a whole number of at least 1"),
        ({"model": "m", "output": "FOLDER.npz"}, "a folder of that name"),
        ({"model": "OTHER", "output": "x.npz"}, "names no known loss: nothing can be corrected"),
        ({"model": "no-such-model", "bank": "nowhere", "output": "x.npz"}, "nowhere"),
        ({"model": "RUN", "bank_split": "test", "output": "x.npz"}, "--bank .*the evaluation data themselves"),
    ],
)
def test_bad_settings_write_nothing(learned_run, tiny_data, tmp_path, monkeypatch, settings, message) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FOLDER.npz").mkdir()
    places = {"RUN": learned_run, "OTHER": changed(learned_run, tmp_path / "other", loss="other")}
    settings = {"bank": str(tiny_data), **settings, "data": str(tiny_data), "workers": 0, "device": "cpu"}
    settings |= {"model": str(places.get(settings["model"], settings["model"]))} if "model" in settings else {}
    with pytest.raises(UserError, match=message):
        embed(EmbedConfig(**settings))
    assert not (tmp_path / "x.npz").exists()


def test_the_examples_of_the_documentation_run(root: Path, written: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="faiss is not installed: pip install -e '.[serving]'")
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs" / "serving.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    script = tmp_path / "examples.py"
    script.write_text("\n".join(["import warnings", "warnings.simplefilter('error')", *blocks]), encoding="utf-8")
    done = run_warm([str(script)], written.parent, {"PYTHONPATH": str(root)}, 120)
    assert done.returncode == 0, done.stderr
    flat, hnsw, int8 = done.stdout.splitlines()[1:]
    assert flat.startswith("flat EngineCheck(recall=1.0, ") and hnsw.startswith("HNSW") and int8.startswith("int8")
