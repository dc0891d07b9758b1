"""Raw text vectors -> results.json of the one direction q2d, in the shape that CLIP's evaluation writes.

:func:`evaluate_text` composes what ``evaluation.evaluate`` does (retrieval, direction_numbers, diagnose) over a
:class:`TextCollection`. Rates that the field has by ir_measures are ir_measures' own numbers (text_runs); metrics.py,
which tells the rest, is what they are checked against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmclip import metrics
from mmclip.data.beir import TextCollection
from mmclip.errors import UserError, printable
from mmclip.evaluation.diagnostics import diagnose
from mmclip.evaluation.direction_numbers import one_direction
from mmclip.evaluation.eval_set import LONGEST, MAIN_POOL, Pool, text_lengths
from mmclip.evaluation.results import NATIVE, Array, Json, Results
from mmclip.evaluation.trec import RankedList, measurable, measure_list
from mmclip.metrics import magnitude as diagnostics
from mmclip.models.metadata import native_exponents
from mmclip.models.text_encoder import TextEncoder
from mmclip.retrieval import BLOCK_BYTES, Qrels, Ranking, as_floats, rank
from mmclip.retrieval.sides import exact_dots, inverse, lengths
from mmclip.similarity import FIXED_NORMALIZATIONS, TINY, Direction, Exponents, Normalization

DEPTH = 100  # documents that a run lists of every query, and the largest k of the rates
WATCHED = ("ndcg@10", "success@1")
Q2D = Direction.Q2D


@dataclass
class TextEvaluation:
    """``results`` as :func:`evaluate_text` makes them; ``runs``: scoring -> its list of the best, for TREC files."""

    results: Results
    runs: dict[str, RankedList]


def evaluate_text(
    collection: TextCollection,
    query: Tensor,
    document: Tensor,
    native: Exponents,
    facts: Mapping[str, Any],
    *,
    alpha: float | None = None,
    fisher: bool = False,
    depth: int = DEPTH,
    resamples: int = metrics.RESAMPLES,
    seed: int = 0,
    block_bytes: int = BLOCK_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> TextEvaluation:
    """What the raw vectors query [Q, D] and document [N, D] of a collection's rows retrieve, under every scoring.

    native, alpha: the trained exponents by role, and the trained scale; None: calibrated (mmclip.evaluation.diagnostics). facts: what
    only the caller knows, {"model", "trained_with": {...}, ...}, copied. fisher: with the Fisher matrices, by far the
    costliest diagnostic. depth: of ``runs``. resamples, seed: of the bootstrap, which draws each query by itself.
    block_bytes: working memory of the ranking. progress: called with (scores done, scores in all).

    Documents that a query excludes are not there for it: neither in its list nor in its ranks.
    Errors: UserError for vectors that do not fit the collection or are not finite, for unusable exponents, and where
    an excluded document is relevant to the query, which is named.

    >>> from mmclip.data.beir import TextCollection
    >>> c = TextCollection("p", "test", ["a", "b"], ["?", "!"], ["x", "y"], ["one", "two"], ["", ""],
    ...                    np.array([[0, 0], [1, 1]]), np.ones(2))
    >>> done = evaluate_text(c, torch.eye(2), torch.eye(2), Exponents(1.0, 0.0), {"model": "tiny"}, resamples=10)
    >>> done.results.json["retrieval"]["q2d"]["native"]["ndcg@10"], done.runs["dot"].ids.tolist()
    (1.0, [[0, 1], [1, 0]])
    """
    native = as_floats(native)
    if not (isfinite(native.gamma_q) and isfinite(native.gamma_d)):
        raise UserError(f"native exponents {tuple(native)}: both must be finite; 0 keeps a length, 1 divides it out")
    _require_vectors(collection, query, document)
    scorings = {n.value: n.exponents for n in FIXED_NORMALIZATIONS} | {NATIVE: native}
    whole = rank(
        query,
        document,
        Qrels(collection.pairs, collection.gains),
        scorings,
        top_k=dict.fromkeys(scorings, max(depth, DEPTH)),
        excluded=_excluded(collection),
        block_bytes=block_bytes,
        progress=progress,
    )
    runs = {name: _listed(query, document, r, scorings[name]) for name, r in whole.items()}
    # Lists end early where a query excludes nearly all of a corpus; ranks are whole, and metrics.py has them.
    listed = whole["cosine"].top_ids.shape[1]
    rates = [
        r
        for r in measurable(metrics.TEXT_RATES, collection.gains)
        if listed == len(document) or (metrics.cutoff(r) or 0) <= listed
    ]
    distinct = {id(r): name for name, r in whole.items()}
    measured = {name: measure_list(collection, runs[name], rates) for name in distinct.values()}
    short = {key: _cut(whole[name], diagnostics.TOP_K) for key, name in distinct.items()}
    rankings = {name: short[id(r)] for name, r in whole.items()}

    per_query: dict[str, Array] = {}
    how: Any = {"resamples": resamples, "seed": seed}
    words = {"query": text_lengths(collection.queries), "document": text_lengths(collection.documents)}
    pool = _pool(collection, query, document, words)
    numbers, documents = one_direction(pool, Q2D, rankings, per_query, how, metrics.TEXT_RATES, measured)
    diagnosed = diagnose(
        query,
        document,
        rankings,
        per_query[f"{MAIN_POOL}/q2d/clusters"],
        pool.clusters["document"],
        native,
        alpha,
        text_length=words,
        fisher=fisher,
        **how,
    )
    asked = whole["cosine"]
    length = lengths(query, "query").cpu().numpy()
    per_query[f"{MAIN_POOL}/lengths/query"] = length.astype(np.float32)
    given = dict(facts)
    content: Json = {
        "model": given.pop("model", None),
        "trained_with": dict(given.pop("trained_with", {})),
        "data": {
            **dict(given.pop("data", {})),
            "path": collection.path,
            "split": collection.split,
            "n_queries": {"q2d": len(asked.queries)},
            "n_documents": len(document),
            "n_empty": len(collection.empty),
            "n_pairs": len(asked.documents),
            "chance": {"q2d": float(np.diff(asked.offsets).mean() / len(document))},
            "fingerprint": collection.fingerprint(),
            "notes": list(collection.notes),
        },
        **given,
        "evaluation": {
            "native": native._asdict(),
            "bootstrap": {**how, "level": metrics.LEVEL, "clusters": "query"},
            "topk": diagnostics.TOP_K,
            "ir_measures": rates,  # whose numbers are its own
        },
        "retrieval": {"q2d": numbers},
        "magnitude": {"query": diagnostics.summary(length[asked.queries]), "document": documents},
        "diagnostics": {"q2d": diagnosed},
    }
    items = {
        "query_ids": list(collection.query_ids),
        "queries": list(collection.queries),
        "document_ids": list(collection.document_ids),
        "titles": list(collection.titles),
    }
    return TextEvaluation(Results(content, per_query, items), runs)


def quick_numbers(collection: TextCollection, query: Tensor, document: Tensor, native: Exponents) -> dict[str, float]:
    """nDCG@10 and success@1, natively and by cosine, from ranks alone: what is watched while training.

    {"val_q2d_ndcg@10_native", "val_q2d_ndcg@10_cosine", "val_q2d_success@1_native", "val_q2d_success@1_cosine"}.
    """
    scorings = {NATIVE: as_floats(native), "cosine": Normalization.COSINE.exponents}
    qrels = Qrels(collection.pairs, collection.gains)
    ways = rank(query, document, qrels, scorings, excluded=_excluded(collection))
    values = {name: metrics.per_query(r.ranks, r.offsets, r.gains, WATCHED) for name, r in ways.items()}
    return {f"val_q2d_{rate}_{name}": float(values[name][rate].mean()) for rate in WATCHED for name in scorings}


def native_scoring(model: TextEncoder) -> tuple[Exponents, float | None]:
    """(exponents, alpha) that a model's vectors are to be scored with.

    What mmclip trained says it itself. Any other model has cosine where its Normalize was removed or its
    ``similarity_fn_name`` is cosine (sentence-transformers' default), dot where that says dot; alpha is not known.
    Errors: UserError for facts without numbers, and for a similarity that is neither.
    """
    if model.metadata:
        alpha = model.metadata.get("logit_scale_q2d")
        return native_exponents(model.metadata), alpha if isinstance(alpha, int | float) else None
    said = str(model.encoder.similarity_fn_name)
    if model.removed or said == "cosine":
        return Normalization.COSINE.exponents, None
    if said == "dot":
        return Normalization.DOT.exponents, None
    raise UserError(
        f"--model {printable(model.name)}: its similarity is {printable(said, 40)}; cosine or dot can be evaluated"
    )


def _require_vectors(collection: TextCollection, query: Tensor, document: Tensor) -> None:
    """Errors: UserError, one line; that values are finite is seen where lengths are taken."""
    for side, x, n in (("query", query, len(collection.queries)), ("document", document, len(collection.documents))):
        if x.ndim != 2 or len(x) != n or not x.shape[1]:
            raise UserError(f"{side} embeddings of shape {list(x.shape)}: {n} rows, one a {side}, are needed")
        longest = float(lengths(x, side).max())
        if longest > LONGEST:
            raise UserError(
                f"{side} embeddings: a length of {longest:.3g}; above {LONGEST:.0e} products overflow in float32: "
                "divide all embeddings by one constant"
            )


def _excluded(collection: TextCollection) -> Array | None:
    """[X, 2] (query row, document row). Errors: UserError where one of them is relevant."""
    pairs = [(query, document) for query, rows in collection.excluded.items() for document in rows]
    relevant = set(map(tuple, collection.pairs.tolist()))
    for query, document in pairs:
        if (query, document) in relevant:
            raise UserError(
                f"{printable(collection.path)}: query {printable(collection.query_ids[query], 60)!r} excludes document "
                f"{printable(collection.document_ids[document], 60)!r}, which is judged relevant to it"
            )
    return np.array(pairs, dtype=np.int64) if pairs else None


def _listed(query: Tensor, document: Tensor, ranking: Ranking, exponents: Exponents) -> RankedList:
    """The list of a scoring with its scores, |q|**(1 - gamma_q) times what the ranking compared (mmclip.retrieval.sides)."""
    gamma_q, gamma_d = as_floats(exponents)
    ids = ranking.top_ids
    rows = [torch.as_tensor(x, device=query.device) for x in (np.repeat(ranking.queries, ids.shape[1]), ids.ravel())]
    q, d = lengths(query, "query")[rows[0]], lengths(document, "document")[rows[1]]
    compared = exact_dots(query, document, *rows) * inverse(q) * inverse(d) * (d / d.clamp_min(TINY).pow(gamma_d))
    scores = compared.float().double() * (q / q.clamp_min(TINY).pow(gamma_q))
    return RankedList(ranking.queries, ids, np.minimum.accumulate(scores.cpu().numpy().reshape(ids.shape), axis=1))


def _cut(ranking: Ranking, k: int) -> Ranking:
    return replace(ranking, top_ids=ranking.top_ids[:, :k], top_relevant=ranking.top_relevant[:, :k])


def _pool(
    collection: TextCollection, query: Tensor, document: Tensor, words: Mapping[str, Mapping[str, Array]]
) -> Pool:
    """The collection as the one pool that it is; each query and each document is drawn by itself."""
    return Pool(
        name=MAIN_POOL,
        vectors={"query": query, "document": document},
        pairs=collection.pairs,
        gains=collection.gains,
        clusters={"query": np.arange(len(query)), "document": np.arange(len(document))},
        whole={side: {"n_words": units["words"]} for side, units in words.items()},
        named={"query": {}, "document": {}},
    )
