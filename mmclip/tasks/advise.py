"""From a trial's numbers to an answer: which norm to train, or "can't tell". No model and no data here.

The rule was fixed on planted data, before any real number was seen; after the first ones only the words of "can't tell"
changed. For each norm X other than cosine, over the same held-out queries and the same seeds, with 95% intervals over
queries and seeds (mmclip.metrics.bootstrap):

    gain           native(X) - native(cosine): what training X instead of cosine changes
    over control   native(X) - native(X's control), which is X but for documents that are normalized, of the same seed:
                   dnorm for dot, cosine for qnorm and for learned
    by length      native(X) - cosine(X), of the same trained head: what its documents' length adds to the angle

1. Fewer than ``MIN_QUERIES`` held-out queries (images, for CLIP) for which any head finds anything: can't tell.
   Percentiles of so few are no interval, and where nothing is found no norm can differ.
2. X is recommended where ``gain`` lies above 0 with its whole interval, and, where X keeps documents' length (dnorm
   does not), ``over control`` and ``by length`` do so, too: length, and not luck, is then what helps. Of several, the
   one whose ``gain`` has the largest lower end; norms whose paired difference to it holds 0 are named beside it.
3. Else cosine is recommended where every other norm's gain ends below the margin, a gain that does not matter: those
   whose interval lies below 0 are among them.
4. Else: can't tell, and the smallest effect that these queries and seeds could show, ``DETECTABLE`` standard errors of
   the paired difference (5% two-sided, power 80%), the largest of the norms that may still gain the margin.

Told, and no part of the rule: ``trained``, by length less what the cosine head of the same seed, whose lengths no loss
saw, gains when its dot products rank. Where it holds 0 the encoder's own lengths do as much as trained ones, and a
cosine model ranked by dot would have them. Fisher condition numbers take no part either: which side they favour is a
hypothesis to be tested. Four norms are compared with cosine, and intervals are not widened for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmclip import metrics
from mmclip.metrics import DETECTABLE, mean_samples, over_seeds
from mmclip.roles import NORMS, Normalization

OTHERS = NORMS[1:]
CONTROLS = {n.value: n.control.value for n in Normalization if n.control}
MIN_QUERIES = 30
CANNOT_TELL = "can't tell"

Array = NDArray[Any]
Json = dict[str, Any]
Values = Mapping[str, Mapping[str, Array]]  # norm -> scoring ("native", "cosine", "dot") -> [S, Q]


def estimate(values: Array, *, resamples: int = metrics.RESAMPLES, seed: int = 0) -> Json:
    """Mean of values [S, Q], a row a seed, a column a held-out query: {"value", "ci", "se", "above"}.

    "ci" is that of metrics.mean_interval, "se" the standard deviation of its samples, "above" the share of them
    above 0.
    """
    samples = _samples(values, resamples, seed)
    lo, hi = metrics.interval(samples)
    return {
        "value": float(values.mean()),
        "ci": [lo, hi],
        "se": float(samples.std(ddof=1)),
        "above": float((samples > 0).mean()),
    }


def _samples(values: Array, resamples: int, seed: int) -> Array:
    v = np.asarray(values, dtype=np.float64)
    return over_seeds(mean_samples(v.T, np.arange(v.shape[1]), resamples=resamples, seed=seed), seed=seed)


def compare(values: Values, *, resamples: int = metrics.RESAMPLES, seed: int = 0) -> Json:
    """norm -> {"native"} and, of all but cosine, {"gain", "detectable"} and, of those that keep documents' length,
    {"over_control", "by_length", "trained"}, as :func:`estimate` has them. A control that is missing is cosine."""
    cosine = values["cosine"]
    luck = cosine["dot"] - cosine["cosine"]
    report: Json = {}
    for norm, found in values.items():
        native, by_length = found["native"], found["native"] - found["cosine"]
        differences = {"native": native}
        if norm != "cosine":
            differences["gain"] = native - cosine["native"]
        if norm in CONTROLS:
            differences["over_control"] = native - values.get(CONTROLS[norm], cosine)["native"]
            differences |= {"by_length": by_length, "trained": by_length - luck}
        row = {k: estimate(v, resamples=resamples, seed=seed) for k, v in differences.items()}
        report[norm] = row | ({"detectable": DETECTABLE * row["gain"]["se"]} if "gain" in row else {})
    return report


def decide(
    values: Values, margin: float, *, metric: str = "ndcg@10", resamples: int = metrics.RESAMPLES, seed: int = 0
) -> Json:
    """The rule above: {"answer", "because", "sure", "detectable", "ties", "n_queries", "n_seeds", "norms"}.

    values: of cosine and at least one other norm. answer: a norm or ``CANNOT_TELL``. sure: the share of resamples in
    which it beats cosine (of cosine: in which none gains the margin; None where there is no answer). ties: norms that
    cannot be told from a recommended one. norms: :func:`compare`.
    """
    n_seeds, n_queries = values["cosine"]["native"].shape
    answered = int(np.any([found["native"] > 0 for found in values.values()], axis=(0, 1)).sum())
    if answered < MIN_QUERIES:
        why = f"{metric} is above 0 for {answered} of {n_queries} held-out queries: {MIN_QUERIES} are needed"
        return undecided(why, n_queries, n_seeds, margin, metric)
    report = undecided("", n_queries, n_seeds, margin, metric)
    options: Any = {"resamples": resamples, "seed": seed}
    norms = compare(values, **options)
    others = [norm for norm in norms if norm != "cosine"]
    report["norms"] = norms
    able = [norm for norm in others if _recommended(norms[norm])]
    if able:
        best = max(able, key=lambda n: norms[n]["gain"]["ci"][0])
        difference = {n: estimate(values[best]["native"] - values[n]["native"], **options) for n in others if n != best}
        report["ties"] = [n for n, d in difference.items() if d["ci"][0] <= 0 <= d["ci"][1]]
        gain = norms[best]["gain"]
        length = norms[best].get("by_length")
        why = f"{metric} {_signed(gain)} over cosine, "
        why += f"{_signed(length)} by length in its own head" if length else "by training alone: it ranks by angle"
        return report | {"answer": best, "because": why, "sure": gain["above"]}
    tops = {norm: norms[norm]["gain"]["ci"][1] for norm in others}
    top = max(tops, key=lambda n: tops[n])
    if tops[top] < margin:
        samples = np.stack([_samples(values[n]["native"] - values["cosine"]["native"], **options) for n in others])
        why = f"no other norm can gain {margin:g} {metric}: the best case is {top}, at most {tops[top]:+.3f}"
        return report | {"answer": "cosine", "because": why, "sure": float((samples < margin).all(axis=0).mean())}
    still = [n for n in others if tops[n] >= margin]
    report["detectable"] = max(norms[n]["detectable"] for n in still)
    why = f"at most ±{report['detectable']:.3f} {metric} was detectable with {n_queries} queries and {n_seeds} seeds"
    if len(still) < len(others):
        out = ", ".join(n for n in others if n not in still)
        why += f"; {', '.join(still)} may gain {margin:g} (at most {tops[top]:+.3f}), {out} cannot"
    if gaining := [n for n in still if norms[n]["gain"]["ci"][0] > 0]:
        why += f"; {', '.join(gaining)} gained, but not shown by length"
    return report | {"because": why}


def undecided(why: str, n_queries: int, n_seeds: int, margin: float, metric: str) -> Json:
    """What :func:`decide` returns where it cannot tell, or before it can."""
    report: Json = {"answer": CANNOT_TELL, "because": why, "sure": None, "detectable": None, "ties": [], "norms": {}}
    return report | {"n_queries": n_queries, "n_seeds": n_seeds, "margin": margin, "metric": metric}


def _recommended(row: Json) -> bool:
    return all(row[k]["ci"][0] > 0 for k in ("gain", "over_control", "by_length") if k in row)


def _signed(found: Json) -> str:
    return f"{found['value']:+.3f} [{found['ci'][0]:+.3f}, {found['ci'][1]:+.3f}]"
