"""Text evaluation against sentence-transformers' evaluator, against metrics.py, and on planted lengths."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmclip import metrics
from mmclip.data.beir import BeirCollection, open_beir
from mmclip.errors import UserError
from mmclip.evaluation.eval_set import text_set
from mmclip.evaluation.evaluate import list_scores, quick_rates
from mmclip.evaluation.results import Results, load_results, save_results
from mmclip.evaluation.trec import measure_run
from mmclip.models.text_encoder import TextEncoder, load_text_model, native_scoring
from mmclip.retrieval import Qrels, rank
from mmclip.roles import Direction, Exponents, Normalization
from mmclip.similarity import score
from tests.helpers.evaluating import evaluate_text

COSINE, QNORM = Exponents(1.0, 1.0), Exponents(1.0, 0.0)


def collection_of(n_q: int = 12, n_d: int = 40, seed: int = 0, graded: bool = True, **changes) -> BeirCollection:
    rng = np.random.default_rng(seed)
    pairs = np.array([(q, d) for q in range(n_q) for d in rng.choice(n_d, min(n_d, rng.integers(1, 9)), replace=False)])
    fields = {
        "path": "p",
        "split": "test",
        "query_ids": [f"q{i}" for i in range(n_q)],
        "queries": [" ".join(["why"] * (1 + i % 5)) for i in range(n_q)],
        "document_ids": [f"d{i}" for i in range(n_d)],
        "documents": [" ".join(["word"] * (i % 11)) for i in range(n_d)],
        "titles": [f"t{i}" for i in range(n_d)],
        "pairs": pairs,
        "gains": rng.integers(1, 5, len(pairs)).astype(float) if graded else np.ones(len(pairs)),
    }
    return BeirCollection(**fields | changes)


def vectors_of(collection: BeirCollection, seed: int = 0, dim: int = 6, coarse: bool = False):
    gen = torch.Generator().manual_seed(seed)
    found = [torch.randn(len(x), dim, generator=gen) for x in (collection.queries, collection.documents)]
    return [x.round() for x in found] if coarse else found


def evaluated(collection: BeirCollection, native: Exponents = QNORM, seed: int = 0, **how) -> Results:
    coarse = how.pop("coarse", False)
    vectors = vectors_of(collection, seed, coarse=coarse)
    return evaluate_text(collection, *vectors, native, {"model": "m"}, **{"resamples": 20, **how})


@settings(max_examples=16)
@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.booleans())
def test_every_query_has_ir_measures_numbers(seed, graded, coarse, excluding):
    """Also where scores tie (coarse vectors) and where documents are excluded; what lists of 40 are too short for and
    map against metrics of the whole ranking."""
    c = collection_of(seed=seed, graded=graded)
    if excluding:
        taken = set(map(tuple, c.pairs.tolist()))
        c.excluded = {q: [d for d in range(40) if (q, d) not in taken and (q + d) % 3 == 0] for q in (0, 5)}
    done = evaluated(c, seed=seed, coarse=coarse, resamples=2, depth=100)
    pairs = np.array([(q, d) for q, rows in c.excluded.items() for d in rows], dtype=int).reshape(-1, 2)
    query, document = vectors_of(c, seed, coarse=coarse)
    for name in ("cosine", "dot", "native"):
        exponents = QNORM if name == "native" else Normalization(name).exponents
        r = rank(query, document, Qrels(c.pairs, c.gains), {name: exponents}, excluded=pairs)[name]
        expected = metrics.per_query(r.ranks, r.offsets, r.gains, metrics.TEXT_RATES)
        run = {  # in our order: equal scores would be sorted by id
            c.query_ids[q]: {c.document_ids[d]: -float(place) for place, d in enumerate(ids)}
            for q, ids in zip(done.lists[name].queries, done.lists[name].top_ids.tolist(), strict=True)
        }
        theirs = measure_run(c, run, [m for m in metrics.TEXT_RATES if m != "recall@100" or not excluding])
        assert len(theirs) == len(metrics.TEXT_RATES) - 1 - excluding
        for rate, values in (expected | theirs).items():
            assert np.allclose(expected[rate], values, rtol=1e-12, atol=1e-12), (name, rate)
            assert np.array_equal(done.query_values("retrieval", "q2d", name, rate), expected[rate].astype(np.float32))
            assert rate == "first_rank" or done.json["retrieval"]["q2d"][name][rate] == expected[rate].mean()


def test_the_evaluation_has_clips_shape_in_the_one_direction(tmp_path: Path) -> None:
    c = collection_of(notes=["n"])
    facts = {"model": "m", "trained_with": {"loss": "q2d"}, "data": {"encoded": 1}, "extra": 2}
    query, document = vectors_of(c)
    done = evaluate_text(c, query, document, QNORM, facts, alpha=3.0, resamples=30)
    r = done.json
    json.dumps(r, allow_nan=False)
    assert (r["model"], r["trained_with"], r["extra"]) == ("m", {"loss": "q2d"}, 2)
    expected = {"path": "p", "split": "test", "n_queries": {"q2d": 12}, "n_documents": 40, "n_empty": 4, "encoded": 1,
                "n_pairs": len(c.pairs), "fingerprint": c.fingerprint(), "notes": ["n"]}  # fmt: skip
    assert expected.items() <= r["data"].items()
    assert r["data"]["chance"]["q2d"] == pytest.approx(len(c.pairs) / 12 / 40)
    assert list(r["retrieval"]["q2d"]) == ["cosine", "dot", "qnorm", "dnorm", "native"]
    assert r["retrieval"]["q2d"]["native"] == r["retrieval"]["q2d"]["dot"]
    for numbers in r["retrieval"]["q2d"].values():
        assert set(metrics.TEXT_RATES) | {"ci", "median_rank", "mean_rank", "tied_queries"} <= set(numbers)
        assert numbers["clamped_k"] == {"recall@100": 40}
        for rate in metrics.TEXT_RATES:
            lo, hi = numbers["ci"][rate]
            assert lo <= numbers[rate] <= hi
    assert r["magnitude"]["query"]["mean"] == pytest.approx(float(query.norm(dim=1).mean()))
    assert set(r["magnitude"]["document"]["cohens_d"]) >= {"topk", "corpus", "pairs"}
    told = r["diagnostics"]["q2d"]
    assert told["scale"]["alpha"] == 3.0 and "relevance_count" in told and "fisher" not in told
    assert {"query", "document", "cohens_d"} <= set(told["text_length"])
    assert r["evaluation"]["native"] == {"gamma_q": 1.0, "gamma_d": 0.0}
    save_results(done, tmp_path)
    again = load_results(tmp_path)
    assert again.items == done.items and again.items["titles"][3] == "t3"
    assert again.json == r
    assert np.array_equal(again.array("retrieval/lengths/query"), done.array("retrieval/lengths/query"))


def test_runs_hold_the_similarity_in_order_and_skip_what_is_excluded() -> None:
    c = collection_of(excluded={0: [39]}, pairs=np.array([[q, q] for q in range(12)]), gains=np.ones(12))
    query, document = vectors_of(c)
    done = evaluate_text(c, query, document, Exponents(0.25, 0.5), {}, resamples=2, depth=100)
    assert set(done.lists) == {"cosine", "dot", "qnorm", "dnorm", "native"}
    for name, ranking in done.lists.items():
        exponents = Exponents(0.25, 0.5) if name == "native" else Normalization(name).exponents
        every = score(query.double(), document.double(), exponents).numpy()
        ids, scores = ranking.top_ids, list_scores(text_set(c, query, document), Direction.Q2D, ranking, exponents)
        assert np.allclose(np.take_along_axis(every, ids, 1), scores, rtol=1e-5, atol=1e-6)
        assert (np.diff(scores, axis=1) <= 0).all()
        assert ids.shape == (12, 39) and 39 not in ids[0]
        assert 39 in ids[1] or every[1].argmin() == 39  # one of 40 is always left out of 39


def test_planted_lengths_are_seen_in_d_and_make_dot_better() -> None:
    gen = torch.Generator().manual_seed(1)
    base = torch.randn(100, 16, generator=gen)
    twins = base.repeat_interleave(2, 0) + 0.3 * torch.randn(200, 16, generator=gen)
    twins = twins / twins.norm(dim=1, keepdim=True) * (1 + 0.5 * (torch.arange(200) % 2 == 0))[:, None]
    twins = twins * (1 + 0.05 * torch.randn(200, 1, generator=gen))
    names = [str(i) for i in range(200)]
    pairs = np.array([[q, 2 * q] for q in range(100)])
    c = BeirCollection("p", "s", names[:100], names[:100], names, names, names, pairs, np.ones(100))
    query = base + 0.5 * torch.randn(100, 16, generator=gen)
    r = evaluate_text(c, query, twins, QNORM, {}, resamples=200).json
    d = r["magnitude"]["document"]["cohens_d"]
    assert d["corpus"]["ci"][0] > 2 and d["topk"]["ci"][0] > 0
    numbers = r["retrieval"]["q2d"]
    assert numbers["dot"]["ci"]["ndcg@10"][0] > numbers["cosine"]["ci"]["ndcg@10"][1]
    assert r["diagnostics"]["q2d"]["relevance_count"]["value"] > 0.8


def test_quick_numbers_are_the_evaluations() -> None:
    c = collection_of(excluded={3: [1]}, pairs=np.array([[q, q + 5] for q in range(12)]), gains=np.ones(12))
    quick = quick_rates(text_set(c, *vectors_of(c)), QNORM, [Direction.Q2D], ("ndcg@10", "success@1"))
    numbers = evaluated(c).json["retrieval"]["q2d"]
    assert quick == {
        f"val_q2d_{rate}_{name}": pytest.approx(numbers[name][rate])
        for rate in ("ndcg@10", "success@1")
        for name in ("native", "cosine")
    }


def test_gains_that_are_no_small_whole_numbers_are_our_own_ndcg() -> None:
    c = collection_of()
    for gains in (c.gains / 2, c.gains * 1e6):
        done = evaluated(replace(c, gains=gains))
        whole = evaluated(c).json["retrieval"]["q2d"]["cosine"]  # nDCG does not know the unit of gains
        assert done.json["retrieval"]["q2d"]["cosine"]["ndcg@10"] == pytest.approx(whole["ndcg@10"])


def test_one_line_errors() -> None:
    c = collection_of()
    query, document = vectors_of(c)
    for q, d, native, words in (
        (query[1:], document, QNORM, r"query embeddings of shape \[11, 6\]: 12 rows"),
        (query, document[:, :0], QNORM, "document embeddings of shape"),
        (query, document[:, :3], QNORM, "one dimension for all"),
        (query, document * 1e20, QNORM, "divide all embeddings"),
        (query * float("nan"), document, QNORM, "row 0 holds NaN"),
        (query, document, Exponents(1.0, float("inf")), "must be finite"),
    ):
        with pytest.raises(UserError, match=words):
            evaluate_text(c, q, d, native, {})
    q, d = c.pairs[-1]
    with pytest.raises(UserError, match=f"query 'q{q}' excludes document 'd{d}', which is judged relevant"):
        evaluated(replace(c, excluded={int(q): [int(d)]}))


def test_how_a_model_is_scored_is_what_it_says() -> None:
    def of(said: str, removed=(), facts=None) -> TextEncoder:
        return TextEncoder(SimpleNamespace(similarity_fn_name=said), "m", list(removed), facts or {})

    trained = {"gamma_q": 0.4, "gamma_d": 0.0, "logit_scale_q2d": 7.5}
    assert native_scoring(of("dot", facts=trained)) == (Exponents(0.4, 0.0), 7.5)
    assert native_scoring(of("dot", facts=trained | {"logit_scale_q2d": None})) == (Exponents(0.4, 0.0), None)
    assert native_scoring(of("cosine")) == (COSINE, None)
    assert native_scoring(of("dot")) == (Exponents(0.0, 0.0), None)
    assert native_scoring(of("dot", removed=["Normalize"])) == (COSINE, None)
    with pytest.raises(UserError, match="its similarity is manhattan"):
        native_scoring(of("manhattan"))


@pytest.fixture(scope="module")
def cranfield(shared: Path) -> tuple[BeirCollection, torch.Tensor, torch.Tensor]:
    """MiniLM's vectors, documents and queries cut to 64 tokens."""
    model = load_text_model(str(shared / "models/all-MiniLM-L6-v2"), query_length=64, document_length=64)
    assert model.removed == ["Normalize"]
    c = open_beir(shared / "data/cranfield", "test")
    return c, model.encode(c.queries, "query"), model.encode(c.documents, "document")


