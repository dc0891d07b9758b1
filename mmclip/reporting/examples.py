"""The report's contact sheets: the best and the worst retrievals of a run, with pictures, captions and lengths.

Best: a relevant answer at rank 1, furthest ahead of the first irrelevant one. Worst: the first relevant answer comes
last. At most one query of an image and its captions is shown in a sheet, so that it shows different ones.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmclip.array_files import SUFFIXES
from mmclip.data.image_text import BadSample, ImageTextData
from mmclip.data.shards import open_data
from mmclip.errors import UserError, printable
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import NATIVE
from mmclip.reporting.source import Items, ReportRun
from mmclip.similarity import CLIP_DIRECTIONS, Direction

Array = NDArray[Any]
SHOWN = 5  # answers of a query
QUERIES = 3  # best ones, and worst ones
SIDE = 132  # pixels of a thumbnail's longer side
CSV_SETTINGS = ("dataset_type", "csv_img_key", "csv_caption_key", "csv_separator")


class Answer(NamedTuple):
    """What a query found, or the query itself: a caption, or a picture's data URI ("" where it cannot be read, None
    where the run's pictures are not here at all). text: the caption, or the picture's key.

    numbers: in words; rank: 1 and up, 0 of the query itself; missed: shown because it is right, not because it is
    near.
    """

    is_picture: bool
    text: str
    uri: str | None
    relevant: bool
    numbers: str
    rank: int
    missed: bool = False


class Example(NamedTuple):
    """A query with its best answers; ``words`` say why it is in the sheet."""

    query: Answer
    answers: list[Answer]
    words: str


@dataclass(frozen=True)
class Sheet:
    """Best or worst queries of one direction."""

    direction: str
    kind: str
    examples: list[Example]


def contact_sheets(run: ReportRun) -> tuple[str, list[Sheet], str | None]:
    """(the scoring that ranks, sheets of both directions, None or a sentence on what is missing).

    Without pictures the sheets hold their keys; without the arrays there are none.
    """
    arrays = run.results.per_query
    wanted = [f"{MAIN_POOL}/{d.value}/cosine/{what}" for d in CLIP_DIRECTIONS for what in ("top_ids", "top_scores")]
    wanted += [f"{MAIN_POOL}/lengths/{d.document_side}" for d in CLIP_DIRECTIONS]
    scoring = NATIVE if all(f"{MAIN_POOL}/{d.value}/{NATIVE}/top_ids" in arrays for d in CLIP_DIRECTIONS) else "cosine"
    if run.items is None or any(name not in arrays for name in wanted):
        return scoring, [], "It was evaluated without keeping its best answers (items.json): evaluate it again."
    pictures, missing = _pictures(run, run.items)
    try:
        sheets = [s for d in CLIP_DIRECTIONS for s in _sheets(run, run.items, d, scoring, pictures)]
    except (IndexError, KeyError, ValueError):
        return scoring, [], "Its items.json and per_query.npz are not of one evaluation: evaluate it again."
    return scoring, sheets, missing


def _pictures(run: ReportRun, items: Items) -> tuple[_Pictures | None, str | None]:
    """(the run's pictures, None), or (None, a sentence on why there are none)."""
    keys = "the keys of the pictures stand in their places."
    if Path(str(run.results.json["data"].get("path"))).suffix.lower() in SUFFIXES:
        return None, f"A file of embeddings holds no pictures: {keys}"
    try:
        return _Pictures.of(run, items), None
    except (UserError, OSError) as error:
        # printable ends a long message with its own mark; the sentence needs one full stop
        return None, f"Its evaluation data cannot be opened here, so {keys} Why: {printable(error).rstrip('.')}."


@dataclass
class _Pictures:
    """Thumbnails by image row of the evaluation, each made once."""

    data: ImageTextData
    rows: Mapping[str, int]
    items: Items

    def __post_init__(self) -> None:
        self.made: dict[int, str] = {}

    @classmethod
    def of(cls, run: ReportRun, items: Items) -> _Pictures:
        """Errors: UserError where the data that results.json names are not there, or are others."""
        about = run.results.json["data"]
        path, split = str(about.get("path")), about.get("split")
        if path.startswith("builtin:"):  # opening them would draw them
            raise UserError(f"{path} is not a folder")
        names = dict(zip(CSV_SETTINGS, ("dataset_type", "img_key", "caption_key", "separator"), strict=True))
        how = {names[k]: v for k, v in (run.settings or {}).items() if k in names}
        data = open_data(path, None if split is None else str(split), "eval", **how)
        rows = {key: row for row, key in enumerate(data.keys)}
        if not any(key in rows for key in items.image_keys):
            raise UserError(f"{printable(path)} holds none of the pictures that were evaluated")
        return cls(data, rows, items)

    def uri(self, image: int) -> str:
        if image not in self.made:
            row = self.rows.get(self.items.image_keys[image])
            self.made[image] = "" if row is None else _thumbnail(self.data, row)
        return self.made[image]


def _thumbnail(data: ImageTextData, row: int) -> str:
    try:
        picture = data.read_image(row)
    except (BadSample, OSError):  # a file may go away while the page is written
        return ""
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=82, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode('ascii')}"


