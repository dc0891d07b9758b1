"""clip-benchmark's command line with mmclip's models: cosine is stock's, magnitude mmclip's own; and what it mends.

Tests named "stock ..." fail where clip-benchmark no longer needs the replacement.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize as unit

from mmclip import metrics
from mmclip.errors import UserError
from mmclip.evaluation import clip_benchmark as bridge
from mmclip.evaluation.clip_benchmark import STOCK_OUTPUT, M, ScoredModel, accuracy, main
from mmclip.models.export import export_clip
from mmclip.models.factory import build_model
from mmclip.retrieval import rank
from mmclip.roles import CLIP_DIRECTIONS, Exponents, Normalization
from tests.helpers.benchmarking import (
    KS,
    OURS,
    STOCK,
    assert_equal_within_ties,
    first_samples,
    flags,
    metrics_of,
    ours,
    stock,
)
from tests.helpers.tiny import run_script

cli = pytest.importorskip("clip_benchmark.cli")
classification = pytest.importorskip("clip_benchmark.metrics.zeroshot_classification")
retrieval = pytest.importorskip("clip_benchmark.metrics.zeroshot_retrieval")
selection = pytest.importorskip("clip_benchmark.metrics.image_caption_selection")
pytestmark = pytest.mark.filterwarnings("default")  # other people's code runs here, in this process

IMAGES, CAPTIONS, DIM = 60, 3, 16
GAMMAS = [0.0, 0.37, 1.0]


class Planted(nn.Module):
    """Towers that know their features: an input is the number of a row."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        image = torch.randn(IMAGES, DIM, generator=gen)
        text = image.repeat_interleave(CAPTIONS, 0) + 1.2 * torch.randn(IMAGES * CAPTIONS, DIM, generator=gen)
        # lengths over two orders of magnitude, so that every exponent ranks otherwise
        self.image, self.text = (x * torch.randn(len(x), 1, generator=gen).exp() for x in (image, text))

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        return (None if image is None else self.image[image.flatten()], None if text is None else self.text[text])


def tokenize(rows: list[str]) -> Tensor:
    return torch.tensor([int(r) for r in rows])


def success(data: dict[str, Tensor], pairs: Tensor, gamma_d: float) -> tuple[dict[str, float], dict[str, int]]:
    """(clip-benchmark's names for the numbers of mmclip's own evaluation, tied queries of each direction)."""
    numbers, tied = {}, {}
    for direction in CLIP_DIRECTIONS:
        query, document = direction.roles(data)
        own = pairs if direction.query_side == "image" else pairs.flip(1)
        found = rank(query, document, own, {"it": Exponents(1.0, gamma_d)})["it"]
        every = metrics.per_query(found.ranks, found.offsets)
        for k in KS:
            numbers[f"{direction.document_side}_retrieval_recall@{k}"] = float(every[f"success@{k}"].mean())
        tied[direction.document_side] = found.n_tied
    return numbers, tied


