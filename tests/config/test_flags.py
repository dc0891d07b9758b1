from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from mmclip.config.clip import CONFIGS, TrainConfig, parse_train
from mmclip.config.files import read_config
from mmclip.errors import UserError, printable


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return str(path)


def test_flag_beats_config_beats_default(tmp_path: Path) -> None:
    path = config(tmp_path, "lr: 1e-3\nbatch-size: 8\nlock_image: true\ntrain_data: x\n")
    settings = parse_train(["--config", path, "--batch-size", "16"])
    assert (settings.lr, settings.batch_size, settings.lock_image, settings.wd) == (1e-3, 16, True, 0.2)
    assert parse_train(["--config", path, "--no-lock-image"]).lock_image is False


def test_scenes_config_is_the_default_without_data_flags() -> None:
    scenes = yaml.safe_load((CONFIGS / "scenes.yaml").read_text(encoding="utf-8"))
    settings = parse_train(["--loss", "asym-i2t", "--norm", "qnorm"])
    assert settings.model == scenes["model"]
    assert (settings.loss, settings.norm) == ("asym-i2t", "qnorm")
    assert parse_train(["--train-data", "elsewhere"]).model == "ViT-B-32"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--norm", "qnrom"], ["qnrom", "cosine", "qnorm"]),
        (["--loss", "both"], ["both", "asym-i2t"]),
        (["--lrr", "1"], ["--lrr", "did you mean --lr?"]),
        (["--lr", "-1"], ["--lr -1", "above 0"]),
        (["--lr", "nan"], ["--lr nan", "above 0"]),
        (["--lr", "fast"], ["fast"]),
        (["--batch-size", "0"], ["--batch-size 0", "at least 1"]),
        (["--i2t-weight", "1.5"], ["1.5", "from 0 to 1"]),
        (["--loss", "asym-i2t", "--i2t-weight", "0.4"], ["--i2t-weight", "--loss sym"]),
        (["--gamma-init", "1"], ["--gamma-init 1", "between 0 and 1"]),
        (["--warmup", "1.5"], ["1.5", "whole number of steps"]),
        (["--cache-features"], ["--lock-image"]),
        (["--val-holdout", "0"], ["--val-holdout 0", "at least 1"]),
        (["--val-holdout", "9", "--val-data", "none"], ["--val-holdout 9", "--val-data none", "one of the two"]),
        (["--val-holdout", "9", "--val-split", "val"], ["--val-holdout 9", "--val-split val"]),
        (["--train-fraction", "0"], ["--train-fraction 0", "above 0 and at most 1"]),
        (["--train-fraction", "1.5"], ["--train-fraction 1.5", "above 0 and at most 1"]),
        (["--train-fraction", ".5", "--train-num-samples", "9"], ["--train-fraction 0.5", "--train-num-samples 9"]),
        (["--zeroshot-split", "val"], ["--zeroshot-split val", "--zeroshot-data"]),
        (["--zeroshot-data", "x", "--val-data", "none"], ["--zeroshot-data", "results.json"]),
        (["--measure-start", "--val-data", "none"], ["--measure-start", "evaluation data"]),
        (["--logit-scale-init", "200"], ["200", "--logit-scale-max 100"]),
        (["--model", "coca_ViT-B-32"], ["CoCa", "not supported"]),
        (["--model", "nothing.json"], ["nothing.json", "scenes-tiny.json"]),
        (["--model", "local-dir:/nowhere"], ["/nowhere"]),
        (["--pretrained", "missing/x.pt"], ["missing/x.pt", "no such file"]),
        (["--text-trunk", "/nowhere"], ["--text-trunk /nowhere"]),
        (["--aug-cfg", "scale"], ["KEY=VALUE"]),
        (["--aug-cfg", "flip=1"], ["flip", "scale"]),
        (["--name", "a/b"], ["a/b", "without slashes"]),
        (["--resume", "latest"], ["--name"]),
        (["--config", "scene"], ["scene", "scenes"]),
        (["--precision", "fp16"], ["fp16", "amp_bf16"]),
    ],
)
def test_bad_flags_are_one_line_that_says_what_is_valid(argv: list[str], told: list[str]) -> None:
    with pytest.raises(UserError) as error:
        parse_train(argv)
    assert "\n" not in str(error.value)
    for part in told:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("norn: dot", ["norn", "did you mean norm?"]),
        ("norm: dott", ["dott", "qnorm"]),
        ("lr: [1]", ["lr is a single value"]),
        ("lr: quick", ["quick"]),
        ("lr: null", ["lr needs a value"]),
        ("lock_image: 3", ["true or false"]),
        ("compare: logs/a", ["compare is a list"]),
        ("- lr", ["'name: value'"]),
        ("lr: !!python/object/apply:os.system ['touch PWNED']", ["lr is a single value, got a list"]),
        ("name: !!python/name:os.system", ["!!python/name:os.system is not read"]),
        ("name: !!binary aGVsbG8=", ["!!binary is not read"]),
        ("lr: 2026-99-99", ["lr: '2026-99-99' is not valid"]),
        ("epochs: 0b", ["'0b' is not a whole number"]),
        ("epochs: 3.5", ["'3.5' is not a whole number"]),
        ("epochs: .inf", ["'.inf' is not a whole number"]),
        ("epochs: true", ["'true' is not a whole number"]),
        (f"epochs: {'9' * 5000}", ["is not a whole number"]),
        (f"seed: {'9' * 30}", ["more than 18 digits"]),
        (f"lr: {'[' * 5000}", ["nested too deep"]),
        (f"lr: {'{a: ' * 5000}", ["nested too deep"]),
        ("- " * 5000, ["nested too deep"]),
        ("a: 1\n" * 50_000, ["more than 100,000 bytes"]),
        ("lr: &a [*a]", ["lr is a single value, got a list"]),
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
def test_bad_config_files_are_one_line(tmp_path: Path, text: str, told: list[str]) -> None:
    with pytest.raises(UserError) as error:
        parse_train(["--config", config(tmp_path, text)])
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    for part in told:
        assert part in str(error.value)
    assert not Path("PWNED").exists()


