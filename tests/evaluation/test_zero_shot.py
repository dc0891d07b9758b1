"""Zero-shot accuracy against a naive computation, clip-benchmark, and data with faults; from the scripts' flags."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip import load_model
from mmclip.embeddings.encode import EncodeOptions
from mmclip.errors import UserError
from mmclip.evaluation.zero_shot import ZeroShot, class_documents, classify, open_classes
from mmclip.models.export import export_clip
from mmclip.models.factory import build_model
from mmclip.roles import Exponents, Normalization
from tests.helpers.benchmarking import COLOURS, first_samples, ours
from tests.helpers.shards import write_tar
from tests.helpers.tiny import run_script

OPTIONS = EncodeOptions(torch.device("cpu"), progress=False)


@given(st.integers(0, 100), st.sampled_from([Exponents(1.0, 0.0), Exponents(0.3, 0.6), Exponents(0.0, 1.0)]))
def test_accuracy_is_a_loop_over_pictures_classes_and_templates(seed: int, native: Exponents) -> None:
    g = torch.Generator().manual_seed(seed)
    image = torch.randn(9, 5, generator=g)
    prompts = torch.randn(4, 3, 5, generator=g) * torch.rand(4, 1, 1, generator=g) * 5
    labels = torch.randint(0, 4, (9,), generator=g).tolist()
    found = classify(image, prompts, labels, native, resamples=20)
    scorings = {"native": native, "cosine": Normalization.COSINE.exponents, "dot": Normalization.DOT.exponents}
    for name, (gamma_q, gamma_d) in scorings.items():
        right = 0
        for x, label in zip(image.double(), labels, strict=True):
            scores = []
            for texts in prompts.double():
                document = sum(t / t.norm() ** gamma_d for t in texts) / len(texts)
                if gamma_d == 1:
                    document = document / document.norm()
                scores.append(float(x @ document / x.norm() ** gamma_q))
            right += int(np.argmax(scores)) == label
        assert found["acc1"][name] == pytest.approx(right / 9)
        lo, hi = found["ci"][name]
        assert 0 <= lo <= found["acc1"][name] <= hi <= 1


def test_with_one_template_and_every_length_divided_out_a_class_is_its_text() -> None:
    texts = torch.randn(4, 1, 6)
    documents, gamma_d = class_documents(texts, 1.0)
    assert gamma_d == 1.0
    torch.testing.assert_close(documents, torch.nn.functional.normalize(texts[:, 0], dim=1))


def test_equal_classes_tie_against_the_model_and_one_picture_has_no_interval() -> None:
    prompts = torch.ones(3, 1, 4)
    found = classify(torch.ones(1, 4), prompts, [0], Normalization.COSINE.exponents)
    assert found["acc1"] == {"native": 0.0, "cosine": 0.0, "dot": 0.0}
    assert found["ci"] == {"native": None, "cosine": None, "dot": None}


@pytest.mark.filterwarnings("default")  # other people's code runs here, in this process
def test_accuracy_is_that_of_clip_benchmark_whatever_the_templates(
    classes: Path, learned_run: Path, tmp_path: Path
) -> None:
    """What clip-benchmark writes for mmclip by cosine is compared with stock, on photos too, in test_clip_benchmark."""
    pytest.importorskip("clip_benchmark")
    model = load_model(str(learned_run))
    native = Exponents(model.metadata["gamma_q"], model.metadata["gamma_d"])
    found = ZeroShot.open(open_classes(str(classes)), model, OPTIONS).measure(model, OPTIONS, native)
    assert (found["n_classes"], found["n_templates"], found["n_images"], found["skipped"]) == (6, 3, 40, {})
    assert found["acc1"] == {s: ours(classes, learned_run, s, tmp_path)["acc1"] for s in ("native", "cosine", "dot")}


@pytest.mark.filterwarnings("default")  # other people's code runs here, in this process
@pytest.mark.real
def test_cosine_is_clip_benchmarks_accuracy_on_real_photos(shared: Path, tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("clip_benchmark")
    torch.manual_seed(0)
    export_clip(tmp_path / "model", build_model(str(tiny_model)), 2.0, {"gamma_q": 1.0, "gamma_d": 0.0})
    data = first_samples(shared / "data" / "cifar10_small", "test", tmp_path / "cifar", 200)
    model = load_model(str(tmp_path / "model"))
    found = ZeroShot.open(open_classes(str(data)), model, OPTIONS).measure(model, OPTIONS, Exponents(1.0, 0.0))
    assert (found["n_classes"], found["n_images"], found["skipped"]) == (10, 200, {})
    theirs = {s: ours(data, tmp_path / "model", s, tmp_path, "--split=test")["acc1"] for s in ("native", "cosine")}
    assert found["acc1"] == theirs | {"dot": theirs["native"]}, "qnorm keeps the documents' norms, as dot does"


def test_a_cached_trunk_gives_the_same_accuracy(classes: Path, tiny_model: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_model(str(tiny_model))
    for side in ("image", "text"):
        model.towers.lock(side)
    opened, native = open_classes(str(classes)), Exponents(1.0, 0.0)
    live = ZeroShot.open(opened, model, OPTIONS).measure(model, OPTIONS, native)
    cached = ZeroShot.open(opened, model, OPTIONS, tmp_path)
    assert list(cached.source.cached) == ["image"] and cached.measure(model, OPTIONS, native) == live


def test_samples_that_cannot_be_used_are_left_out_and_named(classes: Path, tiny_model: Path, tmp_path: Path) -> None:
    root = tmp_path / "colours"
    shutil.copytree(classes, root)
    good = open_classes(str(classes)).data
    place, offset, size = good.places[0]
    picture = Path(place).read_bytes()[offset : offset + size]
    members = [
        ("outside.png", picture), ("outside.cls", b"6"), ("word.png", picture), ("word.cls", b"red"),
        ("bare.png", picture), ("lone.cls", b"1"), ("torn.png", picture[:60]), ("torn.cls", b"2"),
        ("fine.png", picture), ("fine.cls", b" 0\n"), (f"{good.keys[0]}.png", picture), (f"{good.keys[0]}.cls", b"1"),
    ]  # fmt: skip
    write_tar(root / "test" / "1.tar", members)
    (root / "test" / "nshards.txt").write_text("2\n")
    torch.manual_seed(0)
    model = build_model(str(tiny_model))
    native = Normalization.COSINE.exponents
    found = ZeroShot.open(open_classes(str(root)), model, OPTIONS).measure(model, OPTIONS, native)
    assert found["n_images"] == 41
    reasons = {
        "outside": "label 6 of 6 classes", "word": "a whole number, got", "bare": "KEY.cls is missing",
        "lone": "no image beside its label", "torn": "", good.keys[0]: "a duplicate key",
    }  # fmt: skip
    assert set(found["skipped"]) == set(reasons)
    assert all(reason in found["skipped"][key] for key, reason in reasons.items())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda r: (r / "classnames.txt").unlink(), r"classnames\.txt: No such file.*classification needs classnames"),
        (lambda r: (r / "classnames.txt").write_text("a\n\nb\n"), r"classnames\.txt, line 2: empty"),
        (lambda r: (r / "classnames.txt").write_bytes(b"\xff\xfe\xff"), r"classnames\.txt: .*decode"),
        (lambda r: (r / "classnames.txt").write_text(""), r"classnames\.txt, line 1: empty"),
        (lambda r: (r / "zeroshot_classification_templates.txt").unlink(), "templates.txt: No such file"),
        (
            lambda r: (r / "zeroshot_classification_templates.txt").write_text("a photo\n"),
            r"'a photo' has no \{c\}, the place of the name",
        ),
        (lambda r: (r / "test" / "0.tar").unlink(), r"says 1 shards.*missing: 0\.tar"),
        (lambda r: shutil.rmtree(r / "test"), "no split test or val with shards in it; it has: no folders"),
        (lambda r: write_tar(r / "test" / "0.tar", [("a.png", b"")]), r"empty: no image with a label.*1 skipped: a"),
    ],
)
def test_faults_of_the_whole_are_one_line(
    classes: Path, tmp_path: Path, change: Callable[[Path], object], told: str
) -> None:
    root = tmp_path / "colours"
    shutil.copytree(classes, root)
    change(root)
    with pytest.raises(UserError, match=told) as error:
        open_classes(str(root))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", ["builtin:scenes", "builtin:x", "", "nowhere"])
def test_what_is_no_folder_of_classes_is_refused(source: str) -> None:
    with pytest.raises(UserError, match=r"--zeroshot-data .*valid: .*builtin:scenes-classes"):
        open_classes(source)


def test_a_run_and_its_later_evaluation_tell_the_same_accuracy(
    tiny_data: Path, tiny_model: Path, classes: Path, tmp_path: Path
) -> None:
    done = run_script("train_clip.py", "--train-data", tiny_data, "--model", tiny_model, "--batch-size", 32,
                      "--workers", 0, "--epochs", 1, "--device", "cpu", "--logs", tmp_path, "--name", "x",
                      "--zeroshot-data", classes, "--norm", "dot", "--val-holdout", 24)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "x" / "results.json").read_text())["zero_shot"]
    assert (found["n_classes"], found["n_images"]) == (len(COLOURS), 40)
    assert found["data"] == {"path": str(classes), "split": "test"}
    line = next(x for x in done.stdout.splitlines() if x.startswith("zero-shot, "))
    assert line.startswith(f"zero-shot, {classes.name} [test], 6 classes, 40 images, acc@1: native ")
    again = run_script("evaluate.py", "--model", tmp_path / "x", "--data", tiny_data, "--split", "train[holdout 24]",
                       "--workers", 0, "--device", "cpu", "--zeroshot-data", classes,
                       "--output", tmp_path / "y")  # fmt: skip
    assert again.returncode == 0, again.stderr[-2000:]
    later = json.loads((tmp_path / "y" / "results.json").read_text())
    assert later["zero_shot"] == found and line in again.stdout
    mine = json.loads((tmp_path / "x" / "results.json").read_text())
    assert later["retrieval"]["i2t"]["native"] == mine["retrieval"]["i2t"]["native"], "the same held-out images"
    assert mine["trained_with"]["data"]["n_images"] == 72 and not mine["trained_with"]["data"]["permuted_pairs"]
