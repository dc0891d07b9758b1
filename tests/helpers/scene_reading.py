"""A second, slow reading of the built-in scenes' captions from their words alone, for the tests to compare with."""

from __future__ import annotations

from itertools import permutations

from mmclip.data.scenes.world import COLOURS, SHAPES

CANONICAL = {"little": "small", "big": "large"}
PLACES = {"on the left": "left", "on the right": "right", "at the top": "top", "at the bottom": "bottom"}
PLACES["in the middle"] = "middle"
NUMBERS = {"one shape": 1, "two shapes": 2, "three shapes": 3, "four shapes": 4}


def phrase(text: str) -> dict[str, str]:
    """ "a small red circle" -> {"size": "small", "colour": "red", "shape": "circle"}"""
    article, *words = text.split()
    assert article in ("a", "an", "one"), text
    assert words and len(words) <= 3, text
    found = {}
    for word in (CANONICAL.get(w, w) for w in words):
        kind = "shape" if word in SHAPES else "colour" if word in COLOURS else "size"
        assert word in ("small", "large", "shape") or kind != "size", text
        if word != "shape":
            found[kind] = word
    return found


def is_true(text: str, scene: dict) -> bool:
    """Whether the caption is true of the scene of KEY.json: the rules of scene_truth.py, applied to the words."""
    objects, layout = scene["objects"], scene.get("layout")
    text = text.replace("directly ", "")
    for number, n in NUMBERS.items():
        if text in (number, f"a picture of {number}", f"just {number}", f"{number} and nothing else"):
            return len(objects) == n
    for words, place in PLACES.items():
        if text.startswith(words) or text.endswith(words):
            return layout == place and [phrase(text.replace(words, "").strip())] == objects
    text = text.removeprefix("a picture with ").removeprefix("there is ")
    for word, told, turned in (
        ("left of", "row", False),
        ("right of", "row", True),
        ("above", "column", False),
        ("below", "column", True),
    ):
        parts = text.split(f" {word} ")
        if len(parts) == 1:
            continue
        if " and " in text:  # a grid
            assert told == "column"
            rows = [[phrase(p) for p in part.split(" and ")] for part in (parts[::-1] if turned else parts)]
            return layout == "grid" and rows[0] + rows[1] == objects
        wanted = [phrase(p) for p in (parts[::-1] if turned else parts)]
        if all(len(w) == 3 for w in wanted):
            return layout == told and wanted == objects
        axis = 0 if told == "row" else 1
        return any(
            fits(wanted, [objects[i], objects[j]]) and cell(layout, i)[axis] < cell(layout, j)[axis]
            for i, j in permutations(range(len(objects)), 2)
        )
    wanted = [phrase(p) for p in text.split(" and ")]
    return any(fits(wanted, chosen) for chosen in permutations(objects, len(wanted)))


def fits(wanted: list[dict[str, str]], objects: list | tuple) -> bool:
    return all(w.items() <= o.items() for w, o in zip(wanted, objects, strict=True))


def cell(layout: str, i: int) -> tuple[int, int]:
    return {"row": (i, 0), "column": (0, i), "grid": (i % 2, i // 2)}[layout]
