"""How fast a whole training step is, against open_clip_train's own loop: same model, data, machine and settings.

    python benchmarks/training_step.py                           the built-in scenes, a small ViT: minutes
    python benchmarks/training_step.py --data DIR/flickr8k       photos in shards, or any data of train_clip.py
    python benchmarks/training_step.py --layout csv              files named by a CSV instead of tar shards
    python benchmarks/training_step.py --quick                   to see that it runs

ours is ``mmclip.commands.train.run`` with CLIP's own loss: --loss sym --norm cosine --positives none. theirs is
``open_clip_train.main.main``: its data pipeline, train_one_epoch, AdamW and log lines, unchanged. Its requirements
(webdataset, pandas...) go into a virtual environment, --venv, that sees torch and all else of this one.

Both read the same images, one caption each, from the same files: shards that both take, or open_clip's CSV. Both start
from the same weights with the same batch size, readers, precision, threads and optimizer settings, log every tenth
step, validate nothing and save nothing in the span that is timed: --steps steps behind --warmup steps, by torch's hook
after each optimizer step. Each measurement is a process of its own, and the contestants take turns, so that a busy
machine slows both. CPU seconds are those of the process and its readers. Medians are compared; the ratio is last.

First the work of both is compared: three steps over one and the same batch (data of exactly one batch, a deterministic
crop). The first losses must agree to 1e-4, else the exit code is 1; the later ones show that the updates are the same
(open_clip_train decays the positional embedding, mmclip does not, as open_clip itself asks).
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

import harness
from harness import ROOT, Json, count

CONTESTANTS = ("ours", "open_clip_train")
OPTIMIZER = {"lr": 5e-4, "wd": 0.2, "beta1": 0.9, "beta2": 0.98, "eps": 1e-6, "grad-clip-norm": 1.0}
WHOLE_IMAGE = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0)}  # of the random crop: the largest square, always
CHECKED_STEPS = 3
AGREE = 1e-4  # first losses, absolute
MEASURED = ("samples_per_second", "cpu_per_step")


def parser() -> harness.Parser:
    p = harness.Parser(__doc__, rounds=5)
    p.add_argument("--model", default="flickr-small.json", help="a model config JSON or an open_clip name, no dropout")
    p.add_argument("--layout", choices=("tar", "csv"), default="tar", help="how both read [tar]")
    p.add_argument("--steps", type=count, default=40, metavar="N", help="timed steps of a measurement [40]")
    p.add_argument("--warmup", type=count, default=10, metavar="N", help="steps before them [10]")
    p.add_argument("--venv", type=Path, default=ROOT / "data/bench-venv", metavar="DIR", help="made if missing")
    p.add_training_flags()
    return p


def make_venv(folder: Path) -> str:
    """The Python of a virtual environment with open_clip_torch's training requirements beside our own packages."""
    from importlib.metadata import requires

    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    # after its own packages, so that the older webdataset that open_clip_train needs goes before a newer one here
    inherited = [path for path in sys.path if path.endswith("-packages")]
    (site / "parent.pth").write_text("\n".join(inherited) + "\n", encoding="utf-8")
    extra = re.compile(r"extra\s*==\s*.training\b")
    needed = [r.partition(";")[0].strip() for r in requires("open_clip_torch") or [] if extra.search(r)]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "-q"]
    command = [*pip, "install", *needed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["?"])[-1]
        sys.exit(f"error: {folder}: open_clip_train's requirements ({', '.join(needed)}) cannot be installed: {why}")
    return str(python)


# --- one measurement, in a process of its own -------------------------------------------------------------------------


class Enough(Exception):
    """The last timed step is over."""


class Timer:
    """Called after each optimizer step."""

    def __init__(self, warmup: int, steps: int, device: str) -> None:
        self.first, self.last, self.device, self.step = warmup, warmup + steps, device, 0

    def __call__(self, *_: Any) -> None:
        self.step += 1
        if self.step in (self.first, self.last):
            harness.synchronize(self.device)
        if self.step == self.first:
            self.start = harness.clocks()
        if self.step == self.last:
            self.spent = harness.spent(self.start)
            raise Enough


def flags_of(spec: Json) -> list[str]:
    """What both command lines share."""
    flags = [f"--{name}={value}" for name, value in OPTIMIZER.items()]
    for name in ("batch_size", "workers", "precision", "device", "epochs", "logs"):
        flags.append(f"--{name.replace('_', '-')}={spec[name]}")
    flags += [f"--warmup={spec['warmup']}", f"--train-data={spec[spec['layout']]}", "--seed=0", "--name=run"]
    flags += [f"--log-every-n-steps={1 if spec['check'] else 10}", f"--pretrained={spec['weights']}"]
    return [*flags, "--dataset-type", {"tar": "webdataset", "csv": "csv"}[spec["layout"]]]


def ours(spec: Json) -> tuple[list[str], Callable[[list[str]], list[float]]]:
    """(flags, a function that trains with them and returns the losses of a check)."""
    from mmclip.commands.train import run as train
    from mmclip.config import TrainConfig, parse

    flags = [*flags_of(spec), f"--model={spec['config']}", "--loss=sym", "--norm=cosine", "--positives=none"]
    flags += ["--val-data=none", "--save-steps=1000000000", "--no-report"]
    if spec["check"]:
        flags += ["--aug-cfg", *(f"{k}={a},{b}" for k, (a, b) in WHOLE_IMAGE.items())]

    def run(flags: list[str]) -> list[float]:
        with contextlib.suppress(Enough):
            train(parse(TrainConfig, flags))
        lines = (Path(spec["logs"]) / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["loss"] for line in lines] if spec["check"] else []

    return flags, run


