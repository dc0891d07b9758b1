"""The report's pictures: sizes, palettes, both kinds of page, and arrays with nothing in them."""

from __future__ import annotations

import base64
import io
import warnings
from itertools import combinations

import numpy as np
import pytest
from PIL import Image

from mmclip.reporting.plots import COLOURS, Series, curves_figure, lengths_figure, scatter_figure, write_picture
from mmclip.reporting.tradeoff import DARK, LIGHT, MARKERS, RUN_COLOURS

RNG = np.random.default_rng(0)


def test_a_picture_is_written_twice_and_is_the_page_s(tmp_path):
    def draw(theme):
        return lengths_figure(theme, RNG.normal(5, 1, 90), RNG.normal(4, 1, 200), "text")

    picture = write_picture(tmp_path, "name", "alt", "caption", draw)
    for uri, theme in ((picture.light, LIGHT), (picture.dark, DARK)):
        content = (tmp_path / f"name-{theme.name}.png").read_bytes()
        assert base64.b64decode(uri.partition(",")[2]) == content
        assert len(content) < 40_000
        with Image.open(io.BytesIO(content)) as image:
            assert (image.width // 2, image.height // 2) == (picture.width, picture.height)
            assert len(image.getcolors()) <= COLOURS
            corner = image.convert("RGB").getpixel((0, 0))
            assert "#{:02x}{:02x}{:02x}".format(*corner) == theme.paper
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("relevant", "irrelevant"), [([], []), ([1.0], []), ([2.0, 2.0], [2.0]), ([0.0], [0.0])])
def test_few_or_equal_lengths_are_drawn(relevant, irrelevant):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = lengths_figure(LIGHT, np.array(relevant), np.array(irrelevant), "image")
        figure.canvas.draw()


def test_a_histogram_has_area_one_for_each():
    figure = lengths_figure(LIGHT, RNG.normal(5, 1, 50), RNG.normal(0, 1, 5000), "text")
    areas = [float((p.get_data().values * np.diff(p.get_data().edges)).sum()) for p in figure.axes[0].patches]
    assert areas == pytest.approx([1.0] * 4)


def test_a_scatter_shows_every_kind():
    relevant = RNG.random((30, 10)) < 0.2
    figure = scatter_figure(DARK, RNG.random((30, 10)), RNG.random((30, 10)), relevant, "text")
    sizes = [len(c.get_offsets()) for c in figure.axes[0].collections]
    assert sizes == [(~relevant).sum(), relevant.sum()]


def test_curves_keep_their_runs_colour_and_name():
    series = [Series("$x_1$", 0, False, [1, 2], [3, 4]), Series("", RUN_COLOURS + 1, True, [1, 2], [3, 4])]
    figure = curves_figure(LIGHT, series, "loss", log=True)
    figure.canvas.draw()
    assert [line.get_color() for line in figure.axes[0].lines] == [LIGHT.runs[0], LIGHT.runs[1]]
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == [r"\$x_1\$"]


def test_long_curves_of_several_runs_have_marks_and_room():
    steps = list(range(100))
    series = [Series(f"run {i}", i, False, steps, steps) for i in range(12)]
    figure = curves_figure(LIGHT, series, "loss")
    assert [line.get_marker() for line in figure.axes[0].lines] == [MARKERS[i % len(MARKERS)] for i in range(12)]
    starts = [line.get_markevery() for line in figure.axes[0].lines]
    assert len(set(starts)) > 6
    assert all(0 <= start < apart for start, apart in starts)
    alone = curves_figure(LIGHT, series[:1], "loss")
    assert alone.axes[0].lines[0].get_marker() == "None"
    for one in (figure, alone):
        one.canvas.draw()
    tall, low = (one.axes[0].get_window_extent().height for one in (figure, alone))
    assert tall > 0.8 * low


def oklab(colour: str, simulated: np.ndarray) -> np.ndarray:
    """Ottosson's perceptual coordinates of #rrggbb as an eye with these cones sees it: 0 to 1 and two of about ±.3."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    cones = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
    lab = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    return lab @ np.cbrt(cones @ np.clip(simulated @ linear, 0, 1))


# Machado, Oliveira and Fernandes 2009, severity 1
EYES = {
    "all cones": (0.11, np.eye(3)),
    "no green": (0.04, np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])),
    "no red": (0.04, np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]])),
}


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_twelve_colours_stay_apart(theme, eye):
    assert len(theme.runs) == RUN_COLOURS == 12
    least, simulated = EYES[eye]
    points = [oklab(colour, simulated) for colour in (*theme.runs, theme.paper)]
    assert min(np.linalg.norm(a - b) for a, b in combinations(points, 2)) > least
