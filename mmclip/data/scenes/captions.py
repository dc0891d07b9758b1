"""What each split of the built-in scenes holds, before any pixel is drawn.

Random scenes, random true claims about them, their English, and from these the images and captions of each split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypeVar

import numpy as np

from mmclip.data.scenes.drawing import NOTHING_KINDS
from mmclip.data.scenes.world import COLOURS, LAYOUTS, SHAPES, SIZES, Description, Scene, Thing, related

T = TypeVar("T")
CAPTIONS_PER_IMAGE = 5
COUNT_SHARES = (0.07, 0.33, 0.33, 0.27)  # of 1 to 4 objects in the informative variant
UNINFORMATIVE_OBJECTS = 2
_COUNTS = {1: "one shape", 2: "two shapes", 3: "three shapes", 4: "four shapes"}
_PREPOSITIONS = {"left": "on", "right": "on", "top": "at", "bottom": "at", "middle": "in"}
_INVERSE = {"left of": "right of", "above": "below"}
_SYNONYMS = {"small": "little", "large": "big"}
_SIZE_WORDS = (*_SYNONYMS, *_SYNONYMS.values())


def _pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]


def full_description(scene: Scene) -> Description:
    """The description that only this scene satisfies."""
    return Description(things=scene.things, layout=scene.layout)


def draw_scene(rng: np.random.Generator, n_objects: int) -> Scene:
    """A scene of ``n_objects`` (1 to 4) different things, every attribute and the layout uniform."""
    things: list[Thing] = []
    while len(things) < n_objects:
        thing = Thing(_pick(rng, SIZES), _pick(rng, COLOURS), _pick(rng, SHAPES))
        if thing not in things:
            things.append(thing)
    return Scene(_pick(rng, LAYOUTS[n_objects]), tuple(things))


def near_miss(rng: np.random.Generator, scene: Scene) -> Scene:
    """The scene with one attribute of one thing changed, or two things exchanged."""
    while True:
        things = list(scene.things)
        i = int(rng.integers(len(things)))
        kind = int(rng.integers(4 if len(things) > 1 else 3))
        size, colour, shape = things[i].attributes
        if kind == 3:
            j = (i + 1) % len(things)
            things[i], things[j] = things[j], things[i]
        else:
            changes = (Thing(_pick(rng, SIZES), colour, shape), Thing(size, _pick(rng, COLOURS), shape))
            things[i] = (*changes, Thing(size, colour, _pick(rng, SHAPES)))[kind]
        changed = Scene(scene.layout, tuple(things))
        if changed != scene and len(set(things)) == len(things):
            return changed


def draw_partial(rng: np.random.Generator, scene: Scene) -> Description:
    """A true claim that leaves something out: one to three things, some attributes, sometimes how two stand."""
    n = len(scene.things)
    k = int(rng.integers(1 if n == 1 else 2, min(n, 3) + 1))
    chosen = [int(i) for i in rng.permutation(n)[:k]]
    relation = None
    if k == 2 and rng.random() < 0.5:
        relation = "left of" if scene.layout == "row" or (scene.layout == "grid" and rng.random() < 0.5) else "above"
        if related(relation, scene.cells[chosen[1]], scene.cells[chosen[0]]):
            chosen.reverse()
        if not related(relation, scene.cells[chosen[0]], scene.cells[chosen[1]]):
            relation = None  # side by side in a grid says nothing about above, and the reverse
    while True:
        things = tuple(_blur(rng, scene.things[i]) for i in chosen)
        description = Description(things, relation=relation)
        complete = relation is not None and all(None not in thing.attributes for thing in things)
        if description.level == "partial" and not complete:
            return description


def _blur(rng: np.random.Generator, thing: Thing) -> Thing:
    """The thing with each attribute kept with some probability, at least one of them."""
    while True:
        keep = rng.random(3) < (0.4, 0.7, 0.8)
        if keep.any():
            return Thing(*(a if kept else None for a, kept in zip(thing.attributes, keep, strict=True)))


def draw_vague(rng: np.random.Generator, scene: Scene) -> Description:
    """A true claim that many scenes share: their number of things, or the colour or shape of one of them."""
    if rng.random() < 0.4:
        return Description(count=len(scene.things))
    thing = scene.things[int(rng.integers(len(scene.things)))]
    return Description((_pick(rng, (Thing(shape=thing.shape), Thing(colour=thing.colour))),))


def render(rng: np.random.Generator, description: Description) -> str:
    """One of the description's texts: lower-case English, no punctuation; the wording is drawn, the claim is not."""
    if description.layout is not None:
        return _pick(rng, full_texts(description))
    if description.count is not None:
        frame = _pick(rng, ("{}", "a picture of {}", "just {}", "{} and nothing else"))
        return frame.format(_COUNTS[description.count])
    if description.level == "vague":
        return _pick(rng, ("{}", "a picture with {}", "there is {}")).format(_phrase(description.things[0]))
    phrases = [_phrase(thing) for thing in description.things]
    if description.relation is None:
        return " and ".join(phrases[int(i)] for i in rng.permutation(len(phrases)))
    if rng.random() < 0.5:
        return f"{phrases[0]} {description.relation} {phrases[1]}"
    return f"{phrases[1]} {_INVERSE[description.relation]} {phrases[0]}"


