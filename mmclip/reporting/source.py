"""What a report is made of: a run's folder, read as far as it is there.

results.json and per_query.npz must be there (runs.load_run); metrics.jsonl, config.yaml and items.json may be missing
or damaged, and then the report says so where a reader would look for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmclip.config import TrainConfig, read_yaml, values_of
from mmclip.errors import UserError, printable
from mmclip.evaluation.results import Results
from mmclip.evaluation.runs import load_run
from mmclip.reporting.table import is_number

Json = dict[str, Any]
CONFIG_FILE, METRICS = "config.yaml", "metrics.jsonl"
MAX_LINES = 200_000  # of metrics.jsonl; more are more than a curve can show


@dataclass(frozen=True)
class Items:
    """The rows of the main pool: image_keys [N], captions [M], owner [M] (an image row, -1: nobody's)."""

    image_keys: list[str]
    captions: list[str]
    owner: list[int]


@dataclass(frozen=True)
class ReportRun:
    """``number``: its place in the report, which is its colour and the names of its pictures.

    lines: of metrics.jsonl, by rising step, [] without one; settings: of config.yaml, None without one.
    """

    number: int
    name: str
    folder: Path
    results: Results
    lines: list[Json]
    settings: dict[str, Any] | None
    items: Items | None

    @property
    def trained(self) -> Json:
        return dict(self.results.json.get("trained_with") or {})


def read_runs(runs: Mapping[str, str | Path]) -> list[ReportRun]:
    """Finished runs by name, a folder or a results.json each. Errors: UserError, as of ``load_run``."""
    found = []
    for number, (name, place) in enumerate(runs.items()):
        path = Path(place)
        folder = path if path.is_dir() else path.parent
        results = load_run(str(place))
        items = read_items(results)
        found.append(
            ReportRun(number, name, folder, results, read_lines(folder / METRICS), read_settings(folder), items)
        )
    return found


def read_lines(path: Path) -> list[Json]:
    """The objects of metrics.jsonl that have a step; torn or odd lines are passed over."""
    lines: list[Json] = []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for _, text in zip(range(MAX_LINES), file, strict=False):
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError):
                    continue
                if isinstance(line, dict) and is_number(line.get("step")):
                    lines.append(line)
    except OSError:
        return []
    return sorted(lines, key=lambda line: float(line["step"]))


def read_settings(folder: Path) -> dict[str, Any] | None:
    """The settings in a run's config.yaml; None where it is missing or is no settings file."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return None
    try:
        return values_of(TrainConfig, read_yaml(path))
    except (UserError, OSError):
        return None


def read_items(results: Results) -> Items | None:
    """What items.json held; None where there was none, or it is not of as many rows as the results say."""
    try:
        keys, captions, owner = (results.items[k] for k in ("image_keys", "captions", "owner"))
        counts = (len(keys), len(captions), len(owner))
        expected = tuple(results.json["data"][k] for k in ("n_images", "n_texts", "n_texts"))
        if counts != expected:
            return None
        return Items([str(k) for k in keys], [str(c) for c in captions], [int(o) for o in owner])
    except (ValueError, KeyError, TypeError):
        return None


def data_words(run: ReportRun) -> str:
    """The evaluation data in a few words, their path as results.json has it."""
    data = run.results.json["data"]
    split = data.get("split")
    path = printable(data.get("path") or "data without a name", 120)
    return path if split is None else f"{path} [{printable(split, 40)}]"
