"""The built-in classes: one right class a picture, in clip-benchmark's layout, the same bytes every time."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmclip.data.scenes.build import (
    CLASSES,
    TEMPLATES,
    VARIANTS,
    SceneSizes,
    build_scene_classes,
    build_scenes,
    class_names,
)
from mmclip.data.scenes.captions import render
from mmclip.data.scenes.world import COLOURS, PLACES, SHAPES, SIZES, Description, Thing
from mmclip.errors import UserError
from tests.data.test_scenes import all_files, read


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_scene_classes(tmp_path_factory.mktemp("data"), pictures=1)


def test_the_layout_is_clip_benchmarks_and_every_picture_has_one_right_class(built: Path) -> None:
    assert built.name == CLASSES
    names = (built / "classnames.txt").read_text().splitlines()
    assert names == class_names() and len(set(names)) == 42
    assert (built / "zeroshot_classification_templates.txt").read_text().splitlines() == list(TEMPLATES)
    assert (built / "dataset_type.txt").read_text() == "classification\n"
    samples = read(built / "test")
    assert len(samples) == 42 * 10
    seen = set()
    for sample in samples.values():
        scene = json.loads(sample["json"])
        (thing,) = scene["objects"]
        words = names[int(sample["cls"])].split()
        assert words[1:] == [thing["colour"], thing["shape"]]
        seen.add((words[1], words[2], thing["size"], scene["layout"]))
        assert Image.open(io.BytesIO(sample["png"])).size == (48, 48)
    assert len(seen) == len(COLOURS) * len(SHAPES) * len(SIZES) * len(PLACES), "every size in every place"


def test_prompts_are_what_captions_say() -> None:
    """Out of their own vocabulary the scenes' models would be measured on what they never read."""
    rng = np.random.default_rng(0)
    said = {render(rng, Description((Thing(None, "orange", "star"),))) for _ in range(60)}
    assert "an orange star" in class_names() and said & {t.replace("{c}", "an orange star") for t in TEMPLATES}


def test_no_picture_is_one_of_the_scenes(built: Path, tiny_data: Path) -> None:
    mine = {sample["png"] for sample in read(built / "test").values()}
    assert len(mine) == 420
    for split in ("train", "test", "distractors"):
        assert not mine & {sample["png"] for sample in read(tiny_data / split).values()}


def test_the_same_seed_gives_the_same_bytes_and_a_finished_build_is_kept(built: Path, tmp_path: Path) -> None:
    folder = build_scene_classes(tmp_path, pictures=1)
    assert all_files(folder) == all_files(built)
    inode = folder.stat().st_ino
    assert build_scene_classes(tmp_path, pictures=1).stat().st_ino == inode
    assert all_files(build_scene_classes(tmp_path, seed=1, pictures=1)) != all_files(built)


@pytest.mark.parametrize("bad", [{"seed": -1}, {"pictures": 0}])
def test_bad_arguments_are_named(tmp_path: Path, bad: dict[str, int]) -> None:
    with pytest.raises(UserError, match="valid: 0 or more"):
        build_scene_classes(tmp_path, **bad)


@pytest.mark.parametrize("name", [*VARIANTS, CLASSES])
def test_drawing_is_told_and_only_drawing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    def build(folder: str) -> str:
        if name == CLASSES:
            build_scene_classes(tmp_path / folder, pictures=1)
        else:
            build_scenes(tmp_path / folder, name, sizes=SceneSizes(train=30, test=20, distractors=5))
        return capsys.readouterr().err

    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    n = 420 if name == CLASSES else 55
    assert build("a") == f"drawing builtin:{name}: {n} pictures, kept for later runs\n"
    assert build("a") == "", "drawn already"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert f"{n}/{n}" in build("b") and build("b") == ""
