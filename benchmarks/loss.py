"""How fast and in how much memory the contrastive loss is computed, against open_clip's ClipLoss.

    python benchmarks/loss.py                              B = 4,096 and 16,384 at D = 512, one CPU thread: minutes
    python benchmarks/loss.py --quick                      B = 1,024, one round
    python benchmarks/loss.py --device cuda                B = 32,768 and 65,536 at D = 768 in bfloat16
    python benchmarks/loss.py --ranks 2 4                  bytes that a process sends in a step
    python benchmarks/loss.py --losses sym --norms cosine --batch-sizes 512 1024 2048 4096 8192 --plot FILE

A step is forward and backward from raw features [B, D] to the gradients of both sides, alpha and gamma, as between two
logged steps; ClipLoss's begins with normalizing. "ids" masks known positives by image and caption numbers;
"again" keeps no products and makes them again: 8 B^2 D operations instead of 6, in the memory of one direction.

Each measurement is a process of its own, and the contestants take turns, so that a busy machine slows all. Seconds are
by the clock and by CPU time, which other programs disturb less, the median of the steps of a second. Memory is the peak
resident size (ru_maxrss) less that with the inputs made; on CUDA what torch has allocated. Medians of the rounds are
compared; the ratios are last, by the clock and in brackets by CPU time.

The numbers must agree, or the exit code is 1: values and gradients of every loss, norm and policy of positives with the
plain form in float64 to 1e-10, and each measured value of sym/cosine with ClipLoss's, to the rounding of the type.

Bytes (--ranks) are counted at torch.distributed's functions and priced as a ring of W processes sends n bytes in all:
n (W - 1) / W for all_gather, reduce_scatter, all_to_all and scatter (gloo's reduce_scatter), twice that for all_reduce.
open_clip's is ClipLoss(gather_with_grad=True, local_loss=True), exact for the global batch, as mmclip's is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import harness
from harness import MIB, Json, count, share

from mmclip.roles import LOSS_WEIGHTS, NORMS, Positives

LOSSES = tuple(LOSS_WEIGHTS)
ONE_WAY = tuple(f"{loss} cosine" for loss in LOSSES[1:])
THEIRS, OURS, IDS, AGAIN = "ClipLoss", "sym cosine", "sym cosine, ids", "sym cosine, again"
SCALE = 14.285714  # 1 / 0.07, as both begin
AGREE, CONTROL_ROWS, CONTROL_DIM = 1e-10, 1000, 64  # with the plain form, in float64
ROUNDING = {"float32": 1e-5, "bfloat16": 2e-2}  # of a value and of the norm of a gradient
STEPS, SECOND = 20, 1.0  # steps of a measurement: as many as fit, at least one


def parser() -> harness.Parser:
    p, many = harness.Parser(__doc__), partial(count, least=2)
    p.add_argument("--batch-sizes", type=many, nargs="+", metavar="B", help="[4096 16384; on CUDA 32768 65536]")
    p.add_argument("--dim", type=count, metavar="D", help="[512; on CUDA 768]")
    p.add_argument("--dtype", choices=list(ROUNDING), help="of the features [float32; on CUDA bfloat16]")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="[cpu]")
    p.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES), help="[all]")
    p.add_argument("--norms", nargs="+", choices=NORMS, default=list(NORMS), help="of sym [all]")
    p.add_argument("--quick", action="store_true", help="B = 1,024 and one round")
    p.add_argument("--ranks", type=many, nargs="+", metavar="N", help="count bytes between N gloo processes instead")
    p.add_argument("--plot", type=Path, metavar="FILE", help="picture time and memory of sym cosine against B")
    return p


# --- in processes of their own ----------------------------------------------------------------------------------------


def features(batch: int, dim: int, dtype: Any, device: str) -> tuple[Any, Any]:
    """Raw (image, text), each [B, D], of varying norms; a text is its image plus noise. Made in place: no peak."""
    import torch

    gen = torch.Generator(device).manual_seed(0)
    sides = [torch.randn(batch, dim, dtype=dtype, device=device, generator=gen) for _ in range(2)]
    sides[1].mul_(2).add_(sides[0])
    for side in sides:
        side.mul_(torch.randn(batch, 1, dtype=dtype, device=device, generator=gen).mul_(0.3).exp_())
        side.requires_grad_()
    return sides[0], sides[1]


def loss_function(spec: Json) -> tuple[Callable[[Any, Any], Any], list[Any]]:
    """(raw image, raw text -> loss, its parameters) of a contestant: "ClipLoss", or "LOSS NORM" and maybe ", HOW"."""
    import torch

    if spec["name"] == THEIRS:
        from open_clip.loss import ClipLoss

        clip, log_scale = ClipLoss(), torch.nn.Parameter(torch.tensor(SCALE, device=spec["device"]).log())
        unit = partial(torch.nn.functional.normalize, dim=-1)
        return lambda x, y: clip(unit(x), unit(y), log_scale.exp()), [log_scale]

    from mmclip.losses import clip_loss, mask_from_ids, tiled

    name, _, how = spec["name"].partition(", ")
    if how == "again":
        tiled.KEEP.update(dict.fromkeys(tiled.KEEP, 0))
    ours = clip_loss(*name.split()).to(spec["device"])

    def loss(x: Any, y: Any) -> Any:
        each = torch.arange(len(x), device=spec["device"])  # five captions of an image, no two the same
        known = mask_from_ids(each // 5, each) if how == "ids" else None
        return ours({"image": x, "text": y}, known, untrained=False).loss

    return loss, list(ours.parameters())


def step(spec: Json) -> Json | None:
    """Median seconds and CPU seconds of a step, peak memory above the inputs, the loss and its gradients' norms."""
    import torch

    on_cuda, dtype = spec["device"] == "cuda", getattr(torch, spec["dtype"])
    loss, parameters = loss_function(spec)

    def take(x: Any, y: Any) -> Any:
        for tensor in (x, y, *parameters):
            tensor.grad = None
        value = loss(x, y)
        value.backward()
        return value.detach()

    take(*features(64, spec["dim"], dtype, spec["device"]))  # what is made once is not a step's
    x, y = features(spec["batch"], spec["dim"], dtype, spec["device"])
    try:
        if on_cuda:
            take(x, y)  # kernels are chosen or compiled by size
            x.grad = y.grad = None
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / MIB if on_cuda else harness.settled_mib()
        times: list[Json] = []
        while not times or (len(times) < STEPS and sum(t["seconds"] for t in times) < SECOND):
            start = harness.clocks()
            value = take(x, y)
            harness.synchronize(spec["device"])
            times.append(harness.spent(start))
        peak = torch.cuda.max_memory_allocated() / MIB if on_cuda else harness.peak_mib()
    except torch.OutOfMemoryError:
        return None
    slope = [float(t.grad.double().norm()) for t in (x, y)]
    took = {what: median(t[what] for t in times) for what in ("seconds", "cpu")}
    return {**took, "mib": peak - before, "loss": float(value), "slope": slope}


