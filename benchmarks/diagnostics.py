"""Time and memory of the diagnostics, against the plain dense form of the same numbers, and how both grow.

    python benchmarks/diagnostics.py                  1,000 to 10,000 queries and as many documents, D = 64: minutes
    python benchmarks/diagnostics.py --sizes 1000     a quick look

    hubness         the 10 best by cosine of every query, and the skewness of how often each is one
                    dense: the score matrix, topk
    d of lengths    Cohen's d among the 10 best with its bootstrap interval, from moments
                    dense: every resample's lengths, gathered
    anisotropy      mean cosine of two vectors, from the length of a sum; dense: the mean over the matrix of cosines
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
import json
import math
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

FORMS = ("mmclip", "dense")
# measure -> (how far apart the two forms' numbers may be, as a fraction; the most items that the dense form is given)
MEASURES: dict[str, tuple[float, int | None]] = {
    "hubness": (1e-3, None),  # float32 scores of the dense form may exchange a 10th and an 11th
    "d of lengths": (1e-9, None),
    "anisotropy": (1e-3, None),  # the dense mean is one of float32 cosines near 0
    "effective rank": (1e-4, None),
    "row entropy": (1e-5, None),
    "Fisher query": (1e-9, 2000),
    "Fisher document": (1e-9, 2000),
}
K, RESAMPLES = 10, 1000


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__)
    p.add_argument(
        "--sizes",
        type=partial(count, least=2),
        nargs="+",
        default=[1000, 2000, 5000, 10_000],
        metavar="N",
        help="[to 10,000]",
    )
    p.add_argument("--dim", type=count, default=64, metavar="D", help="[64]")
    p.add_argument("--rounds", type=count, default=3, help="measurements of each form [3]")
    p.add_argument("--threads", type=count, default=1, help="of each form [1]")
    p.add_argument("--measures", nargs="+", choices=list(MEASURES), default=list(MEASURES), help="[all]")
    p.add_argument("--csv", type=Path, metavar="FILE", help="write the medians here, too")
    p.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    return p


def vectors(n: int, dim: int) -> tuple[Any, Any]:
    """(query, document), each [N, D], of many lengths; a document is its query and noise."""
    import torch

    gen = torch.Generator().manual_seed(0)
    query = torch.randn(n, dim, generator=gen)
    document = torch.randn(n, dim, generator=gen).add_(query)
    for side in (query, document):
        side.add_(0.3).mul_(torch.randn(n, 1, generator=gen).mul_(0.3).exp_())
    return query, document


def mmclip_form(name: str, q: Any, d: Any, exponents: Any, alpha: float) -> list[float]:
    """The numbers as the package takes them."""
    found: Any  # None does not occur: vectors and lengths vary
    import numpy as np
    import torch

    from mmclip.metrics import fisher, geometry
    from mmclip.metrics import magnitude as diagnostics
    from mmclip.retrieval.ranking import rank
    from mmclip.similarity import Normalization, magnitude

    if name == "hubness":
        pairs = torch.arange(len(q)).repeat(2, 1).T
        cosine = {"cosine": Normalization.COSINE.exponents}
        ids = rank(q, d, pairs, cosine, top_k={"cosine": K})["cosine"].top_ids
        found, _ = geometry.hubness(ids, len(d))
        return [found["skewness"]]
    if name == "d of lengths":
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
    matrix = fisher.query_fisher if name == "Fisher query" else fisher.document_fisher
    return of_matrix(matrix(q, d, exponents, alpha))


def dense_form(name: str, q: Any, d: Any, exponents: Any, alpha: float) -> list[float]:
    """The same numbers as their definitions read."""
    import numpy as np
    import torch
    from scipy.stats import skew

    unit = torch.nn.functional.normalize
    if name == "hubness":
        ids = (unit(q) @ unit(d).T).topk(K).indices
        return [float(skew(np.bincount(ids.numpy().ravel(), minlength=len(d))))]
    if name == "d of lengths":
        ids, relevant = best(len(d))
        lengths = d.norm(dim=1).double().numpy()[ids]

        def effect(queries: Any) -> float:
            a, b = (lengths[queries][side[queries]] for side in (relevant, ~relevant))
            within = (len(a) - 1) * a.var(ddof=1) + (len(b) - 1) * b.var(ddof=1)
            return float((a.mean() - b.mean()) / math.sqrt(within / (len(a) + len(b) - 2)))

        samples = [effect(np.repeat(np.arange(len(ids)), times)) for times in draws(len(ids))]
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
    lengths_q, lengths_d = (x.norm(dim=1, keepdim=True) for x in (q, d))
    asking, entering = q / lengths_q ** gammas[0], d / lengths_d ** gammas[1]
    pi = (alpha * asking @ entering.T).softmax(dim=1)
    if name == "row entropy":
        return [float(torch.special.entr(pi).sum(1).mean())]
    total = torch.zeros(q.shape[1], q.shape[1], dtype=torch.float64)
    of_query = name == "Fisher query"
    gamma, own = (gammas[0], q) if of_query else (gammas[1], d)
    for i, x in enumerate(own):
        if of_query:
            mean = pi[i] @ entering
            within = (entering * pi[i, :, None]).T @ entering - torch.outer(mean, mean)
        else:
            within = (asking * (pi[:, i] * (1 - pi[:, i]))[:, None]).T @ asking
        project = torch.eye(len(x), dtype=torch.float64) - gamma * torch.outer(x, x) / (x @ x)
        total += project @ within @ project * (x @ x) ** -gamma
    return of_matrix(alpha**2 * total / (len(q) if of_query else len(q) * len(d)))


def of_matrix(matrix: Any) -> list[float]:
    """Trace and Frobenius norm of a Fisher matrix."""
    return [float(matrix.trace()), float(matrix.norm())]


def best(n: int) -> tuple[Any, Any]:
    """(ids, relevance) [N, K] of lists made up: the measure's time is not that of ranking."""
    import numpy as np

    rng = np.random.default_rng(0)
    return rng.integers(n, size=(n, K)), rng.random((n, K)) < 0.1


