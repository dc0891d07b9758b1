"""Cached trunk outputs equal live ones, survive an interruption, and are never used for anything else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmclip.data.image_text import ImageTextData
from mmclip.data.shards import open_data
from mmclip.embeddings import trunk_cache
from mmclip.embeddings.encode import EncodeOptions
from mmclip.embeddings.features import FeatureSource
from mmclip.errors import UserError
from mmclip.models.factory import ClipModel, build_model
from tests.helpers.shards import good, jpeg, write_tar
from tests.helpers.tiny import ROOT

OPTIONS = EncodeOptions(torch.device("cpu"), batch_size=4, progress=False)


@pytest.fixture
def model(tiny_model: Path) -> ClipModel:
    torch.manual_seed(0)
    model = build_model(str(tiny_model))
    model.towers.lock("image")
    model.towers.lock("text")
    return model


@pytest.fixture
def data(tmp_path: Path) -> ImageTextData:
    return open_data(str(write_tar(tmp_path / "0.tar", good(10))))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trunk_cache, "PART_ROWS", {"image": 4, "text": 8})


def fill(side: str, model: ClipModel, data: ImageTextData, folder: Path) -> torch.Tensor:
    features, bad = trunk_cache.cached_trunk(side, model, data, folder, OPTIONS, "test")
    assert not bad
    return features


def test_an_interrupted_fill_goes_on_where_it_stopped(
    model: ClipModel, data: ImageTextData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fill("image", model, data, tmp_path / "whole")
    ran: list[range] = []
    original = trunk_cache.encode_images

    def counted(encode, data, transform, options, rows=None, label=""):  # type: ignore[no-untyped-def]
        ran.append(rows)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return original(encode, data, transform, options, rows, label)

    monkeypatch.setattr(trunk_cache, "encode_images", counted)
    with pytest.raises(KeyboardInterrupt):
        fill("image", model, data, tmp_path / "cut")
    assert torch.equal(fill("image", model, data, tmp_path / "cut"), whole)
    assert ran == [range(0, 4), range(4, 8), range(4, 8), range(8, 10)], "the first part was not computed again"
    assert not list((tmp_path / "cut").rglob("*.partial"))


def test_another_trunk_transform_tokenizer_or_data_has_another_key(
    model: ClipModel, data: ImageTextData, tiny_model: Path
) -> None:
    keys = {side: trunk_cache.cache_key(side, model, data) for side in ("image", "text")}
    with torch.no_grad():
        model.towers.clip.visual.proj.add_(1)
    assert trunk_cache.cache_key("image", model, data) == keys["image"], "the head is not part of it"
    model.preprocess_cfg = {**model.preprocess_cfg, "interpolation": "bilinear"}
    assert trunk_cache.cache_key("image", model, data) != keys["image"]
    assert trunk_cache.cache_key("text", model, data) == keys["text"]
    shorter = build_model(str(tiny_model), force_context_length=5)
    model.tokenize = shorter.tokenize
    assert trunk_cache.cache_key("text", model, data) != keys["text"]
    assert trunk_cache.cache_key("image", model, data.subset([1, 2])) != trunk_cache.cache_key("image", model, data)


def test_a_part_of_the_wrong_size_is_computed_again_and_a_file_in_the_folders_place_is_one_line(
    model: ClipModel, data: ImageTextData, tmp_path: Path
) -> None:
    whole = fill("text", model, data, tmp_path)
    (part,) = tmp_path.rglob("part-00001.safetensors")
    part.write_bytes(next(iter(tmp_path.rglob("part-00002.safetensors"))).read_bytes())
    assert torch.equal(fill("text", model, data, tmp_path), whole)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"^--cache-dir .*: cannot be written: [^\n]*$"):
        fill("image", model, data, tmp_path / "file")


def test_parts_of_a_data_set_take_their_rows_from_the_cache_of_the_whole(
    model: ClipModel, data: ImageTextData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FeatureSource.open(data, model, OPTIONS, tmp_path / "cache", "whole")
    train, held = data.holdout(3)
    parts = [train, held, data.subset([7, 1, 4]), train.permute(0), train.subset(range(4)).permute(1)]
    live = [FeatureSource(part) for part in parts]
    expected = [{s: source.vectors(s, model, OPTIONS, "live")[0] for s in ("image", "text")} for source in live]
    for name in ("encode_images", "encode_texts"):
        monkeypatch.setattr(trunk_cache, name, lambda *_, **__: pytest.fail("a trunk was run again"))
    for part, vectors in zip(parts, expected, strict=True):
        source = FeatureSource.open(part, model, OPTIONS, tmp_path / "cache", "part")
        for side, wanted in vectors.items():
            found, _ = source.vectors(side, model, OPTIONS, "cached")
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_only_the_parts_that_hold_rows_are_computed(model: ClipModel, data: ImageTextData, tmp_path: Path) -> None:
    FeatureSource.open(data.subset([0, 9]), model, OPTIONS, tmp_path, "ends")
    parts = [p.stem for p in sorted(tmp_path.glob("image-*/*.safetensors"))]
    FeatureSource.open(data, model, OPTIONS, tmp_path, "whole")
    whole = [p.stem for p in sorted(tmp_path.glob("image-*/*.safetensors"))]
    assert parts == ["part-00000", "part-00002"] and whole == ["part-00000", "part-00001", "part-00002"]


def test_a_picture_that_no_trunk_can_read_leaves_every_part_and_its_captions_stay(
    model: ClipModel, tmp_path: Path
) -> None:
    members = [*good(3), ("bad.jpg", jpeg()[:80]), ("bad.txt", b"x\ny\nz")]
    data = open_data(str(write_tar(tmp_path / "1.tar", members)))
    for part in (data, data.permute(0)):  # computed, then from disk
        source = FeatureSource.open(part, model, OPTIONS, tmp_path / "cache", "test")
        assert list(source.skipped) == ["bad"] and source.data.keys == ["k0", "k1", "k2"]
        assert torch.isfinite(source.cached["image"]).all() and len(source.cached["image"]) == 3
        assert len(source.cached["text"]) == sum(len(c) for c in source.data.captions)
    assert ["x", "y", "z"] in source.data.captions, "another picture has them"
    expected, _ = FeatureSource(source.data).vectors("text", model, OPTIONS, "live")
    torch.testing.assert_close(source.vectors("text", model, OPTIONS, "cached")[0], expected, rtol=1e-4, atol=1e-5)
    untouched = FeatureSource.open(data.subset([1, 2]), model, OPTIONS, tmp_path / "cache", "test")
    assert not untouched.skipped and untouched.data.keys == ["k1", "k2"]


def test_two_processes_share_the_work(tiny_data: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Both start with an empty cache: every trunk is run once, by one of them, and both have its outputs."""
    code = (
        "import sys, torch; from pathlib import Path\n"
        "from mmclip.models.factory import build_model; from mmclip.data.shards import open_data\n"
        "from mmclip.embeddings.features import FeatureSource\n"
        "from mmclip.embeddings.encode import EncodeOptions\n"
        "torch.manual_seed(0); model = build_model(sys.argv[2])\n"
        "for side in ('image', 'text'): model.towers.lock(side)\n"
        "options = EncodeOptions(torch.device('cpu'))\n"
        "source = FeatureSource.open(open_data(sys.argv[1]), model, options, Path(sys.argv[3]), 'test')\n"
        "print({side: float(x.sum()) for side, x in source.cached.items()})"
    )
    command = [sys.executable, "-c", code, str(tiny_data), str(tiny_model), str(tmp_path / "cache")]
    both = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    told = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert told[0][0] == told[1][0] != ""
    work = [line for _, errors in told for line in errors.splitlines() if line.endswith("done")]
    assert sorted(line.split(" (")[0] for line in work) == ["test: image trunk", "test: text trunk"]
