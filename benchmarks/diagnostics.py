"""Time and memory of the diagnostics, against the plain dense form of the same numbers, and how both grow.

    python benchmarks/diagnostics.py                  1,000 to 10,000 queries and as many documents, D = 64: minutes
    python benchmarks/diagnostics.py --sizes 1000     a quick look

    hubness         the 10 best by cosine of every query, and the skewness of how often each is one
                    dense: the score matrix, topk
    d of norms      Cohen's d among the 10 best with its bootstrap interval, from moments
                    dense: every resample's norms, gathered
    anisotropy      mean cosine of two vectors, from the norm of a sum; dense: the mean over the matrix of cosines
    effective rank  from the D x D scatter; dense: the singular values of the centred vectors
    row entropy     of each query's softmax over all documents, in blocks; dense: the matrix
    Fisher query, Fisher document    the mean D x D matrix of a role from matrix products
                    dense: every item's own D x D matrix, one after the other, up to 2,000 items

Each measurement is a process of its own, and the two forms take turns; seconds by the clock and by CPU time. Memory is
the peak resident size (ru_maxrss) less what it was once the vectors were made. The numbers must agree, or the exit code
is 1. "growth" is the exponent of N between the two largest sizes by CPU time: 1 where twice the items take twice as
long.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

import harness
from harness import MEASURED, Json, count, medians, row, share

FORMS = ("mmclip", "dense")
# measure -> (how far apart the two forms' numbers may be, as a fraction; the most items that the dense form is given)
MEASURES: dict[str, tuple[float, int | None]] = {
    "hubness": (1e-3, None),  # float32 scores of the dense form may exchange a 10th and an 11th
    "d of norms": (1e-9, None),
    "anisotropy": (1e-3, None),  # the dense mean is one of float32 cosines near 0
    "effective rank": (1e-4, None),
    "row entropy": (1e-5, None),
    "Fisher query": (1e-9, 2000),
    "Fisher document": (1e-9, 2000),
}
K, RESAMPLES = 10, 1000


def parser() -> harness.Parser:
    p, sizes = harness.Parser(__doc__), [1000, 2000, 5000, 10_000]
    p.add_argument("--sizes", type=partial(count, least=2), nargs="+", default=sizes, metavar="N", help="[to 10,000]")
    p.add_argument("--dim", type=count, default=64, metavar="D", help="[64]")
    p.add_argument("--measures", nargs="+", choices=list(MEASURES), default=list(MEASURES), help="[all]")
    return p


def vectors(n: int, dim: int) -> tuple[Any, Any]:
    """(query, document), each [N, D], of varying norms; a document is its query plus noise."""
    import torch

    gen = torch.Generator().manual_seed(0)
    query = torch.randn(n, dim, generator=gen)
    document = torch.randn(n, dim, generator=gen).add_(query)
    for side in (query, document):
        side.add_(0.3).mul_(torch.randn(n, 1, generator=gen).mul_(0.3).exp_())
    return query, document


def mmclip_form(name: str, q: Any, d: Any, exponents: Any, alpha: float) -> list[float]:
    """The numbers as the package takes them."""
    found: Any  # None does not occur: vectors and norms vary
    import numpy as np
    import torch

    from mmclip.metrics import fisher, geometry
    from mmclip.metrics import magnitude as diagnostics
    from mmclip.retrieval.ranking import rank
    from mmclip.roles import Normalization
    from mmclip.similarity import magnitude

    if name == "hubness":
        pairs = torch.arange(len(q)).repeat(2, 1).T
        cosine = {"cosine": Normalization.COSINE.exponents}
        ids = rank(q, d, pairs, cosine, top_k={"cosine": K})["cosine"].top_ids
        found, _ = geometry.hubness(ids, len(d))
        return [found["skewness"]]
    if name == "d of norms":
        ids, relevant = best(len(d))
        x, level = diagnostics.centred(magnitude(d).numpy())
        moments = diagnostics.split_moments(x[ids], relevant)
        how: Json = {"what": "the best", "resamples": RESAMPLES, "seed": 0}
        found, _ = diagnostics.effect(moments, level, np.arange(len(ids)), **how)
        return [found["value"], *found["ci"]]
    if name == "anisotropy":
        found, _ = geometry.anisotropy(d)
        return [found]
    if name == "effective rank":
        found, _ = geometry.effective_rank(d)
        return [found["participation"], found["entropy"]]
    if name == "row entropy":
        return [float(geometry.row_entropy(q, d, exponents, alpha).mean())]
    matrix = (fisher.query_fisher if name == "Fisher query" else fisher.document_fisher)(q, d, exponents, alpha)
    return [float(matrix.trace()), float(matrix.norm())]


def dense_form(name: str, q: Any, d: Any, exponents: Any, alpha: float) -> list[float]:
    """The same numbers as their definitions read."""
    import numpy as np
    import torch
    from scipy.stats import skew

    from mmclip.metrics import cluster_counts

    unit = torch.nn.functional.normalize
    if name == "hubness":
        ids = (unit(q) @ unit(d).T).topk(K).indices
        return [float(skew(np.bincount(ids.numpy().ravel(), minlength=len(d))))]
    if name == "d of norms":
        ids, relevant = best(len(d))
        norms = d.norm(dim=1).double().numpy()[ids]

        def effect(queries: Any) -> float:
            a, b = (norms[queries][side[queries]] for side in (relevant, ~relevant))
            within = (len(a) - 1) * a.var(ddof=1) + (len(b) - 1) * b.var(ddof=1)
            return float((a.mean() - b.mean()) / math.sqrt(within / (len(a) + len(b) - 2)))

        chunks = cluster_counts(len(ids), resamples=RESAMPLES, seed=0)  # the package's draws
        samples = [effect(np.repeat(np.arange(len(ids)), times.astype(int))) for chunk in chunks for times in chunk]
        return [effect(np.arange(len(ids))), *np.quantile(samples, [0.025, 0.975]).tolist()]
    if name == "anisotropy":
        cosines = unit(d) @ unit(d).T
        return [float(cosines[~torch.eye(len(d), dtype=torch.bool)].mean())]
    if name == "effective rank":
        s = torch.linalg.svdvals((d - d.mean(0)).double())
        p = s / s.sum()
        return [float(s.square().sum() ** 2 / s.pow(4).sum()), float(torch.special.entr(p).sum().exp())]
    gammas = [float(g) for g in exponents]
    if name.startswith("Fisher"):
        q, d = q.double(), d.double()
    norms_q, norms_d = (x.norm(dim=1, keepdim=True) for x in (q, d))
    queries, documents = q / norms_q ** gammas[0], d / norms_d ** gammas[1]
    pi = (alpha * queries @ documents.T).softmax(dim=1)
    if name == "row entropy":
        return [float(torch.special.entr(pi).sum(1).mean())]
    total = torch.zeros(q.shape[1], q.shape[1], dtype=torch.float64)
    of_query = name == "Fisher query"
    gamma, own = (gammas[0], q) if of_query else (gammas[1], d)
    for i, x in enumerate(own):
        if of_query:
            mean = pi[i] @ documents
            within = (documents * pi[i, :, None]).T @ documents - torch.outer(mean, mean)
        else:
            within = (queries * (pi[:, i] * (1 - pi[:, i]))[:, None]).T @ queries
        project = torch.eye(len(x), dtype=torch.float64) - gamma * torch.outer(x, x) / (x @ x)
        total += project @ within @ project * (x @ x) ** -gamma
    total *= alpha**2 / (len(q) if of_query else len(q) * len(d))
    return [float(total.trace()), float(total.norm())]


def best(n: int) -> tuple[Any, Any]:
    """(ids, relevance) [N, K] of lists made up: the measure's time is not that of ranking."""
    import numpy as np

    rng = np.random.default_rng(0)
    return rng.integers(n, size=(n, K)), rng.random((n, K)) < 0.1


