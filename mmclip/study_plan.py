"""A study's file -> the runs that it asks for, each known by its settings. Nothing is trained here."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mmclip.config import CONFIGS, TrainSettings
from mmclip.config_files import convert, converted, find_config, kind_of, name_of, name_value_nodes, read_config
from mmclip.config_study import StudySettings
from mmclip.errors import UsageError, one_line
from mmclip.flags import whole_number
from mmclip.study_arms import COSMETIC, MEASURING

Json = dict[str, Any]
MAX_RUNS = 2000  # more is a slip in an axis
# What only a study sets, for each of its runs
OURS = ("logs", "name", "resume", "may_change", "compare", "report", "keep_checkpoints", "seed")


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """One run of a study: an arm with a seed. initial: the cell that it starts from."""

    arm: str
    seed: int
    settings: TrainSettings
    folder: Path
    initial: Cell | None = None

    @property
    def name(self) -> str:
        return f"{self.arm}, seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """folder: of the study. cells: every one after the cell that it starts from."""

    title: str
    folder: Path
    cells: list[Cell]


def plan_study(settings: StudySettings) -> Plan:
    """Read a study's file and check every run's settings. Errors: UsageError, before anything is trained."""
    path = find_config(settings.config, CONFIGS, study=True)
    given: dict[str, yaml.Node] = {}
    rest = []
    for key, node in name_value_nodes(path):
        name = name_of(key)
        if name in given:
            raise UsageError(f"{path}: {name} is set twice, the second time in line {key.start_mark.line + 1}")
        if name in ("config", "seeds", "arms", "title"):
            given[name] = node
        else:
            rest.append((key, node))
    defaults = {f.name: f.default for f in dataclasses.fields(TrainSettings) if f.name not in OURS}
    asked = _base(path, given.get("config")) | converted(TrainSettings, rest, path) | _overrides(settings.set or [])
    _refuse_ours(asked, path)
    arms, own_seeds = _arms(given.get("arms"), defaults | asked, path)
    seeds = settings.seeds or (_seeds(given["seeds"], path) if "seeds" in given else [0])
    wanted = {name: settings.seeds or own_seeds.get(name, seeds) for name in arms}
    if (n := sum(map(len, wanted.values()))) > MAX_RUNS:
        raise UsageError(f"{path}: {n:,} runs, more than {MAX_RUNS:,}")
    folder = Path(settings.logs) / (settings.name or path.stem)
    title = given.get("title")
    every = list(dict.fromkeys(seed for mine in wanted.values() for seed in mine))
    cells = [c for seed in every for c in _cells(arms, [a for a in arms if seed in wanted[a]], seed, folder, path)]
    return Plan(title.value if isinstance(title, yaml.ScalarNode) else path.stem.replace("_", " "), folder, cells)


def _base(path: Path, node: yaml.Node | None) -> Json:
    """What all runs start from: a file of train_clip.py's settings, the built-in scenes' by default."""
    if node is None:
        return read_config(TrainSettings, CONFIGS / "scenes.yaml")
    if not isinstance(node, yaml.ScalarNode):
        raise UsageError(f"{path}: config is a single value, got {kind_of(node)}")
    beside = path.parent / node.value
    return read_config(TrainSettings, beside if beside.is_file() else find_config(node.value, CONFIGS))


def _overrides(texts: list[str]) -> Json:
    fields = {f.name: f for f in dataclasses.fields(TrainSettings)}
    values: Json = {}
    for text in texts:
        key, value = text.split("=", 1)
        values |= converted(
            TrainSettings,
            [(yaml.ScalarNode("tag:yaml.org,2002:str", key), _node(fields.get(key), value))],
            Path("--set"),
        )
    return values


def _node(field: Any, text: str) -> yaml.Node:
    """What a flag's text would be in a file: 'a b' for a setting that takes a list."""
    if field is not None and field.metadata["nargs"]:
        return yaml.SequenceNode("", [yaml.ScalarNode("tag:yaml.org,2002:str", t) for t in text.split()])
    null = text == "null" and field is not None and field.default is None
    return yaml.ScalarNode("tag:yaml.org,2002:" + ("null" if null else "str"), text)


def _refuse_ours(values: Mapping[str, Any], path: Path) -> None:
    for name in OURS:
        if name in values:
            instead = {"seed": "; give seeds", "name": "; an arm's name is its own"}.get(name, "")
            raise UsageError(f"{path}: {name} is set by the study for each of its runs{instead}")


def _seeds(node: yaml.Node, where: Path) -> list[int]:
    try:
        seeds = [whole_number(n.value) for n in node.value] if isinstance(node, yaml.SequenceNode) else []
    except Exception:  # argparse's own kind, or a node that is no number
        seeds = []
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise UsageError(f"{where}: seeds: a list of different whole numbers from 0 on is expected, such as [0, 1, 2]")
    return seeds


# --- arms -------------------------------------------------------------------------------------------------------------


