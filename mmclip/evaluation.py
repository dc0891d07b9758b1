"""Raw embeddings -> results.json: both directions, every scoring, lengths, intervals.

:func:`evaluate` composes retrieval (ranks), metrics (numbers with intervals) and diagnostics (lengths) over the pools
of an :class:`EvalData`; it holds no formula of its own. What a comparison of two runs needs, the numbers of every
single query, is kept beside the JSON in ``per_query.npz``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmclip import diagnostics, metrics
from mmclip.errors import UsageError, one_line
from mmclip.files import write_atomically, write_text_atomically
from mmclip.pools import MAIN_POOL, EvalData, Pool, make_pools
from mmclip.retrieval import BLOCK_BYTES, Ranking, as_floats, rank_both_ways
from mmclip.similarity import CLIP_DIRECTIONS, FIXED_NORMALIZATIONS, Direction, Exponents, magnitude

__all__ = ["EvalData", "Results", "evaluate", "load_results", "save_results"]

NATIVE = "native"
RESULTS_FILE = "results.json"
PER_QUERY_FILE = "per_query.npz"
KINDS = (*metrics.RATES, "first_rank")  # what is kept of every query

Array = NDArray[Any]
Json = dict[str, Any]


@dataclass
class Results:
    """``json``: the content of results.json. ``per_query``: arrays over queries, named

    POOL/DIRECTION/queries [Q]             rows of the queries
    POOL/DIRECTION/clusters [Q]            whose numbers are drawn together in a bootstrap
    POOL/DIRECTION/topk_moments [Q, 6]     what d(topk) is made of (diagnostics.split_moments)
    POOL/DIRECTION/SCORING/METRIC [Q]      METRIC of metrics.RATES, or first_rank
    """

    json: Json
    per_query: dict[str, Array]

    @property
    def pools(self) -> dict[str, Json]:
        """Pool name -> {"retrieval": ..., "magnitude": ...}, the main pool first."""
        main = {k: self.json[k] for k in ("retrieval", "magnitude")}
        return {MAIN_POOL: main, **self.json.get("pools", {})}

    def query_values(self, pool: str, direction: str, scoring: str, metric: str) -> Array:
        """[Q] numbers of every query. Errors: UsageError naming what is there."""
        return self.array(f"{pool}/{direction}/{scoring}/{metric}")

    def array(self, name: str) -> Array:
        if name not in self.per_query:
            there = sorted({k.rsplit("/", 1)[0] for k in self.per_query})
            raise UsageError(
                f"no per-query numbers {one_line(name)!r}; there are those of: {one_line(', '.join(there), 900)}"
            )
        return self.per_query[name]


def evaluate(
    data: EvalData,
    native: Exponents,
    facts: Mapping[str, Any],
    *,
    resamples: int = metrics.RESAMPLES,
    seed: int = 0,
    block_bytes: int = BLOCK_BYTES,
    progress: Callable[[str, int, int], None] | None = None,
) -> Results:
    """Every pool of ``data`` in both directions.

    native: the trained exponents, by role, applied to the roles of each direction. facts: what only the caller knows,
    {"model", "trained_with": {...}, "data": {"path", "split"}}; copied, with the counts added to "data".
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
    scorings = {n.value: n.exponents for n in FIXED_NORMALIZATIONS} | {NATIVE: native}
    per_query: dict[str, Array] = {}
    pools: dict[str, Json] = {}
    for pool in make_pools(data):
        retrieval: Json = {}
        lengths: Json = {}
        ways = rank_both_ways(
            *CLIP_DIRECTIONS[0].roles(pool.vectors),
            pool.pairs,
            scorings,
            top_k={"cosine": diagnostics.TOP_K},
            block_bytes=block_bytes,
            progress=partial(progress, pool.name) if progress is not None else None,
        )
        for direction, rankings in zip(CLIP_DIRECTIONS, ways, strict=True):
            retrieval[direction.value], side = _one_direction(pool, direction, rankings, per_query, resamples, seed)
            lengths[direction.document_side] = side
        pools[pool.name] = {
            "n_images": len(pool.vectors["image"]),
            "n_texts": len(pool.vectors["text"]),
            "n_queries": {d.value: len(per_query[f"{pool.name}/{d.value}/queries"]) for d in CLIP_DIRECTIONS},
            "retrieval": retrieval,
            "magnitude": {"image": lengths["image"], "text": lengths["text"]},
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
            "fingerprint": data.fingerprint(),
        },
        **given,
        "evaluation": {
            "native": native._asdict(),
            "bootstrap": {"resamples": resamples, "seed": seed, "level": metrics.LEVEL, "clusters": "image"},
            "topk": diagnostics.TOP_K,
        },
        "retrieval": main["retrieval"],
        "magnitude": main["magnitude"],
        "pools": pools,
    }
    return Results(document, per_query)


