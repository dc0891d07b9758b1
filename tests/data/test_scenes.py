"""The built-in scenes and classes: same bytes for a seed, truth that follows from the words, variants that hold."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmclip.data.scenes import build as scenes
from mmclip.data.scenes import drawing as scene_pictures
from mmclip.data.scenes.build import (
    CLASSES,
    SPLITS,
    TEMPLATES,
    VARIANTS,
    SceneSizes,
    build_scene_classes,
    build_scenes,
    class_names,
)
from mmclip.data.scenes.captions import (
    draw_partial,
    draw_scene,
    draw_vague,
    full_description,
    full_texts,
    near_miss,
    render,
)
from mmclip.data.scenes.world import COLOURS, PLACES, SHAPES, SIZES, Description, Scene, Thing, described
from mmclip.errors import UserError
from tests.helpers.scene_reading import is_true

SMALL = SceneSizes(train=150, test=60, distractors=30)
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("scenes")
    scenes = {variant: build_scenes(root, variant, sizes=SMALL) for variant in VARIANTS}
    return scenes | {CLASSES: build_scene_classes(root, pictures=1)}


def build(root: Path, name: str, seed: int = 0) -> Path:
    if name == CLASSES:
        return build_scene_classes(root, seed=seed, pictures=1)
    return build_scenes(root, name, seed=seed, sizes=SMALL)


def read(split: Path) -> dict[str, dict[str, bytes]]:
    """key -> extension -> content, in tar order."""
    samples: dict[str, dict[str, bytes]] = {}
    for shard in range(int((split / "nshards.txt").read_text())):
        with tarfile.open(split / f"{shard}.tar") as tar:
            for member in tar:
                key, extension = member.name.split(".")
                content = tar.extractfile(member)
                assert content is not None
                samples.setdefault(key, {})[extension] = content.read()
    return samples


def captions(sample: dict[str, bytes]) -> list[str]:
    return sample["txt"].decode().splitlines()


def truth(split: Path) -> list[dict]:
    return [json.loads(line) for line in (split / "truth.jsonl").read_text().splitlines()]


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- descriptions ---------------------------------------------------------------------------------------------------


def drawn(seed: int, n: int) -> tuple[np.random.Generator, list[Scene]]:
    rng = np.random.default_rng(seed)
    return rng, [draw_scene(rng, 1 + i % 4) for i in range(n)]


def claims(rng: np.random.Generator, scene: Scene) -> Iterator[Description]:
    for draw in (draw_partial, draw_vague):
        yield draw(rng, scene)
    yield full_description(scene)


@given(seeds)
def test_claims_are_true_and_their_words_say_the_same(seed: int) -> None:
    rng, many = drawn(seed, 12)
    for scene in many:
        for claim, level in zip(claims(rng, scene), ("partial", "vague", "full"), strict=True):
            assert claim.level == level
            assert claim.describes(scene)
            one_by_one = [n for n, other in enumerate(many) if claim.describes(other)]
            assert described(many, [claim])[claim] == one_by_one
            text = render(rng, claim)
            assert [n for n, other in enumerate(many) if is_true(text, other.to_json())] == one_by_one, text


@given(seeds)
def test_a_near_miss_is_another_scene_of_as_many_different_things(seed: int) -> None:
    rng, many = drawn(seed, 4)
    for scene in many:
        other = near_miss(rng, scene)
        assert other != scene and len(set(other.things)) == len(scene.things) and other.layout == scene.layout


@given(seeds, st.integers(1, 4))
def test_a_full_caption_names_its_scene_and_no_other(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    scene, other = draw_scene(rng, n), draw_scene(rng, n)
    texts, others = full_texts(full_description(scene)), full_texts(full_description(other))
    assert len(set(texts)) == len(texts) == 4
    assert scene == other or not set(texts) & set(others)


def test_extra_objects_matter_to_full_captions_only() -> None:
    pair = draw_scene(np.random.default_rng(1), 2)
    more = Scene("row", (*pair.things, *(t for t in draw_scene(np.random.default_rng(2), 2).things))[:3])
    assert not full_description(pair).describes(more)
    assert Description(pair.things).describes(more)


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_layout_is_clip_benchmarks(built: dict[str, Path], variant: str) -> None:
    folder = built[variant]
    assert (folder / "dataset_type.txt").read_text().strip() == "retrieval"
    for split in SPLITS:
        samples = read(folder / split)
        assert len(samples) == getattr(SMALL, split)
        assert len(list((folder / split).glob("*.tar"))) == int((folder / split / "nshards.txt").read_text())
        assert [line["key"] for line in truth(folder / split)] == list(samples)
        for line, sample in zip(truth(folder / split), samples.values(), strict=True):
            assert set(sample) == {"json", "png", "txt"}
            assert len(captions(sample)) == len(line["captions"]) == 5
            assert all(text.strip() == text != "" and text.isascii() for text in captions(sample))
            assert line["n_objects"] == len(json.loads(sample["json"])["objects"])
            with Image.open(io.BytesIO(sample["png"])) as picture:
                assert picture.size == (scene_pictures.IMAGE_SIZE,) * 2 and picture.mode == "RGB"


def test_large_splits_have_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "_SHARD", 25)
    folder = build_scenes(tmp_path, sizes=SMALL) / "test"
    assert sorted(p.name for p in folder.glob("*.tar")) == ["0.tar", "1.tar", "2.tar"]
    assert (folder / "nshards.txt").read_text().strip() == "3"
    assert list(read(folder)) == [line["key"] for line in truth(folder)]


@pytest.mark.parametrize("name", [*VARIANTS, CLASSES])
def test_a_seed_gives_the_same_bytes_and_a_finished_build_is_kept(
    built: dict[str, Path],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    folder = build(tmp_path, name)
    n = 420 if name == CLASSES else 240
    assert capsys.readouterr().err == f"drawing builtin:{name}: {n} pictures, kept for later runs\n"
    first, inode = all_files(folder), folder.stat().st_ino
    assert first == all_files(built[name])
    assert build(tmp_path, name).stat().st_ino == inode and capsys.readouterr().err == "", "drawn already"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    other = all_files(build(tmp_path, name, seed=1))
    assert f"{n}/{n}" in capsys.readouterr().err
    assert other["test/0.tar"] != first["test/0.tar"], "another seed replaces it"
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == [name]


@pytest.mark.parametrize("variant", VARIANTS)
def test_relevance_is_what_the_words_and_the_stored_scenes_say(built: dict[str, Path], variant: str) -> None:
    samples = read(built[variant] / "test")
    stored = {key: json.loads(sample["json"]) for key, sample in samples.items()}
    for line in truth(built[variant] / "test"):
        for text, caption in zip(captions(samples[line["key"]]), line["captions"], strict=True):
            assert caption["relevant"] == [key for key, scene in stored.items() if is_true(text, scene)], text
            assert line["key"] in caption["relevant"]
    assert all(set(c) == {"level"} for line in truth(built[variant] / "train") for c in line["captions"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_test_scene_and_no_distractor_occurs_elsewhere_and_distractors_match_nothing(
    built: dict[str, Path], variant: str
) -> None:
    trained, tested, distractors = (read(built[variant] / split) for split in ("train", "test", "distractors"))
    scenes_of = {sample["json"] for sample in trained.values()}
    assert not scenes_of & {sample["json"] for other in (tested, distractors) for sample in other.values()}
    words = {text for sample in trained.values() for text in captions(sample)}
    assert not words & {text for sample in distractors.values() for text in captions(sample)}
    pool = [json.loads(sample["json"]) for sample in (*tested.values(), *distractors.values())]
    real = [text for sample in tested.values() for text in captions(sample)]
    assert not any(is_true(text, scene) for text in real for scene in pool[len(tested) :])
    for line in truth(built[variant] / "distractors"):
        for text, caption in zip(captions(distractors[line["key"]]), line["captions"], strict=True):
            assert caption["level"] == "distractor" and caption["relevant"] == []
            if caption["kind"] in ("near-miss", "absent"):
                assert not any(is_true(text, scene) for scene in pool), text
            else:
                with pytest.raises(AssertionError):  # the words make no claim
                    is_true(text, pool[0])


def test_the_informative_variant_has_every_level_and_kind(built: dict[str, Path]) -> None:
    lines = truth(built["scenes"] / "test")
    assert {line["n_objects"] for line in lines} == {1, 2, 3, 4}
    assert all([c["level"] for c in line["captions"]] == ["full"] * 2 + ["partial"] * 2 + ["vague"] for line in lines)
    spread = Counter[str]()
    for line in lines:
        for caption in line["captions"]:
            spread[caption["level"]] += len(caption["relevant"])
    assert spread["full"] / 2 < spread["partial"] / 2 < spread["vague"]
    lines = truth(built["scenes"] / "distractors")
    assert {line["kind"] for line in lines} == set(scene_pictures.NOTHING_KINDS)
    assert {c["kind"] for line in lines for c in line["captions"]} == {"near-miss", "boilerplate", "shuffled"}


def test_nothing_tells_relevance_in_the_uninformative_variant(built: dict[str, Path]) -> None:
    folder = built["scenes-uninformative"]
    texts = [text for split in SPLITS for sample in read(folder / split).values() for text in captions(sample)]
    assert len({len(text.split()) for text in texts}) == 1
    assert {line["n_objects"] for split in SPLITS for line in truth(folder / split)} == {2}
    lines = truth(folder / "test")
    assert all(c == {"level": "full", "relevant": [line["key"]]} for line in lines for c in line["captions"])
    kinds = {(line["kind"], c["kind"]) for line in truth(folder / "distractors") for c in line["captions"]}
    assert kinds == {("scene", "absent")}


# --- classes --------------------------------------------------------------------------------------------------------


def test_the_layout_is_clip_benchmarks_and_every_picture_has_one_right_class(built: dict[str, Path]) -> None:
    names = (built[CLASSES] / "classnames.txt").read_text().splitlines()
    assert names == class_names() and len(set(names)) == 42
    assert (built[CLASSES] / "zeroshot_classification_templates.txt").read_text().splitlines() == list(TEMPLATES)
    assert (built[CLASSES] / "dataset_type.txt").read_text() == "classification\n"
    samples = read(built[CLASSES] / "test")
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


def test_no_picture_is_one_of_the_scenes(built: dict[str, Path]) -> None:
    mine = {sample["png"] for sample in read(built[CLASSES] / "test").values()}
    assert len(mine) == 420
    for split in ("train", "test", "distractors"):
        assert not mine & {sample["png"] for sample in read(built["scenes"] / split).values()}


# --- building -------------------------------------------------------------------------------------------------------


def test_an_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> list[object]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(scenes, "_truth", stop)
        build_scenes(tmp_path, sizes=SMALL)
    assert not (tmp_path / "scenes").exists()
    assert (build_scenes(tmp_path, sizes=SMALL) / "scenes.json").is_file()


def test_two_builds_at_once_end_in_one_and_a_folder_that_is_no_build_stays(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: build_scenes(tmp_path, sizes=SMALL), range(2)))
    assert folders[0] == folders[1] and len(read(folders[0] / "test")) == SMALL.test
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["scenes"]
    (folders[0] / "scenes.json").unlink()
    with pytest.raises(UserError, match="no build of the scenes"):
        build_scenes(tmp_path, sizes=SMALL)
    assert (folders[0] / "test" / "0.tar").is_file()


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'scene'.*scenes, scenes-uninformative"):
        build_scenes(tmp_path, "scene")
    for bad in ({"seed": -1}, {"pictures": 0}):
        with pytest.raises(UserError, match="valid: 0 or more"):
            build_scene_classes(tmp_path, **bad)
    with pytest.raises(UserError, match="-1"):
        build_scenes(tmp_path, seed=-1)
    for sizes in ({"train": 0}, {"test": 5}, {"distractors": 10_000}):
        with pytest.raises(UserError, match="valid"):
            SceneSizes(**sizes)
    assert not (tmp_path / "scenes").exists()


def test_the_model_config_fits_the_pictures(root: Path) -> None:
    """Pictures pass open_clip's transform unscaled, and no caption is cut off at the end of the context."""
    config = json.loads((root / "configs/models/scenes-tiny.json").read_text())
    assert config["vision_cfg"]["image_size"] == scene_pictures.IMAGE_SIZE
    open_clip = pytest.importorskip("open_clip")
    tokenize = open_clip.SimpleTokenizer(context_length=config["text_cfg"]["context_length"] + 1)
    assert config["text_cfg"]["vocab_size"] == tokenize.vocab_size
    longest = [text for scene in drawn(0, 200)[1] for text in full_texts(full_description(scene))]
    assert not tokenize(longest)[:, -1].any()
