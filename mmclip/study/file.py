"""A study's file -> its arms, each with its settings and seeds. No run's settings are checked here."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmclip.config import CONFIGS, StudyConfig, find_config, read_yaml, values_of
from mmclip.errors import UserError, nearest, printable
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
    path = find_config(settings.config, study=True)
    kind, own, rest = _top(path)
    title = _text(own["title"], f"{path}: title") if "title" in own else path.stem.replace("_", " ")
    forced = _overrides(kind, settings.set or [])
    asked = _base(kind, path, own.get("config")) | values_of(kind.settings, rest, path)
    _refuse_ours(kind, asked, path)
    defaults = {name: f.default for name, f in kind.fields.items() if name not in kind.ours}
    arms, names, seeds = _arms(kind, _entries(kind, own.get("arms"), forced, path), defaults | asked | forced)
    for_all = _seeds(own["seeds"], path) if "seeds" in own else [0]
    wanted = {name: settings.seeds or seeds.get(name, for_all) for name in arms}
    _require_few(sum(map(len, wanted.values())), path)
    return StudyFile(kind, path, title, arms, names, wanted)


def _top(path: Path) -> tuple[Kind, Json, Json]:
    """What its runs are, what only a study's file has, and all runs' settings."""
    texts = read_yaml(path)
    script = _text(texts.get("script", CLIP.script), f"{path}: script")
    if script not in KINDS:
        raise UserError(f"{path}: script {printable(script, 60)!r} is not one of {', '.join(KINDS)}")
    kind = KINDS[script]
    for name in texts:
        if name not in (*_OF_A_STUDY, *kind.fields):
            valid = [*_OF_A_STUDY, *(f for f in kind.fields if f not in kind.ours)]
            raise UserError(f"{path}: unknown setting {printable(name, 100)!r}{nearest(name[:100], valid)}")
    own = {name: value for name, value in texts.items() if name in _OF_A_STUDY}
    return kind, own, {name: value for name, value in texts.items() if name not in own}


def _base(kind: Kind, path: Path, value: Any) -> Json:
    """What all runs start from: a file of the script's settings."""
    if value is None:
        found = CONFIGS / kind.base if kind.base else None
    else:
        beside = path.parent / (name := _text(value, f"{path}: config"))
        found = beside if beside.is_file() else find_config(name, source=f"{path}: config")
    return values_of(kind.settings, read_yaml(found), found) if found else {}


def _text(value: Any, where: str) -> str:
    if isinstance(value, list | dict):
        raise UserError(f"{where} is a single value, got a {'list' if isinstance(value, list) else 'mapping'}")
    if value is None or not value.strip():
        raise UserError(f"{where} is a text, got {'null' if value is None else 'an empty one'}")
    return str(value.strip())


def _overrides(kind: Kind, texts: Sequence[str]) -> Json:
    """The settings of --set: 'a b' for a setting that takes a list."""
    values: Json = {}
    for text in texts:
        key, value = text.split("=", 1)
        name = key.replace("-", "_")
        if name in values:
            raise UserError(f"--set: {printable(key, 100)} is set twice")
        field = kind.fields.get(name)
        many, null = field is not None and field.many, field is not None and field.optional and value == "null"
        values[name] = value.split() if many else None if null else value
    values = values_of(kind.settings, values, _SET)
    _refuse_ours(kind, values, _SET)
    return values


def _refuse_ours(kind: Kind, names: Iterable[str], where: Path) -> None:
    for name in names:
        if name in kind.ours:
            of_seeds = "; give --seeds" if where == _SET else "; give seeds"
            instead = {"seed": of_seeds, "name": "; an arm's name is its own"}.get(name, "")
            raise UserError(f"{where}: {name} is set by the study for each of its runs{instead}")


def _require_few(runs: int, where: Path) -> None:
    if runs > MAX_RUNS:
        raise UserError(f"{where}: {runs:,} runs, more than {MAX_RUNS:,}")


def _seeds(value: Any, where: Path) -> list[int]:
    seeds = [int(v) for v in value if isinstance(v, str) and v.isdecimal()] if isinstance(value, list) else []
    if not seeds or len(set(seeds)) < len(value):
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


def _entries(kind: Kind, items: Any, forced: Json, path: Path) -> list[_Entry]:
    """The entries of arms, counted before any grid is expanded. Errors: UserError."""
    if not isinstance(items, list) or not items:
        raise UserError(f"{path}: arms: a list of settings is expected, such as - {{loss: sym, norm: cosine}}")
    entries = [_entry(kind, item, forced, Path(f"{path}, arm {i}")) for i, item in enumerate(items, start=1)]
    for entry in entries:
        _require_few(len(entry), entry.where)
    _require_few(sum(map(len, entries)), path)
    return entries


def _entry(kind: Kind, item: Any, forced: Json, where: Path) -> _Entry:
    """A list is an axis, except where a setting is a list itself; what --set gives replaces either."""
    if not isinstance(item, dict):
        raise UserError(f"{where}: an arm is a mapping such as {{loss: sym, norm: cosine}}")
    axes: dict[str, list[Any]] = {}
    plain: Json = {}
    for name, value in item.items():
        if isinstance(value, list) and name in kind.fields and not kind.fields[name].many and name != "seeds":
            if not value:
                raise UserError(f"{where}: {name}: an empty list")
            axes[name] = [values_of(kind.settings, {name: v}, where)[name] for v in value]
        elif name not in ("name", "seeds"):
            plain[name] = value
    fixed = values_of(kind.settings, plain, where)
    _refuse_ours(kind, (*fixed, *axes), where)
    return _Entry(
        kind,
        where,
        _text(item["name"], f"{where}: an arm's name") if "name" in item else None,
        _seeds(item["seeds"], where) if "seeds" in item else [],
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