def _one_direction(
    pool: Pool,
    direction: Direction,
    rankings: Mapping[str, Ranking],
    per_query: dict[str, Array],
    resamples: int,
    seed: int,
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
    found = iter(metrics.mean_intervals(np.column_stack(columns), clusters, resamples=resamples, seed=seed))
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
    return numbers, _lengths(pool, direction, rankings["cosine"], per_query, resamples, seed)


def _lengths(
    pool: Pool, direction: Direction, cosine: Ranking, per_query: dict[str, Array], resamples: int, seed: int
) -> Json:
    """The magnitude section of the side that ``direction`` has as documents."""
    side, asking = direction.document_side, direction.query_side
    length = magnitude(pool.vectors[side].double()).cpu().numpy()
    x, level = diagnostics.centred(length)
    moments = diagnostics.split_moments(x[cosine.top_ids], cosine.top_relevant)
    prefix = f"{pool.name}/{direction.value}"
    clusters = per_query[f"{prefix}/clusters"]
    per_query[f"{prefix}/topk_moments"] = moments
    per_query[f"{prefix}/length_level"] = np.array([level])
    how: Any = {"resamples": resamples, "seed": seed}
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


def save_results(results: Results, folder: str | Path) -> Path:
    """Write results.json and per_query.npz into ``folder``, each whole or not at all; returns the JSON's path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results.json, indent=1, allow_nan=False, ensure_ascii=False)
    text = text.encode("utf-8", "backslashreplace").decode()  # a file name that is not UTF-8: JSON escapes it alike

    def write(partial: Path) -> None:
        with partial.open("wb") as file:  # given a name, numpy would add its own ending
            np.savez_compressed(file, **results.per_query)  # type: ignore[arg-type]

    write_atomically(folder / PER_QUERY_FILE, write)
    write_text_atomically(folder / RESULTS_FILE, text + "\n")
    return folder / RESULTS_FILE


def load_results(path: str | Path) -> Results:
    """Read a run's folder, or its results.json with per_query.npz beside it. Nothing is unpickled.

    Errors: UsageError, one line, where a file is missing or is not what its name says.
    """
    path = Path(path)
    document = path / RESULTS_FILE if path.is_dir() else path
    arrays = document.parent / PER_QUERY_FILE
    for file in (document, arrays):
        if not file.is_file():
            raise UsageError(f"no file {one_line(file)}; an evaluated run has {RESULTS_FILE} and {PER_QUERY_FILE}")
    try:
        content = json.loads(document.read_text(encoding="utf-8"))
        missing = [
            k for k in ("retrieval", "magnitude", "data", "trained_with") if not isinstance(content.get(k), dict)
        ]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{one_line(document)} is not a results.json: {one_line(error)}") from None
    if missing:
        raise UsageError(f"{one_line(document)} is not a results.json: it has no {', '.join(missing)}")
    try:
        with arrays.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            per_query = {name: file[name] for name in file.files}
    except Exception as error:  # damaged content makes numpy, zipfile and zlib raise nearly anything
        kind = "" if isinstance(error, ValueError) else f": {one_line(error)}"  # numpy's advice there is to unpickle it
        raise UsageError(f"{one_line(arrays)} is not an array file that can be read safely{kind}") from None
    return Results(content, per_query)
