"""A study's file -> its arms, each with its settings and seeds. No run's settings are checked here."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mmclip.config.clip import CONFIGS
from mmclip.config.files import (
    convert,
    converted,
    find_config,
    is_null,
    kind_of,
    name_of,
    name_value_nodes,
    nearest,
    read_config,
    require_plain,
    text_of,
)
from mmclip.config.flags import whole_number
from mmclip.config.study import StudyConfig
from mmclip.errors import UserError, printable
from mmclip.study.kinds import CLIP, KINDS, Kind

Json = dict[str, Any]
MAX_RUNS = 2000  # more is a slip in an axis
_OF_A_STUDY = ("script", "config", "seeds", "arms", "title")
_SET = Path("--set")


@dataclasses.dataclass(frozen=True)
class StudyFile:
    """arms: name -> settings, equal ones once. names: whatever an arm is called in the file -> its name in ``arms``.
    seeds: arm -> those that it runs with."""

    kind: Kind
    path: Path
    title: str
    arms: dict[str, Json]
    names: dict[str, str]
    seeds: dict[str, list[int]]


def read_study(settings: StudyConfig) -> StudyFile:
    """The file of --config with --set over it, over its arms too, and --seeds. Errors: UserError, one line."""
    path = find_config(settings.config, CONFIGS, study=True)
    kind, own, rest = _top(path)
    title = _text(own["title"], f"{path}: title") if "title" in own else path.stem.replace("_", " ")
    forced = _overrides(kind, settings.set or [])
    asked = _base(kind, path, own.get("config")) | converted(kind.settings, rest, path)
    _refuse_ours(kind, asked, path)
    defaults = {name: f.default for name, f in kind.fields.items() if name not in kind.ours}
    arms, names, seeds = _arms(kind, _entries(kind, own.get("arms"), forced, path), defaults | asked | forced)
    for_all = _seeds(own["seeds"], path) if "seeds" in own else [0]
    wanted = {name: settings.seeds or seeds.get(name, for_all) for name in arms}
    _require_few(sum(map(len, wanted.values())), path)
    return StudyFile(kind, path, title, arms, names, wanted)


def _top(path: Path) -> tuple[Kind, dict[str, yaml.Node], list[tuple[yaml.Node, yaml.Node]]]:
    """What its runs are, what only a study's file has, by name, and the (name, value) nodes of all runs' settings."""
    pairs = name_value_nodes(path)
    kind = _kind(path, [node for key, node in pairs if name_of(key) == "script"])
    fields = kind.fields
    own: dict[str, yaml.Node] = {}
    rest = []
    for key, node in pairs:
        name = name_of(key)
        if name in own:
            raise UserError(f"{path}: {name} is set twice, the second time in line {key.start_mark.line + 1}")
        if name in _OF_A_STUDY:
            own[name] = node
        elif name in fields:
            rest.append((key, node))
        else:
            valid = [*_OF_A_STUDY, *(f for f in fields if f not in kind.ours)]
            raise UserError(f"{path}: unknown setting {printable(name, 100)!r}{nearest(name[:100], valid)}")
    return kind, own, rest


def _kind(path: Path, nodes: Sequence[yaml.Node]) -> Kind:
    if not nodes:
        return CLIP
    script = _text(nodes[0], f"{path}: script")
    if script not in KINDS:
        raise UserError(f"{path}: script {printable(script, 60)!r} is not one of {', '.join(KINDS)}")
    return KINDS[script]


def _base(kind: Kind, path: Path, node: yaml.Node | None) -> Json:
    """What all runs start from: a file of the script's settings."""
    if node is None:
        return read_config(kind.settings, CONFIGS / kind.base) if kind.base else {}
    name = _text(node, f"{path}: config")
    beside = path.parent / name
    found = beside if beside.is_file() else find_config(name, CONFIGS, asked=f"{path}: config")
    return read_config(kind.settings, found)


