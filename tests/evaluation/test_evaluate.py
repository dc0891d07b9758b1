"""Evaluation of planted embeddings: images and texts, directions read in reverse, text retrieval."""

from __future__ import annotations

import dataclasses
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
from mmclip.embeddings.files import Distractors, Embeddings
from mmclip.errors import UserError
from mmclip.evaluation.eval_set import text_set
from mmclip.evaluation.evaluate import list_scores, quick_rates
from mmclip.evaluation.results import CORRECTED, NATIVE, REVERSED
from mmclip.evaluation.trec import measure_run, write_qrels, write_run
from mmclip.models.text_encoder import TextEncoder, load_text_model, native_scoring
from mmclip.retrieval import Qrels, rank
from mmclip.retrieval.hubness import TRANSDUCTIVE, QueryBank
from mmclip.roles import SCALE_INIT, Direction, Exponents, Normalization
from mmclip.similarity import mean_norm_factor, score
from tests.helpers.evaluating import (
    COSINE,
    DIM,
    QNORM,
    N,
    collection_of,
    eval_data,
    evaluate_clip,
    evaluate_text,
    evaluated,
    rich_data,
    run_of,
    vectors_of,
)

DOT = Normalization.DOT.exponents


def test_results_have_the_documented_shape_and_values():
    data = eval_data()
    about = {"model": "m", "data": {"path": "p", "split": "test"}, "extra": 1}
    results = evaluate_clip(data, QNORM, about, resamples=100)
    r = results.json
    assert (r["model"], r["extra"]) == ("m", 1)
    assert {"path": "p", "split": "test", "n_images": N, "n_texts": 600}.items() <= r["data"].items()
    assert r["data"]["n_queries"] == {"i2t": N, "t2i": 600}
    for direction, query, document, pairs in (
        ("i2t", data.image, data.text, data.pairs),
        ("t2i", data.text, data.image, data.pairs.flip(1)),
    ):
        assert list(r["retrieval"][direction]) == ["cosine", "dot", "qnorm", "dnorm", "native"]
        ranking = rank(query, document, pairs, {"dot": DOT})["dot"]
        expected = metrics.per_query(ranking.ranks, ranking.offsets)
        numbers = r["retrieval"][direction]["dot"]
        for rate in metrics.RATES:
            assert numbers[rate] == pytest.approx(expected[rate].mean())
            assert numbers["ci"][rate][0] <= numbers[rate] <= numbers["ci"][rate][1]
        assert numbers["median_rank"] == np.median(expected["first_rank"])
        assert numbers["mean_rank"] == np.mean(expected["first_rank"])
        assert "clamped_k" not in numbers
        assert r["retrieval"][direction]["qnorm"] == r["retrieval"][direction]["native"]
        assert np.array_equal(results.query_values("retrieval", direction, "dot", "first_rank"), expected["first_rank"])
    d = r["magnitude"]["image"]["cohens_d"]
    assert set(d["topk"]) == {"value", "ci", "n_relevant", "n_irrelevant"}
    assert d["pairs"] is None and d["pairs_reason"] == "degenerate: every candidate is relevant to 5 queries"
    assert d["corpus"] is None
    norms = data.image.double().norm(dim=1).numpy()
    assert r["magnitude"]["image"]["cv"] == pytest.approx(norms.std(ddof=1) / norms.mean())


def test_pools_have_their_own_candidates_and_queries_and_report_progress():
    calls = []
    r = evaluate_clip(rich_data(), QNORM, resamples=100, progress=lambda *a: calls.append(a)).json
    assert calls == [("retrieval", 72_000, 72_000), ("full", 43_200, 43_200), ("distractors", 104_000, 104_000)]
    full, distractors = r["pools"]["full"], r["pools"]["distractors"]
    assert (full["n_texts"], full["n_queries"]) == (360, {"i2t": N, "t2i": 360})
    assert (distractors["n_images"], distractors["n_texts"]) == (N + 40, 650)
    assert distractors["n_queries"] == r["data"]["n_queries"]
    for scoring, numbers in distractors["retrieval"]["t2i"].items():  # more candidates cannot be easier
        assert numbers["success@1"] <= r["retrieval"]["t2i"][scoring]["success@1"]
    d = distractors["magnitude"]["text"]["cohens_d"]  # distractors have small norms by construction
    assert d["corpus"]["ci"][0] > 1 and d["pairs"]["value"] > 0
    assert [row["group"] for row in r["magnitude"]["text"]["by_document"]["level"]] == ["full", "partial", "vague"]
    assert [row["n"] for row in r["magnitude"]["image"]["by_document"]["n_objects"]] == [40, 40, 40]
    assert set(r["magnitude"]["image"]["by_query"]) == {"n_words", "level"}