def agreement(spec: Json) -> Json:
    """The largest relative difference from the plain form in float64, and of what: values and all gradients."""
    import torch

    from mmclip.losses import clip_loss, contrastive_cross_entropy, mask_from_ids
    from mmclip.similarity import Similarity

    rows, dim = spec["batch"], spec["dim"]
    gen = torch.Generator().manual_seed(1)
    ids = [torch.randint(most, (rows,), generator=gen) for most in (max(rows // 3, 1), 2 * rows)]
    known = (ids[0][:, None] == ids[0]) | (ids[1][:, None] == ids[1])
    worst, what, compared = 0.0, "", 0
    for loss, norm, policy in ((a, b, c) for a in spec["losses"] for b in spec["norms"] for c in Positives):
        x, y = features(rows, dim, torch.float64, "cpu")
        ours = clip_loss(loss, norm, positives=policy).double()
        out = ours({"image": x, "text": y}, mask_from_ids(*ids))
        out.loss.backward()
        plain = Similarity(norm).double()
        plain.load_state_dict(ours.similarity.state_dict())  # alpha as its first batch set it
        u, v = (t.detach().clone().requires_grad_() for t in (x, y))
        pairs: list[tuple[str, Any, Any]] = []
        value = torch.zeros((), dtype=torch.float64)
        for direction, weight in ours.weights.items():
            scores = plain(direction, *direction.roles({"image": u, "text": v}))
            one = contrastive_cross_entropy(scores, known, policy)
            value = value + weight * one
            pairs.append((f"{direction.value} alone", out.by_direction[direction], one))
        value.backward()
        pairs += [("value", out.loss, value), ("image", x.grad, u.grad), ("text", y.grad, v.grad)]
        theirs = dict(plain.named_parameters())
        pairs += [(n, p.grad, theirs[n].grad) for n, p in ours.similarity.named_parameters() if p.requires_grad]
        for name, a, b in pairs:
            apart = float((a - b).detach().abs().max() / b.detach().abs().max())
            compared += 1
            if not apart <= worst and worst == worst:  # the first NaN stays
                worst, what = apart, f"{name} of {loss}/{norm}/{policy.value}"
    return {"worst": worst, "what": what, "compared": compared}


def sent(spec: Json) -> Json:
    """{contestant: {collective: bytes}} of the process that sends most."""
    from torch.multiprocessing.spawn import start_processes

    with tempfile.TemporaryDirectory(prefix="mmclip-ranks-") as folder:
        start_processes(_sent_by, (spec, folder), spec["ranks"], start_method="forkserver")
        found = [json.loads(Path(folder, str(r)).read_text(encoding="utf-8")) for r in range(spec["ranks"])]
    return {name: max((f[name] for f in found), key=lambda by: sum(by.values())) for name in found[0]}


def _sent_by(rank: int, spec: Json, folder: str) -> None:
    import inspect
    import warnings

    import torch
    import torch.distributed as dist
    import torch.distributed.nn
    from open_clip.loss import ClipLoss

    from mmclip.losses import clip_loss

    # open_clip calls what torch would rename
    warnings.filterwarnings("ignore", "torch.distributed.nn.functional.all_gather is deprecated", FutureWarning)
    ranks, by = spec["ranks"], Counter[str]()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    ring = (ranks - 1) / ranks
    whole = {"all_gather": "tensor_list", "all_gather_into_tensor": "output_tensor", "reduce_scatter": "input_list",
             "reduce_scatter_tensor": "input", "all_to_all": "input_tensor_list", "all_to_all_single": "input",
             "scatter": "scatter_list", "all_reduce": "tensor", "broadcast": "tensor"}  # fmt: skip
    price = {"all_reduce": 2 * ring, "broadcast": 1.0}

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(call).bind(*args, **kwargs).arguments.get(whole[name])
            tensors = bound if isinstance(bound, (list, tuple)) else [] if bound is None else [bound]
            by[name] += round(price.get(name, ring) * sum(t.nbytes for t in tensors))
            return call(*args, **kwargs)

        return wrapped

    for name in whole:
        setattr(dist, name, counted(name, getattr(dist, name)))
    x, y = (t.detach().chunk(ranks)[rank] for t in features(spec["batch"], spec["dim"], torch.float32, "cpu"))
    clip, scale = ClipLoss(True, True, rank=rank, world_size=ranks), torch.nn.Parameter(torch.tensor(SCALE))
    unit = partial(torch.nn.functional.normalize, dim=-1)
    contestants: Json = {THEIRS: lambda u, v: clip(unit(u), unit(v), scale)}
    for loss, norm in ((a, b) for a in spec["losses"] for b in spec["norms"]):
        ours: Any = partial(clip_loss(loss, norm, gather=True), untrained=False)
        contestants[f"{loss} {norm}"] = lambda u, v, ours=ours: ours({"image": u, "text": v}).loss
    found = {}
    for name, value in contestants.items():
        by.clear()
        value(x.clone().requires_grad_(), y.clone().requires_grad_()).backward()
        found[name] = dict(by)
    Path(folder, str(rank)).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


# --- all of them ------------------------------------------------------------------------------------------------------


def agree(base: Json, losses: list[str], norms: list[str]) -> bool:
    spec = base | {"kind": "agreement", "losses": losses, "norms": norms, "batch": CONTROL_ROWS, "dim": CONTROL_DIM}
    found = harness.measured(__file__, spec, "the plain form")
    if found is None:
        return False
    good = bool(found["worst"] <= AGREE)
    print(f"{found['compared']} values and gradients against the plain form in float64, B = {CONTROL_ROWS}: at most "
          f"{found['worst']:.1e} apart ({found['what']}): {'they agree' if good else 'THEY DO NOT AGREE'}")  # fmt: skip
    return good


def same(ours: list[Json], theirs: list[Json], dtype: str) -> bool:
    """Whether two contestants' losses, and their gradients' norms, are one number to the rounding of the type."""
    a, b = ([found[0]["loss"], *found[0]["slope"]] for found in (ours, theirs))
    apart = max(abs(u - v) / abs(v) for u, v in zip(a, b, strict=True))
    good = apart <= ROUNDING[dtype]
    shown = f"loss {a[0]:.6f} | ClipLoss {b[0]:.6f}, at most {apart:.1e} apart with the gradients' norms"
    print(f"{shown}: {'they agree' if good else 'THEY DO NOT AGREE'}")
    return good


def ratios(batch: int, of: dict[str, Json]) -> list[str]:
    """The ratios of a batch size, a line each; each number by the clock, and by CPU time in brackets."""

    def times(name: str, base: str) -> str:
        return f"{of[name]['seconds'] / of[base]['seconds']:.2f} ({of[name]['cpu'] / of[base]['cpu']:.2f})"

    compared = {"other norms to cosine": (OURS, [f"sym {norm}" for norm in NORMS[1:]]),
                "known positives masked to none known": (OURS, [IDS]), "one direction to sym": (OURS, ONE_WAY),
                "one direction to sym that keeps nothing either": (AGAIN, ONE_WAY)}  # fmt: skip
    lines = []
    for label, (base, names) in compared.items():
        if found := [f"{n.removeprefix('sym ')} {times(n, base)}" for n in names if n in of and base in of]:
            lines.append(f"B = {batch:,}, {label}: {', '.join(found)}")
    if OURS in of and THEIRS in of:
        memory = harness.of_memory(of[OURS]["mib"], of[THEIRS]["mib"])
        lines.append(f"B = {batch:,}, ratio: {times(THEIRS, OURS)} times as fast as ClipLoss, {memory}")
    return lines


def compare(args: argparse.Namespace, device: str) -> int:
    """Measure all contestants at each batch size; the exit code."""
    base = {"dim": args.dim, "threads": args.threads, "dtype": args.dtype, "device": args.device}
    about = f"{harness.machine(args.threads, device)}, {args.dtype}, D = {args.dim}, median of {args.rounds}"
    print(f"{about}\nforward and backward; ClipLoss and mmclip's losses by name", flush=True)
    names = [THEIRS] + [f"sym {norm}" for norm in args.norms if "sym" in args.losses]
    names += [IDS, AGAIN] * (OURS in names) + [f"{loss} cosine" for loss in args.losses if loss != "sym"]
    good, last, table, points = agree(base, args.losses, args.norms), list[str](), list[Json](), list[Json]()
    for batch in args.batch_sizes:
        print(f"\nB = {batch:,}", flush=True)
        spec = {**base, "kind": "step", "batch": batch}
        found = harness.take_turns(names, args.rounds, harness.by_name(__file__, spec))
        of = {name: harness.medians(rounds) for name, rounds in found.items()}
        print(f"medians of {args.rounds}:")
        for name, now in of.items():
            print(harness.row(name, now))
            shares = {f"{w} of ClipLoss's": share(now[w], of[THEIRS][w]) for w in harness.MEASURED if THEIRS in of}
            table.append({"B": batch, "loss": name, **now, **shares})
            points.append({"B": batch, "contestant": name, **now})
        if THEIRS in found and OURS in found:
            good &= same(found[OURS], found[THEIRS], args.dtype)
        last += ratios(batch, of)
    if args.plot and not harness.FAILED:
        harness.draw(args.plot, about, points, ("B", "pairs in a batch, B"), [OURS, THEIRS])
    return harness.finish(args, about, table, last, good)


def count_bytes(args: argparse.Namespace) -> int:
    """Count bytes for every number of processes and batch size, the ratios last; the exit code."""
    about = f"{harness.machine(args.threads)}, gloo, float32, D = {args.dim}"
    print(about, flush=True)
    last, table = list[str](), list[Json]()
    spec = {"kind": "bytes", "dim": args.dim, "threads": args.threads, "losses": args.losses, "norms": args.norms}
    for ranks, batch in ((r, b - b % r) for r in args.ranks for b in args.batch_sizes):  # ClipLoss needs equal shares
        found = harness.measured(__file__, {**spec, "ranks": ranks, "batch": batch}, f"{ranks} processes")
        if found is None:
            continue
        print(f"\n{ranks} processes, B = {batch:,} in all; sent by the one that sends most")
        for name, by in found.items():
            total = sum(by.values())
            shown = ", ".join(f"{call} {n / MIB:.3f}" for call, n in sorted(by.items(), key=lambda c: -c[1]))
            print(f"{name:28} {total / MIB:9.3f} MiB ({shown})")
            part = total / sum(found[THEIRS].values())
            table.append({"processes": ranks, "B": batch, "loss": name, "bytes": total, "of ClipLoss's": part})
            if name != THEIRS:
                last.append(f"{ranks} processes, B = {batch:,}, {name}: {part:.3f} of the bytes of ClipLoss")
    return harness.finish(args, about, table, last, True)


def compete(args: argparse.Namespace, _: Path) -> int:
    device, on_cuda = "cpu", args.device == "cuda"
    if on_cuda:  # its name, by a process of its own
        code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
        device = done.stdout.strip() or harness.refuse("--device cuda: this machine has no usable CUDA device")
    args.batch_sizes = args.batch_sizes or ([32_768, 65_536] if on_cuda else [4_096, 16_384])
    args.dim = args.dim or (768 if on_cuda else 512)
    args.dtype = args.dtype or ("bfloat16" if on_cuda else "float32")
    if args.quick:
        args.batch_sizes, args.rounds = [1_024], 1
    return count_bytes(args) if args.ranks else compare(args, device)


if __name__ == "__main__":
    parser().run(lambda spec: {"step": step, "agreement": agreement, "bytes": sent}[spec["kind"]](spec), compete)
