"""Pairs of sentences: files with their faults, scores from the one similarity, Spearman against scipy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mmclip.errors import UserError
from mmclip.roles import FIXED_NORMALIZATIONS, Exponents, Normalization
from mmclip.tasks.sts import BLOCK, PairBootstrap, evaluate_sts, open_sts, pair_scores, sentence_groups, spearman

TSV = 'sentence2\tscore\tsentence1\nB one.\t1.5\t"A" one.\nB two.\t4\t"A two.\nB three.\t0\tA three.\n'


def write(folder: Path, text: str, name: str = "pairs.tsv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_columns_have_names_and_quote_marks_are_part_of_a_sentence(tmp_path: Path) -> None:
    pairs = open_sts(write(tmp_path, TSV))
    assert pairs.first == ['"A" one.', '"A two.', "A three."]
    assert pairs.second == ["B one.", "B two.", "B three."]
    assert pairs.scores.tolist() == [1.5, 4.0, 0.0]
    head = "index\tgenre\tsource1\tsentence1\tsentence2\tscore\n"
    rows = "".join(f"{i}\tnews\tnone\ta {i}\tb {i}\t{i}.0\n" for i in range(3))
    assert open_sts(write(tmp_path, head + rows)).scores.tolist() == [0, 1, 2]
    hub = "sentence1\tsentence2\tlabel\tidx\na\tb\t0.1\t0\nc\td\t0.2\t1\ne\tf\t0.3\t2\n"
    assert open_sts(write(tmp_path, hub)).second == ["b", "d", "f"]


def test_csv_has_quoting_and_a_fault_behind_a_cell_of_two_lines_has_its_line(tmp_path: Path) -> None:
    text = 'score,sentence1,sentence2\n1,"a, and\nmore","say ""b"""\n2,c,d\n3,e,f\n'
    pairs = open_sts(write(tmp_path, text, "pairs.csv"))
    assert pairs.first == ["a, and\nmore", "c", "e"]
    assert pairs.second[0] == 'say "b"'
    with pytest.raises(UserError, match=r"line 4: .*number, got 'two'"):
        open_sts(write(tmp_path, text.replace("2,c", "two,c"), "pairs.csv"))
    with pytest.raises(UserError, match=r"line 2: 3 columns were expected, as in the header, got 4"):
        open_sts(write(tmp_path, text.replace('"say ""b"""', "b,c"), "pairs.csv"))
    with pytest.raises(UserError, match=r"not CSV: unexpected end of data"):
        open_sts(write(tmp_path, text.replace("3,e", '3,"e'), "pairs.csv"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TSV + "B four.\t2\n", r"line 5: 3 columns were expected, as in the header, got 2"),
        (TSV + "B four.\t2\tA\tB\n", r"line 5: 3 columns were expected"),
        (TSV.replace("\t4\t", "\tfour\t"), r"line 3: the score is a number, got 'four'"),
        (TSV.replace("\t4\t", "\tnan\t"), r"line 3: the score is a number, got 'nan'"),
        (TSV.replace("\t4\t", "\t\t"), r"line 3: the score is a number, got ''"),
        (TSV.replace("score", "mark"), r"line 1: a header with one column of each of score"),
        (TSV.replace("sentence2", "sentence1"), r"line 1: a header"),
        ("", r"line 1: a header .* got nothing"),
        (TSV.rsplit("B three", 1)[0], r"2 pairs; at least 3"),
        (TSV.replace("1.5", "4").replace("\t0\t", "\t4\t"), r"all 3 scores are 4"),
    ],
)
def test_faults_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        open_sts(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_other_encodings_and_empty_sentences(tmp_path: Path) -> None:
    (tmp_path / "latin.tsv").write_bytes(TSV.encode() + "B é\t1\tA\n".encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        open_sts(tmp_path / "latin.tsv")
    notes = open_sts(write(tmp_path, TSV + "\t1\tA five.\n")).notes
    assert notes == [f"1 empty sentence in {tmp_path / 'pairs.tsv'}, scored like all others"]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_groups_are_chains_of_shared_sentences(pairs: list[tuple[int, int]]) -> None:
    groups = sentence_groups([f"S  {a}" for a, _ in pairs], [f"s {b}" for _, b in pairs])
    naive = list(range(len(pairs)))
    for _ in pairs:  # as often as the longest chain
        for i, a in enumerate(pairs):
            for j, b in enumerate(pairs):
                if set(a) & set(b):
                    naive[i] = naive[j] = min(naive[i], naive[j])
    assert [[x == y for y in groups] for x in groups] == [[x == y for y in naive] for x in naive]
    assert sorted(set(groups)) == list(range(len(set(naive))))


@pytest.mark.parametrize("norm", FIXED_NORMALIZATIONS)
def test_pair_scores_are_the_formula_beyond_one_block_with_gradients(norm: Normalization) -> None:
    torch.manual_seed(0)
    q, d = (torch.randn(BLOCK + 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gq, gd = norm.exponents
    naive = 0.5 * (q * d).sum(1) / (q.norm(dim=1) ** gq * d.norm(dim=1) ** gd)
    found = pair_scores(q, d, norm.exponents, 0.5)
    torch.testing.assert_close(found, naive)
    for a, b in zip(torch.autograd.grad(found.sum(), (q, d)), torch.autograd.grad(naive.sum(), (q, d)), strict=True):
        torch.testing.assert_close(a, b)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 5)), min_size=3, max_size=15),
    st.integers(0, 9),
)
def test_bootstrap_samples_are_scipys_spearman_of_the_drawn_pairs(rows: list[tuple[int, ...]], seed: int) -> None:
    gold, scores, groups = (np.array(c) for c in zip(*rows, strict=True))
    bootstrap = PairBootstrap(gold.astype(float), groups, resamples=20, seed=seed)
    found = bootstrap.samples(scores.astype(float))
    times = np.concatenate(bootstrap.times)
    assert found.shape == (20,)
    for value, n in zip(found, times.astype(int), strict=True):
        x, y = np.repeat(scores, n), np.repeat(gold, n)
        if np.ptp(x) == 0 or np.ptp(y) == 0:
            assert np.isnan(value)
        else:
            assert value == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-9)
    for group in np.unique(groups):  # pairs of a group are drawn together
        assert (np.ptp(times[:, groups == group], axis=1) == 0).all()


