"""Effects planted in embeddings are found as often as the intervals promise, and absent ones are not.

Bounds on counts are quantiles of the binomial distribution at 0.1 %: a fault shows, luck does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import binom
from scipy.stats import norm as normal

from mmclip.embeddings.files import Distractors, Embeddings
from mmclip.evaluation.comparison import verdict
from mmclip.evaluation.diagnostics import diagnose
from mmclip.evaluation.eval_set import EvalSet
from mmclip.evaluation.results import Results
from mmclip.metrics import cohens_d, magnitude_auc
from mmclip.retrieval import Qrels, Ranking, rank
from mmclip.roles import Direction, Exponents, Normalization
from tests.helpers.evaluating import evaluate_clip

COSINE, QNORM = Exponents(1.0, 1.0), Exponents(1.0, 0.0)
QUERIES, OWN, OTHERS, DIM = 60, 5, 5, 32  # each query's ten best by cosine are its own five and five distractors
SEEDS, RESAMPLES = 50, 200
Rng = np.random.Generator


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def planted(seed: int, d: float) -> tuple[Embeddings, np.ndarray]:
    """(image queries with captions and caption distractors, norms of captions and distractors).

    Norms are normal with standard deviation 1; those of relevant captions have a mean larger by ``d``, the population
    Cohen's d. Norms of an image's captions correlate (0.9): resampling captions alone would give too narrow intervals.
    """
    rng = np.random.default_rng(seed)
    image = 3 * rng.normal(size=(QUERIES, DIM))
    of_image = np.repeat(rng.normal(size=QUERIES), OWN)
    own = 10 + d + np.sqrt(0.9) * of_image + np.sqrt(0.1) * rng.normal(size=QUERIES * OWN)
    norms = np.concatenate([own, rng.normal(10, 1, size=QUERIES * OTHERS)])
    near = np.concatenate([np.repeat(image, n, axis=0) for n in (OWN, OTHERS)])
    vectors = torch.tensor(unit(near + 0.5 * rng.normal(size=near.shape)) * norms[:, None])
    n = QUERIES * OWN
    data = Embeddings(
        image=torch.tensor(image),
        text=vectors[:n],
        pairs=torch.tensor([[t // OWN, t] for t in range(n)]),
        image_ids=[str(i) for i in range(QUERIES)],
        captions=["a caption"] * n,
        distractors=[Distractors("distractors", text=vectors[n:])],
    )
    return data, norms


def ranked(data: Embeddings) -> tuple[Ranking, np.ndarray, np.ndarray]:
    """(cosine ranking over captions and distractors, clusters of its queries, clusters of its documents)."""
    documents = torch.cat([data.text, data.distractors[0].text])
    exponents = {"cosine": Normalization.COSINE.exponents}
    cosine = rank(data.image, documents, data.pairs, exponents, top_k={"cosine": 10})["cosine"]
    alone = QUERIES + np.arange(QUERIES * OTHERS)
    return cosine, cosine.queries, np.concatenate([np.repeat(np.arange(QUERIES), OWN), alone])


def check_coverage(found: np.ndarray, truth: float) -> None:
    """Assert that 95 % intervals are neither too narrow, too wide, nor biased.

    Args:
        found: [SEEDS, 3], value, lower and upper end.
    """
    value, lo, hi = found.T
    covered = int(((lo <= truth) & (truth <= hi)).sum())
    assert covered >= binom.ppf(0.001, len(found), 0.95), covered
    assert np.mean(hi - lo) / (2 * normal.ppf(0.975)) == pytest.approx(value.std(ddof=1), rel=0.35)
    assert value.mean() == pytest.approx(truth, abs=4 * value.std(ddof=1) / np.sqrt(len(found)))


@pytest.mark.parametrize("d", [-0.8, 0.0, 0.5, 2.0])
def test_intervals_of_d_and_of_auc_cover_what_was_planted(d):
    area = normal.cdf(d / np.sqrt(2))  # AUC of two normal distributions, d of their standard deviations apart
    found: dict[tuple[str, float], list[list[float]]] = {}
    for seed in range(SEEDS):
        data, norms = planted(seed, d)
        reference = ranked(data)
        for measure, truth in ((cohens_d, d), (magnitude_auc, area)):
            effects = measure(norms, *reference, resamples=RESAMPLES, seed=seed)
            for name in ("topk", "corpus"):
                value = effects[name][0]
                assert (value["n_relevant"], value["n_irrelevant"]) == (QUERIES * OWN, QUERIES * OTHERS)
                found.setdefault((name, truth), []).append([value["value"], *value["ci"]])
    for (_, truth), values in found.items():
        check_coverage(np.array(values), truth)


def test_an_evaluation_reports_the_planted_d():
    found: dict[str, list[list[float]]] = {"topk": [], "corpus": []}
    for seed in range(20):
        results = evaluate_clip(planted(seed, 0.5)[0], QNORM, {}, resamples=RESAMPLES, seed=seed)
        section = results.json["pools"]["distractors"]["magnitude"]["text"]["cohens_d"]
        for name, values in found.items():
            values.append([section[name]["value"], *section[name]["ci"]])
    for values in found.values():
        check_coverage(np.array(values), 0.5)


@pytest.mark.parametrize("d", [-1.0, 1.0])
def test_d_and_auc_have_the_planted_sign_on_every_reference_set(d):
    data, norms = planted(0, d)
    for measure, chance in ((cohens_d, 0.0), (magnitude_auc, 0.5)):
        effects = measure(norms, *ranked(data), resamples=RESAMPLES, seed=0)
        for name in ("topk", "corpus", "pairs"):
            assert min(np.sign(d) * (np.array(effects[name][0]["ci"]) - chance)) > 0, (measure, name)


def twins(rng: Rng, norms: np.ndarray, native: Exponents, loss: str, relevant: np.ndarray) -> Results:
    """A model's results on noisy twin images of ``norms`` [2 n].

    Caption t describes twins 2 (t // 2) and 2 (t // 2) + 1 alike; its relevant image is ``relevant[t]``.
    """
    n = len(norms) // 2
    scenes = np.random.default_rng(n).normal(size=(n, 24))  # the same for every model
    image = np.repeat(scenes, 2, axis=0) + 0.3 * rng.normal(size=(2 * n, 24))
    text = np.repeat(scenes, 2, axis=0) + 0.8 * rng.normal(size=(2 * n, 24))
    names = [str(i) for i in range(2 * n)]
    pairs = torch.tensor(np.column_stack([relevant, np.arange(2 * n)]))
    data = Embeddings(torch.tensor(unit(image) * norms[:, None]), torch.tensor(text), pairs, names, names)
    return evaluate_clip(data, native, {"trained_with": {"loss": loss}}, resamples=20)


def verdicts(seeds: int, change: Callable[..., tuple[np.ndarray, np.ndarray]]) -> dict[str, Counter]:
    """Counts of verdicts over seeds.

    Norms of relevant images are larger by six standard deviations until ``change(rng, norms, relevant)``; those of the
    control are random.
    """
    counts = {"learned": Counter(), "useful": Counter()}
    n = 160
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        first = 2 * (np.arange(n) // 2)
        norms = rng.normal(1, 0.05, size=n)
        norms[first] += 0.3
        norms, relevant = change(rng, norms, first)
        run = twins(rng, norms, QNORM, "asym-t2i", relevant)
        control = twins(rng, rng.normal(1, 0.05, size=n), COSINE, "asym-t2i", relevant)
        baseline = twins(rng, rng.normal(1, 0.05, size=n), COSINE, "sym", relevant)
        found = verdict(run, control, baseline, resamples=RESAMPLES, seed=seed)
        for name, counter in counts.items():
            counter[found[name]["verdict"]] += 1
    return counts


def test_a_planted_norm_is_learned_and_useful():
    assert verdicts(10, lambda rng, norms, relevant: (norms, relevant)) == {
        n: {True: 10} for n in ("learned", "useful")
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda rng, norms, relevant: (rng.permutation(norms), relevant),
        lambda rng, norms, relevant: (norms, rng.integers(0, len(norms), len(norms))),
    ],
    ids=["permuted norms", "permuted relevance"],
)
def test_permuted_norms_and_relevance_are_neither_but_for_what_95_percent_allow(change):
    for name, counter in verdicts(40, change).items():
        # an interval of 95 % lies above 0 by chance in 2.5 % of the cases
        assert counter[True] <= binom.ppf(0.999, 40, 0.025), (name, counter)


@pytest.mark.parametrize("rho", [-0.7, 0.0, 0.9])
def test_the_relevance_counter_follows_the_planted_correlation(rho):
    rng = np.random.default_rng(0)
    n_queries, n = 80, 600
    z = rng.normal(size=n)
    times = np.clip(np.round(40 + 12 * z), 1, n_queries).astype(int)
    norms = 10 + rho * z + np.sqrt(1 - rho**2) * rng.normal(size=n)
    pairs = np.array([[q, j] for j in range(n) for q in rng.choice(n_queries, times[j], replace=False)])
    sides = {"query": torch.tensor(rng.normal(size=(n_queries, 8)))}
    sides["document"] = torch.tensor(unit(rng.normal(size=(n, 8))) * norms[:, None])
    data = EvalSet("p", sides, Qrels(pairs), {side: np.arange(len(x)) for side, x in sides.items()}, {})
    exponents = {"cosine": Normalization.COSINE.exponents}
    rankings = rank(*sides.values(), pairs, exponents, top_k={"cosine": 10})
    found = diagnose(data, Direction.Q2D, rankings, QNORM, fisher=False, resamples=20)["relevance_count"]
    spearman = 6 / np.pi * np.arcsin(rho / 2)  # of two normal numbers with Pearson correlation rho
    assert found == {"value": pytest.approx(spearman, abs=4 / np.sqrt(n)), "n": n}


def test_the_planted_pool_is_what_it_says():
    data, norms = planted(0, 1.0)
    cosine, _, _ = ranked(data)
    assert cosine.top_relevant.sum(axis=1).tolist() == [OWN] * QUERIES
    others = np.sort(np.where(cosine.top_relevant, -1, cosine.top_ids), axis=1)[:, OWN:]
    assert np.array_equal(others.ravel(), QUERIES * OWN + np.arange(QUERIES * OTHERS))  # its own distractors, each once
    assert norms.min() > 0
    assert data.text.norm(dim=1).numpy() == pytest.approx(norms[: QUERIES * OWN])