def measure(spec: Json) -> Json:
    import torch

    from mmclip.roles import SCALE_INIT, Exponents
    from mmclip.similarity import mean_norm_factor

    exponents = Exponents(0.5, 0.5)
    form = mmclip_form if spec["name"] == "mmclip" else dense_form
    with torch.no_grad():
        form(spec["measure"], *vectors(100, spec["dim"]), exponents, 1.0)  # imports and caches
        q, d = vectors(spec["size"], spec["dim"])
        alpha = SCALE_INIT / mean_norm_factor(q, d, exponents)
        before, start = harness.settled_mib(), harness.clocks()
        values = form(spec["measure"], q, d, exponents, alpha)
        took = harness.spent(start)
    return {**took, "mib": harness.peak_mib() - before, "values": values}


def compete(args: argparse.Namespace, _: Path) -> int:
    """All measures at all sizes; the exit code."""
    about = f"{harness.machine(args.threads)}, D = {args.dim}, median of {args.rounds}"
    print(about, flush=True)
    good, table, last = True, list[Json](), list[str]()
    for name in args.measures:
        tolerance, limit = MEASURES[name]
        cpu: list[tuple[int, float]] = []
        ratio = grows = ""
        for size in sorted(args.sizes):
            print(f"\n{name}, N = {size:,}", flush=True)
            spec = {"measure": name, "size": size, "dim": args.dim, "threads": args.threads}
            forms = FORMS if limit is None or size <= limit else FORMS[:1]
            found = harness.take_turns(forms, args.rounds, harness.by_name(__file__, spec))
            of = {form: medians(rounds) for form, rounds in found.items()}
            for form, now in of.items():
                print(row(f"{form}, median of {args.rounds}", now))
                table.append({"measure": name, "N": size, "form": form, **now})
            if "mmclip" in of:
                cpu.append((size, of["mmclip"]["cpu"]))
            if set(of) == set(FORMS):
                ours, dense = (found[form][0]["values"] for form in FORMS)
                apart = max(abs(u - v) / abs(v) for u, v in zip(ours, dense, strict=True))
                good &= apart <= tolerance
                print(f"numbers {apart:.1e} apart: {'they agree' if apart <= tolerance else 'THEY DO NOT AGREE'}")
                wall, by_cpu = (share(of["dense"][what], of["mmclip"][what]) for what in MEASURED[:2])
                memory = harness.of_memory(of["mmclip"]["mib"], of["dense"]["mib"])
                ratio = (
                    f"at N = {size:,} {wall:.1f} times as fast as the dense form ({by_cpu:.1f} by CPU time), {memory}"
                )
        if len(cpu) > 1:
            (n1, t1), (n2, t2) = cpu[-2:]
            grows = f"; growth N^{math.log(t2 / t1) / math.log(n2 / n1):.1f} from {n1:,} to {n2:,}"
        last.append(f"{name}: {ratio}{grows}")
    return harness.finish(args, about, table, last, good)


if __name__ == "__main__":
    parser().run(measure, compete)
