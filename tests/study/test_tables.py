"""A study's describing tables against the runs that they are of."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mmclip.study import tables
from mmclip.study.estimates import Study
from mmclip.study.plan import CLIP
from tests.helpers.studying import planted_arm


@pytest.fixture(scope="module")
def study():
    arms = [
        planted_arm(noise=1.8),
        planted_arm(loss="asym-i2t", norm="qnorm", noise=1.5, lengths=0.2),
        planted_arm(loss="asym-i2t", norm="dot", noise=1.5, lengths=0.1),
        planted_arm(loss="asym-i2t", norm="dnorm", noise=1.5, lengths=0.2),
        planted_arm("half", "asym-i2t", "qnorm", noise=1.9, lengths=0.1, changes={"train_fraction": 0.5}),
        planted_arm("learned", norm="learned"),
        planted_arm("null", "asym-i2t", "qnorm", permuted=True, changes={"permute_pairs": True}),
    ]
    return Study(arms, resamples=30)


def of(sheet, **keys):
    (row,) = [row for row in sheet.records if all(row[k] == v for k, v in keys.items())]
    return row


def test_every_run_is_a_cell_with_its_numbers(study):
    sheet = tables.cells(study)
    assert len(sheet.records) == 14
    row = of(sheet, arm="half", seed=1)
    results = study.arms[4].results()[1].json
    assert row["success@5_native_t2i"] == results["retrieval"]["t2i"]["native"]["success@5"]
    assert row["success@1_corrected_t2i"] == results["retrieval"]["t2i"]["corrected"]["success@1"]
    assert row["success@1_corrected_i2t"] is None
    assert row["d_topk_image"] == results["magnitude"]["image"]["cohens_d"]["topk"]["value"]
    assert row["cv_text"] == results["magnitude"]["text"]["cv"]
    assert (row["train_fraction"], row["gamma_d"], row["steps"]) == (0.5, 0.0, 30)
    assert row["zero_shot_acc1_native"] is None and row["seconds"] is None


def test_table_6_has_the_papers_rows_first_and_its_numbers_beside_ours(study):
    sheet = tables.table6(study)
    assert [row["paper_config"] for row in sheet.records[:6]] == [
        paper["name"] for paper in tables.load_claims(CLIP)["table6"]
    ]
    row = of(sheet, paper_config="ImgNorm-I2T")
    assert (row["arm"], row["paper_d_text"], row["paper_R@1_cosine_t2i"]) == ("asym-i2t qnorm", 1.83, 0.003)
    hits = [run.json["retrieval"]["t2i"]["cosine"]["success@1"] for run in study.arms[1].results().values()]
    assert row["success@1_cosine_t2i_mean"] == pytest.approx(np.mean(hits))
    assert row["success@1_cosine_t2i_sd"] == pytest.approx(np.std(hits, ddof=1))
    lacking = of(sheet, paper_config="TxtNorm-T2I")
    assert (lacking["arm"], lacking["n_seeds"], lacking["d_topk_image_mean"]) == (None, 0, None)
    assert lacking["reason"] and lacking["paper_d_text"] == 10.89
    others = [row["arm"] for row in sheet.records[6:]]
    assert others == ["asym-i2t dnorm", "half", "learned", "null"], "less data and nulls are none of the paper's"


def test_a_frontier_point_is_corrected_where_the_direction_was_not_trained(study):
    sheet = tables.frontier(study)
    native, corrected = (of(sheet, arm="asym-i2t qnorm", point=p) for p in ("native", "corrected"))
    assert (corrected["i2t_scoring"], corrected["t2i_scoring"]) == ("native", "corrected")
    assert corrected["i2t_mean"] == native["i2t_mean"] and corrected["t2i_mean"] != native["t2i_mean"]
    both = of(sheet, arm="sym cosine", point="corrected")
    assert (both["i2t_scoring"], both["t2i_scoring"]) == ("corrected", "corrected")
    assert native["t2i_lo"] <= native["t2i_mean"] <= native["t2i_hi"]


def test_scorings_rank_in_pairs(study):
    for row in tables.matrix(study).records:
        assert row["cosine_mean"] == row["dnorm_mean"] and row["dot_mean"] == row["qnorm_mean"]


def test_gammas_are_those_that_move(study):
    rows = tables.gamma(study).records
    assert {row["arm"] for row in rows} == {"learned"}
    assert [(row["step"], row["gamma_q"]) for row in rows if row["seed"] == 1] == [(10, 0.6), (20, 0.7), (30, 0.8)]


def test_delta_cv_is_the_query_sides_seed_by_seed(study):
    (row,) = tables.delta_cv(study).records
    assert (row["direction"], row["query_side"], row["n_seeds"]) == ("i2t", "image", 2)
    dnorm, dot = study.arms[3], study.arms[2]
    ratios = [
        dnorm.results()[s].json["magnitude"]["image"]["cv"] / dot.results()[s].json["magnitude"]["image"]["cv"]
        for s in (0, 1)
    ]
    assert row["delta_cv_mean"] == pytest.approx(np.mean(ratios))
    assert row["delta_cv_sd"] == pytest.approx(np.std(ratios, ddof=1))


def test_fractions_are_of_one_setting(study):
    rows = tables.fractions(study).records
    assert {(row["setting"], row["arm"], row["train_fraction"]) for row in rows} == {
        ("asym-i2t qnorm", "asym-i2t qnorm", 1.0),
        ("asym-i2t qnorm", "half", 0.5),
    }


def test_a_study_of_nothing_and_of_one_seed_has_its_tables():
    for arms in ([], [planted_arm(seeds=(3,), logs=False)], [dataclasses.replace(planted_arm(seeds=(0,)), runs={})]):
        study = Study(arms)
        made = [tables.cells, tables.frontier, tables.matrix, tables.cv, tables.gamma]
        assert [len(make(study).records) for make in made] == [len(study.arms) * n for n in (1, 2, 2, 1, 0)]
        assert len(tables.table6(study).records) == 6
    (row,) = tables.cv(Study([planted_arm(seeds=(3,))])).records
    assert row["cv_image_sd"] is None and row["cv_image_mean"] > 0
