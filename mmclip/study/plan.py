"""A study's file -> the runs that it consists of, each known by its settings. Nothing is trained here."""

from __future__ import annotations

import copy
import difflib
import glob
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


FIXED = {"report": False, "keep_checkpoints": 1}  # settings that are the same for all runs
# Settings that the study makes for each run
OURS = ("logs", "name", "resume", "may_change", "compare", "benchmark", "seed", *FIXED)
# Settings that change neither a run's numbers nor what is measured of it
COSMETIC = (
    *(
        "logs",
        "name",
        "resume",
        "may_change",
        "workers",
        "log_every_n_steps",
        "save_steps",
        "keep_checkpoints",
        "report",
    ),
    *(
        "verbose",
        "report_to",
        "compare",
        "strict",
        "max_bad_samples",
        "device",
        "cache_dir",
        "torchcompile",
        "benchmark",
    ),
    "grad_checkpointing",
)
# Settings of what is measured of an arm, which do not make it another arm
MEASURING = ("measure_start", "zeroshot_data", "zeroshot_split", "val_steps", "bank_size", "watch_steps")


@dataclass(frozen=True, eq=False)
class Kind:
    """Runs that a study may be a grid of: trainings of CLIP models or of text encoders.

    Attributes:
        name: of the claims in configs/claims; command: of mmclip, that trains a run; config: class of its settings.
        base: file of configs/ that runs start from where the study names none.
        weight: name of λ; losses: loss -> its λ.
        directions, metrics: of evaluations; the first metric is the one that claims are about.
    """

    name: str
    command: str
    config: type[TrainConfig] | type[TextTrainConfig]
    base: str | None
    weight: str
    losses: Mapping[str, float]
    directions: tuple[str, ...]
    metrics: tuple[str, ...]

    def data_folders(self, config: Any, folder: Path) -> dict[str, Path]:
        """Data set -> folder of a run's results on it; of CLIP one without a name."""
        if self is CLIP:
            return {"": folder}
        names = [evaluation_name(*folder_and_split(entry)) for entry in config.val_data]
        return {name: folder / EVALUATIONS / name if i else folder for i, name in enumerate(names)}


CLIP = Kind("clip", "train", TrainConfig, "scenes.yaml", "i2t_weight", LOSS_WEIGHTS, ("i2t", "t2i"), ("success@1",))
TEXT_METRICS = ("ndcg@10", "recall@100", "mrr@10")
TEXT = Kind("text", "train-text", TextTrainConfig, None, "q2d_weight", TEXT_LOSS_WEIGHTS, ("q2d",), TEXT_METRICS)
KINDS = {"train_clip": CLIP, "train_text": TEXT}  # by the script that a study's file names


@dataclass(frozen=True, eq=False)
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