def _phrase(thing: Thing, article: str = "a", synonyms: bool = False) -> str:
    """The noun phrase of a pattern: "a small red circle", "an orange shape"."""
    size = _SYNONYMS.get(thing.size or "") if synonyms else thing.size
    words = [w for w in (size, thing.colour, thing.shape or "shape") if w]
    return " ".join([article + "n" * (article == "a" and words[0] == "orange"), *words])


def full_texts(description: Description, even_length: bool = False) -> list[str]:
    """Every text of a full description. ``even_length``: all of them, and of all scenes alike, of as many words.

    >>> full_texts(Description((Thing("small", "red", "ring"),), layout="left"))[:2]
    ['a small red ring on the left', 'on the left a small red ring']
    """
    texts = []
    articles = ("a", "one") if even_length else ("a",)
    above, below = ("directly above", "directly below") if even_length else ("above", "below")
    for article, synonyms in product(articles, (False, True)):
        names = [_phrase(thing, article, synonyms) for thing in description.things]
        if description.layout == "row":
            texts += [" left of ".join(names), " right of ".join(reversed(names))]
        elif description.layout == "column":
            texts += [f" {above} ".join(names), f" {below} ".join(reversed(names))]
        elif description.layout == "grid":
            top, bottom = " and ".join(names[:2]), " and ".join(names[2:])
            texts += [f"{top} {above} {bottom}", f"{bottom} {below} {top}"]
        else:
            place = f"{_PREPOSITIONS[description.layout or '']} the {description.layout}"
            texts += [f"{names[0]} {place}", f"{place} {names[0]}"]
    return texts


_BOILERPLATE = (
    ("stock photo", "click to enlarge", "image not available", "download for free", "add to basket", "photo credit"),
    ("all rights reserved", "high resolution", "no description", "sponsored content", "read more", "view gallery"),
    ("page", "item", "file", "number", "part", "version"),
)


def draw_boilerplate(rng: np.random.Generator) -> str:
    """Words that stand beside pictures and say nothing of them: "stock photo read more page 7"."""
    first, second, third = (_pick(rng, options) for options in _BOILERPLATE)
    return " ".join((first, second, third, str(rng.integers(1, 100)))[: int(rng.integers(1, 3)) * 2])


def draw_shuffled(rng: np.random.Generator, texts: Sequence[str]) -> str:
    """One of the texts in an order that no caption has. ``texts``: full captions, some of several things."""
    while True:
        words = _pick(rng, texts).split()
        shuffled = [words[int(i)] for i in rng.permutation(len(words))]
        # In every caption an article is followed by an adjective or a noun and a size by more of its phrase.
        articles = sum(w in ("a", "an") for w in words)
        well_placed = sum(a in ("a", "an") and b in _SIZE_WORDS for a, b in pairwise(shuffled))
        if articles > 1 and well_placed < articles - 1:
            return " ".join(shuffled)


