"""The project holds to what it says: imports point one way, the README's code runs, configs say what they cost."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mmclip.config.clip import CONFIGS, TrainConfig
from mmclip.config.files import read_config

# module -> what it must never reach, directly or through others: the one idea stays below everything that uses it
FORBIDDEN = {
    "similarity": {"losses", "towers", "data", "retrieval", "evaluation", "training"},
    "losses": {"towers", "build", "data", "loader", "evaluation", "training"},
    "columns": {"similarity", "losses", "towers", "training"},
    "gram": {"similarity", "losses", "towers", "training"},  # one product and its factors: it knows no roles
    "tiled": {"losses", "towers", "build", "data", "training"},
    "softmax_loss": {"similarity", "losses", "towers", "training"},
    "curriculum": {"losses", "towers", "build", "data", "training"},
    "towers": {"losses", "data", "retrieval", "evaluation", "training", "similarity"},
    "data": {"metrics", "retrieval", "evaluation", "losses", "towers", "training"},
    "metrics": None,  # imports nothing of ours
    "embeddings": {"retrieval", "metrics", "evaluation", "losses", "training"},
    "scored_model": {"towers", "build", "data", "losses", "retrieval", "evaluation", "training"},
    "retrieval": {"towers", "data", "losses", "evaluation", "training"},
    "diagnostics": {"towers", "data", "losses", "evaluation", "training"},
    "geometry": {"towers", "data", "losses", "evaluation", "training"},
    "fisher": {"towers", "data", "losses", "evaluation", "training"},
    "diagnose": {"towers", "build", "data", "losses", "evaluation", "training"},
    "evaluation": {"towers", "build", "losses", "training", "run"},
    "zero_shot": {"losses", "evaluation", "training", "run"},
    "array_files": {"similarity", "pools", "towers", "data", "evaluation"},
    "saved_embeddings": {"towers", "build", "data", "losses", "evaluation", "training"},
    "serving": {"towers", "build", "data", "losses", "retrieval", "evaluation", "training"},
    "seed_bootstrap": {"similarity", "results", "comparison"},
    "study_numbers": {"towers", "build", "data", "losses", "training", "evaluation", "report"},
    "study_report": {"towers", "build", "losses", "training", "run"},
    "config_embed": {"similarity", "losses", "training", "build"},
    "config_data": {"config", "similarity", "build", "data"},
    "config": {"similarity", "losses", "training", "build"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "mmclip":
            inner = node.module.split(".")[1:]
            found |= set(inner[:1]) if inner else {a.name for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("mmclip.")}
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        assert not any(n.split(".")[0] == "scripts" for n in names), f"{path.name} imports a script"
    return found


@pytest.fixture(scope="module")
def graph(root: Path) -> dict[str, set[str]]:
    return {p.stem: imports(p) for p in (root / "mmclip").glob("*.py") if p.stem != "__init__"}


def reach(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for name in graph.get(todo.pop(), set()) - seen:
            seen.add(name)
            todo.append(name)
    return seen


@pytest.mark.parametrize("module", list(FORBIDDEN))
def test_imports_point_one_way(graph: dict[str, set[str]], module: str) -> None:
    forbidden = FORBIDDEN[module]
    allowed = {"errors"} if module == "metrics" else set(graph)
    assert reach(graph, module) <= allowed
    assert not reach(graph, module) & (forbidden or set())


def test_no_module_imports_itself_through_others(graph: dict[str, set[str]]) -> None:
    assert [m for m in graph if m in reach(graph, m)] == []


def test_scripts_are_thin(root: Path) -> None:
    for path in (root / "scripts").glob("*.py"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        assert len(lines) <= 80, f"{path.name} has {len(lines)} lines"
        assert 'if __name__ == "__main__":' in lines, f"{path.name} would run when imported"


def test_the_readmes_python_runs(root: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", block], cwd=root, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_the_readmes_file_tree_is_the_tree(root: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    tree = text[text.index("## Files") :]
    for path in (root / "mmclip").glob("*.py"):
        named = path.name in tree or (path.name.startswith("scene_") and "scene_*.py" in tree)
        assert named or path.name == "__init__.py", f"{path.name} is not in the README's tree"
    for name in re.findall(r"\b(\w+\.py)\b", tree):
        assert any((root / folder / name).exists() for folder in ("mmclip", "scripts", "benchmarks")), (
            f"{name} is not there"
        )


RUNS = sorted(p for p in CONFIGS.glob("*.yaml") if not p.stem.startswith("study_"))  # studies: tests/test_study_plan.py


@pytest.mark.parametrize("path", RUNS, ids=lambda p: p.stem)
def test_configs_are_valid_and_open_with_command_cost_and_expectation(path: Path, shared: Path) -> None:
    head = path.read_text(encoding="utf-8").split("\n\n")[0]
    words = [line.split()[1] for line in head.splitlines() if re.match(r"# [A-Z][a-z]+ {2,}", line)]
    assert words == ["Command", "Cost", "Expect"]
    settings = TrainConfig(**read_config(TrainConfig, path))
    assert settings.model


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
        if (root / name).suffix in (".py", ".md", ".yaml", ".toml", ".json", "") and name != "LICENSE":
            text = (root / name).read_text(encoding="utf-8")
            assert not re.search(r"/(home|root|work)/\w|index-url|find-links", text) or name.endswith(
                "test_project.py"
            ), name
