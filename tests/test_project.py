"""The project holds to what it says: the README's code runs, configs say what they cost, dependencies why they are."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mmclip.cli import COMMANDS
from mmclip.config import CONFIGS, TrainConfig, load_config


def test_scripts_are_the_commands(root: Path) -> None:
    started = set()
    for path in (root / "scripts").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 12 and 'if __name__ == "__main__":' in text, path.name
        started |= set(re.findall(r'main\(\["([\w-]+)", \*sys.argv\[1:\]\]\)', text))
    assert started == set(COMMANDS)


def test_the_readmes_python_runs(root: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", block], cwd=root, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


RUNS = sorted(p for p in CONFIGS.glob("*.yaml") if not p.stem.startswith("study_"))  # studies: tests/test_study_plan.py


@pytest.mark.parametrize("path", RUNS, ids=lambda p: p.stem)
def test_configs_are_valid_and_open_with_command_cost_and_expectation(path: Path, shared: Path) -> None:
    head = path.read_text(encoding="utf-8").split("\n\n")[0]
    words = [line.split()[1] for line in head.splitlines() if re.match(r"# [A-Z][a-z]+ {2,}", line)]
    assert words == ["Command", "Cost", "Expect"]
    assert load_config(TrainConfig, path).model


def test_every_dependency_has_a_reason_and_a_range(root: Path) -> None:
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    for name in [*project["dependencies"], *(d for e in project["optional-dependencies"].values() for d in e)]:
        (line,) = [x for x in text.splitlines() if x.strip().startswith(f'"{name}"')]
        assert "#" in line, f"{name} has no reason"
        assert "<" in name or name.startswith("types-"), f"{name} has no upper end"


def test_no_path_of_a_machine_and_no_host_is_in_the_tree(root: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split():
        if (root / name).suffix in (".py", ".md", ".yaml", ".toml", ".json", ".cff", "") and name != "LICENSE":
            text = (root / name).read_text(encoding="utf-8")
            assert not re.search(r"/(home|root|work)/\w|index-url|find-links", text) or name.endswith(
                "test_project.py"
            ), name
