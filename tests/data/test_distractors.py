"""Built-in distractors: equal for any order and process, of the right shape, and no caption of the data."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmclip.data.distractors import KINDS, Corrupted, captions, corrupt, parse_distractors
from mmclip.data.image_text import ImageTextData
from mmclip.embeddings.encode import EncodeOptions, encode_images
from mmclip.errors import UserError

PICTURES = [kind for kind, side in KINDS.items() if side == "image"]
words = st.lists(st.sampled_from(["a", "the", "dog", "cat", "runs", "red", "Straße", "."]), min_size=1, max_size=7)


def picture(width: int = 50, height: int = 37, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def as_tensor(image: Image.Image) -> torch.Tensor:
    """A transform, at the top of a module so that reading processes can be given it."""
    return torch.from_numpy(np.array(image.resize((16, 16)))).permute(2, 0, 1).float()


def numbers(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1)


@pytest.fixture
def data(tmp_path: Path) -> ImageTextData:
    places = []
    for i in range(9):
        path = tmp_path / f"{i}.png"
        picture(20 + i, 30, seed=i).save(path)
        places.append((str(path), -1, 0))
    return ImageTextData("p", "test", [str(i) for i in range(9)], [["c"]] * 9, places)


@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.parametrize("size", [(1, 1), (1, 2), (3, 200), (64, 64), (501, 333)])
def test_a_distractor_has_the_pictures_size_and_leaves_it_alone(kind, size):
    image = picture(*size)
    before = image.tobytes()
    made = corrupt(kind, image, 0)
    assert (made.size, made.mode) == (size, "RGB")
    assert image.tobytes() == before
    assert corrupt(kind, image, 0).tobytes() == made.tobytes()
    # one pixel has no other order and no neighbour to blur with
    assert (made.tobytes() != before) == (size != (1, 1) or kind in ("blank", "noise"))


@pytest.mark.parametrize("kind", ["blank", "noise", "shuffled"])
def test_seed_and_pixels_decide_and_nothing_else(kind):
    one, other = picture(seed=0), picture(seed=1)
    first = [corrupt(kind, x, 3).tobytes() for x in (one, other)]
    assert first[0] != corrupt(kind, one, 1).tobytes() and first[0] != first[1]
    np.random.seed(5)
    torch.manual_seed(5)
    assert [corrupt(kind, x, 3).tobytes() for x in (other, one)] == first[::-1]


@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "I;16", "CMYK"])
def test_every_mode_is_read_as_rgb(kind, mode):
    image = Image.new("I;16", (9, 11), 700) if mode == "I;16" else picture(9, 11).convert(mode)
    made = corrupt(kind, image, 0)
    assert (made.size, made.mode) == ((9, 11), "RGB")
    assert made.tobytes() == corrupt(kind, image.convert("RGB"), 0).tobytes()


def test_each_kind_of_picture_is_what_it_is_called():
    colours = [corrupt("blank", picture(seed=i), 0).getcolors() for i in range(20)]
    assert all(len(c) == 1 for c in colours) and len({c[0][1] for c in colours}) == 20
    resized = corrupt("noise", picture(2048, 1536), 0).resize((224, 224), Image.Resampling.BICUBIC)
    assert np.asarray(resized).std() > 50  # of 74; noise of single pixels would keep 11
    assert len(np.unique(np.asarray(corrupt("noise", picture(64, 64), 0)).reshape(-1, 3), axis=0)) > 4000
    pixels = np.zeros((96, 96, 3), dtype=np.uint8)
    pixels[6::12], pixels[:, 6::12] = 255, 255
    blurred = np.asarray(corrupt("blurred", Image.fromarray(pixels), 0)).astype(float)
    assert blurred.mean() == pytest.approx(pixels.mean(), abs=3) and blurred.std() < 0.1 * pixels.std()


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 3))
def test_shuffled_is_the_same_pixels_with_every_patch_moved(width, height, seed):
    pixels = np.zeros((height, width, 3), dtype=np.uint8)  # each pixel is told apart by its place
    pixels[..., 0], pixels[..., 1] = np.arange(height)[:, None], np.arange(width)
    made = np.asarray(corrupt("shuffled", Image.fromarray(pixels), seed))
    assert Counter(map(tuple, made.reshape(-1, 3))) == Counter(map(tuple, pixels.reshape(-1, 3)))
    rows, columns = min(8, height), min(8, width)
    high, wide = height // rows, width // columns
    same = (made == pixels).all(-1)
    inner = same[: rows * high, : columns * wide]
    assert same.sum() - inner.sum() == height * width - inner.size  # what is left over at the edges stays
    assert not inner.any() if rows * columns > 1 else inner.all()


@pytest.mark.parametrize("kind", PICTURES)
def test_reading_processes_and_order_change_nothing(kind, data):
    transform = Corrupted(kind, as_tensor, seed=4)
    assert pickle.loads(pickle.dumps(transform)) == transform
    made = []
    for part, workers in ((data, 0), (data, 2), (data.subset(range(9)[::-1]), 0)):
        options = EncodeOptions(torch.device("cpu"), batch_size=2, workers=workers, progress=False)
        made.append(encode_images(numbers, part, transform, options)[0])
    assert torch.equal(made[0], made[1]) and torch.equal(made[2].flip(0), made[0])
    assert torch.equal(made[0][3], as_tensor(corrupt(kind, data.read_image(3), 4)).flatten())


@given(st.lists(words.map(" ".join), min_size=1, max_size=8), st.integers(0, 5))
def test_shuffled_words_are_a_captions_words_in_an_order_that_is_no_caption(texts, seed):
    plain = {t.casefold() for t in texts}
    usable = {t for t in texts if len(set(t.casefold().split())) > 1}
    try:
        made = captions("shuffled-words", texts, 1, seed)
    except UserError as error:
        # no word to exchange, or every order of the few words is a caption itself
        assert all(len(t.split()) <= 3 for t in usable), error
        return
    assert sorted(made[0].split()) in [sorted(t.split()) for t in texts]
    assert made[0].casefold() not in plain
    assert made == captions("shuffled-words", texts[::-1], 1, seed)


def test_each_caption_comes_once_before_any_comes_again():
    texts = [f"word{i} and other things" for i in range(30)] + ["single", "same same"]
    made = captions("shuffled-words", texts, 30, 0)
    assert sorted(sorted(t.split()) for t in made) == sorted(sorted(t.split()) for t in texts[:30])
    more = captions("shuffled-words", texts, 90, 0)
    assert more[:30] == made
    assert len(set(more)) == 90
    assert set(Counter(" ".join(sorted(t.split())) for t in more).values()) == {3}
    assert made != captions("shuffled-words", texts, 30, 1)


def test_orders_that_run_out_are_as_many_as_there_are():
    assert captions("shuffled-words", ["red square", "single", "same same"], 5, 0) == ["square red"]
    with pytest.raises(UserError, match="words of 2 captions have no order"):  # each is the other in another order
        captions("shuffled-words", ["red square", "Square  red"], 1, 0)


def test_boilerplate_is_varied_and_nobodys_caption():
    made = captions("boilerplate", ["a dog"], 5000, 0)
    assert len({t.casefold() for t in made}) == 5000
    assert not any("#" in t for t in made)
    assert captions("boilerplate", ["a cat"], 200, 0) == made[:200]
    assert captions("boilerplate", [], 200, 1) != made[:200]
    own = [made[0].upper(), f"  {made[3]} "]
    assert captions("boilerplate", own, 50, 0) == [t for t in made if t not in (made[0], made[3])][:50]
    assert len({t.casefold() for t in captions("boilerplate", [], 15_000, 0)}) == 15_000


@pytest.mark.real
def test_boilerplate_says_nothing_of_real_pictures(shared):
    from mmclip.data.shards import open_data

    data = open_data(str(shared / "data" / "flickr8k"), None, "eval")
    texts = [c for own in data.captions for c in own]
    made = captions("boilerplate", texts, 5000, 0)
    assert not {t.casefold() for t in made} & {t.casefold() for t in texts}
    # no word of it is among the things that these captions are about
    common = Counter(w for t in texts for w in set(t.casefold().split()) if len(w) > 2)
    seen = {w.strip("()|:,") for t in made for w in t.casefold().split()} & {w for w, n in common.items() if n > 25}
    assert seen <= {"the", "with", "off", "picture", "high"}
    assert len(captions("shuffled-words", texts, len(texts), 0)) == len(texts)


def test_kinds_are_told_from_data(tmp_path):
    (tmp_path / "folder").mkdir()
    path = str(tmp_path / "folder")
    names = ["noise", path, "builtin:scenes", "x/{0..3}.tar", "blank", "pairs.csv", "*.tar", "./blank", "noise", path]
    assert parse_distractors(names) == (
        ["noise", "blank"],
        [path, "builtin:scenes", "x/{0..3}.tar", "pairs.csv", "*.tar", "./blank"],
    )
    assert parse_distractors([]) == ([], [])


@pytest.mark.parametrize("name", ["blurry", "Blank", "", " ", "x" * 5000, "a\0b", "two\nlines"])
def test_an_unknown_name_lists_the_kinds_in_one_line(name):
    with pytest.raises(UserError, match="valid: blank, noise, blurred, shuffled, boilerplate, shuffled-words") as error:
        parse_distractors(["blank", name])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: corrupt("boilerplate", picture(), 0), "distractor pictures; valid: blank, noise, blurred, shuffled"),
        (lambda: Corrupted("sepia", as_tensor, 0), "sepia"),
        (lambda: captions("blank", ["a b"], 1, 0), "distractor captions; valid: boilerplate, shuffled-words"),
    ],
)
def test_kinds_of_the_other_side_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