def test_zero_shot_equals_sentence_transformers_evaluator(cranfield) -> None:
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from sentence_transformers.util import cos_sim

    c, query, document = cranfield
    relevant: dict[str, set[str]] = {}
    for q, d in c.pairs.tolist():
        relevant.setdefault(c.query_ids[q], set()).add(c.document_ids[d])
    evaluator = InformationRetrievalEvaluator(
        dict(zip(c.query_ids, c.queries, strict=True)),
        dict(zip(c.document_ids, c.documents, strict=True)),
        relevant,
        precision_recall_at_k=[5, 100],
        accuracy_at_k=[1, 10],
        score_functions={"cosine": cos_sim},
    )
    evaluator.embed_inputs = lambda model, texts, encode_fn_name, **_: query if encode_fn_name == "query" else document
    theirs = evaluator.compute_all_metrics(None)["cosine"]
    binary = replace(c, gains=np.ones_like(c.gains))
    ours = evaluate_text(binary, query, document, COSINE, {}, resamples=2).json["retrieval"]["q2d"]["native"]
    for rate, value in (
        ("ndcg@10", theirs["ndcg@k"][10]),
        ("mrr@10", theirs["mrr@k"][10]),
        ("recall@100", theirs["recall@k"][100]),
        ("success@1", theirs["accuracy@k"][1]),
    ):
        assert ours[rate] == pytest.approx(value, abs=1e-3)
    assert ours["ndcg@10"] > 0.45