def open_clip_train(spec: Json) -> tuple[list[str], Callable[[list[str]], list[float]]]:
    """The same of the other contestant."""
    import open_clip
    from open_clip_train import main

    open_clip.add_model_config(Path(spec["config"]))
    flags = [*flags_of(spec), f"--model={Path(spec['config']).stem}", "--save-frequency=0"]
    if spec["layout"] == "tar":
        flags += [f"--train-num-samples={spec['images']}"]
    if spec["check"]:
        flags += ["--aug-cfg", *(f"{k}={v}" for k, v in WHOLE_IMAGE.items())]

    def run(flags: list[str]) -> list[float]:
        losses: list[float] = []
        create_loss = main.create_loss

        def watched(args: argparse.Namespace) -> Any:
            loss = create_loss(args)
            loss.register_forward_hook(lambda _, __, out: losses.append(float(out["contrastive_loss"])))
            return loss

        if spec["check"]:
            main.create_loss = watched
        with contextlib.suppress(Enough):
            main.main(flags)
        return losses

    return flags, run


def measure(spec: Json) -> Json:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    timer = Timer(spec["warmup"], spec["steps"], spec["device"])
    flags, run = (ours if spec["contestant"] == "ours" else open_clip_train)(spec)
    register_optimizer_step_post_hook(timer)
    losses = run(flags)
    if timer.step < timer.last:
        sys.exit(f"error: {spec['contestant']} ended after {timer.step} of {timer.last} steps")
    return {
        "samples_per_second": spec["batch_size"] * spec["steps"] / timer.spent["seconds"],
        "cpu_per_step": timer.spent["cpu"] / spec["steps"],
        "losses": losses,
        "flags": flags,
    }


# --- both -------------------------------------------------------------------------------------------------------------


def row(name: str, of: Json) -> str:
    flags = f"{' '.join(of['flags'])}\n" if "flags" in of else ""
    return f"{flags}{name:28} {of['samples_per_second']:9.1f} samples/s {of['cpu_per_step']:9.3f} s of CPU a step"


def compete(args: argparse.Namespace, folder: Path) -> int:
    if args.quick:
        args.steps, args.warmup, args.rounds = 2, 1, 1
    about = harness.machine(args.threads, args.device)
    print(about, flush=True)
    model = {**harness.write_model(args.model, folder), "layout": args.layout}
    readers = max(args.workers, 1)
    settings = {n: getattr(args, n) for n in ("batch_size", "precision", "device", "threads")}
    wanted = (args.warmup + args.steps + 1) * args.batch_size
    data = harness.export(args.data, args.split, "train", wanted, folder / "timed", 1, readers)
    if data["images"] < args.batch_size * readers:
        harness.refuse(f"--data {args.data}: {data['images']} images, fewer than a batch for each of {readers} readers")
    one = harness.export(args.data, args.split, "train", args.batch_size, folder / "one", 1, 1)
    pythons = {"ours": sys.executable, "open_clip_train": make_venv(args.venv)}

    def run(spec: Json, contestant: str) -> Json | None:
        with tempfile.TemporaryDirectory(dir=folder) as logs:
            mine = {**model, **settings, **spec, "contestant": contestant, "logs": logs}
            return harness.measured(__file__, mine, contestant, pythons[contestant])

    losses: dict[str, list[float]] = {}
    for name in CONTESTANTS:
        # one step more, since the line of the step at which a process leaves is not written any more
        epochs = {"epochs": CHECKED_STEPS + 1, "steps": CHECKED_STEPS, "warmup": 1, "workers": 1}
        if checked := run({**one, **epochs, "check": True}, name):
            losses[name] = checked["losses"]
            shown = ", ".join(f"{loss:.6f}" for loss in checked["losses"][:CHECKED_STEPS])
            print(f"{name:16} losses of {CHECKED_STEPS} steps over one batch: {shown}", flush=True)

    epoch = data["images"] // args.batch_size
    epochs = {"epochs": -(-(args.warmup + args.steps) // epoch) + 1, "steps": args.steps, "warmup": args.warmup}
    print(
        f"{args.model}, {data['images']} images of {args.data} as {args.layout}, {epoch} steps an epoch, "
        f"batch {args.batch_size}, {args.workers} worker(s), {args.precision}, {args.steps} steps after {args.warmup}"
    )
    spec = {**data, **epochs, "workers": args.workers, "check": False}
    found = harness.take_turns(list(losses), args.rounds, lambda name: run(spec, name), row)
    rows = [{"contestant": name, "round": i, **{n: now[n] for n in MEASURED}}
            for name, all_of in found.items() for i, now in enumerate(all_of)]  # fmt: skip
    of = {name: harness.medians(all_of, MEASURED) for name, all_of in found.items()}
    for name, now in of.items():
        print(row(f"{name}, median of {args.rounds}", now))
    if len(of) < len(CONTESTANTS):
        return harness.finish(args, about, rows, [], False)
    apart = abs(losses["ours"][0] - losses["open_clip_train"][0])
    same, (us, them) = apart <= AGREE, of.values()
    samples, cpu = us["samples_per_second"] / them["samples_per_second"], them["cpu_per_step"] / us["cpu_per_step"]
    last = [f"first losses {apart:.1e} apart: {'the same work' if same else 'NOT THE SAME WORK'}",
            f"ratio: ours {samples:.2f} times open_clip_train's ({cpu:.2f} by CPU time)"]  # fmt: skip
    return harness.finish(args, about, rows, last, same)


if __name__ == "__main__":
    parser().run(measure, compete)
