"""How fast and in how much memory retrieval is evaluated, against clip-benchmark's own metric functions.

    python benchmarks/retrieval.py                  5,000 images x 25,000 captions, 512 numbers each: minutes
    python benchmarks/retrieval.py --images 500     a quick look
    python benchmarks/retrieval.py --images 250 500 1000 2000 4000 --plot docs/performance/retrieval_growth.png

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
from functools import partial
from pathlib import Path
from typing import Any

import harness
from harness import MEASURED, Json, count, medians, row, settled_mib, share, spent

SPEC = ("dim", "captions", "noise", "k", "threads", "block_bytes", "lists")  # flags that a contestant needs
THEIR_BATCH = 64  # clip-benchmark's default --batch_size: queries whose recall it computes together


def parser() -> harness.Parser:
    p = harness.Parser(__doc__)
    p.add_argument("--images", type=count, nargs="+", default=[5_000], metavar="N", help="[5000]")
    p.add_argument("--captions", type=count, default=5, metavar="N", help="of each image [5]")
    p.add_argument("--dim", type=count, default=512, metavar="D", help="numbers of an embedding [512]")
    p.add_argument("--noise", type=float, default=4.0, help="caption = image + NOISE * random; more is harder [4]")
    p.add_argument("--k", type=count, nargs="+", default=[1, 5, 10], help="of success@k [1 5 10]")
    p.add_argument("--block-bytes", type=count, metavar="B", help="mmclip's working memory [mmclip's own]")
    p.add_argument("--lists", type=partial(count, least=0), default=0, metavar="K", help="list the best K, too")
    p.add_argument("--plot", type=Path, metavar="FILE", help="picture time and memory against N")
    return p


def embeddings(spec: Json) -> tuple[Any, Any]:
    """(image [N, D], text [N * captions, D]), made in place so that making them is no peak."""
    import torch

    gen = torch.Generator().manual_seed(0)
    image = torch.randn(spec["images"], spec["dim"], generator=gen)
    text = torch.randn(spec["images"], spec["captions"], spec["dim"], generator=gen)
    text.mul_(spec["noise"]).add_(image[:, None])
    return image, text.view(-1, spec["dim"])


def measure_mmclip(spec: Json) -> Json:
    import numpy as np

    from mmclip import metrics
    from mmclip.retrieval.ranking import BLOCK_BYTES, rank_both
    from mmclip.roles import CLIP_DIRECTIONS, FIXED_NORMALIZATIONS

    imported = settled_mib()
    image, text = embeddings(spec)
    start = harness.clocks()
    caption = np.arange(len(text))
    ways = rank_both(
        image,
        text,
        np.column_stack([caption // spec["captions"], caption]),
        {n.value: n.exponents for n in FIXED_NORMALIZATIONS},
        top_k={"cosine": spec["lists"]},
        block_bytes=spec["block_bytes"] or BLOCK_BYTES,
    )
    rates = [f"success@{k}" for k in spec["k"]]
    hits: Json = {}
    for direction, rankings in zip(CLIP_DIRECTIONS, ways, strict=True):
        for name, ranking in rankings.items():
            values = metrics.per_query(ranking.ranks, ranking.offsets, rates=rates)
            hits[f"{direction.value} {name}"] = [int(values[rate].sum()) for rate in rates]
    took = spent(start)
    tied = {d.value: w["cosine"].n_tied for d, w in zip(CLIP_DIRECTIONS, ways, strict=True)}
    return {**took, "mib": harness.peak_mib() - imported, "hits": hits, "tied": tied}


def measure_clip_benchmark(spec: Json) -> Json:
    import torch
    from clip_benchmark.metrics.zeroshot_retrieval import batchify, recall_at_k

    imported = settled_mib()
    image, text = embeddings(spec)
    start = harness.clocks()
    image, text = (torch.nn.functional.normalize(x, dim=-1) for x in (image, text))
    scores = text @ image.t()
    positive = torch.zeros_like(scores, dtype=torch.bool)
    positive[torch.arange(len(scores)), torch.arange(len(scores)) // spec["captions"]] = True
    hits: Json = {"t2i cosine": [], "i2t cosine": []}
    for k in spec["k"]:
        for name, s, p in (("t2i cosine", scores, positive), ("i2t cosine", scores.T, positive.T)):
            recall = batchify(recall_at_k, s, p, THEIR_BATCH, "cpu", k=k)
            hits[name].append(int((recall > 0).sum()))
    return {**spent(start), "mib": harness.peak_mib() - imported, "hits": hits}


def agree(args: argparse.Namespace, images: int, ours: Json, theirs: Json) -> bool:
    """Whether success@k differs in no more queries than are tied."""
    good = True
    for direction, n in (("i2t", images), ("t2i", images * args.captions)):
        a, b, tied = ours["hits"][f"{direction} cosine"], theirs["hits"][f"{direction} cosine"], ours["tied"][direction]
        rates = ", ".join(f"@{k} {x / n:.4f} | {y / n:.4f}" for k, x, y in zip(args.k, a, b, strict=True))
        worst = max(abs(x - y) for x, y in zip(a, b, strict=True))
        good &= worst <= tied
        print(f"success {direction}, mmclip | clip-benchmark: {rates}; differ in {worst} of {n} queries, {tied} tied")
    print("the numbers agree" if good else "THE NUMBERS DO NOT AGREE")
    return good


CONTESTANTS = {"mmclip": measure_mmclip, "clip-benchmark": measure_clip_benchmark}


def compete(args: argparse.Namespace, _: Path) -> int:
    """Compare at each size; the exit code."""
    about = f"{harness.machine(args.threads)}, D = {args.dim}, median of {args.rounds}"
    print(f"{about}\nmmclip: four scorings, both directions; clip-benchmark: cosine, both directions", flush=True)
    good, table, last = True, list[Json](), list[str]()
    for images in args.images:
        print(f"\n{images} images x {images * args.captions} captions")
        spec = {**{name: getattr(args, name) for name in SPEC}, "images": images}
        found = harness.take_turns(list(CONTESTANTS), args.rounds, harness.by_name(__file__, spec))
        of = {name: medians(rounds) for name, rounds in found.items()}
        for name, now in of.items():
            print(row(f"{name}, median of {args.rounds}", now))
            table.append({"images": images, "captions": images * args.captions, "contestant": name, **now})
        if len(of) == len(CONTESTANTS):
            good &= agree(args, images, *(found[name][0] for name in CONTESTANTS))
            wall, cpu = (share(of["clip-benchmark"][what], of["mmclip"][what]) for what in MEASURED[:2])
            memory = harness.of_memory(of["mmclip"]["mib"], of["clip-benchmark"]["mib"])
            last.append(f"N = {images:,}, ratio: {wall:.1f} times as fast ({cpu:.1f} by CPU time), {memory}")
    if args.plot and not harness.FAILED:
        harness.draw(args.plot, about, table, ("images", "images, each with its captions"), list(CONTESTANTS))
    return harness.finish(args, about, table, last, good)


if __name__ == "__main__":
    parser().run(lambda spec: CONTESTANTS[spec["name"]](spec), compete)
