#!/usr/bin/env python3
"""The main job on built-in data: a baseline, a magnitude-aware model and its control, side by side. `make demo`.

Three runs of scripts/train_clip.py over the built-in scenes, each started as a person would start it:

  baseline   --loss sym      --norm cosine    what everybody trains
  qnorm      --loss asym-i2t --norm qnorm     captions keep their length, one direction is trained
  control    --loss asym-i2t --norm cosine    the same loss and seed, with lengths that no loss ever saw
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from mmclip.config.flags import run_script

ROOT = Path(__file__).resolve().parent.parent
RUNS = {
    "baseline": ["--loss", "sym", "--norm", "cosine"],
    "qnorm": ["--loss", "asym-i2t", "--norm", "qnorm"],
    "control": ["--loss", "asym-i2t", "--norm", "cosine"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--variant",
        choices=("scenes", "scenes-uninformative"),
        default="scenes",
        help="scenes-uninformative: nothing about a caption or picture alone predicts relevance",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, default=ROOT / "logs", help="the runs land in LOGS/demo-VARIANT-seedN/")
    arguments = parser.parse_args()
    logs = arguments.logs / f"demo-{arguments.variant}-seed{arguments.seed}"
    if logs.exists():
        print(f"replacing the earlier demo in {logs}", file=sys.stderr)
        shutil.rmtree(logs)
    data = f"builtin:{arguments.variant}"
    for i, (name, flags) in enumerate(RUNS.items(), start=1):
        print(f"\n=== {i} of {len(RUNS)}: {name}: {' '.join(flags)}", file=sys.stderr, flush=True)
        call(
            "train_clip.py",
            "--train-data",
            data,
            *flags,
            "--seed",
            str(arguments.seed),
            "--logs",
            str(logs),
            "--name",
            name,
            "--no-report",  # one page shows all three, at the end
        )
    print("\n=== side by side; every difference is against the first row\n", flush=True)
    runs = [str(logs / name) for name in RUNS]
    judged = ["--control", str(logs / "control"), "--baseline", str(logs / "baseline")]
    call("evaluate.py", "--compare", *runs, *judged, "--plot", str(logs / "tradeoff.png"))
    call("report.py", "--runs", *runs, *judged)


def call(script: str, *arguments: str) -> None:
    """Run one of our scripts; leave with its exit code where it fails."""
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / script), *arguments], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    run_script(main)