def _sheets(
    run: ReportRun, items: Items, direction: Direction, scoring: str, pictures: _Pictures | None
) -> list[Sheet]:
    """The best and the worst of a direction."""
    array = run.results.array
    where = f"{MAIN_POOL}/{direction.value}"
    first = array(f"{where}/{scoring}/first_rank")
    ids, relevant = (array(f"{where}/{scoring}/{what}") for what in ("top_ids", "top_relevant"))
    clusters = array(f"{where}/clusters")
    leads = _leads(run, direction, scoring)
    best = _different(np.argsort(-leads, kind="stable"), np.isfinite(leads), clusters)
    worst = _different(np.argsort(-first, kind="stable"), first > 1, clusters)

    def example(q: int, words: str) -> Example:
        row = int(array(f"{where}/queries")[q])
        lengths = array(f"{MAIN_POOL}/lengths/{direction.query_side}")
        query = _answer(pictures, items, direction.query_side, row, False, f"length {lengths[row]:.2f}", 0)
        known = _cosines(run, where, q)
        # pictures stand three in a row: six of them, or five and the one that was missed
        shown = SHOWN + (direction.document_side == "image" and first[q] <= SHOWN)
        answers = [
            _described(run, pictures, items, direction, int(i), bool(r), rank, known)
            for rank, (i, r) in enumerate(zip(ids[q][:shown], relevant[q][:shown], strict=True), start=1)
        ]
        own = _own(items, direction, row)
        if first[q] > shown and own is not None and own not in ids[q][:shown]:
            missed = _described(run, pictures, items, direction, own, True, 0, known)
            answers.append(missed._replace(missed=True))
        return Example(query, answers, words)

    n = run.results.json["data"]["n_texts" if direction.document_side == "text" else "n_images"]
    return [
        Sheet(direction.value, "best", [example(q, f"ahead by {leads[q]:.3f}") for q in best]),
        Sheet(
            direction.value,
            "worst",
            [example(q, f"first relevant answer at rank {first[q]:,} of {n:,}") for q in worst],
        ),
    ]


def _leads(run: ReportRun, direction: Direction, scoring: str) -> Array:
    """[Q]: score of a relevant answer at rank 1 less the first irrelevant one's, as cosine times length over the mean
    length where the scoring keeps it; NaN where rank 1 is irrelevant, or an answer is not among the 10 best by cosine
    (its score was not kept)."""
    array = run.results.array
    where = f"{MAIN_POOL}/{direction.value}"
    ids, relevant = array(f"{where}/{scoring}/top_ids"), array(f"{where}/{scoring}/top_relevant").astype(bool)
    near, cosines = array(f"{where}/cosine/top_ids"), array(f"{where}/cosine/top_scores").astype(np.float64)
    same = ids[:, :, None] == near[:, None, :]  # [Q, k, k]
    scores = np.where(same.any(axis=2), (same * cosines[:, None, :]).sum(axis=2), np.nan)
    gamma_d = 1.0 if scoring == "cosine" else float(run.results.json["evaluation"]["native"]["gamma_d"])
    lengths = array(f"{MAIN_POOL}/lengths/{direction.document_side}").astype(np.float64)
    scores = scores * (lengths[ids] / lengths.mean()) ** (1 - gamma_d)
    wrong = np.argmax(~relevant, axis=1)
    rows = np.arange(len(ids))
    return np.where(relevant[:, 0] & ~relevant.all(axis=1), scores[:, 0] - scores[rows, wrong], np.nan)


def _different(order: Array, usable: Array, clusters: Array) -> list[int]:
    """The first ``QUERIES`` usable queries of an order, each of another cluster."""
    found: dict[int, int] = {}
    for q in order:
        if usable[q] and len(found) < QUERIES:
            found.setdefault(int(clusters[q]), int(q))
    return list(found.values())


def _cosines(run: ReportRun, where: str, q: int) -> dict[int, float]:
    ids, scores = (run.results.array(f"{where}/cosine/{what}")[q] for what in ("top_ids", "top_scores"))
    return {int(i): float(s) for i, s in zip(ids, scores, strict=True)}


def _own(items: Items, direction: Direction, row: int) -> int | None:
    """A right answer that the data name: a picture's own first caption, a caption's own picture."""
    if direction.query_side == "text":
        return items.owner[row] if items.owner[row] >= 0 else None
    return items.owner.index(row) if row in items.owner else None


def _described(
    run: ReportRun,
    pictures: _Pictures | None,
    items: Items,
    direction: Direction,
    row: int,
    relevant: bool,
    rank: int,
    cosines: Mapping[int, float],
) -> Answer:
    length = run.results.array(f"{MAIN_POOL}/lengths/{direction.document_side}")[row]
    words = f"length {length:.2f}" + (f" · cos {cosines[row]:.3f}" if row in cosines else "")
    return _answer(pictures, items, direction.document_side, row, relevant, words, rank)


def _answer(
    pictures: _Pictures | None, items: Items, side: str, row: int, relevant: bool, numbers: str, rank: int
) -> Answer:
    if side == "image":
        uri = None if pictures is None else pictures.uri(row)
        return Answer(True, printable(items.image_keys[row], 80), uri, relevant, numbers, rank)
    return Answer(False, printable(items.captions[row], 220), "", relevant, numbers, rank)
