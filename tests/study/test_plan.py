"""A study's file becomes the right runs, each known by its settings; a slip in it is one line before any run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmclip.config import CONFIGS, StudyConfig, parse
from mmclip.errors import UserError
from mmclip.study.plan import COSMETIC, FIXED, KINDS, MEASURING, OURS, Kind, StudyPlan, plan_study, require_data
from tests.helpers.studying import ARMS, plan


def arms(*entries: str) -> str:
    return "arms:\n" + "".join(f"  - {{{entry}}}\n" for entry in entries)


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    """Two folders that look like data; nothing reads them."""
    for name in ("scifact", "cranfield"):
        (tmp_path / name / "qrels").mkdir(parents=True)
        for file in ("corpus.jsonl", "queries.jsonl", "qrels/train.tsv", "qrels/test.tsv"):
            (tmp_path / name / file).touch()
    return tmp_path


def text_plan(beir: Path, text: str, **more: object) -> StudyPlan:
    head = f"script: train_text\nmodel: {beir}\ntrain_data: {beir}/scifact\n"
    return plan(beir, f'{head}val_data: ["{beir}/scifact:test", "{beir}/cranfield"]\n{text}', **more)


Planner = Callable[..., StudyPlan]


@pytest.fixture(params=["clip", "text"])
def planner(request: pytest.FixtureRequest, tmp_path: Path) -> Planner:
    if request.param == "clip":
        return lambda text, **more: plan(tmp_path, text, **more)
    beir = request.getfixturevalue("beir")
    return lambda text, **more: text_plan(beir, text, **more)


# --- arms -------------------------------------------------------------------------------------------------------------


def test_every_arm_runs_with_every_seed_and_all_settings_reach_the_run(tmp_path: Path) -> None:
    result = plan(tmp_path, "seeds: [3, 5]\ntitle: Two\nepochs: 2\n" + arms("norm: [dot, qnorm], lr: [1e-3, 1e-4]"))
    assert result.title == "Two" and len(result.runs) == 8
    assert {(c.seed, c.config.seed, c.config.epochs) for c in result.runs} == {(3, 3, 2), (5, 5, 2)}
    names = [c.arm for c in result.runs if c.seed == 3]
    assert names == ["sym dot lr=0.001", "sym dot lr=0.0001", "sym qnorm lr=0.001", "sym qnorm lr=0.0001"]
    assert result.runs[1].config.lr == 1e-4 and result.runs[1].config.norm == "dot"
    assert result.runs[0].config.model == "scenes-tiny.json"  # without config the built-in scenes'
    assert len({c.folder for c in result.runs}) == 8


def test_a_lambda_of_0_half_or_1_is_the_loss_of_that_name_and_runs_once(tmp_path: Path, beir: Path) -> None:
    result = plan(tmp_path, arms("loss: [asym-i2t, sym], norm: qnorm", "norm: qnorm, i2t_weight: [0, 0.25, 0.5, 1]"))
    assert [c.arm for c in result.runs] == ["asym-i2t qnorm", "sym qnorm", "asym-t2i qnorm", "sym qnorm λ=0.25"]
    result = text_plan(beir, arms("loss: both, norm: dot, q2d_weight: [0, 0.25, 0.5, 1]"))
    assert [c.arm for c in result.runs] == ["d2q dot", "both dot λ=0.25", "both dot", "q2d dot"]


def test_a_run_is_known_by_what_changes_its_numbers(planner: Planner) -> None:
    one = planner(arms("norm: dot")).runs[0]
    clip = one.kind.name == "clip"
    same = ["workers=0", "cache_dir=/elsewhere"] if clip else ["strict=true", "device=cpu"]
    changes = ("val_split=test", "bank_size=10", "batch_size=32") if clip else ("document_length=32", "positives=none")
    assert planner(arms("norm: dot"), set=[*same, "log_every_n_steps=9", "save_steps=3"]).runs[0].folder == one.folder
    for change in (*changes, "lr=1e-2", "train_split=test"):
        assert planner(arms("norm: dot"), set=[change]).runs[0].folder != one.folder, change


def test_a_run_keeps_its_folder_whatever_its_arm_is_called(tmp_path: Path) -> None:
    one = plan(tmp_path, arms("norm: [dot], name: old")).runs[0]
    assert one.arm == "old dot" and one.folder.name.startswith("old-dot-seed0-")
    one.folder.mkdir(parents=True)
    assert plan(tmp_path, arms("norm: dot")).runs[0].folder == one.folder
    (cell,) = plan(tmp_path, arms("norm: dot, name: длина"), set=["lr=1"]).runs
    assert re.fullmatch(r"arm-seed0-[0-9a-f]{8}", cell.folder.name)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_setting_that_a_study_names_is_one(kind: Kind) -> None:
    assert {*COSMETIC, *MEASURING, *OURS, *FIXED} <= {name for k in KINDS.values() for name in k.config.flags}
    assert set(FIXED) <= set(OURS) and kind.weight in kind.config.flags
    assert set(kind.losses) == set(kind.config.flags["loss"].check.choices)


def test_an_arm_may_start_from_another_whose_run_of_the_seed_comes_first(tmp_path: Path) -> None:
    text = "seeds: [0, 1]\n" + arms("norm: dot, init_from: sym cosine", "norm: cosine")
    cells = plan(tmp_path, text).runs
    names = ["sym cosine", "sym dot init_from=sym cosine"]
    assert [(c.arm, c.seed) for c in cells] == [(name, seed) for seed in (0, 1) for name in names]
    assert cells[1].initial is cells[0] and cells[1].config.init_from == str(cells[0].folder)
    other = plan(tmp_path, text, set=["lr=1e-2"]).runs  # another first run is another start
    assert other[1].folder != cells[1].folder


def test_arms_that_differ_in_nothing_that_counts_are_one_and_keep_their_names(tmp_path: Path) -> None:
    same = ("norm: cosine, workers: [0, 1]", "norm: cosine, save_steps: 5, name: other, seeds: [0, 4]")
    result = plan(tmp_path, arms(*same, "norm: dot, init_from: other")).runs
    assert (result[0].arm, result[0].seed, result[0].config.workers) == ("sym cosine workers=0", 0, 0)
    assert [c.seed for c in result if c.arm == result[0].arm] == [0, 4]
    assert len({c.folder for c in result}) == len(result) == 3 and result[1].initial is result[0]
    text = arms("norm: cosine", "norm: cosine, name: b", "norm: dot, init_from: sym cosine")
    result = plan(tmp_path, text + "  - {norm: dot, init_from: b, name: late}\n").runs
    assert [(c.arm, c.seed) for c in result] == [("sym cosine", 0), ("sym dot init_from=sym cosine", 0)]


def test_what_is_measured_tells_arms_apart_where_their_names_are_one(tmp_path: Path) -> None:
    entries = ("norm: cosine", "norm: cosine, measure_start: true", "norm: cosine, bank_size: [0, 7]")
    result = plan(tmp_path, arms(*entries, "norm: dot, measure_start: true")).runs
    more = ("", " measure_start=True", " bank_size=0", " bank_size=7")
    assert [c.arm for c in result] == [*(f"sym cosine{m}" for m in more), "sym dot"]
    assert len({c.folder for c in result}) == 5
    assert plan(tmp_path, arms(*entries, entries[1])).runs[-1].arm == "sym cosine bank_size=7"


@settings(max_examples=30, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0, 0.1, 0.5, 0.9, 1]), min_size=1, max_size=5),
    norms=st.lists(st.sampled_from(["cosine", "dot", "qnorm"]), min_size=1, max_size=4),
)
def test_equal_arms_run_once_whatever_their_order(
    tmp_path_factory: pytest.TempPathFactory, weights: list[float], norms: list[str]
) -> None:
    cells = plan(tmp_path_factory.mktemp("p"), arms(f"norm: {norms}, i2t_weight: {weights}")).runs
    assert len(cells) == len(set(weights)) * len(set(norms))
    assert len({c.arm for c in cells}) == len({c.folder for c in cells}) == len(cells)


def test_the_untrained_text_model_is_measured_with_an_arms_first_seed(beir: Path) -> None:
    text = "seeds: [3, 4]\n" + arms("norm: cosine, measure_start: true", "norm: dot, measure_start: false")
    result = text_plan(beir, text)
    runs = [(c.arm, c.seed, c.config.measure_start) for c in result.runs]
    assert runs == [(f"q2d {n}", s, (n, s) == ("cosine", 3)) for s in (3, 4) for n in ("cosine", "dot")]
    assert result.kind.name == "text" and len({c.folder for c in result.runs}) == 4
    again = text_plan(beir, text, set=["random_init=true"]).runs  # every seed has weights of its own
    assert [c.config.measure_start for c in again if c.arm == "q2d cosine"] == [True, True]


# --- the command line -------------------------------------------------------------------------------------------------


def test_settings_of_the_command_line_win_and_lists_and_null_are_understood(tmp_path: Path) -> None:
    flags = ["lr=0.5", "wd=0.1", "aug_cfg=scale=0.9,1 none=1", "grad-clip-norm=null"]
    text = arms(
        "norm: [cosine, dot], lr: [1e-3, 1e-4], wd: 0.3", "norm: dot, lr: 1, name: a", "norm: qnorm, init_from: a"
    )
    result = plan(tmp_path, "lr: 1\n" + text, set=flags).runs
    assert [c.arm for c in result] == ["sym cosine", "sym dot", "sym qnorm init_from=a"]
    assert {(c.config.lr, c.config.wd, c.config.grad_clip_norm) for c in result} == {(0.5, 0.1, None)}
    assert result[0].config.aug_cfg == ["scale=0.9,1", "none=1"] and result[2].initial is result[1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--jobs", "-1"], "--jobs -1: expected a whole number of at least 0"),
        (["--name", "a/b"], "a plain folder name"),
        (["--set", "lr"], "--set 'lr': expected SETTING=VALUE"),
        (["--seeds", "1", "1"], "--seeds 1 1: different whole numbers"),
        (["--set", "lrr=1"], "--set: unknown setting 'lrr'; did you mean lr"),
        (["--set", "val-split=a", "val_split=b"], "--set: val_split is set twice"),
        (["--set", "seed=3"], "--set: seed is set by the study for each of its runs; give --seeds"),
        (["--set", "logs=a"], "--set: logs is set by the study"),
    ],
)
def test_flags_are_checked(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        plan_study(parse(StudyConfig, argv))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("study_*.yaml")), ids=lambda p: p.stem)
def test_the_shipped_studies_are_valid_and_open_with_command_cost_and_expectation(path: Path, shared: Path) -> None:
    head = path.read_text(encoding="utf-8").split("\n\n")[0]
    words = [line.split()[1] for line in head.splitlines() if re.match(r"# [A-Z][a-z]+ {2,}", line)]
    assert words == ["Command", "Cost", "Expect"] and "TODO" not in head
    assert plan_study(StudyConfig(config=str(path))).runs


# --- slips ------------------------------------------------------------------------------------------------------------

AXIS = str([i / 100 for i in range(1, 61)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds: [0]\n", "arms: a list of settings is expected"),
        ("arms: []\n", "arms: a list of settings is expected"),
        ("arms:\n  - sym\n", "arm 1: an arm is a mapping"),
        (arms("norms: cosine"), "unknown setting 'norms'; did you mean norm?"),
        (arms("norm: [cosine, dott]"), "arm 'sym dott': --norm dott: expected one of"),
        (arms("norm: []"), "norm: an empty list"),
        (arms("norm: cosine, seed: 3"), "seed is set by the study for each of its runs; give seeds"),
        ("resume: latest\n" + ARMS, "resume is set by the study"),
        ("seeds: 3\n" + ARMS, "seeds: a list of different whole numbers"),
        ("seeds: [0, 0]\n" + ARMS, "seeds: a list of different whole numbers"),
        ("seeds: [a]\n" + ARMS, "seeds: a list of different whole numbers"),
        ("lr: 0\n" + ARMS, "arm 'sym cosine': --lr 0.0: expected a number above 0"),
        (arms("loss: asym-i2t, i2t_weight: 0.3"), "--i2t-weight 0.3 needs --loss sym"),
        ("config: no_such\n" + ARMS, "study_tiny.yaml: config no_such: no such file; a path, or one of: coco_vitb32"),
        ("config: [a]\n" + ARMS, 'config is a text, got ["a"]'),
        ("seeds: [0]\nseeds: [1]\n" + ARMS, "seeds is set twice"),
        (
            arms("norm: dot, name: a, init_from: b", "norm: qnorm, name: b, init_from: a"),
            "arms that start from each other",
        ),
        (arms("norm: dot, name: a", "norm: qnorm, name: a"), "called 'a': give each a name of its own"),
        (arms("norm: dot", "norm: dot, name: a", "norm: qnorm, name: a"), "arms are called 'a'"),
        ("arm:\n  - {norm: dot}\n", "unknown setting 'arm'; did you mean arms?"),
        (arms("norm: [dot], norm: qnorm"), "norm is set twice"),
        (arms("norm: dot, name: null"), "arm 1: name is a text, got null"),
        (arms("norm: dot, name: '  '"), 'arm 1: name is a text, got "  "'),
        ("val_data: none\n" + ARMS, "arm 'sym cosine': val_data none: a study shows"),
        (
            arms("norm: [cosine, dot]", "norm: qnorm, init_from: sym cosin"),
            "init_from 'sym cosin': no arm and no folder of that name; arms: sym cosine, sym dot, ",
        ),
        (arms("norm: dot", "norm: qnorm, init_from: sym dot, pretrained: tag"), "beside init_from sym dot"),
        (f"arms:\n  - {{lr: {[i / 1e6 for i in range(1, 2100)]}}}\n", "2,099 runs, more than 2,000"),
        (
            arms(", ".join(f"{n}: {AXIS}" for n in ("lr", "wd", "warmup", "focal", "norm_drift"))),
            "777,600,000 runs, more",
        ),
        (arms(*(f"lr: {AXIS}, wd: [{i}, {i + 1}, {i + 2}]" for i in range(20))), "tiny.yaml: 3,600 runs, more than"),
        ("script: train_txt\n" + ARMS, "script 'train_txt' is not one of train_clip, train_text"),
        ("script: [a]\n" + ARMS, 'script is a text, got ["a"]'),
    ],
)
def test_a_slip_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        plan(tmp_path, text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (arms("i2t_weight: 0.5"), "unknown setting 'i2t_weight'"),
        ("bank_size: 3\n" + arms("norm: dot"), "unknown setting 'bank_size'"),
        (arms("norm: dot, val_data: []"), "val_data none: a study shows the evaluations of its runs"),
        (arms("norm: dot, keep_normalize: true"), "--keep-normalize with --norm dot"),
        (arms("norm: dot, logs: a"), "logs is set by the study"),
    ],
)
def test_settings_of_a_text_study_are_those_of_train_text(beir: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        text_plan(beir, text)


# --- data -------------------------------------------------------------------------------------------------------------


def test_missing_data_are_named_before_a_run(tmp_path: Path) -> None:
    whole, empty = tmp_path / "whole", tmp_path / "empty"
    for folder in (whole / "train", empty):
        folder.mkdir(parents=True)
    (whole / "train" / "00.tar").touch()
    (whole / "a.csv").touch()

    def require(*settings: str) -> None:
        require_data(plan(tmp_path, ARMS, set=list(settings)).runs)

    missing = [f"{tmp_path}/no", f"{whole}/train/{{01..09}}.tar", "x" * 5000, f"{whole}/*.tar", str(empty)]
    for setting in [*(f"train_data={d}" for d in missing), f"val_data={missing[0]}", f"zeroshot_data={missing[0]}"]:
        with pytest.raises(
            UserError, match="no such data, or a folder without shards; valid: a shard pattern"
        ) as raised:
            require(setting)
        assert str(raised.value).startswith(setting.partition("=")[0] + " ")
    for source in (whole, whole / "a.csv", whole / "train" / "{00..09}.tar", whole / "train" / "*.tar"):
        with pytest.raises(UserError, match="no evaluation split test or val"):
            require(f"train_data={source}")
        require(f"train_data={source}", "val_holdout=3")
        require(f"train_data={source}", f"val_data={whole}")
    (whole / "val").mkdir()
    (whole / "val" / "0.tar").touch()
    require(f"train_data={whole}")
    require()


def test_missing_text_data_are_named_before_a_run(beir: Path) -> None:
    cells = text_plan(beir, arms("norm: dot")).runs
    require_data(cells)
    for data, split, left in (("cranfield", "test", "train"), ("scifact", "train", "test")):
        (beir / data / "qrels" / f"{split}.tsv").unlink()
        with pytest.raises(UserError, match=f"{data}: no split '{split}'; splits in qrels/: {left}"):
            require_data(cells)
        (beir / data / "qrels" / f"{split}.tsv").touch()
    (beir / "scifact" / "qrels" / "train.tsv").unlink()
    (beir / "triples.tsv").touch()
    flags = [f"train_data={beir}/triples.tsv", f"val_data={beir}/scifact"]
    require_data(text_plan(beir, arms("norm: dot"), set=flags).runs)  # triples have no splits
