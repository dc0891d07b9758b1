"""The diagnostics section on planted data: what was planted is found, what was not is not, and it is plain JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy import stats

from mmclip.evaluation import diagnostics as module
from mmclip.evaluation.diagnostics import diagnose, without_text_length
from mmclip.evaluation.eval_set import EvalSet, text_sizes
from mmclip.metrics import fisher, geometry
from mmclip.metrics.magnitude import TOP_K, cohens_d
from mmclip.retrieval import Qrels, rank
from mmclip.roles import FIXED_NORMALIZATIONS, SCALE_INIT, Direction, Exponents, Normalization
from mmclip.similarity import mean_norm_factor, score

QNORM = Exponents(1.0, 0.0)
QUERIES, DIM = 200, 12
HOW = {"resamples": 200, "seed": 0}


def planted(factor: float, spread: float = 0.1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """(query, document, pairs): each query has ten documents around it, the first relevant; norms are normal about 1
    whatever the angles, and those of the relevant then ``factor`` times as long."""
    gen = torch.Generator().manual_seed(seed)
    query = torch.randn(QUERIES, DIM, generator=gen)
    near = torch.nn.functional.normalize(query, dim=1).repeat_interleave(10, 0)
    unit = torch.nn.functional.normalize(near + 0.02 * torch.randn(len(near), DIM, generator=gen), dim=1)
    length = 1 + spread * torch.randn(len(near), generator=gen)
    length[::10] *= factor
    return query, unit * length[:, None], np.column_stack([np.arange(QUERIES), 10 * np.arange(QUERIES)])


def run(query, document, pairs, native=QNORM, **options):
    scorings = {n.value: n.exponents for n in FIXED_NORMALIZATIONS} | {"native": native}
    rankings = rank(query, document, pairs, scorings, top_k={"cosine": TOP_K, "native": TOP_K})
    sides = {"query": query, "document": document}
    units = options.pop("text_length", {})
    data = EvalSet("p", sides, Qrels(pairs), {s: np.arange(len(x)) for s, x in sides.items()}, units)
    options = {"fisher_resamples": 10, **HOW} | options
    return diagnose(data, Direction.Q2D, rankings, native, **options), rankings["cosine"]


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.15, 1.5])
def test_relevant_documents_longer_by_a_known_factor_are_found_at_that_factor(factor):
    query, document, pairs = planted(factor)
    section, cosine = run(query, document, pairs, fisher=False)
    # lengths N(1, .1) and N(f, .1 f), one relevant among ten: d and AUC follow
    pooled = 0.1 * np.sqrt(0.1 * factor**2 + 0.9)
    d = (factor - 1) / pooled
    area = stats.norm.cdf((factor - 1) / (0.1 * np.sqrt(1 + factor**2)))
    lengths = document.norm(dim=1).numpy()
    effects = cohens_d(lengths, cosine, cosine.queries, np.arange(len(document)), **HOW)
    for name in ("topk", "corpus"):
        lo, hi = effects[name][0]["ci"]
        assert lo <= d <= hi, name
        lo, hi = section["auc"][name]["ci"]
        assert lo <= area <= hi, name
    lo, hi = section["auc"]["pairs"]["ci"]
    assert lo <= 0.9 * area + 0.1 * 0.5 <= hi  # a tenth of what is irrelevant to a query is relevant to another
    assert np.sign(section["relevance_count"]["value"]) == np.sign(factor - 1) or factor == 1


def test_relevance_moved_to_other_documents_finds_nothing_and_moved_to_other_queries_the_same():
    query, document, pairs = planted(1.5)
    rng = np.random.default_rng(0)
    moved = np.column_stack([pairs[:, 0], rng.choice(len(document), QUERIES, replace=False)])
    # norm belongs to a document, not to a pair: corpus and pairs cannot depend on the query to which it is relevant
    permuted = np.column_stack([pairs[:, 0], np.roll(pairs[:, 1], 7)])
    one, null, other = (run(query, document, p, fisher=False)[0] for p in (pairs, moved, permuted))
    for name in ("corpus", "pairs"):
        assert null["auc"][name]["value"] == pytest.approx(0.5, abs=0.06)
        assert one["auc"][name]["value"] == pytest.approx(other["auc"][name]["value"])
    assert abs(null["relevance_count"]["value"]) < 0.06
    assert one["relevance_count"] == other["relevance_count"]


def test_the_section_is_plain_json_with_every_documented_key():
    query, document, pairs = planted(1.2)
    words = text_sizes([" ".join(["word"] * (1 + i % 7)) for i in range(len(document))])
    section, _ = run(query, document, pairs, text_length={"document": words})
    json.dumps(section, allow_nan=False)
    keys = diagnose.__doc__.split("over clusters.")[1]
    documented = [line.split()[0] for line in keys.splitlines() if line[12:13].isalpha()]
    assert set(documented) == set(section)
    assert section["fisher"]["status"] == "determined"
    assert set(section["auc"]) == {"topk", "corpus", "pairs"}
    assert section["hubness"]["cosine"] is None  # each document is around one query
    assert "equally often" in section["hubness"]["cosine_reason"]
    assert section["hubness"]["native"]["k"] == TOP_K
    assert set(section["row_entropy"]) == {"cosine", "dot", "qnorm", "dnorm", "native"}
    assert section["magnitude"]["query"]["n"] == QUERIES
    assert section["magnitude"]["document"]["quantiles"]["0.5"] == pytest.approx(1, abs=0.05)
    factors = mean_norm_factor(query, document, QNORM)
    assert section["scale"] == {
        "alpha": pytest.approx(SCALE_INIT / factors),
        "alpha_source": "calibrated",
        "effective_scale": pytest.approx(SCALE_INIT),
    }


def test_every_scoring_is_taken_at_natives_effective_scale():
    query, document, pairs = planted(1.2)
    query = 7 * query
    section, _ = run(query, document, pairs, native=Exponents(0.5, 0.25), alpha=3.0, fisher=False)
    scale = 3.0 * mean_norm_factor(query, document, Exponents(0.5, 0.25))
    assert section["scale"]["effective_scale"] == pytest.approx(scale)
    assert section["scale"]["alpha_source"] == "given"
    assert section["row_entropy"]["native"]["alpha"] == pytest.approx(3.0)
    alpha = scale / mean_norm_factor(query, document, Normalization.DOT.exponents)
    p = score(query, document, Normalization.DOT.exponents, alpha).double().softmax(1).numpy()
    assert section["row_entropy"]["dot"]["mean"] == pytest.approx(stats.entropy(p, axis=1).mean(), rel=1e-4)


def test_length_that_only_follows_the_text_is_gone_without_it():
    query, document, pairs = planted(1.0, spread=0.01)
    rng = np.random.default_rng(0)
    words = rng.integers(3, 12, len(document))
    words[::10] += 6  # relevant captions are long
    document = document * torch.as_tensor(5 + words).float()[:, None]
    units = {"words": words, "characters": 5 * words + rng.integers(0, 5, len(document))}
    section, cosine = run(
        query, document, pairs, text_length={"document": units, "query": {"words": np.arange(QUERIES)}}
    )
    raw = cohens_d(document.norm(dim=1).numpy(), cosine, cosine.queries, np.arange(len(document)), **HOW)
    assert raw["topk"][0]["value"] > 2
    assert abs(section["text_length"]["cohens_d"]["topk"]["value"]) < 0.2
    assert section["text_length"]["document"]["words"]["value"] > 0.9
    assert abs(section["text_length"]["query"]["words"]["value"]) < 0.2


def test_length_beyond_the_text_stays():
    rng = np.random.default_rng(0)
    words, own = rng.integers(3, 12, 500), rng.normal(size=500)
    left, reason = without_text_length(10 + 2.0 * words + own, {"words": words})
    assert reason is None
    assert np.corrcoef(left, own)[0, 1] > 0.99
    assert left.mean() == pytest.approx((10 + 2.0 * words + own).mean())
    words[4] = -1
    assert without_text_length(own, {"words": words}) == (None, "1 of 500 documents have no text")


def test_only_queries_with_a_relevant_document_count_and_entropy_is_of_a_sample(monkeypatch):
    query, document, pairs = planted(1.2)
    more = torch.cat([torch.full((3, DIM), 1e3), query])
    words = {"query": {"words": np.concatenate([[99, 99, 99], np.arange(QUERIES)])}}
    moved, _ = run(more, document, pairs + np.array([3, 0]), fisher=False, text_length=words)
    monkeypatch.setattr(module, "ENTROPY_QUERIES", 50)
    alone, _ = run(query, document, pairs, fisher=False, text_length={"query": {"words": np.arange(QUERIES)}})
    assert moved["magnitude"] == alone["magnitude"]
    assert moved["text_length"] == alone["text_length"]
    assert moved["modality_gap"] == pytest.approx(alone["modality_gap"])
    assert {row["n_queries"] for row in alone["row_entropy"].values()} == {50}


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_degenerate_vectors_give_json_without_nan(value):
    query, document, pairs = planted(1.0)
    section, _ = run(torch.full_like(query, value), torch.full_like(document, value), pairs)
    json.dumps(section, allow_nan=False)
    assert section["auc"]["topk"] is None
    assert section["effective_rank"]["document_reason"] == "the vectors do not vary"
    assert section["entanglement"] is None


def test_no_score_matrix_is_ever_whole(monkeypatch):
    # blocks of 8 rows: 2,000 documents at 32 and 48 bytes a score
    sizes = []

    def watched(query, document, *rest):
        sizes.append(len(query) * len(document))
        return score(query, document, *rest)

    for where, name in ((geometry, "row_entropy"), (fisher, "query_fisher")):
        monkeypatch.setattr(where, "score", watched)
        real = getattr(where, name)
        assert "block_bytes" in real.__kwdefaults__
        monkeypatch.setitem(real.__kwdefaults__, "block_bytes", 8 * 32 * 2000)
    run(*planted(1.2))
    assert max(sizes) < QUERIES * 2000 / 10
