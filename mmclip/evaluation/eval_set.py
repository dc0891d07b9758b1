"""Evaluation sets: raw embeddings of two sides with their relevance, one candidate pool each, and the query bank.

Images and texts make several sets with their own candidates: ``retrieval``, every image and caption; ``full``, only
captions of level "full", where levels differ; and one for each set of distractors, candidates that are relevant to
nothing. Queries and documents make one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmclip.data.beir import BeirCollection
from mmclip.data.distractors import KINDS, TWINS, Corrupted, captions
from mmclip.data.image_text import ImageTextData
from mmclip.embeddings.encode import EncodeOptions, encode_images, encode_texts, image_encoder, text_encoder
from mmclip.embeddings.features import FeatureSource
from mmclip.embeddings.files import Distractors, Embeddings, check_vectors, load_embeddings
from mmclip.errors import UserError, printable
from mmclip.models.factory import ClipModel
from mmclip.models.towers import as_bytes
from mmclip.retrieval import Qrels
from mmclip.retrieval.hubness import QueryBank
from mmclip.roles import Direction

Array = NDArray[Any]
FULL = "full"
MAIN_POOL = "retrieval"
UNITS = ("words", "characters")


@dataclass
class EvalSet:
    """Raw embeddings by side with relevance; one candidate pool.

    Attributes:
        name: Of the candidate pool; ``MAIN_POOL`` for the main one.
        embeddings: side -> [N, D], never normalized; the two sides in the order of ``qrels``.
        qrels: Relevance of rows of the second side to rows of the first.
        clusters: side -> [N] numbers; rows with one number (an image and its captions) are resampled together.
        attributes: side -> name -> [N] whole numbers (-1 unknown) or strings ("" unknown). ``UNITS`` are text lengths
            that diagnostics regress out; all others (n_words, n_objects, level) form groups.
        excluded: [X, 2] (row, row) of documents that are not ranked for a query; None: none.
        items: What the rows are, to show them: items.json.
        data: Origin and further counts, copied to "data" of results.json.
        fingerprint: Equal where results can be compared query by query; "" where the main set's says it.
    """

    name: str
    embeddings: dict[str, Tensor]
    qrels: Qrels
    clusters: dict[str, Array]
    attributes: dict[str, dict[str, Array]]
    excluded: Array | None = None
    items: dict[str, list[Any]] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""

    def __post_init__(self) -> None:
        check_vectors(self.embeddings)
        self.qrels.check(*map(len, self.embeddings.values()))
        for side, x in self.embeddings.items():
            for name, values in {"clusters": self.clusters[side], **self.attributes.get(side, {})}.items():
                if len(values) != len(x):
                    raise UserError(f"{side} {name}: {len(values)} values for {len(x)} embeddings")

    def relevance(self, direction: Direction) -> Qrels:
        """``qrels`` with ``direction``'s queries first."""
        return self.qrels if direction.query_side == next(iter(self.embeddings)) else self.qrels.transposed()


def text_sizes(texts: Sequence[str]) -> dict[str, Array]:
    """Count the words, separated by white space, and the characters of texts: ``UNITS``.

    >>> text_sizes(["a dog", ""])
    {'words': array([2, 0]), 'characters': array([5, 0])}
    """
    sizes = {"words": [len(t.split()) for t in texts], "characters": [len(t) for t in texts]}
    return {unit: np.array(counts, dtype=np.int64) for unit, counts in sizes.items()}


def text_set(collection: BeirCollection, query: Tensor, document: Tensor) -> EvalSet:
    """Make the set of a collection and raw query [Q, D] and document [N, D]; every row is resampled by itself.

    Raises:
        UserError: For embeddings that do not fit, and for an excluded document that is relevant to its query.
    """
    c, embeddings = collection, {"query": query, "document": document}
    texts = {"query": c.queries, "document": c.documents}
    for side, x in embeddings.items():
        if x.ndim != 2 or len(x) != len(texts[side]):
            needed = f"{len(texts[side])} rows, one a {side}, are needed"
            raise UserError(f"{side} embeddings of shape {list(x.shape)}: {needed}")
    sizes = {side: text_sizes(values) for side, values in texts.items()}
    excluded = [(q, d) for q, rows in c.excluded.items() for d in rows]
    for q, d in sorted(set(excluded) & set(map(tuple, c.pairs.tolist()))):
        raise UserError(
            f"{printable(c.path)}: query {printable(c.query_ids[q], 60)!r} excludes document "
            f"{printable(c.document_ids[d], 60)!r}, which is judged relevant to it"
        )
    qrels = Qrels(c.pairs, c.gains)
    counts = {"n_empty": len(c.empty), "n_pairs": len(qrels)}
    return EvalSet(
        MAIN_POOL,
        embeddings,
        qrels,
        clusters={side: np.arange(len(x)) for side, x in embeddings.items()},
        attributes={side: {"n_words": units["words"], **units} for side, units in sizes.items()},
        excluded=np.array(excluded, dtype=np.int64) if excluded else None,
        items={name: list(getattr(c, name)) for name in ("query_ids", "queries", "document_ids", "titles")},
        data={"path": c.path, "split": c.split, **counts, "notes": list(c.notes)},
        fingerprint=c.fingerprint(),
    )


