"""A study's tables against the runs that they are of; what is planted is found, nulls are clean, gaps have reasons."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmclip.metrics.bootstrap import Estimate
from mmclip.study import tables
from mmclip.study.claims import kappa_counts
from mmclip.study.estimates import Score, Study
from mmclip.study.plan import CLIP, TEXT
from mmclip.study.tables import StudyTable, load_claims, plain_values, reasons, records_of
from tests.helpers.studying import (
    INSIDE,
    OUTSIDE,
    UNDETERMINED,
    kappa_section,
    nulls,
    of,
    planted_arm,
    start,
    text_arm,
    text_start,
)


@pytest.fixture(scope="module")
def study() -> Study:
    starts = {0: start((3.0, 1.0, 2.0, 2.0), 0.5), 1: start((3.0, 1.0, 2.0, 2.0), 0.6)}
    tuned = planted_arm("tuned", "asym-t2i", "qnorm", noise=1.1, lengths=0.3, initial="sym cosine", starts=starts)
    for seed, run in tuned.results().items():
        run.json["zero_shot"] = {"acc1": {"native": 0.4 + seed / 10, "cosine": 0.4}}
    arms = [
        planted_arm(noise=1.8, starts=starts),
        planted_arm(loss="asym-t2i", noise=1.8, starts=starts),
        planted_arm(loss="asym-t2i", norm="qnorm", noise=1.2, lengths=0.3),
        planted_arm(loss="asym-t2i", norm="dnorm", noise=1.8),
        planted_arm(loss="asym-t2i", norm="dot", noise=1.5, lengths=0.1),
        planted_arm("half", "asym-t2i", "qnorm", noise=1.9, lengths=0.1, train_fraction=0.5),
        planted_arm("learned", norm="learned"),
        tuned,
        *nulls(("null base", "sym", "cosine"), ("null control", "asym-t2i", "cosine"), ("null", "asym-t2i", "qnorm")),
    ]
    return Study(arms, resamples=200)


def arm_of(study: Study, name: str) -> Any:
    return next(arm for arm in study.arms if arm.name == name)


# --- a table ----------------------------------------------------------------------------------------------------------

values = (
    st.none()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1)
)


@given(st.lists(st.dictionaries(st.sampled_from(["b", 'c,"']), values), max_size=5))
def test_records_survive_the_file(tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]]) -> None:
    rows = [{"a": i / 4, **record} for i, record in enumerate(records)]
    path = StudyTable("x", rows, {"title": "X", "first": "a"}).file().to_csv(tmp_path_factory.mktemp("t") / "x.csv")
    assert path.read_text(encoding="utf-8").startswith("a"), "a header stands without records"
    with path.open(encoding="utf-8", newline="") as file:
        result = list(csv.DictReader(file))
    assert len(result) == len(rows)
    for row, read in zip(rows, result, strict=True):
        for name, text in read.items():
            value = row.get(name)
            assert (float(text) == value) if isinstance(value, float) else (text == ("" if value is None else value))


def test_cells_follow_the_names_of_columns() -> None:
    row = plain_values({"arm": "a", "ratio": Estimate(0.97, 0.96, 1.1, 3), "x_minus_y": Estimate(-0.1, -0.2, -0.05, 3)})
    row |= {"m_mean": 0.25, "m_sd": None, "n": 3, "word": "not reproduced", "paper_m": 0.5, "z": None, "reason": "why"}
    layout = {"title": "T", "head": "{arm}\n{n}", "shown": "ratio x_minus_y m/paper_m n word z"}
    table = StudyTable("t", [row], layout).view()
    ((head, cells),) = table.rows
    assert head == "a\n3" and table.columns[2] == "x less y" and table.notes == ["a: why."]
    assert [(c.text, c.detail, c.kind) for c in cells] == [
        (".970", ".960–1.100", "up"),
        ("−.100", "−.200, −.050", "down"),
        (".250 / .500", "", ""),
        ("3", "", ""),
        ("not reproduced", "", "down"),
        ("–", "", "none"),
    ]
    for (lo, hi), kind in {(0.5, 0.9): "down", (0.9, 1.0): "noise"}.items():
        record = plain_values({"ratio": Estimate(0.9, lo, hi, 3)})
        assert StudyTable("t", [record], layout | {"head": "", "shown": "ratio"}).view().rows[0][1][0].kind == kind
    same = Estimate.missing("no baseline")
    assert reasons({"a": same, "b": same, "c": Estimate(1.0, 1.0, 1.0, 1)}) == "a, b: no baseline"


# --- CLIP -------------------------------------------------------------------------------------------------------------


def test_every_run_is_a_cell_with_its_numbers(study: Study) -> None:
    rows = records_of(tables.cells, study)
    assert len(rows) == 22
    row, results = of(rows, arm="half", seed=1), arm_of(study, "half").results()[1].json
    assert row["success@5_native_i2t"] == results["retrieval"]["i2t"]["native"]["success@5"]
    assert row["success@1_corrected_i2t"] == results["retrieval"]["i2t"]["corrected"]["success@1"]
    assert row["success@1_corrected_t2i"] is None
    assert row["d_topk_image"] == results["magnitude"]["image"]["cohens_d"]["topk"]["value"]
    assert row["cv_text"] == results["magnitude"]["text"]["cv"]
    assert (row["train_fraction"], row["gamma_d"], row["steps"]) == (0.5, 0.0, 30)
    assert row["zero_shot_acc1_native"] is None and row["seconds"] is None


def test_table_6_has_the_papers_rows_first_and_its_numbers_beside_ours(study: Study) -> None:
    rows = records_of(tables.table6, study)
    assert [row["paper_config"] for row in rows[:6]] == [paper["name"] for paper in load_claims(CLIP)["table6"]]
    row = of(rows, paper_config="TxtNorm-T2I")
    assert (row["arm"], row["paper_d_text"], row["paper_R@1_cosine_i2t"]) == ("asym-t2i qnorm", 10.89, 0.019)
    runs = arm_of(study, "asym-t2i qnorm").results().values()
    hits = [run.json["retrieval"]["t2i"]["cosine"]["success@1"] for run in runs]
    assert row["success@1_cosine_t2i_mean"] == pytest.approx(np.mean(hits))
    assert row["success@1_cosine_t2i_sd"] == pytest.approx(np.std(hits, ddof=1))
    lacking = of(rows, paper_config="ImgNorm-I2T")
    assert (lacking["arm"], lacking["n_seeds"], lacking["d_topk_image_mean"]) == (None, 0, None)
    assert lacking["reason"] and lacking["paper_d_text"] == 1.83
    others = {row["arm"] for row in rows[6:]}
    assert others >= {"asym-t2i dnorm", "half", "learned", "null"}, "less data and nulls are none of the paper's"


def test_a_frontier_point_is_corrected_where_the_direction_was_not_trained(study: Study) -> None:
    rows = records_of(tables.frontier, study)
    native, corrected = (of(rows, arm="asym-t2i qnorm", point=p) for p in ("native", "corrected"))
    assert (corrected["i2t_scoring"], corrected["t2i_scoring"]) == ("corrected", "native")
    assert corrected["t2i_mean"] == native["t2i_mean"] and corrected["i2t_mean"] != native["i2t_mean"]
    both = of(rows, arm="sym cosine", point="corrected")
    assert (both["i2t_scoring"], both["t2i_scoring"]) == ("corrected", "corrected")
    assert native["t2i_lo"] <= native["t2i_mean"] <= native["t2i_hi"]


def test_describing_tables_are_of_the_arms_that_they_are_about(study: Study) -> None:
    for row in records_of(tables.matrix, study):
        assert row["cosine_mean"] == row["dnorm_mean"] and row["dot_mean"] == row["qnorm_mean"]
    rows = records_of(tables.gamma, study)
    assert {row["arm"] for row in rows} == {"learned"}
    assert [(row["step"], row["gamma_q"]) for row in rows if row["seed"] == 1] == [(10, 0.6), (20, 0.7), (30, 0.8)]
    (row,) = records_of(tables.delta_cv, study)
    assert (row["direction"], row["query_side"], row["n_seeds"]) == ("t2i", "text", 2)
    cvs = [
        [arm_of(study, f"asym-t2i {n}").results()[s].json["magnitude"]["text"]["cv"] for s in (0, 1)]
        for n in ("dnorm", "dot")
    ]
    ratios = np.divide(*cvs)
    assert (row["delta_cv_mean"], row["delta_cv_sd"]) == pytest.approx((ratios.mean(), ratios.std(ddof=1)))
    settings = {(row["setting"], row["arm"], row["train_fraction"]) for row in records_of(tables.fractions, study)}
    assert settings == {("asym-t2i qnorm", "asym-t2i qnorm", 1.0), ("asym-t2i qnorm", "half", 0.5)}


def test_a_study_of_nothing_and_of_one_seed_has_its_tables() -> None:
    for arms in ([], [planted_arm(seeds=(3,), logs=False)], [dataclasses.replace(planted_arm(seeds=(0,)), runs={})]):
        part = Study(arms)
        made = [tables.cells, tables.frontier, tables.matrix, tables.cv, tables.gamma]
        assert [len(records_of(make, part)) for make in made] == [len(part.arms) * n for n in (1, 2, 2, 1, 0)]
        assert len(records_of(tables.table6, part)) == 6
    arms = [planted_arm(seeds=(4,), noise=1.8), planted_arm(loss="asym-i2t", norm="qnorm", seeds=(4,), noise=1.8)]
    row = records_of(tables.cv, Study(arms))[0]
    assert row["cv_image_sd"] is None and row["cv_image_mean"] > 0
    row = records_of(tables.keeps_both, Study(arms, resamples=100))[-1]
    assert row["n_seeds"] == 1 and row["t2i_ratio_to_native_lo"] < row["t2i_ratio_to_native_hi"]


def test_verdicts_have_their_numbers_and_the_null_is_clean(study: Study) -> None:
    rows = records_of(tables.verdicts, study)
    assert {"asym-t2i qnorm", "tuned", "null"} <= {row["arm"] for row in rows} and len(rows) == 7
    row = of(rows, arm="asym-t2i qnorm")
    assert (row["learned"], row["useful"], row["null"], row["n_seeds"]) == ("yes", "yes", False, 2)
    assert row["d_difference"] == pytest.approx(row["d_arm"] - row["d_control"])
    assert row["d_difference_lo"] > 0 < row["gain_over_control_lo"]
    null = of(rows, arm="null")
    assert null["null"] is True and null["control"] == "null control" and null["baseline"] == "null base"
    assert "yes" not in (null["learned"], null["useful"])


def test_the_corrections_gain_is_where_a_direction_was_read_backwards(study: Study) -> None:
    rows = records_of(tables.correction, study)
    directions = [[row["direction"] for row in rows if row["arm"] == name] for name in ("asym-t2i qnorm", "sym cosine")]
    assert directions == [["i2t"], ["i2t", "t2i"]]
    row, arm = of(rows, arm="asym-t2i qnorm"), arm_of(study, "asym-t2i qnorm")
    gain = study.difference(Score(arm, "i2t", "corrected"), Score(arm, "i2t", "reversed"))
    assert (row["corrected_minus_reversed"], row["corrected_minus_reversed_lo"]) == gain[:2]
    assert row["corrected_minus_reversed"] == pytest.approx(row["corrected_mean"] - row["reversed_mean"])


def test_what_is_served_is_a_rule(study: Study) -> None:
    rows = records_of(tables.keeps_both, study)
    decides = of(rows, arm="asym-t2i qnorm", by_rule=True)
    assert (decides["i2t_scoring"], decides["t2i_scoring"]) == ("corrected", "native")
    by_rule = [row["served"] for row in rows if row["arm"] == "sym cosine" and row["by_rule"]]
    assert by_rule == ["native", "corrected", "i2t corrected, t2i native", "t2i corrected, i2t native"]
    itself = of(rows, arm="sym cosine", served="native")
    assert itself["keeps_both"] is True and itself["lowest_end"] == 1
    for row in rows:
        ends = (row["i2t_ratio_to_native_lo"], row["t2i_ratio_to_native_lo"])
        if None in ends:  # a null's baseline finds nothing in many resamples
            assert row["keeps_both"] is None and row["reason"]
            continue
        assert row["keeps_both"] == (min(ends) >= 0.95) and row["lowest_end"] == min(ends)


def test_without_a_baseline_there_is_a_reason_and_no_answer() -> None:
    alone = Study([planted_arm(loss="asym-i2t", norm="qnorm")], resamples=30)
    for row in records_of(tables.keeps_both, alone):
        assert row["keeps_both"] is None and row["i2t_ratio_to_native"] is None and "no baseline" in row["reason"]
    (row,) = records_of(tables.verdicts, alone)
    assert row["learned"] == row["useful"] == "" and "no control" in row["reason"]
    (row,) = records_of(tables.correction, alone)
    assert row["corrected_minus_reversed"] is not None and "no baseline" in row["reason"]


def test_forgetting_is_paired_by_seed(study: Study) -> None:
    (row,) = records_of(tables.pretrained, study)
    assert (row["arm"], row["initial"], row["from_random"]) == ("tuned", "sym cosine", "asym-t2i qnorm")
    assert row["zero_shot_change_native_mean"] == pytest.approx(-0.1)
    assert row["zero_shot_change_native_sd"] == pytest.approx(0, abs=1e-12) and row["zero_shot_native_n"] == 2
    expected = study.difference(Score(arm_of(study, "tuned"), "t2i"), Score(arm_of(study, "asym-t2i qnorm"), "t2i"))
    assert row["minus_from_random_t2i"] == expected.value


def test_kappa_stands_beside_the_winner(study: Study) -> None:
    rows = [row for row in records_of(tables.fisher, study) if row["train_fraction"] == 1]
    assert [(row["direction"], row["seed"], row["winner"]) for row in rows] == [
        ("t2i", 0, "qnorm"),
        ("t2i", 1, "qnorm"),
    ]
    assert rows[0]["log10_kappa_query_raw"] == 3.0 and rows[0]["kappa_of"] == "asym-t2i cosine"
    raw, normalized = kappa_counts(rows)
    assert (raw["n"], raw["larger"], raw["smaller"], raw["constant"]) == (2, 2, 0, True)
    assert (normalized["larger"], normalized["smaller"]) == (0, 2)
    undetermined = {"fisher": {"t2i": {"status": "undetermined", "reason": "9 matched pairs"}}}
    for starts, words in (({}, "nothing was measured"), ({0: undetermined}, "9 matched"), ({0: {"x": 1}}, "no κ")):
        arms = [planted_arm(loss="asym-t2i", norm=n, seeds=(0,), starts=starts) for n in ("qnorm", "dnorm")]
        (row,) = records_of(tables.fisher, Study(arms, resamples=30))
        assert row["log10_kappa_query_raw"] is None and words in row["reason"]


def test_both_signs_are_counted_and_noise_is_not() -> None:
    def counts(*rows: tuple[Any, Any, Any]) -> list[dict[str, Any]]:
        names = ("log10_kappa_query_raw", "log10_kappa_document_raw", "winner")
        return kappa_counts([dict(zip(names, row, strict=True)) for row in rows])

    decided = [(3, 2, "qnorm"), (2, 3, "dnorm"), (3, 2, "dnorm")]
    raw, normalized = counts(*decided, (3, 2, "within noise"), (2, 2, "qnorm"), (None, 1, None))
    assert (raw["n"], raw["larger"], raw["smaller"], raw["noise"], raw["constant"]) == (3, 2, 1, 1, False)
    assert raw["p"] == 1.0 and normalized["n"] == 0
    many = counts(*[(3, 2, "qnorm"), (2, 3, "dnorm")] * 4)[0]
    assert many["p"] == pytest.approx(2 / 2**8) and not many["constant"]


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text() -> Study:
    starts = {0: text_start(UNDETERMINED, {"ndcg@10": 0.4}), 1: {}}
    return Study([text_arm("cosine", starts=starts), text_arm("dot", lengths=0.4)], TEXT, resamples=50)


def test_retrieval_has_means_ranges_and_the_untrained_model(text: Study) -> None:
    rows = records_of(tables.retrieval, text)
    for data, scoring in ((data, s) for data in (INSIDE, OUTSIDE) for s in ("native", "cosine")):
        row = of(rows, data=data, arm="q2d dot", scoring=scoring)
        runs = [text.arms[1].runs[data][s].json["retrieval"]["q2d"][scoring] for s in (0, 1)]
        for metric in TEXT.metrics:
            each = [r[metric] for r in runs]
            assert row[metric] == pytest.approx(np.mean(each))
            assert (row[f"{metric}_min"], row[f"{metric}_max"]) == (min(each), max(each))
    assert of(rows, data=INSIDE, arm="untrained", scoring="dot")["ndcg@10_lo"] == pytest.approx(0.35)
    lacking = of(rows, data=OUTSIDE, arm="untrained", scoring="cosine")
    assert lacking["reason"] == "no run measured this data set before training" and "ndcg@10" not in lacking
    both = Study([text_arm("cosine", starts={0: text_start(UNDETERMINED, other=True)})], TEXT, resamples=50)
    assert of(records_of(tables.retrieval, both), data=OUTSIDE, arm="untrained", scoring="cosine")["mrr@10"] == 0.25


def test_differences_are_to_the_cosine_arm_natively_and_by_cosine(text: Study) -> None:
    rows = records_of(tables.differences, text)
    assert len(rows) == 4
    row = of(rows, data=INSIDE, scoring="cosine")
    cosine, dot = ([run.json["retrieval"]["q2d"] for run in a.runs[INSIDE].values()] for a in text.arms)
    expected = np.mean([d["cosine"]["mrr@10"] - c["native"]["mrr@10"] for c, d in zip(cosine, dot, strict=True)])
    assert row["mrr@10"] == pytest.approx(expected, abs=1e-7) and row["baseline"] == "q2d cosine"
    assert of(rows, data=INSIDE, scoring="native")["mrr@10_smallest"] > 0


def test_norms_and_runs_are_the_runs_own(text: Study) -> None:
    row = of(records_of(tables.magnitude, text), data=OUTSIDE, arm="q2d dot")
    runs = [text.arms[1].runs[OUTSIDE][s].json for s in (0, 1)]
    assert row["cv_query_mean"] == pytest.approx(np.mean([r["magnitude"]["query"]["cv"] for r in runs]))
    topk = [r["magnitude"]["document"]["cohens_d"]["topk"]["value"] for r in runs]
    assert (row["d_topk_mean"], row["d_topk_sd"]) == pytest.approx((np.mean(topk), np.std(topk, ddof=1)))
    assert (row["gamma_q_mean"], row["gamma_d_sd"]) == (0, 0) and row["seconds_mean"] == 9.5
    assert row["effective_scale_mean"] > 0 and row["d_corpus_lo"] > 0
    rows = records_of(tables.runs, text)
    assert [(r["arm"], r["seed"]) for r in rows] == [(f"q2d {n}", s) for n in ("cosine", "dot") for s in (0, 1)]
    assert rows[3][f"ndcg@10_{OUTSIDE}"] == runs[1]["retrieval"]["q2d"]["native"]["ndcg@10"]


def test_what_text_lacks_has_a_reason(text: Study) -> None:
    rows = records_of(tables.text_fisher, text)
    assert of(rows, question="q2d")["reason"] == "565 matched pairs, 1536 needed"
    assert of(rows, question="titles")["status"] == "not measured"
    measured = Study([text_arm("cosine", starts={0: text_start(kappa_section((2.5, 1, 2.5, 1)))})], TEXT)
    row = of(records_of(tables.text_fisher, measured), question="q2d")
    result = (row["log10_kappa_document_raw"], row["log10_kappa_document_raw_hi"], row["reason"])
    assert result == (2.5, 2.6, "") and records_of(tables.text_fisher, Study([], TEXT)) == []
    rows = records_of(tables.text_delta_cv, text)
    assert [r["reason"] for r in rows] == ["no dnorm arm beside a dot arm"] * 2 and rows[0]["delta_cv"] is None


def test_every_layout_is_a_tables(tmp_path: Path) -> None:
    for kind in (CLIP, TEXT):
        assert {*tables.TABLES[kind], "claims"} == set(load_claims(kind)["tables"])
