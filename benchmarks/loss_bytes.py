"""Bytes that a process sends for one step of the loss across gloo processes (benchmarks/loss.py --ranks).

Collectives are counted where they are called, by torch.distributed's functions, and priced as a ring sends them. With W
processes and n bytes in all of them together (all_gather, reduce_scatter and all_to_all: the whole, not a share of it)

    all_gather, reduce_scatter, all_to_all, scatter   (W - 1) / W * n of each process (scatter: of the one that has all)
    all_reduce                                        2 (W - 1) / W * n
    broadcast, send                                   n

so what torch calls under gloo in place of a reduce_scatter, a scatter of every process, has the price of one.
open_clip's loss is ClipLoss(gather_with_grad=True, local_loss=True): exact for the global batch, as mmclip's is. Both
get float32 features of B / W rows a process and no ids. Not counted: the towers' gradients, the same for both.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from harness import MIB, Json, answer, exit_code, machine, write_csv

LOSS = Path(__file__).with_name("loss.py")


def size(tensors: Any) -> int:
    """Bytes of a tensor, or of all in a list; 0 of None."""
    if tensors is None:
        return 0
    if isinstance(tensors, (list, tuple)):
        return sum(size(t) for t in tensors)
    return int(tensors.numel() * tensors.element_size())


def counted(sent: Counter[str]) -> None:
    """Let torch.distributed's functions add to ``sent`` what a ring sends for them."""
    import torch.distributed as dist

    share = (dist.get_world_size() - 1) / dist.get_world_size()
    # name -> (factor, the argument that holds all n bytes)
    priced: dict[str, tuple[float, str]] = {
        "all_gather": (share, "tensor_list"),
        "all_gather_into_tensor": (share, "output_tensor"),
        "all_gather_single": (share, "output_tensor"),
        "reduce_scatter": (share, "input_list"),
        "reduce_scatter_tensor": (share, "input"),
        "reduce_scatter_single": (share, "input"),
        "all_to_all": (share, "input_tensor_list"),
        "all_to_all_single": (share, "input"),
        "scatter": (share, "scatter_list"),
        "all_reduce": (2 * share, "tensor"),
        "broadcast": (1.0, "tensor"),
        "send": (1.0, "tensor"),
        "isend": (1.0, "tensor"),
    }

    def wrap(name: str, factor: float, whole: str, call: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(call)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            sent[name] += round(factor * size(bound.arguments[whole]))
            return call(*args, **kwargs)

        return wrapped

    for name, (factor, whole) in priced.items():
        if not hasattr(dist, name):  # the "single" ones are new names
            continue
        setattr(dist, name, wrap(name, factor, whole, getattr(dist, name)))


def count(spec: Json) -> Json:
    """{contestant: {collective: bytes}} of this process's step."""
    import torch
    import torch.distributed as dist
    import torch.distributed.nn
    from loss_step import SCALE, features
    from open_clip.loss import ClipLoss

    from mmclip.losses.contrastive import clip_loss

    # open_clip calls what torch would rename
    warnings.filterwarnings("ignore", "torch.distributed.nn.functional.all_gather is deprecated", FutureWarning)
    rank, ranks = spec["rank"], spec["ranks"]
    torch.set_num_threads(spec["threads"])
    dist.init_process_group("gloo", init_method=spec["meet"], rank=rank, world_size=ranks)
    sent: Counter[str] = Counter()
    counted(sent)
    x, y = (t.detach().chunk(ranks)[rank].clone() for t in features(spec["batch"], spec["dim"], torch.float32, "cpu"))
    found: Json = {}

    def step(name: str, loss: Callable[[Any, Any], Any]) -> None:
        sent.clear()
        loss(x.clone().requires_grad_(), y.clone().requires_grad_()).backward()
        found[name] = dict(sent)

    theirs, scale = ClipLoss(True, True, rank=rank, world_size=ranks), torch.nn.Parameter(torch.tensor(SCALE))
    unit = torch.nn.functional.normalize
    step("ClipLoss", lambda u, v: theirs(unit(u, dim=-1), unit(v, dim=-1), scale))
    for loss in spec["losses"]:
        for norm in spec["norms"]:
            here: Any = partial(clip_loss(loss, norm, gather=True), untrained=False)  # of this process's rows
            step(f"{loss} {norm}", lambda u, v: here({"image": u, "text": v}).loss)  # noqa: B023
    dist.destroy_process_group()
    return found


def together(args: argparse.Namespace, batch: int, ranks: int) -> list[Json] | None:
    """What each of ``ranks`` processes counts; none of it, told, where one of them fails, which ends the others."""
    with tempfile.TemporaryDirectory(prefix="mmclip-ranks-") as folder:
        spec = {"kind": "bytes", "ranks": ranks, "batch": batch, "dim": args.dim, "threads": args.threads,
                "losses": args.losses, "norms": args.norms, "meet": Path(folder, "meet").as_uri()}  # fmt: skip
        commands = [[sys.executable, str(LOSS), "--measure", json.dumps({**spec, "rank": r})] for r in range(ranks)]
        with contextlib.ExitStack() as stack:
            files = [[stack.enter_context(open(Path(folder, f"{r}.{name}"), "w", encoding="utf-8"))
                      for name in ("out", "err")] for r in range(ranks)]  # fmt: skip
            processes = [subprocess.Popen(c, stdout=f[0], stderr=f[1]) for c, f in zip(commands, files, strict=True)]
            while None in (codes := [p.poll() for p in processes]) and not any(codes):
                time.sleep(0.05)
            time.sleep(0.5 * any(codes))  # the others may know more
            codes = [p.poll() for p in processes]
            first = next((r for r, code in enumerate(codes) if code), 0)
            for process in processes:
                process.kill()
                process.wait()
            texts = [[Path(f.name).read_text(encoding="utf-8") for f in pair] for pair in files]
    done = [subprocess.CompletedProcess[str]("", p.returncode, *t) for p, t in zip(processes, texts, strict=True)]
    if codes[first]:
        answer(done[first], f"process {first} of {ranks}")
        return None
    return [found for r, d in enumerate(done) if (found := answer(d, f"process {r} of {ranks}"))]


def compare(args: argparse.Namespace) -> int:
    """Count for every number of processes and batch size; the ratios last. The exit code."""
    about = f"{machine(args.threads)}, gloo, float32, D = {args.dim}"
    print(about, flush=True)
    last, table = list[str](), list[Json]()
    for ranks in args.ranks:
        for batch in args.batch_sizes:
            batch -= batch % ranks  # ClipLoss's labels and gathers need equal shares
            found = together(args, batch, ranks)
            if not found:
                continue
            print(f"\n{ranks} processes, B = {batch:,} in all; sent by the one that sends most")
            most = {name: max((f[name] for f in found), key=lambda by: sum(by.values())) for name in found[0]}
            for name, by in most.items():
                total = sum(by.values())
                told = ", ".join(f"{call} {n / MIB:.3f}" for call, n in sorted(by.items(), key=lambda c: -c[1]))
                print(f"{name:28} {total / MIB:9.3f} MiB ({told})")
                table.append({"processes": ranks, "B": batch, "loss": name, "bytes": total})
                share = total / sum(most["ClipLoss"].values())
                table[-1]["of ClipLoss's"] = share
                if name != "ClipLoss":
                    last.append(f"{ranks} processes, B = {batch:,}, {name}: {share:.3f} of the bytes of ClipLoss")
    if args.csv and table:
        write_csv(args.csv, about, table)
    print("\n" + "\n".join(last))
    return exit_code(True)