def draws(n: int) -> Any:
    """How often each query is drawn in each resample, as the package draws them."""
    from mmclip.metrics import cluster_counts

    return (times.astype(int) for chunk in cluster_counts(n, resamples=RESAMPLES, seed=0) for times in chunk)


def measure(spec: Json) -> Json:
    import torch

    from mmclip.similarity import SCALE_INIT, Exponents, mean_norm_factor

    torch.set_num_threads(spec["threads"])
    exponents = Exponents(0.5, 0.5)
    form = mmclip_form if spec["form"] == "mmclip" else dense_form
    with torch.no_grad():
        form(spec["name"], *vectors(100, spec["dim"]), exponents, 1.0)  # imports, and what is made once
        q, d = vectors(spec["size"], spec["dim"])
        alpha = SCALE_INIT / mean_norm_factor(q, d, exponents)
        before, start = settled_mib(), (time.perf_counter(), time.process_time())
        values = form(spec["name"], q, d, exponents, alpha)
        took = spent(*start)
    return {**took, "mib": peak_mib() - before, "values": values}


def form_of(spec: Json, form: str) -> Json | None:
    return measured(__file__, {**spec, "form": form}, form)


def compare(args: argparse.Namespace) -> int:
    """All measures at all sizes. The exit code."""
    about = f"{machine(args.threads)}, D = {args.dim}, median of {args.rounds}"
    print(about, flush=True)
    good, table, last = True, list[Json](), list[str]()
    for name in args.measures:
        tolerance, limit = MEASURES[name]
        cpu: list[tuple[int, float]] = []
        ratio = ""
        for size in sorted(args.sizes):
            print(f"\n{name}, N = {size:,}", flush=True)
            spec = {"name": name, "size": size, "dim": args.dim, "threads": args.threads}
            forms = FORMS if limit is None or size <= limit else FORMS[:1]
            found = take_turns(forms, args.rounds, partial(form_of, spec), shown=False)
            of = {form: medians(rounds) for form, rounds in found.items()}
            for form, now in of.items():
                print(row(form, now))
                table.append({"measure": name, "N": size, "form": form, **now})
            if "mmclip" in of:
                cpu.append((size, of["mmclip"]["cpu"]))
            if set(of) == set(FORMS):
                a, b = (found[form][0]["values"] for form in FORMS)
                apart = max(abs(u - v) / abs(v) for u, v in zip(a, b, strict=True))
                good &= apart <= tolerance
                print(f"numbers {apart:.1e} apart: {'they agree' if apart <= tolerance else 'THEY DO NOT AGREE'}")
                wall, cpu_time = (share(of["dense"][what], of["mmclip"][what]) for what in MEASURED[:2])
                ratio = (
                    f"at N = {size:,} {wall:.1f} times as fast as the dense form ({cpu_time:.1f} by CPU time), "
                    + of_memory(of["mmclip"]["mib"], of["dense"]["mib"])
                )
        grows = ""
        if len(cpu) > 1:
            (n1, t1), (n2, t2) = cpu[-2:]
            grows = f"; growth N^{math.log(t2 / t1) / math.log(n2 / n1):.1f} from {n1:,} to {n2:,}"
        last.append(f"{name}: {ratio}{grows}")
    if args.csv and table:
        write_csv(args.csv, about, table)
    print("\n" + "\n".join(last))
    return exit_code(good)


def main() -> int:
    args = parser().parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return 0
    return compare(args)


if __name__ == "__main__":
    sys.exit(main())