def image_text_sets(x: Embeddings, data: Mapping[str, Any] | None = None) -> list[EvalSet]:
    """Make the main set, then ``full`` and one for each set of distractors; ``data`` as in :class:`EvalSet`."""
    names = [MAIN_POOL, FULL, *(d.name for d in x.distractors)]
    if twice := [n for i, n in enumerate(names) if n in names[:i]]:
        raise UserError(f"distractors called {printable(twice[0], 60)!r} twice, or like another pool")
    pairs, texts = x.pairs.numpy(), np.arange(len(x.text))
    main = _image_text_set(x, MAIN_POOL, texts, pairs, x.gains)
    main.items = {"image_keys": list(x.image_ids), "captions": list(x.texts), "owner": x.owners().tolist()}
    main.data, main.fingerprint = dict(data or {}), x.fingerprint()
    sets = [main]
    full = np.flatnonzero(np.array(x.levels or [], dtype=object) == FULL)
    kept = np.isin(pairs[:, 1], full)
    if len(full) < len(texts) and kept.any():
        among = np.column_stack([pairs[kept, 0], np.searchsorted(full, pairs[kept, 1])])
        sets.append(_image_text_set(x, FULL, full, among, None if x.gains is None else np.asarray(x.gains)[kept]))
    return sets + [_with_distractors(x, main, d) for d in x.distractors]


def _image_text_set(x: Embeddings, name: str, texts: Array, pairs: Array, gains: Array | None) -> EvalSet:
    """All images with the text rows ``texts``; ``pairs`` in the rows of the set."""
    n, owner = len(x.image), x.owners()
    sizes = text_sizes([x.texts[row] for row in texts])
    attributes: dict[str, dict[str, Array]] = {"image": {}, "text": {"n_words": sizes["words"], **sizes}}
    if x.n_objects is not None:
        attributes["image"]["n_objects"] = np.asarray(x.n_objects, dtype=np.int64)
    if x.levels is not None:
        attributes["text"]["level"] = np.array(x.levels, dtype=object)[texts]
    clusters = np.where(owner >= 0, owner, n + np.arange(len(owner)))  # a text without an image is its own
    embeddings = {"image": x.image, "text": x.text[torch.as_tensor(texts)]}
    return EvalSet(name, embeddings, Qrels(pairs, gains), {"image": np.arange(n), "text": clusters[texts]}, attributes)


def _with_distractors(x: Embeddings, main: EvalSet, distractors: Distractors) -> EvalSet:
    """The main set with more candidates: the same queries and relevance."""
    embeddings, clusters = dict(main.embeddings), dict(main.clusters)
    attributes = {side: dict(values) for side, values in main.attributes.items()}
    first, sides = len(x.image) + len(x.text), distractors.sides()  # first: a number that no cluster has yet
    for i, (side, more) in enumerate(sides.items()):
        if side in distractors.owner:
            new = np.asarray(distractors.owner[side], dtype=np.int64) + (0 if distractors.twins else first)
        else:
            new = np.arange(len(more)) + first + i * max(map(len, sides.values()))
        clusters[side] = np.concatenate([clusters[side], new])
        embeddings[side] = torch.cat([embeddings[side], more.to(embeddings[side])])
        sizes = text_sizes(distractors.captions) if side == "text" and distractors.captions is not None else {}
        for name, values in attributes[side].items():
            unknown = np.full(len(more), "" if values.dtype == object else -1, dtype=values.dtype)
            attributes[side][name] = np.concatenate([values, sizes.get(name, unknown)])
    mark = distractors.fingerprint()
    return EvalSet(distractors.name, embeddings, main.qrels, clusters, attributes, fingerprint=mark)


