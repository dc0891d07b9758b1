"""A grid of text trainings: its data looked for, its finished runs read, an arm of them. docs/text_study.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmclip.config import TextTrainConfig
from mmclip.data.beir import EVALUATIONS, evaluation_name, folder_and_split, require_beir
from mmclip.errors import UserError, printable
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import NATIVE, PER_QUERY_FILE, RESULTS_FILE, START_FILE, Results, load_results, whole
from mmclip.reporting.table import is_number
from mmclip.similarity import Direction
from mmclip.study.finished import by_arm, read_lines, read_start, seconds_by_seed
from mmclip.study.plan import Cell
from mmclip.training.log import METRICS

Json = dict[str, Any]
Q2D = Direction.Q2D.value
METRIC = "ndcg@10"
SHOWN = (METRIC, "recall@100", "mrr@10")  # what tables have of every scoring


@dataclasses.dataclass(frozen=True)
class TextArm:
    """One setting of a text study.

    settings: of its first seed. runs: data set -> seed -> results, the in-domain data set first. starts: seed ->
    start.json, {} where nothing was measured before the first step. seconds: seed -> how long its run took, where that
    is known.
    """

    name: str
    settings: TextTrainConfig
    runs: Mapping[str, Mapping[int, Results]]
    starts: Mapping[int, Json] = dataclasses.field(default_factory=dict)
    seconds: Mapping[int, float] = dataclasses.field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        """Those whose runs are finished."""
        return sorted({seed for runs in self.runs.values() for seed in runs})


def data_name(asked: str) -> str:
    """What an entry of val_data is called.

    >>> data_name("data/scifact:test")
    'scifact-test'
    """
    return evaluation_name(*folder_and_split(asked))


def require_data(cells: Sequence[Cell]) -> None:
    """Look for the data of runs, once each, and read none. Errors: UserError, one line, where there are none."""
    asked: dict[tuple[Path, str], None] = {}
    for settings in (c.settings for c in cells):
        train = Path(settings.train_data)
        if train.is_dir():
            asked[train, settings.train_split] = None
        asked |= dict.fromkeys(folder_and_split(entry) for entry in settings.val_data)
    for folder, split in asked:
        require_beir(folder, split)


def read_run(cell: Cell) -> tuple[dict[str, Results], list[Json], Json]:
    """(data set -> results, lines of metrics.jsonl, start.json or {}) of a finished cell, whole. Errors: UserError,
    OSError."""
    first, *others = cell.settings.val_data
    places = {data_name(first): cell.folder}
    places |= {data_name(entry): cell.folder / EVALUATIONS / data_name(entry) for entry in others}
    found = {}
    for name, folder in places.items():
        found[name] = load_results(folder)
        with whole(str(folder / RESULTS_FILE)):
            _require_whole(found[name], folder)
    return found, read_lines(cell.folder / METRICS), read_start(cell.folder / START_FILE)


def _require_whole(results: Results, folder: Path) -> None:
    """Everything that tables show of every run is there, a row a query. Errors: UserError, or what whole tells."""
    clusters = results.array(f"{MAIN_POOL}/{Q2D}/clusters")
    native = results.json["evaluation"]["native"]
    float(native["gamma_q"]), float(native["gamma_d"])
    for side in ("query", "document"):
        results.json["magnitude"][side]["cv"]
    for scoring in (NATIVE, "cosine", "dot"):
        for metric in SHOWN:
            if not is_number(results.json["retrieval"][Q2D][scoring][metric]):
                raise UserError(f"{printable(folder / RESULTS_FILE)}: {scoring} {metric} is no number")
            values = results.query_values(MAIN_POOL, Q2D, scoring, metric)
            if values.shape != clusters.shape:
                raise UserError(
                    f"{printable(folder / PER_QUERY_FILE)}: {scoring}/{metric} has {len(values):,} rows, clusters "
                    f"{len(clusters):,}"
                )


def gather(cells: Sequence[Cell]) -> tuple[list[TextArm], dict[Cell, str]]:
    """(the finished runs of a study by arm, in the order of its file; the finished cells that cannot be read, and
    why)."""
    arms, unreadable = by_arm(cells, read_run)
    made = []
    for name, found in arms.items():
        sets = dict.fromkeys(data for results, _, _ in found.values() for data in results)
        runs = {d: {c.seed: results[d] for c, (results, _, _) in found.items() if d in results} for d in sets}
        starts = {c.seed: start for c, (_, _, start) in found.items()}
        made.append(TextArm(name, next(iter(found)).settings, runs, starts, seconds_by_seed(found)))
    return made, unreadable


def numbers(cell: Cell) -> str:
    """A finished cell in a few words. Errors: UserError, OSError, where its files are not whole."""
    return "  ".join(f"{d} {r.json['retrieval'][Q2D][NATIVE][METRIC]:.3f}" for d, r in read_run(cell)[0].items())
