"""What the benchmarks share: processes that take turns, data for both contestants, tables and pictures of the results.

    python benchmarks/harness.py [PAGE]    rewrite the tables of docs/performance.md from the CSV files beside it

A contestant is measured in a process of its own, ``python BENCHMARK --measure JSON``, whose last line of output is
JSON. The benchmark's own process stays light, since Linux counts a parent's size into its child's ru_maxrss.

On the page everything between ``<!-- table: NAME.csv -->`` and ``<!-- /table -->`` becomes the machine and the rows of
PAGE/NAME.csv, or "Not measured." without such a file.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import logging
import math
import multiprocessing
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
MEASURED = ("seconds", "cpu", "mib")
MIB = 2**20
FAILED: list[str] = []  # what failed in this run


class Parser(argparse.ArgumentParser):
    """A benchmark's flags: its docstring is its help, and errors are one line and exit code 2."""

    def __init__(self, text: str | None, rounds: int = 3) -> None:
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--rounds", type=count, default=rounds, help=f"measurements of each contestant [{rounds}]")
        self.add_argument("--threads", type=count, default=1, help="of each contestant [1]")
        self.add_argument("--csv", type=Path, metavar="FILE", help="write the results here, too")
        self.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)  # the task of a contestant's process

    def error(self, message: str) -> NoReturn:
        refuse(message)

    def add_training_flags(self) -> None:
        """The flags of benchmarks that run two programs on the same images and captions."""
        count_0 = partial(count, least=0)
        self.add_argument("--data", default="builtin:scenes", help="images and captions, as train_clip.py takes them")
        self.add_argument("--split", metavar="NAME", help="split of a folder")
        self.add_argument("--batch-size", type=count, default=64, metavar="B", help="of both [64]")
        self.add_argument("--workers", type=count_0, default=2, metavar="N", help="reading processes of both [2]")
        self.add_argument("--device", default="auto", help="auto, cpu or cuda [auto]")
        self.add_argument(
            "--precision", default="auto", choices=("auto", "fp32", "amp_bf16"), help="auto: bf16 on CUDA"
        )
        self.add_argument("--quick", action="store_true", help="one round of little: to see that it runs")

    def run(
        self, measure: Callable[[Json], Json | None], compete: Callable[[argparse.Namespace, Path], int]
    ) -> NoReturn:
        """Do what the command line asks for in a temporary folder, and exit."""
        args = self.parse_args()
        if args.measure:
            print(json.dumps(measure(args.measure)))
            sys.exit(0)
        if "precision" in args:
            import torch

            if args.device == "auto":
                args.device = "cuda" if torch.cuda.is_available() else "cpu"
            if args.precision == "auto":
                args.precision = "amp_bf16" if args.device.startswith("cuda") else "fp32"
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(compete(args, Path(folder)))


def refuse(message: object) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def count(text: str, least: int = 1) -> int:
    """Parse an integer of at least ``least``."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number of at least {least} is expected")
    return number


# --- one measurement --------------------------------------------------------------------------------------------------


def clocks() -> tuple[float, float]:
    """(wall seconds, CPU seconds of this process and its children, running ones included where /proc has them)."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in multiprocessing.active_children():
        stat = Path(f"/proc/{child.pid}/stat")
        if stat.is_file():
            fields = stat.read_text().rpartition(")")[2].split()
            cpu += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), cpu


def spent(start: tuple[float, float]) -> Json:
    wall, cpu = (b - a for a, b in zip(start, clocks(), strict=True))
    return {"seconds": wall, "cpu": cpu}


def peak_mib() -> float:
    """The largest resident size of this process so far, in MiB."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / MIB if sys.platform == "darwin" else size / 1024


def settled_mib() -> float:
    """:func:`peak_mib` after asking Linux to forget earlier peaks, such as those of imports."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_mib()


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


# --- contestants ------------------------------------------------------------------------------------------------------


