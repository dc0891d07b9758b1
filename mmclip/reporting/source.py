"""A run's folder as far as it can be read: only results.json and per_query.npz must be there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mmclip.config import TrainConfig, read_yaml, values_of
from mmclip.errors import UserError
from mmclip.evaluation.results import Results, load_results
from mmclip.reporting.table import is_number

Json = dict[str, Any]
CONFIG_FILE, METRICS = "config.yaml", "metrics.jsonl"
MAX_LINES = 200_000  # of metrics.jsonl; more are more than a curve can show


class Items(NamedTuple):
    """Rows of the main pool: image_keys [N], captions [M], owner [M] (row of its image, -1 without one)."""

    image_keys: list[str]
    captions: list[str]
    owner: list[int]


@dataclass(frozen=True)
class ReportRun:
    """A finished run.

    Attributes:
        number: place in the report, which is its colour and in the names of its pictures.
        lines: of metrics.jsonl, by rising step; [] without one.
        settings: of config.yaml; None without one.
        items: None where items.json is missing, or is not of these results.
    """

    number: int
    name: str
    folder: Path
    results: Results
    lines: list[Json]
    settings: Json | None
    items: Items | None

    @property
    def trained(self) -> Json:
        return dict(self.results.json.get("trained_with") or {})


def read_runs(runs: Mapping[str, str | Path]) -> list[ReportRun]:
    """Finished runs by name, a folder or a results.json each. Errors: UserError, as of ``load_results``."""
    read = []
    for number, (name, place) in enumerate(runs.items()):
        folder = Path(place) if Path(place).is_dir() else Path(place).parent
        results = load_results(str(place))
        more = read_lines(folder / METRICS), read_settings(folder), read_items(results)
        read.append(ReportRun(number, name, folder, results, *more))
    return read


def read_lines(path: Path) -> list[Json]:
    """Objects of metrics.jsonl that have a step; torn or odd lines are passed over."""
    lines: list[Json] = []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in islice(file, MAX_LINES):
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError):
                    continue
                if isinstance(line, dict) and is_number(line.get("step")):
                    lines.append(line)
    except OSError:
        return []
    return sorted(lines, key=lambda line: float(line["step"]))


def read_settings(folder: Path) -> Json | None:
    """Settings in a run's config.yaml; None where it is missing or is no settings file."""
    path = folder / CONFIG_FILE
    try:
        return values_of(TrainConfig, read_yaml(path)) if path.is_file() else None
    except (UserError, OSError):
        return None


def read_items(results: Results) -> Items | None:
    """Content of items.json; None where there was none, or it is not of as many rows as the results say."""
    try:
        keys, captions, owner = (results.items[k] for k in ("image_keys", "captions", "owner"))
        if [len(keys), len(captions), len(owner)] != [
            results.json["data"][f"n_{s}"] for s in ("images", "texts", "texts")
        ]:
            return None
        return Items([str(k) for k in keys], [str(c) for c in captions], [int(o) for o in owner])
    except (ValueError, KeyError, TypeError):
        return None
