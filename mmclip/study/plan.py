"""A study's file -> the runs that it asks for, each known by its settings. Nothing is trained here."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import glob
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmclip.config import StudyConfig
from mmclip.data.shards import FORMS, find_split, is_folder
from mmclip.errors import UserError, printable
from mmclip.study.file import StudyFile, read_study
from mmclip.study.kinds import CLIP, Kind, Settings

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """One run of a study: an arm with a seed. initial: the cell that it starts from."""

    arm: str
    seed: int
    settings: Any  # of the study's kind
    folder: Path
    initial: Cell | None = None

    @property
    def name(self) -> str:
        return f"{self.arm}, seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """folder: of the study. cells: every one after the cell that it starts from."""

    kind: Kind
    title: str
    folder: Path
    cells: list[Cell]


@dataclasses.dataclass(frozen=True, eq=False)
class _Arm:
    """An arm whose settings are checked, and the one that it starts from; seed and name are still to come."""

    kind: Kind
    name: str
    settings: Settings
    start: _Arm | None

    @property
    def identity(self) -> str:
        """What two arms share that would be the same runs."""
        return json.dumps([_known(self.kind, self.settings), self.start and self.start.identity], sort_keys=True)


def plan_study(settings: StudyConfig) -> Plan:
    """Read a study's file and check every run's settings. Errors: UserError, before anything is trained."""
    file = read_study(settings)
    folder = Path(settings.logs) / (settings.name or file.path.stem)
    checked = _checked(file, folder)
    wanted: dict[_Arm, list[int]] = {}  # also of arms that only their settings' check has shown to be one
    for name, seeds in file.seeds.items():
        mine = wanted.setdefault(checked[name], [])
        mine += [s for s in seeds if s not in mine]
    every = list(dict.fromkeys(seed for mine in wanted.values() for seed in mine))
    cells = [
        c
        for seed in every
        for c in _cells({arm: seeds[0] == seed for arm, seeds in wanted.items() if seed in seeds}, seed, folder)
    ]
    return Plan(file.kind, file.title, folder, cells)


def _checked(file: StudyFile, folder: Path) -> dict[str, _Arm]:
    """Every arm by its name; of arms that would be the same runs the first. Errors: UserError for settings that no
    run can have, or arms that start from each other."""
    kind = file.kind
    made: dict[str, _Arm] = {}
    same: dict[str, _Arm] = {}

    def make(name: str, above: tuple[str, ...] = ()) -> _Arm:
        if name in above:
            raise UserError(f"{file.path}: arms that start from each other: {printable(', '.join(above), 200)}")
        if name not in made:
            where = f"{file.path}, arm {printable(name, 80)!r}"
            values = dict(file.arms[name])
            asked = values[kind.initial] if kind.initial else None
            initial = file.names.get(asked) if asked is not None else None
            if initial is not None:
                values["init_from"] = None  # its folder is not there yet, and a run's settings are checked
                if values["pretrained"] is not None:
                    given = (
                        f"pretrained {printable(values['pretrained'], 80)} beside init_from {printable(initial, 80)}"
                    )
                    raise UserError(f"{where}: {given}: both bring every weight; give one of the two")
            elif asked is not None and not is_folder(Path(asked)):
                raise UserError(f"{where}: {_no_start(asked, file.names)}")
            start = make(initial, (*above, name)) if initial is not None else None
            arm = _Arm(kind, name, _settings(kind, values, folder, where), start)
            made[name] = same.setdefault(arm.identity, arm)
        return made[name]

    return {name: make(name) for name in file.arms}


def _no_start(asked: str, names: Iterable[str]) -> str:
    there = sorted(names, key=lambda n: -difflib.SequenceMatcher(None, asked, n).ratio())
    return (
        f"init_from {printable(asked, 100)!r}: no arm and no folder of that name; arms: {printable(', '.join(there))}"
    )


def _settings(kind: Kind, values: Json, folder: Path, where: str) -> Settings:
    ours = {**kind.fixed, "logs": str(folder / "runs")}
    try:
        settings = kind.settings(**(values | ours))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if settings.val_data == "none" or (kind is not CLIP and not settings.val_data):
        left = ", or leave it" if kind is CLIP else ""
        raise UserError(f"{where}: val_data none: a study shows what its runs' evaluations say; name data{left}")
    return settings


# --- cells ------------------------------------------------------------------------------------------------------------


def _cells(wanted: Mapping[_Arm, bool], seed: int, folder: Path) -> list[Cell]:
    """The cells of a seed, each after the one that it starts from, which comes along unasked. wanted: arm -> whether
    the seed is its first."""
    made: dict[_Arm, Cell] = {}

    def make(arm: _Arm) -> Cell:
        if arm not in made:
            start = make(arm.start) if arm.start is not None else None
            made[arm] = _cell(arm, seed, wanted.get(arm, False), start, folder / "runs")
        return made[arm]

    for arm in wanted:
        make(arm)
    return list(made.values())


def _cell(arm: _Arm, seed: int, first: bool, start: Cell | None, runs: Path) -> Cell:
    settings: Any = copy.deepcopy(arm.settings)
    settings.seed = seed
    if arm.kind.once and not first and not settings.random_init:
        setattr(settings, arm.kind.once, False)  # the untrained model is every seed's
    known = _known(arm.kind, settings)
    if start is not None:
        known["init_from"] = start.folder.name
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:8]
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", arm.name).strip("-.")[:60] or "arm"
    there = sorted(p.name for p in runs.glob(f"*-seed{seed}-{digest}"))  # an arm called otherwise is the same arm
    settings.name = there[0] if there else f"{slug}-seed{seed}-{digest}"
    if start is not None:
        settings.init_from = str(start.folder)
    return Cell(arm.name, seed, settings, runs / settings.name, start)


def _known(kind: Kind, settings: Settings) -> Json:
    """What a run is known by. What is not said is left out, so that a setting that a later version knows leaves
    finished runs finished."""
    fields = kind.fields
    return {k: v for k, v in settings.to_dict().items() if k not in kind.cosmetic and v != fields[k].default}


# --- data -------------------------------------------------------------------------------------------------------------


def require_data(cells: Sequence[Cell]) -> None:
    """Look for the data of runs, once each, and read none. Errors: UserError, one line, where there are none."""
    for settings in {(c.settings.train_data, c.settings.val_data): c.settings for c in cells}.values():
        _require_there("train_data", settings.train_data)
        if settings.val_data is not None:
            _require_there("val_data", settings.val_data)
    for settings in {c.settings.zeroshot_data: c.settings for c in cells}.values():
        if settings.zeroshot_data is not None:
            _require_there("zeroshot_data", settings.zeroshot_data)
    for settings in (c.settings for c in cells):
        if (
            settings.val_data is None
            and settings.val_holdout is None
            and not settings.train_data.startswith("builtin:")
        ):
            root = Path(settings.train_data)
            if not is_folder(root) or find_split(root, settings.val_split, "eval") is None:
                told = f"{printable(root)} has no evaluation split {printable(settings.val_split or 'test or val', 60)}"
                raise UserError(f"{told}: a study shows what evaluations say: give val_data or val_holdout")


def _require_there(name: str, source: str) -> None:
    path = Path(source)
    if source.startswith("builtin:"):
        return
    if is_folder(path):
        if not any(path.glob("*.tar")) and not any(path.glob("*/*.tar")):
            raise UserError(f"{name} {printable(source)}: no shards in that folder; valid: {FORMS}")
        return
    first = _first_shard(source)
    try:
        there = path.is_file() or (next(glob.iglob(first), None) if glob.has_magic(first) else Path(first).is_file())  # noqa: PTH207  (Path.glob takes no absolute pattern)
    except OSError:  # longer than a name may be
        there = False
    if not there:
        raise UserError(f"{name} {printable(source)}: no such data; valid: {FORMS}")


def _first_shard(pattern: str) -> str:
    """The first name of a pattern of shards; no other one is made.

    >>> _first_shard("a/{00..59}{x,y{1,2}}.tar::b.tar")
    'a/00x.tar'
    """
    name, before = pattern.partition("::")[0], ""
    while name != before:
        before, name = name, re.sub(r"\{([^{}]*?)(?:\.\.|,)[^{}]*\}", r"\1", name)
    return name
