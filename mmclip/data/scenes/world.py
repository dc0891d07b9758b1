"""Scenes, and descriptions with ``describes(scene)``: the ground truth of the built-in data.

The text of a caption is rendered from its `Description` (captions.py), so truth and words cannot disagree:

- a **full** caption gives size, colour and shape of everything and the layout: it describes exactly the scenes with
  that inventory and layout ("a small red circle left of a large blue star"). Chains run through the picture ("A left
  of B left of C"); in "A and B above C and D" each pair is named from left to right;
- a **partial** caption claims only what it says: its phrases hold for that many different objects, and whatever else
  the picture shows does not matter ("a red circle and a square", "a small shape above something blue");
- a **vague** caption gives an exact count ("two shapes") or one attribute of one object ("a picture with a circle").

No text belongs to two descriptions: a partial caption never gives everything together with a layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple")
SIZES = ("small", "large")
PLACES = ("left", "right", "top", "bottom", "middle")  # layouts of one object
LAYOUTS = {1: PLACES, 2: ("row", "column"), 3: ("row", "column"), 4: ("grid",)}  # by number of objects


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


def described(scenes: list[Scene], descriptions: Iterable[Description]) -> dict[Description, list[int]]:
    """Rows of the scenes that each description describes, ascending."""
    rows_of_scene: dict[Scene, list[int]] = {}
    for row, scene in enumerate(scenes):
        rows_of_scene.setdefault(scene, []).append(row)
    words = [frozenset(a for thing in scene.things for a in thing.attributes) for scene in scenes]
    result: dict[Description, list[int]] = {}
    for claim in dict.fromkeys(descriptions):
        if claim.layout is not None:
            result[claim] = rows_of_scene.get(Scene(claim.layout, claim.things), [])
        else:  # a scene without one of its words cannot fit
            needed = {a for thing in claim.things for a in thing.attributes if a}
            result[claim] = [row for row, s in enumerate(scenes) if needed <= words[row] and claim.describes(s)]
    return result
