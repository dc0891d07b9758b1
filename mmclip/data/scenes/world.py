"""What the built-in scenes mean: a scene, and a description with ``describes(scene)``.

A caption is first a `Description`; its text is rendered from it (scene_captions.py), so that truth cannot drift from
the words. How a text is to be read:

- a **full** caption gives size, colour and shape of everything and the layout: it describes exactly the scenes with
  that inventory and layout ("a small red circle left of a large blue star"). Chains run through the picture ("A left
  of B left of C"); in "A and B above C and D" each pair is named from left to right;
- a **partial** caption claims only what it says: its phrases hold for that many different objects, and whatever else
  the picture shows does not matter ("a red circle and a square", "a small shape above something blue");
- a **vague** caption gives an exact count ("two shapes") or one attribute of one object ("a picture with a circle").

No text belongs to two descriptions: a partial caption never gives everything together with a layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations

import numpy as np

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple")
SIZES = ("small", "large")
PLACES = ("left", "right", "top", "bottom", "middle")  # layouts of one object
LAYOUTS = {1: PLACES, 2: ("row", "column"), 3: ("row", "column"), 4: ("grid",)}  # by number of objects
MAX_OBJECTS = 4

RELATIONS = ("left of", "above")  # their inverses are words only


@dataclass(frozen=True)
class Thing:
    """One object, or a pattern for objects where an attribute is None."""

    size: str | None = None
    colour: str | None = None
    shape: str | None = None

    def matches(self, thing: Thing) -> bool:
        """Whether every attribute this pattern gives is the thing's."""
        return all(mine in (None, its) for mine, its in zip(self.attributes, thing.attributes, strict=True))

    @property
    def attributes(self) -> tuple[str | None, str | None, str | None]:
        return self.size, self.colour, self.shape


@dataclass(frozen=True)
class Scene:
    """1 to 4 different things in reading order: a row left to right, a column top to bottom, a grid row by row."""

    layout: str
    things: tuple[Thing, ...]

    @property
    def cells(self) -> tuple[tuple[int, int], ...]:
        """(column, row) of each thing; relations compare these. One thing sits at (0, 0) whatever its place.

        >>> Scene("column", (Thing("small", "red", "ring"), Thing("large", "red", "ring"))).cells
        ((0, 0), (0, 1))
        """
        if self.layout == "grid":
            return tuple((i % 2, i // 2) for i in range(len(self.things)))
        return tuple((0, i) if self.layout == "column" else (i, 0) for i in range(len(self.things)))

    def to_json(self) -> dict[str, object]:
        """{"layout": "row", "objects": [{"size": "small", "colour": "red", "shape": "ring"}, ...]}"""
        things = [{"size": t.size, "colour": t.colour, "shape": t.shape} for t in self.things]
        return {"layout": self.layout, "objects": things}


@dataclass(frozen=True)
class Description:
    """A claim about a scene: exactly one of ``layout`` (full), ``count`` (vague) or neither (things, maybe related).

    ``relation`` ("left of" or "above") holds between the first and the second of two things.
    """

    things: tuple[Thing, ...] = ()
    layout: str | None = None
    relation: str | None = None
    count: int | None = None

    @property
    def level(self) -> str:
        """ "full", "partial" or "vague"."""
        if self.layout is not None:
            return "full"
        given = sum(a is not None for thing in self.things for a in thing.attributes)
        return "vague" if given <= 1 else "partial"

    def describes(self, scene: Scene) -> bool:
        """Whether the claim is true of the scene.

        >>> scene = Scene("row", (Thing("small", "red", "circle"), Thing("large", "blue", "star")))
        >>> Description((Thing(shape="circle"), Thing(colour="blue")), relation="left of").describes(scene)
        True
        >>> Description(count=3).describes(scene)
        False
        """
        if self.layout is not None:
            return (self.layout, self.things) == (scene.layout, scene.things)
        if self.count is not None:
            return self.count == len(scene.things)
        slots = range(len(scene.things))
        return any(
            all(want.matches(scene.things[i]) for want, i in zip(self.things, chosen, strict=True))
            and (self.relation is None or related(self.relation, scene.cells[chosen[0]], scene.cells[chosen[1]]))
            for chosen in permutations(slots, len(self.things))
        )


def related(relation: str, first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether the first (column, row) cell is left of, or above, the second."""
    axis = 0 if relation == "left of" else 1
    return first[axis] < second[axis]


@dataclass
class SceneTable:
    """Many scenes as arrays: which of them does a description describe, all at once (`Description.describes`)."""

    scenes: list[Scene]
    _known: dict[Description, np.ndarray] = field(default_factory=dict, repr=False)

    @cached_property
    def _codes(self) -> np.ndarray:
        """[N, MAX_OBJECTS, 3] object of attribute words; None where there is no object."""
        codes = np.full((len(self.scenes), MAX_OBJECTS, 3), None, dtype=object)
        for n, scene in enumerate(self.scenes):
            codes[n, : len(scene.things)] = [thing.attributes for thing in scene.things]
        return codes

    @cached_property
    def _has(self) -> dict[str, np.ndarray]:
        """word -> [N, MAX_OBJECTS] bool: the object in that slot has the attribute."""
        kinds = (SIZES, COLOURS, SHAPES)
        return {word: self._codes[:, :, kind] == word for kind, words in enumerate(kinds) for word in words}

    @cached_property
    def _present(self) -> np.ndarray:
        """[N, MAX_OBJECTS] bool: the slot holds an object."""
        return np.arange(MAX_OBJECTS) < np.array([[len(scene.things)] for scene in self.scenes]).reshape(-1, 1)

    @cached_property
    def _relations(self) -> dict[str, np.ndarray]:
        """relation -> [N, MAX_OBJECTS, MAX_OBJECTS] bool: slot i is left of (above) slot j."""
        tables = {relation: np.zeros((len(self.scenes), MAX_OBJECTS, MAX_OBJECTS), bool) for relation in RELATIONS}
        for n, scene in enumerate(self.scenes):
            for i, j in permutations(range(len(scene.things)), 2):
                for relation, table in tables.items():
                    table[n, i, j] = related(relation, scene.cells[i], scene.cells[j])
        return tables

    @cached_property
    def _by_scene(self) -> dict[Scene, list[int]]:
        index: dict[Scene, list[int]] = {}
        for n, scene in enumerate(self.scenes):
            index.setdefault(scene, []).append(n)
        return index

    def described(self, description: Description) -> np.ndarray:
        """Indices of the scenes that the description describes, ascending: [n] int64."""
        if description not in self._known:
            self._known[description] = self._find(description)
        return self._known[description]

    def _find(self, description: Description) -> np.ndarray:
        if description.layout is not None:
            return np.array(self._by_scene.get(Scene(description.layout, description.things), []), dtype=np.int64)
        if description.count is not None:
            return np.flatnonzero(self._present.sum(axis=1) == description.count)
        fits = []
        for thing in description.things:
            fit = self._present
            for word in thing.attributes:
                fit = fit if word is None else fit & self._has[word]
            fits.append(fit)
        true = np.zeros(len(self.scenes), dtype=bool)
        for chosen in permutations(range(MAX_OBJECTS), len(fits)):
            holds = np.logical_and.reduce([fit[:, i] for fit, i in zip(fits, chosen, strict=True)])
            if description.relation is not None:
                holds = holds & self._relations[description.relation][:, chosen[0], chosen[1]]
            true |= holds
        return np.flatnonzero(true)
