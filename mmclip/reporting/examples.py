"""The best and the worst retrievals of a run, with pictures, captions and norms.

Best: a relevant document at rank 1, furthest ahead of the first irrelevant one. Worst: the first relevant document
comes last. At most one query of an image and its captions is shown of a kind.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmclip.data.image_text import BadSample, ImageTextData
from mmclip.data.shards import open_data
from mmclip.errors import UserError, printable
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import NATIVE
from mmclip.io import SUFFIXES
from mmclip.similarity import CLIP_DIRECTIONS, Direction

if TYPE_CHECKING:
    from mmclip.reporting.page import Items, ReportRun

Array = NDArray[Any]
SHOWN = 5  # documents of a query
QUERIES = 3  # best ones, and worst ones
SIDE = 132  # pixels of a thumbnail's longer side
CSV_SETTINGS = {"dataset_type": "dataset_type", "csv_img_key": "img_key", "csv_caption_key": "caption_key",
                "csv_separator": "separator"}  # fmt: skip


class Item(NamedTuple):
    """A picture or a caption.

    Attributes:
        text: the caption, or the picture's key.
        uri: data URI of a picture: "" where it cannot be read, None where the run's pictures are not here at all.
        numbers: norm and cosine in words.
        rank: 1 and up, 0 of the query.
        missed: shown because it is relevant, not because it ranks high.
    """

    is_picture: bool
    text: str
    uri: str | None
    relevant: bool
    numbers: str
    rank: int
    missed: bool = False


class Example(NamedTuple):
    """A query with its best documents; kind: "best" or "worst"; ``words`` say why it is shown."""

    direction: str
    kind: str
    query: Item
    documents: list[Item]
    words: str


def examples(run: ReportRun) -> tuple[str, list[Example], str | None]:
    """(the scoring that ranks, examples of both directions, a sentence on what is missing or None).

    Without pictures the examples hold their keys; without the arrays there are none.
    """
    arrays = run.results.per_query
    wanted = [f"{MAIN_POOL}/{d.value}/cosine/{what}" for d in CLIP_DIRECTIONS for what in ("top_ids", "top_scores")]
    wanted += [f"{MAIN_POOL}/lengths/{d.document_side}" for d in CLIP_DIRECTIONS]
    scoring = NATIVE if all(f"{MAIN_POOL}/{d.value}/{NATIVE}/top_ids" in arrays for d in CLIP_DIRECTIONS) else "cosine"
    if run.items is None or any(name not in arrays for name in wanted):
        return scoring, [], "It was evaluated without keeping its best documents (items.json): evaluate it again."
    data, missing = None, None
    keys = "the keys of the pictures stand in their places."
    if Path(str(run.results.json["data"].get("path"))).suffix.lower() in SUFFIXES:
        missing = f"A file of embeddings holds no pictures: {keys}"
    else:
        try:
            data = _open(run, run.items)
        except (UserError, OSError) as error:
            why = printable(error).rstrip(".")  # the sentence needs one full stop
            missing = f"Its evaluation data cannot be opened here, so {keys} Why: {why}."
    shelf = _Shelf(run, run.items, data)
    try:
        return scoring, [e for d in CLIP_DIRECTIONS for e in shelf.examples(d, scoring)], missing
    except (IndexError, KeyError, ValueError):
        return scoring, [], "Its items.json and per_query.npz are not of one evaluation: evaluate it again."


def _open(run: ReportRun, items: Items) -> ImageTextData:
    """Errors: UserError where the data that results.json names are not there, or are others."""
    about = run.results.json["data"]
    path, split = str(about.get("path")), about.get("split")
    if path.startswith("builtin:"):  # opening them would draw them
        raise UserError(f"{path} is not a folder")
    how = {CSV_SETTINGS[k]: v for k, v in (run.settings or {}).items() if k in CSV_SETTINGS}
    data = open_data(path, None if split is None else str(split), "eval", **how)
    if not set(data.keys) & set(items.image_keys):
        raise UserError(f"{printable(path)} holds none of the pictures that were evaluated")
    return data


class _Shelf:
    """Items of a run's main pool as they are shown; thumbnails are made once."""

    def __init__(self, run: ReportRun, items: Items, data: ImageTextData | None) -> None:
        self.run, self.items, self.data = run, items, data
        self.rows = {key: row for row, key in enumerate(data.keys)} if data is not None else {}
        self.made: dict[int, str] = {}

    def array(self, name: str) -> Array:
        return self.run.results.array(f"{MAIN_POOL}/{name}")

    def examples(self, direction: Direction, scoring: str) -> Iterable[Example]:
        """The best and the worst queries of a direction, each kind of different clusters."""
        first, leads = self.array(f"{direction.value}/{scoring}/first_rank"), self.leads(direction, scoring)
        n = self.run.results.json["data"][f"n_{direction.document_side}s"]
        kinds = (
            ("best", leads, np.isfinite(leads), lambda q: f"ahead by {leads[q]:.3f}"),
            ("worst", first, first > 1, lambda q: f"first relevant at rank {first[q]:,} of {n:,}"),
        )
        clusters = self.array(f"{direction.value}/clusters")
        for kind, values, usable, words in kinds:
            chosen: dict[int, int] = {}
            for q in np.argsort(-values, kind="stable"):
                if usable[q] and len(chosen) < QUERIES:
                    chosen.setdefault(int(clusters[q]), int(q))
            yield from (self.example(direction, scoring, kind, q, words(q)) for q in chosen.values())

    def example(self, direction: Direction, scoring: str, kind: str, q: int, words: str) -> Example:
        where, side = direction.value, direction.document_side
        row, first = int(self.array(f"{where}/queries")[q]), int(self.array(f"{where}/{scoring}/first_rank")[q])
        near, cosines = (self.array(f"{where}/cosine/{what}")[q].tolist() for what in ("top_ids", "top_scores"))
        known = dict(zip(near, cosines, strict=True))
        ids, relevant = (self.array(f"{where}/{scoring}/{what}")[q].tolist() for what in ("top_ids", "top_relevant"))
        # pictures stand three in a row: six of them, or five and the one that was missed
        shown = SHOWN + (side == "image" and first <= SHOWN)
        best = enumerate(zip(ids[:shown], relevant[:shown], strict=True), 1)
        documents = [self.item(side, i, known, bool(r), rank) for rank, (i, r) in best]
        owner = self.items.owner
        own = owner[row] if side == "image" else owner.index(row) if row in owner else -1
        if first > shown and own >= 0 and own not in ids[:shown]:
            documents.append(self.item(side, own, known, True)._replace(missed=True))
        return Example(where, kind, self.item(direction.query_side, row), documents, words)

    def leads(self, direction: Direction, scoring: str) -> Array:
        """[Q]: score of a relevant document at rank 1 less the first irrelevant one's, as cosine times norm over the
        mean norm where the scoring keeps it; NaN where rank 1 is irrelevant, or a document is not among the 10 best by
        cosine (its score was not kept)."""
        ids, relevant, near, cosines = (
            self.array(f"{direction.value}/{name}")
            for name in (f"{scoring}/top_ids", f"{scoring}/top_relevant", "cosine/top_ids", "cosine/top_scores")
        )
        same = ids[:, :, None] == near[:, None, :]  # [Q, k, k]
        scores = np.where(same.any(axis=2), (same * cosines[:, None, :].astype(np.float64)).sum(axis=2), np.nan)
        gamma_d = 1.0 if scoring == "cosine" else float(self.run.results.json["evaluation"]["native"]["gamma_d"])
        norms = self.array(f"lengths/{direction.document_side}").astype(np.float64)
        scores = scores * (norms[ids] / norms.mean()) ** (1 - gamma_d)
        relevant = relevant.astype(bool)
        rival = scores[np.arange(len(ids)), np.argmax(~relevant, axis=1)]
        return np.where(relevant[:, 0] & ~relevant.all(axis=1), scores[:, 0] - rival, np.nan)

    def item(
        self, side: str, row: int, cosines: Mapping[int, float] | None = None, relevant: bool = False, rank: int = 0
    ) -> Item:
        numbers = f"norm {self.array(f'lengths/{side}')[row]:.2f}"
        numbers += f" · cos {cosines[row]:.3f}" if cosines and row in cosines else ""
        if side == "text":
            return Item(False, printable(self.items.captions[row], 220), "", relevant, numbers, rank)
        return Item(True, printable(self.items.image_keys[row], 80), self.uri(row), relevant, numbers, rank)

    def uri(self, image: int) -> str | None:
        if self.data is not None and image not in self.made:
            self.made[image] = _thumbnail(self.data, self.rows.get(self.items.image_keys[image]))
        return self.made.get(image)


def _thumbnail(data: ImageTextData, row: int | None) -> str:
    try:
        picture = data.read_image(row) if row is not None else None
    except (BadSample, OSError):  # a file may go away while the page is written
        picture = None
    if picture is None:
        return ""
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=82, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode('ascii')}"
