"""A long run in small: thousands of tiny steps with many checkpoints and validations, observed from outside.

    python benchmarks/soak.py                 20,000 steps, a checkpoint every 200: about five minutes on 2 CPU cores
    python benchmarks/soak.py --steps 2000    half a minute

It starts scripts/train_clip.py and samples that process: resident memory, open files, steps done. Flat means, after the
first tenth: memory grows by less than --memory-slope per 1,000 steps (a least-squares line with its 95 % interval),
open files end as they began, and the last third's steps take less than --slower times the CPU time of the first
third's. Prints the three figures; exit code 1 where one is not flat.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from harness import ROOT, count
from scipy import stats

from mmclip.data.scenes.build import SceneSizes, build_scenes

MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1},
}


class Sample(NamedTuple):
    cpu: float  # seconds
    step: int
    memory: float  # MB resident
    files: int  # open


def watch(args: argparse.Namespace, folder: Path) -> list[Sample]:
    """Train in ``folder``; samples of the process, about two a second."""
    data = build_scenes(folder, "scenes", sizes=SceneSizes(train=64, test=20, distractors=4))
    (folder / "tiny.json").write_text(json.dumps(MODEL), encoding="utf-8")
    flags = (f"--max-steps {args.steps} --epochs {args.steps} --save-steps {args.save_steps} --workers {args.workers} "
             f"--val-steps {args.val_steps} --batch-size 8 --device cpu --loss sym --norm learned --lr 1e-4 "
             "--no-report --log-every-n-steps 10 --report-to tensorboard --name soak")  # fmt: skip
    command = [sys.executable, ROOT / "scripts/train_clip.py", *flags.split(), "--logs", folder, "--train-data", data,
               "--model", folder / "tiny.json"]  # fmt: skip
    process = subprocess.Popen(
        list(map(str, command)), cwd=ROOT, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    samples, place = list[Sample](), Path(f"/proc/{process.pid}")
    try:
        while process.poll() is None:
            time.sleep(0.5)
            step = last_step(folder / "soak" / "metrics.jsonl")
            try:
                status = (place / "status").read_text()
                ticks = sum(int(t) for t in (place / "stat").read_text().rsplit(")")[1].split()[11:13])
                files = len(list((place / "fd").iterdir()))
            except OSError:  # it has just ended
                break
            if "VmRSS:" in status and 0 < step < args.steps:
                memory = int(status.split("VmRSS:")[1].split()[0]) / 1024
                samples.append(Sample(ticks / os.sysconf("SC_CLK_TCK"), step, memory, files))
    finally:
        if process.poll() is None:
            process.terminate()
    if code := process.wait():
        sys.exit(f"the run itself failed with exit code {code}")
    return samples


def last_step(metrics: Path) -> int:
    """The step of the newest whole line of metrics.jsonl, 0 before the first one."""
    if not metrics.is_file():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 4096))
        lines = file.read().decode().split("\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines and lines[-1].startswith("{") else 0


def report(samples: list[Sample], args: argparse.Namespace) -> bool:
    """Print the three figures; whether all are flat."""
    kept = [s for s in samples if s.step > args.steps / 10]
    if len(kept) < 12:
        sys.exit(f"only {len(kept)} samples: too short a run to tell, raise --steps")
    line = stats.linregress([s.step / 1000 for s in kept], [s.memory for s in kept])
    half = float(stats.t.ppf(0.975, len(kept) - 2) * line.stderr)
    first, last = kept[: len(kept) // 3], kept[-(len(kept) // 3) :]
    before, after = (median(s.files for s in third) for third in (first, last))
    early, late = (1000 * (b.cpu - a.cpu) / (b.step - a.step) for a, *_, b in (first, last))
    flat = [line.slope <= args.memory_slope, after <= before, late <= args.slower * early]
    for good, figure in zip(flat, (
        f"memory: {kept[0].memory:.1f} MB at step {kept[0].step}, {kept[-1].memory:.1f} MB at step {kept[-1].step}; "
        f"{line.slope:+.3f} [{line.slope - half:+.3f}, {line.slope + half:+.3f}] MB per 1,000 steps",
        f"open files: median {before:g} in the first third, {after:g} in the last",
        f"step time, saving and validation included: {early:.2f} ms of CPU time in the first third, "
        f"{late:.2f} ms in the last, ratio {late / early:.2f}",
    ), strict=True):  # fmt: skip
        print(f"{figure}: {'flat' if good else 'NOT FLAT'}")
    return all(flat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("--steps", 20_000, ""),
        ("--save-steps", 200, ""),
        ("--val-steps", 500, ""),
        ("--workers", 0, "reading processes, started anew each epoch "),
    ):
        parser.add_argument(name, type=lambda x: count(x, 0), default=default, help=f"{text}[{default}]")
    parser.add_argument("--memory-slope", type=float, default=0.5, metavar="MB", help="allowed per 1,000 steps [0.5]")
    parser.add_argument("--slower", type=float, default=1.25, help="allowed ratio of step times [1.25]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mmclip-soak-") as folder:
        samples = watch(args, Path(folder))
    sys.exit(0 if report(samples, args) else 1)


if __name__ == "__main__":
    main()