def _text(node: yaml.Node, where: str) -> str:
    text = "" if is_null(node) else text_of(node, where).strip()
    if not text:
        raise UserError(f"{where} is a text, got {'null' if is_null(node) else 'an empty one'}")
    return text


def _overrides(kind: Kind, texts: Sequence[str]) -> Json:
    """The settings of --set."""
    pairs: list[tuple[yaml.Node, yaml.Node]] = []
    for text in texts:
        key, value = text.split("=", 1)
        node = yaml.ScalarNode("tag:yaml.org,2002:str", key)
        if name_of(node) in [name_of(k) for k, _ in pairs]:
            raise UserError(f"--set: {printable(key, 100)} is set twice")
        pairs.append((node, _node(kind.fields.get(name_of(node)), value)))
    values = converted(kind.settings, pairs, _SET)
    _refuse_ours(kind, values, _SET)
    return values


def _node(field: Any, text: str) -> yaml.Node:
    """What a flag's text would be in a file: 'a b' for a setting that takes a list."""
    if field is not None and field.metadata["nargs"]:
        parts = [yaml.ScalarNode("tag:yaml.org,2002:str", t) for t in text.split()]
        return yaml.SequenceNode("tag:yaml.org,2002:seq", parts)
    null = text == "null" and field is not None and field.default is None
    return yaml.ScalarNode("tag:yaml.org,2002:" + ("null" if null else "str"), text)


def _refuse_ours(kind: Kind, names: Iterable[str], where: Path) -> None:
    for name in names:
        if name in kind.ours:
            of_seeds = "; give --seeds" if where == _SET else "; give seeds"
            instead = {"seed": of_seeds, "name": "; an arm's name is its own"}.get(name, "")
            raise UserError(f"{where}: {name} is set by the study for each of its runs{instead}")


def _require_few(runs: int, where: Path) -> None:
    if runs > MAX_RUNS:
        raise UserError(f"{where}: {runs:,} runs, more than {MAX_RUNS:,}")


def _seeds(node: yaml.Node, where: Path) -> list[int]:
    require_plain(node, f"{where}: seeds")
    try:
        seeds = [whole_number(text_of(n, "")) for n in node.value] if isinstance(node, yaml.SequenceNode) else []
    except Exception:  # argparse's own kind, or a node that is no number
        seeds = []
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise UserError(f"{where}: seeds: a list of different whole numbers from 0 on is expected, such as [0, 1, 2]")
    return seeds


# --- arms -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Entry:
    """An entry of arms: a grid of settings, of one point where there are no axes."""

    kind: Kind
    where: Path
    name: str | None
    seeds: list[int]
    fixed: Json
    axes: dict[str, list[Any]]

    def __len__(self) -> int:
        return math.prod(map(len, self.axes.values()))

    def points(self) -> Iterator[tuple[str | None, Json]]:
        """(name, settings) of every point."""
        for values in itertools.product(*self.axes.values()):
            point = dict(zip(self.axes, values, strict=True))
            words = [self.name, *(_shown(self.kind, k, v) for k, v in point.items())] if self.name else []
            yield " ".join(map(str, words)) or None, self.fixed | point


def _entries(kind: Kind, node: yaml.Node | None, forced: Json, path: Path) -> list[_Entry]:
    """The entries of arms, counted before any grid is expanded. Errors: UserError."""
    if not isinstance(node, yaml.SequenceNode) or not node.value:
        raise UserError(f"{path}: arms: a list of settings is expected, such as - {{loss: sym, norm: cosine}}")
    require_plain(node, f"{path}: arms")
    entries = [_entry(kind, item, forced, Path(f"{path}, line {item.start_mark.line + 1}")) for item in node.value]
    for entry in entries:
        _require_few(len(entry), entry.where)
    _require_few(sum(map(len, entries)), path)
    return entries