def measured(script: str | Path, spec: Json, name: str, python: str = sys.executable) -> Json | None:
    """The result of a process of its own; None, reported under ``name``, if it fails or exceeds memory."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(spec["threads"]))
    done = subprocess.run(
        [python, str(script), "--measure", json.dumps(spec)], text=True, check=False, capture_output=True,
        env={**os.environ, **threads, "PYTHONPATH": path},
    )  # fmt: skip
    last = done.stdout.splitlines()[-1] if done.stdout.splitlines() else ""
    if done.returncode == -signal.SIGKILL or (done.returncode == 0 and last == "null"):
        print(f"{name}: does not fit into memory", flush=True)
        return None
    if done.returncode == 0 and last.startswith("{"):
        found: Json = json.loads(last)
        return found
    sys.stderr.write(done.stderr)
    errors = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    ended = signal.Signals(-done.returncode).name if done.returncode < 0 else ""
    FAILED.append(f"{name}: failed: {f'ended by {ended}' if ended else errors[-1] if errors else 'no result'}")
    print(FAILED[-1], flush=True)
    return None


def by_name(script: str, spec: Json) -> Callable[[str], Json | None]:
    """:func:`measured` of a contestant, whose name is the spec's."""
    return lambda name: measured(script, {**spec, "name": name}, name)


def row(name: str, of: Mapping[str, Any]) -> str:
    return f"{name:28} {of['seconds']:9.3f} s {of['cpu']:9.3f} s of CPU {of['mib']:9.1f} MiB"


