"""How time and memory grow: of the loss with the batch, of retrieval with the images, each against its rival.

    python benchmarks/growth.py                                       both, as docs/performance/*_growth.csv and .png
    python benchmarks/growth.py loss --batch-sizes 512 1024 2048      a quick look
    python benchmarks/growth.py --draw                                pictures anew from the CSV files

Measurements are those of benchmarks/loss.py (sym/cosine, forward and backward, against ClipLoss) and of
benchmarks/retrieval.py (four scorings and both directions, against clip-benchmark's one scoring). Time is CPU time,
which other programs disturb least; the CSV files have the clock's, too. Dotted lines grow with B and B^2, or N and N^2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import loss
import retrieval
from harness import Json, Parser, count, exit_code, machine, medians, read_csv, refuse, take_turns, write_csv
from loss import THEIRS

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "performance"
LABELS = {"loss": ("B", "pairs in a batch, B"), "retrieval": ("N", "images, N, with five captions each")}


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__)
    p.add_argument("what", nargs="*", metavar="WHAT", help="loss, retrieval [both]")
    p.add_argument("--batch-sizes", type=count, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16_384], metavar="B")
    p.add_argument("--images", type=count, nargs="+", default=[250, 500, 1000, 2000, 4000], metavar="N")
    p.add_argument("--dim", type=count, default=512, metavar="D", help="[512]")
    p.add_argument("--rounds", type=count, default=3, help="measurements of each [3]")
    p.add_argument("--threads", type=count, default=1, help="of each contestant [1]")
    p.add_argument("--folder", type=Path, default=FOLDER, help="[docs/performance]")
    p.add_argument("--draw", action="store_true", help="measure nothing")
    return p


def loss_at(args: argparse.Namespace, batch: int, name: str) -> Json | None:
    spec = {"batch": batch, "dim": args.dim, "threads": args.threads, "dtype": "float32", "device": "cpu"}
    return loss.step_of(spec, loss.OURS if name == "mmclip" else name)


def retrieval_at(args: argparse.Namespace, images: int, name: str) -> Json | None:
    flags = ["--images", str(images), "--dim", str(args.dim), "--threads", str(args.threads)]
    return retrieval.told(retrieval.parser().parse_args(flags), name)


def curve(
    args: argparse.Namespace, what: str, sizes: list[int], rival: str, at: Callable[[argparse.Namespace, int, str], Any]
) -> bool:
    """Measure both contestants at each size, and write the points. Whether there are any."""
    unit, table = LABELS[what][0], list[Json]()
    for size in sizes:
        print(f"\n{what}, {unit} = {size:,}", flush=True)
        found = take_turns(("mmclip", rival), args.rounds, partial(at, args, size))
        table += [{unit: size, "contestant": name, **medians(rounds)} for name, rounds in found.items()]
    about = f"{machine(args.threads)}, float32, D = {args.dim}, median of {args.rounds}"
    if table:
        write_csv(args.folder / f"{what}_growth.csv", about, table)
    return bool(table)


def draw(what: str, folder: Path) -> None:
    """folder/WHAT_growth.csv as a picture: time and memory, both axes logarithmic."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    unit, label = LABELS[what]
    about, table = read_csv(folder / f"{what}_growth.csv")
    names = list(dict.fromkeys(row["contestant"] for row in table))
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for axis, (key, title) in zip(axes, (("cpu", "CPU time, s"), ("mib", "peak memory, MiB")), strict=True):
        points = {n: [(int(r[unit]), max(float(r[key]), 1e-3)) for r in table if r["contestant"] == n] for n in names}
        for name, marker, colour in zip(names, "os", ("#0072B2", "#D55E00"), strict=False):
            axis.plot(*zip(*points[name], strict=True), marker=marker, color=colour, label=name)
        sizes = sorted({size for line in points.values() for size, _ in line})
        top = max(value for line in points.values() for _, value in line)
        for power, text, style in ((2, f"grows with {unit}²", "--"), (1, f"grows with {unit}", ":")):
            line = [1.6 * top * (size / sizes[-1]) ** power for size in sizes]
            axis.plot(sizes, line, style, color="#8b929a", linewidth=1, label=text)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axis.set_xlabel(label)
        axis.set_title(title, fontsize=11)
        axis.grid(color="#e3e6e9", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle(about, fontsize=9, color="#5d656e")
    figure.savefig(folder / f"{what}_growth.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


def main() -> int:
    args = parser().parse_args()
    wanted = args.what or list(LABELS)
    if unknown := [what for what in wanted if what not in LABELS]:
        refuse(f"{unknown[0]!r} has no curve here; valid: {', '.join(LABELS)}")
    for what in wanted:
        if not args.draw:
            if what == "loss":
                drawn = curve(args, what, args.batch_sizes, THEIRS, loss_at)
            else:
                drawn = curve(args, what, args.images, "clip-benchmark", retrieval_at)
            if not drawn:
                continue
        draw(what, args.folder)
        print(f"{args.folder / f'{what}_growth.png'}")
    return exit_code(True)


if __name__ == "__main__":
    sys.exit(main())
