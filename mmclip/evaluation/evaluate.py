"""Raw embeddings -> results: every direction and scoring, ranks and intervals, norms, diagnostics.

:func:`evaluate` composes retrieval (ranks), metrics (rates and intervals) and diagnostics (norms) over evaluation sets
and has no formula of its own. The values of every single query, which paired comparisons need, go into per_query.npz.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from math import isfinite
from typing import Any

import numpy as np

from mmclip import metrics as rates
from mmclip.console import progress_bar
from mmclip.data.image_text import skipped_line
from mmclip.embeddings.encode import EncodeOptions
from mmclip.errors import UserError, printable
from mmclip.evaluation.diagnostics import diagnose
from mmclip.evaluation.eval_set import UNITS, EvalSet, EvalSource, image_text_sets
from mmclip.evaluation.results import CORRECTED, NATIVE, REVERSED, Array, Json, Results
from mmclip.evaluation.zero_shot import ZeroShot
from mmclip.metrics import magnitude as magnitudes
from mmclip.metrics.bootstrap import LEVEL
from mmclip.metrics.rank import clamped
from mmclip.models.factory import ClipModel
from mmclip.models.metadata import native_exponents, trained_scales
from mmclip.retrieval import BLOCK_BYTES, Ranking, as_floats, norms, rank, rank_both
from mmclip.retrieval.hubness import QueryBank, document_offsets, reversed_exponents, with_offset, with_one
from mmclip.roles import CLIP_DIRECTIONS, FIXED_NORMALIZATIONS, SCALE_INIT, Direction, Exponents, Normalization
from mmclip.similarity import TINY, magnitude, mean_norm_factor

Progress = Callable[[str, int, int], None]  # (set's name, scores done, scores in all)
COUNTS = {"image": "n_images", "text": "n_texts", "document": "n_documents"}


def evaluate(
    sets: Sequence[EvalSet],
    exponents: Exponents,
    directions: Sequence[Direction],
    *,
    scales: Mapping[Direction, float | None] | None = None,
    bank: QueryBank | None = None,
    metrics: Sequence[str] = rates.RATES,
    fisher: bool = False,
    resamples: int = rates.RESAMPLES,
    seed: int = 0,
    depth: int = 0,
    metadata: Mapping[str, Any] | None = None,
    block_bytes: int = BLOCK_BYTES,
    progress: Progress | None = None,
) -> Results:
    """Evaluate sets of one model's embeddings, the main one first, in one direction or in both.

    Args:
        exponents: The trained ("native") exponents, by role, applied to the roles of each direction.
        scales: alpha of every trained direction, None where unknown: then calibrated on the main set. A direction whose
            opposite was trained is also ranked ``reversed`` and, with a ``bank``, ``corrected``.
        metrics: Names of the rates, as in mmclip.metrics.rank.
        fisher: Whether to add the Fisher matrices of the main set, by far the costliest diagnostic.
        resamples, seed: Of the bootstraps.
        depth: Documents to list of every query under every scoring, in ``Results.lists``; 0 for none.
        metadata: What only the caller knows, copied to results.json: {"model", "trained_with", "data", ...}.
        block_bytes: Working memory of the ranking beside the embeddings.
        progress: Called with (name of the set, scores done, scores in all).

    Raises:
        UserError: For exponents that are not finite; :class:`EvalSet` has checked the rest.

    >>> import torch
    >>> from mmclip.embeddings.files import Embeddings
    >>> x = torch.eye(3)
    >>> data = Embeddings(x, x, torch.tensor([[0, 0], [1, 1], [2, 2]]), list("abc"))
    >>> r = evaluate(image_text_sets(data), Exponents(1.0, 0.0), CLIP_DIRECTIONS, resamples=10)
    >>> r.json["retrieval"]["t2i"]["native"]["success@1"], r.json["data"]["n_images"]
    (1.0, 3)
    """
    native = as_floats(exponents)
    if not (isfinite(native.gamma_q) and isfinite(native.gamma_d)):
        raise UserError(f"native exponents {tuple(native)}: both must be finite; 0 keeps a norm, 1 divides it out")
    known = {d: float(alpha) for d, alpha in (scales or {}).items() if alpha is not None}
    alphas = dict(known)
    for direction in (scales or {}).keys() - known.keys():  # the effective scale is SCALE_INIT on the main set
        factors = mean_norm_factor(*direction.roles(sets[0].embeddings), native)
        alphas[direction] = SCALE_INIT / max(factors, TINY)
    scorings = {n.value: n.exponents for n in FIXED_NORMALIZATIONS} | {NATIVE: native}
    if any(d.opposite in alphas for d in directions):
        scorings[REVERSED] = reversed_exponents(native)
    top_k = dict.fromkeys(scorings if depth else ("cosine", NATIVE), max(depth, magnitudes.TOP_K))
    how: Any = {"resamples": resamples, "seed": seed}
    results, pools = Results({}, {}, sets[0].items), {}
    for data in sets:
        report = None if progress is None else partial(progress, data.name)
        by_direction = _ranked(data, directions, scorings, top_k=top_k, block_bytes=block_bytes, progress=report)
        if depth and data is sets[0]:
            results.lists = by_direction[0]
        section: Json = {"retrieval": {}, "magnitude": {}, "diagnostics": {}}
        counts, chance = {}, {}
        for direction, whole in zip(directions, by_direction, strict=True):
            rankings, name, trained = _shortened(whole, magnitudes.TOP_K), direction.value, direction.opposite
            about = None
            if trained not in alphas:
                rankings.pop(REVERSED, None)
            elif bank is not None:
                about = _correct(data, direction, rankings, bank, native, alphas[trained], block_bytes)
            numbers, arrays = _rates(data, direction, rankings, metrics, how)
            if about is not None:
                numbers[CORRECTED] |= about | {"alpha_source": "given" if trained in known else "calibrated"}
            norms, more = _norms(data, direction, rankings["cosine"], how)
            results.per_query |= {f"{data.name}/{key}": x for key, x in (arrays | more).items()}
            section["retrieval"][name], section["magnitude"][direction.document_side] = numbers, norms
            options = {"fisher": fisher and data is sets[0], **how}
            section["diagnostics"][name] = diagnose(data, direction, rankings, native, known.get(direction), **options)
            judged = rankings["cosine"]
            counts[name] = len(judged.queries)
            chance[name] = float(np.diff(judged.offsets).mean() / judged.n_documents)
        for side in data.embeddings.keys() - section["magnitude"].keys():  # never documents here
            row_norms = magnitude(data.embeddings[side].double()).cpu().numpy()
            results.per_query[f"{data.name}/lengths/{side}"] = row_norms.astype(np.float32)
            section["magnitude"][side] = magnitudes.summary(row_norms[rankings["cosine"].queries])
        section["magnitude"] = {side: section["magnitude"][side] for side in data.embeddings}
        sizes: Json = {COUNTS[side]: len(x) for side, x in data.embeddings.items() if side in COUNTS}
        sizes |= {"n_queries": counts, "chance": chance}  # chance: success@1 of a random ranking
        pools[data.name] = sizes | ({"fingerprint": data.fingerprint} if data.fingerprint else {}) | section
    # The main set's sections stand on top, the others' under "pools".
    first, other = pools.pop(sets[0].name), dict(metadata or {})
    sections = {name: first.pop(name) for name in ("retrieval", "magnitude", "diagnostics")}
    results.json |= {
        "model": other.pop("model", None),
        "trained_with": dict(other.pop("trained_with", {})),
        "data": {**other.pop("data", {}), **sets[0].data, **first},
        **other,
        "evaluation": {
            "native": native._asdict(),
            "bootstrap": {**how, "level": LEVEL, "clusters": directions[0].query_side},
            "topk": magnitudes.TOP_K,
            **({} if len(directions) > 1 else {"ir_measures": []}),  # rates with its digits: all are our own
        },
        **sections,
    }
    if len(directions) > 1:
        results.json["pools"] = pools
    return results


def quick_rates(
    data: EvalSet, exponents: Exponents, directions: Sequence[Direction], metrics: Sequence[str]
) -> dict[str, float]:
    """Validate during training: {"val_DIRECTION_METRIC_SCORING": mean} of the native scoring and of cosine."""
    scorings = {NATIVE: as_floats(exponents), "cosine": Normalization.COSINE.exponents}
    numbers: dict[str, float] = {}
    for direction, rankings in zip(directions, _ranked(data, directions, scorings), strict=True):
        values = {name: rates.per_query(r.ranks, r.offsets, r.gains, metrics) for name, r in rankings.items()}
        for metric, name in product(metrics, scorings):
            numbers[f"val_{direction.value}_{metric}_{name}"] = float(values[name][metric].mean())
    return numbers


def _ranked(
    data: EvalSet, directions: Sequence[Direction], scorings: Mapping[str, Exponents], **how: Any
) -> list[dict[str, Ranking]]:
    """scoring -> ranking of each direction, both from one matrix product."""
    direction = directions[0]
    arguments = (*direction.roles(data.embeddings), data.relevance(direction), scorings)
    if len(directions) == 1:
        return [rank(*arguments, excluded=data.excluded, **how)]
    return list(rank_both(*arguments, **how))


def _shortened(rankings: Mapping[str, Ranking], k: int) -> dict[str, Ranking]:
    """The rankings with lists of at most ``k``; scorings that rank alike still share one."""
    lists = ("top_ids", "top_relevant", "top_scores")
    cut = {id(r): replace(r, **{x: getattr(r, x)[:, :k] for x in lists}) for r in rankings.values()}
    return {name: cut[id(r)] for name, r in rankings.items()}


def _correct(
    data: EvalSet,
    direction: Direction,
    rankings: dict[str, Ranking],
    bank: QueryBank,
    native: Exponents,
    alpha: float,
    block_bytes: int,
) -> Json | None:
    """Add ``corrected`` to ``rankings`` and describe it; None without a bank for these candidates."""
    side, (query, candidate) = direction.query_side, direction.roles(data.embeddings)
    rows, offsets, size = bank.of(side, data.embeddings), bank.offsets.get(direction), bank.sizes.get(side, 0)
    if rows is not None:
        offsets, size = document_offsets(candidate, rows, native, alpha, block_bytes), len(rows)
    elif offsets is None or len(offsets) != len(candidate):  # a set with other candidates than the main one
        return None
    rankings |= rank(
        with_one(query, native),
        with_offset(candidate, offsets.to(candidate.device), native, alpha),
        data.relevance(direction),
        {CORRECTED: Normalization.DOT.exponents},
        block_bytes=block_bytes,
    )
    about: Json = {"bank": bank.name, "bank_size": size, "transductive": bank.transductive, "alpha": alpha}
    return about | ({"bank_overlap": bank.overlap[side]} if side in bank.overlap else {})


def _rates(
    data: EvalSet, direction: Direction, rankings: Mapping[str, Ranking], metrics: Sequence[str], how: Json
) -> tuple[Json, dict[str, Array]]:
    """Every scoring's rates with intervals, and arrays of single queries: rates, ranks and lists."""
    prefix, queries = direction.value, rankings["cosine"].queries
    clusters = data.clusters[direction.query_side][queries]
    arrays = {f"{prefix}/queries": queries, f"{prefix}/clusters": clusters}
    # Scorings that rank alike share one Ranking: one set of numbers, equal to the last digit of every interval.
    distinct = {id(r): r for r in rankings.values()}
    values = {key: rates.per_query(r.ranks, r.offsets, r.gains, metrics) for key, r in distinct.items()}
    columns = [values[key][metric] for key in distinct for metric in metrics]
    intervals = iter(rates.mean_intervals(np.column_stack(columns), clusters, **how))
    means = {key: {metric: next(intervals) for metric in metrics} for key in distinct}
    several = rates.several(clusters)
    numbers: Json = {}
    for name, r in rankings.items():
        own, mean = values[id(r)], means[id(r)]
        numbers[name] = {metric: value for metric, (value, _, _) in mean.items()} | {
            "median_rank": float(np.median(own["first_rank"])),
            "mean_rank": float(np.mean(own["first_rank"])),
            "ci": {metric: [lo, hi] if several else None for metric, (_, lo, hi) in mean.items()},
            "tied_queries": r.n_tied,
        }
        if too_few := clamped(r.n_documents, metrics):
            numbers[name]["clamped_k"] = too_few
        arrays |= {f"{prefix}/{name}/{metric}": own[metric].astype(np.float32) for metric in metrics}
        arrays[f"{prefix}/{name}/first_rank"] = own["first_rank"].astype(np.int32)
    for name in ("cosine", NATIVE):  # example pages show them
        arrays[f"{prefix}/{name}/top_ids"] = rankings[name].top_ids.astype(np.int32)
        arrays[f"{prefix}/{name}/top_relevant"] = rankings[name].top_relevant
    scores = list_scores(data, direction, rankings["cosine"], Normalization.COSINE.exponents)
    arrays[f"{prefix}/cosine/top_scores"] = scores.astype(np.float32)
    return numbers, arrays


