"""A study's file becomes the right runs, each known by its settings; a slip in it is one line before any run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmclip.config import CONFIGS, StudyConfig, parse
from mmclip.errors import UserError
from mmclip.study.plan import KINDS, Kind, plan_study, require_data
from tests.helpers import tiny
from tests.helpers.studying import ARMS, plan


def test_every_arm_runs_with_every_seed_and_all_settings_reach_the_run(tmp_path: Path) -> None:
    text = "seeds: [3, 5]\ntitle: Two\nepochs: 2\narms:\n  - {norm: [dot, qnorm], lr: [1e-3, 1e-4]}\n"
    found = plan(tmp_path, text)
    assert found.title == "Two" and len(found.runs) == 8
    assert {(c.seed, c.config.seed, c.config.epochs) for c in found.runs} == {(3, 3, 2), (5, 5, 2)}
    names = [c.arm for c in found.runs if c.seed == 3]
    assert names == ["sym dot lr=0.001", "sym dot lr=0.0001", "sym qnorm lr=0.001", "sym qnorm lr=0.0001"]
    assert found.runs[1].config.lr == 1e-4 and found.runs[1].config.norm == "dot"
    assert found.runs[0].config.model == "scenes-tiny.json"  # without config the built-in scenes'
    assert len({c.folder for c in found.runs}) == 8


def test_a_lambda_of_0_half_or_1_is_the_loss_of_that_name_and_runs_once(tmp_path: Path) -> None:
    text = "arms:\n  - {loss: [asym-i2t, sym], norm: qnorm}\n  - {norm: qnorm, i2t_weight: [0, 0.25, 0.5, 1]}\n"
    found = plan(tmp_path, text)
    assert [c.arm for c in found.runs] == [
        "asym-i2t qnorm",
        "sym qnorm",
        "asym-t2i qnorm",
        "sym qnorm λ=0.25",
    ]


def test_a_run_is_known_by_what_changes_its_numbers(tmp_path: Path) -> None:
    one = plan(tmp_path, ARMS).runs[0].folder
    assert plan(tmp_path, ARMS, set=["workers=0", "log_every_n_steps=1", "cache_dir=/elsewhere"]).runs[0].folder == one
    for change in ("lr=1e-2", "val_split=test", "bank_size=10", "batch_size=32"):
        assert plan(tmp_path, ARMS, set=[change]).runs[0].folder != one, change


def test_a_run_is_found_whatever_its_arm_is_called(tmp_path: Path) -> None:
    one = plan(tmp_path, "arms:\n  - {norm: [dot], name: old}\n").runs[0]
    assert one.arm == "old dot" and one.folder.name.startswith("old-dot-seed0-")
    one.folder.mkdir(parents=True)
    assert plan(tmp_path, "arms:\n  - {norm: dot}\n").runs[0].folder == one.folder


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_setting_that_a_kind_names_is_one(kind: Kind) -> None:
    names = {f.name for f in dataclasses.fields(kind.config)}
    named = {*kind.cosmetic, *kind.ours, *kind.measuring, *kind.fixed, kind.weight, kind.initial, kind.once} - {None}
    assert named <= names and set(kind.fixed) <= set(kind.ours)
    losses = kind.config.flags["loss"].check.choices
    assert set(kind.losses) == set(losses)


def test_an_arm_may_start_from_another_whose_run_of_the_seed_comes_first(tmp_path: Path) -> None:
    text = "seeds: [0, 1]\narms:\n  - {norm: dot, init_from: sym cosine}\n  - {norm: cosine}\n"
    cells = plan(tmp_path, text).runs
    assert [(c.arm, c.seed) for c in cells] == [
        ("sym cosine", 0),
        ("sym dot init_from=sym cosine", 0),
        ("sym cosine", 1),
        ("sym dot init_from=sym cosine", 1),
    ]
    assert cells[1].initial is cells[0] and cells[1].config.init_from == str(cells[0].folder)
    # another first run is another start
    other = plan(tmp_path, text, set=["lr=1e-2"]).runs
    assert other[1].folder != cells[1].folder


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seeds: [0]\n", "arms: a list of settings is expected"),
        ("arms: []\n", "arms: a list of settings is expected"),
        ("arms:\n  - sym\n", "arm 1: an arm is a mapping"),
        ("arms:\n  - {norms: cosine}\n", "unknown setting 'norms'; did you mean norm?"),
        ("arms:\n  - {norm: [cosine, dott]}\n", "arm 'sym dott': --norm dott: expected one of"),
        ("arms:\n  - {norm: []}\n", "norm: an empty list"),
        ("arms:\n  - {norm: cosine, seed: 3}\n", "seed is set by the study for each of its runs; give seeds"),
        ("resume: latest\n" + ARMS, "resume is set by the study"),
        ("seeds: 3\n" + ARMS, "seeds: a list of different whole numbers"),
        ("seeds: [0, 0]\n" + ARMS, "seeds: a list of different whole numbers"),
        ("seeds: [a]\n" + ARMS, "seeds: a list of different whole numbers"),
        ("lr: 0\n" + ARMS, "arm 'sym cosine': --lr 0.0: expected a number above 0"),
        ("arms:\n  - {loss: asym-i2t, i2t_weight: 0.3}\n", "--i2t-weight 0.3 needs --loss sym"),
        ("config: no_such\n" + ARMS, "study_tiny.yaml: config no_such: no such file; a path, or one of: coco_vitb32"),
        ("config: [a]\n" + ARMS, "config is a text, got no single value"),
        ("seeds: [0]\nseeds: [1]\n" + ARMS, "seeds is set twice"),
        (
            "arms:\n  - {norm: dot, name: a, init_from: b}\n  - {norm: qnorm, name: b, init_from: a}\n",
            "arms that start from each other",
        ),
        ("arms:\n  - {norm: dot, name: a}\n  - {norm: qnorm, name: a}\n", "called 'a': give each a name of its own"),
        ("arms:\n  - {norm: dot}\n  - {norm: dot, name: a}\n  - {norm: qnorm, name: a}\n", "arms are called 'a'"),
        ("arm:\n  - {norm: dot}\n", "unknown setting 'arm'; did you mean arms?"),
        ("title: [a]\n" + ARMS, "title is a text, got no single value"),
        ("arms:\n  - {norm: dot, norm: qnorm}\n", "norm is set twice"),
        ("arms:\n  - {norm: [dot], norm: qnorm}\n", "norm is set twice"),
        ("arms:\n  - {norm: dot, norm: [qnorm]}\n", "norm is set twice"),
        ("arms:\n  - {norm: dot, name: a, name: b}\n", "name is set twice"),
        ("arms:\n  - {norm: dot, seeds: [1], seeds: [2]}\n", "seeds is set twice"),
        ("arms:\n  - {norm: dot, name: null}\n", "arm 1: name is a text, got null"),
        ("arms:\n  - {norm: dot, name: '  '}\n", "arm 1: name is a text, got an empty one"),
        ("val_data: none\n" + ARMS, "arm 'sym cosine': val_data none: a study shows"),
        (
            "arms:\n  - {norm: [cosine, dot]}\n  - {norm: qnorm, init_from: sym cosin}\n",
            "init_from 'sym cosin': no arm and no folder of that name; arms: sym cosine, sym dot, ",
        ),
        (
            "arms:\n  - {norm: dot}\n  - {norm: qnorm, init_from: sym dot, pretrained: tag}\n",
            "beside init_from sym dot",
        ),
        (
            "pretrained: openai\nmodel: ViT-B-32\narms:\n  - {norm: dot}\n  - {init_from: sym dot}\n",
            "give one of the two",
        ),
        (
            "arms:\n  - {lr: " + str([i / 1e6 for i in range(1, 2100)]) + "}\n",
            "2,099 runs, more than 2,000",
        ),
    ],
)
def test_a_slip_is_one_line(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)) as raised:
        plan(tmp_path, text)
    assert "\n" not in str(raised.value)


def test_a_name_without_ascii_letters_still_names_a_folder(tmp_path: Path) -> None:
    (cell,) = plan(tmp_path, "arms:\n  - {norm: dot, name: длина}\n").runs
    assert re.fullmatch(r"arm-seed0-[0-9a-f]{8}", cell.folder.name)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--jobs", "-1"], "--jobs -1: expected a whole number of at least 0"),
        (["--name", "a/b"], "a plain folder name"),
        (["--set", "lr"], "--set 'lr': expected SETTING=VALUE"),
        (["--seeds", "1", "1"], "--seeds 1 1: different whole numbers"),
    ],
)
def test_flags_are_checked(argv: list[str], told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        parse(StudyConfig, argv)


def test_data_that_are_not_there_are_told_before_a_run(tmp_path: Path) -> None:
    def told(*given: str) -> str:
        cells = plan(tmp_path, ARMS, set=list(given)).runs
        with pytest.raises(UserError) as raised:
            require_data(cells)
        return str(raised.value)

    there, empty = tmp_path / "there", tmp_path / "empty"
    for folder in (there / "train", empty):
        folder.mkdir(parents=True)
    (there / "train" / "00.tar").touch()
    (there / "a.csv").touch()
    assert told(f"train_data={tmp_path}/no").startswith(
        f"train_data {tmp_path}/no: no such data; valid: a shard pattern"
    )
    assert "no such data" in told(f"train_data={there}/train/{{01..09}}.tar")
    assert "no such data" in told("train_data=" + "x" * 5000) and "no such data" in told(f"train_data={there}/*.tar")
    assert "no shards in that folder" in told(f"train_data={empty}")
    assert told(f"val_data={tmp_path}/no").startswith("val_data ")
    assert told(f"zeroshot_data={tmp_path}/no").startswith("zeroshot_data ")
    for source in (there, there / "a.csv", there / "train" / "{00..09}.tar", there / "train" / "*.tar"):
        assert "no evaluation split test or val" in told(f"train_data={source}")
        require_data(plan(tmp_path, ARMS, set=[f"train_data={source}", "val_holdout=3"]).runs)
        require_data(plan(tmp_path, ARMS, set=[f"train_data={source}", f"val_data={there}"]).runs)
    (there / "val").mkdir()
    (there / "val" / "0.tar").touch()
    require_data(plan(tmp_path, ARMS, set=[f"train_data={there}"]).runs)
    require_data(plan(tmp_path, ARMS).runs)


@settings(max_examples=30, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0, 0.1, 0.5, 0.9, 1]), min_size=1, max_size=5),
    norms=st.lists(st.sampled_from(["cosine", "dot", "qnorm"]), min_size=1, max_size=4),
)
def test_equal_arms_run_once_whatever_their_order(
    tmp_path_factory: pytest.TempPathFactory, weights: list[float], norms: list[str]
) -> None:
    cells = plan(tmp_path_factory.mktemp("p"), f"arms:\n  - {{norm: {norms}, i2t_weight: {weights}}}\n").runs
    assert len(cells) == len(set(weights)) * len(set(norms))
    assert len({c.arm for c in cells}) == len({c.folder for c in cells}) == len(cells)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("study_*.yaml")), ids=lambda p: p.stem)
def test_the_shipped_studies_are_valid_and_open_with_command_cost_and_expectation(path: Path, shared: Path) -> None:
    head = path.read_text(encoding="utf-8").split("\n\n")[0]
    words = [line.split()[1] for line in head.splitlines() if re.match(r"# [A-Z][a-z]+ {2,}", line)]
    assert words == ["Command", "Cost", "Expect"]
    assert "TODO" not in head
    assert plan_study(StudyConfig(config=str(path))).runs


def test_the_grid_is_shown_without_training(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(ARMS, encoding="utf-8")
    done = tiny.run_script("run_study.py", "--config", file, "--logs", tmp_path / "logs", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("to run    sym-cosine-seed0-") and not (tmp_path / "logs").exists()
