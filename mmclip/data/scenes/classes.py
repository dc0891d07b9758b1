"""Pictures of one object of the built-in scenes by colour and shape: what a model of the scenes can still classify.

    ROOT/scenes-classes/          clip-benchmark's layout for classification
      dataset_type.txt, classnames.txt, zeroshot_classification_templates.txt
      scenes.json                 the mark of a complete build
      test/nshards.txt, test/0.tar        KEY.json (the scene), KEY.png, KEY.cls (the class)

Every class has every size in every place as often. Scenes of one object occur in the training scenes, too; these
pictures of them do not: they are drawn with random numbers that no split of the scenes is drawn with.
"""

from __future__ import annotations

import json
import tarfile
from itertools import product
from pathlib import Path

import numpy as np

from mmclip.data.scenes.build import GENERATOR_VERSION, VARIANTS, add_file, build_folder, drawing
from mmclip.data.scenes.drawing import draw_picture, png_bytes
from mmclip.data.scenes.world import COLOURS, PLACES, SHAPES, SIZES, Scene, Thing
from mmclip.errors import UserError

CLASSES = "scenes-classes"
CLASSES_VERSION = 1  # raised whenever the same seed would give other bytes
TEMPLATES = ("{c}", "a picture with {c}", "there is {c}")  # as captions say it
PICTURES = 2  # of a class, size and place: 20 a class


def class_names() -> list[str]:
    """The 42 classes, with their article, as captions have them.

    >>> class_names()[0], class_names()[6]
    ('a red circle', 'an orange circle')
    """
    return [f"a{'n' * (colour == 'orange')} {colour} {shape}" for colour, shape in product(COLOURS, SHAPES)]


def build_scene_classes(root: Path, seed: int = 0, pictures: int = PICTURES) -> Path:
    """Makes sure that the classes are on disk and returns their folder; built, kept and replaced as the scenes are.

    pictures: of a class, size and place, ten times as many of a class. Errors: UserError, as of ``build_scenes``.
    """
    if seed < 0 or not 1 <= pictures <= 1000:
        raise UserError(f"seed {seed}, {pictures} pictures; valid: 0 or more, and 1 to 1000")
    marker = {"generator": GENERATOR_VERSION, "classes": CLASSES_VERSION, "seed": seed, "pictures": pictures}
    return build_folder(Path(root) / CLASSES, marker, lambda folder: _write(folder, seed, pictures))


def _write(folder: Path, seed: int, pictures: int) -> None:
    names = class_names()
    for name, lines in (
        ("dataset_type.txt", ["classification"]),
        ("classnames.txt", names),
        ("zeroshot_classification_templates.txt", list(TEMPLATES)),
    ):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "test").mkdir()
    (folder / "test" / "nshards.txt").write_text("1\n", encoding="utf-8")
    total = len(names) * len(SIZES) * len(PLACES) * pictures
    shard = folder / "test" / "0.tar"
    with drawing(CLASSES, total) as advance, tarfile.open(shard, "w", format=tarfile.USTAR_FORMAT) as tar:
        for label, (colour, shape) in enumerate(product(COLOURS, SHAPES)):
            for i, (size, place, _) in enumerate(product(SIZES, PLACES, range(pictures))):
                scene = Scene(place, (Thing(size, colour, shape),))
                picture = draw_picture(np.random.default_rng([seed, len(VARIANTS), label, i]), scene)
                key = f"{colour}-{shape}-{i:03d}"
                add_file(tar, f"{key}.json", json.dumps(scene.to_json()).encode())
                add_file(tar, f"{key}.png", png_bytes(picture))
                add_file(tar, f"{key}.cls", str(label).encode())
                advance()
