"""How fast and in how much memory retrieval is evaluated, against clip-benchmark's own metric functions.

    python benchmarks/retrieval.py                  5,000 images x 25,000 captions, 512 numbers each: minutes
    python benchmarks/retrieval.py --large          20,000 x 100,000, 64 numbers each, mmclip alone
    python benchmarks/retrieval.py --images 500     a quick look

Both contestants get the same random embeddings, in which a caption is its image's vector plus noise. mmclip ranks by
all four scorings (cosine, dot, qnorm, dnorm) in both directions; clip-benchmark by cosine, in both directions, as its
zeroshot_retrieval.evaluate does once all is encoded: a dense score matrix, then batchify(recall_at_k) for each k.

Each measurement is a process of its own, and the contestants take turns, so that a busy machine slows both. Seconds are
of ranking and metrics, not of making the data, by the clock and by CPU time, which other programs disturb less. Memory
is the process's peak resident size (ru_maxrss) less what it was after the imports: it includes the embeddings. Medians
are compared; the last line is the ratio.

The numbers must agree too: success@k may differ in as many queries as are tied by cosine, since clip-benchmark breaks
ties by chance and mmclip against the model. The exit code is 1 where they do not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from harness import (
    MEASURED,
    Json,
    Parser,
    count,
    exit_code,
    machine,
    measured,
    medians,
    of_memory,
    peak_mib,
    row,
    settled_mib,
    share,
    spent,
    take_turns,
    write_csv,
)

CONTESTANTS = ("mmclip", "clip-benchmark")
THEIR_BATCH = 64  # clip-benchmark's default --batch_size, which is how many queries it looks at together
LARGE = {"images": 20_000, "captions": 5, "dim": 64}
SMALLER = {"images": 5_000, "captions": 5, "dim": 64}  # with LARGE, two points of a line
HUGE = (100_000, 500_000)  # images and captions to which memory is extrapolated


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__)
    p.add_argument("--images", type=count, default=5_000, metavar="N")
    p.add_argument("--captions", type=count, default=5, metavar="N", help="of each image (default: 5)")
    p.add_argument("--dim", type=count, default=512, metavar="D", help="numbers of an embedding (default: 512)")
    p.add_argument(
        "--noise", type=float, default=4.0, help="caption = image + NOISE * random (default: 4; more is harder)"
    )
    p.add_argument("--k", type=count, nargs="+", default=[1, 5, 10], help="of success@k (default: 1 5 10)")
    p.add_argument("--rounds", type=count, default=3, help="measurements of each contestant (default: 3)")
    p.add_argument("--threads", type=count, default=1, help="of each contestant (default: 1)")
    p.add_argument("--block-bytes", type=count, metavar="B", help="mmclip's working memory (default: mmclip's own)")
    p.add_argument(
        "--lists",
        type=partial(count, least=0),
        default=0,
        metavar="K",
        help="let mmclip also list the best K by cosine",
    )
    p.add_argument(
        "--large",
        action="store_true",
        help="20,000 x 100,000 at D = 64, mmclip alone, once; memory extrapolated to 100,000 x 500,000: embeddings and "
        "results grow with images + captions and the rest is constant, so a line through two measured sizes says it",
    )
    p.add_argument("--csv", type=Path, metavar="FILE", help="write the medians here, too")
    p.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)  # what a process of its own is told
    return p


def embeddings(images: int, captions: int, dim: int, noise: float) -> tuple[Any, Any]:
    """(image [N, D], text [N * captions, D]), made in place so that making them is no peak."""
    import torch

    gen = torch.Generator().manual_seed(0)
    image = torch.randn(images, dim, generator=gen)
    text = torch.randn(images, captions, dim, generator=gen)
    text.mul_(noise).add_(image[:, None])
    return image, text.view(-1, dim)


def measure_mmclip(args: argparse.Namespace) -> Json:
    import numpy as np
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from mmclip import metrics
    from mmclip.retrieval.ranking import BLOCK_BYTES, rank_both
    from mmclip.roles import CLIP_DIRECTIONS, FIXED_NORMALIZATIONS

    imported = settled_mib()
    image, text = embeddings(args.images, args.captions, args.dim, args.noise)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not args.bar) as bar:
        task = bar.add_task(f"{len(image)} x {len(text)}")
        start = time.perf_counter(), time.process_time()
        caption = np.arange(len(text))
        ways = rank_both(
            image,
            text,
            np.column_stack([caption // args.captions, caption]),
            {n.value: n.exponents for n in FIXED_NORMALIZATIONS},
            top_k={"cosine": args.lists},
            block_bytes=args.block_bytes or BLOCK_BYTES,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        rates = [f"success@{k}" for k in args.k]
        hits: Json = {}
        for direction, rankings in zip(CLIP_DIRECTIONS, ways, strict=True):
            for name, ranking in rankings.items():
                values = metrics.per_query(ranking.ranks, ranking.offsets, rates=rates)
                hits[f"{direction.value} {name}"] = [int(values[rate].sum()) for rate in rates]
        took = spent(*start)
    tied = {d.value: w["cosine"].n_tied for d, w in zip(CLIP_DIRECTIONS, ways, strict=True)}
    return {**took, "mib": peak_mib() - imported, "hits": hits, "tied": tied}


def measure_clip_benchmark(args: argparse.Namespace) -> Json:
    import torch
    from clip_benchmark.metrics.zeroshot_retrieval import batchify, recall_at_k

    imported = settled_mib()
    image, text = embeddings(args.images, args.captions, args.dim, args.noise)
    start = time.perf_counter(), time.process_time()
    image, text = (torch.nn.functional.normalize(x, dim=-1) for x in (image, text))
    scores = text @ image.t()
    positive = torch.zeros_like(scores, dtype=torch.bool)
    positive[torch.arange(len(scores)), torch.arange(len(scores)) // args.captions] = True
    hits: Json = {"t2i cosine": [], "i2t cosine": []}
    for k in args.k:
        for name, s, p in (("t2i cosine", scores, positive), ("i2t cosine", scores.T, positive.T)):
            recall = batchify(recall_at_k, s, p, THEIR_BATCH, "cpu", k=k)
            hits[name].append(int((recall > 0).sum()))
    return {**spent(*start), "mib": peak_mib() - imported, "hits": hits}


def told(args: argparse.Namespace, contestant: str, bar: bool = False) -> Json | None:
    """What a process of its own finds; None where it does not fit into memory."""
    names = ("images", "captions", "dim", "noise", "k", "threads", "block_bytes", "lists")
    return measured(
        __file__, {**{n: getattr(args, n) for n in names}, "contestant": contestant, "bar": bar}, contestant
    )


def compete(args: argparse.Namespace) -> int:
    """Take turns; print medians, agreement and, last, the ratio. The exit code."""
    n_texts = args.images * args.captions
    about = f"{machine(args.threads)}, D = {args.dim}, median of {args.rounds}"
    print(f"{args.images} images x {n_texts} captions; {about}")
    print("mmclip: four scorings, both directions; clip-benchmark: cosine, both directions", flush=True)
    found = take_turns(CONTESTANTS, args.rounds, lambda name: told(args, name))
    of = {name: medians(rounds) for name, rounds in found.items()}
    if set(found) != set(CONTESTANTS):
        for name, now in of.items():
            print(row(f"{name}, median of {args.rounds}", now))
        return exit_code(False)
    ours, theirs = (found[name][0] for name in CONTESTANTS)
    agree = True
    for direction, n in (("i2t", args.images), ("t2i", n_texts)):
        a, b, tied = ours["hits"][f"{direction} cosine"], theirs["hits"][f"{direction} cosine"], ours["tied"][direction]
        rates = ", ".join(f"@{k} {x / n:.4f} | {y / n:.4f}" for k, x, y in zip(args.k, a, b, strict=True))
        worst = max(abs(x - y) for x, y in zip(a, b, strict=True))
        agree &= worst <= tied
        print(f"success {direction}, mmclip | clip-benchmark: {rates}; differ in {worst} of {n} queries, {tied} tied")
    for name, now in of.items():
        print(row(f"{name}, median of {args.rounds}", now))
    if args.csv:
        sizes = {"images": args.images, "captions": n_texts}
        write_csv(args.csv, about, [{**sizes, "contestant": name, **now} for name, now in of.items()])
    print("the numbers agree" if agree else "THE NUMBERS DO NOT AGREE")
    ours, theirs = of["mmclip"], of["clip-benchmark"]
    wall, cpu = (share(theirs[what], ours[what]) for what in MEASURED[:2])
    print(f"ratio: {wall:.1f} times as fast ({cpu:.1f} by CPU time), {of_memory(ours['mib'], theirs['mib'])}")
    return 0 if agree else 1


def large(args: argparse.Namespace) -> int:
    """mmclip alone, at two sizes; memory extrapolated along the line through them."""
    points = []
    for size in (SMALLER, LARGE):
        now = argparse.Namespace(**{**vars(args), **size})
        rows = now.images * (1 + now.captions)
        print(f"{now.images} images x {now.images * now.captions} captions, D = {now.dim}, {now.threads} thread(s)")
        found = told(now, "mmclip", bar=True)
        if found is None:
            return exit_code(False)
        print(row("mmclip", found), flush=True)
        points.append((rows, found))
    (n1, small), (n2, big) = points
    slope = (big["mib"] - small["mib"]) / (n2 - n1)
    mib = big["mib"] + slope * (sum(HUGE) - n2)
    wide = sum(HUGE) * (512 - LARGE["dim"]) * 4 / 2**20
    print(
        f"{HUGE[0]} x {HUGE[1]}, extrapolated: {mib:.0f} MiB at D = {LARGE['dim']} (a line through the two sizes, "
        f"{1024 * slope:.2f} KiB a row of either side), {mib + wide:.0f} MiB at D = 512 (longer rows of float32)"
    )
    print(f"{LARGE['images']} x {LARGE['images'] * LARGE['captions']}: {big['seconds']:.0f} s, {big['mib']:.0f} MiB")
    return 0


def main() -> int:
    args = parser().parse_args()
    if args.measure:
        import torch

        spec = argparse.Namespace(**args.measure)
        torch.set_num_threads(spec.threads)
        print(json.dumps((measure_mmclip if spec.contestant == "mmclip" else measure_clip_benchmark)(spec)))
        return 0
    return large(args) if args.large else compete(args)


if __name__ == "__main__":
    sys.exit(main())
