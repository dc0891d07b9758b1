"""train_clip.py on two gloo ranks: weights and logs of one process with the joint batch, signals, and the export."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import open_clip
import pytest
import torch

from mmclip import load_model
from tests.helpers.benchmarking import STOCK, assert_equal_within_ties, flags, metrics_of, stock
from tests.helpers.tiny import ROOT, logged, run_script


@pytest.fixture
def common(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> list[object]:
    return ["--train-data", tiny_data, "--model", tiny_model, "--logs", tmp_path, "--workers", 0, "--device", "cpu"]


def train(*arguments: object, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    done = run_script("train_clip.py", *arguments, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


CURRICULUM = ["--norm", "dot", "--gamma-schedule", "switch", "--stage2-lr-factor", 0.3, "--focal", 2, "--i2t-weight", 1,
              "--i2t-weight-end", 0, "--norm-drift", 0.1, "--val-data", "none"]  # fmt: skip
LEARNED = ["--loss", "asym-i2t", "--norm", "learned"]


@pytest.mark.parametrize(
    ("joint", "loss", "how"),
    [
        (40, LEARNED, ["--batch-size", 20]),
        # compiled once: two batches of 40 without the short last one
        (40, [*LEARNED, "--max-steps", 2],
         ["--batch-size", 10, "--accum-freq", 2, "--grad-checkpointing", "--torchcompile"]),
        (21, LEARNED, ["--batch-size", 10, "--loss-batch-size", 21]),  # 11 rows and 10: two parts and one
        (40, CURRICULUM, ["--batch-size", 10, "--accum-freq", 2]),
    ],
    ids=["plain", "accumulated, checkpointed, compiled", "uneven parts", "curriculum"],
)  # fmt: skip
def test_two_ranks_train_like_one_process_on_the_joint_batch(
    common: list[object], tmp_path: Path, joint: int, loss: list[object], how: list[object]
) -> None:
    if "--torchcompile" in how and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    # 96 images in joint batches of 40: the last one, of 16, is divided too; so is that of 12 after those of 21
    common = [*common, *loss, "--lr", "1e-3", "--eps", "1e-3", "--warmup", 1, "--epochs", 2, "--keep-last",
              "--log-every-n-steps", 1]  # fmt: skip
    train(*common, "--name", "one", "--batch-size", joint)
    errors = train(*common, "--name", "two", *how, ranks=2).stderr
    a, b = (load_model(str(tmp_path / name)) for name in ("one", "two"))
    wanted = a.towers.state_dict()
    for name, value in b.towers.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=2e-5, msg=name)
    one, two = (
        {k: m[k] for k in ("gamma_q", "gamma_d", "logit_scale_i2t", "logit_scale_t2i", "effective_scale_i2t") if m[k]}
        for m in (a.metadata, b.metadata)
    )
    assert two == pytest.approx(one, rel=1e-4)
    lines = [logged(tmp_path / name) for name in ("one", "two")]
    assert len(lines[0]) == len(lines[1]), "only rank 0 writes"
    switched = [{m["step"]: m["transition"] for m in of if "transition" in m} for of in lines]
    assert [list(s) for s in switched] == [[4] if loss is CURRICULUM else []] * 2
    if loss is CURRICULUM:
        assert errors.count("step 4: gamma_q 1 -> 0") == 1, "one rank reports it"
        for name, pair in switched[0][4].items():
            assert switched[1][4][name] == pytest.approx(pair, rel=1e-4), name


def test_sharded_towers_are_timed_with_uneven_parts(common: list[object]) -> None:
    """With --fsdp every pass is work of both ranks, that which counts operations, too."""
    done = train(*common, "--batch-size", 10, "--loss-batch-size", 21, "--benchmark", 1, "--fsdp", ranks=2)
    assert "samples/s: 1 step of 21, median" in done.stdout


def test_a_signal_to_one_rank_saves_and_ends_them_all(common: list[object], tmp_path: Path) -> None:
    """Under torchrun itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--",
               ROOT / "scripts" / "train_clip.py", *common, "--name", "x", "--epochs", 2000, "--batch-size", 16,
               "--val-data", "none", "--save-steps", 10**6, "--log-every-n-steps", 1, "--no-report"]  # fmt: skip
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                               text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    metrics, deadline = tmp_path / "x" / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.is_file() and metrics.read_text().count("\n") > 5):
        assert process.poll() is None and time.monotonic() < deadline, "the run never got going"
        time.sleep(0.01)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(ranks[1]), signal.SIGTERM)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode != 0 and "continue with --name x --resume latest" in stderr, stderr[-3000:]
    steps = metrics.read_text().count("\n")
    assert (tmp_path / "x" / "checkpoints" / "latest").read_text() == f"step_{steps:08d}.pt\n"


@pytest.mark.filterwarnings("ignore")  # of webdataset and clip-benchmark
def test_both_towers_tuned_on_two_ranks_score_in_stock_clip_benchmark_as_in_the_run(
    common: list[object], tiny_model: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("clip_benchmark")
    open_clip.add_model_config(tiny_model)
    torch.manual_seed(5)
    start = open_clip.create_model(tiny_model.stem, load_weights=False).state_dict()
    torch.save({"state_dict": start}, tmp_path / "epoch_0.pt")
    steps, lr, run = 4, 1e-4, tmp_path / "tuned"
    train(*common, "--val-data", plain, "--pretrained", tmp_path / "epoch_0.pt", "--batch-size", 16, "--lr", lr,
          "--max-steps", steps, "--warmup", 1, "--loss", "asym-i2t", "--norm", "qnorm", "--name", "tuned",
          ranks=2)  # fmt: skip

    tuned = load_model(str(run)).towers.clip.state_dict()
    moved = {k: float((tuned[k] - v).abs().max()) for k, v in start.items() if k != "logit_scale"}
    for tower, visual in (("visual", True), ("text", False)):
        assert max(m for k, m in moved.items() if k.startswith("visual.") == visual) > lr, f"{tower} did not train"
    assert max(moved.values()) < 2 * steps * lr, "an AdamW step moves a weight by about lr: it started elsewhere"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    stock(monkeypatch, *flags(plain, f"local-dir:{run / 'model'}", tmp_path / "x.json", "--pretrained", "x", *STOCK))
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))["retrieval"]
    for found in (
        metrics_of(tmp_path / "x.json"),
        {f"{side}_retrieval_recall@{k}": results[direction]["cosine"][f"success@{k}"]
         for direction, side in (("i2t", "text"), ("t2i", "image")) for k in (1, 5, 10)},
    ):  # fmt: skip
        assert_equal_within_ties(found, run, plain, "cosine")
