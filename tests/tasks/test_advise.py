"""The adviser: its rule on numbers with a known answer, its trial on planted vectors, its command on both kinds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmclip import metrics
from mmclip.commands.advise import norm_spread, zero_shot
from mmclip.commands.advise import run as advise
from mmclip.config import AdviseConfig, parse
from mmclip.data.beir import open_beir
from mmclip.errors import UserError
from mmclip.models.metadata import weights_key
from mmclip.retrieval import rank
from mmclip.roles import FIXED_NORMS, NORMS
from mmclip.tasks import advise as task
from mmclip.tasks.advise import CANNOT_TELL, FIXED, MIN_QUERIES, Head, Matched, decide, make_heads, measure
from tests.helpers.texts import make_beir, make_bert
from tests.helpers.tiny import run_script

DIM = 16
# map: random models retrieve something for every query, however late
QUICK = ("--seeds", 2, "--steps", 2, "--batch-size", 16, "--metric", "map", "--device", "cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices: threads would wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def quick(direction: str = "q2d", **others: Any) -> AdviseConfig:
    about: dict[str, Any] = {"steps": 8, "batch_size": 24, "task": "text" if direction == "q2d" else "clip"} | others
    return AdviseConfig(model="m", data="d", direction=direction, **about)


# --- the rule


def made(
    native: Mapping[str, float], own_cosine: Mapping[str, float] = {}, queries: int = 200, noise: float = 0.02
) -> dict[str, dict[str, np.ndarray]]:
    """Values of every norm around a mean each, over hard and easy queries that all norms share."""
    rng = np.random.default_rng(0)
    hardness = rng.uniform(0.2, 0.8, queries)

    def around(mean: float) -> np.ndarray:
        return hardness + mean - 0.5 + noise * rng.standard_normal((3, queries))

    means = {norm: (native.get(norm, 0.5), own_cosine.get(norm, 0.5), 0.5) for norm in NORMS}
    return {norm: dict(zip(("native", "cosine", "dot"), map(around, of), strict=True)) for norm, of in means.items()}


@pytest.mark.parametrize(
    ("native", "own_cosine", "answer", "because"),
    [
        ({"dot": 0.60, "qnorm": 0.62, "learned": 0.55}, {}, "qnorm", "ndcg@10 +0.1"),
        *(({norm: 0.60}, {}, norm, "by norm in its own head") for norm in ("dot", "qnorm", "learned")),
        # its own angles are as good as its scores
        *(
            ({n: 0.60}, {n: 0.60}, CANNOT_TELL, f"{n} gained, but not shown by norm")
            for n in ("dot", "qnorm", "learned")
        ),
        # its control has the gain, too, and keeps no document's norm
        ({"dot": 0.60, "dnorm": 0.60}, {"dnorm": 0.60}, "dnorm", "by training alone"),
        (dict.fromkeys(NORMS[1:], 0.45), {}, "cosine", "no other norm can gain"),
    ],
)
def test_the_answer_is_that_of_the_rule(native: Any, own_cosine: Any, answer: str, because: str) -> None:
    report = decide(made(native, own_cosine), quick())
    assert (report["answer"], report["ties"]) == (answer, ["dot"] if answer == "dnorm" else [])
    assert because in report["because"]
    assert report["sure"] == (None if answer == CANNOT_TELL else 1)


def test_equals_are_named_and_a_level_field_is_cosines_unless_any_gain_matters() -> None:
    equal = made({"qnorm": 0.62})
    equal["dot"] = equal["qnorm"]
    report = decide(equal, quick())
    assert {report["answer"], *report["ties"]} == {"dot", "qnorm"}
    level = decide(made({}, noise=0.001), quick())
    assert (level["answer"], level["sure"]) == ("cosine", 1)
    assert decide(made({}, noise=0.001), quick(margin=0.0))["answer"] == CANNOT_TELL


def test_it_cannot_tell_where_noise_hides_the_margin() -> None:
    report = decide(made({}, noise=0.5), quick())
    largest = metrics.DETECTABLE * max(report["norms"][n]["gain"]["se"] for n in NORMS[1:])
    assert report["answer"] == CANNOT_TELL
    assert report["detectable"] == pytest.approx(largest)
    assert report["because"] == f"at most ±{largest:.3f} ndcg@10 was detectable with 200 queries and 3 seeds"
    part = made({"dot": 0.3, "learned": 0.4}, noise=0.1)
    part["qnorm"] = part["cosine"]
    report = decide(part, quick())
    assert report["answer"] == CANNOT_TELL
    assert report["detectable"] == pytest.approx(metrics.DETECTABLE * report["norms"]["dnorm"]["gain"]["se"])
    assert "; dnorm may gain 0.005 (at most +" in report["because"]
    assert report["because"].endswith("dot, qnorm, learned cannot")


def test_too_few_queries_or_too_few_with_an_answer_are_no_interval() -> None:
    assert decide(made({"qnorm": 0.9}, queries=MIN_QUERIES - 1), quick())["answer"] == CANNOT_TELL
    assert decide(made({"qnorm": 0.9}, queries=MIN_QUERIES), quick())["answer"] == "qnorm"
    silent = made({"qnorm": 0.9})
    for scorings in silent.values():
        for values in scorings.values():
            values[:, MIN_QUERIES - 1 :] = 0
    report = decide(silent, quick())
    assert report["answer"] == CANNOT_TELL
    assert report["because"] == "ndcg@10 is above 0 for 29 of 200 held-out queries: 30 are needed"


@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(3, 12))
def test_an_estimate_is_that_of_the_seed_bootstrap(seed: int, seeds: int, queries: int) -> None:
    values = np.random.default_rng(seed).standard_normal((seeds, queries))
    found = task.estimate(values, resamples=50, seed=seed)
    expected = metrics.mean_interval(values, np.arange(queries), resamples=50, seed=seed)
    assert (found["value"], *found["ci"]) == pytest.approx(expected)
    assert found["se"] > 0


@given(st.lists(st.floats(0.4, 0.6), min_size=4, max_size=4), st.sampled_from([0.01, 0.1]))
def test_the_answer_follows_from_the_intervals_alone(means: list[float], noise: float) -> None:
    report = decide(made(dict(zip(NORMS[1:], means, strict=True)), noise=noise), quick(), resamples=100)
    lows, tops = zip(*(report["norms"][n]["gain"]["ci"] for n in NORMS[1:]), strict=True)
    if report["answer"] in NORMS[1:]:
        assert lows[NORMS.index(report["answer"]) - 1] > 0
    else:
        assert (max(tops) < 0.005) == (report["answer"] == "cosine")


# --- the trial


def planted(kind: str, seed: int, queries: int = 100, others: int = 150) -> Matched:
    """Queries with a document each, among others that match nothing and lie as near by angle. Norms tell them apart
    rightly ("informative"), wrongly ("misleading"), or say nothing ("noise"); "permuted" pairs are not pairs."""
    rng = np.random.default_rng(seed)

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    query = rng.standard_normal((queries, DIM))
    near = query[np.concatenate([np.arange(queries), rng.integers(0, queries, others)])]
    document = unit(near + 0.9 * rng.standard_normal(near.shape))
    norms = rng.lognormal(0, {"noise": 0.5}.get(kind, 0.1), len(document))
    norms[queries:] *= {"informative": 0.5, "misleading": 2.0}.get(kind, 1.0)
    match = rng.permutation(queries) if kind == "permuted" else np.arange(queries)
    sides = {
        "query": torch.tensor(unit(query) * rng.lognormal(0, 0.2, (queries, 1)), dtype=torch.float32),
        "document": torch.tensor(document * norms[:, None], dtype=torch.float32),
    }
    return Matched(sides, np.column_stack([np.arange(queries), match]), np.ones(queries))


def pictures(seed: int = 0, n: int = 90) -> Matched:
    """Images with two captions each; caption 0 describes image 1, too."""
    rng = np.random.default_rng(seed)
    image = rng.standard_normal((n, DIM))
    owner = np.repeat(np.arange(n), 2)
    text = image[owner] + 0.7 * rng.standard_normal((2 * n, DIM))
    pairs = np.concatenate([np.column_stack([owner, np.arange(2 * n)]), [[1, 0]]])
    sides = {side: torch.tensor(x, dtype=torch.float32) for side, x in (("image", image), ("text", text))}
    return Matched(sides, pairs, np.ones(len(pairs)), owner)


def advice(data: Matched, seed: int, norms: tuple[str, ...] = NORMS, **others: Any) -> dict[str, Any]:
    settings = quick(seed=seed, **others)
    return decide(task.run_trial(data, settings, norms)[0]["q2d"], settings)


@pytest.fixture
def one_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "LEARNING_RATES", (1e-3,))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["informative", "misleading", "noise"])
def test_norms_are_kept_where_they_inform_and_nowhere_else(kind: str, seed: int, one_rate: None) -> None:
    expected = ("dot", "qnorm", "learned") if kind == "informative" else ("cosine", CANNOT_TELL)
    assert advice(planted(kind, seed), seed)["answer"] in expected


def test_permuted_pairs_are_never_a_reason_to_keep_norms(one_rate: None) -> None:
    """20 data sets in which there is nothing to learn, by a metric to which every query adds: at most one (5%)."""
    how: Any = {"norms": FIXED_NORMS, "seeds": 2, "metric": "map", "steps": 4}
    reports = [advice(planted("permuted", seed, 90, 0), seed, **how) for seed in range(20)]
    assert all(report["norms"] for report in reports), "each was decided by its intervals"
    assert sum(report["answer"] not in ("cosine", CANNOT_TELL) for report in reports) <= 1


@pytest.mark.parametrize("of_rank", [None, 3])
@pytest.mark.parametrize("norm", FIXED_NORMS)
def test_a_head_starts_with_the_encoders_own_numbers(norm: str, of_rank: int | None) -> None:
    data, settings = planted("informative", 1), quick(rank=of_rank, steps=4)
    query, document = data.embeddings.values()
    batches = task.draw_batches(data, np.arange(40), settings, np.random.default_rng(0))
    tried = list(task.fit(data, data, batches, norm, 0, settings))
    assert [(lr, steps) for _, lr, steps, *_ in tried] == [
        (None, 0),
        *((lr, n) for lr in task.LEARNING_RATES for n in (1, 2, 4)),
    ]
    mean, _, _, heads, exponents = tried[0]
    assert torch.equal(heads["query"](query), query)
    found = measure(data, heads, {"native": exponents}, settings)["q2d"]["native"]
    ranking = rank(query, document, data.pairs, {"x": FIXED[norm]})["x"]
    assert np.array_equal(found, metrics.per_query(ranking.ranks, ranking.offsets, None, ["ndcg@10"])["ndcg@10"])
    assert mean == pytest.approx(found.mean())
    assert not any(torch.equal(trained["query"](query), query) for *_, trained, _ in tried[1:]), "training moves it"


@given(st.integers(0, 1000), st.integers(1, DIM))
def test_low_rank_heads_are_the_identity_and_so_many_dimensions(seed: int, of_rank: int) -> None:
    torch.manual_seed(seed)
    full, low, x = Head(DIM), Head(DIM, DIM, seed), torch.randn(5, DIM)
    head = Head(DIM, of_rank, seed)
    assert low.down is not None
    with torch.no_grad():
        head.up.normal_()
        assert torch.linalg.matrix_rank(head(torch.eye(DIM)) - torch.eye(DIM), rtol=1e-4) <= of_rank
        full.up.normal_()  # a full rank can be any matrix that a full head can
        low.up.copy_(torch.linalg.solve(low.down.double(), full.up.double(), left=False))
        torch.testing.assert_close(low(x), full(x), rtol=1e-2, atol=1e-2)


def test_text_sides_share_a_head_and_clip_sides_do_not() -> None:
    text, clip = make_heads(planted("noise", 0)), make_heads(pictures())
    assert [len(list(heads.parameters())) for heads in (text, clip)] == [1, 2]
    with torch.no_grad():
        next(clip.parameters()).fill_(1.0)
    x = torch.ones(1, DIM)
    assert torch.equal(clip["text"](x), x)
    assert not torch.equal(clip["image"](x), x)


def test_batches_are_distinct_units_with_their_matches_and_known_positives() -> None:
    data, settings, units = pictures(), quick("both", steps=7, batch_size=30), np.arange(40)
    matches = {tuple(p) for p in data.pairs.tolist()}
    batches = task.draw_batches(data, units, settings, np.random.default_rng(0))
    assert len(batches) == 7
    for rows, positives in batches:
        images, texts = rows["image"].tolist(), rows["text"].tolist()
        assert len(set(images)) == 30
        assert set(images) <= set(units.tolist())
        lookup = positives.lookup(False)
        assert lookup is not None
        known = lookup(torch.arange(30), torch.arange(30)) | torch.eye(30, dtype=torch.bool)
        assert known.tolist() == [[(i, t) in matches for t in texts] for i in images]
    again = task.draw_batches(data, units, settings, np.random.default_rng(0))
    assert all(torch.equal(a["text"], b["text"]) for (a, _), (b, _) in zip(batches, again, strict=True))


def test_a_part_holds_whole_units_and_no_row_of_others() -> None:
    data, units = pictures(), np.array([0, 3, 5])
    part = data.part(units)
    assert torch.equal(part.embeddings["image"], data.embeddings["image"][units])
    assert torch.equal(part.embeddings["text"], data.embeddings["text"][[0, 1, 6, 7, 10, 11]])
    assert part.clusters("text").tolist() == [0, 0, 1, 1, 2, 2]
    assert part.pairs.tolist() == [[0, 0], [0, 1], [1, 2], [1, 3], [2, 4], [2, 5]], "image 1 goes with its pair"
    shared = planted("noise", 0).part(units)
    assert len(shared.embeddings["document"]) == 250, "every query meets the whole corpus"
    assert shared.pairs.tolist() == [[0, 0], [1, 3], [2, 5]]


def test_both_directions_are_judged_by_their_mean_an_image_at_a_time(one_rate: None) -> None:
    data, settings = pictures(), quick("both", seeds=2)
    judged, rest = task.judged_units(data, settings)
    assert not set(judged) & set(rest)
    values, chosen = task.run_trial(data, settings)
    assert set(values) == {"i2t", "t2i", "both"}
    for norm in NORMS:
        both, *each = (values[d][norm]["native"] for d in ("both", "i2t", "t2i"))
        assert both.shape == (2, 36)
        np.testing.assert_allclose(both, np.mean(each, axis=0))
    assert len(chosen) == 2 * 5
    part = data.part(judged)
    texts = measure(part, make_heads(data), FIXED, settings)["t2i"]["cosine"]
    image, text = part.embeddings.values()
    ranking = rank(text, image, part.pairs[:, ::-1].copy(), {"cosine": FIXED["cosine"]})["cosine"]
    naive = metrics.per_query(ranking.ranks, ranking.offsets, None, ["ndcg@10"])["ndcg@10"].reshape(-1, 2).mean(axis=1)
    np.testing.assert_allclose(texts, naive)


def test_a_rate_that_destroys_a_head_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "LEARNING_RATES", (1e-9, 1e3))
    _, chosen = task.run_trial(planted("informative", 2), quick(seeds=2, seed=2))
    assert all(c["lr"] != 1e3 for c in chosen)


# --- the command


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_beir(tmp_path_factory.mktemp("beir"), queries=160, documents=200)


def settings(*arguments: object) -> AdviseConfig:
    return parse(AdviseConfig, [str(a) for a in arguments])


def test_text_gives_an_answer_with_evidence_and_a_second_run_encodes_nothing(
    bert: Path, beir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_script("advise.py", "--model", bert, "--data", beir, "--output", tmp_path, *QUICK)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "advise.json").read_text(encoding="utf-8"))
    assert done.stdout.startswith("answer    ")
    assert report["answer"] in (*NORMS, CANNOT_TELL)
    assert report["answer"] in done.stdout.splitlines()[0]
    assert (report["direction"], report["data"]["split"], report["trial"]["n_judged"]) == ("q2d", "train", 32)
    assert set(report["sections"]["q2d"]["norms"]) == {c["norm"] for c in report["trial"]["chosen"]} == set(NORMS)
    assert set(report["evidence"]["lengths"]) == {"query", "document"}
    fisher = report["evidence"]["fisher"]["q2d"]  # too few queries: that of titles, labelled
    assert (fisher["status"], fisher["n"]) == ("determined", 4 * 32)
    assert fisher["reference"].startswith("titles as queries of their own texts, a stand-in that is not the task: ")
    assert fisher["larger"]["raw"] in ("query", "document", "within noise")
    assert (tmp_path / "advise.png").read_bytes().startswith(b"\x89PNG")
    for word in ("CV", "untrained model", "q2d, 32 held out", "kappa", "hypothesis", "scope", "are not fine-tuning"):
        assert word in done.stdout
    again = advise(settings("--model", bert, "--data", beir, "--output", tmp_path, *QUICK))
    messages = capsys.readouterr().err
    assert "taken from" in messages and "encoding" not in messages
    assert again | {"seconds": None} == report | {"seconds": None}


def test_other_settings_or_a_damaged_file_are_encoded_anew(
    bert: Path, beir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def encoding(*more: object) -> bool:
        task.encode(settings("--model", bert, "--data", beir, "--no-fisher", *QUICK, *more), tmp_path)
        return "encoding" in capsys.readouterr().err

    assert [encoding(), encoding()] == [True, False]
    assert [encoding("--document-length", 5) for _ in range(2)] == [True, False]
    assert encoding("--max-items", 100)
    (tmp_path / "vectors.safetensors").write_bytes(b"damaged")
    assert encoding("--max-items", 100)
    layer = torch.nn.Linear(3, 2)
    before = weights_key(layer)
    assert weights_key(layer) == before
    with torch.no_grad():
        layer.bias[0] += 1
    assert weights_key(layer) != before


def test_clip_is_judged_in_both_directions_and_their_mean(
    tiny_data: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ("--model", tiny_model, "--data", tiny_data, "--output", tmp_path, "--workers", 0)
    report = advise(settings(*usual, "--rank", 3, *QUICK))
    assert report["direction"] == "both"
    assert list(report["sections"]) == ["i2t", "t2i", "both"]
    assert report["answer"] == report["sections"]["both"]["answer"]
    assert (report["data"]["split"], report["data"]["n_images"], report["trial"]["n_judged"]) == ("train", 96, 38)
    assert report["evidence"]["fisher"].keys() == {"i2t", "t2i"}
    assert report["evidence"]["fisher"]["t2i"]["status"] == "determined"
    assert "by direction: i2t" in capsys.readouterr().out


@pytest.mark.parametrize(("split", "seen"), [("train", True), ("test", False)])
def test_a_run_that_was_trained_on_the_same_images_says_so(
    learned_run: Path, plain: Path, tmp_path: Path, split: str, seen: bool
) -> None:
    usual = ("--model", learned_run, "--data", plain, "--output", tmp_path, "--workers", 0, "--no-fisher")
    report = advise(settings(*usual, "--split", split, "--direction", "i2t", *QUICK))
    assert list(report["sections"]) == ["i2t"]
    assert any("trained on these very images" in note for note in report["notes"]) is seen


def test_a_folder_without_a_train_split_lends_its_test_queries(bert: Path, tmp_path: Path) -> None:
    folder = make_beir(tmp_path / "data", queries=20, documents=60, splits=("test",))
    assert task.text_split(folder, None) == ("test", True)
    report = advise(settings("--model", bert, "--data", folder, "--output", tmp_path / "out", "--no-fisher", *QUICK))
    assert report["answer"] == CANNOT_TELL
    assert report["because"] == "8 held-out queries and 12 others: 30 and 15 are needed"
    assert any("no train split" in note for note in report["notes"])
    assert not (tmp_path / "out" / "advise.png").exists()


def test_drawn_documents_are_all_that_the_queries_need(beir: Path) -> None:
    data = open_beir(beir, "train")
    assert [len(x) for x in task.drawn(data, 1000, 0)] == [80, 200]
    queries, documents = task.drawn(data, 100, 0)
    assert (len(queries), len(documents)) == (33, 100)
    assert set(data.pairs[np.isin(data.pairs[:, 0], queries), 1]) <= set(documents)
    assert np.array_equal(task.drawn(data, 100, 0)[1], documents)


def test_evidence_is_plain_algebra() -> None:
    data = planted("noise", 0, 40, 20)
    for side, rows in data.embeddings.items():
        x, found = rows.double().norm(dim=1), norm_spread(data)[side]
        assert found["cv"] == pytest.approx(float(x.std() / x.mean()))
        assert found["ci"][0] < found["cv"] < found["ci"][1]
    scorings = zero_shot(data, np.arange(40), quick(metric="mrr@10"))["q2d"]["scorings"]
    assert scorings["cosine"] == scorings["dnorm"]
    assert scorings["dot"] == scorings["qnorm"]
    assert scorings["cosine"]["minus_cosine"] == 0
    assert set(scorings) == set(FIXED_NORMS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--data is missing"),
        (("--data", "x"), "--model is missing"),
        (("--data", "x", "--model", "m", "--seeds", 1), "--seeds 1: expected a whole number of at least 2"),
        (("--data", "x", "--model", "m", "--direction", "q2d"), "--direction q2d of clip data: expected both or i2t"),
        (("--data", "x", "--model", "m", "--task", "text", "--direction", "i2t"), "expected q2d"),
        (("--data", "x", "--model", "m", "--held-out", 0.9), "--held-out 0.9: expected a number from 0.1 to 0.8"),
        (("--data", "x", "--model", "m", "--metric", "ndcg"), "--metric ndcg: "),
        (("--data", "x", "--model", "/no/such", "--task", "text"), "--model /no/such: no such folder"),
    ],
)
def test_refused_settings_are_one_line(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(UserError, match="^.*" + message) as error:
        settings(*arguments)
    assert "\n" not in str(error.value)


def test_the_task_follows_from_the_data(bert: Path, beir: Path, tiny_data: Path, tmp_path: Path) -> None:
    kinds = [settings("--model", "m", "--data", data).kind for data in (beir, tiny_data, "x" * 5000)]
    assert kinds == ["text", "clip", "clip"]
    usual = ("--model", bert, "--data", beir, "--output", tmp_path, "--no-fisher", *QUICK)
    with pytest.raises(UserError, match="--rank 33: the vectors have 32 dimensions"):
        advise(settings(*usual, "--rank", 33))
    with pytest.raises(UserError, match="no split 'dev'; splits in qrels/: test, train"):
        advise(settings(*usual, "--split", "dev"))