def _entry(kind: Kind, node: yaml.Node, forced: Json, where: Path) -> _Entry:
    """A list is an axis, except where a setting is a list itself; what --set gives replaces either."""
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{where}: an arm is a mapping such as {{loss: sym, norm: cosine}}, got {kind_of(node)}")
    require_plain(node, str(where))
    fields = kind.fields
    own: dict[str, yaml.Node] = {}
    plain: list[tuple[yaml.Node, yaml.Node]] = []
    axes: dict[str, list[Any]] = {}
    for key, value in node.value:
        name = name_of(key)
        if name in (*own, *axes, *(name_of(k) for k, _ in plain)):
            raise UserError(f"{where}: {printable(name, 100)} is set twice")
        if name in ("name", "seeds"):
            own[name] = value
        elif isinstance(value, yaml.SequenceNode) and name in fields and not fields[name].metadata["nargs"]:
            require_plain(value, f"{where}: {name}")
            if not value.value:
                raise UserError(f"{where}: {name}: an empty list")
            axes[name] = [convert(fields[name], item, where) for item in value.value]
        else:
            plain.append((key, value))
    fixed = converted(kind.settings, plain, where)
    _refuse_ours(kind, (*fixed, *axes), where)
    return _Entry(
        kind,
        where,
        _text(own["name"], f"{where}: an arm's name") if "name" in own else None,
        _seeds(own["seeds"], where) if "seeds" in own else [],
        {k: v for k, v in fixed.items() if k not in forced},
        {k: v for k, v in axes.items() if k not in forced},
    )


def _arms(
    kind: Kind, entries: Sequence[_Entry], base: Json
) -> tuple[dict[str, Json], dict[str, str], dict[str, list[int]]]:
    """(arm -> settings, whatever it is called -> arm, arm -> seeds, where it has its own). Errors: UserError."""
    arms: dict[str, Json] = {}
    names: dict[str, str] = {}
    known: dict[str, str] = {}
    seeds: dict[str, list[int]] = {}
    for entry in entries:
        for given, own in entry.points():
            values = _canonical(kind, base | own)
            name = given or _arm_name(kind, values, base)
            key = json.dumps({k: v for k, v in values.items() if k not in kind.cosmetic}, sort_keys=True)
            arm = known.get(key)  # the same by another road, such as a lambda of 1 beside asym-i2t
            if given is None and name in names:
                name = f"{name}{'' if arm else _told_apart(kind, values, arms[names[name]])}"
            if names.get(name, arm) != arm and (arm is None or given):
                told = printable(name, 80)
                raise UserError(f"{entry.where}: two different arms are called {told!r}: give each a name of its own")
            if arm is None:
                arm = known[key] = name
                arms[arm] = values
            names.setdefault(name, arm)
            if entry.seeds:
                seeds[arm] = list(dict.fromkeys([*seeds.get(arm, []), *entry.seeds]))
    return arms, names, seeds


def _canonical(kind: Kind, values: Json) -> Json:
    """One way to say each loss: a lambda of 0 or 1 is a one-direction loss, a lambda of 1/2 need not be said."""
    weight = values[kind.weight]
    moves = values.get(f"{kind.weight}_end") is not None
    if values["loss"] != kind.losses[0.5] or moves or weight not in kind.losses:
        return values
    return values | {"loss": kind.losses[weight], kind.weight: None}


def _arm_name(kind: Kind, values: Json, base: Json) -> str:
    """Loss and norm, and whatever else makes it another arm than the rest."""
    names = [k for k in values if k not in ("loss", "norm", *kind.measuring) and base.get(k) != values[k]]
    return " ".join(_shown(kind, k, values[k]) for k in ("loss", "norm", *names))


def _told_apart(kind: Kind, values: Json, other: Mapping[str, Any]) -> str:
    """What is measured of an arm and not of the ``other`` of its name."""
    return "".join(f" {_shown(kind, k, values[k])}" for k in kind.measuring if values[k] != other[k])


def _shown(kind: Kind, name: str, value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if name in ("loss", "norm") else f"{'λ' if name == kind.weight else name}={text}"
