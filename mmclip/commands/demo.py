"""mmclip demo: three runs on built-in data, as a person would start them, side by side."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from mmclip.config import DemoConfig

RUNS = {
    "baseline": ["--loss", "sym", "--norm", "cosine"],  # the usual CLIP
    "qnorm": ["--loss", "asym-i2t", "--norm", "qnorm"],  # captions keep their norms, one direction is trained
    "control": ["--loss", "asym-i2t", "--norm", "cosine"],  # the same loss and seed, with norms that no loss used
}


def run(config: DemoConfig) -> int:
    """Train the three, compare them and write their page; returns the exit code of the first command that failed."""
    logs = Path(config.logs) / f"demo-{config.variant}-seed{config.seed}"
    if logs.exists():
        print(f"replacing the earlier demo in {logs}", file=sys.stderr)
        shutil.rmtree(logs)
    data = ["--train-data", f"builtin:{config.variant}"]
    common = [*data, "--seed", str(config.seed), "--logs", str(logs), "--no-report"]
    runs = [str(logs / name) for name in RUNS]
    judged = ["--control", str(logs / "control"), "--baseline", str(logs / "baseline")]
    commands = [["train", *common, *flags, "--name", name] for name, flags in RUNS.items()]
    commands += [["evaluate", "--compare", *runs, *judged, "--plot", str(logs / "tradeoff.png")]]
    commands[-1] += ["--verbose"] if config.verbose else []
    commands += [["report", "--runs", *runs, *judged]]
    for i, command in enumerate(commands, start=1):
        train, name = command[0] == "train", command[-1]
        if train:
            print(f"\n=== {i} of {len(RUNS)}: {name}: {' '.join(RUNS[name])}", file=sys.stderr, flush=True)
        elif command[0] == "evaluate":
            print(file=sys.stderr, flush=True)
        quiet = subprocess.DEVNULL if train and not config.verbose else None
        if code := subprocess.run([sys.executable, "-m", "mmclip", *command], stdout=quiet, check=False).returncode:
            return code
    return 0
