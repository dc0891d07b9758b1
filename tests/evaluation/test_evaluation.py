"""Evaluation, files and comparison, end to end on planted embeddings."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from mmclip import metrics
from mmclip.embeddings.files import Distractors, Embeddings
from mmclip.errors import UserError
from mmclip.evaluation.eval_set import image_text_sets
from mmclip.evaluation.results import Results, load_results, save_results
from mmclip.retrieval.ranking import rank
from mmclip.roles import Exponents, Normalization
from tests.helpers.evaluating import evaluate_clip

COSINE, QNORM = Exponents(1.0, 1.0), Exponents(1.0, 0.0)
N, CAPTIONS, DIM = 120, 5, 32


def eval_data(seed: int = 0, noise: float = 2.0, **changes) -> Embeddings:
    gen = torch.Generator().manual_seed(seed)
    image = torch.randn(N, DIM, generator=gen)
    text = image.repeat_interleave(CAPTIONS, 0) + noise * torch.randn(N * CAPTIONS, DIM, generator=gen)
    fields = {
        "image": image,
        "text": text,
        "pairs": torch.tensor([[t // CAPTIONS, t] for t in range(len(text))]),
        "image_ids": [f"k{i}" for i in range(N)],
        "captions": [" ".join(["word"] * (2 + t % 7)) for t in range(len(text))],
    }
    return Embeddings(**fields | changes)


def rich_data(**changes) -> Embeddings:
    gen = torch.Generator().manual_seed(9)
    fields = {
        "levels": ["full", "full", "partial", "vague", "full"] * N,
        "n_objects": [1 + i % 3 for i in range(N)],
        "distractors": [
            Distractors(
                "distractors",
                0.5 * torch.randn(40, DIM, generator=gen),
                0.5 * torch.randn(50, DIM, generator=gen),
            )
        ],
    }
    return eval_data(**fields | changes)


def run_of(
    data: Embeddings, native: Exponents = QNORM, loss: str = "asym-t2i", name: str = "m", b: int = 200
) -> Results:
    return evaluate_clip(data, native, {"model": name, "trained_with": {"loss": loss}}, resamples=b)


def test_results_have_the_documented_shape_and_values():
    data = eval_data()
    results = evaluate_clip(
        data, QNORM, {"model": "m", "data": {"path": "p", "split": "test"}, "extra": 1}, resamples=100
    )
    r = results.json
    assert r["model"] == "m"
    assert r["extra"] == 1
    assert {"path": "p", "split": "test", "n_images": N, "n_texts": 600}.items() <= r["data"].items()
    assert r["data"]["n_queries"] == {"i2t": N, "t2i": 600}
    for direction, query, document, pairs in (
        ("i2t", data.image, data.text, data.pairs),
        ("t2i", data.text, data.image, data.pairs.flip(1)),
    ):
        assert list(r["retrieval"][direction]) == ["cosine", "dot", "qnorm", "dnorm", "native"]
        ranking = rank(query, document, pairs, {"dot": Normalization.DOT.exponents})["dot"]
        expected = metrics.per_query(ranking.ranks, ranking.offsets)
        numbers = r["retrieval"][direction]["dot"]
        for rate in metrics.RATES:
            assert numbers[rate] == pytest.approx(expected[rate].mean())
            lo, hi = numbers["ci"][rate]
            assert lo <= numbers[rate] <= hi
        assert numbers["median_rank"] == np.median(expected["first_rank"])
        assert numbers["mean_rank"] == np.mean(expected["first_rank"])
        assert "clamped_k" not in numbers
        assert r["retrieval"][direction]["qnorm"] == r["retrieval"][direction]["native"]
        assert np.array_equal(results.query_values("retrieval", direction, "dot", "first_rank"), expected["first_rank"])
    d = r["magnitude"]["image"]["cohens_d"]
    assert set(d["topk"]) == {"value", "ci", "n_relevant", "n_irrelevant"}
    assert d["pairs"] is None
    assert d["pairs_reason"] == "degenerate: every candidate is relevant to 5 queries"
    assert d["corpus"] is None
    lengths = data.image.double().norm(dim=1).numpy()
    assert r["magnitude"]["image"]["cv"] == pytest.approx(lengths.std(ddof=1) / lengths.mean())


def test_pools_have_their_own_candidates_and_queries():
    r = run_of(rich_data()).json
    full, distractors = r["pools"]["full"], r["pools"]["distractors"]
    assert (full["n_texts"], full["n_queries"]) == (360, {"i2t": N, "t2i": 360})
    assert (distractors["n_images"], distractors["n_texts"]) == (N + 40, 650)
    assert distractors["n_queries"] == r["data"]["n_queries"]
    # Fewer candidates with the same queries cannot be harder.
    for scoring, numbers in distractors["retrieval"]["t2i"].items():
        assert numbers["success@1"] <= r["retrieval"]["t2i"][scoring]["success@1"]
    # Distractors are short by construction.
    assert distractors["magnitude"]["text"]["cohens_d"]["corpus"]["ci"][0] > 1
    assert distractors["magnitude"]["text"]["cohens_d"]["pairs"]["value"] > 0
    assert [row["group"] for row in r["magnitude"]["text"]["by_document"]["level"]] == ["full", "partial", "vague"]
    assert [row["n"] for row in r["magnitude"]["image"]["by_document"]["n_objects"]] == [40, 40, 40]
    assert set(r["magnitude"]["image"]["by_query"]) == {"n_words", "level"}


def test_length_that_follows_the_caption_is_seen():
    data = eval_data()
    words = torch.tensor([len(c.split()) for c in data.captions])
    unit = torch.nn.functional.normalize(data.text, dim=1)
    section = run_of(eval_data(text=unit * words[:, None])).json["magnitude"]["text"]
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
    one_cluster = results.json["retrieval"]["t2i"]["cosine"]["ci"]["success@1"]
    assert one_cluster is None
    by_pair = run_of(dataclasses.replace(data, owner=None), COSINE)
    assert by_pair.array("retrieval/t2i/clusters").tolist() == [0, 2]


@pytest.mark.parametrize("length", [0.0, 1.0])
def test_degenerate_embeddings_give_json_without_nan(length):
    data = rich_data(image=torch.full((N, DIM), length), text=torch.full((600, DIM), length))
    results = run_of(data)
    json.dumps(results.json, allow_nan=False)
    numbers = results.json["retrieval"]["t2i"]["native"]
    assert numbers["success@1"] == 0  # every score is equal: the relevant document is last
    assert numbers["tied_queries"] == 600
    assert "topk_reason" in results.json["magnitude"]["image"]["cohens_d"]


def test_results_survive_the_disk_exactly(tmp_path):
    results = run_of(rich_data())
    path = save_results(results, tmp_path / "run")
    assert sorted(p.name for p in path.parent.iterdir()) == ["items.json", "per_query.npz", "results.json"]
    for source in (path, path.parent):
        loaded = load_results(source)
        assert loaded.json == results.json
        assert loaded.per_query.keys() == results.per_query.keys()
        assert all(np.array_equal(v, results.per_query[k]) for k, v in loaded.per_query.items())


def test_bad_files_are_one_line(tmp_path):
    with pytest.raises(UserError, match="no file"):
        load_results(tmp_path)
    path = save_results(run_of(eval_data()), tmp_path)
    good = path.read_text()
    for text, words in (("{", "not a results.json"), ("[]", "not a"), ("{}", "no retrieval"), ("3", "not a")):
        path.write_text(text)
        with pytest.raises(UserError, match=words):
            load_results(path)
    path.write_text(good)
    np.savez(tmp_path / "per_query.npz", x=np.array([object()], dtype=object))  # would need pickle
    with pytest.raises(UserError, match="read safely"):
        load_results(path)
    (tmp_path / "per_query.npz").write_bytes(b"PK")
    with pytest.raises(UserError, match="read safely"):
        load_results(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": torch.ones(600, DIM + 1)}, "text embeddings of shape"),
        ({"image": torch.full((N, DIM), float("nan"))}, "image embeddings: row 0"),
        ({"distractors": [Distractors("x", text=torch.full((2, DIM), float("inf")))]}, "x text embeddings: row 0"),
        ({"pairs": torch.empty(0, 2)}, "at least one"),
        ({"pairs": torch.tensor([[0, 600]])}, "document row 600"),
        ({"image_ids": ["a"]}, "image_ids has 1 entries"),
        ({"levels": ["full"]}, "levels has 1"),
        ({"owner": [N] * 600}, f"owner names image row {N}"),
    ],
)
def test_unusable_data_is_one_line(changes, words):
    with pytest.raises(UserError, match=words) as error:
        image_text_sets(eval_data(**changes))
    assert "\n" not in str(error.value)


def test_progress_is_told_by_pool():
    told = []
    evaluate_clip(rich_data(), QNORM, {}, resamples=10, progress=lambda *a: told.append(a))
    assert told == [("retrieval", 72_000, 72_000), ("full", 43_200, 43_200), ("distractors", 104_000, 104_000)]


def test_missing_per_query_numbers_name_what_is_there():
    with pytest.raises(UserError, match="retrieval/t2i/native"):
        run_of(eval_data(), b=20).query_values("retrieval", "t2i", "learned", "success@1")


def corpus_ci(**changes) -> list[float]:
    gen = torch.Generator().manual_seed(3)
    image = torch.randn(20, DIM, generator=gen).repeat_interleave(5, 0)  # twenty kinds, five copies of each
    extra = Distractors("more", image=image, **changes)
    results = run_of(eval_data(distractors=[extra]), b=400)
    return results.pools["more"]["magnitude"]["image"]["cohens_d"]["corpus"]["ci"]


def test_distractors_of_one_owner_are_drawn_together():
    alone, together = (np.ptp(corpus_ci(**how)) for how in ({}, {"owner": {"image": [i // 5 for i in range(100)]}}))
    assert together > 1.15 * alone, "copies bring no news: the interval must not be that of a hundred items"


def test_twins_share_their_pictures_cluster():
    extra = Distractors("twins", image=torch.randn(3, DIM), owner={"image": [4, 5, 6]}, twins=True)
    pool = image_text_sets(eval_data(distractors=[extra]))[-1]
    assert pool.clusters["image"][-3:].tolist() == [4, 5, 6]
    with pytest.raises(UserError, match=f"one from 0 to {N - 1} for each"):
        eval_data(distractors=[Distractors("x", image=torch.ones(1, DIM), owner={"image": [N]}, twins=True)])


def test_distractors_may_not_be_called_like_another_pool():
    extra = Distractors("retrieval", image=torch.ones(2, DIM))
    with pytest.raises(UserError, match="'retrieval' twice, or like another pool"):
        image_text_sets(eval_data(distractors=[extra]))


def test_gains_are_ranked_by_and_told_apart():
    image, text = torch.eye(3)[:1], torch.eye(3)[[0, 0]] * torch.tensor([[1.0], [0.5]])
    pairs = torch.tensor([[0, 0], [0, 1]])
    runs = []
    for gains in ([1.0, 9.0], [9.0, 1.0]):
        data = Embeddings(image, text, pairs, ["i"], ["a", "b"], gains=np.array(gains))
        runs.append(evaluate_clip(data, Exponents(0.0, 0.0), {"model": "m"}, resamples=5))
    low, high = (r.json["retrieval"]["i2t"]["dot"]["ndcg@10"] for r in runs)
    assert high == 1.0 and low < 0.8
    assert runs[0].json["data"]["fingerprint"] != runs[1].json["data"]["fingerprint"]


def test_results_that_cannot_be_written_replace_none_of_the_old_files(tmp_path):
    results = run_of(eval_data(), b=20)
    save_results(results, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    results.json["broken"] = float("nan")
    results.per_query["more"] = np.ones(3)
    with pytest.raises(ValueError, match="JSON"):
        save_results(results, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