@dataclass(frozen=True)
class Caption:
    """A text with its level, and the claim that it renders."""

    text: str
    level: str
    kind: str | None = None  # of a distractor
    description: Description | None = None  # None: not a claim about scenes


@dataclass(frozen=True)
class Sample:
    """An image before its pixels. ``kind`` is a distractor's; without a scene it names what is drawn."""

    scene: Scene | None
    captions: tuple[Caption, ...]
    kind: str | None = None


Plan = dict[str, list[Sample]]  # by split


def plan_informative(rng: np.random.Generator, n_train: int, n_test: int, n_distractors: int) -> Plan:
    """One to four objects; captions from full to vague; distractors that show or say nothing true."""

    def draw() -> Scene:
        return draw_scene(rng, 1 + int(rng.choice(len(COUNT_SHARES), p=COUNT_SHARES)))

    taken: set[Scene] = set()
    tested = _fresh(draw, n_test, taken)
    test = [_informative_sample(rng, scene) for scene in tested]
    real_texts = [c.text for s in test for c in s.captions if c.level == "full"]
    distractors = []
    for i in range(n_distractors):
        kind = NOTHING_KINDS[i % len(NOTHING_KINDS)]
        missed = _fresh(lambda: near_miss(rng, tested[int(rng.integers(n_test))]), 2, taken)
        claims = [full_description(scene) for scene in missed]
        captions = [Caption(render(rng, claim), "distractor", "near-miss", claim) for claim in claims]
        captions += [Caption(draw_boilerplate(rng), "distractor", "boilerplate")]
        captions += [Caption(draw_shuffled(rng, real_texts), "distractor", "shuffled") for _ in range(2)]
        distractors.append(Sample(None, tuple(captions), kind))
    train = [_informative_sample(rng, s) for s in _fresh(draw, n_train, taken, repeats=True)]
    return {"train": train, "test": test, "distractors": distractors}


def _informative_sample(rng: np.random.Generator, scene: Scene) -> Sample:
    """Two full captions, two partial ones, one vague: five different texts."""
    captions: list[Caption] = []
    while len(captions) < CAPTIONS_PER_IMAGE:
        level = len(captions) // 2
        description = (draw_partial, draw_vague)[level - 1](rng, scene) if level else full_description(scene)
        text = render(rng, description)
        if all(text != caption.text for caption in captions):
            captions.append(Caption(text, description.level, description=description))
    return Sample(scene, tuple(captions))


def plan_uninformative(rng: np.random.Generator, n_train: int, n_test: int, n_distractors: int) -> Plan:
    """Two objects, full captions of one length, test scenes that differ; distractors drawn as the test scenes are."""

    def draw() -> Scene:
        return draw_scene(rng, UNINFORMATIVE_OBJECTS)

    def captions(scene: Scene, level: str, kind: str | None = None) -> tuple[Caption, ...]:
        description = full_description(scene)
        texts = full_texts(description, even_length=True)
        chosen = rng.permutation(len(texts))[:CAPTIONS_PER_IMAGE]
        return tuple(Caption(texts[int(i)], level, kind, description) for i in chosen)

    taken: set[Scene] = set()
    test = [Sample(s, captions(s, "full")) for s in _fresh(draw, n_test, taken)]
    pictured = _fresh(draw, n_distractors, taken)
    absent = _fresh(draw, n_distractors, taken)
    distractors = [
        Sample(shown, captions(other, "distractor", "absent"), "scene")
        for shown, other in zip(pictured, absent, strict=True)
    ]
    train = [Sample(s, captions(s, "full")) for s in _fresh(draw, n_train, taken, repeats=True)]
    return {"train": train, "test": test, "distractors": distractors}


def _fresh(draw: Callable[[], Scene], n: int, taken: set[Scene], repeats: bool = False) -> list[Scene]:
    """``n`` scenes that are not taken; each is taken from then on, unless ``repeats`` lets them return."""
    scenes: list[Scene] = []
    while len(scenes) < n:
        scene = draw()
        if scene not in taken:
            scenes.append(scene)
            if not repeats:
                taken.add(scene)
    return scenes
