"""How fast and in how much memory the contrastive loss is taken, against open_clip's ClipLoss.

    python benchmarks/loss.py                              B = 4,096 and 16,384 at D = 512, one CPU thread: minutes
    python benchmarks/loss.py --quick                      B = 1,024, one round
    python benchmarks/loss.py --device cuda                B = 32,768 and 65,536 at D = 768 in bfloat16
    python benchmarks/loss.py --ranks 2 4                  bytes that a process sends in a step

A step is forward and backward from raw features [B, D] to the gradients of both sides, alpha and gamma. mmclip takes
raw features; ClipLoss takes normalized ones, so its step begins with normalizing them, and its scale is a parameter.
mmclip's step is that of training between two logged steps: a direction of weight 0 is left out. "ids" is sym/cosine
with numbers of images and captions, by which training masks known positives; ClipLoss knows none. "again" is sym/cosine
that keeps no inner products, whatever fits, and makes them again: 8 B^2 D operations instead of 6, in the memory of one
direction. One direction takes 6 itself: where sym keeps its products both are at their floor, and cost nearly the same.

Each measurement is a process of its own, and the contestants take turns, so that a busy machine slows all. Seconds are
by the clock and by CPU time, which other programs disturb less, the median of the steps that fit into a second, at
least one. Memory is the peak resident size (ru_maxrss) less what it was once the inputs were made; on CUDA what torch
has allocated. Medians of the rounds are compared; the ratios are last, by the clock and in brackets by CPU time.

The numbers must agree, or the exit code is 1: values and gradients of every loss, norm and policy of positives with the
plain form in float64 to 1e-10, at 1,000 rows some of which are known positives of others; and each measured value of
sym/cosine and its gradients with ClipLoss's, to the rounding of the type.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

from harness import (
    MEASURED,
    Json,
    Parser,
    count,
    cuda_name,
    exit_code,
    machine,
    measured,
    medians,
    of_memory,
    refuse,
    row,
    share,
    take_turns,
    write_csv,
)
from loss_step import THEIRS

from mmclip.roles import LOSS_WEIGHTS, NORMS

LOSSES = tuple(LOSS_WEIGHTS)
ONE_WAY = tuple(f"{loss} cosine" for loss in LOSSES[1:])
OURS, IDS, AGAIN = "sym cosine", "sym cosine, ids", "sym cosine, again"
AGREE = 1e-10  # with the plain form, in float64
ROUNDING = {"float32": 1e-5, "bfloat16": 2e-2}  # of a value and of the length of a gradient
KINDS = {  # of what a process of its own is told to do
    "step": ("loss_step", "measure"),
    "rate": ("loss_step", "rate"),
    "agreement": ("loss_agreement", "agreement"),
    "bytes": ("loss_bytes", "count"),
}
CONTROL_ROWS, CONTROL_DIM = 1000, 64


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__)
    p.add_argument(
        "--batch-sizes", type=partial(count, least=2), nargs="+", metavar="B", help="[4096 16384; on CUDA 32768 65536]"
    )
    p.add_argument("--dim", type=count, metavar="D", help="[512; on CUDA 768]")
    p.add_argument("--dtype", choices=list(ROUNDING), help="of the features [float32; on CUDA bfloat16]")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="[cpu]")
    p.add_argument("--rounds", type=count, default=3, help="measurements of each contestant [3]")
    p.add_argument("--threads", type=count, default=1, help="of each contestant [1]")
    p.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES), help="[all]")
    p.add_argument("--norms", nargs="+", choices=NORMS, default=list(NORMS), help="of sym [all]")
    p.add_argument("--quick", action="store_true", help="B = 1,024 and one round")
    p.add_argument(
        "--ranks",
        type=partial(count, least=2),
        nargs="+",
        metavar="N",
        help="count bytes between N gloo processes instead",
    )
    p.add_argument("--csv", type=Path, metavar="FILE", help="write the medians here, too")
    p.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)  # what a process of its own is told
    return p


# --- all of them ------------------------------------------------------------------------------------------------------


def agree(base: Json, losses: list[str], norms: list[str]) -> bool:
    spec = {**base, "kind": "agreement", "losses": losses, "norms": norms}
    found = measured(__file__, {**spec, "batch": CONTROL_ROWS, "dim": CONTROL_DIM}, "the plain form")
    if found is None:
        return False
    good = bool(found["worst"] <= AGREE)
    print(
        f"{found['compared']} values and gradients against the plain form in float64, B = {CONTROL_ROWS}: at most "
        f"{found['worst']:.1e} apart ({found['what']}): {'they agree' if good else 'THEY DO NOT AGREE'}"
    )
    return good


def same(ours: list[Json], theirs: list[Json], dtype: str) -> bool:
    """Whether two contestants' losses, and their gradients' lengths, are one number to the rounding of the type."""
    a, b = ([found[0]["loss"], *found[0]["slope"]] for found in (ours, theirs))
    apart = max(abs(u - v) / abs(v) for u, v in zip(a, b, strict=True))
    good = apart <= ROUNDING[dtype]
    print(
        f"loss {a[0]:.6f} | ClipLoss {b[0]:.6f}, at most {apart:.1e} apart with the gradients' lengths: "
        + ("they agree" if good else "THEY DO NOT AGREE")
    )
    return good


def ratios(batch: int, of: dict[str, Json]) -> list[str]:
    """What a batch size shows, a line each; each number by the clock, and by CPU time in brackets."""

    def times(name: str, base: str) -> str:
        return f"{of[name]['seconds'] / of[base]['seconds']:.2f} ({of[name]['cpu'] / of[base]['cpu']:.2f})"

    lines = []
    norms = [f"sym {norm}" for norm in NORMS[1:] if f"sym {norm}" in of]
    one_way = [name for name in ONE_WAY if name in of]
    for names, label in ((norms, "other norms to cosine"), ([IDS], "known positives masked to none known")):
        if names := [n for n in names if n in of and OURS in of]:
            told = ", ".join(f"{n.removeprefix('sym ')} {times(n, OURS)}" for n in names)
            lines.append(f"B = {batch:,}, {label}: {told}")
    for base, label in ((OURS, "sym"), (AGAIN, "sym that keeps nothing either")):
        if one_way and base in of:
            told = ", ".join(f"{n} {times(n, base)}" for n in one_way)
            lines.append(f"B = {batch:,}, one direction to {label}: {told}")
    if OURS in of and THEIRS in of:
        memory = of_memory(of[OURS]["mib"], of[THEIRS]["mib"])
        lines.append(f"B = {batch:,}, ratio: {times(THEIRS, OURS)} times as fast as ClipLoss, {memory}")
    return lines


def step_of(spec: Json, name: str) -> Json | None:
    return measured(__file__, {**spec, "kind": "step", "name": name}, name)


def compete(args: argparse.Namespace, device: str) -> int:
    """All contestants at each batch size. The exit code."""
    base = {"dim": args.dim, "threads": args.threads, "dtype": args.dtype, "device": args.device}
    about = f"{machine(args.threads, device)}, {args.dtype}, D = {args.dim}, median of {args.rounds}"
    print(f"{about}\nforward and backward; ClipLoss and mmclip's losses by name", flush=True)
    names = [THEIRS] + [f"sym {norm}" for norm in args.norms if "sym" in args.losses]
    names += [IDS, AGAIN] * (OURS in names) + [f"{loss} cosine" for loss in args.losses if loss != "sym"]
    good, last, table = agree(base, args.losses, args.norms), list[str](), list[Json]()
    for batch in args.batch_sizes:
        print(f"\nB = {batch:,}", flush=True)
        found = take_turns(names, args.rounds, partial(step_of, {**base, "batch": batch}))
        speed = measured(__file__, {**base, "batch": batch, "kind": "rate"}, "a matrix product")
        of = {name: medians(rounds) for name, rounds in found.items()}
        print(f"medians of {args.rounds}:")
        for name, now in of.items():
            print(row(name, now))
            shares = {f"{what} of ClipLoss's": share(now[what], of[THEIRS][what]) for what in MEASURED if THEIRS in of}
            table.append({"B": batch, "loss": name, **now, **shares})
        if THEIRS in found and OURS in found:
            good &= same(found[OURS], found[THEIRS], args.dtype)
        if speed is not None and OURS in of:
            what, unit = ("seconds", "s") if args.device == "cuda" else ("cpu", "s of CPU")  # what others disturb less
            least = 2 * batch**2 * args.dim / speed[what]
            told = [f"{n} {of[n][what] / (3 * least):.2f}" for n in (OURS, *ONE_WAY) if n in of]
            last.append(
                f"B = {batch:,}, floor: {3 * least:.4g} {unit} for 6 B^2 D at the measured {speed[what] / 1e9:,.0f} "
                f"GFLOP/s; times that: {', '.join(told)}; sym cosine {of[OURS][what] / (4 * least):.2f} times 8 B^2 D"
            )
        last += ratios(batch, of)
    if args.csv and table:
        write_csv(args.csv, about, table)
    print("\n" + "\n".join(last))
    return exit_code(good)


def main() -> int:
    args = parser().parse_args()
    if args.measure:
        module, function = KINDS[args.measure["kind"]]
        print(json.dumps(getattr(import_module(module), function)(args.measure)))
        return 0
    name = cuda_name() if args.device == "cuda" else "cpu"
    if name is None:
        refuse("--device cuda: this machine has no usable CUDA device; valid here: cpu")
    on_cuda = args.device == "cuda"
    args.batch_sizes = args.batch_sizes or ([32_768, 65_536] if on_cuda else [4_096, 16_384])
    args.dim = args.dim or (768 if on_cuda else 512)
    args.dtype = args.dtype or ("bfloat16" if on_cuda else "float32")
    if args.quick:
        args.batch_sizes, args.rounds = [1_024], 1
    if args.ranks:
        from loss_bytes import compare

        return compare(args)
    return compete(args, name)


if __name__ == "__main__":
    sys.exit(main())