def list_scores(data: EvalSet, direction: Direction, ranking: Ranking, exponents: Exponents) -> Array:
    """Scores at alpha 1 of a ranking's lists: [Q, k] float64, never rising along a row."""
    q = norms(data.embeddings[direction.query_side], direction.query_side)
    kept = (q / q.clamp_min(TINY).pow(as_floats(exponents).gamma_q)).cpu().numpy()[ranking.queries]
    return ranking.top_scores * kept[:, None]


def _norms(data: EvalSet, direction: Direction, cosine: Ranking, how: Json) -> tuple[Json, dict[str, Array]]:
    """The "magnitude" section of the side that ``direction`` has as documents, and the arrays of its bootstrap."""
    side, prefix = direction.document_side, direction.value
    norms = magnitude(data.embeddings[side].double()).cpu().numpy()
    x, level = magnitudes.centred(norms)
    clusters = data.clusters[direction.query_side][cosine.queries]
    arrays = {
        f"lengths/{side}": norms.astype(np.float32),
        f"{prefix}/topk_moments": magnitudes.split_moments(x[cosine.top_ids], cosine.top_relevant),
        f"{prefix}/length_level": np.array([level]),
    }
    correlations = {
        name: magnitudes.spearman(norms[v >= 0], v[v >= 0])
        for name, v in data.attributes[side].items()
        if v.dtype != object and name not in UNITS
    }
    section: Json = {
        **magnitudes.summary(norms),
        "cohens_d": magnitudes.with_reasons(magnitudes.cohens_d(norms, cosine, clusters, data.clusters[side], **how)),
        "spearman": magnitudes.with_reasons(correlations),
        "by_document": {},
        "by_query": {},
    }
    for key, of in (("by_document", side), ("by_query", direction.query_side)):
        for name, values in data.attributes[of].items():
            if values.dtype == object:
                names = sorted({v for v in values if v})
                group = np.array([names.index(v) if v else -1 for v in values])
            elif name not in UNITS:
                group, names = magnitudes.number_bins(values)
            else:
                continue
            of_queries = key == "by_query"
            group = group[cosine.queries] if of_queries else group
            section[key][name] = magnitudes.by_group(
                norms, group, names, cosine, clusters, of_queries=of_queries, **how
            )
    return section, arrays


