"""The trial on planted vectors: what it must find, what it must not find, and heads against plain algebra."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip import metrics
from mmclip.retrieval.ranking import rank
from mmclip.similarity import Direction
from mmclip.tasks.advise import (
    CANNOT_TELL,
    FIXED,
    Head,
    Heads,
    Matched,
    Trial,
    answer,
    decide,
    draw_batches,
    fit,
    judged_units,
    run_trial,
)

DIM = 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices of 16 columns: threads would wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


QUICK = {"steps": 8, "batch": 24, "learning_rates": (1e-3,)}


def planted(kind: str, seed: int, queries: int = 100, others: int = 150) -> Matched:
    """Queries with a document each, among others that match nothing and lie as near by angle. Lengths tell them apart
    rightly ("informative"), wrongly ("misleading"), or say nothing ("noise"); "permuted" pairs are not pairs."""
    rng = np.random.default_rng(seed)

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    query = rng.standard_normal((queries, DIM))
    near = query[np.concatenate([np.arange(queries), rng.integers(0, queries, others)])]
    document = unit(near + 0.9 * rng.standard_normal(near.shape))
    spread = {"noise": 0.5}.get(kind, 0.1)
    length = rng.lognormal(0, spread, len(document))
    length[queries:] *= {"informative": 0.5, "misleading": 2.0}.get(kind, 1.0)
    match = rng.permutation(queries) if kind == "permuted" else np.arange(queries)
    return Matched(
        ("query", "document"),
        torch.tensor(unit(query) * rng.lognormal(0, 0.2, (queries, 1)), dtype=torch.float32),
        torch.tensor(document * length[:, None], dtype=torch.float32),
        np.column_stack([np.arange(queries), match]),
        np.ones(queries),
    )


def pictures(seed: int = 0, n: int = 90) -> Matched:
    """Images with two captions each; caption 0 describes image 1, too."""
    rng = np.random.default_rng(seed)
    image = rng.standard_normal((n, DIM))
    owner = np.repeat(np.arange(n), 2)
    text = image[owner] + 0.7 * rng.standard_normal((2 * n, DIM))
    pairs = np.concatenate([np.column_stack([owner, np.arange(2 * n)]), [[1, 0]]])
    first, second = (torch.tensor(x, dtype=torch.float32) for x in (image, text))
    return Matched(("image", "text"), first, second, pairs, np.ones(len(pairs)), owner)


def advice(data: Matched, seed: int, **settings: object) -> dict[str, object]:
    judged, rest = judged_units(len(data.first), 0.4, seed)
    trial = Trial({Direction.Q2D: 1.0}, seed=seed, **{**QUICK, **settings})  # type: ignore[arg-type]
    values, _ = run_trial(data, judged, rest, trial)
    return decide(values["q2d"], 0.005, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_length_that_tells_is_kept(seed: int) -> None:
    assert advice(planted("informative", seed), seed)["answer"] in ("dot", "qnorm", "learned")


@pytest.mark.parametrize("kind", ["misleading", "noise"])
@pytest.mark.parametrize("seed", range(3))
def test_length_that_misleads_or_says_nothing_is_not_kept(kind: str, seed: int) -> None:
    assert advice(planted(kind, seed), seed)["answer"] in ("cosine", CANNOT_TELL)


def test_permuted_pairs_are_never_told_to_keep_length() -> None:
    """40 data sets in which there is nothing to find, by a metric to which every query adds: at most two (5%)."""
    norms = ("cosine", "dot", "qnorm", "dnorm")
    found = [advice(planted("permuted", seed, 90, 0), seed, norms=norms, seeds=2, metric="map") for seed in range(40)]
    assert all(report["norms"] for report in found), "each was decided by its intervals"
    assert sum(report["answer"] not in ("cosine", CANNOT_TELL) for report in found) <= 2


def test_too_few_queries_cannot_tell() -> None:
    assert advice(planted("informative", 0, 50), 0)["answer"] == CANNOT_TELL


@pytest.mark.parametrize("of_rank", [None, 3])
def test_a_head_starts_with_the_encoders_own_numbers(of_rank: int | None) -> None:
    data = planted("informative", 1)
    trial = Trial({Direction.Q2D: 1.0}, rank=of_rank, steps=4, batch=24)
    batches = draw_batches(data, np.arange(40), trial, np.random.default_rng(0))
    for norm in ("cosine", "dot", "qnorm", "dnorm"):
        looks = fit(data, batches, trial, norm, 1e-2, seed=0)
        step, heads, exponents = next(looks)
        assert step == 0
        assert torch.equal(heads("query", data.first), data.first)
        found = answer(data, heads, {"native": exponents}, [Direction.Q2D], "ndcg@10")["q2d"]["native"]
        ranking = rank(data.first, data.second, data.pairs, {"x": FIXED[norm]})["x"]
        expected = metrics.per_query(ranking.ranks, ranking.offsets, None, ["ndcg@10"])["ndcg@10"]
        assert np.array_equal(found, expected)
        for _, heads, _ in looks:
            assert not torch.equal(heads("query", data.first), data.first), "training moves it"
        assert next(fit(data, batches, trial, norm, 1e-2, seed=0))[0] == 0


@given(st.integers(0, 1000), st.integers(1, DIM))
def test_low_rank_heads_are_the_identity_and_so_many_dimensions(seed: int, of_rank: int) -> None:
    torch.manual_seed(seed)
    head = Head(DIM, of_rank, seed)
    with torch.no_grad():
        head.up.normal_()
        matrix = head(torch.eye(DIM)) - torch.eye(DIM)
    assert torch.linalg.matrix_rank(matrix, rtol=1e-4) <= of_rank


@given(st.integers(0, 1000))
def test_full_rank_can_be_any_matrix_that_a_full_head_can(seed: int) -> None:
    torch.manual_seed(seed)
    full, low, x = Head(DIM), Head(DIM, DIM, seed), torch.randn(5, DIM)
    assert low.down is not None
    with torch.no_grad():
        full.up.normal_()
        low.up.copy_(torch.linalg.solve(low.down.double(), full.up.double(), left=False))
        torch.testing.assert_close(low(x), full(x), rtol=1e-2, atol=1e-2)


def test_text_sides_share_a_head_and_clip_sides_do_not() -> None:
    text, clip = Heads(("query", "document"), DIM), Heads(("image", "text"), DIM)
    assert len(list(text.parameters())) == 1
    assert len(list(clip.parameters())) == 2
    with torch.no_grad():
        next(clip.parameters()).fill_(1.0)
    x = torch.ones(1, DIM)
    assert torch.equal(clip("text", x), x)
    assert not torch.equal(clip("image", x), x)


def test_batches_are_distinct_units_with_their_matches_and_known_positives() -> None:
    data = pictures()
    trial = Trial({Direction.I2T: 0.5, Direction.T2I: 0.5}, steps=7, batch=30)
    units = np.arange(40)
    matches = {tuple(p) for p in data.pairs.tolist()}
    batches = draw_batches(data, units, trial, np.random.default_rng(0))
    assert len(batches) == 7
    shared = 0
    for batch in batches:
        rows, texts = batch.first.tolist(), batch.second.tolist()
        assert len(set(rows)) == 30
        assert set(rows) <= set(units.tolist())
        naive = [[(r, t) in matches for t in texts] for r in rows]
        lookup = batch.known.lookup(False)
        assert lookup is not None
        known = lookup(torch.arange(30), torch.arange(30)) | torch.eye(30, dtype=torch.bool)
        assert known.tolist() == naive
        shared += int(known.sum()) - 30
    again = draw_batches(data, units, trial, np.random.default_rng(0))
    assert all(torch.equal(a.second, b.second) for a, b in zip(batches, again, strict=True))


def test_a_part_holds_whole_units_and_no_row_of_others() -> None:
    data = pictures()
    units = np.array([0, 3, 5])
    part = data.part(units)
    assert torch.equal(part.first, data.first[units])
    assert part.owner is not None
    assert part.owner.tolist() == [0, 0, 1, 1, 2, 2]
    assert torch.equal(part.second, data.second[[0, 1, 6, 7, 10, 11]])
    assert part.pairs.tolist() == [[0, 0], [0, 1], [1, 2], [1, 3], [2, 4], [2, 5]], (
        "image 1 is not there, its pair goes"
    )
    shared = planted("noise", 0).part(units)
    assert len(shared.second) == 250, "every query meets the whole corpus"
    assert shared.pairs.tolist() == [[0, 0], [1, 3], [2, 5]]


def test_both_directions_are_judged_by_their_mean_an_image_at_a_time() -> None:
    data = pictures()
    judged, rest = judged_units(len(data.first), 0.4, 0)
    assert not set(judged) & set(rest)
    trial = Trial({Direction.I2T: 0.5, Direction.T2I: 0.5}, seeds=2, **QUICK)  # type: ignore[arg-type]
    values, chosen = run_trial(data, judged, rest, trial)
    assert set(values) == {"i2t", "t2i", "both"}
    for norm in trial.norms:
        both, *each = (values[d][norm]["native"] for d in ("both", "i2t", "t2i"))
        assert both.shape == (2, 36)
        np.testing.assert_allclose(both, np.mean(each, axis=0))
    assert len(chosen) == 2 * 5
    heads = Heads(data.sides, DIM)
    texts = answer(data.part(judged), heads, FIXED, [Direction.T2I], "mrr@10")["t2i"]["cosine"]
    part = data.part(judged)
    ranking = rank(part.second, part.first, part.pairs[:, ::-1].copy(), {"cosine": FIXED["cosine"]})["cosine"]
    naive = metrics.per_query(ranking.ranks, ranking.offsets, None, ["mrr@10"])["mrr@10"].reshape(-1, 2).mean(axis=1)
    np.testing.assert_allclose(texts, naive)


def test_what_a_seed_chose_is_the_best_that_its_choosing_queries_saw() -> None:
    data = planted("informative", 2)
    judged, rest = judged_units(100, 0.4, 2)
    trial = Trial({Direction.Q2D: 1.0}, seeds=2, steps=8, batch=24, learning_rates=(1e-9, 1e3), seed=2)
    _, chosen = run_trial(data, judged, rest, trial)
    assert all(c["lr"] != 1e3 for c in chosen), "a rate that destroys a head is not chosen"
