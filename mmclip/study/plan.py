"""A study's file -> the runs that it consists of, each known by its settings. Nothing is trained here."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import glob
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmclip.config.clip import TrainConfig
from mmclip.config.parser import find_config, from_settings, read_yaml, values_of
from mmclip.config.study import StudyConfig
from mmclip.config.text import TextTrainConfig
from mmclip.data.beir import EVALUATIONS, evaluation_name, folder_and_split, require_beir
from mmclip.data.shards import FORMS, find_split, is_folder
from mmclip.errors import UserError, nearest, printable
from mmclip.evaluation.results import RESULTS_FILE
from mmclip.roles import LOSS_WEIGHTS, TEXT_LOSS_WEIGHTS

Json = dict[str, Any]
MAX_RUNS = 2000  # more is a slip in an axis
OF_A_STUDY = ("script", "config", "seeds", "arms", "title", "show")
SECONDS_FILE = "seconds.json"  # duration of a run, all of its attempts together


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """Runs that a study may be a grid of: trainings of CLIP models or of text encoders.

    Attributes:
        script: its name in a study's file; command: of mmclip, that trains a run.
        config: class of a run's settings.
        base: file of configs/ that runs start from where the study names none.
        ours: settings that the study makes for each run; fixed: those that are the same for all runs.
        cosmetic: settings that change neither a run's numbers nor what is measured of it.
        measuring: settings of what is measured of an arm, which do not make it another arm.
        weight: name of λ; losses: loss -> its λ.
        initial: setting that names the run whose weights a run starts from.
        once: measurement made with an arm's first seed only, because nothing random has entered before it.
        directions, metrics: of evaluations; the first metric is the one that claims are about.
        claims: name of the file in configs/claims.
    """

    script: str
    command: str
    config: type[TrainConfig] | type[TextTrainConfig]
    base: str | None
    ours: tuple[str, ...]
    fixed: Json
    cosmetic: tuple[str, ...]
    measuring: tuple[str, ...]
    weight: str
    losses: Mapping[str, float]
    initial: str | None
    once: str | None
    directions: tuple[str, ...]
    metrics: tuple[str, ...]
    claims: str

    def data_folders(self, config: Any, folder: Path) -> dict[str, Path]:
        """Data set -> folder of a run's results on it; of CLIP one without a name."""
        if self is CLIP:
            return {"": folder}
        names = [evaluation_name(*folder_and_split(entry)) for entry in config.val_data]
        return {name: folder / EVALUATIONS / name if i else folder for i, name in enumerate(names)}


CLIP = Kind(
    script="train_clip",
    command="train",
    config=TrainConfig,
    base="scenes.yaml",
    ours=("logs", "name", "resume", "may_change", "compare", "report", "keep_checkpoints", "benchmark", "seed"),
    fixed={"report": False, "keep_checkpoints": 1},
    cosmetic=("logs", "name", "resume", "may_change", "workers", "log_every_n_steps", "save_steps", "keep_checkpoints",
              "report", "verbose", "report_to", "compare", "strict", "max_bad_samples", "device", "cache_dir", "torchcompile",
              "benchmark", "grad_checkpointing"),
    measuring=("measure_start", "zeroshot_data", "zeroshot_split", "val_steps", "bank_size"),
    weight="i2t_weight",
    losses=LOSS_WEIGHTS,
    initial="init_from",
    once=None,
    directions=("i2t", "t2i"),
    metrics=("success@1",),
    claims="clip",
)  # fmt: skip
TEXT = Kind(
    script="train_text",
    command="train-text",
    config=TextTrainConfig,
    base=None,
    ours=("logs", "name", "resume", "seed"),
    fixed={},
    cosmetic=("logs", "name", "resume", "log_every_n_steps", "save_steps", "strict", "device", "grad_checkpointing"),
    measuring=("measure_start", "watch_steps"),
    weight="q2d_weight",
    losses=TEXT_LOSS_WEIGHTS,
    initial=None,
    once="measure_start",
    directions=("q2d",),
    metrics=("ndcg@10", "recall@100", "mrr@10"),
    claims="text",
)
KINDS = {kind.script: kind for kind in (CLIP, TEXT)}


@dataclasses.dataclass(frozen=True, eq=False)
class StudyRun:
    """One training of a study: an arm with a seed. initial: the run that it starts from."""

    kind: Kind
    arm: str
    seed: int
    config: Any
    folder: Path
    initial: StudyRun | None = None

    @property
    def name(self) -> str:
        return f"{self.arm}, seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class StudyPlan:
    """folder: of the study. runs: each after the one that it starts from. show: tables for the terminal."""

    kind: Kind
    title: str
    folder: Path
    runs: list[StudyRun]
    show: list[str]


def is_finished(run: StudyRun) -> bool:
    return (run.folder / RESULTS_FILE).is_file()