def test_norms_that_follow_the_caption_show_in_spearman_and_groups():
    data = eval_data()
    words = torch.tensor([len(c.split()) for c in data.captions])
    unit = torch.nn.functional.normalize(data.text, dim=1)
    section = run_of(eval_data(text=unit * words[:, None]), b=2).json["magnitude"]["text"]
    assert section["spearman"]["n_words"]["value"] > 0.98  # equal up to rounding within a word count
    means = [row["mean"] for row in section["by_document"]["n_words"]]
    assert means == sorted(means)


def test_captions_relevant_to_many_images_and_images_without_captions():
    pairs = torch.tensor([[0, 0], [1, 0], [2, 0], [2, 1]])  # caption 2 and image 3 match nothing, and stay candidates
    x, y = torch.eye(4), torch.tensor([[1.0, 1, 0.5, 2], [0, 0, 1, 0.1], [1, 0, 0, 0.0]])
    data = Embeddings(x, y, pairs, list("abcd"), ["p", "q", "r"], owner=[2, 2, 3])
    results = run_of(data, COSINE)
    assert results.json["data"]["n_queries"] == {"i2t": 3, "t2i": 2}
    assert results.array("retrieval/t2i/clusters").tolist() == [2, 2]  # the owner's, not the first pair's
    assert results.json["retrieval"]["t2i"]["dot"]["clamped_k"]["success@5"] == 4
    assert results.query_values("retrieval", "t2i", "cosine", "first_rank").tolist() == [2, 1]
    assert results.query_values("retrieval", "i2t", "cosine", "first_rank").tolist() == [2, 1, 1]
    assert results.json["retrieval"]["t2i"]["cosine"]["ci"]["success@1"] is None  # one cluster
    by_pair = run_of(dataclasses.replace(data, owner=None), COSINE)
    assert by_pair.array("retrieval/t2i/clusters").tolist() == [0, 2]


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_degenerate_embeddings_give_json_without_nan(value):
    results = run_of(rich_data(image=torch.full((N, DIM), value), text=torch.full((600, DIM), value)), b=2)
    json.dumps(results.json, allow_nan=False)
    numbers = results.json["retrieval"]["t2i"]["native"]
    assert numbers["success@1"] == 0  # every score is equal: the relevant document is last
    assert numbers["tied_queries"] == 600
    assert "topk_reason" in results.json["magnitude"]["image"]["cohens_d"]