def test_no_interval_of_one_group_and_no_correlation_of_a_constant() -> None:
    gold = np.array([1.0, 2.0, 3.0])
    one = PairBootstrap(gold, np.zeros(3), resamples=20)
    assert one.interval(one.samples(gold)) is None
    three = PairBootstrap(np.arange(30.0), np.arange(30), resamples=20)
    assert three.interval(three.samples(np.zeros(30))) is None
    assert three.interval(three.samples(np.arange(30.0))) == pytest.approx([1.0, 1.0])
    assert spearman(gold, np.ones(3)) is None


def test_each_scoring_orders_best_what_was_planted_for_it_and_sides_exchange_qnorm_and_dnorm() -> None:
    torch.manual_seed(1)
    q, d = (torch.randn(60, 5, dtype=torch.float64) * torch.rand(60, 1).exp() ** 3 for _ in range(2))
    for norm in FIXED_NORMALIZATIONS:
        gold = pair_scores(q, d, norm.exponents).numpy()
        bootstrap = PairBootstrap(gold, np.arange(60), resamples=50)
        report, scores = evaluate_sts((q, d), Exponents(0.5, 0.25), bootstrap)
        found = report["scorings"]
        best = max(found, key=lambda name: found[name]["spearman"])
        assert best == norm.value
        assert found[best]["spearman"] == pytest.approx(1)
        assert found["qnorm"]["exchanged"] == pytest.approx(found["dnorm"]["spearman"])
        assert found["dnorm"]["exchanged"] == pytest.approx(found["qnorm"]["spearman"])
        for name in ("cosine", "dot"):
            assert found[name]["symmetry"] == pytest.approx(1)
            assert found[name]["exchanged"] == pytest.approx(found[name]["spearman"])
        assert found["qnorm"]["symmetry"] < 0.99
        assert found["native"]["symmetry"] < 1
        assert found["cosine"]["minus_cosine"] is None
        delta = found["dot"]["minus_cosine"]
        assert delta["delta"] == pytest.approx(found["dot"]["spearman"] - found["cosine"]["spearman"])
        assert delta["ci"][0] <= delta["delta"] <= delta["ci"][1]
        assert scores["native"].shape == (60,)
    assert report["lengths"]["both"]["n"] == 120


@pytest.mark.real
def test_cosine_of_minilm_is_that_of_sentence_transformers_evaluator(shared: Path) -> None:
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    from mmclip.models.text_encoder import load_text_model

    whole = open_sts(shared / "data" / "stsb" / "dev.tsv")
    pairs = whole.take(np.arange(0, len(whole), 5), "a fifth")
    model = load_text_model(str(shared / "models" / "all-MiniLM-L6-v2"))
    theirs = EmbeddingSimilarityEvaluator(pairs.first, pairs.second, (pairs.scores / 5).tolist(), write_csv=False)
    expected = theirs(model.encoder)
    q, d = model.encode(pairs.first, "query", progress=False), model.encode(pairs.second, "document", progress=False)
    bootstrap = PairBootstrap(pairs.scores, pairs.groups, resamples=100)
    found, _ = evaluate_sts((q.double(), d.double()), Normalization.COSINE.exponents, bootstrap)
    assert len(whole) == 1500
    assert found["scorings"]["cosine"]["spearman"] == pytest.approx(expected["spearman_cosine"], abs=0.005)
    assert found["scorings"]["native"]["spearman"] == found["scorings"]["cosine"]["spearman"]
    for name in ("dot", "qnorm", "dnorm"):  # its norms were never trained: they only disturb
        assert found["scorings"][name]["minus_cosine"]["ci"][1] < 0
