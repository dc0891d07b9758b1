"""Raw embeddings -> results.json: both directions, every scoring, lengths, intervals, diagnostics.

:func:`evaluate` composes retrieval (ranks), metrics (numbers with intervals) and diagnostics (lengths) over the pools
of an :class:`EvalData`; it holds no formula of its own. What a comparison of two runs needs, the numbers of every
single query, is kept beside the JSON in ``per_query.npz``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
import torch

from mmclip import diagnostics, metrics
from mmclip.backwards import Backwards
from mmclip.correction import Bank, reversed_exponents
from mmclip.diagnose import diagnose
from mmclip.errors import UsageError
from mmclip.pools import MAIN_POOL, EvalData, Pool, make_pools
from mmclip.results import NATIVE, REVERSED, Array, Json, Results
from mmclip.retrieval import BLOCK_BYTES, Ranking, as_floats, rank_both_ways
from mmclip.sides import exact_dots, inverse
from mmclip.similarity import (
    CLIP_DIRECTIONS,
    FIXED_NORMALIZATIONS,
    Direction,
    Exponents,
    magnitude,
)

KINDS = (*metrics.RATES, "first_rank")  # what is kept of every query


def evaluate(
    data: EvalData,
    native: Exponents,
    facts: Mapping[str, Any],
    *,
    scales: Mapping[Direction, float | None] | None = None,
    bank: Bank | None = None,
    fisher: bool = False,
    resamples: int = metrics.RESAMPLES,
    seed: int = 0,
    block_bytes: int = BLOCK_BYTES,
    progress: Callable[[str, int, int], None] | None = None,
) -> Results:
    """Every pool of ``data`` in both directions.

    native: the trained exponents, by role, applied to the roles of each direction. facts: what only the caller knows,
    {"model", "trained_with": {...}, "data": {"path", "split"}}; copied, with the counts added to "data".
    scales: alpha of every direction that was trained (None: not told, calibrated on the main pool). A direction whose
    opposite was trained is also ranked ``reversed`` and, with a ``bank``, ``corrected`` (mmclip.correction).
    fisher: with the Fisher matrices of the main pool, by far the costliest diagnostic.
    resamples, seed: of the bootstrap. block_bytes: working memory of the ranking beside the embeddings. progress:
    called with (pool's name, scores done, scores in all) while a pool is ranked.
    Errors: UsageError for unusable exponents; EvalData has checked the rest.

    >>> import torch
    >>> x = torch.eye(3)
    >>> data = EvalData(x, x, torch.tensor([[0, 0], [1, 1], [2, 2]]), list("abc"), list("abc"))
    >>> r = evaluate(data, Exponents(1.0, 0.0), {"model": "tiny"}, resamples=10)
    >>> r.json["retrieval"]["t2i"]["native"]["success@1"], r.json["data"]["n_images"]
    (1.0, 3)
    """
    native = as_floats(native)
    if not (isfinite(native.gamma_q) and isfinite(native.gamma_d)):
        raise UsageError(f"native exponents {tuple(native)}: both must be finite; 0 keeps a length, 1 divides it out")
    backwards = Backwards(native, dict(scales or {}), bank, {"image": data.image, "text": data.text})
    scorings = {n.value: n.exponents for n in FIXED_NORMALIZATIONS} | {NATIVE: native}
    if any(d.opposite in backwards.scales for d in CLIP_DIRECTIONS):
        scorings[REVERSED] = reversed_exponents(native)
    per_query: dict[str, Array] = {}
    pools: dict[str, Json] = {}
    how: Any = {"resamples": resamples, "seed": seed}
    for pool in make_pools(data):
        retrieval: Json = {}
        lengths: Json = {}
        told: Json = {}
        chance: Json = {}
        ways = rank_both_ways(
            *CLIP_DIRECTIONS[0].roles(pool.vectors),
            pool.pairs,
            scorings,
            gains=pool.gains,
            top_k={"cosine": diagnostics.TOP_K, NATIVE: diagnostics.TOP_K},
            block_bytes=block_bytes,
            progress=partial(progress, pool.name) if progress is not None else None,
        )
        for direction, rankings in zip(CLIP_DIRECTIONS, ways, strict=True):
            about = backwards.extend(pool, direction, rankings, block_bytes)
            numbers, side = _one_direction(pool, direction, rankings, per_query, how)
            for scoring, more in about.items():
                numbers[scoring] |= more
            retrieval[direction.value], lengths[direction.document_side] = numbers, side
            at = rankings["cosine"]
            chance[direction.value] = float(np.diff(at.offsets).mean() / at.n_documents)
            told[direction.value] = _diagnostics(pool, direction, rankings, backwards, per_query, fisher, how)
        pools[pool.name] = {
            "n_images": len(pool.vectors["image"]),
            "n_texts": len(pool.vectors["text"]),
            "n_queries": {d.value: len(per_query[f"{pool.name}/{d.value}/queries"]) for d in CLIP_DIRECTIONS},
            "chance": chance,  # success@1 of a ranking that knows nothing
            **({"fingerprint": pool.fingerprint} if pool.fingerprint else {}),
            "retrieval": retrieval,
            "magnitude": {"image": lengths["image"], "text": lengths["text"]},
            "diagnostics": told,
        }
    main = pools.pop(MAIN_POOL)
    given = dict(facts)
    document: Json = {
        "model": given.pop("model", None),
        "trained_with": dict(given.pop("trained_with", {})),
        "data": {
            **dict(given.pop("data", {})),
            "n_images": main["n_images"],
            "n_texts": main["n_texts"],
            "n_queries": main["n_queries"],
            "chance": main["chance"],
            "fingerprint": data.fingerprint(),
        },
        **given,
        "evaluation": {
            "native": native._asdict(),
            "bootstrap": {**how, "level": metrics.LEVEL, "clusters": "image"},
            "topk": diagnostics.TOP_K,
        },
        "retrieval": main["retrieval"],
        "magnitude": main["magnitude"],
        "diagnostics": main["diagnostics"],
        "pools": pools,
    }
    items = {"image_keys": list(data.image_keys), "captions": list(data.captions), "owner": data.owners().tolist()}
    return Results(document, per_query, items)


def _one_direction(
    pool: Pool,
    direction: Direction,
    rankings: Mapping[str, Ranking],
    per_query: dict[str, Array],
    how: Mapping[str, Any],
) -> tuple[Json, Json]:
    """({scoring: numbers}, the document side's lengths); puts every query's numbers into ``per_query``."""
    queries = rankings["cosine"].queries
    clusters = pool.clusters[direction.query_side][queries]
    prefix = f"{pool.name}/{direction.value}"
    per_query[f"{prefix}/queries"] = queries
    per_query[f"{prefix}/clusters"] = clusters

    # Scorings that rank alike share one Ranking: one set of numbers, equal to the last digit of every interval.
    distinct = {id(r): r for r in rankings.values()}
    every = {key: metrics.per_query(r.ranks, r.offsets, r.gains) for key, r in distinct.items()}
    columns = [every[key][rate] for key in distinct for rate in metrics.RATES]
    found = iter(metrics.mean_intervals(np.column_stack(columns), clusters, **how))
    means = {key: {rate: next(found) for rate in metrics.RATES} for key in distinct}
    several = len(np.unique(clusters)) > 1  # one cluster has no spread, which is not the same as certainty
    numbers: Json = {}
    for name, r in rankings.items():
        mine, values = means[id(r)], every[id(r)]
        numbers[name] = {rate: value for rate, (value, _, _) in mine.items()}
        numbers[name]["median_rank"] = float(np.median(values["first_rank"]))
        numbers[name]["mean_rank"] = float(np.mean(values["first_rank"]))
        numbers[name]["ci"] = {rate: [lo, hi] if several else None for rate, (_, lo, hi) in mine.items()}
        numbers[name]["tied_queries"] = r.n_tied
        if too_few := metrics.clamped(r.n_documents):
            numbers[name]["clamped_k"] = too_few
        for kind in KINDS:
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


def _diagnostics(
    pool: Pool,
    direction: Direction,
    rankings: Mapping[str, Ranking],
    backwards: Backwards,
    per_query: Mapping[str, Array],
    fisher: bool,
    how: Mapping[str, Any],
) -> Json:
    """The diagnostics section of a direction; Fisher matrices only on the main pool."""
    role = {direction.query_side: "query", direction.document_side: "document"}["text"]
    return diagnose(
        *direction.roles(pool.vectors),
        rankings,
        per_query[f"{pool.name}/{direction.value}/clusters"],
        pool.clusters[direction.document_side],
        backwards.native,
        backwards.told.get(direction),
        text_length={role: pool.text_length},
        fisher=fisher and pool.name == MAIN_POOL,
        **how,
    )


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