def test_graded_cranfield_is_ir_measures_on_the_written_files(cranfield, tmp_path: Path) -> None:
    import ir_measures

    from mmclip.evaluation.trec import write_qrels, write_run

    c, query, document = cranfield
    assert set(c.gains) > {1.0}
    done = evaluate_text(c, query, document, QNORM, {}, resamples=2, depth=100)
    write_qrels(tmp_path / "qrels.trec", c)
    data = text_set(c, query, document)
    for name, ranking in done.lists.items():
        exponents = QNORM if name == "native" else Normalization(name).exponents
        scores = list_scores(data, Direction.Q2D, ranking, exponents)
        write_run(tmp_path / "run.trec", c, ranking, scores, "t", 100)
        theirs = ir_measures.calc_aggregate(
            [ir_measures.nDCG @ 10, ir_measures.R @ 100, ir_measures.RR @ 10, ir_measures.Success @ 1],
            ir_measures.read_trec_qrels(str(tmp_path / "qrels.trec")),
            ir_measures.read_trec_run(str(tmp_path / "run.trec")),
        )
        numbers = done.json["retrieval"]["q2d"][name]
        names = {"nDCG@10": "ndcg@10", "R@100": "recall@100", "RR@10": "mrr@10", "Success@1": "success@1"}
        assert len(theirs) == len(names)
        for measure, value in theirs.items():
            assert numbers[names[str(measure)]] == pytest.approx(value, abs=1e-6)