@pytest.mark.parametrize("gamma_d", GAMMAS)
def test_one_pair_of_embeddings_ranks_like_mmclip_in_both_directions(gamma_d: float) -> None:
    towers = Planted()
    batches = [
        (torch.arange(s, s + 20)[:, None], [[str(CAPTIONS * i + c) for c in range(CAPTIONS)] for i in range(s, s + 20)])
        for s in range(0, IMAGES, 20)
    ]
    model = ScoredModel(towers, Exponents(0.5, gamma_d))
    found = retrieval.evaluate(model, batches, tokenize, "cpu", amp=False, recall_k_list=list(KS))
    pairs = torch.tensor([[t // CAPTIONS, t] for t in range(IMAGES * CAPTIONS)])
    sides = {"image": towers.image, "text": towers.text}
    numbers, tied = success(sides, pairs, gamma_d)
    assert tied == {"text": 0, "image": 0}
    assert found == pytest.approx(numbers, abs=1e-6)
    others = [success(sides, pairs, g)[0] for g in GAMMAS if g != gamma_d]
    assert all(
        abs(found[k] - o[k]) > 0.01 for o in others for k in ("text_retrieval_recall@5", "image_retrieval_recall@5")
    )


@pytest.mark.parametrize("gamma_d", GAMMAS)
def test_class_vectors_of_several_templates_equal_a_naive_float64_computation(gamma_d: float) -> None:
    towers, classes, templates = Planted(), [str(i) for i in range(9)], ["{c}", "1{c}", "2{c}"]
    model = ScoredModel(towers, Exponents(1.0, gamma_d))
    vectors = classification.zero_shot_classifier(model, tokenize, classes, templates, "cpu", amp=False)
    rows = torch.tensor([[int(t.format(c=c)) for t in templates] for c in classes])
    batch = [(torch.arange(IMAGES)[:, None], torch.zeros(IMAGES, dtype=torch.long))]
    logits, _ = classification.run_classification(model, vectors, batch, "cpu", amp=False)
    image, text = towers.image.double(), towers.text.double()[rows]  # [9, 3, D]
    if gamma_d == 1.0:
        expected = 100 * unit(image, dim=-1) @ unit(unit(text, dim=-1).mean(1), dim=-1).T
    else:
        scored = text / text.norm(dim=-1, keepdim=True) ** gamma_d
        image = image / image.norm(dim=-1, keepdim=True) ** gamma_d  # the image's own factor: constant for a query
        expected = 100 * image @ scored.mean(1).T / M**2
        renormalized = image @ unit(scored.mean(1), dim=-1).T
        assert (renormalized.argmax(1) != expected.argmax(1)).any(), "this test would not see a length that is lost"
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    assert torch.equal(logits.argmax(1), expected.argmax(1))


def test_image_caption_pairs_are_scored_in_both_directions() -> None:
    towers = Planted()
    model = ScoredModel(towers, Normalization.DOT.exponents)
    batch = [(torch.arange(40).view(20, 2, 1, 1, 1), [[str(6 * i), str(6 * i + 3)] for i in range(20)])]
    found = selection.evaluate(model, batch, tokenize, "cpu", amp=False)
    dots = torch.stack([towers.image[2 * i : 2 * i + 2] @ towers.text[[6 * i, 6 * i + 3]].T for i in range(20)])
    own = torch.arange(2)
    assert found["text_acc"] == pytest.approx(float((dots.argmax(2) == own).all(1).float().mean()))
    assert found["image_acc"] == pytest.approx(float((dots.argmax(1) == own).all(1).float().mean()))


def test_lengths_pass_the_normalization_exactly_and_the_limit_is_told() -> None:
    towers = Planted()
    towers.image = unit(towers.image, dim=-1) * torch.logspace(-6, 17 - 1e-3, IMAGES, base=2)[:, None]
    model, every = ScoredModel(towers, Normalization.DOT.exponents), torch.arange(IMAGES)
    assert torch.equal(unit(model.encode_image(every), dim=-1)[:, :DIM] * M, towers.image)
    towers.image[-1] *= 1.1
    with pytest.raises(UserError, match=r"image embeddings: a norm of .*131,072"):
        model.encode_image(every)
    towers.text[5, 1] = torch.nan
    with pytest.raises(UserError, match="text embeddings hold NaN"):
        model.encode_text(every)


def test_autocast_does_not_reach_the_towers() -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> tuple[Any, Any]:
            return (self.layer(image) if image is not None else None, self.layer(text) if text is not None else None)

    towers, x = Linear(), torch.randn(3, 8)
    model, plain = ScoredModel(towers, Normalization.QNORM.exponents), towers.layer(x).detach()
    with torch.autocast("cpu"):
        assert towers.layer(x).dtype == torch.bfloat16
        assert torch.equal(model.encode_image(x)[:, :4], plain) and torch.equal(model.encode_text(x)[:, :4], plain)


# the command line


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


def test_classification_by_cosine_is_stocks(
    classes: Path, learned_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other scorings: class vectors below, and accuracy in test_zero_shot."""
    found = ours(classes, learned_run, "cosine", tmp_path)
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
def test_a_missing_package_is_one_line(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "clip_benchmark"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"^{package} is not installed: pip install -e '\.\[clip-benchmark\]'$"):
        main(["eval"])


@pytest.mark.real
@pytest.mark.parametrize(("name", "split", "samples"), [("flickr8k", "val", 12), ("cifar10_small", "test", 20)])
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


# what is mended


def test_stock_accuracy_stops_with_this_numpy_and_ours_says_the_same_by_hand() -> None:
    output, target = torch.tensor([[3.0, 2, 1], [1, 3, 2], [3, 2, 1]]), torch.tensor([0, 2, 2])
    assert accuracy(output, target, (1, 2)) == [1 / 3, 2 / 3]
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        with pytest.raises(TypeError):
            classification.accuracy(output, target)


def test_stock_stops_where_k_exceeds_the_candidates_and_ours_counts_them_all(
    plain: Path, learned_run: Path, tmp_path: Path
) -> None:
    assert ours(plain, learned_run, "dot", tmp_path, "--recall_k", 1, 1000)["text_retrieval_recall@1000"] == 1
    assert retrieval.recall_at_k.__module__ == retrieval.__name__, "nothing stays replaced"
    gen = torch.Generator().manual_seed(0)
    scores, positive = torch.randn(40, 30, generator=gen), torch.rand(40, 30, generator=gen) < 0.1
    positive[:, 3] = True
    for k in (1, 5, 29):
        assert torch.equal(bridge.recall_at_k(scores, positive, k), retrieval.recall_at_k(scores, positive, k))
    assert bridge.recall_at_k(scores, positive, 31).eq(1).all()
    with pytest.raises(RuntimeError, match="out of range"):
        retrieval.recall_at_k(scores, positive, 31)


def test_stock_loses_the_default_output_of_a_name_with_a_slash_and_ours_names_model_and_scoring(
    plain: Path, learned_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    default = [a for a in flags(plain, f"local-dir:{learned_run / 'model'}", "x") if a not in ("--output", "x")]
    with pytest.raises(FileNotFoundError):
        stock(monkeypatch, *default, *STOCK)
    main([*default, *OURS, "--scoring", "dot"])
    main([*default, "--model_type", "open_clip"])
    (mine,) = Path().glob("plain_own_local-dir-*-model_en_zeroshot_retrieval_dot.json")
    (other,) = Path().glob("plain_laion400m_e32_local-dir-*-model_en_zeroshot_retrieval.json")
    assert metrics_of(mine) != metrics_of(other)


def test_stock_stops_at_more_workers_than_shards_and_ours_takes_fewer(
    plain: Path, learned_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = flags(plain, f"local-dir:{learned_run / 'model'}", tmp_path / "x.json", "--num_workers", 3)
    with pytest.raises(ValueError, match="shards"):
        stock(monkeypatch, *argv, *STOCK)
    alone = ours(plain, learned_run, "cosine", tmp_path)
    assert ours(plain, learned_run, "cosine", tmp_path, "--num_workers", 3) == alone


def test_stock_scores_in_bfloat16_on_a_cpu_and_ours_does_not(
    plain: Path, learned_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    at_k = retrieval.recall_at_k
    monkeypatch.setattr(retrieval, "recall_at_k", lambda s, *a, **k: (seen.append(s.dtype), at_k(s, *a, **k))[1])
    model = f"local-dir:{learned_run / 'model'}"
    stock(monkeypatch, *flags(plain, model, tmp_path / "x.json", "--task", "zeroshot_retrieval"))
    assert set(seen) == {torch.bfloat16}
    seen.clear()
    own = bridge.recall_at_k
    monkeypatch.setattr(bridge, "recall_at_k", lambda s, *a, **k: (seen.append(s.dtype), own(s, *a, **k))[1])
    main(flags(plain, model, tmp_path / "x.json", *OURS))
    assert set(seen) == {torch.float32}


def test_stock_takes_a_retrieval_folder_for_classes_and_ours_reads_what_it_is(
    plain: Path, learned_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = flags(plain, f"local-dir:{learned_run / 'model'}", tmp_path / "x.json")
    with pytest.raises(AssertionError, match="Classes not specified"):
        stock(monkeypatch, *argv, "--no_amp")
    main(argv)
    assert "image_retrieval_recall@1" in metrics_of(tmp_path / "x.json")


def test_help_and_the_default_output_are_clip_benchmarks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["eval", "--help"])
    told = capsys.readouterr().out
    assert end.value.code == 0 and "--scoring {native,cosine,dot,qnorm,dnorm}" in told and "--load_clfs" in told
    monkeypatch.setattr(sys, "argv", ["x", "eval"])
    assert cli.get_parser_args()[1].output == STOCK_OUTPUT