def take_turns(
    names: Sequence[str], rounds: int, measure: Callable[[str], Json | None], show: Callable[[str, Json], str] = row
) -> dict[str, list[Json]]:
    """``rounds`` measurements of each name, in turns, so that a busy machine slows all; each is printed.

    A contestant that ``measure`` returns None for is dropped.
    """
    found: dict[str, list[Json]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            if name not in found:
                continue
            if now := measure(name):
                found[name].append(now)
                print(show(name, now), flush=True)
            else:
                del found[name]
    return found


def medians(rounds: Iterable[Mapping[str, Any]], names: Sequence[str] = MEASURED) -> Json:
    every = list(rounds)
    return {name: median(one[name] for one in every) for name in names}


def share(a: float, b: float) -> float:
    """a / b; NaN for b = 0."""
    return a / b if b else math.nan


def of_memory(ours: float, theirs: float) -> str:
    """'0.100 of its memory'; no ratio of what is too small to measure."""
    return f"{ours / theirs:.3f} of its memory" if ours and theirs else "memory too small to compare"


def machine(threads: int, device: str = "cpu") -> str:
    """The machine in words; device: "cpu", or the name of an accelerator."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    used = "no GPU used" if device == "cpu" else device
    return f"{cpu}, {threads} thread{'s' * (threads != 1)}, torch {version('torch')}, {used}"


# --- data and models for both contestants -----------------------------------------------------------------------------


def export(
    source: str, split: str | None, purpose: str, n: int, folder: Path, captions: int | None, shards: int
) -> Json:
    """Write the first ``n`` images of a data set, bytes unchanged, with their first ``captions`` captions.

    Returns:
        {"csv": a CSV beside files, open_clip's layout, "tar": a pattern of ``shards`` shards, "images", "captions":
        how many}.
    """
    from mmclip.data.shards import open_data
    from mmclip.errors import UserError

    try:
        data = open_data(source, split, purpose)
    except UserError as error:
        refuse(f"--data: {error}")
    n = min(n, len(data))
    (folder / "images").mkdir(parents=True)
    names: list[tuple[str, str]] = []
    with contextlib.ExitStack() as stack:
        tars = [stack.enter_context(tarfile.open(folder / f"{i}.tar", "w")) for i in range(shards)]
        for index in range(n):
            path, offset, size = data.places[index]
            with open(path, "rb") as file:
                file.seek(max(offset, 0))
                content = file.read(size if offset >= 0 else -1)
            texts = data.captions[index][:captions]
            kind = "png" if content.startswith(b"\x89PNG") else "webp" if content[8:12] == b"WEBP" else "jpg"
            image = folder / "images" / f"{index:07}.{kind}"
            image.write_bytes(content)
            names += [(str(image), text) for text in texts]
            for suffix, member in ((kind, content), ("txt", "\n".join(texts).encode())):
                info = tarfile.TarInfo(f"{index:07}.{suffix}")
                info.size = len(member)
                tars[index * shards // n].addfile(info, io.BytesIO(member))
    with open(folder / "data.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t").writerows([("filepath", "title"), *names])
    pattern = str(folder / (f"{{0..{shards - 1}}}.tar" if shards > 1 else "0.tar"))
    return {"csv": str(folder / "data.csv"), "tar": pattern, "images": n, "captions": len(names)}


def write_model(model: str, folder: Path) -> Json:
    """A model config that open_clip can register and random weights (seed 0): {"config", "weights"}."""
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


# --- results ----------------------------------------------------------------------------------------------------------


def finish(args: argparse.Namespace, about: str, rows: Sequence[Json], last: Sequence[str], good: bool) -> int:
    """Write --csv, print the last lines and failures; exit code 0 if all agree and nothing failed, else 1."""
    if args.csv and rows:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", encoding="utf-8", newline="") as file:
            file.write(f"# {about}\n")
            writer = csv.DictWriter(file, max((list(r) for r in rows), key=len), lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()} for r in rows)
    print("\n" + "\n".join(last))
    for line in FAILED:
        print(f"error: {line}", file=sys.stderr)
    return 0 if good and not FAILED else 1


def draw(path: Path, about: str, rows: Sequence[Json], unit: tuple[str, str], names: Sequence[str]) -> None:
    """Picture CPU time and memory of the contestants ``names`` against size, both axes logarithmic.

    Args:
        unit: the rows' key of the size, and its axis label.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for axis, (key, title) in zip(axes, (("cpu", "CPU time, s"), ("mib", "peak memory, MiB")), strict=True):
        points = {n: [(r[unit[0]], max(r[key], 1e-3)) for r in rows if r["contestant"] == n] for n in names}
        for name, marker, colour in zip(names, "os", ("#0072B2", "#D55E00"), strict=True):
            axis.plot(*zip(*points[name], strict=True), marker=marker, color=colour, label=name)
        sizes = sorted({size for line in points.values() for size, _ in line})
        top = max(value for line in points.values() for _, value in line)
        for power, text, style in ((2, f"grows with {unit[0]}²", "--"), (1, f"grows with {unit[0]}", ":")):
            line = [1.6 * top * (size / sizes[-1]) ** power for size in sizes]
            axis.plot(sizes, line, style, color="#8b929a", linewidth=1, label=text)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axis.set_xlabel(unit[1])
        axis.set_title(title, fontsize=11)
        axis.grid(color="#e3e6e9", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle(about, fontsize=9, color="#5d656e")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def cell(text: str) -> str:
    """A number in three digits, thousands set apart; anything else as it is.

    >>> cell("0.123456"), cell("16384"), cell("1234.56"), cell("sym cosine")
    ('0.123', '16,384', '1,235', 'sym cosine')
    """
    if re.fullmatch(r"-?\d+", text):
        return f"{int(text):,}"
    try:
        value = float(text)
    except ValueError:
        return text
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(path: Path) -> str:
    """A CSV file of :func:`finish` in Markdown, with its machine before it."""
    if not path.is_file():
        return "Not measured.\n"
    with path.open(encoding="utf-8", newline="") as file:
        about, (heads, *rows) = file.readline().removeprefix("# ").strip(), csv.reader(file)
    words = {"seconds": "s", "cpu": "s of CPU", "mib": "MiB"}
    named = [" ".join([words.get(first, first), *rest]) for first, *rest in map(str.split, heads)]
    lines = [named, ["---"] * len(heads), *([cell(value) for value in row] for row in rows)]
    return f"{about}.\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "page", nargs="?", type=Path, default=ROOT / "docs/performance.md", help="[docs/performance.md]"
    )
    page = parser.parse_args().page
    if not page.is_file():
        refuse(f"{page}: no such file")
    marked = re.compile(r"(<!-- table: (\S+\.csv) -->\n).*?(<!-- /table -->)", re.DOTALL)
    text = page.read_text(encoding="utf-8")
    page.write_text(marked.sub(lambda m: m[1] + table(page.with_suffix("") / m[2]) + m[3], text), encoding="utf-8")


if __name__ == "__main__":
    main()