def seconds_of(run: StudyRun) -> float | None:
    """Duration of a finished run; None where it is not known."""
    try:
        seconds = float(json.loads((run.folder / SECONDS_FILE).read_text(encoding="utf-8"))["seconds"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return seconds if math.isfinite(seconds) else None


def plan_study(config: StudyConfig) -> StudyPlan:
    """Read a study's file and check every run's settings.

    Raises:
        UserError: one line, before anything is trained.
    """
    path = find_config(config.config, study=True)
    file = read_yaml(path)
    script = _text(file, "script", path) or CLIP.script
    if script not in KINDS:
        raise UserError(f"{path}: script {printable(script, 60)!r} is not one of {', '.join(KINDS)}")
    kind, folder = KINDS[script], Path(config.logs) / (config.name or path.stem)
    for name in file:
        valid = [*OF_A_STUDY, *(f for f in kind.config.flags if f not in kind.ours)]
        if name not in (*valid, *kind.ours):
            raise UserError(f"{path}: unknown setting {printable(name, 100)!r}{nearest(name[:100], valid)}")
    base_name = _text(file, "config", path) or kind.base
    base: Json = {}
    if base_name:
        beside = path.parent / base_name
        base_path = beside if beside.is_file() else find_config(base_name, source=f"{path}: config")
        base = values_of(kind.config, read_yaml(base_path), base_path)
    forced = _overrides(kind, config.set or [])
    own = _values(kind, {k: v for k, v in file.items() if k not in OF_A_STUDY}, path)
    defaults = {k: f.default for k, f in kind.config.flags.items() if k not in kind.ours}
    arms = _arms(kind, file.get("arms"), defaults | base | own | forced, forced, path)
    seeds = _seeds(file["seeds"], path) if "seeds" in file else [0]
    wanted = {arm: list(config.seeds or arm.seeds or seeds) for arm in arms.values()}
    _require_few(sum(map(len, wanted.values())), path)
    for arm in wanted:
        _check(kind, arm, arms, folder, path)
    show = file.get("show") or []
    title = _text(file, "title", path) or path.stem.replace("_", " ")
    tables = [show] if isinstance(show, str) else [str(name) for name in show]
    return StudyPlan(kind, title, folder, _runs(kind, wanted, folder / "runs"), tables)


def _text(mapping: Mapping[str, Any], name: str, where: Path | str) -> str | None:
    """A text that stands in a file; None where its name does not."""
    if name not in mapping:
        return None
    text = mapping[name]
    if not isinstance(text, str) or not text.strip():
        got = "null" if text is None else "an empty one" if isinstance(text, str) else "no single value"
        raise UserError(f"{where}: {name} is a text, got {got}")
    return text.strip()


def _values(kind: Kind, settings: Mapping[str, Any], where: Path | str) -> Json:
    """Typed values of runs' settings. Errors: UserError, also for those that are the study's to make."""
    for name in settings:
        if name in kind.ours:
            seeds = "; give --seeds" if where == "--set" else "; give seeds"
            instead = {"seed": seeds, "name": "; an arm's name is its own"}.get(name, "")
            raise UserError(f"{where}: {name} is set by the study for each of its runs{instead}")
    return values_of(kind.config, settings, where)


def _overrides(kind: Kind, pairs: Sequence[str]) -> Json:
    """Settings of --set, which holds 'a b' for a list."""
    flags, settings = kind.config.flags, dict[str, Any]()
    for key, _, text in (pair.partition("=") for pair in pairs):
        name = key.replace("-", "_")
        if name in settings:
            raise UserError(f"--set: {printable(name, 100)} is set twice")
        many, optional = (name in flags and getattr(flags[name], what) for what in ("many", "optional"))
        settings[name] = None if text == "null" and optional else text.split() if many else text
    return _values(kind, settings, "--set")


def _seeds(value: Any, where: Path | str) -> list[int]:
    texts = value if isinstance(value, list) else []
    seeds = [int(t) for t in texts if isinstance(t, str) and t.isdecimal() and len(t) < 19]
    if not seeds or len(set(seeds)) < len(texts):
        raise UserError(f"{where}: seeds: a list of different whole numbers from 0 on is expected, such as [0, 1, 2]")
    return seeds


def _require_few(runs: int, where: Path | str) -> None:
    if runs > MAX_RUNS:
        raise UserError(f"{where}: {runs:,} runs, more than {MAX_RUNS:,}")


# --- arms -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Arm:
    """An arm of a study's file: its settings and, checked but without name and seed, their config."""

    name: str
    settings: Json
    seeds: list[int] = dataclasses.field(default_factory=list)
    config: Any = None
    start: _Arm | None = None


def _arms(kind: Kind, entries: Any, base: Json, forced: Json, path: Path) -> dict[str, _Arm]:
    """Every name of an arm -> the arm, the same one for settings that are equal in all that counts."""
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: arms: a list of settings is expected, such as - {{loss: sym, norm: cosine}}")
    grids = [_grid(kind, entry, forced, f"{path}, arm {i}") for i, entry in enumerate(entries, 1)]
    _require_few(sum(math.prod(map(len, axes.values())) for _, _, _, axes in grids), path)
    arms: dict[str, _Arm] = {}
    known: dict[str, _Arm] = {}
    for title, seeds, fixed, axes in grids:
        for values in itertools.product(*axes.values()):
            point = dict(zip(axes, values, strict=True))
            settings = _canonical(kind, base | fixed | point)
            own_name = " ".join([title, *(_shown(kind, k, v) for k, v in point.items())]) if title else None
            name = own_name or _arm_name(kind, settings, base)
            if (start := arms.get(str(settings.get(str(kind.initial))))) is not None:
                settings[str(kind.initial)] = start.name
            key = json.dumps({k: v for k, v in settings.items() if k not in kind.cosmetic}, sort_keys=True)
            arm = known.get(key)
            if own_name is None and name in arms and arm is None:
                other = arms[name].settings
                name += "".join(f" {_shown(kind, k, settings[k])}" for k in kind.measuring if settings[k] != other[k])
            if arms.get(name, arm) is not arm and (arm is None or own_name):
                name = printable(name, 80)
                raise UserError(f"{path}: two different arms are called {name!r}: give each a name of its own")
            arm = known.setdefault(key, arm or _Arm(name, settings))
            arms.setdefault(name, arm)
            arm.seeds += [seed for seed in seeds if seed not in arm.seeds]
    return arms


def _grid(kind: Kind, entry: Any, forced: Json, where: str) -> tuple[str | None, list[int], Json, dict[str, list[Any]]]:
    """(name, seeds, fixed settings, axes) of an entry of arms; a list is an axis, except where a setting is a list."""
    if not isinstance(entry, dict):
        raise UserError(
            f"{where}: an arm is a mapping such as {{loss: sym, norm: cosine}}, got {printable(entry, 60)!r}"
        )
    flags = kind.config.flags
    settings = {k: v for k, v in entry.items() if k not in ("name", "seeds")}
    lists = {k: v for k, v in settings.items() if isinstance(v, list) and k in flags and not flags[k].many}
    fixed = _values(kind, {k: v for k, v in settings.items() if k not in lists}, where)
    axes = {k: [_values(kind, {k: value}, where)[k] for value in values] for k, values in lists.items()}
    if empty := [k for k, values in axes.items() if not values]:
        raise UserError(f"{where}: {empty[0]}: an empty list")
    fixed, axes = ({k: v for k, v in found.items() if k not in forced} for found in (fixed, axes))
    _require_few(math.prod(map(len, axes.values())), where)
    return _text(entry, "name", where), _seeds(entry["seeds"], where) if "seeds" in entry else [], fixed, axes


def _canonical(kind: Kind, settings: Json) -> Json:
    """One name for each loss: a λ of 0 or 1 is a one-direction loss, a λ of 1/2 is the default."""
    names = {weight: loss for loss, weight in kind.losses.items()}
    weight = settings[kind.weight]
    if settings["loss"] != names[0.5] or settings.get(f"{kind.weight}_end") is not None or weight not in names:
        return settings
    return settings | {"loss": names[weight], kind.weight: None}


def _arm_name(kind: Kind, settings: Json, base: Json) -> str:
    """Loss and norm, and whatever else differs from the settings of all runs."""
    names = [k for k in settings if k not in ("loss", "norm", *kind.measuring) and base.get(k) != settings[k]]
    return " ".join(_shown(kind, k, settings[k]) for k in ("loss", "norm", *names))


def _shown(kind: Kind, name: str, value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if name in ("loss", "norm") else f"{'λ' if name == kind.weight else name}={text}"


def _check(
    kind: Kind, arm: _Arm, arms: Mapping[str, _Arm], folder: Path, path: Path, above: tuple[str, ...] = ()
) -> None:
    """Make an arm's config, and that of the arm that it starts from. Errors: UserError."""
    if arm.name in above:
        raise UserError(f"{path}: arms that start from each other: {printable(', '.join(above), 200)}")
    if arm.config is not None:
        return
    where = f"{path}, arm {printable(arm.name, 80)!r}"
    settings = arm.settings | kind.fixed | {"logs": str(folder / "runs")}
    source = settings[kind.initial] if kind.initial else None
    if source in arms:
        settings["init_from"] = None  # its folder does not exist yet
        if settings["pretrained"] is not None:
            both = f"pretrained {printable(settings['pretrained'], 80)} beside init_from {printable(source, 80)}"
            raise UserError(f"{where}: {both}: both set every weight; give one of the two")
        arm.start = arms[str(source)]
        _check(kind, arm.start, arms, folder, path, (*above, arm.name))
    elif source is not None and not Path(source).is_dir():
        nearby = printable(", ".join(sorted(arms, key=lambda n: -difflib.SequenceMatcher(None, source, n).ratio())))
        raise UserError(
            f"{where}: init_from {printable(source, 100)!r}: no arm and no folder of that name; arms: {nearby}"
        )
    try:
        arm.config = from_settings(kind.config, settings)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if arm.config.val_data == "none" or (kind is TEXT and not arm.config.val_data):
        raise UserError(f"{where}: val_data none: a study shows the evaluations of its runs; name data")


# --- runs -------------------------------------------------------------------------------------------------------------


def _runs(kind: Kind, wanted: Mapping[_Arm, list[int]], folder: Path) -> list[StudyRun]:
    """Runs seed by seed, each after the one that it starts from, which comes along whether its arm has the seed or not."""
    made: dict[Path, StudyRun] = {}

    def make(arm: _Arm, seed: int) -> StudyRun:
        start = make(arm.start, seed) if arm.start is not None else None
        run = _run(kind, arm, seed, wanted.get(arm, [])[:1] == [seed], start, folder)
        return made.setdefault(run.folder, run)

    for seed in dict.fromkeys(seed for seeds in wanted.values() for seed in seeds):
        for arm in (arm for arm, seeds in wanted.items() if seed in seeds):
            make(arm, seed)
    return list(made.values())


def _run(kind: Kind, arm: _Arm, seed: int, first: bool, start: StudyRun | None, folder: Path) -> StudyRun:
    config = copy.deepcopy(arm.config)
    config.seed = seed
    if kind.once and not first and not config.random_init:
        setattr(config, kind.once, False)  # the untrained model is every seed's
    # Defaults are left out, so that a setting of a later version leaves finished runs finished
    flags = kind.config.flags
    known = {k: v for k, v in config.to_dict().items() if k not in kind.cosmetic and v != flags[k].default}
    known |= {"init_from": start.folder.name} if start is not None else {}
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:8]
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", arm.name).strip("-.")[:60] or "arm"
    there = sorted(p.name for p in folder.glob(f"*-seed{seed}-{digest}"))  # under another name of the arm
    config.name = there[0] if there else f"{slug}-seed{seed}-{digest}"
    if start is not None:
        config.init_from = str(start.folder)
    return StudyRun(kind, arm.name, seed, config, folder / config.name, start)


# --- data -------------------------------------------------------------------------------------------------------------


def require_data(runs: Iterable[StudyRun]) -> None:
    """Look for the data of runs and read none.

    Raises:
        UserError: one line, for data that do not exist.
    """
    for kind, name, source in dict.fromkeys((run.kind.script, *place) for run in runs for place in _sources(run)):
        if kind == TEXT.script:
            require_beir(*folder_and_split(source))
        elif not source.startswith("builtin:"):
            _require_source(name, Path(source), source)


def _sources(run: StudyRun) -> Iterator[tuple[str, str]]:
    config = run.config
    if run.kind is TEXT:
        train = [f"{config.train_data}:{config.train_split}"] if Path(config.train_data).is_dir() else []
        yield from (("data", entry) for entry in [*train, *config.val_data])
        return
    for name in ("train_data", "val_data", "zeroshot_data"):
        if getattr(config, name) is not None:
            yield name, getattr(config, name)
    if config.val_data is None and config.val_holdout is None and not config.train_data.startswith("builtin:"):
        yield config.val_split or "", config.train_data


def _require_source(name: str, path: Path, source: str) -> None:
    """Errors: UserError for a folder without shards or evaluation split, or a file or pattern that does not exist."""
    if not name.endswith("_data"):
        if not is_folder(path) or find_split(path, name or None, "eval") is None:
            split = printable(name or "test or val", 60)
            raise UserError(f"{printable(path)} has no evaluation split {split}: give val_data or val_holdout")
    elif is_folder(path):
        if not any(path.glob("*.tar")) and not any(path.glob("*/*.tar")):
            raise UserError(f"{name} {printable(source)}: no shards in that folder; valid: {FORMS}")
    else:
        first, before = source.partition("::")[0], ""
        while first != before:  # of a/{00..59}{x,y}.tar the first, a/00x.tar
            before, first = first, re.sub(r"\{([^{}]*?)(?:\.\.|,)[^{}]*\}", r"\1", first)
        if not any(glob.iglob(first)) and not any(glob.iglob(glob.escape(source))):  # noqa: PTH207 (absolute patterns)
            raise UserError(f"{name} {printable(source)}: no such data; valid: {FORMS}")
