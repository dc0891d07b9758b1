"""train_clip.py under torchrun: two gloo ranks end where one process with the joint batch ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from mmclip import load_model
from tests.tiny import ROOT, run_script


def test_two_ranks_train_like_one_process_on_the_joint_batch(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    # 96 images in joint batches of 40: the last one, of 16, is shared out too
    common = ["--train-data", tiny_data, "--model", tiny_model, "--logs", tmp_path, "--workers", 0, "--lr", "1e-3",
              "--eps", "1e-3", "--warmup", 2, "--epochs", 2, "--keep-last", "--loss", "asym-i2t", "--norm", "learned",
              "--device", "cpu", "--log-every-n-steps", 1]  # fmt: skip
    one = run_script("train_clip.py", *common, "--name", "one", "--batch-size", 40)
    assert one.returncode == 0, one.stderr[-2000:]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29533", "--"]
    command += [str(ROOT / "scripts" / "train_clip.py"), *map(str, common), "--name", "two", "--batch-size", "20"]
    two = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
                         env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert two.returncode == 0, two.stderr[-3000:]
    a, b = (load_model(str(tmp_path / name)) for name in ("one", "two"))
    start = {k: v.clone() for k, v in a.towers.state_dict().items()}
    for name, value in b.towers.state_dict().items():
        torch.testing.assert_close(value, start[name], rtol=1e-3, atol=2e-5, msg=name)
    for fact in ("gamma_q", "gamma_d", "logit_scale_i2t", "effective_scale_i2t"):
        assert abs(a.facts[fact] / b.facts[fact] - 1) < 1e-4, fact
    lines = [len((tmp_path / n / "metrics.jsonl").read_text().splitlines()) for n in ("one", "two")]
    assert lines[0] == lines[1], "only rank 0 writes"
