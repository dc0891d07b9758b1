"""How fast a whole training step is, against open_clip_train's own loop: same model, data, machine and settings.

    python benchmarks/training.py                                  the built-in scenes, a small ViT: minutes
    python benchmarks/training.py --data DIR/flickr8k              photos in shards, or any data of train_clip.py
    python benchmarks/training.py --layout csv                     files named by a CSV instead of tar shards
    python benchmarks/training.py --quick                          to see that it runs

ours is ``mmclip.commands.train.train``, all that scripts/train_clip.py does after its flags: --loss sym --norm cosine --positives
none, which is CLIP's loss. theirs is ``open_clip_train.main.main``, all that ``python -m open_clip_train.main`` does
with the flags that are printed: its data pipeline, its train_one_epoch, its AdamW, its log lines. Neither is changed or
rewritten. open_clip_train's requirements (webdataset, pandas...) go into a virtual environment that this script makes,
--venv: pip reads them from the metadata of the installed open_clip_torch and finds torch and all else that is there in
the environment of this script, so that both run the same torch.

Both read the same pictures, one caption each, from the same files: shards that both take, or open_clip's CSV. Both
start from the same weights with the same batch size, readers, precision, threads and optimizer settings, log every
tenth step, validate nothing and save nothing in the span that is timed.

The clock is torch's hook after each optimizer step, the same in both: --steps steps from the end of the last of
--warmup steps, the wait for data, the loop and its log lines in it; on CUDA the device is waited for at both ends.
After the last step the process leaves. Each measurement is a process of its own, and the contestants take turns, so
that a busy machine slows both. CPU seconds are those of the process and its readers. Medians are compared; the last
line is the ratio.

First, what both do is held together: three steps over one and the same batch (data of exactly one batch, a
deterministic crop, which are the same pictures in any order). The first losses must agree to 1e-4, else the exit code
is 1; the later ones show that the updates are the same (open_clip_train decays the positional embedding, mmclip does
not, as open_clip itself asks).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import side_by_side as m
from harness import Parser, count, exit_code, machine, refuse, write_csv

CONTESTANTS = ("ours", "open_clip_train")
OPTIMIZER = {"lr": 5e-4, "wd": 0.2, "beta1": 0.9, "beta2": 0.98, "eps": 1e-6, "grad-clip-norm": 1.0}
WHOLE_PICTURE = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0)}  # of the random crop: the largest square, always
CHECKED_STEPS = 3
AGREE = 1e-4  # first losses, absolute


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__)
    p.add_argument("--model", default="flickr-small.json", help="a model config JSON or an open_clip name, no dropout")
    p.add_argument("--layout", choices=("tar", "csv"), default="tar", help="how both read (default: tar)")
    p.add_argument("--steps", type=count, default=40, metavar="N", help="timed steps of a measurement (default: 40)")
    p.add_argument("--warmup", type=count, default=10, metavar="N", help="steps before them (default: 10)")
    p.add_argument("--venv", type=Path, default=m.ROOT / "data/bench-venv", metavar="DIR", help="made where missing")
    m.add_flags(p)
    return p


# --- open_clip_train's environment ------------------------------------------------------------------------------------


def make_venv(folder: Path) -> str:
    """The Python of a virtual environment that has all of open_clip_torch's training requirements: what this one has
    is seen there, the rest is installed. Errors: exit, where pip cannot."""
    from importlib.metadata import requires

    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    # after its own packages, so that the older webdataset that open_clip_train needs goes before a newer one here
    seen = [path for path in sys.path if path.endswith("-packages")]
    (site / "parent.pth").write_text("\n".join(seen) + "\n", encoding="utf-8")
    extra = re.compile(r"extra\s*==\s*.training\b")
    needed = [r.partition(";")[0].strip() for r in requires("open_clip_torch") or [] if extra.search(r)]
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q", *needed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["?"])[-1]
        sys.exit(f"error: {folder}: open_clip_train's requirements ({', '.join(needed)}) cannot be installed: {why}")
    return str(python)


# --- one measurement, in a process of its own -------------------------------------------------------------------------


class Enough(Exception):
    """The last step that is wanted has been taken."""


class Timer:
    """Called after each optimizer step, whoever takes it."""

    def __init__(self, warmup: int, steps: int, device: str) -> None:
        self.first, self.last, self.device, self.step = warmup, warmup + steps, device, 0
        self.found: m.Json = {}

    def __call__(self, *_: Any) -> None:
        self.step += 1
        if self.step == self.first:
            m.synchronize(self.device)
            self.start = m.clocks()
        if self.step == self.last:
            m.synchronize(self.device)
            wall, cpu = (b - a for a, b in zip(self.start, m.clocks(), strict=True))
            self.found = {"seconds": wall, "cpu": cpu}
            raise Enough


def flags_of(told: m.Json) -> list[str]:
    """What both command lines share."""
    flags = [f"--{name}={value}" for name, value in OPTIMIZER.items()]
    for name in ("batch_size", "workers", "precision", "device", "epochs", "logs"):
        flags.append(f"--{name.replace('_', '-')}={told[name]}")
    flags += [f"--warmup={told['warmup']}", f"--train-data={told[told['layout']]}", "--seed=0", "--name=run"]
    flags += [f"--log-every-n-steps={1 if told['check'] else 10}", f"--pretrained={told['weights']}"]
    return [*flags, "--dataset-type", {"tar": "webdataset", "csv": "csv"}[told["layout"]]]


def ours(told: m.Json) -> tuple[list[str], Callable[[list[str]], list[float]]]:
    """(the flags, what trains with them and returns the losses of a check)."""
    from mmclip.commands.train import run as train
    from mmclip.config import TrainConfig, parse

    flags = [*flags_of(told), f"--model={told['config']}", "--loss=sym", "--norm=cosine", "--positives=none"]
    flags += ["--val-data=none", "--save-steps=1000000000", "--no-report"]
    if told["check"]:
        flags += ["--aug-cfg", *(f"{k}={a},{b}" for k, (a, b) in WHOLE_PICTURE.items())]

    def run(flags: list[str]) -> list[float]:
        with contextlib.suppress(Enough):
            train(parse(TrainConfig, flags))
        lines = (Path(told["logs"]) / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["loss"] for line in lines] if told["check"] else []

    return flags, run


def open_clip_train(told: m.Json) -> tuple[list[str], Callable[[list[str]], list[float]]]:
    """The same of the other side."""
    import open_clip
    from open_clip_train import main

    open_clip.add_model_config(Path(told["config"]))
    flags = [*flags_of(told), f"--model={Path(told['config']).stem}", "--save-frequency=0"]
    if told["layout"] == "tar":
        flags += [f"--train-num-samples={told['images']}"]
    if told["check"]:
        flags += ["--aug-cfg", *(f"{k}={v}" for k, v in WHOLE_PICTURE.items())]

    def run(flags: list[str]) -> list[float]:
        losses: list[float] = []
        create_loss = main.create_loss

        def watched(args: argparse.Namespace) -> Any:
            loss = create_loss(args)
            loss.register_forward_hook(lambda _, __, out: losses.append(float(out["contrastive_loss"])))
            return loss

        if told["check"]:
            main.create_loss = watched
        with contextlib.suppress(Enough):
            main.main(flags)
        return losses

    return flags, run


def measure(told: m.Json) -> m.Json:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    timer = Timer(told["warmup"], told["steps"], told["device"])
    flags, run = (ours if told["contestant"] == "ours" else open_clip_train)(told)
    register_optimizer_step_post_hook(timer)
    losses = run(flags)
    if timer.step < timer.last:
        sys.exit(f"error: {told['contestant']} ended after {timer.step} of {timer.last} steps")
    steps, seconds = told["steps"], timer.found["seconds"]
    return {
        "samples_per_second": told["batch_size"] * steps / seconds,
        "cpu_per_step": timer.found["cpu"] / steps,
        "losses": losses,
        "flags": flags,
    }


# --- both -------------------------------------------------------------------------------------------------------------


def measured(args: argparse.Namespace, contestant: str, told: m.Json, python: str, check: bool) -> m.Json | None:
    with tempfile.TemporaryDirectory(dir=told["folder"]) as logs:
        mine = {**told, "contestant": contestant, "check": check, "logs": logs}
        return m.in_a_process(str(Path(__file__)), python, mine, args.threads)


def row(name: str, samples: float, cpu: float) -> str:
    return f"{name:28} {samples:9.1f} samples/s {cpu:9.3f} s of CPU a step"


def compete(args: argparse.Namespace, folder: Path) -> int:
    """Hold both together, take turns; print medians and, last, the ratio. The exit code."""
    about = machine(args.threads, args.device)
    print(about, flush=True)
    model = {**m.write_model(args.model, folder), "folder": str(folder), "layout": args.layout}
    readers = max(args.workers, 1)
    settings = {n: getattr(args, n) for n in ("batch_size", "precision", "device")}
    wanted = (args.warmup + args.steps + 1) * args.batch_size
    data = m.export(args.data, args.split, "train", wanted, folder / "timed", 1, readers)
    if data["images"] < args.batch_size * readers:
        refuse(f"--data {args.data}: {data['images']} images, fewer than a batch for each of {readers} readers")
    one = m.export(args.data, args.split, "train", args.batch_size, folder / "one", 1, 1)
    pythons = {"ours": sys.executable, "open_clip_train": make_venv(args.venv)}

    agree: dict[str, list[float]] = {}
    for name in CONTESTANTS:
        # one step more, since the line of the step at which a process leaves is not written any more
        told = {**model, **one, **settings, "workers": 1, "warmup": 1, "steps": CHECKED_STEPS}
        checked = measured(args, name, told | {"epochs": CHECKED_STEPS + 1}, pythons[name], True)
        if checked is None:
            continue
        agree[name] = checked["losses"]
        losses = ", ".join(f"{loss:.6f}" for loss in agree[name][:CHECKED_STEPS])
        print(f"{name:16} losses of {CHECKED_STEPS} steps over one batch: {losses}", flush=True)

    epoch = data["images"] // args.batch_size
    told = {**model, **data, **settings, "workers": args.workers, "warmup": args.warmup, "steps": args.steps}
    told["epochs"] = -(-(args.warmup + args.steps) // epoch) + 1
    print(
        f"{args.model}, {data['images']} images of {args.data} as {args.layout}, {epoch} steps an epoch, "
        f"batch {args.batch_size}, {args.workers} worker(s), {args.precision}, {args.steps} steps after {args.warmup}"
    )
    found: dict[str, list[m.Json]] = {name: [] for name in agree}
    rows = []
    for turn in range(args.rounds):
        for name in CONTESTANTS if turn % 2 == 0 else reversed(CONTESTANTS):
            new = measured(args, name, told, pythons[name], False) if name in found else None
            if new is None:
                found.pop(name, None)
                continue
            if not found[name]:
                print(f"{name}: {' '.join(new['flags'])}")
            found[name].append(new)
            rows.append(
                {"contestant": name, "round": turn} | {n: new[n] for n in ("samples_per_second", "cpu_per_step")}
            )
            print(row(name, new["samples_per_second"], new["cpu_per_step"]), flush=True)
    if args.csv and rows:
        write_csv(args.csv, about, rows)
    medians = {name: m.medians(found[name], ("samples_per_second", "cpu_per_step")) for name in found}
    for name in found:
        print(row(f"{name}, median of {args.rounds}", *medians[name]))
    if len(found) < len(CONTESTANTS):
        return exit_code(False)
    apart = abs(agree["ours"][0] - agree["open_clip_train"][0])
    print(f"first losses {apart:.1e} apart: " + ("the same work" if apart <= AGREE else "NOT THE SAME WORK"))
    (samples, cpu), (their_samples, their_cpu) = medians.values()
    print(f"ratio: ours {samples / their_samples:.2f} times open_clip_train's ({their_cpu / cpu:.2f} by CPU time)")
    return 0 if apart <= AGREE else 1


def main() -> int:
    args = parser().parse_args()
    if args.told:
        print(json.dumps(measure(json.loads(args.told))))
        return 0
    if args.quick:
        args.steps, args.warmup, args.rounds = 2, 1, 1
    m.settle(args)
    with tempfile.TemporaryDirectory() as folder:
        return compete(args, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
