"""Command lines and settings files become checked configs, or one line with what was received and what is valid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mmclip import config as configs
from mmclip.cli import COMMANDS
from mmclip.config import CONFIGS, Config, TrainConfig, from_settings, load_config, parse, read_yaml, values_of
from mmclip.config.parser import _field_docs
from mmclip.errors import UserError


def file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return str(path)


def refused(*argv: str) -> str:
    with pytest.raises(UserError) as error:
        parse(TrainConfig, argv)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    return str(error.value)


def test_flag_beats_file_beats_default(tmp_path: Path) -> None:
    path = file(tmp_path, "lr: 1e-3\nbatch-size: 8\nlock_image: true\ntrain_data: x\ncompare: [a, b]\n")
    config = parse(TrainConfig, ["--config", path, "--batch_size=16", "--compare", "c"])
    assert (config.lr, config.batch_size, config.lock_image, config.wd) == (1e-3, 16, True, 0.2)
    assert config.compare == ["c"]
    assert parse(TrainConfig, ["--config", path, "--no-lock-image"]).lock_image is False
    assert parse(TrainConfig, ["--lock-image", "--no-lock-image", "--lr", "1", "--lr", "2"]).lr == 2


def test_values_keep_their_spelling() -> None:
    config = parse(TrainConfig, ["--csv-separator", "\t", "--epochs", "1e3", "--warmup", "100", "--val-data", "none",
                                 "--aug-cfg", "scale=0.9,1", "none=1", "--name=007"])  # fmt: skip
    assert (config.csv_separator, config.epochs, config.warmup, config.val_data) == ("\t", 1000, 100.0, "none")
    assert config.aug_cfg == ["scale=0.9,1", "none=1"] and config.name == "007" and isinstance(config.epochs, int)
    assert parse(TrainConfig, ["--aug-cfg"]).aug_cfg == []


def test_the_scenes_file_is_the_default_without_data_flags() -> None:
    scenes = yaml.safe_load((CONFIGS / "scenes.yaml").read_text(encoding="utf-8"))
    config = parse(TrainConfig, ["--loss", "asym-i2t", "--norm", "qnorm"])
    assert (config.model, config.loss, config.norm) == (scenes["model"], "asym-i2t", "qnorm")
    assert parse(TrainConfig, ["--train-data", "elsewhere"]).model == "ViT-B-32"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--norm qnrom", ["--norm qnrom", "one of cosine", "qnorm"]),
        ("--lrr 1", ["--lrr", "did you mean --lr?"]),
        ("--lrr=1", ["'--lrr'", "did you mean --lr?"]),
        ("stray", ["stray"]),
        ("--lr", ["--lr takes one value, got none"]),
        ("--lr 1 2", ["--lr takes one value, got 1 2"]),
        ("--lr -1", ["--lr -1", "above 0"]),
        ("--lr nan", ["--lr nan", "above 0", "finite"]),
        ("--lr fast", ["--lr 'fast'", "a number"]),
        ("--lock-image yes", ["'yes'"]),
        ("--epochs 3.5", ["--epochs '3.5'", "whole number"]),
        ("--seed 9999999999999999999", ["at most 18 digits"]),
        ("--batch-size 0", ["--batch-size 0", "at least 1"]),
        ("--i2t-weight 1.5", ["1.5", "from 0 to 1"]),
        ("--loss asym-i2t --i2t-weight 0.4", ["--i2t-weight 0.4 needs --loss sym"]),
        ("--gamma-start 0.3", ["--gamma-start 0.3 needs --gamma-schedule switch or anneal"]),
        ("--gamma-init 1", ["--gamma-init 1", "between 0 and 1"]),
        ("--warmup 1.5", ["1.5", "whole number of steps"]),
        ("--cache-features", ["--lock-image"]),
        ("--val-holdout 9 --val-data none", ["--val-holdout 9 beside --val-data none", "give one of the two"]),
        ("--val-holdout 9 --val-split val", ["--val-holdout 9 beside --val-split val"]),
        ("--train-fraction 1.5", ["--train-fraction 1.5", "above 0 and at most 1"]),
        ("--train-fraction .5 --train-num-samples 9", ["--train-fraction 0.5", "--train-num-samples 9"]),
        ("--loss-batch-size 1", ["--loss-batch-size 1", "2 or more pairs"]),
        ("--loss-batch-size 8 --accum-freq 2", ["--loss-batch-size 8 beside --accum-freq 2"]),
        ("--zeroshot-split val", ["--zeroshot-split val needs --zeroshot-data"]),
        ("--zeroshot-data x --val-data none", ["--zeroshot-data x", "results.json"]),
        ("--measure-start --val-data none", ["--measure-start", "evaluation data"]),
        ("--logit-scale-init 200", ["200", "--logit-scale-max 100"]),
        ("--model coca_ViT-B-32", ["CoCa", "not supported"]),
        ("--model nothing.json", ["nothing.json", "scenes-tiny.json"]),
        ("--model local-dir:/nowhere", ["/nowhere"]),
        ("--pretrained missing/x.pt", ["missing/x.pt", "no such file"]),
        ("--init-from nowhere --pretrained x", ["--pretrained x beside --init-from nowhere"]),
        ("--text-trunk /nowhere", ["--text-trunk /nowhere", "existing file or folder"]),
        ("--aug-cfg scale", ["KEY=VALUE"]),
        ("--aug-cfg flip=1", ["flip", "scale"]),
        ("--aug-cfg scale=inf", ["numbers expected"]),
        ("--name a/b", ["a/b", "without slashes"]),
        ("--name ..", ["--name ..", "folder name"]),
        ("--resume latest", ["--name"]),
        ("--benchmark 3 --resume x.pt", ["--benchmark 3 beside --resume x.pt"]),
        ("--fsdp --torchcompile", ["--fsdp beside --torchcompile"]),
        ("--config scene", ["scene", "scenes"]),
        ("--precision fp16", ["fp16", "amp_bf16"]),
        ("--fast-decode", ["unknown argument '--fast-decode'"]),
    ],
)
def test_bad_flags_are_one_line_that_says_what_is_valid(argv: str, words: list[str]) -> None:
    message = refused(*argv.split())
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("norn: dot", ["norn", "did you mean norm?"]),
        ("norm: dott", ["dott", "qnorm"]),
        ("lr: [1]", ["lr is a single value, got a list"]),
        ("lr: quick", ["lr 'quick': expected a number"]),
        ("lr: null", ["lr is a single value, got null"]),
        ("lock_image: 3", ["true or false"]),
        ("compare: logs/a", ["compare is a list"]),
        ("- lr", ["'name: value'"]),
        ("lr: !!python/object/apply:os.system ['touch PWNED']", ["lr is a single value, got a list"]),
        ("lr: 2026-99-99", ["lr '2026-99-99'"]),
        ("epochs: 0b", ["'0b'", "whole number"]),
        ("epochs: .inf", ["'.inf'", "whole number"]),
        (f"epochs: {'9' * 5000}", ["whole number"]),
        (f"lr: {'[' * 5000}", ["nested too deep"]),
        ("- " * 5000, ["nested too deep"]),
        ("a: 1\n" * 50_000, ["more than 100,000 bytes"]),
        ("lr: &a [*a]", ["not readable as YAML"]),
        ("{lr: {x: 1}}", ["lr is a single value, got a mapping"]),
        ("compare: [a, [b]]", ["compare is a single value, got a list"]),
        ("? [a, b]\n: 3", ["unknown setting 'a list'"]),
        ("<<: {lr: 3}", ["unknown setting '<<'"]),
        ("batch-size: 1\nbatch_size: 2", ["batch_size is set twice", "line 2"]),
        ('name: "a\\0b"', ["NUL"]),
        ('name: "\\ud800"', ["half a character"]),
        ("lr: 1\0", ["not readable as YAML"]),
        ("lr: \udcff", ["not readable as YAML"]),
        ("", ["got nothing"]),
        ("lr", ["got a single value"]),
        ("lr: ${MMCLIP_NO_SUCH_VARIABLE}", ["MMCLIP_NO_SUCH_VARIABLE", "--lr"]),
        ("a: b: c", ["not readable as YAML"]),
    ],
)
def test_bad_settings_files_are_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    message = refused("--config", file(tmp_path, text))
    assert all(word in message for word in words), message
    assert not Path("PWNED").exists()


@pytest.mark.timeout(20)
def test_aliases_that_multiply_are_never_written_out(tmp_path: Path) -> None:
    """Twelve lists, each of nine times the one before it: written out they would be a terabyte."""
    lists = ["&a0 [x]", *(f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 13))]
    for text in (f"lr: [{', '.join(lists)}]", f"compare: [{', '.join(lists)}]"):
        assert len(refused("--config", file(tmp_path, text))) < 300


def test_a_folder_or_a_device_is_no_settings_file(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/zero")):
        assert "no such file" in refused("--config", str(path))


def test_texts_of_a_file_become_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCLIP_TEST_RATE", "0.25")
    text = "epochs: 3.0\nbatch_size: 1e2\nname: 007\nlr: ${MMCLIP_TEST_RATE}\nlock_image: yes\nval_steps: ~\n"
    text += "logs: ${MMCLIP_UNSET_NAME:-run}\n"
    values = values_of(TrainConfig, read_yaml(Path(file(tmp_path, text))))
    assert values == {"epochs": 3, "batch_size": 100, "name": "007", "lr": 0.25, "lock_image": True, "val_steps": None,
                      "logs": "run"}  # fmt: skip
    assert isinstance(values["epochs"], int)


def test_a_runs_own_config_is_read_back_whole(tmp_path: Path) -> None:
    config = parse(TrainConfig, ["--train-data", "null", "--name", "1e3", "--lr", "1e-06", "--aug-cfg", "scale=0.9,1"])
    path = file(tmp_path, yaml.safe_dump(config.to_dict(), sort_keys=False))
    assert load_config(TrainConfig, path) == config
    assert from_settings(TrainConfig, config.to_dict()) == config


CLASSES = [getattr(configs, command.config) for command in COMMANDS.values() if command.config]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_help_opens_with_a_sentence_examples_and_the_flags_used_most(
    cls: type[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse(cls, ["--help"], prog="mmclip x")
    shown = capsys.readouterr().out
    assert left.value.code == 0 and shown.index("Examples:") < 300 and shown.count(" mmclip ") >= 3
    if cls.most_used:
        assert shown.index("Examples:") < shown.index("Most used:") < shown.index("--help")
    for flag in cls.flags.values():
        assert flag.options[0] in shown
    assert all(name in docs and docs[name] for docs in [_field_docs(cls)] for name in cls.flags), "a flag without help"


def test_configs_and_help_need_no_torch(root: Path) -> None:
    code = "import sys; from mmclip.config import *; parse(TrainConfig, []); "
    code += "sys.exit(bool({'torch', 'numpy'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
