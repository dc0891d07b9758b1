"""What benchmarks that set two programs side by side share: the machine, the same data for both, clocks, processes."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import logging
import multiprocessing
import os
import resource
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from harness import answer, count, refuse

ROOT = Path(__file__).resolve().parent.parent

Json = dict[str, Any]


def add_flags(p: argparse.ArgumentParser) -> None:
    """The flags of every such benchmark."""
    p.add_argument("--data", default="builtin:scenes", help="pictures and captions, as train_clip.py takes them")
    p.add_argument("--split", metavar="NAME", help="split of a folder")
    p.add_argument("--batch-size", type=count, default=64, metavar="B", help="of both (default: 64)")
    p.add_argument(
        "--workers", type=partial(count, least=0), default=2, metavar="N", help="reading processes of both (default: 2)"
    )
    p.add_argument("--threads", type=count, metavar="N", help="of both, OMP_NUM_THREADS (default: as many as cores)")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    p.add_argument("--precision", default="auto", choices=("auto", "fp32", "amp_bf16"), help="auto: bf16 on CUDA only")
    p.add_argument("--rounds", type=count, default=5, help="measurements of each contestant (default: 5)")
    p.add_argument("--csv", type=Path, metavar="FILE", help="write every measurement to it")
    p.add_argument("--quick", action="store_true", help="one round of little: to see that it runs, not to be quoted")
    p.add_argument("--told", help=argparse.SUPPRESS)  # what a process of its own is told: a contestant and its inputs


def settle(args: argparse.Namespace) -> None:
    """'auto' and defaults that ask the machine, resolved."""
    import torch

    args.threads = args.threads or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [0])
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.precision == "auto":
        args.precision = "amp_bf16" if args.device.startswith("cuda") else "fp32"


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def clocks() -> tuple[float, float]:
    """(wall seconds, CPU seconds of this process and its readers, those at work included where the system tells)."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in multiprocessing.active_children():
        stat = Path(f"/proc/{child.pid}/stat")
        if stat.is_file():
            fields = stat.read_text().rpartition(")")[2].split()
            cpu += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), cpu


# --- the same data for both -------------------------------------------------------------------------------------------


def export(
    source: str, split: str | None, purpose: str, n: int | None, folder: Path, captions: int | None, shards: int
) -> Json:
    """The first ``n`` pictures of a data set, bytes unchanged, with their first ``captions`` captions: {"csv": a CSV
    beside files, open_clip's layout, "tar": a pattern of ``shards`` shards, "images", "captions": how many}."""
    from mmclip.data.shards import open_data
    from mmclip.errors import UserError

    try:
        data = open_data(source, split, purpose)
    except UserError as error:
        refuse(f"--data: {error}")
    n = len(data) if n is None else min(n, len(data))
    (folder / "pictures").mkdir(parents=True)
    names: list[tuple[str, str]] = []
    with contextlib.ExitStack() as stack:
        tars = [stack.enter_context(tarfile.open(folder / f"{i}.tar", "w")) for i in range(shards)]
        for row in range(n):
            path, offset, size = data.places[row]
            with open(path, "rb") as file:
                file.seek(max(offset, 0))
                content = file.read(size if offset >= 0 else -1)
            texts = data.captions[row][:captions]
            kind = "png" if content.startswith(b"\x89PNG") else "webp" if content[8:12] == b"WEBP" else "jpg"
            picture = folder / "pictures" / f"{row:07}.{kind}"
            picture.write_bytes(content)
            names += [(str(picture), text) for text in texts]
            for suffix, member in ((kind, content), ("txt", "\n".join(texts).encode())):
                info = tarfile.TarInfo(f"{row:07}.{suffix}")
                info.size = len(member)
                tars[row * shards // n].addfile(info, io.BytesIO(member))
    with open(folder / "data.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerows([("filepath", "title"), *names])
    pattern = str(folder / (f"{{0..{shards - 1}}}.tar" if shards > 1 else "0.tar"))
    return {"csv": str(folder / "data.csv"), "tar": pattern, "images": n, "captions": len(names)}


def write_model(model: str, folder: Path) -> Json:
    """A model config that open_clip can register and random weights for it (seed 0), which both load:
    {"config", "weights"}."""
    import open_clip
    import torch
    from safetensors.torch import save_file

    from mmclip.config.model_config import read_model_config

    config = read_model_config(model)
    model_cfg = config["model_cfg"] if config else open_clip.get_model_config(model)
    if model_cfg is None:
        refuse(f"--model {model}: neither a model config JSON nor a name that open_clip knows")
    path = folder / "bench-model.json"
    path.write_text(json.dumps(model_cfg), encoding="utf-8")
    open_clip.add_model_config(path)
    torch.manual_seed(0)
    logging.disable(logging.WARNING)  # that its weights are random
    state = open_clip.create_model(path.stem).state_dict()
    logging.disable(logging.NOTSET)
    weights = folder / "bench-model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, weights)
    return {"config": str(path), "weights": str(weights)}


# --- processes --------------------------------------------------------------------------------------------------------


def in_a_process(script: str, python: str, told: Json, threads: int) -> Json | None:
    """What a process of its own finds: the last line of its stdout. None where it fails: its log is shown, and told
    why in a line."""
    done = subprocess.run(
        [python, script, "--told", json.dumps(told)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
    )
    if done.returncode:
        print(done.stdout[-2000:], file=sys.stderr)
    else:
        done.stderr = ""  # its log
    return answer(done, told["contestant"])


def medians(found: Sequence[Json], names: Sequence[str]) -> list[float]:
    return [median(one[name] for one in found) for name in names]