@dataclass
class EvalSource:
    """Image-text data that a model is evaluated on.

    Attributes:
        main: Queries and candidates.
        distractors: name -> data whose images and captions are candidates only.
        kinds: Built-in distractors, made out of the main data (mmclip.data.distractors).
    """

    main: FeatureSource
    distractors: dict[str, FeatureSource] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)

    @classmethod
    def open(
        cls,
        data: ImageTextData,
        distractors: Mapping[str, ImageTextData],
        model: ClipModel,
        options: EncodeOptions,
        cache_dir: Path | None = None,
        kinds: Sequence[str] = (),
    ) -> EvalSource:
        """Open the cached trunk outputs of all data."""
        how = model, options, cache_dir
        others = {name: FeatureSource.open(d, *how, name) for name, d in distractors.items()}
        return cls(FeatureSource.open(data, *how, "evaluation"), others, list(kinds))

    def embed(
        self, model: ClipModel, options: EncodeOptions, with_distractors: bool = True, seed: int = 0
    ) -> Embeddings:
        """Encode everything once; ``seed``: of the built-in distractors."""
        main, distractors = self.main.embed(model, options, "evaluation"), []
        if not with_distractors:
            return main
        for name, source in self.distractors.items():
            extra = source.embed(model, options, name)
            owner = {"image": list(range(len(extra.image))), "text": extra.owners().tolist()}
            mark = source.data.fingerprint()
            distractors.append(Distractors(name, extra.image, extra.text, extra.captions, mark, owner))
        distractors += [self._built_in(kind, main, model, options, seed) for kind in self.kinds]
        return dataclasses.replace(main, distractors=distractors)

    def _built_in(
        self, kind: str, main: Embeddings, model: ClipModel, options: EncodeOptions, seed: int
    ) -> Distractors:
        """One built-in kind: as many pictures as the data have, made out of them, or as many captions."""
        mark = f"seed {seed}"
        if KINDS[kind] == "text":
            texts = captions(kind, main.texts, len(main.texts), seed)
            vectors = encode_texts(text_encoder(model), texts, model.tokens, options, kind)
            return Distractors(kind, text=vectors, captions=texts, mark=mark)
        row_of = {key: row for row, key in enumerate(self.main.data.keys)}
        readable = self.main.data.subset([row_of[key] for key in main.image_ids])
        corrupted = Corrupted(kind, as_bytes(model.transform()), seed)
        image, bad = encode_images(image_encoder(model), readable, corrupted, options, label=kind)
        kept, twins = [row for row in range(len(image)) if row not in bad], kind in TWINS
        return Distractors(kind, image[kept], mark=mark, owner={"image": kept} if twins else {}, twins=twins)


def draw_bank(
    source: FeatureSource,
    sides: Iterable[str],
    size: int,
    model: ClipModel,
    options: EncodeOptions,
    seed: int = 0,
    evaluated: ImageTextData | None = None,
) -> QueryBank:
    """Embed ``size`` random items of each side, all where there are fewer, without images that cannot be read.

    Args:
        evaluated: Data whose captions are counted in the bank as its overlap.

    Raises:
        UserError: Where every caption of the bank is the evaluation's: it is the same set under another name.
    """
    own = {c for image in evaluated.captions for c in image} if evaluated is not None else set()
    data = source.data
    texts = {"image": data.captions, "text": [[c] for image in data.captions for c in image]}
    bank = QueryBank(f"{data.path} [{data.split}]" if data.split else data.path)
    for side in sides:
        rows = _drawn(len(texts[side]), size, seed)
        if evaluated is not None:  # an image is the evaluation's if all of its captions are
            _overlap(bank, data.path, side, [all(c in own for c in texts[side][row]) for row in rows], "captions")
        vectors, bad = source.vectors(side, model, options, "bank", rows.tolist())
        bank.vectors[side] = vectors[[i for i in range(len(rows)) if i not in bad]]
    return bank


def saved_bank(path: str, sides: Iterable[str], size: int, evaluated: Embeddings, seed: int = 0) -> QueryBank:
    """Draw a bank as :func:`draw_bank` from a file of embeddings; items are the same where their vectors are.

    Raises:
        UserError: For a file of another D, and where all drawn vectors are the evaluation's.
    """
    try:
        saved = load_embeddings(path)
    except UserError as error:
        raise UserError(f"--bank of saved embeddings: {error}") from None
    bank = QueryBank(path)
    for side in sides:
        vectors, known = getattr(saved, side), getattr(evaluated, side)
        if vectors.shape[1] != known.shape[1]:
            wrong = f"vectors of {vectors.shape[1]} dimensions; the evaluation has {known.shape[1]}"
            raise UserError(f"--bank {printable(path)}: {wrong}")
        bank.vectors[side] = vectors[torch.from_numpy(_drawn(len(vectors), size, seed))]
        own = {row.tobytes() for row in known.float().numpy()}
        same = [row.tobytes() in own for row in bank.vectors[side].float().numpy()]
        _overlap(bank, path, side, same, "vectors")
    return bank


def _drawn(n: int, size: int, seed: int) -> Array:
    """``size`` random rows of n, ascending."""
    return np.sort(np.random.default_rng(seed).choice(n, min(size, n), replace=False))


def _overlap(bank: QueryBank, path: str, side: str, same: Sequence[bool], what: str) -> None:
    """Count the items that are the evaluation's, too. Raises UserError where all are."""
    bank.overlap[side] = sum(same)
    if all(same):
        raise UserError(
            f"the bank {printable(path)} is the evaluation set, or a part of it: all of {len(same)} {what} are in it, "
            "too; take training data, or name it: --bank transductive"
        )
