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

from mmclip import metrics
from mmclip.errors import UserError
from mmclip.evaluation.backwards import Backwards
from mmclip.evaluation.diagnostics import diagnose
from mmclip.evaluation.direction_numbers import one_direction
from mmclip.evaluation.eval_set import MAIN_POOL, EvalData, Pool, make_pools
from mmclip.evaluation.results import NATIVE, REVERSED, Array, Json, Results
from mmclip.metrics import magnitude as diagnostics
from mmclip.retrieval import BLOCK_BYTES, Qrels, Ranking, as_floats, rank_both
from mmclip.retrieval.hubness import Bank, reversed_exponents
from mmclip.similarity import (
    CLIP_DIRECTIONS,
    FIXED_NORMALIZATIONS,
    Direction,
    Exponents,
)


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
    opposite was trained is also ranked ``reversed`` and, with a ``bank``, ``corrected`` (mmclip.retrieval.hubness).
    fisher: with the Fisher matrices of the main pool, by far the costliest diagnostic.
    resamples, seed: of the bootstrap. block_bytes: working memory of the ranking beside the embeddings. progress:
    called with (pool's name, scores done, scores in all) while a pool is ranked.
    Errors: UserError for unusable exponents; EvalData has checked the rest.

    >>> import torch
    >>> x = torch.eye(3)
    >>> data = EvalData(x, x, torch.tensor([[0, 0], [1, 1], [2, 2]]), list("abc"), list("abc"))
    >>> r = evaluate(data, Exponents(1.0, 0.0), {"model": "tiny"}, resamples=10)
    >>> r.json["retrieval"]["t2i"]["native"]["success@1"], r.json["data"]["n_images"]
    (1.0, 3)
    """
    native = as_floats(native)
    if not (isfinite(native.gamma_q) and isfinite(native.gamma_d)):
        raise UserError(f"native exponents {tuple(native)}: both must be finite; 0 keeps a length, 1 divides it out")
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
        ways = rank_both(
            *CLIP_DIRECTIONS[0].roles(pool.vectors),
            Qrels(pool.pairs, pool.gains),
            scorings,
            top_k={"cosine": diagnostics.TOP_K, NATIVE: diagnostics.TOP_K},
            block_bytes=block_bytes,
            progress=partial(progress, pool.name) if progress is not None else None,
        )
        for direction, rankings in zip(CLIP_DIRECTIONS, ways, strict=True):
            about = backwards.extend(pool, direction, rankings, block_bytes)
            numbers, side = one_direction(pool, direction, rankings, per_query, how)
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