@contextmanager
def ranking_bars() -> Iterator[Progress]:
    """A ``progress`` for :func:`evaluate`: a bar on the terminal for each set."""
    with progress_bar() as bar:
        tasks: dict[str, Any] = {}

        def progress(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(f"ranking, pool {printable(name, 40)}", total=total, note="")
            bar.update(tasks[name], completed=done)

        yield progress


def evaluate_model(
    source: EvalSource,
    model: ClipModel,
    options: EncodeOptions,
    trained: Mapping[str, Any],
    about: Mapping[str, Any],
    *,
    classes: ZeroShot | None = None,
    seed: int = 0,
    **how: Any,
) -> Results:
    """Encode image-text data once and evaluate both directions; ``classes`` are classified, too.

    Args:
        trained: mmclip.json, {} for a plain CLIP.
        about: What else results.json says.
        how: Of :func:`evaluate`.
    """
    data = source.embed(model, options, seed=seed)
    if data.skipped:
        print(f"evaluation data: {skipped_line(data.skipped)}", file=sys.stderr)
    metadata: Json = {"skipped": data.skipped, "trained_with": dict(trained), **about}
    native = native_exponents(trained)
    if classes is not None:
        metadata["zero_shot"] = classes.measure(model, options, native, seed)
        if skipped := metadata["zero_shot"]["skipped"]:
            print(f"zero-shot data: {skipped_line(skipped)}", file=sys.stderr)
    sets = image_text_sets(data, {"path": source.main.data.path, "split": source.main.data.split})
    with ranking_bars() as progress:
        scales = trained_scales(trained, model.loaded_scale)
        return evaluate(sets, native, CLIP_DIRECTIONS, scales=scales, seed=seed, metadata=metadata,
                        progress=progress, **how)  # fmt: skip