def test_a_config_that_is_a_folder_or_a_device_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(UserError, match="no such file"):
            parse_train(["--config", str(path)])


@pytest.mark.timeout(20)
def test_aliases_that_multiply_are_never_written_out(tmp_path: Path) -> None:
    """Twelve lists, each of nine times the one before it: written out they would be a terabyte."""
    lists = ["&a0 [x]", *(f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 13))]
    for text in (f"lr: [{', '.join(lists)}]", f"compare: [{', '.join(lists)}]", f"? [{', '.join(lists)}]\n: 1"):
        with pytest.raises(UserError) as error:
            parse_train(["--config", config(tmp_path, text)])
        assert len(str(error.value)) < 300


def test_whole_numbers_may_be_written_as_floats_and_text_stays_as_it_stands(tmp_path: Path) -> None:
    path = config(tmp_path, "epochs: 3.0\nbatch_size: 1e2\nname: 007\nlr: 1e-3\nlock_image: yes\nval_steps: ~\n")
    values = read_config(TrainConfig, Path(path))
    assert values == {"epochs": 3, "batch_size": 100, "name": "007", "lr": 1e-3, "lock_image": True, "val_steps": None}
    assert isinstance(values["epochs"], int) and parse_train(["--epochs", "2.0"]).epochs == 2


def test_a_runs_own_config_is_read_back_whole(tmp_path: Path) -> None:
    settings = parse_train(["--train-data", "null", "--name", "1e3", "--lr", "1e-06", "--aug-cfg", "scale=0.9,1"])
    path = config(tmp_path, yaml.safe_dump(settings.to_dict(), sort_keys=False))
    assert read_config(TrainConfig, Path(path)) == settings.to_dict()


def test_config_values_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCLIP_TEST_RATE", "0.25")
    path = config(tmp_path, "lr: ${MMCLIP_TEST_RATE}\nname: ${MMCLIP_UNSET_NAME:-run}\n")
    assert read_config(TrainConfig, Path(path)) == {"lr": 0.25, "name": "run"}


def test_help_is_quick_grouped_and_teaches(root: Path) -> None:
    started = time.monotonic()
    shown = subprocess.run(
        [sys.executable, "scripts/train_clip.py", "--help"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, mmclip.config.clip; print('torch' in sys.modules)"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert time.monotonic() - started < 30, "two cold starts; --help itself must not wait for torch"
    assert loaded == "False"
    for group in ("data:", "model:", "loss and normalization:", "optimization:", "run:"):
        assert group in shown
    assert shown.count("scripts/train_clip.py") >= 3, "three examples"
    for field in dataclasses.fields(TrainConfig):
        assert "--" + field.name.replace("_", "-") in shown


def test_shown_text_cannot_control_a_terminal() -> None:
    assert printable("a\x1b[31m\u202eb\nc") == "a\\x1b[31m\\u202eb\\nc"
    assert len(printable("x" * 5000)) == 300


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("UserError('a\\nb\\x1b[31m')", r"error: a\nb\x1b[31m"),
        ("OSError(28, 'No space left on device', 'a\\nb')", r"error: a\nb: No space left on device"),
        ("MemoryError()", "error: out of memory"),
        (
            "RuntimeError('[enforce fail] DefaultCPUAllocator: can\\'t allocate memory: 9 bytes')",
            "error: out of memory",
        ),
        ("RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')", "error: out of memory: CUDA"),
    ],
)
def test_a_script_ends_with_one_line_and_exit_code_2(root: Path, error: str, told: str) -> None:
    code = f"""
from mmclip.errors import UserError
from mmclip.config.flags import run_script
def main():
    print("caf\u00e9")
    raise {error}
run_script(main)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
    )
    assert done.returncode == 2 and done.stdout == "caf\\xe9\n"
    assert done.stderr.startswith(told) and done.stderr.count("\n") == 1


def test_a_programming_error_keeps_its_traceback(root: Path) -> None:
    code = "from mmclip.config.flags import run_script\ndef main(): raise RuntimeError('a bug')\nrun_script(main)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" in done.stderr
