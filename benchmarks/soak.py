#!/usr/bin/env python3
"""A long run in small: thousands of tiny steps with many checkpoints and validations, watched from outside.

It starts scripts/train_clip.py and samples that process: resident memory, open files, steps done. Flat means, after the
first tenth: memory grows by less than --memory-slope per 1,000 steps (a least-squares line, its 95 % interval printed),
open files end as they began, and the last third's steps take less than --slower times the processor time of the first
third's (the wall time, which other work on the machine moves, is printed beside it). Prints the
three figures; exit code 1 where one is not flat.

  python benchmarks/soak.py                    20,000 steps, a checkpoint every 200: about five minutes on 2 CPU cores
  python benchmarks/soak.py --steps 2000       half a minute
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scipy import stats

from mmclip.data.scenes.build import SceneSizes, build_scenes

ROOT = Path(__file__).resolve().parent.parent
MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1},
}
Sample = tuple[float, float, int, float, int]  # wall and processor seconds, steps done, MB resident, open files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="[20000]")
    parser.add_argument("--save-steps", type=int, default=200, help="[200]")
    parser.add_argument("--val-steps", type=int, default=500, help="[500]")
    parser.add_argument("--workers", type=int, default=0, help="reading processes, started anew each epoch [0]")
    parser.add_argument("--memory-slope", type=float, default=0.5, metavar="MB", help="allowed per 1,000 steps [0.5]")
    parser.add_argument("--slower", type=float, default=1.25, help="allowed ratio of step times [1.25]")
    parser.add_argument("--output", type=Path, help="write the samples here, JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mmclip-soak-") as scratch:
        samples, code = watch(arguments, Path(scratch))
    if code:
        sys.exit(f"the run itself failed with exit code {code}")
    if arguments.output:
        arguments.output.write_text(json.dumps(samples), encoding="utf-8")
    sys.exit(0 if report(samples, arguments) else 1)


def watch(arguments: argparse.Namespace, scratch: Path) -> tuple[list[Sample], int]:
    """Samples of a run, taken about twice a second, and its exit code."""
    data = build_scenes(scratch, "scenes", sizes=SceneSizes(train=64, test=20, distractors=4))
    (scratch / "tiny.json").write_text(json.dumps(MODEL), encoding="utf-8")
    command = [sys.executable, ROOT / "scripts" / "train_clip.py", "--train-data", data,
               "--model", scratch / "tiny.json", "--batch-size", 8,
               "--max-steps", arguments.steps, "--epochs", arguments.steps, "--device", "cpu",
               "--save-steps", arguments.save_steps, "--val-steps", arguments.val_steps, "--workers", arguments.workers,
               "--loss", "sym", "--norm", "learned", "--lr", "1e-4", "--logs", scratch, "--name", "soak",
               "--report-to", "tensorboard", "--log-every-n-steps", 10, "--no-report"]  # fmt: skip
    process = subprocess.Popen(
        [str(c) for c in command], cwd=ROOT, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    started, samples, metrics = time.monotonic(), list[Sample](), scratch / "soak" / "metrics.jsonl"
    try:
        while process.poll() is None:
            time.sleep(0.5)
            step = last_step(metrics)
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
                used = sum(int(t) for t in Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[1].split()[11:13])
                files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
            except OSError:  # it has just ended
                break
            if "VmRSS:" in status and 0 < step < arguments.steps:
                memory = int(status.split("VmRSS:")[1].split()[0]) / 1024
                samples.append((time.monotonic() - started, used / os.sysconf("SC_CLK_TCK"), step, memory, files))
    finally:
        if process.poll() is None:
            process.terminate()
    return samples, process.wait()


def last_step(metrics: Path) -> int:
    """The step of the newest whole line of metrics.jsonl, 0 before the first one."""
    if not metrics.is_file():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 4096))
        lines = file.read().decode().split("\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines and lines[-1].startswith("{") else 0


def report(samples: list[Sample], arguments: argparse.Namespace) -> bool:
    """Print the three figures; whether all are flat."""
    kept = [s for s in samples if s[2] > arguments.steps / 10]
    if len(kept) < 12:
        sys.exit(f"only {len(kept)} samples: too short a run to tell, raise --steps")
    wall, used, steps, memory, files = zip(*kept, strict=True)
    line = stats.linregress([s / 1000 for s in steps], memory)
    half = float(stats.t.ppf(0.975, len(kept) - 2) * line.stderr)
    slope_flat = line.slope <= arguments.memory_slope
    print(
        f"memory: {memory[0]:.1f} MB at step {steps[0]}, {memory[-1]:.1f} MB at step {steps[-1]}; "
        f"{line.slope:+.3f} [{line.slope - half:+.3f}, {line.slope + half:+.3f}] MB per 1,000 steps: {flat(slope_flat)}"
    )
    third = len(kept) // 3
    early, late = statistics.median(files[:third]), statistics.median(files[-third:])
    files_flat = late <= early
    print(f"open files: median {early:g} in the first third, {late:g} in the last: {flat(files_flat)}")

    def per_step(seconds: tuple[float, ...]) -> tuple[float, float]:
        """ms in the first and in the last third."""
        first, last = ((0, third), (len(kept) - 1 - third, len(kept) - 1))
        a, b = (1000 * (seconds[e] - seconds[s]) / (steps[e] - steps[s]) for s, e in (first, last))
        return a, b

    (first, last), (wall_first, wall_last) = per_step(used), per_step(wall)
    time_flat = last <= arguments.slower * first
    print(
        f"step time, saving and validation included: {first:.2f} ms of processor time in the first third, "
        f"{last:.2f} ms in the last, ratio {last / first:.2f}: {flat(time_flat)} "
        f"(wall {wall_first:.2f} ms, {wall_last:.2f} ms)"
    )
    return slope_flat and files_flat and time_flat


def flat(yes: bool) -> str:
    return "flat" if yes else "NOT FLAT"


if __name__ == "__main__":
    main()
