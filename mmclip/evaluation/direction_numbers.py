"""One ranked direction of one pool -> its section of results.json, and every query's numbers beside it.

Images or texts, what is said of a direction is the same: rates with intervals, and its documents' lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mmclip import metrics
from mmclip.evaluation.eval_set import Pool
from mmclip.evaluation.results import NATIVE, Array, Json
from mmclip.metrics import magnitude as diagnostics
from mmclip.retrieval.ranking import Ranking
from mmclip.retrieval.sides import exact_dots, inverse
from mmclip.similarity import Direction, magnitude


def one_direction(
    pool: Pool,
    direction: Direction,
    rankings: Mapping[str, Ranking],
    per_query: dict[str, Array],
    how: Mapping[str, Any],
    rates: Sequence[str] = metrics.RATES,
    measured: Mapping[str, Mapping[str, Array]] | None = None,
) -> tuple[Json, Json]:
    """({scoring: numbers}, the document side's lengths); puts every query's numbers into ``per_query``.

    rates: those of metrics.py that are told. measured: scoring -> rate -> [Q], of whom the numbers are taken where they
    were measured elsewhere; metrics.py's stand for all others.
    """
    queries = rankings["cosine"].queries
    clusters = pool.clusters[direction.query_side][queries]
    prefix = f"{pool.name}/{direction.value}"
    per_query[f"{prefix}/queries"] = queries
    per_query[f"{prefix}/clusters"] = clusters

    # Scorings that rank alike share one Ranking: one set of numbers, equal to the last digit of every interval.
    distinct = {id(r): r for r in rankings.values()}
    every = {key: metrics.per_query(r.ranks, r.offsets, r.gains, rates) for key, r in distinct.items()}
    for name, values in (measured or {}).items():
        every[id(rankings[name])] |= values
    columns = [every[key][rate] for key in distinct for rate in rates]
    found = iter(metrics.mean_intervals(np.column_stack(columns), clusters, **how))
    means = {key: {rate: next(found) for rate in rates} for key in distinct}
    several = len(np.unique(clusters)) > 1  # one cluster has no spread, which is not the same as certainty
    numbers: Json = {}
    for name, r in rankings.items():
        mine, values = means[id(r)], every[id(r)]
        numbers[name] = {rate: value for rate, (value, _, _) in mine.items()}
        numbers[name]["median_rank"] = float(np.median(values["first_rank"]))
        numbers[name]["mean_rank"] = float(np.mean(values["first_rank"]))
        numbers[name]["ci"] = {rate: [lo, hi] if several else None for rate, (_, lo, hi) in mine.items()}
        numbers[name]["tied_queries"] = r.n_tied
        if too_few := metrics.clamped(r.n_documents, rates):
            numbers[name]["clamped_k"] = too_few
        for kind in (*rates, "first_rank"):
            dtype = np.int32 if kind == "first_rank" else np.float32
            per_query[f"{prefix}/{name}/{kind}"] = values[kind].astype(dtype)
    _keep_lists(pool, direction, rankings, per_query)
    return numbers, _lengths(pool, direction, rankings["cosine"], per_query, how)


def _keep_lists(pool: Pool, direction: Direction, rankings: Mapping[str, Ranking], per_query: dict[str, Array]) -> None:
    """The best by cosine, with their cosines, and by native: what pictures of a run are drawn from."""
    prefix = f"{pool.name}/{direction.value}"
    for name in ("cosine", NATIVE):
        per_query[f"{prefix}/{name}/top_ids"] = rankings[name].top_ids.astype(np.int32)
        per_query[f"{prefix}/{name}/top_relevant"] = rankings[name].top_relevant
    query, document = direction.roles(pool.vectors)
    best = rankings["cosine"].top_ids
    rows = [
        torch.as_tensor(x, device=query.device)
        for x in (np.repeat(rankings["cosine"].queries, best.shape[1]), best.ravel())
    ]
    cosine = exact_dots(query, document, *rows)
    for x, at in zip((query, document), rows, strict=True):
        cosine *= inverse(magnitude(x.double()))[at]
    per_query[f"{prefix}/cosine/top_scores"] = cosine.float().cpu().numpy().reshape(best.shape)


def _lengths(
    pool: Pool, direction: Direction, cosine: Ranking, per_query: dict[str, Array], how: Mapping[str, Any]
) -> Json:
    """The magnitude section of the side that ``direction`` has as documents."""
    side, asking = direction.document_side, direction.query_side
    length = magnitude(pool.vectors[side].double()).cpu().numpy()
    per_query[f"{pool.name}/lengths/{side}"] = length.astype(np.float32)
    x, level = diagnostics.centred(length)
    moments = diagnostics.split_moments(x[cosine.top_ids], cosine.top_relevant)
    prefix = f"{pool.name}/{direction.value}"
    clusters = per_query[f"{prefix}/clusters"]
    per_query[f"{prefix}/topk_moments"] = moments
    per_query[f"{prefix}/length_level"] = np.array([level])
    effects = diagnostics.length_effects(length, cosine, clusters, pool.clusters[side], **how)
    section: Json = {**diagnostics.summary(length), "cohens_d": diagnostics.with_reasons(effects)}
    follows = {name: diagnostics.spearman(length[v >= 0], v[v >= 0]) for name, v in pool.whole[side].items()}
    section["spearman"] = diagnostics.with_reasons(follows)
    top_args = (cosine.top_ids, cosine.top_relevant, clusters)
    section["by_document"] = {
        name: diagnostics.by_document_group(length, group, names, *top_args, **how)
        for name, (group, names) in _groups(pool, side).items()
    }
    section["by_query"] = {
        name: diagnostics.by_query_group(length, group[cosine.queries], names, *top_args, **how)
        for name, (group, names) in _groups(pool, asking).items()
    }
    return section


def _groups(pool: Pool, side: str) -> dict[str, tuple[Array, list[str]]]:
    """attribute -> (group number of every row, group names)."""
    groups = {name: diagnostics.number_bins(v) for name, v in pool.whole[side].items()}
    for name, values in pool.named[side].items():
        names = sorted({v for v in values if v})
        place = {v: i for i, v in enumerate(names)}
        groups[name] = np.array([place.get(v, -1) for v in values]), names
    return groups