def _arms(node: yaml.Node | None, base: Json, path: Path) -> tuple[dict[str, Json], dict[str, list[int]]]:
    """Arm's name -> its settings, equal arms once, and -> its seeds, where it has its own. Errors: UsageError."""
    if not isinstance(node, yaml.SequenceNode) or not node.value:
        raise UsageError(f"{path}: arms: a list of settings is expected, such as - {{loss: sym, norm: cosine}}")
    arms: dict[str, Json] = {}
    known: dict[str, str] = {}
    seeds: dict[str, list[int]] = {}
    for entry in node.value:
        where = f"{path}, line {entry.start_mark.line + 1}"
        if not isinstance(entry, yaml.MappingNode):
            raise UsageError(f"{where}: an arm is a mapping such as {{loss: sym, norm: cosine}}, got {kind_of(entry)}")
        asked = [_seeds(node, Path(where)) for key, node in entry.value if name_of(key) == "seeds"]
        for name, own in _grid(entry, Path(where)):
            _refuse_ours(own, Path(where))
            values = _canonical(base | own)
            name = name or _arm_name(values, base)
            key = json.dumps(values, sort_keys=True)
            if known.setdefault(key, name) != name:
                name = known[key]  # the same arm by another road, such as a lambda of 1 beside asym-i2t
            if name in arms and arms[name] != values:
                raise UsageError(f"{where}: two different arms are called {one_line(name, 80)!r}")
            arms[name] = values
            if asked:
                seeds[name] = list(dict.fromkeys([*seeds.get(name, []), *asked[0]]))
    return arms, seeds


def _grid(entry: yaml.MappingNode, where: Path) -> Iterator[tuple[str, Json]]:
    """(name or "", settings) of every point of an entry: a list is an axis, except where a setting is a list itself."""
    fields = {f.name: f for f in dataclasses.fields(TrainSettings)}
    title, plain, axes = "", [], []
    for key, node in entry.value:
        name = name_of(key)
        if name == "seeds":
            continue
        if name == "name":
            title = node.value if isinstance(node, yaml.ScalarNode) else ""
            if not title:
                raise UsageError(f"{where}: an arm's name is a text")
        elif isinstance(node, yaml.SequenceNode) and name in fields and not fields[name].metadata["nargs"]:
            if not node.value:
                raise UsageError(f"{where}: {name}: an empty list")
            axes.append([(name, convert(fields[name], item, where)) for item in node.value])
        else:
            plain.append((key, node))
    fixed = converted(TrainSettings, plain, where)
    for point in itertools.product(*axes):
        more = " ".join(_shown(k, v) for k, v in point)
        yield f"{title} {more}".strip() if title else "", fixed | dict(point)


def _canonical(values: Json) -> Json:
    """One way to say each loss: a lambda of 0 or 1 is a one-direction loss, a lambda of 1/2 need not be said."""
    weight = values["i2t_weight"]
    if values["loss"] != "sym" or values.get("i2t_weight_end") is not None or weight not in (0, 0.5, 1):
        return values
    loss = {0: "asym-t2i", 0.5: "sym", 1: "asym-i2t"}[weight]
    return values | {"loss": loss, "i2t_weight": None}


def _arm_name(values: Json, base: Json) -> str:
    """Loss and norm, and whatever else makes it another arm than the rest."""
    names = [k for k in values if k not in ("loss", "norm", *MEASURING) and base.get(k) != values[k]]
    return " ".join(_shown(k, values[k]) for k in ("loss", "norm", *names))


def _shown(name: str, value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if name in ("loss", "norm") else f"{'λ' if name == 'i2t_weight' else name}={text}"


# --- cells ------------------------------------------------------------------------------------------------------------


def _cells(arms: Mapping[str, Json], wanted: list[str], seed: int, folder: Path, path: Path) -> list[Cell]:
    """The cells of a seed, each after the one that it starts from, which comes along unasked. Errors: UsageError for
    settings that no run can have, or arms that start from each other."""
    made: dict[str, Cell] = {}

    def make(arm: str, above: tuple[str, ...] = ()) -> Cell:
        if arm in above:
            raise UsageError(f"{path}: arms that start from each other: {one_line(', '.join(above), 200)}")
        if arm not in made:
            values = dict(arms[arm])
            initial = values.get("init_from")
            start = make(str(initial), (*above, arm)) if initial in arms else None
            made[arm] = _cell(arm, seed, values, start, folder, path)
        return made[arm]

    for arm in wanted:
        make(arm)
    return list(made.values())


def _cell(arm: str, seed: int, values: Json, start: Cell | None, folder: Path, path: Path) -> Cell:
    ours = {"seed": seed, "report": False, "keep_checkpoints": 1, "logs": str(folder / "runs")}
    if start is not None:
        values.pop("init_from")  # its folder is not there yet, and a run's settings are checked
    try:
        settings = TrainSettings(**(values | ours))
    except UsageError as error:
        raise UsageError(f"{path}, arm {one_line(arm, 80)!r}: {error}") from None
    defaults = {f.name: f.default for f in dataclasses.fields(TrainSettings)}
    # what is not said is left out, so that a setting that a later version knows leaves finished runs finished
    known = {k: v for k, v in settings.to_dict().items() if k not in COSMETIC and v != defaults[k]}
    if start is not None:
        known["init_from"] = start.folder.name
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:8]
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", arm).strip("-.")[:60]
    runs = Path(settings.logs)
    there = [p.name for p in runs.glob(f"*-seed{seed}-{digest}")]  # an arm that was called otherwise is the same arm
    name = there[0] if there else f"{slug}-seed{seed}-{digest}"
    settings.name = name
    if start is not None:
        settings.init_from = str(start.folder)
    return Cell(arm, seed, settings, runs / name, start)