@dataclass(frozen=True)
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
        return float(json.loads((run.folder / SECONDS_FILE).read_text(encoding="utf-8"))["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def plan_study(config: StudyConfig) -> StudyPlan:
    """Read a study's file and check every run's settings.

    Raises:
        UserError: one line, before anything is trained.
    """
    path = find_config(config.config, study=True)
    file = read_yaml(path)
    script = _text(file, "script", path) or "train_clip"
    if script not in KINDS:
        raise UserError(f"{path}: script {printable(script, 60)!r} is not one of {', '.join(KINDS)}")
    kind, folder = KINDS[script], Path(config.logs) / (config.name or path.stem)
    valid = [*OF_A_STUDY, *kind.config.flags]
    if unknown := next((name for name in file if name not in valid), None):
        raise UserError(f"{path}: unknown setting {printable(unknown, 100)!r}{nearest(unknown[:100], valid)}")
    base: Json = {k: f.default for k, f in kind.config.flags.items() if k not in OURS}
    if name := _text(file, "config", path) or kind.base:
        base_path = path.parent / name
        base_path = base_path if base_path.is_file() else find_config(name, source=f"{path}: config")
        base |= values_of(kind.config, read_yaml(base_path), base_path)
    forced = _overrides(kind, config.set or [])
    base |= _values(kind, {k: v for k, v in file.items() if k not in OF_A_STUDY}, path) | forced
    seeds = _seeds(file["seeds"], path) if "seeds" in file else [0]
    planner = _Planner(kind, path, folder / "runs")
    planner.add_arms(file.get("arms"), base, forced)
    runs = planner.runs({arm: list(config.seeds or arm.seeds or seeds) for arm in planner.arms.values()})
    show = file.get("show") or []
    title = _text(file, "title", path) or path.stem.replace("_", " ")
    return StudyPlan(kind, title, folder, runs, [show] if isinstance(show, str) else [str(name) for name in show])


def _text(mapping: Mapping[str, Any], name: str, where: Path | str) -> Any:
    """A text that stands in a file; None where its name does not."""
    text = mapping.get(name)
    if name in mapping and not (isinstance(text, str) and text.strip()):
        raise UserError(f"{where}: {name} is a text, got {printable(json.dumps(text), 60)}")
    return text and text.strip()


def _values(kind: Kind, settings: Mapping[str, Any], where: Path | str) -> Json:
    """Typed values of runs' settings. Errors: UserError, also for those that are the study's to make."""
    if ours := next((name for name in settings if name in OURS), None):
        instead = f"; give {'--' * (where == '--set')}seeds" if ours == "seed" else ""
        raise UserError(f"{where}: {ours} is set by the study for each of its runs{instead}")
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


@dataclass(eq=False)
class _Arm:
    """An arm of a study's file: its settings and, checked but without name and seed, their config."""

    name: str
    settings: Json
    seeds: list[int] = field(default_factory=list)
    config: Any = None
    start: _Arm | None = None


class _Planner:
    """Arms of a study's file, by every name of theirs, and their runs in ``folder``."""

    def __init__(self, kind: Kind, path: Path, folder: Path) -> None:
        self.kind, self.path, self.folder = kind, path, folder
        self.arms: dict[str, _Arm] = {}

    def add_arms(self, entries: Any, base: Json, forced: Json) -> None:
        """Every point of every entry's grid; one arm where settings are equal in all that counts."""
        if not isinstance(entries, list) or not entries:
            raise UserError(f"{self.path}: arms: a list of settings is expected, such as - {{loss: sym, norm: cosine}}")
        grids = [self._grid(entry, forced, f"{self.path}, arm {i}") for i, entry in enumerate(entries, 1)]
        self._require_few(sum(math.prod(map(len, axes.values())) for _, _, _, axes in grids))
        by_settings: dict[str, _Arm] = {}
        for title, seeds, fixed, axes in grids:
            for values in itertools.product(*axes.values()):
                point = dict(zip(axes, values, strict=True))
                settings = self._canonical(base | fixed | point)
                differ = [k for k in settings if k not in ("loss", "norm", *MEASURING) and base.get(k) != settings[k]]
                shown = point if title else {k: settings[k] for k in ("loss", "norm", *differ)}
                name = " ".join([*filter(None, [title]), *(self._shown(k, v) for k, v in shown.items())])
                if (start := self.arms.get(str(settings.get("init_from")))) is not None:
                    settings["init_from"] = start.name
                key = json.dumps({k: v for k, v in settings.items() if k not in COSMETIC}, sort_keys=True)
                arm = by_settings.get(key)
                if not title and name in self.arms and arm is None:
                    other = self.arms[name].settings
                    more = (k for k in MEASURING if settings.get(k) != other.get(k))
                    name = " ".join([name, *(self._shown(k, settings[k]) for k in more)])
                if self.arms.get(name, arm) is not arm and (arm is None or title):
                    same = f"two different arms are called {printable(name, 80)!r}"
                    raise UserError(f"{self.path}: {same}: give each a name of its own")
                arm = by_settings.setdefault(key, arm or _Arm(name, settings))
                self.arms.setdefault(name, arm)
                arm.seeds += [seed for seed in seeds if seed not in arm.seeds]

    def _require_few(self, runs: int) -> None:
        if runs > MAX_RUNS:
            raise UserError(f"{self.path}: {runs:,} runs, more than {MAX_RUNS:,}")

    def _grid(self, entry: Any, forced: Json, where: str) -> tuple[str | None, list[int], Json, dict[str, list[Any]]]:
        """(name, seeds, fixed settings, axes) of an entry; a list is an axis, except where a setting is a list."""
        if not isinstance(entry, dict):
            example = "{loss: sym, norm: cosine}"
            raise UserError(f"{where}: an arm is a mapping such as {example}, got {printable(entry, 60)!r}")
        kind, flags = self.kind, self.kind.config.flags
        settings = {k: v for k, v in entry.items() if k not in ("name", "seeds")}
        lists = {k: v for k, v in settings.items() if isinstance(v, list) and k in flags and not flags[k].many}
        fixed = _values(kind, {k: v for k, v in settings.items() if k not in lists}, where)
        axes = {k: [_values(kind, {k: value}, where)[k] for value in values] for k, values in lists.items()}
        if empty := [k for k, values in axes.items() if not values]:
            raise UserError(f"{where}: {empty[0]}: an empty list")
        fixed, axes = ({k: v for k, v in part.items() if k not in forced} for part in (fixed, axes))
        return _text(entry, "name", where), _seeds(entry["seeds"], where) if "seeds" in entry else [], fixed, axes

    def _canonical(self, settings: Json) -> Json:
        """One name for each loss: a λ of 0 or 1 is a one-direction loss, a λ of 1/2 is the default."""
        kind, names = self.kind, {weight: loss for loss, weight in self.kind.losses.items()}
        weight = settings[kind.weight]
        if settings["loss"] != names[0.5] or settings.get(f"{kind.weight}_end") is not None or weight not in names:
            return settings
        return settings | {"loss": names[weight], kind.weight: None}

    def _shown(self, name: str, value: Any) -> str:
        text = f"{value:g}" if isinstance(value, float) else str(value)
        return text if name in ("loss", "norm") else f"{'λ' if name == self.kind.weight else name}={text}"

    def runs(self, wanted: Mapping[_Arm, list[int]]) -> list[StudyRun]:
        """Runs seed by seed, each after the one that it starts from, which comes along even for a seed not its own."""
        made: dict[Path, StudyRun] = {}

        def make(arm: _Arm, seed: int) -> StudyRun:
            start = make(arm.start, seed) if arm.start is not None else None
            run = self._run(arm, seed, wanted[arm][0] == seed, start)
            return made.setdefault(run.folder, run)

        self._require_few(sum(map(len, wanted.values())))
        for arm in wanted:
            self._check(arm)
        for seed in dict.fromkeys(seed for seeds in wanted.values() for seed in seeds):
            for arm in (arm for arm, seeds in wanted.items() if seed in seeds):
                make(arm, seed)
        return list(made.values())

    def _check(self, arm: _Arm, above: tuple[str, ...] = ()) -> None:
        """Make an arm's config, and that of the arm that it starts from. Errors: UserError."""
        if arm.name in above:
            raise UserError(f"{self.path}: arms that start from each other: {printable(', '.join(above), 200)}")
        where, kind = f"{self.path}, arm {printable(arm.name, 80)!r}", self.kind
        fixed = {k: v for k, v in FIXED.items() if k in kind.config.flags}
        settings = arm.settings | fixed | {"logs": str(self.folder)}
        source = settings.get("init_from")
        if source in self.arms:
            settings["init_from"] = None  # its folder does not exist yet
            if settings["pretrained"] is not None:
                both = f"pretrained {printable(settings['pretrained'], 80)} beside init_from {printable(source, 80)}"
                raise UserError(f"{where}: {both}: both set every weight; give one of the two")
            arm.start = self.arms[str(source)]
            self._check(arm.start, (*above, arm.name))
        elif source is not None and not Path(source).is_dir():
            names = sorted(self.arms, key=lambda n: -difflib.SequenceMatcher(None, source, n).ratio())
            missing = f"init_from {printable(source, 100)!r}: no arm and no folder of that name"
            raise UserError(f"{where}: {missing}; arms: {printable(', '.join(names))}")
        try:
            arm.config = from_settings(kind.config, settings)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        if arm.config.val_data == "none" or (kind is TEXT and not arm.config.val_data):
            raise UserError(f"{where}: val_data none: a study shows the evaluations of its runs; name data")

    def _run(self, arm: _Arm, seed: int, first: bool, start: StudyRun | None) -> StudyRun:
        kind, config = self.kind, copy.deepcopy(arm.config)
        config.seed = seed
        if kind is TEXT and not first and not config.random_init:
            config.measure_start = False  # the untrained model is every seed's
        # Defaults are left out, so that a setting of a later version leaves finished runs finished
        counts = {k: v for k, v in config.to_dict().items() if k not in COSMETIC and config.is_set(k)}
        counts |= {"init_from": start.folder.name} if start is not None else {}
        digest = hashlib.sha256(json.dumps(counts, sort_keys=True).encode()).hexdigest()[:8]
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", arm.name).strip("-.")[:60] or "arm"
        existing = sorted(p.name for p in self.folder.glob(f"*-seed{seed}-{digest}"))  # under another name of the arm
        config.name = existing[0] if existing else f"{slug}-seed{seed}-{digest}"
        if start is not None:
            config.init_from = str(start.folder)
        return StudyRun(kind, arm.name, seed, config, self.folder / config.name, start)


# --- data -------------------------------------------------------------------------------------------------------------


def require_data(runs: Iterable[StudyRun]) -> None:
    """Look for the data of runs and read none.

    Raises:
        UserError: one line, for data that do not exist.
    """
    for name, source in dict.fromkeys(place for run in runs for place in _sources(run)):
        if name == "beir":
            require_beir(*folder_and_split(source))
        elif name.endswith("_data"):
            if not source.startswith("builtin:") and not _exists(source):
                raise UserError(f"{name} {printable(source)}: no such data, or a folder without shards; valid: {FORMS}")
        elif not is_folder(Path(source)) or find_split(Path(source), name or None, "eval") is None:
            split = printable(name or "test or val", 60)
            raise UserError(f"{printable(source)} has no evaluation split {split}: give val_data or val_holdout")


def _sources(run: StudyRun) -> Iterator[tuple[str, str]]:
    """("beir", folder), (setting, data) or, of training data that evaluate as well, (split, folder)."""
    config = run.config
    if run.kind is TEXT:
        train = [f"{config.train_data}:{config.train_split}"] if Path(config.train_data).is_dir() else []
        yield from (("beir", entry) for entry in [*train, *config.val_data])
        return
    names = ("train_data", "val_data", "zeroshot_data")
    yield from ((name, getattr(config, name)) for name in names if getattr(config, name) is not None)
    if config.val_data is None and config.val_holdout is None and not config.train_data.startswith("builtin:"):
        yield config.val_split or "", config.train_data


def _exists(source: str) -> bool:
    """Whether a folder has shards, or a pattern's first file exists: of a/{00..59}{x,y}.tar a/00x.tar."""
    if is_folder(Path(source)):
        return any(any(Path(source).glob(pattern)) for pattern in ("*.tar", "*/*.tar"))
    first, before = source.partition("::")[0], ""
    while first != before:
        before, first = first, re.sub(r"\{([^{}]*?)(?:\.\.|,)[^{}]*\}", r"\1", first)
    return any(glob.iglob(first)) or any(glob.iglob(glob.escape(source)))  # noqa: PTH207 (absolute patterns)