def test_distractors_of_one_owner_are_drawn_together():
    def ci(**changes) -> list[float]:
        gen = torch.Generator().manual_seed(3)
        image = torch.randn(20, DIM, generator=gen).repeat_interleave(5, 0)  # twenty kinds, five copies of each
        results = run_of(eval_data(distractors=[Distractors("more", image=image, **changes)]), b=400)
        return results.pools["more"]["magnitude"]["image"]["cohens_d"]["corpus"]["ci"]

    alone, together = (np.ptp(ci(**how)) for how in ({}, {"owner": {"image": [i // 5 for i in range(100)]}}))
    assert together > 1.15 * alone, "copies bring no news: the interval must not be that of a hundred items"


def test_gains_are_ranked_by_and_change_the_fingerprint():
    image, text = torch.eye(3)[:1], torch.eye(3)[[0, 0]] * torch.tensor([[1.0], [0.5]])
    runs = []
    for gains in ([1.0, 9.0], [9.0, 1.0]):
        pairs = torch.tensor([[0, 0], [0, 1]])
        data = Embeddings(image, text, pairs, ["i"], ["a", "b"], gains=np.array(gains))
        runs.append(evaluate_clip(data, DOT, {"model": "m"}, resamples=5))
    low, high = (r.json["retrieval"]["i2t"]["dot"]["ndcg@10"] for r in runs)
    assert high == 1.0 and low < 0.8
    assert runs[0].json["data"]["fingerprint"] != runs[1].json["data"]["fingerprint"]


# reversed and corrected, against naive matrices of the trained direction


def vectors(seed: int, n: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(n, 8, generator=gen) * (0.5 + torch.rand(n, 1, generator=gen) * 3)


def two_captions(**changes: object) -> Embeddings:
    """40 images with two captions each."""
    image = vectors(0, 40)
    pairs = torch.tensor([[t // 2, t] for t in range(80)])
    names = [f"i{i}" for i in range(40)], [f"t{t}" for t in range(80)]
    return Embeddings(image, image.repeat_interleave(2, 0) + vectors(1, 80), pairs, *names, **changes)


BANK = QueryBank("train", {"image": vectors(8, 20), "text": vectors(9, 30)})


@pytest.mark.parametrize("native", [QNORM, Exponents(0.0, 0.0), Exponents(0.4, 0.7), COSINE])
@pytest.mark.parametrize("trained", [Direction.I2T, Direction.T2I])
def test_the_other_direction_is_ranked_by_the_trained_matrix(native: Exponents, trained: Direction) -> None:
    d, direction = two_captions(), trained.opposite.value
    results = evaluate_clip(d, native, scales={trained: 2.5}, bank=BANK, resamples=2)
    query, document = trained.roles({"image": d.image.double(), "text": d.text.double()})
    matrix = score(query, document, native, 2.5)
    offsets = score(query, BANK.vectors[trained.document_side].double(), native, 2.5).logsumexp(1)
    relevant = torch.zeros(40, 80, dtype=torch.bool)
    relevant[d.pairs[:, 0], d.pairs[:, 1]] = True
    relevant = relevant.T if trained is Direction.I2T else relevant
    for scoring, scores in ((REVERSED, matrix.T), (CORRECTED, (matrix - offsets[:, None]).T)):
        best = scores.masked_fill(~relevant, -torch.inf).amax(1, keepdim=True)
        expected = 1 + (scores.masked_fill(relevant, -torch.inf) >= best).sum(1)
        assert results.query_values("retrieval", direction, scoring, "first_rank").tolist() == expected.tolist()
    assert not {REVERSED, CORRECTED} & set(results.json["retrieval"][trained.value]), "its opposite was not trained"
    facts = results.json["retrieval"][direction][CORRECTED]
    size = len(BANK.vectors[trained.document_side])
    expected = {"bank": "train", "bank_size": size, "transductive": False, "alpha": 2.5, "alpha_source": "given"}
    assert expected.items() <= facts.items()


def test_a_model_trained_both_ways_is_corrected_both_ways() -> None:
    scales = {Direction.I2T: 9.0, Direction.T2I: 9.0}
    results = evaluate_clip(two_captions(), COSINE, scales=scales, bank=BANK, resamples=2)
    for direction, size in (("i2t", 20), ("t2i", 30)):
        numbers = results.json["retrieval"][direction]
        assert numbers[REVERSED] == numbers[NATIVE], "cosine reads the same both ways"
        assert numbers[CORRECTED]["bank_size"] == size


def test_a_transductive_bank_is_the_pools_own_items_and_an_unknown_scale_is_calibrated() -> None:
    d = two_captions(distractors=[Distractors("more", text=vectors(5, 10))])
    results = evaluate_clip(d, QNORM, scales={Direction.I2T: None}, bank=QueryBank(TRANSDUCTIVE), resamples=2)
    for pool, size in (("retrieval", 80), ("more", 90)):
        facts = results.pools[pool]["retrieval"]["t2i"][CORRECTED]
        assert facts["transductive"] and facts["bank_size"] == size
        assert facts["alpha"] == pytest.approx(SCALE_INIT / mean_norm_factor(d.image, d.text, QNORM))
        assert facts["alpha_source"] == "calibrated"


@pytest.mark.parametrize(("how", "scorings"), [({"scales": {Direction.I2T: 2.5}}, {REVERSED}), ({"bank": BANK}, set())])
def test_without_a_bank_or_without_training_nothing_is_corrected(how, scorings) -> None:
    numbers = evaluate_clip(two_captions(), QNORM, resamples=2, **how).json["retrieval"]["t2i"]
    assert set(numbers) & {REVERSED, CORRECTED} == scorings


# text retrieval


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


def test_the_evaluation_of_text_has_clips_shape_in_the_one_direction() -> None:
    c = collection_of(notes=["n"])
    facts = {"model": "m", "trained_with": {"loss": "q2d"}, "data": {"encoded": 1}, "extra": 2}
    query, document = vectors_of(c)
    r = evaluate_text(c, query, document, QNORM, facts, alpha=3.0, resamples=30).json
    json.dumps(r, allow_nan=False)
    assert (r["model"], r["trained_with"], r["extra"]) == ("m", {"loss": "q2d"}, 2)
    expected = {"path": "p", "split": "test", "n_queries": {"q2d": 12}, "n_documents": 40, "n_empty": 4, "encoded": 1,
                "n_pairs": len(c.pairs), "fingerprint": c.fingerprint(), "notes": ["n"]}  # fmt: skip
    assert expected.items() <= r["data"].items() and "pools" not in r
    assert r["data"]["chance"]["q2d"] == pytest.approx(len(c.pairs) / 12 / 40)
    assert list(r["retrieval"]["q2d"]) == ["cosine", "dot", "qnorm", "dnorm", "native"]
    assert r["retrieval"]["q2d"]["native"] == r["retrieval"]["q2d"]["dot"]
    for numbers in r["retrieval"]["q2d"].values():
        assert set(metrics.TEXT_RATES) | {"ci", "median_rank", "mean_rank", "tied_queries"} <= set(numbers)
        assert numbers["clamped_k"] == {"recall@100": 40}
        assert all(numbers["ci"][m][0] <= numbers[m] <= numbers["ci"][m][1] for m in metrics.TEXT_RATES)
    assert r["magnitude"]["query"]["mean"] == pytest.approx(float(query.norm(dim=1).mean()))
    assert set(r["magnitude"]["document"]["cohens_d"]) >= {"topk", "corpus", "pairs"}
    section = r["diagnostics"]["q2d"]
    assert section["scale"]["alpha"] == 3.0 and "relevance_count" in section and "fisher" not in section
    assert {"query", "document", "cohens_d"} <= set(section["text_length"])
    assert r["evaluation"]["native"] == {"gamma_q": 1.0, "gamma_d": 0.0} and r["evaluation"]["ir_measures"] == []


def test_lists_have_the_similarity_in_order_and_skip_what_is_excluded() -> None:
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


def test_planted_norms_show_in_d_and_make_dot_better() -> None:
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


def test_validation_numbers_are_the_evaluations_and_ndcg_does_not_know_the_unit_of_gains() -> None:
    c = collection_of(excluded={3: [1]}, pairs=np.array([[q, q + 5] for q in range(12)]), gains=np.ones(12))
    quick = quick_rates(text_set(c, *vectors_of(c)), QNORM, [Direction.Q2D], ("ndcg@10", "success@1"))
    numbers = evaluated(c).json["retrieval"]["q2d"]
    assert quick == {
        f"val_q2d_{rate}_{name}": pytest.approx(numbers[name][rate])
        for rate in ("ndcg@10", "success@1")
        for name in ("native", "cosine")
    }
    graded = collection_of()
    one, *others = (
        evaluated(replace(graded, gains=graded.gains * unit)).json["retrieval"]["q2d"]["cosine"]["ndcg@10"]
        for unit in (1, 0.5, 1e6)
    )
    assert others == pytest.approx([one, one])


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
    assert native_scoring(of("dot")) == (DOT, None)
    assert native_scoring(of("dot", removed=["Normalize"])) == (COSINE, None)
    with pytest.raises(UserError, match="its similarity is manhattan"):
        native_scoring(of("manhattan"))


@pytest.fixture(scope="module")
def cranfield(shared: Path) -> tuple[BeirCollection, torch.Tensor, torch.Tensor]:
    """MiniLM's vectors, documents and queries cut to 32 tokens."""
    model = load_text_model(str(shared / "models/all-MiniLM-L6-v2"), query_length=32, document_length=32)
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
    assert ours["ndcg@10"] > 0.35


def test_graded_cranfield_is_ir_measures_on_the_written_files(cranfield, tmp_path: Path) -> None:
    import ir_measures

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
