"""Which scenes and captions each split of the built-in scenes holds, before any pixel is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mmclip.data.scenes.captions import (
    draw_boilerplate,
    draw_partial,
    draw_scene,
    draw_shuffled,
    draw_vague,
    full_description,
    full_texts,
    near_miss,
    render,
)
from mmclip.data.scenes.drawing import NOTHING_KINDS
from mmclip.data.scenes.world import Description, Scene

CAPTIONS_PER_IMAGE = 5
COUNT_SHARES = (0.07, 0.33, 0.33, 0.27)  # of 1 to 4 objects in the informative variant
UNINFORMATIVE_OBJECTS = 2


@dataclass(frozen=True)
class Caption:
    text: str
    level: str
    kind: str | None = None  # of a distractor
    description: Description | None = None  # None: not a claim about scenes


@dataclass(frozen=True)
class Sample:
    """What one image is, before its pixels. ``kind`` is a distractor's; without a scene it names what is drawn."""

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
        captions = [_distractor(render(rng, full_description(s)), "near-miss", s) for s in missed]
        captions += [_distractor(draw_boilerplate(rng), "boilerplate")]
        captions += [_distractor(draw_shuffled(rng, real_texts), "shuffled") for _ in range(2)]
        distractors.append(Sample(None, tuple(captions), kind))
    train = [_informative_sample(rng, s) for s in _fresh(draw, n_train, taken, repeats=True)]
    return {"train": train, "test": test, "distractors": distractors}


def _informative_sample(rng: np.random.Generator, scene: Scene) -> Sample:
    """Two full captions, two partial ones, one vague: five different texts."""
    captions: list[Caption] = []
    while len(captions) < CAPTIONS_PER_IMAGE:
        draw = (_draw_full, draw_partial, draw_vague)[len(captions) // 2]
        description = draw(rng, scene)
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
        Sample(shown, captions(told, "distractor", "absent"), "scene")
        for shown, told in zip(pictured, absent, strict=True)
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


def _draw_full(rng: np.random.Generator, scene: Scene) -> Description:
    return full_description(scene)


def _distractor(text: str, kind: str, scene: Scene | None = None) -> Caption:
    return Caption(text, "distractor", kind, full_description(scene) if scene else None)
