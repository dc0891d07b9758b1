"""train_clip.py under torchrun: two gloo ranks end where one process with the joint batch ends, in both towers too, and
what they leave scores in stock clip-benchmark as in the run's own results."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import open_clip
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from mmclip import load_model
from tests.helpers.tiny import ROOT, run_script

QUIET = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(*arguments: object) -> list[str]:
    """train_clip.py on two ranks, which meet at a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port), "--"]
    return [*start, str(ROOT / "scripts" / "train_clip.py"), *map(str, arguments), "--no-report"]


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=500, check=False, env=QUIET
    )


def clip_benchmark_metrics(model: Path, data: Path, output: Path) -> dict[str, float]:
    """The numbers of clip-benchmark's own command line, which knows nothing of mmclip."""
    command = [sys.executable, "-m", "clip_benchmark.cli", "eval", "--model", f"local-dir:{model}", "--pretrained", "x",
               "--dataset", "wds/plain", "--dataset_root", str(data), "--task", "zeroshot_retrieval",
               "--recall_k", "1", "5", "10", "--num_workers", "0", "--no_amp", "--output", str(output)]  # fmt: skip
    done = subprocess.run(command, cwd=output.parent, capture_output=True, text=True, timeout=300, check=False,
                          env={**QUIET, "HF_HUB_OFFLINE": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    metrics: dict[str, float] = json.loads(output.read_text(encoding="utf-8"))["metrics"]
    return metrics


@torch.no_grad()
def embeddings(model: Path, shard: Path) -> tuple[Tensor, Tensor]:
    """Unit rows of a shard's images and captions in float64, by stock open_clip alone."""
    clip, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{model}")
    tokenize = open_clip.get_tokenizer(f"local-dir:{model}")
    clip.eval()
    with tarfile.open(shard) as tar:
        files = {m.name: tar.extractfile(m).read() for m in sorted(tar.getmembers(), key=lambda m: m.name)}
    pictures = [preprocess(Image.open(io.BytesIO(v)).convert("RGB")) for k, v in files.items() if k.endswith(".png")]
    captions = [c for k, v in files.items() if k.endswith(".txt") for c in v.decode().splitlines()]
    rows = clip.encode_image(torch.stack(pictures)), clip.encode_text(tokenize(captions))
    image, text = (nn.functional.normalize(r.double(), dim=-1) for r in rows)
    return image, text


def hit_rates(scores: Tensor, relevant: Tensor, k: int) -> tuple[float, float]:
    """Success@k where ties go against the relevant document, and where they go for it.

    Cosines within 1e-6 are a tie: clip-benchmark ranks float32 products, mmclip and this float64 ones.
    """
    best = scores.masked_fill(~relevant, -torch.inf).amax(1, keepdim=True)
    rivals = scores.masked_fill(relevant, -torch.inf)
    lowest, highest = (float(((rivals > best + e).sum(1) < k).double().mean()) for e in (-1e-6, 1e-6))
    return lowest, highest


@pytest.mark.parametrize(
    ("joint", "how"),
    [
        (40, ["--batch-size", 20]),
        (40, ["--batch-size", 10, "--accum-freq", 2, "--grad-checkpointing", "--torchcompile"]),
        (21, ["--batch-size", 10, "--loss-batch-size", 21]),  # 11 rows and 10: two parts and one
    ],
    ids=["plain", "accumulated, checkpointed, compiled", "uneven parts"],
)
def test_two_ranks_train_like_one_process_on_the_joint_batch(
    tiny_data: Path, tiny_model: Path, tmp_path: Path, joint: int, how: list[object]
) -> None:
    if "--torchcompile" in how and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    # 96 images in joint batches of 40: the last one, of 16, is shared out too; so is that of 12 after those of 21
    common = ["--train-data", tiny_data, "--model", tiny_model, "--logs", tmp_path, "--workers", 0, "--lr", "1e-3",
              "--eps", "1e-3", "--warmup", 2, "--epochs", 2, "--keep-last", "--loss", "asym-i2t", "--norm", "learned",
              "--device", "cpu", "--log-every-n-steps", 1]  # fmt: skip
    one = run_script("train_clip.py", *common, "--name", "one", "--batch-size", joint)
    assert one.returncode == 0, one.stderr[-2000:]
    two = torchrun(*common, "--name", "two", *how)
    assert two.returncode == 0, two.stderr[-3000:]
    a, b = (load_model(str(tmp_path / name)) for name in ("one", "two"))
    start = {k: v.clone() for k, v in a.towers.state_dict().items()}
    for name, value in b.towers.state_dict().items():
        torch.testing.assert_close(value, start[name], rtol=1e-3, atol=2e-5, msg=name)
    for fact in ("gamma_q", "gamma_d", "logit_scale_i2t", "effective_scale_i2t"):
        assert abs(a.metadata[fact] / b.metadata[fact] - 1) < 1e-4, fact
    lines = [len((tmp_path / n / "metrics.jsonl").read_text().splitlines()) for n in ("one", "two")]
    assert lines[0] == lines[1], "only rank 0 writes"


def test_shared_out_towers_are_timed_with_uneven_parts(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    """With --fsdp every pass is work of both, that which counts operations, too."""
    done = torchrun("--train-data", tiny_data, "--model", tiny_model, "--logs", tmp_path, "--workers", 0, "--device",
                    "cpu", "--batch-size", 10, "--loss-batch-size", 21, "--benchmark", 1, "--fsdp")  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "samples/s: 1 step of 21, median" in done.stdout


def test_two_ranks_follow_a_curriculum_like_one_process(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    common = ["--train-data", tiny_data, "--model", tiny_model, "--logs", tmp_path, "--workers", 0, "--lr", "1e-3",
              "--eps", "1e-3", "--warmup", 2, "--epochs", 2, "--keep-last", "--norm", "dot", "--device", "cpu",
              "--log-every-n-steps", 4, "--val-data", "none", "--gamma-schedule", "switch", "--stage2-lr-factor", 0.3,
              "--focal", 2, "--norm-drift", 0.1, "--i2t-weight", 1, "--i2t-weight-end", 0]  # fmt: skip
    one = run_script("train_clip.py", *common, "--name", "one", "--batch-size", 40)
    assert one.returncode == 0, one.stderr[-2000:]
    two = torchrun(*common, "--name", "two", "--batch-size", 10, "--accum-freq", 2)
    assert two.returncode == 0, two.stderr[-3000:]
    assert two.stderr.count("step 4: gamma_q 1 -> 0") == 1, "one rank tells it"
    told = [
        {m["step"]: m["transition"] for m in map(json.loads, text.splitlines()) if "transition" in m}
        for text in ((tmp_path / n / "metrics.jsonl").read_text(encoding="utf-8") for n in ("one", "two"))
    ]
    assert [list(t) for t in told] == [[4], [4]]
    for name, pair in told[0][4].items():
        assert told[1][4][name] == pytest.approx(pair, rel=1e-4), name
    a, b = (load_model(str(tmp_path / name)) for name in ("one", "two"))
    for name, value in b.towers.state_dict().items():
        torch.testing.assert_close(value, a.towers.state_dict()[name], rtol=1e-3, atol=2e-5, msg=name)
    for fact in ("logit_scale_i2t", "logit_scale_t2i", "effective_scale_i2t"):
        assert abs(a.metadata[fact] / b.metadata[fact] - 1) < 1e-4, fact


def test_a_signal_to_one_rank_saves_and_ends_them_all(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("--train-data", tiny_data, "--model", tiny_model, "--logs", tmp_path, "--name", "x", "--workers", 0,
                "--epochs", 2000, "--batch-size", 16, "--device", "cpu", "--val-data", "none", "--save-steps", 10**6,
                "--log-every-n-steps", 1),
        cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=QUIET,
    )  # fmt: skip
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


def test_both_towers_tuned_under_torchrun_score_in_stock_clip_benchmark_as_in_the_run(
    tiny_data: Path, tiny_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("clip_benchmark")
    open_clip.add_model_config(tiny_model)
    torch.manual_seed(5)
    start = open_clip.create_model(tiny_model.stem, load_weights=False).state_dict()
    torch.save({"state_dict": start}, tmp_path / "epoch_0.pt")
    # clip-benchmark knows of a caption's own image only, and so does mmclip where no truth.jsonl says more
    data = tmp_path / "plain" / "test"
    shutil.copytree(tiny_data / "test", data, ignore=shutil.ignore_patterns("truth.jsonl"))
    shutil.copy(tiny_data / "dataset_type.txt", data.parent)
    steps, lr = 4, 1e-4
    done = torchrun("--train-data", tiny_data, "--val-data", data.parent, "--model", tiny_model, "--pretrained",
                    tmp_path / "epoch_0.pt", "--batch-size", 16, "--max-steps", steps, "--lr", lr, "--warmup", 1,
                    "--loss", "asym-i2t", "--norm", "qnorm", "--device", "cpu", "--workers", 0,
                    "--logs", tmp_path, "--name", "tuned")  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]

    tuned = load_model(str(tmp_path / "tuned")).towers.clip.state_dict()
    moved = {k: float((tuned[k] - v).abs().max()) for k, v in start.items() if k != "logit_scale"}
    for tower, names in (("visual", [k for k in moved if k.startswith("visual.")]),
                         ("text", [k for k in moved if not k.startswith("visual.")])):  # fmt: skip
        assert max(moved[k] for k in names) > lr, f"the {tower} tower did not train"
    assert max(moved.values()) < 2 * steps * lr, "an AdamW step moves a weight by about lr: it started elsewhere"
    theirs = clip_benchmark_metrics(tmp_path / "tuned" / "model", data.parent, tmp_path / "benchmark.json")
    results = json.loads((tmp_path / "tuned" / "results.json").read_text(encoding="utf-8"))
    image, text = embeddings(tmp_path / "tuned" / "model", data / "0.tar")
    own = torch.arange(24).repeat_interleave(5)[None, :] == torch.arange(24)[:, None]
    for direction, side, scores, relevant in (
        ("i2t", "text", image @ text.T, own),
        ("t2i", "image", text @ image.T, own.T),
    ):
        ours = results["retrieval"][direction]["cosine"]
        for k in (1, 5, 10):
            # Equal captions tie, against us here and at random there: where no tie decides a hit, the three are equal.
            lowest, highest = hit_rates(scores, relevant, k)
            assert highest - lowest <= 1 / 24, "too many ties to tell"
            for number in (ours[f"success@{k}"], theirs[f"{side}_retrieval_recall@{k}"]):
                assert lowest - 1e-6 <= number <= highest + 1e-6, (direction, k, number, lowest, highest)
