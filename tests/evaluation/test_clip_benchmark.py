"""clip-benchmark's own command line with mmclip's models: cosine is stock's, magnitude is mmclip's own evaluation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize as unit

from mmclip import load_model
from mmclip.errors import UserError
from mmclip.evaluation.clip_benchmark import accuracy, main
from mmclip.models.export import export_clip
from mmclip.models.factory import build_model
from tests.helpers.benchmarking import (
    COLOURS,
    OURS,
    STOCK,
    assert_equal_within_ties,
    first_samples,
    flags,
    metrics_of,
    ours,
    stock,
)
from tests.helpers.tiny import ROOT, run_script

classification = pytest.importorskip("clip_benchmark.metrics.zeroshot_classification")
pytestmark = pytest.mark.filterwarnings("default")  # other people's code runs here, in this process


def test_cosine_is_stock_clip_benchmark_and_all_else_is_mmclips_own(
    plain: Path, learned_run: Path, tmp_path: Path
) -> None:
    """The two command lines as a user starts them; then every scoring in this process."""
    mine, stocks = tmp_path / "mine.json", tmp_path / "stock.json"
    done = run_script("clip_benchmark.py", *flags(plain, learned_run, mine, *OURS, "--scoring", "cosine"))
    assert done.returncode == 0, done.stderr[-2000:]
    argv = flags(plain, f"local-dir:{learned_run / 'model'}", stocks, *STOCK)
    done = subprocess.run([sys.executable, "-m", "clip_benchmark.cli", *argv], cwd=tmp_path, capture_output=True,
                          text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert metrics_of(mine) == metrics_of(stocks), "not a single query apart"
    found = {s: ours(plain, learned_run, s, tmp_path) for s in ("cosine", "dnorm", "dot", "qnorm", "native")}
    assert found["cosine"] == metrics_of(stocks)
    assert len({json.dumps(f) for f in found.values()}) == 3, "dot is qnorm and cosine is dnorm; no others are alike"
    for scoring, numbers in found.items():
        tied = assert_equal_within_ties(numbers, learned_run, plain, scoring)
        assert tied["t2i"] == 0 and tied["i2t"] <= 12, (
            "equal captions of other images tie for at most half of 24 images"
        )


@pytest.mark.parametrize("scoring", ["cosine", "dot", "qnorm", "native"])
def test_classification_with_several_templates_equals_a_naive_float64_computation(
    classes: Path, learned_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scoring: str
) -> None:
    found = ours(classes, learned_run, scoring, tmp_path)
    model = load_model(str(learned_run))
    names = COLOURS
    templates = (classes / "zeroshot_classification_templates.txt").read_text().splitlines()
    with torch.no_grad():
        pictures = torch.stack([model.transform()(Image.new("RGB", (32, 32), names[i % 6])) for i in range(40)])
        image = model.towers(image=pictures)[0].double()
        text = torch.stack([model.towers(text=model.tokenize([t.format(c=c) for t in templates]))[1] for c in names])
    gamma_d = {"cosine": 1.0, "native": model.metadata["gamma_d"]}.get(scoring, 0.0)
    vectors = (text.double() / text.double().norm(dim=-1, keepdim=True) ** gamma_d).mean(1)
    if scoring == "cosine":
        vectors = unit(vectors, dim=-1)
    order = (image @ vectors.T).argsort(1, descending=True)
    target = torch.arange(40) % 6
    assert found["acc1"] == float((order[:, 0] == target).double().mean())
    assert found["acc5"] == float((order[:, :5] == target[:, None]).any(1).double().mean())
    recalls = [float((order[target == c, 0] == c).double().mean()) for c in range(6)]
    assert found["mean_per_class_recall"] == pytest.approx(float(np.mean(recalls)))
    if scoring == "cosine":
        monkeypatch.setattr(classification, "accuracy", accuracy)  # or stock stops, with this numpy
        stock(monkeypatch, *flags(classes, f"local-dir:{learned_run / 'model'}", tmp_path / "stock.json", "--no_amp"))
        assert found == metrics_of(tmp_path / "stock.json")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["--scoring", "cosin"], "--scoring: invalid choice: 'cosin' .*native.*dnorm"),
        (["--scoring"], "--scoring: expected one argument"),
        (["--scoring", "dot", "--model_type", "open_clip"], "--scoring dot needs --model_type mmclip"),
        (["--model", "logs/none"], "--model logs/none: unknown to open_clip.*local-dir:FOLDER"),
        (["--model", "."], "a folder without open_clip_config.json"),
        (["--pretrained", "no/such.pt"], "--pretrained no/such.pt: no such file"),
        (["--model_cache_dir", "x"], "--model_cache_dir.*HF_HOME"),
        (["--dataset_root", "none"], "none: no test/nshards.txt.*splits there: none"),
        (["--split", "val"], "no val/nshards.txt.*splits there: test, train"),
        (["--dataset", "flikr"], "Unsupported dataset: flikr"),
        (["--task", "zeroshot_classification"], "dataset_type.txt says retrieval"),
        (["--task", "linear_probe"], "--task linear_probe"),
        (["--output", "{run}.json"], r"--output \{run\}.json: the names to fill in are model"),
    ],
)
def test_bad_input_is_one_line(
    plain: Path, learned_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=told) as error:
        main([*flags(plain, learned_run, tmp_path / "x.json", *OURS), *change])
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir()), "it was found before the work"


def test_a_data_set_without_its_shards_or_names_is_one_line(classes: Path, learned_run: Path, tmp_path: Path) -> None:
    root = tmp_path / "colours"
    shutil.copytree(classes, root)
    (root / "classnames.txt").unlink()
    with pytest.raises(UserError, match=r"needs classnames\.txt"):
        main(flags(root, learned_run, tmp_path / "x.json", *OURS))
    (root / "test" / "0.tar").unlink()
    with pytest.raises(UserError, match=r"says 1 shards.*missing: 0\.tar"):
        main(flags(root, learned_run, tmp_path / "x.json", *OURS))


@pytest.mark.parametrize("package", ["clip_benchmark", "requests"])
def test_a_missing_package_is_one_line_and_exit_code_2(package: str) -> None:
    code = f"import runpy, sys\nsys.modules[{package!r}] = None\nsys.argv = ['x', 'eval']\n"
    code += f"runpy.run_path({str(ROOT / 'scripts' / 'clip_benchmark.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: {package} is not installed: pip install -e '.[clip-benchmark]'\n"


@pytest.mark.real
@pytest.mark.parametrize(("name", "split", "samples"), [("flickr8k", "val", 40), ("cifar10_small", "test", 60)])
def test_photos_through_real_trunks_equal_stock_by_cosine_and_mmclip_natively(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, split: str, samples: int
) -> None:
    """Heads with random weights: they tell equal from unequal as well as trained ones."""
    torch.manual_seed(0)
    trunks = {"image_trunk": str(shared / "models" / "tf_efficientnet_lite0.safetensors"),
              "text_trunk": str(shared / "models" / "all-MiniLM-L6-v2")}  # fmt: skip
    model = tmp_path / "model"
    export_clip(model, build_model("effnet_lite0-minilm.json", **trunks), 2.0, {"gamma_q": 1.0, "gamma_d": 0.0})
    root = first_samples(shared / "data" / name, split, tmp_path / name, samples)
    found = {scoring: ours(root, model, scoring, tmp_path, "--split", split) for scoring in ("cosine", "native")}
    monkeypatch.setattr(classification, "accuracy", accuracy)  # or stock stops, with this numpy
    monkeypatch.chdir(model)  # where stock finds the text tower's config
    task = STOCK if name == "flickr8k" else ("--no_amp",)
    stock(monkeypatch, *flags(root, f"local-dir:{model}", tmp_path / "stock.json", *task, "--split", split))
    assert found["cosine"] == metrics_of(tmp_path / "stock.json")
    if name == "flickr8k":
        assert assert_equal_within_ties(found["native"], model, root, "native") == {"i2t": 0, "t2i": 0}
